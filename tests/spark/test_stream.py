"""Streams of a real session.

They show that Spark calls sources and sinks in the order that ``engine`` has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyqueue.spark import SparkStage, register
from tests.spark.fakes import Flow
from tests.spark.processes import spark_eventually
from tests.spark.session import URI_ENV

Query = Any


def settled(flow: Flow) -> bool:
    return flow.left() == [] and not flow.held()


@pytest.fixture
def started(spark: Any, flow: Flow, tmp_path: Path) -> Callable[..., Query]:
    """Return a function that starts a stream; an environment variable holds its credentials."""

    def start(
        *,
        to: str = "s",
        limit: int = 5,
        checkpoint: str = "checkpoint",
        via: Any = None,
        **trigger: Any,
    ) -> Query:
        options = {"uriEnv": URI_ENV, "queue": flow.source, "group": "g", "numPartitions": "2"}
        df = spark.readStream.format("pyqueue").options(**options, maxMessagesPerBatch=str(limit))
        writer = (via or (lambda df: df))(df.load()).writeStream.format("pyqueue")
        writer = writer.options(uriEnv=URI_ENV, queue=flow.target, stage=to)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        return writer.trigger(**trigger).start()

    return start


def ended(query: Query) -> Query:
    query.awaitTermination()
    return query


# ---- the order of the calls, and the ends of queries


@pytest.mark.spark_long
def test_stream_available_now_empties_the_queue(flow: Flow, started: Callable[..., Query]) -> None:
    ids = flow.raw.push_many(range(8), headers={"h": 1})
    query = ended(started(availableNow=True))
    assert [each.numInputRows for each in query.recentProgress] == [5, 3]
    assert flow.written() == [*range(8)]
    stored = sorted(each["_id"] for each in flow.stored(flow.target))
    assert stored == sorted(f"s~{id}" for id in ids)
    assert flow.clean.peek()[0].headers == {"h": "1"}
    assert settled(flow)


@pytest.mark.spark_long
def test_stream_goes_on_from_its_checkpoint(flow: Flow, started: Callable[..., Query]) -> None:
    flow.raw.push_many(range(8))
    ended(started(availableNow=True))
    flow.raw.push_many([8, 9])
    flow.raw.push("later", delay=600)
    query = ended(started(availableNow=True))
    assert [each.numInputRows for each in query.recentProgress] == [2]
    assert flow.written() == [*range(10)]
    assert flow.left() == ["later"]


@pytest.mark.spark_long
def test_continuing_stream_leaves_nothing_reserved(
    flow: Flow, started: Callable[..., Query]
) -> None:
    """The listener acknowledges the last batch, while the query waits and when it is stopped."""
    flow.raw.push_many(range(3))
    query = started(processingTime="1 hour")
    spark_eventually(lambda: settled(flow), "a settled source", query)
    query.stop()
    assert flow.written() == [*range(3)]
    query = started(processingTime="200 milliseconds")
    flow.raw.push_many(range(3, 10))
    spark_eventually(lambda: len(flow.written()) == 10, "all messages written", query)
    spark_eventually(lambda: settled(flow), "a settled source", query)
    query.stop()
    assert query.exception() is None
    assert max(each.numInputRows for each in query.recentProgress) <= 5
    assert settled(flow)


@pytest.mark.spark_long
def test_stream_survives_a_task_repeated_in_another_order(
    flow: Flow, started: Callable[..., Query], tmp_path: Path
) -> None:
    marker = str(tmp_path / "failed")

    def via(df: Any) -> Any:
        def rows(batches: Any) -> Any:
            import pyarrow as pa

            table = pa.Table.from_batches(list(batches))
            if Path(marker).exists():
                yield from table.take(list(range(table.num_rows - 1, -1, -1))).to_batches()
            else:
                yield from table.slice(0, table.num_rows // 2).to_batches()
                Path(marker).touch()
                raise ArithmeticError("once")

        return df.mapInArrow(rows, df.schema)

    flow.raw.push_many(range(40))
    ended(started(availableNow=True, limit=100, via=via))
    assert Path(marker).exists()
    assert flow.written() == [*range(40)]
    assert settled(flow)


@pytest.fixture
def settle_by(spark: Any, flow: Flow, database: str, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a stream to its end. A stage settles the batches."""

    def run(transform: Any, **options: str) -> None:
        stage = SparkStage(
            uri=database, source=flow.source, to=flow.target, group="g", transform=transform
        )
        given = {"uri": database, "queue": flow.source, "group": "g"} | options
        df = spark.readStream.format("pyqueue").options(**given).load()
        writer = df.writeStream.foreachBatch(stage.foreach_batch)
        writer = writer.option("checkpointLocation", str(tmp_path))
        ended(writer.trigger(availableNow=True).start())

    return run


@pytest.mark.spark_long
def test_foreach_batch_settles_the_stream(flow: Flow, settle_by: Callable[..., None]) -> None:
    """The stage settles the batches. Messages that it leaves out are finished."""

    def transform(df: Any) -> Any:
        return df.where("payload != '2'").selectExpr("id", "concat('1', payload) AS payload")

    flow.raw.push_many(range(5))
    settle_by(transform, maxMessagesPerBatch="3")
    assert flow.written() == [10, 11, 13, 14]
    assert settled(flow)


