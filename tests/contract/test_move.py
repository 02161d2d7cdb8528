"""Moving between queues: move, move_many, bury and redrive. Each is one atomic update."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import UNCHANGED, ConfigurationError, DuplicateKey, InvalidMessage, LeaseLost
from pyqueue.backends import applying
from tests.contract.world import (
    FINISHES,
    AnyClient,
    AnyQueue,
    World,
    expect_error,
    hold,
    near,
    refuses,
)

pytestmark = pytest.mark.needs("move", "dead_letter")


class Order(BaseModel):
    n: int


@pytest.mark.needs("pop")
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "Queue"])
def test_move(queue: AnyQueue, other: AnyQueue, by_name: bool) -> None:
    assert other.pop(0) is None  # the first receive creates the record, which names the kind
    held = hold(queue, {"n": 1}, headers={"a": 1})
    queue.progress(held, 0.5)
    queue.checkpoint(held, "there")
    queue.rollback(held, delay=0, error="once")
    held = queue.reserve(0)
    assert held.tries == 2
    queue.move(held, to=other.name if by_name else other)
    assert queue.get(held.id) is None
    assert queue.counts().total == 0
    message = other.get(held.id)
    assert (message.payload, message.headers, message.pushed) == ({"n": 1}, {"a": 1}, held.pushed)
    assert (message.state, message.tries, message.queue) == ("ready", 0, other.name)
    assert (message.error, message.progress, message.checkpoint, message.dead) == (None,) * 4
    assert [each["q"] for each in message.trail] == [queue.name]
    assert near(message.trail[0]["at"], 0)
    assert near(message.when, 0)
    assert other.pop(0).id == held.id


def test_move_takes_several_or_none(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many(range(world.many))
    queue.move(*queue.reserve_many(world.many, timeout=0), to=other)
    queue.move(to=other)
    assert (queue.counts().total, other.counts().ready) == (0, world.many)


def test_move_to_the_same_queue(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.move(held, to=queue, delay=60)
    message = queue.get(held.id)
    assert (message.state, message.tries) == ("scheduled", 0)
    assert near(message.when, 60)


def test_move_creates_the_record_of_the_target(world: World, queue: AnyQueue, name: str) -> None:
    queue.move(hold(queue), to=f"{name}-new")
    assert world.document(f"~queue:{name}-new")["kind"] == "standard"


@pytest.mark.parametrize("payload", [None, 0, "", False, [], {}, {"new": [1]}], ids=repr)
def test_move_with_a_payload(queue: AnyQueue, other: AnyQueue, payload: Any) -> None:
    held = hold(queue, "old")
    queue.move(held, to=other, payload=payload)
    assert other.get(held.id).payload == payload


def test_move_many(queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many([1, 2, 3])
    held = queue.reserve_many(3, timeout=0)
    pairs = [(each, UNCHANGED if each.payload == 3 else each.payload * 10) for each in held]
    queue.move_many(iter(pairs), to=other, headers={"a": 1}, delay=60)
    messages = [other.get(each.id) for each in held]
    assert sorted(each.payload for each in messages) == [3, 10, 20]
    assert all(each.headers == {"a": 1} and each.state == "scheduled" for each in messages)
    queue.move_many([], to=other)


@pytest.mark.needs("documents")
def test_move_many_reports_lost_reservations(
    world: World, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many([1, 2, 3])
    held = queue.reserve_many(3, timeout=0)
    world.lapse(held[1], known=False)
    assert queue.reserve(0) is not None
    before = world.bytes(held[1].id)
    with expect_error(LeaseLost, lost=(held[1],)):
        queue.move_many([(each, "new") for each in held], to=other)
    assert world.bytes(held[1].id) == before
    assert {each.id for each in other.peek()} == {held[0].id, held[2].id}


PAYLOAD: dict[str, Any] = {"n": 1, "f": 2.0, "list": [1, 2], "deep": {"x": 1}}
#: An update of that payload, and the result.
UPDATES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"$set": {"n": 2, "deep.x": 3, "new": None}},
        PAYLOAD | {"n": 2, "deep": {"x": 3}, "new": None},
    ),
    ({"$unset": {"n": "", "list": ""}}, {"f": 2.0, "deep": {"x": 1}}),
    ({"$inc": {"n": 5, "new": 1}}, PAYLOAD | {"n": 6, "new": 1}),
    (
        {"$mul": {"f": 4, "deep.x": 3, "new.y": 2}},
        PAYLOAD | {"f": 8.0, "deep": {"x": 3}, "new": {"y": 0}},
    ),
    ({"$min": {"n": 0, "f": 9}}, PAYLOAD | {"n": 0}),
    ({"$max": {"n": 0, "f": 9.0}}, PAYLOAD | {"f": 9.0}),
    ({"$rename": {"n": "m"}}, {"m": 1, "f": 2.0, "list": [1, 2], "deep": {"x": 1}}),
    ({"$rename": {"deep.x": "far.y", "none.x": "z"}}, PAYLOAD | {"deep": {}, "far": {"y": 1}}),
    ({"$push": {"list": 2}}, PAYLOAD | {"list": [1, 2, 2]}),
    ({"$pull": {"list": 1}}, PAYLOAD | {"list": [2]}),
    ({"$addToSet": {"list": 2}}, PAYLOAD),
    (
        {"$set": {"n": 2}, "$push": {"list": 3}, "$unset": {"f": ""}},
        {"n": 2, "list": [1, 2, 3], "deep": {"x": 1}},
    ),
]


@pytest.mark.parametrize(
    ("update", "expected"), UPDATES, ids=["+".join(update) for update, _ in UPDATES]
)
def test_move_with_an_update(
    queue: AnyQueue, other: AnyQueue, update: dict[str, Any], expected: dict[str, Any]
) -> None:
    held = hold(queue, PAYLOAD, key="k", headers={"a": 1})
    queue.move(held, to=other, update=update, headers={"b": 2})
    message = other.get(held.id)
    assert message.payload == expected
    assert (message.headers, message.state, message.tries) == ({"a": 1, "b": 2}, "ready", 0)
    assert [each["q"] for each in message.trail] == [queue.name]


def test_update_that_does_not_fit_the_payload(
    world: World, queue: AnyQueue, other: AnyQueue
) -> None:
    held = hold(queue, {"hint": "text"})  # the server's errors use this word too
    before = world.bytes(held.id)
    if world.place.server:
        with pytest.raises(InvalidMessage):
            queue.move(held, to=other, update={"$inc": {"hint": 1}})
        assert world.bytes(held.id) == before
    queue.commit(held)


def test_headers_are_merged(queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue, 1, headers={"a": 1, "b": 2})
    queue.move(held, to=other, headers={"b": "new", "c": True})
    assert other.get(held.id).headers == {"a": 1, "b": "new", "c": True}
    bare = hold(queue, 1)
    queue.move(bare, to=other, headers={"c": 0.5})
    assert other.get(bare.id).headers == {"c": 0.5}


@pytest.mark.parametrize("delay", [60, timedelta(minutes=1)], ids=repr)
def test_move_with_a_delay(queue: AnyQueue, other: AnyQueue, delay: Any) -> None:
    held = hold(queue)
    queue.move(held, to=other, delay=delay)
    assert other.get(held.id).state == "scheduled"
    assert near(other.next_when(), 60)


def test_move_at_an_instant(queue: AnyQueue, other: AnyQueue) -> None:
    """A past instant means now."""
    later, past = datetime.now(UTC) + timedelta(minutes=1), datetime(2020, 1, 1, tzinfo=UTC)
    queue.push_many([1, 2, 3])
    one, two, three = queue.reserve_many(3, timeout=0)
    queue.move(one, to=other, at=later)
    assert near(other.next_when(), 60)
    queue.move_many([(two, "new")], to=other, at=later)
    queue.move(three, to=other, at=past)
    found = [other.get(each.id) for each in (one, two, three)]
    assert [each.state for each in found] == ["scheduled", "scheduled", "ready"]
    held = hold(queue)
    refuses(
        "delay, at: pass one of the two",
        lambda: queue.move(held, to=other, at=later, delay=1),
        lambda: queue.move_many([(held, 1)], to=other, at=later, delay=1),
    )
    refuses("at: .* has no time zone", lambda: queue.move(held, to=other, at=datetime(2020, 1, 1)))
    queue.commit(held)


def test_move_drops_the_key_and_can_set_another(queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue, 1, key="k")
    queue.move(held, to=other)
    assert other.get(held.id).key is None
    assert queue.push(2, key="k", on_duplicate="error") is not None
    assert other.push(2, key="k", on_duplicate="error") is not None
    for key in (None, "k2"):
        held = hold(other, "x", key=key) if key else hold(queue, "x")
        source, target = (other, queue) if key else (queue, other)
        source.move(held, to=target, key="new")
        assert target.get(held.id).key == "new"
        assert target.push(3, key="new") is None


def test_move_with_a_taken_key_keeps_the_reservation(
    world: World, queue: AnyQueue, other: AnyQueue
) -> None:
    other.push("there", key="new")
    held = hold(queue, 1, key="k")
    before = world.bytes(held.id)
    with expect_error(DuplicateKey, keys=["new"]):
        queue.move(held, to=other, key="new")
    assert world.bytes(held.id) == before
    queue.extend(held)
    queue.move(held, to=other, key="free")
    assert other.get(held.id).key == "free"


def test_move_without_a_key_never_clashes(queue: AnyQueue, other: AnyQueue) -> None:
    other.push("there", key="k")
    held = hold(queue, 1, key="k")
    queue.move(held, to=other)
    assert other.counts().ready == 2


def test_move_to_a_typed_queue(client: AnyClient, world: World, queue: AnyQueue, name: str) -> None:
    typed = client.queue(f"{name}-typed", Order)
    held = hold(queue, "raw")
    queue.move(held, to=typed, payload=Order(n=1))
    assert world.document(held.id)["type"] == "Order"
    received = typed.reserve(0)
    assert received.payload == Order(n=1)
    typed.move(received, to=queue, payload={"plain": 1})
    assert "type" not in world.document(held.id)
    with pytest.raises(InvalidMessage, match="n"):
        queue.move(hold(queue, "raw"), to=typed, payload={"n": "x"})


def test_trail_has_the_last_twenty_queues(client: AnyClient, name: str) -> None:
    queues = [client.queue(f"{name}-{index}") for index in range(23)]
    id = queues[0].push(1)
    for source, target in pairwise(queues):
        source.move(source.reserve(0), to=target)
    message = queues[-1].get(id)
    assert [each["q"] for each in message.trail] == [each.name for each in queues[2:22]]
    assert [each["at"] for each in message.trail] == sorted(each["at"] for each in message.trail)


# ---- bury, redrive


@pytest.mark.needs("pop")
@pytest.mark.needs("history")
@pytest.mark.parametrize("key", [None, "here"])
@pytest.mark.parametrize("finish", FINISHES)
def test_replay_restores_the_key_of_this_queue_only(
    client: AnyClient, queue: AnyQueue, name: str, finish: str, key: str | None
) -> None:
    last = client.queue(f"{name}.last", history=60)
    held = hold(queue, "x", key="there")
    queue.move(held, to=last, key=key)
    FINISHES[finish](last)
    assert last.replay(held.id) == 1
    assert last.get(held.id).key == key


@pytest.mark.parametrize(
    "error", [None, "bad row", ValueError("bad row")], ids=["none", "str", "exception"]
)
def test_bury(client: AnyClient, queue: AnyQueue, error: Any) -> None:
    held = hold(queue, {"n": 1}, key="k", headers={"a": 1})
    queue.checkpoint(held, "page 3")
    queue.bury(held, error=error)
    assert queue.get(held.id) is None
    message = client.queue(f"{queue.name}.dead").get(held.id)
    assert (message.payload, message.headers, message.key) == ({"n": 1}, {"a": 1}, "k")
    assert (message.state, message.tries, message.checkpoint) == ("ready", 0, "page 3")
    found = [message.dead[field] for field in ("from", "reason", "tries")]
    assert found == [queue.name, "buried", 1]
    assert near(message.dead["at"], 0)
    said = None if error is None else "bad row"
    for each in (message.error, message.dead["error"]):
        assert (None if each is None else each["message"]) == said
        assert each is None or near(each["at"], 0)
    assert [each["q"] for each in message.trail] == [queue.name]


def test_bury_many(client: AnyClient, world: World, queue: AnyQueue) -> None:
    queue.push_many(range(5), keys=["a", None, "b", None, "c"])
    held = queue.reserve_many(5, timeout=0)
    lapsed = next(each for each in held if each.key == "c")
    world.lapse(lapsed, known=False)
    assert queue.reserve(0) is not None
    with expect_error(LeaseLost, lost=(lapsed,)):
        queue.bury(*held, error="no")
    assert client.queue(f"{queue.name}.dead").counts().ready == 4
    assert queue.counts().reserved == 1


def test_bury_of_keys_never_clashes(client: AnyClient, queue: AnyQueue) -> None:
    for n in range(3):
        queue.bury(hold(queue, n, key="k"))
    assert [each.key for each in client.queue(f"{queue.name}.dead").peek()] == ["k"] * 3


def test_dead_message_is_not_buried_again(client: AnyClient, world: World, queue: AnyQueue) -> None:
    queue.bury(hold(queue))
    dead = client.queue(f"{queue.name}.dead")
    held = dead.reserve(0)
    before = world.bytes(held.id)
    with pytest.raises(ConfigurationError, match="dead-letter"):
        dead.bury(held)
    assert world.bytes(held.id) == before
    dead.commit(held)


def test_redrive(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    dead = client.queue(f"{queue.name}.dead")
    one = client.queue(other.name, dead_letter=dead.name)
    first, second = hold(queue, "a", key="k", headers={"h": 1}), hold(one, "b")
    queue.bury(first, error="once")
    one.bury(second)
    assert dead.redrive() == 2
    assert dead.counts().total == 0
    message = queue.get(first.id)
    assert (message.payload, message.key, message.headers) == ("a", "k", {"h": 1})
    assert (message.state, message.tries, message.dead) == ("ready", 0, None)
    assert [each["q"] for each in message.trail] == [queue.name, dead.name]
    assert queue.push("c", key="k") is None
    assert one.get(second.id).payload == "b"
    assert dead.redrive() == 0
    assert queue.redrive() == 0
    assert (queue.counts().ready, one.counts().ready) == (1, 1)


def test_redrive_with_a_limit(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(range(5))
    queue.bury(*queue.reserve_many(5, timeout=0))
    dead = client.queue(f"{queue.name}.dead")
    assert dead.redrive(2) == 2
    assert (dead.counts().ready, queue.counts().ready) == (3, 2)
    assert dead.redrive(limit=100) == 3


@pytest.mark.parametrize("limit", [None, 7])
def test_redrive_of_many_batches(
    client: AnyClient, queue: AnyQueue, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(applying, "MAX_BATCH", 3)
    queue.push_many(range(8))
    queue.bury(*queue.reserve_many(8, timeout=0))
    order = [each.payload for each in client.queue(f"{queue.name}.dead").peek(8)]
    moved = limit or 8
    assert client.queue(f"{queue.name}.dead").redrive(limit) == moved
    assert sorted(each.payload for each in queue.peek(8)) == sorted(order[:moved])


def test_redrive_restores_a_key_only_if_it_is_free(client: AnyClient, queue: AnyQueue) -> None:
    dead = client.queue(f"{queue.name}.dead")
    first = hold(queue, "old", key="k")
    queue.bury(first)
    queue.push("new", key="k")
    assert dead.redrive() == 1
    assert queue.get(first.id).key is None
    assert queue.counts().ready == 2
    assert queue.purge() == 2
    second = hold(queue, "other", key="free")
    queue.bury(second)
    assert dead.redrive() == 1
    assert queue.get(second.id).key == "free"


@pytest.mark.needs("history")
@pytest.mark.parametrize("finish", FINISHES)
def test_redrive_of_a_message_with_a_key_in_the_dead_queue(
    client: AnyClient, queue: AnyQueue, finish: str
) -> None:
    """A replay there restored the key. In the first queue the key may be free or taken."""
    dead = client.queue(f"{queue.name}.dead", history=60)
    for taken in (False, True):
        one = hold(queue, "old", key="k")
        queue.bury(one)
        FINISHES[finish](dead)
        assert dead.replay(one.id) == 1
        assert dead.get(one.id).key == "k"
        if taken:
            queue.push("new", key="k")
        assert dead.redrive() == 1
        assert queue.get(one.id).key == (None if taken else "k")
        assert queue.purge() == 1 + taken


def test_redrive_leaves_held_and_unburied_messages(client: AnyClient, queue: AnyQueue) -> None:
    dead = client.queue(f"{queue.name}.dead")
    dead.push("by hand")
    queue.bury(hold(queue, "held"))
    held = {each.payload: each for each in dead.reserve_many(2, timeout=0)}
    dead.release(held["by hand"])
    assert dead.redrive() == 0
    dead.release(held["held"])
    assert dead.redrive() == 1
    assert [each.payload for each in dead.peek()] == ["by hand"]
    assert [each.payload for each in queue.peek()] == ["held"]


def test_redrive_skips_messages_without_a_valid_origin(
    world: World, client: AnyClient, queue: AnyQueue
) -> None:
    queue.push_many(["at fault", "from nowhere", "good"])
    held = {each.payload: each for each in queue.reserve_many(3, timeout=0)}
    queue.bury(*held.values())
    world.raw().update_one({"_id": held["at fault"].id}, {"$set": {"trail": 5}})
    world.raw().update_one({"_id": held["from nowhere"].id}, {"$set": {"dead.from": "~"}})
    for payload, age in (("good", 0.3), ("at fault", 0.2), ("from nowhere", 0.1)):
        when = datetime.now(UTC) - timedelta(seconds=age)  # in either order
        world.raw().update_one({"_id": held[payload].id}, {"$set": {"when": when}})
    if "fifo" in world.place.offers:
        world.raw().update_one({"_id": held["good"].id}, {"$set": {"when": datetime.now(UTC)}})
    assert client.queue(f"{queue.name}.dead").redrive() == 1
    assert [each.payload for each in queue.peek()] == ["good"]


def test_redriven_message_keeps_its_model(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, Order)
    queue.bury(hold(queue, Order(n=1)))
    assert client.queue(f"{name}.dead").redrive() == 1
    [message] = queue.peek()
    assert world.document(message.id)["type"] == "Order"


def test_dead_message_can_be_reserved_and_settled(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many(["a", "b", "c"])
    queue.bury(*queue.reserve_many(3, timeout=0))
    dead = client.queue(f"{queue.name}.dead")
    held = dead.reserve_many(2, timeout=0)
    dead.commit(held[0])
    dead.move(held[1], to=other)
    message = other.get(held[1].id)
    assert (message.dead, message.key) == (None, None)
    assert dead.pop(0) is not None
    assert dead.counts().total == 0
