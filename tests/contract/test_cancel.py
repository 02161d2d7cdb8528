"""Cancel: a message that is not held ends, and a held message unless its holder commits it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import Counts, LeaseLost, Limit
from tests.contract.world import AnyClient, AnyQueue, World, hold, near, payloads, refuses
from tests.support.recorder import Recorder


def hold_cancelled(queue: AnyQueue, payload: Any = "x", **options: Any) -> Any:
    """Push a message, reserve it, and cancel it."""
    held = hold(queue, payload, **options)
    assert queue.cancel(held.id) == "requested"
    return held


# ---- a message that is not held


def test_cancel_ends_a_message_that_is_not_held(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    ready, scheduled = queue.push(1), queue.push(2, delay=60)
    assert other.cancel(ready) is None, "it is in another queue"
    assert queue.cancel(str(ready)) == "cancelled"
    assert client.cancel(scheduled, force=True) == "cancelled"
    assert queue.counts() == Counts()
    for id in (ready, "unknown", f"{ObjectId()}:0001"):
        assert queue.cancel(id) is None
        assert client.cancel(id) is None


def test_cancel_ends_a_message_whose_lease_has_ended(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    world.lapse(held)
    assert queue.cancel(held.id) == "cancelled"
    with pytest.raises(LeaseLost):
        queue.commit(held)


def test_cancel_ends_a_dead_letter(client: AnyClient, queue: AnyQueue) -> None:
    held = hold(queue)
    queue.bury(held)
    dead = client.queue(f"{queue.name}.dead")
    assert client.cancel(held.id) == "cancelled"
    assert (dead.counts().total, dead.redrive()) == (0, 0)


@pytest.mark.needs("history", "keys")
def test_history_shows_that_a_message_was_cancelled(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    ids = [queue.push(each, key=each) for each in ("one", "two")]
    assert queue.cancel(ids[0]) == "cancelled"
    assert client.cancel(ids[1]) == "cancelled", "the record tells the length of the history"
    found = [queue.get(id) for id in ids]
    assert [(each.state, each.outcome, each.key) for each in found] == [
        ("finished", "cancelled", "one"),
        ("finished", "cancelled", "two"),
    ]
    assert all(near(each.processed, 0) for each in found)
    assert queue.push("again", key="one") is not None
    assert queue.cancel(ids[0]) is None


@pytest.mark.needs("ordered")
def test_group_goes_on_after_a_cancelled_message(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    ids = queue.push_many([1, 2, 3, 4], groups=["g"] * 4)
    held = queue.reserve(0)
    assert queue.cancel(ids[1]) == "cancelled"
    assert queue.get(ids[1]).group == "g"
    assert queue.cancel(ids[0]) == "requested"
    queue.rollback(held, delay=0)
    held = queue.reserve(0)
    assert (held.payload, queue.get(ids[0]).group) == (3, "g")
    assert client.cancel(ids[2], force=True) == "cancelled"
    assert queue.reserve(0).payload == 4


# ---- a held message


def test_commit_of_a_cancelled_message_wins(queue: AnyQueue) -> None:
    held = hold_cancelled(queue)
    assert queue.get(held.id).state == "reserved"
    assert queue.cancel(held.id) == "requested", "it may be cancelled again"
    queue.extend(held)
    queue.commit(held)
    assert queue.counts() == Counts()
    assert queue.cancel(held.id) is None


#: The ways in which a message comes back to its queue.
BACK: dict[str, Callable[[World, AnyQueue, Any], object]] = {
    "rollback": lambda world, queue, held: queue.rollback(held, delay=0),
    "release": lambda world, queue, held: queue.release(held),
    "lapse": lambda world, queue, held: world.lapse(held),
    "force_release": lambda world, queue, held: world.client.force_release(held.id),
}


@pytest.mark.parametrize("back", BACK)
def test_next_claim_ends_a_cancelled_message(world: World, queue: AnyQueue, back: str) -> None:
    held = hold_cancelled(queue)
    following = [queue.push("next", id=f"next {each} {queue.name}") for each in range(2)]
    BACK[back](world, queue, held)
    found = [queue.reserve(0), queue.reserve(0)]
    assert sorted(each.id for each in found) == following
    assert queue.reserve(0) is None
    assert queue.get(held.id) is None
    queue.commit(*found)


@pytest.mark.needs("documents")
def test_later_start_takes_a_cancellation_back(world: World, queue: AnyQueue) -> None:
    held = hold_cancelled(queue)
    queue.rollback(held, delay=600)
    assert queue.select().requeue(at=datetime.now(UTC) + timedelta(seconds=60)).done == 1
    assert queue.requeue(held.id)
    assert queue.reserve(0).id == held.id


@pytest.mark.needs("pop")
@pytest.mark.parametrize("pop", ["pop", "pop_many"])
def test_pop_passes_over_a_cancelled_message(queue: AnyQueue, pop: str) -> None:
    queue.rollback(hold_cancelled(queue), delay=0)
    queue.push("next", id=f"next {queue.name}")
    found = [queue.pop(0)] if pop == "pop" else queue.pop_many(5, timeout=0)
    assert payloads(found) == ["next"]
    assert queue.pop(0) is None
    assert queue.counts() == Counts()
    queue.rollback(hold_cancelled(queue), delay=0)
    assert queue.pop(0) is None
    assert queue.counts() == Counts()


@pytest.mark.needs("history")
def test_claim_keeps_what_it_ends_in_the_history(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, history=60)
    held = hold_cancelled(queue, key="k") if "keys" in world.place.offers else hold_cancelled(queue)
    queue.rollback(held, delay=0)
    assert queue.reserve(0) is None
    found = queue.get(held.id)
    assert (found.outcome, found.key) == ("cancelled", held.key)
    queue.rollback(hold_cancelled(queue), delay=0)
    if "pop" in world.place.offers:
        assert queue.pop(0) is None
        assert [each.outcome for each in queue.history()] == ["cancelled"] * 2


@pytest.mark.needs("move")
def test_cancelled_message_ends_in_the_queue_that_it_moves_to(
    queue: AnyQueue, other: AnyQueue
) -> None:
    held = hold_cancelled(queue)
    queue.move(held, to=other)
    assert other.get(held.id).state == "ready"
    assert other.reserve(0) is None
    assert other.counts() == Counts()


def test_buried_message_ends_unless_it_is_redriven(client: AnyClient, queue: AnyQueue) -> None:
    first, second = hold_cancelled(queue, 1), hold_cancelled(queue, 2)
    dead = client.queue(f"{queue.name}.dead")
    queue.bury(first)
    assert dead.reserve(0) is None
    assert dead.counts() == Counts()
    queue.bury(second)
    assert dead.redrive() == 1
    assert queue.reserve(0).id == second.id


@pytest.mark.parametrize("delay", [0, 60])
def test_requeue_withdraws_a_cancel(queue: AnyQueue, delay: float) -> None:
    held = hold_cancelled(queue)
    assert not queue.requeue(held.id), "it is held"
    queue.rollback(held, delay=delay)
    assert queue.requeue(held.id)
    again = queue.reserve(0)
    assert again.id == held.id
    queue.commit(again)


@pytest.mark.needs("keys")
def test_replace_withdraws_a_cancel(queue: AnyQueue) -> None:
    held = hold_cancelled(queue, key="k")
    assert queue.push("new", key="k", on_duplicate="replace") == held.id
    assert queue.reserve(0).payload == "new"


@pytest.mark.needs("history")
def test_replay_withdraws_a_cancel(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    held = hold_cancelled(queue)
    queue.commit(held)
    assert queue.get(held.id).outcome == "committed"
    assert queue.replay(held.id) == 1
    assert queue.reserve(0).id == held.id


@pytest.mark.needs("claim", "documents")
def test_named_claim_ends_cancelled_messages(queue: AnyQueue) -> None:
    queue.rollback(hold_cancelled(queue), delay=0)
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == []
    queue.rollback(hold_cancelled(queue), delay=0)
    id = queue.push("next", id=f"next {queue.name}")
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == [id]
        assert queue.cancel(id) == "requested"
        claim.commit()
    assert queue.counts() == Counts()


# ---- at once


def test_force_ends_a_held_message(client: AnyClient, queue: AnyQueue) -> None:
    for cancel in (queue.cancel, client.cancel):
        held = hold(queue)
        assert cancel(held.id, force=True) == "cancelled"
        assert queue.counts() == Counts()
        for settle in (queue.commit, queue.rollback, queue.extend, queue.release):
            with pytest.raises(LeaseLost):
                settle(held)


@pytest.mark.needs("history")
def test_holder_cannot_settle_a_message_that_was_ended(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    held = hold(queue)
    assert queue.cancel(held.id, True) == "cancelled"
    with pytest.raises(LeaseLost):
        queue.commit(held)
    assert [each.outcome for each in queue.history()] == ["cancelled"]


# ---- limits


@pytest.mark.needs("concurrency")
@pytest.mark.parametrize("force", [False, True])
def test_slot_of_a_cancelled_message_is_freed(client: AnyClient, name: str, force: bool) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1))
    held = hold(queue)
    queue.push("next")
    assert queue.reserve(0) is None
    queue.cancel(held.id, force)
    if not force:
        queue.rollback(held, delay=0)
    assert payloads(queue.reserve_many(5, timeout=0)) == ["next"]
    assert queue.reserve(0) is None


@pytest.mark.needs("per")
def test_slot_of_a_key_is_freed(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1, per="headers.tenant"))
    held = hold(queue, headers={"tenant": "t"})
    queue.push("next", headers={"tenant": "t"})
    assert queue.reserve(0) is None
    assert queue.cancel(held.id) == "requested"
    queue.rollback(held, delay=0)
    assert payloads(queue.reserve_many(5, timeout=0)) == ["next"]


@pytest.mark.needs("rate")
@pytest.mark.parametrize("limit", [1, 5])
def test_permit_of_a_cancelled_message_comes_back(client: AnyClient, name: str, limit: int) -> None:
    queue = client.queue(name, limit=Limit(rate=1, period=3600, burst=2))
    held = hold_cancelled(queue)
    queue.push("next")
    queue.rollback(held, delay=0)
    assert payloads(queue.reserve_many(limit, timeout=0)) == ["next"]
    queue.push("waits")
    assert queue.reserve(0) is None


@pytest.mark.needs("per")
def test_permit_of_a_key_comes_back(client: AnyClient, name: str) -> None:
    limit = Limit(rate=1, period=3600, burst=2, per="headers.tenant")
    queue = client.queue(name, limit=limit)
    held = hold_cancelled(queue, headers={"tenant": "t"})
    queue.push_many(["next", "waits"], headers={"tenant": "t"})
    queue.rollback(held, delay=0)
    assert payloads(queue.reserve_many(5, timeout=0)) == ["next"]
    assert queue.reserve(0) is None


# ---- hooks and refusals


def test_hooks_hear_of_messages_that_a_claim_ends(
    world: World, client: AnyClient, name: str
) -> None:
    recorder = Recorder()
    queue = world.connect(hooks=[recorder]).queue(name)
    held = hold_cancelled(queue)
    queue.rollback(held, delay=0)
    recorder.take()
    assert queue.reserve(0) is None
    assert recorder.take() == [("settled", name, "cancel", [held.id], None, None)]
    if "pop" in world.place.offers:
        held = hold_cancelled(queue)
        queue.rollback(held, delay=0)
        recorder.take()
        assert queue.pop(0) is None
        assert recorder.take() == [("settled", name, "cancel", [held.id], None, None)]


@pytest.mark.needs("packs")
def test_packed_message_is_cancelled_unless_its_pack_is_held(
    client: AnyClient, queue: AnyQueue
) -> None:
    ids = queue.push_many(range(4))
    assert queue.cancel(ids[0]) == "cancelled"
    assert queue.cancel(ids[0]) is None
    held = queue.reserve(0)
    for cancel in (queue.cancel, client.cancel):
        for force in (False, True):
            refuses(r"cancel: .* shares a document.*pass id=", partial(cancel, ids[3], force))
    queue.release(held)
    assert client.cancel(ids[3]) == "cancelled", "no message of the pack is held"
    assert queue.counts() == Counts(ready=2)
    assert client.cancel(ObjectId(ids[1].partition(":")[0])) is None, "a pack is not a message"


@pytest.mark.needs("standard")
def test_cancel_in_a_stream_is_refused(client: AnyClient, name: str) -> None:
    client.stream(name).append(1)
    refuses(r"cancel: .* of a stream.*trim\(\)", lambda: client.cancel(f"{name}~0"))
    refuses("is a stream", lambda: client.queue(name).cancel("x"))


@pytest.mark.needs("standard")
def test_wrong_arguments_of_cancel_are_refused(client: AnyClient, queue: AnyQueue) -> None:
    id: Any = queue.push(1)
    for cancel in (queue.cancel, client.cancel):
        refuses("force: expected True or False, found str", partial(cancel, id, "yes"))
        refuses("id: ", partial(cancel, 7))
    assert queue.counts() == Counts(ready=1)
