"""What only the buses within a process can get wrong."""

import asyncio
import threading
import time
from datetime import timedelta

import pytest

import signals
from signals.memory import MemoryRunner
from tests.signals.portal import NOW
from tests.support.eventually import eventually

LATER = NOW + timedelta(minutes=1)
SECONDS = 20.0  # for what happens at once; a slow machine needs longer


def test_memory_buses_hear_each_other_across_loops() -> None:
    """Blocking and asyncio buses, in several threads and event loops."""
    place = "across"
    heard: list[bool] = []
    entered = threading.Barrier(3)

    async def listen() -> bool:
        async with signals.AsyncMemoryBus(place) as bus, bus.listen("a") as listener:
            await asyncio.to_thread(entered.wait, SECONDS)
            return await listener.wait(SECONDS)

    threads = [threading.Thread(target=lambda: heard.append(asyncio.run(listen()))) for _ in "12"]
    for thread in threads:
        thread.start()
    with signals.MemoryBus(place) as bus:
        entered.wait(SECONDS)
        bus.emit("a", NOW)
        for thread in threads:
            thread.join(SECONDS)
        assert heard == [True, True]

        async def emit() -> None:
            signals.AsyncMemoryBus(place).emit("a", NOW)

        with bus.listen("a") as listener:
            asyncio.run(emit())
            assert listener.wait(SECONDS)


def test_closed_loop_does_not_break_emit() -> None:
    async_bus = signals.AsyncMemoryBus("closed-loop")

    async def leave_behind() -> None:
        await async_bus.listen("a").__aenter__()

    asyncio.run(leave_behind())
    with signals.MemoryBus("closed-loop") as bus, bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(SECONDS)


def test_memory_thread_lives_only_while_events_are_held() -> None:
    def trailing() -> bool:
        return any(thread.name == "signals-memory" for thread in threading.enumerate())

    eventually(lambda: not trailing())
    with signals.MemoryBus("thread", window=0.2) as bus:
        bus.emit("a", NOW)
        assert not trailing()
        while not bus.stats["merged"]:  # on a slow machine the window may have closed
            bus.emit("a", NOW)
        sent = bus.stats["emitted"] - bus.stats["merged"]
        assert trailing() or bus.stats["published"] > sent
        eventually(lambda: not trailing())
        assert bus.stats["published"] == sent + 1


def test_memory_bus_holds_nothing_if_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can start while the interpreter exits."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with signals.MemoryBus("ending", window=60) as bus, bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            bus.emit("a", LATER)
        assert listener.wait(0)
        assert listener.when == LATER
        assert (bus.stats["published"], bus.stats["failed"]) == (2, 0)


def test_memory_delivery_takes_under_a_millisecond() -> None:
    with signals.MemoryBus("speed", window=0) as bus, bus.listen("a") as listener:
        times = []
        for _ in range(200):
            began = time.perf_counter()
            bus.emit("a", NOW)
            assert listener.wait(0)  # the event has arrived when `emit` returns
            times.append(time.perf_counter() - began)
        assert min(times) < 0.001


def test_hub_keeps_nothing_of_topics_without_listeners() -> None:
    runner = MemoryRunner("MemoryBus", "kept", 0.0)
    bus = signals.MemoryBus("kept", window=0)
    for number in range(100):
        with bus.listen(str(number)):
            bus.emit(str(number), NOW)
    hub = runner.hub
    kept = (hub._subscriptions, hub._left, hub._new, hub._asked)
    assert [len(each) for each in kept] == [0, 0, 0, 0]


async def _null() -> None:
    async with signals.AsyncNullBus() as bus, bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert not await listener.wait(0.01)
        await bus.check()
        await bus.close()
        assert not await listener.wait(None)


def test_null_bus_carries_nothing() -> None:
    with signals.NullBus() as bus, bus.listen("a") as listener, signals.NullBus() as producer:
        bus.emit("a", NOW)
        producer.emit("a", NOW)
        assert not listener.wait(0.01)
        bus.check()
        bus.close()
        assert not listener.wait(None)
        assert listener.closed
    asyncio.run(_null())
