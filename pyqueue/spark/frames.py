"""Convert stored messages to Spark rows and back, by Arrow.

A payload has one of three forms: a JSON string, a variant, or a struct or any other Spark type.
The JSON is MongoDB's relaxed Extended JSON, so dates, ObjectIds, bytes and decimals come back as
they were. A payload that does not fit its type is an ``InvalidMessage`` that names the message.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
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
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    VariantVal,
)

from pyqueue import arguments
from pyqueue.backends.options import NewMessage
from pyqueue.documents import invalid_fields, priority_of, without_fields
from pyqueue.errors import ConfigurationError, InvalidMessage
from pyqueue.payloads import OPTIONS, error_text
from pyqueue.spark.columns import columns

__all__ = [
    "Reader",
    "batch",
    "columns",
    "label",
    "misfits",
    "payloads",
    "to_json",
]

JSON: Final = json_util.RELAXED_JSON_OPTIONS.with_options(
    tz_aware=True,
    tzinfo=dt.UTC,
    uuid_representation=OPTIONS.uuid_representation,
    datetime_conversion=OPTIONS.datetime_conversion,
)

#: Instants are in UTC. Before Spark 4.2 they always are, and there is no such argument.
_ZONE: Final[Mapping[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

#: Converts a payload, or a part of one.
Convert = Callable[[Any], Any]
Document = Mapping[str, Any]

#: The errors of Arrow and of the conversions for a value of another type.
_MISFITS: Final = (
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


def _instant(value: Any) -> Any:
    return value if isinstance(value, dt.datetime) else _refuse(value)


def _bytes(value: Any) -> Any:
    return value if isinstance(value, bytes) else _refuse(value)


def _refuse(value: Any) -> NoReturn:
    raise InvalidMessage(f"a value is of type {type(value).__name__}")


def _reason(error: BaseException) -> str:
    """Return the text of a misfit without the value that Arrow puts into it."""
    text = re.sub(r"convert .* with type", "convert a value of type", error_text(error))
    return text[:500] or type(error).__name__


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, (ObjectId, UUID)) else value


def _decimal(value: Any) -> Any:
    return value.to_decimal() if isinstance(value, Decimal128) else value


def _to_arrow(type: DataType) -> Convert | None:
    """Return the conversion of a BSON value for Arrow, or None if Arrow takes it unchanged."""
    if isinstance(type, VariantType):
        return _as_variant
    if isinstance(type, (IntegerType, LongType)):
        return _whole_number
    if isinstance(type, (DoubleType, FloatType)):
        return _number
    if isinstance(type, (TimestampType, TimestampNTZType)):
        return _instant
    if isinstance(type, BinaryType):
        return _bytes
    if isinstance(type, StringType):
        return _text
    if isinstance(type, DecimalType):
        return _decimal
    if isinstance(type, ArrayType):
        return _each(_to_arrow(type.elementType))
    if isinstance(type, MapType):
        inner = _to_arrow(type.valueType)
        return lambda value: [(name, _apply(inner, each)) for name, each in value.items()]
    if isinstance(type, StructType):
        return _fields({field.name: _to_arrow(field.dataType) for field in type.fields})
    return None


def _each(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: (
        [_apply(convert, each) for each in value] if isinstance(value, list) else value
    )


def _apply(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _fields(converts: Mapping[str, Convert | None]) -> Convert:
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


def label(value: object) -> str:
    """Return the value of a header as a string."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def batch(documents: Sequence[Document], payload: DataType | None) -> pa.RecordBatch:
    """Return the rows of stored messages.

    Raises:
        InvalidMessage: A payload does not fit the type. The text names the message.
    """
    try:
        return _rows(documents, payload)
    except InvalidMessage:
        raise
    except _MISFITS:  # another program wrote invalid fields: leave these out
        return _rows([without_fields(each, invalid_fields(each)) for each in documents], payload)


def _rows(documents: Sequence[Document], payload: DataType | None) -> pa.RecordBatch:
    schema = to_arrow_schema(columns(payload), **_ZONE)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([str(each["_id"]) for each in documents], pa.string()),
            pa.array([each["q"] for each in documents], pa.string()),
            payloads(documents, payload, schema.field("payload").type),
            pa.array(
                [
                    [(name, label(value)) for name, value in (each.get("headers") or {}).items()]
                    for each in documents
                ],
                schema.field("headers").type,
            ),
            pa.array([each.get("key") for each in documents], pa.string()),
            pa.array(
                [each.get("due", each["when"]) for each in documents], schema.field("when").type
            ),
            pa.array([each.get("pushed") for each in documents], schema.field("pushed").type),
            pa.array([each.get("tries", 0) for each in documents], pa.int32()),
            pa.array([priority_of(each) for each in documents], pa.int32()),
        ],
        schema=schema,
    )


