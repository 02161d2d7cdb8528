"""Ordered groups: no failure and no race holds two messages of a group, or forgets one.

Each operation is cut, stalled and undone at each of its commands. There is no database. The last
tests run real plans in virtual time, with processes that die.
"""

from __future__ import annotations

import contextlib
import random
from bisect import bisect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyqueue import DuplicateKey, LeaseLost, Unavailable
from pyqueue.backends import recovering
from pyqueue.backends.kind import lookup
from pyqueue.backends.options import Options
from pyqueue.backends.ordered import groups, scan
from pyqueue.backends.outputs import Output
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.settling import fan_out
from pyqueue.backends.turns import DEFERRED_FOR, FirstOfEach
from pyqueue.documents import group_of, stored_group
from pyqueue.messages import Backoff
from pyqueue.requests import Delete, Insert, Plan, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.competing import compete, seeds
from tests.plans.meddler import Meddler
from tests.plans.runner import NOW, after
from tests.plans.steps import Cut, Steps
from tests.plans.steps import cut as dying
from tests.plans.store import Store, World, instant

LEASE = 60.0
#: The shapes of a queue: each has another order after failures, or a limit as well.
LIMIT = 3
SHAPES: dict[str, dict[str, Any]] = {
    "block": {"on_failure": "block"},
    "skip": {"on_failure": "skip"},
    "limited": {"on_failure": "block", "limit": {"concurrency": LIMIT}},
}
FAR = after(10 * 365 * 86400)


def plans(queue: str = "a", **shape: Any) -> QueuePlans:
    """Return an ordered queue."""
    backoff = Backoff(base=5, factor=1, jitter=0)
    options = Options(lease=LEASE, dead_letter="dead", max_tries=None, backoff=backoff, shape=shape)
    return plans_of(queue, options, kind="ordered", owner="me")


# ---- the order


#: By how many milliseconds each message of a group is scheduled ahead.
PUSHES: dict[str, list[int]] = {
    "many at once": [*[0] * 5000, 1, 1, 0],
    "many instants in turn": [number % 100 for number in range(500)],
    "a time that others share": [*[60_000] * 5, *range(70), 60_000, 60_000],
}


def entering(delay: int, id: str) -> dict[str, Any]:
    """Return a message that enters group "g"."""
    when = NOW + timedelta(milliseconds=delay)
    return {"_id": id, **lookup("ordered").entering("a", when, group="g")}


@pytest.mark.parametrize("pushes", PUSHES)
def test_messages_of_one_instant_keep_the_order_of_their_pushes(pushes: str) -> None:
    """Their ids would sort the other way."""
    found = [entering(each, f"{9999 - n}") for n, each in enumerate(PUSHES[pushes])]
    assert sorted(found, key=groups.rank) == sorted(found, key=lambda each: each["when"])


# ---- how a group is stored


@given(st.text(min_size=1) | st.from_regex("[0-9a-f]{3}:.*"))
def test_group_is_shown_as_it_was_given(group: str) -> None:
    """Also a name that resembles a stored hash."""
    for kind in ("ordered", "priority", "standard"):
        assert group_of(lookup(kind).entering("a", NOW, 4, group)) == group


def test_first_use_puts_bounds_around_each_lock() -> None:
    """They keep an insert into the index from walking over the entries of deleted locks."""
    store = World(0).store
    runner = Meddler(store)
    runner.run(plans("b").push([1], groups=["g"]))
    bounds = store.documents["~locks"]
    assert bounds["record"]
    locks = bounds["lock"]
    assert locks == sorted(set(locks))
    names = [stored_group(f"g{number}") for number in range(1000)]
    between = {bisect(locks, name) for name in names}
    assert len(between) > 800
    assert 0 < min(between) <= max(between) < len(locks)
    standard = World(0).store
    Meddler(standard).run(plans_of("b", Options(dead_letter="x"), owner="me").push([1]))
    assert "~locks" not in standard.documents


# ---- one operation, disturbed at each command


Doing = Callable[[Meddler], object]


