"""Failures of a runner without any fault of a server.

Threads that cannot start, event loops that are thrown away, and the growing delays of retries.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

import signals
from signals.hub import Hub, Subscription, TaskListener
from signals.runner import RetryDelays, Runner
from signals.transport import Deliver, Procedure, TaskRuntime
from tests.signals.portal import NOW
from tests.support.servers import RedisServer


def test_runner_counts_events_if_no_thread_starts(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread starts while the interpreter exits, or beyond the limits of the system."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with signals.RedisBus(redis_server.url, prefix="threads") as bus:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "signals"):
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr("signals.runner.ENTER_TIMEOUT_S", 0.01)
            bus.emit("a", NOW)
            with bus.listen("a") as listener:
                assert not listener.wait(0)
            assert (bus.stats["emitted"], bus.stats["failed"]) == (1, 1)
            (record,) = caplog.records
            assert "can't start new thread" in record.getMessage()
        with bus.listen("a") as listener:  # threads start again
            bus.emit("a", NOW)
            assert listener.wait(20)
            assert listener.when == NOW


def test_asyncio_bus_emits_from_a_thread_beside_its_loop(
    redis_server: RedisServer,
) -> None:
    async def use() -> None:
        async with (
            signals.AsyncRedisBus(redis_server.url, prefix="beside") as bus,
            signals.AsyncRedisBus(redis_server.url, prefix="beside") as second,
            second.listen("a") as listener,
        ):
            await bus.check()  # from here on the bus belongs to this loop
            await asyncio.to_thread(bus.emit, "a", NOW)
            assert await listener.wait(20)
            assert listener.when == NOW

    asyncio.run(use())


class SilentTransport:
    """A server that accepts everything and never sends anything."""

    def __init__(self) -> None:
        self.place = "silent"
        self.calls: list[str] = []
        self.reading = asyncio.Event()

    def _call(self, name: str) -> Procedure[None]:
        self.calls.append(name)
        yield asyncio.sleep(0)

    def publish(self, events: dict[str, datetime | None], origin: str) -> Procedure[None]:
        return self._call("publish")

    def start(self) -> Procedure[bool]:
        yield from self._call("start")
        return True

    def subscribe(self, add: list[str], drop: list[str]) -> Procedure[None]:
        return self._call("subscribe")

    def read(self, deliver: Deliver, confirm: Callable[[str], None]) -> Procedure[None]:
        self.reading.set()
        yield asyncio.Event().wait()

    def stop(self) -> Procedure[None]:
        return self._call("stop")

    def check(self) -> Procedure[None]:
        return self._call("check")

    def close(self) -> Procedure[None]:
        return self._call("close")

    def explain(self, error: Exception) -> str:
        return str(error)


def listening(
    transport: SilentTransport, loop: asyncio.AbstractEventLoop
) -> list[asyncio.Task[Any]]:
    """Let a listener enter in a loop, then stop the loop. Return the tasks of the bus."""

    async def enter() -> None:
        runner = Runner("still", lambda: transport, 0.05, TaskRuntime)
        await TaskListener("a", runner.enter, runner.leave).__aenter__()
        await transport.reading.wait()

    loop.run_until_complete(enter())
    return list(asyncio.all_tasks(loop))


def test_loop_thrown_away_ends_listening_silently() -> None:
    """Nothing can be awaited any more: Python warns about code that tries."""
    transport, loop = SilentTransport(), asyncio.new_event_loop()
    tasks = listening(transport, loop)
    loop.close()
    assert {task.get_name() for task in tasks} == {"signals_listening", "signals_publishing"}
    for task in tasks:
        coroutine: Any = task.get_coro()
        coroutine.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # meant to be lost
    assert "stop" not in transport.calls


def test_cancelled_task_stops_the_transport() -> None:
    transport, loop = SilentTransport(), asyncio.new_event_loop()
    tasks = listening(transport, loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
    assert transport.calls.count("stop") == 1


def nowhere(subscription: Subscription) -> Procedure[None]:
    yield from ()


def test_hub_drops_no_topic_it_never_subscribed_to() -> None:
    """A bus that hears every topic has nothing to unsubscribe from."""
    hub, subscription = (
        Hub(dict.fromkeys(signals.STATS, 0)),
        Subscription("a", nowhere, lambda _: None),
    )
    subscription.open(threading.Event)
    hub.confirm()
    hub.add(subscription)
    hub.remove(subscription)
    assert hub.changes(0.0) == (True, [], []), "the listener may come back"
    assert hub.changes(float("inf")) == (False, [], [])


def test_retry_delays_double_up_to_five_seconds() -> None:
    delays = RetryDelays()
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert all(most / 2 <= delays.next() <= most for most in longest)
    delays.reset()
    assert delays.next() <= 0.1


def test_retry_delays_leave_the_shared_random_numbers_alone() -> None:
    """A bus draws them in its thread, when a program that has seeded them is at work."""
    before = random.getstate()
    RetryDelays().next()
    assert random.getstate() == before
