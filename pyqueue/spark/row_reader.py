"""Read messages from the rows of a DataFrame. For the reverse, see ``frames``."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa
from bson import json_util
from bson.decimal128 import Decimal128
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    IntegralType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    VariantVal,
    YearMonthIntervalType,
)

from pyqueue import arguments
from pyqueue.backends.options import NewMessage
from pyqueue.errors import ConfigurationError, InvalidMessage, QueueError
from pyqueue.payloads import LIMIT, encode
from pyqueue.spark.frames import JSON, MISFITS, Convert, applied, each_of, fields_of, reason_of

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
#: The bytes that a document may need for all fields but its payload.
_REST: Final = bytes(2**14)
#: The deepest nesting of a payload that the server stores.
MAX_DEPTH: Final = 179
#: How many characters are kept of a payload that is too large.
_EXCERPT: Final = 1000

#: Why rows cannot be stored, keyed by row number.
Faults = dict[int, str]


def from_json(text: str) -> Any:
    """Return the payload that a JSON text represents.

    Raises:
        InvalidMessage: The text is not valid JSON.
    """
    try:
        return json_util.loads(text, json_options=JSON) if '"$' in text else json.loads(text)
    except Exception as error:  # the parsers of Extended JSON raise errors of many types
        reason = error if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InvalidMessage(
            f"invalid JSON ({reason}); use a struct or a variant, or make JSON with "
            "to_json(...) or to_variant_object(...)"
        ) from None


def _to_decimal(name: str, value: Decimal) -> Decimal128:
    try:
        return Decimal128(value)
    except ArithmeticError:
        raise InvalidMessage(f"{name} has more than 34 digits; cast it to string") from None


def _to_bson(type: DataType, name: str) -> Convert | None:
    """Return the function that converts an Arrow value for BSON, or None if none is needed."""
    if isinstance(type, VariantType):
        return lambda value: from_json(VariantVal(value["value"], value["metadata"]).toJson())
    if isinstance(type, DecimalType):
        return partial(_to_decimal, name)
    if isinstance(type, (DayTimeIntervalType, YearMonthIntervalType, CalendarIntervalType)):
        raise ConfigurationError(
            f"payload: {name} is of type {type.simpleString()}, which BSON does not have; cast it "
            "to a number or to string"
        )
    if isinstance(type, (TimestampNTZType, DateType)):
        raise ConfigurationError(
            f"payload: {name} is of type {type.simpleString()}, which has no time zone; "
            "cast it to timestamp, or to string"
        )
    if isinstance(type, ArrayType):
        return each_of(_to_bson(type.elementType, name))
    if isinstance(type, MapType):
        if not isinstance(type.keyType, StringType):
            raise ConfigurationError(
                f"payload: {name} is a map with keys that are not strings; cast the keys to string"
            )
        convert = _to_bson(type.valueType, name)
        return lambda value: {key: applied(convert, each) for key, each in value}
    if isinstance(type, StructType):
        inner = {
            field.name: _to_bson(field.dataType, f"{name}.{field.name}") for field in type.fields
        }
        return fields_of(inner) if any(inner.values()) else None
    return None


def _has(
    schema: StructType, name: str, types: type[DataType] | tuple[type[DataType], ...], cast: str
) -> bool:
    """Return whether the schema has a column with this name.

    Raises:
        ConfigurationError: The column is not of one of these types.
    """
    if name not in schema.fieldNames():
        return False
    found = schema[name].dataType
    if not isinstance(found, types):
        raise ConfigurationError(
            f"{name}: the column is of type {found.simpleString()}; cast it to {cast}"
        )
    return True


class _Rows:
    """The rows of a batch: their names in errors, and why some of them cannot be stored.

    Args:
        ids: The id of each row, or None.
        bury: Whether to record a row that cannot be stored, instead of raising an error.
    """

    def __init__(self, ids: Sequence[str | None], *, bury: bool = False) -> None:
        self.ids = ids
        #: The reasons, or None if a row that cannot be stored is an error.
        self.faults: Faults | None = {} if bury else None

    def name(self, number: int) -> str:
        """Return the name of a row for an error text."""
        id = self.ids[number]
        return f"row {number}" if id is None else f"the row with id {id}"

    def refuse(self, number: int, text: str, error: type[QueueError] = ConfigurationError) -> None:
        """Raise an error about a row. With ``bury``, record the first error of each row instead."""
        if self.faults is None:
            raise error(text) from None
        self.faults.setdefault(number, text)

    def checked(self, values: Sequence[Any], check: Convert) -> list[Any]:
        """Return the values of a column, checked and converted by ``check``.

        With ``bury``, an invalid value becomes None.

        Raises:
            ConfigurationError: A value is invalid, and ``bury`` is false. The text names the row.
        """
        checked = []
        for number, value in enumerate(values):
            try:
                checked.append(check(value))
            except (ConfigurationError, InvalidMessage) as error:
                self.refuse(number, f"{error}; in {self.name(number)}")
                checked.append(None)
        return checked


def _microseconds(column: pa.Array | pa.ChunkedArray) -> list[int | None]:
    """Return instants as microseconds since 1970, several times faster than as datetimes."""
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


_priority = partial(applied, arguments.priority)
_group = partial(applied, arguments.ordered_group)
_key = partial(applied, arguments.key)


def _only(column: pa.Array) -> Any:
    """Return the only value of a column, as a text if Python cannot represent the value."""
    try:
        return column.to_pylist()[0]
    except MISFITS:  # Spark's calendar is longer than Python's
        if not pa.types.is_struct(column.type):
            return " ".join(str(column).split())
        return dict(zip(column.type.names, map(_only, column.flatten()), strict=True))


def _text_of(payload: pa.Array, type: DataType) -> str:
    """Return the text of a payload that cannot be stored, or its beginning if it is too long.

    Args:
        payload: A column of one row, with this payload.
        type: The type of the column.
    """
    value = _only(payload)
    if isinstance(type, VariantType):
        with suppress(*MISFITS):
            value = VariantVal(value["value"], value["metadata"]).toJson()
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    is_long = len(text.encode()) + len(_REST) > LIMIT
    return f"{text[:_EXCERPT]}..." if is_long else text


def _check_payload(value: Any) -> None:
    """Check that a message can have this payload.

    Raises:
        InvalidMessage: The payload is too large or too deep, or BSON cannot represent it.
    """
    encode({"payload": value, "rest": _REST})
    if _is_deep(value, MAX_DEPTH):
        raise InvalidMessage(f"payload: nested more than {MAX_DEPTH} levels deep")


def _is_deep(value: Any, levels: int) -> bool:
    """Return whether documents and arrays are nested more than ``levels`` deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return not levels or any(_is_deep(each, levels - 1) for each in value)


