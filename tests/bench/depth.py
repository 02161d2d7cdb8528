"""The cost of a claim and an empty scan next to many ready, scheduled or finished messages.

Every depth has its own namespace, and the rounds alternate between the depths. The figure is the
cost at a depth divided by the cost at a thousand messages. The last figure is the cost of calls
that one process spreads over a thousand queues, divided by their cost in one queue.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from bson import ObjectId

from pyqueue import Client
from pyqueue.messages import KEPT
from tests.bench.figures import Curve, at_most, ratios
from tests.bench.harness import Bench, empty_scans, fill, interleave, latencies, payload

BASE = 1_000
QUEUES = (1, 100, 1_000)


def run(bench: Bench) -> None:
    curve = bench.curve(
        Curve("depth", "cost of a scan by depth", "messages stored", "x the cost at a thousand")
    )
    depths = [BASE, 100_000] if bench.quick else [BASE, 10_000, 100_000, 1_000_000]
    for kind in ("ready", "scheduled", "history"):
        measure(bench, kind, depths, curve)
    compare_queues(bench)


def compare_queues(bench: Bench) -> None:
    """Compare a process that uses many queues by turns with one that uses one."""
    calls, rounds = bench.either(40, 100), bench.either(7, 15)
    with bench.database() as url, ExitStack() as stack:
        sides = []
        for count in QUEUES:
            client = Client(
                url, namespace=f"queues{count}", durability="acknowledged", telemetry=False
            )
            sides.append(in_turn(stack.enter_context(client), count, calls))
        one, *several = interleave(rounds, *sides)
    for count, times in zip(QUEUES[1:], several, strict=True):
        micros = [statistics.median(each) * 1e6 for each in (one, times)]
        note = f"{micros[0]:.0f} us in one queue, {micros[1]:.0f} us here"
        name = f"push + reserve + commit, in {count} queues by turns"
        bench.row(name, "x in one", ratios(times, one), calls * rounds, at_most(1.2), note)


def in_turn(client: Client, count: int, calls: int) -> Callable[[], float]:
    """Return a function that measures the median cost of a message, each in the next queue."""
    queues = itertools.cycle([client.queue(f"queue{number}") for number in range(count)])

    def through() -> None:
        queue = next(queues)
        queue.push(payload(0))
        reservation = queue.reserve(0)
        assert reservation is not None
        queue.commit(reservation)

    latencies(max(count, calls), through)  # so that each queue was used
    return lambda: statistics.median(latencies(calls, through))


def measure(bench: Bench, kind: str, depths: list[int], curve: Curve) -> None:
    calls, rounds = bench.either(20, 40), bench.either(7, 15)
    with bench.database() as url, ExitStack() as stack:
        claims: list[Callable[[], float]] = []
        scans: list[Callable[[], float]] = []
        for depth in depths:
            client = stack.enter_context(
                Client(url, namespace=f"depth{depth}", durability="acknowledged", telemetry=False)
            )
            store(client, kind, depth)
            claims.append(claim(client, kind, calls))
            scans.append(partial(empty_scans, client.queue("deep"), calls))
        for name, sides in (("claim", claims), ("empty scan", scans)):
            if name == "empty scan" and kind == "ready":
                continue  # with ready messages no scan is empty
            base, *deeper = interleave(rounds, *sides)
            line = f"{name}, {kind}"
            curve.add(line, BASE, 1)
            for depth, times in zip(depths[1:], deeper, strict=True):
                ratio = ratios(times, base)
                micros = [statistics.median(each) * 1e6 for each in (base, times)]
                note = f"{micros[0]:.0f} us at {BASE}, {micros[1]:.0f} us here"
                bench.row(f"{line} {depth}", "x at 1000", ratio, calls * rounds, at_most(1.2), note)
                curve.add(line, depth, statistics.median(ratio))


def store(client: Client, kind: str, depth: int) -> None:
    collection = client.database[client.namespace]
    if kind == "history":
        now = datetime.now(UTC)
        # The form of finished messages: `when` is far away, and they expire in an hour.
        done: dict[str, Any] = {
            "processed": now,
            "outcome": "committed",
            "expires": now + timedelta(hours=1),
            "token": str(ObjectId()),
        }
        fill(collection, "deep", depth, ahead=KEPT.total_seconds(), **done)
    else:
        fill(collection, "deep", depth, ahead=3 * 86400 if kind == "scheduled" else 0)


def claim(client: Client, kind: str, calls: int) -> Callable[[], float]:
    """Return a function that measures the median cost of a reserve."""
    queue = client.queue("deep")

    def timed() -> float:
        if kind != "ready":
            fill(client.database[client.namespace], "deep", calls + 1)
        queue.reserve(0, lease=3600)
        return statistics.median(latencies(calls, taken))

    def taken() -> Any:
        reservation = queue.reserve(0, lease=3600)
        assert reservation is not None
        return reservation

    return timed
