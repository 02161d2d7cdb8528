"""Convert stored messages to Spark rows with Arrow. For the reverse, see ``row_reader``.

A payload has one of three forms: a JSON string, a variant, or a struct or any other Spark type. The
JSON is MongoDB's relaxed Extended JSON, so dates, ObjectIds, bytes and decimals come back
unchanged. A payload that does not fit its type raises an ``InvalidMessage`` that names it.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn
from uuid import UUID

import pyarrow as pa
from bson import ObjectId, json_util
from bson.decimal128 import Decimal128
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    VariantVal,
)

from pyqueue.documents import invalid_fields, without_fields
from pyqueue.errors import InvalidMessage
from pyqueue.payloads import OPTIONS, error_text
from pyqueue.spark.columns import COLUMNS, Document, columns

JSON: Final = json_util.RELAXED_JSON_OPTIONS.with_options(
    tz_aware=True,
    tzinfo=dt.UTC,
    uuid_representation=OPTIONS.uuid_representation,
    datetime_conversion=OPTIONS.datetime_conversion,
)

#: Instants are in UTC. Before Spark 4.2 they always are, without this argument.
_ZONE: Final[Mapping[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)

_LARGEST_FLOAT: Final = 3.4028234663852886e38

#: Converts a payload, or a part of one.
Convert = Callable[[Any], Any]

#: The errors of Arrow and of the conversions for a value of another type.
MISFITS: Final = (
    pa.ArrowException,
    InvalidMessage,
    AttributeError,
    TypeError,
    ValueError,
    ArithmeticError,
)

# ---- documents to rows


def to_json(value: Any) -> str:
    """Return a payload as JSON."""
    try:
        return _encode(value)
    except ValueError:  # NaN and infinities, which plain JSON lacks
        return json_util.dumps(value, json_options=JSON, ensure_ascii=False)


_encode: Final = json.JSONEncoder(
    default=lambda value: json_util.default(value, JSON), allow_nan=False, ensure_ascii=False
).encode


def _as_variant(value: Any) -> dict[str, bytes]:
    variant = VariantVal.parseJson(to_json(value))
    return {"value": variant.value, "metadata": variant.metadata}


# Arrow would convert some values of other types silently. The next functions refuse them.


def _whole_number(value: Any) -> Any:
    if isinstance(value, float) and not value.is_integer():
        raise InvalidMessage("a number is not whole")
    return value


def _number(value: Any) -> Any:
    return _refuse(value) if isinstance(value, bool) else value


def _small_number(value: Any) -> Any:
    if isinstance(_number(value), float) and _LARGEST_FLOAT < abs(value) < math.inf:
        raise InvalidMessage("a number is too large")
    return value


def _instant(value: Any) -> Any:
    return value if isinstance(value, dt.datetime) else _refuse(value)


def _bytes(value: Any) -> Any:
    return value if isinstance(value, bytes) else _refuse(value)


def _refuse(value: Any) -> NoReturn:
    raise InvalidMessage(f"a value is of type {type(value).__name__}")


def reason_of(error: BaseException) -> str:
    """Return the text of a conversion error without the value that Arrow puts into it."""
    text = re.sub(r"convert .* with type", "convert a value of type", error_text(error))
    return text[:500] or type(error).__name__


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, (ObjectId, UUID)) else value


def _decimal(value: Any) -> Any:
    return value.to_decimal() if isinstance(value, Decimal128) else value


#: The conversions of single values.
_CONVERTS: Final[Sequence[tuple[type[DataType] | tuple[type[DataType], ...], Convert]]] = (
    (VariantType, _as_variant),
    (IntegralType, _whole_number),
    (DoubleType, _number),
    (FloatType, _small_number),
    ((TimestampType, TimestampNTZType, DateType), _instant),
    (BinaryType, _bytes),
    (StringType, _text),
    (DecimalType, _decimal),
)


def _to_arrow(type: DataType) -> Convert | None:
    """Return the function that converts a BSON value for Arrow, or None if none is needed."""
    for types, convert in _CONVERTS:
        if isinstance(type, types):
            return convert
    if isinstance(type, ArrayType):
        return each_of(_to_arrow(type.elementType))
    if isinstance(type, MapType):
        inner = _to_arrow(type.valueType)
        return lambda value: [(name, applied(inner, each)) for name, each in value.items()]
    if isinstance(type, StructType):
        return fields_of({field.name: _to_arrow(field.dataType) for field in type.fields})
    return None


def each_of(convert: Convert | None) -> Convert | None:
    """Return a function that converts a list, given the function that converts its values."""
    if convert is None:
        return None
    return lambda value: (
        [applied(convert, each) for each in value] if isinstance(value, list) else value
    )


def applied(convert: Convert | None, value: Any) -> Any:
    """Return the converted value. None stays None."""
    return value if convert is None or value is None else convert(value)


def fields_of(converts: Mapping[str, Convert | None]) -> Convert:
    """Return a function that converts a document, given the functions that convert its fields."""
    needed = [(name, convert) for name, convert in converts.items() if convert is not None]

    def convert_fields(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        result = dict(value)
        for name, convert in needed:
            if result.get(name) is not None:
                result[name] = convert(result[name])
        return result

    return convert_fields


def batch(documents: Sequence[Document], payload: DataType | None) -> pa.RecordBatch:
    """Return stored messages as rows.

    Raises:
        InvalidMessage: A payload does not fit the type. The text names the message.
    """
    try:
        return _rows(documents, payload)
    except InvalidMessage:
        raise
    except MISFITS:  # another program wrote invalid fields: leave these out
        return _rows([without_fields(each, invalid_fields(each)) for each in documents], payload)


def schema_of(payload: DataType | None) -> pa.Schema:
    """Return the Arrow schema of the rows that are read. A payload type of None means JSON."""
    return to_arrow_schema(columns(payload), **_ZONE)


def _rows(documents: Sequence[Document], payload: DataType | None) -> pa.RecordBatch:
    schema = schema_of(payload)
    arrays = [
        payloads(documents, payload, field.type)
        if field.name == "payload"
        else pa.array(COLUMNS[field.name].values(documents), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def payloads(
    documents: Sequence[Document], payload: DataType | None, type: pa.DataType
) -> pa.Array:
    """Return the payloads of stored messages as a column of this type."""
    if payload is None:
        return pa.array([to_json(each.get("payload")) for each in documents], type)
    convert = _to_arrow(payload)
    try:
        return pa.array([applied(convert, each.get("payload")) for each in documents], type)
    except MISFITS:
        for place, reason in misfits(documents, payload):
            raise InvalidMessage(f"payload: message {documents[place]['_id']} {reason}") from None
        raise


def misfits(documents: Sequence[Document], payload: DataType) -> Iterator[tuple[int, str]]:
    """Yield the index and the reason of each message whose payload does not fit the type."""
    convert = _to_arrow(payload)
    type = schema_of(payload).field("payload").type
    for place, each in enumerate(documents):
        try:
            pa.array([applied(convert, each.get("payload"))], type)
        except MISFITS as error:
            yield place, f"does not match {payload.simpleString()[:500]} ({reason_of(error)})"
