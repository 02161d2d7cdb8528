"""Where scans of a queue begin, so that the cost of a claim does not grow with earlier claims.

A replica set keeps deleted index entries for minutes. A FIFO queue deletes at its head, so a scan
that began there would walk over all of them. Therefore each process remembers a lower bound, below
which it knows of no message, and a scan begins at that bound. Messages can still arrive below it,
after a slow insert, a lapsed lease or a lost signal. From time to time, a *rescan* begins at the
very start and finds them. If a process loses this state, its next scan is slow; no message is lost.

This module is pure: the instant is always an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, Protocol, TypeVar, cast

from bson import ObjectId

from pyqueue.backends.kind import Kind, Ordering, ScanStart
from pyqueue.backends.transaction_locks import LockedMessages
from pyqueue.documents import eligible_since
from pyqueue.limits import FollowedLimit
from pyqueue.requests import Document, Filter

#: The order of positions, whatever the order in which a kind claims.
SCAN_ORDER: Final = (("when", 1), ("_id", 1))

#: The maximum size of a batch of documents from the server, unless its first document is larger.
BATCH_BYTES: Final = 16 * 2**20

#: An instant before every message.
FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: How far below the latest ``when`` a racing producer's insert is found without a rescan.
SLACK: Final = timedelta(milliseconds=500)
#: The time between rescans of a busy queue.
BUSY_RESCAN_S: Final = 5.0
#: The time to the first rescan of a queue that has become idle; it doubles with each rescan.
IDLE_RESCAN_S: Final = 1.0
#: A rescan is not repeated before this many times its own duration has passed.
RESCAN_REST_FACTOR: Final = 50
#: The duration that counts for this is the shortest one of this many rescans.
JUDGED_RESCANS: Final = 4
#: The longest rest between rescans. A message whose signal was lost may wait that long.
MAX_RESCAN_REST_S: Final = 60.0
#: If the time goes back further than this, the clock was set.
CLOCK_STEP: Final = timedelta(seconds=1)
#: An empty scan that takes longer than this is walking over deleted entries ahead of now.
SLOW_SCAN: Final = timedelta(milliseconds=2)
#: How long the server keeps deleted index entries.
TOMBSTONE_LIFETIME: Final = timedelta(seconds=300)


def due_of(document: Document) -> datetime:
    """Return when a message became eligible, or FIRST if the stored value is not a date."""
    return eligible_since(document) or FIRST


def scan_position(document: Document, now: datetime) -> ScanStart:
    """Return the position of a message in scan order.

    For a reclaimed message, and for a document of another program, this is a safe lower bound.
    """
    id, due = document["_id"], due_of({name: document.get(name) for name in ("due", "when")})
    return due if due <= now else FIRST, id if isinstance(id, (ObjectId, str)) else None


class Scanned(NamedTuple):
    """The result of a scan."""

    #: Where it began, or None for a rescan.
    start: ScanStart | None
    #: When it began, and when it was answered.
    began: datetime
    answered: datetime
    #: The last message that it found, or None if it found nothing.
    last: ScanStart | None
    #: Whether the scan reached the end of the ready messages.
    ended: bool
    #: The priority of the last message.
    level: object = None


class Line(Protocol):
    """An order in which messages are claimed, and where the scans in that order begin."""

    #: Whether a scan goes over several ranges of an index, one after the other. If so, a claim
    #: takes the first messages even when other processes compete, and a scan that finds something
    #: may be slow.
    in_ranges: ClassVar[bool]
    #: The fields that a scan reads of each message, besides its place.
    fields: ClassVar[Mapping[str, int]]

    def ordering(self, kind: Kind) -> Ordering:
        """Return the order, and the index that provides it."""

    def start(self) -> ScanStart | None:
        """Return where the next scan begins, or None for the very start."""

    def claimable(self, kind: Kind, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches the messages that may be claimed, from ``start`` on."""

    def learn(self, seen: Scanned, margin: ScanStart) -> None:
        """Learn where the next scan begins. Producers may still insert above ``margin``."""

    def move_back(self, when: datetime) -> None:
        """Make the next scan find messages from ``when`` on."""


class Memory:
    """A process's memory of a queue, in the form that the queue's kind needs."""

    __slots__ = ()

    def move_back(self, when: datetime) -> None:
        """Learn that there may be messages from ``when`` on."""

    def begin_rescan(self) -> bool:
        """Learn that messages may be anywhere. Return whether the next scan by age is a rescan."""
        return False

    def records(self, queue: str) -> Sequence[str]:
        """Return the ids of further records that mark the place ahead of now where scans end."""
        return ()


