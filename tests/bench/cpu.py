"""The processor time that pyqueue adds to each message.

It is the time of this process less the time that raw pymongo needs for the same work, BSON
included. It is measured at w:1, which waits least, and includes the threads and tasks of the
default bus.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.bench.figures import at_most
from tests.bench.harness import Bench, interleave, latencies, payload, raw_document
from tests.bench.single import Timed, in_loop, operations

TARGET = at_most(15)


def run(bench: Bench) -> None:
    with bench.blocking("acknowledged") as (client, raw):
        compare(bench, "blocking", client, raw, client.database[client.namespace], raw, latencies)
        queue = client.queue("many")
        hundred = [payload(number) for number in range(100)]
        one = spent(
            1,
            lambda: raw.insert_many(
                [raw_document("many", number) for number in range(100)], ordered=False
            ),
        )
        report(
            bench,
            "push_many of 100, per message",
            100,
            one,
            spent(1, lambda: queue.push_many(hundred)),
        )
    with bench.looped("acknowledged") as (runner, client, raw, store):
        compare(bench, "async", client, raw, store, store.database["raw"], in_loop(runner))


def compare(
    bench: Bench, label: str, client: Any, raw: Any, store: Any, raw_store: Any, timed: Timed
) -> None:
    calls = bench.either(100, 300)
    for name in ("push", "pop", "reserve"):
        ours, theirs = operations(name, client, raw, store, raw_store)
        report(
            bench,
            f"{name}, {label}",
            calls,
            within(theirs, timed, calls),
            within(ours, timed, calls),
        )


def within(
    side: Callable[[Timed, int], list[float]], timed: Timed, calls: int
) -> Callable[[], float]:
    """Return the processor time of the timed calls of a side, without its preparation."""

    def measured() -> float:
        spans: list[float] = []

        def clocked(count: int, call: Callable[[], Any]) -> list[float]:
            start = time.process_time()
            times = timed(count, call)
            spans.append(time.process_time() - start)
            return times

        side(clocked, calls)
        return spans[-1]  # the first span is the warm-up

    return measured


def spent(calls: int, call: Callable[[], object]) -> Callable[[], float]:
    def measured() -> float:
        start = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - start

    return measured


def report(
    bench: Bench, name: str, messages: int, raw: Callable[[], float], ours: Callable[[], float]
) -> None:
    rounds = bench.either(8, 25)
    before, after = interleave(rounds, raw, ours)
    added = [(b - a) / messages * 1e6 for a, b in zip(before, after, strict=True)]
    micros = [sorted(side)[rounds // 2] / messages * 1e6 for side in (before, after)]
    bench.row(
        name,
        "us",
        added,
        rounds * messages,
        TARGET,
        f"{micros[0]:.0f} us raw, {micros[1]:.0f} us ours",
    )
