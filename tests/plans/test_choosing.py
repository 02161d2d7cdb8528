"""Reserve a chosen message, cut and stalled at each command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import QueueError, Reservation
from pyqueue.backends.choosing import reserve_id
from pyqueue.requests import Coalesce, Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import after, message, record, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, at_each_command, resume


def choose(id: str = "m") -> Plan[list[Any]]:
    """Return the plan of a process that chooses a message."""
    return reserve_id(standard(max_tries=None).terms, Waiters("a"), id, None)


def receive() -> Plan[list[Reservation[Any]]]:
    """Return the plan of a process that receives in order."""
    return standard(max_tries=None).receive(Waiters("a"), 5, timeout=0)


def stored(**fields: Any) -> Callable[[], Steps]:
    """Return a function that makes a store with one message."""
    return lambda: Steps([record(), message("m", **fields)])


SCHEDULED = {"when": after(30), "due": after(30)}


@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize("fields", [{}, SCHEDULED], ids=["ready", "scheduled"])
def test_message_is_not_lost_by_a_fault(fault: str, fields: dict[str, Any]) -> None:
    for at in range(20):
        steps = stored(**fields)()
        with suppress(Cut, QueueError):
            steps.run(choose(), FAULT_AT[fault](at))
        last = len(steps.commands) <= at
        steps.seconds += 100
        (held,) = steps.run(choose())
        assert held.id == "m", at
        if last:
            assert at > 2, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("other", [choose, receive])
def test_message_has_one_holder(other: Callable[[], Plan[list[Any]]]) -> None:
    for steps, running in at_each_command(stored(), choose, least=2):
        held = [*steps.run(other()), *resume(running)]
        assert [each.id for each in held] == ["m"]


def test_scheduled_message_claimed_in_between_is_left_alone() -> None:
    """Its lease ends later than the message would have been ready."""
    for steps, running in at_each_command(stored(**SCHEDULED), choose, least=2):
        (held,) = steps.run(choose())
        assert resume(running) == []
        (found,) = [each for each in steps.all() if each["_id"] == "m"]
        assert (found["token"], found["when"]) == (held.token, held.until)


def test_message_of_a_cancelled_caller_is_given_back() -> None:
    steps = stored(**SCHEDULED)()
    plan = choose()
    request = next(plan)
    while not isinstance(request, Coalesce):
        answer = steps.run(_carried_out(request))
        request = plan.send(answer)
    (claimed,) = steps.run(request.batch([request.item]))
    assert request.undo is not None
    steps.run(request.undo(claimed))
    (found,) = [each for each in steps.all() if each["_id"] == "m"]
    assert (found["when"], found["tries"], "token" in found) == (after(30), 0, False)


def _carried_out(request: Any) -> Plan[Any]:
    return (yield request)


def test_choosing_a_message_takes_few_commands() -> None:
    steps = stored()()
    steps.run(choose())
    kinds = [type(each).__name__ for each in steps.commands]
    assert kinds == ["Find", "Find", "Find", "FindAndModify"]
