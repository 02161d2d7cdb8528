"""pop, reserve and their batches: order, leases, and how long a consumer waits."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import LeaseLost, Reservation
from tests.contract.world import AnyClient, AnyQueue, World, expect_error, hold, near, waiting
from tests.support.eventually import eventually

by_client = pytest.mark.differs_by("client")

#: Seconds, far below the fallback poll of 15 s. A consumer that returns earlier was woken, or
#: scanned at the right time.
SOON = 10.0


@pytest.mark.needs("pop")
def test_pop_takes_the_message_out(queue: AnyQueue) -> None:
    id = queue.push("x", headers={"a": 1}, key="k")
    message = queue.pop(0)
    assert (message.id, message.payload, message.headers, message.key) == (id, "x", {"a": 1}, "k")
    assert message.tries == 0
    assert message.queue == queue.name
    assert queue.get(id) is None
    assert queue.counts().total == 0


@by_client
@pytest.mark.needs("pop")
@pytest.mark.parametrize("timeout", [0.05, 0, timedelta(milliseconds=50)], ids=repr)
def test_receive_waits_for_the_timeout(queue: AnyQueue, timeout: Any) -> None:
    for receive in (
        lambda: queue.pop(timeout) is None,
        lambda: queue.reserve(timeout) is None,
        lambda: queue.pop_many(2, timeout=timeout) == [],
        lambda: queue.reserve_many(2, timeout=timeout) == [],
    ):
        start = time.monotonic()
        assert receive()
        assert (0.045 if timeout else 0) <= time.monotonic() - start < SOON


@pytest.mark.needs("pop")
def test_reservation_has_the_stored_fields(queue: AnyQueue) -> None:
    id = queue.push("x", headers={"a": 1}, key="k")
    pushed = queue.get(id)
    held = queue.reserve(0)
    assert isinstance(held, Reservation)
    assert (held.id, held.payload, held.headers, held.key) == (id, "x", {"a": 1}, "k")
    assert (held.tries, held.state, held.lease, held.when) == (1, "reserved", 60, pushed.when)
    assert near(held.until, 60)
    assert held.token
    assert held.owner
    assert queue.reserve(0) is None
    assert queue.pop(0) is None
    stored = queue.get(id)
    assert (stored.state, stored.when) == ("reserved", pushed.when)
    assert queue.next_when() == held.until


def test_owner_comes_from_the_client(world: World, name: str) -> None:
    queue = world.connect(owner="night shift").queue(name)
    id = queue.push(1)
    assert queue.reserve(0).owner == "night shift"
    assert world.document(id)["owner"] == "night shift"


@pytest.mark.parametrize("lease", [90, 90.0, timedelta(seconds=90)], ids=repr)
def test_lease_of_a_call_overrides_the_queue(client: AnyClient, name: str, lease: Any) -> None:
    queue = client.queue(name, lease=lease)
    queue.push_many([1, 2])
    first = queue.reserve(0)
    second = queue.reserve(0, lease=timedelta(seconds=30))
    assert (first.lease, second.lease) == (90, 30)
    assert near(first.until, 90)
    assert near(second.until, 30)
    queue.release(first, second)
    for held in queue.reserve_many(2, timeout=0, lease=45):
        assert held.lease == 45
        assert near(held.until, 45)


def test_expired_lease_is_received_again(queue: AnyQueue) -> None:
    id = queue.push(1)
    first = queue.reserve(0, lease=0.005)
    # This waits for the end of the lease.
    second = queue.reserve(SOON)
    assert first.id == second.id == id
    assert (first.tries, second.tries) == (1, 2)
    assert first.token != second.token
    queue.commit(second)
    with pytest.raises(LeaseLost):
        queue.commit(first)


@pytest.mark.needs("pop")
def test_pop_takes_a_message_with_an_expired_lease(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    world.lapse(held)
    assert queue.pop(0).tries == 1
    assert queue.counts().total == 0


@pytest.mark.needs("pop")
@pytest.mark.parametrize("verb", ["pop_many", "reserve_many"])
def test_pop_many_and_reserve_many(world: World, queue: AnyQueue, verb: str) -> None:
    queue.push_many(range(world.many))
    receive = getattr(queue, verb)
    first = receive(3, timeout=0)
    rest = receive(1000, timeout=0)
    assert (len(first), len(rest)) == (3, world.many - 3)
    assert sorted(each.payload for each in first + rest) == list(range(world.many))
    assert len({each.id for each in first + rest}) == world.many
    assert receive(1, timeout=0) == []
    assert queue.counts().ready == 0
    if verb == "reserve_many":
        assert {each.tries for each in first + rest} == {1}
        assert queue.counts().reserved == world.many
        queue.commit(*first, *rest)
    assert queue.counts().total == 0


@pytest.mark.needs("pop")
def test_keyed_messages_in_a_batch(queue: AnyQueue) -> None:
    queue.push_many([1, 2, 3], keys=["a", None, "b"])
    assert {(each.payload, each.key) for each in queue.pop_many(5, timeout=0)} == {
        (1, "a"),
        (2, None),
        (3, "b"),
    }


# ---- order


@pytest.mark.needs("fifo")
class TestOrder:
    @pytest.mark.needs("pop")
    def test_first_in_first_out(self, queue: AnyQueue) -> None:
        for each in range(5):
            queue.push(each)
        queue.push_many(range(5, 112))
        assert [each.payload for each in queue.peek(10)] == list(range(10))
        received = [queue.pop(0), queue.reserve(0)]
        received += queue.pop_many(3, timeout=0)
        received += queue.reserve_many(105, timeout=0)
        assert [each.payload for each in received if each is not None] == list(range(110))

    @pytest.mark.needs("pop")
    def test_order_is_by_when_and_not_by_push(self, world: World, queue: AnyQueue) -> None:
        late, early = queue.push("late", delay=60), queue.push("early")
        when = world.document(early)["when"] + timedelta(milliseconds=1)
        world.raw().update_one({"_id": late}, {"$set": {"when": when}})
        eventually(lambda: queue.counts().ready == 2, "both are ready")
        queue.push("last")
        assert [each.payload for each in queue.pop_many(3, timeout=0)] == ["early", "late", "last"]

    @pytest.mark.needs("pop")
    def test_rolled_back_message_goes_to_the_end(self, queue: AnyQueue) -> None:
        queue.push_many([1, 2])
        held = queue.reserve(0)
        eventually(lambda: held.when < _now(queue), "a millisecond passes")
        queue.rollback(held, delay=0)
        assert [each.payload for each in queue.pop_many(2, timeout=0)] == [2, 1]

    @pytest.mark.needs("pop")
    def test_released_message_has_its_old_position(self, queue: AnyQueue) -> None:
        queue.push_many([1, 2, 3])
        held = queue.reserve_many(2, timeout=0)
        queue.release(*held)
        assert [each.payload for each in queue.pop_many(3, timeout=0)] == [1, 2, 3]


def _now(queue: AnyQueue) -> Any:
    message = queue.get(queue.push("clock", delay=60))
    return message.pushed


@pytest.mark.needs("pop")
def test_waiting_messages_never_block_ready_ones(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(world.many), delay=60)
    queue.push_many(range(20))
    queue.reserve_many(20, timeout=0)
    queue.push_many(["a", "b"])
    assert sorted(each.payload for each in queue.reserve_many(5, timeout=0)) == ["a", "b"]
    queue.push("c")
    assert queue.pop(0).payload == "c"


@pytest.mark.needs("pop")
def test_released_message_is_received_at_once(world: World, queue: AnyQueue) -> None:
    """The old position is far below the lower bound of a client that found nothing there."""
    old = timedelta(seconds=3)
    for n in range(2):
        id = queue.push(n)
        when = world.document(id)["when"] - old
        world.raw().update_one({"_id": id}, {"$set": {"when": when, "due": when}})
    held = queue.reserve_many(2, timeout=0)
    assert len(held) == 2
    assert queue.reserve(0) is None
    queue.release(held[0])
    assert queue.pop(0) is not None
    assert queue.pop(0) is None
    queue.release(held[1])
    assert queue.reserve(0) is not None


# ---- waiting


@pytest.mark.needs("pop")
@pytest.mark.parametrize("verb", ["pop", "reserve"])
def test_push_wakes_a_waiting_consumer(client: AnyClient, queue: AnyQueue, verb: str) -> None:
    queue.push(0)
    # Create the record first.
    queue.pop(0)
    received = waiting(client, queue, lambda: getattr(queue, verb)(60))
    queue.push("here")
    assert received.result(SOON).payload == "here"


@by_client
@pytest.mark.needs("pop")
def test_many_consumers_get_one_message_each(client: AnyClient, queue: AnyQueue) -> None:
    received = [waiting(client, queue, lambda: queue.pop(60)) for _ in range(4)]
    queue.push_many(range(4))
    assert sorted(each.result(SOON).payload for each in received) == [0, 1, 2, 3]


@by_client
@pytest.mark.needs("pop")
def test_waiting_consumer_gets_a_scheduled_message_at_its_time(queue: AnyQueue) -> None:
    start = time.monotonic()
    queue.push("later", delay=0.2)
    assert queue.pop(60).payload == "later"
    assert 0.19 <= time.monotonic() - start < SOON


@by_client
@pytest.mark.needs("pop")
def test_batch_waits_for_the_first_message_only(queue: AnyQueue) -> None:
    queue.push("now", delay=0.05)
    queue.push("later", delay=60)
    assert [each.payload for each in queue.pop_many(5, timeout=60)] == ["now"]


@by_client
def test_batch_waits_for_a_message(client: AnyClient, queue: AnyQueue) -> None:
    received = waiting(client, queue, lambda: queue.reserve_many(5, timeout=60))
    queue.push("here")
    assert [each.payload for each in received.result(SOON)] == ["here"]


@pytest.mark.parametrize("way", ["rollback", "release", "move"])
def test_returned_message_wakes_a_waiting_consumer(
    client: AnyClient, queue: AnyQueue, other: AnyQueue, way: str
) -> None:
    held = hold(queue)
    target = other if way == "move" else queue
    received = waiting(client, target, lambda: target.reserve(60))
    options = {"rollback": {"delay": 0}, "move": {"to": other}}.get(way, {})
    getattr(queue, way)(held, **options)
    assert received.result(SOON).id == held.id


@by_client
@pytest.mark.needs("pop")
def test_notify_wakes_a_waiting_consumer(world: World, queue: AnyQueue) -> None:
    id = queue.push(1, delay=60)
    received = waiting(world.client, queue, lambda: queue.pop(60))
    # This stands for a write by the user's own code.
    world.ready(id)
    queue.notify()
    assert received.result(SOON).payload == 1


# ---- pausing


@pytest.mark.parametrize(
    "make", [lambda queue: queue.push(1), lambda queue: queue.pause()], ids=["push", "pause"]
)
def test_record_has_a_date(
    world: World, queue: AnyQueue, make: Callable[[AnyQueue], object]
) -> None:
    """Without a date, the record could not mark the end of a scan."""
    make(queue)
    assert near(world.document(f"~queue:{queue.name}")["when"], 0)


@by_client
@pytest.mark.needs("pop")
def test_paused_queue_looks_empty(queue: AnyQueue) -> None:
    queue.push_many([1, 2, 3])
    assert not queue.paused()
    queue.pause()
    assert queue.paused()
    assert queue.pop(0) is None or queue.pop(0) is None
    start = time.monotonic()
    assert queue.reserve(0.05) is None
    assert queue.pop_many(3, timeout=0.05) == []
    assert 0.09 <= time.monotonic() - start < SOON
    queue.push(4)  # pushes still work
    queue.resume()
    assert not queue.paused()
    eventually(lambda: len(queue.peek()) == 4, "all are there")


@by_client
@pytest.mark.needs("pop")
def test_pause_reaches_waiting_consumers(world: World, queue: AnyQueue) -> None:
    elsewhere = world.connect().queue(queue.name)  # another client stands for another process
    queue.push(0)
    assert queue.pop(0) is not None  # it has read the flag
    received = waiting(world.client, queue, lambda: queue.pop(60))
    elsewhere.pause()
    assert queue.paused()
    elsewhere.push(1)
    with pytest.raises(TimeoutError):
        received.result(0.3)
    assert queue.counts().ready == 1
    elsewhere.resume()
    assert received.result(SOON).payload == 1


def test_pause_does_not_affect_reserved_messages(queue: AnyQueue) -> None:
    held = hold(queue)
    queue.pause()
    queue.extend(held)
    queue.commit(held)
    assert queue.counts().total == 0


def test_queue_can_be_paused_before_its_first_push(queue: AnyQueue) -> None:
    queue.pause()
    assert queue.paused()
    queue.push(1)
    assert queue.reserve(0.01) is None


# ---- other processes


def test_reservation_pickles_and_is_settled_by_another_client(
    world: World, queue: AnyQueue
) -> None:
    queue.push_many([{"n": 1}, {"n": 2}])
    held = queue.reserve_many(2, timeout=0)
    elsewhere = world.connect().queue(queue.name)
    copies = [pickle.loads(pickle.dumps(each)) for each in held]
    assert [(each.id, each.token, each.payload, each.until) for each in copies] == [
        (each.id, each.token, each.payload, each.until) for each in held
    ]
    elsewhere.commit(copies[0])
    elsewhere.rollback(copies[1], delay=0)
    with expect_error(LeaseLost, lost=tuple(held)):
        queue.commit(*held)
    assert queue.counts().ready == 1
