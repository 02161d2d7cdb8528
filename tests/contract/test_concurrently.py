"""Plans that a driver runs at once."""

from __future__ import annotations

import _thread
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from functools import partial
from threading import Barrier, Event, Lock, get_ident
from typing import Any

import pytest

from pyqueue import AsyncClient, Client
from pyqueue.backends.managing import ping
from pyqueue.concurrently import AT_ONCE, Concurrently, concurrently
from pyqueue.requests import Command, Hello, Plan, ServerTime, ToTheEnd
from pyqueue.runtime import aside
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.drivers import AsyncDriver
from tests.spark.processes import SLOW_S
from tests.support.eventually import LONG


def plan(result: int, work: Callable[[], object] = int) -> Plan[int]:
    """Do some work, and return the result."""
    yield from ServerTime()
    work()
    return result


def test_blocking_driver_runs_several_plans_at_once(url: str) -> None:
    together = Barrier(AT_ONCE)
    with Client(url) as client:
        plans = [plan(number, lambda: together.wait(SLOW_S)) for number in range(2 * AT_ONCE)]
        assert runner_of(client).run(concurrently(plans)) == [*range(2 * AT_ONCE)]


def both_of(plans: Any) -> Any:
    """Run plans, the first one by the caller, as a loop does."""
    return (yield from Concurrently(plans, outlive=True))


def test_first_plan_runs_in_the_thread_of_the_caller(url: str) -> None:
    """Ctrl-C interrupts it there, and it may call hooks."""
    with Client(url) as client:
        runner_of(client).run(ping())
        for _ in range(20):
            both, threads = Barrier(2), dict[int, int]()

            def note(number: int, both: Barrier = both, threads: dict[int, int] = threads) -> None:
                threads[number] = get_ident()
                both.wait(SLOW_S)

            plans = [plan(number, partial(note, number)) for number in range(2)]
            runner_of(client).run(both_of(plans))
            assert threads[0] == get_ident() != threads[1]


def test_first_plan_runs_in_the_task_of_the_caller(url: str) -> None:
    """An eager task begins before its creator continues, and takes another plan."""
    places: list[object] = []

    async def run() -> None:
        eager = getattr(asyncio, "eager_task_factory", None)  # since Python 3.12
        asyncio.get_running_loop().set_task_factory(eager)
        async with AsyncClient(url) as client:
            await runner_of(client).run(ping())
            first = plan(0, lambda: places.append(asyncio.current_task()))
            await runner_of(client).run(concurrently([first, plan(1)]))
        assert places == [asyncio.current_task()]

    asyncio.run(run())


def test_first_error_is_raised_after_the_plans_have_ended(url: str) -> None:
    both = Barrier(2)
    ended: list[int] = []

    def fail() -> None:
        both.wait(SLOW_S)
        raise ArithmeticError("no")

    def end() -> None:
        both.wait(SLOW_S)
        ended.append(1)

    with Client(url) as client, pytest.raises(ArithmeticError):
        runner_of(client).run(concurrently([plan(0, fail), plan(1, end)]))
    assert ended == [1]


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_memory_and_async_clients_run_plans_in_one_thread(url: str, count: int) -> None:
    threads: set[int] = set()

    def plans() -> list[Plan[int]]:
        return [plan(number, lambda: threads.add(get_ident())) for number in range(count)]

    async def run() -> Any:
        async with AsyncClient(url) as client:
            return await runner_of(client).run(concurrently(plans()))

    with Client("memory:") as client:
        assert runner_of(client).run(concurrently(plans())) == [*range(count)]
    assert asyncio.run(run()) == [*range(count)]
    assert threads <= {get_ident()}


