"""What priorities cost: a queue with three levels in use next to a standard queue.

The rounds alternate between the two. The last rows are the cost of a claim after many deletions in
one level, next to a queue without any.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from pyqueue import Client, Queue
from tests.bench.figures import at_least, at_most, ratios
from tests.bench.harness import Bench, interleave, latencies, payload

LEVELS = (9, 4, 1)
#: The number of messages in one push of many.
MANY = 500


def run(bench: Bench) -> None:
    for durability in ("majority", "acknowledged"):
        with bench.blocking(durability) as (client, _):
            beside_standard(bench, client, durability)
    with bench.blocking("acknowledged") as (client, _):
        after_deletions(bench, client)


def beside_standard(bench: Bench, client: Client, durability: str) -> None:
    """Measure pushes and claims of the two kinds in turn."""
    rounds, calls, count = bench.either(5, 10), bench.either(100, 300), bench.either(1000, 3000)
    queues = (client.queue("plain"), client.queue("levels", kind="priority"))

    def each(make: Callable[[Queue[Any]], Callable[[], float]]) -> list[list[float]]:
        return interleave(rounds, *(make(queue) for queue in queues))

    for name, make, least in (
        ("push", lambda queue: pushes(queue, calls), 0.6),
        ("reserve + commit", lambda queue: singles(queue, calls), None),
        ("push_many", lambda queue: pushes_of_many(queue, count), 0.6),
        ("reserve + commit of 100", lambda queue: batches(queue, count), 0.9),
    ):
        plain, levels = each(make)
        target = None if least is None else at_least(least)
        note = " us, ".join(f"{statistics.median(side) * 1e6:.0f}" for side in (plain, levels))
        values = ratios(plain, levels)
        label = f"{name}, {durability}"
        bench.row(label, "x standard speed", values, rounds * calls, target, f"{note} us")


def level(queue: Queue[Any], number: int) -> int | None:
    """Return the priority of a message; None in a standard queue."""
    return LEVELS[number % len(LEVELS)] if queue.name == "levels" else None


def pushes(queue: Queue[Any], calls: int) -> Callable[[], float]:
    """Return a side that pushes one by one."""
    numbers = iter(range(1 << 60))

    def push() -> None:
        number = next(numbers)
        queue.push(payload(number), priority=level(queue, number))

    return lambda: statistics.median(latencies(calls, push))


def singles(queue: Queue[Any], calls: int) -> Callable[[], float]:
    """Return a side that reserves and commits messages that were pushed one by one."""

    def take() -> None:
        held = queue.reserve(0)
        assert held is not None
        queue.commit(held)

    return lambda: statistics.median(latencies(calls, take))


def pushes_of_many(queue: Queue[Any], count: int) -> Callable[[], float]:
    """Return a side that pushes many at once: seconds for each message."""
    payloads = [payload(number) for number in range(MANY)]
    priorities = [level(queue, number) for number in range(MANY)]

    def push() -> float:
        began = time.perf_counter()
        for _ in range(count // MANY):
            queue.push_many(payloads, priorities=priorities)
        return (time.perf_counter() - began) / count

    return push


def batches(queue: Queue[Any], count: int) -> Callable[[], float]:
    """Return a side that reserves and commits a hundred at a time: seconds for each message."""

    def take() -> float:
        began = time.perf_counter()
        take_off(queue, count)
        return (time.perf_counter() - began) / count

    return take


def take_off(queue: Queue[Any], count: int) -> None:
    """Reserve and commit ``count`` messages."""
    while count > 0:
        held = queue.reserve_many(min(100, count), timeout=0)
        assert held, "it ran dry"
        queue.commit(*held)
        count -= len(held)


def after_deletions(bench: Bench, client: Client) -> None:
    """Claim from a level in which much was deleted, and from one below it."""
    rounds, calls = bench.either(5, 10), bench.either(50, 200)
    deleted = bench.either(10_000, 100_000)
    fresh, used = (client.queue(name, kind="priority") for name in ("fresh", "levels"))
    for queue in (fresh, used):
        queue.push_many(range(3), priorities=LEVELS)
        queue.pop_many(3, timeout=0)
    for _ in range(deleted // 2000):
        used.push_many([payload(0)] * 2000, priorities=[9] * 2000)
    take_off(used, deleted)
    for name, priority in (("in it", 9), ("below it", 1)):

        def claims(queue: Queue[Any], priority: int = priority) -> float:
            queue.push_many([payload(0)] * calls, priorities=[priority] * calls)

            def take() -> None:
                assert queue.reserve(0) is not None

            return statistics.median(latencies(calls, take))

        sides = interleave(rounds, lambda: claims(fresh), lambda: claims(used))
        micros = [f"{statistics.median(side) * 1e6:.0f} us" for side in sides]
        label = f"claim {name} after {deleted} deletions in a level"
        note = f"{micros[0]} fresh, {micros[1]} used"
        bench.row(label, "x fresh", ratios(sides[1], sides[0]), rounds * calls, at_most(1.5), note)
