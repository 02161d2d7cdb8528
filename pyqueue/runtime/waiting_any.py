"""Wait for messages of several queues at once; see ``WaitForAny``.

The consumer enters each queue as a leader or as a follower; see ``waiters``. As a leader, it
listens to the bus for all consumers of that queue in this client. In async code, each of these
listeners has a task. In blocking code, all of them set the same flag.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Final

from pyqueue.clock import Clock
from pyqueue.errors import Unavailable
from pyqueue.requests import Wait
from pyqueue.runtime.base_driver import REFRESH_TIMEOUT_S
from pyqueue.runtime.waiters import Waiters, seconds_left
from signals import Listener

#: How often to check a listener of a bus that gives no alerts, in seconds.
_CHECK_S: Final = 0.05

#: The steps of a leader's wait. The generator yields how many seconds to listen, or None to have
#: the clock refreshed. It is sent whether an event was heard, and returns whether to scan.
Steps = Generator[float | None, bool, bool]


class _Entered:
    """The queues in which one consumer is waiting."""

    def __init__(self, wake: Callable[[], object], clock: Clock) -> None:
        self._wake, self._clock = wake, clock
        self._places: list[tuple[Waiters, bool, bool]] = []
        #: How many seconds the consumer may wait as a follower, or None for no limit.
        self.most_s: float | None = None

    def enter(self, wait: Wait) -> bool:
        """Start waiting in one queue. Return whether the consumer leads there."""
        waiters: Waiters = wait.waiters
        leads = waiters.enter(self._wake, wait.until)
        guards = not leads and waiters.guard(wait.until)
        self._places.append((waiters, leads, guards))
        if not leads:
            left_s = seconds_left(wait, self._clock if guards else None)
            limits = [each for each in (self.most_s, left_s) if each is not None]
            self.most_s = min(limits, default=None)
        return leads

    def leave(self) -> None:
        """Stop waiting in all these queues."""
        for waiters, leads, guards in self._places:
            waiters.leave(self._wake, leads, guards)


async def wait_for_any_async(
    waits: Sequence[Wait], clock: Clock, lead: Callable[[Wait], Awaitable[bool]]
) -> bool:
    """Wait until one of the waits ends. Return whether to scan for messages.

    Args:
        waits: One wait for each queue.
        clock: The clock of the driver.
        lead: A function that waits as the leader of a queue.
    """
    woken = asyncio.Event()
    entered = _Entered(woken.set, clock)
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(woken.wait())]
    try:
        leading = [each for each in waits if entered.enter(each)]
        tasks.extend(asyncio.ensure_future(lead(each)) for each in leading)
        done, _ = await asyncio.wait(
            tasks, timeout=entered.most_s, return_when=asyncio.FIRST_COMPLETED
        )
        answers = [task.result() for task in done]  # raises the error of a task that failed
        return not done or any(answers)
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_forget)
        entered.leave()


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that is no longer awaited, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class _Led:
    """A queue whose leader is a blocking consumer: the listener, and the steps of the wait.

    Args:
        listener: The listener of the queue.
        steps: The steps of the leader's wait.
        alert: A function to be called for each event, if the listener gives alerts.
    """

    def __init__(self, listener: Any, steps: Steps, alert: Callable[[], object]) -> None:
        self._listener, self._steps = listener, steps
        self._gives_alerts = hasattr(listener, "alert")
        if self._gives_alerts:
            listener.alert = alert
        self._listen(next(steps))

    def _listen(self, seconds: float | None) -> None:
        assert seconds is not None
        self._end = time.monotonic() + seconds

    @property
    def pause_s(self) -> float:
        """How many seconds the consumer may wait before the next step, unless there is an alert."""
        left_s = max(0.0, self._end - time.monotonic())
        return left_s if self._gives_alerts else min(left_s, _CHECK_S)

    def step(self, refresh: Callable[[float], object]) -> bool | None:
        """Take a step if one is due. Return None until the wait ends, and then whether to scan."""
        heard = self._listener.wait(0)
        if not heard and not self._listener.closed and time.monotonic() < self._end:
            return None
        try:
            seconds = self._steps.send(heard)
            while seconds is None:
                with suppress(Unavailable):
                    refresh(REFRESH_TIMEOUT_S)
                seconds = self._steps.send(False)
        except StopIteration as stop:
            return bool(stop.value)
        self._listen(seconds)
        return None

    def close(self) -> None:
        """Stop the alerts, before another consumer becomes the leader."""
        if self._gives_alerts:
            self._listener.alert = None


def wait_for_any(
    waits: Sequence[Wait],
    clock: Clock,
    lead: Callable[[Wait], tuple[Listener, Steps]],
    refresh: Callable[[float], object],
) -> bool:
    """Wait until one of the waits ends. Return whether to scan for messages.

    Args:
        waits: One wait for each queue.
        clock: The clock of the driver.
        lead: A function that returns the listener of a queue, and the steps of its leader's wait.
        refresh: A function that refreshes the clock. Its argument is how many seconds it may take.
    """
    stirred = threading.Event()
    turns: list[bool] = []

    def wake() -> None:
        turns.append(True)
        stirred.set()

    entered = _Entered(wake, clock)
    led: list[_Led] = []
    try:
        leading = [each for each in waits if entered.enter(each)]
        led.extend(_Led(*lead(each), stirred.set) for each in leading)
        end = None if entered.most_s is None else time.monotonic() + entered.most_s
        while True:
            stirred.clear()  # before the listeners are checked: a later event sets it again
            for one in led:
                answer = one.step(refresh)
                if answer is not None:
                    return answer
            if turns or (end is not None and time.monotonic() >= end):
                return True
            pauses = [one.pause_s for one in led]
            if end is not None:
                pauses.append(max(0.0, end - time.monotonic()))
            stirred.wait(min(pauses, default=None))
    finally:
        for one in led:
            one.close()
        entered.leave()
