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

T = TypeVar("T")

#: How many messages are read, and written, at once.
CHUNK: Final = 10_000


# ---- the options


@dataclass(frozen=True)
class Options:
    """The options of a read or a write, checked."""

    place: NamespaceAddress
    queue: str
    payload: str
    parts: int
    group: str | None
    limit: int
    lease: float
    stage: str | None
    id: str | None

    def backend(self) -> QueuePlans:
        """The plans of the queue, in the process at hand."""
        client = client_of(self.place)
        runner_of(client).run(_known(self.queue))
        return backend_of(client.queue(self.queue))

    def claims(self) -> NamedClaims:
        """The plans of the group."""
        if self.group is None:
            raise ConfigurationError(
                'group: a stream needs the durable name of this consumer: .option("group", "...")'
            )
        return NamedClaims(self.backend(), self.group)

    def run(self, plan: Plan[T]) -> T:
        """Carry a plan out, in the process at hand."""
        return runner_of(client_of(self.place)).run(plan)


def _known(queue: str) -> Plan[None]:
    """Have the queue's record read or made, with nothing said of its options: those of its consumers stand."""
    yield from EnsureQueue(queue, "standard", None)


#: The options there are; Spark adds some of its own, which are let pass.
_NAMES: Final = {
    name.lower(): name
    for name in (
        *(
            "uri",
            "uriEnv",
            "namespace",
            "queue",
            "payloadType",
            "numPartitions",
            "group",
            "maxMessagesPerBatch",
            "leaseSeconds",
        ),
        *("stage", "idColumn"),
    )
}
#: What a payload may be: JSON in a string, or a type, which only Spark itself can read.
_TYPE: Final = re.compile(
    r"(?i)json$|(variant|struct|array|map|string|boolean|byte|tinyint|short|smallint|int|integer|long|bigint|float|real|double|dec|"
    r"decimal|numeric|binary|timestamp|timestamp_ntz|timestamp_ltz|date)\b"
)
_SPARKS: Final = {"checkpointlocation", "path", "querytimeout"}


def _options(given: Mapping[str, str]) -> Options:
    """Check options.

    Raises:
        ConfigurationError: one is missing, unknown or not allowed.
    """
    unknown = sorted(name for name in given if name.lower() not in {*_NAMES, *_SPARKS})
    if unknown:
        raise ConfigurationError(
            f"options: {', '.join(unknown)}: there is no such option; there are {', '.join(_NAMES.values())}"
        )

    def option(name: str, default: str | None = None) -> str | None:
        return given.get(name) or default

    queue = option("queue")
    if queue is None:
        raise ConfigurationError('queue: name one: .option("queue", "...")')
    payload = option("payloadType", "json") or "json"
    if not _TYPE.match(payload):
        raise ConfigurationError(
            f'payloadType: {payload!r} is not allowed: give "json", "variant" or a Spark type, e.g. "struct<a: bigint>"'
        )
    return Options(
        NamespaceAddress.of(option("uri"), option("uriEnv"), option("namespace", "pyqueue") or ""),
        arguments.queue_name(queue),
        payload,
        _number("numPartitions", option("numPartitions", "4"), 10_000),
        option("group") and arguments.group(option("group")),
        _number("maxMessagesPerBatch", option("maxMessagesPerBatch", "10000"), MAX_CLAIM),
        arguments.duration("leaseSeconds", _seconds(option("leaseSeconds", "600")), positive=True),
        option("stage") and arguments.group(option("stage"), "stage"),
        option("idColumn"),
    )


def _number(name: str, given: str | None, most: int) -> int:
    if given is None or not given.isdecimal() or not 1 <= int(given) <= most:
        raise ConfigurationError(
            f"{name}: {given!r} is not allowed: give a whole number from 1 to {most}"
        )
    return int(given)


def _seconds(given: str | None) -> Any:
    try:
        return float(given or "")
    except ValueError:
        return given


def _payload(options: Options, schema: StructType) -> DataType | None:
    """The type of the payload column, as Spark has read it; None: JSON.

    Raises:
        ConfigurationError: the caller gave a schema of another kind.
    """
    json = options.payload == "json"
    if schema.names != columns(None).names or (
        json and not isinstance(schema["payload"].dataType, StringType)
    ):
        raise ConfigurationError(
            f"schema: a queue has the columns {', '.join(columns(None).names)}: give no schema, but the payload's type by payloadType"
        )
    return None if json else schema["payload"].dataType


