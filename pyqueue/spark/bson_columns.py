"""Build Arrow columns from encoded documents, without a Python object for each value.

The documents of a queue usually have the same fields, so numpy finds the next field of all
documents at once. A field costs a few array operations, whatever the number of documents. An
unusual document raises ``Unfit``; the caller then decodes the documents one by one. A value is
converted only if decoding the document would give the same result.
"""

from __future__ import annotations

import datetime as dt
from binascii import hexlify
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

#: The bytes of padding after the last document. They let names be compared without a bounds check.
_MARGIN: Final = 256
#: How many times a document may wait for documents with other fields, on average. Beyond this
#: the documents differ so much that decoding them is faster.
_MAX_WAITS: Final = 30
#: The longest array that is read.
_MAX_ITEMS: Final = 200

_DOUBLE, _STRING, _DOCUMENT, _ARRAY, _BINARY = 1, 2, 3, 4, 5
_OBJECT_ID, _BOOL, _DATE, _NULL, _INT, _LONG = 7, 8, 9, 10, 16, 18
_MISSING: Final = 0
#: The sizes of values, by type. 19 is a Decimal128, 17 a timestamp of the server.
_FIXED: Final[Mapping[int, int]] = {
    _DOUBLE: 8, _OBJECT_ID: 12, _BOOL: 1, _DATE: 8, _NULL: 0, _INT: 4, 17: 8, _LONG: 8, 19: 16,
}  # fmt: skip
#: The bytes of a value that its stored length does not count, by type.
_UNCOUNTED: Final[Mapping[int, int]] = {_STRING: 4, _DOCUMENT: 0, _ARRAY: 0, _BINARY: 5}

_EPOCH: Final = dt.datetime(1970, 1, 1)
_FIRST_MS: Final = (dt.datetime.min - _EPOCH) // dt.timedelta(milliseconds=1)
_LAST_MS: Final = (dt.datetime.max - _EPOCH) // dt.timedelta(milliseconds=1)
#: Larger integers have no exact double.
_EXACT: Final = 1 << 53

Array = np.ndarray[Any, np.dtype[Any]]


class Unfit(ValueError):
    """A value is stored in an unusual way, so the caller must decode the documents."""


class Field(NamedTuple):
    """One field of all documents: the BSON type (0 if missing) and the offset of each value."""

    types: Array
    places: Array

    def has(self, *types: int) -> Array:
        """Return which documents have a value of one of these types."""
        found: Array = np.isin(self.types, types)
        return found

    def only(self, *types: int) -> Array:
        """Return which documents have a value of one of these types.

        In all other documents the value must be null or missing.

        Raises:
            Unfit: A value has another type and is not null.
        """
        present = self.has(*types)
        if not (present | self.has(_NULL, _MISSING)).all():
            raise Unfit
        return present

    def without_null(self) -> Field:
        """Return this field if no value is null.

        Raises:
            Unfit: A value is null.
        """
        if self.has(_NULL).any():
            raise Unfit
        return self

    def everywhere(self) -> Field:
        """Return this field if every document has a value that is not null.

        Raises:
            Unfit: In a document, the value is null or missing.
        """
        if self.has(_NULL, _MISSING).any():
            raise Unfit
        return self


