"""Where scans of a queue begin, so that a claim costs the same however much was claimed before it.

A replica set keeps deleted index entries for minutes. A FIFO queue deletes at its head, so a scan
that began there would walk over all of them. Therefore each process remembers a lower bound, below
which it knows of no message, and a scan begins at that bound. Messages can still arrive below it:
by a slow insert, by a lapsed lease, or with a lost signal. A *rescan*, from time to time, begins at
the very start and finds those. If a process loses this state, its next scan is slow; no message is
lost.

This module is pure: the instant is always an argument.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from bson import ObjectId

from pyqueue.backends.kind import ScanStart
from pyqueue.backends.priority.levels import LevelStarts
from pyqueue.backends.transaction_locks import LockedMessages
from pyqueue.documents import eligible_since
from pyqueue.limits import FollowedLimit
from pyqueue.requests import Document

#: The order of positions, whatever the order in which a kind claims.
SCAN_ORDER: Final = (("when", 1), ("_id", 1))

#: The server puts no more than this into one batch of documents, except for a first document.
BATCH_BYTES: Final = 16 * 2**20

#: Earlier than every message.
FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: How far below the latest ``when`` a racing producer may insert and still be found without a
#: rescan.
SLACK: Final = timedelta(milliseconds=500)
#: The time between rescans of a busy queue.
BUSY_RESCAN_S: Final = 5.0
#: The time to the first rescan of a queue that has become idle; it doubles with each rescan.
IDLE_RESCAN_S: Final = 1.0
#: A rescan is not repeated before this many times its own duration has passed.
RESCAN_REST_FACTOR: Final = 50
#: That duration is the shortest of so many rescans.
JUDGED_RESCANS: Final = 4
#: The longest such rest. A message without a signal may wait for the rescan after it.
MAX_RESCAN_REST_S: Final = 60.0
#: Instants that go back further than this mean that the clock was set.
CLOCK_STEP: Final = timedelta(seconds=1)
#: An empty scan that takes longer is walking over deleted entries that lie ahead of now.
SLOW_SCAN: Final = timedelta(milliseconds=2)
#: The mean time between two passes of a client over the handovers of all queues.
SWEEP_INTERVAL: Final = timedelta(seconds=60)
#: How long the server keeps deleted index entries.
TOMBSTONE_LIFETIME: Final = timedelta(seconds=300)


def due_of(document: Document) -> datetime:
    """Return when a message became eligible, or FIRST if the stored value is not a date."""
    return eligible_since(document) or FIRST


def scan_position(document: Document, now: datetime) -> ScanStart:
    """Return the position of a message in scan order.

    For a reclaimed message, and for a document of another program, it is a safe lower bound.
    """
    id, due = document["_id"], due_of({name: document.get(name) for name in ("due", "when")})
    return due if due <= now else FIRST, id if isinstance(id, (ObjectId, str)) else None


def page_end(page: Sequence[Document]) -> ScanStart | None:
    """Return where the scan goes on after a page; None if all of it is foreign documents."""
    for document in reversed(page):
        when, id = document["when"], document["_id"]
        if isinstance(when, datetime) and isinstance(id, (ObjectId, str)):
            return when, id
    return None


@dataclass(slots=True)
class GroupLooks:
    """What this process knows about the groups of an ordered queue."""

    #: Whether the last look met messages whose group was locked. Otherwise the next look expects
    #: none, and the unique index tells it.
    meets_locks: bool = True
    #: Whether the last look saw messages that wait for others, and little else.
    crowded: bool = False
    #: The group behind which the next walk over the groups goes on.
    walked_to: str = ""


@dataclass(slots=True)
class Sweep:
    """When a client finishes the handovers of all queues next. All its queues share it."""

    at: datetime | None = None

    def is_due(self, now: datetime) -> bool:
        """Return whether it is time, and set the next one, at random."""
        due = self.at is not None and now >= self.at
        if due or self.at is None or self.at > now + 2 * SWEEP_INTERVAL:
            self.at = now + SWEEP_INTERVAL * random.uniform(0.5, 1.5)
        return due


@dataclass(slots=True)
class Recovery:
    """What this process knows about the handovers of processes that died."""

    sweep: Sweep = field(default_factory=Sweep)
    #: When to look for them next, and where the last such look ended.
    at: datetime | None = None
    ended: ScanStart | None = None


@dataclass(slots=True)
class ScanState:
    """What one process knows about the head of a queue between two scans."""

    paused: bool = False
    limit: FollowedLimit = field(default_factory=FollowedLimit)
    #: When the pause flag was last read; None: read it again.
    flag_read: datetime | None = None
    #: The next known ``when`` in the future, whether it is up to date, and when it was last read.
    due: datetime | None = None
    due_known: bool = False
    due_read: datetime | None = None

    #: Whether another process took part of what the last claim saw. The next claim then looks
    #: further on, so that the two do not chase each other.
    contested: bool = False
    #: How many messages the last claim of several tried to take.
    last_claim: int = 0
    #: The size in bytes of the largest message, when a claim last looked at sizes.
    largest_seen: int = BATCH_BYTES
    #: The messages that claims pass over, because a transaction holds them.
    locked: LockedMessages = field(default_factory=LockedMessages)
    #: No message is known below it.
    lower_bound: ScanStart | None = None
    #: The same for each level of a queue with priorities. Then ``lower_bound`` is that by age.
    levels: LevelStarts = field(default_factory=LevelStarts)
    groups: GroupLooks = field(default_factory=GroupLooks)
    #: When to rescan next; None: now.
    rescan_at: datetime | None = None
    recovery: Recovery = field(default_factory=Recovery)
    _idle_rescan_s: float = IDLE_RESCAN_S
    #: How long the last rescans took. A stall makes a few of them slow, a long way makes all slow.
    _rescans_took_s: tuple[float, ...] = (0.0,) * JUDGED_RESCANS
    #: The last instant that this state was used with.
    _observed: datetime = FIRST
    #: The earliest ``when`` that was announced since the last scan began.
    _announced: datetime | None = None
    #: Until when the sentinel is useful, and until when it stands.
    sentinel_until: datetime | None = None
    sentinel: datetime | None = None

    def observe(self, now: datetime) -> None:
        """Forget what was learnt by a clock that has been set back since."""
        if now < self._observed - CLOCK_STEP:
            self.forget()
        self._observed = now

    def start(self, now: datetime, *, by_level: bool = False) -> ScanStart | None:
        """Begin a scan: forget a due time that has passed, and return where to begin.

        None means at the very start, which is a rescan. A scan ``by_level`` begins at the starts of
        the levels else, and no scan by age is behind a rescan.
        """
        if self.due is not None and self.due <= now:
            self.move_start_back(self.due)
            self.due, self.due_known = None, False
        self._announced = None
        if self.rescan_at is None or self.rescan_at <= now:
            if self.levels.in_use:
                self.levels.begin_rescan()
                self.lower_bound = None  # so does the next scan by age
            return None
        return (FIRST, None) if by_level else self.lower_bound

    def scanned(
        self,
        start: ScanStart | None,
        now: datetime,
        after: datetime,
        last: ScanStart | None,
        poll_s: float,
        *,
        ended: bool,
        by_level: bool = False,
        level: object = None,
    ) -> None:
        """Learn from a scan.

        Args:
            start: where it began; None: a rescan.
            now: when it began.
            after: when it was answered.
            last: the last message that it found; None: it found nothing.
            poll_s: the longest time between rescans of an idle queue, in seconds.
            ended: whether it saw the end of what is ready.
            by_level: whether it scanned by level.
            level: the level of the last message that it found.
        """
        if after < now - CLOCK_STEP:
            self.forget()  # the clock was set back meanwhile: new messages lie below this scan
            return
        # Racing producers may still insert above this margin.
        margin: ScanStart = (now - SLACK, None)
        if last is not None or ended:
            if by_level:
                self.levels.learn(None if ended else level, last, margin)
            else:
                self.lower_bound = last if last is not None and last[0] < margin[0] else margin
            if self._announced is not None:
                self.move_start_back(self._announced)  # it arrived during the scan
        if last is not None:
            self._idle_rescan_s = IDLE_RESCAN_S
        # Of several concurrent rescans, the first sets the time of the next.
        if start is None and (self.rescan_at is None or self.rescan_at <= now):
            took_s = (after - now).total_seconds()
            self._rescans_took_s = (*self._rescans_took_s[1:], took_s)
            cost_s = min(self._rescans_took_s)
            rest_s = BUSY_RESCAN_S if last is not None and not ended else self._idle_rescan_s
            rest_s = max(rest_s, min(RESCAN_REST_FACTOR * cost_s, MAX_RESCAN_REST_S))
            self.rescan_at = after + _seconds(rest_s)
            if last is None:
                self._idle_rescan_s = min(self._idle_rescan_s * 2, max(poll_s, IDLE_RESCAN_S))
        elif start is not None and last is None and self.rescan_at is not None:
            self.rescan_at = min(self.rescan_at, now + _seconds(self._idle_rescan_s))
        if (last is None or by_level) and after - now >= SLOW_SCAN:
            self.sentinel_until = after + TOMBSTONE_LIFETIME

    def move_start_back(self, when: datetime) -> None:
        """Make the next scan find messages from ``when`` on."""
        self._announced = when if self._announced is None else min(when, self._announced)
        if self.lower_bound is not None and when <= self.lower_bound[0]:
            self.lower_bound = (when, None)
        if self.levels.starts:
            self.levels.move_back(when)

    def on_signal(self, when: datetime) -> None:
        """Learn from the bus that the queue has a message from ``when`` on."""
        self._idle_rescan_s = IDLE_RESCAN_S
        self.due_known = False  # the bus merges events and passes on the earliest ``when`` only
        self.move_start_back(when)

    def on_missed_signals(self) -> None:
        """Expect messages anywhere: the bus may have lost events."""
        self.on_signal(FIRST)
        self.flag_read = None

    def forget(self) -> None:
        """Know nothing of the messages, as in a new process: messages may be anywhere."""
        self.on_missed_signals()
        self.due = self.due_read = self.rescan_at = None

    def wake_at(self, when: datetime) -> None:
        """Remember that a message becomes eligible at ``when``."""
        if self.due is None or when < self.due:
            self.due = when

    def wants_sentinel(self, now: datetime) -> bool:
        """Return whether the record of the queue should move ahead of now, where scans end."""
        if self.sentinel_until is None or now >= self.sentinel_until:
            return False
        return self.sentinel is None or self.sentinel - now < _seconds(1)


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
