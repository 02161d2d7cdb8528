"""One caller and one message at a time: the cost of pyqueue next to one round trip.

The raw side stores and claims ``{q, when, payload}`` with one index. Reserves alone are compared at
w:1, which both durabilities use for them; a reserve with its commit is compared with
find_one_and_update and delete_one at the durability. Each block uses a new queue, so that no side
pays for earlier claims. The raw side is measured twice, which shows the noise.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import statistics
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NamedTuple

from tests.bench.figures import Target, at_least, at_most
from tests.bench.harness import (
    DURABILITIES,
    RAW_POP,
    RAW_RESERVE,
    WRITE,
    Bench,
    async_latencies,
    compared,
    fill,
    latencies,
    payload,
    raw_claim,
    raw_document,
    raw_lease,
)

WARM = 5
BLOCKING: dict[str, Target] = {
    "push": at_least(0.95),
    "pop": at_most(1.25),
    "reserve": at_most(1.25),
    "reserve + commit": at_least(0.95),
}
ASYNC = BLOCKING | {"push": at_least(0.9), "reserve + commit": at_least(0.9)}

Timed = Callable[[int, Callable[[], Any]], list[float]]


class Sides(NamedTuple):
    """The client, the raw collection, and the collections to fill before a call of each."""

    client: Any
    raw: Any
    store: Any
    raw_store: Any


def run(bench: Bench) -> None:
    for durability, shown in DURABILITIES.items():
        with bench.blocking(durability) as (client, raw):
            sides = Sides(client, raw, client.database[client.namespace], raw)
            compare(bench, f"{shown}, blocking", durability, sides, latencies)
        with bench.looped(durability) as (runner, client, raw, store):
            sides = Sides(client, raw, store, store.database["raw"])
            compare(bench, f"{shown}, async", durability, sides, in_loop(runner))


def in_loop(runner: asyncio.Runner) -> Timed:
    return lambda calls, call: runner.run(async_latencies(calls, call))


def compare(bench: Bench, label: str, durability: str, sides: Sides, timed: Timed) -> None:
    """Compare every operation."""
    calls, rounds = bench.either(40, 100), bench.either(6, 20)
    for name, target in (BLOCKING if timed is latencies else ASYNC).items():
        if name == "reserve" and durability != "acknowledged":
            continue  # both durabilities reserve at w:1
        ours, theirs = operations(name, sides)
        medians = [
            lambda side=side: statistics.median(side(timed, calls)) for side in (theirs, ours)
        ]
        before, after, same = compared(rounds, *medians)
        if target.sign == ">=":
            bench.speed(f"{name}, {label}", before, after, calls * rounds, target, same=same)
        else:
            bench.cost(f"{name}, {label}", before, after, calls * rounds, target)


Side = Callable[[Timed, int], list[float]]


def operations(name: str, sides: Sides) -> tuple[Side, Side]:
    """Return both sides of an operation, pyqueue first. Each call of a side uses a new queue."""
    client, raw, store, raw_store = sides
    numbers = itertools.count()
    quick = raw.with_options(write_concern=WRITE["acknowledged"])

    def ours(timed: Timed, calls: int) -> list[float]:
        queue = client.queue(f"q{next(numbers)}")
        if name == "push":
            call = lambda: queue.push(payload(0))  # noqa: E731
        else:
            fill(store, queue.name, calls + WARM)
            call = {
                "pop": lambda: queue.pop(0),
                "reserve": lambda: queue.reserve(0),
                "reserve + commit": lambda: chained(queue.reserve(0), queue.commit),
            }[name]
        timed(WARM, call)
        return timed(calls, call)

    def theirs(timed: Timed, calls: int) -> list[float]:
        queue = f"{name}{next(numbers)}"
        if name == "push":
            call = lambda: raw.insert_one(raw_document(queue))  # noqa: E731
        else:
            fill_raw(raw_store, queue, calls + WARM)
            call = {
                "pop": lambda: raw.find_one_and_delete(raw_claim(queue), **RAW_POP),
                "reserve": lambda: claim(quick, queue),
                "reserve + commit": lambda: chained(
                    claim(raw, queue), lambda held: raw.delete_one(fenced(held))
                ),
            }[name]
        timed(WARM, call)
        return timed(calls, call)

    return ours, theirs


def claim(collection: Any, queue: str) -> Any:
    return collection.find_one_and_update(raw_claim(queue), raw_lease(), **RAW_RESERVE)


def chained(first: Any, then: Callable[[Any], Any]) -> Any:
    """Call a function with a value, or return a coroutine that does so with an awaited one."""
    return _awaited(first, then) if inspect.isawaitable(first) else then(first)


async def _awaited(first: Awaitable[Any], then: Callable[[Any], Any]) -> Any:
    return await then(await first)


def fenced(held: dict[str, Any]) -> dict[str, Any]:
    return {"_id": held["_id"], "token": held["token"]}


def fill_raw(collection: Any, queue: str, count: int) -> None:
    now = raw_document(queue)["when"]
    collection.with_options(write_concern=WRITE["acknowledged"]).insert_many(
        [
            raw_document(queue, number, now - timedelta(milliseconds=count - number))
            for number in range(count)
        ]
    )
