"""Programs that the tests start as processes of their own: drivers with a JVM, to be killed, or to start as users' do.

Run as ``python -m tests.spark.programs NAME ARGUMENTS``. What a program has to say it says in JSON, on one line of standard output.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

#: What a session is started with, here and in the tests.
CONFIG = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.python.authenticate.socketTimeout": "600s",  # a busy machine starts workers slowly
}


#: Whether the naive stream has written a batch.
WROTE = threading.Event()


def stream(spark: Any, url: str, queue: str, **options: str) -> Any:
    """A stream out of a queue."""
    given = {
        "uri": url,
        "queue": queue,
        "maxMessagesPerBatch": "20",
        "numPartitions": "5",
    } | options
    return spark.readStream.format("pyqueue").options(**given).load()


def slowly(pause: float) -> Any:
    """Lets rows through, one after the other."""

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(pause * batch.num_rows)
            yield batch

    return rows


def good(spark: Any, url: str, checkpoint: str, pause: float = 0) -> Any:
    """From "raw" to "clean", with ids made of the source's."""
    df = stream(spark, url, "raw", group="g")
    if pause:
        df = df.mapInArrow(slowly(pause), df.schema)
    writer = df.writeStream.format("pyqueue").options(uri=url, queue="clean", stage="clean")
    return (
        writer.option("checkpointLocation", f"{checkpoint}/good").trigger(availableNow=True).start()
    )


def naive(spark: Any, url: str, checkpoint: str, pause: float = 0) -> Any:
    """From "raw2" to "clean2", each batch by a batch write, which makes ids of its own."""

    def write(df: Any, number: int) -> None:
        df.write.format("pyqueue").mode("append").options(uri=url, queue="clean2").save()
        WROTE.set()
        time.sleep(pause)

    df = stream(spark, url, "raw2", group="g")
    writer = df.writeStream.foreachBatch(write).option("checkpointLocation", f"{checkpoint}/naive")
    return writer.trigger(availableNow=True).start()


def streams(url: str, checkpoint: str, *names: str) -> None:
    """Run these streams, slowly, to their end; the naive one is to be killed when it has written."""
    from pyqueue.spark import spark_session

    spark = spark_session("killed", master="local[2]", config=CONFIG)
    spark.sparkContext.setLogLevel("OFF")
    if "naive" in names:
        naive(spark, url, checkpoint, 600)
        WROTE.wait()
    good(spark, url, checkpoint, 0.1).awaitTermination()


def write(url: str, rows: str) -> None:
    """Write rows with ids by one job, again and again, for ever."""
    from pyqueue.spark import spark_session

    spark = spark_session("killed", master="local[2]", config=CONFIG)
    spark.sparkContext.setLogLevel("OFF")
    df = (
        spark.range(int(rows))
        .selectExpr("concat('id', id) AS name", "cast(id AS string) AS payload")
        .repartition(4)
    )
    while True:
        df.write.format("pyqueue").mode("append").options(
            uri=url, queue="clean", idColumn="name"
        ).save()


def plain(url: str) -> None:
    """A session as a user starts one, who registers nothing: reads and writes payloads of several types."""
    from pyqueue.spark.session import session

    spark = session("plain", master="local[1]", config=CONFIG)
    spark.sparkContext.setLogLevel("OFF")
    given = {"uri": url, "queue": "raw", "numPartitions": "1"}
    type = "struct<at: timestamp, far: timestamp, price: decimal(10,2), tags: array<string>>"
    df = spark.read.format("pyqueue").options(**given, payloadType=type).load()
    df.write.format("pyqueue").mode("append").options(uri=url, queue="structs").save()
    row = df.selectExpr(
        "cast(payload.at AS string) AS at", "cast(payload.far AS string) AS far", "id"
    ).collect()[0]
    json_ = spark.read.format("pyqueue").options(**given).load()
    json_.write.format("pyqueue").mode("append").options(uri=url, queue="jsons").save()
    variant = spark.read.format("pyqueue").options(**given, payloadType="variant").load()
    variant.write.format("pyqueue").mode("append").options(uri=url, queue="variants").save()
    import os

    import pyqueue

    told = {
        "at": row.at,
        "far": row.far,
        "java_home": os.environ.get("JAVA_HOME"),
        "pyqueue": str(Path(pyqueue.__file__).parents[1]),
        "zone": time.strftime("%z", time.localtime(datetime(2013, 7, 1, tzinfo=UTC).timestamp())),
    }
    spark.stop()
    print(json.dumps(told), flush=True)


def connect(url: str, checkpoint: str) -> None:
    """Spark Connect: a batch read, a write, a stream, a stage and a claim."""
    from pyqueue import Client
    from pyqueue.spark import SparkStage, spark_session

    spark = spark_session("connect", config=CONFIG | {"spark.remote": "local[2]"})
    told: dict[str, Any] = {"session": type(spark).__module__}
    told["read"] = spark.read.format("pyqueue").options(uri=url, queue="raw").load().count()
    query = (
        stream(spark, url, "raw", group="g")
        .writeStream.format("pyqueue")
        .options(uri=url, queue="clean", stage="clean")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    stage = SparkStage(
        uri=url, source="clean", to="last", group="g", transform=lambda df: df.where("payload > 1")
    )
    report = stage.run_once(spark)
    told["stage"] = [report.claimed, report.written, report.dropped]
    with Client(url) as client, client.queue("last").claim("h", limit=10) as claim:
        told["claim"] = sorted(row.payload for row in claim.dataframe(spark).collect())
    spark.stop()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "streams": streams,
        "write": write,
        "plain": plain,
        "connect": connect,
    }
    programs[sys.argv[1]](*sys.argv[2:])