class QueueDataSource(DataSource):
    """The data source "pyqueue": reads and writes the messages of a queue.

    A batch read shows what is ready, and consumes nothing. A batch write, in mode append, shows all of its messages at its end, or none.
    A streaming read claims its messages for a group, and finishes each batch once Spark has committed it. A streaming write makes ids of the
    source's, so that a batch that is repeated writes nothing twice.

    Options: ``uri`` or ``uriEnv`` (the name of an environment variable that holds it, so that no plan or log shows it), ``queue``;
    ``namespace`` ("pyqueue"). To read: ``payloadType`` ("json", "variant", or a type such as "struct<a: bigint>"), ``numPartitions``
    (4). To read a stream: ``group``, ``maxMessagesPerBatch`` (10 000), ``leaseSeconds`` (600). To write: ``idColumn`` (its values are the
    ids) or, in a stream, ``stage`` (ids are "STAGE~ID", of the column id).

    Columns of a read: id, queue, payload, headers, key, when, pushed, tries. Columns of a write: payload; headers and key may be there.
    """

    @classmethod
    def name(cls) -> str:
        """As in ``format("pyqueue")``."""
        return "pyqueue"

    def schema(self) -> StructType | str:
        """The columns of a read."""
        payload, fields = _options(self.options).payload, columns(None).fields
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
        """A batch read."""
        options = _options(self.options)
        return _BatchReader(options, _payload(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A streaming read."""
        options = _options(self.options)
        return _StreamReader(options, _payload(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        options = _options(self.options)
        if overwrite:
            raise ConfigurationError(
                'mode: a queue is appended to, never overwritten: .mode("append"), and Queue.purge() to empty it'
            )
        if options.stage is not None:
            raise ConfigurationError(
                "stage: is for streams; a batch write takes its ids from idColumn, or makes new ones"
            )
        return _BatchWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """A streaming write."""
        options = _options(self.options)
        if overwrite:
            raise ConfigurationError('outputMode: a queue is appended to: .outputMode("append")')
        if (options.stage is None) == (options.id is None):
            raise ConfigurationError(
                'stage, idColumn: give one of the two: a batch may be repeated, and must then write the same ids. .option("stage", "...") makes '
                "them of the column id; idColumn names a column whose values are the ids"
            )
        return _StreamWriter(options, schema)


# ---- batch reads


@dataclass
class _Looked(InputPartition):
    part: Slice


class _BatchReader(DataSourceReader):
    def __init__(self, options: Options, payload: DataType | None) -> None:
        self._options = options
        self._payload = payload

    def partitions(self) -> Sequence[InputPartition]:
        backend = self._options.backend()
        parts = self._options.run(slices(backend.queue, backend.kind, self._options.parts))
        return [_Looked(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Looked)
        part = partition.part
        backend = self._options.backend()
        while found := self._options.run(page(backend.queue, backend.kind, part, CHUNK)):
            yield batch(found, self._payload)
            part = replace(part, above=(found[-1]["when"], found[-1]["_id"]))


# ---- streaming reads


@dataclass
class _Claimed(InputPartition):
    span: ClaimRange


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The offset is the number of a claim. The planning process runs the group, and renews what is outstanding; executors read spans."""

    def __init__(self, options: Options, payload: DataType | None) -> None:
        options.claims()
        self._options = options
        self._payload = payload
        self._token: str | None = None
        self._since: datetime | None = None

    @property
    def id(self) -> str:
        """How the log names it."""
        return f"group {self._options.group!r}"

    @property
    def lease(self) -> float:
        """For how long a renewal holds, in seconds."""
        return self._options.lease

    def _running(self) -> str:
        """The token of this runner; it takes the group over at first use."""
        if self._token is None:
            options = self._options
            token = self._token = options.run(options.claims().adopt(options.lease))
            runner_of(client_of(options.place)).renewer.add(
                self, lambda _: options.run(options.claims().renew(token, options.lease))
            )
        return self._token

    def _offset(self, n: int) -> dict[str, Any]:
        options = self._options
        return Offset(n, self._running(), options.queue, str(options.group), options.place).told()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        token = self._running()
        return self._offset(self._options.run(self._options.claims().progress(token)).acknowledged)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._since = self._options.run(_now())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        token, claims, run = self._running(), self._options.claims(), self._options.run
        run(claims.acknowledge(token, start["n"]))  # it is in the commit log
        claimed = run(claims.progress(token)).claimed
        if claimed > start["n"]:
            return self._offset(claimed)  # made before its offset could be logged
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else MAX_CLAIM
        n = run(claims.claim(token, most, self._options.lease, since=self._since))
        return start if n is None else self._offset(n)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        spans = self._options.claims().ranges(
            self._running(), start["n"], end["n"], self._options.parts
        )
        return [_Claimed(span) for span in self._options.run(spans)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Claimed)
        found = self._options.run(self._options.claims().read(partition.span))
        for start in range(0, len(found), CHUNK):
            yield batch(found[start : start + CHUNK], self._payload)

    def commit(self, end: dict[str, Any]) -> None:
        self._options.run(self._options.claims().acknowledge(self._running(), end["n"]))

    def stop(self) -> None:
        if self._token is not None:
            runner_of(client_of(self._options.place)).renewer.discard(self)


def _now() -> Plan[datetime]:
    now: datetime = yield ServerTime()
    return now


# ---- writes


@dataclass
class _Written(WriterCommitMessage):
    #: How many messages are at which places.
    places: dict[str, int]


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = Reader(schema, options.id)
        self._staging = Staging(options.backend().target, uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        attempt, places = uuid4().hex, {}
        for number, some in enumerate(_chunks(self._reader, iterator)):
            place = f"{attempt}:{number}"
            places[place] = self._options.run(self._staging.write(place, some))
        return _Written(places)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        places = {
            place: count
            for each in messages
            if isinstance(each, _Written)
            for place, count in each.places.items()
        }
        with self._options.place.opened() as client:
            runner_of(client).run(self._staging.publish(places))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._options.run(self._staging.discard())


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._reader = Reader(schema, options.id or "id")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        backend, stage = self._options.backend(), self._options.stage
        for some in _chunks(self._reader, iterator):
            if stage is not None:
                some = [each._replace(id=f"{stage}~{each.id}") for each in some]
            self._options.run(append(backend.target, some))
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with self._options.place.opened() as client:
            client.queue(self._options.queue).notify()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What was written stays: the batch is repeated, with the same ids."""


def _chunks(reader: Reader, batches: Iterator[pa.RecordBatch]) -> Iterator[list[NewMessage]]:
    """The rows, some at a time.

    Raises:
        ConfigurationError: a row has no id where ids are asked for.
    """
    rows = chain.from_iterable(map(reader.rows, batches))
    while some := list(islice(rows, CHUNK)):
        yield some
