"""A stateful model of buckets: any sequence of operations, compared with a set of numbers.

Two processes share a queue. The model tracks where each message is: in the queue, held
under a token, finished, dead or moved. A reservation may be settled by the other process, which
knows nothing of the pack.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyqueue import LeaseLost, Reservation
from pyqueue.backends.bucket import packs, settling
from pyqueue.backends.bucket.stock import HeldPack
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.messages import Backoff
from pyqueue.runtime.waiters import Waiters
from tests.model.profiles import LONG, SHORT
from tests.plans.steps import Steps

pytestmark = pytest.mark.xdist_group("hypothesis")

LEASE_S = 60
MAX_TRIES = 3

Held = Reservation[Any]


class Buckets(RuleBasedStateMachine):
    """Two processes that push to a bucket and consume it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()
        options = Options(
            lease=LEASE_S,
            max_tries=MAX_TRIES,
            dead_letter="dead",
            backoff=Backoff(jitter=0),
            shape={"pack": 4},
        )
        self.plans = [plans_of("a", options, kind="bucket", owner=name) for name in ("x", "y")]
        self.waiting = [Waiters("a"), Waiters("a")]
        self.steps.listeners += self.waiting
        self.pushed = 0
        #: The numbers in the queue, with the holder of each and the end of its lease.
        self.alive: set[int] = set()
        self.held: dict[int, tuple[str, float]] = {}
        self.ids: dict[int, Any] = {}
        #: Reservations whose holders may settle them, in time or too late; and who received them.
        self.taken: list[tuple[Held, int]] = []
        self.dead: set[int] = set()
        self.moved: set[int] = set()

    processes = st.integers(0, 1)

    def is_held(self, number: int) -> bool:
        return number in self.held and self.held[number][1] > self.steps.seconds

    @rule(process=processes, number=st.integers(1, 9))
    def push(self, process: int, number: int) -> None:
        payloads = list(range(self.pushed, self.pushed + number))
        ids = self.steps.run(self.plans[process].push(payloads))
        self.ids |= dict(zip(payloads, ids, strict=True))
        self.alive |= set(payloads)
        self.pushed += number

    @rule(process=processes, limit=st.integers(1, 7), pop=st.booleans())
    def receive(self, process: int, limit: int, pop: bool) -> None:
        plan = self.plans[process].receive(self.waiting[process], limit, timeout=0, pop=pop)
        found = self.steps.run(plan)
        numbers = [each.payload for each in found]
        assert len(set(numbers)) == len(numbers) <= limit
        for each in found:
            assert each.id == self.ids[each.payload]
            assert each.payload in self.alive, "it had ended"
            assert not self.is_held(each.payload), "held twice"
            if pop:
                self.end(each.payload)
            else:
                self.held[each.payload] = each.token, self.steps.seconds + LEASE_S - 1
                self.taken.append((each, process))

    def end(self, number: int) -> None:
        self.alive.discard(number)
        self.held.pop(number, None)

    @precondition(lambda self: self.taken)
    @rule(
        process=processes,
        how=st.sampled_from(["commit", "commit", "rollback", "release", "bury", "extend", "move"]),
        data=st.data(),
    )
    def settle(self, process: int, how: str, data: st.DataObject) -> None:
        places = st.sampled_from(range(len(self.taken)))
        chosen = data.draw(st.lists(places, min_size=1, max_size=5))
        some = [self.taken[index] for index in dict.fromkeys(chosen)]
        members = [each if by == process else pickle.loads(pickle.dumps(each)) for each, by in some]
        plans = self.plans[process]
        if how == "move":
            plan = plans.move([(each, each.payload) for each in members], to="b")
        else:
            call: Any = getattr(plans, how)
            plan = call(members, delay=0) if how == "rollback" else call(members)
        lost: set[int] = set()
        unknown: set[int] = set()
        try:
            self.steps.run(plan)
        except LeaseLost as error:
            lost, unknown = ({id(each) for each in some} for some in (error.lost, error.unknown))
        for each in members:
            number = each.payload
            mine = number in self.alive and self.held.get(number, ("", 0))[0] == each.token
            if not mine:  # of documents that are gone, a batch cannot tell which it deleted
                assert id(each) in lost | unknown, "it was not held"
            elif self.is_held(number):
                assert id(each) not in lost, "it was held"
            if mine and id(each) not in lost:
                self.settled(each, how)

    def settled(self, each: Held, how: str) -> None:
        number = each.payload
        if how == "extend":
            self.held[number] = each.token, self.steps.seconds + LEASE_S
            return
        del self.held[number]
        buried = how == "bury" or (how == "rollback" and each.tries >= MAX_TRIES)
        if how in ("commit", "move") or buried:
            self.alive.remove(number)
        if buried:
            self.dead.add(number)
        if how == "move":
            self.moved.add(number)

    @rule(seconds=st.sampled_from([0.1, 1.1, 30, 61]))
    def wait(self, seconds: float) -> None:
        self.steps.seconds += seconds

    @precondition(lambda self: self.pushed)
    @rule(process=processes, data=st.data())
    def remove(self, process: int, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.pushed - 1))
        if self.steps.run(self.plans[process].remove(self.ids[number])):
            assert number in self.alive
            assert not self.is_held(number)
            self.end(number)

    @rule(process=processes)
    def purge(self, process: int) -> None:
        number = self.steps.run(self.plans[process].purge())
        gone = self.alive - set(self.stored())
        assert len(gone) == number
        for each in gone:
            assert not self.is_held(each)
            self.end(each)

    @rule(process=processes)
    def counts(self, process: int) -> None:
        found = self.steps.run(self.plans[process].counts())
        assert found.total == len(self.alive)
        assert found.reserved >= sum(map(self.is_held, self.alive))

    def stored(self) -> list[int]:
        """Return the numbers that the queue has."""
        numbers: list[int] = []
        for document in self.steps.collection.find({"q": "a", "record": {"$exists": False}}):
            if packs.is_pack(document):
                alive = packs.alive_of(document)
                assert document["n"] == alive.bit_count()
                numbers += [document["b"][place]["p"] for place in packs.places(alive)]
            else:
                numbers.append(document["payload"])
        return numbers

    def payloads(self, queue: str) -> list[int]:
        found = self.steps.collection.find({"q": queue, "payload": {"$exists": True}})
        return [each["payload"] for each in found]

    @invariant()
    def each_message_is_in_one_place(self) -> None:
        here, dead, moved = self.stored(), self.payloads("dead"), self.payloads("b")
        assert len(here) == len(set(here)), "in two places"
        for number in set(dead) - self.dead:  # its last allowed lease lapsed
            assert not self.is_held(number)
            self.end(number)
            self.dead.add(number)
        assert sorted(dead) == sorted(self.dead)
        assert sorted(moved) == sorted(self.moved)
        assert set(here) == self.alive

    def teardown(self) -> None:
        """Everything that is left can be received, by a new process."""
        rest = Waiters("a")
        self.steps.listeners = [rest]
        left = set(self.alive)
        for _ in range(60):
            self.steps.seconds += 61
            while held := self.steps.run(self.plans[0].receive(rest, 50, timeout=0, pop=True)):
                left -= {each.payload for each in held}
            if not left:
                return
        raise AssertionError(f"never received: {left}")


def test_buckets_follow_the_model() -> None:
    run_state_machine_as_test(Buckets, settings=SHORT(max_examples=12, stateful_step_count=25))


@pytest.mark.slow
def test_buckets_follow_the_model_in_the_long_run() -> None:
    run_state_machine_as_test(Buckets, settings=LONG(max_examples=300, stateful_step_count=50))


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("lost ones are named", marks=pytest.mark.slow),
        pytest.param("a settled place stays settled", marks=pytest.mark.slow),
        "fence",
    ],
)
def test_broken_rule_of_buckets_is_detected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "lost ones are named":
        monkeypatch.setattr(settling, "raise_lost", lambda *_: None)
    elif rule == "fence":
        monkeypatch.setattr(packs, "having", lambda bits: {})
    else:
        monkeypatch.setattr(HeldPack, "alive", property(lambda self: packs.full(self.size)))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Buckets,
            settings=SHORT(max_examples=200, stateful_step_count=25, phases=[Phase.generate]),
        )
