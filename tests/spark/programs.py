"""Programs that tests run as separate processes: drivers with their own JVM.

Run one with ``python -m tests.spark.programs NAME ARGUMENTS``. A program that has a result prints
it as JSON on one line of standard output. This module imports nothing from ``tests``, because one
test runs it next to an installed wheel.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

#: The settings of every session in the tests. All of them save time.
CONFIG = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.sql.streaming.stopTimeout": "60s",
    # A busy machine starts workers slowly.
    "spark.python.authenticate.socketTimeout": "600s",
}
#: The JVM of a test lives too short for its second compiler to pay.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
JAVA = {"spark.driver.extraJavaOptions": JAVA_OPTIONS}

#: How many messages a batch of a stream takes, and how many partitions it has.
BATCH = 20
PARTITIONS = 2

#: A program that is held ends by itself after this time, in seconds.
HELD_S = 3600.0

#: Set once the stream without ids has written a batch.
WROTE = threading.Event()


def stream(spark: Any, url: str, queue: str, **options: str) -> Any:
    """Return a stream out of a queue."""
    given = {"uri": url, "queue": queue, "numPartitions": str(PARTITIONS)}
    given |= {"maxMessagesPerBatch": str(BATCH)} | options
    return spark.readStream.format("pyqueue").options(**given).load()


def held(column: str, value: str, gate: str = "", reached: str = "") -> Any:
    """Return a function for ``mapInArrow`` that lets rows pass, except the one with this value.

    The task with that row makes the file ``reached`` and waits until the file ``gate`` exists, or
    until its process is killed. The tasks before it have ended, so the job stays half-done for as
    long as a test needs.
    """

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if value in batch.column(column).to_pylist():
                if reached:
                    Path(reached).touch()
                end = time.monotonic() + HELD_S
                while not (gate and Path(gate).exists()):
                    if time.monotonic() > end:
                        raise TimeoutError("the test has neither opened the gate nor killed this")
                    time.sleep(0.01)
            yield batch

    return rows


def with_ids(spark: Any, url: str, checkpoint: str, hold: str | None = None, gate: str = "") -> Any:
    """Start the stream from "raw" to "clean". Its ids are made from the ids of the source.

    Args:
        spark: The session.
        url: The database.
        checkpoint: The directory of the checkpoints.
        hold: The payload of the message whose task waits for the gate.
        gate: The file that opens the gate; by default the task never ends.
    """
    df = stream(spark, url, "raw", group="g")
    if hold is not None:
        df = df.mapInArrow(held("payload", hold, gate), df.schema)
    writer = df.writeStream.format("pyqueue").options(uri=url, queue="clean", stage="clean")
    writer = writer.option("checkpointLocation", f"{checkpoint}/with_ids")
    return writer.trigger(availableNow=True).start()


def typed(spark: Any, url: str, checkpoint: str, hold: str | None = None, reached: str = "") -> Any:
    """Start a stream of numbers from "raw" to "clean", in batches of 2 500.

    Args:
        spark: The session.
        url: The database.
        checkpoint: The directory of the checkpoints.
        hold: The id of the message whose task never ends.
        reached: The file that this task makes.
    """
    options = {"payloadType": "bigint", "maxMessagesPerBatch": "2500", "numPartitions": "1"}
    df = stream(spark, url, "raw", group="g", **options)
    if hold is not None:
        df = df.mapInArrow(held("id", hold, reached=reached), df.schema)
    writer = df.writeStream.format("pyqueue").options(uri=url, queue="clean", stage="clean")
    writer = writer.option("checkpointLocation", f"{checkpoint}/typed")
    return writer.trigger(availableNow=True).start()


def without_ids(spark: Any, url: str, checkpoint: str, hold: bool = False) -> Any:
    """Start the stream from "raw2" to "clean2": a batch write of each batch, which makes new ids.

    Args:
        spark: The session.
        url: The database.
        checkpoint: The directory of the checkpoints.
        hold: Whether the first batch waits after its write until the process is killed.
    """

    def write(df: Any, number: int) -> None:
        df.write.format("pyqueue").mode("append").options(uri=url, queue="clean2").save()
        WROTE.set()
        if hold:
            time.sleep(HELD_S)

    df = stream(spark, url, "raw2", group="g")
    writer = df.writeStream.foreachBatch(write)
    writer = writer.option("checkpointLocation", f"{checkpoint}/without_ids")
    return writer.trigger(availableNow=True).start()


def session(master: str = "local[1]", **config: str) -> Any:
    """Start the session of a program that will be killed. One core starts fewest workers."""
    from pyqueue.spark import spark_session

    spark = spark_session("killed", master=master, config=CONFIG | JAVA | config)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def run_with_ids(url: str, checkpoint: str, hold: str, gate: str = "") -> None:
    """Run the stream with ids. It holds at one message."""
    with_ids(session(), url, checkpoint, hold, gate).awaitTermination()


def run_typed(url: str, checkpoint: str, hold: str, reached: str) -> None:
    """Run the stream of numbers. It holds at one message."""
    typed(session(), url, checkpoint, hold, reached).awaitTermination()


def run_without_ids(url: str, checkpoint: str) -> None:
    """Run the stream without ids. It holds once its first batch is written."""
    without_ids(session(), url, checkpoint, hold=True).awaitTermination()


def write(url: str, rows: str, hold: str, gate: str) -> None:
    """Write rows with ids in one job, which holds at the row ``hold`` until the gate opens."""
    df = (
        session("local[2]")
        .range(int(rows))
        .selectExpr("concat('id', id) AS name", "cast(id AS string) AS payload")
        .repartition(4)
    )
    df = df.mapInArrow(held("payload", hold, gate), df.schema)
    options = {"uri": url, "queue": "clean", "idColumn": "name"}
    df.write.format("pyqueue").mode("append").options(**options).save()


def plain(url: str) -> None:
    """Read and write payloads of several types in a session that registers nothing."""
    import pyqueue
    from pyqueue.spark.session import session

    spark = session("plain", master="local[1]", config=CONFIG | JAVA)
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
    result = {
        "at": row.at,
        "far": row.far,
        "java_home": os.environ.get("JAVA_HOME"),
        "pyqueue": str(Path(pyqueue.__file__).parents[1]),
        "zone": time.strftime("%z", time.localtime(datetime(2013, 7, 1, tzinfo=UTC).timestamp())),
    }
    spark.stop()
    print(json.dumps(result), flush=True)


def connect(url: str, checkpoint: str) -> None:
    """Use Spark Connect: a batch read, a write, a stream, a stage and a claim."""
    from pyqueue import Client
    from pyqueue.spark import SparkStage, spark_session

    spark = spark_session("connect", config=CONFIG | JAVA | {"spark.remote": "local[2]"})
    result: dict[str, Any] = {"session": type(spark).__module__}
    result["read"] = spark.read.format("pyqueue").options(uri=url, queue="raw").load().count()
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
    result["stage"] = [report.claimed, report.written, report.dropped]
    with Client(url) as client, client.queue("last").claim("h", limit=10) as claim:
        result["claim"] = sorted(row.payload for row in claim.dataframe(spark).collect())
    spark.stop()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        "with_ids": run_with_ids,
        "typed": run_typed,
        "without_ids": run_without_ids,
        "write": write,
        "plain": plain,
        "connect": connect,
    }
    programs[sys.argv[1]](*sys.argv[2:])
