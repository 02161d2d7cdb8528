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
from tests.bench.single import Sides, Timed, in_loop, operations

TARGET = at_most(15)


def run(bench: Bench) -> None:
    with bench.blocking("acknowledged") as (client, raw):
        sides = Sides(client, raw, client.database[client.namespace], raw)
        compare(bench, "blocking", sides, latencies)
        queue = client.queue("many")
        hundred = [payload(number) for number in range(100)]

        def raw_push() -> None:
            documents = [raw_document("many", number) for number in range(100)]
            raw.insert_many(documents, ordered=False)

        ours = spent(lambda: queue.push_many(hundred))
        report(bench, "push_many of 100, per message", 100, spent(raw_push), ours)
    with bench.looped("acknowledged") as (runner, looped, raw, store):
        sides = Sides(looped, raw, store, store.database["raw"])
        compare(bench, "async", sides, in_loop(runner))


def compare(bench: Bench, label: str, sides: Sides, timed: Timed) -> None:
    calls = bench.either(100, 300)
    for name in ("push", "pop", "reserve"):
        ours, raw = (within(side, timed, calls) for side in operations(name, sides))
        report(bench, f"{name}, {label}", calls, raw, ours)


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


def spent(call: Callable[[], object]) -> Callable[[], float]:
    def measured() -> float:
        start = time.process_time()
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
    note = f"{micros[0]:.0f} us raw, {micros[1]:.0f} us ours"
    bench.row(name, "us", added, rounds * messages, TARGET, note)
