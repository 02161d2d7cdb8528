"""Queues with a rate: no more messages start than the limit allows.

``test_suspended`` has the tests with faults.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pyqueue import Limit
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.requests import Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.steps import Steps, lasting, resume

LIMIT = Limit(rate=2, period=1, burst=5)
MESSAGES = 12
KINDS = ["standard", "priority", "ordered", "bucket"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def limited(kind: str, limit: Limit | None = None) -> QueuePlans:
    shape = {} if limit is None else {"limit": limit.stored()}
    return plans_of("a", Options(dead_letter="a.dead", shape=shape), kind=kind, owner="me")


class Consumer:
    """A process that consumes."""

    def __init__(self, kind: str) -> None:
        self.plans = limited(kind)
        self.waiting = Waiters("a")
        self.received: list[Any] = []

    def receive(self, limit: int, **how: Any) -> Plan[list[Any]]:
        found = yield from self.plans.receive(self.waiting, limit, **{"timeout": 0, **how})
        self.received += [each.payload for each in found]
        return found

    def work(self) -> Plan[None]:
        for wanted in (1, 3, 4):
            yield from self.receive(wanted)


@cache
def stored(kind: str, limit: Limit | None = LIMIT) -> list[Any]:
    """Return the documents of a queue with messages, each in a separate group."""
    steps = Steps()
    queue = limited(kind, limit)
    if kind == "bucket":  # packs of several sizes, and single messages
        for first, size in ((0, 4), (4, 1), (5, 3), (8, 1), (9, 3)):
            steps.run(queue.push(range(first, first + size)))
        return steps.all()
    for number in range(MESSAGES):
        more = {"priority": {"priorities": [number % 3]}, "ordered": {"groups": [str(number)]}}
        steps.run(queue.push([number], **more.get(kind, {})))  # type: ignore[arg-type]
    return steps.all()


def made(kind: str, limit: Limit | None = LIMIT) -> Steps:
    return lasting(stored(kind, limit))


def numbers(steps: Steps, consumer: Consumer, wanted: int, **how: Any) -> int:
    return len(steps.run(consumer.receive(wanted, **how)))


@each_kind
def test_queue_starts_the_messages_its_permits_allow(kind: str) -> None:
    steps, first, second = made(kind), Consumer(kind), Consumer(kind)
    assert [numbers(steps, first, 3), numbers(steps, second, 9), numbers(steps, first, 1)] == [
        *(3, 2, 0)
    ]
    steps.seconds = 0.5
    assert [numbers(steps, second, 1), numbers(steps, first, 1)] == [1, 0]
    steps.seconds = 20
    assert [numbers(steps, first, 9), numbers(steps, second, 9)] == [5, 0]
    steps.seconds = 40
    assert numbers(steps, second, 9) == 1
    assert sorted(first.received + second.received) == list(range(MESSAGES))


@each_kind
def test_consumer_that_is_stopped_sends_no_command(kind: str) -> None:
    """It knows when the next message may start."""
    steps, consumer = made(kind), Consumer(kind)
    assert numbers(steps, consumer, 9) == 5
    assert numbers(steps, consumer, 9) == 0
    steps.seconds = 0.1
    assert numbers(steps, consumer, 1) == 0
    sent = {type(each).__name__ for each in steps.commands}
    assert sent <= {"Find"}  # the record of the queue


@each_kind
def test_waiting_consumer_scans_when_the_next_may_start(kind: str) -> None:
    steps, consumer = made(kind), Consumer(kind)
    assert numbers(steps, consumer, 5) == 5
    assert numbers(steps, consumer, 1, timeout=30) == 1
    assert steps.seconds == pytest.approx(0.5)


@each_kind
def test_scan_that_finds_less_asks_for_less(kind: str) -> None:
    steps, consumer = made(kind), Consumer(kind)
    for seconds in (0, 10, 20):
        steps.seconds = seconds
        numbers(steps, consumer, 9)
    bucket = steps.collection.find_one({"_id": "~limit:a~"})
    assert len(consumer.received) == MESSAGES
    assert bucket["tokens"] == pytest.approx(3)
    assert numbers(steps, consumer, 9) == 0
    if kind != "bucket":  # which does not know how many messages a pack has
        assert not any(type(each).__name__ == "TakePermits" for each in steps.commands)


@pytest.mark.parametrize("kind", ["standard", "priority", "bucket"])
@pytest.mark.parametrize("wanted", [1, 9])
def test_pops_count_as_starts(kind: str, wanted: int) -> None:
    steps, consumer = made(kind), Consumer(kind)
    for _ in range(9):
        numbers(steps, consumer, wanted, pop=True)
    assert len(consumer.received) == 5
    steps.seconds = 0.5
    assert numbers(steps, consumer, wanted, pop=True) == 1


@each_kind
def test_slow_network_starts_messages_with_permits(kind: str) -> None:
    """Only the first scan does not know how slow it is. After one by level comes one by age."""
    steps, consumer = made(kind), Consumer(kind)
    received = []
    for _ in range(3):
        before = len(consumer.received)
        for _ in steps.steps(consumer.receive(2)):
            steps.seconds += 1.5
        received.append(len(consumer.received) - before)
    assert received == [2 if kind == "priority" else 0, 2, 2]


def test_order_of_the_queue_is_kept() -> None:
    steps, consumer = made("standard"), Consumer("standard")
    for second in range(8):
        steps.seconds = second
        numbers(steps, consumer, 1)
    assert consumer.received == list(range(8))


def test_both_limits_hold_together() -> None:
    limit = Limit(concurrency=2, rate=2, period=1, burst=5)
    steps, consumer = made("standard", limit), Consumer("standard")
    started = 0
    for _ in range(4):
        found = steps.run(consumer.receive(9))
        started += len(found)
        assert len(found) <= 2
        steps.run(consumer.plans.commit(found))
    assert started == 5
    steps.seconds = 10
    assert [numbers(steps, consumer, 9), numbers(steps, consumer, 9)] == [2, 0]


def test_consumer_uses_a_raised_rate_within_seconds() -> None:
    slow, fast = Limit(rate=1, period=3600), Limit(rate=1000, burst=9)
    steps, consumer = made("standard", slow), Consumer("standard")
    assert numbers(steps, consumer, 9) == 1
    running = steps.steps(consumer.receive(9, timeout=100))
    next(running)
    change = {"$set": {"shape.limit": fast.stored()}}
    steps.collection.update_one({"_id": "~queue:a"}, change)
    resume(running)
    assert len(consumer.received) > 1
    assert steps.seconds <= 11
