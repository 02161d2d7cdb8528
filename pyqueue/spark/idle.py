"""The waits of an idle query between checks of its queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from signals import Listener

#: The longest time between two checks of an idle query, in seconds. Signals wake it earlier.
IDLE_LOOK_S: Final = 2.0


class IdleWait:
    """Decides when an idle query checks its queue, and waits for a signal until then.

    Spark asks for new data a hundred times a second, and a wait delays all sources of the query. So
    a wait ends ``max_wait_s`` after the previous answer. The time between two answers includes the
    waits of the other sources.

    Args:
        max_wait_s: How long to wait, in seconds. With 0, it does not listen for signals.
        listen: Starts listening for signals of the queue. It is called before the first wait.
    """

    def __init__(self, max_wait_s: float, listen: Callable[[], Listener]) -> None:
        self._max_wait_s = max_wait_s
        self._listen = listen
        self._listener: Listener | None = None
        self._look_at = self._answered_at = -math.inf

    def look(self) -> bool:
        """Return whether to check the queue now. This may wait."""
        now = time.monotonic()
        if now >= self._look_at:
            return True
        if self._max_wait_s == 0:
            return False
        if self._listener is None:
            self._listener = self._listen()
            return True  # a signal may have been missed
        end = min(self._look_at, self._answered_at + self._max_wait_s)
        return self._listener.wait(max(0.0, end - now)) or time.monotonic() >= self._look_at

    def rest(self, due_s: float) -> None:
        """Check again when a message becomes ready, or earlier if a signal arrives."""
        self._look_at = time.monotonic() + min(due_s, IDLE_LOOK_S)

    def answered(self) -> None:
        """Note that Spark gets its answer now."""
        self._answered_at = time.monotonic()
