"""Calls without a plan: when a receive or a commit needs none, and that it ends the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, Gather, Hooks, LeaseLost, Limit, Queue, QueueClosed
from pyqueue.backends.scan import FIRST
from pyqueue.facts import Keep
from pyqueue.messages import UNCHANGED


class Told(Hooks):
    """Hooks that note each event."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def received(self, queue: str, messages: Any, waited: float) -> None:
        self.events.append(("received", queue, [each.payload for each in messages], waited < 5))

    def settled(self, queue: str, verb: str, reservations: Any, error: Any, to: Any) -> None:
        given = [each.payload for each in reservations]
        self.events.append((verb, queue, given, type(error).__name__, to))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def queue(told: Told) -> Iterator[Queue[Any]]:
    """A queue that has been used, with five messages left."""
    with Client("memory:", owner="me", hooks=[told]) as client:
        queue = client.queue("a", kind="standard")
        queue.push_many(range(6))
        commit_next(queue)
        told.events.clear()
        yield queue


def commit_next(queue: Queue[Any]) -> None:
    held = queue.reserve(0)
    assert held is not None
    queue.commit(held)


def at_once(queue: Queue[Any], *given: Any, **options: Any) -> Any:
    how = {"payload": UNCHANGED, "result": UNCHANGED, "session": None, **options}
    return queue._commit_at_once(given, **how)


def waiters(queue: Queue[Any]) -> Any:
    return queue._runner.waiters("a")


