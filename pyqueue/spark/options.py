"""The options of the data source "pyqueue"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast, get_args

from pyspark.sql.types import DataType, StringType, StructField, StructType

from pyqueue import arguments
from pyqueue.backends.claim_groups import MAX_MEMBERS
from pyqueue.backends.named_claims import MAX_CLAIM, NamedClaims
from pyqueue.backends.options import Options as QueueOptions
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.connecting import runner_of
from pyqueue.errors import ConfigurationError
from pyqueue.messages import MAX_BATCH_BYTES
from pyqueue.requests import EnsureQueue, Plan
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.filters import matching
from pyqueue.spark.frames import columns

__all__ = ["CHUNK", "MAX_PARTITIONS", "Options", "checked", "payload_column", "read_columns"]

R = TypeVar("R")

OnBadRecord = Literal["bury", "null", "fail"]
OnDuplicate = Literal["ignore", "replace", "error"]

#: The most tasks of one read.
MAX_PARTITIONS: Final = 10_000
#: How many messages are read, or written, at once.
CHUNK: Final = 10_000


@dataclass(frozen=True)
class Options:
    """The options of a read or a write, after the check."""

    address: NamespaceAddress
    #: The queue, or the first one of ``queues``.
    queue: str
    #: The queues that the rows of a write may name. Empty: the rows name none.
    queues: tuple[str, ...]
    payload_type: str
    partitions: int
    group: str | None
    max_messages: int
    max_bytes: int
    lease: float
    members: int
    stage: str | None
    epoch: int | None
    id_column: str | None
    at_least_once: bool
    staged: bool
    on_duplicate: OnDuplicate
    #: None: the default, which differs between a stream and a table.
    on_bad_record: OnBadRecord | None
    corrupt_column: str | None
    max_wait: float
    #: The columns of a read, in order.
    columns: list[str]
    #: The filter of a batch read.
    match: Mapping[str, Any] | None
    push_filters: bool
    #: The import path of the model of the payloads.
    payload_model: str | None

    def backend(self, queue: str | None = None) -> QueuePlans:
        """Return the plans of a queue, and make sure that the queue is recorded.

        Args:
            queue: The name of the queue. None: that of the options.
        """
        queue = self.queue if queue is None else queue
        connection = runner_of(client_of(self.address))
        connection.run(_record_queue(queue))
        return QueuePlans(
            queue,
            QueueOptions(dead_letter=arguments.dead_letter(queue, None)),
            owner=connection.owner,
            command_timeout=connection.command_timeout,
        )

    def claims(self, member: int | None = None) -> NamedClaims:
        """Return the plans of the group, or of a member of it.

        Raises:
            ConfigurationError: The option ``group`` is missing.
        """
        if self.group is None:
            raise ConfigurationError(
                'group: a stream needs the durable name of this consumer: .option("group", "...")'
            )
        return NamedClaims(self.backend(), self.group, member)

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
    "queues",
    "payloadType",
    "payloadModel",
    "numPartitions",
    "columns",
    "match",
    "pushFilters",
    "group",
    "maxMessagesPerBatch",
    "maxBytesPerBatch",
    "leaseSeconds",
    "maxWaitMs",
    "onBadRecord",
    "columnNameOfCorruptRecord",
    "members",
    "stage",
    "epoch",
    "idColumn",
    "delivery",
    "staged",
    "onDuplicate",
)
_YES_OR_NO: Final = ("true", "false")
_DELIVERIES: Final = ("exactly-once", "at-least-once")
_MOST_EPOCHS: Final = 10**12 - 1
_MOST_BYTES: Final = 2**40
#: Spark adds these to the options of a stream; the name comes from Declarative Pipelines.
_SPARK_OPTIONS: Final = {"checkpointlocation", "path", "queryname", "querytimeout"}
_KNOWN_OPTIONS: Final = {name.lower() for name in _OPTIONS} | _SPARK_OPTIONS
#: JSON, or the beginning of a Spark type. Only Spark itself can parse the whole type.
_PAYLOAD_TYPE: Final = re.compile(
    r"(?i)json$|(variant|struct|array|map|string|boolean|byte|tinyint|short|smallint|int|integer|"
    r"long|bigint|float|real|double|dec|decimal|numeric|binary|timestamp|timestamp_ntz|"
    r"timestamp_ltz|date)\b"
)


def checked(given: Mapping[str, str], partitions: int = 1) -> Options:
    """Check the options.

    Args:
        given: The options.
        partitions: How many tasks read if the options do not say so.

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

    queues = _queues(option("queue"), option("queues"))
    payload_type = option("payloadType", "json") or "json"
    if not _PAYLOAD_TYPE.match(payload_type):
        raise ConfigurationError(
            f'payloadType: {payload_type!r} is not allowed: give "json", "variant" or a Spark '
            'type, for example "struct<a: bigint>"'
        )
    model = option("payloadModel")
    if model is not None and option("payloadType") is not None:
        raise ConfigurationError("payloadType, payloadModel: give one of the two")
    match = option("match")
    return Options(
        NamespaceAddress.of(option("uri"), option("uriEnv"), option("namespace", "pyqueue") or ""),
        queues[0],
        () if option("queues") is None else queues,
        payload_type,
        _count("numPartitions", option("numPartitions", str(partitions)), MAX_PARTITIONS),
        option("group") and arguments.group(option("group")),
        _count("maxMessagesPerBatch", option("maxMessagesPerBatch", "10000"), MAX_CLAIM),
        _count("maxBytesPerBatch", option("maxBytesPerBatch", str(MAX_BATCH_BYTES)), _MOST_BYTES),
        arguments.duration("leaseSeconds", _number(option("leaseSeconds", "600")), positive=True),
        _count("members", option("members", "1"), MAX_MEMBERS),
        option("stage") and arguments.group(option("stage"), "stage"),
        _epoch(option("epoch")),
        option("idColumn"),
        arguments.one_of("delivery", option("delivery", _DELIVERIES[0]), _DELIVERIES)
        == _DELIVERIES[1],
        _yes("staged", option("staged", "true")),
        _on_duplicate(option("onDuplicate", "ignore")),
        *_bad_records(option("onBadRecord"), option("columnNameOfCorruptRecord")),
        _count("maxWaitMs", option("maxWaitMs", "100"), 60_000, least=0) / 1000,
        _columns(option("columns")),
        None if match is None else matching(match),
        _yes("pushFilters", option("pushFilters", "false")),
        model,
    )


