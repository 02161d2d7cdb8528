"""A job for ``spark-submit``: it reads, writes and streams, and says where its tasks ran.

The Python of the cluster has no pyqueue and no pydantic unless the job ships them. This program
imports nothing from ``tests``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa


def places(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return, for each task, the file of pyqueue and whether pydantic is there."""
    import importlib.util
    import os

    import pyqueue

    for batch in batches:
        place = pyqueue.__file__, importlib.util.find_spec("pydantic") is not None, os.getcwd()
        yield pa.RecordBatch.from_pylist([{"place": json.dumps(place)}] * min(1, batch.num_rows))


def main(url: str, checkpoint: str) -> None:
    """Run the job."""
    from pyspark.sql import SparkSession

    from pyqueue.spark import register

    spark = SparkSession.builder.appName("submitted").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    given = {"uri": url, "queue": "raw"}
    table = spark.read.format("pyqueue").options(**given).load()
    result: dict[str, Any] = {"read": table.count(), "parts": table.rdd.getNumPartitions()}
    rows = spark.range(10, numPartitions=2).selectExpr(
        "cast(id AS string) AS payload", "concat('table-', id) AS name"
    )
    rows.write.format("pyqueue").mode("append").options(
        uri=url, queue="table", idColumn="name"
    ).save()
    query = (
        spark.readStream.format("pyqueue")
        .options(**given, group="g", maxMessagesPerBatch="6")
        .load()
        .writeStream.format("pyqueue")
        .options(uri=url, queue="clean", stage="clean")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = spark.range(2, numPartitions=2).mapInArrow(places, "place string").collect()
    result["places"] = [json.loads(each.place) for each in found]
    spark.stop()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
