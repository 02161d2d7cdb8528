"""The cost of telemetry: the same work by clients with it and without it, in alternating rounds.

Two of the three clients have no telemetry. Their ratio to each other is the noise, and telemetry
may cost no more. Each turn of the client with telemetry ends with a flush, and takes less than the
5 s between two flushes of a program. So a program pays less for flushes than these clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from pyqueue import AsyncClient, Client
from pyqueue.runtime.connecting import Durability
from pyqueue.telemetry import flushing
from tests.bench.figures import at_least, at_most, ratios
from tests.bench.harness import Bench, interleave, micros, payload
from tests.bench.pipeline import STAGES, through

#: The clients, and whether each has telemetry.
SIDES = {"off": False, "on": True, "again": False}
#: The durability that waits least, so that the processor time of telemetry shows most.
DURABILITY: Durability = "acknowledged"
#: How many messages a call of a bucket takes.
BATCH = 500


def run(bench: Bench) -> None:
    # Turns flush. Otherwise a flush of one client might fall into the turn of another client.
    with patch.object(flushing, "INTERVAL_S", 3600.0):
        with blocking(bench) as clients:
            pushes(bench, clients)
            buckets(bench, clients)
        pipelines(bench)


@contextmanager
def blocking(bench: Bench) -> Iterator[Mapping[str, Client]]:
    """The client of each side, all in one database."""
    with bench.database() as url, ExitStack() as stack:
        yield {
            side: stack.enter_context(Client(url, durability=DURABILITY, telemetry=telemetry))
            for side, telemetry in SIDES.items()
        }


def pushes(bench: Bench, clients: Mapping[str, Client]) -> None:
    """Push one message at a time."""
    calls = bench.either(500, 3000)
    queues = {side: client.queue(f"push-{side}") for side, client in clients.items()}

    def work(side: str) -> int:
        push = queues[side].push
        for number in range(calls):
            push(payload(number))
        return calls

    number = compare(bench, "push", work, partial(flush, clients))
    check(bench, "push", clients["off"].queue("push-on").stats().counts["pushed"], number)


def buckets(bench: Bench, clients: Mapping[str, Client]) -> None:
    """Push, reserve and commit the messages of a bucket in batches of 500."""
    batches = bench.either(20, 150)
    queues = {
        side: client.queue(f"bucket-{side}", kind="bucket", pack=BATCH)
        for side, client in clients.items()
    }
    values = [payload(number) for number in range(BATCH)]

    def work(side: str) -> int:
        queue = queues[side]
        for _ in range(batches):
            queue.push_many(values)
            held = queue.reserve_many(BATCH, timeout=0)
            assert len(held) == BATCH
            queue.commit(*held)
        return batches * BATCH

    name = f"bucket, batches of {BATCH}"
    number = compare(bench, name, work, partial(flush, clients))
    check(bench, name, clients["off"].queue("bucket-on").stats().counts["finished"], number)


def pipelines(bench: Bench) -> None:
    """Move messages through the stages of a pipeline."""
    count, moves = bench.either(500, 2000), len(STAGES) - 1
    faults: list[int] = []
    with bench.database() as url, asyncio.Runner() as runner, ExitStack() as stack:
        clients = {
            side: AsyncClient(url, durability=DURABILITY, telemetry=telemetry)
            for side, telemetry in SIDES.items()
        }

        async def close() -> None:
            for client in clients.values():
                await client.close()

        stack.callback(lambda: runner.run(close()))

        def work(side: str) -> int:
            _, done = runner.run(through(clients[side], count))
            faults.append(abs(done - count))
            return count * moves

        def flush_task(side: str) -> None:
            telemetry = clients[side]._telemetry
            if telemetry is not None:
                runner.run(telemetry.flush())

        name = f"pipeline of {moves} links"
        compare(bench, name, work, flush_task)
        bench.zero(f"{name}: lost or twice", sum(faults), count * len(faults))


def flush(clients: Mapping[str, Client], side: str) -> None:
    """Store the figures of a client, if it has telemetry."""
    telemetry = clients[side]._telemetry
    if telemetry is not None:
        telemetry.flush()


def compare(
    bench: Bench, name: str, work: Callable[[str], int], flush: Callable[[str], object]
) -> int:
    """Add the rows for one kind of work.

    Args:
        bench: The run.
        name: The name of the work.
        work: Lets the client of a side work. Returns how many messages it handled.
        flush: Stores the figures of the client of a side.

    Returns:
        How many messages the client with telemetry handled, the warm-up included.
    """
    rounds = bench.either(4, 8)
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    handled = dict.fromkeys(SIDES, 0)

    def turn(side: str) -> float:
        before, start = bench.cpu().client, time.perf_counter()
        number = work(side)
        flush(side)
        seconds = time.perf_counter() - start
        spent[side].append((bench.cpu().client - before) / number)
        handled[side] += number
        return seconds / number

    off, on, again = interleave(rounds, *(partial(turn, side) for side in SIDES))
    cpu: dict[str, Any] = {side: values[1:] for side, values in spent.items()}  # no warm-up
    n, same = handled["on"], ratios(off, again)
    unit = "x without"
    note = micros(off, on)
    bench.row(f"{name}, with telemetry", unit, ratios(off, on), n, at_least(1), note, same=same)
    bench.row(f"{name}, without it twice", unit, same, n, None, micros(off, again))
    bench.row(
        f"{name}, with telemetry: processor time",
        unit,
        ratios(cpu["on"], cpu["off"]),
        n,
        at_most(1.02),
        micros(cpu["off"], cpu["on"]),
        same=ratios(cpu["again"], cpu["off"]),
    )
    return n


def check(bench: Bench, name: str, counted: int, number: int) -> None:
    """Add a row that shows that telemetry counted all messages. Otherwise it would cost nothing."""
    bench.zero(f"{name}: not counted", abs(number - counted), number)
