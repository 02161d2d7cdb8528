"""Stages and claims with a real session; at the end, tests that need none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from bson import ObjectId
from pydantic import BaseModel
from pyspark.sql.pandas.types import to_arrow_schema

from pyqueue import UNCHANGED, AsyncClient, Client, ConfigurationError, Limit
from pyqueue.backends import settling
from pyqueue.backends.moving import move_each
from pyqueue.spark import SparkStage
from pyqueue.spark import stage as module
from pyqueue.spark.columns import columns
from pyqueue.spark.models import struct_of
from tests.spark.fakes import Flow, Frame, counts, no_session
from tests.spark.session import URI_ENV

NOON = datetime(2013, 7, 1, 12, tzinfo=UTC)


class Flight(BaseModel):
    carrier: str
    delay: int
    tags: list[str] = []


FLIGHTS = [
    {"carrier": carrier, "delay": delay, "tags": ["x"]}
    for carrier in ("AA", "UA")
    for delay in (-5, 0, 10)
]


def stage_of(flow: Flow, transform: Any, **options: Any) -> SparkStage:
    """Return a stage between the queues of a flow, with a model."""
    given: dict[str, Any] = {"source": flow.source, "to": flow.target, "group": "g"}
    given["transform"] = transform
    return SparkStage(uri_env=URI_ENV, model=Flight, **(given | options))


@pytest.mark.spark_long
def test_stage_moves_transformed_messages(spark: Any, flow: Flow) -> None:
    flow.raw.push_many(FLIGHTS, headers={"n": 5})
    stage = stage_of(
        flow,
        lambda df: df.where("payload.delay > 0").selectExpr(
            "id", "payload", "headers", "payload.carrier AS key"
        ),
    )
    (report,) = stage.run(spark, until_empty=True)
    assert counts(report) == (6, 2, 4, 0, 0)
    moved = flow.clean.peek()
    assert [(each.payload, each.headers, each.key) for each in moved] == [
        ({"carrier": carrier, "delay": 10, "tags": ["x"]}, {"n": 5}, carrier)
        for carrier in ("AA", "UA")
    ]
    assert [[stop["q"] for stop in each.trail] for each in moved] == [[flow.source]] * 2
    assert flow.left() == []


@pytest.mark.spark_long
@pytest.mark.filterwarnings("ignore:Cannot infer the eval type:UserWarning")
def test_stage_by_transaction_writes_any_rows(spark: Any, flow: Flow) -> None:
    """One message fails. The other messages are written."""
    from pyspark.sql.functions import udf

    flow.raw.push_many([*FLIGHTS, {"carrier": "ZZ", "delay": 7}])

    def check(carrier):  # type: ignore[no-untyped-def]  # Spark interprets type hints
        if carrier == "ZZ":
            raise ArithmeticError("no such carrier")
        return carrier

    checked = udf(check, "string")
    stage = stage_of(
        flow,
        lambda df: (
            df.groupBy(checked("payload.carrier").alias("carrier"))
            .count()
            .selectExpr("struct(carrier, count) AS payload")
        ),
        output="transaction",
        max_tries=1,
    )
    report = stage.run_once(spark)
    assert (report.claimed, report.failed, report.lost) == (7, 1, 0)
    total = Counter[str]()
    for each in flow.clean.peek(100):
        total[each.payload["carrier"]] += each.payload["count"]
    assert total == {"AA": 3, "UA": 3}
    (grave,) = flow.client.queue(f"{flow.source}.dead").peek()
    assert grave.payload["carrier"] == "ZZ"
    assert grave.error is not None
    assert "no such carrier" in grave.error["message"]
    assert flow.left() == []


@pytest.mark.spark_long
def test_claim_dataframe_holds_its_rows(spark: Any, database: str, flow: Flow) -> None:
    flow.raw.push_many(FLIGHTS)
    queue = flow.client.queue(flow.source, Flight)
    with queue.claim("g", limit=100) as claim:
        df = claim.dataframe(spark)
        rows = df.groupBy("payload.carrier").sum("payload.delay").collect()
        assert {row[0]: row[1] for row in rows} == {"AA": 5, "UA": 5}
        assert df.count() == 6
        claim.commit()
        assert df.count() == 6  # the DataFrame contains its rows
    assert flow.left() == []
    with Client("memory:") as memory:
        memory.queue("a").push({"x": 1})
        with memory.queue("a").claim("g", limit=5) as claim:
            assert claim.dataframe(spark).collect()[0].payload == '{"x": 1}'


@pytest.mark.spark_long
def test_claim_dataframe_names_a_message_that_does_not_fit(spark: Any, flow: Flow) -> None:
    (good, bad) = flow.raw.push_many([FLIGHTS[0], {"carrier": "AA", "delay": 0.5}])
    assert good != bad
    queue = flow.client.queue(flow.source, Flight)
    with (
        pytest.raises(ValueError, match=f"message {bad} does not match"),
        queue.claim("g", limit=100) as claim,
    ):
        claim.dataframe(spark)
    assert queue.counts().total == 2


# ---- without a session


class Session:
    """Makes Frames, and records in which thread."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def createDataFrame(self, table: pa.Table, schema: Any) -> Frame:  # noqa: N802
        """Make a frame, as a session makes a DataFrame."""
        self.threads.append(threading.get_ident())
        return Frame(table, schema)


