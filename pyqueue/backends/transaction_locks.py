"""Messages that an open transaction holds, and how claims get past them.

A transaction keeps the messages that it changed until it ends. If a process is killed, the server
ends its transaction after up to a minute. An update that meets such a message waits for it, so a
single locked message could stop every consumer of its queue. Therefore the server ends a claim
after ``CLAIM_LIMIT_S``. The process then reads the next candidates, because reads do not wait, and
tries each of them alone. It excludes messages that time out again from its next claims. Later, it
retries each of them alone.

A slow server has the same symptoms. So a message counts as locked only if another write to the same
queue finishes within the limit. Otherwise claims get a longer limit for a while, and in the end no
limit. Then the short limit returns: after a fail-over, a server is slow only for a moment.

A claim that the server ends has written nothing, because a claim waits for no other member. If a
reply is lost after the write, the token finds the message, or its lease lapses. A pop that deletes
can wait for other members after it has deleted, so it never gets this limit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.backends.kind import Ordering
from pyqueue.backends.transitions import record_id, still_claimable
from pyqueue.documents import hashable_id
from pyqueue.errors import DuplicateKey, InvalidMessage, TimeLimitReached, Unavailable
from pyqueue.requests import Document, Filter, Find, FindAndModify, Plan, Update, UpdateDocument

log = logging.getLogger("pyqueue")

#: How long the server may work on a claim, in seconds. A claim takes a millisecond.
CLAIM_LIMIT_S: Final = 0.15
#: The least number of candidates to read and to try one at a time.
PAGE_SIZE: Final = 20
#: After this many time-outs in a row, the rest of the page is left for later.
MAX_TIMEOUTS_IN_A_ROW: Final = 3
#: How long a locked message is excluded at first. The pause doubles with each retry that times out.
FIRST_PAUSE: Final = timedelta(seconds=1)
LONGEST_PAUSE: Final = timedelta(seconds=60)
#: The time between retries that time out, in limits of one retry, so that they cost no more than a
#: fifth of a consumer's time; and between claims that try a page one by one.
RETRY_LIMITS, RELEASE_LIMITS = 5, 20
#: The longer limits for claims on a slow server, in seconds, and how long they apply.
SLOW_SERVER_LIMITS_S: Final = (4 * CLAIM_LIMIT_S, 16 * CLAIM_LIMIT_S, None)
SLOW_SERVER_INTERVAL: Final = timedelta(seconds=10)
#: How long a process expects locked messages after a claim timed out.
EXPECTED_FOR: Final = timedelta(seconds=60)
#: After a bulk claim was blocked, messages are claimed one by one for this many times as long.
BLOCKED_PAUSE: Final = 4
#: The fields that are read of each message.
PLACE: Final = {"_id": 1, "when": 1}
#: How far ahead of now the record of a queue is put. See ``scan.Sentinel``.
RECORD_AHEAD: Final = timedelta(seconds=2)


class Exclusion(NamedTuple):
    """A message that claims pass over."""

    id: Any
    #: Its place in the queue.
    when: datetime
    #: The current pause, which doubles if the retry times out. Zero if not yet tried alone.
    pause: timedelta
    retry_at: datetime


@dataclass(slots=True)
class LockedMessages:
    """One process's knowledge of the locked messages of a queue."""

    #: The excluded messages, keyed by id. Threads share this mapping, which is only ever replaced.
    excluded: Mapping[Hashable, Exclusion] = field(default_factory=dict)
    #: The messages that were excluded when messages were last readmitted.
    _readmitted: Mapping[Hashable, Exclusion] = field(default_factory=dict)
    #: The earliest time of the next retry.
    _next_retry: datetime | None = None
    #: How many longer limits were too short, and until when this counts.
    _too_short: int = 0
    _slow_until: datetime | None = None
    _expected_until: datetime | None = None
    #: Until when claims with an update for each message claim one by one, on the monotonic clock.
    singly_until: float = -math.inf

    def limit_s(self, now: datetime) -> float | None:
        """Return the server's time limit for a claim, in seconds, or None on a very slow server."""
        if not _before(now, self._slow_until):
            return CLAIM_LIMIT_S
        return SLOW_SERVER_LIMITS_S[self._too_short]

    def try_limit_s(self, now: datetime) -> float:
        """Return the limit for a claim of one message, which is longer on a slow server, too."""
        return min(self.limit_s(now) or math.inf, SLOW_SERVER_LIMITS_S[0])

    def expected(self, now: datetime) -> bool:
        """Return whether claims are likely to meet locked messages."""
        return bool(self.excluded) or _before(now, self._expected_until)

    def on_time_limit(self, now: datetime) -> None:
        """Note that a claim timed out."""
        self._expected_until = now + EXPECTED_FOR

    def on_blocked_claim(self, began: float, ended: float) -> None:
        """Note that a claim with an update for each message was blocked during this time."""
        self.singly_until = ended + BLOCKED_PAUSE * (ended - began)

    def on_slow_server(self, began: datetime, ended: datetime) -> None:
        """Note that every write of a claim timed out, so that claims get a longer limit."""
        was_slow = _before(began, self._slow_until)
        longest = len(SLOW_SERVER_LIMITS_S) - 1
        self._too_short = min(self._too_short + 1, longest) if was_slow else 0
        self._slow_until = ended + SLOW_SERVER_INTERVAL

    def exclude(
        self, now: datetime, timed_out: Sequence[Document], untried: Sequence[Document]
    ) -> None:
        """Pass over locked messages and untried messages behind them until each is tried alone."""
        for each in timed_out:
            former = self._readmitted.get(hashable_id(each["_id"]))
            self._exclude(now, each["_id"], each["when"], former.pause if former else timedelta())
        for each in untried:
            self._exclude(now, each["_id"], each["when"], None)

    def exclude_again(self, now: datetime, exclusion: Exclusion) -> None:
        """Note that the retry of an excluded message timed out, and extend its pause."""
        self._exclude(now, exclusion.id, exclusion.when, exclusion.pause)
        self._next_retry = now + timedelta(seconds=RETRY_LIMITS * self.try_limit_s(now))

    def _exclude(self, now: datetime, id: Any, when: datetime, former: timedelta | None) -> None:
        pause = timedelta() if former is None else min(max(2 * former, FIRST_PAUSE), LONGEST_PAUSE)
        exclusion = Exclusion(id, when, pause, now + pause)
        self.excluded = {**self.excluded, hashable_id(id): exclusion}

    def forget(self, id: Any) -> None:
        """Stop passing over a message."""
        key = hashable_id(id)
        self.excluded = {each: self.excluded[each] for each in self.excluded if each != key}

    def to_retry(self, now: datetime) -> Exclusion | None:
        """Return the message to retry now: the one whose pause ended first."""
        if _before(now, self._next_retry):
            return None
        found = [each for each in self.excluded.values() if not _before(now, each.retry_at)]
        return min(found, key=lambda each: (each.retry_at, each.when), default=None)

    def readmit(self, now: datetime) -> None:
        """Stop excluding messages whose pause is over; between retries, only untried messages."""
        rest, items = _before(now, self._next_retry), self.excluded.items()
        kept = {
            id: each for id, each in items if (rest and each.pause) or _before(now, each.retry_at)
        }
        if not rest and len(kept) < len(items):
            rest_s = RELEASE_LIMITS * self.try_limit_s(now)
            self._next_retry, self._readmitted = now + timedelta(seconds=rest_s), self.excluded
        self.excluded = kept

    @property
    def retry_at(self) -> datetime | None:
        """When to retry next, or None if nothing is excluded."""
        first = min((each.retry_at for each in self.excluded.values()), default=None)
        if first is None or self._next_retry is None:
            return first
        return max(first, self._next_retry)

    @property
    def first_when(self) -> datetime | None:
        """The ``when`` of the first excluded message, or None if none is excluded."""
        return min((each.when for each in self.excluded.values()), default=None)

    def passing_over(self, match: Filter, page: Sequence[Document] = ()) -> Filter:
        """Return a filter without the excluded messages and without the messages of a page."""
        ids = [*(each.id for each in self.excluded.values()), *(each["_id"] for each in page)]
        return {"$and": [match, {"_id": {"$nin": ids}}]} if ids else match


