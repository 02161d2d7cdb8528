"""Plans that a driver runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from threading import Barrier, get_ident
from typing import Any

import pytest

from pyqueue import AsyncClient, Client
from pyqueue.backends.namespace import ping
from pyqueue.concurrently import AT_ONCE, concurrently
from pyqueue.requests import Command, Hello, Plan, ServerTime
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.drivers import AsyncDriver
from tests.spark.processes import SLOW_S


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
