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
    AsyncClient,
    Backoff,
    Client,
    ConfigurationError,
    InvalidMessage,
    InvalidName,
    LeaseLost,
    QueueClosed,
    QueueError,
)
from tests.contract.world import AnyQueue, World, hold, waiting

#: A refusal reaches no driver.
pytestmark = pytest.mark.differs_by("kind")
by_client = pytest.mark.differs_by("client")

NAIVE = datetime(2030, 1, 1)  # no zone, so refused
FAR = datetime(8000, 1, 1, tzinfo=UTC)
SOON = datetime.now(UTC) + timedelta(hours=1)
LARGE = "x" * (16 * 1024 * 1024)
DEEP: dict[str, Any] = {}
DEEP["self"] = DEEP


class Order(BaseModel):
    n: int


BAD_PAYLOADS: dict[str, Any] = {
    "an object": object(),  # the case of most places, since the large ones take long
    "over 16 MB": LARGE,
    "over 16 MB less 64 KB": "x" * (16 * 1024 * 1024 - 63 * 1024),
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

#: Options of a push, and words of the error.
BAD_PUSHES: dict[str, tuple[dict[str, Any], str]] = {
    **{f"delay {case}": ({"delay": value}, "delay") for case, value in BAD_DURATIONS.items()},
    "naive at": ({"at": NAIVE}, "at:.*time zone"),
    "at in the year 8000": ({"at": FAR}, "at:.*8000"),
    "at in the year 9999": ({"at": datetime.max.replace(tzinfo=UTC)}, "at:.*8000"),
    "at of another type": ({"at": 5}, "at:.*datetime"),
    "delay with at": ({"delay": 1, "at": SOON}, "delay, at"),
    "unknown on_duplicate": ({"key": "k", "on_duplicate": "merge"}, "on_duplicate.*'replace'"),
    "unhashable on_duplicate": ({"on_duplicate": ["ignore"]}, "on_duplicate"),
    "empty key": ({"key": ""}, "key.*1-512"),
    "long key": ({"key": "k" * 513}, "key.*1-512"),
    "key with NUL": ({"key": "a\0"}, "key"),
    "key that is no str": ({"key": 5}, "key"),
    "headers that are none": ({"headers": ["a"]}, "headers"),
    "header with a dot": ({"headers": {"a.b": 1}}, "headers.*dots"),
    "header with a dollar": ({"headers": {"$a": 1}}, "headers.*\\$"),
    "header that is no str": ({"headers": {1: 1}}, "headers"),
    "header without a name": ({"headers": {"": 1}}, "headers"),
    "header of another type": ({"headers": {"a": [1]}}, "headers.*a"),
    "65 headers": ({"headers": {f"h{number}": 1 for number in range(65)}}, "headers: 65 .*64"),
    "headers of more than 8 KB": (
        {"headers": {"a": "x" * 4096, "b": "\N{EURO SIGN}" * 1366}},
        "headers: 8196 bytes.*8192",
    ),
    "header of None": ({"headers": {"a": None}}, "headers.*a"),
    "header over 64 bits": ({"headers": {"a": 1 << 63}}, "headers.*a"),
    "empty id": ({"id": ""}, "id.*1-512"),
    "long id": ({"id": "x" * 513}, "id.*1-512"),
    "id like a record's": ({"id": "~x"}, "id.*~"),
    "id of another type": ({"id": 5}, "id"),
}


def refused(kind: type[QueueError], words: str, *calls: Callable[[], Any]) -> None:
    """Check that each call raises exactly this class, as a ValueError that names the argument."""
    for call in calls:
        with pytest.raises(QueueError, match=words) as caught:
            call()
        assert type(caught.value) is kind
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS.keys())
class TestPayloads:
    def test_push(self, world: World, queue: AnyQueue, payload: Any) -> None:
        replace = {"key": "k", "on_duplicate": "replace"}
        for options in ({}, {"key": "k"}, replace, {"id": queue.name}):
            refused(InvalidMessage, "payload", partial(queue.push, payload, **options))
        assert world.stored(queue) == []

    def test_batch_with_one_bad_item_writes_nothing(
        self, world: World, queue: AnyQueue, payload: Any
    ) -> None:
        queue.push("before")
        before = world.stored(queue)
        refused(
            InvalidMessage,
            "payload",
            lambda: queue.push_many([1, 2, payload, 3]),
            lambda: queue.push_many([1, payload], keys=["a", "b"]),
            lambda: queue.push_many([1, payload], keys=["a", "b"], on_duplicate="replace"),
        )
        assert world.stored(queue) == before

    def test_settling(self, world: World, queue: AnyQueue, other: AnyQueue, payload: Any) -> None:
        queue.push_many([1, 2])
        held = queue.reserve_many(2, timeout=0)
        before = world.stored(queue, other)
        refused(
            InvalidMessage,
            "payload",
            lambda: queue.commit(*held, payload=payload),
            lambda: queue.move(*held, to=other, payload=payload),
            lambda: queue.move_many([(held[0], 1), (held[1], payload)], to=other),
        )
        update = partial(queue.move, *held, to=other, update={"$set": {"a": payload}})
        refused(InvalidMessage, "payload|update", update)
        words = "payload|state|checkpoint"
        refused(InvalidMessage, words, lambda: queue.checkpoint(held[0], payload))
        assert world.stored(queue, other) == before
        queue.commit(*held)


