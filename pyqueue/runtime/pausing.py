"""The pauses of a plan. After a pause, a stale estimate of the primary's clock is refreshed."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from pyqueue.errors import Unavailable


def sleep(driver: Any, seconds: float) -> None:
    """Pause a plan of a blocking driver."""
    time.sleep(seconds)
    if driver.clock.stale:  # perhaps no other call of the client asks for the time
        with suppress(Unavailable):
            driver.prepare()


async def sleep_async(driver: Any, seconds: float) -> None:
    """Pause a plan of an async driver."""
    await asyncio.sleep(seconds)
    if driver.clock.stale:
        with suppress(Unavailable):
            await driver.prepare()
