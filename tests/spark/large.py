"""A task that writes large messages and reads them: how much memory it takes.

Run it with ``python -m tests.spark.large URL COUNT``, where ``COUNT`` is the number of messages of
1 MB. It prints the most memory that the process had, in megabytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from pyqueue.spark import QueueDataSource
from pyqueue.spark.columns import columns

ROWS = StructType([StructField("payload", StringType())])
#: The number of rows that Spark gives a task at once, of 64 MB.
AT_ONCE = 64


def batches(count: int) -> Iterator[pa.RecordBatch]:
    """Return the rows that Spark gives a task."""
    row = pa.RecordBatch.from_pydict({"payload": ['"' + "x" * 1_000_000 + '"']})
    for start in range(0, count, AT_ONCE):  # exactly the memory of the rows, as Spark hands them
        yield row.take(pa.array([0] * min(AT_ONCE, count - start)))


def main(url: str, count: str) -> None:
    """Write messages, read them, and say how much memory that took."""
    source = QueueDataSource({"uri": url, "queue": "large", "numPartitions": "1"})
    writer = cast(Any, source.writer(ROWS, False))
    writer.commit([writer.write(batches(int(count)))])
    reader = cast(Any, source.reader(columns(None)))
    read = sum(rows.num_rows for part in reader.partitions() for rows in reader.read(part))
    assert read == int(count), read
    # The maximum of getrusage() would include the memory of the process that started this one.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) // 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