class Documents:
    """Encoded documents.

    Args:
        documents: The documents, whole and valid.
    """

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._bytes = b"".join([*documents, bytes(_MARGIN)])
        self._data = np.frombuffer(self._bytes, np.uint8)
        if len(self._bytes) >= 1 << 31:  # an offset of Arrow has 32 bits
            raise Unfit
        if b"$ref\0" in self._bytes:  # a DBRef, which is decoded as another type
            raise Unfit
        sizes = np.fromiter(map(len, documents), np.int64, len(documents))
        self._starts = np.cumsum(sizes) - sizes

    def fields(self, names: Iterable[str]) -> dict[str, Field]:
        """Find the types and the offsets of the values of these fields.

        Raises:
            Unfit: The documents differ too much, or a document has a field twice.
        """
        return self._fields(np.arange(len(self._starts)), self._starts, len(self._starts), names)

    def inner(self, field: Field, names: Iterable[str]) -> dict[str, Field]:
        """Find the types and the offsets of these fields in the documents embedded in ``field``."""
        rows = np.flatnonzero(field.types == _DOCUMENT)
        return self._fields(rows, field.places[rows], len(field.types), names)

    def _fields(
        self, rows: Array, starts: Array, count: int, names: Iterable[str]
    ) -> dict[str, Field]:
        data, at = self._data, starts + 4
        found = {
            name.encode(): Field(np.zeros(count, np.uint8), np.zeros(count, np.int64))
            for name in names
        }
        left = _MAX_WAITS * count
        while left >= 0:
            live = data[at] != 0
            if not live.all():
                rows, at = rows[live], at[live]
            if not len(rows):
                return {name.decode(): field for name, field in found.items()}
            first = int(at[0])
            end = self._bytes.index(0, first + 1) + 1
            header = data[first:end]
            if len(header) > _MARGIN:
                raise Unfit
            alike = (data[at[:, None] + np.arange(len(header))] == header).all(axis=1)
            mine, places = (rows, at) if alike.all() else (rows[alike], at[alike])
            places = places + len(header)
            kind = int(header[0])
            field = found.get(self._bytes[first + 1 : end - 1])
            if field is not None:
                if field.types[mine].any():
                    raise Unfit
                field.types[mine] = kind
                field.places[mine] = places
            at = at.copy()
            at[alike] = places + self._sizes(kind, places)
            left -= len(rows) - len(mine)
        raise Unfit

    def _sizes(self, kind: int, places: Array) -> Array | int:
        if kind in _FIXED:
            return _FIXED[kind]
        if kind not in _UNCOUNTED:
            raise Unfit
        return self.numbers(places, "<i4") + _UNCOUNTED[kind]

    def items(self, field: Field) -> tuple[Array, Field]:
        """Return the length of each array in a field, and the items of all arrays in order."""
        counts = np.zeros(len(field.types), np.int64)
        rows = np.flatnonzero(field.types == _ARRAY)
        at = field.places[rows] + 4
        types: list[Array] = []
        places: list[Array] = []
        for number in range(_MAX_ITEMS + 1):
            live = self._data[at] != 0
            rows, at = rows[live], at[live]
            if not len(rows):
                break
            name = np.frombuffer(b"%d\0" % number, np.uint8)
            if not (self._data[at[:, None] + 1 + np.arange(len(name))] == name).all():
                raise Unfit
            kinds = self._data[at]
            at = at + 1 + len(name)
            types.append(kinds)
            places.append(at)
            counts[rows] += 1
            at = at.copy()
            for kind in np.unique(kinds).tolist():
                mine = kinds == kind
                at[mine] += self._sizes(kind, at[mine])
        else:
            raise Unfit
        if not types:
            return counts, Field(np.zeros(0, np.uint8), np.zeros(0, np.int64))
        values = Field(np.concatenate(types), np.concatenate(places))
        order = np.argsort(values.places)
        return counts, Field(values.types[order], values.places[order])

    def numbers(self, places: Array, form: str) -> Array:
        """Return the numbers stored at these offsets. ``form`` is their numpy format."""
        width = np.dtype(form).itemsize
        numbers: Array = self._data[places[:, None] + np.arange(width)].view(form).ravel()
        return numbers.astype(np.int64) if form == "<i4" else numbers

    def integers(self, field: Field) -> tuple[Array, Array]:
        """Return the integers of a field (0 for a missing value), and a mask of missing values."""
        present = field.only(_INT, _LONG)
        values = np.zeros(len(present), np.int64)
        for type, form in ((_INT, "<i4"), (_LONG, "<i8")):
            mine = field.types == type
            if mine.any():
                values[mine] = self.numbers(field.places[mine], form)
        return values, ~present

    def slices(self, field: Field, type: int, arrow: pa.DataType) -> pa.Array:
        """Return the strings or the documents of a field, as ``type`` says, in an Arrow array."""
        present = field.only(type)
        places = field.places[present]
        sizes = self.numbers(places, "<i4")
        if type == _STRING:
            places, sizes = places + 4, sizes - 1
        # The bounds divide the bytes into wanted pieces and gaps, which alternate.
        bounds = np.empty(2 * len(places) + 1, np.int32)
        bounds[0:-1:2], bounds[1::2] = places, places + sizes
        bounds[-1] = bounds[-2] if len(places) else 0
        if (np.diff(bounds) < 0).any():
            raise Unfit
        pieces = pa.Array.from_buffers(
            arrow, 2 * len(places), [None, pa.py_buffer(bounds), pa.py_buffer(self._bytes)]
        )
        chosen = np.zeros(len(present), np.int64)
        chosen[present] = 2 * np.arange(len(places))
        texts = pieces.take(pa.array(chosen, mask=~present))
        texts.validate(full=True)  # the server accepts texts that are not UTF-8
        return texts

    def strings(self, field: Field) -> pa.Array:
        """Return the values of a field that contains only strings."""
        return self.slices(field, _STRING, pa.string())

    def texts(self, field: Field) -> pa.Array:
        """Return the strings and ObjectIds of a field as strings. ObjectIds become hex digits."""
        ids = field.types == _OBJECT_ID
        if not ids.any():
            return self.strings(field)
        others = Field(np.where(ids, _MISSING, field.types).astype(np.uint8), field.places)
        digits = hexlify(self._data[field.places[ids][:, None] + np.arange(12)].tobytes())
        bounds = np.arange(0, len(digits) + 1, 24, dtype=np.int32)
        hexes = pa.StringArray.from_buffers(
            len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(digits)
        )
        if ids.all():
            return hexes
        chosen = np.zeros(len(ids), np.int64)
        chosen[ids] = np.arange(len(bounds) - 1)
        return pc.coalesce(self.strings(others), hexes.take(pa.array(chosen, mask=~ids)))

    def instants(self, field: Field, type: pa.DataType) -> pa.Array:
        """Return the dates of a field as Arrow values of this timestamp type.

        Raises:
            Unfit: An instant is not between the years 1 and 9999.
        """
        present = field.only(_DATE)
        values = np.zeros(len(present), np.int64)
        values[present] = self.numbers(field.places[present], "<i8")
        if ((values < _FIRST_MS) | (values > _LAST_MS)).any():
            raise Unfit
        return pa.array(values * 1000, mask=~present).cast(type)

    def parts(self, field: Field) -> tuple[list[int], bytes]:
        """Return the rows whose value is a document, and the joined bytes of these documents."""
        present = field.only(_DOCUMENT)
        found = self.slices(field, _DOCUMENT, pa.binary()).drop_null()
        return np.flatnonzero(present).tolist(), b"".join(found.to_pylist())


