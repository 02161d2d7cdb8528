"""The cost of 50 waiting consumers of one process: server commands per second and processor time.

The server counts commands by name, so the driver's monitoring (hello) and the benchmark's own
serverStatus do not count.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pymongo

from pyqueue import AsyncClient, QueueClosed
from tests.bench.figures import Target, at_most
from tests.bench.harness import Bench
from tests.bench.wakeups import redis, refused
from tests.bench.workers import Start, Workers

WAITERS = 50
#: Seconds before the count begins, quick and full: a queue that was just used is scanned more
#: often.
SETTLE = (2, 20)
MONITORING = {"hello", "isMaster", "serverStatus", "ping", "endSessions"}


@dataclass(frozen=True, slots=True)
class Case:
    """A bus, a poll interval, and the number of queues that the consumers share."""

    name: str
    url: str
    poll: float = 15.0
    queues: int = 1
    targets: tuple[Target | None, Target | None] = (at_most(2), at_most(1))


def run(bench: Bench) -> None:
    with redis() as url, Workers(1) as workers, pymongo.MongoClient[Any](bench.server.url) as mongo:
        for case in (
            Case("one queue, memory:", "memory:"),
            Case("one queue, capped:", "capped:"),
            Case("one queue, redis:", url),
            Case("one queue, a 50 ms poll", "none:", poll=0.05, targets=(None, None)),
            Case(f"{WAITERS} queues, capped:", "capped:", queues=WAITERS, targets=(None, None)),
        ):
            if bench.quick and case.targets[0] is None:
                continue  # left out of a quick run
            reason = refused(bench, case.url)
            if reason is None:
                measure(bench, mongo, workers, case)
            else:
                bench.row(f"{WAITERS} idle, {case.name}", "not run", [0], 0, None, reason)


def measure(bench: Bench, mongo: Any, workers: Workers, case: Case) -> None:
    settle, seconds = bench.either(*SETTLE), bench.either(3, 20)
    with bench.database() as database:
        workers.start(wait, database, case, settle, seconds)
        time.sleep(settle)  # the child begins to measure at about the same time
        before = commands(mongo)
        time.sleep(seconds)
        counted = commands(mongo) - before
        share = workers.results()[0]
    rates = ", ".join(f"{name} {count / seconds:.1f}" for name, count in counted.most_common(3))
    label = f"{WAITERS} idle, {case.name}"
    bench.row(
        f"{label}: server commands",
        "1/s",
        [counted.total() / seconds],
        counted.total(),
        case.targets[0],
        rates,
    )
    bench.row(f"{label}: processor", "%", [100 * share], WAITERS, case.targets[1])


def commands(mongo: Any) -> Counter[str]:
    """Return how often each command has run since the start of the server, without monitoring."""
    metrics = mongo.admin.command("serverStatus")["metrics"]["commands"]
    return Counter(
        {
            name: each["total"]
            for name, each in metrics.items()
            if isinstance(each, dict) and "total" in each and name not in MONITORING
        }
    )


async def wait(_: Start, database: str, case: Case, settle: float, seconds: float) -> float:
    """Wait for messages in a worker process and return its share of a processor."""
    async with AsyncClient(database, signals=case.url) as client:
        queues = [
            client.queue(f"idle{number % case.queues}", poll=case.poll) for number in range(WAITERS)
        ]
        waiters = [asyncio.create_task(idle(queue)) for queue in queues]
        await asyncio.sleep(settle)
        start, spent = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        share = (time.process_time() - spent) / (time.perf_counter() - start)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
    return share


async def idle(queue: Any) -> None:
    with suppress(QueueClosed):
        assert await queue.reserve() is None
