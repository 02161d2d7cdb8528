"""Values that no program should pass or store, as hypothesis strategies."""

from __future__ import annotations

import enum
import math
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final

from bson import Binary, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from hypothesis import strategies as st


class Word(enum.StrEnum):
    ONE = "one"


class Unreadable:
    def __repr__(self) -> str:
        return "an object"


#: Operators in the place of values, as an attacker might send them.
INJECTED: Final[list[dict[str, Any]]] = [
    {"$gt": ""},
    {"$ne": None},
    {"$exists": True},
    {"$where": "sleep(10000) || true"},
    {"$regex": ".*"},
    {"$in": [None]},
    {"$set": {"q": "another"}},
    {"$expr": {"$eq": [1, 1]}},
]

#: Each kind of BSON value, with its extremes.
ODD: Final[dict[str, Any]] = {
    "null": None,
    "bool": True,
    "zero": 0,
    "negative": -5,
    "64 bits": Int64((1 << 63) - 1),
    "float": 1.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "decimal": Decimal128("1.5"),
    "empty": "",
    "text": "text",
    "NUL": "a\0b",
    "long": "x" * 5000,
    "operator": {"$gt": ""},
    "update": {"$set": {"q": "another"}},
    "document": {"a": {"b": 1}},
    "array": [1, "a", None],
    "empty array": [],
    "array of arrays": [[[]]],
    "now": datetime(2026, 1, 1, tzinfo=UTC),
    "array of instants": [datetime(2026, 1, 1, tzinfo=UTC)],
    "before year 1": DatetimeMS(-(1 << 62)),
    "after year 9999": DatetimeMS(1 << 62),
    "year 8500": datetime(8500, 1, 1, tzinfo=UTC),
    "binary": b"\xff\x00",
    "uuid": uuid.UUID(int=7),
    "id": ObjectId("0123456789abcdef01234567"),
    "regex": Regex("(a+)+$"),
    "timestamp": Timestamp(1, 1),
    "least": MinKey(),
    "most": MaxKey(),
}


def odd() -> st.SearchStrategy[Any]:
    """Generate values that the server can store."""
    return st.one_of(st.sampled_from(list(ODD.values())), bson_values(), st.sampled_from(INJECTED))


def _leaves() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats(),
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.binary(max_size=8),
        st.datetimes(timezones=st.just(UTC), min_value=datetime(1, 1, 2)).map(_milliseconds),
        st.sampled_from(
            [ObjectId(), uuid.UUID(int=1), Regex("x"), Timestamp(1, 1), MinKey(), Decimal128("NaN")]
        ),
    )


def _milliseconds(value: datetime) -> datetime:
    return value.replace(microsecond=value.microsecond // 1000 * 1000)


def bson_values() -> st.SearchStrategy[Any]:
    """Generate BSON values, nested in documents and arrays."""
    names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
    names |= st.sampled_from(["$gt", "$set", "a.b", "_id", "q", "when", "$ref", ""])
    return st.recursive(
        _leaves(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)
        ),
        max_leaves=6,
    )


_DEEP: list[Any] = []
for _ in range(3000):
    _DEEP = [_DEEP]

#: Python values that no queue takes.
_STRANGE: Final[list[Callable[[], Any]]] = [
    Unreadable,
    lambda: Unreadable,
    lambda: {1, 2},
    lambda: iter(()),
    lambda: 10**400,
    lambda: -(10**6000),
    lambda: 1 << 63,
    lambda: "\ud800",
    lambda: {"\ud800": 1},
    lambda: {"a\0": 1},
    lambda: {1: 1},
    lambda: "x" * 513,
    lambda: b"bytes",
    lambda: Word.ONE,
    lambda: Decimal("1e400"),
    lambda: timedelta.max,
    lambda: timedelta(seconds=-1),
    lambda: datetime(2030, 1, 1),
    lambda: datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    lambda: datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
    lambda: _DEEP,
    lambda: Binary(b"five!", 4),
    lambda: "~queue:x",
    lambda: "a b",
    lambda: "$where",
    lambda: ValueError("\ud800"),
]


class Given:
    """A value that hypothesis need not print, because not every value can be printed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        try:
            return f"Given({self.value!r})"[:200]
        except (ValueError, RecursionError):
            return f"Given(a huge {type(self.value).__name__})"


def anything() -> st.SearchStrategy[Given]:
    """Generate values of any kind; hardly any argument takes them."""
    values: st.SearchStrategy[Any] = st.one_of(
        odd(),
        st.sampled_from(_STRANGE).map(lambda make: make()),
        st.text(max_size=5),
        st.floats(),
        st.integers(),
    )
    return values.map(Given)
