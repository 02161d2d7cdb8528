"""Stages and claims whose process dies before each of their commands. Another process follows.

No test here needs Spark: a function stands in for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pymongo
import pytest
from pymongo.errors import PyMongoError

from pyqueue import Client, Unavailable
from pyqueue.backends.bulk.staging import Staging
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.options import NewMessage
from pyqueue.queue_base import backend_of
from pyqueue.requests import Plan, UpdateEach
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import batches as module
from tests.spark.fakes import Crash, Flow, Frame, counts, meddled, no_session, outputs, passed
from tests.support.eventually import eventually
from tests.support.samples import at_each, some_or_all

pytestmark = pytest.mark.usefixtures("faked")

#: More commands than any run here sends.
MAX_CLAIM = 200


def doubled(frame: Frame) -> Frame:
    """Double the numbers; leave out the 2."""
    rows = [dict(row) for row in frame.rows() if json.loads(row["payload"]) != 2]
    for row in rows:
        row["payload"] = json.dumps(2 * json.loads(row["payload"]))
    return frame.made_of(rows, "id", "payload")


def tripled(frame: Frame) -> Frame:
    """Return each row three times."""
    return frame.made_of([row for row in frame.rows() for _ in range(3)], "payload")


def transformed(output: str) -> tuple[Callable[[Frame], Frame], list[int]]:
    """Return a transform for an output, and the payloads that it makes of five messages."""
    return (doubled, [0, 2, 6, 8]) if output == "move" else (tripled, sorted([*range(5)] * 3))


def crashes(run: Callable[[int], bool]) -> int:
    """Run with a crash at each command, until a run gets through; return the number of crashes."""
    for at in range(1, MAX_CLAIM):
        if not run(at):
            return at - 1
    raise AssertionError("the run has too many commands")


def stage_dies(flow_of: Callable[[], Flow], output: str, few: int | None) -> int:
    """Let a stage die at its commands, and check that nothing is lost. Return their number.

    Args:
        flow_of: Returns two new queues.
        output: "move" or "transaction".
        few: How many deaths are tried; None: one at each command.
    """
    transform, expected = transformed(output)

    def run(at: int) -> int:
        flow = flow_of()
        flow.raw.push_many(range(5))
        with meddled(flow.client, at) as meddler, suppress(Crash):
            flow.stage(transform, output=output).run_once(no_session)
        flow.work(transform, output=output)
        flow.check_moved(expected, f"died at command {at}")
        return meddler.count

    return at_each(run, few)


@some_or_all
@outputs
def test_stage_that_dies_at_any_command_loses_nothing(
    shared: Client, output: str, few: int | None
) -> None:
    assert stage_dies(lambda: Flow(shared), output, few) > 12


@some_or_all
def test_claim_that_dies_at_any_command_loses_nothing(shared: Client, few: int | None) -> None:
    def run(at: int) -> int:
        flow = Flow(shared)
        flow.raw.push_many(range(5))
        seen: set[int] = set()
        done: Counter[int] = Counter()

        def worked() -> None:
            with flow.raw.claim("g", limit=3) as claim:
                found = [each["payload"] for each in runner_of(shared).run(claim._documents())]
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
        return meddler.count

    assert at_each(run, few) > 8


@some_or_all
@outputs
def test_stage_skips_a_message_taken_at_any_command(
    shared: Client, output: str, few: int | None
) -> None:
    """Its next holder finishes it. The stage writes the other messages and reports one as lost."""
    transform, expected = transformed(output)
    raw = shared.database["pyqueue"]
    lost = 0

    def run(at: int) -> int:
        nonlocal lost
        flow = Flow(shared)
        flow.raw.push_many(range(5))

        def steal() -> None:
            taken = {"$set": {"token": "thief"}, "$unset": {"claim": ""}}
            for first in flow.stored(flow.source, payload=1):
                # A message that a transaction has deleted blocks the update until the timeout.
                with suppress(PyMongoError), pymongo.timeout(1):
                    raw.update_one({"_id": first["_id"]}, taken)

        with meddled(shared, at, steal) as meddler:
            report = flow.stage(transform, output=output).run_once(no_session)
        held = raw.delete_many({"q": flow.source, "token": "thief"}).deleted_count
        flow.work(transform, output=output)
        missing = Counter([2] * held if output == "move" else [1] * 3 * held)
        assert Counter(flow.written()) == Counter(expected) - missing, f"taken at command {at}"
        assert flow.left() == []
        assert report.failed == 0
        assert report.lost <= held
        lost += report.lost
        return meddler.count

    assert at_each(run, few and few + 2) > 12
    assert lost > (3 if few is None else 0)


@outputs
def test_stage_whose_messages_are_all_taken_writes_nothing(flow: Flow, output: str) -> None:
    flow.raw.push_many(range(5))

    def transform(frame: Frame) -> Frame:
        flow.steal(*range(5))
        return passed(frame)

    report = flow.stage(transform, output=output).run_once(no_session)
    assert counts(report) == (5, 0, 0, 0, 5)
    assert flow.written() == []
    assert flow.left() == [*range(5)]  # they belong to the other consumer


def test_transaction_counts_each_taken_message_once(flow: Flow) -> None:
    """The transaction is repeated with the messages that are left, and in the end with halves."""
    flow.raw.push_many(range(10))
    thefts = [0, 9, 5, 1]

    def transform(frame: Frame) -> Frame:
        if thefts:
            flow.steal(thefts.pop())
        return frame.made_of(frame.rows(), "payload")

    report = flow.stage(transform, output="transaction").run_once(no_session)
    assert thefts == []
    assert counts(report) == (10, 6, 0, 0, 4)
    assert flow.written() == [2, 3, 4, 6, 7, 8]
    assert flow.left() == [0, 1, 5, 9]


def test_long_transaction_leaves_out_taken_messages(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it writes, it reads which messages it holds, and transforms these again."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=count(step=1000).__next__))
    flow.raw.push_many(range(5))
    sizes: list[int] = []

    def transform(frame: Frame) -> Frame:
        sizes.append(len(frame.rows()))
        if len(sizes) == 1:
            flow.steal(3)
        return frame.made_of(frame.rows(), "payload")

    report = flow.stage(transform, output="transaction").run_once(no_session)
    assert sizes == [5, 4]
    assert (report.written, report.lost) == (4, 1)
    assert flow.written() == [0, 1, 2, 4]
    assert flow.left() == [3]


IDS = [f"id{number}" for number in range(6)]


def test_write_that_dies_at_any_command_can_be_repeated(shared: Client) -> None:
    """It may also die while it publishes. Some rows have keys, and one of the keys is taken."""

    def run(at: int) -> bool:
        flow = Flow(shared)
        flow.clean.push(-1, key="k5")
        backend = backend_of(flow.clean)
        rows = [
            NewMessage(f"{flow.source}-{id}", number, None, f"k{number}" if number > 2 else None)
            for number, id in enumerate(IDS)
        ]

        def job() -> None:
            staging = Staging(backend.target, uuid4().hex)
            run = runner_of(shared).run
            parts = {"a": rows[::2], "b": rows[1::2]}
            places = {place: run(staging.write(place, part)) for place, part in parts.items()}
            run(staging.publish(places))

        with meddled(shared, at) as meddler, suppress(Crash):
            job()
        died = [payload for payload in flow.written() if payload != -1]
        job()
        assert flow.written() == [-1, 0, 1, 2, 3, 4], f"died at command {at}"
        assert flow.staged() == 0
        assert flow.clean.counts().ready == 6
        partly.append(0 < len(died) < 5)
        return meddler.happened

    partly: list[bool] = []
    assert crashes(run) > 8
    assert any(partly)  # some crashes came while it published


def test_stage_without_atomic_moves_writes_twice(shared: Client) -> None:
    """This shows that the tests above can fail: here the write and the commit are two steps."""
    twice: list[bool] = []

    def run(at: int) -> None:
        flow = Flow(shared)
        flow.raw.push_many(range(5))

        def naive() -> None:
            with flow.raw.claim("g", limit=9) as claim:
                flow.clean.push_many(
                    [each["payload"] for each in runner_of(shared).run(claim._documents())]
                )
                claim.commit()

        with meddled(shared, at), suppress(Crash):
            naive()
        naive()
        twice.append(max(Counter(flow.written()).values()) > 1)
        assert flow.left() == []

    for at in range(1, MAX_CLAIM):
        run(at)
        if any(twice):
            break
    assert any(twice)
    assert not all(twice)


def test_transaction_keeps_its_claim_if_the_server_is_gone(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(shared)
    flow.raw.push_many(range(5))
    stage = flow.stage(tripled, output="transaction")

    def gone(work: object) -> None:
        raise pymongo.errors.AutoReconnect("gone")

    with monkeypatch.context() as patch:
        patch.setattr(runner_of(shared), "run_transaction", gone)
        with pytest.raises(Unavailable):
            stage.run_once(no_session)
    assert flow.raw.counts().reserved == 5  # the next run continues with them
    flow.work(tripled, output="transaction")
    flow.check_moved(sorted([*range(5)] * 3))


def test_move_keeps_its_claim_if_the_server_is_gone(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run continues with the messages that were not moved."""
    flow = Flow(shared)
    flow.raw.push_many(range(5))
    driver: Any = runner_of(shared).open()
    send = driver._send

    def gone(request: Any) -> Any:
        if isinstance(request, UpdateEach):
            raise pymongo.errors.AutoReconnect("gone")
        return send(request)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_send", gone)
        with pytest.raises(Unavailable):
            flow.stage(doubled).run_once(no_session)
    assert flow.raw.counts().reserved == 5
    assert [each["tries"] for each in flow.stored(flow.source)] == [1] * 5
    (report,) = flow.work(doubled)
    assert counts(report) == (5, 4, 1, 0, 0)
    flow.check_moved([0, 2, 6, 8])


def test_stage_goes_on_after_a_failed_renewal(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(claims: NamedClaims, token: str, lease: float) -> Plan[None]:
        raise Unavailable("the server went away")

    monkeypatch.setattr(NamedClaims, "renew", failing)
    flow.raw.push_many(range(5))

    def transform(frame: Frame) -> Frame:
        text = "could not renew the lease of group 'g', trying again: the server went away"
        eventually(lambda: text in caplog.text, "a log message")
        return doubled(frame)

    report = flow.stage(transform, lease=3).run_once(no_session)
    assert (report.written, report.dropped, report.failed) == (4, 1, 0)
    assert flow.written() == [0, 2, 6, 8]
