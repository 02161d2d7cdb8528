"""The kind with priorities: the order of claims, moves that keep a priority, and refusals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import ConfigurationError, Push
from pyqueue.backends import receiving
from pyqueue.backends.priority import scan
from pyqueue.backends.priority.levels import LOOKS_PER_AGE_LOOK
from tests.contract.world import AnyClient, AnyQueue, World, hold, payloads, refuses
from tests.support.eventually import eventually

pytestmark = pytest.mark.needs("priority")


def insert(world: World, queue: AnyQueue, id: str, **fields: Any) -> None:
    """Insert a document as another program would."""
    when = datetime.now(UTC) - timedelta(minutes=1)
    world.raw().insert_one({"_id": id, "q": queue.name, "when": when, "payload": id, **fields})


# ---- the order


def test_claims_go_by_priority_and_then_by_age(queue: AnyQueue) -> None:
    for n in range(2):
        for priority in (0, 9, 5):
            queue.push(f"{priority}-{n}", priority=priority)
    queue.push("4-0")
    order = ["9-0", "9-1", "5-0", "5-1", "4-0", "0-0", "0-1"]
    assert payloads(queue.peek()) == order
    assert queue.pop(0).payload == "9-0"
    held = queue.reserve_many(3, timeout=0)
    assert payloads(held) == order[1:4]
    assert [each.priority for each in held] == [9, 5, 5]
    queue.release(*held)
    assert payloads(queue.pop_many(10, timeout=0)) == order[1:]


def test_push_many_takes_one_priority_for_each(queue: AnyQueue) -> None:
    ids = queue.push_many(["a", "b", "c"], priorities=[1, None, 8])
    assert [queue.get(each).priority for each in ids] == [1, 4, 8]
    assert payloads(queue.pop_many(3, timeout=0)) == ["c", "b", "a"]
    queue.push_many([Push("d", priority=0), Push("e"), Push("f", priority=9)])
    assert payloads(queue.pop_many(3, timeout=0)) == ["f", "e", "d"]
    for wrong in ([1], "123", 3):
        with pytest.raises(ConfigurationError, match="priorities: "):
            queue.push_many(["a", "b", "c"], priorities=wrong)


def test_scheduled_messages_do_not_block_lower_priorities(queue: AnyQueue) -> None:
    queue.push("later", priority=9, delay=60)
    queue.push("now", priority=0)
    assert queue.pop(0).payload == "now"
    assert queue.pop(0) is None
    assert queue.counts().scheduled == queue.counts().total == 1


def test_new_level_is_found_by_a_consumer_that_looked_before(
    world: World, queue: AnyQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record lists it before the first push, and consumers read the record again."""
    monkeypatch.setattr(receiving, "PAUSE_READ_INTERVAL", timedelta(seconds=0.5))
    queue.push("low", priority=1)
    other = world.connect().queue(queue.name)
    other.release(other.reserve(0))
    queue.push("high", priority=8)
    assert world.document(f"~queue:{queue.name}")["levels"] == [1, 8]
    eventually(lambda: other.peek(1)[0].payload == "high", "the level is listed")

    def first() -> bool:
        held = other.reserve(0)
        other.release(held)
        return bool(held.payload == "high")

    eventually(first, "the consumer knows the level")


@pytest.mark.parametrize("strict", [False, True])
def test_lower_priorities_are_reached_unless_it_is_strict(
    client: AnyClient, name: str, strict: bool
) -> None:
    """One scan in sixteen goes by age."""
    queue = client.queue(name, strict=strict)
    queue.push("low", priority=0)
    queue.push_many(range(2 * LOOKS_PER_AGE_LOOK), priorities=[9] * 2 * LOOKS_PER_AGE_LOOK)
    taken = [queue.pop(0).payload for _ in range(LOOKS_PER_AGE_LOOK)]
    assert ("low" in taken) is not strict
    assert len(payloads(queue.pop_many(50, timeout=0))) == LOOKS_PER_AGE_LOOK + 1


# ---- documents of other programs


