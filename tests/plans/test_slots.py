"""Limits on concurrency: no failure and no race holds more messages, and no slot is lost.

There is no server. ``test_faults`` disturbs each operation at each of its commands. The last tests
run real plans in virtual time, with processes that die; ``test_groups`` has the tests of ordered
queues.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest

from pyqueue import ConfigurationError, LeaseLost
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.indexes import make_indexes
from pyqueue.backends.invalid import bury_unclaimable
from pyqueue.backends.kind import lookup
from pyqueue.backends.limits.slots import slot_of
from pyqueue.backends.options import Options
from pyqueue.backends.outputs import Output
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.reshaping import reshape
from pyqueue.backends.settling import fan_out
from pyqueue.errors import InvalidMessage, TimeLimitReached
from pyqueue.messages import Backoff
from pyqueue.requests import FindAndModify, Plan, UpdateEach, WriteFailure
from pyqueue.runtime.waiters import Waiters
from tests.plans.competing import compete, seeds
from tests.plans.faults import Faults, Settler, check_ends
from tests.plans.meddler import Meddler
from tests.plans.runner import NOW, after
from tests.plans.steps import WRITES, Steps
from tests.plans.store import World, instant

LEASE = 60.0
LIMIT = 3
MESSAGES = 12


def plans(concurrency: int | None = LIMIT, kind: str = "standard", **options: Any) -> QueuePlans:
    """Return a queue with a limit; None: as a program that does not give the limit has it."""
    shape = {} if concurrency is None else {"limit": {"concurrency": concurrency}}
    given = {"lease": LEASE, "max_tries": None, "backoff": Backoff(jitter=0), **options}
    return plans_of("a", Options(dead_letter="dead", shape=shape, **given), kind=kind, owner="me")


def group_of(number: int, kind: str) -> str | None:
    """Return the group of a message of an ordered queue. Some have none."""
    return f"g{number % 5}" if kind == "ordered" and number % 5 < 4 else None


def held_in(documents: Any, now: Any) -> list[Any]:
    """Return the messages of the queue that are held under a live lease."""
    return [
        each for each in documents if each["q"] == "a" and "token" in each and each["when"] > now
    ]


class Consumer(Settler):
    """A consuming process, and the messages it has finished."""

    def __init__(self, kind: str = "standard") -> None:
        super().__init__()
        self.kind = kind
        self.plans = plans(kind=kind)
        self.waiting = Waiters("a")
        self.ended: set[int] = set()

    def receive(self, limit: int) -> Plan[list[Any]]:
        return self.plans.receive(self.waiting, limit, timeout=0)

    def work(self) -> Plan[None]:
        """Receive several times, and end each message in another way."""
        for first in ("commit", "fan out"):
            held = yield from self.receive(5)
            if first == "commit":
                yield from self.settle(self.plans.commit(held[:1]), held[:1], self.ended)
            else:
                for each in held[:1]:
                    outputs = [Output(f"new{each.payload}", other().target, 100, None)]
                    end = fan_out(self.plans.terms, each, outputs)
                    yield from self.settle(end, [each], self.ended)
            yield from self.settle(self.plans.extend(held[1:2]), held[1:2])
            yield from self.settle(self.plans.bury(held[1:2]), held[1:2], self.ended)
            later = 0 if first == "commit" else 9
            again = self.plans.rollback(held[2:], delay=later)
            yield from self.settle(again, held[2:])
            held = yield from self.receive(1)
            yield from self.settle(self.plans.release(held), held)
            held = yield from self.receive(2)
            move = self.plans.move([(each, each.payload) for each in held], to="b")
            yield from self.settle(move, held, self.ended)


def other() -> QueuePlans:
    return plans_of("b", Options(dead_letter="dead"), owner="me")


@cache
def stored(kind: str) -> list[Any]:
    """Return the documents of a queue with a limit."""
    steps = Steps()
    names = [group_of(number, kind) for number in range(MESSAGES)]
    groups = names if kind == "ordered" else None
    steps.run(plans(kind=kind).push(list(range(MESSAGES)), groups=groups))
    return steps.all()


class LockingSteps(Steps):
    """A store that keeps the locks of groups unique, too."""

    def __init__(self, before: list[Any] | None = None) -> None:
        super().__init__(before)
        self.driver.run(make_indexes("pyqueue", lookup("ordered").needs({})))


def drain(steps: Steps, kind: str) -> list[int]:
    """Consume the rest, as a process that begins after all leases have ended."""
    steps.seconds += 1000
    last = Consumer(kind)
    delivered: list[int] = []
    while held := steps.run(last.receive(100)):
        assert len(held) <= LIMIT
        names = [each.group for each in held if each.group is not None]
        assert len(names) == len(set(names))
        delivered += [each.payload for each in held]
        steps.run(last.plans.commit(held))
    live = {"q": "a", "record": {"$exists": False}}
    assert list(steps.collection.find(live)) == []
    return delivered


def check(steps: Steps) -> None:
    """Check the invariants."""
    found = steps.collection.find({"q": "a", "token": {"$exists": True}})
    documents = [{**each, "when": each["when"].replace(tzinfo=NOW.tzinfo)} for each in found]
    assert all("slot" in each for each in documents)
    assert len(held_in(documents, steps.now)) <= LIMIT
    locks = [each["lock"] for each in documents if "lock" in each]
    assert len(locks) == len(set(locks))
    assert not any("group" in each for each in documents)
    free = {"q": "a", "token": {"$exists": False}, "lock": {"$exists": True}}
    assert not steps.collection.count_documents(free)


def audit(steps: Steps, *consumers: Consumer) -> None:
    """Check that each message is delivered, or was finished once, and each group in order."""
    check(steps)
    kind = consumers[0].kind
    left = drain(steps, kind)
    ended = sorted((each.begun[number], number) for each in consumers for number in each.ended)
    done = [number for _, number in ended]
    check_ends(left, done, consumers, MESSAGES)
    for name in {group_of(number, kind) for number in range(MESSAGES)} - {None}:
        order = [number for number in [*done, *left] if group_of(number, kind) == name]
        assert order == sorted(order), f"{name} is not in order"


FAULTS = {
    kind: Faults(
        partial(stored, kind), partial(Consumer, kind), audit, 500, check, LockingSteps, stride=83
    )
    for kind in ("standard", "ordered")
}


# ---- one scan


class Scene:
    """A store with a queue that has messages, and its processes.

    In an ordered queue, each message has a separate group, unless ``groups`` names them.
    """

    def __init__(
        self,
        messages: int = 6,
        concurrency: int = LIMIT,
        *,
        groups: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.store = World(0).store
        self.runner = Meddler(self.store)
        self.plans = plans(concurrency, **options)
        self.waiting = Waiters("a")
        ids = [f"m{number}" for number in range(messages)]
        if options.get("kind") == "ordered":
            groups = list(groups or ids)
        self.runner.run(self.plans.push(list(range(messages)), ids=ids, keys=ids, groups=groups))

    def receive(self, limit: int, waiting: Waiters | None = None) -> list[Any]:
        """Receive all messages that may start now."""
        self.runner.answers = [self.runner.carried] * 1000
        del self.runner.commands[:]
        return self.runner.run(self.plans.receive(waiting or self.waiting, limit, timeout=0))

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.runner.now += timedelta(seconds=seconds)

    def reshape(self, concurrency: int) -> None:
        """Change the limit."""
        record = self.store.documents["~queue:a"]
        self.plans = plans(None, self.plans.kind.name)
        self.store._put({**record, "shape": {"limit": {"concurrency": concurrency}}})

    def waiting_for(self) -> dict[str, Any]:
        """Return the ``when`` of messages that are not held."""
        found = self.store.documents.values()
        return {
            each["_id"]: each["when"] for each in found if "due" in each and "token" not in each
        }


each_kind = pytest.mark.parametrize("kind", ["standard", "ordered"])


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize("kind", ["standard", "priority", "ordered"])
def test_messages_up_to_the_limit_are_held(kind: str, limit: int) -> None:
    scene = Scene(kind=kind)
    held: list[Any] = []
    while more := scene.receive(limit):
        held += more
    assert [each.payload for each in held] == [0, 1, 2]
    scene.runner.run(scene.plans.commit(held[:2]))
    held = [*held[2:], *scene.receive(10)]
    assert [each.payload for each in held] == [2, 3, 4]
    assert scene.waiting.scan.limit.blocked_until is not None
    scene.runner.run(scene.plans.commit(held))
    assert [each.payload for each in scene.receive(10)] == [5]
    assert scene.waiting.scan.limit.blocked_until is None


def test_blocked_scan_keeps_the_levels() -> None:
    """Nothing that it saw and left is forgotten until the next rescan."""
    scene = Scene(0, 1, kind="priority")
    for priority in (3, 9, 5, 9):
        scene.runner.run(scene.plans.push([priority], priorities=[priority]))
    found = []
    for _ in range(4):
        (held,) = scene.receive(10)
        assert scene.receive(10) == []
        scene.waiting.scan.rescan_at = after(10_000)
        found.append(held.payload)
        scene.passes(0.8)
        scene.runner.run(scene.plans.commit([held]))
    assert found == [9, 9, 5, 3]


@pytest.mark.usefixtures("same_slots")
def test_scan_that_chose_a_taken_slot_scans_again() -> None:
    """Also by level alone, after a rescan. Only a scan without a message in reach is the last."""
    scene = Scene(6, 6, kind="priority")
    record = scene.store.documents["~queue:a"]
    scene.store._put({**record, "shape": {**record["shape"], "strict": True}})
    assert len(scene.receive(1)) == 1
    scene.passes(20)
    assert len(scene.receive(1)) == 1


@each_kind
def test_blocked_consumer_waits_for_the_end_of_a_lease(kind: str) -> None:
    """It does not scan again for ready messages, and reads the limit again in time."""
    scene = Scene(kind=kind)
    (first, *_) = scene.receive(3)
    scene.runner.run(scene.plans.extend([first], lease=2))
    waiting = Waiters("a")

    def wait(request: Any) -> bool:
        waiting.scan.rescan_at = after(10_000)
        return scene.runner.pass_time(request)

    scene.runner.on_wait = wait
    scene.runner.listening = True
    (held,) = scene.runner.run(scene.plans.receive(waiting, 1, timeout=100))
    assert held.payload == 0 or held.payload == 3
    assert [request.until for request in scene.runner.waits][-1] == after(2)
    assert len(scene.runner.waits) <= 3
    waiting.scan.limit.blocked_until = after(1000)
    del scene.runner.waits[:]
    scene.runner.run(scene.plans.receive(waiting, 1, timeout=6))
    assert all(each.until <= scene.runner.now + timedelta(seconds=5) for each in scene.runner.waits)


@each_kind
def test_slot_of_a_lapsed_lease_is_taken_for_good(kind: str) -> None:
    """Its former holder can neither extend nor settle."""
    scene = Scene(kind=kind)
    former = scene.receive(3)
    scene.passes(LEASE + 1)
    scene.runner.run(scene.plans.extend(former[:1]))  # no consumer needed the slot
    again = scene.receive(10, Waiters("a"))
    assert len(again) == 2
    for plan in (scene.plans.extend(former[1:]), scene.plans.commit(former[1:])):
        with pytest.raises(LeaseLost) as caught:
            scene.runner.run(plan)
        assert len(caught.value.lost) == 2
    assert len(held_in(scene.store.documents.values(), scene.runner.now)) == LIMIT


@each_kind
def test_lease_that_is_extended_in_time_keeps_its_slot(kind: str) -> None:
    """A scan saw that it had ended. Then its holder extended it."""
    for place in range(9):
        scene = Scene(6, 1, kind=kind)
        (former,) = scene.receive(1)
        scene.passes(LEASE + 1)
        extended: list[Any] = []

        def extend(scene: Scene = scene, former: Any = former, to: list[Any] = extended) -> None:
            with contextlib.suppress(LeaseLost):
                Meddler(scene.store, now=scene.runner.now).run(scene.plans.extend([former]))
                to.append(former)

        runner = Meddler(scene.store, place, extend, now=scene.runner.now)
        taken = runner.run(scene.plans.receive(Waiters("a"), 1, timeout=0))
        assert len(taken) + len(extended) <= 1 + (place > 5)
        assert len(held_in(scene.store.documents.values(), runner.now)) == 1


@each_kind
def test_lowered_limit_drains_and_a_raised_one_is_used(kind: str) -> None:
    scene = Scene(12, 5, kind=kind)
    held = scene.receive(5)
    scene.reshape(2)
    scene.waiting.scan.flag_read = None
    more: list[Any] = []
    for each in held:
        more += scene.receive(10)
        assert len(more) <= 2
        scene.runner.run(scene.plans.commit([each]))
    more += scene.receive(10)
    assert len(more) == 2
    scene.reshape(4)
    scene.waiting.scan.flag_read = None
    assert len(scene.receive(10)) == 2


def following(kind: str) -> Consumer:
    """Return a process that does not give the limit."""
    consumer = Consumer(kind)
    consumer.plans = plans(None, kind)
    return consumer


def lowered(kind: str, per: str | None) -> tuple[Steps, Consumer, list[Any]]:
    """Return a queue that holds 6 messages after its limit was lowered from 6 to 3."""
    steps, old = LockingSteps(), following(kind)
    limits = [{"concurrency": number, "per": per} for number in (6, 3)]
    first, then = ({k: v for k, v in each.items() if v is not None} for each in limits)
    queue = plans_of("a", Options(dead_letter="dead", shape={"limit": first}), kind=kind)
    groups = [str(number) for number in range(30)] if kind == "ordered" else None
    steps.run(queue.push(list(range(30)), groups=groups))
    held = steps.run(old.receive(6))
    steps.run(reshape("a", {"limit": then}))
    return steps, old, held


@seeds(1, 40)
@pytest.mark.parametrize(
    ("kind", "per"), [("standard", None), ("standard", "headers.t"), ("ordered", None)]
)
def test_lowered_limit_starts_no_more_than_it_allows(kind: str, per: str | None, seed: int) -> None:
    """Whichever messages end first, and however the commands of several processes follow."""
    choose = random.Random(seed)
    steps, old, held = lowered(kind, per)
    choose.shuffle(held)
    ends = [old.plans.commit([each]) for each in held]
    news = [following(kind) for _ in range(3)]
    running: list[Any] = [steps.steps(each.receive(choose.randint(1, 4))) for each in news]
    running += [steps.steps(end) for end in ends[:1]]
    left, most = ends[1:], 6
    while left or running:
        one = choose.choice(running) if running and (not left or choose.random() < 0.97) else None
        if one is None:
            running.append(steps.steps(left.pop()))
            continue
        try:
            next(one)
        except StopIteration:
            running.remove(one)
            if left:
                running.append(steps.steps(choose.choice(news).receive(choose.randint(1, 4))))
        number = steps.collection.count_documents({"q": "a", "token": {"$exists": True}})
        assert number <= max(most, 3)
        most = number
    assert most or steps.run(news[0].receive(1)), "a free slot can be taken"


def test_former_limit_is_remembered_although_clocks_differ() -> None:
    """The clock of the process that lowered the limit was behind: the primary's had been set."""
    steps, old = LockingSteps(), following("standard")
    queue = plans_of("a", Options(dead_letter="dead", shape={"limit": {"concurrency": 6}}))
    steps.run(queue.push(list(range(30))))
    steps.run(old.plans.commit(steps.run(old.receive(1))))
    steps.seconds = -3.7
    steps.run(reshape("a", {"limit": {"concurrency": 3}}))
    steps.seconds = 4.9
    held = steps.run(old.receive(6))
    assert len(held) == 6, "it follows the change within 5 s"
    low = tuple(f"#{number}" for number in range(3))
    steps.seconds = 6
    steps.run(following("standard").receive(9))
    steps.run(old.plans.commit([each for each in held if each.slot.endswith(low)]))
    assert steps.run(following("standard").receive(9)) == []


