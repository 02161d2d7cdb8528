"""The rate of a stream: the permits of a group cap the messages it starts.

``test_suspended`` has the tests with faults.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import pytest

from pyqueue import Limit
from pyqueue.backends.options import Options
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.backends.streams.receiving import wake_time
from pyqueue.payloads import Codec
from pyqueue.requests import Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW
from tests.plans.steps import Steps, lasting

LIMIT = Limit(rate=2, period=1, burst=5)


class Consumer:
    """A process that consumes one group."""

    def __init__(self, group: str = "g") -> None:
        options = Options(lease=60, dead_letter="dead")
        self.plans: GroupPlans = StreamPlans("log", Codec(), {}, owner="me").group(
            group, options, "first"
        )
        self.waiting = Waiters(f"log~{group}")

    def receive(self, limit: int) -> Plan[list[Any]]:
        return self.plans.receive(self.waiting, limit, timeout=0)

    def work(self) -> Plan[None]:
        for _ in range(3):
            yield from self.receive(2)


@cache
def stored() -> list[Any]:
    """Return the documents of a stream of packs of 4 messages."""
    steps = Steps()
    stream = StreamPlans("log", Codec(), {"limit": LIMIT.stored()})
    for first in range(0, 12, 4):
        steps.run(stream.append(range(first, first + 4)))
    return steps.all()


def made() -> Steps:
    return lasting(stored())


def started(steps: Steps, group: str = "g") -> int:
    """Return how many messages the group holds. No test here ends a claim."""
    found = steps.collection.find_one({"_id": f"~group:log~{group}"})
    return sum(each["e"] - each["s"] for each in found["out"]) if found else 0


def test_group_starts_the_messages_its_permits_allow() -> None:
    steps, first, second = made(), Consumer(), Consumer("h")
    assert len(steps.run(first.receive(3))) == 3
    assert len(steps.run(first.receive(9))) == 2
    asked = len(steps.commands)
    assert steps.run(first.receive(1)) == []
    assert len(steps.commands) < asked  # it knows when the next one may start
    steps.seconds = 0.5
    assert len(steps.run(first.receive(9))) == 1
    assert len(steps.run(second.receive(9))) == 5
    steps.seconds = 100
    assert len(steps.run(second.receive(9))) == 5  # lapsed messages start again
    assert steps.run(second.receive(9)) == []


def test_scan_that_finds_less_asks_for_less() -> None:
    steps, consumer = made(), Consumer()
    steps.seconds = 1
    assert len(steps.run(consumer.receive(9))) == 5
    steps.seconds = 4
    assert len(steps.run(consumer.receive(3))) == 3
    assert len(steps.run(consumer.receive(3))) == 2
    steps.seconds = 10
    assert len(steps.run(consumer.receive(9))) == 2
    bucket = steps.collection.find_one({"_id": "~limit:log~g"})
    assert bucket["tokens"] == pytest.approx(3)


def test_waiting_consumer_scans_when_the_next_may_start() -> None:
    steps, consumer = made(), Consumer()
    steps.run(consumer.receive(5))
    plans = consumer.plans
    held = steps.run(plans.receive(consumer.waiting, 1, timeout=30))
    assert len(held) == 1
    assert steps.seconds == pytest.approx(0.5)


def test_message_given_back_wakes_nobody_before_the_limit() -> None:
    steps, consumer = made(), Consumer()
    held = steps.run(consumer.receive(5))
    steps.run(consumer.plans.rollback(held[:1], delay=0))
    assert steps.run(consumer.receive(1)) == []
    waiting = consumer.waiting
    until = steps.run(wake_time(consumer.plans.state, waiting, waiting.scan.limit, 15))
    assert until == NOW + timedelta(seconds=0.5)


def test_group_is_checked_after_its_part_of_the_poll() -> None:
    steps, consumer = made(), Consumer()
    consumer.waiting.poll_share = 0.8
    assert len(steps.run(consumer.receive(1))) == 1
    state, limit = consumer.plans.state, consumer.waiting.scan.limit
    until = steps.run(wake_time(state, consumer.waiting, limit, 15))
    assert until == NOW + timedelta(seconds=12)


def test_consumer_follows_a_changed_limit() -> None:
    steps, consumer = made(), Consumer()
    steps.run(consumer.receive(5))
    record = {"_id": "~queue:log"}
    steps.collection.update_one(record, {"$set": {"shape.limit.burst": 7}})
    steps.seconds = 1
    assert len(steps.run(consumer.receive(9))) == 2
    steps.collection.update_one(record, {"$set": {"shape.limit": {"weight": 1}}})
    assert steps.run(consumer.receive(1)) == []
    steps.collection.update_one(record, {"$unset": {"shape.limit": 1}})
    assert len(steps.run(consumer.receive(9))) == 5
