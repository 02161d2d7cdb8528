"""Requeue and force_release: messages become ready before their time, or before a lease ends."""

from __future__ import annotations

from datetime import timedelta

import pytest
from bson import ObjectId

from pyqueue import Counts, LeaseLost, Limit
from tests.contract.world import AnyClient, AnyQueue, World, hold, near, payloads, refuses, waiting

# ---- requeue


def test_requeue_makes_a_scheduled_message_ready(queue: AnyQueue) -> None:
    id = queue.push("x", delay=60)
    assert queue.requeue(str(id))
    found = queue.get(id)
    assert (found.state, near(found.when, 0)) == ("ready", True)
    held = queue.reserve(0)
    assert held.id == id
    assert not queue.requeue(id), "it is held"
    queue.rollback(held, delay=60, error="bad")
    assert queue.requeue(id)
    assert queue.requeue(id), "it is ready"
    again = queue.reserve(0)
    assert (again.id, again.tries, again.error["message"]) == (id, 2, "bad")
    queue.commit(again)
    assert not queue.requeue(id)
    assert not queue.requeue("unknown")


def test_requeue_leaves_a_message_of_another_queue(queue: AnyQueue, other: AnyQueue) -> None:
    id = queue.push("x", delay=60)
    assert not other.requeue(id)
    assert queue.get(id).state == "scheduled"


def test_requeue_sends_a_dead_message_back(client: AnyClient, queue: AnyQueue) -> None:
    queue.push("x", key="k")
    held = queue.reserve(0)
    queue.bury(held)
    queue.bury(hold(queue, "stays"))
    assert client.queue(f"{queue.name}.dead").requeue(held.id)
    found = queue.get(held.id)
    assert (found.state, found.key, found.tries, found.dead) == ("ready", "k", 0, None)
    assert client.queue(f"{queue.name}.dead").counts().total == 1


