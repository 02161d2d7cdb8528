"""Read and write queues as tables, with a real session."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pymongo
import pytest

from pyqueue.backends.bulk.staging import Staging
from pyqueue.backends.options import NewMessage
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from tests.spark.fakes import Flow, waiting_consumer
from tests.spark.processes import SLOW_S

Read = Callable[..., Any]
Write = Callable[..., None]


@pytest.fixture
def read(spark: Any, database: str) -> Read:
    """Return a function that reads a queue."""
    return lambda queue, **options: (
        spark.read.format("pyqueue").options(uri=database, queue=queue, **options).load()
    )


@pytest.fixture
def write(database: str) -> Write:
    """Return a function that writes a DataFrame to a queue."""

    def write(df: Any, queue: str, **options: Any) -> None:
        given = {"uri": database, "queue": queue} | options
        df.write.format("pyqueue").mode("append").options(**given).save()

    return write


def ordered(spark: Any, flow: Flow, *numbers: int) -> Any:
    """Return a DataFrame of numbers. The column "order_id" has their ids."""
    rows = [(f"{flow.target}-{n}", str(n)) for n in numbers]
    return spark.createDataFrame(rows, "order_id string, payload string")


# ---- reads


@pytest.mark.spark_long
def test_read_shows_ready_messages_and_consumes_none(flow: Flow, read: Read) -> None:
    ids = flow.raw.push_many(range(10), headers={"text": "a", "number": 5})
    ids.append(flow.raw.push({"a": [1, "é"]}, key="k", id="mine"))
    flow.raw.push("later", delay=600)
    held = flow.raw.reserve(0)
    assert held is not None
    before = flow.stored(flow.source)
    df = read(flow.source, numPartitions="3")
    assert df.count() == df.count() == 10
    names = "id queue payload headers key when pushed tries priority group"
    assert df.columns == names.split()
    rows = {row.id: row for row in df.collect()}
    assert sorted(rows) == sorted(str(id) for id in ids if id != held.id)
    row, stored = rows["mine"], flow.raw.get("mine")
    assert stored is not None
    assert (row.queue, row.payload) == (flow.source, '{"a": [1, "é"]}')
    assert (row.headers, row.key, row.tries) == ({}, "k", 0)
    assert row.when.astimezone(UTC) == stored.when
    assert row.pushed.astimezone(UTC) == stored.pushed
    assert rows[str(ids[5])].headers == {"text": "a", "number": "5"}
    assert df.where("key = 'k'").select("id").collect()[0].id == "mine"
    assert flow.stored(flow.source) == before


@pytest.mark.spark_long
def test_read_of_an_empty_queue_has_no_rows(flow: Flow, read: Read) -> None:
    assert read(flow.source, mustExist="false").collect() == []


# ---- writes


@pytest.mark.spark_long
def test_write_makes_messages(spark: Any, flow: Flow, write: Write) -> None:
    df = spark.createDataFrame(
        [('{"a": 1}', {"h": "x"}, "k1"), ("2", None, None), (None, {}, "k2"), ("4", None, "k1")],
        "payload string, headers map<string, string>, key string",
    )
    write(df.coalesce(1), flow.target)
    messages = flow.clean.peek(10)
    assert [(each.payload, each.headers, each.key) for each in messages] == [
        ({"a": 1}, {"h": "x"}, "k1"),
        (2, {}, None),
        (None, {}, "k2"),
    ]  # the key of the last row is taken
    assert all(each.tries == 0 and each.trail == [] for each in messages)
    document = flow.stored(flow.target)[0]
    assert not {"staged", "expires", "processed"} & {*document}
    assert flow.staged() == 0


@pytest.mark.spark_long
def test_write_wakes_a_waiting_consumer(
    spark: Any, flow: Flow, write: Write, database: str
) -> None:
    with waiting_consumer(flow, database) as got:
        write(spark.createDataFrame([("1",)], "payload string"), flow.target)
    assert [each.payload for each in got] == [1]


@pytest.mark.spark_long
def test_write_with_id_column_can_be_repeated(spark: Any, flow: Flow, write: Write) -> None:
    df = ordered(spark, flow, *range(20))
    write(df, flow.target, idColumn="order_id")
    taken = flow.clean.reserve(0)
    assert taken is not None
    write(df, flow.target, idColumn="order_id")
    stored = sorted(each["_id"] for each in flow.stored(flow.target))
    assert stored == sorted(row.order_id for row in df.collect())
    flow.clean.commit(taken)
    assert flow.clean.counts().total == 19


@pytest.mark.spark_long
def test_write_with_ids_of_another_queue_fails(spark: Any, flow: Flow, write: Write) -> None:
    id = flow.raw.push("other", id=f"{flow.target}-3")
    df = ordered(spark, flow, *range(6))
    with pytest.raises(Exception, match=f"never in queue '{flow.target}'"):
        write(df.repartition(3), flow.target, idColumn="order_id")
    assert flow.written() == []
    assert flow.staged() == 0
    message = flow.raw.get(id or "")
    assert message is not None
    assert message.payload == "other"


@pytest.mark.spark_long
def test_write_with_one_id_in_several_rows_fails(spark: Any, flow: Flow, write: Write) -> None:
    df = ordered(spark, flow, 1, 2, 3, 2)
    for divided in (df.coalesce(1), df.repartition(4)):
        with pytest.raises(Exception, match="several rows"):
            write(divided, flow.target, idColumn="order_id")
        assert flow.written() == []
        assert flow.staged() == 0


@pytest.mark.spark_long
def test_write_refuses_mode_overwrite(spark: Any, flow: Flow, database: str) -> None:
    flow.clean.push("there")
    df = spark.createDataFrame([("1",)], "payload string")
    with pytest.raises(Exception, match="mode: a queue cannot be overwritten"):
        df.write.format("pyqueue").mode("overwrite").options(uri=database, queue=flow.target).save()
    assert flow.written() == ["there"]


@pytest.mark.spark_long
def test_write_that_fails_leaves_nothing(spark: Any, flow: Flow, write: Write) -> None:
    """Some tasks had written their rows before."""
    flow.clean.push("there")

    def fails(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in rows:
            if 7 in batch.column("n").to_pylist():
                raise ArithmeticError("the seventh")
            payloads = [str(n) for n in batch.column("n").to_pylist()]
            yield pa.RecordBatch.from_pydict({"payload": payloads})

    df = spark.createDataFrame([(n,) for n in range(8)], "n int").repartition(4, "n")
    df = df.mapInArrow(fails, "payload string")
    with pytest.raises(Exception, match="the seventh"):
        write(df, flow.target)
    assert flow.written() == ["there"]
    assert flow.staged() == 0


def test_staged_messages_of_a_dead_writer_expire(flow: Flow) -> None:
    """The TTL index deletes them, because ``expires`` is a date."""
    rows = [NewMessage(f"{flow.target}-1", 1), NewMessage(None, 2)]
    runner_of(flow.client).run(Staging(backend_of(flow.clean).target, "job").write("a", rows))
    collection = flow.client.database["pyqueue"]
    index = collection.index_information()["expires"]
    assert index["expireAfterSeconds"] == 0
    match = {"q": f"~staged:{flow.target}:job:a", **index["partialFilterExpression"]}
    found = list(collection.find(match))
    assert len(found) == 2
    for each in found:
        assert isinstance(each["expires"], datetime)
        left = each["expires"].replace(tzinfo=UTC) - datetime.now(UTC)
        assert timedelta(days=6.9) < left < timedelta(days=7.1)
    assert flow.clean.counts().total == 0
    assert flow.clean.pop(0) is None
    assert [each for each in flow.client.queues() if "~" in each.name] == []


# ---- a task that fails once

ROWS = 14_000


def failing_once(
    marker: Path, url: str, queue: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a task that fails once some rows are written, and repeats them in reverse order."""

    def written() -> int:
        with pymongo.MongoClient[dict[str, Any]](url) as client:
            collection = client.get_default_database()["pyqueue"]
            return collection.count_documents(
                {"q": {"$regex": f"^(~staged:)?{queue}"}, "record": {"$exists": False}}
            )

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_batches(list(batches))
        if marker.exists():
            yield from table.take(list(range(table.num_rows - 1, -1, -1))).to_batches()
            return
        yield from table.slice(0, ROWS - 1000).to_batches()
        end = time.monotonic() + SLOW_S
        while not written():
            if time.monotonic() > end:
                raise AssertionError("nothing was written")
            time.sleep(0.01)
        marker.touch()
        raise ArithmeticError("once")

    return rows


@pytest.mark.spark_long
@pytest.mark.parametrize("ids", [True, False], ids=["idColumn", "no ids"])
def test_write_survives_a_task_repeated_in_another_order(
    spark: Any, flow: Flow, write: Write, database: str, tmp_path: Path, ids: bool
) -> None:
    marker = tmp_path / "failed"
    df = (
        spark.range(ROWS)
        .selectExpr(f"concat('{flow.target}-', id) AS name", "cast(id AS string) AS payload")
        .coalesce(1)
        .mapInArrow(failing_once(marker, database, flow.target), "name string, payload string")
    )
    write(df, flow.target, **({"idColumn": "name"} if ids else {}))
    assert marker.exists()
    assert Counter(flow.written()) == Counter(range(ROWS))
    assert flow.staged() == 0
    flow.clean.purge()