# ---- values of a Spark type


def _long(documents: Documents, field: Field, _: DataType, type: pa.DataType) -> pa.Array:
    values, missing = documents.integers(field)
    if type == pa.int32():
        if (values != values.astype(np.int32)).any():
            raise Unfit
        values = values.astype(np.int32)
    return pa.array(values, mask=missing)


def _double(documents: Documents, field: Field, _: DataType, type: pa.DataType) -> pa.Array:
    doubles = field.types == _DOUBLE
    rest = Field(np.where(doubles, _MISSING, field.types).astype(np.uint8), field.places)
    whole, _missing = documents.integers(rest)
    if (abs(whole) > _EXACT).any():
        raise Unfit
    values = whole.astype(np.float64)
    values[doubles] = documents.numbers(field.places[doubles], "<f8")
    return pa.array(values, mask=field.has(_NULL, _MISSING))


def _bool(documents: Documents, field: Field, _: DataType, type: pa.DataType) -> pa.Array:
    present = field.only(_BOOL)
    values = np.zeros(len(present), np.bool_)
    values[present] = documents.numbers(field.places[present], "u1") != 0
    return pa.array(values, mask=~present)


def _text(documents: Documents, field: Field, _: DataType, type: pa.DataType) -> pa.Array:
    return documents.texts(field)


def _instant(documents: Documents, field: Field, _: DataType, type: pa.DataType) -> pa.Array:
    return documents.instants(field, type)


def _struct(documents: Documents, field: Field, spark: DataType, type: pa.DataType) -> pa.Array:
    assert isinstance(spark, StructType)
    present = field.only(_DOCUMENT)
    inner = documents.inner(field, spark.names)
    values = [
        column(documents, inner[each.name], each.dataType, type.field(each.name).type)
        for each in spark.fields
    ]
    return pa.StructArray.from_arrays(values, fields=list(type), mask=pa.array(~present))


def _list(documents: Documents, field: Field, spark: DataType, type: pa.DataType) -> pa.Array:
    assert isinstance(spark, ArrayType)
    present = field.only(_ARRAY)
    counts, items = documents.items(field)
    values = column(documents, items, spark.elementType, type.value_type)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    offsets = pa.array(bounds, mask=np.append(~present, False))
    return pa.ListArray.from_arrays(offsets, values, type=type)


Convert = Callable[[Documents, Field, DataType, pa.DataType], pa.Array]
_CONVERTS: Final[Mapping[type[DataType], Convert]] = {
    LongType: _long,
    IntegerType: _long,
    DoubleType: _double,
    BooleanType: _bool,
    StringType: _text,
    TimestampType: _instant,
    StructType: _struct,
    ArrayType: _list,
}


def fits(spark: DataType) -> bool:
    """Return whether ``column`` supports this Spark type."""
    if isinstance(spark, StructType):
        named = len(set(spark.names)) == len(spark.names) > 0
        return named and all(fits(each.dataType) for each in spark.fields)
    if isinstance(spark, ArrayType):
        return fits(spark.elementType)
    return type(spark) in _CONVERTS


def column(documents: Documents, field: Field, spark: DataType, arrow: pa.DataType) -> pa.Array:
    """Return the values of a field as an Arrow column.

    Args:
        documents: The documents that have the field.
        field: The field to convert.
        spark: The type of the column, one that ``fits`` accepts.
        arrow: The same type in Arrow.

    Raises:
        Unfit: A value does not fit the type, or is stored in an unusual way.
    """
    return _CONVERTS[type(spark)](documents, field, spark, arrow)
