"""The options of the data source "pyqueue"."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, TypeVar

from pyspark.sql.types import DataType, StringType, StructField, StructType

from pyqueue import arguments
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import Options as QueueOptions
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import ConfigurationError
from pyqueue.requests import EnsureQueue, Plan
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark.addresses import NamespaceAddress, client_of, plans_at
from pyqueue.spark.columns import columns, log_columns
from pyqueue.spark.option_table import (
    REFUSED,
    TABLE,
    BatchOptions,
    ReadOptions,
    Source,
    Way,
    WriteOptions,
    values,
)

R = TypeVar("R")

log = logging.getLogger("pyqueue")

#: The maximum number of messages, and of bytes, that are read or written at once.
CHUNK: Final = 10_000
CHUNK_BYTES: Final = 2**24


@dataclass(frozen=True, kw_only=True)
class Options(ReadOptions):
    """The checked options for reading or writing rows."""

    address: NamespaceAddress
    #: The queue, the first of ``queues``, or the stream that is read.
    queue: str
    #: The queues that the rows of a write may name. If empty, the rows name no queue.
    queues: tuple[str, ...]
    #: Whether the options are for reading a stream.
    by_position: bool
    batch: BatchOptions
    of_write: WriteOptions

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are read, in order."""
        return self.chosen or self.known_columns().names

    def known_columns(self, payload: DataType | None = None) -> StructType:
        """Return all columns that can be read. A payload type of None means JSON."""
        return (log_columns if self.by_position else columns)(payload)

    def backend(self, queue: str | None = None) -> QueuePlans:
        """Return the plans (command sequences) of a queue. Create its record if it is missing.

        Args:
            queue: The name of the queue, or None for the queue of the options.
        """
        queue = self.queue if queue is None else queue
        return self._plans(queue, self.run(_kind(queue, make=True)))

    def source(self) -> QueuePlans:
        """Return the plans (command sequences) of the queue that is read. This writes nothing.

        Raises:
            ConfigurationError: The queue does not exist, and ``mustExist`` is true.
        """
        kind = self.source_kind()
        if not kind and self.must_exist:
            raise ConfigurationError(
                f"queue: there is no queue {self.queue!r} in namespace {self.address.namespace!r}; "
                'check both names, or set .option("mustExist", "false") to get no rows instead'
            )
        return self._plans(self.queue, kind or GUESSED_KIND)

    def source_kind(self) -> str:
        """Return the kind of the queue that is read, or "" if there is no such queue."""
        return self.run(_kind(self.queue, make=False))

    def _plans(self, queue: str, kind: str) -> QueuePlans:
        options = QueueOptions(dead_letter=arguments.dead_letter(queue, None))
        return plans_at(self.address, queue, options, kind)

    def claims(self, member: int | None = None) -> NamedClaims:
        """Return the plans (command sequences) of the group, or of one of its members."""
        assert self.group is not None
        kind = self.source_kind() or GUESSED_KIND
        return NamedClaims(self._plans(self.queue, kind), self.group, member)

    def run(self, plan: Plan[R]) -> R:
        """Run a plan (a command sequence) with the client of this process."""
        return runner_of(client_of(self.address)).run(plan)


def _kind(queue: str, *, make: bool) -> Plan[str]:
    # No options are given: the record keeps the options of the queue's consumers.
    kind = yield from EnsureQueue(queue, GUESSED_KIND if make else None, guessed=make)
    if kind == STREAM:
        raise ConfigurationError(
            f'queue: {queue!r} is a stream; read it with .option("stream", {queue!r}), or append '
            "to it in foreachBatch, with Stream.append_many"
        )
    return kind


#: Spark adds these to the options of a stream; the name comes from Declarative Pipelines.
_SPARK_OPTIONS: Final = {"checkpointlocation", "path", "queryname", "querytimeout"}
#: Tables of Spark's catalogs have these, and each option twice, once after "option.".
_OF_CATALOGS: Final = {"comment", "external", "location", "owner", "provider"}
_BY_LOWER_CASE: Final = {each.name.lower(): each for each in TABLE}
_KNOWN: Final = _SPARK_OPTIONS | _OF_CATALOGS | _BY_LOWER_CASE.keys()
#: An unknown option counts as mistyped if it is this similar to a known option; 1 means equal.
_NEAR: Final = 0.8
#: The environment variable that names the server if no option does, as for the command line.
DEFAULT_ENV: Final = "PYQUEUE_URL"
#: The warnings that this process has logged.
_warned: Final[set[str]] = set()


