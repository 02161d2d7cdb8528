"""Messages that are read by columns give the same rows as messages that are decoded."""

from __future__ import annotations

import datetime as dt
import random
import struct
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any
from uuid import UUID

import bson
import pytest
from bson import Binary, Code, Int64, MaxKey, ObjectId, Regex, Timestamp
from bson.decimal128 import Decimal128
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from pyqueue.documents import STORED_GROUP
from pyqueue.payloads import OPTIONS
from pyqueue.spark.frames import batch
from pyqueue.spark.rows import decoded, encoded_batch
from tests.support.samples import sampled

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 678000, dt.UTC)
ID = ObjectId("0123456789abcdef01234567")

#: Values that some type takes, and that another one refuses, cuts or rounds.
VALUES: list[Any] = [
    None, True, False, 0, 1, -7, 2**31, -(2**31) - 1, 2**53, 2**53 + 1, 2**63 - 1, Int64(5),
    2.0, 2.5, -0.0, 1e300, float("nan"), float("inf"), "", "x", "\0 \u00e4\u20ac\U0001f600", "12",
    b"", b"bytes", Binary(b"other", 128), UUID(int=7), ID, NOW, dt.datetime(1, 1, 1, tzinfo=dt.UTC),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999000, dt.UTC), bson.DatetimeMS(2**60),
    bson.DatetimeMS(-(2**60)), Decimal128("1.10"), Code("f()"), Code("f()", {}), Regex("a"),
    Timestamp(1, 2), MaxKey(), {}, [], [1, 2], [1, None, "x"], [[1], []], [{"n": 1}, {"m": "y"}],
    {"n": 1}, {"n": 2.5}, {"n": None}, {"n": {"n": 1}}, {"m": "y", "n": 3, "other": ["z"]},
    {"$ref": "queue", "$id": 1}, {"n": [1, 2]}, {"": 1}, {"\u00e4": 1, "n": 1},
]  # fmt: skip

N = StructType([StructField("n", LongType()), StructField("m", StringType())])
#: The types of a payload. None is JSON.
TYPES: list[DataType | None] = [
    None, LongType(), IntegerType(), DoubleType(), BooleanType(), StringType(), BinaryType(),
    TimestampType(), DecimalType(38, 18), VariantType(), MapType(StringType(), LongType()), N,
    ArrayType(LongType()), ArrayType(N), ArrayType(ArrayType(LongType())),
    StructType([StructField("n", N)]), StructType([StructField("n", ArrayType(LongType()))]),
    StructType([]), StructType([StructField("n", DecimalType(38, 18))]),
]  # fmt: skip


def message(payload: Any, **fields: Any) -> bytes:
    """Return a stored message."""
    usual = {"_id": ObjectId(), "q": "raw", "when": NOW, "due": NOW, "tries": 0, "pushed": NOW}
    named = usual | {"payload": payload} | fields
    return encoded({name: value for name, value in named.items() if value is not ...})


def encoded(document: dict[str, Any]) -> bytes:
    """Return a document in BSON."""
    return bson.encode(document, codec_options=OPTIONS)


def check(found: Sequence[bytes], payload: DataType | None, *, by_columns: bool = False) -> None:
    """Compare the two ways of reading. ``by_columns``: the messages must not be decoded."""
    rows = encoded_batch(found, payload)
    if rows is None:
        assert not by_columns
        return
    documents = decoded(found)
    expected = batch(documents, payload)
    assert rows.schema == expected.schema
    rows.validate(full=True)
    # NaN differs from itself, so this compares the texts.
    assert str(rows.to_pylist()) == str(expected.to_pylist())