def test_used_queue_needs_no_plan(queue: Queue[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue._runner, "run", None)  # no plan can run
    for number in range(1, 6):
        held = queue.reserve(0)
        assert held is not None
        assert (held.payload, held.tries, held.owner) == (number, 1, "me")
        queue.commit(held)
    monkeypatch.undo()
    assert queue.reserve(0) is None
    assert queue.counts().ready == 0


#: What leaves a receive to its plan.
DISTURBED: dict[str, Callable[[Any], object]] = {
    "paused": lambda queue: setattr(waiters(queue).scan, "paused", True),
    "record to be read": lambda queue: setattr(waiters(queue).scan, "flag_read", None),
    "old record": lambda queue: setattr(waiters(queue).scan, "flag_read", FIRST),
    "limit": lambda queue: setattr(waiters(queue).scan.limit, "limit", Limit(concurrency=1)),
    "clock to be set": lambda queue: queue._runner.driver.clock.expire(),
    "upkeep": lambda queue: setattr(waiters(queue)._recovery, "at", FIRST),
    "upkeep of all queues": lambda queue: setattr(waiters(queue)._recovery.sweep, "at", FIRST),
    "no upkeep yet": lambda queue: setattr(waiters(queue)._recovery, "at", None),
    "another lease before": lambda queue: queue.reserve(0, lease=9),
    "several before": lambda queue: queue.reserve_many(2, timeout=0),
    "forgotten facts": lambda queue: queue._runner.waiters("a").reset(),
    "pop before": lambda queue: queue.pop(0),
    "forgotten records": lambda queue: queue._runner.known.forget_records(),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_receive_is_left_to_the_plan(queue: Queue[Any], name: str) -> None:
    assert queue._claim_at_once(0, None) is not None
    DISTURBED[name](queue)
    assert queue._claim_at_once(0, None) is None


@pytest.mark.parametrize("timeout", [True, -1, 90_000, float("nan"), "1", timedelta(seconds=1)])
def test_unusual_timeout_is_left_to_the_plan(queue: Queue[Any], timeout: Any) -> None:
    assert queue._claim_at_once(timeout, None) is None


@pytest.mark.parametrize("timeout", [None, 0, 0.5, 60])
def test_lease_is_left_to_the_plan(queue: Queue[Any], timeout: Any) -> None:
    assert queue._claim_at_once(timeout, None) is not None
    assert queue._claim_at_once(timeout, 60) is None


def test_commit_is_left_to_the_plan(queue: Queue[Any]) -> None:
    held, other = queue.reserve_many(2, timeout=0)
    assert at_once(queue, held) is not None
    assert at_once(queue, held, other) is None
    assert at_once(queue) is None
    assert at_once(queue, held.payload) is None
    for option in ({"payload": None}, {"result": None}, {"session": object()}):
        assert at_once(queue, held, **option) is None
    for name, value in {
        "keep": Keep(60, "topic"),
        "gather": Gather("g", "end"),
        "queue": "b",
    }.items():
        before = getattr(held, name)
        setattr(held, name, value)
        assert at_once(queue, held) is None
        setattr(held, name, before)
    queue._runner.driver.clock.expire()
    assert at_once(queue, held) is None


def test_renewed_lease_is_left_to_the_plan(queue: Queue[Any]) -> None:
    held = queue.reserve(0)
    assert held is not None
    with queue.renew(held):
        assert at_once(queue, held) is None
    assert at_once(queue, held) is not None


def test_hooks_are_told(queue: Queue[Any], told: Told) -> None:
    held: Any = queue.reserve(0)
    queue.commit(held)
    with pytest.raises(LeaseLost) as lost:
        queue.commit(held)
    assert lost.value.lost == (held,)
    assert queue.reserve(0) is not None
    assert told.events == [
        ("received", "a", [1], True),
        ("commit", "a", [1], "NoneType", None),
        ("commit", "a", [1], "LeaseLost", None),
        ("received", "a", [2], True),
    ]


def test_hooks_are_told_of_an_error(queue: Queue[Any], told: Told) -> None:
    held: Any = queue.reserve(0)

    def join(request: object) -> None:
        raise KeyboardInterrupt

    queue._runner.driver.coalescer.join = join
    woken: list[bool] = []
    waiters(queue).wake_next = woken.append
    with pytest.raises(KeyboardInterrupt):
        queue.commit(held)
    assert told.events[1:] == [("commit", "a", [1], "KeyboardInterrupt", None)]
    with pytest.raises(KeyboardInterrupt):
        queue.reserve(0)
    assert woken == [False]


def test_closed_client_is_refused(queue: Queue[Any]) -> None:
    held: Any = queue.reserve(0)
    queue._runner.driver.closed = True
    with pytest.raises(QueueClosed):
        queue.reserve(0)
    with pytest.raises(QueueClosed):
        queue.commit(held)


def test_timeout_includes_the_first_claim(
    queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.purge()
    call: Any = queue._claim_at_once(3, None)
    call._began -= 2
    assert 0.5 < call.left_s <= 1
    call._began -= 2
    assert call.left_s == 0
    call = queue._claim_at_once(None, None)
    assert call.left_s is None
    asked: list[Any] = []

    def received(*args: object, **how: object) -> Any:
        asked.append(how)
        yield from ()
        return []

    monkeypatch.setattr(queue, "_receive", received)
    assert queue.reserve(0) is None
    assert asked == [{"timeout": 0.0, "looked": True}]


@pytest.mark.parametrize("looked", [False, True])
def test_second_look_is_left_out(queue: Queue[Any], looked: bool) -> None:
    """Otherwise each consumer that finds nothing would look twice before it waits."""
    queue.purge()
    assert queue.reserve(0) is None
    driver: Any = queue._runner.driver
    before = driver.stats["commands"]
    how: dict[str, Any] = {"looked": True} if looked else {}
    assert queue._runner.run(queue._receive(1, timeout=0, **how)) == []
    assert driver.stats["commands"] - before == (0 if looked else 1)


def test_cancelled_receive_gives_the_message_back() -> None:
    async def run() -> None:
        async with AsyncClient("memory:") as client:
            queue = client.queue("a", kind="standard")
            await queue.push_many([0, 1])
            first = await queue.reserve(0)
            assert first is not None
            await queue.commit(first)
            assert queue._claim_at_once(0, None) is not None
            task = asyncio.ensure_future(queue.reserve(0))
            await asyncio.sleep(0)  # the task has put its item into a batch
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            driver: Any = client._connection.driver
            await driver.settled()
            held = await queue.reserve(0)
            assert held is not None
            assert (held.payload, held.tries) == (1, 1)

    asyncio.run(run())
