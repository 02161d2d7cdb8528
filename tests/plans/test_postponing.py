"""Rollbacks that do not count the try: the count is taken back once, whatever is lost or cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import QueueError
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.runtime.waiters import Waiters
from tests.plans import test_packs as packs
from tests.plans.runner import standard
from tests.plans.steps import FAULT_AT, Cut, Steps

FIVE = list(range(5))
MAKERS: dict[str, Callable[..., QueuePlans]] = {"documents": standard, "packs": packs.plans}
kinds = pytest.mark.parametrize("kind", MAKERS)


def holding(kind: str) -> tuple[Steps, QueuePlans, list[Any]]:
    """Return a store, and the plans of a process that holds five messages."""
    steps, plans = Steps(), MAKERS[kind](max_tries=None)
    steps.run(plans.push(FIVE))
    return steps, plans, steps.run(plans.receive(Waiters("a"), 5, timeout=0))


def consume(steps: Steps, plans: QueuePlans) -> dict[int, int]:
    """Consume every message once its delay or its lease has ended. Return their tries."""
    steps.seconds += 1000
    waiting, tries = Waiters("a"), dict[int, int]()
    steps.listeners.append(waiting)
    for _ in range(3):  # handed-over messages appear after a while
        while held := steps.run(plans.receive(waiting, 100, timeout=0)):
            tries |= {each.payload: each.tries for each in held}
            steps.run(plans.commit(held))
        steps.seconds += 30
    return tries


@kinds
@pytest.mark.parametrize("number", [2, 5], ids=["some", "all"])
@pytest.mark.parametrize("fault", FAULT_AT)
def test_fault_takes_no_count_back_twice(kind: str, number: int, fault: str) -> None:
    """After a lost request or reply, the caller tries again."""
    for at in range(50):
        steps, plans, held = holding(kind)
        some = held[:number]
        rollback = plans.rollback(some, delay=10, error="busy", counted=False)
        with suppress(Cut, QueueError):
            steps.run(rollback, FAULT_AT[fault](at))
        done = len(steps.commands) <= at
        if "loses" in fault:
            with suppress(QueueError):
                steps.run(plans.rollback(some, delay=10, error="busy", counted=False))
        tries = consume(steps, plans)
        assert sorted(tries) == FIVE
        assert min(tries.values()) >= 1, at
        if done:
            assert [tries[each.payload] for each in some] == [1] * number
            return
    raise AssertionError("more commands than expected")


@kinds
def test_former_holder_takes_no_count_back(kind: str) -> None:
    steps, plans, held = holding(kind)
    steps.seconds += 61
    waiting = Waiters("a")
    again = steps.run(plans.receive(waiting, 1, timeout=0))
    before = steps.all()
    with pytest.raises(QueueError):
        steps.run(plans.rollback([each for each in held if each.id == again[0].id], counted=False))
    assert steps.all() == before
