"""Mistakes that only the buses within a process can make."""

import asyncio
import threading
import time

import signals
from tests.signals.portal import NOW, SECONDS


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


def test_memory_delivery_takes_under_a_millisecond() -> None:
    with signals.MemoryBus("speed") as bus, bus.listen("a") as listener:
        times = []
        for _ in range(200):
            began = time.perf_counter()
            bus.emit("a", NOW)
            assert listener.wait(0)  # the event has arrived when `emit` returns
            times.append(time.perf_counter() - began)
        assert min(times) < 0.001


def test_hub_keeps_nothing_of_topics_without_listeners() -> None:
    bus = signals.MemoryBus("kept")
    for number in range(100):
        with bus.listen(str(number)):
            bus.emit(str(number), NOW)
    hub = bus._runner.hub
    kept = (hub._subscriptions, hub._left, hub._new, hub._asked)
    assert [len(each) for each in kept] == [0, 0, 0, 0]


async def _null() -> None:
    async with signals.AsyncNullBus() as bus, bus.listen("a") as listener:
        assert not await listener.wait(0.01)
        bus.emit("a", NOW)
        assert await listener.wait(0.01)
        await bus.check()
        await bus.close()
        assert not await listener.wait(None)


def test_null_bus_reaches_no_other_bus() -> None:
    with signals.NullBus() as bus, bus.listen("a") as listener, signals.NullBus() as producer:
        producer.emit("a", NOW)
        assert not listener.wait(0.01)
        bus.emit("a", NOW)
        assert listener.wait(0.01)
        bus.check()
        bus.close()
        assert not listener.wait(None)
        assert listener.closed
    asyncio.run(_null())
