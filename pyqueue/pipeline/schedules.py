"""A run stores its program's schedules, and pushes due messages of all schedules."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio
from anyio.lowlevel import checkpoint

from pyqueue import arguments
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules.definitions import Definition
from pyqueue.backends.schedules.managing import schedule
from pyqueue.backends.schedules.ticking import await_tick, find_due, tick_each
from pyqueue.errors import ConfigurationError, QueueClosed, QueueError
from pyqueue.messages import Backoff
from pyqueue.pipeline.blocking import ClientRunner
from pyqueue.runtime.retrying import RetryDelays

log = logging.getLogger("pyqueue")

#: The delays after a failure, in seconds.
_DELAYS: Final = Backoff(base=1, maximum=60, jitter=0.5)
#: How long a stopped run may take to finish a tick, in seconds.
_STOP_S: Final = 10.0


async def keep_ticking(
    runner: ClientRunner, given: Sequence[Definition], fail: Callable[[QueueError], None]
) -> None:
    """Store a program's schedules, then push due messages of all schedules until cancelled.

    Args:
        runner: Runs the plans.
        given: The schedules of the program.
        fail: Ends the run with an error, if one of these schedules is refused.
    """
    waiting, delays, left = runner.waiters(SCHEDULES), RetryDelays(_DELAYS), list(given)
    unreadable: set[object] = set()
    while True:
        try:
            while left:
                await runner.run(schedule(left[0]))
                del left[0]
            ids, when = await runner.run(find_due(waiting, unreadable))
            if ids:
                # Otherwise a tick that a stop interrupts waits until another process finishes it.
                with anyio.move_on_after(_STOP_S, shield=True):
                    unreadable |= await runner.run(tick_each(waiting, ids))
                await checkpoint()  # let a stop take effect
            else:
                await runner.run(await_tick(waiting, when))
                unreadable.clear()
            delays.reset()
        except QueueClosed:
            return
        except QueueError as error:
            if left and isinstance(error, ConfigurationError):
                fail(error)
                return
            delay_s = next(delays)
            level = logging.WARNING if given else logging.DEBUG
            log.log(level, "schedules: no tick for %.1f s: %s", delay_s, error)
            await anyio.sleep(delay_s)


def default_name(function: Callable[..., Any]) -> str:
    """Return the default name of a function's schedule: "module:function".

    Raises:
        ConfigurationError: The function has no usable name.
    """
    name = f"{function.__module__}:{getattr(function, '__qualname__', '')}"
    try:
        return arguments.group(name, "name")
    except ConfigurationError:
        raise ConfigurationError(
            f"name: {name!r} cannot be the name of a schedule; set name="
        ) from None


def taking_payload(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that calls a function, even if the function takes no arguments."""
    try:
        takes_some = bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not a function, or without a signature
        return function
    if takes_some:
        return function

    def call(payload: object) -> Any:
        return function()

    async def awaited(payload: object) -> Any:
        return await function()

    handler = awaited if inspect.iscoroutinefunction(function) else call
    # Not ``wraps``: it would also pass on the signature of the function.
    handler.__name__ = getattr(function, "__name__", type(function).__name__)
    return handler
