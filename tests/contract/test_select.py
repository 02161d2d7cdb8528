"""Select: many messages of a queue are counted, removed, redriven, moved or requeued at once."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import BulkResult, Counts, Limit
from pyqueue.where import gt, one_of
from tests.contract.world import (
    AnyClient,
    AnyQueue,
    World,
    hold,
    near,
    payloads,
    refuses,
    waiting,
)

ODD = {"payload": one_of(1, 3, 5, 7, 9)}


def left(queue: AnyQueue) -> list[Any]:
    """Return the payloads of the messages that are not finished."""
    states = ("ready", "scheduled", "reserved", "dead")
    found = [queue.browse(state, limit=1000) for state in states]
    return sorted(each for page in found for each in payloads(page.messages))


# ---- the changes


def test_selected_messages_are_counted_and_removed(queue: AnyQueue) -> None:
    queue.push_many(range(10))
    assert queue.select(ODD).count() == 5
    assert queue.select(ODD).count(limit=3) == 3
    assert queue.select(ODD).remove() == BulkResult(5, 0)
    assert left(queue) == [0, 2, 4, 6, 8]
    assert queue.select().remove(limit=2) == BulkResult(2, 0)
    assert left(queue) == [4, 6, 8]
    assert queue.select(ODD).remove() == BulkResult(0, 0)


@pytest.mark.needs("history")
def test_removed_messages_go_to_the_history(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    queue.push_many(range(4), keys=["k", None, None, None])
    assert queue.select({"payload": one_of(0, 1)}).remove() == BulkResult(2, 0)
    assert queue.counts() == Counts(ready=2, history=2)
    assert {each.outcome for each in queue.history()} == {"removed"}
    assert queue.push(0, key="k") is not None, "the key is free"
    assert queue.select({"payload": 0}).count() == 1, "finished messages are not selected"


def test_held_messages_are_passed(queue: AnyQueue) -> None:
    held = hold(queue, 1)
    queue.push_many([2, 3], delay=60)
    assert queue.select().count() == 3
    assert queue.select(state="reserved").count() == 1
    assert queue.select(state="reserved").remove() == BulkResult(0, 1)
    assert queue.select().requeue(datetime.now(UTC) + timedelta(hours=1)) == BulkResult(2, 1)
    assert queue.select().remove() == BulkResult(2, 1)
    queue.commit(held)


def test_dead_messages_of_one_error_are_redriven(client: AnyClient, queue: AnyQueue) -> None:
    for n in range(6):
        error = TimeoutError("late") if n % 2 else ValueError("wrong")
        queue.bury(hold(queue, n, **({"key": "k"} if n == 1 else {})), error=error)
    dead = client.queue(f"{queue.name}.dead")
    assert dead.select(error=TimeoutError).count() == 3
    assert dead.select(error="ValueError", state="dead").count() == 3
    assert dead.select(error="Timeout").count() == 0
    assert dead.select(error=TimeoutError).redrive(limit=2) == BulkResult(2, 0)
    assert left(queue) == [1, 3]
    (first,) = [each for each in queue.browse().messages if each.payload == 1]
    assert (first.key, first.tries, first.dead, first.error["type"]) == (
        *("k", 0, None),
        "TimeoutError",
    )
    (example, *_) = dead.browse(where={"error.type": "ValueError"}).messages
    assert dead.select({"error.fp": example.error.fp}).redrive() == BulkResult(3, 0)
    assert left(dead) == [5]
    assert queue.select().redrive() == BulkResult(0, 0), "none of these is dead"


def test_messages_move_to_another_queue(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many(range(10), headers={"by": "me"})
    queue.push(10, key="k", delay=60)
    assert queue.select(ODD).move(other) == BulkResult(5, 0)
    assert queue.select({"payload": 10}).move(other.name) == BulkResult(1, 0)
    assert left(queue) == [0, 2, 4, 6, 8]
    found = {each.payload: each for each in other.browse().messages}
    assert sorted(found) == [1, 3, 5, 7, 9, 10]
    assert {(each.state, each.tries) for each in found.values()} == {("ready", 0)}
    assert {each.trail[-1]["q"] for each in found.values()} == {queue.name}
    assert (found[1].headers, found[10].key) == ({"by": "me"}, None)
    assert len(other.reserve_many(20, timeout=0)) == 6


def test_move_of_dead_letters_makes_them_ordinary(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.bury(hold(queue, 1), error="bad")
    dead = client.queue(f"{queue.name}.dead")
    assert dead.select(state="dead").move(other) == BulkResult(1, 0)
    (found,) = other.browse().messages
    assert (found.payload, found.state, found.dead, found.error) == (1, "ready", None, None)


def test_scheduled_messages_are_requeued(queue: AnyQueue) -> None:
    queue.push_many(range(10), delay=60)
    queue.push(10)
    assert queue.select(ODD).requeue() == BulkResult(5, 0)
    assert queue.select().requeue(limit=1) == BulkResult(1, 0)
    assert queue.counts() == Counts(ready=7, scheduled=4)
    at = datetime.now(UTC) + timedelta(minutes=5)
    assert queue.select({"payload": one_of(1, 2, 10)}).requeue(at) == BulkResult(3, 0)
    assert queue.select({"payload": one_of(1, 2, 10)}).requeue(at) == BulkResult(0, 0)
    (found,) = queue.browse(where={"payload": 10}).messages
    assert (found.state, near(found.when, 300)) == ("scheduled", True)
    past = at - timedelta(days=1)
    assert queue.select().requeue(past) == BulkResult(6, 0), "this means now"
    assert len(queue.reserve_many(20, timeout=0)) == 11


def test_failed_messages_keep_their_tries_when_requeued(queue: AnyQueue) -> None:
    queue.rollback(hold(queue, 1), delay=60, error="bad")
    assert queue.select(error="error").requeue() == BulkResult(1, 0)
    again = queue.reserve(0)
    assert (again.tries, again.error["message"]) == (2, "bad")


@pytest.mark.needs("priority")
def test_priority_of_many_messages_changes(queue: AnyQueue) -> None:
    queue.push_many(range(6), priorities=[3] * 6)
    assert queue.select(ODD).reprioritize(8) == BulkResult(3, 0)
    assert payloads(queue.reserve_many(4, timeout=0)) == [1, 3, 5, 0]
    refuses("priority: 10 is not", lambda: queue.select().reprioritize(10))


# ---- conditions


def test_conditions_of_a_selection(queue: AnyQueue) -> None:
    queue.push_many([{"n": n} for n in range(5)], headers={"by": "a"})
    queue.push({"n": 5}, delay=60)
    for options, number in (
        ({}, 6),
        ({"where": {"payload.n": gt(2)}}, 3),
        ({"where": {"payload.n": gt(2), "headers.by": "a"}}, 2),
        ({"state": "ready"}, 5),
        ({"state": "scheduled"}, 1),
        ({"state": "scheduled", "where": {"headers.by": "a"}}, 0),
        ({"older": timedelta(hours=1)}, 0),
        ({"error": KeyError}, 0),
    ):
        found = queue.select(**options).count()
        assert found == number, options


def test_old_messages_are_selected(world: World, queue: AnyQueue) -> None:
    old, _ = queue.push("old", id=f"{queue.name}/old"), queue.push("new")
    pushed = datetime.now(UTC) - timedelta(hours=2)
    assert world.raw().update_one({"_id": old}, {"$set": {"pushed": pushed}}).matched_count
    assert queue.select(older=timedelta(hours=1)).remove() == BulkResult(1, 0)
    assert left(queue) == ["new"]


def test_wrong_arguments_of_select_are_refused(queue: AnyQueue, other: AnyQueue) -> None:
    queue.push(1)
    some = queue.select()
    refuses("where: unknown path 'n'", lambda: queue.select({"n": 1}))
    refuses("state: 'finished' is not allowed", lambda: queue.select(state="finished"))
    refuses("older: -1 is not allowed", lambda: queue.select(older=-1))
    refuses("error: expected an exception class", lambda: queue.select(error=KeyError("x")))
    refuses("limit: 0 is not", lambda: some.remove(limit=0), lambda: some.count(limit=0))
    refuses("rate: 0 is not", lambda: some.remove(rate=0))
    refuses("rate: ", lambda: some.remove(rate="1"), lambda: some.remove(rate=True))
    refuses("progress: expected a function", lambda: some.remove(progress=1))
    refuses("to: the messages are already in", lambda: some.move(queue))
    refuses("to: the messages are already in", lambda: some.move(queue.name))
    refuses("to: expected a Queue or the name", lambda: some.move(1))
    refuses("at: .* has no time zone", lambda: some.requeue(datetime(2030, 1, 1)))
    assert left(queue) == [1]


@pytest.mark.needs("standard")
def test_select_of_a_stream_is_refused(client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append(1)
    for kind in (None, "standard"):
        some = client.queue(name, kind=kind).select()
        remedy = r"select: .* is a stream; use trim\(\) .* seek\(\)"
        refuses(remedy, some.count, some.remove, some.requeue, partial(some.move, "b"))
    queue = client.queue(f"{name}-queue")
    queue.push(1)
    refuses("to: .* is a stream", lambda: queue.select().move(name))
    group = log.consumer("g")
    group.bury(group.reserve(0))
    dead = client.queue(f"{name}.g.dead")
    refuses(r"redrive: .* came from the stream .*; move\(\)", dead.select().redrive)
    refuses(r"redrive: .* came from the stream .*; move\(\)", dead.select().requeue)
    assert dead.select().move(queue) == BulkResult(1, 0)
    assert left(queue) == [1, 1]


@pytest.mark.needs("documents")
def test_selection_takes_the_kind_of_the_record(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(range(3))
    any_kind = client.queue(queue.name, kind=None)
    assert any_kind.select({"payload": 1}).remove() == BulkResult(1, 0)


def test_selection_of_an_unused_queue_creates_none(world: World, queue: AnyQueue) -> None:
    assert queue.select().count() == 0
    assert queue.select().remove() == BulkResult(0, 0)
    assert queue.select().move(f"{queue.name}-other") == BulkResult(0, 0)
    assert world.stored(queue, f"{queue.name}-other") == []


@pytest.mark.needs("server")
def test_selection_changes_more_than_a_portion(queue: AnyQueue) -> None:
    number = 2300
    queue.push_many(range(number))
    told: list[BulkResult] = []
    assert queue.select().requeue() == BulkResult(0, 0)
    assert queue.select({"payload": gt(9)}).remove(progress=told.append).done == number - 10
    assert [each.done for each in told[:1]] == [1000]
    assert told[-1] == BulkResult(number - 10, 0)
    assert left(queue) == list(range(10))


@pytest.mark.needs("standard")
@pytest.mark.differs_by("kind")
def test_rate_of_a_call_is_kept(queue: AnyQueue) -> None:
    queue.push_many(range(5))
    began = time.monotonic()
    assert queue.select().remove(rate=4) == BulkResult(5, 0)
    assert time.monotonic() - began > 0.9


def test_exception_of_progress_ends_the_call(queue: AnyQueue) -> None:
    queue.push_many(range(5))

    def stop(so_far: BulkResult) -> None:
        raise KeyError(so_far.done)

    with pytest.raises(KeyError, match="2"):
        queue.select().remove(rate=2, progress=stop)
    assert len(left(queue)) == 3


# ---- consumers


def test_bulk_requeue_wakes_a_consumer(world: World, queue: AnyQueue) -> None:
    queue.push("x", delay=600)
    found = waiting(world.client, queue, lambda: queue.reserve(timedelta(seconds=30)))
    assert queue.select(state="scheduled").requeue() == BulkResult(1, 0)
    assert found.result(30).payload == "x"


def test_bulk_move_wakes_a_consumer(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push("x")
    found = waiting(world.client, other, lambda: other.reserve(timedelta(seconds=30)))
    assert queue.select().move(other) == BulkResult(1, 0)
    assert found.result(30).payload == "x"


@pytest.mark.needs("ordered")
def test_bulk_changes_let_groups_continue(queue: AnyQueue, other: AnyQueue) -> None:
    queue.push_many(range(6), groups=["g", "h"] * 3)
    held = queue.reserve_many(10, timeout=0)
    assert sorted(payloads(held)) == [0, 1]
    assert queue.reserve(0) is None  # this defers the rest
    assert queue.select({"payload": one_of(2, 3)}).remove() == BulkResult(2, 0)
    queue.commit(*held)
    assert sorted(payloads(queue.reserve_many(10, timeout=0))) == [4, 5]


@pytest.mark.needs("ordered")
def test_redriven_messages_keep_their_order(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(range(4), groups=["g"] * 4)
    for _ in range(4):
        queue.bury(queue.reserve(0))
    assert client.queue(f"{queue.name}.dead").select().redrive() == BulkResult(4, 0)
    order = []
    while (held := queue.reserve(0)) is not None:
        order.append(held.payload)
        queue.commit(held)
    assert order == [0, 1, 2, 3]


@pytest.mark.needs("per", "fifo")
def test_bulk_changes_take_no_slot(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1, per="headers.t"))
    queue.push_many(range(5), headers={"t": "x"})
    held = queue.reserve_many(5, timeout=0)
    assert payloads(held) == [0]
    assert queue.reserve(0) is None  # this defers the rest
    assert queue.select(ODD).remove() == BulkResult(2, 0)
    queue.commit(*held)
    assert payloads(queue.reserve_many(5, timeout=0)) == [2]


@pytest.mark.needs("packs")
def test_messages_of_packs_are_changed_one_by_one(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many(range(10))
    held = queue.reserve(0)
    assert queue.select(ODD).remove() == BulkResult(0, 5), "a consumer holds the pack"
    queue.release(held)
    assert queue.select(ODD).move(other) == BulkResult(5, 0)
    assert left(other) == [1, 3, 5, 7, 9]
    at = datetime.now(UTC) + timedelta(hours=1)
    assert queue.select({"payload": one_of(2, 4)}).requeue(at) == BulkResult(2, 0)
    assert queue.counts() == Counts(ready=3, scheduled=2)
    (found,) = queue.browse(where={"payload": 4}).messages
    assert (found.state, near(found.when, 3600)) == ("scheduled", True)
    assert queue.select({"payload": 2}).requeue() == BulkResult(1, 0)
    assert sorted(payloads(queue.reserve_many(10, timeout=0))) == [0, 2, 6, 8]


@pytest.mark.needs("packs")
def test_whole_packs_move_to_another_bucket(client: AnyClient, name: str) -> None:
    queue, other = client.queue(name, pack=5), client.queue(f"{name}-other", pack=5)
    queue.push_many(range(10))
    assert queue.select({"payload": gt(3)}).move(other) == BulkResult(6, 0)
    assert (left(queue), left(other)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert len(other.reserve_many(10, timeout=0)) == 6
