"""Spark's part in a stream, without Spark.

``Engine`` calls a source and a sink in the order in which Spark calls them, and keeps the two logs
of a checkpoint. So a test can let a stream die between any two steps, within milliseconds. The
tests with a real session show that the order is right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from pyqueue.spark import QueueDataSource, offsets, writers
from pyqueue.spark.columns import columns
from tests.spark.fakes import Crash, Flow

Offset = dict[str, Any]
Sink = Callable[[int, list[pa.RecordBatch]], None]


@dataclass
class Checkpoint:
    """The state that outlives a query."""

    #: The end offsets of the batches, in order. Each is written before its batch runs.
    offsets: list[Offset] = field(default_factory=list)
    #: How many batches are committed.
    committed: int = 0
    #: The id of the query.
    query: str = field(default_factory=lambda: uuid4().hex)


class Engine:
    """A query from a queue to a sink. It calls ``step`` with a name before each thing it does."""

    def __init__(
        self,
        options: Mapping[str, str],
        sink: Sink,
        checkpoint: Checkpoint | None = None,
        step: Callable[[str], object] = lambda name: None,
        *,
        now: bool = False,
        schema: StructType | None = None,
    ) -> None:
        self.checkpoint = Checkpoint() if checkpoint is None else checkpoint
        source = QueueDataSource({**options})
        self.reader = cast(Any, source.streamReader(schema or columns(None)))
        #: Spark asks for it again after a restart, unless a batch was committed.
        self._first: Offset | None = None
        self._sink = sink
        self._step = step
        if now:
            self.reader.prepareForTriggerAvailableNow()

    @property
    def _start(self) -> Offset:
        if self.checkpoint.committed:
            return self.checkpoint.offsets[self.checkpoint.committed - 1]
        if self._first is None:
            self._step("initialOffset")
            self._first = self.reader.initialOffset()
        return self._first

    def batch(self) -> bool:
        """Run a batch; return whether there was one."""
        checkpoint, number = self.checkpoint, self.checkpoint.committed
        start = self._start
        if len(checkpoint.offsets) == number:
            self._step("latestOffset")
            limit = self.reader.getDefaultReadLimit()
            assert isinstance(limit, (ReadMaxRows, ReadAllAvailable))
            end = self.reader.latestOffset(start, limit)
            self.reader.reportLatestOffset()
            if end == start:
                return False
            self._step("offset log")
            checkpoint.offsets.append(end)
            if number:
                self._step("commit")
                self.reader.commit(start)
        end = checkpoint.offsets[number]
        self._step("partitions")
        parts = self.reader.partitions(start, end)
        self._step("tasks")
        self._sink(number, [batch for part in parts for batch in self.reader.read(part)])
        self._step("commit log")
        checkpoint.committed = number + 1
        return True

    def run(self) -> int:
        """Run batches until there are no more; return how many there were."""
        done = 0
        while self.batch():
            done += 1
        self.reader.stop()
        return done

    def listen(self) -> None:
        """Acknowledge the last batch, as the listener does."""
        end = self.checkpoint.offsets[self.checkpoint.committed - 1]
        offsets.Offset.parse(end).acknowledge()


def source(flow: Flow, database: str, **options: str) -> dict[str, str]:
    """Return the options of a stream from the source of a flow."""
    given = {"uri": database, "queue": flow.source, "group": "g"}
    return given | {"maxMessagesPerBatch": "2", "numPartitions": "2"} | options


def target(flow: Flow, database: str, **options: str) -> dict[str, str]:
    """Return the options of a stream into the target of a flow."""
    return {"uri": database, "queue": flow.target, "stage": "s"} | options


def seen(rows: Counter[Any]) -> Sink:
    """Return a sink that counts payloads."""

    def count(number: int, batches: list[pa.RecordBatch]) -> None:
        for each in batches:
            rows.update(map(json.loads, each.column("payload").to_pylist()))

    return count


def sized(sizes: list[int]) -> Sink:
    """Return a sink that keeps the sizes of the batches."""
    return lambda number, batches: sizes.append(sum(each.num_rows for each in batches))


def nothing(step: str) -> None:
    """Do nothing before a step."""


class Deaths:
    """Ends the process before step number ``at``, from 1; with 0 it survives."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps: list[str] = []

    def __call__(self, step: str) -> None:
        if len(self.steps) + 1 == self.at:
            raise Crash
        self.steps.append(step)


def table_rows(
    options: Mapping[str, str], schema: StructType | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a batch read."""
    reader = cast(Any, QueueDataSource({**options}).reader(schema or columns(None)))
    batches = [each for part in reader.partitions() for each in reader.read(part)]
    return [row for each in batches for row in each.to_pylist()]


_tasks = count(1)


def in_a_task(
    query: str | None = None, epoch: int | None = None, run: str | None = None
) -> AbstractContextManager[Any]:
    """Return a block that is a task of a query. Each task has another number."""
    number = next(_tasks)
    told = {"sql.streaming.queryId": query, "streaming.sql.batchId": epoch}
    told["spark.jobGroup.id"] = run
    told = {name: each if each is None else str(each) for name, each in told.items()}
    context = SimpleNamespace(taskAttemptId=lambda: number, getLocalProperty=told.get)
    return patch.object(writers, "TaskContext", SimpleNamespace(get=lambda: context))


def to_queue(
    options: Mapping[str, str],
    step: Callable[[str], object] = lambda name: None,
    schema: StructType | None = None,
    query: str = "",
) -> Sink:
    """Return a sink that writes into a queue."""
    source = QueueDataSource({**options})

    def write(number: int, batches: list[pa.RecordBatch]) -> None:
        writer = cast(Any, source.streamWriter(schema or columns(None), False))
        done = []
        for some in batches:
            step("write")
            with in_a_task(query, number):
                done.append(writer.write(iter([some])))
        step("sink commit")
        # Spark makes another writer for the commit.
        cast(Any, source.streamWriter(schema or columns(None), False)).commit(done, number)

    return write
