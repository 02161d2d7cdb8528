"""One clock per client: the primary's.

The machine's own monotonic clock carries the time; the primary says where to begin. So leases mean the same in every process,
whatever the clocks of their machines show. It reads clocks and does no I/O; whoever owns it brings the samples.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

__all__ = ["BAND", "Clock", "seconds"]

#: Instants from here on are pyqueue's own (finished messages are kept there); users' instants lie before.
BAND = datetime(8000, 1, 1, tzinfo=UTC)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_REFRESH = 30.0
_JUMP = 1.0


def seconds(duration: float | timedelta) -> float:
    """A duration in seconds, from seconds or a timedelta."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


class Clock:
    """An estimate of the primary's clock, aware UTC with milliseconds, that never steps back by less than a second."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()  # from the monotonic clock to the epoch
        self._apart = self._offset
        self._last = 0
        self._instant = _EPOCH
        self._taken = float("-inf")

    def now(self) -> datetime:
        """The instant at the primary."""
        stamp = int((time.monotonic() + self._offset) * 1000)
        # A small step back is waited out, a large one is followed.
        if not -_JUMP * 1000 < stamp - self._last <= 0:
            # The instant goes first: a thread that reads between the two gets one that has been, never one to come.
            self._instant, self._last = _EPOCH + timedelta(milliseconds=stamp), stamp
        return self._instant

    @property
    def stale(self) -> bool:
        """Whether new samples are due: after 30 s, or when the machine's clocks were set apart by more than a second."""
        monotonic = time.monotonic()
        return (
            monotonic - self._taken >= _REFRESH
            or abs(time.time() - monotonic - self._apart) > _JUMP
        )

    def expire(self) -> None:
        """Ask for new samples: the primary may be another one now."""
        self._taken = float("-inf")

    def touch(self) -> None:
        """Go on for another 30 s with the estimate there is."""
        self._taken = time.monotonic()
        self._apart = time.time() - self._taken

    def sample(self, samples: list[tuple[float, float, datetime]]) -> None:
        """Take the best of ``(sent, received, the primary's instant)``, both ends on the monotonic clock."""
        sent, received, instant = min(samples, key=lambda each: each[1] - each[0])
        self._offset = instant.timestamp() - (sent + received) / 2
        self.touch()

    @property
    def skew(self) -> float:
        """Seconds by which the primary's clock is ahead of this machine's."""
        return self._offset - (time.time() - time.monotonic())
