"""Payloads of every type go to Spark and come back unchanged, or fail with a clear error.

No test here needs a session. Some also run in a time zone other than UTC, which would reveal a
naive datetime.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import bson
import pyarrow as pa
import pytest
from bson import Binary, Int64, ObjectId, Regex
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from pydantic import BaseModel, Field
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    YearMonthIntervalType,
)

from pyqueue import ConfigurationError, InvalidMessage
from pyqueue.payloads import OPTIONS, Codec, encode
from pyqueue.spark import struct_of
from pyqueue.spark.columns import columns
from pyqueue.spark.frames import batch
from pyqueue.spark.models import payload_type
from pyqueue.spark.row_reader import Reader

NOON = datetime(2013, 7, 1, 12, 0, 0, 123000, tzinfo=UTC)
ID = ObjectId("51d16f000000000000000001")


@pytest.fixture(params=["UTC", "America/New_York"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the time zone of the machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


zoned = pytest.mark.usefixtures("zone")


def stored(payload: Any, id: Any = ID, **fields: Any) -> dict[str, Any]:
    """Return a message as the server returns it."""
    usual = {"_id": id, "q": "a", "when": NOON, "due": NOON, "pushed": NOON, "tries": 0}
    document = usual | {"payload": payload} | fields
    return bson.decode(bson.encode(document, codec_options=OPTIONS), OPTIONS)


def through(payload: Any, type: DataType | None) -> Any:
    """Return a payload after it went to Spark and back into the database."""
    reader = Reader(columns(type), "id")
    (fresh,) = reader.rows(batch([stored(payload)], type))
    assert fresh.id == str(ID)
    return bson.decode(encode({"payload": fresh.payload}).raw, OPTIONS)["payload"]


def shown(payload: Any, type: DataType | None) -> Any:
    """Return a payload as a query sees it."""
    return batch([stored(payload)], type).column("payload").to_pylist()[0]


# ---- JSON

VALUES: dict[str, Any] = {
    "dict": {"a": {"b": {"c": 1}}, "": 0, "é": "ü", "with.dot": 1},
    "empty": {},
    "list": [1, [2, [], [[3]]], {"a": [None]}],
    "none": None,
    "text": 'a "quoted" \\ text\n\u2028 ☃ \U0001f600',
    "json in a text": '{"$oid": "51d16f000000000000000001"}',
    "true": True,
    "false": False,
    "zero": 0,
    "int": -5,
    "long": 2**62,
    "int64": Int64(5),
    "float": 0.1,
    "whole float": 1.0,
    "large float": 1e300,
    "infinity": math.inf,
    "infinities": [math.inf, -math.inf, {"a": math.inf}],
    "ObjectId": ID,
    "bytes": b"\x00\xff",
    "binary": Binary(b"\x00", 128),
    "decimal": Decimal128("1.10"),
    "decimals": [Decimal128(each) for each in ("NaN", "Infinity", "-0", "1E+6144")],
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
    "datetime": NOON,
    "the last day": datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
    "the first day": datetime(1, 1, 1, tzinfo=UTC),
    "before 1970": datetime(1969, 12, 31, 23, 59, 59, 1000, tzinfo=UTC),
    "in another zone": NOON.astimezone(timezone(timedelta(hours=-5))),
    "beyond": DatetimeMS(10**15),
    "regex": Regex("^a", "i"),
    "null in a text": "a\0b",
}

forms = pytest.mark.parametrize("type", [None, VariantType()], ids=["json", "variant"])


@zoned
@forms
def test_json_payload_comes_back_unchanged(type: DataType | None) -> None:
    for name, value in VALUES.items():
        for payload in (value, {"a": value}, [value, value]):
            expected = stored(payload)["payload"]
            back = through(payload, type)
            assert back == expected, name
            assert types_of(back) == types_of(expected), name


def types_of(value: Any) -> Any:
    """Return the types of a value and of its parts. All integers count as one type."""
    if isinstance(value, dict):
        return {name: types_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [types_of(each) for each in value]
    return int if isinstance(value, Int64) else type(value)


@forms
def test_json_payload_keeps_nan(type: DataType | None) -> None:
    back = through({"a": math.nan, "b": [math.nan]}, type)
    assert math.isnan(back["a"])
    assert math.isnan(back["b"][0])


def test_json_payload_is_relaxed_extended_json() -> None:
    text = '{"a": 1, "b": [true, null, "é"], "c": 1.5}'
    assert shown({"a": 1, "b": [True, None, "é"], "c": 1.5}, None) == text
    assert shown({"at": NOON}, None) == '{"at": {"$date": "2013-07-01T12:00:00.123Z"}}'
    assert shown({"id": ID}, None) == '{"id": {"$oid": "51d16f000000000000000001"}}'


@pytest.mark.parametrize(
    "text", ["", "abc", "{", "{'a': 1}", "nul", '{"$date": "yesterday"}', '{"$oid": 5}']
)
def test_invalid_json_names_its_row(text: str) -> None:
    rows = pa.RecordBatch.from_pydict({"id": ["first", "second"], "payload": ["1", text]})
    schema = StructType([StructField("id", StringType()), StructField("payload", StringType())])
    with pytest.raises(InvalidMessage, match=r"^payload: in the row with id second: invalid JSON"):
        list(Reader(schema, "id").rows(rows))


# ---- structs


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Inner(BaseModel):
    at: datetime | None = None
    tags: list[str] = []


class Everything(BaseModel):
    text: str
    number: int
    part: float
    flag: bool
    raw: bytes
    price: Decimal
    at: datetime
    day: date
    uuid: UUID
    kind: Literal["a", "b"]
    color: Color
    level: Level
    maybe: int | None
    inner: Inner
    inners: list[Inner]
    counts: dict[str, int]
    nested: list[list[int]]
    unique: set[str]
    pair: tuple[int, ...]
    short: Annotated[str, Field(max_length=5)]
    shorts: list[Annotated[str, Field(max_length=5)]]


MODEL: dict[str, Any] = {
    "text": "é",
    "number": 2**40,
    "part": 0.5,
    "flag": True,
    "raw": b"\x00\xff",
    "price": Decimal("12.50"),
    "at": NOON,
    "day": date(2013, 7, 1),
    "uuid": UUID(int=5),
    "kind": "a",
    "color": Color.RED,
    "level": Level.HIGH,
    "maybe": None,
    "inner": Inner(at=datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC), tags=["a"]),
    "inners": [Inner(), Inner(tags=["b", "c"])],
    "counts": {"a": 1, "b.c": 2},
    "nested": [[1], [], [2, 3]],
    "unique": {"one"},
    "pair": (1, 2),
    "short": "abc",
    "shorts": ["d", "e"],
}


@zoned
def test_struct_payload_of_every_type_comes_back() -> None:
    type = struct_of(Everything)
    codec: Codec[Any] = Codec(Everything)
    payload = codec.dump(Everything(**MODEL))
    back = codec.load(through(payload, type))
    assert back == Everything(**MODEL)
    assert back.at == NOON
    row = shown(payload, type)
    assert (row["day"], row["uuid"]) == ("2013-07-01", str(UUID(int=5)))
    assert row["at"].astimezone(UTC) == NOON


def test_struct_of_a_model() -> None:
    class Small(BaseModel):
        a: int
        b: list[str] | None
        c: dict[str, float]

    text = "struct<a:bigint,b:array<string>,c:map<string,double>>"
    assert struct_of(Small).simpleString() == text


class OfId(BaseModel):
    model_config = {"arbitrary_types_allowed": True}

    it: ObjectId


def test_struct_shows_an_object_id_in_hex() -> None:
    assert shown({"it": ID}, struct_of(OfId)) == {"it": str(ID)}


class OfAny(BaseModel):
    it: Any


class OfUnion(BaseModel):
    it: int | str


class OfLiterals(BaseModel):
    it: Literal[1, "a"]


class OfTuple(BaseModel):
    it: tuple[int, str]


class OfIntKeys(BaseModel):
    it: dict[int, str]


class OfDuration(BaseModel):
    it: timedelta


@pytest.mark.parametrize("model", [OfAny, OfUnion, OfLiterals, OfTuple, OfIntKeys, OfDuration])
def test_struct_of_an_unsupported_field_is_refused(model: type[BaseModel]) -> None:
    with pytest.raises(ConfigurationError, match=rf"^model: .*{model.__name__}\.it"):
        struct_of(model)


LONG, INT, DOUBLE, TEXT = LongType(), IntegerType(), DoubleType(), StringType()
INSTANT = TimestampType()


def array(type: DataType) -> DataType:
    return ArrayType(type)


def mapping(type: DataType) -> DataType:
    return MapType(StringType(), type)


def struct(**fields: DataType) -> DataType:
    return StructType([StructField(name, type) for name, type in fields.items()])


ROUND: list[tuple[DataType, Any]] = [
    (LONG, 2**62),
    (LONG, 5.0),
    (INT, -5),
    (DOUBLE, 0.1),
    (DOUBLE, 5),
    (FloatType(), 0.5),
    (FloatType(), math.inf),
    (FloatType(), -3.4028234663852886e38),
    (ByteType(), -128),
    (ShortType(), 5.0),
    (BooleanType(), True),
    (TEXT, "é"),
    (BinaryType(), b"\x00"),
    (INSTANT, NOON),
    (INSTANT, datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)),
    (INSTANT, datetime(1, 1, 1, tzinfo=UTC)),
    (DecimalType(10, 2), Decimal128("12.50")),
    (DecimalType(38, 18), Decimal128("0.000000000000000001")),
    (array(LONG), [1, None, 3]),
    (array(array(TEXT)), [["a"], [], None]),
    (mapping(array(DOUBLE)), {"a": [0.5], "": None}),
    (mapping(INSTANT), {"a": NOON}),
    (struct(a=LONG, b=struct(c=array(INSTANT))), {"a": None, "b": {"c": [NOON, None]}}),
    (array(struct(d=DecimalType(4, 1))), [{"d": Decimal128("0.5")}, None]),
    (struct(v=VariantType()), {"v": {"a": [1, "b", ID]}}),
]


@zoned
def test_payload_type_comes_back_unchanged() -> None:
    for type, value in ROUND:
        name = f"{type.simpleString()} {value}"
        # a string column is JSON when it is written
        back = shown(value, type) if type == TEXT else through(value, type)
        assert back == stored(value)["payload"], name
        assert shown(None, type) is None, name


def test_struct_payload_fills_and_drops_fields() -> None:
    assert shown({"a": 1, "more": 2}, struct(a=LONG, b=TEXT)) == {"a": 1, "b": None}


@zoned
def test_timestamp_ntz_is_utc() -> None:
    assert shown(NOON, TimestampNTZType()) == NOON.replace(tzinfo=None)


#: Values that do not fit, by type.
MISFITS: list[tuple[DataType, list[Any]]] = [
    (LONG, [0.5, math.inf, math.nan, 1e300, "5", True, NOON, Decimal128("5")]),
    (INT, [2**40]),
    (DOUBLE, ["0.5", True, 2**62 + 1]),
    (BooleanType(), [1, "true"]),
    (TEXT, [5, True, {"a": 1}, [1], b"\xff", NOON, Decimal128("1")]),
    (BinaryType(), ["text"]),
    (INSTANT, ["2013-07-01", 5, DatetimeMS(10**15)]),
    (DecimalType(4, 1), [Decimal128("0.55"), Decimal128("12345"), Decimal128("NaN"), 0.5]),
    (DateType(), ["2013-07-01", 5]),
    (ByteType(), [1.5, 128, True]),
    (ShortType(), [1.5, -(2**15) - 1]),
    (FloatType(), [1e300, "0.5"]),
    (array(INT), [[1, 2.5]]),
    (array(LONG), [5, "12", {"a": 1}]),
    (mapping(LONG), [{"a": 0.1}, [["a", 1]]]),
    (struct(a=LONG), [{"a": 1.5}, 5, [1], [["a", 1]]]),
    (struct(a=struct(b=array(LONG))), [{"a": {"b": [1, 0.5]}}]),
]


@pytest.mark.parametrize(
    ("type", "value"),
    [
        pytest.param(type, value, id=f"{type.simpleString()}-{value}")
        for type, values in MISFITS
        for value in values
    ],
)
def test_misfit_names_its_message(type: DataType, value: Any) -> None:
    documents = [stored(None, id="good"), stored(value, id="bad"), stored(None, id="other")]
    with pytest.raises(InvalidMessage, match=r"^payload: message bad does not match "):
        batch(documents, type)


def test_array_overflow_blames_no_single_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in Arrow hold up to 2 GB. The test lowers this limit."""
    array = pa.array

    def small(values: Sequence[Any], type: pa.DataType) -> pa.Array:
        if pa.types.is_list(type) and len(values) > 1:
            raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")
        return array(values, type)

    monkeypatch.setattr(pa, "array", small)
    with pytest.raises(pa.ArrowCapacityError, match="2147483646"):
        batch([stored(["a"]), stored(["b"])], ArrayType(TEXT))