class Scene:
    """A store with two groups, a message that one consumer holds, and its next operation."""

    def __init__(self, shape: str = "block", *, depth: int = 4, deferred: bool = True) -> None:
        self.store = World(0).store
        self.shape = SHAPES[shape]
        runner = Meddler(self.store)
        names = ["g"] * depth + ["h"] * 2 + [None]
        ids = [f"{name or 'x'}{place}" for place, name in enumerate(names)]
        keys = [None, "k1", "k2", *[None] * (len(ids) - 3)]
        queue = plans(**self.shape)
        runner.run(queue.push(ids, groups=names, ids=ids, keys=keys))
        del self.store.documents["~locks"]  # it is large, and copies of the store are many
        #: The first message of group "g". Unless ``deferred`` is False, another scan defers the
        #: rest.
        self.held = runner.run(self.receive(1, Waiters("a")))
        assert [each.id for each in self.held] == ["g0"]
        if not deferred:
            return
        waiters = Waiters("a")
        more = runner.run(self.receive(10, waiters))
        assert {each.id for each in more} == {f"h{depth}", f"x{depth + 2}"}
        runner.run(queue.release(more))

    def receive(self, limit: int, waiters: Waiters | None = None) -> Plan[Any]:
        """Return a receive; without ``waiters``, of a process that knows nothing yet."""
        return plans().receive(waiters or Waiters("a"), limit, timeout=0)


OPERATIONS: dict[str, Callable[[Scene], Plan[Any]]] = {
    "reserve": lambda scene: scene.receive(1),
    "reserve_many": lambda scene: scene.receive(10),
    "commit": lambda scene: plans().commit(scene.held),
    "rollback": lambda scene: plans().rollback(scene.held, delay=0),
    "rollback later": lambda scene: plans().rollback(scene.held, delay=20),
    "release": lambda scene: plans().release(scene.held),
    "bury": lambda scene: plans().bury(scene.held),
    "move": lambda scene: plans().move([(scene.held[0], 1)], to=plans("b")),
    "remove": lambda scene: plans().remove("g1"),
    "push": lambda scene: plans().push(["new"], groups=["g"], ids=["new"]),
    "replace": lambda scene: plans().push(
        ["new"], groups=["h"], keys=["k1"], on_duplicate="replace"
    ),
    "purge": lambda scene: plans().purge(),
}
#: Those that delete a message that waits. If they stop half way, the walk finds the rest.
DELETING = ("remove", "replace", "purge")
#: The operations that ``make test`` disturbs in a queue of each shape. They begin claims, end one
#: with a later try, and end one elsewhere; the rest it disturbs in a queue that blocks.
IN_EACH_SHAPE = ("reserve_many", "rollback later", "move")
each_operation = pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(
            name,
            shape,
            marks=[pytest.mark.slow] * (shape != "block" and name not in IN_EACH_SHAPE),
        )
        for name in OPERATIONS
        for shape in SHAPES
    ],
)


#: Of the pairs of operations ``make test`` runs a third, each operation with four others.
pairs = pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(first, second, marks=[pytest.mark.slow] * ((one + other) % 3 > 0))
        for one, first in enumerate(OPERATIONS)
        for other, second in enumerate(OPERATIONS)
    ],
)


def drain(store: Store, *, walks: bool = True, now: datetime = NOW) -> list[str]:
    """Receive and commit everything by a new process. Return the ids in their order.

    Nothing may wait longer than a lease. Without ``walks``, the process walks over no groups.
    """
    waiters = Waiters("a")
    runner = Meddler(store, now=now + timedelta(seconds=1))
    done: list[str] = []
    last: dict[str, Any] = {}
    for _ in range(100):
        waiters.scan.forget()
        waiters.scan.lower_bound = None
        waiters.scan.rescan_at = None if walks else FAR
        runner.answers = [runner.carried] * 1000
        held = runner.run(plans().receive(waiters, 10, timeout=0))
        check_slots(store, runner.now)
        for each in held:
            stored = store.documents[each.id]
            if each.group is not None:
                place = groups.rank(stored)
                assert place > last.get(each.group, ()), f"{each.id} comes too late"
                last[each.group] = place
        if held:
            runner.run(plans().commit(held))
            done += [str(each.id) for each in held]
            continue
        left = [
            each for each in store.documents.values() if each["q"] == "a" and "record" not in each
        ]
        if not left:
            return done
        until = waiters.scan.limit.blocked_until  # set if a ready message waits for a slot
        upcoming = until or min(each["when"] for each in left)
        runner.now = max(runner.now, upcoming) + timedelta(milliseconds=1)
        assert runner.now <= now + timedelta(seconds=2 * LEASE), f"forgotten: {left}"
    raise AssertionError("scanned too often")


