"""Stages and claims whose process dies at each of their commands, and is followed by another. No Spark: its part is a function here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import pymongo
import pytest
from pymongo.errors import PyMongoError

from pyqueue import Client, Unavailable
from pyqueue.backends.bulk import Fresh, Staging
from tests.spark.fakes import Crash, Flow, Frame, meddled, nothing

pytestmark = pytest.mark.usefixtures("faked")

#: More than any run here has commands.
MOST = 200

OUTPUTS = ("move", "transaction")


def doubled(frame: Frame) -> Frame:
    """Doubles the numbers, and leaves out the 2."""
    rows = [dict(row) for row in frame.rows() if json.loads(row["payload"]) != 2]
    for row in rows:
        row["payload"] = json.dumps(2 * json.loads(row["payload"]))
    return frame.made_of(rows, "id", "payload")


def tripled(frame: Frame) -> Frame:
    """Makes three of each."""
    return frame.made_of([row for row in frame.rows() for _ in range(3)], "payload")


def crashes(run: Callable[[int], bool]) -> int:
    """Run with a crash at each command, until one run gets through. Answers how many there were."""
    for at in range(1, MOST):
        if not run(at):
            return at - 1
    raise AssertionError("it has too many commands")


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_stage_that_dies_anywhere(shared: Client, output: str) -> None:
    transform = doubled if output == "move" else tripled
    expected = [0, 2, 6, 8] if output == "move" else sorted([*range(5)] * 3)

    def run(at: int) -> bool:
        flow = Flow(shared)
        flow.raw.push_many(range(5))
        with meddled(shared, at) as meddler, suppress(Crash):
            flow.stage(transform, output=output).run_once(nothing)
        flow.work(transform, output=output)
        assert flow.written() == expected, f"died at command {at}"
        assert flow.left() == []
        assert not flow.held()
        return meddler.happened

    assert crashes(run) > 12


def test_a_claim_that_dies_anywhere(shared: Client) -> None:
    def run(at: int) -> bool:
        flow = Flow(shared)
        flow.raw.push_many(range(5))
        seen: set[int] = set()
        done: Counter[int] = Counter()

        def worked() -> None:
            with flow.raw.claim("g", limit=3) as claim:
                found = [each["payload"] for each in shared.run(claim._documents())]
                seen.update(found)
                claim.commit()
                done.update(found)

        with meddled(shared, at) as meddler, suppress(Crash):
            worked()
        for _ in range(3):
            worked()
        assert seen == set(range(5)), f"died at command {at}"
        assert max(done.values()) == 1
        assert flow.left() == []
        return meddler.happened

    assert crashes(run) > 8


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_message_that_is_taken_away_at_any_point(shared: Client, output: str) -> None:
    """Its lease ran out, say. Whoever has it finishes it; the stage writes the others, and says that it lost one."""
    transform = doubled if output == "move" else tripled
    raw = shared.database["pyqueue"]
    lost = 0

    def run(at: int) -> bool:
        nonlocal lost
        flow = Flow(shared)
        flow.raw.push_many(range(5))

        def steal() -> None:
            for first in flow.stored(flow.source, payload=1):
                with suppress(PyMongoError), pymongo.timeout(0.2):  # one that a transaction deletes must be waited for
                    raw.update_one({"_id": first["_id"]}, {"$set": {"token": "thief"}, "$unset": {"claim": ""}})

        with meddled(shared, at, steal) as meddler:
            report = flow.stage(transform, output=output).run_once(nothing)
        held = raw.delete_many({"q": flow.source, "token": "thief"}).deleted_count
        flow.work(transform, output=output)
        written = Counter(flow.written())
        if output == "move":
            assert written == Counter([0, 2, 6, 8]) - Counter([2] * held), f"taken at command {at}"
        else:
            assert written == Counter([*range(5)] * 3) - Counter([1] * 3 * held), f"taken at command {at}"
        assert flow.left() == []
        assert report.failed == 0
        assert report.lost <= held
        lost += report.lost
        return meddler.happened

    assert crashes(run) > 12
    assert lost > 3


IDS = [f"id{number}" for number in range(6)]


def test_a_job_that_writes_and_dies_anywhere_and_is_run_again(shared: Client) -> None:
    """Also in the middle of showing what it staged. Ids are columns; some rows have keys, one of which is taken."""

    def run(at: int) -> bool:
        flow = Flow(shared)
        flow.clean.push(-1, key="k5")
        backend = flow.clean._backend
        rows = [
            Fresh(f"{flow.source}-{id}", number, None, f"k{number}" if number > 2 else None)
            for number, id in enumerate(IDS)
        ]

        def job() -> None:
            staging = Staging(backend, uuid4().hex)
            places = {"a": shared.run(staging.write("a", rows[::2])), "b": shared.run(staging.write("b", rows[1::2]))}
            shared.run(staging.publish(places))

        with meddled(shared, at) as meddler, suppress(Crash):
            job()
        died = [payload for payload in flow.written() if payload != -1]
        job()
        assert flow.written() == [-1, 0, 1, 2, 3, 4], f"died at command {at}"
        assert shared.database["pyqueue"].count_documents({"q": {"$regex": f"^~staged:{flow.target}:"}}) == 0
        assert flow.clean.counts().ready == 6
        partly.append(0 < len(died) < 5)
        return meddler.happened

    partly: list[bool] = []
    assert crashes(run) > 8
    assert any(partly)  # it did die in the middle of it


def test_the_audit_can_fail(shared: Client) -> None:
    """A stage that writes first and commits later, each by itself, loses nothing, and writes twice."""
    twice: list[bool] = []

    def run(at: int) -> bool:
        flow = Flow(shared)
        flow.raw.push_many(range(5))

        def naive() -> None:
            with flow.raw.claim("g", limit=9) as claim:
                flow.clean.push_many([each["payload"] for each in shared.run(claim._documents())])
                claim.commit()

        with meddled(shared, at) as meddler, suppress(Crash):
            naive()
        naive()
        twice.append(max(Counter(flow.written()).values()) > 1)
        assert flow.left() == []
        return meddler.happened

    crashes(run)
    assert any(twice)
    assert not all(twice)


def test_a_server_that_goes_away_in_a_transaction_fails_no_message(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(shared)
    flow.raw.push_many(range(5))
    stage = flow.stage(tripled, output="transaction")

    def gone(work: object) -> None:
        raise pymongo.errors.AutoReconnect("gone")

    with monkeypatch.context() as patch:
        patch.setattr(shared, "run_transaction", gone)
        with pytest.raises(Unavailable):
            stage.run_once(nothing)
    assert flow.raw.counts().reserved == 5  # they stay claimed, for the next run to go on with
    flow.work(tripled, output="transaction")
    assert flow.written() == sorted([*range(5)] * 3)
    assert flow.left() == []
