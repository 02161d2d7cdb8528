"""One caller and one message at a time: the cost of pyqueue next to one round trip.

The raw side stores and claims ``{q, when, payload}`` with one index. Reserves are compared at w:1,
which both durabilities use for them. Each block uses a new queue, so that no side pays for earlier
claims.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.bench.figures import Target, at_least, at_most
from tests.bench.harness import (
    DURABILITIES,
    RAW_POP,
    RAW_RESERVE,
    WRITE,
    Bench,
    async_latencies,
    fill,
    interleave,
    latencies,
    payload,
    raw_claim,
    raw_document,
    raw_lease,
)

WARM = 5
TARGETS = {"push": at_least(0.85), "pop": at_most(1.25), "reserve": at_most(1.25)}

Timed = Callable[[int, Callable[[], Any]], list[float]]


def run(bench: Bench) -> None:
    for durability, shown in DURABILITIES.items():
        with bench.blocking(durability) as (client, raw):
            compare(
                bench,
                f"{shown}, blocking",
                durability,
                client,
                raw,
                client.database[client.namespace],
                raw,
                latencies,
            )
        with bench.looped(durability) as (runner, client, raw, store):
            timed = in_loop(runner)
            compare(
                bench,
                f"{shown}, async",
                durability,
                client,
                raw,
                store,
                store.database["raw"],
                timed,
            )


def in_loop(runner: asyncio.Runner) -> Timed:
    return lambda calls, call: runner.run(async_latencies(calls, call))


def compare(
    bench: Bench,
    label: str,
    durability: str,
    client: Any,
    raw: Any,
    store: Any,
    raw_store: Any,
    timed: Timed,
) -> None:
    """Compare every operation. ``store`` and ``raw_store`` are the collections to fill first."""
    calls, rounds = bench.either(40, 100), bench.either(6, 20)
    for name, target in TARGETS.items():
        if name == "reserve" and durability != "acknowledged":
            continue  # both durabilities reserve at w:1
        ours, theirs = operations(name, client, raw, store, raw_store)
        medians = [
            lambda side=side: statistics.median(side(timed, calls)) for side in (theirs, ours)
        ]
        before, after = interleave(rounds, *medians)
        report(bench, f"{name}, {label}", before, after, calls * rounds, target)


def report(
    bench: Bench, name: str, raw: list[float], ours: list[float], n: int, target: Target
) -> None:
    (bench.speed if target.sign == ">=" else bench.cost)(name, raw, ours, n, target)


Side = Callable[[Timed, int], list[float]]


def operations(name: str, client: Any, raw: Any, store: Any, raw_store: Any) -> tuple[Side, Side]:
    """Return both sides of an operation, pyqueue first. Each call of a side uses a new queue."""
    numbers = itertools.count()
    quick = raw.with_options(write_concern=WRITE["acknowledged"])

    def ours(timed: Timed, calls: int) -> list[float]:
        queue = client.queue(f"{name}{next(numbers)}")
        if name == "push":
            call = lambda: queue.push(payload(0))  # noqa: E731
        else:
            fill(store, queue.name, calls + WARM)
            call = (lambda: queue.pop(0)) if name == "pop" else (lambda: queue.reserve(0))
        timed(WARM, call)
        return timed(calls, call)

    def theirs(timed: Timed, calls: int) -> list[float]:
        queue = f"{name}{next(numbers)}"
        if name == "push":
            call = lambda: raw.insert_one(raw_document(queue))  # noqa: E731
        else:
            fill_raw(raw_store, queue, calls + WARM)
            if name == "pop":
                call = lambda: raw.find_one_and_delete(raw_claim(queue), **RAW_POP)  # noqa: E731
            else:
                call = lambda: quick.find_one_and_update(  # noqa: E731
                    raw_claim(queue), raw_lease(), **RAW_RESERVE
                )
        timed(WARM, call)
        return timed(calls, call)

    return ours, theirs


def fill_raw(collection: Any, queue: str, count: int) -> None:
    now = raw_document(queue)["when"]
    collection.with_options(write_concern=WRITE["acknowledged"]).insert_many(
        [
            raw_document(queue, number, now - timedelta(milliseconds=count - number))
            for number in range(count)
        ]
    )
