"""The options of the data source "pyqueue"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeVar, cast, get_args

from pyspark.sql.types import DataType, StringType, StructField, StructType

from pyqueue import arguments
from pyqueue.backends.claim_groups import MAX_MEMBERS
from pyqueue.backends.named_claims import MAX_CLAIM, NamedClaims
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.options import Options as QueueOptions
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.connecting import runner_of
from pyqueue.errors import ConfigurationError
from pyqueue.messages import MAX_BATCH_BYTES
from pyqueue.requests import EnsureQueue, Plan
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.columns import columns, log_columns
from pyqueue.spark.filters import matching

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
    #: The queue, or the first one of ``queues``; for a read of a stream, the stream.
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
    #: Whether it reads a stream, and where it begins and ends: "first", "last", a position or an
    #: instant.
    by_position: bool
    starting: str
    ending: str

    def backend(self, queue: str | None = None) -> QueuePlans:
        """Return the plans of a queue, of the kind that its record has; make the record if needed.

        Args:
            queue: The name of the queue. None: that of the options.
        """
        queue = self.queue if queue is None else queue
        connection = runner_of(client_of(self.address))
        return QueuePlans(
            queue,
            QueueOptions(dead_letter=arguments.dead_letter(queue, None)),
            kind=connection.run(_recorded_kind(queue)),
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


def _recorded_kind(queue: str) -> Plan[str]:
    # No options are given: the record keeps those of the queue's consumers.
    kind = yield from EnsureQueue(queue, "standard", guessed=True)
    if kind == STREAM:
        raise ConfigurationError(
            f'queue: {queue!r} is a stream: read it by .option("stream", {queue!r}); append to it '
            "in foreachBatch, by Stream.append_many"
        )
    return kind


_OPTIONS: Final = (
    "uri",
    "uriEnv",
    "namespace",
    "queue",
    "queues",
    "stream",
    "startingPosition",
    "endingPosition",
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
#: The options of a read of a stream by position.
_OF_STREAMS: Final = (
    *("uri", "uriEnv", "namespace", "stream", "startingPosition", "endingPosition"),
    *("payloadType", "payloadModel", "numPartitions", "columns", "maxMessagesPerBatch"),
    *("maxWaitMs", "onBadRecord", "columnNameOfCorruptRecord"),
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
    _check_names(given)

    def option(name: str, default: str | None = None) -> str | None:
        return given.get(name) or default

    stream = option("stream")
    queues = _queues(option("queue"), option("queues"), stream)
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
        *_bad_records(option("onBadRecord"), option("columnNameOfCorruptRecord"), stream),
        _count("maxWaitMs", option("maxWaitMs", "100"), 60_000, least=0) / 1000,
        _columns(option("columns"), stream),
        None if match is None else matching(match),
        _yes("pushFilters", option("pushFilters", "false")),
        model,
        stream is not None,
        _position("startingPosition", option("startingPosition", "first") or ""),
        _position("endingPosition", option("endingPosition", "last") or ""),
    )


def _check_names(given: Mapping[str, str]) -> None:
    """Refuse unknown options, and those that do not go with the option ``stream``."""
    unknown = sorted(name for name in given if name.lower() not in _KNOWN_OPTIONS)
    if unknown:
        raise ConfigurationError(
            f"options: {', '.join(unknown)}: unknown option; use {', '.join(_OPTIONS)}"
        )
    names = {name.lower() for name in given} - _SPARK_OPTIONS
    if "stream" in names:
        known = {name.lower() for name in _OF_STREAMS}
        if more := sorted(name for name in given if name.lower() in names - known):
            raise ConfigurationError(
                f"{', '.join(more)}: a read of a stream takes {', '.join(_OF_STREAMS)}"
            )
    elif more := sorted(name for name in given if name.lower().endswith("ingposition")):
        raise ConfigurationError(
            f"{', '.join(more)}: only a stream has positions: name it by the option stream, in "
            "place of queue"
        )


def _position(name: str, given: str) -> str:
    """Return where a read of a stream begins or ends."""
    if given in ("first", "last") or (given.isascii() and given.isdecimal() and len(given) < 16):
        return given
    try:
        return arguments.instant(name, datetime.fromisoformat(given)).isoformat()
    except ValueError:  # the errors of ``instant`` are, too
        raise ConfigurationError(
            f'{name}: {given!r} is not allowed: give "first", "last", a position, or an instant '
            "with its time zone, such as 2026-01-31T12:00:00Z"
        ) from None


def _queues(queue: str | None, queues: str | None, stream: str | None) -> tuple[str, ...]:
    if stream is not None:
        return (arguments.queue_name(stream),)
    if queue is not None and queues is not None:
        raise ConfigurationError(
            "queue, queues: give one of the two. With queues, the column queue of each row names "
            "one of them"
        )
    if queues is None:
        if queue is None:
            raise ConfigurationError(
                'queue: name the queue: .option("queue", "..."); or, for a read of a stream, '
                '.option("stream", "...")'
            )
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


def _columns(given: str | None, stream: str | None) -> list[str]:
    known = (columns if stream is None else log_columns)(None).names
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
    on_bad_record: str | None, column: str | None, stream: str | None
) -> tuple[OnBadRecord | None, str | None]:
    if on_bad_record is not None:
        arguments.one_of("onBadRecord", on_bad_record, get_args(OnBadRecord))
    if column is not None and on_bad_record != "null":
        raise ConfigurationError(
            "columnNameOfCorruptRecord: this column shows the payloads that are read as null: "
            'give .option("onBadRecord", "null") too'
        )
    if on_bad_record == "bury" and stream is not None:
        raise ConfigurationError(
            'onBadRecord: messages of a stream stay there, so a read cannot bury them: give "fail" '
            '(the default) or "null"'
        )
    if column in (columns if stream is None else log_columns)(None).names:
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
    known = (log_columns if options.by_position else columns)(payload)
    return StructType([*(known[name] for name in options.columns), *more])


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
            f"schema: the read has the columns {', '.join(names)}: give no schema; "
            "give the type of the payload by payloadType"
        )
    return None if json or "payload" not in schema.names else payload
