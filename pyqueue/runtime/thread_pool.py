"""Threads that run blocking calls for one event loop.

Unlike the threads of anyio and concurrent.futures, these threads are daemons: a call that never
returns must not prevent the process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")


class DaemonThreadPool:
    """A pool that grows with the number of concurrent calls and reuses idle threads."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Any]] = deque()
        self._closed = False

    async def run(self, call: Callable[..., R], *args: Any) -> R:
        """Call a function in a thread and return its result.

        If the caller is cancelled, the call continues and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[R, BaseException | None]] = loop.create_future()
        if self._idle:
            work = self._idle.pop()
        else:
            work = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(work, loop), name="pyqueue-call", daemon=True
            ).start()
        work.put((future, contextvars.copy_context(), call, args))
        result, error = await future
        if error is not None:  # raised here, because a future does not accept every exception
            raise error
        return result

    def close(self) -> None:
        """End the idle threads at once, and each busy thread after its call."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, work: SimpleQueue[Any], loop: asyncio.AbstractEventLoop) -> None:
        while (item := work.get()) is not None:
            future, context, call, args = item
            result, error = None, None
            try:
                result = context.run(call, *args)
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(self._done, work, future, result, error)
            except RuntimeError:  # the loop was closed, and with it the caller
                return
            del item, future, context, call, args, result, error  # keep no object alive while idle

    def _done(
        self,
        work: SimpleQueue[Any],
        future: asyncio.Future[Any],
        result: Any,
        error: BaseException | None,
    ) -> None:
        if self._closed:
            work.put(None)
        else:
            self._idle.append(work)
        if not future.done():  # otherwise the caller was cancelled
            future.set_result((result, error))