def _before(now: datetime, until: datetime | None) -> bool:
    """Return whether ``until`` is ahead, but not so far ahead that the clock was set back."""
    return until is not None and now < until <= now + LONGEST_PAUSE


# ---- plans


class OneByOne(NamedTuple):
    """How one process claims messages of a queue one by one."""

    queue: str
    update: UpdateDocument
    now: datetime
    #: The end of the permits to start messages, or None if no permit is needed.
    until: datetime | None
    #: Buries the malformed message that matches a filter, given the refusal of the server.
    bury: Callable[[Filter, InvalidMessage, datetime], Plan[None]]

    def claim(self, id: Any, limit_s: float | None) -> Plan[int]:
        """Claim a message that is free. Return 1, or 0 if it could not be claimed or was buried.

        Raises:
            TimeLimitReached: A transaction may hold the message, or the server is slow.
        """
        one = still_claimable(self.queue, [id], self.now, self.until)
        try:
            change = yield from Update(one, self.update, w1=True, server_limit_s=limit_s)
        except DuplicateKey:
            return 0  # another message of its group is held, or another has its slot
        except InvalidMessage as refusal:
            yield from self.bury(one, refusal, self.now)
            return 0
        return change.matched


def retry_excluded(claims: OneByOne, locked: LockedMessages, wanted: int) -> Plan[int]:
    """Claim excluded messages whose pause is over, one at a time. Return how many were claimed."""
    claimed = 0
    while claimed < wanted and (exclusion := locked.to_retry(claims.now)) is not None:
        try:
            claimed += yield from claims.claim(exclusion.id, locked.try_limit_s(claims.now))
        except Unavailable:
            locked.exclude_again(claims.now, exclusion)
        else:
            locked.forget(exclusion.id)  # it is ours, or no longer free, or its group is held
    return claimed


