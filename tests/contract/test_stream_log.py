"""Streams: append, read, trim, and their refusals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import ConfigurationError, InvalidMessage, InvalidName, StreamMessage
from pyqueue.backends.streams import retention
from tests.contract.world import AnyClient, World, in_thread, near, refuses

pytestmark = pytest.mark.needs("standard")  # a stream does not depend on the kind of queues


class Click(BaseModel):
    page: str
    at: datetime


def test_append_and_read(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    assert log.append("a") == 0
    assert log.append_many(["b", None, {"c": [1]}], headers={"by": "me"}) == [1, 2, 3]
    assert log.append_many([]) == []
    found = log.read()
    assert [each.payload for each in found] == ["a", "b", None, {"c": [1]}]
    assert [each.position for each in found] == [0, 1, 2, 3]
    assert [each.headers for each in found] == [{}, *[{"by": "me"}] * 3]
    first = found[0]
    assert type(first) is StreamMessage
    assert (first.id, first.queue, first.state) == (f"{name}~0", name, "ready")
    assert near(first.pushed, 0)


def test_read_after_a_position(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append_many(range(1500))
    found = log.read(after=998, limit=3)
    assert [(each.position, each.payload) for each in found] == [(n, n) for n in (999, 1000, 1001)]
    assert len(log.read()) == 1000
    assert [each.position for each in log.read(after=1497)] == [1498, 1499]
    assert log.read(after=1499) == []


def test_stream_with_a_model(client: AnyClient, name: str) -> None:
    log = client.stream(name, Click)
    click = Click(page="/", at=datetime(2026, 1, 1, tzinfo=UTC))
    log.append(click)
    assert log.read()[0].payload == click
    with pytest.raises(InvalidMessage, match="at"):
        log.append_many([click, {"page": "/"}])
    client.stream(name).append("no click")
    raw = log.read()[1]
    assert (len(log.read()), raw.payload) == (2, "no click")
    assert raw.error["type"] == "InvalidMessage"


def test_stream_is_listed_with_its_kind(client: AnyClient, name: str) -> None:
    client.stream(name).append_many(range(3))
    (info,) = [each for each in client.queues() if name in each.name]
    assert (info.name, info.kind, info.counts.ready, info.paused) == (name, "stream", 3, False)


def test_stream_is_no_queue_and_a_queue_no_stream(client: AnyClient, name: str) -> None:
    client.stream(name).append(1)
    queue = client.queue(name)
    for call in (lambda: queue.push(1), lambda: queue.reserve(0), queue.purge, queue.pause):
        with pytest.raises(ConfigurationError, match=r"open it with client.stream\(\)"):
            call()
    other = client.queue(f"{name}-queue")
    other.push(1)
    log = client.stream(other.name)
    for call in (lambda: log.append(1), log.read, lambda: log.trim(before=3)):
        with pytest.raises(ConfigurationError, match=r"open it with client.queue\(\)"):
            call()
    held = other.reserve(0)
    with pytest.raises(ConfigurationError, match="is a stream, and messages cannot move there"):
        other.move(held, to=name)
    other.commit(held)


@pytest.mark.parametrize(
    "call",
    [
        lambda log: log.append(1, headers={"a.b": 1}),
        lambda log: log.append_many("abc"),
        lambda log: log.append_many(3),
        lambda log: log.read(after=-1),
        lambda log: log.read(after="first"),
        lambda log: log.read(limit=0),
        lambda log: log.trim(before=True),
        lambda log: log.trim(before=datetime(2026, 1, 1)),
    ],
)
def test_stream_refuses_wrong_arguments(call: Any, client: AnyClient, name: str) -> None:
    log = client.stream(name)
    with pytest.raises(ConfigurationError):
        call(log)
    assert log.read() == []
    assert name not in [each.name for each in client.queues()], "nothing was written"


def test_stream_refuses_wrong_options(client: AnyClient, name: str) -> None:
    for wrong in (0, 599, -1, "7 days", True):
        with pytest.raises(ConfigurationError, match="retention"):
            client.stream(name, retention=wrong)
    with pytest.raises(InvalidName):
        client.stream("a~b")
    client.stream(name, retention=timedelta(hours=1)).append(1)
    client.stream(name, retention=3600).append(2)
    client.stream(name).append(3)
    with pytest.raises(ConfigurationError, match=r"retention=3600.0 .* retention=7200.0"):
        client.stream(name, retention=7200).append(4)


def test_reshape_changes_the_retention(
    world: World, client: AnyClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RETENTION_INTERVAL_S", 0)
    log = client.stream(name, retention=86400)
    log.append_many(range(3))
    old = datetime.now(UTC) - timedelta(hours=2)
    world.raw().update_many({"q": f"~log:{name}"}, {"$set": {"pushed": old}})
    log.append(3)
    assert len(log.read()) == 4
    client.reshape(name, retention=timedelta(hours=1))
    log.append(4)  # it agreed before and follows
    assert [each.payload for each in log.read()] == [3, 4]
    with pytest.raises(ConfigurationError, match=r"retention=3600.0 .* retention=7200.0"):
        world.connect().stream(name, retention=7200).append(5)
    missing = f"{name}-other"
    refuses(r"retention: .* at least 600", lambda: client.reshape(name, retention=599))
    refuses(r"strict: .*of kind 'stream'", lambda: client.reshape(name, strict=True))
    refuses(r"set at least one option; .* has the options retention", lambda: client.reshape(name))
    refuses(r"does not exist.*client.stream\(\)", lambda: client.reshape(missing, retention=600))


def test_trim_keeps_young_messages(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append_many(range(10))
    assert log.trim(before=10) == 0
    assert log.trim(before=datetime.now(UTC)) == 0


def test_trim_deletes_whole_packs(world: World, client: AnyClient, name: str) -> None:
    log = client.stream(name)
    for first in range(0, 30, 10):
        log.append_many(range(first, first + 10))
    old = datetime.now(UTC) - timedelta(hours=1)
    world.raw().update_many({"q": f"~log:{name}"}, {"$set": {"pushed": old}})
    assert log.trim(before=25) == 20
    assert [each.position for each in log.read()] == list(range(20, 30))
    assert log.trim(before=30) == 20, "the last pack stays"
    assert log.append("next") == 30


def test_delete_queue_deletes_a_stream(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append_many(range(5))
    with pytest.raises(ConfigurationError, match="has 5 messages; pass force=True"):
        client.delete_queue(name)
    assert client.delete_queue(name, force=True) == 5
    assert log.read() == []
    assert client.stream(name).append("again") == 5, "positions continue"


def test_append_after_a_deletion_is_received(client: AnyClient, name: str) -> None:
    """Even if the program has not noticed the last appends of another one."""
    log, other = client.stream(name), client.stream(name)
    log.append(0)
    other.append(1)
    client.delete_queue(name, force=True)
    assert log.append("new") == 2
    assert [each.payload for each in log.read()] == ["new"]
    assert client.stream(name).consumer("g").reserve(0).payload == "new"


def test_concurrent_appends_are_contiguous(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    appends = [in_thread(lambda: [log.append(number) for number in range(10)]) for _ in range(4)]
    positions = [position for each in appends for position in each.result()]
    assert sorted(positions) == list(range(40))
    assert [each.position for each in log.read()] == list(range(40))
