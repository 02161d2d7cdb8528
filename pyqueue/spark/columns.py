"""The columns of the rows that Spark reads: their types, and their values in a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql.types import (
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyqueue.documents import STORED_GROUP, group_of, priority_of

Document = Mapping[str, Any]


class Column(NamedTuple):
    """A column of the rows that Spark reads from a queue."""

    type: DataType
    #: Takes stored messages, and returns their values for Arrow.
    values: Callable[[Sequence[Document]], list[Any]]
    #: The stored fields that the column needs besides ``NEEDED``.
    fields: Sequence[str] = ()
    nullable: bool = True


def label(value: object) -> str:
    """Return the value of a header as a string."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def labels(headers: Document | None) -> list[tuple[str, str]]:
    """Return headers as the key-value pairs of a map."""
    return [(name, label(value)) for name, value in headers.items()] if headers else []


def _field(name: str, default: object = None) -> Callable[[Sequence[Document]], list[Any]]:
    return lambda found: [each.get(name, default) for each in found]


_TEXT: Final = StringType()
#: The stored fields that are needed whichever columns are read.
NEEDED: Final = ("_id", "q", "when")
#: The columns, in order. The type of the payload varies; this one means JSON.
COLUMNS: Final[Mapping[str, Column]] = {
    "id": Column(_TEXT, lambda found: [str(each["_id"]) for each in found], nullable=False),
    "queue": Column(_TEXT, lambda found: [each["q"] for each in found], nullable=False),
    "payload": Column(_TEXT, _field("payload"), ["payload"]),
    "headers": Column(
        MapType(_TEXT, _TEXT),
        lambda found: [labels(each.get("headers")) for each in found],
        ["headers"],
    ),
    "key": Column(_TEXT, _field("key"), ["key"]),
    "when": Column(
        TimestampType(),
        lambda found: [each.get("due", each["when"]) for each in found],
        ["due"],
        nullable=False,
    ),
    "pushed": Column(TimestampType(), _field("pushed"), ["pushed"]),
    "tries": Column(IntegerType(), _field("tries", 0), ["tries"], nullable=False),
    "priority": Column(IntegerType(), lambda found: [*map(priority_of, found)], ["priority"]),
    "group": Column(_TEXT, lambda found: [*map(group_of, found)], STORED_GROUP),
}


def columns(payload: DataType | None) -> StructType:
    """Return the columns of rows that are read from a queue. A payload type of None means JSON."""
    types = {name: each.type for name, each in COLUMNS.items()} | {"payload": payload or _TEXT}
    return StructType(
        [StructField(name, types[name], each.nullable) for name, each in COLUMNS.items()]
    )


def log_columns(payload: DataType | None) -> StructType:
    """Return the columns of rows read from a stream. A payload type of None means JSON."""
    of_messages = columns(payload)
    return StructType(
        [
            of_messages["id"],
            StructField("stream", StringType(), nullable=False),
            StructField("position", LongType(), nullable=False),
            *(of_messages[name] for name in ("payload", "headers", "pushed")),
        ]
    )
