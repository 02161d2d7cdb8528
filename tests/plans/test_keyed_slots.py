"""Limits on concurrency ``per`` header: each key has its slots, and none holds up another one.

There is no server. ``test_faults`` disturbs each operation at each of its commands. The last tests
run real plans in virtual time, with processes that die.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from pyqueue.backends import reshaping
from pyqueue.backends.limits import indexes as limit_indexes
from pyqueue.backends.limits import scan, slots
from pyqueue.backends.limits import waiting as limit_waiting
from pyqueue.backends.options import Options
from pyqueue.backends.ordered.groups import GROUPED
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.turns import DEFERRED_FOR, FirstOfEach
from pyqueue.limits import FollowedLimit, Limit, key_of
from pyqueue.messages import Backoff
from pyqueue.requests import Find, Plan, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.competing import compete, seeds
from tests.plans.faults import Faults, Settler, check_ends, each_command
from tests.plans.meddler import Meddler
from tests.plans.runner import NOW, after
from tests.plans.steps import Steps
from tests.plans.store import World, instant

LEASE = 60.0
LIMIT = 2
PER = Limit(concurrency=LIMIT, per="headers.t")
MESSAGES = 15


def plans(limit: Limit | None = PER, kind: str = "standard") -> QueuePlans:
    """Return a queue with a limit; None: as a program that does not give the limit has it."""
    shape = {} if limit is None else {"limit": limit.stored()}
    given: dict[str, Any] = {"lease": LEASE, "max_tries": None, "backoff": Backoff(jitter=0)}
    return plans_of("a", Options(dead_letter="dead", shape=shape, **given), kind=kind, owner="me")


def headers_of(number: int) -> dict[str, Any]:
    """Return the headers of a message: most have one key, some have another one or none."""
    return {} if number % 5 == 4 else {"t": "y" if number % 5 == 3 else "x"}


def held_in(documents: Any, now: Any) -> Counter[str]:
    """Return how many messages of each key are held under a live lease."""
    return Counter(
        key_of(PER, each)
        for each in documents
        if each["q"] == "a" and "token" in each and each["when"].replace(tzinfo=now.tzinfo) > now
    )


class Consumer(Settler):
    """A consuming process, and the messages it has finished."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = plans()
        self.waiting = Waiters("a")
        self.ended: set[int] = set()

    def receive(self, limit: int) -> Plan[list[Any]]:
        return self.plans.receive(self.waiting, limit, timeout=0)

    def work(self) -> Plan[None]:
        """Receive several times, and end each message in another way."""
        for _ in range(2):
            held = yield from self.receive(8)
            yield from self.settle(self.plans.commit(held[:2]), held[:2], self.ended)
            yield from self.settle(self.plans.bury(held[2:3]), held[2:3], self.ended)
            yield from self.settle(self.plans.rollback(held[3:], delay=0), held[3:])
            held = yield from self.receive(1)
            yield from self.settle(self.plans.release(held), held)
            held = yield from self.receive(8)
            move = self.plans.move([(each, each.payload) for each in held[:2]], to="b")
            yield from self.settle(move, held[:2], self.ended)
            yield from self.settle(self.plans.rollback(held[2:], delay=9), held[2:])


@cache
def stored() -> list[Any]:
    """Return the documents of a queue with a limit."""
    steps = Steps()
    for number in range(MESSAGES):
        steps.run(plans().push([number], headers=headers_of(number)))
    return steps.all()


def drain(steps: Steps) -> list[int]:
    """Consume the rest. Nothing waits much longer than a lease."""
    delivered: list[int] = []
    last = Consumer()
    for _ in range(3):
        steps.seconds += LEASE + 1
        last.waiting.scan.forget()
        while held := steps.run(last.receive(100)):
            assert max(Counter(each.headers.get("t") for each in held).values()) <= LIMIT
            delivered += [each.payload for each in held]
            steps.run(last.plans.commit(held))
            last.waiting.scan.forget()
    live = {"q": "a", "record": {"$exists": False}}
    assert list(steps.collection.find(live)) == []
    return delivered


def check(steps: Steps) -> None:
    """Check the invariants."""
    found = list(steps.collection.find({"q": "a", "token": {"$exists": True}}))
    assert all("slot" in each for each in found)
    assert max(held_in(found, steps.now).values(), default=0) <= LIMIT


def audit(steps: Steps, *consumers: Consumer) -> None:
    """Check that each message is delivered, or was finished once."""
    check(steps)
    ended = [number for each in consumers for number in each.ended]
    check_ends(drain(steps), ended, consumers, MESSAGES)


FAULTS = Faults(stored, Consumer, audit, 400, check, stride=149)


@each_command(FAULTS.stride)
def test_walk_beside_a_consumer_changes_nothing(every: int) -> None:
    """Another process corrects deferred messages before each command."""
    FAULTS.sleeps(every, lambda steps, quick: steps.run(walk()))