def test_former_limit_is_forgotten_when_nothing_is_left_of_it() -> None:
    """Until then, a lowered limit that is lowered again counts from the first one."""
    steps, old, held = lowered("standard", None)
    steps.run(old.plans.extend(held, lease=600))
    steps.run(reshape("a", {"limit": {"concurrency": 2}}))
    record = steps.collection.find_one({"_id": "~queue:a"})
    assert record["drain"]["concurrency"] == 6
    for seconds, ends, starts in ((61, held[:5], 1), (67, held[:0], 0), (73, held[5:], 1)):
        steps.seconds = seconds
        steps.run(old.plans.commit(ends))
        assert len(steps.run(following("standard").receive(9))) == starts
        there = "drain" in steps.collection.find_one({"_id": "~queue:a"})
        assert there is (seconds < 73)


ENDS: dict[str, Callable[[QueuePlans, Any], Plan[Any]]] = {
    "commit": lambda queue, held: queue.commit(held),
    "commit one": lambda queue, held: queue.commit(held[:1]),
    "rollback later": lambda queue, held: queue.rollback(held, delay=100),
    "rollback": lambda queue, held: queue.rollback(held, delay=0),
    "release": lambda queue, held: queue.release(held),
    "bury": lambda queue, held: queue.bury(held),
    "move": lambda queue, held: queue.move([(each, 1) for each in held], to="b"),
}


