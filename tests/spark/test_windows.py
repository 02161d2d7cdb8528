"""Windows and joins with watermarks over queues give the results of pandas, across a restart."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import functions as F  # noqa: N812  # the usual name in Spark programs

from pyqueue.demo.rows import find_lines
from tests.spark.fakes import Flow
from tests.spark.session import URI_ENV

pytestmark = pytest.mark.spark_long

EVENT = "struct<id: int, at: timestamp, carrier: string, minutes: int>"
WEEK = timedelta(days=7)
#: The first Thursday after which Spark's windows of a week are counted.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def flights(every: int) -> list[dict[str, Any]]:
    """Return some flights of the file as events, in the order of their departure."""
    _, _, lines = find_lines(None)
    events = [
        {
            "id": int(line["id"]),
            "at": datetime(2013, int(line["month"]), int(line["day"]), tzinfo=UTC)
            + timedelta(minutes=int(line["dep_time"]) // 100 * 60 + int(line["dep_time"]) % 100),
            "carrier": line["carrier"],
            "minutes": int(line["arr_delay"]),
        }
        for line in lines()
        if "NA" not in (line["dep_time"], line["arr_delay"])
    ]
    return sorted(events, key=lambda each: (each["at"], each["id"]))[::every]


def events(spark: Any, queue: str) -> Any:
    """Return a stream of the events of a queue."""
    options = {"uriEnv": URI_ENV, "queue": queue, "group": "g", "payloadType": EVENT}
    df = spark.readStream.format("pyqueue").options(**options, maxMessagesPerBatch="500").load()
    return df.select("payload.*").withWatermark("at", "1 day")


def run(flow: Flow, df: Any, checkpoint: Path) -> None:
    """Write the results of a stream into the target, until its sources are empty."""
    options = {"uriEnv": URI_ENV, "queue": flow.target, "idColumn": "name"}
    writer = df.writeStream.format("pyqueue").options(**options)
    writer = writer.option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def results(flow: Flow) -> list[dict[str, Any]]:
    return [each["payload"] for each in flow.stored(flow.target)]


def halves(rows: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def test_windows_with_watermarks_equal_pandas(spark: Any, flow: Flow, tmp_path: Path) -> None:
    rows = flights(16)
    late = {"id": 0, "at": datetime(2015, 1, 1, tzinfo=UTC), "carrier": "closes", "minutes": 0}
    window = F.window("at", "7 days")
    for some in halves([*rows, late]):
        flow.raw.push_many(some)
        weeks = (
            events(spark, flow.source)
            .groupBy(window.alias("week"), "carrier")
            .agg(F.count("*").alias("flights"), F.sum("minutes").alias("minutes"))
        )
        start = F.unix_seconds("week.start").cast("string")
        payload = F.to_json(F.struct(start.alias("start"), "carrier", "flights", "minutes"))
        named = F.concat_ws("-", F.lit(flow.target), start, "carrier").alias("name")
        run(flow, weeks.select(named, payload.alias("payload")), tmp_path / "checkpoint")
    frame = pd.DataFrame(rows)
    frame["start"] = (frame["at"] - EPOCH) // WEEK * int(WEEK.total_seconds())
    expected = frame.groupby(["start", "carrier"])["minutes"].agg(["size", "sum"])
    found = {
        (int(each["start"]), each["carrier"]): (each["flights"], each["minutes"])
        for each in results(flow)
    }
    assert found == {key: tuple(map(int, row)) for key, row in expected.iterrows()}
    assert flow.left() == []


def test_join_of_streams_with_watermarks_equals_pandas(
    spark: Any, flow: Flow, tmp_path: Path
) -> None:
    departures = flights(32)
    arrivals = [
        each | {"at": each["at"] + timedelta(hours=each["minutes"] % 40)} for each in departures
    ]
    arrivals.sort(key=lambda each: each["at"])
    landed = flow.client.queue(f"{flow.source}-landed")
    for some, others in zip(halves(departures), ([], arrivals), strict=True):
        flow.raw.push_many(some)
        landed.push_many(others)
        left = events(spark, flow.source).alias("left")
        right = events(spark, landed.name).alias("right")
        joined = left.join(
            right,
            F.expr("left.id = right.id AND right.at BETWEEN left.at AND left.at + interval 1 day"),
        )
        payload = F.to_json(F.struct("left.id", "right.carrier", "left.minutes"))
        named = F.concat_ws("-", F.lit(flow.target), "left.id").alias("name")
        run(flow, joined.select(named, payload.alias("payload")), tmp_path / "checkpoint")
    pairs = pd.DataFrame(departures).merge(pd.DataFrame(arrivals), on="id")
    pairs = pairs[(pairs["at_y"] >= pairs["at_x"]) & (pairs["at_y"] - pairs["at_x"] <= "1 day")]
    expected = {int(row.id): (row.carrier_y, int(row.minutes_x)) for row in pairs.itertuples()}
    assert 0 < len(expected) < len(departures)
    found = {each["id"]: (each["carrier"], each["minutes"]) for each in results(flow)}
    assert found == expected
    assert len(flow.stored(flow.target)) == len(expected)
    assert flow.left() == []
    assert landed.counts().total == 0
