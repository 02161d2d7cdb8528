"""The line of waiting consumers: one leads, and no wake-up is lost with one that is gone.

No database, no bus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pyqueue.waiters import Waiters
from tests.plans.runner import NOW, after


class Caller:
    """What a driver hands in: called when it is its turn."""

    def __init__(self) -> None:
        self.called = 0

    def __call__(self) -> None:
        self.called += 1


def test_one_leads_and_the_others_follow() -> None:
    line, one, two = Waiters("t"), Caller(), Caller()
    assert line.enter(one, after(15))
    assert not line.enter(two, after(5))
    assert not line.guard(after(15))  # the leader will look by then
    assert line.guard(after(14))
    assert not line.guard(after(14))  # one is enough
    line.leave(two, False, guards=True)
    assert line.guard(after(14))
    line.leave(one, True)
    assert line.enter(Caller(), after(15))


def test_a_follower_is_called_when_the_leader_goes_on() -> None:
    line, leader, first, second = Waiters("t"), Caller(), Caller(), Caller()
    line.enter(leader, after(15))
    line.enter(first, after(15))
    line.enter(second, after(15))
    line.wake_next(False)
    assert (first.called, second.called) == (0, 0)  # somebody leads
    line.leave(leader, True)
    line.wake_next(False)
    assert (first.called, second.called) == (1, 0)  # in order
    line.leave(first, False)
    line.wake_next(False)
    assert second.called == 1


def test_after_finds_more_are_called() -> None:
    line, leader = Waiters("t"), Caller()
    line.enter(leader, after(15))
    followers = [Caller() for _ in range(20)]
    for each in followers:
        line.enter(each, after(15))
    line.leave(leader, True)
    awake = []
    for _ in range(4):
        line.wake_next(True)
        awake.append(sum(each.called for each in followers))
    assert awake == [1, 3, 7, 15]
    line.wake_next(False)
    line.wake_next(True)
    assert sum(each.called for each in followers) == 17


def test_one_who_left_is_not_called() -> None:
    line, leader, gone, stays = Waiters("t"), Caller(), Caller(), Caller()
    line.enter(leader, after(15))
    line.enter(gone, after(15))
    line.enter(stays, after(15))
    line.leave(gone, False)
    line.leave(leader, True)
    line.wake_next(True)
    assert (gone.called, stays.called) == (0, 1)


def test_what_is_heard() -> None:
    line = Waiters("t")
    head: Any = line.scan
    head.flag_read = NOW
    assert line.on_signal(None, NOW)
    assert head.flag_read is None  # the record changed: read it again
    assert line.on_signal(NOW, NOW)
    assert line.on_signal(after(-5), NOW)
    assert not line.on_signal(after(5), NOW)
    assert head.due == after(5)
    assert not line.on_signal(after(9), NOW)
    assert head.due == after(5)


def test_closing_calls_everyone() -> None:
    line, leader, followers = Waiters("t"), Caller(), [Caller() for _ in range(3)]
    line.enter(leader, after(15))
    for each in followers:
        line.enter(each, after(15))
    line.close()
    assert [each.called for each in followers] == [1, 1, 1]


class LineMachine(RuleBasedStateMachine):
    """Consumers come, wait, are woken, find something or not, and are cancelled, in any order.

    A consumer follows the rules of the drivers: it leaves at the end of a wait, and it wakes the
    next one at the end of a receive. What must hold: at most one leads; and while a consumer waits,
    one leads or has been called and has yet to act on it.
    """

    waiting: Bundle[Any] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.line = Waiters("t")
        self.leaders: list[Callable[[], object]] = []
        self.followers: list[Caller] = []

    @rule(target=waiting)
    def enter(self) -> Caller:
        caller = Caller()
        self._wait(caller)
        return caller

    def _wait(self, caller: Caller) -> None:
        caller.called = 0
        if self.line.enter(caller, after(15)):
            self.leaders.append(caller)
        else:
            self.followers.append(caller)

    def _leave(self, caller: Caller) -> None:
        led = caller in self.leaders
        (self.leaders if led else self.followers).remove(caller)
        self.line.leave(caller, led)

    @rule(caller=waiting)
    def look_again(self, caller: Caller) -> None:
        """It heard something, was called, or its time came: it looks, finds nothing, and waits
        again.
        """
        self._leave(caller)
        self._wait(caller)

    @rule(caller=consumes(waiting), found=st.booleans())
    def go(self, caller: Caller, found: bool) -> None:
        """It found something; or it was cancelled, or timed out, perhaps with a call that it never
        saw.
        """
        self._leave(caller)
        self.line.wake_next(found)

    @invariant()
    def at_most_one_leads(self) -> None:
        assert len(self.leaders) <= 1

    @invariant()
    def nobody_waits_alone(self) -> None:
        if self.followers:
            assert self.leaders or any(each.called for each in self.followers)


LineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLineMachine = LineMachine.TestCase