def test_bad_pushes(world: World, queue: AnyQueue) -> None:
    lists = {"key": "keys", "id": "ids"}
    for options, words in BAD_PUSHES.values():
        many = {
            lists.get(name, name): [None, value] if name in lists else value
            for name, value in options.items()
        }
        push_many = partial(queue.push_many, [1, 2], **many)
        refused(ConfigurationError, words, partial(queue.push, 1, **options), push_many)
        assert world.stored(queue) == [], options


@pytest.mark.parametrize("name", ["keys", "ids"])
def test_lists_of_different_lengths(world: World, queue: AnyQueue, name: str) -> None:
    for given in ([], ["a"], ["a", "b", "c"], "ab", 5):
        refused(ConfigurationError, name, partial(queue.push_many, [1, 2], **{name: given}))
    assert world.stored(queue) == []


# ---- names, options


def test_bad_names(world: World, queue: AnyQueue) -> None:
    refused(InvalidName, "name", lambda: world.client.queue(queue.name, dead_letter="a b"))
    held = hold(queue)
    before = world.bytes(held.id)
    for bad in ("", "a b", "a~b", "~queue:x", "a/b", "ü", "x" * 111, ".dead" * 30, "a\n", 5, None):
        refused(InvalidName, "name", partial(world.client.queue, bad))
        with pytest.raises((InvalidName, ConfigurationError)):
            queue.move(held, to=bad)
        assert world.bytes(held.id) == before, bad
    queue.commit(held)


#: Options of a queue. The first word of a case stands in the error.
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    **{
        f"{name} {case}": {name: value}
        for name in ("lease", "history", "poll")
        for case, value in (BAD_DURATIONS | {"zero": 0}).items()
    },
    "max_tries zero": {"max_tries": 0},
    "max_tries float": {"max_tries": 1.5},
    "max_tries bool": {"max_tries": True},
    "backoff": {"backoff": 5},
    "base negative": {"backoff": Backoff(base=-1)},
    "base NaN": {"backoff": Backoff(base=math.nan)},
    "base str": {"backoff": Backoff(base="1")},  # type: ignore[arg-type]  # as a user may
    "factor negative": {"backoff": Backoff(factor=-1)},
    "maximum negative": {"backoff": Backoff(maximum=-1)},
    "jitter negative": {"backoff": Backoff(jitter=-0.1)},
    "jitter over 1": {"backoff": Backoff(jitter=2)},
    "model": {"model": object()},
}