@pytest.mark.parametrize("history", [None, 60])
@pytest.mark.parametrize("end", ENDS)
@each_kind
def test_end_of_a_claim_frees_the_slot_and_signals(
    kind: str, end: str, history: float | None
) -> None:
    scene = Scene(history=history, kind=kind)
    held = scene.receive(2)
    del scene.runner.signals[:]
    scene.runner.run(ENDS[end](scene.plans, held))
    assert ("a", NOW) in scene.runner.signals
    left = [each for each in scene.store.documents.values() if "slot" in each]
    assert len(left) == (1 if end == "commit one" else 0)
    assert all("token" in each for each in left)
    assert all(("lock" in each) is (kind == "ordered") for each in left)


@each_kind
def test_handover_frees_the_slot_and_signals(kind: str) -> None:
    steps, queue = Steps(), plans(kind=kind)
    steps.run(queue.push([1]))
    (held,) = steps.run(queue.receive(Waiters("a"), 1, timeout=0))
    del steps.signals[:]
    steps.run(fan_out(queue.terms, held, [Output("new", other().target, 1, None)]))
    assert ("a", NOW) in steps.signals
    assert not [each for each in steps.all() if "slot" in each]


def test_settle_without_a_limit_signals_nothing() -> None:
    store = World(0).store
    runner = Meddler(store)
    free = plans(None)
    runner.run(free.push([1, 2]))
    held = runner.run(free.receive(Waiters("a"), 2, timeout=0))
    assert not any("slot" in each for each in store.documents.values())
    del runner.signals[:]
    runner.run(free.commit(held))
    assert not runner.signals


