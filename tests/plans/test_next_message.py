"""The plan of a loop: the last message is committed while the next one is claimed.

A message of the loop that the caller does not get is in its place again, unless a command of the
claim itself lost its reply.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from pyqueue import LeaseLost, Reservation, Unavailable
from pyqueue.backends.next_message import next_message, to_the_end
from pyqueue.hooks import Tell
from pyqueue.pausable import Pausable
from pyqueue.requests import Delete, FindAndModify, Listen, MonotonicTime, Plan, ServerTime
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, after, message, standard
from tests.plans.steps import FAULT_AT, Cut, lasting, resume

LEASE_S = 60

#: The commit and the claim run at once. In tests the claim is first, or the commit.
either_first = pytest.mark.parametrize("backwards", [False, True])


class Loop:
    """A loop with the message "m1" in its body, and other messages in the queue."""

    def __init__(self, *others: str, backwards: bool = False) -> None:
        self.before = {id: message(id) for id in ("m1", *others)}
        self.steps = lasting([*self.before.values()])
        self.steps.backwards = backwards
        self.plans = standard(lease=LEASE_S)
        self.waiters = Waiters("a")
        (self.last,) = self.receive()

    def receive(self, limit: int = 1) -> list[Any]:
        """Receive messages that are ready."""
        return self.steps.run(self.plans.receive(Waiters("a"), limit, timeout=0))

    def following(
        self, timeout: float = 0, *, commit_first: bool = False
    ) -> Plan[list[Reservation[Any]]]:
        """Commit the message in the body, and receive the next one."""
        receive = self.plans.receive(self.waiters, 1, timeout=timeout)
        commit, release = self.plans.commit([self.last]), partial(self.plans.release, seen=False)
        until = self.last.until
        return next_message(receive, commit, release, commit_first=commit_first, until=until)

    def stored(self, id: str) -> dict[str, Any] | None:
        """Return a stored message, without the count of 0 that giving back leaves."""
        found = next((each for each in self.steps.all() if each["_id"] == id), None)
        if found is not None and found.get("deliveries") == 0:
            del found["deliveries"]
        return found

    def take_over(self) -> None:
        """Let another consumer take the message in the body."""
        taken = {"$set": {"token": "another's", "when": after(999)}}
        assert self.steps.collection.update_one({"_id": "m1"}, taken).matched_count


def kinds(loop: Loop) -> list[type]:
    """Return the kinds of the writes of the last plan."""
    return [type(each) for each in loop.steps.commands if isinstance(each, (FindAndModify, Delete))]


@either_first
def test_next_message_is_claimed_and_the_last_committed(backwards: bool) -> None:
    loop = Loop("m2", backwards=backwards)
    loop.steps.seconds = 5
    (held,) = loop.steps.run(loop.following())
    assert (held.id, held.tries) == ("m2", 1)
    assert loop.stored("m1") is None
    assert kinds(loop) == ([Delete, FindAndModify] if backwards else [FindAndModify, Delete])


def test_first_message_needs_no_commit() -> None:
    loop = Loop("m2")
    receive = loop.plans.receive(loop.waiters, 1, timeout=0)
    (held,) = loop.steps.run(next_message(receive, None, loop.plans.release))
    assert held.id == "m2"
    assert loop.stored("m1") is not None


@pytest.mark.parametrize("commit_first", [False, True])
def test_last_message_is_committed_though_none_follows(commit_first: bool) -> None:
    loop = Loop()
    assert loop.steps.run(loop.following(commit_first=commit_first)) == []
    assert loop.stored("m1") is None


@pytest.mark.parametrize("lapsed", [False, True])
def test_commit_comes_first_if_the_claim_depends_on_it(lapsed: bool) -> None:
    """Other messages wait for the last one; or its lease has ended, and the claim would take it."""
    loop = Loop("m2")
    loop.steps.seconds = LEASE_S if lapsed else 0
    (held,) = loop.steps.run(loop.following(commit_first=not lapsed))
    assert held.id == "m2"
    assert kinds(loop) == [Delete, FindAndModify]
    loop = Loop("m2")
    loop.take_over()
    loop.steps.seconds = LEASE_S if lapsed else 0
    with pytest.raises(LeaseLost):
        loop.steps.run(loop.following(commit_first=not lapsed))
    assert kinds(loop) == [Delete]


@either_first
def test_lost_lease_gives_the_next_message_back(backwards: bool) -> None:
    loop = Loop("m2", backwards=backwards)
    loop.take_over()
    with pytest.raises(LeaseLost) as caught:
        loop.steps.run(loop.following())
    assert caught.value.lost == (loop.last,)
    assert loop.stored("m2") == loop.before["m2"]
    assert loop.steps.signals == [("a", NOW)]


def test_failure_to_give_a_message_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the error of the commit. The message comes back when its lease ends."""
    loop = Loop("m2")
    loop.take_over()

    def release(held: Any) -> Plan[None]:
        yield from ServerTime()
        raise Unavailable("the server went away")

    receive = loop.plans.receive(loop.waiters, 1, timeout=0)
    with pytest.raises(LeaseLost):
        loop.steps.run(next_message(receive, loop.plans.commit([loop.last]), release))
    assert "message m2 of queue 'a' was claimed for a loop" in caplog.text
    assert "comes back when its lease ends: the server went away" in caplog.text
    loop.steps.seconds = LEASE_S + 1
    assert [each.id for each in loop.receive(9)] == ["m2"]


