"""Stages that claim the next batch while they work on one.

No test here needs Spark: a function stands in for it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Fenced, Unavailable
from pyqueue.spark.batches import Batches
from tests.spark.fakes import Crash, Flow, Frame, meddled, no_session, numbers, outputs, passed
from tests.support.eventually import eventually
from tests.support.samples import at_each, some_or_all

pytestmark = pytest.mark.usefixtures("faked")


def claims_of(flow: Flow) -> Counter[int]:
    """Return how many messages of the source each claim holds."""
    return Counter(each["claim"]["n"] for each in flow.stored(flow.source) if "claim" in each)


def await_ahead(flow: Flow, held: int) -> None:
    """Wait until the stage holds so many messages. Those of a claim appear one after the other."""
    eventually(lambda: claims_of(flow).total() == held, "a claim ahead")


def run(stage: Batches) -> list[int]:
    """Run a stage until nothing is ready. Return the sizes of its batches."""
    sizes = []
    while report := stage.run_once(no_session, ahead=True).claimed:
        sizes.append(report)
    return sizes


@outputs
def test_next_batch_is_claimed_during_the_work(flow: Flow, output: str) -> None:
    """The last batch is not full, so nothing is claimed ahead of messages that may still come."""
    flow.raw.push_many(range(8))
    worked: list[list[Any]] = []
    seen: list[dict[int, int]] = []

    def transform(frame: Frame) -> Frame:
        worked.append(numbers(frame))
        if len(worked) < 3:
            await_ahead(flow, held=7 - len(worked))
        seen.append(dict(claims_of(flow)))
        return passed(frame)

    stage = flow.stage(transform, output=output, most=3)
    assert run(stage) == [3, 3, 2]
    assert worked == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert seen == [{1: 3, 2: 3}, {2: 3, 3: 2}, {3: 2}]
    flow.check_moved(range(8))


def test_one_batch_by_itself_claims_nothing_ahead(flow: Flow) -> None:
    flow.raw.push_many(range(4))
    assert flow.stage(passed, most=2).run_once(no_session).written == 2
    assert not flow.held()
    assert flow.left() == [2, 3]


def test_release_gives_back_what_was_claimed_ahead(flow: Flow) -> None:
    """No try is counted, and the next process does not wait."""
    flow.raw.push_many(range(4))
    stage = flow.stage(passed, most=2)
    assert stage.run_once(no_session, ahead=True).written == 2
    stage.release()
    assert not flow.held()
    assert {each["tries"] for each in flow.stored(flow.source)} == {0}
    assert [each.written for each in flow.work(passed, owner="other")] == [2]


@pytest.mark.parametrize("error", [ArithmeticError, ConfigurationError])
def test_failing_batch_gives_back_what_was_claimed_ahead(
    flow: Flow, error: type[Exception]
) -> None:
    flow.raw.push_many(range(4))

    def transform(frame: Frame) -> Frame:
        await_ahead(flow, held=4)
        raise error("no")

    stage = flow.stage(transform, most=2)
    with pytest.raises(error):
        stage.run_once(no_session, ahead=True)
    assert not flow.held()
    tried = 1 if error is ArithmeticError else 0
    tries = {each["payload"]: each["tries"] for each in flow.stored(flow.source)}
    assert tries == {0: tried, 1: tried, 2: 0, 3: 0}
    assert sum(each.written for each in flow.work(passed)) == 4


@some_or_all
@outputs
def test_stage_that_dies_with_two_batches_loses_nothing(
    shared: Client, output: str, few: int | None
) -> None:
    def die(at: int) -> int:
        flow = Flow(shared)
        flow.raw.push_many(range(7))
        with meddled(shared, at) as meddler, suppress(Crash):
            run(flow.stage(passed, output=output, most=2))
        flow.work(passed, output=output, most=2)
        flow.check_moved(range(7), f"died at command {at}")
        return meddler.count

    assert at_each(die, few) > 40


@some_or_all
def test_lost_answers_lose_nothing_with_two_batches(shared: Client, few: int | None) -> None:
    """The stage continues in the same process, with all that is outstanding."""

    def lose(at: int) -> int:
        flow = Flow(shared)
        flow.raw.push_many(range(7))

        def away() -> None:
            raise Unavailable("lost")

        stage = flow.stage(passed, most=2)
        with meddled(shared, at, away) as meddler:
            for tries in count():
                assert tries < 5
                with suppress(Unavailable):
                    run(stage)
                    break
        run(stage)
        flow.release()
        stage.release()
        flow.check_moved(range(7), f"lost command {at}")
        return meddler.count

    assert at_each(lose, few) > 40


def test_fenced_stage_leaves_both_batches_to_the_new_runner(flow: Flow) -> None:
    flow.raw.push_many(range(4))
    others: list[int] = []

    def transform(frame: Frame) -> Frame:
        await_ahead(flow, held=4)
        flow.lapse()
        others.extend(each.written for each in flow.work(passed, owner="other"))
        return passed(frame)

    stage = flow.stage(transform, most=2)
    with pytest.raises(Fenced):
        stage.run_once(no_session, ahead=True)
    assert sum(others) == 4
    flow.check_moved(range(4))


def test_batch_ahead_that_another_consumer_took_is_skipped(flow: Flow) -> None:
    """The stage continues with the messages that are ready."""
    flow.raw.push_many(range(6))

    def transform(frame: Frame) -> Frame:
        if 0 in numbers(frame):
            await_ahead(flow, held=4)
            flow.steal(2, 3)
        return passed(frame)

    stage = flow.stage(transform, most=2)
    assert sum(run(stage)) in (4, 6)  # the theft may come before or after the thread has read them
    assert flow.written() == [0, 1, 4, 5]
    assert flow.left() == [2, 3]
