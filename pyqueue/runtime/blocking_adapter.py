"""An async driver that uses a blocking driver, for async code that serves a blocking client."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from pyqueue.requests import Command
from pyqueue.runtime.coalescing import Coalescer
from pyqueue.runtime.drivers import AsyncDriver, Driver
from pyqueue.runtime.single_flight import AsyncSingleFlight
from pyqueue.runtime.thread_pool import DaemonThreadPool
from pyqueue.runtime.waiters import Waiters
from signals import Listener

R = TypeVar("R")


class BlockingAdapter(AsyncDriver):
    """Runs the blocking calls of a driver (its commands, and its waiting) in threads.

    The adapter has its own waiting consumers, and coalesces concurrent calls. It uses the clock,
    bus, transactions and counters of the blocking driver. A cancelled call returns at once, as with
    any ``AsyncDriver``, but its command continues in its thread.

    Args:
        driver: The blocking driver.
        threads: The threads in which calls of the blocking driver run.
    """

    def __init__(self, driver: Driver, threads: DaemonThreadPool) -> None:
        vars(self).update(vars(driver))
        self._driver = driver
        self._threads = threads
        self._waiters = {}
        self._all_waiters.append(self._waiters)
        self._listeners = {}
        self.loop = None
        self._lock = asyncio.Lock()
        self._preparing = AsyncSingleFlight()
        self.coalescer = Coalescer(self.drive, self.stats)
        self._admit = self.coalescer.admit

    def check_usable(self) -> None:
        """Refuse a call to a closed client, or from the wrong process or event loop."""
        self._driver.check_usable()
        super().check_usable()

    async def prepare(self, limit_s: float = math.inf) -> None:
        """Call ``Driver.prepare`` of the blocking driver in a thread."""
        await self._threads.run(self._driver.prepare, limit_s)
        self.replicated = self._driver.replicated

    async def ask(self, request: Command[R]) -> R:
        """Send a command in a thread and return its answer."""
        self.check_usable()
        return await self._threads.run(self._driver.ask, request)

    async def _listen(self, waiters: Waiters) -> bool:
        async def register() -> None:
            listening = self._driver.bus.listen(waiters.topic)
            listener = await entered(listening, self._threads, self.check_usable)
            if self.closed or waiters in self._listeners:  # not covered: closed while it waited
                listener.close()
            else:
                self._listeners[waiters] = listener

        async with self._lock:
            if waiters in self._listeners:
                return False
            # Shielded: if the caller is cancelled now, the listener must still be registered, or it
            # would never be closed.
            await asyncio.shield(asyncio.ensure_future(register()))
            return True


class AdaptedListener:
    """A blocking listener of a bus, made awaitable.

    It waits in short slices, so that its thread ends soon after the caller is cancelled.
    """

    SLICE_S: Final = 0.25

    def __init__(
        self, listener: Listener, threads: DaemonThreadPool, check: Callable[[], None]
    ) -> None:
        self._listener = listener
        self._threads = threads
        self._check = check

    @property
    def when(self) -> datetime | None:
        """The earliest instant in the events that the last successful wait heard."""
        return self._listener.when

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds. Return whether an event was heard."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = self.SLICE_S if end is None else end - time.monotonic()
            if await self._threads.run(self._listener.wait, max(0.0, min(left, self.SLICE_S))):
                return True
            self._check()
            if end is None and self._listener.closed:
                return False
            if end is not None and left <= self.SLICE_S:
                return False

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


async def entered(
    listening: Any, threads: DaemonThreadPool, check: Callable[[], None]
) -> AdaptedListener:
    """Enter a blocking listener in a thread, and return its awaitable form.

    Args:
        listening: The blocking listener.
        threads: The threads in which calls of the listener run.
        check: A function that raises an error if the client was closed.
    """
    return AdaptedListener(await threads.run(listening.__enter__), threads, check)
