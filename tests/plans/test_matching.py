"""The matcher of ``where=``: the messages that it selects, and the conditions that it refuses.

``tests/model/test_where.py`` compares it with the filters of servers.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, cast

import pytest
from bson import Code, Decimal128

from pyqueue import ConfigurationError
from pyqueue.backends.matching import conditions
from pyqueue.documents import stored_group
from pyqueue.where import contains, exists, ge, gt, le, lt, one_of
from tests.plans.runner import NOW, after, message

PAYLOAD = {
    "n": 3,
    "price": Decimal128("1.50"),
    "name": "Emma",
    "at": NOW,
    "ok": True,
    "none": None,
    "tags": ["red", 2],
    "items": [{"sku": "a"}, {"sku": "b"}],
    "$gt": 1,
    "odd": {"$gt": 1},
}
EARLIER = NOW.astimezone(timezone(timedelta(hours=5)))

SELECTED: list[dict[str, Any]] = [
    {},
    {"payload.n": 3},
    {"payload.n": 3.0, "payload.name": "Emma"},
    {"payload.n": Decimal("3.00")},
    {"payload.price": 1.5},
    {"payload.price": Decimal("1.5")},
    {"payload.price": gt(1)},
    {"payload.n": ge(Decimal(3))},
    {"payload.n": lt(3.5)},
    {"payload.name": le("Emma")},
    {"payload.at": EARLIER},
    {"payload.at": gt(NOW - timedelta(days=1))},
    {"payload.none": None},
    {"payload.none": exists()},
    {"payload.more": exists(False)},
    {"payload.items.sku": exists(False)},
    {"payload.items.1.sku": "b"},
    {"payload.tags": ["red", 2.0]},
    {"payload.tags": contains("red")},
    {"payload.name": contains("mm")},
    {"payload.n": one_of(1, 3)},
    {"payload.n": one_of([1, 3])},
    {"payload.odd": {"$gt": 1}},
    {"payload.$gt": 1},
    {"headers.tenant": "t"},
    {"tries": 0},
    {"key": None, "error": None, "group": None},
    {"key": exists(False)},
    {"when": le(NOW)},
    {"pushed": NOW},
]

LEFT_OUT: list[dict[str, Any]] = [
    {"payload.n": 4},
    {"payload.n": "3"},
    {"payload.n": True},
    {"payload.ok": 1},
    {"payload.n": 3, "payload.name": "Anna"},
    {"payload.n": gt("2")},
    {"payload.n": gt(3)},
    {"payload.name": gt(3)},
    {"payload.more": None},
    {"payload.more": lt(3)},
    {"payload.none": exists(False)},
    {"payload.tags": "red"},
    {"payload.tags": ["red"]},
    {"payload.tags.5": 2},
    {"payload.items.sku": "a"},
    {"payload.tags": contains("re")},
    {"payload.n": contains(3)},
    {"payload.odd": {"$gt": 2}},
    {"payload.odd": gt(0)},
    {"headers.other": "t"},
    {"tries": gt(0)},
    {"key": "k"},
    {"error": exists()},
    {"error.type": "Timeout"},
    {"error.type": exists()},
]


@pytest.mark.parametrize("where", SELECTED, ids=str)
def test_matcher_selects(where: dict[str, Any]) -> None:
    document = message("m", payload=PAYLOAD, headers={"tenant": "t"})
    assert conditions(where).matches(document)


@pytest.mark.parametrize("where", LEFT_OUT, ids=str)
def test_matcher_leaves_out(where: dict[str, Any]) -> None:
    document = message("m", payload=PAYLOAD, headers={"tenant": "t"})
    assert not conditions(where).matches(document)


def test_no_condition_selects_everything() -> None:
    assert conditions(None).matches(message("m"))
    assert conditions(None).filter() == []


def test_matcher_reads_a_message_as_it_is_shown() -> None:
    dead = {"from": "a", "at": NOW, "reason": "tries", "tries": 3, "error": {"type": "Timeout"}}
    buried = message("m", last_key="k", dead=dead, last_group=stored_group("g"), due=after(-60))
    for where in (
        {"key": "k", "group": "g", "when": after(-60)},
        {"dead.reason": "tries", "dead.tries": 3, "dead.error.type": "Timeout"},
        {"key": one_of("k", "l"), "group": exists()},
    ):
        assert conditions(where).matches(buried), where
    moved = message("m", last_key="k")  # the key that it had in another queue
    assert conditions({"key": None}).matches(moved)
    held = message("m", lock=stored_group("g"), tries=2)
    del held["tries"]
    assert conditions({"group": "g", "tries": 0}).matches(held)


def test_values_of_rare_types_are_no_strs_and_no_numbers() -> None:
    document = message("m", payload={"code": Code("x"), "nan": Decimal128("NaN")})
    for where in ({"payload.code": "x"}, {"payload.code": contains("x")}, {"payload.nan": gt(1)}):
        assert not conditions(where).matches(document), where
    assert conditions({"payload.code": Code("x")}).matches(document)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["payload.n"], "where: expected a mapping of paths to values"),
        ("payload.n=1", "where: expected a mapping"),
        ({1: 2}, "where: expected each path as a str, found int"),
        ({"error.typ": "x"}, r"where: unknown path 'error.typ' \(did you mean 'error.type'"),
        ({"paylod.n": 1}, r"where: unknown path 'paylod.n' \(did you mean 'payload.n'\?\); use"),
        ({"header.n": 1}, r"'header.n' \(did you mean 'headers.n'\?\); use"),
        ({"order": 1}, r"'order' \(did you mean 'headers.order' or 'payload.order'\?\); use"),
        ({"x y": 1}, "where: unknown path 'x y'; use payload.NAME"),
        ({"key.n": 1}, "where: unknown path 'key.n'"),
        ({"payload..n": 1}, "where: invalid path 'payload..n'"),
        ({"headers.a\0": 1}, "where: invalid path"),
        ({"payload.n": object()}, "where: BSON cannot store the object for payload.n"),
        ({"payload.n": 1 << 64}, "where: BSON cannot store the int for payload.n"),
        ({"payload.n": one_of()}, "where: one_of for payload.n needs at least one value"),
        ({"payload.n": gt([1])}, "where: gt for payload.n compares numbers, strs and instants"),
        ({"payload.n": le(None)}, "where: le for payload.n compares"),
        ({"payload.n": gt(True)}, "where: gt for payload.n compares"),
        (
            {"payload.n": exists(cast("bool", 1))},
            r"where: exists\(\) for payload.n: expected True or False, found int",
        ),
        ({"payload.at": datetime(2026, 1, 1)}, "where: the instant for payload.at has no time"),
        ({"payload.at": [{"x": datetime(2026, 1, 1)}]}, "where: the instant for payload.at has no"),
    ],
)
def test_matcher_refuses(where: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        conditions(where)


def test_refusal_contains_no_value() -> None:
    with pytest.raises(ConfigurationError) as caught:
        conditions({"payload.n": {"secret": object(), "word": "s3cret"}})
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
