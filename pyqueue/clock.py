"""The clock of a client: an estimate of the clock of the primary.

The monotonic clock of the machine measures the time that passes, and samples from the primary set
its starting point. So a lease ends at the same time for every process, whatever the wall clock of
its machine shows. This module does no I/O; the driver takes the samples.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

#: Instants given by users are before this. The ``when`` of a finished message is this or later.
BAND = datetime(8000, 1, 1, tzinfo=UTC)
#: The ``when`` of a finished message that is kept only for its message key is this or later.
BARE_BAND = datetime(9500, 1, 1, tzinfo=UTC)

#: When the primary was asked and when it answered, both by the monotonic clock, and its time.
Sample = tuple[float, float, datetime]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: How long an estimate is used before it is refreshed: a random time between these bounds, so that
#: the clients of a fleet do not ask all at once.
REFRESH_INTERVAL_S = (10.0, 15.0)
#: If the wall clock moves farther than this from the monotonic clock, it was set or the machine was
#: suspended. If the estimate moves farther than this, the primary's clock was set.
_JUMP_S = 1.0
#: How far a sample may differ from an estimate and still agree with it: instants are in whole
#: milliseconds, and clocks drift between two samples.
_TOLERANCE_S = 0.003


def seconds(duration: float | timedelta) -> float:
    """Return a duration in seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


class Clock:
    """An estimate of the clock of the primary, in UTC and whole milliseconds.

    If the primary's clock steps back by less than a second, the estimate stands still. It follows
    larger steps.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()  # from the monotonic clock to the epoch
        self._apart = self._offset
        #: The number of seconds by which ``advance`` has moved the clock forward.
        self.ahead = 0.0
        self._last = 0
        self._instant = _EPOCH
        self._taken = float("-inf")
        self._interval = random.uniform(*REFRESH_INTERVAL_S)
        #: How many samples moved the estimate by more than a second, or came from a new primary.
        #: Times that consumers computed before then may be wrong.
        self.changes = 0

    def now(self) -> datetime:
        """Return the estimated current instant at the primary."""
        stamp = int((time.monotonic() + self._offset) * 1000)
        # Wait out a small step back, and follow a large one.
        if not -_JUMP_S * 1000 < stamp - self._last <= 0:
            # Set the instant first: a thread that reads in between gets an old instant, never a
            # future one.
            self._instant, self._last = _EPOCH + timedelta(milliseconds=stamp), stamp
        return self._instant

    def advance(self, seconds: float) -> None:
        """Move the clock forward, for a test. From then on, it is ahead of the primary's clock."""
        self._offset += seconds
        self.ahead += seconds
        self.changes += 1

    def follow(self, other: Clock) -> None:
        """Show the time of another clock. Use this only for clocks that take no samples."""
        self._offset, self.ahead = other._offset, other.ahead

    @property
    def stale(self) -> bool:
        """Whether new samples are due: after 10 to 15 s, or after the wall clock was set."""
        now = time.monotonic()
        return now >= self._taken + self._interval or abs(time.time() - now - self._apart) > _JUMP_S

    @property
    def fresh_s(self) -> float:
        """How many seconds are left until new samples are due, unless the wall clock is set."""
        return max(0.0, self._taken + self._interval - time.monotonic())

    def expire(self) -> None:
        """Mark the estimate as stale, because another member may be primary now."""
        self._taken = float("-inf")

    def touch(self) -> None:
        """Use the current estimate for another 10 to 15 s."""
        self._interval = random.uniform(*REFRESH_INTERVAL_S)
        self._taken = time.monotonic()
        self._apart = time.time() - self._taken

    def agrees(self, sample: Sample) -> bool:
        """Return whether a sample took less than a second and agrees with the estimate."""
        sent, received, instant = sample
        ahead = instant.timestamp() + self.ahead - self._offset
        return received - sent < _JUMP_S and sent - _TOLERANCE_S <= ahead <= received + _TOLERANCE_S

    def sample(self, samples: list[Sample]) -> None:
        """Set the estimate from the quickest of several samples, which is the most exact one."""
        sent, received, instant = min(samples, key=lambda each: each[1] - each[0])
        offset = instant.timestamp() + self.ahead - (sent + received) / 2
        self.changes += abs(offset - self._offset) > _JUMP_S
        self._offset = offset
        self.touch()

    @property
    def skew(self) -> float:
        """How many seconds the primary's clock is ahead of the wall clock of this machine."""
        return self._offset - self.ahead - (time.time() - time.monotonic())


def _from_now() -> Iterator[int]:
    """Return a counter that begins at the current time, with 4096 numbers per millisecond."""
    return itertools.count(time.time_ns() // 1_000_000 << 12)


_numbers = _from_now()


def next_number() -> int:
    """Return a number larger than all earlier numbers of this process and its predecessors."""
    return next(_numbers)  # one call of C, so threads need no lock


def _forked() -> None:
    """Start again from the current time: an earlier child may have used the next numbers."""
    global _numbers
    _numbers = _from_now()


os.register_at_fork(after_in_child=_forked)
