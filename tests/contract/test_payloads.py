"""Payloads round-trip: every BSON value, null and falsy values included.

Each operation that writes a payload is tested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, Decimal128, Int64, ObjectId

from tests.contract.world import AnyClient, AnyQueue, World, hold

VALUES: dict[str, Any] = {
    "None": None,
    "zero": 0,
    "zero float": 0.0,
    "empty str": "",
    "False": False,
    "empty list": [],
    "empty dict": {},
    "True": True,
    "one": 1,
    "int64": 1 << 62,
    "negative": -(1 << 63),
    "float": 1.5,
    "infinity": float("inf"),
    "str": "żółw 🐢 \u0000 nul",
    "bytes": b"\x00\xff",
    "no bytes": b"",
    "subtype": Binary(b"x", 128),
    "ObjectId": ObjectId("0123456789abcdef01234567"),
    "Decimal128": Decimal128("1.20"),
    "UUID": UUID("00112233-4455-6677-8899-aabbccddeeff"),
    "datetime": datetime(2013, 1, 1, 5, 17, 0, 123_000, tzinfo=UTC),
    "nested": {
        "a": [{"b": {"c": [None, 0, "", False, [], {}, b"", Decimal128("0.10")]}}],
        "z": {"y": {}},
    },
    "list": [1, [2, [3, []]], {"a": None}],
    "dots": {"a.b": 1, "": 2, "x.": {".y": 3}},
    "dollars": {"$set": 1, "deep": {"$ref": "x", "$a.b": [{"$c": 1}]}},
    "like ours": {"_id": 7, "q": "x", "when": 1, "token": None, "processed": False, "key": 1},
    "large": "x" * (1 << 20),
}

#: Every operation that writes a payload; each returns the payload that is read back.
Way = Callable[[AnyQueue, AnyQueue, Any], Any]


def _pop(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.push(value)
    return queue.pop(0).payload


def _many(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.push_many([value, value])
    first, second = queue.pop_many(2, timeout=0)
    assert repr(first.payload) == repr(second.payload)
    return first.payload


def _keyed(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    id = queue.push(value, key="k")
    assert queue.peek()[0].payload == queue.get(id).payload
    return queue.reserve(0).payload


def _replace(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.push({"old": "value"}, key="k")
    return _first_replace(queue, other, value)


def _first_replace(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    return hold(queue, value, key="k", on_duplicate="replace").payload


def _move(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.move(hold(queue, {"old": "value"}), to=other, payload=value)
    return other.reserve(0).payload


def _unchanged(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.move(hold(queue, value), to=other)
    return other.reserve(0).payload


def _move_many(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.push_many([1, 2])
    queue.move_many([(each, value) for each in queue.reserve_many(2, timeout=0)], to=other)
    first, _ = other.reserve_many(2, timeout=0)
    return first.payload


def _rolled_back(queue: AnyQueue, other: AnyQueue, value: Any) -> Any:
    queue.rollback(hold(queue, value), delay=0, error="once")
    return queue.reserve(0).payload


WAYS: dict[str, Way] = {
    "pop": _pop,
    "push_many": _many,
    "keyed": _keyed,
    "replace": _replace,
    "first replace": _first_replace,
    "move payload": _move,
    "move": _unchanged,
    "move_many": _move_many,
    "rollback": _rolled_back,
}


#: ``make test`` passes all values through these operations, and a few through the rest.
WIDE = ("pop", "keyed", "move payload")
FEW_VALUES = ("None", "False", "empty dict", "str", "nested", "dollars", "like ours")


@pytest.mark.needs("keys", "move")
@pytest.mark.needs("pop")
@pytest.mark.parametrize(
    ("way", "values"),
    [
        *(
            pytest.param(way, VALUES if name in WIDE else FEW_VALUES, id=name)
            for name, way in WAYS.items()
        ),
        *(
            pytest.param(way, VALUES, id=f"{name} of all", marks=pytest.mark.slow)
            for name, way in WAYS.items()
            if name not in WIDE
        ),
    ],
)
def test_round_trip(
    world: World, queue: AnyQueue, other: AnyQueue, way: Way, values: Iterable[str]
) -> None:
    for what in values:
        value = VALUES[what]
        back = way(queue, other, value)
        assert back == value, what
        assert type(back) is type(value) or isinstance(value, (bytes, int)), what
        if isinstance(value, bool):
            assert back is value
        if isinstance(value, datetime):
            assert back.tzinfo is UTC
        world.raw().delete_many(
            {"q": {"$in": [queue.name, other.name]}, "record": {"$exists": False}}
        )


@pytest.mark.needs("history")
def test_round_trip_into_the_history(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=600)
    for what, value in VALUES.items():
        held = hold(queue, {"old": "value"})
        queue.commit(held, payload=value)
        message = queue.get(held.id)
        assert message.payload == value, what
        assert type(message.payload) is type(value) or isinstance(value, (bytes, int)), what
        kept = hold(queue, value)
        queue.commit(kept)
        assert queue.get(kept.id).payload == value, what


@pytest.mark.needs("pop")
@pytest.mark.needs("dead_letter")
def test_round_trip_through_the_dead_letter_queue(client: AnyClient, name: str) -> None:
    queue, dead = client.queue(name), client.queue(f"{name}.dead")
    for what, value in VALUES.items():
        held = hold(queue, value)
        queue.bury(held)
        assert dead.redrive() == 1, what
        assert queue.pop(0).payload == value, what


@pytest.mark.needs("pop")
def test_falsy_payloads_differ_from_no_message(queue: AnyQueue) -> None:
    queue.push_many([None, 0, "", False, [], {}])
    received = [queue.pop(0) for _ in range(7)]
    assert received.pop() is None
    assert not any(each.payload for each in received)


@pytest.mark.needs("pop")
def test_datetimes_come_out_as_aware_utc_with_milliseconds(queue: AnyQueue) -> None:
    zone = timezone(timedelta(hours=-5))
    queue.push({"at": datetime(2013, 1, 1, 0, 0, 0, 999_999, tzinfo=zone)})
    at = queue.pop(0).payload["at"]
    assert at == datetime(2013, 1, 1, 5, 0, 0, 999_000, tzinfo=UTC)
    assert at.tzinfo is UTC


@pytest.mark.needs("pop")
def test_bson_conversions_are_the_documented_ones(queue: AnyQueue) -> None:
    """Without a model, payloads are BSON values.

    A tuple comes back as a list; an Int64 and a regex come back unchanged.
    """
    queue.push({"tuple": (1, 2), "int64": Int64(5), "pattern": re.compile("a.b", re.IGNORECASE)})
    payload = queue.pop(0).payload
    assert (payload["tuple"], payload["int64"], payload["pattern"].pattern) == ([1, 2], 5, "a.b")


@pytest.mark.needs("pop")
def test_decimal128_keeps_its_digits(queue: AnyQueue) -> None:
    queue.push(Decimal128("1.2300"))
    payload = queue.pop(0).payload
    assert payload.to_decimal() == Decimal("1.23")
    assert str(payload) == "1.2300"


def test_push_does_not_change_the_object(queue: AnyQueue) -> None:
    payload = {"a": [1, {"b": 2}]}
    headers = {"h": 1}
    queue.push(payload, headers=headers)
    queue.push_many([payload, payload], headers=headers)
    assert payload == {"a": [1, {"b": 2}]}
    assert headers == {"h": 1}
    payload["a"].append(3)
    assert all(each.payload == {"a": [1, {"b": 2}]} for each in queue.peek())


@pytest.mark.needs("pop", "server")  # mongomock accepts 17 MB, so it would prove nothing
def test_largest_message(client: AnyClient, queue: AnyQueue) -> None:
    large = "x" * (16 * 1024 * 1024 - 66 * 1024)
    held = hold(queue, large)
    queue.rollback(held, error="y" * 5000, delay=0)
    held = queue.reserve(0)
    queue.bury(held, error="z" * 5000)
    assert client.queue(f"{queue.name}.dead").redrive() == 1
    assert queue.pop(0).payload == large