def claim_unlocked(
    claims: OneByOne, ordering: Ordering, locked: LockedMessages, match: Filter, wanted: int
) -> Plan[bool]:
    """Claim messages one by one after a claim timed out, and exclude the locked messages.

    Args:
        claims: How to claim one message, with the update that timed out and claimed nothing.
        ordering: The order and the index of the claim.
        locked: This process's knowledge of the locked messages of the queue.
        match: The filter of the claim that timed out.
        wanted: The maximum number of messages to claim.

    Returns:
        False if the server is slow: no write finished within the limit, and nothing was claimed.
    """
    now, limit_s = claims.now, locked.try_limit_s(claims.now)
    locked.on_time_limit(now)
    size = max(PAGE_SIZE, wanted, 2 * len(locked.excluded))
    page = yield from Find(match, PLACE, sort=ordering.sort, limit=size, hint=ordering.hint)
    claimed = in_a_row = tried = 0
    timed_out = []
    for each in page:
        if claimed == wanted or in_a_row == MAX_TIMEOUTS_IN_A_ROW:
            break
        tried += 1
        try:
            claimed += yield from claims.claim(each["_id"], limit_s)
            in_a_row = 0
        except TimeLimitReached:
            timed_out.append(each)
            in_a_row += 1
    if not timed_out:
        return True
    untried = page[tried:] if in_a_row == MAX_TIMEOUTS_IN_A_ROW else []
    behind = locked.passing_over(match, page)
    if not claimed and not (yield from _is_quick(claims, ordering, behind, limit_s)):
        return False
    log.warning(
        "queue %r: a transaction holds %s; claims pass over it until the transaction ends",
        claims.queue,
        ", ".join(f"message {each['_id']}" for each in timed_out),
    )
    locked.exclude(now, timed_out, untried)
    return True


def _is_quick(claims: OneByOne, ordering: Ordering, behind: Filter, limit_s: float) -> Plan[bool]:
    """Return whether a claim behind the locked messages, or a write to the record, is in time.

    If no other message is free, the write to the record decides. The caller of ``claim_unlocked``
    finds a message that this claims: it reads all messages with the token of ``claims.update``.
    """
    sort, index = ordering
    try:
        claimed = yield from FindAndModify(
            behind, claims.update, sort=sort, hint=index, w1=True, server_limit_s=limit_s
        )
        if claimed is not None:
            return True
    except (DuplicateKey, InvalidMessage):
        return True  # the server refused it in time; the next claim finds a malformed document
    except TimeLimitReached:
        pass
    # Ahead of now, the record marks where scans end; see ``scan.Sentinel``.
    record = {"_id": record_id(claims.queue)}
    ahead = {"$set": {"when": claims.now + RECORD_AHEAD}}
    try:
        change = yield from Update(record, ahead, w1=True, server_limit_s=limit_s)
    except TimeLimitReached:
        return False
    return change.matched > 0  # without a record, nothing was written in time
