"""pyqueue beside the same commands by hand, and many threads beside threads of the raw driver.

64 tasks are compared with ``sketch``, the upper bound. Batches of 100 are compared with the same
commands by hand. 16 threads are compared with 16 threads of the raw driver. All of it is at
majority; claims of pyqueue and of the commands by hand are at w:1.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.bench.concurrency import (
    Call,
    Load,
    Stock,
    cpu_of,
    drive,
    kept,
    metered,
    ours_of,
    supply,
    warm_up,
)
from tests.bench.figures import Cpu, at_least
from tests.bench.harness import (
    RAW_RESERVE,
    Bench,
    compared,
    interleave,
    payload,
    raw_claim,
    raw_document,
    raw_lease,
    timed,
)
from tests.bench.sketch import HOT, ByHand, Sketch
from tests.bench.workers import as_coroutine

THREADS = 16
SIZE = 100
TARGETS = {
    "push by 64 tasks": at_least(0.8),
    "reserve + commit by 64 tasks": at_least(0.65),
    "push of 100": at_least(0.95),
    "reserve + commit of 100": at_least(0.95),
}


def run(bench: Bench) -> None:
    with bench.looped("majority") as (runner, client, raw, store):
        bound = raw.database["bound"].with_options(write_concern=raw.write_concern)
        runner.run(bound.create_index(HOT))
        pushers(bench, runner, client, bound, store)
        consumers(bench, runner, client, bound, store)
        wait = lambda value: runner.run(as_coroutine(value))  # noqa: E731
        batches(bench, "async", wait, client, partial(Sketch, bound), store)
    with bench.blocking("majority") as (client, raw):
        hand = raw.database["bound"].with_options(write_concern=raw.write_concern)
        hand.create_index(HOT)
        store = client.database[client.namespace]
        batches(bench, "blocking", _itself, client, partial(ByHand, hand), store)
        threads(bench, client, raw, store)


def _itself(value: Any) -> Any:
    return value


# ---- 64 tasks


def pushers(
    bench: Bench, runner: asyncio.Runner, client: Any, bound: Any, store: Any, callers: int = 64
) -> None:
    rounds, seconds = bench.either(3, 7), bench.either(4, 12) / 10
    counter, name = itertools.count(), "pushed"
    queue, sketch = client.queue(name), Sketch(bound, name)
    runner.run(warm_up(queue))

    def of(push: Callable[[Any], Any]) -> Call:
        async def call() -> int:
            number = next(counter)
            await push(payload(number))
            return number

        return call

    def side(push: Callable[[Any], Any], done: list[Load]) -> float:
        return kept(done, metered(bench, lambda: runner.run(drive(callers, seconds, of(push)))))

    theirs: list[Load] = []
    ours: list[Load] = []
    rates = interleave(rounds, lambda: side(sketch.push, theirs), lambda: side(queue.push, ours))
    report(bench, f"push by {callers} tasks", rates, theirs, ours, "bound")
    for label, loads, collection in (
        ("", ours, store),
        (", bound", theirs, store.database["bound"]),
    ):
        sent = {number for each in loads for number in each.numbers}
        found = [each["payload"]["n"] for each in collection.find({"q": name, "record": None})]
        count_faults(
            bench,
            f"push by {callers} tasks{label}",
            {"lost": len(sent - set(found)), "twice": len(found) - len(set(found))},
            len(sent),
        )
        collection.delete_many({"q": name, "record": None})


def consumers(
    bench: Bench, runner: asyncio.Runner, client: Any, bound: Any, store: Any, callers: int = 64
) -> None:
    rounds, seconds = bench.either(3, 7), bench.either(4, 12) / 10
    numbers = itertools.count()
    done: dict[str, list[Load]] = {"bound": [], "ours": []}
    faults = {name: {"lost": 0, "twice": 0} for name in done}

    def side(name: str) -> float:
        collection = store if name == "ours" else store.database["bound"]
        stock = Stock(collection, f"c{next(numbers)}", supply(done[name], seconds))
        queue = client.queue(stock.queue)
        call = ours_of(queue) if name == "ours" else bound_of(Sketch(bound, stock.queue))
        if name == "ours":
            runner.run(warm_up(queue))
        load = metered(bench, lambda: runner.run(drive(callers, seconds, call)))
        stock.check(load.numbers, faults[name])
        return kept(done[name], load)

    rates = interleave(rounds, lambda: side("bound"), lambda: side("ours"))
    label = f"reserve + commit by {callers} tasks"
    report(bench, label, rates, done["bound"], done["ours"], "bound")
    count_faults(bench, label, faults["ours"], messages(done["ours"]))
    count_faults(bench, f"{label}, bound", faults["bound"], messages(done["bound"]))


def bound_of(sketch: Sketch) -> Call:
    async def call() -> int | None:
        document = await sketch.reserve()
        if document is None:
            return None
        await sketch.commit(document)
        return int(document["payload"]["n"])

    return call


# ---- batches


class Batches:
    """Batches of 100 on both sides.

    Args:
        run: Returns the result of a call, which may be a coroutine.
        by_hand: Returns the raw side of a queue.
        client: A client of pyqueue.
        store: Its collection, for blocking code.
        repeats: How many batches are measured after the first one.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        by_hand: Callable[[str], Any],
        client: Any,
        store: Any,
        repeats: int,
    ) -> None:
        self._run, self._by_hand, self._client, self._store = run, by_hand, client, store
        self._repeats = repeats
        self._names = itertools.count()
        self._values = [payload(number) for number in range(SIZE)]
        self.faults = {"lost": 0, "twice": 0}

    def push(self, ours: bool) -> float:
        name = f"batch{next(self._names)}"
        queue = self._client.queue(name) if ours else self._by_hand(name)

        def pushes(count: int) -> None:
            for _ in range(count):
                self._run(queue.push_many(self._values))

        pushes(1)
        return timed(lambda: pushes(self._repeats), self._repeats * SIZE)

    def receive(self, ours: bool) -> float:
        name = f"batch{next(self._names)}"
        queue = self._client.queue(name) if ours else self._by_hand(name)
        collection = self._store if ours else self._store.database["bound"]
        stock = Stock(collection, name, (self._repeats + 1) * SIZE)
        received: list[int] = []

        def receives(count: int) -> None:
            for _ in range(count):
                if ours:
                    claimed = self._run(queue.reserve_many(SIZE, timeout=0))
                    self._run(queue.commit(*claimed))
                    received.extend(each.payload["n"] for each in claimed)
                else:
                    claimed = self._run(queue.reserve_many(SIZE))
                    self._run(queue.commit_many(claimed))
                    received.extend(each["payload"]["n"] for each in claimed)

        receives(1)
        seconds = timed(lambda: receives(self._repeats), self._repeats * SIZE)
        stock.check(received, self.faults)
        return seconds


