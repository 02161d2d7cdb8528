"""Rows of stored messages, and the treatment of payloads that do not fit their type.

Messages in BSON are converted column by column, which is faster, where that gives the same rows as
``frames.batch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import bson
import pyarrow as pa
import pyarrow.compute as pc
from bson.errors import BSONError
from pyspark.sql.types import DataType

from pyqueue.documents import GROUP_PREFIX, STORED_GROUP
from pyqueue.errors import InvalidMessage
from pyqueue.messages import HIGHEST_PRIORITY, Id
from pyqueue.payloads import OPTIONS
from pyqueue.requests import Document
from pyqueue.spark.columns import COLUMNS, NEEDED, labels
from pyqueue.spark.frames import batch, misfits, payloads, schema_of, to_json
from pyqueue.spark.options import Options, read_columns

if TYPE_CHECKING:
    from pyqueue.spark.bson_columns import Documents, Field

_FIELDS: Final = (*NEEDED, *chain.from_iterable(each.fields for each in COLUMNS.values()))


def decoded(found: Sequence[bytes]) -> list[Document]:
    """Decode stored messages from BSON, as the database driver would."""
    return bson.decode_all(b"".join(found), OPTIONS)


def encoded_batch(found: Sequence[bytes], payload: DataType | None) -> pa.RecordBatch | None:
    """Return the rows that ``frames.batch`` would make of stored messages, or None.

    None means that a value is unusual, such as a payload that does not fit the type, or that numpy
    is not installed. The caller then decodes the messages and calls ``frames.batch``.
    """
    try:
        return _batch(found, payload) if found else None
    except (InvalidMessage, BSONError, pa.ArrowException, ImportError, LookupError, ValueError):
        return None


def _batch(found: Sequence[bytes], payload: DataType | None) -> pa.RecordBatch:
    from pyqueue.spark.bson_columns import Documents, column, fits

    schema, documents = schema_of(payload), Documents(found)
    fields = documents.fields(_FIELDS)
    type = schema.field("payload").type
    if payload is not None and fits(payload):
        values = column(documents, fields["payload"], payload, type)
    else:
        named = [{"_id": "", "payload": each} for each in _values(documents, fields["payload"])]
        values = payloads(named, payload, type)
    headers = [labels(each) for each in _values(documents, fields["headers"])]
    due, instant = fields["due"], schema.field("when").type
    tries, _ = documents.integers(fields["tries"].without_null())
    levels, without = documents.integers(fields["priority"])
    without |= (levels < 0) | (levels > HIGHEST_PRIORITY)
    return pa.RecordBatch.from_arrays(
        [
            documents.texts(fields["_id"].everywhere()),
            documents.strings(fields["q"].everywhere()),
            values,
            pa.array(headers, schema.field("headers").type),
            documents.strings(fields["key"]),
            pc.coalesce(
                documents.instants(due.without_null(), instant),
                documents.instants(fields["when"].everywhere(), instant),
            ),
            documents.instants(fields["pushed"], instant),
            pa.array(tries, pa.int32()),
            pa.array(levels, pa.int32(), mask=without),
            _groups(documents, fields),
        ],
        schema=schema,
    )


def _groups(documents: Documents, fields: Mapping[str, Field]) -> pa.Array:
    """Return the names of groups without their stored prefix."""
    stored = pc.coalesce(*(documents.strings(fields[name]) for name in STORED_GROUP))
    return pc.replace_substring_regex(stored, f"^{GROUP_PREFIX.pattern}", "")


def _values(documents: Documents, field: Field) -> list[Document | None]:
    """Return the values of a field, which are documents or null."""
    rows, parts = documents.parts(field)
    values: list[Document | None] = [None] * len(field.types)
    for row, value in zip(rows, bson.decode_all(parts, OPTIONS), strict=True):
        values[row] = value
    return values


# ---- payloads that do not fit


def rows_of(
    options: Options, found: Sequence[bytes], payload: DataType | None, default: str
) -> tuple[pa.RecordBatch, dict[Id, str]]:
    """Convert stored messages to rows, and handle bad records as ``onBadRecord`` says.

    Args:
        options: The options with which the messages are read.
        found: The stored messages in BSON.
        payload: The type of the payloads. None means JSON, which every payload fits.
        default: How to handle bad records if the options do not set it.

    Returns:
        The rows, and the reasons for burying messages, keyed by message id.

    Raises:
        InvalidMessage: A payload does not fit, and ``onBadRecord`` is "fail".
    """
    rows, bad = encoded_batch(found, payload), dict[Id, str]()
    corrupt: Sequence[str | None] = [None] * len(found)
    if rows is None:
        documents = decoded(found)
        rows, corrupt, bad = _decoded_rows(options, documents, payload, default)
    return _with_corrupt(options, rows, corrupt).select(read_columns(options, None).names), bad


def log_rows_of(
    options: Options, documents: Sequence[Document], payload: DataType | None
) -> pa.RecordBatch:
    """Convert messages of a stream to rows, and handle bad records as ``onBadRecord`` says.

    No message is left out.

    Args:
        options: The options with which the messages are read.
        documents: The messages in the form of a queue's messages, each with its position.
        payload: The type of the payloads. None means JSON, which every payload fits.

    Raises:
        InvalidMessage: A payload does not fit, and ``onBadRecord`` is "fail".
    """
    rows, corrupt, _ = _decoded_rows(options, documents, payload, "fail")
    positions = pa.array([each["position"] for each in documents], pa.int64())
    # Spark compares the schemas, nullability included.
    position = pa.field("position", pa.int64(), nullable=False)
    stream = pa.field("stream", pa.string(), nullable=False)
    rows = rows.append_column(position, positions).append_column(stream, rows.column("queue"))
    return _with_corrupt(options, rows, corrupt).select(read_columns(options, None).names)


def _with_corrupt(
    options: Options, rows: pa.RecordBatch, corrupt: Sequence[str | None]
) -> pa.RecordBatch:
    """Add the column for payloads that do not fit their type, if the options name one.

    With such a column, no message is buried, so ``corrupt`` has a value for each row.
    """
    if options.corrupt_column is None:
        return rows
    field = pa.field(options.corrupt_column, pa.string())
    return rows.append_column(field, pa.array(corrupt, pa.string()))


def _decoded_rows(
    options: Options, documents: Sequence[Document], payload: DataType | None, default: str
) -> tuple[pa.RecordBatch, list[str | None], dict[Id, str]]:
    """Return the rows, the JSON of payloads that do not fit, and the reasons to bury messages."""
    action = options.on_bad_record or default
    reasons: dict[int, str] = {}
    bad: dict[Id, str] = {}
    kept = list(documents)
    try:
        rows = batch(documents, payload)
    except InvalidMessage as error:
        if action == "fail":
            raise InvalidMessage(
                f'{error}; to read such payloads as null, set .option("onBadRecord", "null")'
            ) from None
        if payload is not None:
            reasons = dict(misfits(documents, payload))
        kept = []
        for place, each in enumerate(documents):
            if place in reasons and action == "bury" and "dead" not in each:
                bad[each["_id"]] = reasons[place]
            else:
                kept.append(each | {"payload": None} if place in reasons else each)
        rows = batch(kept, payload)
    corrupt = [
        to_json(each.get("payload")) if place in reasons else None
        for place, each in enumerate(documents)
    ]
    return rows, corrupt, bad
