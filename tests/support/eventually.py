"""Wait until a condition holds. This is the only way in which tests wait for something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pyqueue.runtime.connecting import runner_of

#: Far more than anything in the tests takes, in seconds. Reaching it means failure.
LONG = 60.0

_STEP = 0.002


def eventually(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    seconds: float = LONG,
    alive: Callable[[], object] | None = None,
) -> None:
    """Wait until the condition holds.

    Args:
        condition: Called until it returns something true.
        what: The condition in words, for the failure.
        seconds: Fail after this time. Only a test of the waiting itself needs a small value.
        alive: Fail as soon as this returns something false: the condition cannot come about.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        # Asked again: the program may have brought the condition about as its last act.
        assert alive is None or alive() or condition(), f"ended without {what}"
        assert time.monotonic() < deadline, f"{what} did not hold within {seconds:.0f} s"
        time.sleep(_STEP)


async def async_eventually(
    condition: Callable[[], object], what: str = "the condition", *, seconds: float = LONG
) -> None:
    """Wait until the condition holds, while the event loop runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not hold within {seconds:.0f} s"
        await asyncio.sleep(_STEP)


def waiters(client: Any, queue: str) -> int:
    """Return the number of consumers of a queue that wait in this client."""
    return int(runner_of(client).waiters(queue).count)
