"""The cost of priorities: a queue with three levels in use next to a standard queue.

The rounds alternate between the two. The last rows are the cost of a claim after many deletions in
one level, next to a queue without any.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from pyqueue import Client, Queue
from tests.bench.figures import at_least, at_most, ratios
from tests.bench.harness import Bench, interleave, latencies, micros, payload, singles, take, timed

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

    def row(
        name: str, make: Callable[[Queue[Any]], Callable[[], float]], least: float | None
    ) -> None:
        sides = interleave(rounds, *(make(queue) for queue in queues))
        target = None if least is None else at_least(least)
        label, values = f"{name}, {durability}", ratios(*sides)
        bench.row(label, "x standard speed", values, rounds * calls, target, micros(*sides))

    row("push", lambda queue: pushes(queue, calls), 0.6)
    row("reserve + commit", lambda queue: partial(singles, queue, calls), None)
    row("push_many", lambda queue: pushes_of_many(queue, count), 0.6)
    row("reserve + commit of 100", lambda q: partial(timed, partial(take, q, count), count), 0.9)


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


def pushes_of_many(queue: Queue[Any], count: int) -> Callable[[], float]:
    """Return a side that pushes many at once: seconds for each message."""
    payloads = [payload(number) for number in range(MANY)]
    priorities = [level(queue, number) for number in range(MANY)]

    def push() -> None:
        for _ in range(count // MANY):
            queue.push_many(payloads, priorities=priorities)

    return partial(timed, push, count)


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
    take(used, deleted)
    for name, priority in (("in it", 9), ("below it", 1)):

        def claims(queue: Queue[Any], priority: int = priority) -> float:
            queue.push_many([payload(0)] * calls, priorities=[priority] * calls)

            def claim() -> None:
                assert queue.reserve(0) is not None

            return statistics.median(latencies(calls, claim))

        sides = interleave(rounds, lambda: claims(fresh), lambda: claims(used))
        label = f"claim {name} after {deleted} deletions in a level"
        note = f"{micros(sides[0])} fresh, {micros(sides[1])} used"
        bench.row(label, "x fresh", ratios(sides[1], sides[0]), rounds * calls, at_most(1.5), note)
