"""reserve_id: a chosen message is reserved, under the rules of every claim."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import Counts, LeaseLost, Limit
from tests.contract.world import AnyClient, AnyQueue, World, hold, near, payloads, refuses
from tests.support.recorder import Recorder


def test_chosen_message_is_reserved(world: World, queue: AnyQueue) -> None:
    ids = [queue.push(each) for each in range(3)]
    held = queue.reserve_id(str(ids[1]), lease=30)
    assert (held.id, held.payload, held.tries, held.lease) == (ids[1], 1, 1, 30)
    assert near(held.until, 30)
    assert queue.reserve_id(ids[1]) is None, "it is held"
    others = queue.reserve_many(5, timeout=0)
    assert sorted(payloads(others)) == [0, 2]
    world.lapse(held)
    again = queue.reserve_id(ids[1])
    assert (again.id, again.tries) == (ids[1], 2)
    with pytest.raises(LeaseLost):
        queue.commit(held)
    queue.commit(again, *others)
    assert queue.counts() == Counts()


def test_unknown_messages_are_not_reserved(queue: AnyQueue, other: AnyQueue) -> None:
    id = other.push("x")
    for unknown in (id, "unknown", ObjectId(), f"{ObjectId()}:0001"):
        assert queue.reserve_id(unknown) is None
    assert other.reserve_id(id).payload == "x"


@pytest.mark.needs("history")
def test_finished_messages_are_not_reserved(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    held = hold(queue)
    queue.commit(held)
    assert queue.reserve_id(held.id) is None


def test_lookup_of_a_message_makes_no_queue(client: AnyClient, name: str) -> None:
    assert client.queue(name).reserve_id("unknown") is None
    assert name not in {each.name for each in client.queues()}


def test_scheduled_message_is_reserved_and_released(queue: AnyQueue) -> None:
    id = queue.push("later", delay=60)
    held = queue.reserve_id(id)
    assert (held.payload, near(held.when, 60)) == ("later", True)
    queue.release(held)
    found = queue.get(id)
    assert (found.state, found.tries, near(found.when, 60)) == ("scheduled", 0, True)
    assert queue.reserve(0) is None


def test_message_of_a_paused_queue_is_not_reserved(queue: AnyQueue) -> None:
    id = queue.push("x")
    queue.pause()
    assert queue.reserve_id(id) is None
    queue.resume()
    assert queue.reserve_id(id) is not None


def test_lease_of_a_chosen_message_ends(queue: AnyQueue) -> None:
    """Consumers of this client expect its end."""
    id = queue.push("x")
    assert queue.reserve(0).id == id
    chosen = queue.push("y")
    assert queue.reserve_id(chosen, lease=0.2).id == chosen
    assert queue.reserve(timedelta(seconds=30)).id == chosen


@pytest.mark.needs("priority")
def test_chosen_message_may_have_any_priority(queue: AnyQueue) -> None:
    low, _ = queue.push_many(["low", "high"], priorities=[1, 9])
    assert queue.reserve_id(low).payload == "low"
    assert queue.reserve(0).payload == "high"


@pytest.mark.needs("ordered")
def test_only_the_first_of_a_group_is_reserved(queue: AnyQueue) -> None:
    ids = queue.push_many([1, 2, 3], groups=["g", "g", "h"])
    assert queue.reserve_id(ids[1]) is None, "it is not the first"
    assert queue.get(ids[1]).tries == 0
    held = queue.reserve_id(ids[0])
    assert held.payload == 1
    assert queue.reserve_id(ids[1]) is None, "its group is locked"
    assert payloads(queue.reserve_many(5, timeout=0)) == [3]
    queue.commit(held)
    assert queue.reserve_id(ids[1]).payload == 2


@pytest.mark.needs("ordered")
def test_scheduled_message_behind_its_group_stays_scheduled(queue: AnyQueue) -> None:
    first = queue.push("first", group="g", delay=60)
    second = queue.push("second", group="g", delay=120)
    assert queue.reserve_id(second) is None
    found = queue.get(second)
    assert (found.state, found.tries, near(found.when, 120)) == ("scheduled", 0, True)
    held = queue.reserve_id(first)
    assert held.payload == "first"
    queue.release(held)
    found = queue.get(first)
    assert (found.state, near(found.when, 60)) == ("scheduled", True)
    assert queue.reserve(0) is None


@pytest.mark.needs("concurrency")
@pytest.mark.parametrize("delay", [None, 60])
def test_chosen_message_takes_a_slot(client: AnyClient, name: str, delay: float | None) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1))
    ids = [queue.push(each, delay=delay) for each in range(2)]
    held = queue.reserve_id(ids[1])
    assert held.payload == 1
    assert queue.reserve_id(ids[0]) is None
    assert queue.get(ids[0]).state == ("ready" if delay is None else "scheduled")
    assert queue.reserve(0) is None
    queue.commit(held)
    assert queue.reserve_id(ids[0]).payload == 0


@pytest.mark.needs("per")
def test_chosen_message_takes_a_slot_of_its_key(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1, per="headers.tenant"))
    ids = [queue.push(each, headers={"tenant": each % 2}) for each in range(4)]
    held = queue.reserve_id(ids[2])
    assert held.payload == 2
    assert queue.reserve_id(ids[0]) is None
    assert queue.reserve_id(ids[3]).payload == 3
    queue.commit(held)
    assert queue.reserve_id(ids[0]).payload == 0


@pytest.mark.needs("rate")
def test_chosen_message_takes_a_permit(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(rate=1, period=3600))
    ids = [queue.push(each) for each in range(2)]
    assert queue.reserve_id(ids[1]).payload == 1
    assert queue.reserve_id(ids[0]) is None
    assert queue.reserve(0) is None


def test_message_that_does_not_fit_the_model_is_buried(client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push("text")
    assert client.queue(queue.name, int).reserve_id(id) is None
    assert client.queue(f"{queue.name}.dead").counts().ready == 1


def test_cancelled_message_is_not_reserved(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.cancel(held.id)
    queue.rollback(held, delay=0)
    assert queue.reserve_id(held.id) is None
    assert queue.counts() == Counts()


def test_hooks_hear_of_a_chosen_message(world: World, client: AnyClient, name: str) -> None:
    recorder = Recorder()
    queue = world.connect(hooks=[recorder]).queue(name)
    id = queue.push("x")
    recorder.take()
    assert queue.reserve_id("unknown") is None
    assert queue.reserve_id(id) is not None
    assert recorder.take() == [("received", name, [id])]


@pytest.mark.needs("packs")
def test_packed_message_is_not_reserved_alone(queue: AnyQueue) -> None:
    ids = queue.push_many(range(3))
    refuses("reserve_id: .* shares a document.*pass id=", partial(queue.reserve_id, ids[1]))
    alone = queue.push("alone", id=f"alone {queue.name}")
    assert queue.reserve_id(alone).payload == "alone"
    assert queue.reserve_id(ObjectId(ids[0].partition(":")[0])) is None
    assert queue.counts() == Counts(ready=3, reserved=1)


@pytest.mark.needs("standard")
def test_wrong_arguments_of_reserve_id_are_refused(client: AnyClient, queue: AnyQueue) -> None:
    id: Any = queue.push(1)
    refuses("id: ", partial(queue.reserve_id, 7))
    refuses(
        "lease: ", partial(queue.reserve_id, id, lease=0), partial(queue.reserve_id, id, lease="x")
    )
    client.stream(f"{queue.name}-log").append(1)
    log = client.queue(f"{queue.name}-log")
    refuses("is a stream", partial(log.reserve_id, "x"))
    assert queue.counts() == Counts(ready=1)
