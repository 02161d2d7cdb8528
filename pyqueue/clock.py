"""The clock of a client: an estimate of the clock of the primary.

The monotonic clock of the machine measures the time that passes, and samples of the primary say
where to start. So a lease ends at the same time for every process, whatever the wall clock of its
machine shows. This module does no I/O; the driver takes the samples.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

__all__ = ["BAND", "Clock", "seconds"]

#: Users give instants before this one. From here on pyqueue keeps finished messages.
BAND = datetime(8000, 1, 1, tzinfo=UTC)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: How long an estimate is used before it is refreshed.
REFRESH_INTERVAL_S = 30.0
#: A larger step between the clocks of the machine means that its wall clock was set.
_JUMP_S = 1.0


def seconds(duration: float | timedelta) -> float:
    """Return a duration in seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


class Clock:
    """An estimate of the clock of the primary, in UTC and whole milliseconds.

    It never steps back by less than a second.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()  # from the monotonic clock to the epoch
        self._apart = self._offset
        self._last = 0
        self._instant = _EPOCH
        self._taken = float("-inf")

    def now(self) -> datetime:
        """Return the instant at the primary."""
        stamp = int((time.monotonic() + self._offset) * 1000)
        # Wait out a small step back, and follow a large one.
        if not -_JUMP_S * 1000 < stamp - self._last <= 0:
            # Set the instant first: a thread that reads in between gets an old instant, never a
            # future one.
            self._instant, self._last = _EPOCH + timedelta(milliseconds=stamp), stamp
        return self._instant

    @property
    def stale(self) -> bool:
        """Whether new samples are due: after 30 s, or after the wall clock was set."""
        monotonic = time.monotonic()
        return (
            monotonic - self._taken >= REFRESH_INTERVAL_S
            or abs(time.time() - monotonic - self._apart) > _JUMP_S
        )

    def expire(self) -> None:
        """Ask for new samples, because another member may be primary now."""
        self._taken = float("-inf")

    def touch(self) -> None:
        """Use the present estimate for another 30 s."""
        self._taken = time.monotonic()
        self._apart = time.time() - self._taken

    def sample(self, samples: list[tuple[float, float, datetime]]) -> None:
        """Take the best of several samples ``(sent, received, instant at the primary)``.

        ``sent`` and ``received`` are of the monotonic clock.
        """
        sent, received, instant = min(samples, key=lambda each: each[1] - each[0])
        self._offset = instant.timestamp() - (sent + received) / 2
        self.touch()

    @property
    def skew(self) -> float:
        """Seconds by which the clock of the primary is ahead of the wall clock of this machine."""
        return self._offset - (time.time() - time.monotonic())
