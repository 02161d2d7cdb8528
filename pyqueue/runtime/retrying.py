"""The delays of a retry loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pyqueue.messages import Backoff

#: From this number of tries on, the delay no longer changes; it reached its maximum long before.
#: The bound keeps ``factor ** tries`` cheap to compute in a loop that runs for weeks.
_MAX_TRIES: Final = 1000


class RetryDelays(Iterator[float]):
    """The seconds to wait before each further try, from a ``Backoff``. The iterator never ends.

    Args:
        backoff: The first delay, the factor by which delays grow, and the longest delay.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._tries = 0

    def __next__(self) -> float:
        self._tries = min(self._tries + 1, _MAX_TRIES)
        return self._backoff.delay(self._tries)

    def reset(self) -> None:
        """Start again with the first delay. Call this after a try that succeeded."""
        self._tries = 0
