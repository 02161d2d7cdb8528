"""Results: how the end of a message is kept, and how a client waits for it."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import ConfigurationError, Counts, InvalidMessage, JobFailed, LeaseLost, Push
from pyqueue.backends import awaiting
from tests.contract.world import AnyClient, AnyQueue, World, expect_error, hold, in_thread, refuses
from tests.support.eventually import LONG, eventually, waiters


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wait end only by an event."""
    monkeypatch.setattr(awaiting, "POLL_S", 3600.0)


@pytest.fixture
def short_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wait read its message often."""
    monkeypatch.setattr(awaiting, "POLL_S", 0.05)


def await_end(client: AnyClient, id: Any) -> Any:
    """Wait for a message in another thread. Return once that call waits."""
    topic = client._connection.results
    before = waiters(client, topic)
    future = in_thread(lambda: client.wait(id, LONG))
    eventually(lambda: waiters(client, topic) == before + 1, "one more call waits")
    return future


def stored_in(world: World, queue: AnyQueue) -> list[dict[str, Any]]:
    """Return the stored messages of a queue."""
    messages = {"q": queue.name, "record": {"$exists": False}}
    return list(world.raw().find(messages).sort("_id", 1))


def test_result_reaches_the_call_that_waits(
    client: AnyClient, queue: AnyQueue, no_poll: None
) -> None:
    id = queue.push("x", result=60, headers={"h": 1})
    found = await_end(client, id)
    queue.commit(queue.reserve(5), result={"n": [1, None]})
    finished = found.result(LONG)
    assert (finished.id, finished.queue, finished.payload) == (id, queue.name, "x")
    assert (finished.outcome, finished.result, finished.headers) == (
        *("committed", {"n": [1, None]}, {"h": 1}),
    )
    assert client.wait(str(id), 0).result == {"n": [1, None]}, "it is kept"


def test_all_calls_that_wait_hear_of_their_messages(
    client: AnyClient, queue: AnyQueue, no_poll: None
) -> None:
    ids = queue.push_many([Push(n, result=60) for n in range(4)])
    found = [await_end(client, id) for id in (*ids, ids[0])]
    for held in queue.reserve_many(4, timeout=5):
        queue.commit(held, result=held.payload * 10)
    assert [each.result(LONG).result for each in found] == [0, 10, 20, 30, 0]


@pytest.mark.usefixtures("short_poll")
@pytest.mark.differs_by("client")
def test_end_that_was_not_signalled_is_read(client: AnyClient, world: World, name: str) -> None:
    """Another client pushed the message, so its topic is another one."""
    other = world.connect()
    id = other.queue(name).push("x", result=60)
    found = await_end(client, id)
    client.queue(name).commit(client.queue(name).reserve(5), result=1)
    assert found.result(LONG).result == 1


@pytest.mark.parametrize("timeout", [0, 0.05, timedelta(milliseconds=20)])
def test_wait_ends_after_its_timeout(client: AnyClient, queue: AnyQueue, timeout: Any) -> None:
    id = queue.push("x", result=60)
    with pytest.raises(TimeoutError, match=f"message {id} has not finished within"):
        client.wait(id, timeout)
    held = queue.reserve(0)
    with pytest.raises(TimeoutError):
        client.wait(id, timeout)
    queue.rollback(held, delay=0)
    queue.commit(queue.reserve(5))
    assert client.wait(id, timeout).result is None


@pytest.mark.needs("dead_letter")
@pytest.mark.parametrize("way", ["bury", "rollback"])
def test_burial_fails_the_wait(client: AnyClient, name: str, way: str, no_poll: None) -> None:
    queue = client.queue(name, max_tries=1)
    id = queue.push("x", result=60)
    found = await_end(client, id)
    getattr(queue, way)(queue.reserve(5), error="no such page")
    with pytest.raises(JobFailed, match=r"was buried .*no such page") as caught:
        found.result(LONG)
    assert caught.value.reason == "dead"
    assert (caught.value.job.id, caught.value.job.error.message) == (id, "no such page")


@pytest.mark.needs("dead_letter")
def test_work_on_a_dead_letter_is_no_success(client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push("x", result=60)
    queue.bury(queue.reserve(5))
    dead = client.queue(f"{queue.name}.dead")
    dead.commit(dead.reserve(5), result=1)
    with expect_error(JobFailed, reason="dead"):
        client.wait(id, 0)
    assert dead.get(id).outcome == "committed"


@pytest.mark.needs("dead_letter")
def test_redriven_message_can_still_succeed(client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push("x", result=60)
    queue.bury(queue.reserve(5))
    assert client.queue(f"{queue.name}.dead").redrive() == 1
    queue.commit(queue.reserve(5), result=2)
    assert client.wait(id, 0).result == 2


def test_removed_message_fails_the_wait(client: AnyClient, queue: AnyQueue, no_poll: None) -> None:
    id = queue.push("x", result=60)
    found = await_end(client, id)
    assert queue.remove(id)
    with pytest.raises(JobFailed, match="was removed") as caught:
        found.result(LONG)
    assert (caught.value.reason, caught.value.job.payload) == ("removed", "x")


@pytest.mark.usefixtures("short_poll")
@pytest.mark.differs_by("client")
def test_message_without_a_kept_end_is_gone(client: AnyClient, queue: AnyQueue) -> None:
    id = queue.push("x")
    queue.commit(queue.reserve(5))
    with expect_error(JobFailed, reason="gone", job=None):
        client.wait(id, LONG)


@pytest.mark.needs("documents")
def test_move_keeps_the_wish_for_a_result(
    client: AnyClient, queue: AnyQueue, other: AnyQueue, no_poll: None
) -> None:
    id = queue.push("x", result=60)
    found = await_end(client, id)
    queue.move(queue.reserve(5), to=other)
    other.commit(other.reserve(5), result="done")
    assert (found.result(LONG).queue, found.result(LONG).result) == (other.name, "done")


@pytest.mark.needs("pop")
@pytest.mark.parametrize("number", [1, 3])
def test_pops_keep_the_end(client: AnyClient, queue: AnyQueue, number: int, no_poll: None) -> None:
    ids = queue.push_many([Push(n, result=60) for n in range(number)])
    found = await_end(client, ids[0])
    assert len([queue.pop(0)] if number == 1 else queue.pop_many(9, timeout=0)) == number
    assert found.result(LONG).outcome == "popped"
    assert [client.wait(id, 0).payload for id in ids] == list(range(number))
    assert queue.pop_many(9, timeout=0) == []


@pytest.mark.needs("history")
@pytest.mark.parametrize(
    ("history", "result", "kept"), [(None, 60, 60), (600, 60, 600), (60, 600, 600)]
)
def test_end_is_kept_for_the_longer_time(
    client: AnyClient, world: World, name: str, history: Any, result: float, kept: float
) -> None:
    queue = client.queue(name, history=history)
    queue.push("x", result=result)
    queue.commit(queue.reserve(5))
    [stored] = stored_in(world, queue)
    assert stored["expires"] - stored["processed"] == timedelta(seconds=kept)


def test_settled_together_each_keeps_its_own(
    client: AnyClient, world: World, queue: AnyQueue
) -> None:
    pushes = [Push(0), Push(1, result=60), Push(2, result=120), Push(3, result=60), Push(4)]
    ids = queue.push_many(pushes)
    queue.commit(*queue.reserve_many(9, timeout=5))
    kept = {each["_id"]: each["expires"] - each["processed"] for each in stored_in(world, queue)}
    seconds = [60, 120, 60]
    assert kept == {id: timedelta(seconds=s) for id, s in zip(ids[1:4], seconds, strict=True)}
    assert queue.counts() == Counts(history=3)


@pytest.mark.needs("keys")
def test_replace_takes_the_new_wish(world: World, queue: AnyQueue) -> None:
    queue.push(1, key="k", result=60)
    queue.push(2, key="k", on_duplicate="replace")
    queue.commit(queue.reserve(5))
    assert stored_in(world, queue) == []


@pytest.mark.needs("history")
def test_replayed_message_has_no_result(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    id = queue.push("x", result=60)
    queue.commit(queue.reserve(5), result=1)
    assert queue.replay(id)
    with pytest.raises(TimeoutError):
        client.wait(id, 0)
    queue.commit(queue.reserve(5))
    assert client.wait(id, 0).result is None


@pytest.mark.needs("history")
def test_result_is_kept_by_a_history_alone(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    queue.push("x")
    queue.commit(queue.reserve(5), result=5)
    [finished] = queue.history()
    assert finished.result == 5


def test_result_is_dropped_if_nothing_keeps_the_end(world: World, queue: AnyQueue) -> None:
    queue.push("x", id=f"{queue.name}-x")
    queue.commit(queue.reserve(5), result=5)
    assert stored_in(world, queue) == []


@pytest.mark.parametrize("result", [object(), "x" * 262_144])
def test_result_that_cannot_be_stored_changes_nothing(
    client: AnyClient, queue: AnyQueue, result: object
) -> None:
    id = queue.push("x", result=60)
    held = queue.reserve(5)
    with pytest.raises(InvalidMessage, match="result"):
        queue.commit(held, result=result)
    queue.commit(held, result="x" * 262_000)
    assert len(client.wait(id, 0).result) == 262_000


def test_wrong_lengths_are_refused(world: World, queue: AnyQueue) -> None:
    lengths: list[Any] = [0, -1, "1", float("nan"), timedelta(days=31), True]
    for wrong in lengths:
        refuses("result", partial(queue.push, "x", result=wrong))
        refuses("result", partial(queue.push_many, [Push("x", result=wrong)]))
    assert world.stored(queue) == []


def test_wrong_waits_are_refused(client: AnyClient, queue: AnyQueue) -> None:
    refuses("timeout", lambda: client.wait("x", -1), lambda: client.request(queue, 1, timeout="1"))
    refuses("id", lambda: client.wait(5))
    assert queue.counts() == Counts()


def test_lost_lease_keeps_the_rest(client: AnyClient, queue: AnyQueue, no_poll: None) -> None:
    ids = queue.push_many([Push(n, result=60) for n in range(2)])
    held = queue.reserve_many(2, timeout=5)
    found = await_end(client, ids[1])
    hold_lost = next(each for each in held if each.id == ids[0])
    assert client.force_release(hold_lost.id)
    with expect_error(LeaseLost, lost=(hold_lost,)):
        queue.commit(*held, result=7)
    assert found.result(LONG).result == 7
    with pytest.raises(TimeoutError):
        client.wait(ids[0], 0)


@pytest.mark.needs("server")
def test_commit_in_a_transaction_is_heard_after_it(
    client: AnyClient, queue: AnyQueue, no_poll: None
) -> None:
    id = queue.push("x", result=60)
    found = await_end(client, id)
    held = queue.reserve(5)
    client.run_transaction(lambda session: queue.commit(held, result=3, session=session))
    assert found.result(LONG).result == 3


def test_request_returns_the_result(client: AnyClient, queue: AnyQueue) -> None:
    answer = in_thread(lambda: client.request(queue.name, {"n": 4}, headers={"h": 1}))
    held = queue.reserve(LONG)
    assert held.headers == {"h": 1}
    queue.commit(held, result=held.payload["n"] ** 2)
    assert answer.result(LONG) == 16


def test_request_without_an_answer_is_removed(client: AnyClient, queue: AnyQueue) -> None:
    with pytest.raises(TimeoutError):
        client.request(queue, "x", timeout=0.05)
    assert queue.reserve(0) is None
    held = hold(queue)
    assert held is not None
    queue.commit(held)


def test_packed_reservation_refuses_a_result(client: AnyClient, name: str) -> None:
    bucket = client.queue(name, kind="bucket")
    [*_, kept] = bucket.push_many([Push(1), Push(2), Push(3, result=60)])
    held = {each.payload: each for each in bucket.reserve_many(9, timeout=5)}
    with pytest.raises(ConfigurationError, match=r"result: message .* shares a document"):
        bucket.commit(held[1], result=1)
    bucket.commit(held[3], result=3)
    assert client.wait(kept, 0).result == 3
    bucket.commit(held[1], held[2])