@pytest.mark.parametrize("fails", [False, True])
def test_async_driver_waits_for_several_plans_at_once(
    url: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one has failed, no other plan begins."""

    sent: list[object] = []

    async def run() -> None:
        together = asyncio.Barrier(AT_ONCE)

        async def ask(driver: AsyncDriver, request: Command[object]) -> object:
            sent.append(request)
            if fails:
                raise ArithmeticError("no")
            await asyncio.wait_for(together.wait(), SLOW_S)
            return len(sent)

        hellos = [Hello() for _ in range(2 * AT_ONCE)]
        async with AsyncClient(url) as client:
            await runner_of(client).run(ping())
            with monkeypatch.context() as patched:
                patched.setattr(AsyncDriver, "ask", ask)
                await runner_of(client).run(concurrently([iter(each) for each in hellos]))

    with pytest.raises(ArithmeticError) if fails else nullcontext():
        asyncio.run(run())
    assert len(sent) == (1 if fails else 2 * AT_ONCE)


def test_async_driver_raises_the_error_of_another_task(url: str) -> None:
    async def run() -> None:
        async with AsyncClient(url) as client:
            await runner_of(client).run(ping())
            await runner_of(client).run(concurrently([iter(Hello()), plan(1, fail)]))

    def fail() -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        asyncio.run(run())


def test_cancellation_ends_the_plans_of_all_tasks(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []

    async def run() -> None:
        both = asyncio.Barrier(3)

        async def ask(driver: AsyncDriver, request: Command[object]) -> object:
            try:
                await both.wait()
                return await asyncio.sleep(SLOW_S, request)
            finally:
                ended.append(1)

        async with AsyncClient(url) as client:
            await runner_of(client).run(ping())
            with monkeypatch.context() as patched:
                patched.setattr(AsyncDriver, "ask", ask)
                hellos = [iter(Hello()), iter(Hello())]
                task = asyncio.ensure_future(runner_of(client).run(concurrently(hellos)))
                await both.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert ended == [1, 1]

    asyncio.run(run())


def test_dropped_caller_of_plans_at_once_ends_quietly(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop closes the coroutines of tasks that it never finished."""

    async def ask(driver: AsyncDriver, request: Command[object]) -> None:
        await asyncio.sleep(SLOW_S)

    async def run() -> None:
        async with AsyncClient(url) as client:
            await runner_of(client).run(ping())
            with monkeypatch.context() as patched:
                patched.setattr(AsyncDriver, "ask", ask)
                call = runner_of(client).run(concurrently([iter(Hello()), iter(Hello())]))
                call.send(None)
                call.close()

    asyncio.run(run())


# ---- plans that run aside


def test_plan_aside_does_not_hold_up_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may start it while this thread holds a lock that it needs."""
    monkeypatch.setattr(aside, "WAIT_S", 0.01)
    lock, done = Lock(), Event()

    def needing() -> Plan[None]:
        yield from ServerTime()
        with lock:
            done.set()

    with Client("memory:") as client:
        runner_of(client).run(ping())
        with lock:
            runner_of(client).aside(needing())
            assert not done.is_set()
        assert done.wait(SLOW_S)


def test_plan_runs_to_the_end_for_a_cancelled_caller() -> None:
    done: list[int] = []

    async def run() -> None:
        begun, more = asyncio.Event(), asyncio.Event()

        async def ask(driver: AsyncDriver, request: Command[object]) -> None:
            begun.set()
            await more.wait()

        def work() -> Plan[int]:
            yield from Hello()
            done.append(1)
            return 1

        async with AsyncClient("memory:") as client:
            runner = runner_of(client)
            assert await runner.run(iter(ToTheEnd(plan(1)))) == 1
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(AsyncDriver, "ask", ask)
                task = asyncio.ensure_future(runner.run(iter(ToTheEnd(work()))))
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not done
                more.set()
        assert done, "closing the client did not wait for it"

    asyncio.run(run())


def test_program_that_keeps_a_loop_ends() -> None:
    """No thread of it runs on when the loop is dropped, and one of them may hold a lock."""
    program = """if True:
        from pyqueue import Client
        orders = Client("memory:").queue("orders")
        orders.push(1)
        loop = iter(orders.each(0))
        next(loop)
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_message_comes_back_though_no_thread_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop is gone, so nothing renews the lease."""

    def fail(*given: object) -> None:
        raise RuntimeError("can't start new thread")

    with Client("memory:") as client:
        queue = client.queue("orders")
        id = queue.push("x")
        loop = iter(queue.each(0, lease=0.9))
        next(loop)
        with monkeypatch.context() as patched:
            patched.setattr(_thread, "start_new_thread", fail)
            del loop
        assert "comes back when its lease ends: can't start new thread" in caplog.text
        again = queue.reserve(LONG)
        assert again is not None
        assert (again.id, again.tries) == (id, 2)


def test_plan_aside_is_dropped_with_its_event_loop() -> None:
    queue = "orders"

    async def main() -> tuple[AsyncClient, AsyncIterator[Any]]:
        client = AsyncClient("memory:")
        await client.queue(queue).push(1)
        loop = aiter(client.queue(queue).each(0))
        await anext(loop)
        return client, loop

    client, loop = asyncio.run(main())
    del loop
    assert client.database.raw[client.namespace].count_documents({"token": {"$exists": True}}) == 1