def checked(given: Mapping[str, str], ways: Way = Way.ALL) -> Options:
    """Check the options and return them.

    Args:
        given: The texts of the options, keyed by option name.
        ways: The uses for which the options may be meant.

    Raises:
        ConfigurationError: An option is missing, unknown, invalid, or not for this use.
    """
    _check_names(given)
    _check_ways(given, ways)
    source = Source(**values(Source, given))
    queues = [each for each in (source.stream, source.queue) if each] + [*(source.queues or ())]
    if not queues:
        raise ConfigurationError(
            'queue: set .option("queue", "..."), or .option("stream", "...") to read a stream. In '
            "SQL, use CREATE TEMPORARY VIEW ... USING pyqueue OPTIONS (...), because Spark does "
            "not pass the options of a table to its data source"
        )
    if source.queue is not None and source.queues is not None:
        raise ConfigurationError(
            'queue, queues: set one of the two. With queues, the column "queue" of each row '
            "names one of the listed queues"
        )
    found = Options(
        **values(ReadOptions, given),
        address=_address(source),
        queue=queues[0],
        queues=source.queues or (),
        by_position=source.stream is not None,
        batch=BatchOptions(**values(BatchOptions, given)),
        of_write=WriteOptions(**values(WriteOptions, given)),
    )
    if given.get("payloadType") and found.payload_model is not None:
        raise ConfigurationError("payloadType, payloadModel: set one of the two, not both")
    if found.batch.min_messages > (most := found.batch.max_messages):
        raise ConfigurationError(
            f"minMessagesPerBatch: {found.batch.min_messages} is more than maxMessagesPerBatch, "
            f"which is {most}; decrease the former or increase the latter"
        )
    if found.of_write.id_prefix is not None and found.of_write.id_column is None:
        raise ConfigurationError(
            "idPrefix: requires idColumn, whose values get the prefix; set idColumn, too, or set "
            "stage instead, which generates ids that begin with the stage's name"
        )
    _check_columns(found)
    _check_bad_records(found)
    return found


def _check_names(given: Mapping[str, str]) -> None:
    """Refuse options that seem to be mistyped.

    Spark and its catalogs add options, so other unknown options are ignored with a warning.
    """
    ignored = []
    for name in sorted(given):
        lower = name.lower()
        if lower in _KNOWN or lower.startswith("option."):
            continue
        if near := get_close_matches(lower, _BY_LOWER_CASE, 1, _NEAR):
            raise ConfigurationError(
                f"{name}: unknown option; did you mean {_BY_LOWER_CASE[near[0]].name}? "
                f"The options are {', '.join(each.name for each in TABLE)}"
            )
        ignored.append(name)
    if ignored:
        _warn(f"options: the data source pyqueue ignores unknown options ({', '.join(ignored)})")


def _check_ways(given: Mapping[str, str], ways: Way) -> None:
    """Refuse options that are for other uses only."""
    if not given.get("stream"):
        ways &= ~Way.BY_POSITION
    elif ways & Way.READS:
        ways &= Way.BY_POSITION
        known = {each.name.lower(): each.name for each in TABLE if each.ways & Way.BY_POSITION}
        others = _BY_LOWER_CASE.keys() - known.keys()
        if more := sorted(name for name in given if name.lower() in others):
            raise ConfigurationError(
                f"{', '.join(more)}: not allowed if a stream is read; use only the options "
                f"{', '.join(known.values())}"
            )
    for names, uses, text in REFUSED:
        options = [_BY_LOWER_CASE[name.lower()] for name in names.split(", ")]
        if ways in uses and any(each.value(given) != each.value({}) for each in options):
            raise ConfigurationError(f"{names}: {text}")


def _address(source: Source) -> NamespaceAddress:
    """Return the address of the namespace. Warn of a password in ``uri``: Spark may show it."""
    uri, uri_env = source.uri or source.url, source.uri_env
    given = [each for each in (source.uri, source.url, uri_env) if each is not None]
    if not given and os.environ.get(DEFAULT_ENV):
        uri_env = DEFAULT_ENV
    elif len(given) != 1:
        raise ConfigurationError(
            "uri, url, uriEnv: set exactly one, uri or url to the server's URI, or uriEnv to the "
            "name of the environment variable that holds the URI; or set none, and the environment "
            f"variable {DEFAULT_ENV}"
        )
    address = NamespaceAddress.of(uri, uri_env, source.namespace)
    if source.uri is not None and address.has_secret:
        _warn("uri: Spark may show the password in plans and in its event log; use url or uriEnv")
    return address


def _warn(text: str) -> None:
    """Log a warning, once in this process."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


def _check_columns(options: Options) -> None:
    known, names = options.known_columns().names, options.columns
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ConfigurationError(
            f"columns: {','.join(names)!r} is not allowed; name some of {', '.join(known)}, each "
            "once, separated by commas"
        )


def _check_bad_records(options: Options) -> None:
    column = options.corrupt_column
    if column is not None and options.on_bad_record != "null":
        raise ConfigurationError(
            'columnNameOfCorruptRecord: requires onBadRecord "null", because this column shows the '
            'payloads that are read as null; set .option("onBadRecord", "null"), too'
        )
    if options.on_bad_record == "bury" and options.by_position:
        raise ConfigurationError(
            'onBadRecord: messages of a stream stay in the stream and cannot be buried; use "fail" '
            '(the default) or "null"'
        )
    if column in options.known_columns().names:
        raise ConfigurationError(
            f"columnNameOfCorruptRecord: the rows already have a column {column!r}; use another "
            "name"
        )


def read_columns(options: Options, payload: DataType | None) -> StructType:
    """Return the columns of the rows that are read. A payload type of None means JSON."""
    corrupt = options.corrupt_column
    more = [] if corrupt is None else [StructField(corrupt, StringType())]
    known = options.known_columns(payload)
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
            f"schema: does not fit the columns that are read ({', '.join(names)}); leave out the "
            "schema, and set the type of the payload with payloadType"
        )
    return None if json or "payload" not in schema.names else payload
