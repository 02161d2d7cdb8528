"""The writers of the data source: batches that appear at once, and the epochs of streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from pyqueue.backends import managing
from pyqueue.backends.options import NewMessage
from pyqueue.backends.staging import Staging, append
from pyqueue.connecting import runner_of
from pyqueue.spark.frames import Reader
from pyqueue.spark.options import CHUNK, Options

__all__ = ["BatchWriter", "StreamWriter"]


@dataclass
class _Staged(WriterCommitMessage):
    """What one task has staged: the number of messages in each of its staging places."""

    counts: dict[str, int]


class BatchWriter(DataSourceArrowWriter):
    """Stages messages out of sight, and shows all of them at the commit."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = Reader(schema, options.id_column)
        self._staging = Staging(options.backend().target, uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        attempt, counts = uuid4().hex, {}
        for number, messages in enumerate(_chunks(self._reader, iterator)):
            place = f"{attempt}:{number}"
            counts[place] = self._options.run(self._staging.write(place, messages))
        return _Staged(counts)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Show what the tasks have staged."""
        counts = {
            place: count
            for each in messages
            if isinstance(each, _Staged)
            for place, count in each.counts.items()
        }
        with self._options.address.open() as client:
            runner_of(client).run(self._staging.publish(counts))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete what the tasks have staged."""
        self._options.run(self._staging.discard())


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes messages whose ids are the same if Spark repeats the batch."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = Reader(schema, options.id_column or "id")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task."""
        backend, stage = self._options.backend(), self._options.stage
        for messages in _chunks(self._reader, iterator):
            if stage is not None:
                messages = [each._replace(id=f"{stage}~{each.id}") for each in messages]
            self._options.run(append(backend.target, messages))
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Wake the consumers. The messages are visible already."""
        with self._options.address.open() as client:
            runner_of(client).run(managing.notify(self._options.queue))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: Spark repeats the batch, with the same ids."""


def _chunks(reader: Reader, batches: Iterator[pa.RecordBatch]) -> Iterator[list[NewMessage]]:
    """Read the rows of all batches, in lists of at most ``CHUNK``."""
    rows = chain.from_iterable(map(reader.rows, batches))
    while messages := list(islice(rows, CHUNK)):
        yield messages
