"""The clocks of one process: a wall clock that can be set wrong, and the sleep of a machine.

pyqueue, its buses and its driver read the wall clock only by ``time.time``, so that is replaced.
The monotonic clock stays right, as it does when the clock of a machine is set. It stands still
while a machine sleeps.

The clocks of servers are set wrong elsewhere: clients see them only in replies to ``hello``, so the
proxies change the times there.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime

_true_time, _true_time_ns = time.time, time.time_ns
true_monotonic = time.monotonic
_offset_s = 0.0
_slept_s = 0.0


def install() -> None:
    """Replace the clocks of this process by those that this module controls."""
    time.time = lambda: _true_time() + _offset_s
    time.time_ns = lambda: _true_time_ns() + round(_offset_s * 1e9)
    time.monotonic = lambda: true_monotonic() - _slept_s


def true_now() -> datetime:
    """Return the machine's time, whatever the clock of this process shows."""
    return datetime.fromtimestamp(_true_time(), UTC)


def set_offset(seconds: float) -> None:
    """Set the wall clock ahead of the true time; behind it if negative."""
    global _offset_s
    _offset_s = seconds


def sleep_as_the_machine() -> None:
    """Suspend this process until SIGCONT. Its monotonic clock does not see that time pass."""
    global _slept_s
    began = true_monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    _slept_s += true_monotonic() - began
