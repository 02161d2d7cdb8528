"""Wait for the end of a message that a fail-over may undo."""

from __future__ import annotations

import pytest
from bson import ObjectId

from pyqueue import Finished, JobFailed, Reservation
from pyqueue.backends import recovering
from pyqueue.backends.awaiting import wait
from pyqueue.backends.outputs import Output
from pyqueue.backends.settling import fan_out
from pyqueue.backends.transitions import HIDDEN
from pyqueue.requests import Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import message, record, standard
from tests.plans.steps import Steps, lasting

PLANS = standard(history=3600)


def held() -> tuple[Steps, Reservation[object]]:
    """Return a store with a message, which a consumer holds."""
    steps = lasting([record(history=3600), message("m")])
    (reserved,) = steps.run(PLANS.receive(Waiters("a"), 1, timeout=0))
    return steps, reserved


def waiting() -> Plan[Finished[object]]:
    return wait(Waiters("~done"), "m", 0)


def test_end_counts_once_a_majority_has_it() -> None:
    steps, reserved = held()
    before = steps.all()
    steps.run(PLANS.commit((reserved,)))
    steps.safe = before
    with pytest.raises(TimeoutError):
        steps.run(waiting())
    steps.safe = steps.all()
    assert steps.run(waiting()).outcome == "committed"


def test_burial_counts_once_a_majority_has_it() -> None:
    steps, reserved = held()
    before = steps.all()
    steps.run(PLANS.bury((reserved,), error="broken"))
    steps.safe = before
    with pytest.raises(TimeoutError):
        steps.run(waiting())
    steps.safe = steps.all()
    with pytest.raises(JobFailed, match="broken"):
        steps.run(waiting())


def test_message_that_a_handover_hides_is_not_gone() -> None:
    """Its worker died after it had decided on the outputs."""
    keep = {"result": 60.0, "topic": "~done"}
    steps = lasting([record(), message("m", keep=keep)])
    (held,) = steps.run(standard().receive(Waiters("a"), 1, timeout=0))
    outputs = [Output(ObjectId(), standard("b").target, "y", None)]
    running = steps.steps(fan_out(standard().terms, held, outputs))
    while not any(str(each["q"]).startswith(HIDDEN) and each["_id"] == "m" for each in steps.all()):
        next(running)
    with pytest.raises(TimeoutError):
        steps.run(wait(Waiters("~done"), "m", 5))
    steps.seconds += 10
    steps.run(recovering.recover_queue("a", recovering.NO_GRACE))
    assert steps.run(wait(Waiters("~done"), "m", 0)).outcome == "committed"


def test_message_that_a_majority_has_is_not_gone() -> None:
    """The former primary has deleted it."""
    steps, _ = held()
    before = steps.all()
    steps.collection.delete_one({"_id": "m"})
    steps.safe = before
    with pytest.raises(TimeoutError):
        steps.run(wait(Waiters("~done"), "m", 5))
