"""What a process knows of a queue's head, so that a look costs the same however much was claimed before it.

Deleted index entries stay for minutes on a replica set, and a FIFO deletes at its head: a look that starts there walks them all. So
a look starts from a *floor*, below which nothing is left as far as this process knows, and now and then one, a *sweep*, starts from the
bottom, for what came in below: slow inserts, expired leases, lost signals. Losing all this costs a slow look, never a message.

It is pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pyqueue.messages import Id

__all__ = ["FIRST", "ScanStart", "ScanState"]

#: From where a look starts: after this (when, _id), or at this ``when`` if the id is None.
ScanStart = tuple[datetime, Id | None]

#: Before all others.
FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: How far behind the others a racing producer's ``when`` may come in without waiting for a sweep.
SLACK: Final = timedelta(milliseconds=500)
#: How often a queue that is busy is swept.
BUSY: Final = 5.0
#: How soon a queue that fell quiet is swept; then after twice as long each time.
QUIET: Final = 1.0
#: A sweep that took so long is not repeated before this many times as long has passed.
EASE: Final = 50
#: An empty look that takes longer walks over what leases left behind, ahead of now.
SLOW: Final = timedelta(milliseconds=2)
#: For how long the server keeps that.
WINDOW: Final = timedelta(seconds=300)


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


@dataclass(slots=True)
class ScanState:
    """What is known between looks."""

    paused: bool = False
    #: When the pause flag was read last; None: read it again.
    flag_read: datetime | None = None
    #: The earliest ``when`` still to come, as far as it is known; whether it is; and when it was read last.
    due: datetime | None = None
    due_known: bool = False
    due_read: datetime | None = None

    #: Whether another process took some of what the last claim saw: then the next one looks further on, lest they chase each other.
    contested: bool = False
    floor: ScanStart | None = None
    #: When to sweep next; None: now.
    sweep_at: datetime | None = None
    _rest: float = QUIET
    #: What was said since the last look began.
    _lowered: datetime | None = None
    #: Until when the sentinel is worth keeping, and until when it stands.
    sentinel_until: datetime | None = None
    sentinel: datetime | None = None

    def start(self, now: datetime) -> ScanStart | None:
        """From where to look now; None: a sweep."""
        if self.due is not None and self.due <= now:
            self.move_start_back(self.due)
            self.due, self.due_known = None, False
        self._lowered = None
        return None if self.sweep_at is None or self.sweep_at <= now else self.floor

    def looked(
        self,
        start: ScanStart | None,
        now: datetime,
        after: datetime,
        last: ScanStart | None,
        poll: float,
        *,
        ended: bool,
    ) -> None:
        """Take in a look that started from there at ``now``, was answered at ``after``, and found ``last`` as the last (None: nothing).

        ``ended``: it saw the end of what is ready.
        """
        # Not above what racing producers may still put in, and not above what was just seen.
        margin: ScanStart = (now - SLACK, None)
        if last is not None or ended:
            self.floor = last if last is not None and last[0] < margin[0] else margin
            if self._lowered is not None:
                self.move_start_back(self._lowered)  # what was said while it was under way
        if last is not None:
            self._rest = QUIET
        if start is None and (
            self.sweep_at is None or self.sweep_at <= now
        ):  # of several at once, the first
            took = (after - now).total_seconds()
            rest = BUSY if last is not None and not ended else self._rest
            self.sweep_at = after + _seconds(max(rest, EASE * took))
            if last is None:
                self._rest = min(self._rest * 2, max(poll, QUIET))
        elif start is not None and last is None and self.sweep_at is not None:
            self.sweep_at = min(self.sweep_at, now + _seconds(self._rest))
        if last is None and after - now >= SLOW:
            self.sentinel_until = after + WINDOW

    def move_start_back(self, when: datetime) -> None:
        """Something is, or will be, there from then on."""
        self._lowered = when if self._lowered is None else min(when, self._lowered)
        if self.floor is not None and when <= self.floor[0]:
            self.floor = (when, None)

    def on_signal(self, when: datetime) -> None:
        """The bus says so."""
        self._rest = QUIET
        self.due_known = False  # of all that was merged with it only the earliest is heard
        self.move_start_back(when)

    def on_missed_signals(self) -> None:
        """The bus may have missed something: anything may be there."""
        self.on_signal(FIRST)
        self.flag_read = None

    def wake_at(self, when: datetime) -> None:
        """Something becomes eligible then."""
        if self.due is None or when < self.due:
            self.due = when

    def wants_sentinel(self, now: datetime) -> bool:
        """Whether the queue's record should be put ahead of now, where looks end."""
        if self.sentinel_until is None or now >= self.sentinel_until:
            return False
        return self.sentinel is None or self.sentinel - now < _seconds(1)