def chosen(cases: Iterable[tuple[Any, Any]], few: int | None) -> list[tuple[Any, Any]]:
    """Return some of the cases, at equal distances; None: all.

    The cases are not parameters: each worker would collect two thousand tests.
    """
    every = list(cases)
    return every[:: len(every) // few if few else 1]


some_of_all = pytest.mark.parametrize("few", sampled([90, None], few=1))


@some_of_all
def test_payloads_are_the_same_by_columns(few: int | None) -> None:
    for payload, value in chosen(product(TYPES, VALUES), few):
        check([message(value)], payload)
        check([message(None), message(value), message(...), message({"n": 1}), message(3)], payload)
        check([message([value]), message({"n": value, "m": "text"})], payload)
        check([message({"n": value}), message({"m": value}), message({"n": [value, 1]})], payload)


FIELDS = [
    *("_id", "q", "headers", "key", "when", "due", "pushed", "tries", "priority"),
    *("group", "lock", "last_group"),
]


@some_of_all
def test_fields_are_the_same_by_columns(few: int | None) -> None:
    usual = message({"n": 1}, headers={"a": "x", "b": 2}, key="k")
    for name, value in chosen(product(FIELDS, [..., *VALUES]), few):
        check([message({"n": 1}, **{name: value})], None)
        check([usual, message(2, **{name: value})], None)


@pytest.mark.parametrize("payload", [None, N])
@pytest.mark.parametrize("seed", range(5))
def test_random_messages_are_the_same_by_columns(seed: int, payload: DataType | None) -> None:
    """Some fields are missing. If they come in any order, too, the messages may be decoded."""
    choose = random.Random(seed)
    found = []
    for number in range(60):
        fields: dict[str, Any] = {
            "_id": choose.choice([ObjectId(), f"id{number}"]),
            "q": "raw",
            "when": NOW + dt.timedelta(hours=number),
            "payload": choose.choice([{"n": number, "m": "x" * number}, {"m": None}, {}, None]),
        }
        more = {"due": NOW, "pushed": NOW, "tries": 3, "key": "k", "headers": {"h": 1}, "token": ""}
        more["priority"] = choose.randrange(-1, 12)
        more[choose.choice(STORED_GROUP)] = choose.choice(["a", "0af:b", "xyz:c"])
        fields |= {name: value for name, value in more.items() if choose.random() < 0.7}
        found.append(fields)
    check([encoded(each) for each in found], payload, by_columns=True)
    shuffled = [dict(choose.sample(list(each.items()), len(each))) for each in found]
    check([encoded(each) for each in shuffled], payload)
    check([encoded(each) for each in shuffled[:3]], payload, by_columns=True)


@pytest.mark.parametrize("payload", [None, N, StructType([StructField("n", LongType())])])
def test_usual_messages_are_not_decoded(payload: DataType | None) -> None:
    found = [
        message({"n": 1, "m": "x"}),
        message({"n": 2**40, "m": "\u00e4" * 300}, _id="order~1", headers={"a": "b"}, key="k"),
        message({"n": None}, due=..., token="t", claim={"g": "raw~g", "n": 3}),
    ]
    check(found, payload, by_columns=True)
    check(found[:1], payload, by_columns=True)


def test_all_types_of_models_are_read_by_columns() -> None:
    inner = StructType([StructField("a", DoubleType()), StructField("b", BooleanType())])
    types: list[tuple[DataType, Any]] = [
        (DoubleType(), 1.5), (DoubleType(), 3), (BooleanType(), True), (IntegerType(), 5),
        (TimestampType(), NOW), (StringType(), ID), (inner, {"a": float("nan"), "b": None}),
        (ArrayType(StringType()), ["x", None]), (ArrayType(inner), [{"a": 1.0}, None, {}]),
        (ArrayType(LongType()), list(range(150))),
        (ArrayType(ArrayType(LongType())), [[1], [], None]),
    ]  # fmt: skip
    names = [f"f{number}" for number in range(len(types))]
    payload = StructType(
        [StructField(name, type) for name, (type, _) in zip(names, types, strict=True)]
    )
    values = {name: value for name, (_, value) in zip(names, types, strict=True)}
    found = [message(values), message({}), message(None), message({"f5": "text"})]
    check([message(values), message(values)], payload, by_columns=True)
    check(found, payload, by_columns=True)


def test_invalid_texts_and_repeated_fields_are_decoded() -> None:
    good = message({"n": 1, "m": "text"})
    bad = good.replace(b"text", b"\xff\xff\xff\xff")
    twice = encoded({"n": 1})[4:-1] + encoded({"n": 2})[4:-1]
    twice = struct.pack("<i", len(twice) + 5) + twice + b"\0"
    repeated = bson.encode(
        {"_id": ID, "q": "q", "when": NOW, "payload": bson.raw_bson.RawBSONDocument(twice)}
    )
    assert encoded_batch([good, bad], N) is None
    assert encoded_batch([good, bad], None) is None
    assert encoded_batch([repeated], N) is None
    check([repeated], None)


def test_very_different_documents_are_decoded() -> None:
    found = [
        encoded({f"{name}{number}": 1 for name in range(20)} | {"_id": number})
        for number in range(200)
    ]
    assert encoded_batch(found, None) is None


def test_columns_need_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyqueue.spark.bson_columns", None)
    assert encoded_batch([message({"n": 1})], None) is None
    assert encoded_batch([], None) is None
