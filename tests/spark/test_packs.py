"""Buckets in and out of Spark: packs are read, moved, written and finished as batches.

Only the last tests have a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import datasource
from pyspark.sql.types import StructType

from pyqueue import Client, ConfigurationError
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import QueueDataSource
from pyqueue.spark.columns import columns
from tests.spark.engine import table_rows
from tests.spark.fakes import (
    Flow,
    Frame,
    counts,
    no_session,
    outputs,
)
from tests.spark.test_crash import stage_dies
from tests.spark.test_poison import failing, restarted
from tests.spark.test_source import die_at_commands
from tests.spark.test_table_sink import Table, into, rows, sink_dies_at_13
from tests.support.samples import some_or_all

PACK = 3


def bucket(client: Client, **options: Any) -> Flow:
    """Return a flow from a bucket into another one."""
    flow = Flow(client, kind="bucket", **{"pack": PACK} | options)
    flow.clean.reserve(0)  # its record has the kind
    return flow


@pytest.fixture
def flow(shared: Client) -> Iterator[Flow]:
    """Two buckets, and stages between them."""
    flow = bucket(shared)
    yield flow
    flow.release()


def sizes(flow: Flow, queue: str) -> list[int]:
    """Return how many messages each document of a queue has, sorted."""
    return sorted(each.get("n", 1) for each in flow.stored(queue))


# ---- stages


@pytest.mark.usefixtures("faked")
def test_stage_moves_whole_packs(flow: Flow) -> None:
    """A batch has whole packs, so it may have some messages more than it should."""
    ids = flow.raw.push_many(range(9), headers={"h": 1})
    stage = flow.stage(most=4)
    assert counts(stage.run_once(no_session)) == (6, 6, 0, 0, 0)
    assert (sizes(flow, flow.target), sizes(flow, flow.source)) == ([3, 3], [3])
    assert stage.run_once(no_session).written == 3
    assert (sizes(flow, flow.target), flow.left()) == ([3, 3, 3], [])
    received = flow.clean.reserve_many(10, timeout=0)
    assert [each.id for each in received] == ids
    assert [(each.payload, each.headers) for each in received] == [(n, {"h": 1}) for n in range(9)]


@pytest.mark.usefixtures("faked")
def test_stage_changes_and_drops_messages_of_packs(flow: Flow) -> None:
    ids = flow.raw.push_many(range(6))

    def transform(frame: Frame) -> Frame:
        found = [{**row, "payload": f"1{row['payload']}"} for row in frame.rows()]
        for row in found:
            row["headers"] = [("was", row["payload"])]
        return frame.made_of([found[0], *found[3:]], "id", "payload", "headers")

    assert counts(flow.stage(transform).run_once(no_session)) == (6, 4, 2, 0, 0)
    assert flow.left() == []
    received = flow.clean.reserve_many(10, timeout=0)
    found = {each.id: (each.payload, each.headers["was"]) for each in received}
    assert found == {ids[n]: (10 + n, f"1{n}") for n in (0, 3, 4, 5)}


@pytest.mark.usefixtures("faked")
@some_or_all
@outputs
def test_stage_between_buckets_that_dies_loses_nothing(
    shared: Client, output: str, few: int | None
) -> None:
    """It dies before any of its commands, some of which move a part of a pack."""
    assert stage_dies(lambda: bucket(shared), output, few) > 12


@pytest.mark.usefixtures("faked")
@outputs
def test_message_that_fails_leaves_its_pack_and_is_buried(flow: Flow, output: str) -> None:
    flow.raw.push_many(range(20))
    reports = flow.work(failing(4, 5, 19), output=output, max_tries=3)
    assert (reports[0].written, reports[0].failed) == (17, 3)
    assert flow.written() == sorted({*range(20)} - {4, 5, 19})
    graves = flow.buried()
    assert {n: each.dead and each.dead["tries"] for n, each in graves.items()} == {
        4: 3,
        5: 3,
        19: 3,
    }
    assert (flow.left(), flow.held()) == ([], False)


@pytest.mark.usefixtures("faked")
def test_stage_that_always_fails_gives_packs_back_whole(flow: Flow) -> None:
    flow.raw.push_many(range(9))
    with pytest.raises(ArithmeticError):
        flow.stage(failing(*range(9))).run_once(no_session)
    assert (sizes(flow, flow.source), {each.tries for each in flow.raw.peek(10)}) == ([3] * 3, {1})
    assert not flow.held()


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("killer", [0, 10])
def test_message_that_kills_the_stage_is_found_in_its_pack(flow: Flow, killer: int) -> None:
    flow.raw.push_many(range(20))
    assert 3 <= restarted(flow, (killer,), max_tries=3) <= 8
    assert sorted(flow.buried()) == [killer]
    assert flow.written() == sorted({*range(20)} - {killer})
    assert flow.left() == []


@pytest.mark.usefixtures("faked")
def test_table_sink_finds_the_message_that_fails_in_a_pack(shared: Client) -> None:
    flow, table = bucket(shared, pack=100), Table()
    flow.raw.push_many(range(30))

    def check(part: list[int]) -> None:
        if 17 in part:
            table.popitem()
            raise ArithmeticError("seventeen")

    flow.work(into(table, check), to=(), max_tries=2)
    assert rows(table) == sorted({*range(30)} - {17})
    (dead,) = flow.buried().values()
    assert (dead.payload, dead.dead and dead.dead["tries"], flow.left()) == (17, 2, [])


@pytest.mark.usefixtures("faked")
def test_table_sink_finds_the_message_that_kills_it_in_a_pack(shared: Client) -> None:
    flow = bucket(shared, pack=100)
    sink_dies_at_13(flow, max_tries=2)
    assert sorted(flow.buried()) == [13]


def test_claim_of_a_bucket_has_the_rows_of_its_packs(flow: Flow) -> None:
    ids = flow.raw.push_many(range(7))
    with flow.raw.claim("g", limit=4) as claim:
        assert claim.ids == ids[:6]
        documents = runner_of(flow.client).run(claim._documents())
        assert [(each["_id"], each["payload"]) for each in documents] == [
            *zip(ids[:6], range(6), strict=True)
        ]
        claim.commit()
    with flow.raw.claim("g", limit=4) as claim:
        assert len(claim) == 1
    assert flow.left() == [6]


# ---- reads, without a session


def test_table_of_a_bucket_shows_the_messages_left(flow: Flow, database: str) -> None:
    ids = flow.raw.push_many(range(9), headers={"h": 1})
    flow.raw.push("keyed", key="k")
    held = flow.raw.reserve_many(3, timeout=0)
    flow.raw.commit(held[1])
    flow.raw.rollback(held[0], delay=0)
    flow.raw.release(held[2])
    options = {"uri": database, "queue": flow.source}
    found = table_rows(options)
    assert {each["id"] for each in found} >= {*ids} - {ids[1]}
    payloads = sorted(each["payload"] for each in found)
    assert payloads == sorted(['"keyed"', *(str(n) for n in range(9) if n != 1)])
    assert {each["key"] for each in found} == {None, "k"}
    some = StructType([columns(None)[name] for name in ("id", "headers")])
    short = table_rows({**options, "columns": "id,headers"}, some)
    assert {each["id"] for each in short} == {each["id"] for each in found}
    assert ("h", "1") in {pair for each in short for pair in each["headers"]}
    match = {**options, "match": '{"a": 1}'}
    with pytest.raises(ConfigurationError, match=r"match: .* share documents; filter"):
        table_rows(match)


def test_table_of_a_bucket_is_divided_whatever_spark_filters_by(flow: Flow, database: str) -> None:
    """The database cannot find a packed message by its id, so each task has a part to read."""
    ids = flow.raw.push_many(range(9))
    options = {"uri": database, "queue": flow.source, "pushFilters": "true", "numPartitions": "3"}
    source = QueueDataSource(options)
    schema: Any = source.schema()
    reader: Any = source.reader(schema)
    reader.pushFilters([datasource.EqualTo(("id",), str(ids[4]))])
    parts = [[each.num_rows for each in reader.read(part)] for part in reader.partitions()]
    assert parts == [[3], [3], [3]]


@some_or_all
@pytest.mark.parametrize("consumed", [True, False], ids=["consumed", "left"])
def test_stream_between_buckets_that_dies_writes_each_once(
    shared: Client, database: str, few: int | None, consumed: bool
) -> None:
    """It dies at any command. The rows have new ids: only the record of epochs makes it exact."""

    def flow_of() -> Flow:
        return bucket(shared, pack=2)

    assert die_at_commands(flow_of, database, few, consumed=consumed, number=5) > 20


# ---- a session


@pytest.mark.spark_long
def test_stream_between_buckets(spark: Any, flow: Flow, database: str, tmp_path: Path) -> None:
    """One payload does not fit. It alone leaves its pack and is buried."""
    flow.raw.push_many([*range(20), "odd"], headers={"h": 1})
    options = {"uri": database, "queue": flow.source, "group": "g", "maxMessagesPerBatch": "7"}
    df = spark.readStream.format("pyqueue").options(**options, payloadType="bigint").load()
    writer = df.writeStream.format("pyqueue").options(uri=database, queue=flow.target, stage="s")
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    query.awaitTermination()
    assert [each.numInputRows for each in query.recentProgress] == [9, 9, 2]
    assert (flow.written(), flow.left(), flow.held()) == ([*range(20)], [], False)
    assert max(sizes(flow, flow.target)) == PACK
    assert [each.payload for each in flow.buried().values()] == ["odd"]
    assert flow.clean.peek()[0].headers == {"h": "1"}


@pytest.mark.spark_long
def test_batch_write_into_a_bucket(spark: Any, flow: Flow, database: str) -> None:
    options = {"uri": database, "queue": flow.target}
    rows: Callable[..., Any] = spark.range(10).selectExpr
    plain = rows("cast(id AS string) payload")
    plain.write.format("pyqueue").mode("append").options(**options).save()
    assert (flow.written(), max(sizes(flow, flow.target))) == ([*range(10)], PACK)
    chosen = rows("concat('x', id) id", "cast(id AS string) payload")
    write = chosen.write.format("pyqueue").mode("append").options(**options, idColumn="id")
    write.save()
    write.save()
    assert flow.written() == sorted([*range(10)] * 2)
    found = spark.read.format("pyqueue").options(**options, numPartitions="3").load()
    assert found.count() == 20
    assert found.where("id like 'x%'").count() == 10