def batches(
    bench: Bench,
    how: str,
    run: Callable[[Any], Any],
    client: Any,
    by_hand: Callable[[str], Any],
    store: Any,
) -> None:
    """Compare batches of 100. ``run`` returns the result of a call, which may be a coroutine."""
    rounds, repeats = bench.either(4, 15), bench.either(3, 10)
    both = Batches(run, by_hand, client, store, repeats)
    for what, side in (("push of 100", both.push), ("reserve + commit of 100", both.receive)):
        cpu: list[Cpu] = []
        ours = metered_into(bench, cpu, partial(side, True))
        before, after, same = compared(rounds, partial(side, False), ours)
        n = rounds * repeats * SIZE
        each = sum(cpu, Cpu()).each(len(cpu) * (repeats + 1) * SIZE)
        name, target = f"{what}, {how}, against the same commands", TARGETS[what]
        bench.speed(name, before, after, n, target, same=same, cpu=each)
    count_faults(bench, f"batches of 100, {how}", both.faults, rounds * (repeats + 1) * SIZE)


def metered_into(bench: Bench, into: list[Cpu], side: Callable[[], float]) -> Callable[[], float]:
    def measured() -> float:
        before = bench.cpu()
        value = side()
        into.append(bench.cpu() - before)
        return value

    return measured


# ---- threads


