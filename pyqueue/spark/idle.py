"""How often an idle query looks at its queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from signals import Listener

#: An idle query looks at the queue at least so often, in seconds. Signals wake it earlier.
IDLE_LOOK_S: Final = 2.0


class IdleWait:
    """Says when an idle query looks at its queue, and waits for a signal before.

    Spark asks for new data a hundred times a second, and each answer holds up all sources of the
    query. So a wait ends ``max_wait_s`` after the answer before: the time between two answers
    includes the waits of the other sources.

    Args:
        max_wait_s: How long to wait, in seconds. With 0 it hears no signals.
        listen: Begins to hear the signals of the queue. It is called before the first wait.
    """

    def __init__(self, max_wait_s: float, listen: Callable[[], Listener]) -> None:
        self._max_wait_s = max_wait_s
        self._listen = listen
        self._listener: Listener | None = None
        self._look_at = self._answered_at = -math.inf

    def look(self) -> bool:
        """Return whether to look now. This may wait."""
        now = time.monotonic()
        if now >= self._look_at:
            return True
        if self._max_wait_s == 0:
            return False
        if self._listener is None:
            self._listener = self._listen()
            return True  # a signal may have come before
        end = min(self._look_at, self._answered_at + self._max_wait_s)
        return self._listener.wait(max(0.0, end - now)) or time.monotonic() >= self._look_at

    def rest(self, due_s: float) -> None:
        """Look again when a message becomes ready, if no signal arrives before."""
        self._look_at = time.monotonic() + min(due_s, IDLE_LOOK_S)

    def answered(self) -> None:
        """Note that Spark gets its answer now."""
        self._answered_at = time.monotonic()
