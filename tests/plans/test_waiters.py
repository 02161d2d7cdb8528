"""Waiters: one consumer leads, the rest follow, and no wake-up is lost.

There is no database and no bus.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, after


class Caller:
    """The callback that a driver registers; it counts its calls."""

    def __init__(self) -> None:
        self.called = 0

    def __call__(self) -> None:
        self.called += 1


def test_first_waiter_leads_and_the_rest_follow() -> None:
    waiters, one, two = Waiters("t"), Caller(), Caller()
    assert waiters.enter(one, after(15))
    assert not waiters.enter(two, after(5))
    assert not waiters.guard(after(15))  # the leader scans by then
    assert waiters.guard(after(14))
    assert not waiters.guard(after(14))  # one is enough
    waiters.leave(two, False, guards=True)
    assert waiters.guard(after(14))
    waiters.leave(one, True)
    assert waiters.enter(Caller(), after(15))


def test_follower_is_called_when_the_leader_leaves() -> None:
    waiters, leader, first, second = Waiters("t"), Caller(), Caller(), Caller()
    waiters.enter(leader, after(15))
    waiters.enter(first, after(15))
    waiters.enter(second, after(15))
    waiters.wake_next(False)
    assert (first.called, second.called) == (0, 0)  # one consumer leads
    waiters.leave(leader, True)
    waiters.wake_next(False)
    assert (first.called, second.called) == (1, 0)  # in order
    waiters.leave(first, False)
    waiters.wake_next(False)
    assert second.called == 1


def test_found_messages_wake_more_followers() -> None:
    waiters, leader = Waiters("t"), Caller()
    waiters.enter(leader, after(15))
    followers = [Caller() for _ in range(20)]
    for each in followers:
        waiters.enter(each, after(15))
    waiters.leave(leader, True)
    awake = []
    for _ in range(4):
        waiters.wake_next(True)
        awake.append(sum(each.called for each in followers))
    assert awake == [1, 3, 7, 15]
    waiters.wake_next(False)
    waiters.wake_next(True)
    assert sum(each.called for each in followers) == 17


def test_waiter_that_left_is_not_called() -> None:
    waiters, leader, gone, stays = Waiters("t"), Caller(), Caller(), Caller()
    waiters.enter(leader, after(15))
    waiters.enter(gone, after(15))
    waiters.enter(stays, after(15))
    waiters.leave(gone, False)
    waiters.leave(leader, True)
    waiters.wake_next(True)
    assert (gone.called, stays.called) == (0, 1)


def test_signal_updates_the_scan_state() -> None:
    waiters = Waiters("t")
    scan: Any = waiters.scan
    scan.flag_read = NOW
    assert waiters.on_signal(None, NOW)
    assert scan.flag_read is None  # the record changed: read it again
    assert waiters.on_signal(NOW, NOW)
    assert waiters.on_signal(after(-5), NOW)
    assert not waiters.on_signal(after(5), NOW)
    assert scan.due == after(5)
    assert not waiters.on_signal(after(9), NOW)
    assert scan.due == after(5)


def test_close_calls_every_waiter() -> None:
    waiters, leader, followers = Waiters("t"), Caller(), [Caller() for _ in range(3)]
    waiters.enter(leader, after(15))
    for each in followers:
        waiters.enter(each, after(15))
    waiters.wake_all()
    assert [each.called for each in followers] == [1, 1, 1]


class WaitersMachine(RuleBasedStateMachine):
    """Consumers come, wait, are woken, find a message or not, and are cancelled, in any order.

    A consumer follows the rules of the drivers: it leaves at the end of a wait, and it wakes the
    next one at the end of a receive. At most one consumer leads. While a consumer waits, one leads,
    or one has been called and has not acted yet.
    """

    waiting: Bundle[Any] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.waiters = Waiters("t")
        self.leaders: list[Callable[[], object]] = []
        self.followers: list[Caller] = []

    @rule(target=waiting)
    def enter(self) -> Caller:
        caller = Caller()
        self._wait(caller)
        return caller

    def _wait(self, caller: Caller) -> None:
        caller.called = 0
        if self.waiters.enter(caller, after(15)):
            self.leaders.append(caller)
        else:
            self.followers.append(caller)

    def _leave(self, caller: Caller) -> None:
        led = caller in self.leaders
        (self.leaders if led else self.followers).remove(caller)
        self.waiters.leave(caller, led)

    @rule(caller=waiting)
    def scan_again(self, caller: Caller) -> None:
        """Scan without a result after a signal, a call or a timeout, and wait again."""
        self._leave(caller)
        self._wait(caller)

    @rule(caller=consumes(waiting), found=st.booleans())
    def go(self, caller: Caller, found: bool) -> None:
        """Leave for good: with a message, by a cancellation or by a timeout; a call may be lost."""
        self._leave(caller)
        self.waiters.wake_next(found)

    @invariant()
    def at_most_one_leads(self) -> None:
        assert len(self.leaders) <= 1

    @invariant()
    def no_consumer_waits_alone(self) -> None:
        if self.followers:
            assert self.leaders or any(each.called for each in self.followers)


WaitersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWaitersMachine = WaitersMachine.TestCase
