"""Expiring messages: no consumer gets one for its first try once its time has passed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import Counts, JobFailed, Limit, Push
from tests.contract.world import (
    AnyClient,
    AnyQueue,
    World,
    expect_error,
    hold,
    in_thread,
    near,
    payloads,
    refuses,
)
from tests.support.eventually import LONG, eventually
from tests.support.recorder import Recorder


def let_expire(world: World, id: Any) -> None:
    """Let the time of a message pass."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    name = "dies" if "dies" in world.document(id) else "best_before"
    done = world.raw().update_one({"_id": id}, {"$set": {name: past}})
    assert done.matched_count == 1


def push_expired(world: World, queue: AnyQueue, payload: Any = "x", **options: Any) -> Any:
    """Push a message that expires, and let its time pass. Return its id."""
    id = queue.push(payload, expires=60, **options)
    let_expire(world, id)
    return id


def push_next(queue: AnyQueue) -> Any:
    """Push a message that has a separate document in queues of each kind."""
    return queue.push("next", id=f"next {queue.name}")


def test_message_expires_after_the_given_time(world: World, queue: AnyQueue) -> None:
    ids = [queue.push("x", expires=60), queue.push("y", expires=timedelta(hours=1), delay=600)]
    for id, seconds in zip(ids, (60, 3600), strict=True):
        assert near(world.document(id)["dies"], seconds)
    ids = queue.push_many([Push(1, expires=5), Push(2), Push(3, expires=7)])
    stored = [world.raw().find_one({"_id": id, "dies": {"$exists": True}}) for id in ids]
    assert [each is not None for each in stored] == [True, False, True]
    found = payloads(queue.reserve_many(9, timeout=0))
    assert sorted(map(str, found)) == ["1", "2", "3", "x"]


def test_claim_passes_over_an_expired_message(world: World, queue: AnyQueue) -> None:
    expired = push_expired(world, queue)
    following = push_next(queue)
    held = queue.reserve(0)
    assert held.id == following
    assert queue.reserve_many(9, timeout=0) == []
    assert queue.get(expired) is None
    queue.commit(held)
    assert queue.counts() == Counts()


@pytest.mark.needs("pop")
@pytest.mark.parametrize("pop", ["pop", "pop_many"])
def test_pop_passes_over_an_expired_message(world: World, queue: AnyQueue, pop: str) -> None:
    push_expired(world, queue)
    push_next(queue)
    found = [queue.pop(0)] if pop == "pop" else queue.pop_many(5, timeout=0)
    assert payloads(found) == ["next"]
    push_expired(world, queue)
    assert queue.pop(0) is None
    assert queue.counts() == Counts()


