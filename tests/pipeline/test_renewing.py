"""Renewing costs the same however much is at work: no switch to the renewer, and no walk over all, for each message."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from pyqueue import Reservation
from pyqueue.renewal import AsyncRenewer, Entry, Renewer, Schedule
from tests.integration.eventually import async_until, until


def reservation(lease: float = 60) -> Reservation[Any]:
    now = datetime.now(UTC)
    return Reservation(
        "id",
        "q",
        None,
        {},
        None,
        now,
        now,
        1,
        None,
        None,
        None,
        [],
        "reserved",
        None,
        "t",
        now,
        "o",
        lease,
    )


def test_a_renewer_that_sleeps_is_woken_only_for_what_is_due_earlier() -> None:
    schedule = Schedule[Any]()
    assert schedule.pause() is None
    assert schedule.add(Entry(reservation(60), print, print)), "it sleeps for ever"
    assert schedule.pause() == pytest.approx(20, abs=1)
    assert not schedule.add(Entry(reservation(60), print, print))
    assert not schedule.add(Entry(reservation(90), print, print))
    assert schedule.add(Entry(reservation(30), print, print))
    assert schedule.pause() == pytest.approx(10, abs=1)


def test_what_is_discarded_leaves_nothing_behind() -> None:
    schedule = Schedule[Any]()
    for _ in range(1000):
        held = reservation()
        schedule.add(Entry(held, print, print))
        assert schedule.discard(held) == "renewed"
        assert schedule.discard(held) is None
    assert (schedule.entries, schedule._by_interval, schedule.pause()) == ({}, {}, None)


def test_a_step_costs_the_same_however_many_there_are() -> None:
    def cost(count: int) -> float:
        schedule = Schedule[Any]()
        kept = [reservation() for _ in range(count)]
        for each in kept:
            schedule.add(Entry(each, print, print))
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(500):
                held = reservation()
                schedule.add(Entry(held, print, print))
                schedule.pause()
                schedule.due()
                schedule.discard(held)
            best = min(best, time.perf_counter() - began)
        return best

    assert cost(20_000) < 5 * cost(10)


def test_the_thread_sleeps_on_while_messages_come_and_go() -> None:
    renewer, calls = Renewer(), Counting()
    try:
        for _ in range(100):
            held = reservation()
            renewer.add(held, calls)
            renewer.discard(held)
        short = reservation(0.15)
        renewer.add(short, calls)  # due before what it sleeps for
        until(lambda: calls.times >= 2)
        assert renewer.discard(short) == "renewed"
    finally:
        renewer.close()
    assert calls.threads == {"pyqueue-renewer"}


def test_the_task_sleeps_on_while_messages_come_and_go() -> None:
    async def main() -> int:
        renewer, calls, woken = AsyncRenewer(), Counting(), 0
        pause: Callable[[], float | None] = renewer._schedule.pause

        def counted() -> float | None:
            nonlocal woken
            woken += 1
            return pause()

        renewer._schedule.pause = counted  # type: ignore[method-assign]
        for _ in range(100):
            held = reservation()
            renewer.add(held, calls.awaited)
            await asyncio.sleep(0)
            renewer.discard(held)
            await asyncio.sleep(0)
        short = reservation(0.15)
        slept = woken
        renewer.add(short, calls.awaited)
        await async_until(lambda: calls.times >= 2)
        await renewer.close()
        return slept

    assert asyncio.run(main()) <= 2


class Counting:
    """An extend that counts."""

    def __init__(self) -> None:
        self.times = 0
        self.threads: set[str] = set()

    def __call__(self, held: Reservation[Any]) -> None:
        self.times += 1
        self.threads.add(threading.current_thread().name)

    async def awaited(self, held: Reservation[Any]) -> None:
        self(held)