def walk() -> Plan[None]:
    yield from limit_waiting.restore("a", FollowedLimit(PER), None)


# ---- one scan


class Scene:
    """A store with a queue that has messages, and its processes."""

    def __init__(self, keys: str, limit: Limit = PER) -> None:
        self.store = World(0).store
        self.runner = Meddler(self.store)
        self.plans = plans(limit)
        self.waiting = Waiters("a")
        for number, key in enumerate(keys):
            push = self.plans.push([number], ids=[f"{key}{number}"], headers={"t": key})
            self.runner.run(push)
        self.plans = plans(None)

    def receive(self, limit: int, waiting: Waiters | None = None) -> list[Any]:
        """Receive all messages that may start now. Return them."""
        self.runner.answers = [self.runner.carried] * 1000
        del self.runner.commands[:]
        return self.runner.run(self.plans.receive(waiting or self.waiting, limit, timeout=0))

    def whens(self) -> dict[str, Any]:
        """Return the ``when`` of messages that wait for a slot."""
        documents = self.store.documents.values()
        return {each["_id"]: each["when"] for each in documents if "limited" in each}


def test_key_with_many_messages_holds_up_no_other() -> None:
    scene = Scene("xxxxxxyz")
    held = scene.receive(5)
    assert sorted(each.id for each in held) == ["x0", "x1", "y6", "z7"]
    whens = scene.whens()
    assert whens["x2"] == after(LEASE)
    assert whens["x3"] == NOW + DEFERRED_FOR
    assert scene.receive(5) == []


def test_key_that_fills_a_page_holds_up_no_other() -> None:
    """A scan reads past it, and defers no more than one page of it."""
    scene = Scene("x" * 400 + "y")
    held = scene.receive(5)
    assert sorted(each.id for each in held) == ["x0", "x1", "y400"]
    assert len(scene.whens()) < 50


def test_scans_past_a_key_pause_if_there_is_nothing_else() -> None:
    """The server reads all messages of the key for such a scan."""
    scene = Scene("x" * 400)

    def scans_past() -> int:
        scene.receive(5)
        finds = [each for each in scene.runner.commands if isinstance(each, Find)]
        return sum("$nin" in each.filter.get("headers.t", {}) for each in finds)

    assert scans_past() == 1
    scene.waiting.scan.limit.behind_at = after(0.5)
    for document in scene.store.documents.values():
        if document.get("limited"):
            document["when"] = NOW  # a page of them again
    assert scans_past() == 0
    scene.runner.now = after(0.6)
    for document in scene.store.documents.values():
        if document.get("limited"):
            document["when"] = NOW
    assert scans_past() > 0


def test_scan_with_enough_defers_nothing() -> None:
    """So a consumer of many keys writes nothing but its claims."""
    scene = Scene("abcdefgh" * 4)
    for _ in range(8):
        held = scene.receive(4)
        assert len(held) == 4
        writes = [each for each in scene.runner.commands if hasattr(each, "update")]
        bulks = [each for each in scene.runner.commands if isinstance(each, UpdateEach)]
        assert len(writes) + len(bulks) == 1
        scene.runner.run(scene.plans.commit(held))


def test_end_of_a_claim_releases_the_next_of_its_key() -> None:
    scene = Scene("xxxxxxyy")
    held = scene.receive(10)
    del scene.runner.signals[:]
    scene.runner.run(scene.plans.commit(held[:1]))
    assert ("a", NOW) in scene.runner.signals
    assert scene.whens()["x2"] == NOW
    assert [each.id for each in scene.receive(10)] == ["x2"]
    assert scene.whens()["x3"] == after(LEASE)


def test_several_free_slots_are_used_by_one_scan() -> None:
    """The ends of two claims bring one message forward. The scan that claims it brings more."""
    scene = Scene("xxxxxx")
    held = scene.receive(10)
    scene.runner.run(scene.plans.commit(held))
    assert [each.id for each in scene.receive(10)] == ["x2", "x3"]


def test_rescan_brings_forward_messages_of_dead_processes() -> None:
    """The first that waits is gone, and nothing of its key is held any more."""
    scene = Scene("xxxxx")
    held = scene.receive(10)
    del scene.store.documents["x2"]
    for each in held:
        del scene.store.documents[each.id]
    assert scene.whens() == {"x3": NOW + DEFERRED_FOR, "x4": NOW + DEFERRED_FOR}
    assert [each.id for each in scene.receive(10, Waiters("a"))] == ["x3", "x4"]


def test_removed_message_brings_the_next_of_its_key_forward() -> None:
    scene = Scene("xxxxx")
    scene.receive(10)
    assert scene.runner.run(scene.plans.remove("x2"))
    assert scene.whens() == {"x3": NOW, "x4": NOW + DEFERRED_FOR}


