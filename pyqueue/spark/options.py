"""The options of the data source "pyqueue"."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar, cast, get_args

from pyspark.sql.types import DataType, StringType, StructField, StructType

from pyqueue import arguments
from pyqueue.backends.claim_groups import MAX_MEMBERS
from pyqueue.backends.named_claims import MAX_CLAIM, NamedClaims
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import Options as QueueOptions
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.connecting import runner_of
from pyqueue.errors import ConfigurationError
from pyqueue.messages import MAX_BATCH_BYTES
from pyqueue.requests import EnsureQueue, Plan
from pyqueue.spark.addresses import NamespaceAddress, client_of
from pyqueue.spark.columns import columns, log_columns
from pyqueue.spark.filters import matching
from pyqueue.spark.option_values import count, delay, number, position, queue_names, yes_or_no

__all__ = [
    "CHUNK",
    "CHUNK_BYTES",
    "MAX_PARTITIONS",
    "Options",
    "WriteOptions",
    "checked",
    "payload_column",
    "read_columns",
]

R = TypeVar("R")

log = logging.getLogger("pyqueue")

OnBadRecord = Literal["bury", "null", "fail"]
OnDuplicate = Literal["ignore", "replace", "error"]

#: The most tasks of one read.
MAX_PARTITIONS: Final = 10_000
#: How many messages are read, or written, at once, and how many bytes.
CHUNK: Final = 10_000
CHUNK_BYTES: Final = 2**24


@dataclass(frozen=True)
class WriteOptions:
    """The options that only a write has, after the check."""

    stage: str | None
    epoch: int | None
    #: The name of the query; empty if the caller gives none.
    query: str
    id_column: str | None
    #: Goes before the values of ``id_column``; empty without it.
    id_prefix: str
    at_least_once: bool
    staged: bool
    on_duplicate: OnDuplicate
    #: Whether rows that cannot be stored go to the dead-letter queue.
    bury: bool


@dataclass(frozen=True)
class BatchOptions:
    """The size of the batches of a stream, after the check."""

    max_messages: int
    min_messages: int
    #: How long a batch waits for ``min_messages`` after the batch before, in seconds.
    max_delay: float
    max_bytes: int


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
    batch: BatchOptions
    lease: float
    members: int
    of_write: WriteOptions
    #: None: the default, which differs between a stream and a table.
    on_bad_record: OnBadRecord | None
    corrupt_column: str | None
    max_wait: float
    #: The columns of a read, in order.
    columns: list[str]
    #: The filter of a batch read.
    match: Mapping[str, Any] | None
    push_filters: bool
    must_exist: bool
    fail_on_data_loss: bool
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
        return self._plans(queue, self.run(_kind(queue, make=True)))

    def source(self) -> QueuePlans:
        """Return the plans of the queue that is read. This writes nothing.

        Raises:
            ConfigurationError: There is no such queue, and it must exist.
        """
        kind = self.source_kind()
        if not kind and self.must_exist:
            raise ConfigurationError(
                f"queue: there is no queue {self.queue!r} in namespace {self.address.namespace!r}: "
                'check both names, or give .option("mustExist", "false") to read no rows'
            )
        return self._plans(self.queue, kind or GUESSED_KIND)

    def source_kind(self) -> str:
        """Return the kind of the queue that is read, or "" if there is no such queue."""
        return self.run(_kind(self.queue, make=False))

    def _plans(self, queue: str, kind: str) -> QueuePlans:
        connection = runner_of(client_of(self.address))
        return QueuePlans(
            queue,
            QueueOptions(dead_letter=arguments.dead_letter(queue, None)),
            kind=kind,
            owner=connection.owner,
            command_timeout=connection.command_timeout,
        )

    def claims(self, member: int | None = None) -> NamedClaims:
        """Return the plans of the group, or of a member of it."""
        assert self.group is not None
        kind = self.source_kind() or GUESSED_KIND
        return NamedClaims(self._plans(self.queue, kind), self.group, member)

    def run(self, plan: Plan[R]) -> R:
        """Run a plan with the client of this process."""
        return runner_of(client_of(self.address)).run(plan)


def _kind(queue: str, *, make: bool) -> Plan[str]:
    # No options are given: the record keeps those of the queue's consumers.
    kind = yield from EnsureQueue(queue, GUESSED_KIND if make else None, guessed=make)
    if kind == STREAM:
        raise ConfigurationError(
            f'queue: {queue!r} is a stream: read it by .option("stream", {queue!r}); append to it '
            "in foreachBatch, by Stream.append_many"
        )
    return kind


_OPTIONS: Final = (
    "uri",
    "url",
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
    "mustExist",
    "failOnDataLoss",
    "group",
    "maxMessagesPerBatch",
    "minMessagesPerBatch",
    "maxTriggerDelay",
    "maxBytesPerBatch",
    "leaseSeconds",
    "maxWaitMs",
    "onBadRecord",
    "columnNameOfCorruptRecord",
    "members",
    "stage",
    "epoch",
    "query",
    "idColumn",
    "idPrefix",
    "delivery",
    "staged",
    "onDuplicate",
    "onBadRow",
)
#: The options of a read of a stream by position.
_OF_STREAMS: Final = (
    *("uri", "url", "uriEnv", "namespace", "stream", "startingPosition", "endingPosition"),
    *("payloadType", "payloadModel", "numPartitions", "columns", "maxMessagesPerBatch"),
    *("maxWaitMs", "onBadRecord", "columnNameOfCorruptRecord", "failOnDataLoss"),
)
_POSITIONS: Final = {"startingposition", "endingposition"}
_ON_BAD_ROW: Final = ("fail", "bury")
_DELIVERIES: Final = ("exactly-once", "at-least-once")
_MOST_EPOCHS: Final = 10**12 - 1
_MOST_BYTES: Final = 2**40
#: Spark adds these to the options of a stream; the name comes from Declarative Pipelines.
_SPARK_OPTIONS: Final = {"checkpointlocation", "path", "queryname", "querytimeout"}
_KNOWN_OPTIONS: Final = {name.lower() for name in _OPTIONS} | _SPARK_OPTIONS
#: Tables of Spark's catalogs have these, and each option twice, once after "option.".
_OF_CATALOGS: Final = {"comment", "external", "location", "owner", "provider"}
_BY_LOWER_CASE: Final = {name.lower(): name for name in _OPTIONS}
#: How much alike an unknown option and a known one are if one of them was meant; 1 is the same.
_NEAR: Final = 0.8
#: The environment variable that names the server if no option does, as for the command line.
DEFAULT_ENV: Final = "PYQUEUE_URL"
#: The warnings that were given.
_warned: Final[set[str]] = set()
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
    queues = queue_names(option("queue"), option("queues"), stream)
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
    on_bad_record, corrupt_column = _bad_records(
        option("onBadRecord"), option("columnNameOfCorruptRecord"), stream
    )
    return Options(
        address=_address(
            option("uri"), option("url"), option("uriEnv"), option("namespace") or "pyqueue"
        ),
        queue=queues[0],
        queues=() if option("queues") is None else queues,
        payload_type=payload_type,
        payload_model=model,
        partitions=count("numPartitions", option("numPartitions", str(partitions)), MAX_PARTITIONS),
        group=option("group") and arguments.group(option("group")),
        batch=_batch_options(option),
        lease=arguments.duration(
            "leaseSeconds", number(option("leaseSeconds", "600")), positive=True
        ),
        members=count("members", option("members", "1"), MAX_MEMBERS),
        of_write=_write_options(option),
        on_bad_record=on_bad_record,
        corrupt_column=corrupt_column,
        max_wait=count("maxWaitMs", option("maxWaitMs", "100"), 60_000, least=0) / 1000,
        columns=_columns(option("columns"), stream),
        match=None if match is None else matching(match),
        push_filters=yes_or_no("pushFilters", option("pushFilters", "false")),
        must_exist=yes_or_no("mustExist", option("mustExist", "true")),
        fail_on_data_loss=yes_or_no("failOnDataLoss", option("failOnDataLoss", "true")),
        by_position=stream is not None,
        starting=position("startingPosition", option("startingPosition", "first") or ""),
        ending=position("endingPosition", option("endingPosition", "last") or ""),
    )


def _batch_options(option: Callable[..., str | None]) -> BatchOptions:
    most = count("maxMessagesPerBatch", option("maxMessagesPerBatch", "10000"), MAX_CLAIM)
    most_bytes = option("maxBytesPerBatch", str(MAX_BATCH_BYTES))
    return BatchOptions(
        max_messages=most,
        min_messages=count("minMessagesPerBatch", option("minMessagesPerBatch", "1"), most),
        max_delay=delay(option("maxTriggerDelay", "15m") or ""),
        max_bytes=count("maxBytesPerBatch", most_bytes, _MOST_BYTES),
    )


def _write_options(option: Callable[..., str | None]) -> WriteOptions:
    stage, query = option("stage"), option("query")
    delivery = arguments.one_of("delivery", option("delivery", _DELIVERIES[0]), _DELIVERIES)
    return WriteOptions(
        stage=stage and arguments.group(stage, "stage"),
        epoch=_epoch(option("epoch")),
        query=arguments.group(query, "query") if query else "",
        id_column=option("idColumn"),
        id_prefix=_id_prefix(option("idPrefix"), option("idColumn")),
        at_least_once=delivery == _DELIVERIES[1],
        staged=yes_or_no("staged", option("staged", "true")),
        on_duplicate=_on_duplicate(option("onDuplicate", "ignore")),
        bury=arguments.one_of("onBadRow", option("onBadRow", "fail"), _ON_BAD_ROW) == "bury",
    )


def _check_names(given: Mapping[str, str]) -> None:
    """Refuse options that seem to be mistyped, and those that do not go with ``stream``.

    Spark and its catalogs add options of their own, so the rest is ignored with a warning.
    """
    ignored = []
    for name in sorted(given):
        lower = name.lower()
        if lower in _KNOWN_OPTIONS or lower in _OF_CATALOGS or lower.startswith("option."):
            continue
        if near := get_close_matches(lower, _BY_LOWER_CASE, 1, _NEAR):
            raise ConfigurationError(
                f"options: {name}: unknown option; did you mean {_BY_LOWER_CASE[near[0]]}? There "
                f"are {', '.join(_OPTIONS)}"
            )
        ignored.append(name)
    if ignored:
        _warn(f"options: {', '.join(ignored)}: the data source pyqueue does not know these")
    names = _BY_LOWER_CASE.keys() & {name.lower() for name in given}
    if "stream" in names:
        known = {name.lower() for name in _OF_STREAMS}
        if more := sorted(name for name in given if name.lower() in names - known):
            raise ConfigurationError(
                f"{', '.join(more)}: a read of a stream takes {', '.join(_OF_STREAMS)}"
            )
    elif more := sorted(name for name in given if name.lower() in names & _POSITIONS):
        raise ConfigurationError(
            f"{', '.join(more)}: only a stream has positions: name it by the option stream, in "
            "place of queue"
        )


def _address(
    uri: str | None, url: str | None, uri_env: str | None, namespace: str
) -> NamespaceAddress:
    """Return the address. Spark keeps the value of ``url`` out of what it shows."""
    given = [each for each in (uri, url, uri_env) if each is not None]
    if not given and os.environ.get(DEFAULT_ENV):
        uri_env = DEFAULT_ENV
    elif len(given) != 1:
        raise ConfigurationError(
            "uri, url, uriEnv: give one of them, or set the environment variable "
            f"{DEFAULT_ENV}: the server's URI, or the name of the variable that holds it"
        )
    address = NamespaceAddress.of(uri or url, uri_env, namespace)
    if uri is not None and address.has_secret:
        _warn("uri: Spark may show its password in plans and in the event log: use url, or uriEnv")
    return address


def _warn(text: str) -> None:
    """Log a warning, once in this process."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


def _on_duplicate(given: str | None) -> OnDuplicate:
    return cast("OnDuplicate", arguments.one_of("onDuplicate", given, get_args(OnDuplicate)))


def _epoch(given: str | None) -> int | None:
    if given is not None and (not given.isdecimal() or int(given) > _MOST_EPOCHS):
        raise ConfigurationError(
            f"epoch: {given!r} is not allowed: give the number of the batch, which foreachBatch "
            "passes as its second argument"
        )
    return None if given is None else int(given)


def _id_prefix(given: str | None, column: str | None) -> str:
    if given is None:
        return ""
    if column is None:
        raise ConfigurationError(
            "idPrefix: it goes before the values of a column: give idColumn, too; or give stage, "
            "which makes ids that begin with its name"
        )
    try:
        return str(arguments.identity(given))
    except ConfigurationError as error:
        raise ConfigurationError(f"idPrefix: {error}") from None


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