def check_slots(store: Store, now: datetime) -> None:
    """Check that each held message has a slot, if the queue has a limit, and no other message."""
    limited = "limit" in store.documents["~queue:a"].get("shape", {})
    held = [each for each in store.documents.values() if each["q"] == "a" and "token" in each]
    assert all(("slot" in each) is limited for each in held)
    assert not limited or sum(each["when"] > now for each in held) <= LIMIT
    assert not any("slot" in each for each in store.documents.values() if "token" not in each)


def live(store: Store) -> set[str]:
    """Return the ids of the messages of the queue."""
    found = store.documents.values()
    return {each["_id"] for each in found if each["q"] == "a" and "record" not in each}


def undoing(store: Store) -> Callable[[], None]:
    """Record writes without a majority. Return a function that undoes them, like a fail-over."""
    undo: list[tuple[Any, dict[str, Any] | None]] = []
    answer = store.answer
    put = store._put

    def recorded(document: dict[str, Any]) -> dict[str, Any]:
        undo.append((document["_id"], store.documents.get(document["_id"])))
        return put(document)

    def answered(process: Any, request: Any) -> Any:
        if isinstance(request, (Delete, Insert, UpdateEach)):
            del undo[:]  # it waits for the majority, and so for earlier writes
        found = answer(process, request)
        if not getattr(request, "w1", True):
            del undo[:]
        return found

    def lose() -> None:
        for id, before in reversed(undo):
            if before is None:
                store.documents.pop(id, None)
            else:
                store.documents[id] = before
        del undo[:]

    store.answer = answered  # type: ignore[method-assign]
    store._put = recorded  # type: ignore[method-assign]
    return lose


def commands(name: str, shape: str) -> int:
    """Return how many commands an operation has."""
    scene = Scene(shape)
    whole = Meddler(scene.store)
    whole.run(OPERATIONS[name](scene))
    return len(whole.commands)


@each_operation
def test_operation_cut_at_any_command_forgets_no_group(name: str, shape: str) -> None:
    """Without the walk, waiting messages come when the lease ends at the latest."""
    for cut in range(commands(name, shape)):
        for walks in (True, False):
            if not walks and name in DELETING:
                continue
            scene = Scene(shape)
            with contextlib.suppress(Unavailable):
                Meddler(scene.store, cut).run(OPERATIONS[name](scene))
            there = live(scene.store)
            assert set(drain(scene.store, walks=walks)) == set(map(str, there))


@each_operation
def test_operation_undone_at_any_command_forgets_no_group(name: str, shape: str) -> None:
    """A fail-over undoes writes without a majority, between two commands."""
    for place in range(commands(name, shape)):
        scene = Scene(shape)
        lose = undoing(scene.store)
        with contextlib.suppress(LeaseLost, DuplicateKey):
            Meddler(scene.store, place, lose).run(OPERATIONS[name](scene))
        there = live(scene.store)
        check_slots(scene.store, NOW)
        assert set(drain(scene.store)) == set(map(str, there))


