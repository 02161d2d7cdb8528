"""Bad records of streams and tables: payloads that do not fit their type. No session is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyqueue import Client, InvalidMessage
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import QueueDataSource
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.columns import columns
from tests.spark.engine import (
    Checkpoint,
    Deaths,
    Engine,
    Sink,
    nothing,
    source,
    table_rows,
    target,
    to_queue,
)
from tests.spark.fakes import Crash, Flow, meddled
from tests.support.samples import at_each, some_or_all

#: The columns of a read whose payloads are numbers.
NUMBERS = columns(LongType())
#: The same, with the column of the payloads that do not fit.
CORRUPT = StructType([*NUMBERS.fields, StructField("corrupt", StringType())])
#: The third payload does not fit.
PAYLOADS = [0, 1, "two", 3, 4]

Rows = list[dict[str, Any]]


def numbers(
    flow: Flow,
    database: str,
    sink: Sink,
    checkpoint: Checkpoint | None = None,
    step: Callable[[str], object] = nothing,
    schema: StructType = NUMBERS,
    **options: str,
) -> Engine:
    """Return a query that reads numbers, in batches of three."""
    given = {"payloadType": "bigint", "maxMessagesPerBatch": "3"} | options
    return Engine(source(flow, database, **given), sink, checkpoint, step, schema=schema)


def into(rows: Rows) -> Sink:
    """Return a sink that keeps all rows."""

    def keep(number: int, batches: list[pa.RecordBatch]) -> None:
        for batch in batches:
            rows.extend(batch.to_pylist())

    return keep


def failing(number: int, batches: list[pa.RecordBatch]) -> None:
    """A sink that is down."""
    raise Crash


def payloads(rows: Rows) -> list[Any]:
    return [row["payload"] for row in rows]


def dead(flow: Flow) -> list[dict[str, Any]]:
    """Return the documents of the messages that were buried."""
    return flow.stored(f"{flow.source}.dead")


# ---- streams


def test_stream_buries_a_bad_record_and_goes_on(flow: Flow, database: str) -> None:
    flow.raw.push_many(PAYLOADS)
    rows: Rows = []
    engine = numbers(flow, database, into(rows))
    engine.batch()
    assert dead(flow) == []  # Spark has not committed the batch
    engine.run()
    assert sorted(payloads(rows)) == [0, 1, 3, 4]
    assert flow.left() == []
    (buried,) = dead(flow)
    assert (buried["payload"], buried["error"]["type"]) == ("two", "InvalidMessage")
    assert (buried["dead"]["from"], buried["dead"]["reason"]) == (flow.source, "invalid")
    assert buried["dead"]["tries"] == 1
    assert "does not match bigint" in buried["error"]["message"]
    assert "two" not in buried["error"]["message"]  # an error names no values


@pytest.mark.parametrize("by", ["reader", "listener"])
def test_burial_honours_the_options_of_the_queue(
    flow: Flow, database: str, shared: Client, by: str
) -> None:
    """They are in the queue's record: the stream itself has no such options."""
    queue = shared.queue(flow.source, dead_letter=f"{flow.source}-graves", history=3600)
    queue.push_many(PAYLOADS[:3])
    engine = numbers(flow, database, into([]))
    engine.batch()
    if by == "listener":
        engine.listen()
    else:
        engine.batch()
    engine.reader.stop()
    assert [each["payload"] for each in flow.stored(f"{flow.source}-graves")] == ["two"]
    assert sorted(each.payload for each in queue.history()) == [0, 1]
    assert dead(flow) == []


def dies_and_goes_on(
    flow: Flow, database: str, die: Callable[[Callable[[], object]], None]
) -> None:
    """Let a stream into the target die, and run it again to its end."""
    flow.raw.push_many(PAYLOADS)
    checkpoint = Checkpoint()

    def run(step: Callable[[str], object] = nothing) -> None:
        sink = to_queue(target(flow, database), step, NUMBERS, checkpoint.query)
        engine = numbers(flow, database, sink, checkpoint, step)
        try:
            engine.run()
        finally:
            engine.reader.stop()  # a dead process renews nothing

    die(run)
    if not checkpoint.offsets:  # this restart knows of no former runner
        flow.lapse()
    run()
    flow.check_moved([0, 1, 3, 4])
    assert [(each["payload"], each["dead"]["tries"]) for each in dead(flow)] == [("two", 1)]


@some_or_all
def test_bad_record_is_buried_if_the_stream_dies_at_any_step(
    shared: Client, database: str, few: int | None
) -> None:
    def run(at: int) -> int:
        death = Deaths(at)

        def die(run: Callable[..., object]) -> None:
            with suppress(Crash):
                run(death)

        dies_and_goes_on(Flow(shared), database, die)
        return len(death.steps)

    assert at_each(run, few) > 14


@some_or_all
def test_bad_record_is_buried_if_the_stream_dies_at_any_command(
    shared: Client, database: str, few: int | None
) -> None:
    client = client_of(NamespaceAddress.of(database, None, "pyqueue"))
    runner_of(client).enter()

    def run(at: int) -> int:
        met = 0

        def die(run: Callable[[], object]) -> None:
            nonlocal met
            with meddled(client, at) as meddler, suppress(Crash):
                run()
            met = meddler.count

        dies_and_goes_on(Flow(shared), database, die)
        return met

    assert at_each(run, few) > 20