def test_wait_begins_after_the_commit() -> None:
    """A lost lease is reported at once, though the receive would wait for a message."""
    loop = Loop()
    loop.take_over()
    with pytest.raises(LeaseLost):
        loop.steps.run(loop.following(timeout=30))
    assert loop.steps.seconds == 0
    assert loop.waiters.count == 0
    loop = Loop()
    assert loop.steps.run(loop.following(timeout=30)) == []
    assert loop.steps.seconds >= 30


@either_first
@pytest.mark.parametrize("fault", FAULT_AT)
def test_fault_loses_no_message(fault: str, backwards: bool) -> None:
    """The caller holds what it gets, and everything else comes back within a lease."""
    for at in range(100):
        loop = Loop("m2", backwards=backwards)
        mine: list[Reservation[Any]] = []
        try:
            mine = loop.steps.run(loop.following(), FAULT_AT[fault](at))
            ended = len(loop.steps.commands) <= at
        except (Unavailable, Cut):
            ended = False
        committed = loop.stored("m1") is None
        assert committed or not mine, "the next message was received, and the last is not settled"
        loop.steps.seconds = LEASE_S + 1
        again = {each.id for each in loop.receive(9)}
        assert again == {"m1", "m2"} - ({"m1"} if committed else set())
        if ended:
            assert at > 3, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


def cancel(running: Generator[Any, None, Any]) -> None:
    """Cancel the caller of a stalled plan."""
    running.throw(CancelledError())
    resume(running)


@pytest.mark.parametrize(
    ("commit_first", "backwards"), [(False, False), (False, True), (True, False)]
)
def test_cancellation_at_each_command_holds_nothing(commit_first: bool, backwards: bool) -> None:
    """The claimed message is as it was, and the last one is committed."""
    for at in range(100):
        loop = Loop("m2", backwards=backwards)
        running = loop.steps.stalled(loop.following(commit_first=commit_first), at)
        if running is None:
            assert at > 3, "fewer commands than expected"
            return
        with pytest.raises(CancelledError):
            cancel(running)
        assert loop.stored("m2") == loop.before["m2"]
        assert loop.stored("m1") is None
    raise AssertionError("more commands than expected")


