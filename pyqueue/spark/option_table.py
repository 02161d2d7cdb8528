"""The options of the data source "pyqueue", each declared in one place.

Each field declares an option: its name, its uses, the check of its value, and its default.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache
from typing import Annotated, Any, Final, get_type_hints

from pyqueue.backends.claims.admitting import MAX_CLAIM
from pyqueue.backends.claims.groups import MAX_MEMBERS
from pyqueue.messages import MAX_BATCH_BYTES
from pyqueue.spark import option_values as value
from pyqueue.spark.filters import matching

#: The maximum number of tasks that read one table.
MAX_PARTITIONS: Final = 10_000
_MAX_WAIT_MS: Final = 60_000
_MAX_BYTES: Final = 2**40


class Way(Flag):
    """One or several uses of the data source."""

    READ = auto()
    READ_STREAM = auto()
    READ_BY_POSITION = auto()
    READ_STREAM_BY_POSITION = auto()
    WRITE = auto()
    WRITE_STREAM = auto()
    BY_POSITION = READ_BY_POSITION | READ_STREAM_BY_POSITION
    BATCH_READS = READ | READ_BY_POSITION
    STREAM_READS = READ_STREAM | READ_STREAM_BY_POSITION
    READS = BATCH_READS | STREAM_READS
    WRITES = WRITE | WRITE_STREAM
    QUEUES = READ | READ_STREAM | WRITES
    ALL = READS | WRITES


@dataclass(frozen=True, eq=False)
class Option:
    """An option. Uses that are not in ``ways`` ignore it, unless ``REFUSED`` lists them."""

    name: str
    ways: Way
    #: Takes the name and the given text, and returns the checked value.
    check: Callable[[str, str], object] = lambda _, given: given
    default: str | None = None

    def value(self, given: Mapping[str, str]) -> Any:
        """Return the checked value of this option. No text, or an empty one, means the default."""
        found = given.get(self.name) or self.default
        return None if found is None else self.check(self.name, found)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The options that say where the messages are."""

    uri: Annotated[str | None, Option("uri", Way.ALL)]
    url: Annotated[str | None, Option("url", Way.ALL)]
    uri_env: Annotated[str | None, Option("uriEnv", Way.ALL)]
    namespace: Annotated[str, Option("namespace", Way.ALL, default="pyqueue")]
    queue: Annotated[str | None, Option("queue", Way.QUEUES, value.queue_name)]
    queues: Annotated[tuple[str, ...] | None, Option("queues", Way.WRITES, value.queue_names)]
    stream: Annotated[str | None, Option("stream", Way.BY_POSITION, value.queue_name)]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options for reading only."""

    payload_type: Annotated[str, Option("payloadType", Way.READS, value.payload_type, "json")]
    #: The import path of the model of the payloads.
    payload_model: Annotated[str | None, Option("payloadModel", Way.READS)]
    #: The columns to read, in order, or None for all of them.
    chosen: Annotated[list[str] | None, Option("columns", Way.READS, value.names)]
    partitions: Annotated[int, Option("numPartitions", Way.READS, value.count(MAX_PARTITIONS), "4")]
    #: None means the default: "bury" in a streaming read of a queue, and "fail" in other reads.
    on_bad_record: Annotated[
        str | None, Option("onBadRecord", Way.READS, value.one_of("bury", "null", "fail"))
    ]
    corrupt_column: Annotated[str | None, Option("columnNameOfCorruptRecord", Way.READS)]
    match: Annotated[
        Mapping[str, Any] | None, Option("match", Way.READ, lambda _, given: matching(given))
    ]
    push_filters: Annotated[bool, Option("pushFilters", Way.READ, value.yes_or_no, "false")]
    must_exist: Annotated[bool, Option("mustExist", Way.READ, value.yes_or_no, "true")]
    group: Annotated[str | None, Option("group", Way.READ_STREAM, value.group)]
    members: Annotated[int, Option("members", Way.READ_STREAM, value.count(MAX_MEMBERS), "1")]
    lease: Annotated[float, Option("leaseSeconds", Way.READ_STREAM, value.seconds, "600")]
    max_wait_ms: Annotated[
        int, Option("maxWaitMs", Way.STREAM_READS, value.count(_MAX_WAIT_MS, least=0), "100")
    ]
    #: Where reading a stream begins and ends: "first", "last", a position or an instant.
    starting: Annotated[str, Option("startingPosition", Way.BY_POSITION, value.position, "first")]
    ending: Annotated[str, Option("endingPosition", Way.READ_BY_POSITION, value.position, "last")]
    fail_on_data_loss: Annotated[
        bool, Option("failOnDataLoss", Way.READ_STREAM_BY_POSITION, value.yes_or_no, "true")
    ]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The size of the batches that a streaming query reads."""

    max_messages: Annotated[
        int, Option("maxMessagesPerBatch", Way.STREAM_READS, value.count(MAX_CLAIM), "10000")
    ]
    min_messages: Annotated[
        int, Option("minMessagesPerBatch", Way.READ_STREAM, value.count(MAX_CLAIM), "1")
    ]
    #: How long a batch waits for ``min_messages`` after the previous batch, in seconds.
    max_delay: Annotated[float, Option("maxTriggerDelay", Way.READ_STREAM, value.delay, "15m")]
    max_bytes: Annotated[
        int,
        Option("maxBytesPerBatch", Way.READ_STREAM, value.count(_MAX_BYTES), str(MAX_BATCH_BYTES)),
    ]


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options for writing only."""

    id_column: Annotated[str | None, Option("idColumn", Way.WRITES)]
    #: The text that goes before each value of ``id_column``.
    id_prefix: Annotated[str | None, Option("idPrefix", Way.WRITES, value.id_prefix)]
    stage: Annotated[str | None, Option("stage", Way.WRITES, value.group)]
    on_duplicate: Annotated[
        str, Option("onDuplicate", Way.WRITES, value.one_of("ignore", "replace", "error"), "ignore")
    ]
    #: Whether rows that cannot be stored go to the dead-letter queue.
    bury: Annotated[bool, Option("onBadRow", Way.WRITES, value.either("fail", "bury"), "fail")]
    epoch: Annotated[int | None, Option("epoch", Way.WRITE, value.batch_number)]
    #: The caller's name for the query. If None, the id that Spark gives it is used.
    query: Annotated[str | None, Option("query", Way.WRITE, value.group)]
    staged: Annotated[bool, Option("staged", Way.WRITE, value.yes_or_no, "true")]
    at_least_once: Annotated[
        bool,
        Option(
            "delivery",
            Way.WRITE_STREAM,
            value.either("exactly-once", "at-least-once"),
            "exactly-once",
        ),
    ]


_POSITIONS: Final = "only a stream has positions; set the stream option instead of queue"
#: The options that some uses refuse, rather than ignore, if the value is not the default.
REFUSED: Final = (
    (
        "queues",
        Way.READS,
        "this option is for writes; read each queue separately, and union the DataFrames",
    ),
    (
        "stream",
        Way.WRITES,
        "this option is for reads; to write to a stream, call Stream.append_many in foreachBatch",
    ),
    ("startingPosition", Way.QUEUES, _POSITIONS),
    ("endingPosition", Way.QUEUES, _POSITIONS),
    (
        "endingPosition",
        Way.READ_STREAM_BY_POSITION,
        "this option is for batch reads; the trigger availableNow ends a query at the current end",
    ),
    (
        "match, pushFilters",
        Way.READ_STREAM,
        "these options are for batch reads; a streaming read claims every message, so filter "
        "its DataFrame (the query also finishes the messages that you filter out)",
    ),
    (
        "epoch, query, staged",
        Way.WRITE_STREAM,
        "these options are for batch writes; a streaming write numbers its batches itself, and "
        "has the delivery option instead of staged",
    ),
    ("delivery", Way.WRITE, "this option is for streaming writes; leave out delivery"),
)


@cache
def _options(part: type) -> dict[str, Option]:
    """Return the options of a part of the table, keyed by the names of their fields."""
    hints = get_type_hints(part, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


#: All options.
TABLE: Final[tuple[Option, ...]] = tuple(
    option
    for part in (Source, ReadOptions, BatchOptions, WriteOptions)
    for option in _options(part).values()
)


def values(part: type, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked values of a part of the table, keyed by the names of its fields."""
    return {name: each.value(given) for name, each in _options(part).items()}
