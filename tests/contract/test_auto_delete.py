"""Queues with auto_delete: once they are unused and empty, nothing is left of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import Client
from pyqueue.backends.recovering import recover_all
from pyqueue.backends.unused import delete_unused
from pyqueue.runtime.connecting import runner_of
from tests.contract.world import AnyClient, AnyQueue, World, hold, near, refuses
from tests.support.eventually import eventually


def note_of(world: World, name: str) -> Any:
    """Return the document that notes the use of a queue, or None."""
    return world.raw().find_one({"_id": f"~used:{name}"})


def let_pass(world: World, name: str, seconds: float = 3600) -> datetime:
    """Let the last use of a queue lie so far back. Return when it was."""
    past = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=seconds)
    match = {"_id": f"~used:{name}"}
    done = world.raw().update_one(match, {"$set": {"used": past, "when": past}})
    assert done.matched_count == 1
    return past


def sweep(world: World, name: str) -> bool:
    """Delete unused queues, as clients do from time to time. Return whether this queue was one."""
    with Client(world.raw().database, signals="none:") as other:
        return name in runner_of(other).run(delete_unused())


@pytest.fixture
def passing(client: AnyClient, name: str) -> AnyQueue:
    """Return an empty queue that was used, and is deleted when unused."""
    queue = client.queue(name, auto_delete=60)
    queue.commit(hold(queue))
    return queue


def test_use_is_noted(world: World, passing: AnyQueue) -> None:
    found = note_of(world, passing.name)
    assert near(found["used"], 0)
    assert near(found["when"], 75)
    assert world.document(f"~queue:{passing.name}")["shape"]["auto_delete"] == 60.0


def test_unused_queue_is_deleted(world: World, client: AnyClient, passing: AnyQueue) -> None:
    assert not sweep(world, passing.name)
    let_pass(world, passing.name)
    assert sweep(world, passing.name)
    assert passing.name not in [each.name for each in client.queues()]
    assert world.stored(passing) == []
    assert note_of(world, passing.name) is None


def test_pass_of_a_consumer_deletes_unused_queues(world: World, passing: AnyQueue) -> None:
    let_pass(world, passing.name)
    with Client(world.raw().database, signals="none:") as other:
        runner_of(other).run(recover_all())
    assert world.stored(passing) == []


def test_deleted_queue_is_made_again(world: World, passing: AnyQueue) -> None:
    let_pass(world, passing.name)
    sweep(world, passing.name)
    again = world.connect().queue(passing.name, auto_delete=60)
    again.push("again")
    record = world.document(f"~queue:{passing.name}")
    assert (record["q"], "deleted" in record) == (passing.name, False)
    assert near(note_of(world, passing.name)["used"], 0)
    assert again.reserve(0).payload == "again"


def test_push_to_a_queue_that_was_just_deleted_is_kept(world: World, passing: AnyQueue) -> None:
    """The producer still relies on the record."""
    producer = world.connect().queue(passing.name)
    producer.commit(hold(producer))
    let_pass(world, passing.name)
    assert sweep(world, passing.name)
    producer.push("kept")
    assert world.document(f"~queue:{passing.name}")["q"] == "~deleted"
    assert not sweep(world, passing.name)
    assert world.connect().queue(passing.name).reserve(0).payload == "kept"
    assert world.document(f"~queue:{passing.name}")["q"] == passing.name


@pytest.mark.parametrize("state", ["ready", "scheduled", "reserved"])
def test_queue_with_a_message_stays(world: World, passing: AnyQueue, state: str) -> None:
    passing.push(1, delay=60 if state == "scheduled" else None)
    held = passing.reserve(0)
    if state == "ready":
        passing.release(held)
    let_pass(world, passing.name)
    before = world.stored(passing)
    assert not sweep(world, passing.name)
    assert world.stored(passing) == before
    if state == "reserved":
        passing.commit(held)
        let_pass(world, passing.name)
        assert sweep(world, passing.name)


def test_other_program_keeps_the_queue(world: World, passing: AnyQueue) -> None:
    """It does not give the option."""
    past = let_pass(world, passing.name)
    assert world.connect().queue(passing.name).reserve(0) is None
    eventually(lambda: note_of(world, passing.name)["used"] > past, "its use is noted")
    assert not sweep(world, passing.name)
    assert world.stored(passing) != []


@pytest.mark.needs("claim", "documents")
def test_named_claim_is_a_use(world: World, passing: AnyQueue) -> None:
    past = let_pass(world, passing.name)
    with world.connect().queue(passing.name).claim("g", limit=1) as claim:
        assert claim.ids == []
    eventually(lambda: note_of(world, passing.name)["used"] > past, "its use is noted")


@pytest.mark.needs("history")
def test_deletion_takes_the_history(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, auto_delete=60, history=3600)
    queue.commit(hold(queue))
    let_pass(world, name)
    assert sweep(world, name)
    assert world.stored(queue) == []


@pytest.mark.needs("dead_letter")
def test_dead_letters_stay(world: World, client: AnyClient, passing: AnyQueue) -> None:
    passing.bury(hold(passing))
    let_pass(world, passing.name)
    assert sweep(world, passing.name)
    assert client.queue(f"{passing.name}.dead").counts().ready == 1


def test_reads_are_no_use(world: World, passing: AnyQueue) -> None:
    past = let_pass(world, passing.name)
    other = world.connect().queue(passing.name)
    assert (other.peek(), other.counts().total, other.get("x")) == ([], 0, None)
    assert note_of(world, passing.name)["used"] == past


@pytest.mark.needs("documents")
def test_note_is_not_on_the_path_of_each_call(client: AnyClient, passing: AnyQueue) -> None:
    before = client.stats["commands"]
    for _ in range(3):
        passing.push("x")
    assert client.stats["commands"] == before + 3


def test_reshape_sets_and_removes_it(world: World, client: AnyClient, queue: AnyQueue) -> None:
    queue.commit(hold(queue))
    client.reshape(queue.name, auto_delete=timedelta(minutes=1))
    (found,) = [each for each in client.queues() if each.name == queue.name]
    assert found.options["auto_delete"] == 60.0
    let_pass(world, queue.name)
    client.reshape(queue.name, auto_delete=False)
    assert not sweep(world, queue.name)
    assert note_of(world, queue.name) is None
    assert world.stored(queue) != []


def test_note_of_a_queue_deleted_by_hand_goes(
    world: World, client: AnyClient, passing: AnyQueue
) -> None:
    passing.push(1)
    assert client.delete_queue(passing.name, force=True) == 1
    let_pass(world, passing.name)
    sweep(world, passing.name)
    assert note_of(world, passing.name) is None


@pytest.mark.differs_by("client")
def test_stream_refuses_it(client: AnyClient, name: str) -> None:
    client.stream(name).append(1)
    refuses(
        "auto_delete: .*is of kind 'stream', which has no such option; set retention",
        partial(client.reshape, name, auto_delete=60),
    )
    refuses("is a stream", lambda: client.queue(name, auto_delete=60).push(1))


def test_wrong_value_is_refused(client: AnyClient, name: str) -> None:
    for value in (0, -1, 0.5, True, False, "60", float("nan")):
        refuses("auto_delete: ", partial(client.queue, name, auto_delete=value))
        if value is not False:
            refuses("auto_delete: ", partial(client.reshape, name, auto_delete=value))


def test_other_value_is_refused(world: World, passing: AnyQueue) -> None:
    other = world.connect().queue(passing.name, auto_delete=90)
    refuses("auto_delete=60.0.*auto_delete=90.0", partial(other.push, 1))