def test_bad_options(world: World, name: str) -> None:
    for case, options in BAD_OPTIONS.items():
        words = case.partition(" ")[0]
        refused(ConfigurationError, words, partial(world.client.queue, name, **options))


# ---- receiving


@pytest.mark.needs("pop")
def test_bad_timeouts_and_leases(world: World, queue: AnyQueue) -> None:
    for value in BAD_DURATIONS.values():
        refused(
            ConfigurationError,
            "timeout",
            partial(queue.pop, value),
            partial(queue.reserve, value),
            partial(queue.pop_many, 1, timeout=value),
            partial(queue.reserve_many, 1, timeout=value),
        )
    for lease in (*BAD_DURATIONS.values(), 0):
        refused(ConfigurationError, "lease", partial(queue.reserve, 0, lease=lease))
    assert world.stored(queue) == []


@pytest.mark.needs("pop")
def test_bad_limits(world: World, queue: AnyQueue) -> None:
    for limit in (0, -1, 1.5, "1", True, None):
        refused(ConfigurationError, "limit", partial(queue.pop_many, limit, timeout=0))
        refused(ConfigurationError, "limit", partial(queue.reserve_many, limit, timeout=0))
        refused(ConfigurationError, "limit", partial(queue.peek, limit))
        if limit is not None:
            refused(ConfigurationError, "limit", partial(queue.redrive, limit))
    assert world.stored(queue) == []


@pytest.mark.needs("history")
def test_bad_history(world: World, queue: AnyQueue) -> None:
    refused(ConfigurationError, "limit", lambda: queue.history(0))
    refused(ConfigurationError, "since", lambda: queue.history(since=NAIVE))
    refused(ConfigurationError, "since", lambda: queue.history(since=FAR))
    refused(ConfigurationError, "id", lambda: queue.replay("~x"))
    assert world.stored(queue) == []


def test_bad_ids(queue: AnyQueue) -> None:
    for id in ("", "~queue:x", 5, None):
        refused(ConfigurationError, "id", partial(queue.get, id), partial(queue.remove, id))


# ---- settling

#: Options of a move, and words of the error.
BAD_MOVES: dict[str, tuple[dict[str, Any], str]] = {
    **{f"delay {case}": ({"delay": value}, "delay") for case, value in BAD_DURATIONS.items()},
    "key": ({"key": ""}, "key"),
    "65 headers": ({"headers": {f"h{n}": n for n in range(65)}}, "headers.*64"),
    "headers": ({"headers": {"a.b": 1}}, "headers"),
    "to nothing": ({"to": None}, "to"),
    "update operator": ({"update": {"$where": {"a": 1}}}, "update"),
    "update plain": ({"update": {"a": 1}}, "update"),
    "update no fields": ({"update": {"$set": 1}}, "update"),
    "update rename to nothing": ({"update": {"$rename": {"a": ""}}}, "update"),
    "update empty name": ({"update": {"$set": {"": 1}}}, "update"),
    "update and payload": ({"payload": 1, "update": {"$set": {"a": 1}}}, "payload, update"),
}
#: The name of a method, its options, and words of the error.
BAD_SETTLES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"{method} {name} {case}": (method, {name: value}, name)
        for method, name in (("rollback", "delay"), ("extend", "lease"))
        for case, value in BAD_DURATIONS.items()
    },
    **{
        f"move {case}": ("move", {"to": "x", **options}, words)
        for case, (options, words) in BAD_MOVES.items()
    },
    "rollback error": ("rollback", {"error": 5}, "error"),
    "bury error": ("bury", {"error": 5}, "error"),
    "progress over 1": ("progress", {"fraction": 1.1}, "fraction"),
    "progress NaN": ("progress", {"fraction": math.nan}, "fraction"),
    "progress negative": ("progress", {"fraction": -0.1}, "fraction"),
    "progress note": ("progress", {"fraction": 0.5, "note": 5}, "note"),
    "progress long note": ("progress", {"fraction": 0.5, "note": "x" * 2049}, "note"),
}


