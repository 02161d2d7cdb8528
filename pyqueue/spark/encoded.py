"""Rows of stored messages in BSON: read by columns if that gives the same rows and is faster."""

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
from pyqueue.messages import HIGHEST_PRIORITY
from pyqueue.payloads import OPTIONS
from pyqueue.requests import Document
from pyqueue.spark.columns import COLUMNS, NEEDED, labels
from pyqueue.spark.frames import batch, payloads

if TYPE_CHECKING:
    from pyqueue.spark.bson_columns import Documents, Field

_FIELDS: Final = (*NEEDED, *chain.from_iterable(each.fields for each in COLUMNS.values()))


def decoded(found: Sequence[bytes]) -> list[Document]:
    """Return stored messages as the database returns them."""
    return bson.decode_all(b"".join(found), OPTIONS)


def encoded_batch(found: Sequence[bytes], payload: DataType | None) -> pa.RecordBatch | None:
    """Return the rows of stored messages: the same as ``frames.batch`` makes of them, or None.

    None means that a value is unusual, such as a payload that does not fit the type, or that numpy
    is not installed. The caller then decodes the messages and calls ``frames.batch``.
    """
    try:
        return _batch(found, payload) if found else None
    except (InvalidMessage, BSONError, pa.ArrowException, ImportError, LookupError, ValueError):
        return None


def _batch(found: Sequence[bytes], payload: DataType | None) -> pa.RecordBatch:
    from pyqueue.spark.bson_columns import Documents, column, fits

    schema, documents = batch([], payload).schema, Documents(found)
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
    """Return the groups without their stored prefix."""
    stored = pc.coalesce(*(documents.strings(fields[name]) for name in STORED_GROUP))
    return pc.replace_substring_regex(stored, f"^{GROUP_PREFIX.pattern}", "")


def _values(documents: Documents, field: Field) -> list[Document | None]:
    """Return the values of a field, which are documents or null."""
    rows, parts = documents.parts(field)
    values: list[Document | None] = [None] * len(field.types)
    for row, value in zip(rows, bson.decode_all(parts, OPTIONS), strict=True):
        values[row] = value
    return values
