"""Requeue: a message of a pack leaves it once, wherever the process dies or loses a reply."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from pyqueue import QueueError
from pyqueue.backends.requeueing import requeue
from pyqueue.requests import FindAndModify
from tests.plans.runner import after, message, record, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, resume
from tests.plans.test_packs import Consumer, drain, plans

FIVE = list(range(5))


@cache
def waiting() -> tuple[list[Any], list[Any]]:
    """Return the documents of a pack that waits for its next try, and the ids of its messages."""
    steps, consumer = Steps(), Consumer()
    ids = steps.run(consumer.plans.push(FIVE))
    held = steps.run(consumer.receive(5))
    steps.run(consumer.plans.rollback(held, delay=100))
    return steps.all(), ids


def test_requeue_takes_one_message_out_of_its_pack() -> None:
    stored, ids = waiting()
    steps = Steps(stored)
    assert steps.run(requeue(plans().terms, ids[3]))
    (pack,) = [each for each in steps.all() if "n" in each]
    assert (pack["n"], pack["when"], "token" in pack) == (4, after(100), False)
    held = steps.run(Consumer().receive(5))
    assert [(each.id, each.tries) for each in held] == [(ids[3], 2)]


@pytest.mark.parametrize("fault", FAULT_AT)
def test_requeue_loses_no_message_of_a_pack(fault: str) -> None:
    stored, ids = waiting()
    for at in range(50):
        steps = Steps(stored)
        with suppress(Cut, QueueError):
            steps.run(requeue(plans().terms, ids[3]), FAULT_AT[fault](at))
        if len(steps.commands) <= at:
            assert at > 6, "fewer commands than expected"
            return
        assert sorted(drain(steps)) == FIVE, at
    raise AssertionError("more commands than expected")


def test_requeue_leaves_a_pack_that_was_just_claimed() -> None:
    stored, ids = waiting()
    steps = Steps(stored)
    running = steps.steps(requeue(plans().terms, ids[3]))
    while not isinstance(next(running), FindAndModify):
        pass
    steps.seconds += 200
    assert len(steps.run(Consumer().receive(5))) == 5
    assert resume(running) is False


@pytest.mark.parametrize("change", [{"token": "t"}, {"due": after(9)}, {"q": "b"}])
def test_requeue_leaves_a_message_that_just_changed(change: dict[str, Any]) -> None:
    steps = Steps([record(), message("m", when=after(60), due=after(60))])
    running = steps.steps(requeue(standard().terms, "m"))
    for _ in range(3):  # the record and the message are read, and the update is next
        next(running)
    steps.collection.update_one({"_id": "m"}, {"$set": change})
    assert resume(running) is False
    assert steps.collection.find_one({"_id": "m"})["when"].minute == after(60).minute