M = TypeVar("M", bound=Memory)


@dataclass(slots=True)
class GroupLooks:
    """This process's knowledge of the groups of an ordered queue."""

    #: Whether the last scan met messages of locked groups. Otherwise the next scan expects none;
    #: if there are some, the unique index rejects the claim.
    meets_locks: bool = True
    #: Whether almost all messages that the last scan met wait for other messages.
    crowded: bool = False
    #: The group after which the next walk over the groups continues.
    walked_to: str = ""
    #: Whether the next scan has to walk, and rescan, because a correction of deferrals failed.
    must_walk: bool = False


@dataclass(slots=True)
class _RescanPace:
    """How often to rescan."""

    #: The rest after a rescan that finds nothing, in seconds.
    idle_s: float = IDLE_RESCAN_S
    #: How long the last rescans took. A stall slows a few rescans; a long range slows every rescan.
    took_s: tuple[float, ...] = (0.0,) * JUDGED_RESCANS

    def rest_s(self, rescan: Scanned, poll_s: float) -> float:
        """Take a rescan into account. Return how many seconds to rest after it."""
        took_s = (rescan.answered - rescan.began).total_seconds()
        self.took_s = (*self.took_s[1:], took_s)
        is_busy = rescan.last is not None and not rescan.ended
        rest_s = BUSY_RESCAN_S if is_busy else self.idle_s
        if rescan.last is None:
            self.idle_s = min(self.idle_s * 2, max(poll_s, IDLE_RESCAN_S))
        return max(rest_s, min(RESCAN_REST_FACTOR * min(self.took_s), MAX_RESCAN_REST_S))


@dataclass(slots=True)
class Sentinel:
    """The record of a queue, which marks the place ahead of now where scans end."""

    #: Until when the place ahead of now is useful, and the ``when`` of the record.
    until: datetime | None = None
    at: datetime | None = None
    #: How long the scan took for which the record was moved, and the last scan that ended there.
    took: timedelta = timedelta()
    least: timedelta = timedelta()

    def judge(self, took: timedelta, now: datetime) -> None:
        """Learn from a scan whether deleted entries ahead of now slow scans down.

        On a slow network or a busy machine, scans that end at the record take as long.
        """
        if self.at is not None and now - took < self.at:
            self.least = took
            if self.took < 2 * took:
                self.until = None
        elif took >= max(SLOW_SCAN, 2 * self.least):
            self.until, self.took = now + TOMBSTONE_LIFETIME, took
        else:
            self.least = min(self.least, took)

    def is_due(self, now: datetime) -> bool:
        """Return whether the record should move ahead of now."""
        if self.until is None or now >= self.until:
            return False
        return self.at is None or self.at - now < timedelta(seconds=1)


