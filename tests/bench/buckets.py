"""Buckets: messages in packs of 1000, single callers, several processes, and depth."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pyqueue import AsyncQueue, Client, Queue
from tests.bench.figures import at_least, at_most, ratios
from tests.bench.harness import Bench, interleave, payload
from tests.bench.workers import as_coroutine
from tests.support.processes import spawn_pool

PACK = 1000
#: How many tasks push, and reserve and commit, one message at a time.
TASKS = 64


def run(bench: Bench) -> None:
    """Measure all figures at majority."""
    batches(bench)
    single_callers(bench)
    processes(bench)
    depth(bench)


def rate(bench: Bench, name: str, seconds: list[float], n: int, least: int) -> None:
    """Add a row of messages per second."""
    bench.row(name, "messages/s", [1 / each for each in seconds], n, at_least(least))


def push_packs(queue: Queue[Any], count: int) -> float:
    """Push ``count`` messages. Return the seconds for each."""
    values = [payload(number) for number in range(PACK)]
    start = time.perf_counter()
    for _ in range(count // PACK):
        queue.push_many(values)
    return (time.perf_counter() - start) / count


def take_packs(queue: Queue[Any], count: int) -> float:
    """Reserve and commit ``count`` messages. Return the seconds for each."""
    start = time.perf_counter()
    for _ in range(count // PACK):
        held = queue.reserve_many(PACK, timeout=0)
        assert len(held) == PACK
        queue.commit(*held)
    return (time.perf_counter() - start) / count


def batches(bench: Bench) -> None:
    """Push, reserve and commit a thousand messages in one call."""
    packs, rounds = bench.either(10, 40), bench.either(5, 9)
    count = packs * PACK
    with bench.blocking("majority") as (client, _):
        queue = client.queue("jobs", kind="bucket", pack=PACK)
        push_packs(queue, count)  # in every other round, the messages are taken first
        pushed, taken = interleave(
            rounds, partial(push_packs, queue, count), partial(take_packs, queue, count)
        )
    shown = f"packs of {PACK}"
    rate(bench, f"push_many, {shown}", pushed, rounds * count, 100_000)
    rate(bench, f"reserve_many and commit, {shown}", taken, rounds * count, 60_000)


# ---- many callers of one message


async def _callers(work: Any, seconds: float) -> float:
    """Let tasks repeat their work for some time. Return the seconds for each message."""
    count = 0
    start = time.perf_counter()

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < start + seconds:
            await work()
            count += 1

    await asyncio.gather(*(caller() for _ in range(TASKS)))
    return (time.perf_counter() - start) / count


async def _raw(raw: Any, seconds: float) -> float:
    """Insert one document after the other. Return the seconds for each."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        await raw.insert_one({"payload": payload(count)})
        count += 1
    return (time.perf_counter() - start) / count


async def _raw_pairs(raw: Any, seconds: float) -> float:
    """Claim and delete one document after the other. Return the seconds for each."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        found = await raw.find_one_and_update({"held": None}, {"$set": {"held": count}})
        await raw.delete_one({"_id": found["_id"]})
        count += 1
    return (time.perf_counter() - start) / count


def single_callers(bench: Bench) -> None:
    """Compare 64 tasks that handle one message at a time with a raw loop that does so."""
    rounds, seconds = bench.either(5, 7), bench.either(5, 15) / 10
    with bench.looped("majority") as (runner, client, raw, _):
        queue: AsyncQueue[Any] = client.queue("jobs", kind="bucket")

        async def push() -> None:
            await queue.push(payload(0))

        async def take() -> None:
            held = await queue.reserve(0)
            assert held is not None, "it ran dry"
            await queue.commit(held)

        async def refill() -> None:
            await queue.purge()
            for _ in range(100):
                await queue.push_many([payload(number) for number in range(PACK)])

        runner.run(as_coroutine(raw.insert_many([{"payload": payload(0)} for _ in range(PACK)])))

        def side(work: Any, prepare: Any = None) -> float:
            if prepare is not None:
                runner.run(prepare())
            return float(runner.run(work()))

        before, pushed, pairs, taken = interleave(
            rounds,
            partial(side, partial(_raw, raw, seconds)),
            partial(side, partial(_callers, push, seconds)),
            partial(side, partial(_raw_pairs, raw, seconds)),
            partial(side, partial(_callers, take, seconds), refill),
        )
    for name, plain, ours in (
        (f"push by {TASKS} tasks", before, pushed),
        (f"reserve and commit by {TASKS} tasks", pairs, taken),
    ):
        note = f"{statistics.median(1 / each for each in ours):.0f}/s"
        bench.row(name, "x a raw loop", ratios(plain, ours), rounds, at_least(30), note)


# ---- several processes


def push_for(url: str, name: str, seconds: float) -> float:
    """Push for some time, in a separate process. Return how many messages a second."""
    with Client(url, telemetry=False) as client:
        queue = client.queue(name, kind="bucket", pack=PACK)
        queue.paused()
        count, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            queue.push_many([payload(number) for number in range(PACK)])
            count += PACK
        return count / (time.perf_counter() - start)


def take_for(url: str, name: str, seconds: float) -> float:
    """Reserve and commit for some time, in a separate process."""
    with Client(url, telemetry=False) as client:
        queue = client.queue(name, kind="bucket", pack=PACK)
        count, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            held = queue.reserve_many(PACK, timeout=0)
            assert held, "it ran dry"
            queue.commit(*held)
            count += len(held)
        return count / (time.perf_counter() - start)


def processes(bench: Bench) -> None:
    """Compare four processes with one."""
    seconds, rounds = bench.either(10, 20) / 10, bench.either(3, 5)
    with bench.database() as url, spawn_pool(4) as pool:

        def total(work: Callable[[str, str, float], float], number: int) -> float:
            arguments = [url] * number, ["jobs"] * number, [seconds] * number
            return sum(pool.map(work, *arguments))

        for _ in range(3):  # in every other round, the messages are taken first
            total(push_for, 4)
        sides = interleave(
            rounds,
            partial(total, push_for, 1),
            partial(total, push_for, 4),
            partial(total, take_for, 1),
            partial(total, take_for, 4),
        )
    pushed, pushed4, taken, taken4 = sides
    for name, one, four in (
        ("push_many", pushed, pushed4),
        ("reserve_many and commit", taken, taken4),
    ):
        note = f"{statistics.median(one):.0f}/s and {statistics.median(four):.0f}/s"
        label = f"{name} by four processes, compared with one"
        bench.row(label, "x", ratios(four, one), rounds, at_least(0.9), note)


# ---- depth


def depth(bench: Bench) -> None:
    """Compare a deep queue with one that is ten times less deep."""
    rounds, count = bench.either(5, 7), bench.either(5, 20) * PACK
    deep = bench.either(100, 1000) * PACK
    with bench.blocking("majority") as (client, _):
        queues = [client.queue(name, kind="bucket", pack=PACK) for name in ("flat", "deep")]
        for queue, size in zip(queues, (deep // 10, deep), strict=True):
            push_packs(queue, size)

        def turn(queue: Queue[Any]) -> float:
            return push_packs(queue, count) + take_packs(queue, count)

        flat, much = interleave(rounds, *(partial(turn, queue) for queue in queues))
    name = f"push, reserve and commit at {deep} messages, compared with {deep // 10}"
    bench.cost(name, flat, much, rounds * count, at_most(1.2))