class Reader:
    """Reads messages from the rows of a DataFrame.

    Args:
        schema: The schema of the DataFrame. It needs a column ``payload``: JSON in a string, a
            struct, a variant or any other value. It may have columns ``headers`` and ``key``, and
            ``when`` or ``delay``, which determine when a message becomes ready.
        id: The column of the ids, or None if there is none.
        queues: The queues that the column ``queue`` may name. If empty, this column is ignored.
        prefix: A text that is put before each id in the column of the ids.
        bury: What to do with a row that cannot be stored: if true, return its message with the
            reason in ``fault``; if false, raise an error.

    Raises:
        ConfigurationError: A column is missing or has a type that cannot be stored.
    """

    def __init__(
        self,
        schema: StructType,
        id: str | None = None,
        *,
        queues: Sequence[str] = (),
        prefix: str = "",
        bury: bool = False,
    ) -> None:
        names = schema.fieldNames()
        for needed in ("payload", *(() if id is None else (id,)), *(("queue",) if queues else ())):
            if needed not in names:
                raise ConfigurationError(
                    f"the DataFrame has no column {needed!r} (it has {', '.join(names)}); add it"
                )
        payload = schema["payload"].dataType
        self._id = id
        self._prefix = prefix
        self._bury = bury
        self._json = isinstance(payload, StringType)
        self._convert = from_json if self._json else _to_bson(payload, "payload")
        if id is not None and not isinstance(schema[id].dataType, StringType):
            raise ConfigurationError(
                f"the ids in column {id!r} are of type {schema[id].dataType.simpleString()}; "
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
            raise ConfigurationError("headers: expected a column of type map<string, string>")
        self._labels = _to_bson(labels, "headers")

    def rows(
        self, batch: pa.RecordBatch | pa.Table, capabilities: Collection[str] = ()
    ) -> Iterator[NewMessage]:
        """Return the messages of a batch of rows.

        Args:
            batch: The rows, one for each message.
            capabilities: What the target queues support. Without "priority" and "group", the
                columns ``priority`` and ``group`` are ignored.

        Raises:
            InvalidMessage: A payload is not valid JSON, or cannot be stored, and ``bury`` is false.
            ConfigurationError: An id is null or a ``queue`` is invalid; or ``bury`` is false, and a
                ``when``, ``delay``, ``priority`` or ``group`` is invalid.
        """
        none: list[Any] = [None] * batch.num_rows
        ids: Sequence[str | None] = none if self._id is None else batch.column(self._id).to_pylist()
        rows = _Rows(ids, bury=self._bury)
        payloads = self._payloads(batch.column("payload"), rows)
        headers = batch.column("headers").to_pylist() if self._headers else none
        keys = batch.column("key").to_pylist() if self._key else none
        if self._id is not None and None in ids:
            raise ConfigurationError(f"the column {self._id!r} has a null; give every row an id")
        if self._prefix:
            rows.ids = [f"{self._prefix}{each}" for each in ids]
        delays, instants, queues, levels, groups = [none] * 5
        if self._delay:
            delays = rows.checked(batch.column("delay").to_pylist(), _delay)
        if self._when:
            instants = rows.checked(_microseconds(batch.column("when")), _when)
        if self._queues:
            queues = _Rows(rows.ids).checked(batch.column("queue").to_pylist(), self._queue)
        if "priority" in capabilities and _has(self._schema, "priority", IntegralType, "int"):
            levels = rows.checked(batch.column("priority").to_pylist(), _priority)
        if "group" in capabilities and _has(self._schema, "group", StringType, "string"):
            groups = rows.checked(batch.column("group").to_pylist(), _group)
        for number, both in enumerate(zip(delays, instants, strict=True)):
            if None not in both:
                text = f"when, delay: {rows.name(number)} has both"
                rows.refuse(number, f"{text}; drop the when column, or make one of the two null")
        if rows.faults is None:  # the writer of the messages checks these
            headers = [self._named(each) for each in headers]
        else:
            headers = rows.checked(headers, lambda each: arguments.headers(self._named(each)))
            keys = rows.checked(keys, _key)
        reasons = list(map(rows.faults.get, range(len(none)))) if rows.faults else none
        rest = headers, keys, delays, instants, queues, levels, groups, reasons
        yield from itertools.starmap(NewMessage, zip(rows.ids, payloads, *rest, strict=True))

    def _named(self, headers: Any) -> dict[str, Any] | None:
        return applied(self._labels, headers) or None

    def _queue(self, value: str | None) -> str:
        if value not in self._queues:
            raise ConfigurationError(
                f"queue: {'null' if value is None else repr(value[:120])} is not one of "
                f"{', '.join(sorted(self._queues))}; add it to the queues option or to the to= "
                "list of the stage, or leave out the row"
            )
        return value

    def _payloads(self, column: pa.Array | pa.ChunkedArray, rows: _Rows) -> list[Any]:
        """Return the payloads of a column. If ``rows`` records errors, a bad one becomes a text."""

        def values(some: pa.Array | pa.ChunkedArray) -> list[Any]:
            return [applied(self._convert, value) for value in some.to_pylist()]

        try:
            found = values(column)
        except MISFITS:
            found = []
            for number in range(len(column)):  # find the rows
                try:
                    found += values(column.slice(number, 1))
                except MISFITS as error:
                    text = f"payload: in {rows.name(number)}: {reason_of(error)}"
                    rows.refuse(number, text, InvalidMessage)
                    found.append(None)
            if rows.faults is None:
                raise  # not covered: an error of all rows is an error of one of them
        if rows.faults is None:
            return found
        for number, value in enumerate(found):
            try:
                _check_payload(value)
            except InvalidMessage as error:
                rows.refuse(number, f"{error}; in {rows.name(number)}")
            if number in rows.faults:
                found[number] = _text_of(column.slice(number, 1), self._schema["payload"].dataType)
        return found
