"""Permits to start messages: how many a bucket grants, with faults between its commands."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pyqueue import Limit, Unavailable
from pyqueue.backends.limits import rates
from pyqueue.requests import Plan
from tests.plans.runner import NOW, after
from tests.plans.steps import Fault, Steps, lasting, lost_reply, lost_request
from tests.support.samples import sampled

LIMIT = Limit(rate=2, period=1, burst=5)


def taking(
    wanted: int, key: str = "", limit: Limit = LIMIT, queue: str = "a"
) -> Plan[rates.Granted]:
    """Ask for permits of one key."""
    return (yield from rates.take(queue, limit, {key: wanted}))[key]


def take(steps: Steps, wanted: int, limit: Limit = LIMIT, key: str = "") -> int:
    return steps.run(taking(wanted, key, limit)).permits


def give_back(
    steps: Steps, unused: int, key: str = "", limit: Limit = LIMIT, fault: Fault | None = None
) -> None:
    """Give permits back that were granted just now."""
    granted = rates.Granted(unused, steps.now, steps.now)
    steps.run(rates.give_back("a", limit, [(key, granted)]), fault)


def stored(steps: Steps, key: str = "") -> dict[str, Any]:
    found = {each["_id"]: each for each in steps.all()}
    return found[rates.permits_id("a", key)]


def test_bucket_begins_full_and_fills_at_the_rate() -> None:
    steps = lasting()
    assert [take(steps, 3), take(steps, 3), take(steps, 3)] == [3, 2, 0]
    granted = steps.run(taking(1))
    assert granted[:2] == (0, after(0.5))
    steps.seconds = 0.499
    assert take(steps, 1) == 0
    steps.seconds = 0.5
    assert [take(steps, 1), take(steps, 1)] == [1, 0]
    steps.seconds = 1.75
    assert steps.run(taking(9))[:2] == (2, after(2))
    steps.seconds = 1000
    assert take(steps, 99) == 5


def test_default_burst_is_one() -> None:
    steps, limit = lasting(), Limit(rate=60, period=60)
    assert [take(steps, 5, limit), take(steps, 5, limit)] == [1, 0]
    steps.seconds = 1
    assert take(steps, 5, limit) == 1


def test_each_key_and_each_queue_has_a_bucket() -> None:
    steps = lasting()
    granted = steps.run(rates.take("a", LIMIT, {"x": 9, "y": 2, "": 9}))
    assert {key: each.permits for key, each in granted.items()} == {"x": 5, "y": 2, "": 5}
    assert steps.run(taking(9, queue="b")).permits == 5
    assert take(steps, 9, key="y") == 3


def test_bucket_expires_when_it_is_full() -> None:
    """One that the server has deleted is full, so nothing is granted too early."""
    steps = lasting()
    take(steps, 3)
    found = stored(steps)
    assert found["expires"] == after(1.5)
    assert "q" not in found
    assert "processed" in found  # the index of expiring documents has only such documents
    steps.seconds = 1.4
    take(steps, 0)
    assert stored(steps)["tokens"] == pytest.approx(4.8)
    assert stored(steps)["expires"] == after(1.5)


def test_permits_that_are_given_back_are_granted_again() -> None:
    steps = lasting()
    take(steps, 5)
    give_back(steps, 2)
    give_back(steps, 3, "unknown")
    assert take(steps, 9) == 2
    give_back(steps, 99)
    assert take(steps, 99) == 5
    assert [each["_id"] for each in steps.all()] == ["~limit:a~"]


def test_clock_that_steps_back_grants_nothing_more() -> None:
    """A small step is waited out, and after a large one the bucket fills from then on."""
    steps = lasting()
    take(steps, 5)
    steps.seconds = -30
    assert steps.run(taking(1))[:2] == (0, after(0.5))
    steps.seconds = 1
    assert take(steps, 9) == 2
    steps.seconds = -3600
    assert steps.run(taking(1))[:2] == (0, after(-3600 + 0.5))
    steps.seconds = -3599
    assert take(steps, 9) == 2


@pytest.mark.parametrize(("late_s", "left"), [(0, 4), (0.5, 4), (1.5, 4), (2, 4), (3, 5)])
def test_late_permits_are_given_back_less_what_came_since(late_s: float, left: int) -> None:
    """The bucket may have been full since, and more than the burst would start at once."""
    steps = lasting()
    granted = steps.run(taking(4))
    take(steps, 1)
    steps.seconds = late_s
    steps.run(rates.give_back("a", LIMIT, [("", granted)]))
    assert min(5, stored(steps)["tokens"] + 2 * late_s) == pytest.approx(left)


@pytest.mark.parametrize("lost", [lost_request, lost_reply])
def test_request_that_lost_a_message_grants_nothing(lost: Callable[[int], Any]) -> None:
    """Its permits may be lost; they are never used."""
    steps = lasting()
    with pytest.raises(Unavailable):
        steps.run(taking(3), lost(0))
    assert take(steps, 9) == (5 if lost is lost_request else 2)
    give_back(steps, 1, fault=lost(0))  # nothing to be done about it


def test_fail_over_does_not_grant_again() -> None:
    steps = lasting()
    steps.collection.insert_one({"_id": "other"})
    steps.safe = steps.all()
    assert take(steps, 5) == 5
    steps.fail_over()
    assert take(steps, 5) == 0
    give_back(steps, 5)
    steps.fail_over()
    assert take(steps, 5) == 0


def test_lower_burst_counts_at_once() -> None:
    steps = lasting()
    take(steps, 1)
    assert take(steps, 9, Limit(rate=2, burst=2)) == 2
    assert take(steps, 9, Limit(rate=2, burst=9)) == 0


@pytest.mark.parametrize("seed", sampled(range(20), few=5))
def test_no_window_has_too_many_starts(seed: int) -> None:
    chance = random.Random(seed)
    rate, burst = chance.choice([0.3, 2, 7.5, 1000]), chance.randint(1, 8)
    limit = Limit(rate=rate, period=chance.choice([1, 10]), burst=burst)
    token_s = limit.period_s / rate
    steps, starts = lasting(), list[float]()
    for _ in range(60):
        # In whole milliseconds, as the server counts.
        steps.seconds += round(chance.choice([0, token_s, token_s * burst]) * chance.random(), 3)
        held = take(steps, chance.randint(1, 2 * burst), limit)
        unused = chance.randint(0, held) if chance.random() < 0.3 else 0
        give_back(steps, unused, limit=limit)
        starts += [steps.seconds] * (held - unused)
        if chance.random() < 0.1:
            gone = {"expires": {"$lte": steps.now}, "_id": {"$regex": "^~limit:"}}
            steps.collection.delete_many(gone)
    for place, begin in enumerate(starts):
        for more, end in enumerate(starts[place:], 1):
            assert more <= burst + (end - begin) / token_s + 1e-3
    granted = steps.run(taking(1, limit=limit))
    steps.seconds = (granted.next_at - NOW).total_seconds()
    assert granted.permits or take(steps, 1, limit) == 1  # and a scan at that time is not in vain