@pytest.mark.needs("move", "dead_letter")
def test_bad_settles(world: World, queue: AnyQueue) -> None:
    held = hold(queue, {"a": 1})
    until, before = held.until, world.stored(queue, "x")
    for method, options, words in BAD_SETTLES.values():
        refused(ConfigurationError, words, partial(getattr(queue, method), held, **options))
        assert world.stored(queue, "x") == before, (method, options)
        assert held.until == until
    queue.commit(held)


def test_settling_of_no_reservation(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    before = world.stored(queue)
    for wrong in (held.id, queue.get(held.id)):
        refused(ConfigurationError, "reservations", partial(queue.commit, wrong))
    assert world.stored(queue) == before


def test_reservation_of_another_queue(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue)
    before = world.bytes(held.id)
    settles = (other.commit, other.rollback, other.extend, other.release, other.bury)
    refused(ConfigurationError, queue.name, *(partial(settle, held) for settle in settles))
    refused(ConfigurationError, queue.name, lambda: other.move(held, to=queue))
    assert world.bytes(held.id) == before


@pytest.mark.needs("move")
def test_queue_of_another_namespace(world: World, queue: AnyQueue) -> None:
    elsewhere = world.connect(namespace="elsewhere").queue(queue.name)
    held = hold(queue)
    before = world.bytes(held.id)
    refused(
        ConfigurationError,
        "to:.*namespace",
        lambda: queue.move(held, to=elsewhere),
        lambda: queue.move_many([(held, 1)], to=elsewhere),
    )
    assert world.bytes(held.id) == before
    assert list(world.raw("elsewhere").find({})) == []


@pytest.mark.needs("move")
def test_key_for_several_messages(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many([1, 2])
    held = queue.reserve_many(2, timeout=0)
    before = world.stored(queue, other)
    refused(ConfigurationError, "key", lambda: queue.move(*held, to=other, key="k"))
    assert world.stored(queue, other) == before


@pytest.mark.needs("move")
def test_payload_of_the_wrong_model(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    typed = world.client.queue(other.name, Order)
    queue.push_many([1, 2])
    held = queue.reserve_many(2, timeout=0)
    before = world.stored(queue, other)
    refused(
        InvalidMessage,
        "payload.*Order",
        lambda: queue.move(*held, to=typed, payload={"n": "x"}),
        lambda: queue.move_many([(held[0], {"n": 1}), (held[1], {})], to=typed),
    )
    assert world.stored(queue, other) == before


# ---- clients


@by_client
def test_bad_namespaces(world: World) -> None:
    for namespace in ("", "a b", "system.x", "$a", "x" * 101, 5):
        refused(InvalidName, "namespace", partial(world.connect, namespace=namespace))


@by_client
def test_bad_client_options(world: World) -> None:
    refused(ConfigurationError, "durability", lambda: world.connect(durability="some"))
    for wrong in (0, math.nan):
        call = partial(world.connect, command_timeout=wrong)
        refused(ConfigurationError, "command_timeout", call)
    for owner in (5, "x" * 257):
        refused(ConfigurationError, "owner", partial(world.connect, owner=owner))


def test_bad_targets() -> None:
    targets: tuple[Any, ...] = ("", "memory", "redis://x", "embedded:", 5, None, {})
    for target in targets:
        refused(ConfigurationError, "target", partial(Client, target), partial(AsyncClient, target))


@by_client
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


@by_client
@pytest.mark.needs("pop")
def test_close_wakes_waiting_consumers(world: World, name: str) -> None:
    client = world.connect()
    queue = client.queue(name)
    received = [waiting(client, queue, queue.pop) for _ in range(3)]
    client.close()
    for each in received:
        with pytest.raises(QueueClosed):
            each.result(10)


@by_client
def test_ids_have_two_types(queue: AnyQueue) -> None:
    for id in (ObjectId(), "x" * 512, "a~b", "ü"):
        assert queue.get(id) is None
