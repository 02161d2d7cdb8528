"""The writers of the data source, for batch writes and for streaming writes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from pyqueue.backends import managing
from pyqueue.backends.bulk.epochs import EpochWrites
from pyqueue.backends.bulk.id_sketch import IdSketch
from pyqueue.backends.bulk.staging import Staging, append, place_of
from pyqueue.backends.contents import contents_of
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import NewMessage
from pyqueue.backends.reading import dead_letter_of
from pyqueue.errors import ConfigurationError, Occupied
from pyqueue.spark.options import CHUNK, CHUNK_BYTES, Options
from pyqueue.spark.row_reader import Reader

#: The property of a Spark job that holds the id of its streaming query.
_QUERY: Final = "sql.streaming.queryId"
_RUN_ID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class _Chunk(NamedTuple):
    """The messages of one queue that are written together."""

    #: The queue, or None if the rows name none.
    queue: str | None
    messages: list[NewMessage]
    #: Whether they are rows that their queue cannot store. ``queue`` is then its dead-letter queue.
    dead: bool

    def place(self, part: str) -> str:
        """Return the name of the place (a part of the staged messages) for these messages."""
        return place_of(part, self.queue, dead=self.dead)


Chunks = Iterator[_Chunk]


@dataclass
class _Staged(WriterCommitMessage):
    """The result of one task: the number of messages in each of its staging places."""

    counts: dict[str, int]


class BatchWriter(DataSourceArrowWriter):
    """Stages messages where no consumer sees them, and publishes all of them at the commit."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = _reader(options, schema, options.of_write.id_column)
        self._staging = Staging(
            options.backend().target, uuid4().hex, options.of_write.on_duplicate
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        attempt, counts = uuid4().hex, {}
        for number, chunk in enumerate(_chunks(self._options, self._reader, iterator)):
            place = chunk.place(f"{attempt}:{number}")
            counts[place] = self._options.run(self._staging.write(place, chunk.messages))
        return _Staged(counts)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the rows that the tasks have staged."""
        counts = {
            place: count
            for each in messages
            if isinstance(each, _Staged)
            for place, count in each.counts.items()
        }
        with self._options.address.open() as connection:
            connection.run(self._staging.publish(counts))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the rows that the tasks have staged."""
        self._options.run(self._staging.discard())


class DirectBatchWriter(DataSourceArrowWriter):
    """Appends messages with ids. Each message is visible as soon as it is written."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = _reader(options, schema, options.of_write.id_column)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append the rows of a task."""
        return _appended(self._options, _chunks(self._options, self._reader, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Wake the consumers."""
        _notify(self._options)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Wake the consumers, because appended rows stay."""
        _notify(self._options)


def _appended(options: Options, chunks: Chunks) -> WriterCommitMessage:
    how = options.of_write
    # A streaming query repeats a batch with the same ids, so an error would stop it forever.
    by_id = how.id_column is not None and not (how.at_least_once and how.on_duplicate == "error")
    for chunk in chunks:
        target = options.backend(chunk.queue).target
        # If a row is written again, its message is already in the dead-letter queue.
        on_duplicate = "ignore" if chunk.dead else how.on_duplicate
        options.run(append(target, chunk.messages, on_duplicate, by_id=by_id))
    return WriterCommitMessage()


def _notify(options: Options) -> None:
    with options.address.open() as connection:
        for queue in options.queues or [options.queue]:
            connection.run(managing.notify(queue))
            if options.of_write.bury:
                connection.run(managing.notify(connection.run(dead_letter_of(queue))))


# ---- by epoch


@dataclass
class _Written(WriterCommitMessage):
    """The rows of an epoch that one task has written."""

    epochs: EpochWrites
    job: str
    #: The number of the attempt, or None if the epoch was already committed.
    attempt: int | None
    #: The number of messages in each staging place of the task.
    counts: dict[str, int]
    ids: IdSketch


class _EpochWriter:
    """Writes the rows of an epoch (a numbered batch) once, however often Spark runs the epoch.

    An abort changes nothing, because the epoch may already have been committed. If the epoch was
    not committed, the next attempt replaces the rows.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = _reader(options, schema, options.of_write.id_column or "id")
        self._job = uuid4().hex

    def _write(
        self, query: str, epoch: int, iterator: Iterator[pa.RecordBatch]
    ) -> WriterCommitMessage:
        """Write the rows of a task where no consumer sees them."""
        target, run = self._options.backend().target, self._options.run
        epochs = EpochWrites(target, self._options.of_write.stage or "", query, _run())
        attempt = self._join(epochs, epoch)
        counts, known = {}, IdSketch()
        task = _context().taskAttemptId()
        for number, chunk in enumerate(self._messages(iterator)):
            ids = [each.id for each in chunk.messages if each.id is not None]
            known = IdSketch.union((known, IdSketch.of(ids)))
            if attempt is None:
                run(epochs.check_repeated(epoch, ids))
                continue
            place = chunk.place(f"{attempt}:{task}:{number}")
            messages = chunk.messages if chunk.dead else self._named(target.kind, chunk.messages)
            counts[place] = run(epochs.write(epoch, attempt, task, place, messages))
        return _Written(epochs, self._job, attempt, counts, known)

    def _named(self, kind: Kind, rows: Sequence[NewMessage]) -> Sequence[NewMessage]:
        """Return the rows. If they can share documents, remove the ids derived from the source."""
        if self._options.of_write.id_column is not None:
            return rows
        # The ids were derived from the source. The record has a sample of them.
        return contents_of(kind).without_derived_ids(rows)

    def _join(self, epochs: EpochWrites, epoch: int) -> int | None:
        """Join the attempt at an epoch. Return its number, or None if the epoch is committed.

        If another query wrote to the same stage a moment ago, wait to find out whether that query
        has died. If so, this query takes over the stage. If that query writes again, this write
        fails.
        """
        until = None
        while True:
            try:
                return self._options.run(epochs.join(self._job, epoch))
            except Occupied as other:
                if until not in (None, other.until):
                    raise ConfigurationError(str(other)) from None
                until = other.until
                time.sleep(other.wait_s)

    def _messages(self, iterator: Iterator[pa.RecordBatch]) -> Chunks:
        """Read the messages from the rows, and give each its id."""
        stage = self._options.of_write.stage if self._options.of_write.id_column is None else None
        for chunk in _chunks(self._options, self._reader, iterator):
            if stage is not None:
                messages = [each._replace(id=f"{stage}~{each.id}") for each in chunk.messages]
                chunk = chunk._replace(messages=messages)
            yield chunk

    def _commit(self, messages: list[WriterCommitMessage | None], epoch: int) -> None:
        """Publish the rows that the tasks have written, unless that was done before."""
        written = [each for each in messages if isinstance(each, _Written)]
        if not written:
            return  # the epoch had no task
        epochs = written[0].epochs
        counts = {place: count for each in written for place, count in each.counts.items()}
        with self._options.address.open() as connection:
            # All tasks of a job that have an attempt have the same one.
            if any(each.attempt is None for each in written):
                connection.run(epochs.resume(epoch))
            else:
                job, attempt = written[0].job, written[0].attempt or 0
                ids = IdSketch.union(each.ids for each in written)
                connection.run(epochs.commit(job, epoch, attempt, counts, ids))


class EpochBatchWriter(_EpochWriter, DataSourceArrowWriter):
    """Writes a batch whose number is given by the ``epoch`` option, as in ``foreachBatch``."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        query = self._options.of_write.query or _local(_QUERY)
        return self._write(query, self._options.of_write.epoch or 0, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the rows that the tasks have staged."""
        self._commit(messages, self._options.of_write.epoch or 0)


class StreamWriter(_EpochWriter, DataSourceStreamArrowWriter):
    """Writes the epochs of a streaming query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task, or append them at once if delivery is "at-least-once"."""
        if self._options.of_write.at_least_once:
            return _appended(self._options, self._messages(iterator))
        query, epoch = _local(_QUERY), _local("streaming.sql.batchId")
        if not query or not epoch:
            raise ConfigurationError(
                "writeStream: Spark did not provide the query's id and the number of the batch; "
                'use .option("delivery", "at-least-once")'
            )
        return self._write(query, int(epoch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Publish the staged rows, or wake the consumers if the rows were appended at once."""
        if self._options.of_write.at_least_once:
            _notify(self._options)
        else:
            self._commit(messages, batchId)


def _context() -> TaskContext:
    """Return the context that Spark gives a task."""
    context = TaskContext.get()
    assert context is not None
    return context


def _local(name: str) -> str:
    """Return a property of the thread that started this job, or an empty text."""
    return _context().getLocalProperty(name) or ""


def _run() -> str:
    """Return the id of the run of a streaming query, or "" if Spark does not provide it.

    Each start of a query is another run. The id of the run is the job group of its jobs, unless the
    user has set a job group, whose name may stay the same.
    """
    group = _local("spark.jobGroup.id") if _local(_QUERY) else ""
    return group if _RUN_ID.fullmatch(group) else ""


def _reader(options: Options, schema: StructType, id: str | None) -> Reader:
    writes = options.of_write
    return Reader(
        schema, id, queues=options.queues, prefix=writes.id_prefix or "", bury=writes.bury
    )


def _chunks(options: Options, reader: Reader, batches: Iterator[pa.RecordBatch]) -> Chunks:
    """Yield the messages in the rows of all batches, in lists that are each for one queue."""
    capabilities = options.backend().kind.capabilities
    for pieces in _at_once(batches):
        by_queue: dict[str | None, list[NewMessage]] = {}
        bad: dict[str, list[NewMessage]] = {}
        for each in chain.from_iterable(reader.rows(one, capabilities) for one in pieces):
            if each.fault is None:
                by_queue.setdefault(each.queue, []).append(each)
            else:
                queue = each.queue or options.queue
                bad.setdefault(queue, []).append(each._replace(queue=queue))
        for name, messages in by_queue.items():
            yield _Chunk(name, messages, dead=False)
        for queue, messages in bad.items():
            yield _Chunk(options.run(dead_letter_of(queue)), messages, dead=True)


def _at_once(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Divide and join batches into groups of rows that are written together.

    A full group does not wait for the next batch, which Spark may still have to compute.
    """
    pieces: list[pa.RecordBatch] = []
    rows = size = 0
    for piece in chain.from_iterable(map(_halved, batches)):
        if pieces and (rows + piece.num_rows > CHUNK or size + piece.nbytes > CHUNK_BYTES):
            yield pieces
            pieces, rows, size = [], 0, 0
        pieces.append(piece)
        rows, size = rows + piece.num_rows, size + piece.nbytes
        if rows == CHUNK:
            yield pieces
            pieces, rows, size = [], 0, 0
    if rows:
        yield pieces


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide a batch into parts that are each small enough for one write."""
    half = batch.num_rows // 2
    if half and (batch.num_rows > CHUNK or batch.nbytes > CHUNK_BYTES):
        yield from _halved(batch.slice(0, half))
        yield from _halved(batch.slice(half))
    else:
        yield batch
