"""What only the buses within a process can get wrong."""

import asyncio
import threading
import time
from datetime import timedelta

import pytest

import signals
from signals.memory import MemoryRunner
from tests.signals.servers import NOW, eventually

LATER = NOW + timedelta(minutes=1)


def test_blocking_and_asyncio_buses_hear_each_other_across_loops_and_threads() -> None:
    place = "across"
    heard = threading.Event()
    entered = threading.Barrier(3)

    async def listen() -> bool:
        async with signals.AsyncMemoryBus(place) as bus, bus.listen("a") as listener:
            await asyncio.to_thread(entered.wait, 5)
            return await listener.wait(5)

    def loop() -> None:
        if asyncio.run(listen()):
            heard.set()

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    with signals.MemoryBus(place) as bus:
        entered.wait(5)
        bus.emit("a", NOW)
        for thread in threads:
            thread.join(5)
        assert heard.is_set()

        async def emit() -> None:
            signals.AsyncMemoryBus(place).emit("a", NOW)

        with bus.listen("a") as listener:
            asyncio.run(emit())
            assert listener.wait(5)


def test_a_loop_that_was_closed_does_not_break_emit() -> None:
    async_bus = signals.AsyncMemoryBus("closed-loop")

    async def leave_behind() -> None:
        await async_bus.listen("a").__aenter__()

    asyncio.run(leave_behind())
    with signals.MemoryBus("closed-loop") as bus, bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(5)


def test_the_thread_lives_only_while_something_is_held_back() -> None:
    def trailing() -> bool:
        return any(thread.name == "signals-memory" for thread in threading.enumerate())

    eventually(lambda: not trailing())
    with signals.MemoryBus("thread", window=0.2) as bus:
        bus.emit("a", NOW)
        assert not trailing()
        bus.emit("a", NOW)
        assert trailing()
        eventually(lambda: not trailing())
        assert bus.stats["published"] == 2


def test_where_no_thread_can_be_started_nothing_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while the interpreter ends."""

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


def test_delivery_takes_well_below_a_millisecond() -> None:
    with signals.MemoryBus("speed", window=0) as bus, bus.listen("a") as listener:
        times = []
        for _ in range(200):
            began = time.perf_counter()
            bus.emit("a", NOW)
            assert listener.wait(0)  # it is there when `emit` returns
            times.append(time.perf_counter() - began)
        assert sorted(times)[100] < 0.001


def test_nothing_is_kept_of_topics_that_nobody_hears() -> None:
    runner = MemoryRunner("MemoryBus", "kept", 0.0)
    bus = signals.MemoryBus("kept", window=0)
    for number in range(100):
        with bus.listen(str(number)):
            bus.emit(str(number), NOW)
    hub = runner.hub
    assert [len(kept) for kept in (hub._subscriptions, hub._left, hub._new, hub._asked)] == [
        0,
        0,
        0,
        0,
    ]


async def _null() -> None:
    async with signals.AsyncNullBus() as bus, bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert not await listener.wait(0.01)
        await bus.check()
        await bus.close()
        assert not await listener.wait(None)


def test_the_null_bus_only_waits() -> None:
    with signals.NullBus() as bus, bus.listen("a") as listener, signals.NullBus() as other:
        bus.emit("a", NOW)
        other.emit("a", NOW)
        assert not listener.wait(0.01)
        bus.check()
        bus.close()
        assert not listener.wait(None)
        assert listener.closed
    asyncio.run(_null())
