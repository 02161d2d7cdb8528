"""Stages report their batches to the hooks of their client. No test needs a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyqueue import Client
from pyqueue.spark import SparkStage, addresses
from pyqueue.spark import stage as module
from tests.spark.fakes import Flow, Frame, faked, no_session, numbers, passed
from tests.support.recorder import Books, Recorder

__all__ = ["faked"]  # a fixture

pytestmark = pytest.mark.usefixtures("faked")

Transform = Callable[[Frame], Any]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def told(database: str, recorder: Recorder, books: Books) -> Iterator[Flow]:
    with Client(database, signals="none:", hooks=[recorder, books]) as client:
        flow = Flow(client)
        yield flow
        flow.release()


def test_batch_is_told_with_its_moves(told: Flow, recorder: Recorder) -> None:
    ids = told.raw.push_many(range(5))
    recorder.take()
    told.work(lambda frame: frame.made_of(frame.rows()[:3], "id", "payload"))
    received, move, commit = recorder.take()
    assert received == ("received", told.source, ids)
    assert move == ("settled", told.source, "move", ids[:3], None, told.target)
    assert commit == ("settled", told.source, "commit", ids[3:], None, None)


def without_two(frame: Frame) -> Frame:
    if 2 in numbers(frame):
        raise ArithmeticError("two")
    return passed(frame)


@pytest.mark.parametrize(
    ("output", "verb"), [("move", "move"), ("transaction", "commit"), ("table", "commit")]
)
def test_failures_of_a_stage_are_told(told: Flow, books: Books, output: str, verb: str) -> None:
    told.raw.push_many(range(4))
    if output == "table":
        told.work(lambda frame: without_two(frame) and None, to=(), max_tries=1)
    else:
        told.work(without_two, output=output, max_tries=1)
    assert +books.left == {(told.source, verb): 3, (told.source, "bury"): 1}
    assert books.total(told.source) == 0
    assert books.total(f"{told.source}.dead") == 1


def test_batch_that_fails_as_a_whole_is_told(told: Flow, recorder: Recorder) -> None:
    def fail(frame: Frame) -> Frame:
        raise ArithmeticError("all")

    ids = told.raw.push_many(range(3))
    recorder.take()
    with pytest.raises(ArithmeticError):
        told.stage(fail).run_once(no_session)
    assert recorder.take() == [
        ("received", told.source, ids),
        ("settled", told.source, "rollback", ids, None, None),
    ]


def test_messages_taken_by_another_consumer_are_told_as_lost(
    told: Flow, recorder: Recorder
) -> None:
    ids = told.raw.push_many(range(2))
    recorder.take()

    def late(frame: Frame) -> Frame:
        taken = {"$set": {"token": "another's"}}
        told.client.database["pyqueue"].update_one({"_id": ids[0]}, taken)
        return passed(frame)

    told.stage(late).run_once(no_session)
    settled = recorder.take("settled")
    assert (told.source, "move", [ids[1]], None, told.target) in settled
    assert [each[3].__name__ for each in settled if each[3] is not None] == ["LeaseLost"]


def test_stage_with_telemetry_counts_on_the_driver(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(4))
    stage = SparkStage(
        uri=database,
        source=flow.source,
        to=flow.target,
        group="g",
        transform=passed,  # type: ignore[arg-type]
        telemetry=True,
    )
    assert stage.run_once(None).written == 4
    (client,) = (
        each for (_, _, make), each in addresses._clients.items() if make is module._counting
    )
    telemetry: Any = client._telemetry  # type: ignore[attr-defined]
    telemetry.flush()
    stats = flow.raw.stats()
    assert {name: number for name, number in stats.counts.items() if number} == {
        "received": 4,
        "moved": 4,
    }
    assert stats.moved == {flow.target: 4}
