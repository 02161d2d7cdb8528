"""Levels of priority: a scan by level finds the highest; no failure or race loses a message.

There is no database. The last tests run real plans in virtual time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given, settings
from hypothesis import strategies as st

from pyqueue import ConfigurationError, LeaseLost, Unavailable
from pyqueue.backends import managing, reshaping, transitions
from pyqueue.backends.kind import lookup
from pyqueue.backends.options import Options
from pyqueue.backends.priority import scan as priority_scan
from pyqueue.backends.priority.levels import LEVEL_ORDER, LevelStarts, ready_by_level
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.scan import FIRST, Scanned, ScanState
from pyqueue.documents import listed_levels
from pyqueue.messages import Backoff
from pyqueue.requests import Plan, Update
from pyqueue.runtime.waiters import Waiters
from tests.plans.competing import seeds
from tests.plans.meddler import Meddler
from tests.plans.runner import NOW, after, message
from tests.plans.store import Process, Store, Task, World, instant, matches, place
from tests.support.samples import spread

RECORD = "~queue:a"


def plans(**shape: Any) -> QueuePlans:
    """Return a queue with priorities."""
    options = Options(
        dead_letter="a.dead", max_tries=None, backoff=Backoff(base=0, jitter=0), shape=shape
    )
    return plans_of("a", options, kind="priority", owner="me")


# ---- the filter and the starts


IDS = ["a", "b", "~x", ObjectId(b"0" * 12), ObjectId(b"5" * 12)]
STARTS = st.none() | st.tuples(st.integers(-3, 0), st.none() | st.sampled_from(IDS))


@settings(max_examples=25)
@given(st.dictionaries(st.integers(0, 3), STARTS), st.lists(st.integers(0, 3), unique=True))
def test_scan_finds_ready_messages_from_the_start_of_a_level(
    starts: dict[int, tuple[int, Any] | None], levels: list[int]
) -> None:
    begin = {level: (after(at[0]), at[1]) for level, at in starts.items() if at is not None}
    found = ready_by_level("a", levels, NOW, begin) if levels else {"$or": []}
    for level in range(4):
        for seconds in range(-4, 2):
            for id in IDS:
                when = after(seconds)
                document = {"_id": id, "q": "a", "when": when, "priority": level}
                start = begin.get(level, (FIRST, None))
                behind = when > start[0] or (
                    when == start[0]
                    and (
                        start[1] is None
                        or place(document) > place({"when": start[0], "_id": start[1]})
                    )
                )
                expected = level in levels and seconds <= 0 and behind
                assert matches(document, found) is expected


def test_scan_passes_over_the_records_of_levels() -> None:
    for start in (None, (after(-9), None), (after(-9), "a"), (after(-1), "a")):
        starts = {} if start is None else {4: start}
        record = {"_id": "~queue:a~4", "q": "a", "when": after(-1), "priority": 4, "record": True}
        assert not matches(record, ready_by_level("a", [4], NOW, starts))


def test_levels_of_a_damaged_record_are_ignored() -> None:
    assert listed_levels([3, 9, 3, -1, 10, True, "4", 5.0, None, 0]) == (9, 3, 0)
    for stored in (None, 4, "9", {"9": 1}):
        assert listed_levels(stored) == ()


def test_starts_move_up_to_the_last_seen_message() -> None:
    margin = (after(-0.5), None)
    levels = LevelStarts(in_use=(9, 4, 1))
    levels.learn(Scanned(None, NOW, NOW, (after(-3), "m"), False, 4), margin)
    assert levels.starts == {9: margin, 4: (after(-3), "m")}
    levels.learn(Scanned(None, NOW, NOW, (after(-0.1), "n"), False, 9), margin)
    assert levels.starts == {9: margin, 4: (after(-3), "m")}
    levels.learn(Scanned(None, NOW, NOW, None, True), margin)
    assert levels.starts == {9: margin, 4: margin, 1: margin}
    levels.move_back(after(-2))
    assert levels.starts == dict.fromkeys((9, 4, 1), (after(-2), None))
    levels.move_back(after(-1))
    assert levels.starts == dict.fromkeys((9, 4, 1), (after(-2), None))


# ---- cut or raced at every command


def stored(*, strict: bool = False) -> Store:
    """Return a store with a queue: two messages with a listed priority, and one without."""
    store = World(0).store
    runner = Meddler(store)
    runner.run(plans(strict=strict).push(["low", "high"], priorities=[1, 9], ids=["low", "high"]))
    store.documents["none"] = message("none", when=after(-9), due=after(-9))
    return store


def receive(limit: int) -> Callable[[], Plan[Any]]:
    """Return a maker of a receive by a process that knows nothing yet."""
    return lambda: plans().receive(Waiters("t"), limit, timeout=0)


OPERATIONS: dict[str, Callable[[], Plan[Any]]] = {
    "push": lambda: plans().push(["new"], priorities=[5], ids=["new"]),
    "reserve": receive(1),
    "reserve_many": receive(10),
    "reprioritize": lambda: plans_reprioritize("low", 7),
    "reshape": lambda: reshaping.reshape("a", {"strict": False}),
}


def plans_reprioritize(id: str, priority: int) -> Plan[bool]:
    return managing.reprioritize("a", lookup("priority"), id, priority)


def check(store: Store) -> None:
    """Check that no message is lost, that levels are listed, and that a new process gets all."""
    messages = {id: each for id, each in store.documents.items() if "record" not in each}
    assert {"low", "high", "none"} <= messages.keys()
    listed = store.documents[RECORD]["levels"]
    assert all(each["priority"] in listed for each in messages.values() if "priority" in each)
    for each in messages.values():
        each["when"] = min(each["when"], after(-1))  # leases end
    found: list[Any] = []
    waiters = Waiters("t")
    for _ in range(8):
        found += Meddler(store).run(plans().receive(waiters, 10, timeout=0))
        waiters.scan.rescan_at = None
    assert {each.id for each in found} == messages.keys()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_cut_at_any_command_loses_nothing(name: str, strict: bool) -> None:
    whole = Meddler(stored(strict=strict))
    whole.run(OPERATIONS[name]())
    for cut in range(len(whole.commands)):
        store = stored(strict=strict)
        with contextlib.suppress(Unavailable):
            Meddler(store, cut).run(OPERATIONS[name]())
        check(store)


@pytest.mark.parametrize("pop", [True, False])
def test_receive_outlives_a_sentinel_that_does_not_move(pop: bool) -> None:
    """The sentinels only make scans fast. The message would be lost, or held in vain."""

    def received(place: int) -> Meddler:
        waiters = Waiters("t")
        waiters.scan.of(LevelStarts).in_use = (9, 1)
        waiters.scan.sentinel.until = after(300)
        runner = Meddler(stored(), place)
        found = runner.run(plans().receive(waiters, 1, timeout=0, pop=pop))
        assert [each.id for each in found] == ["high"]
        return runner

    commands = received(-1).commands
    assert isinstance(commands[-1], Update)
    received(len(commands) - 1)


@pytest.mark.parametrize("second", OPERATIONS)
@pytest.mark.parametrize("first", OPERATIONS)
def test_operations_beside_each_other_lose_nothing(first: str, second: str) -> None:
    """The first one stalls before one of its commands, and resumes once the second one is done."""
    whole = Meddler(stored())
    whole.run(OPERATIONS[first]())
    for stall in spread(len(whole.commands), 4):
        for strict in (False, True):
            store = stored(strict=strict)
            held: list[Any] = []

            def meddle(store: Store = store, held: list[Any] = held) -> None:
                held.append(Meddler(store).run(OPERATIONS[second]()))

            held.append(Meddler(store, stall, meddle).run(OPERATIONS[first]()))
            both = [
                each.id
                for some in held
                if isinstance(some, list)
                for each in some
                if hasattr(each, "id")
            ]
            assert len(both) == len(set(both)), "one message was received twice"
            check(store)


def receive_and_settle(how: str) -> Callable[[], Plan[Any]]:
    """Return a maker of a receive of all, whose messages are then settled one by one."""

    def work() -> Plan[list[Any]]:
        queue, settled = plans(), []
        for each in (yield from queue.receive(Waiters("t"), 10, timeout=0)):
            with contextlib.suppress(LeaseLost):
                yield from getattr(queue, how)([each])
                settled.append(each)
        return settled

    return work


UNDONE = OPERATIONS | {how: receive_and_settle(how) for how in ("release", "rollback", "bury")}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", UNDONE)
def test_fail_over_at_any_command_loses_no_priority(name: str, strict: bool) -> None:
    """The operation continues after it. A claim that was undone may be made again by another."""
    whole = Meddler(stored(strict=strict))
    whole.run(UNDONE[name]())
    for stall in range(len(whole.commands) + 1):
        for again in (False, True):
            store = stored(strict=strict)
            runner = Meddler(store, stall)
            other: list[Any] = []

            def meddle(
                store: Store = store,
                runner: Meddler = runner,
                other: list[Any] = other,
                again: bool = again,
            ) -> None:
                runner.fail_over()
                if again:
                    other += Meddler(store).run(receive(10)())

            runner.meddle = meddle
            found = runner.run(UNDONE[name]())
            if stall >= len(runner.commands):
                meddle()
            if name in ("release", "rollback", "bury"):
                kept = {each["_id"]: each for each in store.documents.values()}
                for each in other:
                    assert kept[each.id]["token"] == each.token, "settled by a former holder"
                assert all(each.priority == kept[each.id].get("priority") for each in found)
            for each in store.documents.values():
                if each["q"] == "a.dead" and "record" not in each:
                    each["q"] = "a"  # as a redrive does
                    each.pop("dead")
            check(store)


def test_reprioritize_finds_the_message_of_another_level_at_once() -> None:
    """The scan starts of its new level lie above it."""
    store = stored()
    waiters = Waiters("t")
    waiters.scan.of(LevelStarts).in_use = (9, 1)
    waiters.scan.of(LevelStarts).starts = {9: (after(-0.5), None), 1: (FIRST, None)}
    store.documents["low"]["when"] = after(-5)
    runner = Meddler(store)
    assert runner.run(plans_reprioritize("low", 9))
    assert runner.signals[-1] == ("a", after(-5))
    waiters.on_signal(after(-5), NOW)
    found = store.answer(None, _look(waiters.scan))  # type: ignore[arg-type]
    assert found["_id"] == "low"


def _look(scan: ScanState) -> Any:
    from pyqueue.requests import FindAndModify

    return FindAndModify(
        scan.of(LevelStarts).claimable(lookup("priority"), "a", NOW, None), None, sort=LEVEL_ORDER
    )


def test_strict_queue_walks_on_to_find_unlisted_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page is full of messages that have one, for ever."""
    monkeypatch.setattr(priority_scan, "WALK", 3)
    store = stored(strict=True)
    for n in range(10):
        early = after(-99 + n)
        store.documents[f"m{n}"] = message(f"m{n}", when=early, due=early, priority=0)
    store.documents[RECORD]["levels"].append(0)
    waiters = Waiters("t")
    for _ in range(6):
        waiters.scan.rescan_at = None
        Meddler(store).run(plans().receive(waiters, 1, timeout=0))
    waiters.scan.of(LevelStarts).in_use = ()
    for _ in range(6):
        Meddler(store).run(plans().receive(waiters, 1, timeout=0))
        waiters.scan.of(LevelStarts).in_use = ()
    assert store.documents["none"]["priority"] == 4
    assert 4 in store.documents[RECORD]["levels"]