@pytest.mark.parametrize(
    "few", [pytest.param(True, id="some"), pytest.param(False, id="all", marks=pytest.mark.slow)]
)
@pairs
@pytest.mark.parametrize("shape", ["block", pytest.param("limited", marks=pytest.mark.slow)])
def test_operations_beside_each_other_keep_the_order(
    shape: str, first: str, second: str, few: bool
) -> None:
    """The first one stalls before one of its commands, and resumes once the second one is done.

    A group may not wait for the lease of a message that is no longer held.
    """
    every = list(range(commands(first, shape)))
    if few:  # of each first one, the pairs stall at each command in turn
        every = [every[list(OPERATIONS).index(second) % len(every)]]
    for stall in every:
        scene = Scene(shape)
        store = scene.store
        received: list[Any] = []

        def meddle(scene: Scene = scene, received: list[Any] = received) -> None:
            runner = Meddler(scene.store)
            with contextlib.suppress(LeaseLost):
                received.append(runner.run(OPERATIONS[second](scene)))

        with contextlib.suppress(LeaseLost):
            received.append(Meddler(store, stall, meddle).run(OPERATIONS[first](scene)))
        held = [
            each.id
            for some in received
            if isinstance(some, list)
            for each in some
            if hasattr(each, "token")
        ]
        assert len(held) == len(set(held)), "one message was received twice"
        check_at_once(store)
        check_slots(store, NOW)
        there = live(store)
        assert set(drain(store)) == set(map(str, there))


def check_at_once(store: Store) -> None:
    """Check that each free group has its first message ready, or waiting for its time."""
    firsts = store._first_of_each(FirstOfEach("a", groups.GROUPED))
    messages = [each for each in store.documents.values() if each["q"] == "a"]
    locks = {each["lock"] for each in messages if "lock" in each}
    for each in firsts:
        if each["group"] not in locks:
            assert each["when"] <= max(each["due"], NOW) + scan.LEAST_DEFERRAL, each


@pytest.mark.parametrize("name", OPERATIONS)
def test_recovery_beside_an_operation_changes_nothing(name: str) -> None:
    """The walk over the groups runs before each command of another process."""
    for place in range(commands(name, "block")):
        scene = Scene()

        def walk(scene: Scene = scene) -> None:
            Meddler(scene.store).run(groups.restore("a", None))

        Meddler(scene.store, place, walk).run(OPERATIONS[name](scene))
        check_at_once(scene.store)
        there = live(scene.store)
        assert set(drain(scene.store)) == set(map(str, there))


# ---- deferred messages, and who brings them forward


def test_heir_comes_when_the_lease_ends_if_the_holder_dies() -> None:
    """The second message was deferred by an hour. It is the heir since the first one was claimed.

    Its holder dies when the commit is stored, and before it brings the next one forward.
    """
    scene = Scene()
    store = scene.store
    runner = Meddler(store)
    runner.run(plans().commit(scene.held))
    assert store.documents["g2"]["when"] == NOW + DEFERRED_FOR
    (held,) = runner.run(scene.receive(1))
    assert held.id == "g1"
    with contextlib.suppress(Unavailable):
        Meddler(store, 1).run(plans().commit([held]))
    assert "g1" not in store.documents
    assert store.documents["g2"]["when"] == after(LEASE)
    assert drain(store, walks=False)[-2:] == ["g2", "g3"]


def test_deferral_beside_a_commit_is_corrected() -> None:
    """A scan defers waiting messages. Before it does, the holder frees the group."""
    found = 0
    for place in range(12):
        scene = Scene(deferred=False)
        when = {id: each["when"] for id, each in scene.store.documents.items()}

        def commit(scene: Scene = scene) -> None:
            Meddler(scene.store).run(plans().commit(scene.held))

        runner = Meddler(scene.store, place, commit)
        runner.run(scene.receive(10))
        found += any(each["when"] > when[id] for id, each in scene.store.documents.items())
        check_at_once(scene.store)
    assert found


@pytest.mark.parametrize("name", ["remove", "replace"])
def test_rescan_finds_a_group_that_processes_left_when_they_died(name: str) -> None:
    """One of them deleted the heir, and one committed the held message. No lease is left."""
    scene = Scene()
    store = scene.store
    die_before_the_group_continues(store, OPERATIONS[name](scene))
    die_before_the_group_continues(store, plans().commit(scene.held))
    assert store.documents["g2"]["when"] == NOW + DEFERRED_FOR
    there = live(store)
    assert set(drain(store)) == there


def die_before_the_group_continues(store: Store, plan: Plan[Any]) -> None:
    """Run a plan until it would read which messages of a group come first."""
    whole = Meddler(store)

    def die(request: Any) -> Any:
        if isinstance(request, FirstOfEach):
            raise Unavailable("it died")
        return whole.carried(request)

    whole.answers = [die] * 20
    whole.run(plan)


