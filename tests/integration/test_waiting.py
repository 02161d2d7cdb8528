"""Waiting consumers: woken within milliseconds by what happens in their process, at a message's time, and at the latest at the poll.

The polls are an hour where a signal must do the waking, and there is no bus where the poll must.
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

from pyqueue import AsyncClient, Client, QueueClosed
from pyqueue.connecting import runner_of
from tests.integration.conftest import Connect
from tests.support.eventually import async_eventually, eventually, waiters

#: A few milliseconds, on a busy machine.
SOON = 0.1
NEVER = 3600.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(64)
    yield pool
    pool.shutdown(
        wait=False, cancel_futures=True
    )  # a test that failed leaves waiters; closing their client ends them


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    return call(), time.monotonic()


def waiting(
    pool: ThreadPoolExecutor, client: Any, queue: Any, call: Callable[[], Any]
) -> Future[tuple[Any, float]]:
    """Begin a call that waits; answers once it does."""
    before = waiters(client, queue.name)
    future = pool.submit(timed, call)
    eventually(lambda: waiters(client, queue.name) > before or future.done())
    assert not future.done()
    return future


def lag(
    pool: ThreadPoolExecutor, client: Any, queue: Any, receive: str, act: Callable[[], object]
) -> float:
    """Seconds from an act to the return of a receive that waits; the median of several."""
    lags = []
    for _ in range(5):
        future = waiting(pool, client, queue, getattr(queue, receive))
        began = time.monotonic()
        act()
        got, at = future.result(20)
        if receive == "reserve":
            queue.commit(got)
        lags.append(at - began)
    return median(lags)


# Woken by a signal


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
    # how it is made ready for, and what then wakes a consumer of "jobs"
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
    lags = []
    for _ in range(3):
        ready = prepare(jobs, other)
        future = waiting(pool, client, jobs, jobs.reserve)
        began = time.monotonic()
        act(jobs, other, ready)
        reservation, at = future.result(20)
        lags.append(at - began)
        jobs.commit(reservation)
    assert median(lags) < SOON


def test_second_push_within_the_window_wakes(connect: Connect, pool: ThreadPoolExecutor) -> None:
    """20 ms after the first, while identical signals are merged: the second waiter hears when the window closes."""
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    lags = []
    for _ in range(5):
        one, other = (waiting(pool, client, queue, queue.pop) for _ in range(2))
        queue.push("first")
        time.sleep(0.02)  # the case itself
        began = time.monotonic()
        queue.push("second")
        ends = [future.result(20)[1] for future in (one, other)]
        lags.append(max(ends) - began)
    assert median(lags) < SOON + 0.05


def test_no_wake_is_lost_between_scan_and_wait(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    rounds = 150
    rng = random.Random(7)

    def consume() -> list[Any]:
        return [queue.pop(20).payload for _ in range(rounds)]  # type: ignore[union-attr]  # None fails, as it should

    future = pool.submit(consume)
    for n in range(rounds):
        queue.push(n)
        time.sleep(rng.uniform(0, 0.006))  # so that pushes fall into every moment of a receive
    assert future.result(20) == list(range(rounds))


# Woken by time


def test_scheduled_message_wakes_at_its_time(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    took = lag(pool, client, queue, "pop", lambda: queue.push(1, delay=0.3))
    assert 0.3 <= took < 0.3 + SOON


def test_message_scheduled_before_the_wait_wakes(connect: Connect) -> None:
    queue = connect().queue("jobs", poll=NEVER)
    lags = []
    for _ in range(3):
        began = time.monotonic()
        queue.push(1, delay=0.3)
        assert queue.pop(20) is not None
        lags.append(time.monotonic() - began)
    assert 0.3 <= median(lags) < 0.3 + SOON


def test_earlier_message_moves_the_alarm_forward(
    connect: Connect, pool: ThreadPoolExecutor
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    queue.push("late", delay=600)
    took = lag(pool, client, queue, "pop", lambda: queue.push("early", delay=0.3))
    assert 0.3 <= took < 0.3 + SOON


def test_rolled_back_message_wakes_at_its_time(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    lags = []
    for _ in range(3):
        held = take(queue)
        future = waiting(pool, client, queue, queue.pop)
        began = time.monotonic()
        queue.rollback(held, delay=0.3)
        lags.append(future.result(20)[1] - began)
    assert 0.3 <= median(lags) < 0.3 + SOON


def test_end_of_an_own_lease_wakes(connect: Connect) -> None:
    queue = connect().queue("jobs", poll=NEVER)
    queue.push(1)
    began = time.monotonic()
    assert queue.reserve(0, lease=0.5) is not None
    again = queue.reserve(20)
    took = time.monotonic() - began
    assert again is not None
    assert again.tries == 2
    assert 0.5 <= took < 0.5 + 2 * SOON


@pytest.mark.parametrize("receive", ["pop", "reserve"])
def test_timeout_ends_the_wait(connect: Connect, receive: str) -> None:
    queue = connect().queue("jobs", poll=NEVER)
    getattr(queue, receive)(0)
    for timeout in (0.0, 0.2):
        took = []
        for _ in range(3):
            began = time.monotonic()
            assert getattr(queue, receive)(timeout) is None
            took.append(time.monotonic() - began)
        assert timeout <= median(took) < timeout + SOON


# Woken by the poll


def test_poll_finds_messages_without_signals(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect(signals="none:")
    queue = consumer.queue("jobs", poll=0.3)
    producer = client.queue("jobs")
    assert lag(pool, consumer, queue, "reserve", lambda: producer.push(1)) < 0.3 + SOON


def test_poll_finds_a_foreign_expired_lease(connect: Connect, client: Client) -> None:
    """Its end is known to nobody here."""
    queue = connect(signals="none:").queue("jobs", poll=0.3)
    assert queue.pop(0) is None
    client.queue("jobs").push(1)
    assert client.queue("jobs").reserve(0, lease=0.6) is not None
    began = time.monotonic()
    reservation = queue.reserve(20)
    assert reservation is not None
    assert reservation.tries == 2
    assert time.monotonic() - began < 0.6 + 0.3 + SOON


def test_waiting_consumers_send_few_commands(connect: Connect, pool: ThreadPoolExecutor) -> None:
    client = connect()
    queue = client.queue("jobs")
    futures = [pool.submit(queue.pop) for _ in range(50)]
    eventually(lambda: waiters(client, "jobs") == 50)
    time.sleep(1.5)  # the first looks are closer together
    before, began = client.stats["commands"], time.monotonic()
    time.sleep(3)
    assert client.stats["commands"] - before <= 2 * (time.monotonic() - began)
    client.close()
    assert {type(future.exception(20)) for future in futures} == {QueueClosed}


# Many waiters


def test_push_to_fifty_waiters_costs_few_commands(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue, producer = consumer.queue("jobs", poll=NEVER), client.queue("jobs")
    producer.pop(0)  # its record and indexes are there
    futures = [pool.submit(timed, lambda: queue.pop(30)) for _ in range(50)]
    eventually(lambda: waiters(consumer, "jobs") == 50)
    lags, costs = [], []
    for left in range(49, 44, -1):
        time.sleep(0.1)  # let them be idle, the window closed
        before = consumer.stats["commands"]
        began = time.monotonic()
        producer.push("one")
        eventually(lambda: sum(future.done() for future in futures) == 50 - left)  # noqa: B023  # called at once
        eventually(lambda: waiters(consumer, "jobs") == left)  # noqa: B023
        lags.append(
            max(at for _, at in (future.result() for future in futures if future.done())) - began
        )
        costs.append(consumer.stats["commands"] - before)
    assert median(lags) < SOON
    # The claim of the one that was woken; the look of the next, and when to look again. The pause flag is read every 5 s.
    assert median(costs) <= 3
    producer.push_many(range(45))
    assert all(future.result(20)[0] is not None for future in futures)
    assert queue.counts().total == 0


def test_fifty_pushes_wake_fifty_waiters(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue, producer = consumer.queue("jobs", poll=NEVER), client.queue("jobs")
    futures = [pool.submit(timed, lambda: queue.reserve(30)) for _ in range(50)]
    eventually(lambda: waiters(consumer, "jobs") == 50)
    began = time.monotonic()
    for n in range(50):
        producer.push(n)
    done = time.monotonic()
    got = [future.result(20) for future in futures]
    assert sorted(reservation.payload for reservation, _ in got) == list(range(50))
    assert max(at for _, at in got) - done < 1.0 + (done - began)


# Waiters that go


def waiting_tasks(queue: Any, number: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(queue.pop()) for _ in range(number)]


async def stored_unheard(client: AsyncClient, payload: object) -> None:
    """A ready message of which no signal has told."""
    async with AsyncClient(client.url, signals="none:") as silent:
        await silent.queue("jobs").push(payload)


def test_waiter_cancelled_when_woken_passes_the_wake_on(url: str) -> None:
    async def main() -> list[float]:
        lags: list[float] = []
        async with AsyncClient(url) as client:
            queue = client.queue("jobs", poll=NEVER)
            while len(lags) < 5:
                first, second = waiting_tasks(queue, 2)
                await async_eventually(lambda: waiters(client, "jobs") == 2)
                await stored_unheard(client, len(lags))
                began = time.monotonic()
                await queue.notify()  # no I/O: whoever leads is woken and has not run yet
                first.cancel()
                await asyncio.wait([first])
                if (
                    not first.cancelled()
                ):  # storing took so long that it looked by itself, and has the message
                    second.cancel()
                    await asyncio.wait([second])
                    continue
                async with asyncio.timeout(20):
                    message = await second
                lags.append(time.monotonic() - began)
                assert message.payload == len(lags) - 1
        return lags

    assert median(asyncio.run(main())) < SOON


def test_next_waiter_leads_after_a_cancelled_leader(url: str) -> None:
    async def main() -> list[float]:
        lags = []
        async with AsyncClient(url) as client:
            queue = client.queue("jobs", poll=NEVER)
            for n in range(5):
                first, second = waiting_tasks(queue, 2)
                await async_eventually(lambda: waiters(client, "jobs") == 2)
                first.cancel()
                await async_eventually(lambda: waiters(client, "jobs") == 1)
                began = time.monotonic()
                await queue.push(n)
                async with asyncio.timeout(20):
                    assert (await second).payload == n
                lags.append(time.monotonic() - began)
        return lags

    assert median(asyncio.run(main())) < SOON


def test_next_waiter_leads_after_a_timed_out_leader(
    connect: Connect, pool: ThreadPoolExecutor
) -> None:
    client = connect()
    queue = client.queue("jobs", poll=NEVER)
    first = waiting(pool, client, queue, lambda: queue.pop(2))
    second = waiting(pool, client, queue, queue.pop)
    assert first.result(20)[0] is None
    eventually(lambda: waiters(client, "jobs") == 1)
    began = time.monotonic()
    queue.push(1)
    assert second.result(20)[1] - began < 2  # nothing else would wake it: it never polls


# Paused


def test_paused_queue_waits_until_resume(
    connect: Connect, client: Client, pool: ThreadPoolExecutor
) -> None:
    consumer = connect()
    queue, other = consumer.queue("jobs", poll=NEVER), client.queue("jobs")
    lags = []
    for _ in range(3):
        future = waiting(pool, consumer, queue, queue.reserve)
        other.pause()
        eventually(lambda: runner_of(consumer).waiters("jobs").scan.paused)
        other.push("while paused")
        began = time.monotonic()
        assert queue.pop(0.2) is None
        assert 0.19 <= time.monotonic() - began < 0.2 + 2  # the client's clock counts milliseconds
        assert not future.done()
        began = time.monotonic()
        other.resume()
        reservation, at = future.result(20)
        lags.append(at - began)
        queue.commit(reservation)
    assert median(lags) < SOON


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
    assert queue.pop(20) is not None
    assert time.monotonic() - began < 5 + SOON