@pytest.mark.parametrize("model", [None, Flight])
def test_async_claim_dataframe_is_made_in_a_thread(model: type[Flight] | None) -> None:
    """Spark blocks, so a thread calls it, not the event loop."""
    session = Session()

    async def main() -> Frame:
        async with AsyncClient("memory:") as client:
            await client.queue("a").push_many(FLIGHTS[:2], headers={"n": 5})
            async with client.queue("a", model).claim("g", limit=5) as claim:
                frame: Frame = await claim.dataframe(session)
                assert len(claim) == 2
                await claim.commit()
            assert (await client.queue("a").counts()).total == 0
        return frame

    frame = asyncio.run(main())
    rows = frame.rows()
    payloads = [row["payload"] if model else json.loads(row["payload"]) for row in rows]
    assert payloads == FLIGHTS[:2]
    assert [(row["queue"], row["headers"], row["tries"]) for row in rows] == [
        ("a", [("n", "5")], 1)
    ] * 2
    assert (frame.schema["payload"].dataType == struct_of(Flight)) == (model is not None)
    assert len(session.threads) == 1
    assert threading.get_ident() not in session.threads


class Given(Frame):
    """Stands in for the DataFrame of a stream's batch."""

    def isEmpty(self) -> bool:  # noqa: N802
        """Return whether there are no rows, as a DataFrame does."""
        return not self.rows()


def plain(flow: Flow, database: str, transform: Any = None) -> SparkStage:
    """Return a stage between the queues of a flow, without a model."""
    return SparkStage(
        uri=database, source=flow.source, to=flow.target, group="g", transform=transform
    )


def given(*rows: dict[str, Any]) -> Any:
    """Return a stream's batch with these rows."""
    schema = columns(None)
    return Given(pa.Table.from_pylist([*rows], to_arrow_schema(schema, timezone="UTC")), schema)


def test_foreach_batch_skips_a_batch_done_before(flow: Flow, database: str) -> None:
    flow.raw.push_many(range(2))

    def transform(frame: Any) -> Any:
        raise AssertionError("the batch was done before")

    plain(flow, database, transform).foreach_batch(given(), 0)
    assert flow.left() == [0, 1]
    assert not flow.held()


def test_foreach_batch_refuses_a_batch_of_another_source(flow: Flow, database: str) -> None:
    """No process would finish the messages of such a batch."""
    row = {"id": "a", "queue": "another", "payload": "1", "when": NOON, "tries": 1}
    text = f"^foreach_batch: group 'g' of queue '{flow.source}' has nothing claimed"
    with pytest.raises(ConfigurationError, match=text):
        plain(flow, database).foreach_batch(given(row), 0)
    assert flow.written() == []


STORED = [1, 2.0, "text", {"at": NOON, "id": ObjectId(), "n": [1, None]}, None]


@pytest.mark.usefixtures("faked")
def test_stage_writes_only_payloads_that_change(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 and 2.0 are equal in Python, and not in the database."""
    written: list[Any] = []

    def watched(*args: Any) -> Any:
        written.extend(new.payload for _, new in args[-1] if new.payload is not UNCHANGED)
        return move_each(*args)

    def transform(frame: Frame) -> Frame:
        rows = [dict(row) for row in frame.rows()]
        for row in rows:
            row["payload"] = {"1": "7", "2.0": "2"}.get(row["payload"], row["payload"])
        return frame.made_of(rows, "id", "payload")

    monkeypatch.setattr(settling, "move_each", watched)
    flow.raw.push_many(STORED)
    assert flow.stage(transform).run_once(no_session).written == len(STORED)
    assert written == [7, 2]
    moved = [each.payload for each in flow.clean.peek(10)]
    assert sorted(map(repr, moved)) == sorted(map(repr, [7, 2, *STORED[2:]]))


@pytest.mark.usefixtures("faked")
def test_large_batch_is_settled_by_several_commands(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message has its result, whichever command settles it."""
    monkeypatch.setattr(settling, "MAX_BATCH", 2)
    flow.raw.push_many(range(9))

    def transform(frame: Frame) -> Frame:
        flow.steal(4)
        rows = [{"id": row["id"], "payload": f"1{row['payload']}"} for row in frame.rows()]
        return frame.made_of(rows, "id", "payload")

    report = flow.stage(transform).run_once(no_session)
    assert (report.claimed, report.written, report.lost) == (9, 8, 1)
    assert flow.written() == [10, 11, 12, 13, 15, 16, 17, 18]


@pytest.mark.usefixtures("faked")
def test_stage_run_waits_for_more(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads an empty queue again and again, and reports only batches with messages."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            flow.raw.push_many([1, 2])

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    flow.raw.push(0)
    reports = plain(flow, database).run(None)
    assert [next(reports).written, waits] == [1, []]
    assert [next(reports).written, waits] == [2, [module.IDLE_DELAY_S] * 2]
    assert flow.written() == [0, 1, 2]


@pytest.mark.usefixtures("faked")
def test_stage_until_empty_waits_for_permits(
    flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a slow rate, a claim may get nothing while messages are ready."""
    monkeypatch.setattr(module, "IDLE_DELAY_S", 0.1)
    flow.client.queue(flow.source, limit=Limit(rate=2, burst=1)).push_many(range(3))
    reports = plain(flow, database).run(None, until_empty=True)
    assert [each.written for each in reports] == [1, 1, 1]
    flow.check_moved(range(3))
