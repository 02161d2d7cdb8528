"""pyqueue beside the same commands by hand, and many threads beside threads of the raw driver.

64 tasks are compared with ``sketch``, the bound, and with ``by_hand``, the same client on the
documents and indexes of pyqueue. Batches of 100 are compared with the same commands on the raw
driver. 16 threads are compared with 16 threads of the raw driver. All of it is at majority; claims
of pyqueue and of the commands by hand are at w:1.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.bench.by_hand import ByHand
from tests.bench.concurrency import (
    Call,
    Load,
    Stock,
    cpu_of,
    drive,
    drive_loops,
    kept,
    metered,
    ours_of,
    supply,
    warm_up,
)
from tests.bench.figures import Cpu, at_least, ratios
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
from tests.bench.sketch import HOT, BlockingSketch, Sketch
from tests.bench.workers import as_coroutine

TASKS = 64
THREADS = 16
SIZE = 100
#: The sides of 64 tasks.
BOUND, BY_HAND, OURS = SIDES = ("bound", "by hand", "ours")
#: The loops of each() by as many tasks.
EACH = "each"
TARGETS = {
    "push by 64 tasks, against bound": at_least(0.75),
    "reserve + commit by 64 tasks, against by hand": at_least(0.7),
    "each by 64 tasks, against by hand": at_least(0.85),
    "push of 100": at_least(0.95),
    "reserve + commit of 100": at_least(0.95),
}
#: The speed to aim at where the target is lower.
AIMS = {"push by 64 tasks, against bound": 0.8}


def run(bench: Bench) -> None:
    with bench.looped("majority") as (runner, client, raw, store):
        tasks = Tasks(runner, client, raw, store)
        runner.run(tasks.collection(BOUND).create_index(HOT))
        pushers(bench, tasks)
        consumers(bench, tasks)
        wait = lambda value: runner.run(as_coroutine(value))  # noqa: E731
        batches(bench, "async", wait, client, partial(tasks.sketch, BOUND), store)
    with bench.blocking("majority") as (client, raw):
        hand = raw.database["bound"].with_options(write_concern=raw.write_concern)
        hand.create_index(HOT)
        store = client.database[client.namespace]
        batches(bench, "blocking", _itself, client, partial(BlockingSketch, hand), store)
        threads(bench, client, raw, store)


def _itself(value: Any) -> Any:
    return value


# ---- 64 tasks


@dataclass(frozen=True, slots=True)
class Tasks:
    """64 tasks of one event loop, and the three sides that they drive.

    The client by hand shares the collection of pyqueue, so both of them write the same indexes.
    """

    runner: asyncio.Runner
    client: Any
    #: An async collection of the same database, with the write concern of all sides.
    raw: Any
    #: The collection of pyqueue, for blocking code.
    store: Any

    def collection(self, side: str) -> Any:
        """Return the async collection of a side."""
        name = "bound" if side == BOUND else self.client.namespace
        return self.raw.database[name].with_options(write_concern=self.raw.write_concern)

    def stored(self, side: str) -> Any:
        """Return the collection of a side, for blocking code."""
        return self.store.database["bound"] if side == BOUND else self.store

    def sketch(self, side: str, queue: str) -> Sketch:
        """Return the client of a side that is not pyqueue."""
        return (Sketch if side == BOUND else ByHand)(self.collection(side), queue)

    def drive(self, bench: Bench, seconds: float, call: Call) -> Load:
        """Let the tasks repeat a call."""
        return metered(bench, lambda: self.runner.run(drive(TASKS, seconds, call)))

    def loop(self, bench: Bench, seconds: float, queue: Any) -> Load:
        """Let the tasks loop over a queue."""
        return metered(bench, lambda: self.runner.run(drive_loops(TASKS, seconds, queue)))


def pushers(bench: Bench, tasks: Tasks) -> None:
    rounds, seconds = bench.either(3, 7), bench.either(3, 12) / 10
    counter = itertools.count()
    names = {side: f"pushed-{place}" for place, side in enumerate(SIDES)}
    queue = tasks.client.queue(names[OURS])
    tasks.runner.run(warm_up(queue))
    pushes: dict[str, Callable[[Any], Any]] = {OURS: queue.push}
    pushes |= {side: tasks.sketch(side, names[side]).push for side in (BOUND, BY_HAND)}
    done: dict[str, list[Load]] = {side: [] for side in SIDES}

    def measured(side: str) -> float:
        push = pushes[side]

        async def call() -> int:
            number = next(counter)
            await push(payload(number))
            return number

        return kept(done[side], tasks.drive(bench, seconds, call))

    rates = interleave(rounds, *(partial(measured, side) for side in SIDES))
    label = f"push by {TASKS} tasks"
    report_tasks(bench, label, Measured.of(done, rates))
    for side in SIDES:
        sent = {number for each in done[side] for number in each.numbers}
        mine = {"q": names[side], "record": None}
        found = [each["payload"]["n"] for each in tasks.stored(side).find(mine)]
        faults = {"lost": len(sent - set(found)), "twice": len(found) - len(set(found))}
        count_faults(bench, _of(side, label), faults, len(sent))
        tasks.stored(side).delete_many(mine)


def consumers(bench: Bench, tasks: Tasks) -> None:
    rounds, seconds = bench.either(3, 7), bench.either(3, 12) / 10
    numbers = itertools.count()
    sides = (*SIDES, EACH)
    done: dict[str, list[Load]] = {side: [] for side in sides}
    faults = {side: {"lost": 0, "twice": 0} for side in sides}

    def measured(side: str) -> float:
        stock = Stock(tasks.stored(side), f"c{next(numbers)}", supply(done[side], seconds))
        if side in (OURS, EACH):
            queue = tasks.client.queue(stock.queue)
            tasks.runner.run(warm_up(queue))
        if side == EACH:
            load = tasks.loop(bench, seconds, queue)
        else:
            ours = side == OURS
            call = ours_of(queue) if ours else tasks.sketch(side, stock.queue).take
            load = tasks.drive(bench, seconds, call)
        stock.check(load.numbers, faults[side])
        return kept(done[side], load)

    rates = interleave(rounds, *(partial(measured, side) for side in sides))
    label, loops = f"reserve + commit by {TASKS} tasks", f"{EACH} by {TASKS} tasks"
    outcomes = Measured.of(done, rates)
    report_tasks(bench, label, outcomes)
    report(bench, f"{loops}, against {BY_HAND}", outcomes, BY_HAND, EACH)
    for side in sides:
        name = loops if side == EACH else _of(side, label)
        count_faults(bench, name, faults[side], messages(done[side]))


def _of(side: str, label: str) -> str:
    return label if side == OURS else f"{label}, {side}"


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
    against = "as many raw threads"
    sides = {against: done["raw"], OURS: done["ours"]}
    report(bench, f"{label}, against {against}", Measured.of(sides, rates), against)
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


@dataclass(frozen=True, slots=True)
class Measured:
    """The work of several sides, and their rates in the rounds that count."""

    loads: dict[str, list[Load]]
    rates: dict[str, list[float]]

    @classmethod
    def of(cls, loads: dict[str, list[Load]], rates: list[list[float]]) -> Measured:
        """Return the measurements of sides whose rates come in the order of their loads."""
        return cls(loads, dict(zip(loads, rates, strict=True)))


def messages(loads: list[Load]) -> int:
    return sum(len(each.numbers) for each in loads)


def report_tasks(bench: Bench, label: str, sides: Measured) -> None:
    """Add a row for each two sides of 64 tasks."""
    for against in (BOUND, BY_HAND):
        report(bench, f"{label}, against {against}", sides, against)
    report(bench, f"{label}, {BY_HAND} against {BOUND}", sides, BOUND, BY_HAND)


def report(bench: Bench, name: str, sides: Measured, against: str, side: str = OURS) -> None:
    """Add a row for the rate of one side as a ratio to the rate of another side."""
    theirs, ours = sides.rates[against], sides.rates[side]
    cpu = {each: cpu_of(sides.loads[each]) for each in (against, side)}
    note = f"{against}: {statistics.median(theirs):.0f}/s, {cpu[against]} us of CPU; "
    note += f"{side}: {statistics.median(ours):.0f}/s"
    if name in AIMS:
        note += f"; aim {AIMS[name]}"
    ratio = ratios(ours, theirs)
    n, target = messages(sides.loads[side]), TARGETS.get(name)
    bench.row(name, f"x {against}", ratio, n, target, note, cpu=cpu[side])


def count_faults(bench: Bench, label: str, faults: dict[str, int], n: int) -> None:
    for fault, count in faults.items():
        bench.zero(f"{label}: {fault}", count, n)
