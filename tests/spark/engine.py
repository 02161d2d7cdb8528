"""Spark's part in a stream, without Spark: the order in which it calls a source and a sink, and the two logs of its checkpoint.

So a stream can be made to die between any two of these steps, in milliseconds. That this is the order is what the tests with a real session
are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from pyqueue.spark import QueueDataSource
from pyqueue.spark.frames import columns
from pyqueue.spark.offsets import Offset as Told

__all__ = ["Checkpoint", "Engine", "Sink", "to_queue"]

Offset = dict[str, Any]
Sink = Callable[[int, list[pa.RecordBatch]], None]


@dataclass
class Checkpoint:
    """What outlives a query."""

    #: The end offsets of batches, by their numbers, written before they run.
    offsets: list[Offset] = field(default_factory=list)
    first: Offset | None = None
    #: How many batches are committed.
    committed: int = 0


class Engine:
    """A query, from a queue to a sink. ``step`` is told of each thing it does, before it does it."""

    def __init__(
        self,
        options: Mapping[str, str],
        sink: Sink,
        checkpoint: Checkpoint | None = None,
        step: Callable[[str], object] = lambda name: None,
        *,
        now: bool = False,
    ) -> None:
        self.checkpoint = Checkpoint() if checkpoint is None else checkpoint
        self.reader = cast(Any, QueueDataSource({**options}).streamReader(columns(None)))
        self._sink = sink
        self._step = step
        if now:
            self.reader.prepareForTriggerAvailableNow()

    @property
    def _start(self) -> Offset:
        if self.checkpoint.committed:
            return self.checkpoint.offsets[self.checkpoint.committed - 1]
        if self.checkpoint.first is None:
            self._step("initialOffset")
            self.checkpoint.first = self.reader.initialOffset()
        return self.checkpoint.first

    def batch(self) -> bool:
        """Run a batch; whether there was one."""
        checkpoint, number = self.checkpoint, self.checkpoint.committed
        start = self._start
        if len(checkpoint.offsets) == number:
            self._step("latestOffset")
            limit = self.reader.getDefaultReadLimit()
            assert isinstance(limit, (ReadMaxRows, ReadAllAvailable))
            end = self.reader.latestOffset(start, limit)
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
        """Run batches until there is none. Answers how many there were."""
        done = 0
        while self.batch():
            done += 1
        self.reader.stop()
        return done

    def listened(self) -> None:
        """What the listener does, after each batch."""
        Told.parse(self.checkpoint.offsets[self.checkpoint.committed - 1]).acknowledge()


def to_queue(options: Mapping[str, str], step: Callable[[str], object] = lambda name: None) -> Sink:
    """The sink that is a queue."""
    source = QueueDataSource({**options})

    def write(number: int, batches: list[pa.RecordBatch]) -> None:
        for some in batches:
            step("write")
            source.streamWriter(columns(None), False).write(iter([some]))  # each task has its own
        step("sink commit")  # it only wakes consumers

    return write