def test_restarts_while_the_sink_is_down_bury_nothing(
    flow: Flow, database: str, shared: Client
) -> None:
    shared.queue(flow.source, max_tries=2).push_many([0, 1, 3, 4])
    checkpoint, rows = Checkpoint(), []  # type: ignore[var-annotated]
    for _ in range(6):
        engine = numbers(flow, database, failing, checkpoint)
        with pytest.raises(Crash):
            engine.run()
        engine.reader.stop()
    numbers(flow, database, into(rows), checkpoint).run()
    assert sorted(payloads(rows)) == [0, 1, 3, 4]
    assert {row["tries"] for row in rows} == {1}
    assert dead(flow) == []


def test_corrected_type_reads_what_was_bad(flow: Flow, database: str) -> None:
    """The first query notes all messages as bad, and dies before the batch is committed."""
    flow.raw.push_many(["one", "two"])
    checkpoint, rows = Checkpoint(), []  # type: ignore[var-annotated]
    with pytest.raises(Crash):
        numbers(flow, database, failing, checkpoint).run()
    assert len(flow.stored(flow.source, **{"claim.bad": {"$exists": True}})) == 2
    strings = columns(StringType())
    numbers(flow, database, into(rows), checkpoint, schema=strings, payloadType="string").run()
    assert sorted(payloads(rows)) == ["one", "two"]
    assert flow.left() == []
    assert dead(flow) == []


def test_stream_reads_bad_records_as_null_if_asked(flow: Flow, database: str) -> None:
    flow.raw.push_many([0, {"a": [1]}, 2])
    rows: Rows = []
    options: dict[str, Any] = {"onBadRecord": "null", "columnNameOfCorruptRecord": "corrupt"}
    numbers(flow, database, into(rows), schema=CORRUPT, **options).run()
    found = sorted((row["payload"], row["corrupt"]) for row in rows if row["payload"] is not None)
    assert found == [(0, None), (2, None)]
    assert [row["corrupt"] for row in rows if row["payload"] is None] == ['{"a": [1]}']
    assert flow.left() == []
    assert dead(flow) == []


def test_stream_fails_at_a_bad_record_if_asked(flow: Flow, database: str) -> None:
    ids = flow.raw.push_many(PAYLOADS)
    engine = numbers(flow, database, into([]), onBadRecord="fail")
    with pytest.raises(InvalidMessage, match=f"message {ids[2]} does not match bigint") as caught:
        engine.run()
    assert "onBadRecord" in str(caught.value)
    engine.reader.stop()
    assert len(flow.stored(flow.source)) == 5


def test_stream_of_dead_messages_reads_a_bad_one_as_null(flow: Flow, database: str) -> None:
    """A dead message is never buried again."""
    flow.raw.push_many(PAYLOADS[:3])
    flow.raw.bury(*flow.raw.reserve_many(3))
    rows: Rows = []
    numbers(flow, database, into(rows), queue=f"{flow.source}.dead").run()
    assert sorted(payloads(rows), key=str) == [0, 1, None]
    assert dead(flow) == []


# ---- tables


def table(flow: Flow, database: str, schema: StructType = NUMBERS, **options: str) -> Rows:
    """Return the rows of a batch read of numbers."""
    given = {"uri": database, "queue": flow.source, "payloadType": "bigint"}
    return table_rows(given | options, schema)


def test_table_fails_at_a_bad_record_and_names_the_remedy(flow: Flow, database: str) -> None:
    ids = flow.raw.push_many(PAYLOADS)
    before = flow.stored(flow.source)
    with pytest.raises(InvalidMessage, match=f"message {ids[2]} does not match .*onBadRecord"):
        table(flow, database)
    assert flow.stored(flow.source) == before


def test_table_reads_bad_records_as_null_if_asked(flow: Flow, database: str) -> None:
    flow.raw.push_many(PAYLOADS)
    before = flow.stored(flow.source)
    found = sorted(map(str, payloads(table(flow, database, onBadRecord="null"))))
    assert found == ["0", "1", "3", "4", "None"]
    options = {"onBadRecord": "null", "columnNameOfCorruptRecord": "corrupt"}
    rows = table(flow, database, CORRUPT, **options)
    assert [(row["payload"], row["corrupt"]) for row in rows if row["corrupt"]] == [(None, '"two"')]
    assert flow.stored(flow.source) == before  # a batch read writes nothing


def test_schema_has_the_column_of_corrupt_records() -> None:
    given = {"uri": "mongodb://127.0.0.1:1", "queue": "raw", "onBadRecord": "null"}
    given["columnNameOfCorruptRecord"] = "a `b`"
    assert str(QueueDataSource(given | {"payloadType": "bigint"}).schema()).endswith(
        ", `a ``b``` string"
    )
    plain = QueueDataSource(given).schema()
    assert isinstance(plain, StructType)
    assert plain.names[-1] == "a `b`"