@pytest.mark.parametrize(
    "limit", [False, {"concurrency": 9}, {"concurrency": 9, "per": "headers.u"}]
)
def test_changed_limit_lifts_every_deferral(limit: Any) -> None:
    """Also messages deferred by a process that did not know of the change yet."""
    scene = Scene("xxxxxx")
    scene.receive(10)
    deferred = {id: dict(scene.store.documents[id]) for id in scene.whens()}
    scene.runner.run(reshaping.reshape("a", {"limit": limit}))
    assert not scene.whens()
    scene.store.documents |= deferred
    scene.waiting.scan.flag_read = None
    assert len(scene.receive(10)) == 4


def test_raised_limit_is_used_after_a_rescan() -> None:
    scene = Scene("xxxxxx")
    scene.receive(10)
    scene.runner.run(reshaping.reshape("a", {"limit": {"concurrency": 4, "per": "headers.t"}}))
    scene.waiting.scan.forget()
    assert len(scene.receive(10)) == 2


def test_message_that_is_removed_waits_for_nothing() -> None:
    """The history has no message that seems to be the first one of its key."""
    scene = Scene("xxxx")
    scene.receive(10)
    kept = plans_of("a", Options(dead_letter="dead", history=60), owner="me")
    scene.runner.run(kept.remove("x2"))
    assert set(scene.whens()) == {"x3"}


def test_values_of_headers_are_told_apart() -> None:
    values = ["", "1", 1, 1.0, True, "True", "-", -1, None]
    keys = {key_of(PER, {"headers": {"t": each}}) for each in values}
    assert len(keys) == len(values)
    assert key_of(PER, {}) == key_of(PER, {"headers": {"t": None}}) == key_of(PER, {"headers": 1})
    for key in keys:
        assert slots.key_of_slot(slots.slot_of(key, 7)) == key


def test_crowded_scan_reads_a_large_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "LEAST_PAGE", 5)
    scene = Scene("x" * 60 + "y")
    found = scene.receive(3)
    found += scene.receive(3)
    assert {each.headers["t"] for each in found} == {"x", "y"}
    assert len(scene.whens()) == 58


# ---- competing processes, in virtual time


def push(choose: random.Random, _: int) -> Plan[list[Any]]:
    """Push messages of one of a few keys."""
    several = [1] * choose.choice((1, 1, 5))
    return plans().push(several, headers={"t": choose.choice("xxyz")})


@pytest.mark.parametrize("mortal", [pytest.param(False, marks=pytest.mark.slow), True])
@seeds(1, 60)
def test_competing_processes_hold_no_more_of_a_key(seed: int, mortal: bool) -> None:
    """All messages are finished once."""
    world = World(seed, lost=0.2, late=0.1)
    store, done, most = world.store, list[Any](), [0]

    def changed(before: Mapping[str, Any], then: Mapping[str, Any] | None) -> None:
        if then is None:
            done.append(before["_id"])
        rest = [each for each in store.documents.values() if each["_id"] != before["_id"]]
        held = held_in([*rest, *([] if then is None else [then])], instant(world.time))
        most[0] = max(most[0], *held.values(), 0)

    store.on_change = changed
    pushed: list[Any] = [*Meddler(store).run(plans().push([1]))]
    compete(world, seed, plans(None), push, pushed, mortal=mortal)
    world.run(20_000)
    if mortal:
        world.run(20_000 + 6 * LEASE * 1000)
    assert sorted(map(str, done)) == sorted(map(str, pushed))
    assert most[0] == LIMIT


def test_reads_of_deferred_messages_name_their_index() -> None:
    """So that its absence is noticed, and the first scan makes it."""
    assert FirstOfEach("a", limit_indexes.LIMITED).hint in limit_indexes.LIMIT_INDEXES
    assert FirstOfEach("a", GROUPED).hint not in limit_indexes.LIMIT_INDEXES


def test_claim_without_the_limit_is_not_taken_back() -> None:
    """A process that has not read a new limit claims a message that another process deferred."""
    scene = Scene("xxxx")
    held = scene.receive(10)
    scene.runner.run(scene.plans.commit(held[:1]))
    other = Waiters("a")
    other.scan.limit.known, other.scan.flag_read = True, NOW
    assert [each.id for each in scene.receive(1, other)] == ["x2"]
    scene.waiting.scan.forget()
    assert "x2" not in [each.id for each in scene.receive(10)]


def test_slots_of_many_keys_are_read_in_parts() -> None:
    """A command may have at most 16 MB."""
    scene = Scene("x", Limit(concurrency=1000, per="headers.t"))
    scene.receive(1)
    scene.waiting.scan.limit.meets_slots = True
    for number in range(40):
        push = scene.plans.push([number], headers={"t": f"{number:036}"})
        scene.runner.run(push)
    scene.receive(100)
    reads = [each for each in scene.runner.commands if isinstance(each, Find)]
    slots = [each.filter["slot"]["$in"] for each in reads if "slot" in each.filter]
    assert sum(map(len, slots)) > 10_000
    assert max(map(len, slots)) <= 10_000
