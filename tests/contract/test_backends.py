"""Where backends differ: what one cannot do it declares, and refuses; and no client misreads a queue of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyqueue import ConfigurationError
from tests.contract.newest import Newest
from tests.contract.test_settle import hold
from tests.contract.world import AnyClient, AnyQueue, World


@pytest.mark.needs("newest")
class TestNewest:
    def test_the_newest_comes_first(self, queue: AnyQueue) -> None:
        for n in range(5):
            queue.push(n)
        assert [each.payload for each in queue.peek()] == [4, 3, 2, 1, 0]
        message, held = queue.pop(0), queue.reserve(0)
        assert message is not None
        assert held is not None
        assert (message.payload, held.payload) == (4, 3)
        assert [each.payload for each in queue.pop_many(2, timeout=0)] == [2, 1]
        queue.release(held)
        assert [each.payload for each in queue.reserve_many(5, timeout=0)] == [3, 0]

    def test_history_is_declared_and_refused(self, world: World, queue: AnyQueue) -> None:
        assert "history" not in Newest.capabilities
        calls: list[Callable[[], Any]] = [
            lambda: world.client.queue(queue.name, history=60),
            lambda: queue.history(),
            lambda: queue.replay("x"),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match=r"history.*newest"):
                call()
        assert world.stored(queue) == []

    def test_its_record_says_so(self, world: World, queue: AnyQueue) -> None:
        queue.bury(hold(queue))
        assert world.document(f"~queue:{queue.name}")["kind"] == "newest"
        assert world.document(f"~queue:{queue.name}.dead")["kind"] == "standard"


@pytest.mark.parametrize(
    "change",
    [{"kind": "ordered"}, {"v": 2}, {"kind": None}, {"v": "1"}],
    ids=lambda change: repr(change),
)
def test_a_queue_of_a_kind_or_version_that_is_not_known(
    world: World, queue: AnyQueue, other: AnyQueue, change: dict[str, Any]
) -> None:
    there = queue.push("there")
    world.raw().update_one({"_id": f"~queue:{queue.name}"}, {"$set": change})
    held = hold(other)
    before = world.stored(queue, other)
    stranger = world.connect().queue(queue.name)  # knows nothing yet
    calls: list[Any] = [
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
    for call in calls:
        with pytest.raises(ConfigurationError, match=queue.name):
            call()
    source = world.connect().queue(other.name)
    for to in (queue.name, world.connect().queue(queue.name)):
        with pytest.raises(ConfigurationError):
            source.move(held, to=to)
    assert world.stored(queue, other) == before


def test_a_move_into_a_queue_of_another_kind(
    world: World, client: AnyClient, queue: AnyQueue, name: str
) -> None:
    """By name this client cannot know how a message enters there."""
    world.raw().insert_one(
        {"_id": f"~queue:{name}-x", "q": f"{name}-x", "record": True, "kind": "ordered", "v": 1}
    )
    held = hold(queue)
    before = world.bytes(held.id)
    with pytest.raises(ConfigurationError, match="ordered"):
        queue.move(held, to=f"{name}-x")
    assert world.bytes(held.id) == before
