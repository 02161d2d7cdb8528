"""The pulse of a run: when its event loop last turned, and when the server last answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio

from pyqueue.errors import QueueClosed, QueueError
from pyqueue.pipeline.blocking import ClientRunner
from pyqueue.requests import Find

#: After this time, in seconds, an event loop that does not turn counts as blocked.
BLOCKED_AFTER_S: Final = 10.0
#: After this time without an answer of the server, in seconds, a run is not ready.
UNREACHED_AFTER_S: Final = 60.0
#: The seconds between two records of the loop, and between two reads from the server.
_TURN_S: Final = 1.0
_ASK_S: Final = 15.0


class Pulse:
    """The signs of life of a run. Health checks read them in other threads."""

    def __init__(self) -> None:
        #: When the loop last turned, by the monotonic clock.
        self.turned = time.monotonic()
        #: When the server last answered, or None if it has not answered yet.
        self.reached: float | None = None
        #: Returns whether the run receives messages: its lifespan has begun, and it is not stopped.
        self.receiving: Callable[[], bool] = lambda: False

    async def turn(self) -> None:
        """Record that the event loop turns, until cancelled."""
        while True:
            self.turned = time.monotonic()
            await anyio.sleep(_TURN_S)

    async def reach(self, runner: ClientRunner) -> None:
        """Read from the server at intervals, until cancelled, and record when it answers."""
        while True:
            try:
                await runner.run(iter(Find({"_id": "~"}, limit=1)))  # there is no such document
                self.reached = time.monotonic()
            except QueueClosed:
                return
            except QueueError:
                pass  # the time of the last answer shows it
            await anyio.sleep(_ASK_S)

    def why_not_alive(self) -> str | None:
        """Return why the process should be restarted, or None if its event loop is not blocked."""
        silent_s = time.monotonic() - self.turned
        if silent_s <= BLOCKED_AFTER_S:
            return None
        return f"the event loop has been blocked for {silent_s:.0f} s"

    def why_not_ready(self) -> str | None:
        """Return why the process cannot work now, or None if it can."""
        if not self.receiving():
            return "no messages are received, because the worker is starting or stopping"
        silent_s = time.monotonic() - (self.reached or 0.0)
        if self.reached is not None and silent_s <= UNREACHED_AFTER_S:
            return None
        since = "yet" if self.reached is None else f"for {silent_s:.0f} s"
        return f"the server has not answered {since}"