NO_TYPES = [
    DateType(),
    TimestampNTZType(),
    struct(a=DateType()),
    array(TimestampNTZType()),
    mapping(DateType()),
    MapType(IntegerType(), StringType()),
    DayTimeIntervalType(),
    struct(a=YearMonthIntervalType()),
    array(CalendarIntervalType()),
]


@pytest.mark.parametrize("type", NO_TYPES, ids=[type.simpleString() for type in NO_TYPES])
def test_reader_refuses_types_that_cannot_be_stored(type: DataType) -> None:
    with pytest.raises(ConfigurationError, match=r"^payload: .* cast"):
        Reader(columns(type))


def arrow(type: DataType, *values: Any) -> tuple[StructType, pa.RecordBatch]:
    """Return rows that a query made."""
    schema = StructType([StructField("id", StringType()), StructField("payload", type)])
    arrow = to_arrow_schema(schema, timezone="UTC")
    ids = pa.array([f"row{number}" for number in range(len(values))])
    payloads = pa.array(values, arrow.field("payload").type)
    return schema, pa.RecordBatch.from_arrays([ids, payloads], schema=arrow)


UNSTORABLE: list[tuple[DataType, Any]] = [
    # It has 38 digits, and Decimal128 has 34.
    (DecimalType(38, 18), Decimal("12345678901234567890.123456789012345678")),
    (INSTANT, 253402300800_000_000),  # in the year 10000
]


