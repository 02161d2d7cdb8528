"""The cost of a claim after many claims at the head of the same queue.

A replica set keeps deleted index entries for its snapshot history, exactly where a
first-in-first-out queue searches. A standalone server or a small cache hides most of their cost,
and ``explain`` shows nothing of it, so only times count. A plain query is measured in the same
rounds as a control. If it is cheap, the other figures prove nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from pyqueue import Client
from tests.bench.figures import Curve, Row, at_most, ratios
from tests.bench.harness import (
    RAW_SORT,
    Bench,
    empty_scans,
    fill,
    interleave,
    latencies,
    payload,
    raw_claim,
    take,
)

FRESH, USED = "fresh", "used"
AHEAD = 3_000  # messages that are left when the deleted entries exist
#: The cost of a plain query that shows that the deleted entries are there.
VISIBLE = 1.5


def run(bench: Bench) -> None:
    points = [1_000, 20_000] if bench.quick else [1_000, 10_000, 100_000]
    curve = bench.curve(
        Curve(
            "tombstones",
            "cost of a scan by earlier claims",
            "claims before",
            "x the cost when fresh",
        )
    )
    claims(bench, "distinct when", False, points, curve)
    claims(bench, "one when", True, points, curve)
    empty(bench, points, curve)


def claims(bench: Bench, name: str, same: bool, points: list[int], curve: Curve) -> None:
    """Claim with one client all the time. All messages have the same ``when``, or all differ."""
    calls, rounds = bench.either(10, 20), bench.either(5, 10)
    with bench.blocking("acknowledged") as (client, _):
        store = client.database[client.namespace]
        for queue, count in ((FRESH, AHEAD), (USED, points[-1] + AHEAD)):
            fill(store, queue, count, same=same)
        sides = [plain(store, queue, calls) for queue in (FRESH, USED)]
        sides += [claim(client, queue, calls) for queue in (FRESH, USED)]
        made = 0
        for point in points:
            take(client.queue(USED), point - made)
            made = max(made, point)
            compare(
                bench, "claim", f"after {point}, {name}", sides, calls, rounds, point == points[-1]
            )
            curve_of(bench, curve, ("plain query", "claim"), name, point)
            made += calls * (rounds + 1)


def empty(bench: Bench, points: list[int], curve: Curve) -> None:
    """Scan a queue that was just emptied by reserve and commit, all within one lease of 60 s."""
    calls, rounds = bench.either(10, 20), bench.either(5, 10)
    with bench.blocking("acknowledged") as (client, _):
        store = client.database[client.namespace]
        sides = [plain(store, queue, calls) for queue in (FRESH, USED)]
        sides += [partial(empty_scans, client.queue(queue), calls) for queue in (FRESH, USED)]
        made = 0
        for point in points:
            for _ in range(made, point, 1000):
                client.queue(USED).push_many([payload(number) for number in range(1000)])
            take(client.queue(USED), point - made)
            made = max(made, point)
            compare(
                bench, "empty scan", f"after {point}", sides, calls, rounds, point == points[-1]
            )
            curve_of(bench, curve, ("plain query", "empty scan"), "empty", point)


def compare(
    bench: Bench,
    what: str,
    when: str,
    sides: list[Callable[[], float]],
    calls: int,
    rounds: int,
    last: bool,
) -> None:
    """Add rows for the control and for pyqueue, each fresh and used, from the same rounds."""
    plain_fresh, plain_used, fresh, used = interleave(rounds, *sides)
    control = report(
        bench, f"control: plain query {when}", plain_fresh, plain_used, calls * rounds, None
    )
    if last and control.median < VISIBLE:
        control.note += "; NOT VISIBLE: what follows proves nothing"
    report(bench, f"{what} {when}", fresh, used, calls * rounds, at_most(1.5) if last else None)


def curve_of(bench: Bench, curve: Curve, names: tuple[str, str], kind: str, point: int) -> None:
    for name, row in zip(names, bench.rows[-2:], strict=True):
        curve.add(f"{name}, {kind}", point, row.median)


def claim(client: Client, name: str, calls: int) -> Callable[[], float]:
    queue = client.queue(name)

    def taken() -> None:
        assert queue.reserve(0) is not None

    return lambda: statistics.median(latencies(calls, taken))


def plain(collection: Any, name: str, calls: int) -> Callable[[], float]:
    """Find the first message as a claim without any bound would, and take nothing."""

    def first() -> None:
        match = raw_claim(name) | {"_id": {"$ne": f"~queue:{name}"}}
        collection.find_one(match, {"_id": 1, "when": 1}, sort=RAW_SORT, hint="hot")

    return lambda: statistics.median(latencies(calls, first))


def report(
    bench: Bench, name: str, fresh: list[float], used: list[float], n: int, target: Any
) -> Row:
    micros = [1e6 * each for each in (statistics.median(fresh), statistics.median(used), max(used))]
    note = f"{micros[0]:.0f} us fresh, {micros[1]:.0f} us used, worst round {micros[2]:.0f} us"
    return bench.row(name, "x fresh", ratios(used, fresh), n, target, note)