def test_pops_and_named_claims_are_refused() -> None:
    """Also by a program that does not know of the limit."""
    scene = Scene()
    with pytest.raises(ConfigurationError, match=r"^pop: .*reserve messages"):
        scene.runner.run(plans(None).receive(Waiters("a"), 1, timeout=0, pop=True))
    claims = NamedClaims(plans(None), "group")
    with pytest.raises(ConfigurationError, match=r"^claim: .*reserve messages"):
        scene.runner.run(claims.begin(5, 60))


@each_kind
def test_burial_of_a_held_message_frees_the_slot_and_signals(kind: str) -> None:
    """It was claimed, and then it could not be read."""
    scene = Scene(kind=kind)
    (held,) = scene.receive(1)
    del scene.runner.signals[:]
    graveyard = ClaimTerms.of(scene.plans.terms, LEASE).graveyard
    match, fault = {"_id": held.id, "token": held.token}, InvalidMessage("unreadable")
    scene.runner.run(bury_unclaimable(graveyard, match, fault, NOW))
    assert scene.store.documents[held.id]["q"] == "dead"
    assert ("a", NOW) in scene.runner.signals


@each_kind
def test_message_that_cannot_be_claimed_is_buried(kind: str) -> None:
    """The server refuses to count its tries. The rest is claimed by the same command."""
    scene = Scene(kind=kind)
    scene.store.documents["m1"]["tries"] = "many"
    update_each = scene.store._update_each

    def refusing(request: UpdateEach) -> Any:
        pairs = [pair for pair in request.pairs if pair[0]["_id"] != "m1"]
        matched, failures = update_each(UpdateEach(pairs, w1=True))
        place = [pair[0]["_id"] for pair in request.pairs].index("m1")
        return matched, [*failures, WriteFailure(place, None, InvalidMessage("not a number"))]

    scene.store._update_each = refusing  # type: ignore[method-assign]
    (*held,) = scene.runner.run(scene.plans.receive(scene.waiting, 2, timeout=0))
    assert len(held) == 2
    assert 1 not in [each.payload for each in held]
    assert scene.store.documents["m1"]["q"] == "dead"