@pytest.mark.spark_long
def test_stream_buries_bad_records_and_is_counted(
    spark: Any, flow: Flow, database: str, tmp_path: Path
) -> None:
    """The listener of the session has the numbers. Spark's progress has the ready messages."""
    flow.raw.push_many([0, 1, "two", 3, 4])
    given = {"uri": database, "queue": flow.source, "group": "g", "payloadType": "bigint"}
    df = spark.readStream.format("pyqueue").options(**given, maxMessagesPerBatch="3").load()
    writer = df.writeStream.format("pyqueue").options(uri=database, queue=flow.target, stage="s")
    writer = writer.option("checkpointLocation", str(tmp_path))
    query = ended(writer.trigger(availableNow=True).start())
    assert flow.written() == [0, 1, 3, 4]
    assert [each["payload"] for each in flow.stored(f"{flow.source}.dead")] == ["two"]
    assert settled(flow)
    listener = register(spark)

    def counted() -> bool:
        found = listener.queries.get(str(query.id), [])
        return [(each.claim, each.buried) for each in found] == [(2, 1)]

    spark_eventually(counted, "the numbers of the query")
    (found,) = listener.queries[str(query.id)]
    assert (found.queue, found.group, found.rows) == (flow.source, "g", 4)
    assert (found.ready, found.oldest_age, found.lost, found.fenced) == (0, None, 0, 0)
    ready = [json.loads(each.sources[0].latestOffset)["ready"] for each in query.recentProgress]
    assert ready == [2, 0]


@pytest.mark.spark_long
def test_foreach_batch_leaves_bad_records_to_the_stream(
    flow: Flow, settle_by: Callable[..., None]
) -> None:
    """A message that the transform leaves out is finished, and one that is bad is buried."""

    def transform(df: Any) -> Any:
        return df.where("payload != 1").select("id", "payload")

    flow.raw.push_many([0, 1, "two", 3, 4])
    settle_by(transform, payloadType="bigint")
    assert flow.written() == [0, 3, 4]
    assert [each["payload"] for each in flow.stored(f"{flow.source}.dead")] == ["two"]
    assert settled(flow)


@pytest.mark.slow
def test_second_query_of_a_dataframe_is_refused(flow: Flow, started: Callable[..., Query]) -> None:
    """Both queries run in one application. The second one would wait for the first for ever."""
    flow.raw.push_many(range(3))
    first = started(processingTime="200 milliseconds", to="first")
    spark_eventually(lambda: len(flow.written()) == 3, "three messages written", first)
    second = started(processingTime="200 milliseconds", to="second", checkpoint="another")
    spark_eventually(lambda: not second.isActive, "the end of the second query", first)
    assert "another query of this application already runs" in str(second.exception())
    flow.raw.push_many(range(3, 8))
    spark_eventually(lambda: len(flow.written()) == 8, "all messages written", first)
    spark_eventually(lambda: settled(flow), "a settled source", first)
    first.stop()
    assert first.exception() is None
    assert {each["_id"].partition("~")[0] for each in flow.stored(flow.target)} == {"first"}


@pytest.mark.slow
def test_stream_goes_on_without_its_checkpoint(flow: Flow, started: Callable[..., Query]) -> None:
    flow.raw.push_many(range(7))

    def via(df: Any) -> Any:
        return df.selectExpr("id", "cast(raise_error('always') AS string) AS payload")

    query = started(availableNow=True, via=via, checkpoint="first")
    spark_eventually(lambda: not query.isActive, "the end of the query")
    assert "always" in str(query.exception())
    assert flow.raw.counts().reserved == 5
    ended(started(availableNow=True, checkpoint="second"))
    assert flow.written() == [*range(7)]
    assert settled(flow)


# ---- secrets


def stream_with_uri(spark: Any, flow: Flow, uri: str, checkpoint: Path) -> Query:
    """Run a stream that has the URI in its options; return its query."""
    stream = spark.readStream.format("pyqueue").options(uri=uri, queue=flow.source, group="g")
    writer = stream.load().writeStream.format("pyqueue")
    writer = writer.options(uri=uri, queue=flow.target, stage="open")
    writer = writer.option("checkpointLocation", str(checkpoint))
    return ended(writer.trigger(availableNow=True).start())


def files(path: Path) -> str:
    return "\n".join(each.read_text(errors="replace") for each in path.rglob("*") if each.is_file())


@pytest.mark.spark_long
def test_plans_checkpoints_and_logs_hide_the_password(
    spark: Any,
    flow: Flow,
    started: Callable[..., Query],
    signed_in: str,
    password: str,
    tmp_path: Path,
    log: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """This holds for a URI in an environment variable and for ``uri``."""
    assert password in signed_in
    flow.raw.push_many(range(3))
    spark.sparkContext.setLogLevel("INFO")
    try:
        plans = []
        for given in ({"uriEnv": URI_ENV}, {"uri": signed_in}):
            df = spark.read.format("pyqueue").options(queue=flow.source, **given).load()
            df = df.where("tries = 0")
            df.explain("extended")
            plans.append(repr(df))
        assert df.count() == 3
        ended(started(availableNow=True))
        flow.raw.push_many(range(3))
        query = stream_with_uri(spark, flow, signed_in, tmp_path / "open")
        query.explain(True)
        progress = json.dumps([str(each) for each in query.recentProgress])
        bad = df.selectExpr("tries").write.format("pyqueue").mode("append")
        with pytest.raises(Exception, match="payload") as caught:
            bad.options(uri=signed_in, queue=flow.target).save()
    finally:
        spark.sparkContext.setLogLevel("OFF")
    output = capsys.readouterr().out
    assert "Physical Plan" in output
    logged = log.read_text()
    assert "MicroBatchExecution" in logged
    offsets = files(tmp_path / "open") + files(tmp_path / "checkpoint")
    assert '"token"' in offsets
    for name, text in {
        "plan": output + "".join(plans),
        "log": logged,
        "checkpoint": offsets,
        "progress": progress,
        "error": str(caught.value),
    }.items():
        assert password not in text, name
    assert settled(flow)
