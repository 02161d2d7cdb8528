"""A wall clock that can be set wrong, for one process.

pyqueue, its buses and its driver read the wall clock only by ``time.time``, so that is replaced.
The monotonic clock stays right, as it does when the clock of a machine is set.
"""

from __future__ import annotations

import time

__all__ = ["install", "set_offset"]

_true_time, _true_time_ns = time.time, time.time_ns
_offset_s = 0.0


def install() -> None:
    """Replace the wall clock of this process by one that ``set_offset`` controls."""
    time.time = lambda: _true_time() + _offset_s
    time.time_ns = lambda: _true_time_ns() + round(_offset_s * 1e9)


def set_offset(seconds: float) -> None:
    """Set the wall clock ahead of the true time; behind it if negative."""
    global _offset_s
    _offset_s = seconds
