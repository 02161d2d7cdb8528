"""Renewing costs the same for each message, however many are in flight.

A message that comes or goes neither wakes the renewer nor makes it look at every other message.
"""

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
from tests.support.eventually import async_eventually, eventually


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


def test_schedule_wakes_only_for_what_is_due_earlier() -> None:
    schedule = Schedule[Any]()
    assert schedule.pause() is None
    assert schedule.add(Entry(reservation(60), print, print)), "the renewer would sleep for ever"
    assert schedule.pause() == pytest.approx(20, abs=1)
    assert not schedule.add(Entry(reservation(60), print, print))
    assert not schedule.add(Entry(reservation(90), print, print))
    assert schedule.add(Entry(reservation(30), print, print))
    assert schedule.pause() == pytest.approx(10, abs=1)


def test_schedule_forgets_what_is_discarded() -> None:
    schedule = Schedule[Any]()
    for _ in range(1000):
        held = reservation()
        schedule.add(Entry(held, print, print))
        assert schedule.discard(held) == "renewed"
        assert schedule.discard(held) is None
    assert (schedule.entries, schedule._by_interval, schedule.pause()) == ({}, {}, None)


def test_schedule_cost_does_not_grow_with_its_size() -> None:
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


def test_renewer_thread_sleeps_while_messages_pass() -> None:
    renewer, calls = Renewer(), Counting()
    try:
        for _ in range(100):
            held = reservation()
            renewer.add(held, calls)
            renewer.discard(held)
        short = reservation(0.15)
        renewer.add(short, calls)  # due before what it sleeps for
        eventually(lambda: calls.times >= 2)
        assert renewer.discard(short) == "renewed"
    finally:
        renewer.close()
    assert calls.threads == {"pyqueue-renewer"}


def test_renewer_task_sleeps_while_messages_pass() -> None:
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
        await async_eventually(lambda: calls.times >= 2)
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
