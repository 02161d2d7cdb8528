"""The reader with which streaming queries read a stream by position. It needs Spark 4.2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import DataType

from pyqueue.errors import ConfigurationError
from pyqueue.spark.idle import IdleReader
from pyqueue.spark.options import Options
from pyqueue.spark.positions import PositionReader


class PositionStreamReader(IdleReader):
    """Reads a stream by position for a streaming query.

    The checkpoint alone records how far the query has come, so there is nothing to do at a commit.
    """

    def __init__(self, options: Options, payload: DataType | None) -> None:
        super().__init__(options)
        self._reader = PositionReader(options, payload, fails=options.fail_on_data_loss)
        #: Where a query with the trigger ``availableNow`` ends.
        self._until: int | None = None
        self._tail = 0

    def _offset(self, position: int) -> dict[str, Any]:
        return {"stream": self._options.queue, "position": position}

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset at which a query without a checkpoint begins.

        Raises:
            ConfigurationError: ``startingPosition`` lies beyond the end of the stream.
        """
        position, (_, end) = self._reader.position(self._options.starting), self._reader.bounds()
        if position > end:
            raise ConfigurationError(
                f"startingPosition: {position} is not allowed; stream {self._options.queue!r} ends "
                f'at {end}; use a position up to {end}, or "last" to begin with the next message'
            )
        return self._offset(position)

    def prepareForTriggerAvailableNow(self) -> None:
        """Let the query end at the current end of the stream."""
        self._until = self._reader.bounds()[1]

    def _hurries(self, start: dict[str, Any]) -> bool:
        return self._until is not None or self._tail > int(start["position"])

    def _next(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the offset at which the next batch ends.

        Raises:
            ConfigurationError: The checkpoint belongs to another stream, or to an earlier
                stream of the same name.
        """
        name, position = self._options.queue, int(start["position"])
        if start["stream"] != name:
            raise ConfigurationError(
                f"stream: the checkpoint belongs to stream {start['stream']!r}, but the query "
                f"reads {name!r}; use a separate checkpoint for each query"
            )
        first, self._tail = self._reader.bounds()
        if position > self._tail:
            raise ConfigurationError(
                f"stream: the checkpoint is at position {position}, but {name!r} ends at "
                f"{self._tail}, so the checkpoint belongs to an earlier stream of that name; start "
                "the query with a new checkpoint"
            )
        end = self._tail if self._until is None else min(self._until, self._tail)
        if end <= position:
            self._idle.rest(math.inf)
            return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else end
        return self._offset(min(end, max(first, position) + most))

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the last known end of the stream."""
        return self._offset(self._tail)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide a batch among tasks."""
        return self._reader.divided(int(start["position"]), int(end["position"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part of a batch."""
        return self._reader.read(partition)