def test_scheduled_message_is_not_brought_forward() -> None:
    """Nothing is written for it."""
    store = World(0).store
    runner = Meddler(store)
    runner.run(plans().push(["first"], groups=["g"], ids=["first"]))
    runner.run(plans().push(["later"], groups=["g"], ids=["later"], delay=30))
    held = runner.run(plans().receive(Waiters("a"), 1, timeout=0))
    del runner.commands[:]
    runner.run(plans().commit(held))
    assert [type(each) for each in runner.commands] == [Delete, FirstOfEach]
    assert store.documents["later"]["when"] == after(30)


def test_message_just_rolled_back_is_not_brought_forward() -> None:
    """The holder read that it is deferred. Now it waits for its next try."""
    scene = Scene()
    store = scene.store

    def meddle() -> None:
        other = Meddler(store)
        waiters = Waiters("a")
        waiters.scan.rescan_at = None
        (held,) = [each for each in other.run(scene.receive(10, waiters)) if each.id == "g1"]
        other.run(plans().rollback([held], delay=20))

    Meddler(store, 2, meddle).run(plans().commit(scene.held))
    assert store.documents["g1"]["when"] == store.documents["g1"]["due"] == after(20)


# ---- scans


def test_message_behind_an_earlier_one_is_given_back() -> None:
    """Its group waits for a message that was rolled back, so it is deferred as long."""
    scene = Scene()
    runner = Meddler(scene.store)
    runner.run(plans().rollback(scene.held, delay=20))
    runner.run(plans().push(["late"], groups=["g"], ids=["late"]))
    found = runner.run(scene.receive(10))
    assert "late" not in {each.id for each in found}
    stored = scene.store.documents["late"]
    assert stored["when"] == after(20)
    assert stored["tries"] == 0
    assert "token" not in stored


def test_group_continues_behind_a_failure_if_it_skips() -> None:
    scene = Scene("skip")
    runner = Meddler(scene.store)
    runner.run(plans().rollback(scene.held, delay=20))
    found = runner.run(scene.receive(10))
    assert "g1" in {each.id for each in found}
    runner.now = after(21)
    runner.run(plans().push(["late"], groups=["g"], ids=["late"]))
    order = [id for id in drain(scene.store, now=after(90)) if id in ("g0", "g1", "g2", "late")]
    assert order == ["g1", "g2", "g0", "late"]


def test_rollback_beside_a_message_without_group_moves_back() -> None:
    """One rollback of both: they wait for the same time, and only one of them has a place."""
    scene = Scene("skip")
    runner = Meddler(scene.store)
    (free,) = [each for each in runner.run(scene.receive(10)) if each.group is None]
    runner.run(plans().rollback([free, *scene.held], delay=20))
    assert "seq" not in scene.store.documents[free.id]
    order = [id for id in drain(scene.store, now=after(90)) if id in ("g0", "g1", "g2")]
    assert order == ["g1", "g2", "g0"]