def test_strict_queue_finds_a_foreign_level() -> None:
    store = stored(strict=True)
    store.documents["none"]["priority"] = 7
    waiters = Waiters("t")
    received: list[Any] = []
    for _ in range(3):
        waiters.scan.rescan_at = None
        received += Meddler(store).run(plans().receive(waiters, 1, timeout=0))
    assert [(each.id, each.priority) for each in received][-1] == ("none", 7)
    assert 7 in store.documents[RECORD]["levels"]


def test_contested_scan_by_level_skips_nothing() -> None:
    """Or it would claim a lower level first."""
    for _ in range(5):
        store, waiters = stored(), Waiters("t")
        waiters.scan.contested = True
        runner = Meddler(store)
        found = runner.run(plans().receive(waiters, 2, timeout=0))
        assert [each.id for each in found] == ["high", "low"]


def test_new_level_is_announced_before_its_first_push() -> None:
    """Consumers that wait read the record again, and then hear of the message."""
    runner = Meddler(stored())
    runner.run(plans().push([1], priorities=[5]))
    assert runner.signals == [("a", None), ("a", NOW)]
    assert [type(each).__name__ for each in runner.commands][-1] == "Insert"
    again = Meddler(runner.store)
    again.run(plans().push([1], priorities=[5]))
    assert again.signals == [("a", NOW)]


