"""Plans that run in the background: no caller waits for their results; see ``requests.Aside``.

The garbage collector may start such a plan at any moment, in any thread, while the thread holds a
lock that the plan needs. So a plan never runs in the thread that starts it.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from pyqueue.errors import QueueError
from pyqueue.requests import Plan

log = logging.getLogger("pyqueue")

#: How long a thread waits at most for a plan that it started, in seconds.
WAIT_S: Final = 5.0


def in_thread(run: Callable[[Plan[None]], None], plan: Plan[None]) -> None:
    """Run a plan in a new thread, and wait for it, but no longer than ``WAIT_S``."""
    ended = _thread.allocate_lock()
    ended.acquire()

    def work() -> None:
        try:
            run(plan)
        except QueueError as error:
            _log(error)
        finally:
            ended.release()

    try:
        # Not threading.Thread, because its locks may be held, too.
        _thread.start_new_thread(work, ())
    except RuntimeError as error:  # the system has no thread left
        _log(error)
    else:
        ended.acquire(timeout=WAIT_S)


def in_task(
    run: Callable[[Plan[None]], Awaitable[None]],
    plan: Plan[None],
    spawn: Callable[[Coroutine[Any, Any, None]], object],
    loop: asyncio.AbstractEventLoop | None,
) -> None:
    """Run a plan in a task of an event loop, unless the loop is closed.

    Args:
        run: A function that runs the plan.
        plan: The plan to run.
        spawn: A function that starts the task.
        loop: The event loop of the client, or None if the client was not used yet.
    """
    if loop is None or loop.is_closed():
        return

    async def work() -> None:
        try:
            await run(plan)
        except QueueError as error:
            _log(error)

    def begin() -> None:
        spawn(work())

    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        begin()
    else:
        with suppress(RuntimeError):  # the loop was just closed
            loop.call_soon_threadsafe(begin)


def _log(error: Exception) -> None:
    log.warning("a message was not settled; it comes back when its lease ends: %s", error)
