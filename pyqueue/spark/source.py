"""The data source "pyqueue": queues as Spark's tables and streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, islice
from typing import Any, Final, TypeVar
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import DataType, StringType, StructType

from pyqueue import arguments
from pyqueue.backends.named_claims import MAX_CLAIM, ClaimRange, NamedClaims
from pyqueue.backends.options import NewMessage
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.slices import Slice, page, slices
from pyqueue.backends.staging import Staging, append
from pyqueue.connecting import runner_of
from pyqueue.errors import ConfigurationError
from pyqueue.queues import backend_of
from pyqueue.requests import EnsureQueue, Plan, ServerTime
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.frames import Reader, batch, columns
from pyqueue.spark.offsets import Offset

__all__ = ["QueueDataSource"]

R = TypeVar("R")

#: How many messages are read, or written, at once.
CHUNK: Final = 10_000


# ---- the options


@dataclass(frozen=True)
class Options:
    """The options of a read or a write, after the check."""

    address: NamespaceAddress
    queue: str
    payload_type: str
    partitions: int
    group: str | None
    max_messages: int
    lease: float
    stage: str | None
    id_column: str | None

    def backend(self) -> QueuePlans:
        """Return the plans of the queue, and make sure that the queue is recorded."""
        client = client_of(self.address)
        runner_of(client).run(_record_queue(self.queue))
        return backend_of(client.queue(self.queue))

    def claims(self) -> NamedClaims:
        """Return the plans of the group.

        Raises:
            ConfigurationError: The option ``group`` is missing.
        """
        if self.group is None:
            raise ConfigurationError(
                'group: a stream needs the durable name of this consumer: .option("group", "...")'
            )
        return NamedClaims(self.backend(), self.group)

    def run(self, plan: Plan[R]) -> R:
        """Run a plan with the client of this process."""
        return runner_of(client_of(self.address)).run(plan)


def _record_queue(queue: str) -> Plan[None]:
    # No options are given: the record keeps those of the queue's consumers.
    yield from EnsureQueue(queue, "standard")


_OPTIONS: Final = (
    "uri",
    "uriEnv",
    "namespace",
    "queue",
    "payloadType",
    "numPartitions",
    "group",
    "maxMessagesPerBatch",
    "leaseSeconds",
    "stage",
    "idColumn",
)
#: Spark adds these to the options of a stream.
_SPARK_OPTIONS: Final = {"checkpointlocation", "path", "querytimeout"}
_KNOWN_OPTIONS: Final = {name.lower() for name in _OPTIONS} | _SPARK_OPTIONS
#: JSON, or the beginning of a Spark type. Only Spark itself can parse the whole type.
_PAYLOAD_TYPE: Final = re.compile(
    r"(?i)json$|(variant|struct|array|map|string|boolean|byte|tinyint|short|smallint|int|integer|"
    r"long|bigint|float|real|double|dec|decimal|numeric|binary|timestamp|timestamp_ntz|"
    r"timestamp_ltz|date)\b"
)


def _checked(given: Mapping[str, str]) -> Options:
    """Check the options.

    Raises:
        ConfigurationError: An option is missing, unknown or invalid.
    """
    unknown = sorted(name for name in given if name.lower() not in _KNOWN_OPTIONS)
    if unknown:
        raise ConfigurationError(
            f"options: {', '.join(unknown)}: unknown option; use {', '.join(_OPTIONS)}"
        )

    def option(name: str, default: str | None = None) -> str | None:
        return given.get(name) or default

    queue = option("queue")
    if queue is None:
        raise ConfigurationError('queue: name the queue: .option("queue", "...")')
    payload_type = option("payloadType", "json") or "json"
    if not _PAYLOAD_TYPE.match(payload_type):
        raise ConfigurationError(
            f'payloadType: {payload_type!r} is not allowed: give "json", "variant" or a Spark '
            'type, for example "struct<a: bigint>"'
        )
    return Options(
        NamespaceAddress.of(option("uri"), option("uriEnv"), option("namespace", "pyqueue") or ""),
        arguments.queue_name(queue),
        payload_type,
        _count("numPartitions", option("numPartitions", "4"), 10_000),
        option("group") and arguments.group(option("group")),
        _count("maxMessagesPerBatch", option("maxMessagesPerBatch", "10000"), MAX_CLAIM),
        arguments.duration("leaseSeconds", _number(option("leaseSeconds", "600")), positive=True),
        option("stage") and arguments.group(option("stage"), "stage"),
        option("idColumn"),
    )


def _count(name: str, given: str | None, most: int) -> int:
    if given is None or not given.isdecimal() or not 1 <= int(given) <= most:
        raise ConfigurationError(
            f"{name}: {given!r} is not allowed: give a whole number from 1 to {most}"
        )
    return int(given)


def _number(given: str | None) -> float | str | None:
    """Return the number; a text that is none is returned unchanged, for the check to refuse."""
    try:
        return float(given or "")
    except ValueError:
        return given


def _payload_column(options: Options, schema: StructType) -> DataType | None:
    """Return the type of the payload column as Spark has parsed it, or None for JSON.

    Raises:
        ConfigurationError: The caller gave a schema with different columns.
    """
    json = options.payload_type == "json"
    if schema.names != columns(None).names or (
        json and not isinstance(schema["payload"].dataType, StringType)
    ):
        raise ConfigurationError(
            f"schema: a queue has the columns {', '.join(columns(None).names)}: give no schema; "
            "give the type of the payload by payloadType"
        )
    return None if json else schema["payload"].dataType


class QueueDataSource(DataSource):
    """The data source "pyqueue": read and write the messages of a queue.

    A batch read shows the ready messages and consumes none. A batch write, in mode append, shows
    all its messages at its end, or none. A streaming read claims messages for a group and finishes
    each batch once Spark has committed it. A streaming write makes its ids from those of the
    source, so a repeated batch writes nothing twice.

    Options of all:
        uri or uriEnv: The server's URI, or the name of an environment variable that holds it.
            With ``uriEnv`` the URI appears in no plan and no log.
        namespace: The collection that holds the queues; "pyqueue" by default.
        queue: The name of the queue.

    Options of a read:
        payloadType: "json" (default), "variant" or a Spark type.
        numPartitions: How many tasks read; 4 by default.

    Options of a streaming read:
        group: The durable name of this consumer.
        maxMessagesPerBatch: The largest size of a batch; 10 000 by default.
        leaseSeconds: How long a batch stays held if the query dies; 600 by default.

    Options of a write:
        stage: For streams only: the ids are "STAGE~ID", made from the column id.
        idColumn: The column whose values are the ids.

    Columns of a read: id, queue, payload, headers, key, when, pushed, tries. Columns of a write:
    payload, and optionally headers and key.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("pyqueue")``."""
        return "pyqueue"

    def schema(self) -> StructType | str:
        """Return the columns of a read."""
        payload, fields = _checked(self.options).payload_type, columns(None).fields
        if payload == "json":
            return columns(None)
        types = [
            payload if field.name == "payload" else field.dataType.simpleString()
            for field in fields
        ]
        return ", ".join(
            f"`{field.name}` {type}{'' if field.nullable else ' NOT NULL'}"
            for field, type in zip(fields, types, strict=True)
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch read."""
        options = _checked(self.options)
        return _BatchReader(options, _payload_column(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader of a streaming read."""
        options = _checked(self.options)
        return _StreamReader(options, _payload_column(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch write."""
        options = _checked(self.options)
        if overwrite:
            raise ConfigurationError(
                'mode: a queue cannot be overwritten: use .mode("append"), and Queue.purge() to '
                "empty it first"
            )
        if options.stage is not None:
            raise ConfigurationError(
                "stage: this option is for streams; a batch write takes its ids from idColumn, or "
                "makes new ones"
            )
        return _BatchWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Return the writer of a streaming write."""
        options = _checked(self.options)
        if overwrite:
            raise ConfigurationError(
                'outputMode: a queue cannot be overwritten: use .outputMode("append")'
            )
        if (options.stage is None) == (options.id_column is None):
            raise ConfigurationError(
                "stage, idColumn: give one of the two. Spark may repeat a batch, which must then "
                'write the same ids. .option("stage", "...") makes them from the column id; '
                "idColumn names a column whose values are the ids"
            )
        return _StreamWriter(options, schema)


# ---- batch reads


@dataclass
class _SlicePartition(InputPartition):
    slice: Slice


class _BatchReader(DataSourceReader):
    """Reads ready messages and consumes none."""

    def __init__(self, options: Options, payload: DataType | None) -> None:
        self._options = options
        self._payload = payload

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        backend = options.backend()
        found = options.run(slices(backend.queue, backend.kind, options.partitions))
        return [_SlicePartition(each) for each in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _SlicePartition)
        rest = partition.slice
        backend = self._options.backend()
        while found := self._options.run(page(backend.queue, backend.kind, rest, CHUNK)):
            yield batch(found, self._payload)
            rest = replace(rest, above=(found[-1]["when"], found[-1]["_id"]))


# ---- streaming reads


@dataclass
class _ClaimPartition(InputPartition):
    range: ClaimRange


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
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
        token = self._running()
        return self._offset(self._options.run(self._options.claims().progress(token)).acknowledged)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_messages)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._since = self._options.run(_server_time())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
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
        ranges = self._options.claims().ranges(
            self._running(), start["n"], end["n"], self._options.partitions
        )
        return [_ClaimPartition(each) for each in self._options.run(ranges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _ClaimPartition)
        found = self._options.run(self._options.claims().read(partition.range))
        for start in range(0, len(found), CHUNK):
            yield batch(found[start : start + CHUNK], self._payload)

    def commit(self, end: dict[str, Any]) -> None:
        self._options.run(self._options.claims().acknowledge(self._running(), end["n"]))

    def stop(self) -> None:
        if self._token is not None:
            runner_of(client_of(self._options.address)).renewer.discard(self)


def _server_time() -> Plan[datetime]:
    now: datetime = yield ServerTime()
    return now


# ---- writes


@dataclass
class _Staged(WriterCommitMessage):
    """What one task has staged: the number of messages in each of its staging places."""

    counts: dict[str, int]


class _BatchWriter(DataSourceArrowWriter):
    """Stages messages out of sight, and shows all of them at the commit."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = Reader(schema, options.id_column)
        self._staging = Staging(options.backend().target, uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        attempt, counts = uuid4().hex, {}
        for number, messages in enumerate(_chunks(self._reader, iterator)):
            place = f"{attempt}:{number}"
            counts[place] = self._options.run(self._staging.write(place, messages))
        return _Staged(counts)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        counts = {
            place: count
            for each in messages
            if isinstance(each, _Staged)
            for place, count in each.counts.items()
        }
        with self._options.address.open() as client:
            runner_of(client).run(self._staging.publish(counts))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._options.run(self._staging.discard())


class _StreamWriter(DataSourceStreamArrowWriter):
    """Writes messages whose ids are the same if Spark repeats the batch."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = Reader(schema, options.id_column or "id")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        backend, stage = self._options.backend(), self._options.stage
        for messages in _chunks(self._reader, iterator):
            if stage is not None:
                messages = [each._replace(id=f"{stage}~{each.id}") for each in messages]
            self._options.run(append(backend.target, messages))
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Wake the consumers. The messages are visible already."""
        with self._options.address.open() as client:
            client.queue(self._options.queue).notify()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: Spark repeats the batch, with the same ids."""


def _chunks(reader: Reader, batches: Iterator[pa.RecordBatch]) -> Iterator[list[NewMessage]]:
    """Read the rows of all batches, in lists of at most ``CHUNK``."""
    rows = chain.from_iterable(map(reader.rows, batches))
    while messages := list(islice(rows, CHUNK)):
        yield messages