@each_kind
def test_message_that_a_transaction_holds_is_passed_over(kind: str) -> None:
    """The claim of several waits for it in vain. A claim of one gets past it."""
    scene = Scene(kind=kind)
    carried = scene.runner.carried

    def locked(request: Any) -> Any:
        found = [request.filter] if hasattr(request, "filter") else []
        found += [match for match, _ in getattr(request, "pairs", ())]
        writes = hasattr(request, "update") or hasattr(request, "pairs")
        if writes and any("m0" in str(each.get("_id")) for each in found):
            raise TimeLimitReached("it took too long")
        return carried(request)

    scene.runner.carried = locked  # type: ignore[method-assign]
    held: list[Any] = []
    while more := scene.receive(3):
        held += more
    assert len(held) == LIMIT
    assert 0 not in [each.payload for each in held]


# ---- beside the locks of groups


def test_full_limit_defers_no_message_of_a_free_group() -> None:
    """A blocked scan writes nothing, and the consumer does not scan again and again."""
    scene = Scene(9, 2, groups="abcdefgab", kind="ordered")
    assert len(scene.receive(10)) == 2
    before = scene.waiting_for()
    assert set(before.values()) == {NOW}
    waiting = Waiters("a")
    scene.runner.on_wait = scene.runner.pass_time
    scene.runner.listening = True
    scene.runner.answers = [scene.runner.carried] * 1000
    del scene.runner.commands[:]
    assert scene.runner.run(scene.plans.receive(waiting, 10, timeout=30)) == []
    assert scene.waiting_for() == before
    assert not any(isinstance(each, WRITES) for each in scene.runner.commands)
    assert len(scene.runner.waits) <= 10
    assert len(scene.runner.commands) <= 80


