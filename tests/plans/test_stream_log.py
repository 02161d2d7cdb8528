"""The log of a stream under faults: whatever happens, positions are contiguous and nothing that was
acknowledged is missing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from pyqueue import ConfigurationError, Unavailable
from pyqueue.backends import all_queues
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.payloads import Codec
from pyqueue.requests import Plan
from tests.plans.runner import NOW
from tests.plans.steps import (
    Cut,
    Steps,
    at_each_command,
    cut,
    lasting,
    lost_reply,
    lost_request,
    resume,
)

#: An append to a log with messages, by a process that knows nothing, has no more commands.
MOST_COMMANDS = 8


def opened(**shape: object) -> StreamPlans:
    """Return the stream as a new process opens it."""
    return StreamPlans("log", Codec(), shape)


def contents(steps: Steps) -> list[Any]:
    """Return the payloads of the log, whose positions must be contiguous."""
    found = steps.run(opened().read(limit=100_000))
    positions = [each.position for each in found]
    assert positions == list(range(positions[0], positions[0] + len(found))) if found else True
    packs = list(steps.collection.find({"q": "~log:log"}).sort("_id", 1))
    for pack, following in pairwise(packs):
        assert pack["s"] + pack["n"] == following["s"], "a gap or an overlap"
    return [each.payload for each in found]


@pytest.fixture
def steps() -> Steps:
    """Return a store with a stream of three packs."""
    made = Steps()
    stream = opened()
    for first in range(0, 30, 10):
        made.run(stream.append(list(range(first, first + 10))))
    return made


def stalls(steps: Steps, append: Callable[[], Plan[Any]]) -> Iterator[Generator[Any, None, Any]]:
    """Yield the append, stalled before each of its commands in turn."""
    for at in range(MOST_COMMANDS):
        running = steps.stalled(append(), at)
        if running is None:
            return
        yield running


def test_append_returns_contiguous_positions(steps: Steps) -> None:
    stream = opened()
    assert steps.run(stream.append(["a", "b"])) == [30, 31]
    assert steps.run(stream.append(["c"])) == [32]
    assert [type(each).__name__ for each in steps.commands] == ["Find", "Insert"], "record, pack"
    assert contents(steps) == [*range(30), "a", "b", "c"]


def test_append_of_many_makes_packs_of_1000(steps: Steps) -> None:
    assert steps.run(opened().append(range(2500))) == list(range(30, 2530))
    sizes = [each["n"] for each in steps.collection.find({"q": "~log:log"}).sort("_id", 1)]
    assert sizes == [10, 10, 10, 1000, 1000, 500]


def test_append_of_large_messages_makes_small_packs(steps: Steps) -> None:
    large = b"x" * 3_000_000
    assert steps.run(opened().append([large, large, "small"])) == [30, 31, 32]
    sizes = [each["n"] for each in steps.collection.find({"q": "~log:log"}).sort("_id", 1)]
    assert sizes[3:] == [1, 2]


@pytest.mark.parametrize("after", [False, True])
def test_append_that_dies_anywhere_leaves_a_log(after: bool, steps: Steps) -> None:
    for at in range(MOST_COMMANDS):
        before = contents(steps)
        try:
            steps.run(opened().append([f"cut {at}"]), cut(at, after=after))
        except Cut:
            assert contents(steps) in (before, [*before, f"cut {at}"])
            steps.run(opened().append([f"whole {at}"]))
            assert contents(steps)[-1] == f"whole {at}"
        else:
            assert at > 2, "too few commands were cut"
            break


@pytest.mark.parametrize("lost", [lost_request, lost_reply])
def test_append_with_a_lost_message_is_stored_once(lost: Any, steps: Steps) -> None:
    for at in range(MOST_COMMANDS):
        before = contents(steps)
        try:
            (position,) = steps.run(opened().append([f"lost {at}"]), lost(at))
        except Unavailable:
            assert contents(steps) == before, "nothing was written before the tail was known"
        else:
            assert contents(steps) == [*before, f"lost {at}"]
            assert position == len(before)


def test_append_with_an_unknown_outcome_ends_in_time(steps: Steps) -> None:
    stream = opened()
    steps.run(stream.append(["first"]))

    def fault(number: int, done: bool) -> None:
        steps.seconds += 10
        if number > 0:
            raise Unavailable("no answer")

    with pytest.raises(Unavailable, match="no answer"):
        steps.run(stream.append(["second"]), fault)
    assert steps.run(stream.append(["third"])) == [31]


def test_append_of_many_says_how_many_are_stored(steps: Steps) -> None:
    stream = opened()
    steps.run(stream.append(["known"]))

    def fault(number: int, done: bool) -> None:
        if number >= 2:
            steps.seconds += 40
            raise Unavailable("no answer")

    with pytest.raises(Unavailable, match="the first 1000 messages are stored, up to position 103"):
        steps.run(stream.append(range(1500)), fault)
    assert contents(steps) == [*range(30), "known", *range(1000)]


def test_append_stalled_anywhere_while_another_appends(steps: Steps) -> None:
    number = 0
    for running in stalls(steps, lambda: opened().append(["stalled"])):
        (quick,) = steps.run(opened().append(["quick"]))
        (position,) = resume(running)
        found = contents(steps)
        assert (found[position], found[quick]) == ("stalled", "quick")
        number += 1
    assert number >= 4
    assert contents(steps).count("stalled") == number + 1, "the last one was not stalled"


@pytest.mark.parametrize("reads_first", [False, True])
def test_append_stalled_while_the_log_is_trimmed(reads_first: bool, steps: Steps) -> None:
    """A process sleeps for longer than any pack is kept, and wakes with an old tail."""
    number = 0
    known = opened()

    def append() -> Plan[Any]:
        steps.run(known.append(["tail known"]))
        return (known if reads_first else opened()).append(["stalled"])

    for running in stalls(steps, append):
        for _ in range(3):
            steps.run(opened().append(["quick"]))
            steps.seconds += 700
        end_of_log = steps.run(opened().append(["last"]))[0]
        steps.seconds += 700
        assert steps.run(opened().trim(end_of_log)) == end_of_log
        (position,) = resume(running)
        if position < end_of_log:  # it was stored before it slept
            assert "stalled" not in contents(steps)
        else:
            assert contents(steps)[-1] == "stalled"
            number += 1
    assert number >= 1


def test_append_stalled_while_the_stream_is_deleted() -> None:
    """It knows a tail from before another process appended."""
    steps, known, number = lasting(), opened(), 0

    def append() -> Plan[Any]:
        steps.run(known.append(["tail known"]))
        steps.run(opened().append(["quick"]))
        return known.append(["stalled"])

    for running in stalls(steps, append):
        steps.run(all_queues.delete_queue("log", True))
        (position,) = resume(running)
        record = steps.collection.find_one({"_id": "~queue:log"})
        assert position >= record["first"], "no new group would receive it"
        assert contents(steps) == ["stalled"]
        number += 1
    assert number >= 4


def test_delete_without_force_keeps_a_new_message() -> None:
    """It arrives while the stream is deleted."""

    def made() -> Steps:
        steps = lasting()
        steps.run(opened().append([]))
        return steps

    for steps, running in at_each_command(made, lambda: all_queues.delete_queue("log", False), 8):
        steps.run(opened().append(["new"]))
        with suppress(ConfigurationError):
            resume(running)
        assert contents(steps) == ["new"]


def test_deleted_stream_leaves_its_last_positions() -> None:
    steps = lasting()
    steps.run(opened().append(["old"]))
    steps.seconds += 601
    steps.run(opened().append(["young", "secret"]))
    assert steps.run(all_queues.delete_queue("log", True)) == 3
    (left,) = steps.collection.find({"_id": {"$regex": "^~log:"}})
    assert (left["s"], left["n"], "b" in left) == (1, 2, False)
    assert left["expires"] - left["processed"] == timedelta(minutes=10)
    assert steps.run(opened().append(["next"])) == [3]
    assert [each.payload for each in steps.run(opened().read(after=1))] == ["next"]


def test_tail_is_used_for_a_minute_only(steps: Steps) -> None:
    stream = opened()
    steps.run(stream.append(["a"]))
    steps.seconds += 61
    steps.run(stream.append(["b"]))
    reads = [each for each in steps.commands if type(each).__name__ == "Find"]
    assert [each.majority for each in reads][:2] == [False, True], "the record, then the tail"


def test_append_writes_and_reads_at_majority(steps: Steps) -> None:
    steps.run(opened().append(["a"]))
    inserts = [each for each in steps.commands if type(each).__name__ == "Insert"]
    assert [each.majority for each in inserts] == [True]


def test_trim_keeps_the_last_pack_and_young_packs(steps: Steps) -> None:
    assert steps.run(opened().trim(30)) == 0, "all are young"
    steps.seconds += 601
    assert steps.run(opened().trim(15)) == 10
    assert steps.run(opened().trim(30)) == 20
    assert contents(steps) == list(range(20, 30))
    assert steps.run(opened().append(["next"])) == [30]


def test_trim_before_an_instant(steps: Steps) -> None:
    steps.seconds += 1000
    steps.run(opened().append(["later"]))
    steps.seconds += 601
    assert steps.run(opened().trim(NOW + timedelta(seconds=1))) == 30
    assert contents(steps) == ["later"]


def test_trim_that_dies_anywhere_is_repeated(steps: Steps) -> None:
    steps.seconds += 601
    for after in (False, True):
        for at in range(MOST_COMMANDS):
            try:
                steps.run(opened().trim(20), cut(at, after=after))
            except Cut:
                assert set(range(20, 30)) <= set(contents(steps))
                steps.run(opened().append(["more"]))
    assert steps.run(opened().trim(20)) == 20


def test_retention_deletes_by_the_way() -> None:
    steps = Steps()
    stream = opened(retention=3600.0)
    steps.run(stream.append(["old"]))
    steps.seconds += 3000
    steps.run(stream.append(["young"]))
    steps.seconds += 601
    steps.run(stream.append(["last"]))
    assert contents(steps) == ["young", "last"]
    assert steps.run(opened().read())[0].position == 1


def test_position_at_an_instant(steps: Steps) -> None:
    from pyqueue.backends.streams.log import position_at

    stream = opened()
    for number in range(30, 40):
        steps.seconds += 10
        steps.run(stream.append([number]))
    for seconds, position in ((0, 0), (0.001, 30), (10, 30), (11, 31), (100, 39), (101, 40)):
        at = NOW + timedelta(seconds=seconds)
        assert steps.run(position_at("log", at)) == position, seconds
    assert steps.run(position_at("log", "first")) == 0
    assert steps.run(position_at("log", "last")) == 40
    assert steps.run(position_at("log", 17)) == 17
    for wrong in (-1, True, "begin", 1.5, None, NOW.replace(tzinfo=None)):
        with pytest.raises(ConfigurationError, match="start"):
            steps.run(position_at("log", wrong))


def test_read_begins_within_a_pack(steps: Steps) -> None:
    found = steps.run(opened().read(after=14, limit=7))
    assert [each.position for each in found] == list(range(15, 22))
    assert steps.run(opened().read(after=29)) == []
    assert steps.run(opened().read(after=5000)) == []


def test_older_release_refuses_the_record(steps: Steps) -> None:
    record = steps.collection.find_one({"_id": "~queue:log"})
    assert (record["kind"], record["v"]) == ("stream", 2)
    assert record["shape"] == {"retention": 7 * 86400.0}
    names = steps.run(all_queues.names())
    assert names == ["log"]
