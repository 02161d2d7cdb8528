"""``Client.receive``: one call receives from several queues and consumer groups."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import LeaseLost, Limit, QueueClosed, Reservation, StreamReservation
from tests.contract.world import (
    AnyClient,
    AnyQueue,
    World,
    hold,
    in_thread,
    near,
    payloads,
    refuses,
    waiting,
)
from tests.support.eventually import LONG, eventually, waiters
from tests.support.recorder import Recorder

by_client = pytest.mark.differs_by("client")


def waiting_in(client: AnyClient, queues: list[AnyQueue], limit: int = 9) -> Future[Any]:
    """Receive from queues in another thread. Return once the consumer waits in each of them."""
    before = [waiters(client, each.name) for each in queues]
    future = in_thread(lambda: client.receive(queues, limit, timeout=LONG))
    eventually(
        lambda: (
            future.done()
            or [waiters(client, each.name) for each in queues] == [each + 1 for each in before]
        ),
        "it waits in each queue",
    )
    assert not future.done()
    return future


def taken(future: Future[Any]) -> list[Any]:
    """Return the payloads that a receive in another thread returned."""
    return payloads(future.result(LONG))


@pytest.fixture
def group(client: AnyClient, name: str) -> Any:
    """Return a consumer group of an empty stream."""
    return client.stream(f"{name}-log").consumer("g")


def log_of(client: AnyClient, name: str) -> Any:
    """Return the stream of ``group``."""
    return client.stream(f"{name}-log")


# ---- without waiting


def test_receive_takes_queues_in_order(
    client: AnyClient, name: str, queue: AnyQueue, other: AnyQueue, group: Any
) -> None:
    queue.push_many(["a1", "a2"])
    other.push_many(["b1", "b2"])
    log_of(client, name).append_many(["c1", "c2"])
    held = client.receive([queue, group, other], 5, timeout=0)
    assert sorted(payloads(held[:2])) == ["a1", "a2"]
    assert payloads(held[2:4]) == ["c1", "c2"]
    assert [each.queue for each in held] == [queue.name] * 2 + [f"{name}-log"] * 2 + [other.name]
    assert [isinstance(each, StreamReservation) for each in held] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert {each.tries for each in held} == {1}
    rest = client.receive([queue, group, other], 5, timeout=timedelta(0))
    assert len(rest) == 1
    client.commit(*held, *rest)
    assert client.receive([queue, group, other], 5, timeout=0) == []
    assert queue.counts().total == other.counts().total == group.counts().total == 0


def test_earlier_queue_goes_first_each_time(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    other.push_many(["later", "later"])
    found = []
    for payload in ("first", "first"):
        queue.push(payload)
        found += client.receive([queue, other], 1, timeout=0)
    assert payloads(found) == ["first", "first"]
    assert payloads(client.receive([queue, other], 9, timeout=0)) == ["later", "later"]


@by_client
def test_reservations_have_the_options_of_their_queues(client: AnyClient, name: str) -> None:
    short = client.queue(name, lease=100, max_tries=1, dead_letter=f"{name}-grave")
    long = client.queue(f"{name}-other", lease=200)
    short.push(1)
    long.push(2)
    held = client.receive([short, long], 9, timeout=0)
    assert [near(each.until, lease) for each, lease in zip(held, (100, 200), strict=True)] == [
        True,
        True,
    ]
    client.rollback(*held, delay=0)
    assert client.queue(f"{name}-grave").counts().ready == 1
    assert long.reserve(0).tries == 2


@by_client
def test_paused_queue_is_passed_over(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push(1)
    other.push(2)
    queue.pause()
    assert payloads(client.receive([queue, other], 9, timeout=0)) == [2]
    queue.resume()
    assert payloads(client.receive([queue, other], 9, timeout=LONG)) == [1]


@by_client
def test_blocked_queue_is_passed_over(client: AnyClient, name: str, other: AnyQueue) -> None:
    limited = client.queue(name, limit=Limit(concurrency=1))
    limited.push_many([1, 2])
    other.push(3)
    first, second = client.receive([limited, other], 9, timeout=0)
    assert [first.payload, second.payload] == [1, 3]
    assert client.receive([limited, other], 9, timeout=0) == []
    client.commit(first, second)
    assert payloads(client.receive([limited, other], 9, timeout=LONG)) == [2]


@pytest.mark.needs("packs")
def test_receive_takes_part_of_a_pack(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    other.push("first")
    queue.push_many(range(5))
    held = client.receive([other, queue], 3, timeout=0)
    assert payloads(held) == ["first", 0, 1]
    client.commit(*held)
    assert payloads(client.receive([queue], 9, timeout=0)) == [2, 3, 4]


@by_client
def test_misspelt_queue_leaves_no_record(client: AnyClient, name: str, other: AnyQueue) -> None:
    other.push(1)
    unknown = client.queue(f"{name}-unknown", kind=None)
    assert payloads(client.receive([unknown, other], 9, timeout=0)) == [1]
    assert f"{name}-unknown" not in [each.name for each in client.queues()]


@by_client
def test_receive_refuses_its_arguments(
    world: World, client: AnyClient, name: str, queue: AnyQueue
) -> None:
    foreign = world.connect().queue(queue.name)
    for error, call in (
        ("queues: expected a list.*pass a list, such as", lambda: client.receive(queue, 1)),
        ("queues: expected a list", lambda: client.receive(None, 1)),
        ("queues: expected a list", lambda: client.receive("jobs", 1)),
        ("found str", lambda: client.receive([queue, "jobs"], 1)),
        ("a group of the stream", lambda: client.receive([log_of(client, name)], 1)),
        ("listed twice", lambda: client.receive([queue, client.queue(queue.name)], 1)),
        ("another client", lambda: client.receive([queue, foreign], 1)),
        ("the list is empty", lambda: client.receive([], 1)),
        ("limit", lambda: client.receive([queue], 0)),
        ("timeout", lambda: client.receive([queue], 1, timeout=-1)),
    ):
        refuses(error, call)
    assert queue.name not in [each.name for each in client.queues()]


def test_hooks_are_told_of_each_queue(world: World, name: str) -> None:
    recorder = Recorder()
    client = world.connect(hooks=[recorder])
    queue, other = client.queue(name), client.queue(f"{name}-other")
    log = client.stream(f"{name}-log")
    queue.push(1)
    log.append(3)
    recorder.take()
    held = client.receive([queue, other, log.consumer("g")], 9, timeout=0)
    assert recorder.take() == [
        ("received", name, [held[0].id]),
        ("received", f"{name}-log~g", [f"{name}-log~0"]),
    ]
    assert client.receive([other], 9, timeout=0) == []
    assert recorder.take() == []


# ---- waiting


def test_receive_waits_in_all_queues_at_once(
    client: AnyClient, name: str, queue: AnyQueue, other: AnyQueue, group: Any
) -> None:
    log_of(client, name).append("old")
    client.commit(*client.receive([group], 1, timeout=0))
    sources = [queue, group, other]
    for push in (queue.push, log_of(client, name).append, other.push):
        future = waiting_in(client, sources)
        push("new")
        (held,) = future.result(LONG)
        assert held.payload == "new"
        client.commit(held)
        assert [waiters(client, each.name) for each in sources] == [0, 0, 0]


def test_receive_is_woken_by_another_client(
    world: World, client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    future = waiting_in(client, [queue, other])
    world.connect().queue(other.name).push("x")
    assert taken(future) == ["x"]


@by_client
def test_receive_ends_at_its_timeout(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    queue.push(1, delay=600)
    assert client.receive([queue, other], 1, timeout=0.2) == []
    assert [waiters(client, each.name) for each in (queue, other)] == [0, 0]


@by_client
def test_receive_wakes_when_a_message_is_due(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    other.push("soon", delay=0.3)
    assert payloads(client.receive([queue, other], 1, timeout=LONG)) == ["soon"]


@by_client
def test_receive_wakes_when_a_lease_ends(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    other.push("x")
    held = other.reserve(0, lease=0.3)
    (again,) = client.receive([queue, other], 1, timeout=LONG)
    assert (again.id, again.tries) == (held.id, 2)
    with pytest.raises(LeaseLost):
        client.commit(held)


@by_client
def test_receive_waits_for_a_queue_that_is_not_there_yet(
    client: AnyClient, name: str, other: AnyQueue
) -> None:
    unknown = client.queue(name, kind=None)
    future = waiting_in(client, [unknown, other])
    client.queue(name).push("x")
    assert taken(future) == ["x"]


@by_client
@pytest.mark.parametrize("first", [True, False], ids=["follows", "leads"])
def test_consumers_of_one_queue_wait_beside_it(
    client: AnyClient, queue: AnyQueue, other: AnyQueue, first: bool
) -> None:
    """Each message wakes one of them, no matter which of them listens to the bus."""
    if first:
        alone = waiting(client, other, lambda: other.reserve(LONG))
        several = waiting_in(client, [queue, other], 1)
    else:
        several = waiting_in(client, [queue, other], 1)
        alone = waiting(client, other, lambda: other.reserve(LONG))
    other.push(1)
    other.push(2)
    got = [*several.result(LONG), alone.result(LONG)]
    assert sorted(payloads(got)) == [1, 2]


@by_client
def test_receive_that_leaves_passes_its_wake_on(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    """It leads in both queues. When it leaves, the other consumer leads in its queue."""
    several = waiting_in(client, [queue, other], limit=1)
    alone = waiting(client, other, lambda: other.reserve(LONG))
    queue.push("x")
    assert taken(several) == ["x"]
    other.push("y")
    assert alone.result(LONG).payload == "y"


@by_client
def test_two_receives_share_queues(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    futures = [waiting_in(client, [queue, other], 1), waiting_in(client, [other, queue], 1)]
    queue.push(1)
    other.push(2)
    assert sorted(payload for each in futures for payload in taken(each)) == [1, 2]


def test_closed_client_ends_the_wait(world: World, name: str) -> None:
    client = world.connect()
    future = waiting_in(client, [client.queue(name), client.queue(f"{name}-other")])
    client.close()
    with pytest.raises(QueueClosed):
        future.result(LONG)


@by_client
def test_receive_without_a_bus_polls(world: World, client: AnyClient, name: str) -> None:
    deaf = world.connect(signals="none:")
    queues = [deaf.queue(name, poll=0.2), deaf.queue(f"{name}-other", poll=3600)]
    future = waiting_in(deaf, queues)
    client.queue(name).push("x")
    assert taken(future) == ["x"]


def test_messages_go_once_to_many_receives(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queues = [[queue, other], [other, queue]]
    futures = [waiting_in(client, queues[n % 2], 1) for n in range(6)]
    ids = [*queue.push_many(range(3)), *other.push_many(range(3))]
    got = [held for each in futures for held in each.result(LONG)]
    assert sorted(str(each.id) for each in got) == sorted(map(str, ids))
    assert all(isinstance(each, Reservation) for each in got)
    client.commit(*got)
    hold(queue)  # the queue still works