def payloads(
    documents: Sequence[Document], payload: DataType | None, type: pa.DataType
) -> pa.Array:
    """Return the payloads of stored messages as a column of this type."""
    if payload is None:
        return pa.array([to_json(each.get("payload")) for each in documents], type)
    convert = _to_arrow(payload)
    try:
        return pa.array([_apply(convert, each.get("payload")) for each in documents], type)
    except _MISFITS:
        for place, reason in misfits(documents, payload):
            raise InvalidMessage(f"payload: message {documents[place]['_id']} {reason}") from None
        raise


def misfits(documents: Sequence[Document], payload: DataType) -> Iterator[tuple[int, str]]:
    """Find the messages whose payloads do not fit the type: the places and the reasons."""
    convert = _to_arrow(payload)
    type = to_arrow_schema(columns(payload), **_ZONE).field("payload").type
    for place, each in enumerate(documents):
        try:
            pa.array([_apply(convert, each.get("payload"))], type)
        except _MISFITS as error:
            yield place, f"does not fit {payload.simpleString()[:500]}: {_reason(error)}"


# ---- rows to documents


def from_json(text: str) -> Any:
    """Return the payload of a JSON text.

    Raises:
        InvalidMessage: The text is not valid JSON.
    """
    try:
        return json_util.loads(text, json_options=JSON) if '"$' in text else json.loads(text)
    except Exception as error:  # the parsers of Extended JSON raise errors of many types
        reason = error if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidMessage(
            f"invalid JSON ({reason}): give a struct or a variant, or make JSON by "
            "to_json(...) or to_variant_object(...)"
        ) from None


def _to_bson(type: DataType, name: str) -> Convert | None:
    """Return the conversion of an Arrow value for BSON, or None if there is nothing to convert."""
    if isinstance(type, VariantType):
        return lambda value: from_json(VariantVal(value["value"], value["metadata"]).toJson())
    if isinstance(type, DecimalType):
        return Decimal128
    if isinstance(type, (TimestampNTZType, DateType)):
        raise ConfigurationError(
            f"payload: {name} is a {type.simpleString()}, which does not name an instant: "
            "cast it to timestamp, or to string"
        )
    if isinstance(type, ArrayType):
        return _each(_to_bson(type.elementType, name))
    if isinstance(type, MapType):
        if not isinstance(type.keyType, StringType):
            raise ConfigurationError(
                f"payload: {name} is a map with keys that are not strings: cast them to string"
            )
        convert = _to_bson(type.valueType, name)
        return lambda value: {key: _apply(convert, each) for key, each in value}
    if isinstance(type, StructType):
        inner = {
            field.name: _to_bson(field.dataType, f"{name}.{field.name}") for field in type.fields
        }
        return _fields(inner) if any(inner.values()) else None
    return None


def _has(
    schema: StructType, name: str, types: type[DataType] | tuple[type[DataType], ...], cast: str
) -> bool:
    """Return whether there is a column of this name.

    Raises:
        ConfigurationError: It is of another type.
    """
    if name not in schema.fieldNames():
        return False
    found = schema[name].dataType
    if not isinstance(found, types):
        raise ConfigurationError(
            f"{name}: the column is of type {found.simpleString()}: cast it to {cast}"
        )
    return True


def _row(number: int, id: str | None) -> str:
    """Return how an error names a row."""
    return f"row {number}" if id is None else f"the row with id {id}"


def _checked(values: Sequence[Any], ids: Sequence[str | None], check: Convert) -> list[Any]:
    """Return the values of a column as ``check`` returns them.

    Raises:
        ConfigurationError: A value is invalid. The text names its row.
    """
    checked = []
    for number, value in enumerate(values):
        try:
            checked.append(check(value))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; in {_row(number, ids[number])}") from None
    return checked


def _microseconds(column: pa.Array | pa.ChunkedArray) -> list[int | None]:
    """Return instants as numbers, which takes a fraction of the time of datetimes."""
    numbers: list[int | None] = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    return numbers


def _when(value: int | None) -> dt.datetime | None:
    if value is None:
        return None
    try:
        instant = _EPOCH + dt.timedelta(microseconds=value)
    except OverflowError:  # Spark's calendar is longer than Python's
        instant = (dt.datetime.max if value > 0 else dt.datetime.min).replace(tzinfo=dt.UTC)
    return arguments.instant("when", instant)


def _delay(value: float | Decimal | dt.timedelta | None) -> float | None:
    if value is None:
        return None
    return arguments.duration("delay", float(value) if isinstance(value, Decimal) else value)


def _priority(value: int | None) -> int | None:
    return None if value is None else arguments.priority(value)


