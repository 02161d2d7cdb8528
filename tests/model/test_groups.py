"""A machine over an ordered queue: the results of scans, compared with a model of its groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyqueue import Backoff, LeaseLost, Reservation
from pyqueue.backends import turns
from pyqueue.backends.ordered import groups, scan
from pyqueue.requests import Plan
from tests.model.places import Cluster, Place, plans_place, virtual_time
from tests.model.profiles import LONG, SHORT

pytestmark = pytest.mark.xdist_group("hypothesis")

LEASE_MS = 10_000

clients = st.integers(0, 1)
names = st.sampled_from(["g", "g", "g", "h", None])
delays = st.sampled_from([0, 0, 0, 1, 4, 12])
#: Positions in a list; the first entries are the most useful.
places = st.sampled_from([0, 0, 1, 2, 5])


@dataclass(eq=False)
class Item:
    """A live message of the model."""

    id: str
    group: str | None
    #: Its order in its group.
    place: tuple[int, int]
    due: int
    tries: int = 0
    #: The end of the lease, while it is held. A lapsed lease keeps the group locked.
    until: int | None = None
    held_by: Reservation[Any] | None = None


@dataclass
class Groups:
    """The documents that should be stored."""

    skips: bool
    live: dict[str, Item] = field(default_factory=dict)
    entered: int = 0

    def enter(self, when: int) -> tuple[int, int]:
        """Return the next place at this instant."""
        self.entered += 1
        return when, self.entered

    def free(self, now: int) -> set[str]:
        """Return the ids of the messages that a scan may hand out."""
        found: set[str] = set()
        firsts: dict[str, Item] = {}
        for item in self.live.values():
            if item.group is None:
                if (item.due if item.until is None else item.until) <= now:
                    found.add(item.id)
                continue
            known = firsts.setdefault(item.group, item)
            if (item.until is None, item.place) < (known.until is None, known.place):
                firsts[item.group] = item
        for item in firsts.values():
            if (item.due if item.until is None else item.until) <= now:
                found.add(item.id)
        return found


class OrderedMachine(RuleBasedStateMachine):
    """Clients that use one ordered queue."""

    #: Creates an empty database with clients of it.
    make: Any
    on_failure: ClassVar[Literal["block", "skip"]] = "block"

    def __init__(self) -> None:
        super().__init__()
        self.cluster: Cluster = type(self).make()
        self.model = Groups(self.on_failure == "skip")
        self.handles: list[tuple[Item, Reservation[Any]]] = []
        self.count = 0

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.cluster.close()

    def queue(self, client: int) -> Any:
        """Return the queue of a client."""
        return self.cluster.clients[client].queue(
            "a",
            kind="ordered",
            on_failure=self.on_failure,
            lease=LEASE_MS / 1000,
            max_tries=None,
            backoff=Backoff(base=0, jitter=0),
        )

    # ---- rules

    @rule(client=clients, entries=st.lists(names, min_size=2, max_size=4), delay=delays)
    def push(self, client: int, entries: list[str | None], delay: int) -> None:
        ids = [f"m{self.count + each:04d}" for each in range(len(entries))]
        self.count += len(entries)
        self.queue(client).push_many(ids, groups=entries, ids=ids, delay=delay or None)
        when = self.cluster.now + 1000 * delay
        for id, group in zip(ids, entries, strict=True):
            self.model.live[id] = Item(id, group, self.model.enter(when), when)

    @rule(client=clients, limit=st.sampled_from([1, 1, 1, 2, 10]))
    def reserve(self, client: int, limit: int) -> None:
        self.receive(client, limit)

    def receive(self, client: int, limit: int) -> list[Reservation[Any]]:
        """Receive from the queue, and compare it with the model."""
        now = self.cluster.now
        held = self.queue(client).reserve_many(limit, timeout=0)
        ids = [each.id for each in held]
        free = self.model.free(now)
        assert len(ids) == len(set(ids))
        assert set(ids) <= free, "not its turn"
        # A scan whose page is full of waiting messages may leave some to the next scan.
        assert bool(ids) == bool(free), f"{free} waits although it is free"
        for each in held:
            item = self.model.live[each.id]
            item.tries += 1
            item.until, item.held_by = now + LEASE_MS, each
            assert (each.group, each.tries) == (item.group, item.tries)
            self.handles.append((item, each))
        return list(held)

    @precondition(lambda self: self.handles)
    @rule(
        client=clients,
        place=places,
        end=st.sampled_from(["rollback", "rollback", "commit", "release", "bury", "move"]),
        delay=st.sampled_from([4, 12, 0]),
    )
    def settle(self, client: int, place: int, end: str, delay: int) -> None:
        """End a claim, perhaps by a former holder."""
        item, held = self.handles.pop(place % len(self.handles))
        queue = self.queue(client)
        given: dict[str, Any] = {}
        if end in ("rollback", "move"):
            given = {"delay": delay} if end == "rollback" else {"to": "b"}
        try:
            getattr(queue, end)(held, **given)
        except LeaseLost:
            assert item.held_by is not held
            return
        assert item.held_by is held
        item.until = item.held_by = None
        if end == "release":
            item.tries -= 1
        elif end == "rollback":
            item.due = self.cluster.now + 1000 * delay
            if self.model.skips and item.group is not None:
                item.place = self.model.enter(item.due)
        else:
            del self.model.live[item.id]

    @precondition(lambda self: self.model.live)
    @rule(client=clients, place=places)
    def remove(self, client: int, place: int) -> None:
        item = list(self.model.live.values())[place % len(self.model.live)]
        removed = self.queue(client).remove(item.id)
        assert removed == (item.until is None or item.until <= self.cluster.now)
        if removed:
            item.held_by = None
            del self.model.live[item.id]

    @rule(milliseconds=st.sampled_from([1, 250, 1000, 4000, 10_000, 12_000, 100_000]))
    def advance(self, milliseconds: int) -> None:
        self.cluster.advance(milliseconds)

    # ---- invariants

    @invariant()
    def stored_is_as_expected(self) -> None:
        stored = {
            id: message
            for id, (message, _) in self.cluster.stored().items()
            if message.queue == "a"
        }
        assert stored.keys() == self.model.live.keys()
        for id, message in stored.items():
            assert message.group == self.model.live[id].group

    def drain(self) -> None:
        """Receive and commit everything. Nothing is forgotten."""
        while self.model.live:
            while held := self.receive(0, 10):
                self.queue(0).commit(*held)
                for each in held:
                    del self.model.live[str(each.id)]
            self.cluster.advance(LEASE_MS)


def play(place: Place, how: settings, on_failure: Literal["block", "skip"] = "block") -> None:
    """Run the machine on a place."""
    with virtual_time() as time:

        class Here(OrderedMachine):
            make = staticmethod(lambda: Cluster(place, time, clients=2))

        Here.on_failure = on_failure
        run_state_machine_as_test(Here, settings=how)


def test_examples_begin_with_the_same_time_and_number() -> None:
    found = []
    with virtual_time() as time:
        for _ in range(2):
            cluster = Cluster(plans_place(), time, clients=1)
            cluster.clients[0].queue("a", kind="ordered").push_many(range(3), groups=["g"] * 3)
            stored = cluster.world.store.documents.values()
            found.append([(each["when"], each["no"]) for each in stored if "group" in each])
            cluster.advance(1000)
            cluster.close()
    assert found[0] == found[1]
    assert [number for _, number in found[0]] == [0, 1, 2]


BOTH = pytest.mark.parametrize("on_failure", ["block", "skip"])


@BOTH
def test_groups_follow_the_model(on_failure: Literal["block", "skip"]) -> None:
    play(plans_place(), SHORT(max_examples=12, stateful_step_count=30), on_failure)


def test_groups_follow_the_model_on_a_server(server: Place) -> None:
    play(server, SHORT(max_examples=2, stateful_step_count=20))


@pytest.mark.slow
@BOTH
def test_groups_follow_the_model_in_the_long_run(on_failure: Literal["block", "skip"]) -> None:
    play(plans_place(), LONG(max_examples=1_000, stateful_step_count=60), on_failure)


@pytest.mark.slow
def test_groups_follow_the_model_on_a_server_for_long(server: Place) -> None:
    play(server, LONG(max_examples=200, stateful_step_count=60))


def _moves_nothing(*_: object, **__: object) -> Plan[int]:
    """Leave deferred messages."""
    yield from ()
    return 0


@pytest.mark.parametrize("rule", ["earlier ones go first", "the next one comes at once"])
def test_broken_rule_of_groups_is_detected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "earlier ones go first":
        monkeypatch.setattr(groups, "is_first", lambda document, rest: True)
    else:
        for each in (turns, groups, scan):
            monkeypatch.setattr(each, "place_firsts", _moves_nothing)
    with pytest.raises(AssertionError):
        play(
            plans_place(), SHORT(max_examples=200, stateful_step_count=30, phases=[Phase.generate])
        )
