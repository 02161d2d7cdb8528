"""Batch calls, compared with a raw loop of one command per message."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId

from pyqueue import Client
from tests.bench.figures import Target, at_least
from tests.bench.harness import (
    DURABILITIES,
    Bench,
    fill,
    interleave,
    payload,
    raw_document,
    raw_lease,
    timed,
)

Timing = Callable[[], float]


def run(bench: Bench) -> None:
    for durability, shown in DURABILITIES.items():
        with bench.blocking(durability) as (client, raw):
            for size in (10, 100, 1000):
                loop = bench.either(100, 300)
                compare(
                    bench,
                    f"push_many of {size}, {shown}",
                    raw_pushes(raw, loop),
                    pushes(client, size),
                    loop,
                    size,
                )
            settles(bench, client, raw, shown)


def compare(
    bench: Bench,
    name: str,
    raw: Timing,
    ours: Timing,
    loop: int,
    size: int,
    target: Target | None = None,
) -> None:
    """Compare seconds per message."""
    rounds = bench.either(4, 15)
    before, after = interleave(rounds, raw, ours)
    bench.speed(name, before, after, rounds * size, target)


def raw_pushes(raw: Any, count: int) -> Timing:
    return lambda: timed(
        lambda: [raw.insert_one(raw_document("push", number)) for number in range(count)], count
    )


def pushes(client: Client, size: int) -> Timing:
    queue, values = client.queue("push"), [payload(number) for number in range(size)]
    return lambda: timed(lambda: queue.push_many(values), size)


def settles(bench: Bench, client: Client, raw: Any, shown: str) -> None:
    """Settle 100 messages that were reserved before. The raw loop has their ids and tokens."""
    numbers = itertools.count()

    def reserved() -> tuple[Any, list[Any]]:
        queue = client.queue(f"settle{next(numbers)}")
        fill(client.database[client.namespace], queue.name, 100)
        return queue, queue.reserve_many(100, timeout=0)

    def held() -> list[dict[str, Any]]:
        documents = [
            raw_document("held", number) | {"_id": ObjectId()} | raw_lease()["$set"]
            for number in range(100)
        ]
        raw.insert_many(documents)
        return [{"_id": each["_id"], "token": each["token"]} for each in documents]

    def ours(settle: Callable[[Any, list[Any]], object]) -> Timing:
        def side() -> float:
            queue, reservations = reserved()
            return timed(lambda: settle(queue, reservations), 100)

        return side

    def theirs(settle: Callable[[dict[str, Any]], object]) -> Timing:
        def side() -> float:
            matches = held()
            return timed(lambda: [settle(match) for match in matches], 100)

        return side

    for name, one, many, target in settle_operations(raw):
        compare(bench, f"{name} of 100, {shown}", theirs(one), ours(many), 100, 100, target)


SettleOperation = tuple[
    str, Callable[[Any], object], Callable[[Any, list[Any]], object], Target | None
]


def settle_operations(raw: Any) -> list[SettleOperation]:
    """Each operation: its name, one raw command, our call for all of them, and the target."""
    now = datetime.now(UTC)
    freed = {"$set": {"when": now}, "$unset": {"token": "", "reserved": ""}}
    moved = {
        "$set": {"q": "next", "when": now, "tries": 0, "payload": payload(1)},
        "$unset": freed["$unset"],
    }
    return [
        ("commit", raw.delete_one, lambda queue, given: queue.commit(*given), at_least(10)),
        (
            "rollback",
            lambda match: raw.update_one(match, freed),
            lambda queue, given: queue.rollback(*given, delay=0),
            None,
        ),
        (
            "move",
            lambda match: raw.find_one_and_update(match, moved),
            lambda queue, given: queue.move(*given, to="next"),
            None,
        ),
        (
            "move_many with payloads",
            lambda match: raw.find_one_and_update(match, moved),
            lambda queue, given: queue.move_many([(each, payload(1)) for each in given], to="next"),
            None,
        ),
    ]
