"""A stateful model of streams: any sequence of operations, compared with a plain list.

Two processes share a group. The model tracks where each position is: before the group,
held under a token, waiting for its next try, finished or dead.
"""

from __future__ import annotations

from datetime import timedelta
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

from pyqueue import LeaseLost
from pyqueue.backends.options import Options
from pyqueue.backends.streams import entries, receiving, settling
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.backends.streams.ranges import Group, claim_step
from pyqueue.messages import Backoff, StreamReservation
from pyqueue.payloads import Codec
from pyqueue.requests import FindAndModify
from pyqueue.runtime.waiters import Waiters
from tests.model.profiles import LONG, SHORT
from tests.plans.steps import Steps

pytestmark = pytest.mark.xdist_group("hypothesis")

LEASE_S = 60
MAX_TRIES = 3

Held = StreamReservation[Any]


class Streams(RuleBasedStateMachine):
    """Two processes that append to a stream and consume it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()
        self.streams = [StreamPlans("log", Codec(), {}, owner=name) for name in ("one", "two")]
        options = Options(
            lease=LEASE_S, max_tries=MAX_TRIES, dead_letter="dead", backoff=Backoff(jitter=0)
        )
        self.groups: list[GroupPlans] = [each.group("g", options, 0) for each in self.streams]
        self.waiting = Waiters("log~g")
        #: The log.
        self.log: list[int] = []
        #: The holder of each position, and the end of its lease.
        self.held: dict[int, tuple[str, float]] = {}
        #: Reservations whose holders may settle them, in time or too late.
        self.taken: list[Held] = []
        self.finished: set[int] = set()
        self.dead: set[int] = set()
        self.begun = False

    processes = st.integers(0, 1)

    @rule(process=processes, number=st.integers(1, 5))
    def append(self, process: int, number: int) -> None:
        payloads = list(range(len(self.log), len(self.log) + number))
        assert self.steps.run(self.streams[process].append(payloads)) == payloads
        self.log += payloads

    @rule(process=processes, limit=st.integers(1, 6))
    def reserve(self, process: int, limit: int) -> None:
        plan = self.groups[process].receive(self.waiting, limit, timeout=0)
        found: list[Held] = self.steps.run(plan)
        self.begun = True
        positions = [each.position for each in found]
        assert positions == sorted(set(positions))
        assert len(found) <= limit
        now = self.steps.seconds
        # The rest of a range whose lease lapsed is no longer held, either.
        ended = {self.held[at][0] for at in positions if at in self.held}
        for each in found:
            assert each.payload == each.position
            assert each.position not in self.finished | self.dead
            held = self.held.get(each.position)
            assert held is None or held[1] <= now, "held twice"
        self.held = {at: one for at, one in self.held.items() if one[0] not in ended}
        self.held |= {each.position: (each.token, now + LEASE_S) for each in found}
        self.taken += found

    @precondition(lambda self: self.taken)
    @rule(
        process=processes,
        how=st.sampled_from(["commit", "rollback", "release", "bury", "extend"]),
        data=st.data(),
    )
    def settle(self, process: int, how: str, data: st.DataObject) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(range(len(self.taken))), min_size=1, max_size=4)
        )
        members = [self.taken[index] for index in dict.fromkeys(chosen)]
        owned = [each for each in members if self.held.get(each.position, ("", 0))[0] == each.token]
        plans = self.groups[process]
        call: Any = getattr(plans, how)
        plan = call(members, delay=0) if how == "rollback" else call(members)
        lost: list[Held] = []
        try:
            self.steps.run(plan)
        except LeaseLost as error:
            lost = list(error.lost)
        assert {id(each) for each in lost} == {id(each) for each in members} - {
            id(each) for each in owned
        }
        if how == "extend":
            for each in members:  # also if it has ended: the rest has the same lease
                self._extended(each.token)
            return
        for each in owned:
            del self.held[each.position]
            if how == "commit":
                self.finished.add(each.position)
            elif how == "bury" or (how == "rollback" and each.tries >= MAX_TRIES):
                self.dead.add(each.position)

    def _extended(self, token: str) -> None:
        """Messages that were received together share their lease."""
        for position, (holder, _) in self.held.items():
            if holder == token:
                self.held[position] = token, self.steps.seconds + LEASE_S

    @rule(seconds=st.sampled_from([1, 30, 61]))
    def wait(self, seconds: int) -> None:
        self.steps.seconds += seconds

    @rule(process=processes, place=st.integers(0, 1))
    @precondition(lambda self: self.log and not self.dead)
    def seek(self, process: int, place: int) -> None:
        position = len(self.log) * place
        assert self.steps.run(self.groups[process].seek(position)) == position
        self.begun = True
        self.held.clear()
        self.finished = set(range(position))

    @rule(process=processes)
    def counts(self, process: int) -> None:
        found = self.steps.run(self.groups[process].counts())
        now = self.steps.seconds
        held = sum(until > now for _, until in self.held.values())
        assert found.reserved == held
        assert found.total == len(self.log) - len(self.finished) - len(self.dead)

    @invariant()
    def each_position_is_in_one_place(self) -> None:
        document = self.steps.collection.find_one({"_id": "~group:log~g"})
        if document is None:
            assert not self.begun
            return
        group = Group.of(self.steps.driver.ask(_read()))
        places = [each for one in (*group.out, *group.back) for each in one.positions()]
        places += range(group.next, len(self.log))
        assert len(places) == len(set(places)), "in two places"
        buried = {
            each["dead"]["position"]
            for each in self.steps.collection.find({"q": "dead", "dead": {"$exists": True}})
        }
        self._exhausted(buried)
        assert buried == self.dead
        assert set(places) == set(range(len(self.log))) - self.finished - self.dead

    def _exhausted(self, buried: set[int]) -> None:
        """Accept burials of messages whose last allowed lease lapsed alone."""
        for position in buried - self.dead:
            held = self.held.pop(position, None)
            assert held is not None
            assert held[1] <= self.steps.seconds
            self.dead.add(position)


def _read() -> Any:
    return FindAndModify({"_id": "~group:log~g"}, {"$inc": {"skipped": 0}})


def test_streams_follow_the_model() -> None:
    run_state_machine_as_test(Streams, settings=SHORT(max_examples=12, stateful_step_count=25))


@pytest.mark.slow
@pytest.mark.parametrize("merges_above", [entries.MERGE_ABOVE, 2])
def test_streams_follow_the_model_in_the_long_run(
    monkeypatch: pytest.MonkeyPatch, merges_above: int
) -> None:
    monkeypatch.setattr(entries, "MERGE_ABOVE", merges_above)
    run_state_machine_as_test(Streams, settings=LONG(max_examples=100, stateful_step_count=50))


def _endless(group: Group, now: Any, until: Any, *rest: Any, **more: Any) -> Any:
    """Claim positions that are still held."""
    return claim_step(group, now + timedelta(seconds=LEASE_S), until, *rest, **more)


@pytest.mark.parametrize("rule", ["lost ones are named", "held ones are kept"])
def test_broken_rule_of_streams_is_detected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "held ones are kept":
        monkeypatch.setattr(receiving, "claim_step", _endless)
    else:
        monkeypatch.setattr(settling, "raise_lost", lambda *_: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Streams,
            settings=SHORT(max_examples=200, stateful_step_count=25, phases=[Phase.generate]),
        )
