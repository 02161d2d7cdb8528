"""Waiting consumers are woken by signals, by the time of a message, and at the latest by the poll.

Where a signal or an alarm must wake, the poll is an hour away. Where the poll must wake, there is
no bus.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, Limit
from pyqueue.runtime.connecting import runner_of
from tests.integration.conftest import Connect
from tests.support.eventually import LONG, async_eventually, eventually, waiters

#: Far below ``NEVER``, and longer than a wake takes on a busy machine, in seconds.
SOON = 10.0
NEVER = 3600.0
#: When a scheduled message is due.
DELAY = 0.15


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(64)
    yield pool
    # A test that failed leaves waiters. Closing their client ends them.
    pool.shutdown(wait=False, cancel_futures=True)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    return call(), time.monotonic()


def waiting(
    pool: ThreadPoolExecutor, client: Any, queue: Any, call: Callable[[], Any]
) -> Future[tuple[Any, float]]:
    """Begin a call that waits; return once it does."""
    before = waiters(client, queue.name)
    future = pool.submit(timed, call)
    eventually(lambda: waiters(client, queue.name) > before or future.done())
    assert not future.done()
    return future


def lag(
    pool: ThreadPoolExecutor, client: Any, queue: Any, receive: str, act: Callable[[], object]
) -> float:
    """Return the seconds from an act to the return of a receive that waits."""
    future = waiting(pool, client, queue, getattr(queue, receive))
    began = time.monotonic()
    act()
    got, at = future.result(LONG)
    if receive == "reserve":
        queue.commit(got)
    return float(at - began)


# ---- woken by a signal


@pytest.mark.parametrize("receive", ["pop", "reserve"])
def test_push_wakes_a_waiting_receive(
    connect: Connect, pool: ThreadPoolExecutor, receive: str
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    assert lag(pool, client, queue, receive, lambda: queue.push(1)) < SOON


def test_push_of_another_client_wakes_in_the_process(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue = consumer.queue("jobs", poll=NEVER)
    producer = client.queue("jobs")
    assert lag(pool, consumer, queue, "reserve", lambda: producer.push_many([1])) < SOON


WAKES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any, Any], Any]]] = {
    # the preparation, and the act that wakes a consumer of "jobs"
    "rollback": (
        lambda jobs, other: take(jobs),
        lambda jobs, other, held: jobs.rollback(held, delay=0),
    ),
    "release": (lambda jobs, other: take(jobs), lambda jobs, other, held: jobs.release(held)),
    "move": (lambda jobs, other: take(other), lambda jobs, other, held: other.move(held, to=jobs)),
    "move by name": (
        lambda jobs, other: take(other),
        lambda jobs, other, held: other.move(held, to="jobs"),
    ),
    "bury": (lambda jobs, other: take(other), lambda jobs, other, held: other.bury(held)),
    "last rollback": (
        lambda jobs, other: take(other),
        lambda jobs, other, held: other.rollback(held),
    ),
    "replay": (lambda jobs, other: finished(jobs), lambda jobs, other, id: jobs.replay(id)),
    "redrive": (lambda jobs, other: jobs.bury(take(jobs)), lambda jobs, other, _: other.redrive()),
    "replace": (
        lambda jobs, other: jobs.push("old", key="k", delay=600),
        lambda jobs, other, _: jobs.push("new", key="k", on_duplicate="replace"),
    ),
}


def take(queue: Any) -> Any:
    queue.push("a message")
    return queue.reserve(0)


def finished(queue: Any) -> Any:
    reservation = take(queue)
    queue.commit(reservation)
    return reservation.id


@pytest.mark.parametrize("what", WAKES)
def test_every_way_to_become_ready_wakes(
    connect: Connect, pool: ThreadPoolExecutor, what: str
) -> None:
    client = connect()
    jobs = client.queue("jobs", history=600, poll=NEVER, dead_letter="other")
    other = client.queue("other", max_tries=1, dead_letter="jobs")
    prepare, act = WAKES[what]
    ready = prepare(jobs, other)
    assert lag(pool, client, jobs, "reserve", lambda: act(jobs, other, ready)) < SOON


def test_second_push_within_the_window_wakes(connect: Connect, pool: ThreadPoolExecutor) -> None:
    """Equal signals are merged for 50 ms: the second waiter hears when the window closes."""
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    for _ in range(5):
        one, other = (waiting(pool, client, queue, queue.pop) for _ in range(2))
        queue.push("first")
        time.sleep(0.02)  # within the window
        queue.push("second")
        assert [future.result(LONG)[0] is None for future in (one, other)] == [False, False]


def test_no_wake_is_lost_between_scan_and_wait(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    rounds = 80
    rng = random.Random(7)

    def consume() -> list[Any]:
        received = [queue.pop(LONG) for _ in range(rounds)]
        return [each and each.payload for each in received]

    future = pool.submit(consume)
    for n in range(rounds):
        queue.push(n)
        time.sleep(rng.uniform(0, 0.006))  # so that pushes fall into every moment of a receive
    assert future.result(LONG) == list(range(rounds))


# ---- woken by time


def test_scheduled_message_wakes_at_its_time(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    took = lag(pool, client, queue, "pop", lambda: queue.push(1, delay=DELAY))
    assert DELAY <= took < DELAY + SOON


def test_message_scheduled_before_the_wait_wakes(connect: Connect) -> None:
    queue = connect().queue("jobs", poll=NEVER)
    began = time.monotonic()
    queue.push(1, delay=DELAY)
    assert queue.pop(LONG) is not None
    assert DELAY <= time.monotonic() - began < DELAY + SOON


def test_earlier_message_moves_the_alarm_forward(
    connect: Connect, pool: ThreadPoolExecutor
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    queue.push("late", delay=600)
    took = lag(pool, client, queue, "pop", lambda: queue.push("early", delay=DELAY))
    assert DELAY <= took < DELAY + SOON


def test_rolled_back_message_wakes_at_its_time(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    held = take(queue)
    took = lag(pool, client, queue, "pop", lambda: queue.rollback(held, delay=DELAY))
    assert DELAY <= took < DELAY + SOON


def test_end_of_an_own_lease_wakes(connect: Connect) -> None:
    queue = connect().queue("jobs", poll=NEVER)
    queue.push(1)
    began = time.monotonic()
    assert queue.reserve(0, lease=0.3) is not None
    again = queue.reserve(LONG)
    took = time.monotonic() - began
    assert again is not None
    assert again.tries == 2
    assert 0.3 <= took < 0.3 + SOON


@pytest.mark.parametrize("receive", ["pop", "reserve"])
def test_timeout_ends_the_wait(connect: Connect, receive: str) -> None:
    queue = connect().queue("jobs", poll=NEVER)
    getattr(queue, receive)(0)
    for timeout in (0.0, 0.2):
        began = time.monotonic()
        assert getattr(queue, receive)(timeout) is None
        assert timeout <= time.monotonic() - began < timeout + SOON


# ---- woken by the poll


def test_poll_finds_messages_without_signals(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect(signals="none:")
    queue = consumer.queue("jobs", poll=0.3)
    producer = client.queue("jobs")
    assert lag(pool, consumer, queue, "reserve", lambda: producer.push(1)) < SOON


def test_poll_finds_a_foreign_expired_lease(connect: Connect, client: Client) -> None:
    """This client does not know when the lease ends."""
    queue = connect(signals="none:").queue("jobs", poll=0.1)
    assert queue.pop(0) is None
    client.queue("jobs").push(1)
    assert client.queue("jobs").reserve(0, lease=0.3) is not None
    began = time.monotonic()
    reservation = queue.reserve(LONG)
    assert reservation is not None
    assert reservation.tries == 2
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("how", ["push", "ordered", "limit"])
def test_client_without_a_bus_wakes_its_own_consumers(
    connect: Connect, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also at the end of a claim, if its group or slot has a next message. No rescan finds it."""
    for name in ("IDLE_RESCAN_S", "BUSY_RESCAN_S"):
        monkeypatch.setattr(f"pyqueue.backends.scan.{name}", NEVER)
    client = connect(signals="none:")
    options: dict[str, dict[str, Any]] = {
        "push": {},
        "ordered": {"kind": "ordered"},
        "limit": {"limit": Limit(concurrency=1)},
    }
    queue = client.queue("jobs", poll=NEVER, **options[how])
    groups = ["a", "a"] if how == "ordered" else None
    queue.push_many([1] if how == "push" else [1, 2], groups=groups)
    held = queue.reserve(0)
    assert held is not None

    def act() -> None:
        if how == "push":
            queue.push(2)
        else:
            queue.commit(held)

    assert lag(pool, client, queue, "reserve", act) < SOON


