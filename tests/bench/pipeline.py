"""A pipeline of three links that do nothing, compared with a raw loop that claims and updates."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime
from typing import Any

from pyqueue.runtime.connecting import Durability
from tests.bench.harness import (
    DURABILITIES,
    RAW_RESERVE,
    WRITE,
    Bench,
    interleave,
    payload,
    raw_claim,
    raw_document,
    raw_lease,
)

STAGES = ("raw", "parsed", "checked", "done")
CONCURRENCY = 64


def run(bench: Bench) -> None:
    for durability, shown in DURABILITIES.items():
        compare(bench, durability, shown)


def compare(bench: Bench, durability: Durability, shown: str) -> None:
    count, rounds = bench.either(500, 2000), bench.either(3, 7)
    counts: list[int] = []
    with (
        bench.looped(durability) as (runner, client, _, _),
        bench.blocking(durability) as (_, blocking),
    ):

        def ours() -> float:
            seconds, done = runner.run(through(client, count))
            counts.append(done)
            return seconds

        before, after = interleave(rounds, lambda: by_hand(blocking, bench.either(50, 150)), ours)
    moves = len(STAGES) - 1
    label = f"pipeline of {moves} links, {CONCURRENCY} at a time, {shown}"
    bench.speed(f"{label}: per move", before, after, rounds * count * moves)
    bench.zero(
        f"{label}: lost or twice", sum(abs(done - count) for done in counts), count * len(counts)
    )


numbers = itertools.count()


async def through(client: Any, count: int) -> tuple[float, int]:
    """Return the seconds per move and the number of messages at the end."""
    names = [f"{name}{next(numbers)}" for name in STAGES]
    pipeline = client.pipeline("bench")

    async def same(payload: object) -> object:
        return payload

    for source, target in itertools.pairwise(names):
        pipeline.link(source, same, to=target)
    await client.queue(names[0]).push_many([payload(number) for number in range(count)])
    began = time.perf_counter()
    await pipeline.run(until_empty=True, concurrency=CONCURRENCY)
    took = time.perf_counter() - began
    return took / count / (len(names) - 1), (await client.queue(names[-1]).counts()).ready


def by_hand(raw: Any, count: int) -> float:
    """Return the seconds per move of one blocking raw loop."""
    names = [f"{name}{next(numbers)}" for name in STAGES]
    quick = raw.with_options(write_concern=WRITE["acknowledged"])
    raw.insert_many([raw_document(names[0], number) for number in range(count)])
    began = time.perf_counter()
    for source, target in itertools.pairwise(names):
        for _ in range(count):
            found = quick.find_one_and_update(raw_claim(source), raw_lease(), **RAW_RESERVE)
            put = {"q": target, "when": datetime.now(UTC), "payload": found["payload"]}
            match = {"_id": found["_id"], "token": found["token"]}
            assert raw.update_one(match, {"$set": put, "$unset": {"token": ""}}).matched_count == 1
    return (time.perf_counter() - began) / count / (len(names) - 1)
