"""The record of a queue: what all users must agree on, and what it shows to people."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, known_queues
from pyqueue.backends import kind, namespace
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.standard import Standard
from pyqueue.connecting import runner_of
from pyqueue.requests import EnsureQueue


class Shaped(Standard):
    """A kind with two options on which all users of a queue must agree."""

    name = "shaped"
    shape: Mapping[str, object] = {"on_failure": "block", "limit": None}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Return a client that never takes a record as known."""
    monkeypatch.setattr(known_queues, "_LIFETIME_S", 0)
    monkeypatch.setitem(kind._kinds, "shaped", Shaped())
    with Client("memory:") as client:
        yield client


def record(client: Client) -> dict[str, Any]:
    found = client.database["pyqueue"].find_one({"_id": "~queue:a"})
    assert found is not None
    return dict(found)


def push(client: Client, **shape: object) -> None:
    """Push to queue "a" of the kind with a shape."""
    plans = QueuePlans("a", Options(dead_letter="a.dead", shape=shape), kind="shaped")
    runner_of(client).run(plans.push([1]))


# ---- the shape


def test_shape_is_stored_with_defaults_and_a_version(client: Client) -> None:
    push(client, on_failure="skip")
    assert record(client)["shape"] == {"on_failure": "skip", "limit": None}
    assert record(client)["v"] == 2 == namespace.LATEST_VERSION


def test_shape_that_is_not_given_comes_from_the_record(client: Client) -> None:
    push(client, on_failure="skip")
    before = record(client)
    push(client)
    push(client, on_failure="skip")
    assert record(client) == before


@pytest.mark.parametrize("lifetime", [0.0, 3600.0])
def test_different_shape_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, lifetime: float
) -> None:
    """Also if another object of this client has just read the record."""
    monkeypatch.setattr(known_queues, "_LIFETIME_S", lifetime)
    push(client, on_failure="skip")
    before = client.queues()
    with pytest.raises(ConfigurationError, match=r"on_failure='skip'.*on_failure='block'"):
        push(client, on_failure="block")
    assert client.queues() == before


def test_producer_follows_a_reshape_within_5_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program reshapes a bucket. A queue without such options is read more rarely."""
    now = 1000.0
    monkeypatch.setattr(known_queues, "time", SimpleNamespace(monotonic=lambda: now))
    with Client("memory:") as client:
        bucket, plain = client.queue("a", kind="bucket", pack=4), client.queue("plain")
        assert plain.push(1)
        assert [int(str(id)[-4:]) for id in bucket.push_many([1] * 4)] == [0, 1, 2, 3]
        put = {"$set": {"shape.pack": 2}}
        client.database["pyqueue"].update_one({"_id": "~queue:a"}, put)
        now += 5
        assert [int(str(id)[-4:]) for id in bucket.push_many([1] * 4)] == [0, 1, 0, 1]
        known = runner_of(client).open().known
        assert known.kind_of(EnsureQueue("plain", "standard")) == "standard"
        now += 25
        assert known.kind_of(EnsureQueue("plain", "standard")) is None


def test_shape_survives_a_deletion(client: Client) -> None:
    push(client, on_failure="skip")
    client.delete_queue("a", force=True)
    with pytest.raises(ConfigurationError, match="on_failure"):
        push(client, on_failure="block")
    push(client)
    assert record(client)["shape"]["on_failure"] == "skip"


def test_kind_without_a_shape_refuses_one_and_stores_none(client: Client) -> None:
    client.queue("a").push(1)
    assert "shape" not in record(client)
    assert record(client)["v"] == 1
    with pytest.raises(ConfigurationError, match="on_failure"):
        QueuePlans("a", Options(shape={"on_failure": "skip"}))


# ---- the options


def test_other_options_do_not_rewrite_the_record(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A producer sets nothing, and two consumers differ: each writes once and warns once."""
    caplog.set_level(logging.WARNING, "pyqueue")
    producer = client.queue("a")
    consumers = [client.queue("a", lease=5, history=60), client.queue("a", lease=7)]
    written = []
    for _ in range(5):
        producer.push(1)
        for consumer in consumers:
            consumer.pop(0)
            written.append(record(client)["options"])
    assert written[0] == {"lease": 5.0, "history": 60.0}
    assert written[1:] == [{"lease": 7.0, "history": 60.0}] * 9
    assert [each.getMessage() for each in caplog.records] == [
        "queue 'a' is used with different options than before: lease"
    ]


def test_default_options_are_not_stored(client: Client) -> None:
    client.queue("a", lease=60, max_tries=20, dead_letter="a.dead").push(1)
    assert record(client)["options"] == {}
    shown = runner_of(client).run(namespace.options_of("a"))
    assert shown == {"lease": 60, "max_tries": 20, "dead_letter": "a.dead", "history": None}


def test_index_may_be_added_while_others_are_made(client: Client) -> None:
    """After a fail-over a client makes its indexes, and other calls go on."""
    making = runner_of(client).open().known.make_indexes()
    next(making)
    client.queue("a", kind="priority").push(1)
    assert len(list(making)) > 0