def test_scan_uses_free_slots_for_free_groups() -> None:
    """Messages behind a held message are deferred if they are in the way, as without a limit."""
    scene = Scene(60, 5, groups=["a"] * 58 + ["b", "c"], kind="ordered")
    held = scene.receive(3)
    held += scene.receive(3)
    assert sorted(each.group for each in held) == ["a", "b", "c"]
    assert scene.waiting_for()["m1"] == after(LEASE)


def test_slot_of_a_lapsed_lease_gives_its_group_back() -> None:
    """Another message may take the slot first. The order of the group stays."""
    scene = Scene(4, 1, groups="aabb", kind="ordered")
    (former,) = scene.receive(1)
    assert former.payload == 0
    scene.passes(LEASE + 1)
    order = []
    while held := scene.receive(10, Waiters("a")):
        assert len(held) == 1
        assert not any("lock" in scene.store.documents[each] for each in scene.waiting_for())
        order += [each.payload for each in held]
        scene.runner.run(scene.plans.commit(held))
    assert sorted(order) == [0, 1, 2, 3]
    assert order.index(0) < order.index(1)
    assert order.index(2) < order.index(3)
    with pytest.raises(LeaseLost):
        scene.runner.run(scene.plans.commit([former]))


def test_message_behind_an_earlier_one_gives_its_slot_back() -> None:
    """Its group waits for one that was rolled back. Consumers that wait for the slot scan again."""
    scene = Scene(3, 1, groups="aab", kind="ordered")
    (first,) = scene.receive(1)
    scene.runner.run(scene.plans.rollback([first], delay=20))
    scene.store.documents["m1"]["when"] = NOW  # as if nothing had deferred it
    del scene.runner.signals[:]
    (held,) = scene.receive(10)
    assert held.payload == 2
    assert ("a", NOW) in scene.runner.signals
    assert "slot" not in scene.store.documents["m1"]
    assert scene.store.documents["m1"]["when"] == after(20)
    assert scene.receive(10) == []