@dataclass(slots=True)
class ScanState:
    """One process's knowledge of the head of a queue between two scans."""

    paused: bool = False
    limit: FollowedLimit = field(default_factory=FollowedLimit)
    #: When the pause flag was last read, or None to read it again.
    flag_read: datetime | None = None
    #: The next known ``when`` in the future, whether it is up to date, and when it was last read.
    due: datetime | None = None
    due_known: bool = False
    due_read: datetime | None = None

    #: Whether another process took some candidates of the last claim. The next claim then skips
    #: ahead, so that the two do not chase each other.
    contested: bool = False
    #: How many messages the last claim of several tried to take.
    last_claim: int = 0
    #: The size in bytes of the largest message in the last claim that measured sizes.
    largest_seen: int = BATCH_BYTES
    #: The messages that claims pass over because a transaction holds them.
    transaction_locks: LockedMessages = field(default_factory=LockedMessages)
    #: The position below which no message is known.
    lower_bound: ScanStart | None = None
    #: The memories that the queue's kind needs, keyed by class.
    memories: dict[type[Memory], Memory] = field(default_factory=dict)
    groups: GroupLooks = field(default_factory=GroupLooks)
    #: When to rescan next, or None for now.
    rescan_at: datetime | None = None
    _pace: _RescanPace = field(default_factory=_RescanPace)
    #: The instant of the last call of ``observe``.
    _observed: datetime = FIRST
    #: The earliest ``when`` that was announced since the last scan began.
    _announced: datetime | None = None
    sentinel: Sentinel = field(default_factory=Sentinel)

    def observe(self, now: datetime) -> None:
        """Forget everything if the clock has been set back."""
        if now < self._observed - CLOCK_STEP:
            self.forget()
        self._observed = now

    def of(self, memory: type[M]) -> M:
        """Return this process's memory of this class; create it if it is missing."""
        return cast("M", self.memories.setdefault(memory, memory()))

    def start(self, now: datetime, line: Line | None = None) -> ScanStart | None:
        """Begin a scan: forget a due time that has passed, and return where to begin.

        None means the very start: the scan is a rescan. If ``line`` is None, the scan is by age.
        """
        if self.due is not None and self.due <= now:
            self.move_start_back(self.due)
            self.due, self.due_known = None, False
        self._announced = None
        if self.wants_rescan(now):
            self.groups.must_walk = False
            for each in list(self.memories.values()):
                if each.begin_rescan():
                    self.lower_bound = None  # so that the next scan by age is a rescan, too
            return None
        return self.lower_bound if line is None else line.start()

    def wants_rescan(self, now: datetime) -> bool:
        """Return whether the next scan has to begin at the very start."""
        return self.groups.must_walk or self.rescan_at is None or self.rescan_at <= now

    def scanned(self, seen: Scanned, poll_s: float, line: Line | None = None) -> None:
        """Update this state from the result of a scan.

        Args:
            seen: The result of the scan.
            poll_s: The longest time between rescans of an idle queue, in seconds.
            line: The order of the scan, or None for the order by age.
        """
        order: Line = line or ByAge(self)
        began, found = seen.began, seen.last is not None
        if seen.answered < began - CLOCK_STEP:
            self.forget()  # the clock was set back during the scan: new messages lie below it
            return
        if found or seen.ended:
            order.learn(seen, (began - SLACK, None))  # racing producers may insert above this
            if self._announced is not None:
                self.move_start_back(self._announced)  # it arrived during the scan
        if found:
            self._pace.idle_s = IDLE_RESCAN_S
        self._plan_rescan(seen, poll_s)
        if order.in_ranges or not found:  # it goes on to what is ahead of now
            self.sentinel.judge(seen.answered - began, seen.answered)

    def _plan_rescan(self, seen: Scanned, poll_s: float) -> None:
        """Set the time of the next rescan after a scan."""
        if seen.start is None:
            # Of several concurrent rescans, the first sets the time of the next.
            if self.wants_rescan(seen.began):
                self.rescan_at = seen.answered + timedelta(seconds=self._pace.rest_s(seen, poll_s))
        elif seen.last is None and self.rescan_at is not None:
            self.rescan_at = min(self.rescan_at, seen.began + timedelta(seconds=self._pace.idle_s))

    def move_start_back(self, when: datetime) -> None:
        """Make the next scan find messages from ``when`` on."""
        self._announced = when if self._announced is None else min(when, self._announced)
        if self.lower_bound is not None and when <= self.lower_bound[0]:
            self.lower_bound = (when, None)
        for each in list(self.memories.values()):
            each.move_back(when)

    def on_signal(self, when: datetime) -> None:
        """Note that the bus announced a message that becomes ready at ``when``."""
        self._pace.idle_s = IDLE_RESCAN_S
        self.due_known = False  # the bus merges events and passes on the earliest ``when`` only
        self.move_start_back(when)

    def on_missed_signals(self) -> None:
        """Make the next scan find messages anywhere, because the bus may have lost events."""
        self.on_signal(FIRST)
        self.flag_read = None

    def forget(self) -> None:
        """Forget all positions, as in a new process, because messages may be anywhere."""
        self.on_missed_signals()
        self.due = self.due_read = self.rescan_at = None

    def wake_at(self, when: datetime) -> None:
        """Remember that a message becomes eligible at ``when``."""
        if self.due is None or when < self.due:
            self.due = when


class ByAge:
    """The kind's usual order: in most kinds, by the time at which messages became ready."""

    __slots__ = ("state",)
    in_ranges: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, state: ScanState) -> None:
        self.state = state

    def ordering(self, kind: Kind) -> Ordering:
        """Return the order, and the index that provides it."""
        return Ordering(kind.order, kind.index)

    def start(self) -> ScanStart | None:
        """Return where the next scan begins, or None for the very start."""
        return self.state.lower_bound

    def claimable(self, kind: Kind, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches the messages that may be claimed, from ``start`` on."""
        return kind.claimable(queue, now, start)

    def learn(self, seen: Scanned, margin: ScanStart) -> None:
        """Learn where the next scan begins. Producers may still insert above ``margin``."""
        last = seen.last
        self.state.lower_bound = last if last is not None and last[0] < margin[0] else margin

    def move_back(self, when: datetime) -> None:
        """Make the next scan find messages from ``when`` on."""
        bound = self.state.lower_bound
        if bound is not None and when <= bound[0]:
            self.state.lower_bound = (when, None)
