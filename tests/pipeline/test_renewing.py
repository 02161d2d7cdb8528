"""Renewing costs the same for each message, however many are in flight.

A message that comes or goes neither wakes the renewer nor makes it visit every other message.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pymongo
import pytest

from pyqueue import LeaseLost, Reservation, Unavailable
from pyqueue.runtime.renewal import AsyncRenewer, Entry, Renewer, Schedule
from tests.plans import runner
from tests.support.eventually import async_eventually, eventually


def reservation(lease: float = 60) -> Reservation[Any]:
    return runner.reservation("id", lease=lease)


def test_schedule_wakes_only_for_what_is_due_earlier() -> None:
    schedule = Schedule[Any]()
    assert schedule.pause() is None
    assert schedule.add(Entry(reservation(60), print, print)), "the renewer would sleep for ever"
    assert schedule.pause() == pytest.approx(20, abs=1)
    assert not schedule.add(Entry(reservation(60), print, print))
    assert not schedule.add(Entry(reservation(90), print, print))
    assert schedule.add(Entry(reservation(30), print, print))
    assert schedule.pause() == pytest.approx(10, abs=1)


def test_lease_of_a_slow_claim_is_renewed_at_once() -> None:
    schedule = Schedule[Any]()
    schedule.add(Entry(reservation(60), print, print), 5.9)
    assert schedule.pause() == pytest.approx(20, abs=1)
    late = reservation(60)
    assert schedule.add(Entry(late, print, print), 6.1)
    assert schedule.pause() == 0
    (entry,) = schedule.take()
    assert entry.reservation is late
    schedule.renewed(entry, None)
    assert schedule.pause() == pytest.approx(20, abs=1)


def test_schedule_forgets_what_is_discarded() -> None:
    schedule = Schedule[Any]()
    for _ in range(1000):
        held = reservation()
        schedule.add(Entry(held, print, print))
        assert schedule.discard(held) == "renewed"
        assert schedule.discard(held) is None
    assert (schedule.entries, schedule._lines, schedule.pause()) == ({}, {}, None)


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
                schedule.take()
                schedule.discard(held)
            best = min(best, time.perf_counter() - began)
        return best

    assert cost(20_000) < 5 * cost(10)


def test_renewer_thread_sleeps_while_messages_pass() -> None:
    calls = Counting()
    with closing(Renewer()) as renewer:
        for _ in range(100):
            held = reservation()
            renewer.add(held, calls)
            renewer.discard(held)
        short = reservation(0.15)
        renewer.add(short, calls)  # due before the renewer wakes
        eventually(lambda: calls.times >= 2)
        assert renewer.discard(short) == "renewed"
    assert calls.threads == {"pyqueue-renewer"}


def test_abandoned_reservation_is_not_renewed() -> None:
    """It is forgotten when it is due, though no call discards it."""
    calls = Counting()
    with closing(Renewer()) as renewer:
        held = reservation(0.3)
        renewer.add(held, calls)
        assert renewer.abandon(held) == "renewed"
        assert renewer.state(held) == "suspended"
        eventually(lambda: renewer.state(held) is None, "it is forgotten")
        assert renewer.abandon(held) is None
    assert calls.times == 0


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


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), SystemExit(3), Unavailable("down")])
def test_renewer_thread_survives_any_exception(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Each exception is logged, and the lease is renewed again."""
    calls = Counting(failure)
    with closing(Renewer()) as renewer:
        held = reservation(0.05)
        renewer.add(held, calls)
        eventually(lambda: calls.times >= 3, "it is renewed again")
        assert renewer.discard(held) == "renewed"
    assert f"could not renew the lease of id, trying again: {failure}" in caplog.text