@pytest.mark.needs("standard")
def test_requeue_of_a_dead_letter_of_a_stream_is_refused(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append("x")
    refuses("is a stream", lambda: client.queue(name).requeue("x"))
    group = log.consumer("g")
    group.bury(group.reserve(0))
    dead = client.queue(f"{name}.g.dead")
    (buried,) = dead.browse("dead").messages
    refuses("is a stream, and messages cannot move there", lambda: dead.requeue(buried.id))
    assert dead.browse("dead").messages[0].id == buried.id


@pytest.mark.needs("history")
def test_requeue_leaves_finished_messages(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    held = hold(queue)
    queue.commit(held)
    assert not queue.requeue(held.id)
    assert queue.counts() == Counts(history=1)


def test_requeue_wakes_a_consumer(world: World, queue: AnyQueue) -> None:
    id = queue.push("x", delay=600)
    found = waiting(world.client, queue, lambda: queue.reserve(timedelta(seconds=30)))
    assert queue.requeue(id)
    assert found.result(30).id == id


@pytest.mark.needs("ordered")
def test_requeued_message_keeps_its_place_in_its_group(queue: AnyQueue) -> None:
    later = queue.push("later", group="g", delay=60)
    queue.push_many(["first", "other"], groups=["g", "h"])
    assert queue.requeue(later)
    held = queue.reserve_many(5, timeout=0)
    assert sorted(payloads(held)) == ["first", "other"]
    queue.commit(*held)
    assert payloads(queue.reserve_many(5, timeout=0)) == ["later"]


@pytest.mark.needs("per")
def test_requeue_of_a_deferred_message_keeps_the_limit(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1, per="headers.tenant"))
    ids = queue.push_many([1, 2], headers={"tenant": "t"})
    held = queue.reserve_many(2, timeout=0)
    assert queue.reserve(0) is None
    (waits,) = set(ids) - {each.id for each in held}
    before = queue.get(waits).when
    assert queue.requeue(waits)
    assert queue.reserve(0) is None
    assert queue.get(waits).when == before
    queue.commit(*held)
    assert queue.reserve(0).id == waits


@pytest.mark.needs("packs")
def test_requeued_message_leaves_its_pack(queue: AnyQueue) -> None:
    ids = queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    assert not queue.requeue(ids[2]), "its pack is held"
    queue.rollback(*held, delay=60, error="bad")
    assert queue.counts() == Counts(scheduled=5)
    assert queue.requeue(ids[2])
    assert queue.counts() == Counts(ready=1, scheduled=4)
    again = queue.reserve(0)
    assert (again.id, again.tries, again.error["message"]) == (ids[2], 2, "bad")
    assert {each.state for each in queue.browse("scheduled").messages} == {"scheduled"}
    assert near(queue.get(ids[0]).when, 60)
    assert not queue.requeue(f"{ids[0]}0")
    assert not queue.requeue(ObjectId(ids[0].partition(":")[0])), "a pack is not a message"
    assert not queue.requeue(f"{ObjectId()}:0001")
    fresh = queue.push_many(range(5, 8))
    assert queue.requeue(fresh[1]), "it is ready"


# ---- force_release


def test_force_release_takes_a_message_from_its_holder(
    world: World, client: AnyClient, queue: AnyQueue
) -> None:
    held = hold(queue, "x")
    assert client.force_release(str(held.id))
    assert queue.get(held.id).state == "ready"
    with pytest.raises(LeaseLost):
        queue.commit(held)
    with pytest.raises(LeaseLost):
        queue.extend(held)
    again = world.connect().queue(queue.name).reserve(0)
    assert (again.id, again.tries) == (held.id, 2)
    assert client.force_release(again.id)
    assert queue.reserve(timedelta(seconds=30)).id == held.id, "this process finds it, too"


def test_force_release_of_messages_that_are_not_held(
    world: World, client: AnyClient, queue: AnyQueue
) -> None:
    ready, scheduled = queue.push(1), queue.push(2, delay=60)
    held = queue.reserve(0)
    world.lapse(held)
    before = world.stored(queue)
    for id in (ready, scheduled, "unknown", f"{ObjectId()}:0001", f"{queue.name}~0"):
        assert not client.force_release(id)
    assert world.stored(queue) == before


@pytest.mark.needs("concurrency")
def test_force_release_frees_the_slot(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1))
    queue.push_many([1, 2])
    held = queue.reserve(0)
    assert queue.reserve(0) is None
    assert client.force_release(held.id)
    assert queue.reserve(0) is not None
    assert queue.reserve(0) is None


@pytest.mark.needs("ordered")
def test_force_release_keeps_the_group_in_order(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["g", "g"])
    held = queue.reserve(0)
    assert queue.reserve(0) is None
    assert client.force_release(held.id)
    assert payloads(queue.reserve_many(2, timeout=0)) == [1]


@pytest.mark.needs("claim", "documents")
def test_force_release_takes_a_message_from_a_claim(client: AnyClient, queue: AnyQueue) -> None:
    ids = queue.push_many(range(3))
    with queue.claim("g", limit=3) as claim:
        assert client.force_release(ids[1])
        with pytest.raises(LeaseLost, match="1 of 3 messages"):
            claim.commit()
    assert payloads(queue.reserve_many(5, timeout=0)) == [1]


@pytest.mark.needs("packs")
def test_force_release_of_a_packed_message_is_refused(client: AnyClient, queue: AnyQueue) -> None:
    ids = queue.push_many(range(3))
    assert not client.force_release(ids[0])
    held = queue.reserve(0)
    refuses(r"force_release: .* shares a document", lambda: client.force_release(held.id))
    assert not client.force_release(ObjectId(ids[0].partition(":")[0]))
    queue.commit(held)


@pytest.mark.needs("standard")
def test_force_release_in_a_stream_is_refused(client: AnyClient, name: str) -> None:
    client.stream(name).append(1)
    refuses(r"force_release: .* of a stream.*seek\(\)", lambda: client.force_release(f"{name}~0"))
