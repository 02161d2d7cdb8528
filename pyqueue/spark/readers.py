"""The readers of the data source: batches of ready messages, and streams of claimed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import DataType

from pyqueue.backends.named_claims import MAX_CLAIM, ClaimRange
from pyqueue.backends.slices import Slice, page, slices
from pyqueue.connecting import runner_of
from pyqueue.requests import Plan, ServerTime
from pyqueue.spark.addresses import client_of
from pyqueue.spark.frames import batch
from pyqueue.spark.offsets import Offset
from pyqueue.spark.options import CHUNK, Options

__all__ = ["BatchReader", "StreamReader"]


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
            yield batch(found, self._payload)
            rest = replace(rest, above=(found[-1]["when"], found[-1]["_id"]))


@dataclass
class _ClaimPartition(InputPartition):
    range: ClaimRange


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Claims batches for a group. The offset is the number of a claim.

    The process that plans the query runs the group and renews what is outstanding. Executors read
    ranges of the claims.
    """

    def __init__(self, options: Options, payload: DataType | None) -> None:
        options.claims()
        self._options = options
        self._payload = payload
        self._token: str | None = None
        self._since: datetime | None = None

    @property
    def id(self) -> str:
        """The name in log messages."""
        return f"group {self._options.group!r}"

    @property
    def lease(self) -> float:
        """The length of the lease in seconds."""
        return self._options.lease

    def _running(self) -> str:
        """Return the token of this runner. The first call takes the group over."""
        if self._token is None:
            options = self._options
            token = self._token = options.run(options.claims().adopt(options.lease))
            runner_of(client_of(options.address)).renewer.add(
                self, lambda _: options.run(options.claims().renew(token, options.lease))
            )
        return self._token

    def _offset(self, n: int) -> dict[str, Any]:
        options = self._options
        return Offset(
            n, self._running(), options.queue, str(options.group), options.address
        ).to_json()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return where a query without a checkpoint begins: after what was acknowledged."""
        token = self._running()
        return self._offset(self._options.run(self._options.claims().progress(token)).acknowledged)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the size of a batch."""
        return ReadMaxRows(self._options.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Take only what is ready by now."""
        self._since = self._options.run(_server_time())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Finish what is committed, and claim the next batch."""
        token, claims, run = self._running(), self._options.claims(), self._options.run
        # Spark has committed everything up to ``start``.
        run(claims.acknowledge(token, start["n"]))
        claimed = run(claims.progress(token)).claimed
        if claimed > start["n"]:
            # A former process made this claim and died before Spark logged the offset.
            return self._offset(claimed)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else MAX_CLAIM
        n = run(claims.claim(token, most, self._options.lease, since=self._since))
        return start if n is None else self._offset(n)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the claims of a batch among tasks."""
        ranges = self._options.claims().ranges(
            self._running(), start["n"], end["n"], self._options.partitions
        )
        return [_ClaimPartition(each) for each in self._options.run(ranges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part of the claims."""
        assert isinstance(partition, _ClaimPartition)
        found = self._options.run(self._options.claims().read(partition.range))
        for start in range(0, len(found), CHUNK):
            yield batch(found[start : start + CHUNK], self._payload)

    def commit(self, end: dict[str, Any]) -> None:
        """Finish a batch that Spark has committed."""
        self._options.run(self._options.claims().acknowledge(self._running(), end["n"]))

    def stop(self) -> None:
        """Renew nothing any more."""
        if self._token is not None:
            runner_of(client_of(self._options.address)).renewer.discard(self)


def _server_time() -> Plan[datetime]:
    now: datetime = yield ServerTime()
    return now
