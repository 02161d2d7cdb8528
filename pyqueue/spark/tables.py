"""The reader of tables: the messages that are ready. It consumes none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import DataType

from pyqueue.backends.slices import Slice, page, slices
from pyqueue.spark.options import CHUNK, Options
from pyqueue.spark.rows import rows_of

__all__ = ["BatchReader"]


@dataclass
class _SlicePartition(InputPartition):
    slice: Slice


class BatchReader(DataSourceReader):
    """Reads ready messages and consumes none."""

    def __init__(self, options: Options, payload: DataType | None) -> None:
        self._options = options
        self._payload = payload

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the queue among tasks."""
        options = self._options
        backend = options.backend()
        found = options.run(slices(backend.queue, backend.kind, options.partitions))
        return [_SlicePartition(each) for each in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part of the queue."""
        assert isinstance(partition, _SlicePartition)
        rest = partition.slice
        backend = self._options.backend()
        while found := self._options.run(page(backend.queue, backend.kind, rest, CHUNK)):
            yield rows_of(self._options, found, self._payload, "fail")[0]
            if len(found) < CHUNK:
                return
            rest = replace(rest, above=(found[-1]["when"], found[-1]["_id"]))