def test_shape_of_another_kind_is_refused() -> None:
    runner = Meddler(stored())
    with pytest.raises(ConfigurationError, match="strict"):
        plans_of("b", Options(shape={"strict": True}))
    with pytest.raises(ConfigurationError, match="queue 'b' does not exist"):
        runner.run(reshaping.reshape("b", {"strict": True}))


# ---- competing processes, in virtual time


class Observer:
    """Checks each scan by level of a world: it finds the highest messages that are ready."""

    #: How long a scan that runs beside a push may miss its message, in milliseconds.
    TOLERANCE = 60.0

    def __init__(self, world: World) -> None:
        self.world = world
        self.looks = 0
        #: When each message got another priority.
        self.moved: dict[Any, float] = {}
        world.store.on_scan, world.store.on_change = self.scanned, self.changed

    def changed(self, before: dict[str, Any], then: dict[str, Any] | None) -> None:
        """Note a change of the priority."""
        if then is not None and then.get("priority") != before.get("priority"):
            self.moved[then["_id"]] = self.world.time

    def scanned(self, process: Process, request: Any, found: list[dict[str, Any]]) -> None:
        """Check a scan."""
        if len(request.sort) != 3:
            return
        self.looks += 1
        limit = getattr(request, "limit", 1)
        known = [
            each
            for since, each in self.world.store.ready("a")
            if max(since, self.moved.get(each["_id"], 0)) <= self.world.time - self.TOLERANCE
        ]
        known.sort(key=lambda each: (-each["priority"], place(each)))
        ids = [each["_id"] for each in found]
        for each in known[:limit]:
            if each["_id"] not in ids:
                rank = (-each["priority"], place(each))
                last = found[-1] if len(found) == limit else None
                passed = last is None or rank < (-last["priority"], place(last))
                assert not passed, f"{each} is passed over for {found}"