def _queues(queue: str | None, queues: str | None) -> tuple[str, ...]:
    if queue is not None and queues is not None:
        raise ConfigurationError(
            "queue, queues: give one of the two. With queues, the column queue of each row names "
            "one of them"
        )
    if queues is None:
        if queue is None:
            raise ConfigurationError('queue: name the queue: .option("queue", "...")')
        return (arguments.queue_name(queue),)
    names = [arguments.queue_name(name.strip()) for name in queues.split(",")]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"queues: {queues!r} is not allowed: name each queue once, separated by commas"
        )
    return tuple(names)


def _on_duplicate(given: str | None) -> OnDuplicate:
    return cast("OnDuplicate", arguments.one_of("onDuplicate", given, get_args(OnDuplicate)))


def _yes(name: str, given: str | None) -> bool:
    return arguments.one_of(name, (given or "").lower(), _YES_OR_NO) == _YES_OR_NO[0]


def _epoch(given: str | None) -> int | None:
    if given is not None and (not given.isdecimal() or int(given) > _MOST_EPOCHS):
        raise ConfigurationError(
            f"epoch: {given!r} is not allowed: give the number of the batch, which foreachBatch "
            "passes as its second argument"
        )
    return None if given is None else int(given)


def _columns(given: str | None) -> list[str]:
    known = columns(None).names
    if given is None:
        return known
    names = [name.strip() for name in given.split(",")]
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ConfigurationError(
            f"columns: {given!r} is not allowed: name some of {', '.join(known)}, each once, "
            "separated by commas"
        )
    return names


def _bad_records(
    on_bad_record: str | None, column: str | None
) -> tuple[OnBadRecord | None, str | None]:
    if on_bad_record is not None:
        arguments.one_of("onBadRecord", on_bad_record, get_args(OnBadRecord))
    if column is not None and on_bad_record != "null":
        raise ConfigurationError(
            "columnNameOfCorruptRecord: this column shows the payloads that are read as null: "
            'give .option("onBadRecord", "null") too'
        )
    if column in columns(None).names:
        raise ConfigurationError(
            f"columnNameOfCorruptRecord: every read has a column {column!r}: give another name"
        )
    return cast("OnBadRecord | None", on_bad_record), column


def _count(name: str, given: str | None, most: int, *, least: int = 1) -> int:
    if given is None or not given.isdecimal() or not least <= int(given) <= most:
        raise ConfigurationError(
            f"{name}: {given!r} is not allowed: give a whole number from {least} to {most}"
        )
    return int(given)


def _number(given: str | None) -> float | str | None:
    """Return the number; a text that is none is returned unchanged, for the check to refuse."""
    try:
        return float(given or "")
    except ValueError:
        return given


def read_columns(options: Options, payload: DataType | None) -> StructType:
    """Return the columns of a read. A payload type of None means JSON."""
    corrupt = options.corrupt_column
    more = [] if corrupt is None else [StructField(corrupt, StringType())]
    return StructType([*(columns(payload)[name] for name in options.columns), *more])


def payload_column(options: Options, schema: StructType) -> DataType | None:
    """Return the type of the payload column as Spark has parsed it, or None for JSON.

    Raises:
        ConfigurationError: The caller gave a schema with different columns.
    """
    json = options.payload_type == "json" and options.payload_model is None
    names = read_columns(options, None).names
    payload = schema["payload"].dataType if "payload" in schema.names else StringType()
    if schema.names != names or (json and not isinstance(payload, StringType)):
        raise ConfigurationError(
            f"schema: a queue has the columns {', '.join(names)}: give no schema; "
            "give the type of the payload by payloadType"
        )
    return None if json or "payload" not in schema.names else payload
