"""Readers of streams by position: a range as a table, or a streaming query without claims.

An offset is a position. Messages of a stream never change, so a batch is the range between two
positions, and Spark may read it as often as it likes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import DataType

from pyqueue.backends.streams import log as stream_log
from pyqueue.backends.streams.log import MAX_PACK, LogState, Pack
from pyqueue.errors import QueueError
from pyqueue.requests import Document, Plan
from pyqueue.spark.options import CHUNK, Options
from pyqueue.spark.rows import log_rows_of

log = logging.getLogger("pyqueue")


@dataclass
class _PositionRange(InputPartition):
    """The positions that a task reads: from ``start`` to before ``end``."""

    start: int
    end: int


class PositionReader:
    """A reader of ranges of a stream, for tables and for streaming queries. It can be pickled.

    Args:
        options: The options for reading the stream.
        payload: The type of the payloads. None means JSON.
        fails: Whether reading fails if messages were deleted before they were read. Otherwise the
            reader skips these messages with a warning.
    """

    def __init__(self, options: Options, payload: DataType | None, *, fails: bool = False) -> None:
        self._options = options
        self._payload = payload
        self._fails = fails

    def position(self, place: str) -> int:
        """Return the position for ``place``: "first", "last", a position, or an instant."""
        return self._options.run(_position_at(self._options.queue, place))

    def bounds(self) -> tuple[int, int]:
        """Return the first position that can be read, and the position after the last message."""
        return self._options.run(stream_log.bounds(self._options.queue))

    def divided(self, start: int, end: int) -> list[InputPartition]:
        """Divide the range between two positions among tasks.

        Raises:
            QueueError: The retention has deleted messages of the range, and ``fails`` is true.
        """
        first, _ = self.bounds()
        if first > start:
            self._missed(start, min(first, end))
            start = first
        # A task that begins within a pack reads all of it.
        count = max(0, end - start)
        parts = min(self._options.partitions, math.ceil(count / MAX_PACK))
        cuts = [start + count * number // max(1, parts) for number in range(parts + 1)]
        return [_PositionRange(*each) for each in pairwise(cuts)]

    def _missed(self, start: int, end: int) -> None:
        text = (
            f"stream {self._options.queue!r}: {end - start} messages from position {start} on were "
            "deleted before they were read"
        )
        if self._fails:
            raise QueueError(
                f"{text}, because the query is too slow for the retention; set a longer retention, "
                'or set .option("failOnDataLoss", "false") to skip these messages'
            )
        log.warning("%s", text)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages in the range of a task."""
        assert isinstance(partition, _PositionRange)
        options, low, end = self._options, partition.start, partition.end
        while low < end:
            packs = options.run(
                stream_log.fetch(options.queue, low, end, limit=min(CHUNK, end - low))
            )
            there = packs[0].first if packs else end
            if there > low:  # they were deleted after the range was divided
                self._missed(low, there)
            if not packs:
                return
            found = [each for pack in packs for each in _documents(options.queue, pack, low, end)]
            yield log_rows_of(options, found, self._payload)
            low = packs[-1].end


def _position_at(stream: str, place: str) -> Plan[int]:
    yield from stream_log.check(stream, LogState())
    if place in ("first", "last"):
        return (yield from stream_log.position_at(stream, place))
    if place.isdecimal():
        return int(place)
    return (yield from stream_log.position_at(stream, datetime.fromisoformat(place)))


def _documents(stream: str, pack: Pack, low: int, end: int) -> Iterator[Document]:
    """Yield messages of a pack (a document), with the fields that a queue's messages have."""
    for position in range(max(low, pack.first), min(end, pack.end)):
        entry = pack.entries[position - pack.first]
        yield {
            "_id": f"{stream}~{position}",
            "q": stream,
            "payload": entry["p"],
            "headers": entry.get("h") or {},
            "when": pack.pushed,
            "pushed": pack.pushed,
            "position": position,
        }


class LogReader(PositionReader, DataSourceReader):
    """Reads a range of a stream as a table."""

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the range among tasks. Messages appended from now on are not part of it."""
        options = self._options
        start, end = self.position(options.starting), self.position(options.ending)
        return self.divided(start, min(end, self.bounds()[1]))
