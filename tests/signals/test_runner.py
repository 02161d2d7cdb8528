"""The life of a bus that has a server, where no real server brings it about: threads that cannot start, loops thrown away."""

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

import signals
from signals.hub import Hub, Subscription, TaskListener
from signals.runner import Runner
from signals.transport import Procedure, TaskRuntime
from tests.signals.servers import NOW, RedisServer


def test_where_no_thread_can_be_started_events_fail_and_nobody_is_hurt(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the interpreter ends, or beyond the limits of the system."""

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
        with bus.listen("a") as listener:  # it can again
            bus.emit("a", NOW)
            assert listener.wait(5)
            assert listener.when == NOW


def test_an_asyncio_bus_may_be_used_first_from_a_thread_beside_its_loop(
    redis_server: RedisServer,
) -> None:
    async def use() -> None:
        async with (
            signals.AsyncRedisBus(redis_server.url, prefix="beside") as bus,
            signals.AsyncRedisBus(redis_server.url, prefix="beside") as other,
            other.listen("a") as listener,
        ):
            await bus.check()  # which loop is its own, it knows from here on
            await asyncio.to_thread(bus.emit, "a", NOW)
            assert await listener.wait(5)
            assert listener.when == NOW

    asyncio.run(use())


class Still:
    """A server that takes everything and never says a word."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reading = asyncio.Event()

    def _call(self, name: str) -> Procedure[None]:
        self.calls.append(name)
        yield asyncio.sleep(0)

    def publish(self, events: dict[str, datetime | None]) -> Procedure[None]:
        return self._call("publish")

    def start(self) -> Procedure[bool]:
        yield from self._call("start")
        return True

    def subscribe(self, add: list[str], drop: list[str]) -> Procedure[None]:
        return self._call("subscribe")

    def read(
        self, deliver: Callable[[str, datetime | None], None], confirm: Callable[[str], None]
    ) -> Procedure[None]:
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


def listening(transport: Still, loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Let a listener enter in a loop, which then stands still; answers the tasks of its bus."""

    async def enter() -> None:
        runner = Runner("still", lambda: transport, 0.05, TaskRuntime)
        await TaskListener("a", runner.enter, runner.leave).__aenter__()
        await transport.reading.wait()

    loop.run_until_complete(enter())
    return list(asyncio.all_tasks(loop))


def test_a_loop_that_is_thrown_away_ends_listening_without_a_word() -> None:
    """Nothing can be awaited any more: Python complains of whoever tries."""
    transport, loop = Still(), asyncio.new_event_loop()
    tasks = listening(transport, loop)
    loop.close()
    assert {task.get_name() for task in tasks} == {"signals_listening", "signals_publishing"}
    for task in tasks:
        coroutine: Any = task.get_coro()
        coroutine.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that it is thrown away is meant
    assert "stop" not in transport.calls


def test_a_task_that_is_cancelled_ends_listening_properly() -> None:
    transport, loop = Still(), asyncio.new_event_loop()
    tasks = listening(transport, loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
    assert transport.calls.count("stop") == 1


def nowhere(subscription: Subscription) -> Procedure[None]:
    yield from ()


def test_hub_keeps_what_was_never_subscribed() -> None:
    """A bus that hears every topic has nothing to unsubscribe from."""
    hub, subscription = Hub(), Subscription("a", nowhere, lambda _: None)
    subscription.open(threading.Event)
    hub.confirm()
    hub.add(subscription)
    hub.remove(subscription)
    assert hub.changes(0.0) == (True, [], []), "the listener may come back"
    assert hub.changes(float("inf")) == (False, [], [])
