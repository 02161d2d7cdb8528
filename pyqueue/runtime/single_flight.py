"""Run one call at a time, and share its result among all concurrent callers.

If a caller is cancelled or interrupted, the other callers still get a result.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from pyqueue.errors import QueueClosed, Unavailable
from pyqueue.runtime.coalescing import copy_of


class SingleFlight:
    """Lets threads share a call. If the working thread is interrupted, another one takes over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Future[None] | None = None

    def run(
        self, work: Callable[[], None], *, joins: bool, timeout_s: float, end: float = math.inf
    ) -> None:
        """Do the work, or share the result of the thread that is already doing it.

        Args:
            work: The function to call.
            joins: If another thread is doing the work, whether to wait for it or return at once.
            timeout_s: How long to wait for another thread, in seconds.
            end: Until when the caller may wait, on the monotonic clock. ``work`` keeps to it.

        Raises:
            Unavailable: Another thread is still doing the work.
        """
        mine: Future[None] = Future()
        while True:
            try:
                with self._lock:
                    current = self._current
                    if current is None:
                        self._current = mine
                if current is None:
                    # Not the context of the caller, because it may have a shorter time limit.
                    contextvars.Context().run(work)
                    mine.set_result(None)
                    return
            except Exception as error:
                if end == math.inf:  # else it may be the limit of this caller alone
                    mine.set_exception(error)
                raise
            finally:
                if self._current is mine:
                    self._current = None
                    mine.cancel()  # this has no effect if there is a result
            if not joins:
                return
            try:
                failure = current.exception(max(0.0, min(timeout_s, end - time.monotonic())))
            except CancelledError:
                continue
            except TimeoutError:
                raise Unavailable("the server did not answer in time") from None
            if failure is not None:
                raise copy_of(failure)
            return


class AsyncSingleFlight:
    """Lets tasks share a call. The work has a task that no caller can cancel."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def run(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        joins: bool,
        end: float = math.inf,
    ) -> None:
        """Do the work, or share its result if it is already being done.

        Args:
            work: The coroutine function to call.
            joins: If the work is already being done, whether to wait for it or return at once.
            end: Until when the caller may wait, on the monotonic clock. The work goes on.

        Raises:
            Unavailable: The work is still being done.
        """
        task = self._task
        if task is None:
            # Not the context of the caller, because it may have a shorter time limit.
            task = self._task = asyncio.get_running_loop().create_task(
                work(), context=contextvars.Context()
            )
            task.add_done_callback(self._done)
        elif not joins:
            return
        left_s = None if end == math.inf else max(0.0, end - time.monotonic())
        ended, _ = await asyncio.wait([task], timeout=left_s)
        if not ended:
            raise Unavailable("the server did not answer in time")
        if task.cancelled():
            raise QueueClosed("the client was closed")
        failure = task.exception()
        if failure is not None:
            raise copy_of(failure)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # perhaps no caller takes it: all of them may have been cancelled

    async def close(self) -> None:
        """Cancel the work. Its callers raise QueueClosed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
