"""Ordered queues: one message of a group at a time, in the order of the group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import Backoff, ConfigurationError, Counts, LeaseLost, Push
from pyqueue.backends.ordered.groups import rank
from pyqueue.documents import stored_group
from tests.contract.world import AnyClient, AnyQueue, World, hold, payloads, refuses
from tests.support.eventually import eventually

pytestmark = pytest.mark.needs("ordered")


def take(queue: AnyQueue, limit: int = 100) -> list[Any]:
    """Reserve free messages."""
    return list(queue.reserve_many(limit, timeout=0))


def all_of(queue: AnyQueue) -> list[Any]:
    """Receive and commit everything. Return the payloads in order."""
    found = []
    while held := take(queue):
        found += payloads(held)
        queue.commit(*held)
    return found


# ---- order


def test_group_is_received_one_at_a_time_in_order(queue: AnyQueue) -> None:
    queue.push_many(range(6), groups=["a", "b"] * 3)
    held = take(queue)
    assert sorted(payloads(held)) == [0, 1]
    assert take(queue) == []
    queue.commit(held[0])
    (second,) = take(queue)
    assert second.group == held[0].group
    assert second.payload == held[0].payload + 2


def test_messages_without_a_group_do_not_wait(queue: AnyQueue) -> None:
    queue.push_many(range(5), groups=["a", None, "a", None, None])
    assert sorted(payloads(take(queue))) == [0, 1, 3, 4]


@pytest.mark.differs_by("kind")
def test_pushes_of_one_process_keep_their_order(queue: AnyQueue) -> None:
    """Their ids sort the other way, and many messages share a millisecond."""
    for number in range(20):
        queue.push(number, group="a", id=f"{queue.name}-{99 - number}")
    queue.push_many(range(20, 30), groups=["a"] * 10)
    queue.push_many([Push(number, group="a") for number in range(30, 35)])
    assert all_of(queue) == list(range(35))


def test_another_client_respects_the_locks(world: World, queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["a", "a"])
    held = queue.reserve(0)
    other = world.connect().queue(queue.name)
    assert other.reserve(0) is None
    queue.commit(held)
    assert payloads(take(other)) == [2]


def test_look_that_expects_no_lock_meets_one(world: World, queue: AnyQueue) -> None:
    """The unique index refuses its claim. It then takes the free messages."""
    queue.push_many([1, 2], groups=["a", "b"])
    assert sorted(all_of(queue)) == [1, 2]
    queue.push_many([3, 4, 5, 6], groups=["a", "a", "b", "c"])
    held = world.connect().queue(queue.name).reserve(0)
    assert held.payload == 3
    assert sorted(payloads(take(queue))) == [5, 6]


def test_commit_wakes_who_waits_for_the_group(world: World, queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["a", "a"])
    held = queue.reserve(0)
    other = world.connect().queue(queue.name)
    assert other.reserve(0) is None  # this defers the second message
    queue.commit(held)
    assert other.reserve(timedelta(seconds=30)).payload == 2


@pytest.mark.differs_by("kind")
def test_scheduled_message_does_not_block_its_group(queue: AnyQueue) -> None:
    """Its time decides its place in the group."""
    queue.push("later", group="a", delay=1)
    queue.push("now", group="a")
    assert all_of(queue) == ["now"]
    eventually(lambda: all_of(queue) == ["later"], "its time has come")


@pytest.mark.parametrize("on_failure", ["block", "skip"])
def test_messages_of_an_earlier_release_keep_their_places(
    world: World, client: AnyClient, name: str, on_failure: Any
) -> None:
    """That release numbered messages of a millisecond by ``seq`` alone. Some are scheduled."""
    queue = client.queue(name, on_failure=on_failure)
    queue.push("made")
    assert all_of(queue) == ["made"]
    now = datetime.now(UTC).replace(microsecond=0)
    ahead = now + timedelta(days=1)
    for number, when in enumerate([now, now, ahead, ahead]):
        put = {"when": when, "due": when, "pushed": now, "tries": 0, "payload": number}
        place = {"group": stored_group("a"), "seq": int(when.timestamp()) * 10**6 + number % 2}
        world.raw().insert_one({"_id": f"{name}-{9 - number}", "q": name, **place, **put})
    queue.push_many([4, 5], groups=["a", "a"], at=ahead)
    queue.push(6, group="a")
    queue.rollback(world.connect().queue(name).reserve(0), delay=0)
    first = [0, 1, 6] if on_failure == "block" else [1, 6, 0]
    assert all_of(world.connect().queue(name)) == first
    world.raw().update_many(
        {"q": name, "group": {"$exists": True}}, {"$set": {"when": now, "due": now}}
    )
    assert all_of(world.connect().queue(name)) == [2, 3, 4, 5]


# ---- how a claim ends


ENDS: dict[str, Callable[[AnyQueue, Any, AnyQueue], None]] = {
    "commit": lambda queue, held, other: queue.commit(held),
    "bury": lambda queue, held, other: queue.bury(held),
    "move": lambda queue, held, other: queue.move(held, to=other),
    "replace": lambda queue, held, other: queue.push("new", key="k", on_duplicate="replace"),
}


@pytest.mark.parametrize("end", ENDS)
def test_group_goes_on_once_its_message_has_left(
    queue: AnyQueue, other: AnyQueue, end: str
) -> None:
    queue.push_many(["first", "second", "third"], groups=["a"] * 3, keys=["k", None, None])
    held = queue.reserve(0)
    assert take(queue) == []
    ENDS[end](queue, held, other)
    assert "second" in payloads(take(queue))


@pytest.mark.parametrize("end", ["release", "rollback"])
def test_message_that_comes_back_is_the_next(queue: AnyQueue, end: str) -> None:
    queue.push_many(["first", "second"], groups=["a", "a"])
    held = queue.reserve(0)
    assert take(queue) == []
    if end == "release":
        queue.release(held)
    else:
        queue.rollback(held, delay=0)
    again = queue.reserve(0)
    assert again.payload == "first"
    assert again.tries == (1 if end == "release" else 2)
    assert take(queue) == []


@pytest.mark.parametrize("on_failure", [None, "block", "skip"])
def test_failed_message_blocks_its_group_or_not(
    client: AnyClient, name: str, on_failure: Any
) -> None:
    queue = client.queue(name, on_failure=on_failure)
    queue.push_many(["first", "second", "other"], groups=["a", "a", "b"])
    held = {each.payload: each for each in take(queue)}
    queue.rollback(held["first"], delay=60)
    assert payloads(take(queue)) == (["second"] if on_failure == "skip" else [])


@pytest.mark.parametrize("on_failure", ["block", "skip"])
def test_uncounted_rollback_blocks_the_group_as_any_other(
    world: World, client: AnyClient, name: str, on_failure: Any
) -> None:
    queue = client.queue(name, on_failure=on_failure, max_tries=1)
    queue.push_many(["first", "second"], groups=["a", "a"])
    held = queue.reserve(0)
    queue.rollback(held, delay=60, counted=False)
    rest = take(queue)
    assert payloads(rest) == (["second"] if on_failure == "skip" else [])
    queue.commit(*rest)
    world.ready(held.id)
    (again,) = take(queue)
    assert (again.payload, again.tries) == ("first", 1)


def test_lapsed_lease_keeps_the_group_locked(world: World, queue: AnyQueue) -> None:
    """The message itself comes back, and its former holder changes nothing."""
    queue.push_many(["first", "second"], groups=["a", "a"])
    held = queue.reserve(0)
    assert take(queue) == []
    world.lapse(held)
    (again,) = take(queue)
    assert again.payload == "first"
    with pytest.raises(LeaseLost):
        queue.commit(held)
    queue.commit(again)
    assert all_of(queue) == ["second"]


def test_remove_and_purge_let_the_group_go_on(queue: AnyQueue) -> None:
    queue.push_many(range(4), groups=["a"] * 4)
    held = queue.reserve(0)
    assert take(queue) == []
    ids = [each.id for each in queue.peek(9)]
    assert ids == []  # the rest waits
    queue.commit(held)
    assert queue.remove(queue.peek(1)[0].id)
    assert payloads(take(queue)) == [2]
    assert queue.purge() == 1
    queue.push("new", group="a")
    assert take(queue) == []


def test_batch_of_many_groups_is_settled_at_once(queue: AnyQueue) -> None:
    names = [f"g{number % 50}" for number in range(150)]
    queue.push_many(range(150), groups=names)
    done = []
    for _ in range(3):
        held = take(queue, 60)
        assert len({each.group for each in held}) == len(held) == 50
        done += payloads(held)
        queue.commit(*held)
    assert sorted(done) == list(range(150))


# ---- where the group is kept


def test_message_shows_its_group_in_every_state(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    ids = queue.push_many([1, 2], groups=["a", None])
    assert [queue.get(each).group for each in ids] == ["a", None]
    held = queue.reserve(0)
    assert held.group == queue.get(held.id).group == "a"
    queue.commit(held)
    assert queue.get(held.id).group == "a"
    stored = world.document(held.id)
    assert stored["last_group"] == stored_group("a")
    assert {"group", "lock"}.isdisjoint(stored)
    assert queue.replay(held.id) == 1
    assert world.document(held.id)["group"] == stored_group("a")
    assert "last_group" not in world.document(held.id)
    assert 1 in payloads(take(queue))


def test_removed_message_keeps_its_group_in_the_history(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, history=60)
    first, _ = queue.push_many([1, 2], groups=["a", "a"])
    assert queue.remove(first)
    assert queue.get(first).group == "a"
    assert "group" not in world.document(first)
    assert payloads(take(queue)) == [2]


def test_redrive_restores_the_group(world: World, client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["a", "a"])
    held = queue.reserve(0)
    queue.bury(held)
    dead = client.queue(f"{queue.name}.dead")
    assert dead.peek(1)[0].group == "a"
    assert {"group", "lock", "seq", "no"}.isdisjoint(world.document(held.id))
    assert dead.redrive() == 1
    assert all_of(queue) == [2, 1]


def test_move_keeps_the_group_and_the_order(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many([1, 2, 3, 4], groups=["a", "a", "b", "b"])
    places = []
    for _ in range(2):
        held = take(queue)
        places += [(each.id, rank(world.document(each.id))) for each in held]
        queue.move(*reversed(held), to=other)
    assert [rank(world.document(id)) for id, _ in places] == [place for _, place in places]
    held = take(other)
    assert sorted(payloads(held)) == [1, 3]
    other.move(*held, to=queue, group="c")
    assert sorted(payloads(take(other))) == [2, 4]
    assert len(take(queue)) == 1


def test_repaired_message_keeps_its_place(client: AnyClient, name: str) -> None:
    queue = client.queue(name, kind="ordered", max_tries=None, backoff=Backoff(maximum=60))
    queue.push_many(["ten", 11, "other"], groups=["a", "a", "b"])
    for each in take(queue):
        queue.rollback(each, error=ValueError("no number"), delay=60)
    (failed,) = queue.browse(where={"error.type": "ValueError", "group": "a"}).messages
    held = queue.reserve_id(failed.id)
    queue.move(held, to=queue, payload=10)
    assert all_of(queue) == [10, 11]
    assert queue.counts() == Counts(scheduled=1)


def test_move_to_another_kind_and_back(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["a", "a"])
    plain = client.queue(f"{queue.name}-plain", kind="standard")
    for _ in range(2):
        queue.move(queue.reserve(0), to=plain)
    held = take(plain)
    assert [each.group for each in held] == ["a", "a"]
    plain.move(*held, to=queue)
    assert all_of(queue) == [1, 2]


def test_commit_in_a_transaction_frees_the_group(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many([1, 2], groups=["a", "a"])
    held = queue.reserve(0)
    assert take(queue) == []
    with client.transaction() as session:
        queue.commit(held, session=session)
        assert take(queue) == []
    assert payloads(take(queue)) == [2]


# ---- refusals


def test_what_takes_no_turns_is_refused(world: World, queue: AnyQueue) -> None:
    refuses("pop: .*reserve", lambda: queue.pop(0), lambda: queue.pop_many(3, timeout=0))
    refuses("priority", lambda: queue.push(1, priority=3))
    assert world.stored(queue) == []


def test_named_claim_is_refused(world: World, queue: AnyQueue) -> None:
    with pytest.raises(ConfigurationError, match=r"claim: .*reserve_many"):  # noqa: SIM117
        with queue.claim("g", limit=5):
            pass
    assert world.stored(queue) == []


@pytest.mark.parametrize("group", ["", 5, "x" * 513, "a\0b", ["a"]], ids=repr)
def test_invalid_group_is_refused(world: World, queue: AnyQueue, group: Any) -> None:
    with pytest.raises(ConfigurationError, match="group"):
        queue.push(1, group=group)
    with pytest.raises(ConfigurationError, match=r"groups?:"):
        queue.push_many([1], groups=[group])
    assert world.stored(queue) == []


def test_group_outside_an_ordered_queue_is_refused(
    world: World, client: AnyClient, queue: AnyQueue, name: str
) -> None:
    plain = client.queue(f"{name}-plain", kind="standard")
    with pytest.raises(ConfigurationError, match=r"group: .*'standard'.*'ordered'"):
        plain.push(1, group="a")
    held = hold(queue, 1, group="a")
    before = world.bytes(held.id)
    for to in (plain, plain.name):
        with pytest.raises(ConfigurationError, match="group"):
            queue.move(held, to=to, group="b")
    assert world.bytes(held.id) == before


def test_shape_is_agreed_upon(world: World, client: AnyClient, name: str) -> None:
    client.queue(name, on_failure="skip").push(1)
    assert world.document(f"~queue:{name}")["shape"] == {"on_failure": "skip"}
    with pytest.raises(ConfigurationError, match=r"on_failure.*'skip'.*'block'"):
        world.connect().queue(name, on_failure="block").push(1)
    with pytest.raises(ConfigurationError, match="on_failure"):
        client.queue(name, on_failure="wait")
    client.reshape(name, on_failure="block")
    world.connect().queue(name, on_failure="block").push(1)
    with pytest.raises(ConfigurationError, match="strict"):
        client.reshape(name, strict=True)
    with pytest.raises(ConfigurationError, match="on_failure"):
        client.reshape(name)


# ---- documents of other programs


def test_documents_of_other_programs_are_received(world: World, queue: AnyQueue) -> None:
    """They lack a sequence number and a time of entry, or their group is not a str."""
    queue.push("ours", group="a")
    when = world.document(queue.peek(1)[0].id)["when"]
    put = {"q": queue.name, "when": when, "tries": 0}
    bare = {"_id": f"{queue.name}-1", "group": stored_group("a"), "payload": "bare", **put}
    world.raw().insert_one(bare)
    world.raw().insert_one({"_id": f"{queue.name}-2", "group": 5, "payload": "five", **put})
    world.raw().insert_one({"_id": f"{queue.name}-3", "group": 5, "payload": "more", **put})
    fresh = world.connect().queue(queue.name)
    first = take(fresh)
    assert sorted(payloads(first)) == ["bare", "five"]
    assert take(fresh) == []
    until = {each.payload: each.until for each in first}
    fresh.commit(*first)
    assert all_of(world.connect().queue(queue.name)) == ["ours"]
    # The client cannot show its group, so it does not bring the next one forward.
    more = {"_id": f"{queue.name}-3"}
    assert world.document(more["_id"])["when"] <= until["five"]
    world.raw().update_one(more, {"$set": {"when": when}})
    assert all_of(world.connect().queue(queue.name)) == ["more"]
