"""The cost of ordered groups: an ordered queue next to a standard one, with a thousand groups.

The rounds alternate between the two. The last rows show the cost of a large group for the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pyqueue import Client, Queue
from tests.bench.figures import at_least, at_most, ratios
from tests.bench.harness import BATCH, Bench, interleave, micros, payload, singles, take, timed
from tests.support.processes import spawn_pool

GROUPS = 1000


def run(bench: Bench) -> None:
    with bench.blocking("majority") as (client, _):
        beside_standard(bench, client)
    with bench.blocking("majority") as (client, _):
        beside_a_large_group(bench, client)
    four_processes(bench)


def groups_of(queue: Queue[Any], count: int, run: int = 1) -> list[str | None] | None:
    """Return the groups of ``count`` messages, ``run`` of one group in a row; None: standard."""
    if queue.name.startswith("plain"):
        return None
    return [f"g{number // run % GROUPS}" for number in range(count)]


def fill(queue: Queue[Any], count: int, run: int = 1) -> None:
    """Push ``count`` messages."""
    for start in range(0, count, BATCH * 10):
        many = min(BATCH * 10, count - start)
        groups = groups_of(queue, count, run)
        some = None if groups is None else groups[start : start + many]
        queue.push_many([payload(number) for number in range(many)], groups=some)


def beside_standard(bench: Bench, client: Client) -> None:
    """Measure pushes and claims of the two kinds in turn."""
    rounds, calls, count = bench.either(5, 9), bench.either(50, 200), bench.either(2000, 5000)
    queues = (client.queue("plain"), client.queue("groups", kind="ordered"))

    def row(
        name: str, make: Callable[[Queue[Any]], Callable[[], float]], least: float | None = None
    ) -> None:
        sides = interleave(rounds, *(make(queue) for queue in queues))
        target = None if least is None else at_least(least)
        bench.row(name, "x standard", ratios(*sides), rounds * count, target, micros(*sides))

    row("push_many", lambda queue: partial(timed, partial(fill, queue, count), count))
    row("reserve + commit of 100", lambda q: partial(timed, partial(take, q, count), count), 0.5)
    row("the same, 20 messages of a group in a row", lambda q: filled(q, count, 20))
    for queue in queues:
        fill(queue, (rounds + 1) * calls)
    row("reserve + commit", lambda queue: partial(singles, queue, calls))


def filled(queue: Queue[Any], count: int, run: int) -> Callable[[], float]:
    """Return a side that takes the messages it pushed before, without the time of the push."""

    def side() -> float:
        fill(queue, count, run)
        return timed(partial(take, queue, count), count)

    return side


def beside_a_large_group(bench: Bench, client: Client) -> None:
    """Time from a push into a small group to its receipt, behind a large group that waits."""
    depth, calls = bench.either(10_000, 100_000), bench.either(20, 50)
    queue = client.queue("large", kind="ordered")
    for _ in range(depth // 1000):
        queue.push_many([payload(0)] * 1000, groups=["large"] * 1000)
    delays = []
    for number in range(calls):
        began = time.perf_counter()
        queue.push(number, group=f"small{number}")
        while not any(each.group != "large" for each in queue.reserve_many(2, timeout=0)):
            pass
        delays.append(time.perf_counter() - began)
    name = f"longest wait of a small group behind {depth} messages of another one"
    bench.row(name, "s", [max(delays)], calls, at_most(0.2))


def drain_for(url: str, name: str, seconds: float) -> int:
    """Reserve and commit for some time, in a separate process. Return how many."""
    with Client(url, telemetry=False) as client:
        queue = client.queue(name, kind="standard" if name.startswith("plain") else "ordered")
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            held = queue.reserve_many(BATCH, timeout=0)
            queue.commit(*held)
            count += len(held)
        return count


def four_processes(bench: Bench) -> None:
    """Compare four processes on an ordered queue with four on a standard one."""
    seconds, rounds = bench.either(1, 2), bench.either(3, 5)
    with bench.database() as url, spawn_pool(4) as pool, Client(url, telemetry=False) as client:

        def total(name: str) -> float:
            queue = client.queue(name, kind="standard" if name == "plain" else "ordered")
            fill(queue, int(14_000 * seconds))
            counts = pool.map(drain_for, [url] * 4, [name] * 4, [seconds] * 4)
            done = sum(counts)
            assert queue.counts().ready > 0, "it ran dry"
            queue.purge()
            return seconds / done

        total("plain")  # the processes start
        plain, ordered = interleave(rounds, partial(total, "plain"), partial(total, "groups"))
    note = " and ".join(f"{1 / statistics.median(side):.0f}/s" for side in (plain, ordered))
    name = "four processes that reserve and commit 100"
    bench.row(name, "x standard", ratios(plain, ordered), rounds, at_least(0.35), note)