def test_scan_that_met_a_lock_expects_locks() -> None:
    """It expected none, and claimed with a slot for each message. It tries no lock again."""
    scene = Scene(4, 4, groups="aabb", kind="ordered")
    scene.runner.run(scene.plans.release(scene.receive(1)))
    scan = scene.waiting.scan
    assert not scan.groups.meets_locks
    other = Meddler(scene.store)
    assert len(other.run(scene.plans.receive(Waiters("a"), 1, timeout=0))) == 1
    scene.store.documents["m0"]["slot"] = slot_of("", 99)  # the scan meets the lock only
    assert [each.payload for each in scene.receive(10)] == [2]
    assert not any(isinstance(each, FindAndModify) for each in scene.runner.commands)


def test_slot_or_lock_that_is_taken_costs_one_message_only() -> None:
    """Another process takes both between the choice and the claim."""
    for place in range(12):
        scene = Scene(8, 4, groups="aabbccdd", kind="ordered")
        scene.runner.run(scene.plans.release(scene.receive(1)))  # it expects free slots now
        taken: list[Any] = []

        def meddle(scene: Scene = scene, taken: list[Any] = taken) -> None:
            taken += Meddler(scene.store).run(scene.plans.receive(Waiters("a"), 2, timeout=0))

        runner = Meddler(scene.store, place, meddle)
        found = runner.run(scene.plans.receive(scene.waiting, 10, timeout=0))
        groups = [each.group for each in (*found, *taken)]
        assert sorted(groups) == ["a", "b", "c", "d"], place


# ---- competing processes, in virtual time


def push(choose: random.Random, _: int) -> Plan[list[Any]]:
    return plans().push([1] * choose.choice((1, 1, 5)))


@pytest.mark.parametrize("mortal", [False, True])
@seeds(1, 60)
def test_competing_processes_hold_no_more_messages(seed: int, mortal: bool) -> None:
    """All messages are finished once. While none dies, all slots are used."""
    world = World(seed, lost=0.2, late=0.1)
    store, done, most = world.store, list[Any](), [0]

    def changed(before: Mapping[str, Any], then: Mapping[str, Any] | None) -> None:
        if then is None:
            done.append(before["_id"])
        now = instant(world.time)
        others = [each for each in store.documents.values() if each["_id"] != before["_id"]]
        held = held_in([*others, *([] if then is None else [then])], now)
        most[0] = max(most[0], len(held))

    store.on_change = changed
    pushed: list[Any] = [*Meddler(store).run(plans().push([1]))]
    compete(world, seed, plans(None), push, pushed, mortal=mortal)
    world.run(20_000)
    if mortal:
        world.run(20_000 + 6 * LEASE * 1000)
    assert sorted(map(str, done)) == sorted(map(str, pushed))
    assert most[0] == LIMIT
