"""Bad input raises the right class of error, names the argument, and writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from pyqueue import (
    Backoff,
    Client,
    ConfigurationError,
    InvalidMessage,
    InvalidName,
    LeaseLost,
    QueueClosed,
    QueueError,
    Reservation,
)
from tests.contract.world import AnyQueue, World, hold, waiting

NAIVE = datetime(2030, 1, 1)  # the refused payload
FAR = datetime(8000, 1, 1, tzinfo=UTC)
SOON = datetime.now(UTC) + timedelta(hours=1)
LARGE = "x" * (16 * 1024 * 1024)
DEEP: dict[str, Any] = {}
DEEP["self"] = DEEP


class Order(BaseModel):
    n: int


BAD_PAYLOADS: dict[str, Any] = {
    "over 16 MB": LARGE,
    "over 16 MB less 64 KB": "x" * (16 * 1024 * 1024 - 63 * 1024),
    "an object": object(),
    "a set": {1, 2},
    "deep": {"a": [{"b": object()}]},
    "huge int": 1 << 64,
    "key that is no str": {1: 2},
    "key with NUL": {"a\0b": 1},
    "itself": DEEP,
}

#: Invalid durations.
BAD_DURATIONS: dict[str, Any] = {
    "negative": -1,
    "negative timedelta": timedelta(seconds=-1),
    "NaN": math.nan,
    "infinite": math.inf,
    "str": "60",
    "bool": True,
    "more than 100 years": 1e12,
}

Push = tuple[dict[str, Any], type[QueueError], str]

BAD_PUSHES: dict[str, Push] = {
    **{
        f"delay {what}": ({"delay": value}, ConfigurationError, "delay")
        for what, value in BAD_DURATIONS.items()
    },
    "naive at": ({"at": NAIVE}, ConfigurationError, "at:.*time zone"),
    "at in the year 8000": ({"at": FAR}, ConfigurationError, "at:.*8000"),
    "at in the year 9999": (
        {"at": datetime.max.replace(tzinfo=UTC)},
        ConfigurationError,
        "at:.*8000",
    ),
    "at of another type": ({"at": 5}, ConfigurationError, "at:.*datetime"),
    "delay with at": ({"delay": 1, "at": SOON}, ConfigurationError, "delay, at"),
    "unknown on_duplicate": (
        {"key": "k", "on_duplicate": "merge"},
        ConfigurationError,
        "on_duplicate.*'replace'",
    ),
    "unhashable on_duplicate": ({"on_duplicate": ["ignore"]}, ConfigurationError, "on_duplicate"),
    "empty key": ({"key": ""}, ConfigurationError, "key.*1-512"),
    "long key": ({"key": "k" * 513}, ConfigurationError, "key.*1-512"),
    "key with NUL": ({"key": "a\0"}, ConfigurationError, "key"),
    "key that is no str": ({"key": 5}, ConfigurationError, "key"),
    "headers that are none": ({"headers": ["a"]}, ConfigurationError, "headers"),
    "header with a dot": ({"headers": {"a.b": 1}}, ConfigurationError, "headers.*dots"),
    "header with a dollar": ({"headers": {"$a": 1}}, ConfigurationError, "headers.*\\$"),
    "header that is no str": ({"headers": {1: 1}}, ConfigurationError, "headers"),
    "header without a name": ({"headers": {"": 1}}, ConfigurationError, "headers"),
    "header of another type": ({"headers": {"a": [1]}}, ConfigurationError, "headers.*a"),
    "65 headers": (
        {"headers": {f"h{number}": 1 for number in range(65)}},
        ConfigurationError,
        "headers: 65 .*64",
    ),
    "headers of more than 8 KB": (
        {"headers": {"a": "x" * 4096, "b": "\N{EURO SIGN}" * 1366}},
        ConfigurationError,
        "headers: 8196 bytes.*8192",
    ),
    "header of None": ({"headers": {"a": None}}, ConfigurationError, "headers.*a"),
    "header over 64 bits": ({"headers": {"a": 1 << 63}}, ConfigurationError, "headers.*a"),
    "empty id": ({"id": ""}, ConfigurationError, "id.*1-512"),
    "long id": ({"id": "x" * 513}, ConfigurationError, "id.*1-512"),
    "id like a record's": ({"id": "~x"}, ConfigurationError, "id.*~"),
    "id of another type": ({"id": 5}, ConfigurationError, "id"),
}


def refused(call: Callable[[], Any], kind: type[QueueError], words: str) -> None:
    """Check that a call raises exactly this class, as a ValueError that names the argument."""
    with pytest.raises(QueueError, match=words) as caught:
        call()
    assert type(caught.value) is kind
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS.keys())
class TestPayloads:
    def test_push(self, world: World, queue: AnyQueue, payload: Any) -> None:
        for options in (
            {},
            {"key": "k"},
            {"key": "k", "on_duplicate": "replace"},
            {"id": queue.name},
        ):
            refused(partial(queue.push, payload, **options), InvalidMessage, "payload")
        assert world.stored(queue) == []

    def test_batch_with_one_bad_item_writes_nothing(
        self, world: World, queue: AnyQueue, payload: Any
    ) -> None:
        queue.push("before")
        before = world.stored(queue)
        refused(lambda: queue.push_many([1, 2, payload, 3]), InvalidMessage, "payload")
        refused(lambda: queue.push_many([1, payload], keys=["a", "b"]), InvalidMessage, "payload")
        refused(
            lambda: queue.push_many([1, payload], keys=["a", "b"], on_duplicate="replace"),
            InvalidMessage,
            "payload",
        )
        assert world.stored(queue) == before

    def test_settling(self, world: World, queue: AnyQueue, other: AnyQueue, payload: Any) -> None:
        queue.push_many([1, 2])
        held = queue.reserve_many(2, timeout=0)
        before = world.stored(queue, other)
        refused(lambda: queue.commit(*held, payload=payload), InvalidMessage, "payload")
        refused(lambda: queue.move(*held, to=other, payload=payload), InvalidMessage, "payload")
        refused(
            lambda: queue.move_many([(held[0], 1), (held[1], payload)], to=other),
            InvalidMessage,
            "payload",
        )
        refused(
            lambda: queue.move(*held, to=other, update={"$set": {"a": payload}}),
            InvalidMessage,
            "payload|update",
        )
        refused(
            lambda: queue.checkpoint(held[0], payload), InvalidMessage, "payload|state|checkpoint"
        )
        assert world.stored(queue, other) == before
        queue.commit(*held)


@pytest.mark.parametrize(("options", "kind", "words"), BAD_PUSHES.values(), ids=BAD_PUSHES.keys())
def test_bad_pushes(
    world: World, queue: AnyQueue, options: dict[str, Any], kind: type[QueueError], words: str
) -> None:
    refused(lambda: queue.push(1, **options), kind, words)
    many = {{"key": "keys", "id": "ids"}.get(name, name): value for name, value in options.items()}
    for name in ("keys", "ids"):
        if name in many:
            many[name] = [None, many[name]]
    refused(lambda: queue.push_many([1, 2], **many), kind, words)
    assert world.stored(queue) == []


@pytest.mark.parametrize("name", ["keys", "ids"])
def test_lists_of_different_lengths(world: World, queue: AnyQueue, name: str) -> None:
    for given in ([], ["a"], ["a", "b", "c"], "ab", 5):
        refused(partial(queue.push_many, [1, 2], **{name: given}), ConfigurationError, name)
    assert world.stored(queue) == []


# ---- names, options


@pytest.mark.parametrize(
    "bad",
    ["", "a b", "a~b", "~queue:x", "a/b", "ü", "x" * 111, ".dead" * 30, "a\n", 5, None],
    ids=lambda bad: repr(bad)[:12],
)
def test_bad_names(world: World, queue: AnyQueue, bad: Any) -> None:
    refused(lambda: world.client.queue(bad), InvalidName, "name")
    held = hold(queue)
    before = world.bytes(held.id)
    with pytest.raises((InvalidName, ConfigurationError)):
        queue.move(held, to=bad)
    assert world.bytes(held.id) == before
    queue.commit(held)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[QueueError]]] = {
    **{
        f"{name} {what}": ({name: value}, ConfigurationError)
        for name in ("lease", "history", "poll")
        for what, value in (BAD_DURATIONS | {"zero": 0}).items()
    },
    "max_tries zero": ({"max_tries": 0}, ConfigurationError),
    "max_tries float": ({"max_tries": 1.5}, ConfigurationError),
    "max_tries bool": ({"max_tries": True}, ConfigurationError),
    "dead_letter": ({"dead_letter": "a b"}, InvalidName),
    "backoff": ({"backoff": 5}, ConfigurationError),
    "model": ({"model": object()}, ConfigurationError),
}


@pytest.mark.parametrize(("options", "kind"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(
    world: World, name: str, options: dict[str, Any], kind: type[QueueError]
) -> None:
    words = "name" if kind is InvalidName else next(iter(options))
    refused(lambda: world.client.queue(name, **options), kind, words)


@pytest.mark.parametrize(
    "values",
    [
        {"base": -1},
        {"factor": -1},
        {"maximum": -1},
        {"jitter": -0.1},
        {"jitter": 2},
        {"base": math.nan},
        {"base": "1"},
    ],
    ids=repr,
)
def test_bad_backoffs(world: World, name: str, values: dict[str, Any]) -> None:
    refused(
        lambda: world.client.queue(name, backoff=Backoff(**values)),
        ConfigurationError,
        next(iter(values)),
    )


# ---- receiving


@pytest.mark.needs("pop")
@pytest.mark.parametrize("value", BAD_DURATIONS.values(), ids=BAD_DURATIONS.keys())
def test_bad_timeouts_and_leases(world: World, queue: AnyQueue, value: Any) -> None:
    refused(lambda: queue.pop(value), ConfigurationError, "timeout")
    refused(lambda: queue.reserve(value), ConfigurationError, "timeout")
    refused(lambda: queue.pop_many(1, timeout=value), ConfigurationError, "timeout")
    refused(lambda: queue.reserve_many(1, timeout=value), ConfigurationError, "timeout")
    refused(lambda: queue.reserve(0, lease=value), ConfigurationError, "lease")
    refused(lambda: queue.reserve(0, lease=0), ConfigurationError, "lease")
    assert world.stored(queue) == []


@pytest.mark.needs("pop")
@pytest.mark.parametrize("limit", [0, -1, 1.5, "1", True, None], ids=repr)
def test_bad_limits(world: World, queue: AnyQueue, limit: Any) -> None:
    refused(lambda: queue.pop_many(limit, timeout=0), ConfigurationError, "limit")
    refused(lambda: queue.reserve_many(limit, timeout=0), ConfigurationError, "limit")
    refused(lambda: queue.peek(limit), ConfigurationError, "limit")
    if limit is not None:
        refused(lambda: queue.redrive(limit), ConfigurationError, "limit")
    assert world.stored(queue) == []


@pytest.mark.needs("history")
def test_bad_history(world: World, queue: AnyQueue) -> None:
    refused(lambda: queue.history(0), ConfigurationError, "limit")
    refused(lambda: queue.history(since=NAIVE), ConfigurationError, "since")
    refused(lambda: queue.history(since=FAR), ConfigurationError, "since")
    refused(lambda: queue.replay("~x"), ConfigurationError, "id")
    assert world.stored(queue) == []


@pytest.mark.parametrize("id", ["", "~queue:x", 5, None], ids=repr)
def test_bad_ids(queue: AnyQueue, id: Any) -> None:
    refused(lambda: queue.get(id), ConfigurationError, "id")
    refused(lambda: queue.remove(id), ConfigurationError, "id")


# ---- settling

Settle = Callable[[AnyQueue, Reservation[Any]], Any]


def _rollback(value: Any, queue: AnyQueue, held: Reservation[Any]) -> None:
    queue.rollback(held, delay=value)


def _move(value: Any, queue: AnyQueue, held: Reservation[Any]) -> None:
    queue.move(held, to="x", delay=value)


def _extend(value: Any, queue: AnyQueue, held: Reservation[Any]) -> None:
    queue.extend(held, lease=value)


BAD_SETTLES: dict[str, tuple[Settle, str]] = {
    **{
        f"rollback delay {what}": (partial(_rollback, value), "delay")
        for what, value in BAD_DURATIONS.items()
    },
    **{
        f"move delay {what}": (partial(_move, value), "delay")
        for what, value in BAD_DURATIONS.items()
    },
    **{
        f"extend {what}": (partial(_extend, value), "lease")
        for what, value in BAD_DURATIONS.items()
    },
    "rollback error": (lambda queue, held: queue.rollback(held, error=5), "error"),
    "bury error": (lambda queue, held: queue.bury(held, error=5), "error"),
    "progress over 1": (lambda queue, held: queue.progress(held, 1.1), "fraction"),
    "progress NaN": (lambda queue, held: queue.progress(held, math.nan), "fraction"),
    "progress negative": (lambda queue, held: queue.progress(held, -0.1), "fraction"),
    "progress note": (lambda queue, held: queue.progress(held, 0.5, 5), "note"),
    "move key": (lambda queue, held: queue.move(held, to="x", key=""), "key"),
    "move 65 headers": (
        lambda queue, held: queue.move(held, to="x", headers={f"h{n}": n for n in range(65)}),
        "headers.*64",
    ),
    "move headers": (lambda queue, held: queue.move(held, to="x", headers={"a.b": 1}), "headers"),
    "move to nothing": (lambda queue, held: queue.move(held, to=None), "to"),
    "move update operator": (
        lambda queue, held: queue.move(held, to="x", update={"$where": {"a": 1}}),
        "update",
    ),
    "move update plain": (lambda queue, held: queue.move(held, to="x", update={"a": 1}), "update"),
    "move update no fields": (
        lambda queue, held: queue.move(held, to="x", update={"$set": 1}),
        "update",
    ),
    "move update rename to nothing": (
        lambda queue, held: queue.move(held, to="x", update={"$rename": {"a": ""}}),
        "update",
    ),
    "progress long note": (lambda queue, held: queue.progress(held, 0.5, "x" * 2049), "note"),
    "move update empty name": (
        lambda queue, held: queue.move(held, to="x", update={"$set": {"": 1}}),
        "update",
    ),
    "move update and payload": (
        lambda queue, held: queue.move(held, to="x", payload=1, update={"$set": {"a": 1}}),
        "payload, update",
    ),
    "not a reservation": (lambda queue, held: queue.commit(held.id), "reservations"),
    "a message": (lambda queue, held: queue.commit(queue.get(held.id)), "reservations"),
}


@pytest.mark.needs("move", "dead_letter")
@pytest.mark.parametrize(("settle", "words"), BAD_SETTLES.values(), ids=BAD_SETTLES.keys())
def test_bad_settles(world: World, queue: AnyQueue, settle: Settle, words: str) -> None:
    held = hold(queue, {"a": 1})
    until, before = held.until, world.stored(queue, "x")
    refused(lambda: settle(queue, held), ConfigurationError, words)
    assert world.stored(queue, "x") == before
    assert held.until == until
    queue.commit(held)


def test_reservation_of_another_queue(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue)
    before = world.bytes(held.id)
    for settle in (other.commit, other.rollback, other.extend, other.release, other.bury):
        refused(partial(settle, held), ConfigurationError, queue.name)
    refused(lambda: other.move(held, to=queue), ConfigurationError, queue.name)
    assert world.bytes(held.id) == before


@pytest.mark.needs("move")
def test_queue_of_another_namespace(world: World, queue: AnyQueue) -> None:
    elsewhere = world.connect(namespace="elsewhere").queue(queue.name)
    held = hold(queue)
    before = world.bytes(held.id)
    refused(lambda: queue.move(held, to=elsewhere), ConfigurationError, "to:.*namespace")
    refused(
        lambda: queue.move_many([(held, 1)], to=elsewhere), ConfigurationError, "to:.*namespace"
    )
    assert world.bytes(held.id) == before
    assert list(world.raw("elsewhere").find({})) == []


@pytest.mark.needs("move")
def test_key_for_several_messages(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many([1, 2])
    held = queue.reserve_many(2, timeout=0)
    before = world.stored(queue, other)
    refused(lambda: queue.move(*held, to=other, key="k"), ConfigurationError, "key")
    assert world.stored(queue, other) == before


@pytest.mark.needs("move")
def test_payload_of_the_wrong_model(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    typed = world.client.queue(other.name, Order)
    queue.push_many([1, 2])
    held = queue.reserve_many(2, timeout=0)
    before = world.stored(queue, other)
    refused(
        lambda: queue.move(*held, to=typed, payload={"n": "x"}), InvalidMessage, "payload.*Order"
    )
    refused(
        lambda: queue.move_many([(held[0], {"n": 1}), (held[1], {})], to=typed),
        InvalidMessage,
        "payload.*Order",
    )
    assert world.stored(queue, other) == before


# ---- clients


@pytest.mark.parametrize(
    "namespace", ["", "a b", "system.x", "$a", "x" * 101, 5], ids=lambda name: repr(name)[:12]
)
def test_bad_namespaces(world: World, namespace: Any) -> None:
    refused(lambda: world.connect(namespace=namespace), InvalidName, "namespace")


@pytest.mark.parametrize(
    "options",
    [
        {"durability": "some"},
        {"command_timeout": 0},
        {"command_timeout": math.nan},
        {"owner": 5},
        {"owner": "x" * 257},
    ],
    ids=repr,
)
def test_bad_client_options(world: World, options: dict[str, Any]) -> None:
    refused(lambda: world.connect(**options), ConfigurationError, next(iter(options)))


@pytest.mark.parametrize("target", ["", "memory", "redis://x", "embedded:", 5, None, {}], ids=repr)
def test_bad_targets(target: Any) -> None:
    from pyqueue import AsyncClient

    refused(lambda: Client(target), ConfigurationError, "target")
    refused(lambda: AsyncClient(target), ConfigurationError, "target")


def test_closed_client(world: World, name: str) -> None:
    client = world.connect()
    queue = client.queue(name)
    held = hold(queue)
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: queue.push(1),
        lambda: queue.pop(0),
        lambda: queue.reserve(60),
        lambda: queue.commit(held),
        lambda: queue.counts(),
        lambda: client.queues(),
    ]
    for call in calls:
        with pytest.raises(QueueClosed):
            call()
    elsewhere = world.client.queue(name)
    elsewhere.commit(held)
    with pytest.raises(LeaseLost):
        elsewhere.commit(held)


@pytest.mark.needs("pop")
def test_close_wakes_waiting_consumers(world: World, name: str) -> None:
    client = world.connect()
    queue = client.queue(name)
    received = [waiting(client, queue, queue.pop) for _ in range(3)]
    client.close()
    for each in received:
        with pytest.raises(QueueClosed):
            each.result(10)


def test_ids_have_two_types(queue: AnyQueue) -> None:
    for id in (ObjectId(), "x" * 512, "a~b", "ü"):
        assert queue.get(id) is None