@either_first
def test_cancellation_after_a_lost_lease_holds_nothing(backwards: bool) -> None:
    for at in range(100):
        loop = Loop("m2", backwards=backwards)
        loop.take_over()
        theirs = loop.stored("m1")
        try:
            running = loop.steps.stalled(loop.following(), at)
        except LeaseLost:
            assert at > 4, "fewer commands than expected"
            return
        assert running is not None
        with pytest.raises(CancelledError):
            cancel(running)
        assert (loop.stored("m1"), loop.stored("m2")) == (theirs, loop.before["m2"])
    raise AssertionError("more commands than expected")


@either_first
def test_stall_at_each_command_takes_nothing_from_another(backwards: bool) -> None:
    for at in range(100):
        loop = Loop("m2", backwards=backwards)
        running = loop.steps.stalled(loop.following(), at)
        if running is None:
            assert at > 3, "fewer commands than expected"
            return
        loop.steps.seconds = LEASE_S + 1
        theirs = {each.id: each.token for each in loop.receive(9)}
        assert "m2" in theirs
        with pytest.raises(LeaseLost) if "m1" in theirs else nullcontext():
            assert resume(running) == []
        for id, token in theirs.items():
            found = loop.stored(id)
            assert found is not None
            assert found["token"] == token
    raise AssertionError("more commands than expected")


# ---- plans that run to their end


def committing(loop: Loop) -> Plan[None]:
    """Commit the message in the body, and then tell hooks."""
    yield from loop.plans.commit([loop.last])
    yield from Tell("settled", "a", [loop.last], verb="commit")


def test_cancelled_caller_is_told_of_what_ended() -> None:
    """The plan ends before the cancellation arrives, so nothing else will tell hooks."""
    for at in range(100):
        loop = Loop()
        running = loop.steps.stalled(to_the_end(committing(loop)), at)
        if running is None:
            assert at > 0, "fewer commands than expected"
            return
        with pytest.raises(CancelledError):
            cancel(running)
        assert loop.stored("m1") is None
        assert [each.verb for each in loop.steps.told] == ["commit"]
    raise AssertionError("more commands than expected")


def test_failure_without_a_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The error of a settlement that no caller waits for; a lost lease is no failure."""

    def failing(error: Exception) -> Plan[None]:
        yield from ServerTime()
        raise error

    for error in (Unavailable("the server went away"), LeaseLost("lost")):
        plan = to_the_end(failing(error))
        behind = iter(next(plan).plan)  # type: ignore[attr-defined]
        next(behind)
        with pytest.raises(CancelledError):
            plan.throw(CancelledError())
        with pytest.raises(type(error)):
            behind.send(NOW)
    assert caplog.messages == ["messages of a loop were not settled: the server went away"]


# ---- plans in two parts


def asking(asked: list[str]) -> Plan[str]:
    try:
        yield from ServerTime()
        asked.append("time")
        try:
            yield from MonotonicTime()
        except KeyError:
            asked.append("caught")
        return "done"
    finally:
        asked.append("ended")


def test_pausable_pauses_before_a_request_and_continues() -> None:
    asked: list[str] = []
    plan = Pausable(asking(asked), (MonotonicTime, Listen))
    first = plan.begin()
    assert isinstance(next(first), ServerTime)
    with pytest.raises(StopIteration):
        first.send(NOW)
    assert (asked, plan.result) == (["time"], None)
    rest = plan.finish()
    assert isinstance(next(rest), MonotonicTime)
    with pytest.raises(StopIteration) as stop:
        rest.throw(KeyError())
    assert stop.value.value == plan.result == "done"
    assert asked == ["time", "caught", "ended"]
    with pytest.raises(StopIteration) as stop:
        next(plan.finish())
    assert stop.value.value == "done"


def test_closed_pausable_ends_its_plan() -> None:
    asked: list[str] = []
    plan = Pausable(asking(asked), (MonotonicTime,))
    first = plan.begin()
    next(first)
    with pytest.raises(StopIteration):
        first.send(NOW)
    plan.close()
    assert asked == ["time", "ended"]
