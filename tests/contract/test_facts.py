"""What a message tells about its deliveries and its failures."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from tests.contract.world import AnyClient, AnyQueue, World, hold, near


def test_release_lowers_tries_but_not_deliveries(queue: AnyQueue) -> None:
    held = hold(queue)
    assert (held.tries, held.deliveries) == (1, 1)
    queue.release(held)
    shown = queue.get(held.id)
    assert (shown.tries, shown.deliveries) == (0, 1)
    [held] = queue.reserve_many(5, timeout=0)
    assert (held.tries, held.deliveries) == (1, 2)
    queue.rollback(held, delay=0)
    held = queue.reserve(0)
    assert (held.tries, held.deliveries) == (2, 3)


@pytest.mark.needs("move")
def test_deliveries_begin_again_in_another_queue(queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue)
    queue.release(held)
    queue.move(queue.reserve(0), to=other)
    assert other.get(held.id).deliveries == 0
    assert other.reserve(0).deliveries == 1


@pytest.mark.needs("keys")
def test_deliveries_begin_again_for_a_new_payload(world: World, queue: AnyQueue) -> None:
    id = queue.push(1, key="k")
    queue.reserve(0)
    queue.push(2, key="k", on_duplicate="replace")
    assert "deliveries" not in world.document(id)
    assert queue.reserve(0).deliveries == 1


def test_deliveries_of_an_older_release_count_as_tries(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    queue.rollback(held, delay=0)
    world.raw().update_one({"_id": held.id}, {"$unset": {"deliveries": ""}, "$set": {"tries": 3}})
    assert queue.get(held.id).deliveries == 3
    assert queue.reserve(0).deliveries == 4


def test_reservation_tells_when_it_was_claimed(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    assert near(held.reserved, 0)
    assert held.reserved == world.document(held.id)["reserved"]
    assert held.reserved == held.until - timedelta(seconds=held.lease)
    claimed = held.reserved
    queue.extend(held, lease=600)
    assert held.reserved == claimed


@pytest.mark.needs("packs")
def test_messages_of_a_pack_share_their_deliveries(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.push_many(["a", "b", "c"])
    held = queue.reserve_many(3, timeout=0)
    assert {(each.tries, each.deliveries) for each in held} == {(1, 1)}
    assert all(near(each.reserved, 0) for each in held)
    queue.release(*held)
    held = queue.reserve_many(3, timeout=0)
    assert {(each.tries, each.deliveries) for each in held} == {(1, 2)}
    queue.rollback(held[0], delay=0)  # it leaves the pack
    assert queue.get(held[0].id).deliveries == 2
    queue.commit(*held[1:])
    assert queue.reserve(0).deliveries == 3


# ---- errors


def broken() -> None:
    """Fail as a handler does."""
    raise ValueError("no such carrier")


def failure() -> ValueError:
    """Return the exception of a handler."""
    try:
        broken()
    except ValueError as error:
        return error
    raise AssertionError


def test_error_names_its_place(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.rollback(held, delay=0, error=failure())
    error = queue.reserve(0).error
    assert (error.type, error.message) == ("ValueError", "no such carrier")
    assert near(error.at, 0)
    assert re.fullmatch(rf"{re.escape(__name__)}:broken:\d+", error.where)
    assert error.trace.splitlines()[-1] == error.where
    assert len(error.fp) == 12


def test_error_is_a_mapping_of_its_stored_fields(world: World, queue: AnyQueue) -> None:
    """Programs for release 0.1 read it by the stored names."""
    held = hold(queue)
    queue.rollback(held, delay=0, error="why")
    error = queue.get(held.id).error
    stored = world.document(held.id)["error"]
    assert (error["type"], error["message"], error["at"]) == ("error", "why", stored["at"])
    assert error == stored
    assert (error.get("where", "none"), "fp" in error) == ("none", True)


@pytest.mark.needs("dead_letter")
def test_dead_message_tells_of_its_burial(client: AnyClient, queue: AnyQueue) -> None:
    held = hold(queue)
    queue.bury(held, error=failure())
    dead = client.queue(f"{queue.name}.dead").get(held.id).dead
    assert (dead.queue, dead.reason, dead.tries) == (queue.name, "buried", 1)
    assert (dead["from"], dead["reason"], dead["tries"]) == (queue.name, "buried", 1)
    assert near(dead.at, 0)
    assert (dead.group, dead.position) == (None, None)
    assert (dead.error.type, dead.error["type"]) == ("ValueError", "ValueError")


def test_progress_has_attributes_and_stored_names(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.progress(held, 0.5, "half way")
    progress = queue.get(held.id).progress
    assert (progress.fraction, progress.note) == (0.5, "half way")
    assert near(progress.at, 0)
    assert progress["fraction"] == 0.5


@pytest.mark.needs("packs")
def test_error_stays_as_a_message_leaves_its_pack(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.push_many(["a", "b"])
    queue.rollback(*queue.reserve_many(2, timeout=0), delay=0, error=failure())
    one, other = queue.reserve_many(2, timeout=0)
    before = dict(one.error)
    assert before["where"].partition(":")[0] == __name__
    queue.rollback(one, delay=0)
    queue.release(other)
    assert [dict(queue.get(each.id).error) for each in (one, other)] == [before, before]
    queue.bury(queue.reserve(0))
    assert dict(client.queue(f"{name}.dead").peek()[0].dead.error) == before


@pytest.mark.needs("standard")
def test_error_in_a_stream_keeps_its_fingerprint(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append("a")
    group = log.consumer("g")
    held = group.reserve(0)
    error = failure()
    group.rollback(held, delay=0, error=error)
    held = group.reserve(0)
    assert (held.error.type, held.error.where) == ("ValueError", None)
    assert (held.tries, held.deliveries) == (2, 2)
    assert near(held.reserved, 0)
    group.bury(held, error=error)
    [dead] = client.queue(f"{name}.g.dead").peek()
    assert (dead.error.fp, dead.error.where.partition(":")[0]) == (held.error.fp, __name__)
    assert (dead.dead.queue, dead.dead.group, dead.dead.position) == (name, "g", 0)


# ---- attempts


def fail(queue: AnyQueue, error: Any, **options: Any) -> None:
    """Reserve the message of a queue, and roll it back."""
    queue.rollback(queue.reserve(0), delay=0, error=error, **options)


def numbers(message: Any) -> list[int]:
    """Return the numbers of the failed tries."""
    return [each.number for each in message.attempts]


def test_failed_tries_are_kept(queue: AnyQueue) -> None:
    queue.push(1)
    fail(queue, failure())
    fail(queue, None)  # no error, no attempt
    fail(queue, "x" * 300)
    held = queue.reserve(0)
    first, second = held.attempts
    assert (first.number, first.type, first.message) == (1, "ValueError", "no such carrier")
    assert (second.number, second.type, second.message) == (3, "error", "x" * 200)
    assert (first.owner, second.fp) == (held.owner, held.error.fp)
    assert near(first.at, 0)
    assert 0 <= first.seconds < 60
    assert queue.get(held.id).attempts == held.attempts


def test_message_keeps_its_last_five_attempts(queue: AnyQueue) -> None:
    id = queue.push(1)
    for number in range(1, 8):
        fail(queue, f"failure {number}")
    assert numbers(queue.get(id)) == [3, 4, 5, 6, 7]


def test_lapsed_try_leaves_a_gap(world: World, queue: AnyQueue) -> None:
    queue.push(1)
    fail(queue, "one")
    world.lapse(queue.reserve(0))
    fail(queue, "three")
    assert numbers(queue.reserve(0)) == [1, 3]


@pytest.mark.needs("dead_letter", "move")
def test_attempts_survive_burial_and_redrive_but_no_move(
    client: AnyClient, name: str, other: AnyQueue
) -> None:
    queue, dead = client.queue(name, max_tries=2), client.queue(f"{name}.dead")
    id = queue.push(1)
    fail(queue, "one")
    fail(queue, "two")
    assert numbers(dead.get(id)) == [1, 2]
    assert dead.redrive() == 1
    assert numbers(queue.get(id)) == [1, 2]
    queue.bury(queue.reserve(0), error="bad")
    assert [each.message for each in dead.get(id).attempts] == ["one", "two", "bad"]
    assert numbers(dead.get(id)) == [1, 2, 1]  # a redrive begins to count anew
    dead.redrive()
    queue.move(queue.reserve(0), to=other)
    assert other.get(id).attempts == ()


@pytest.mark.needs("dead_letter")
@pytest.mark.parametrize("value", ["x", 3, {"a": 1}, [1, 2], None], ids=repr)
def test_attempts_that_are_no_list_are_replaced(
    world: World, client: AnyClient, name: str, value: Any
) -> None:
    """Another program wrote them into a dead message. Its neighbour keeps its attempts."""
    queue, dead = client.queue(name), client.queue(f"{name}.dead")
    ids = [queue.push(1), queue.push(2)]
    queue.bury(*queue.reserve_many(2, timeout=0), error="why")
    world.raw().update_one({"_id": ids[0]}, {"$set": {"attempts": value}})
    for number in (1, 2):
        held = {each.id: each for each in dead.reserve_many(2, timeout=0)}
        assert len(held[ids[0]].attempts) == number - 1
        dead.rollback(*held.values(), delay=0, error=f"later {number}")
    texts = [[each.message for each in dead.get(id).attempts] for id in ids]
    assert texts == [["later 1", "later 2"], ["why", "later 1", "later 2"]]
    assert dead.redrive() == 2
    assert numbers(queue.get(ids[0])) == [1, 2]


@pytest.mark.needs("history")
def test_history_keeps_attempts_until_a_replay(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    id = queue.push(1)
    fail(queue, "one")
    queue.commit(queue.reserve(0))
    assert numbers(queue.get(id)) == [1]
    queue.replay(id)
    assert queue.get(id).attempts == ()


@pytest.mark.needs("keys")
def test_new_payload_has_no_attempts(queue: AnyQueue) -> None:
    id = queue.push(1, key="k")
    fail(queue, "one")
    queue.push(2, key="k", on_duplicate="replace")
    assert queue.get(id).attempts == ()


@pytest.mark.needs("packs")
def test_messages_of_a_pack_have_no_attempts(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.push_many(["a", "b"])
    one, other = queue.reserve_many(2, timeout=0)
    queue.rollback(one, delay=0, error="one")
    assert queue.get(one.id).attempts == ()
    queue.commit(other)
    fail(queue, "two")  # by now the message has its own document
    assert numbers(queue.get(one.id)) == [2]


# ---- the trail


@pytest.mark.needs("move")
def test_trail_tells_of_each_stay(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push(1)
    fail(queue, "one")
    held = queue.reserve(0)
    queue.move(held, to=other)
    second = other.reserve(0)
    (stop,) = second.trail
    assert (stop["q"], stop["tries"], stop["in"]) == (queue.name, 2, held.pushed)
    assert stop["out"] == stop["at"] == second.when
    assert stop["waited"] == (held.reserved - held.when).total_seconds()
    other.move(second, to=queue)
    one, two = queue.reserve(0).trail
    assert one == stop
    assert (two["q"], two["tries"], two["in"]) == (other.name, 1, one["out"])
    assert two["out"] >= two["in"]


@pytest.mark.needs("move")
def test_trail_of_an_older_release_tells_when_it_can(world: World, queue: AnyQueue) -> None:
    id = queue.push(1)
    pushed = queue.get(id).pushed
    stop = {"q": "a", "at": pushed}
    world.raw().update_one({"_id": id}, {"$set": {"trail": [stop, stop]}})
    known = {"in": pushed, "out": pushed, "tries": None, "waited": None}
    assert queue.get(id).trail == [stop | known] * 2
    world.raw().update_one({"_id": id}, {"$set": {"trail": [stop] * 20}})
    trail = queue.get(id).trail
    assert (trail[0]["in"], trail[1]["in"]) == (None, pushed)  # an earlier entry may be gone


@pytest.mark.needs("dead_letter")
def test_trail_tells_of_the_tries_before_a_burial(client: AnyClient, name: str) -> None:
    queue, dead = client.queue(name, max_tries=2), client.queue(f"{name}.dead")
    id = queue.push(1)
    fail(queue, "one")
    fail(queue, "two")
    (stop,) = dead.get(id).trail
    assert (stop["q"], stop["tries"]) == (name, 2)
    dead.redrive()
    assert [each["tries"] for each in queue.get(id).trail] == [2, None]


@pytest.mark.needs("packs")
def test_trail_of_a_pack_tells_of_its_stay(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many(["a", "b", "c"])
    held = queue.reserve_many(3, timeout=0)
    queue.move(*held, to=other)
    moved = other.reserve_many(3, timeout=0)
    assert {(each.trail[0]["tries"], each.trail[0]["in"]) for each in moved} == {
        (1, held[0].pushed)
    }
    other.bury(moved[1])
    (dead,) = client.queue(f"{other.name}.dead").peek()
    assert (dead.trail[1]["tries"], dead.trail[1]["waited"] >= 0) == (1, True)
    other.move(moved[0], to=queue)  # out of its pack
    (back,) = queue.reserve_many(1, timeout=0)
    assert [stop["tries"] for stop in back.trail] == [1, 1]
    assert back.trail[1]["in"] == back.trail[0]["out"]
