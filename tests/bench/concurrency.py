"""Concurrent callers: throughput, the slowest calls, and whether each message came exactly once.

The raw side has the same number of callers and processes. One process is also compared with the
loop of one caller that most users of the raw driver write. Each side runs for a fixed time; its
consumed and remaining messages must add up to those that were stored. The 4 x 16 consumers share
one queue, and the smallest share of a process is compared with the largest.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pymongo

from pyqueue import AsyncClient
from pyqueue.runtime.connecting import Durability
from tests.bench.figures import Cpu, Curve, Target, at_least, histogram, quantile
from tests.bench.harness import (
    DURABILITIES,
    RAW_INDEX,
    RAW_POP,
    RAW_RESERVE,
    WRITE,
    Bench,
    fill,
    interleave,
    payload,
    raw_claim,
    raw_document,
    raw_lease,
)
from tests.bench.workers import Start, Workers

#: The numbers of consumers in the table. More of them are measured for the curve.
SHOWN = (8, 64)
#: Compared with one raw loop that does the same, because the targets were set that way.
TARGETS = {(64, "majority"): at_least(12), (64, "w:1"): at_least(8)}

#: One unit of work. Its result is the number of the message, or None if there was none.
Call = Callable[[], Awaitable[int | None]]


@dataclass(slots=True)
class Load:
    """The work of several callers: message numbers, seconds per call, seconds in all, and CPU."""

    numbers: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: Cpu = field(default_factory=Cpu)

    @property
    def rate(self) -> float:
        return len(self.numbers) / self.seconds if self.seconds else 0.0


async def drive(callers: int, seconds: float, call: Call) -> Load:
    """Let callers repeat a call until the time is over or a call finds nothing."""
    outcome = Load()
    begin = time.perf_counter()

    async def caller() -> None:
        while (start := time.perf_counter()) < begin + seconds:
            number = await call()
            if number is None:
                break
            end = time.perf_counter()
            outcome.numbers.append(number)
            outcome.times.append(end - start)
            outcome.seconds = max(outcome.seconds, end - begin)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return outcome


async def drive_loops(callers: int, seconds: float, queue: Any) -> Load:
    """Let callers loop over a queue until the time is over or there is no message left."""
    outcome = Load()
    begin = time.perf_counter()

    async def caller() -> None:
        start = begin
        async for reservation in queue.each(0):
            end = time.perf_counter()
            outcome.numbers.append(int(reservation.payload["n"]))
            outcome.times.append(end - start)
            outcome.seconds = max(outcome.seconds, end - begin)
            start = end
            if end >= begin + seconds:
                await queue.commit(reservation)
                break

    await asyncio.gather(*(caller() for _ in range(callers)))
    return outcome


def metered(bench: Bench, work: Callable[[], Load]) -> Load:
    """Do the work, and note the processor time of this process and of the server."""
    before = bench.cpu()
    load = work()
    load.cpu += bench.cpu() - before
    return load


def cpu_of(loads: Sequence[Load]) -> Cpu:
    """Return the processor time for each message."""
    return sum((each.cpu for each in loads), Cpu()).each(sum(len(each.numbers) for each in loads))


def run(bench: Bench) -> None:
    curve = bench.curve(
        Curve("throughput", "throughput at majority against consumers", "consumers", "messages/s")
    )
    spread = bench.curve(
        Curve(
            "latencies", "reserve + commit, 64 consumers, majority", "ms", "% of calls", log_y=False
        )
    )
    for durability, shown in DURABILITIES.items():
        safest = durability == "majority"
        with bench.looped(durability) as (runner, client, raw, store):
            pushers(bench, runner, shown, client, raw, store)
            for callers in (1, 8, 64) if bench.quick else (1, 2, 4, 8, 16, 32, 64):
                if safest or callers == 64 or (callers in SHOWN and not bench.quick):
                    done = consumers(bench, runner, shown, client, raw, store, callers)
                    for side in ("raw", "ours") if safest else ():
                        outcomes = done[side]
                        curve.add(
                            side, callers, statistics.median(each.rate for each in outcomes[1:])
                        )
                        if callers == 64:
                            times = [value for each in outcomes[1:] for value in each.times]
                            histogram(spread, side, [1000 * value for value in times])
        with bench.database() as url, Workers(4) as workers:
            processes(bench, shown, durability, url, workers)


# ---- one process


def pushers(
    bench: Bench, runner: asyncio.Runner, shown: str, client: AsyncClient, raw: Any, store: Any
) -> None:
    rounds, seconds = bench.either(3, 7), bench.either(4, 15) / 10
    counter = itertools.count()
    queue = client.queue("pushed")
    runner.run(warm_up(queue))
    done: dict[str, list[Load]] = {"raw": [], "ours": [], "loop": []}

    async def ours() -> int:
        number = next(counter)
        await queue.push(payload(number))
        return number

    async def theirs() -> int:
        number = next(counter)
        await raw.insert_one(raw_document("pushed", number))
        return number

    def side(name: str, callers: int, call: Call) -> float:
        return kept(done[name], metered(bench, lambda: runner.run(drive(callers, seconds, call))))

    rates = interleave(
        rounds,
        lambda: side("raw", 64, theirs),
        lambda: side("ours", 64, ours),
        lambda: side("loop", 1, theirs),
    )
    acknowledged = sorted(number for each in done["ours"] for number in each.numbers)
    stored = sorted(
        document["payload"]["n"] for document in store.find({"q": "pushed", "record": None})
    )
    target = at_least(8) if shown == "majority" else None
    outcome(bench, f"64 pushers, {shown}", rates[:2], done, None)
    note = f"{statistics.median(rates[2]):.0f}/s raw, {statistics.median(rates[1]):.0f}/s ours"
    ratio = [ours / raw for raw, ours in zip(rates[2], rates[1], strict=True)]
    bench.row(
        f"64 pushers, {shown}: against one raw loop of insert_one",
        "x raw speed",
        ratio,
        len(ratio),
        target,
        note,
    )
    bench.zero(
        f"64 pushers, {shown}: lost", len(set(acknowledged) - set(stored)), len(acknowledged)
    )
    bench.zero(f"64 pushers, {shown}: twice", len(stored) - len(set(stored)), len(acknowledged))
    store.delete_many({"q": "pushed", "record": None})


def consumers(
    bench: Bench,
    runner: asyncio.Runner,
    shown: str,
    client: AsyncClient,
    raw: Any,
    store: Any,
    callers: int,
) -> dict[str, list[Load]]:
    rounds, seconds = bench.either(3, 7 if callers in SHOWN else 3), bench.either(4, 15) / 10
    numbers = itertools.count()
    done: dict[str, list[Load]] = {"raw": [], "ours": []}
    faults = {"lost": 0, "twice": 0}

    def side(name: str) -> float:
        collection = store if name == "ours" else store.database["raw"]
        stock = Stock(collection, f"c{callers}-{next(numbers)}", supply(done[name], seconds))
        call = (
            ours_of(client.queue(stock.queue))
            if name == "ours"
            else LOOPS.get(name, raw_of)(raw, stock.queue)
        )
        if name == "ours":
            runner.run(warm_up(client.queue(stock.queue)))
        count = 1 if name in LOOPS else callers
        result = metered(bench, lambda: runner.run(drive(count, seconds, call)))
        if name == "ours":
            stock.check(result.numbers, faults)
        return kept(done[name], result)

    sides = ["raw", "ours"]
    loops = LOOPS if callers == 64 or (callers in SHOWN and not bench.quick) else {}
    for name in loops:
        done[name] = []
        sides.append(name)
    rates = interleave(rounds, *[partial(side, name) for name in sides])
    label = f"1 x {callers} consumers, {shown}"
    if callers in SHOWN:
        outcome(bench, label, rates[:2], done, None)
        for name, theirs in zip(loops, rates[2:], strict=True):
            note = (
                f"{statistics.median(theirs):.0f}/s raw, {statistics.median(rates[1]):.0f}/s ours"
            )
            ratio = [ours / raw for raw, ours in zip(theirs, rates[1], strict=True)]
            target = TARGETS.get((callers, shown)) if LOOPS[name] is raw_of else None
            bench.row(
                f"{label}: against one raw loop of {name}",
                "x raw speed",
                ratio,
                len(ratio),
                target,
                note,
            )
        total = sum(len(each.numbers) for each in done["ours"])
        for fault, count in faults.items():
            bench.zero(f"{label}: {fault}", count, total)
    return done


async def warm_up(queue: Any) -> None:
    """Create the record of the queue and claim once, before the time is measured."""
    if (reservation := await queue.reserve(0)) is not None:
        await queue.release(reservation)


def ours_of(queue: Any) -> Call:
    async def call() -> int | None:
        reservation = await queue.reserve(0)
        if reservation is None:
            return None
        await queue.commit(reservation)
        return int(reservation.payload["n"])

    return call


def raw_of(raw: Any, queue: str) -> Call:
    async def call() -> int | None:
        document = await raw.find_one_and_update(raw_claim(queue), raw_lease(), **RAW_RESERVE)
        if document is None:
            return None
        await raw.delete_one({"_id": document["_id"], "token": document["token"]})
        return int(document["payload"]["n"])

    return call


def raw_pops(raw: Any, queue: str) -> Call:
    async def call() -> int | None:
        document = await raw.find_one_and_delete(raw_claim(queue), **RAW_POP)
        return None if document is None else int(document["payload"]["n"])

    return call


#: The raw loops of one caller.
LOOPS: dict[str, Callable[[Any, str], Call]] = {
    "find_one_and_update + delete_one": raw_of,
    "find_one_and_delete": raw_pops,
}


class Stock:
    """Messages that are stored in a queue and counted afterwards."""

    def __init__(self, collection: Any, queue: str, count: int) -> None:
        self.queue = queue
        self._collection = collection
        self._count = count
        fill(collection, queue, count)

    def check(self, consumed: list[int], faults: dict[str, int]) -> None:
        """Add the messages that came twice, and those that were neither consumed nor left."""
        left = {
            document["payload"]["n"]
            for document in self._collection.find({"q": self.queue, "record": None})
        }
        faults["twice"] += len(consumed) - len(set(consumed)) + len(left & set(consumed))
        faults["lost"] += self._count - len(left | set(consumed))


def supply(done: list[Load], seconds: float) -> int:
    """Return how many messages to store: twice the number that the last round consumed."""
    return int(max(2_000, 2 * done[-1].rate * seconds if done else 0))


def kept(done: list[Load], result: Load) -> float:
    done.append(result)
    return result.rate


def outcome(
    bench: Bench,
    label: str,
    rates: list[list[float]],
    done: dict[str, list[Load]],
    target: Target | None,
) -> None:
    """Add rows for the ratio of the rates and for the slowest calls."""
    theirs, ours = rates
    total = sum(len(each.numbers) for each in done["ours"])
    note = f"{statistics.median(theirs):.0f}/s and {cpu_of(done['raw'])} us of CPU raw, "
    note += f"{statistics.median(ours):.0f}/s ours"
    ratio = [b / a for a, b in zip(theirs, ours, strict=True)]
    bench.row(label, "x raw speed", ratio, total, target, note, cpu=cpu_of(done["ours"]))
    slow = {
        name: [quantile(each.times, 0.99) for each in done[name][1:]] for name in ("raw", "ours")
    }
    median = {name: 1000 * statistics.median(times) for name, times in slow.items()}
    note = f"{median['raw']:.1f} ms raw, {median['ours']:.1f} ms ours"
    ratio = [b / a for a, b in zip(slow["raw"], slow["ours"], strict=True)]
    bench.row(f"{label}: p99", "x raw p99", ratio, total, None, note)


# ---- several processes


def processes(bench: Bench, shown: str, durability: Durability, url: str, workers: Workers) -> None:
    rounds, seconds = bench.either(2, 7), bench.either(4, 15) / 10
    numbers = itertools.count()
    done: dict[str, list[Load]] = {"raw": [], "ours": []}
    faults = {"lost": 0, "twice": 0}
    shares: list[float] = []
    with pymongo.MongoClient[Any](url) as mongo:
        database = mongo.get_default_database()
        database["raw"].create_index(RAW_INDEX)
        workers.call(consume, url, durability, "ours", "warm", 0.1)  # creates the indexes

        def side(name: str) -> float:
            collection = database["pyqueue" if name == "ours" else "raw"]
            stock = Stock(collection, f"p{next(numbers)}", supply(done[name], seconds))
            before = bench.cpu()
            results: list[Load] = workers.call(consume, url, durability, name, stock.queue, seconds)
            server = Cpu(0.0, (bench.cpu() - before).server)
            counts = [len(each.numbers) for each in results]
            if name == "ours":
                stock.check([number for each in results for number in each.numbers], faults)
                shares.append(min(counts) / max(*counts, 1))
            everything = Load(
                [number for each in results for number in each.numbers],
                [value for each in results for value in each.times],
                max(each.seconds for each in results),
                sum((each.cpu for each in results), server),
            )
            return kept(done[name], everything)

        rates = interleave(rounds, lambda: side("raw"), lambda: side("ours"))
    label = f"4 x 16 consumers, {shown}"
    outcome(bench, label, rates, done, at_least(3.5))
    total = sum(len(each.numbers) for each in done["ours"])
    bench.row(f"{label}: smallest share", "of the largest", shares[1:], total, at_least(0.6))
    for fault, count in faults.items():
        bench.zero(f"{label}: {fault}", count, total)


async def consume(
    start: Start, url: str, durability: Durability, side: str, queue: str, seconds: float
) -> Load:
    """Run 16 consumers in a worker process, at the same time as all workers."""
    if side == "ours":
        async with AsyncClient(url, durability=durability, telemetry=False) as client:
            await warm_up(client.queue(queue))
            start.wait()
            return await drive_alone(16, seconds, ours_of(client.queue(queue)))
    async with pymongo.AsyncMongoClient[Any](url, tz_aware=True) as mongo:
        raw = mongo.get_default_database().get_collection("raw", write_concern=WRITE[durability])
        await raw.find_one()
        start.wait()
        return await drive_alone(16, seconds, raw_of(raw, queue))


async def drive_alone(callers: int, seconds: float, call: Call) -> Load:
    """Drive callers, and note the processor time of this process."""
    before = time.process_time()
    load = await drive(callers, seconds, call)
    load.cpu = Cpu(time.process_time() - before)
    return load
