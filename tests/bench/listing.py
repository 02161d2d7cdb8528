"""The time of ``Client.queues()`` for many queues, of which a third are buckets and streams."""

from __future__ import annotations

import time
from typing import Any

from pyqueue import Client, Limit, Push
from tests.bench.figures import at_most
from tests.bench.harness import Bench, payload

#: The kinds of the queues in turn. A "limited" queue is a standard one with a limit for each key.
KINDS = ("standard", "priority", "ordered", "limited", "bucket", "stream")
#: The messages of each queue, and how many of these are scheduled and reserved.
DEPTH, SCHEDULED, RESERVED = 1000, 100, 10
#: The groups of an ordered queue, and the keys of a limited one.
GROUPS = 100
LIMIT = Limit(concurrency=1, per="headers.customer")
#: The calls that are measured.
CALLS: dict[str, dict[str, Any]] = {
    "queues()": {},
    "queues(held=False)": {"held": False},
    "queues(cap=1000)": {"cap": 1000},
}


def run(bench: Bench) -> None:
    count, rounds = bench.either(100, 1000), bench.either(5, 9)
    with bench.blocking("acknowledged") as (client, _):
        for number in range(count):
            fill(client, KINDS[number % len(KINDS)], f"queue{number}")
        for name, options in CALLS.items():
            times = [seconds(client, options) for _ in range(rounds + 1)][1:]
            title = f"{name}, {count} queues of {len(KINDS)} kinds, {count * DEPTH} messages"
            target = None if bench.quick or "cap" in options else at_most(1)
            bench.row(title, "s", times, rounds, target)


def seconds(client: Client, options: dict[str, Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    client.queues(**options)
    return time.perf_counter() - began


def fill(client: Client, kind: Any, name: str) -> None:
    """Store messages, most of them ready."""
    payloads = [payload(number) for number in range(DEPTH)]
    if kind == "stream":
        client.stream(name).append_many(payloads)
        return
    if kind == "limited":
        fill_limited(client, name, payloads)
        return
    queue, more = client.queue(name, kind=kind), dict[str, Any]()
    if kind == "priority":
        more["priorities"] = [number % 10 for number in range(DEPTH)]
    if kind == "ordered":
        more["groups"] = [f"g{number % GROUPS}" for number in range(DEPTH)]
    parts: dict[float | None, slice] = {None: slice(SCHEDULED, None), 3600.0: slice(SCHEDULED)}
    for delay, part in parts.items():
        some = {field: values[part] for field, values in more.items()}
        queue.push_many(payloads[part], delay=delay, **some)
    queue.reserve_many(RESERVED, timeout=0, lease=3600)


def fill_limited(client: Client, name: str, payloads: list[Any]) -> None:
    """Store messages of many keys, and reserve some. The limit defers the rest of their keys."""
    queue = client.queue(name, limit=LIMIT)
    queue.push_many(
        Push(
            each,
            headers={"customer": f"c{number % GROUPS}"},
            delay=3600 if number < SCHEDULED else None,
        )
        for number, each in enumerate(payloads)
    )
    queue.reserve_many(RESERVED, timeout=0, lease=3600)
