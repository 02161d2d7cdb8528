"""Reads of streams by position: a batch lies between two positions, and nothing is claimed.

The data source is called as Spark calls it. The last test has a real session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyqueue import Client, ConfigurationError, InvalidMessage, QueueError, Stream
from pyqueue.backends.streams import retention
from pyqueue.spark import QueueDataSource, idle
from pyqueue.spark.columns import log_columns
from tests.spark.engine import Checkpoint, Engine, table_rows
from tests.spark.fakes import Crash, Flow
from tests.support.eventually import eventually

Rows = list[dict[str, Any]]


class Log:
    """A stream, and reads of it."""

    def __init__(self, flow: Flow, database: str) -> None:
        self.flow = flow
        self.stream: Stream[Any] = flow.client.stream(flow.source)
        self.options = {"uri": database, "stream": flow.source, "maxWaitMs": "0"}

    def table(self, **options: str) -> tuple[Rows, int]:
        """Return the rows of a batch read, and the number of its tasks."""
        source = QueueDataSource(self.options | options)
        schema: Any = source.schema()
        reader: Any = source.reader(schema)
        parts = reader.partitions()
        batches = [each for part in parts for each in reader.read(part)]
        expected = to_arrow_schema(schema, timezone="UTC")
        assert all(each.schema == expected for each in batches), "Spark compares them"
        return [row for each in batches for row in each.to_pylist()], len(parts)

    def positions(self, **options: str) -> list[int]:
        return [row["position"] for row in self.table(**options)[0]]

    def engine(self, sink: Any, checkpoint: Checkpoint | None = None, **how: Any) -> Engine:
        """Return a streaming query."""
        options = self.options | how.pop("options", {})
        return Engine(options, sink, checkpoint, schema=log_columns(None), **how)


@pytest.fixture
def clicks(flow: Flow, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(idle, "IDLE_LOOK_S", 0.0)
    yield Log(flow, database)
    flow.client.delete_queue(flow.source, force=True)


class Sink:
    """Keeps the positions of each batch, each time that it is read."""

    def __init__(self) -> None:
        self.batches: dict[int, list[list[int]]] = {}

    def __call__(self, number: int, found: list[pa.RecordBatch]) -> None:
        rows = [row["position"] for each in found for row in each.to_pylist()]
        self.batches.setdefault(number, []).append(rows)

    def last(self) -> list[int]:
        """Return the positions of each batch, as they were read last."""
        return [each for number in sorted(self.batches) for each in self.batches[number][-1]]


# ---- tables


def test_table_has_the_messages_of_a_range(clicks: Log) -> None:
    clicks.stream.append_many([{"n": n} for n in range(5)], headers={"h": 1})
    clicks.stream.append("last")
    rows, _ = clicks.table()
    assert rows[1]["id"] == f"{clicks.stream.name}~1"
    assert (rows[1]["stream"], rows[1]["position"]) == (clicks.stream.name, 1)
    assert (rows[1]["payload"], rows[1]["headers"]) == ('{"n": 1}', [("h", "1")])
    assert abs(rows[1]["pushed"] - datetime.now(UTC)) < timedelta(hours=1)
    assert [row["position"] for row in rows] == [*range(6)]
    assert clicks.positions(startingPosition="2", endingPosition="4") == [2, 3]
    assert clicks.positions(startingPosition="4", endingPosition="999") == [4, 5]
    for empty in ({"startingPosition": "last"}, {"endingPosition": "0"}, {"startingPosition": "9"}):
        assert clicks.positions(**empty) == []
    assert list(clicks.table(columns="position,payload")[0][5].values()) == [5, '"last"']


def test_instant_stands_for_the_first_pack_since_then(clicks: Log) -> None:
    clicks.stream.append_many([0, 1])
    pushed = clicks.stream.read()[0].pushed
    eventually(lambda: datetime.now(UTC) > pushed + timedelta(milliseconds=20), "a later instant")
    since = (pushed + timedelta(milliseconds=1)).isoformat()
    clicks.stream.append_many([2, 3])
    assert clicks.positions(startingPosition=since) == [2, 3]
    assert clicks.positions(endingPosition=since) == [0, 1]


def test_range_is_divided_among_tasks(clicks: Log) -> None:
    """A small one is not: each task that begins within a pack would read the whole pack."""
    clicks.stream.append_many(range(3500))
    rows, tasks = clicks.table(numPartitions="3", startingPosition="10")
    assert ([row["position"] for row in rows], tasks) == ([*range(10, 3500)], 3)
    assert clicks.table(numPartitions="3", startingPosition="2600")[1] == 1


def test_payload_that_does_not_fit_fails_or_is_null(clicks: Log) -> None:
    clicks.stream.append_many([1, "two", 3])
    with pytest.raises(InvalidMessage, match=rf"{clicks.stream.name}~1 "):
        _typed(clicks, payloadType="bigint")
    null = {"onBadRecord": "null", "columnNameOfCorruptRecord": "bad"}
    rows = _typed(clicks, payloadType="bigint", **null)
    assert [(row["payload"], row["bad"]) for row in rows] == [(1, None), (None, '"two"'), (3, None)]


def _typed(clicks: Log, **options: str) -> Rows:
    more = [StructField("bad", StringType())] if "onBadRecord" in options else []
    schema = StructType([*log_columns(LongType()).fields, *more])
    return table_rows(clicks.options | options, schema)


# ---- streams


def test_query_reads_each_position_once(clicks: Log) -> None:
    sink = Sink()
    query = clicks.engine(sink, options={"maxMessagesPerBatch": "3"})
    assert query.run() == 0
    clicks.stream.append_many(range(4))
    assert query.batch()
    clicks.stream.append_many(range(4, 7))
    while query.batch():
        pass
    assert sink.last() == [*range(7)]
    assert [len(each[0]) for each in sink.batches.values()] == [3, 3, 1]
    assert clicks.stream.consumers() == [], "nothing is claimed"


def test_query_dies_anywhere_and_reads_the_same_again(clicks: Log) -> None:
    clicks.stream.append_many(range(7))
    names = ["initialOffset", "latestOffset", "offset log", "commit", "partitions", "tasks"]
    for name in [*names, "commit log"]:
        sink, checkpoint = Sink(), Checkpoint()

        def step(at: str, name: str = name, checkpoint: Checkpoint = checkpoint) -> None:
            if at == name and checkpoint.committed == (0 if name == "initialOffset" else 1):
                raise Crash

        how = {"options": {"maxMessagesPerBatch": "3"}}
        with pytest.raises(Crash):
            clicks.engine(sink, checkpoint, step=step, **how).run()
        clicks.engine(sink, checkpoint, **how).run()
        assert sink.last() == [*range(7)]
        assert all(each == tries[0] for tries in sink.batches.values() for each in tries)


def test_query_begins_where_it_says(clicks: Log) -> None:
    for starting, expected in {"first": [0, 1, 2, 3, 4], "2": [2, 3, 4], "last": [4]}.items():
        name = f"{clicks.stream.name}-{starting}"
        stream: Stream[Any] = clicks.flow.client.stream(name)
        stream.append_many(range(4))
        sink = Sink()
        query = clicks.engine(sink, options={"startingPosition": starting, "stream": name})
        query.batch()
        stream.append(4)
        query.batch()
        assert sink.last() == expected
    with pytest.raises(ConfigurationError, match="startingPosition: 99"):
        clicks.engine(Sink(), options={"startingPosition": "99"}).batch()


def test_available_now_ends_at_what_was_there(clicks: Log) -> None:
    clicks.stream.append_many(range(4))
    sink = Sink()
    query = clicks.engine(sink, now=True, options={"maxMessagesPerBatch": "3"})
    clicks.stream.append(4)
    assert query.run() == 2
    assert sink.last() == [0, 1, 2, 3]


def test_signal_ends_the_wait_of_an_idle_query(
    clicks: Log, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "IDLE_LOOK_S", 600.0)
    clicks.stream.append(0)
    sink = Sink()
    query = clicks.engine(sink, options={"maxWaitMs": "60000"})
    assert query.batch()
    assert not query.batch()
    assert not query.batch(), "it listens from now on, and looks once more"
    with Client(database) as client:  # it signals through the server
        client.stream(clicks.stream.name).append(1)
        assert query.batch()
    assert sink.last() == [0, 1]
    query.reader.stop()


def test_deleted_messages_are_named(
    clicks: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pyqueue")
    monkeypatch.setattr(retention, "LEAST_AGE", timedelta(0))
    for n in range(3):
        clicks.stream.append_many([n, n])
    eventually(lambda: clicks.stream.trim(before=3) == 2, "the first pack is old enough")
    options = {"startingPosition": "0"}
    for refused in ({}, {"failOnDataLoss": "true"}):
        with pytest.raises(QueueError, match="2 messages from position 0 on were deleted"):
            clicks.engine(Sink(), Checkpoint(), options=options | refused).run()
    assert not caplog.messages
    sink = Sink()
    clicks.engine(sink, Checkpoint(), options=options | {"failOnDataLoss": "false"}).run()
    assert sink.last() == [2, 3, 4, 5]
    assert "2 messages from position 0 on were deleted" in caplog.text


def test_messages_deleted_beside_a_task_are_named(
    clicks: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LEAST_AGE", timedelta(0))
    for n in range(3):
        clicks.stream.append_many([n, n])
    reader = clicks.engine(Sink(), Checkpoint()).reader
    (part,) = reader.partitions(reader._offset(0), reader._offset(6))
    eventually(lambda: clicks.stream.trim(before=3) == 2, "the first pack is old enough")
    with pytest.raises(QueueError, match="2 messages from position 0 on were deleted"):
        list(reader.read(part))


def test_checkpoint_of_another_stream_is_refused(clicks: Log) -> None:
    clicks.stream.append_many(range(3))
    for offset, text in (
        ({"stream": "other", "position": 1}, "belongs to stream 'other'"),
        ({"stream": clicks.stream.name, "position": 9}, "an earlier stream of that name"),
    ):
        checkpoint = Checkpoint(offsets=[offset], committed=1)
        with pytest.raises(ConfigurationError, match=text):
            clicks.engine(Sink(), checkpoint).batch()


# ---- invalid options


def stream(source: QueueDataSource) -> object:
    return source.streamReader(log_columns(None))


def write(source: QueueDataSource) -> object:
    return source.writer(log_columns(None), False)


def table(source: QueueDataSource) -> object:
    return source.reader(log_columns(None))


@pytest.mark.parametrize(
    ("options", "use", "text"),
    [
        ({"stream": "s", "queue": "q"}, table, "^queue: not allowed if a stream is read"),
        ({"stream": "s", "group": "g", "match": "{}"}, table, "^group, match: not allowed if a"),
        ({"stream": "no name"}, table, "no name"),
        ({"queue": "q", "startingPosition": "1"}, table, "^startingPosition: only a stream has"),
        ({"queue": "q", "endingPosition": "1"}, table, "^endingPosition: only a stream has"),
        ({"stream": "s", "startingPosition": "-1"}, table, "^startingPosition: '-1' .*a position"),
        ({"stream": "s", "startingPosition": "2026-01-31T12:00:00"}, table, "time zone"),
        ({"stream": "s", "endingPosition": "9" * 20}, table, "^endingPosition: "),
        ({"stream": "s", "onBadRecord": "bury"}, table, "^onBadRecord: messages of a stream stay"),
        ({"stream": "s", "endingPosition": "9"}, stream, "^endingPosition: this option is for ba"),
        ({"stream": "s"}, write, "^stream: this option is for reads"),
    ],
)
def test_invalid_options_of_a_stream_are_refused(
    options: dict[str, str], use: Callable[[QueueDataSource], object], text: str
) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=text):
        use(QueueDataSource({"uri": "mongodb://localhost:1/db", **options}))


def test_names_of_queues_and_streams_are_not_mixed_up(clicks: Log, database: str) -> None:
    clicks.stream.append(0)
    source = QueueDataSource({"uri": database, "queue": clicks.stream.name})
    reader: Any = source.reader(source.schema())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"is a stream; .*option\(.stream"):
        reader.partitions()
    clicks.flow.client.queue(clicks.flow.target).push(0)
    with pytest.raises(ConfigurationError, match="is a queue of kind 'standard'"):
        Log(clicks.flow, database).table(stream=clicks.flow.target)


# ---- a real session


@pytest.mark.slow
@pytest.mark.xdist_group("spark")
def test_spark_streams_a_log_by_position(clicks: Log, spark: Any, tmp_path: Path) -> None:
    """With two tasks, and a restart from the checkpoint."""
    frame = spark.readStream.format("pyqueue").options(
        **clicks.options, numPartitions="2", maxMessagesPerBatch="1500"
    )
    for round in range(2):
        clicks.stream.append_many(range(2000))
        query = (
            frame.load()
            .select("position", "payload")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .option("path", str(tmp_path / "rows"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(240)
        found = spark.read.parquet(str(tmp_path / "rows")).select("position").collect()
        assert sorted(row.position for row in found) == [*range(2000 * (round + 1))]
    rows = spark.read.format("pyqueue").options(**clicks.options, startingPosition="3998").load()
    assert [row.payload for row in rows.collect()] == ["1998", "1999"]
