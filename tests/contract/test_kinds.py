"""Kinds of queues: a kind refuses the features that it lacks, and several kinds share a client.

No client misreads a queue of another kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyqueue import ConfigurationError
from tests.contract.newest import Newest
from tests.contract.world import AnyClient, AnyQueue, World, hold, refuses, waiting
from tests.support.eventually import eventually


@pytest.mark.needs("newest")
class TestNewest:
    def test_newest_message_comes_first(self, queue: AnyQueue) -> None:
        for n in range(5):
            queue.push(n)
        assert [each.payload for each in queue.peek()] == [4, 3, 2, 1, 0]
        message, held = queue.pop(0), queue.reserve(0)
        assert (message.payload, held.payload) == (4, 3)
        assert [each.payload for each in queue.pop_many(2, timeout=0)] == [2, 1]
        queue.release(held)
        assert [each.payload for each in queue.reserve_many(5, timeout=0)] == [3, 0]

    def test_history_is_declared_and_refused(self, world: World, queue: AnyQueue) -> None:
        assert "history" not in Newest.capabilities
        refuses(
            r"history.*newest",
            lambda: world.client.queue(queue.name, history=60),
            lambda: queue.history(),
            lambda: queue.replay("x"),
        )
        assert world.stored(queue) == []

    def test_record_names_the_kind(self, world: World, queue: AnyQueue) -> None:
        queue.bury(hold(queue))
        assert world.document(f"~queue:{queue.name}")["kind"] == "newest"
        assert world.document(f"~queue:{queue.name}.dead")["kind"] == "standard"


@pytest.mark.needs("pop")
@pytest.mark.parametrize(
    "change",
    [{"kind": "unheard-of"}, {"v": 3}, {"kind": None}, {"v": "1"}],
    ids=lambda change: repr(change),
)
def test_unknown_kind_or_version_is_refused(
    world: World, queue: AnyQueue, other: AnyQueue, change: dict[str, Any]
) -> None:
    there = queue.push("there")
    world.raw().update_one({"_id": f"~queue:{queue.name}"}, {"$set": change})
    held = hold(other)
    before = world.stored(queue, other)
    stranger = world.connect().queue(queue.name)  # this client has not read the record yet
    calls: list[Callable[[], Any]] = [
        lambda: stranger.push(1),
        lambda: stranger.push(1, key="k", on_duplicate="replace"),
        lambda: stranger.pop(0),
        lambda: stranger.reserve(0),
        lambda: stranger.pop_many(5, timeout=0),
        lambda: stranger.remove(there),
        stranger.purge,
        stranger.pause,
        stranger.resume,
    ]
    if "dead_letter" in world.place.offers:
        calls.append(stranger.redrive)
    if "history" in world.place.offers:
        calls.append(lambda: stranger.replay(there))
    refuses(queue.name, *calls)
    source = world.connect().queue(other.name)
    for to in (queue.name, world.connect().queue(queue.name)):
        with pytest.raises(ConfigurationError):
            source.move(held, to=to)
    assert world.stored(queue, other) == before


def test_move_by_name_into_another_kind_is_refused(
    world: World, queue: AnyQueue, name: str
) -> None:
    """This client knows only the name of the target, not how a message enters that kind."""
    world.raw().insert_one(
        {"_id": f"~queue:{name}-x", "q": f"{name}-x", "record": True, "kind": "unheard-of", "v": 1}
    )
    held = hold(queue)
    before = world.bytes(held.id)
    with pytest.raises(ConfigurationError, match="unheard-of"):
        queue.move(held, to=f"{name}-x")
    assert world.bytes(held.id) == before


# ---- two kinds in one client


@pytest.mark.needs("pop")
def test_kinds_share_a_client(client: AnyClient, name: str) -> None:
    """The same pushes come out in two orders."""
    first = client.queue(f"{name}-fifo", kind="standard")
    last = client.queue(f"{name}-lifo", kind="newest")
    for queue in (first, last):
        queue.push("a")
        queue.push("b", delay=0.002)
        queue.push("c", delay=0.004)
    eventually(lambda: first.counts().ready == last.counts().ready == 3, "all are ready")
    assert [each.payload for each in first.pop_many(3, timeout=0)] == ["a", "b", "c"]
    assert [each.payload for each in last.pop_many(3, timeout=0)] == ["c", "b", "a"]


@pytest.mark.needs("pop")
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "Queue"])
def test_moves_between_kinds_use_the_entering_of_the_target(
    world: World, client: AnyClient, name: str, by_name: bool
) -> None:
    first = client.queue(f"{name}-fifo", kind="standard")
    last = client.queue(f"{name}-lifo", kind="newest")
    assert last.pop(0) is None  # this creates the record, which names the kind
    assert first.pop(0) is None
    id = first.push("m", key="k")
    assert "height" not in world.document(id)
    first.move(first.reserve(0), to=last.name if by_name else last)
    assert world.document(id)["height"] == world.document(id)["due"]
    last.move(last.reserve(0), to=first.name if by_name else first)
    document = world.document(id)
    assert "height" not in document
    assert (document["q"], document["last_key"]) == (first.name, "k")
    assert [stop["q"] for stop in document["trail"]] == [first.name, last.name]


@pytest.mark.needs("pop")
def test_dead_messages_return_to_a_queue_of_their_kind(
    world: World, client: AnyClient, name: str
) -> None:
    last = client.queue(name, kind="newest")
    id = last.push("m")
    last.bury(last.reserve(0), error="why")
    assert "height" not in world.document(id)
    assert world.document(f"~queue:{name}.dead")["kind"] == "standard"
    assert client.queue(f"{name}.dead", kind="standard").redrive() == 1
    assert "height" in world.document(id)
    assert last.pop(0).payload == "m"


def test_queue_of_another_kind_is_refused(world: World, client: AnyClient, name: str) -> None:
    client.queue(name, kind="newest").push(1)
    other = world.connect().queue(name, kind="standard")
    before = world.stored(name)
    refuses(
        r"of kind 'newest'.*'standard'",
        lambda: other.push(2),
        lambda: other.reserve(0),
        other.purge,
        other.pause,
    )
    assert world.stored(name) == before


@pytest.mark.parametrize("kind", ["unheard-of", "Standard", "", 1])
def test_kind_that_this_release_lacks_is_refused(client: AnyClient, name: str, kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"kind: .*'standard'"):
        client.queue(name, kind=kind)


# ---- objects that name no kind


@pytest.mark.needs("standard")
def test_producer_without_a_kind_comes_first(world: World, client: AnyClient, name: str) -> None:
    """The first consumer names the kind and receives all messages. The producer follows."""
    for kind in ("standard", "priority", "ordered", "bucket"):
        producer, consumer = client.queue(f"{name}-{kind}"), world.connect()
        pushed = [producer.push(1, key="k"), *producer.push_many([2, 3])]
        assert world.document(f"~queue:{name}-{kind}")["open"] is True
        found = consumer.queue(f"{name}-{kind}", kind=kind).reserve_many(9, timeout=0)
        assert [each.id for each in found] == pushed
        assert producer.counts().reserved == 3
        assert "open" not in world.document(f"~queue:{name}-{kind}")


@pytest.mark.needs("standard")
def test_consumer_without_a_kind_waits_for_a_producer(
    world: World, client: AnyClient, name: str
) -> None:
    """A mistyped name leaves no record. The first push names the kind and wakes the consumer."""
    queue, before = client.queue(name), world.stored(name)
    assert queue.reserve(0.02) is None
    assert (queue.counts().total, queue.peek(), world.stored(name)) == (0, [], before)
    received = waiting(client, queue, lambda: queue.reserve(60))
    ids = client.queue(name, kind="bucket").push_many([1, 2])
    held = received.result(30)
    assert (held.id, held.payload) == (ids[0], 1)
    queue.commit(held)
    assert queue.counts().total == 1