@pytest.mark.parametrize("strict", [False, True])
def test_messages_without_a_listed_priority_are_found(
    world: World, client: AnyClient, name: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found in an empty queue and beside messages with a priority."""
    monkeypatch.setattr(scan, "WALK", 2)
    queue = client.queue(name, strict=strict)
    for round in ("first", "second"):
        if round == "second":
            queue.push_many(range(3), priorities=[9, 9, 0])
        assert queue.paused() is False
        insert(world, queue, f"{name}-none-{round}")
        insert(world, queue, f"{name}-odd-{round}", priority="high")
        found: list[Any] = []

        def all_found(found: list[Any] = found, wanted: int = 2 if round == "first" else 5) -> bool:
            found += payloads(queue.pop_many(1, timeout=0))
            return len(found) == wanted

        eventually(all_found, "all are found")
        assert {f"{name}-none-{round}", f"{name}-odd-{round}"} <= set(found)
    assert queue.counts().total == 0


def test_peek_shows_messages_without_a_priority_last(world: World, queue: AnyQueue) -> None:
    insert(world, queue, f"{queue.name}-none")
    assert [(each.payload, each.priority) for each in queue.peek()] == [
        (f"{queue.name}-none", None)
    ]
    queue.push("low", priority=0)
    assert payloads(queue.peek()) == ["low", f"{queue.name}-none"]


# ---- moves that keep it


def test_messages_keep_their_priority(world: World, client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push("m", priority=7)
    queue.push("other", priority=6)
    queue.rollback(queue.reserve(0), delay=0)
    queue.release(queue.reserve(0))
    world.lapse(queue.reserve(0))
    eventually(lambda: queue.peek(1)[0].id == id, "the lease has lapsed")
    held = queue.reserve(0)
    assert (held.id, held.priority) == (id, 7)
    queue.bury(held)
    dead = client.queue(f"{queue.name}.dead")
    assert dead.get(id).priority == 7
    assert dead.redrive() == 1
    assert queue.get(id).priority == 7
    assert payloads(queue.pop_many(2, timeout=0)) == ["m", "other"]


def test_history_and_replay_keep_it(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    id = queue.push("m", priority=7)
    queue.push("other", priority=6)
    queue.commit(queue.reserve(0))
    assert queue.history()[0].priority == 7
    assert queue.replay(id) == 1
    assert payloads(queue.pop_many(2, timeout=0)) == ["m", "other"]


def test_moves_keep_it_or_set_it(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    assert other.pop(0) is None  # makes its record, which names the kind
    plain = client.queue(f"{queue.name}-plain", kind="standard")
    id = queue.push("m", priority=7)
    queue.move(queue.reserve(0), to=other)
    assert other.get(id).priority == 7
    other.move(other.reserve(0), to=queue.name, priority=2)
    assert queue.get(id).priority == 2
    queue.move(queue.reserve(0), to=plain)
    held = plain.reserve(0)
    assert held.priority == 2
    plain.move(held, to=queue)
    assert queue.get(id).priority == 2
    new = plain.push("new")
    assert plain.get(new).priority is None
    plain.move_many([(plain.reserve(0), "changed")], to=queue)
    assert (queue.get(new).priority, queue.get(new).payload) == (4, "changed")


def test_replace_in_another_queue_leaves_no_priority_and_group(
    client: AnyClient, queue: AnyQueue, name: str
) -> None:
    plain = client.queue(f"{name}-plain", kind="standard")
    groups = client.queue(f"{name}-groups", kind="ordered")
    queue.push("old", priority=7)
    queue.move(queue.reserve(0), to=groups, group="g")
    groups.move(groups.reserve(0), to=plain, key="k")
    before = plain.peek(1)[0]
    assert (before.priority, before.group) == (7, "g")
    plain.push("new", key="k", on_duplicate="replace")
    after = plain.peek(1)[0]
    assert (after.payload, after.priority, after.group) == ("new", None, None)


def test_replace_by_key_takes_the_new_priority(queue: AnyQueue) -> None:
    queue.push("other", priority=5)
    id = queue.push("old", key="k", priority=1)
    assert queue.push("new", key="k", priority=8, on_duplicate="replace") == id
    assert payloads(queue.pop_many(2, timeout=0)) == ["new", "other"]


def test_push_in_a_transaction_takes_a_priority(world: World, queue: AnyQueue) -> None:
    queue.push("low", priority=1)
    with world.client.transaction() as session:
        queue.push("high", priority=9, session=session)
        queue.push("key", priority=8, key="k", session=session)
    queue.notify()
    assert payloads(queue.pop_many(3, timeout=0)) == ["high", "key", "low"]


# ---- reprioritize


def test_reprioritize_moves_a_message_within_the_queue(world: World, queue: AnyQueue) -> None:
    queue.push("other", priority=5)
    id = queue.push("m", priority=1)
    held = queue.reserve(0)
    assert held.payload == "other"
    assert world.connect().queue(queue.name).reprioritize(id, 9)
    assert queue.reprioritize(held.id, 0)  # reserved, so it counts for the next try
    queue.rollback(held, delay=0)
    eventually(lambda: queue.peek(1)[0].id == id, "it goes first")
    later = queue.push("later", delay=60)
    assert queue.reprioritize(later, 9)
    assert queue.get(later).state == "scheduled"
    assert [each.priority for each in queue.pop_many(3, timeout=0)] == [9, 0]


def test_reprioritize_of_no_live_message_is_false(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    id = queue.push("m")
    queue.commit(queue.reserve(0))
    assert not queue.reprioritize(id, 9)
    assert not queue.reprioritize("unknown", 9)
    assert queue.history()[0].priority == 4


# ---- refusals


@pytest.mark.parametrize("value", [-1, 10, True, 4.0, "4", [4]])
def test_invalid_priority_is_refused(world: World, queue: AnyQueue, value: Any) -> None:
    id = queue.push("m")
    held = queue.reserve(0)
    before = world.stored(queue)
    refuses(
        r"priority: .*0 to 9",
        lambda: queue.push(1, priority=value),
        lambda: queue.push_many([1, 2], priorities=[1, value]),
        lambda: queue.move(held, to=queue, priority=value),
        lambda: queue.reprioritize(id, value),
    )
    assert world.stored(queue) == before


def test_other_kinds_refuse_a_priority(world: World, client: AnyClient, queue: AnyQueue) -> None:
    held = hold(queue)
    plain = client.queue(f"{queue.name}-plain", kind="standard")
    refuses(
        r"priority: .*of kind 'standard'",
        lambda: plain.push(1, priority=4),
        lambda: plain.push_many([1], priorities=[4]),
        lambda: queue.move(held, to=plain, priority=4),
        lambda: queue.move(held, to=plain.name, priority=4),
        lambda: plain.reprioritize("x", 4),
    )
    assert world.stored(plain) == []
    queue.commit(held)
    with pytest.raises(ConfigurationError, match="strict"):
        client.queue(plain.name, kind="standard", strict=True)


# ---- reshape


def test_reshape_changes_what_all_users_agree_on(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, strict=False)
    queue.push(1)
    other = world.connect()
    with pytest.raises(ConfigurationError, match=r"strict=False.*strict=True"):
        other.queue(name, strict=True).push(2)
    client.reshape(name, strict=True)
    other.queue(name, strict=True).push(2)
    queue.push(3)  # it agreed before and follows
    assert queue.counts().ready == 3
    world.connect().queue(name, strict=False).push(4)  # an older program
    assert world.document(f"~queue:{name}")["shape"] == {"strict": True}


def test_pause_of_a_new_queue_stores_what_was_given(client: AnyClient, name: str) -> None:
    queue = client.queue(name, strict=True)
    queue.pause()
    queue.push(1)
    with pytest.raises(ConfigurationError, match=r"strict=True.*strict=False"):
        client.queue(name, strict=False).push(2)
    queue.resume()
    assert queue.pop(0).payload == 1


def test_reshape_of_the_wrong_queue_is_refused(client: AnyClient, name: str) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        client.reshape(name, strict=True)
    client.queue(f"{name}-plain", kind="standard").push(1)
    with pytest.raises(ConfigurationError, match=r"strict: .*of kind 'standard'"):
        client.reshape(f"{name}-plain", strict=True)
    client.queue(name).push(1)
    for wrong in (1, "yes"):
        with pytest.raises(ConfigurationError, match=r"strict: .*True or False"):
            client.reshape(name, strict=wrong)


# ---- the records of the levels


def test_level_records_are_no_messages(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(4), priorities=[0, 3, 3, 9])
    assert queue.counts().total == queue.counts().ready == 4
    assert len(queue.peek(10)) == 4
    assert len(queue.pop_many(10, timeout=0)) == 4
    assert queue.counts().total == 0
    assert queue.next_when() is None
    assert queue.purge() == 0
    assert world.client.delete_queue(queue.name) == 0
    assert world.stored(queue) == []
    again = queue.push_many(range(2), priorities=[0, 9])
    assert len(ids) == 4
    eventually(lambda: len(queue.peek()) == len(again), "the queue lives again")
    assert world.client.delete_queue(queue.name, force=True) == 2
