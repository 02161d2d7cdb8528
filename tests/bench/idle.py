"""What 50 waiters of one process cost while nothing happens: server commands a second, and the processor time of the process.

The server counts by command name, so the driver's own monitoring (hello) and our looking (serverStatus) are left out exactly.
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
from tests.bench.harness import Bench, Start, Target, Workers, at_most
from tests.bench.wakeups import redis, refused

WAITERS = 50
#: How long they wait before the count begins: looks at a queue that has just been used come sooner than later on.
SETTLE = (2, 20)
MONITORING = {"hello", "isMaster", "serverStatus", "ping", "endSessions"}


@dataclass(frozen=True, slots=True)
class Case:
    """How the waiters are woken, and whether they wait for one queue or each for its own."""

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
                continue  # beside the point of a quick run
            trouble = refused(bench, case.url)
            if trouble is None:
                measure(bench, mongo, workers, case)
            else:
                bench.row(f"{WAITERS} idle, {case.name}", "not run", [0], 0, None, trouble)


def measure(bench: Bench, mongo: Any, workers: Workers, case: Case) -> None:
    settle, seconds = bench.either(*SETTLE), bench.either(3, 20)
    with bench.database() as database:
        workers.start(wait, database, case, settle, seconds)
        time.sleep(settle)  # the child's own figures begin at about the same time
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
    """How often each command has been run since the server's start, without monitoring."""
    metrics = mongo.admin.command("serverStatus")["metrics"]["commands"]
    return Counter(
        {
            name: each["total"]
            for name, each in metrics.items()
            if isinstance(each, dict) and "total" in each and name not in MONITORING
        }
    )


async def wait(_: Start, database: str, case: Case, settle: float, seconds: float) -> float:
    """In a worker: wait in vain; answers the processor's share."""
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
