"""The cost of waiting: 50 consumers of one process, and one worker with a schedule.

For the consumers, the server counts commands by name, so the driver's monitoring (hello) and the
benchmark's own serverStatus do not count. For the worker, the driver tells of each command, which
shows the reads of schedules. Its bus is in the process: the rows of the consumers show the cost of
the other buses.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pymongo
from pymongo import monitoring

from pyqueue import AsyncClient, QueueClosed, Worker
from pyqueue.backends.recovering import SCHEDULES
from tests.bench.figures import Target, at_most
from tests.bench.harness import Bench
from tests.bench.wakeups import redis, refused
from tests.bench.workers import Start, Workers, as_coroutine

WAITERS = 50
#: Seconds before the count begins, quick and full: a queue that was just used is scanned more
#: often.
SETTLE = (2, 20)
MONITORING = {"hello", "isMaster", "serverStatus", "ping", "endSessions"}
#: How long a worker with a schedule is observed, in seconds: two or three reads of its schedules.
OBSERVED_S = 180
#: The name under which reads of schedules are counted.
READ = "read of schedules"


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
        if not bench.quick:
            observe(bench, workers)


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
    async with AsyncClient(database, signals=case.url, telemetry=False) as client:
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


# ---- a worker with a schedule


class Counting(monitoring.CommandListener):
    """Counts the commands of a client by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Count a command."""
        asked = event.command.get("filter", {}).get("q")
        if isinstance(asked, dict) and SCHEDULES in asked.get("$in", ()):
            self.counts[READ] += 1
        elif event.command_name not in MONITORING:
            self.counts[event.command_name] += 1

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Do nothing."""


def observe(bench: Bench, workers: Workers) -> None:
    """Add the rows of an idle worker with a schedule, without telemetry and with it."""
    with bench.database() as database:
        found = workers.call(idle_workers, database, SETTLE[1], OBSERVED_S)[0]
    for telemetry, counted in found.items():
        label = f"idle worker with a schedule, {telemetry}"
        total, minutes = counted.total(), OBSERVED_S / 60
        names = ", ".join(f"{name} {n / minutes:.1f}" for name, n in counted.most_common(4))
        bench.row(f"{label}: commands", "1/min", [total / minutes], total, None, names)
        reads = counted[READ]
        bench.row(f"{label}: reads of schedules", "1/min", [reads / minutes], reads, at_most(1))


async def idle_workers(
    _: Start, database: str, settle: float, seconds: float
) -> dict[str, Counter[str]]:
    """Let two workers idle in one process. Return the commands of each."""
    sides = {"telemetry off": Counting(), "telemetry on": Counting()}
    async with AsyncExitStack() as stack:
        for number, (name, counting) in enumerate(sides.items()):
            mongo = pymongo.AsyncMongoClient[Any](database, event_listeners=[counting])
            await stack.enter_async_context(mongo)
            client = AsyncClient(
                mongo.get_default_database(),
                namespace=f"idle{number}",
                signals="memory:",
                telemetry=name == "telemetry on",
            )
            await stack.enter_async_context(client)
            await client.schedule("daily", queue="idle", every=86_400)
            worker = Worker(client).on("idle", print)
            run = asyncio.create_task(as_coroutine(worker.run(handle_signals=False)))
            stack.push_async_callback(end, worker, run)
        await asyncio.sleep(settle)
        before = {name: counting.counts.copy() for name, counting in sides.items()}
        await asyncio.sleep(seconds)
        return {name: counting.counts - before[name] for name, counting in sides.items()}


async def end(worker: Worker[Any], run: asyncio.Task[Any]) -> None:
    """Stop a worker, and wait for its end."""
    worker.stop()
    await run