@pytest.mark.needs("history", "keys")
def test_history_shows_that_a_message_expired(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    id = push_expired(world, queue, key="k")
    assert queue.reserve(0) is None
    found = queue.get(id)
    assert (found.outcome, found.key, found.payload) == ("expired", "k", "x")
    assert queue.push("again", key="k") is not None
    assert queue.replay(id) == 1
    assert len(queue.reserve_many(9, timeout=0)) == 2, "it does not expire again"


#: How a message comes back to its queue, and whether it may still expire.
BACK: dict[str, tuple[Callable[[World, AnyQueue, Any], object], bool]] = {
    "rollback": (lambda world, queue, held: queue.rollback(held, delay=0), False),
    "lapse": (lambda world, queue, held: world.lapse(held), False),
    "force_release": (lambda world, queue, held: world.client.force_release(held.id), False),
    "release": (lambda world, queue, held: queue.release(held), True),
    "uncounted": (lambda world, queue, held: queue.rollback(held, delay=0, counted=False), True),
}


@pytest.mark.parametrize("back", BACK)
def test_message_expires_before_its_first_try_only(
    world: World, queue: AnyQueue, back: str
) -> None:
    held = hold(queue, expires=60)
    way, may_expire = BACK[back]
    way(world, queue, held)
    let_expire(world, held.id)
    found = queue.reserve(0)
    assert (found is None) is may_expire
    if found is not None:
        assert (found.id, found.tries) == (held.id, 2)


def test_held_message_does_not_expire(world: World, queue: AnyQueue) -> None:
    held = hold(queue, expires=60)
    let_expire(world, held.id)
    queue.extend(held)
    queue.commit(held)
    assert queue.counts() == Counts()


@pytest.mark.needs("move")
def test_move_ends_the_expiry(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue, expires=60)
    let_expire(world, held.id)
    queue.move(held, to=other)
    assert other.reserve(0).id == held.id


@pytest.mark.needs("keys")
def test_replace_takes_the_new_expiry(world: World, queue: AnyQueue) -> None:
    id = push_expired(world, queue, key="k")
    assert queue.push("new", key="k", on_duplicate="replace") == id
    assert queue.reserve(0).payload == "new"


@pytest.mark.needs("ordered")
def test_group_goes_on_after_an_expired_message(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    id = push_expired(world, queue, 1, group="g")
    queue.push(2, group="g")
    assert payloads(queue.reserve_many(5, timeout=0)) == [2]
    assert (queue.get(id).outcome, queue.get(id).group) == ("expired", "g")


@pytest.mark.needs("concurrency")
def test_expired_message_takes_no_slot(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1))
    push_expired(world, queue)
    queue.push("next")
    assert payloads(queue.reserve_many(5, timeout=0)) == ["next"]
    assert queue.reserve(0) is None


@pytest.mark.needs("rate")
def test_expired_message_takes_no_permit(world: World, client: AnyClient, name: str) -> None:
    # A bucket asks for permits before it claims.
    burst = 1 if "documents" in world.place.offers else 2
    queue = client.queue(name, limit=Limit(rate=1, period=3600, burst=burst))
    push_expired(world, queue)
    push_next(queue)
    assert payloads(queue.reserve_many(5, timeout=0)) == ["next"]


@pytest.mark.needs("claim", "documents")
def test_named_claim_ends_expired_messages(world: World, queue: AnyQueue) -> None:
    push_expired(world, queue)
    with queue.claim("g", limit=5) as claim:
        assert claim.ids == []
    assert queue.counts() == Counts()


def test_chosen_message_may_have_expired(world: World, queue: AnyQueue) -> None:
    assert queue.reserve_id(push_expired(world, queue)) is None
    assert queue.counts() == Counts()


def test_request_expires_with_its_timeout(world: World, client: AnyClient, queue: AnyQueue) -> None:
    answer = in_thread(lambda: client.request(queue.name, "x", timeout=LONG))
    messages = {"q": queue.name, "payload": "x"}
    eventually(lambda: world.raw().find_one(messages) is not None, "the request is pushed")
    stored = world.raw().find_one(messages)
    assert near(stored["dies"], LONG)
    let_expire(world, stored["_id"])
    assert queue.reserve(0) is None
    with pytest.raises(TimeoutError, match="has expired: no worker has begun"):
        answer.result(LONG)


def test_wait_for_an_expired_message_fails(
    world: World, client: AnyClient, queue: AnyQueue
) -> None:
    id = push_expired(world, queue, result=60)
    assert queue.reserve(0) is None
    with expect_error(JobFailed, reason="expired"):
        client.wait(id, 0)


def test_hooks_hear_of_an_expired_message(world: World, name: str) -> None:
    recorder = Recorder()
    queue = world.connect(hooks=[recorder]).queue(name)
    id = push_expired(world, queue)
    recorder.take()
    assert queue.reserve(0) is None
    assert recorder.take() == [("settled", name, "expire", [id], None, None)]


def test_expiry_takes_no_command_but_the_first_time(client: AnyClient, queue: AnyQueue) -> None:
    queue.push("x", expires=60)
    before = client.stats["commands"]
    queue.push("x", expires=60)
    assert client.stats["commands"] == before + 1


def test_wrong_expiry_is_refused(world: World, queue: AnyQueue) -> None:
    queue.push("x", id=f"x {queue.name}")
    before = world.stored(queue)
    for value in (0, -1, True, "60", float("nan")):
        refuses("expires: ", partial(queue.push, "x", expires=value))
    start: Any
    for start in ({"delay": 60}, {"at": datetime.now(UTC) + timedelta(minutes=5)}):
        pushes = [Push("y"), Push("x", expires=60, **start)]
        refuses(
            "expires: expected more than .*found 60; use a longer time",
            partial(queue.push, "x", expires=60, **start),
            partial(queue.push_many, pushes),
        )
    assert world.stored(queue) == before