# ---- many waiters


def test_push_to_fifty_waiters_costs_few_commands(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue = consumer.queue("jobs", poll=NEVER, kind="standard")
    producer = client.queue("jobs", kind="standard")
    producer.pop(0)  # its record and indexes are there
    futures = [pool.submit(queue.pop) for _ in range(50)]
    eventually(lambda: waiters(consumer, "jobs") == 50)
    costs = []
    for left in range(49, 44, -1):
        time.sleep(0.1)  # until the window of the last signal is over
        before = consumer.stats["commands"]
        producer.push("one")
        eventually(lambda: sum(future.done() for future in futures) == 50 - left)  # noqa: B023
        eventually(lambda: waiters(consumer, "jobs") == left)  # noqa: B023
        costs.append(consumer.stats["commands"] - before)
    # The claim of the consumer that was woken; the scan of the next, and its question when to wake.
    # The pause flag is read every 5 s.
    assert median(costs) <= 3
    producer.push_many(range(45))
    assert all(future.result(LONG) is not None for future in futures)
    assert queue.counts().total == 0


def test_fifty_pushes_wake_fifty_waiters(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue, producer = consumer.queue("jobs", poll=NEVER), client.queue("jobs")
    futures = [pool.submit(queue.reserve) for _ in range(50)]
    eventually(lambda: waiters(consumer, "jobs") == 50)
    for n in range(50):
        producer.push(n)
    got = [future.result(LONG) for future in futures]
    assert sorted(each.payload for each in got if each is not None) == list(range(50))


# ---- waiters that leave


def waiting_tasks(queue: Any, number: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(queue.pop()) for _ in range(number)]


async def stored_unheard(client: AsyncClient, payload: object) -> None:
    """Store a ready message without a signal."""
    async with AsyncClient(client.url, signals="none:") as silent:
        await silent.queue("jobs").push(payload)


def test_waiter_cancelled_when_woken_passes_the_wake_on(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            queue = client.queue("jobs", poll=NEVER)
            passed_on = 0
            while passed_on < 5:
                first, second = waiting_tasks(queue, 2)
                await async_eventually(lambda: waiters(client, "jobs") == 2)
                await stored_unheard(client, passed_on)
                await queue.notify()  # no I/O: the leader is woken and has not run yet
                first.cancel()
                await asyncio.wait([first])
                if not first.cancelled():  # a scan while the message was stored has found it
                    second.cancel()
                    await asyncio.wait([second])
                    continue
                async with asyncio.timeout(LONG):
                    message = await second
                assert message.payload == passed_on
                passed_on += 1

    asyncio.run(main())


def test_next_waiter_leads_after_a_cancelled_leader(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            queue = client.queue("jobs", poll=NEVER)
            for n in range(5):
                first, second = waiting_tasks(queue, 2)
                await async_eventually(lambda: waiters(client, "jobs") == 2)
                first.cancel()
                await async_eventually(lambda: waiters(client, "jobs") == 1)
                await queue.push(n)
                async with asyncio.timeout(LONG):
                    assert (await second).payload == n

    asyncio.run(main())


def test_next_waiter_leads_after_a_timed_out_leader(
    connect: Connect, pool: ThreadPoolExecutor
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    first = pool.submit(queue.pop, 0.5)
    eventually(lambda: waiters(client, "jobs") == 1 or first.done())
    second = pool.submit(queue.pop)
    assert first.result(LONG) is None
    eventually(lambda: waiters(client, "jobs") == 1)
    queue.push(1)
    assert second.result(LONG) is not None  # nothing else would wake it: it never polls


# ---- paused


def test_paused_queue_waits_until_resume(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue, other = consumer.queue("jobs", poll=NEVER), client.queue("jobs")
    for _ in range(2):
        future = waiting(pool, consumer, queue, queue.reserve)
        other.pause()
        eventually(lambda: runner_of(consumer).waiters("jobs").scan.paused)
        other.push("while paused")
        began = time.monotonic()
        assert queue.pop(0.2) is None
        assert time.monotonic() - began >= 0.19  # the client's clock counts milliseconds
        assert not future.done()
        other.resume()
        reservation, _ = future.result(LONG)
        queue.commit(reservation)


@pytest.mark.slow
def test_pause_is_noticed_in_five_seconds_without_a_bus(connect: Connect, client: Client) -> None:
    queue, other = connect(signals="none:").queue("jobs", poll=1), client.queue("jobs")
    assert queue.pop(0) is None
    other.pause()
    time.sleep(5)
    other.push("while paused")
    assert queue.pop(1) is None
    other.resume()
    began = time.monotonic()
    assert queue.pop(LONG) is not None
    assert time.monotonic() - began < 5 + SOON


def test_waiting_consumer_makes_a_deleted_queue_again(
    connect: Connect, pool: ThreadPoolExecutor
) -> None:
    """It hears of the deletion. A message of a producer that still knows the queue arrives."""
    consumer, producer, admin = connect(), connect(), connect()
    jobs = producer.queue("jobs")
    jobs.push("warm")
    assert jobs.pop(0) is not None
    queue = consumer.queue("jobs", poll=NEVER)
    future = waiting(pool, consumer, queue, queue.reserve)
    assert admin.delete_queue("jobs") == 0
    eventually(lambda: [each.name for each in admin.queues()] == ["jobs"], "made again")
    jobs.push("kept")
    reservation, _ = future.result(LONG)
    assert reservation is not None
    assert reservation.payload == "kept"
