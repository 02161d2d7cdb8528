"""The queue, the instant and the key that the rows of a write give to their messages.

The data source is called as Spark calls it. The last test has a real session.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import (
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyqueue import ConfigurationError, DuplicateKey, LeaseLost
from pyqueue.spark import QueueDataSource, ahead
from pyqueue.spark.columns import columns
from tests.spark.engine import Engine, in_a_task, sized, table_rows, to_queue
from tests.spark.fakes import Flow, waiting_consumer
from tests.support.eventually import eventually

HOUR = timedelta(hours=1)
#: The ways of a write, and their options.
WAYS: dict[str, dict[str, str]] = {
    "staged": {"idColumn": "id"},
    "direct": {"idColumn": "id", "staged": "false"},
    "epoch": {"idColumn": "id", "stage": "s", "epoch": "0"},
    "stream": {"idColumn": "id"},
    "append": {"idColumn": "id", "delivery": "at-least-once"},
}
ways = pytest.mark.parametrize("way", WAYS)

Rows = list[dict[str, Any]]


class Sink:
    """Two queues, and writes of one task into them."""

    def __init__(self, flow: Flow, database: str) -> None:
        self.flow = flow
        self.first, self.second = flow.target, f"{flow.target}-2"
        self._database = database

    def write(self, way: str, rows: Rows, types: Mapping[str, DataType], **options: str) -> None:
        """Write rows that have an id and a payload each, and columns of these types."""
        names = {"id": StringType(), "payload": StringType(), **types}
        schema = StructType([StructField(name, type) for name, type in names.items()])
        given = {"uri": self._database, **WAYS[way], **options}
        source = QueueDataSource(given if "queues" in given else {"queue": self.first} | given)
        streams = way in ("stream", "append")
        writer: Any = (source.streamWriter if streams else source.writer)(schema, False)
        full = [dict.fromkeys(names) | row for row in rows]
        table = pa.Table.from_pylist(full, to_arrow_schema(schema, timezone="UTC"))
        epoch = (0,) if streams else ()
        try:
            with in_a_task("query", 0):
                done = writer.write(iter(table.to_batches()))
        except Exception:
            writer.abort([None], *epoch)
            raise
        writer.commit([done], *epoch)

    @property
    def both(self) -> str:
        return f"{self.first}, {self.second}"

    def stored(self) -> list[tuple[str, Any]]:
        """Return the queue and the payload of each message."""
        queues = (self.first, self.second)
        return [(queue, each["payload"]) for queue in queues for each in self.flow.stored(queue)]

    def states(self, queue: str) -> dict[Any, str]:
        """Return the state of each message of a queue, by payload."""
        return {payload: each.state for payload, each in self.flow.messages(queue).items()}

    def hidden(self) -> int:
        """Return the number of hidden rows."""
        return self.flow.staged()

    def row(self, number: int, **fields: Any) -> dict[str, Any]:
        return {"id": f"{self.first}-{number}", "payload": str(number), **fields}


@pytest.fixture
def sink(flow: Flow, database: str) -> Sink:
    """Return two empty queues to write to."""
    return Sink(flow, database)


# ---- queue


@ways
def test_rows_go_to_the_queues_that_they_name(sink: Sink, way: str) -> None:
    rows = [sink.row(n, queue=(sink.second if n % 2 else sink.first)) for n in range(5)]
    sink.write(way, rows, {"queue": StringType()}, queues=sink.both)
    assert sink.stored() == [
        *((sink.first, n) for n in (0, 2, 4)),
        *((sink.second, n) for n in (1, 3)),
    ]
    assert sink.hidden() == 0
    recorded = {each.name for each in sink.flow.client.queues()}
    assert {sink.first, sink.second} <= recorded


@ways
@pytest.mark.parametrize("name", [None, "elsewhere"])
def test_row_of_another_queue_fails_the_write(sink: Sink, way: str, name: str | None) -> None:
    rows = [sink.row(0, queue=sink.first), sink.row(1, queue=name)]
    said = "null" if name is None else repr(name)
    text = f"^queue: {said} is not one of .* in the row with id {sink.first}-1$"
    with pytest.raises(ConfigurationError, match=text):
        sink.write(way, rows, {"queue": StringType()}, queues=sink.both)
    assert sink.stored() == []
    assert sink.hidden() == 0


@ways
def test_prefix_keeps_the_ids_of_two_queues_apart(sink: Sink, way: str) -> None:
    for queue in (sink.first, sink.second):
        sink.write(way, [sink.row(0), sink.row(1)], {}, queue=queue, idPrefix=f"{queue}/")
    assert sink.stored() == [(queue, n) for queue in (sink.first, sink.second) for n in (0, 1)]
    message = sink.flow.client.queue(sink.second).get(f"{sink.second}/{sink.first}-1")
    assert message is not None


def test_queue_column_means_nothing_without_the_option(sink: Sink) -> None:
    sink.write("staged", [sink.row(0, queue="elsewhere"), sink.row(1)], {"queue": StringType()})
    assert sink.stored() == [(sink.first, 0), (sink.first, 1)]


@ways
def test_id_in_two_queues_fails_the_write(sink: Sink, way: str) -> None:
    rows = [sink.row(0, queue=queue) for queue in (sink.first, sink.second)]
    with pytest.raises(Exception, match=r"several rows have the (same )?id|never in queue"):
        sink.write(way, rows, {"queue": StringType()}, queues=sink.both)
    shown = [(sink.first, 0)] if way in ("direct", "append") else []
    assert sink.stored() == shown


@ways
def test_write_wakes_consumers_of_each_queue(
    sink: Sink, flow: Flow, database: str, way: str
) -> None:
    queues = f"{sink.second}, {sink.first}"  # the consumer waits at the second one
    with waiting_consumer(flow, database) as got:
        sink.write(way, [sink.row(0, queue=sink.first)], {"queue": StringType()}, queues=queues)
    assert [each.payload for each in got] == [0]


def test_stage_of_several_queues_keeps_to_its_first(flow: Flow, sink: Sink, database: str) -> None:
    """A stream may get further queues. The first queue has its record."""
    types = {"queue": StringType()}
    sink.write("stream", [sink.row(0)], {}, stage="s")
    with pytest.raises(ConfigurationError, match=r"batch 0 of .* has been written with different"):
        sink.write("stream", [sink.row(1, queue=sink.second)], types, stage="s", queues=sink.both)
    sink.write("stream", [sink.row(0, queue=sink.second)], types, stage="s", queues=sink.both)
    assert sink.stored() == [(sink.first, 0)], "the epoch was decided before"


# ---- priority


@ways
def test_rows_have_the_priorities_that_they_say(sink: Sink, way: str) -> None:
    queue = sink.flow.client.queue(sink.first, kind="priority", strict=True)
    queue.push("seed", priority=5)
    rows = [sink.row(n, priority=priority) for n, priority in enumerate([1, None, 9, 9])]
    sink.write(way, rows, {"priority": LongType()})
    assert [(each.payload, each.priority) for each in queue.peek()] == [
        (2, 9), (3, 9), ("seed", 5), (1, 4), (0, 1),
    ]  # fmt: skip
    found: list[Any] = []

    def received() -> bool:
        found.extend(each.payload for each in queue.pop_many(9, timeout=0))
        return len(found) == 5

    eventually(received, "a consumer knows the new levels")


def test_replacing_rows_bring_their_priorities(sink: Sink) -> None:
    queue = sink.flow.client.queue(sink.first, kind="priority")
    queue.push("old", key="k", priority=1)
    types = {"key": StringType(), "priority": IntegerType()}
    rows = [sink.row(0, key="k", priority=8)]
    sink.write("staged", rows, types, onDuplicate="replace", idColumn="")
    assert [(each.payload, each.priority) for each in queue.peek()] == [(0, 8)]


@ways
def test_priority_column_means_nothing_elsewhere(sink: Sink, way: str) -> None:
    """Rows that were read from a queue with priorities may enter other queues."""
    sink.write(way, [sink.row(0, priority="high")], {"priority": StringType()})
    assert sink.flow.messages(sink.first)[0].priority is None


@pytest.mark.parametrize(
    ("type", "value", "text"),
    [
        (IntegerType(), 10, "^priority: 10 is not allowed; .* in the row with id"),
        (StringType(), "9", "^priority: the column is of type string; cast it to int"),
    ],
)
def test_row_with_an_invalid_priority_fails_the_write(
    sink: Sink, type: DataType, value: Any, text: str
) -> None:
    sink.flow.client.queue(sink.first, kind="priority").pop(0)
    with pytest.raises(ConfigurationError, match=text):
        sink.write("staged", [sink.row(0, priority=value)], {"priority": type})
    assert sink.flow.messages(sink.first) == {}


def test_claims_of_a_queue_with_priorities_are_finished(flow: Flow, database: str) -> None:
    """Their history needs the kind. Their rows show the priority, as a table does."""
    queue = flow.client.queue(flow.source, kind="priority", history=60)
    queue.push_many([1, 2], priorities=[3, None])
    table = table_rows({"uri": database, "queue": flow.source})
    assert sorted(row["priority"] for row in table) == [3, 4]
    source = QueueDataSource({"uri": database, "queue": flow.source, "group": "g"})
    stream: Any = source.streamReader(columns(None))
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(10))
    rows = [row for part in stream.partitions(start, end) for row in stream.read(part)]
    shown = {(row["payload"], row["priority"]) for each in rows for row in each.to_pylist()}
    assert shown == {("1", 3), ("2", 4)}
    stream.commit(end)
    stream.stop()
    assert {(each.payload, each.priority) for each in queue.history()} == {(1, 3), (2, 4)}


# ---- groups


@ways
def test_rows_have_the_groups_that_they_say(sink: Sink, way: str) -> None:
    queue = sink.flow.client.queue(sink.first, kind="ordered")
    queue.push("first", group="a")
    groups = ["a", "b", None, "b", "a"]
    rows = [sink.row(9 - n, group=group) for n, group in enumerate(groups)]
    sink.write(way, rows, {"group": StringType()})
    received: list[tuple[str | None, Any]] = []
    while len(received) < 6:
        (one,) = queue.reserve_many(1, timeout=0)
        received.append((one.group, one.payload))
        queue.commit(one)
    for group, order in {"a": ["first", 9, 5], "b": [8, 6], None: [7]}.items():
        assert [payload for name, payload in received if name == group] == order


@ways
def test_group_column_means_nothing_elsewhere(sink: Sink, way: str) -> None:
    sink.write(way, [sink.row(0, group=7)], {"group": LongType()})
    assert sink.flow.messages(sink.first)[0].group is None


def test_row_with_an_invalid_group_fails_the_write(sink: Sink) -> None:
    sink.flow.client.queue(sink.first, kind="ordered").reserve(0)
    with pytest.raises(ConfigurationError, match=r"^group: .* in the row with id"):
        sink.write("staged", [sink.row(0, group="")], {"group": StringType()})
    with pytest.raises(ConfigurationError, match=r"^group: the column is of type bigint"):
        sink.write("staged", [sink.row(0, group=7)], {"group": LongType()})
    assert sink.flow.messages(sink.first) == {}


def test_table_shows_the_groups(flow: Flow, database: str) -> None:
    queue = flow.client.queue(flow.source, kind="ordered")
    queue.push_many([1, 2, 3], groups=["a", "b", None])
    table = table_rows({"uri": database, "queue": flow.source})
    assert {row["group"] for row in table} == {"a", "b", None}


# ---- when and delay


@ways
def test_rows_become_ready_when_they_say(sink: Sink, way: str) -> None:
    now = datetime.now(UTC)
    rows = [sink.row(0, when=now + HOUR), sink.row(1, delay=600.0), sink.row(2, when=now - HOUR)]
    sink.write(way, [*rows, sink.row(3)], {"when": TimestampType(), "delay": DoubleType()})
    expected = {0: "scheduled", 1: "scheduled", 2: "ready", 3: "ready"}
    eventually(lambda: sink.states(sink.first) == expected, "the ready messages")
    found = sink.flow.messages(sink.first)
    assert abs(found[0].when - (now + HOUR)) < timedelta(milliseconds=1)
    assert timedelta(minutes=5) < found[1].when - now < HOUR
    assert found[2].when > now - HOUR / 2


@pytest.mark.parametrize(
    ("type", "delay"),
    [
        (IntegerType(), 600),
        (DoubleType(), 599.5),
        (DecimalType(6, 2), Decimal("600.25")),
        (DayTimeIntervalType(), timedelta(minutes=10)),
    ],
    ids=["int", "double", "decimal", "interval"],
)
def test_delay_may_be_a_number_or_an_interval(sink: Sink, type: DataType, delay: Any) -> None:
    before = datetime.now(UTC)
    sink.write("staged", [sink.row(0, delay=delay), sink.row(1)], {"delay": type})
    expected = {0: "scheduled", 1: "ready"}
    eventually(lambda: sink.states(sink.first) == expected, "the ready message")
    found = sink.flow.messages(sink.first)
    assert timedelta(minutes=5) < found[0].when - before < HOUR


@pytest.mark.parametrize("way", ["direct", "stream"])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"when": datetime.now(UTC), "delay": 1.0}, "^when, delay: the row with id .* has both"),
        ({"delay": -1.0}, "^delay: -1.0 is not allowed; .* in the row with id"),
        ({"delay": float("nan")}, "^delay: nan is not allowed"),
        ({"when": datetime(8000, 1, 1, tzinfo=UTC)}, "^when: .* before the year 8000; in the row"),
    ],
    ids=["both", "negative", "nan", "too far"],
)
def test_row_with_an_invalid_instant_fails_the_write(
    sink: Sink, way: str, fields: dict[str, Any], text: str
) -> None:
    types = {"when": TimestampType(), "delay": DoubleType()}
    with pytest.raises(ConfigurationError, match=text):
        sink.write(way, [sink.row(0), sink.row(1, **fields)], types)
    assert sink.stored() == []
    assert sink.hidden() == 0


def test_instant_beyond_the_calendar_of_python_is_refused(flow: Flow, database: str) -> None:
    """Spark's timestamps go further than Python's."""
    schema = StructType(
        [StructField("payload", StringType()), StructField("when", TimestampType())]
    )
    writer: Any = QueueDataSource({"uri": database, "queue": flow.target}).writer(schema, False)
    instants = pa.array([-(2**60), 2**60], pa.timestamp("us", "America/New_York"))
    rows = pa.RecordBatch.from_arrays([pa.array(["1", "2"]), instants], ["payload", "when"])
    with pytest.raises(ConfigurationError, match=r"^when: .* before the year 8000; in row 1$"):
        writer.write(iter([rows]))
    assert flow.written() == []


def test_stream_between_queues_is_ready_at_once(flow: Flow, database: str) -> None:
    """The instants of the messages that a stream reads are past, so they delay nothing."""
    flow.raw.push_many(range(3))
    source = {"uri": database, "queue": flow.source, "group": "g"}
    target = {"uri": database, "queue": flow.target, "stage": "s"}
    Engine(source, to_queue(target, query="q")).run()
    eventually(lambda: flow.clean.counts().ready == 3, "three ready messages")


# ---- taken keys


@ways
def test_row_whose_key_is_taken_is_left_out(sink: Sink, way: str) -> None:
    sink.flow.clean.push(100, key="k")
    sink.write(way, [sink.row(0, key="k"), sink.row(1, key="free")], {"key": StringType()})
    assert sink.flow.written() == [1, 100]
    assert sink.hidden() == 0


@pytest.mark.parametrize("way", ["direct", "append"])
def test_row_replaces_the_message_with_its_key(sink: Sink, way: str) -> None:
    """A write that is run again replaces it again, also if its id is stored."""
    sink.flow.clean.push(100, key="k")
    held = sink.flow.clean.reserve(0)
    assert held is not None
    for payload in (1, 2):
        rows = [sink.row(payload, key="k"), sink.row(0, key="new") | {"payload": str(payload)}]
        sink.write(way, rows, {"key": StringType()}, onDuplicate="replace")
        assert sink.flow.written() == [payload, payload]
    with pytest.raises(LeaseLost):
        sink.flow.clean.commit(held)


def test_staged_row_without_an_id_replaces_a_message(flow: Flow, database: str) -> None:
    flow.clean.push(100, key="k")
    schema = StructType([StructField("payload", StringType()), StructField("key", StringType())])
    options = {"uri": database, "queue": flow.target, "onDuplicate": "replace"}
    writer: Any = QueueDataSource(options).writer(schema, False)
    rows = pa.RecordBatch.from_pydict({"payload": ["1", "2", "3"], "key": ["k", None, "k"]})
    done = writer.write(iter([rows]))
    assert flow.written() == [100]
    writer.commit([done])
    assert flow.written() == [2, 3]


@pytest.mark.parametrize("way", ["direct", "append"])
def test_row_replaces_the_message_with_its_id(sink: Sink, way: str) -> None:
    """A write that is run again replaces it again."""
    queue, id = sink.flow.clean, f"{sink.first}-1"
    queue.push(100, id=id, key="k", headers={"h": "old"})
    held = queue.reserve(0)
    assert held is not None
    rows = [sink.row(1, key=None), sink.row(2, key="new")]
    for _ in range(2):
        sink.write(way, rows, {"key": StringType()}, onDuplicate="replace")
        found = [(each.id, each.payload, each.key, each.headers) for each in queue.peek(9)]
        assert found == [(id, 1, None, {}), (f"{sink.first}-2", 2, "new", {})]
    with pytest.raises(LeaseLost):
        queue.commit(held)


@pytest.mark.parametrize("way", ["staged", "direct", "append"])
@pytest.mark.parametrize("finished", [True, False])
def test_row_whose_id_is_taken_may_fail_the_write(sink: Sink, way: str, finished: bool) -> None:
    """A stream repeats its ids itself."""
    queue = sink.flow.client.queue(sink.first, history=60)
    queue.push(100, id=f"{sink.first}-0")
    if finished:
        queue.pop(0)
    text = rf"^queue '{sink.first}' has, or had, messages with the ids \['{sink.first}-0'\]$"
    with nullcontext() if way == "append" else pytest.raises(DuplicateKey, match=text):
        sink.write(way, [sink.row(0), sink.row(1)], {}, onDuplicate="error")
    assert sink.flow.written() == ([100] if way == "staged" else [1, 100])
    assert sink.hidden() == 0


@pytest.mark.parametrize("way", ["staged", "direct", "append"])
def test_row_whose_key_is_taken_may_fail_the_write(sink: Sink, way: str) -> None:
    sink.flow.clean.push(100, key="k")
    rows = [sink.row(0, key="k"), sink.row(1)]
    with pytest.raises(DuplicateKey, match=r"has messages with the keys \['k'\]"):
        sink.write(way, rows, {"key": StringType()}, onDuplicate="error")
    assert sink.flow.written() == ([100] if way == "staged" else [1, 100])


# ---- the bytes of a batch


def test_stream_ends_a_batch_at_its_bytes(flow: Flow, database: str) -> None:
    flow.raw.push_many(["x" * 1000] * 6)
    sizes: list[int] = []
    source = {"uri": database, "queue": flow.source, "group": "g", "maxBytesPerBatch": "2500"}
    Engine(source, sized(sizes)).run()
    assert sizes == [2, 2, 2]
    assert flow.left() == []


@pytest.mark.usefixtures("faked")
def test_stage_ends_a_batch_at_its_bytes(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_BATCH_BYTES", 2500)
    flow.raw.push_many(["x" * 1000] * 6)
    assert [each.claimed for each in flow.work()] == [2, 2, 2]
    assert len(flow.written()) == 6


# ---- a real session


@pytest.mark.spark_long
def test_session_writes_to_queues_and_instants(
    spark: Any, sink: Sink, flow: Flow, database: str, tmp_path: Path
) -> None:
    """A table and a stream, each into two queues, with instants and delays."""
    options = {"uri": database, "queues": sink.both}
    name = f"if(n % 2 = 0, '{sink.first}', '{sink.second}') AS queue"
    spark.range(4).withColumnRenamed("id", "n").selectExpr(
        "cast(n AS string) AS payload",
        name,
        "if(n = 0, current_timestamp() + INTERVAL 1 HOUR, null) AS `when`",
        "if(n = 1, INTERVAL 1 HOUR, null) AS delay",
    ).write.format("pyqueue").mode("append").options(**options).save()
    flow.raw.push_many([10, 11, 12])
    stream = spark.readStream.format("pyqueue").options(uri=database, queue=flow.source, group="g")
    query = (
        stream.load()
        .selectExpr("id", "payload", "cast(payload AS int) AS n")
        .selectExpr("id", "payload", name, "if(n = 10, 3600, 0) AS delay")
        .writeStream.format("pyqueue")
        .options(**options, stage="s")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert query.exception() is None
    first = {0: "scheduled", 2: "ready", 10: "scheduled", 12: "ready"}
    second = {1: "scheduled", 3: "ready", 11: "ready"}
    eventually(
        lambda: (sink.states(sink.first), sink.states(sink.second)) == (first, second),
        "the ready messages",
    )
    assert sink.hidden() == 0