def test_crowded_scan_finds_other_groups_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is full of one group, and there are many such pages."""
    monkeypatch.setattr(scan, "LEAST_PAGE", 5)
    store = World(0).store
    runner = Meddler(store)
    runner.run(plans().push(list(range(200)), groups=["full"] * 200))
    runner.run(plans().push(["other"], groups=["x"], ids=["other"]))
    waiters = Waiters("a")
    found = runner.run(plans().receive(waiters, 2, timeout=0))
    assert {each.group for each in found} == {"full", "x"}
    assert len(runner.commands) < 30


def test_scan_with_enough_defers_nothing() -> None:
    """So a consumer of many groups writes nothing but its claims."""
    store = World(0).store
    runner = Meddler(store)
    names = [f"g{number % 20}" for number in range(100)]
    runner.run(plans().push(names, groups=names))
    waiters = Waiters("a")
    for _ in range(5):
        del runner.commands[:]
        held = runner.run(plans().receive(waiters, 20, timeout=0))
        assert len({each.group for each in held}) == 20
        runner.run(plans().commit(held))
        writes = [each for each in runner.commands if hasattr(each, "update")]
        assert len(writes) == 1
    assert not live(store)


def test_settle_releases_no_group_of_another_kind() -> None:
    """A message that was moved out of an ordered queue remembers its group."""
    scene = Scene()
    runner = Meddler(scene.store)
    runner.run(plans().move([(scene.held[0], 1)], to="other"))
    assert scene.store.documents["g0"]["last_group"] == stored_group("g")
    other = plans_of("other", Options(dead_letter="x"), owner="me")
    (held,) = runner.run(other.receive(Waiters("other"), 1, timeout=0))
    del runner.commands[:]
    runner.run(other.move([(held, 2)], to=plans()))
    assert not any(isinstance(each, FirstOfEach) for each in runner.commands)
    assert scene.store.documents["g0"]["group"] == stored_group("g")
    assert drain(scene.store)[-1] == "g0"


@pytest.mark.parametrize("last", range(8))
def test_group_continues_behind_a_handover(last: int) -> None:
    """The process dies before a command. An ended message does not hold the lock of its group."""
    steps = Steps()
    steps.run(plans().push([1, 2], groups=["g", "g"]))
    (held,) = steps.run(plans().receive(Waiters("a"), 10, timeout=0))
    outputs = [Output("new", plans("b").target, 3, None, "g")]
    with contextlib.suppress(Cut):
        steps.run(fan_out(plans().terms, held, outputs), dying(last, after=False))
    assert not any("lock" in each for each in steps.all() if each["q"].startswith("~handover"))
    steps.seconds = LEASE
    found = [*steps.run(plans().receive(Waiters("a"), 10, timeout=0))]
    assert len(found) == 1
    steps.run(recovering.recover_queue("a"))
    ended = found[0].payload == 2
    made = steps.run(plans("b").receive(Waiters("b"), 10, timeout=0))
    assert [(each.payload, each.group) for each in made] == ([(3, "g")] if ended else [])
    assert sum("lock" in each for each in steps.all() if each["q"] == "a") == 1


# ---- competing processes, in virtual time


class Ledger:
    """Checks a world: held messages, and the order in which a group's messages are finished."""

    def __init__(self, world: World, limit: int | None) -> None:
        self.world, self.limit = world, limit
        self.finished: dict[str, list[tuple[Any, Any]]] = {}
        world.store.on_change = self.changed

    def changed(self, before: Mapping[str, Any], then: Mapping[str, Any] | None) -> None:
        """Note finished messages, and check how many are held."""
        if self.limit is not None and then is not None and "token" in then:
            now = instant(self.world.time)
            rest = [each for each in self.world.store.documents.values() if each is not before]
            held = [each for each in [*rest, then] if "token" in each and each["when"] > now]
            assert len(held) <= self.limit
        if then is None and "lock" in before:
            done = self.finished.setdefault(before["lock"], [])
            place = groups.rank(before)
            assert not done or done[-1][0] < place, f"{before} is finished after {done[-1]}"
            done.append((place, before["_id"]))


def push(choose: random.Random, producer: int) -> Plan[list[Any]]:
    """Push messages of a few groups. Each group has one producer."""
    names = [f"{producer}-{choose.randrange(3)}" for _ in range(choose.choice((1, 1, 5)))]
    return plans().push(names, groups=names)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("mortal", [pytest.param(False, marks=pytest.mark.slow), True])
@seeds(1, 60)
def test_competing_processes_keep_the_order(seed: int, mortal: bool, limit: int | None) -> None:
    """All messages are finished once, and each group in its order."""
    world = World(seed, lost=0.2, late=0.1)
    ledger = Ledger(world, limit)
    shape: dict[str, Any] = {} if limit is None else {"limit": {"concurrency": limit}}
    pushed = Meddler(world.store).run(plans(**shape).push([0], groups=["g"]))
    compete(world, seed, plans(), push, pushed, mortal=mortal)
    world.run(15_000)
    if mortal:
        world.run(15_000 + (6 if limit is None else 20) * LEASE * 1000)
    done = [id for some in ledger.finished.values() for _, id in some]
    assert sorted(map(str, done)) == sorted(map(str, pushed))