def drive_threads(callers: int, seconds: float, call: Callable[[], int | None]) -> Load:
    """Let threads repeat a call until the time is over or a call finds nothing."""
    outcome = Load()
    begin = time.perf_counter()

    def caller(_: int) -> None:
        while (start := time.perf_counter()) < begin + seconds:
            number = call()
            if number is None:
                break
            end = time.perf_counter()
            outcome.numbers.append(number)
            outcome.times.append(end - start)
            outcome.seconds = max(outcome.seconds, end - begin)

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(caller, range(callers)))
    return outcome


def threads(bench: Bench, client: Any, raw: Any, store: Any) -> None:
    for what in ("push", "reserve + commit"):
        by_threads(bench, what, client, raw, store)


def by_threads(bench: Bench, what: str, client: Any, raw: Any, store: Any) -> None:
    rounds, seconds = bench.either(3, 7), bench.either(4, 10) / 10
    names, numbers = itertools.count(), itertools.count(1)
    done: dict[str, list[Load]] = {"raw": [], "ours": []}
    faults = {"lost": 0, "twice": 0}

    def side(name: str) -> float:
        collection = store if name == "ours" else raw
        count = 1 if what == "push" else supply(done[name], seconds)
        stock = Stock(collection, f"{what[:4]}{next(names)}", count)
        queue = client.queue(stock.queue)
        if name == "ours":
            queue.release(queue.reserve(0))  # the indexes, the record, the first claim
        call = thread_calls(queue, raw, stock.queue, numbers)[what, name]
        load = metered(bench, lambda: drive_threads(THREADS, seconds, call))
        if name == "ours" and what == "push":
            check_pushed(collection, stock.queue, load.numbers, faults)
        elif name == "ours":
            stock.check(load.numbers, faults)
        return kept(done[name], load)

    rates = interleave(rounds, lambda: side("raw"), lambda: side("ours"))
    label = f"{what} by {THREADS} threads"
    report(bench, label, rates, done["raw"], done["ours"], "as many raw threads")
    count_faults(bench, label, faults, messages(done["ours"]))


def thread_calls(
    queue: Any, raw: Any, name: str, numbers: itertools.count[int]
) -> dict[tuple[str, str], Callable[[], int | None]]:
    def push() -> int:
        number = next(numbers)
        queue.push(payload(number))
        return number

    def insert() -> int:
        number = next(numbers)
        raw.insert_one(raw_document(name, number))
        return number

    def receive() -> int | None:
        reservation = queue.reserve(0)
        if reservation is None:
            return None
        queue.commit(reservation)
        return int(reservation.payload["n"])

    def claim() -> int | None:
        document = raw.find_one_and_update(raw_claim(name), raw_lease(), **RAW_RESERVE)
        if document is None:
            return None
        raw.delete_one({"_id": document["_id"], "token": document["token"]})
        return int(document["payload"]["n"])

    return {
        ("push", "ours"): push,
        ("push", "raw"): insert,
        ("reserve + commit", "ours"): receive,
        ("reserve + commit", "raw"): claim,
    }


def check_pushed(collection: Any, queue: str, pushed: list[int], faults: dict[str, int]) -> None:
    later = collection.find({"q": queue, "payload.n": {"$gt": 0}})  # without the stock
    found = [each["payload"]["n"] for each in later]
    faults["lost"] += len(set(pushed) - set(found))
    faults["twice"] += len(found) - len(set(found))


# ---- rows


def messages(loads: list[Load]) -> int:
    return sum(len(each.numbers) for each in loads)


def report(
    bench: Bench,
    label: str,
    rates: list[list[float]],
    theirs: list[Load],
    ours: list[Load],
    against: str,
) -> None:
    """Add a row for the ratio of the rates."""
    cells = [cpu_of(loads) for loads in (theirs, ours)]
    middle = [sorted(each)[len(each) // 2] for each in rates]
    bench.row(
        f"{label}, against {against}",
        f"x {against}",
        [b / a for a, b in zip(*rates, strict=True)],
        messages(ours),
        TARGETS.get(label),
        f"{middle[0]:.0f}/s and {cells[0]} us of CPU theirs, {middle[1]:.0f}/s ours",
        cpu=cells[1],
    )


def count_faults(bench: Bench, label: str, faults: dict[str, int], n: int) -> None:
    for fault, count in faults.items():
        bench.zero(f"{label}: {fault}", count, n)