@pytest.mark.parametrize(("type", "value"), UNSTORABLE, ids=["decimal", "instant"])
def test_unstorable_value_names_its_row(type: DataType, value: Any) -> None:
    schema, rows = arrow(type, None, value)
    with pytest.raises(InvalidMessage, match=r"^payload: in the row with id row1: "):
        list(Reader(schema, "id").rows(rows))


@zoned
def test_microseconds_are_cut_to_milliseconds() -> None:
    schema, rows = arrow(INSTANT, NOON + timedelta(microseconds=456))
    (fresh,) = Reader(schema, "id").rows(rows)
    assert bson.decode(encode({"at": fresh.payload}).raw, OPTIONS)["at"] == NOON


# ---- the other columns


def test_batch_has_the_documented_columns() -> None:
    headers, later = {"a": "x", "n": 5, "t": True}, NOON + timedelta(days=1)
    document = stored(1, id="mine", headers=headers, key="k", tries=3, when=later)
    row: dict[str, Any] = batch([document], None).to_pylist()[0]
    assert row.pop("headers") == [("a", "x"), ("n", "5"), ("t", "true")]
    # This is when it became eligible, not the end of a lease.
    assert row.pop("when").astimezone(UTC) == NOON
    assert row.pop("pushed").astimezone(UTC) == NOON
    expected = {"id": "mine", "queue": "a", "payload": "1", "key": "k", "tries": 3}
    assert row == expected | {"priority": None, "group": None}


