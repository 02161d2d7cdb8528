"""Messages of a stream that are given back one by one: how the group's document grows.

However many wait for their next try, new messages are claimed, and one more costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Any

import bson
import pytest

from pyqueue.backends.streams import entries
from pyqueue.backends.streams.entries import MAX_BACK, MAX_BACK_SPAN, MAX_RANGE, Range, merged
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.backends.streams.ranges import Group, claim_step, group_id
from pyqueue.backends.streams.settling import reload
from pyqueue.payloads import OPTIONS, Codec
from tests.plans.faults import DISTURBANCES, some_or_all
from tests.plans.runner import NOW, after
from tests.plans.steps import Steps
from tests.plans.test_stream_groups import FAULTS, Consumer

ID = group_id("log", "g")


def filled(messages: int) -> tuple[Steps, Consumer]:
    """Return a store with a stream, and a consumer whose group has begun."""
    steps, consumer = Steps(), Consumer(max_tries=None)
    stream = StreamPlans("log", Codec(), {})
    for first in range(0, messages, 1000):
        steps.run(stream.append(list(range(first, min(first + 1000, messages)))))
    steps.run(consumer.plans.pause(False))
    return steps, consumer


def test_full_group_of_single_rollbacks_receives() -> None:
    """It has entries as every release stored them, and nothing is due for an hour."""
    steps, consumer = filled(MAX_BACK + 2)
    until = steps.now + timedelta(hours=1)
    back = [Range(str(at), at, at + 1, 0, until, 1).stored() for at in range(MAX_BACK)]
    steps.collection.update_one({"_id": ID}, {"$set": {"back": back, "next": MAX_BACK}})
    consumer.plans.state.seen = None
    held = steps.run(consumer.receive(1))
    assert [each.position for each in held] == [MAX_BACK]
    steps.run(consumer.plans.rollback(held, delay=60))
    assert [each.position for each in steps.run(consumer.receive(1))] == [MAX_BACK + 1]
    assert len(steps.collection.find_one({"_id": ID})["back"]) < 20


@pytest.mark.parametrize("number", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_cost_of_single_rollbacks_is_flat(number: int) -> None:
    """Each is one command, and the document that the command returns stays small."""
    steps, consumer = filled(number + 1)
    sizes = []
    for _ in range(0, number, 50):
        for each in steps.run(consumer.receive(50)):
            steps.seconds += 0.01
            steps.run(consumer.plans.rollback([each], delay=30, error=f"no {each.position}"))
            assert len(steps.commands) == 1
            document = steps.collection.find_one({"_id": ID})
            sizes.append(len(bson.encode(document, codec_options=OPTIONS)))
    assert max(sizes[number // 2 :]) < 24_000
    assert [each.position for each in steps.run(consumer.receive(1))] == [number]
    steps.seconds += 33
    again: list[Any] = []
    while held := steps.run(consumer.receive(1000)):
        again += held
    assert [each.position for each in again] == list(range(number))
    assert {each.tries for each in again} == {2}


def scattered(seed: int, number: int, span: int, most_tries: int = 2) -> list[Range]:
    """Return ranges as rollbacks leave them, in any order."""
    choose = Random(seed)
    ranges = []
    for start in sorted(choose.sample(range(0, span, 3), number)):
        done = choose.choice([0, 0b10])
        error = choose.choice([None, {"type": "A", "at": NOW}, {"type": "B", "at": NOW}])
        until = after(choose.choice([-5, 0, choose.uniform(2.5, 3), choose.uniform(290, 310)]))
        tries, lapses = (
            choose.randint(1, most_tries),
            choose.choice([0, 0, 1]),
        )
        ranges.append(Range(str(start), start, start + 3, done, until, tries, lapses, error))
    choose.shuffle(ranges)
    return ranges


@pytest.mark.parametrize("change", ["claim", "commit", "extend"])
def test_merging_undoes_no_change_of_another_process(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(entries, "MERGE_ABOVE", 1)
    steps, consumer = filled(6)
    other = Consumer()
    held = steps.run(consumer.receive(6))
    steps.run(consumer.plans.rollback(held[:1], delay=0))
    if change == "claim":
        steps.run(other.receive(1))
    elif change == "commit":
        steps.run(other.plans.commit(held[2:3]))
    else:
        steps.run(other.plans.extend(held[1:], lease=1000))
    steps.run(consumer.plans.rollback(held[1:2], delay=0))
    group = steps.run(reload(other.plans.state))
    assert group is not None
    out, back = by_position(group.out), by_position(group.back)
    assert sorted(back) == ([1] if change == "claim" else [0, 1])
    assert sorted(out) == ([0] if change == "claim" else []) + list(
        range(3 if change == "commit" else 2, 6)
    )
    assert max(each.until for each in group.out) == after(1000 if change == "extend" else 60)


def by_position(ranges: Sequence[Range]) -> dict[int, Range]:
    found = {at: each for each in ranges for at in each.positions()}
    assert len(found) == sum(each.size for each in ranges), "in two entries"
    return found


@pytest.mark.parametrize("seed", range(4))
def test_merged_entries_keep_the_data_of_a_claim(seed: int) -> None:
    before = scattered(seed, 900, 3000)
    more = merged(before[:890], before[890:], NOW)
    assert more is not None
    assert {each.token for each in more.removed} <= {each.token for each in before[:890]}
    gone = {each.token for each in more.removed}
    left = [each for each in before[:890] if each.token not in gone] + more.added
    assert len(left) <= 450
    now, then = by_position(left), by_position(before)
    assert now.keys() == then.keys()
    for at, one in now.items():
        old = then[at]
        assert (one.tries, one.lapses) == (old.tries, old.lapses)
        assert (one.error and one.error["type"]) == (old.error and old.error["type"])
        assert old.until <= one.until <= max(NOW, old.until + (old.until - NOW) / 10)
        assert one.end - one.start <= MAX_RANGE + 2


@pytest.mark.parametrize("span", [30_000, MAX_BACK_SPAN])
def test_most_entries_fit_however_they_are(span: int) -> None:
    before = scattered(span, MAX_BACK + 1, span, 1000)
    more = merged(before[:-1], before[-1:], NOW)
    assert more is not None
    left = MAX_BACK - len(more.removed) + len(more.added)
    assert left <= MAX_BACK * 2 // 3
    now, then = by_position(more.added), by_position(before)
    assert all(
        one.tries <= then[at].tries and one.until >= then[at].until for at, one in now.items()
    )


@pytest.mark.parametrize("beyond", [0, 1])
def test_group_stops_before_its_document_is_too_large(beyond: int) -> None:
    """Entries over a long range of positions could need more bytes than a server stores."""
    back = [Range(str(at), at, at + 1, 0, after(60), 1) for at in range(MAX_BACK)]
    group = Group(MAX_BACK_SPAN - 1 + beyond, [], back, [], 0, False, 1)
    claimed = claim_step(group, NOW, after(60), MAX_BACK_SPAN + 1, [1])
    assert (claimed is None) == bool(beyond)


def test_claim_of_a_wide_entry_takes_one_read() -> None:
    wide = Range("a", 0, 3 * MAX_RANGE, ((1 << 3 * MAX_RANGE - 1) - 1) & ~0b101, NOW, 1)
    group = Group(3 * MAX_RANGE, [], [wide], [], 0, False, 1)
    found = claim_step(group, NOW, after(60), 3 * MAX_RANGE, [10])
    assert found is not None
    assert [list(each.range.positions()) for each in found[1]] == [[0, 2]]


@some_or_all
@pytest.mark.parametrize(
    ("most", "disturbance", "every"),
    [
        (1, "dies after a command", 9),
        (MAX_BACK, "loses a reply", 9),
        (MAX_BACK, "sleeps while another works", 6),
        (1, "meets a fail-over", 9),
    ],
)
def test_merging_anywhere_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, most: int, disturbance: str, every: int, some: bool
) -> None:
    """An added entry meets entries that must be alike, unless there are more than ``most``."""
    monkeypatch.setattr(entries, "MERGE_ABOVE", 1)
    monkeypatch.setattr(entries, "MAX_BACK", most)
    DISTURBANCES[disturbance](FAULTS, every if some else 1)