@pytest.mark.parametrize(
    "failure", [RuntimeError("a bug"), asyncio.CancelledError("inside"), Unavailable("down")]
)
def test_renewer_task_survives_any_exception(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        renewer, calls = AsyncRenewer(), Counting(failure)
        held = reservation(0.05)
        renewer.add(held, calls.awaited)
        await async_eventually(lambda: calls.times >= 3, "it is renewed again")
        assert renewer.discard(held) == "renewed"
        await renewer.close()

    asyncio.run(main())
    assert f"could not renew the lease of id, trying again: {failure}" in caplog.text


def test_renewer_starts_later_if_no_thread_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first, second = Counting(), Counting()
    with closing(Renewer()) as never_started, closing(Renewer()) as renewer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            never_started.add(reservation(), Counting())
            renewer.add(reservation(0.05), first)
        assert "no lease is renewed until the next message: can't start" in caplog.text
        renewer.add(reservation(0.05), second)
        eventually(lambda: first.times and second.times, "both are renewed")


def test_renewer_survives_a_failing_callback(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise SystemExit("from the callback")

    calls = Counting()
    with closing(Renewer()) as renewer:
        lost, held = reservation(0.05), reservation(0.05)
        renewer.add(lost, Counting(LeaseLost("taken")), fail)
        renewer.add(held, calls)
        eventually(lambda: calls.times >= 3)
        eventually(lambda: "callback for the lost lease of id failed" in caplog.text)
        assert renewer.discard(lost) == "lost"


def test_renewer_logs_one_line_for_many_failures(caplog: pytest.LogCaptureFixture) -> None:
    failing = [Counting(*[Unavailable("down")] * 5) for _ in range(20)]
    with closing(Renewer()) as renewer:
        for calls in failing:
            renewer.add(reservation(0.05), calls)
        eventually(lambda: all(calls.times >= 5 for calls in failing))
    assert caplog.text.count("could not renew") < 20


def test_renewer_thread_does_not_wait_for_a_blocked_group() -> None:
    """A renewal that waits for a lock delays no other one."""
    renewer, calls, release = Renewer(), Counting(), threading.Event()
    blocked = Counting()

    def block(held: Sequence[Reservation[Any]]) -> None:
        blocked(held)
        release.wait()

    try:
        renewer.add(reservation(0.05), block, group="locked")
        eventually(lambda: blocked.times)
        renewer.add(reservation(0.05), calls, group="free")
        eventually(lambda: calls.times >= 2, "the other group is renewed")
        assert blocked.times == 1
    finally:
        release.set()
        renewer.close()


def test_renewer_task_does_not_wait_for_a_blocked_group() -> None:
    async def main() -> None:
        renewer, calls, blocked = AsyncRenewer(), Counting(), Counting()

        async def block(held: Sequence[Reservation[Any]]) -> None:
            blocked(held)
            await asyncio.Event().wait()

        renewer.add(reservation(0.05), block, group="locked")
        await async_eventually(lambda: blocked.times)
        renewer.add(reservation(0.05), calls.awaited, group="free")
        await async_eventually(lambda: calls.times >= 2, "the other group is renewed")
        assert blocked.times == 1
        await renewer.close()

    asyncio.run(main())


def test_renewer_task_starts_again_after_it_was_cancelled() -> None:
    async def main() -> None:
        renewer, first, second = AsyncRenewer(), Counting(), Counting()
        renewer.add(reservation(0.05), first.awaited)
        await async_eventually(lambda: first.times)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        seen = first.times
        renewer.add(reservation(0.05), second.awaited)
        await async_eventually(lambda: second.times and first.times > seen)
        await renewer.close()

    asyncio.run(main())


def test_renewer_task_ignores_the_time_limit_of_its_first_caller() -> None:
    async def main() -> None:
        renewer, limits = AsyncRenewer(), []

        async def extend(held: Sequence[Reservation[Any]]) -> None:
            limits.append(pymongo._csot.get_timeout())

        with pymongo.timeout(60):
            renewer.add(reservation(0.05), extend)
        await async_eventually(lambda: limits)
        await renewer.close()
        assert limits[0] is None

    asyncio.run(main())


class Counting:
    """An extend that counts, after it raised these exceptions."""

    def __init__(self, *failures: BaseException) -> None:
        self.times = 0
        self.threads: set[str] = set()
        self._failures = list(failures)

    def __call__(self, held: Sequence[Reservation[Any]]) -> None:
        self.times += 1
        self.threads.add(threading.current_thread().name)
        if self._failures:
            raise self._failures.pop()

    async def awaited(self, held: Sequence[Reservation[Any]]) -> None:
        self(held)