ODD: list[tuple[str, Any, Any]] = [
    ("key", 5, None),
    ("headers", "text", []),
    ("pushed", "yesterday", None),
    ("tries", "two", 0),
]


@pytest.mark.parametrize(("name", "value", "expected"), ODD, ids=[name for name, *_ in ODD])
def test_column_with_an_invalid_value_is_empty(name: str, value: Any, expected: Any) -> None:
    documents = [stored(1, id="good", key="k"), stored(2, id="odd", **{name: value})]
    rows = batch(documents, None).to_pylist()
    assert [(row["id"], row["payload"]) for row in rows] == [("good", "1"), ("odd", "2")]
    assert rows[0]["key"] == "k"
    assert rows[1][name] == expected


def read(
    rows: Sequence[dict[str, Any]], types: dict[str, DataType], id: str | None = None
) -> list[Any]:
    schema = StructType([StructField(name, type) for name, type in types.items()])
    table = pa.Table.from_pylist(list(rows), to_arrow_schema(schema, timezone="UTC"))
    return list(Reader(schema, id).rows(table))


def test_reader_takes_headers_and_keys() -> None:
    row = {"payload": "1", "headers": [("a", 5)], "key": "k"}
    first, second = read(
        [row, {"payload": None}], {"payload": TEXT, "headers": mapping(INT), "key": TEXT}
    )
    assert (first.id, first.payload, first.headers, first.key) == (None, 1, {"a": 5}, "k")
    assert (second.id, second.payload, second.headers, second.key) == (None, None, None, None)


BAD_COLUMNS: list[tuple[dict[str, DataType], str]] = [
    ({"id": TEXT, "value": TEXT}, r"no column 'payload'"),
    ({"payload": TEXT}, r"no column 'id'"),
    ({"id": LONG, "payload": TEXT}, r"'id'.* cast"),
    ({"id": TEXT, "payload": TEXT, "headers": TEXT}, r"^headers: "),
    ({"id": TEXT, "payload": TEXT, "headers": MapType(INT, TEXT)}, r"headers.* cast"),
    ({"id": TEXT, "payload": TEXT, "key": LONG}, r"^key: .*cast"),
]


@pytest.mark.parametrize(("types", "named"), BAD_COLUMNS, ids=[named for _, named in BAD_COLUMNS])
def test_reader_refuses_missing_or_mistyped_columns(types: dict[str, DataType], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read([], types, "id")


def test_reader_refuses_a_null_id() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "payload": "1"}, {"name": None, "payload": "2"}]
    with pytest.raises(ConfigurationError, match="'name' has a null"):
        read(rows, {"name": TEXT, "payload": TEXT}, "name")


@pytest.mark.parametrize("given", ["json", 5, int, dict, dict[str, int]])
def test_payload_type_refuses_unusable_models(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^model: "):
        payload_type(given)