def consume(process: Process, seed: int, done: list[Any]) -> Task:
    """Receive for ever; commit most messages and give the rest back."""
    choose = random.Random(seed)
    queue = plans()
    while True:
        limit = choose.choice((1, 1, 4))
        timeout = timedelta(seconds=5)
        held = yield from process.run(queue.receive(process.waiters, limit, timeout=timeout))
        if not held:
            continue
        yield process.world.sleep(choose.uniform(0, 20))
        end = choose.choice(("commit", "commit", "release", "rollback"))
        if end == "commit":
            yield from process.run(queue.commit(held))
            done += [each.id for each in held]
        elif end == "release":
            yield from process.run(queue.release(held))
        else:
            yield from process.run(queue.rollback(held, delay=0))


def produce(process: Process, seed: int, pushed: list[Any]) -> Task:
    """Push messages of random priorities."""
    choose = random.Random(seed)
    queue = plans()
    for _ in range(25):
        yield process.world.sleep(choose.uniform(0, 120))
        levels = [choose.choice((None, 0, 3, 9)) for _ in range(choose.choice((1, 1, 6)))]
        pushed += yield from process.run(queue.push(levels, priorities=levels))
        if choose.random() < 0.3:
            id, level = choose.choice(pushed), choose.choice((1, 9))
            yield from process.run(plans_reprioritize(id, level))


@seeds(2, 40)
def test_competing_processes_keep_the_order(seed: int) -> None:
    """Every scan by level takes the highest first, and all messages are consumed once."""
    world = World(seed)
    observer = Observer(world)
    pushed: list[Any] = []
    done: list[Any] = []
    processes = [Process(world, "a") for _ in range(4)]
    # A consumer that is busy reads the record every 5 s, so it may not know a new level.
    levels = (0, 1, 3, 4, 9)
    pushed += world.finish(processes[0].run(plans().push(levels, priorities=levels)))
    for number, process in enumerate(processes[:3]):
        world.spawn(consume(process, seed * 10 + number, done), 5)
    for number, process in enumerate(processes[2:]):
        world.spawn(produce(process, seed * 10 + 5 + number, pushed))
    world.run(30_000)
    assert sorted(map(str, done)) == sorted(map(str, pushed))
    assert observer.looks > 50


@pytest.mark.parametrize("seed", range(3))
def test_lost_signals_hide_no_level_for_long(seed: int) -> None:
    """Without signals, a rescan and the record tell of new levels and of returned messages."""
    world = World(seed, lost=0.5, late=0.3)
    pushed: list[Any] = []
    done: list[Any] = []
    processes = [Process(world, "a") for _ in range(3)]
    for number, process in enumerate(processes[:2]):
        world.spawn(consume(process, seed * 10 + number, done), 5)
    world.spawn(produce(processes[2], seed * 10 + 5, pushed))
    world.run(60_000)
    assert sorted(map(str, done)) == sorted(map(str, pushed))


def test_level_starts_are_forgotten_with_the_clock() -> None:
    scan = ScanState()
    scan.of(LevelStarts).in_use = (9,)
    scan.of(LevelStarts).starts = {9: (after(0), None)}
    scan.observe(after(0))
    scan.observe(after(-10))
    assert scan.of(LevelStarts).starts[9][0] <= datetime.fromtimestamp(0, NOW.tzinfo)
    assert transitions.level_record_id("a", 9) == f"{RECORD}~9"
    assert instant(0) == NOW
