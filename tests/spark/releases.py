"""Try each use on the installed release of Spark: ``python -m tests.spark.releases URL DIR``.

It prints a JSON object: the release, and for each use "ok" or its error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark

from pyqueue import Client
from pyqueue.spark import SparkStage, spark_session
from tests.spark.programs import CONFIG, JAVA

PAYLOADS = ['{"n": 0}', '{"n": 1}']


def written(client: Client, queue: str) -> None:
    """Raise an error unless a queue holds the payloads, each once."""
    found = sorted(each.payload["n"] for each in client.queue(queue).peek(10))
    if found != [0, 1]:
        raise AssertionError(f"the queue holds {found}")


def read_batch(spark: Any, client: Client, url: str, folder: Path) -> None:
    """Read a queue as a table, with structs."""
    options = {"uri": url, "queue": "read", "payloadType": "struct<n: int>"}
    rows = spark.read.format("pyqueue").options(**options).load().collect()
    if sorted(row.payload.n for row in rows) != [0, 1]:
        raise AssertionError(f"the table holds {rows}")


def write_batch(spark: Any, client: Client, url: str, folder: Path) -> None:
    """Append a table to a queue."""
    df = spark.createDataFrame([(each,) for each in PAYLOADS], "payload string")
    df.write.format("pyqueue").mode("append").options(uri=url, queue="batch").save()
    written(client, "batch")


def write_stream(spark: Any, client: Client, url: str, folder: Path) -> None:
    """Write a stream of files to a queue."""
    source = folder / "files"
    source.mkdir()
    lines = [json.dumps({"id": str(n), "payload": each}) for n, each in enumerate(PAYLOADS)]
    (source / "one.json").write_text("\n".join(lines))
    df = spark.readStream.schema("id string, payload string").json(str(source))
    run_stream(df, url, "files", folder)
    written(client, "files")


def read_stream(spark: Any, client: Client, url: str, folder: Path) -> None:
    """Stream one queue into another one."""
    options = {"uri": url, "queue": "stream", "group": "g", "maxMessagesPerBatch": "1"}
    df = spark.readStream.format("pyqueue").options(**options).load()
    run_stream(df.select("id", "payload"), url, "streamed", folder)
    written(client, "streamed")


def run_stream(df: Any, url: str, queue: str, folder: Path) -> None:
    """Write the messages that are ready into a queue, by epochs."""
    writer = df.writeStream.format("pyqueue").options(uri=url, queue=queue, stage=queue)
    writer = writer.option("checkpointLocation", str(folder / f"{queue}-checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


def stage(spark: Any, client: Client, url: str, folder: Path) -> None:
    """Transform the messages between two queues."""
    moving = SparkStage(
        uri=url, source="stage", to="moved", group="g", transform=lambda df: df.where("true")
    )
    if moving.run_once(spark).written != len(PAYLOADS):
        raise AssertionError("the stage did not move the messages")
    written(client, "moved")


def claim(spark: Any, client: Client, url: str, folder: Path) -> None:
    """Stage messages by hand."""
    with client.queue("claim").claim("g", limit=10) as batch:
        if batch.dataframe(spark).count() != len(PAYLOADS):
            raise AssertionError("the DataFrame lacks messages")
        batch.commit()
    if client.queue("claim").counts().total:
        raise AssertionError("the claim was not settled")


Use = Callable[[Any, Client, str, Path], None]
#: By name. The queue that a use reads has the payloads.
USES: dict[str, Use] = {
    "batch reads": read_batch,
    "batch writes": write_batch,
    "stream writes": write_stream,
    "stream reads": read_stream,
    "SparkStage": stage,
    "Queue.claim": claim,
}


def main(url: str, folder: str) -> None:
    """Try each use."""
    spark = spark_session("releases", master="local[2]", config=CONFIG | JAVA)
    found = {"release": pyspark.__version__}
    with Client(url, signals="none:") as client:
        for queue in ("read", "stream", "stage", "claim"):
            client.queue(queue).push_many([json.loads(each) for each in PAYLOADS])
        for name, use in USES.items():
            try:
                use(spark, client, url, Path(folder))
                found[name] = "ok"
            except Exception as error:
                found[name] = str(error)[:2000] or type(error).__name__
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
