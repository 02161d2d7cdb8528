"""The filter of ``where=`` matches at least the messages that the matcher selects.

On a real server and on mongomock, with values of all types at paths of all shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pymongo
import pytest
from bson import Binary, Code, Decimal128, Int64, MinKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from hypothesis import given
from hypothesis import strategies as st

from pyqueue.backends.matching import conditions
from pyqueue.documents import stored_group
from pyqueue.memory import MemoryCollection, memory_database
from pyqueue.payloads import OPTIONS, encode
from pyqueue.where import contains, exists, ge, gt, le, lt, one_of
from tests.model.profiles import LONG, SHORT
from tests.plans.runner import NOW, after

pytestmark = pytest.mark.xdist_group("hypothesis")

#: Numbers, strs and instants, which have an order.
ORDERED: list[Any] = [
    *(0, 1, 1.0, 3, -1, 1.5, 0.1, 1 << 40, Int64(1), (1 << 53) + 1, float(1 << 53)),
    *(math.nan, math.inf, -0.0, Decimal128("1.00"), Decimal128("0.1"), Decimal128("NaN")),
    *("", "a", "ab", "b", "1", "$a", "é", "a\0"),
    *(NOW, after(1), NOW - timedelta(days=20_000)),
]
OTHER: list[Any] = [
    *(None, True, False, ObjectId("0" * 24), UUID(int=7), b"x", Binary(b"x", 5)),
    *(Code("a"), Regex("a"), Timestamp(1, 1), MinKey(), DatetimeMS(10**15)),
]
NAMES = ("a", "b", "0", "1", "$gt")

scalars = st.sampled_from([*ORDERED, *OTHER])
values = st.recursive(
    scalars,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(NAMES), each, max_size=3)
    ),
    max_leaves=6,
)
below = st.lists(st.sampled_from(NAMES), max_size=3)
paths = below.map(lambda names: ".".join(("payload", *names)))
comparisons = st.builds(
    lambda condition, value: condition(value),
    st.sampled_from([gt, ge, lt, le]),
    st.sampled_from([*ORDERED, Decimal("1.5")]),
)
wanted = st.one_of(
    values,
    comparisons,
    values.map(contains),
    st.lists(values, min_size=1, max_size=3).map(lambda some: one_of(*some, None)),
    st.booleans().map(exists),
)
groups = st.sampled_from([None, "g", stored_group("g"), "0ab:h"])
#: The other fields of a message, as pyqueue writes them, or some of them.
fields = st.fixed_dictionaries(
    {"payload": values},
    optional={
        **dict.fromkeys(("key", "last_key"), st.sampled_from(["a", "b"])),
        **dict.fromkeys(("group", "lock", "last_group"), groups.filter(bool)),
        "tries": st.sampled_from([0, 1, 2.0]),
        "priority": st.sampled_from([4, 9]),
        "error": st.sampled_from([{"type": "Timeout", "at": NOW}, {"type": "a"}]),
        "due": st.sampled_from([NOW, after(1)]),
        "dead": st.just({"from": "b", "at": NOW, "reason": "tries", "tries": 3, "error": None}),
        "headers": st.dictionaries(st.sampled_from(["a", "0"]), st.sampled_from([1, "a", 1.0])),
    },
)
SCALARS = ["a", "b", "g", "h", "Timeout", 0, 1, 3, NOW, None]
of_messages = st.dictionaries(
    st.sampled_from(
        [
            *("key", "group", "tries", "priority", "when", "error", "error.type", "error.at"),
            *("dead.tries", "dead.reason", "headers.a", "headers.0", "outcome", "checkpoint.a"),
        ]
    ),
    st.one_of(
        st.sampled_from(SCALARS),
        st.booleans().map(exists),
        st.builds(one_of, st.sampled_from(SCALARS), st.sampled_from(SCALARS)),
        st.builds(ge, st.sampled_from(["a", 1, NOW])),
        st.builds(contains, st.sampled_from(["a", "im"])),
    ),
    min_size=1,
    max_size=2,
)
wheres = st.dictionaries(paths, wanted, min_size=1, max_size=2) | of_messages


@pytest.fixture(params=["memory", "server"])
def collection(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryCollection(memory_database("pyqueue"), "messages")
        return
    with pymongo.MongoClient[dict[str, Any]](request.getfixturevalue("url")) as mongo:
        database = mongo.get_default_database()
        yield database.get_collection("messages", codec_options=OPTIONS)


def check(collection: Any, documents: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """Compare the matcher and the filter."""
    collection.delete_many({})
    stored = [encode({"_id": n, "q": "a", **each}) for n, each in enumerate(documents)]
    collection.insert_many(stored)
    compiled = conditions(where)
    selected = {each["_id"] for each in collection.find({}) if compiled.matches(each)}
    filters = compiled.filter()
    found = {each["_id"] for each in collection.find({"$and": filters} if filters else {})}
    assert selected <= found, filters


examples = given(documents=st.lists(fields, min_size=1, max_size=5), where=wheres)


@SHORT(max_examples=60)
@examples
def test_filter_lets_every_match_through(
    collection: Any, documents: list[dict[str, Any]], where: dict[str, Any]
) -> None:
    check(collection, documents, where)


@pytest.mark.slow
@LONG(max_examples=20_000)
@examples
def test_filter_lets_every_match_through_long(
    collection: Any, documents: list[dict[str, Any]], where: dict[str, Any]
) -> None:
    check(collection, documents, where)


#: Documents and conditions that are easy to get wrong: each is selected.
HARD: list[tuple[Any, Any, dict[str, Any]]] = [
    ({"a": None}, None, {"payload.a": None}),
    ([5, {"0": [1]}], None, {"payload.0": gt(3)}),
    ([{"a": 1}], None, {"payload.a": exists(False)}),
    ({"a": Decimal128("1.0")}, None, {"payload.a": 1}),
    ({"a": 1}, None, {"payload.a": Decimal128("1.00")}),
    ({"a": Decimal128("0.1")}, None, {"payload.a": lt(0.1)}),
    ({"a": [1, Timestamp(1, 1)]}, None, {"payload.a": contains(1)}),
    ({"a": {"$gt": 1}}, None, {"payload.a": {"$gt": 1.0}}),
    ({"a": {"b": 1, "a": 2}}, None, {"payload.a": {"a": 2, "b": 1}}),
    ({"$gt": "a"}, None, {"payload.$gt": contains("a")}),
    (1, "k", {"key": "k"}),
    (1, None, {"key": one_of(None, {"a": 1})}),
]


@pytest.mark.parametrize(("payload", "key", "where"), HARD, ids=range(len(HARD)))
def test_filter_and_matcher_agree_where_types_differ(
    collection: Any, payload: Any, key: str | None, where: dict[str, Any]
) -> None:
    document = {"payload": payload} if key is None else {"payload": payload, "key": key}
    collection.insert_many([encode({"_id": 0, "q": "a", **document})])
    assert all(conditions(where).matches(each) for each in collection.find({}))
    check(collection, [document], where)