class Reader:
    """Reads messages from the rows of a DataFrame.

    Args:
        schema: The schema of the DataFrame. It needs a column ``payload``: JSON in a string, a
            struct, a variant or any value. It may have columns ``headers`` and ``key``, and
            ``when`` or ``delay``, which say when a message becomes ready.
        id: The column of the ids; None if there is none.
        queues: The queues that the column ``queue`` may name. Empty: this column means nothing.

    Raises:
        ConfigurationError: A column is missing or has a type that cannot be stored.
    """

    def __init__(
        self,
        schema: StructType,
        id: str | None = None,
        *,
        queues: Sequence[str] = (),
    ) -> None:
        names = schema.fieldNames()
        for needed in ("payload", *(() if id is None else (id,)), *(("queue",) if queues else ())):
            if needed not in names:
                raise ConfigurationError(
                    f"the DataFrame has no column {needed!r} (it has {', '.join(names)})"
                )
        payload = schema["payload"].dataType
        self._id = id
        self._json = isinstance(payload, StringType)
        self._convert = from_json if self._json else _to_bson(payload, "payload")
        if id is not None and not isinstance(schema[id].dataType, StringType):
            raise ConfigurationError(
                f"the ids in column {id!r} are of type {schema[id].dataType.simpleString()}: "
                "cast them to string"
            )
        self._key = _has(schema, "key", StringType, "string")
        self._when = _has(schema, "when", TimestampType, "timestamp")
        seconds = (NumericType, DayTimeIntervalType)
        self._delay = _has(schema, "delay", seconds, "double, a number of seconds")
        self._schema = schema
        self._queues = frozenset(queues)
        if queues:
            _has(schema, "queue", StringType, "string")
        self._headers = "headers" in names
        labels = (
            schema["headers"].dataType if self._headers else MapType(StringType(), StringType())
        )
        if not isinstance(labels, MapType):
            raise ConfigurationError("headers: give a column of type map<string, string>")
        self._labels = _to_bson(labels, "headers")

    def rows(
        self, batch: pa.RecordBatch | pa.Table, *, priorities: bool = False
    ) -> Iterator[NewMessage]:
        """Return the messages of a batch of rows.

        Without ``priorities`` the column ``priority`` means nothing.

        Raises:
            InvalidMessage: A payload is not valid JSON, or cannot be stored.
            ConfigurationError: An id is null, or a ``when``, ``delay``, ``queue`` or ``priority``
                is invalid.
        """
        none: list[None] = [None] * batch.num_rows
        ids: Sequence[str | None] = none if self._id is None else batch.column(self._id).to_pylist()
        payloads = self._payloads(batch.column("payload"), ids)
        headers = batch.column("headers").to_pylist() if self._headers else none
        keys = batch.column("key").to_pylist() if self._key else none
        if self._id is not None and None in ids:
            raise ConfigurationError(f"the column {self._id!r} has a null: every row needs an id")
        delays = _checked(batch.column("delay").to_pylist(), ids, _delay) if self._delay else none
        instants = _checked(_microseconds(batch.column("when")), ids, _when) if self._when else none
        queues = (
            _checked(batch.column("queue").to_pylist(), ids, self._queue) if self._queues else none
        )
        levels: Sequence[int | None] = none
        if priorities and _has(self._schema, "priority", IntegralType, "int"):
            levels = _checked(batch.column("priority").to_pylist(), ids, _priority)
        if self._delay and self._when:
            for number, both in enumerate(zip(delays, instants, strict=True)):
                if None not in both:
                    raise ConfigurationError(
                        f"when, delay: {_row(number, ids[number])} has both: drop the column when, "
                        "or make one of the two null"
                    )
        for id, payload, labels, key, delay, at, queue, level in zip(
            ids, payloads, headers, keys, delays, instants, queues, levels, strict=True
        ):
            named = _apply(self._labels, labels) or None
            yield NewMessage(id, payload, named, key, delay, at, queue, level)

    def _queue(self, value: str | None) -> str:
        if value not in self._queues:
            raise ConfigurationError(
                f"queue: {'null' if value is None else repr(value[:120])} is not one of "
                f"{', '.join(sorted(self._queues))}, which the option queues, or to of a stage, "
                "lists: add it there, or leave the row out"
            )
        return value

    def _payloads(self, column: pa.Array | pa.ChunkedArray, ids: Sequence[str | None]) -> list[Any]:
        def values(some: pa.Array | pa.ChunkedArray) -> list[Any]:
            return [_apply(self._convert, value) for value in some.to_pylist()]

        try:
            return values(column)
        except _MISFITS:
            for number, id in enumerate(ids):  # find the row
                try:
                    values(column.slice(number, 1))
                except _MISFITS as error:
                    text = f"payload: in {_row(number, id)}: {_reason(error)}"
                    raise InvalidMessage(text) from None
            raise  # not covered: what fails in all rows fails in one of them
