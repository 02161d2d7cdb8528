"""A wall clock that can be set wrong, for one process.

Of the wall clock, pyqueue, its buses and its driver read ``time.time`` alone; that is what is replaced. The monotonic clock stays right,
as it does when somebody sets a machine's clock.
"""

from __future__ import annotations

import time

__all__ = ["install", "step"]

_true_time, _true_time_ns = time.time, time.time_ns
_ahead = 0.0  # seconds


def install(ahead: float = 0.0) -> None:
    """Replace the wall clock of this process by one that is so many seconds ahead."""
    step(ahead)
    time.time = lambda: _true_time() + _ahead
    time.time_ns = lambda: _true_time_ns() + round(_ahead * 1e9)


def step(ahead: float) -> None:
    """Set it so many seconds ahead of the true one, at once; behind it if negative."""
    global _ahead
    _ahead = ahead
