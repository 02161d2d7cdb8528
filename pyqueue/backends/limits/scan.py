"""Claim from a queue with a limit: as many of the first messages as may start.

A look reads a page of what is ready, in the order of the queue, asks how many messages of each key
may start, and claims the first ones. Without ``per``, what is left waits where it is. With ``per``,
a look that finds too few defers what is in its way. The end of a claim lets the next ones go on, so
that consumers that wait look at once; see ``slots`` and ``waiting``. ``pacing`` adds a rate
without ``per``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue.backends.byte_limit import ByteLimit
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.claiming import MAX_CLAIM, Taken, take_first
from pyqueue.backends.limits import slots
from pyqueue.backends.limits import waiting as limit_waiting
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.limits.slots import FreeSlots
from pyqueue.backends.scan import ScanState
from pyqueue.backends.turns import MAX_PAGE
from pyqueue.documents import hashable_id
from pyqueue.errors import Unavailable
from pyqueue.limits import Limit, key_of
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime

#: What a look reads of each message.
FIELDS: Final = dict.fromkeys(("_id", "when", "due", "limited"), 1)
#: How many messages a look reads for each one that is wanted, beside competing processes.
PAGE_FACTOR: Final = 4
#: How long a process waits at most before it looks for other keys behind a page again.
BEHIND_PAUSE: Final = timedelta(seconds=1)
#: The least size of a page whose messages may have different keys.
LEAST_PAGE: Final = 50


def walk(queue: str, scan: ScanState) -> Plan[None]:
    """Look at the next keys of which messages wait, from time to time; see ``waiting``."""
    limit = scan.limit.limit
    if limit is not None and limit.per is not None:
        after = scan.groups.walked_to
        scan.groups.walked_to = yield from limit_waiting.walk(queue, scan.limit, after)


@dataclass(slots=True)
class _Look:
    """What one look has found out about the messages of its page."""

    limit: Limit
    page: list[Document]
    #: The messages of the page that were claimed or deferred.
    done: set[Hashable] = field(default_factory=set)

    def choose(
        self,
        free: Mapping[str, FreeSlots],
        wanted: int,
        order: Sequence[Document],
        most: Mapping[str, int] | None = None,
    ) -> list[tuple[Document, str]]:
        """Return the messages to claim, each with its slot. ``most``: how many of each key."""
        names = {
            key: each.names[: None if most is None else most[key]] for key, each in free.items()
        }
        chosen: list[tuple[Document, str]] = []
        for each in order:
            if len(chosen) < wanted and (left := names[key_of(self.limit, each)]):
                chosen.append((each, left.pop()))
        return chosen

    def within(
        self, chosen: Sequence[tuple[Document, str]], permits: Mapping[str, int]
    ) -> list[tuple[Document, str]]:
        """Return the first messages that were chosen, as many of each key as have permits."""
        left = Counter(permits)
        found = []
        for each in chosen:
            key = key_of(self.limit, each[0])
            left[key] -= 1
            if left[key] >= 0:
                found.append(each)
        return found

    def count(self, documents: Iterable[Document]) -> Counter[str]:
        """Return how many messages each key has."""
        return Counter(key_of(self.limit, each) for each in documents)

    def leaves_few(
        self, free: Mapping[str, FreeSlots], chosen: Sequence[tuple[Document, str]]
    ) -> bool:
        """Return whether the slots of a key may soon be taken."""
        used = self.count(each for each, _ in chosen)
        half = (self.limit.concurrency or 0) / 2
        return any(each.number - used[key] < half for key, each in free.items())

    def headers(self) -> list[Any]:
        """Return the values of the header of its messages; None if one lacks it."""
        found = [each.get("headers") for each in self.page]
        name = self.limit.header
        values = [each.get(name) if isinstance(each, Mapping) else None for each in found]
        return [*{hashable_id(each): each for each in values}.values()]

    def finished(self, documents: Sequence[Document]) -> None:
        """Learn which messages were claimed, or deferred."""
        self.done |= {hashable_id(each["_id"]) for each in documents}

    def left(self) -> list[Document]:
        """Return the messages of the page that are still ready, as far as is known."""
        return [each for each in self.page if hashable_id(each["_id"]) not in self.done]


def take(
    terms: ClaimTerms, scan: ScanState, match: Filter, now: datetime, wanted: int, room: ByteLimit
) -> Plan[Taken | None]:
    """Claim the first messages that may start."""
    scan.limit.blocked_until = None
    permits, (order, index) = Permits(terms.queue, scan.limit), terms.scan
    limit = permits.limit
    if limit is None:  # another thread has read that it is gone
        return (yield from take_first(terms, scan, match, now, wanted, room))
    fields: dict[str, Any] = {**FIELDS, "priority": 1} if terms.by_level else FIELDS
    if limit.per is not None:
        fields = {**fields, limit.per: 1, "token": 1}
    size = _page_size(scan, limit, wanted)
    page = yield from Find(match, fields, sort=order, limit=size, hint=index)
    if not page:
        scan.contested = scan.groups.crowded = False
        return [], None, True
    look = _Look(limit, page)
    useful = {key: min(number, wanted) for key, number in look.count(page).items()}
    free = yield from expected_slots(terms, scan, limit, useful, now)
    # By level, lower levels would come before higher ones.
    shuffled = scan.contested and not terms.by_level
    chosen = yield from _choose(look, permits, free, wanted, now, shuffled=shuffled)
    crowded = limit.per is not None and len(chosen) < wanted and len(page) == size
    few = len(chosen) < min(wanted, len(page)) and not permits.cut
    if crowded and not (yield from permits.spent()):
        rest = wanted - len(chosen)
        chosen += yield from _behind(terms, scan, look, permits, match, fields, rest)
    if late := (yield from permits.drop_late()):
        chosen, few = look.within(chosen, permits.held), False
    within, contested = terms._replace(until=permits.until or terms.until), scan.contested
    documents = yield from _claim_and_learn(within, scan, look, chosen, free, now, room)
    if documents is not None and len(documents) < len(chosen) and (yield from permits.late()):
        late, scan.contested = True, contested
    unused = yield from permits.give_back(look.count(documents or ()))
    if documents is None:
        return None
    look.finished([*documents, *room.excess])
    few = few and len(documents) == len(chosen)
    moved = False
    if limit.per is not None:
        scan.groups.crowded = few and crowded
        claimed = [each for each, _ in chosen if hashable_id(each["_id"]) in look.done]
        moved = yield from _let_wait(terms, scan, look, claimed, unused, now, few=few)
        if not chosen and not moved:  # other processes have changed what it saw
            start = None if permits.cut else scan.limit.first_start(now)
            scan.limit.blocked_until = start or now
    elif few:
        scan.limit.blocked_until = free[""].until or now
    if late:  # it comes back at once
        scan.limit.blocked_until = now
    left = look.left()
    if not left:
        return documents, {**page[-1], "due": page[-1]["when"]}, len(page) < size and not moved
    return documents, {**left[0], "_id": None, "due": left[0]["when"]}, False


def _page_size(scan: ScanState, limit: Limit, wanted: int) -> int:
    if limit.per is not None:
        return MAX_PAGE if scan.groups.crowded else max(LEAST_PAGE, PAGE_FACTOR * wanted)
    return max(wanted, min(wanted * PAGE_FACTOR, MAX_CLAIM)) if scan.contested else wanted


def expected_slots(
    terms: ClaimTerms, scan: ScanState, limit: Limit, useful: Mapping[str, int], now: datetime
) -> Plan[dict[str, FreeSlots]]:
    """Return the free slots of each key; as if all were free, unless a look met taken ones.

    ``useful``: how many are of use, by key.
    """
    if limit.concurrency is None:
        return slots.no_slots(useful)
    if not scan.limit.meets_slots and scan.limit.drain is None:
        return slots.any_slots(limit.concurrency, useful)
    return (yield from slots.free_slots(terms.queue, terms.kind, scan.limit, useful, now))


def _choose(
    look: _Look,
    permits: Permits,
    free: Mapping[str, FreeSlots],
    wanted: int,
    now: datetime,
    *,
    shuffled: bool = False,
) -> Plan[list[tuple[Document, str]]]:
    """Return the messages to claim, each with its slot, as many as have permits."""
    limit, page = look.limit, look.page
    order = random.sample(page, len(page)) if shuffled else page
    if limit.per is None or limit.rate is None:
        return look.choose(free, wanted, order)

    def choose(most: Mapping[str, int]) -> Mapping[str, int]:
        return look.count(each for each, _ in look.choose(free, wanted, order, most))

    most = {key: len(each.names) for key, each in free.items()}
    granted = yield from permits.ask(choose, most, now)
    return look.choose(free, wanted, order, granted)


def claim_free(
    terms: ClaimTerms,
    scan: ScanState,
    limit: Limit,
    page: Sequence[Document],
    free: Mapping[str, FreeSlots],
    now: datetime,
    room: ByteLimit,
) -> Plan[list[Document] | None]:
    """Claim the first messages of a page, each with a free slot. None: the server is too slow."""
    look = _Look(limit, list(page))
    order = random.sample(page, len(page)) if scan.contested else page
    chosen = look.choose(free, len(page), order)
    return (yield from _claim_and_learn(terms, scan, look, chosen, free, now, room))


def _claim_and_learn(
    terms: ClaimTerms,
    scan: ScanState,
    look: _Look,
    chosen: Sequence[tuple[Document, str]],
    free: Mapping[str, FreeSlots],
    now: datetime,
    room: ByteLimit,
) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot, and learn whether the next look may meet taken slots."""
    guessed = look.limit.concurrency is not None and not scan.limit.meets_slots
    documents: list[Document] = []
    if chosen:
        taken = yield from _claim(terms, scan, chosen, now, room)
        if taken is None:
            return None
        documents = taken
        scan.contested = not guessed and len(documents) < len(chosen)
    scan.limit.meets_slots = look.leaves_few(free, chosen) or len(documents) < len(chosen)
    return documents


def _claim(
    terms: ClaimTerms,
    scan: ScanState,
    chosen: Sequence[tuple[Document, str]],
    now: datetime,
    room: ByteLimit,
) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot. The result is None if the server is too slow."""
    if scan.locked.due(now) is not None:
        chosen = chosen[:1]
    while True:
        ids = [each["_id"] for each, _ in chosen]
        free = terms.free(ids, now)
        these = terms._replace(
            chosen=[each for each, _ in chosen],
            slots={hashable_id(each["_id"]): slot for each, slot in chosen if slot},
        )
        if len(ids) == 1:
            taken = yield from take_first(these, scan, free, now, 1, room)
            return None if taken is None else taken[0]
        # What stops a claim of several, such as a transaction, may spare a claim of one.
        with suppress(Unavailable):
            taken = yield from take_first(these, scan, free, now, len(ids), room)
            if taken is not None and (taken[0] or room.full):
                return taken[0]
        chosen = chosen[:1]


def _behind(
    terms: ClaimTerms,
    scan: ScanState,
    look: _Look,
    permits: Permits,
    match: Filter,
    fields: dict[str, Any],
    wanted: int,
) -> Plan[list[tuple[Document, str]]]:
    """Return messages of other keys than those that fill a page, each with its slot.

    The server reads all messages of these keys for it. So if there are no others, this process
    looks for them a quarter of its time at most.
    """
    limit, (order, index) = look.limit, terms.scan
    assert limit.per is not None
    others = {**match, limit.per: {"$nin": look.headers()}}
    now = yield from ServerTime()
    if scan.limit.behind_at is not None and now < scan.limit.behind_at <= now + BEHIND_PAUSE:
        return []
    page = yield from Find(others, fields, sort=order, limit=wanted, hint=index)
    if not page:
        after = yield from ServerTime()
        scan.limit.behind_at = after + min(3 * (after - now), BEHIND_PAUSE)
        return []
    other = _Look(limit, page)
    useful = other.count(page)
    if limit.concurrency is None:
        free = slots.no_slots(useful)
    else:
        free = yield from slots.free_slots(terms.queue, terms.kind, scan.limit, useful, now)
    return (yield from _choose(other, permits, free, wanted, now))


def _let_wait(
    terms: ClaimTerms,
    scan: ScanState,
    look: _Look,
    claimed: Sequence[Document],
    unused: Collection[str],
    now: datetime,
    *,
    few: bool,
) -> Plan[bool]:
    """Defer what is in the way of other keys, if there is too little else.

    What was claimed may have been deferred. Then the next ones of its key take its place.

    Args:
        terms: how the look claims.
        scan: what this process knows about the queue.
        look: the look.
        claimed: the messages that it claimed.
        unused: the keys of permits that it gave back.
        now: the instant.
        few: whether it found too few.

    Returns:
        Whether messages behind those may be ready now.
    """
    keys = {each["limited"] for each in claimed if isinstance(each.get("limited"), str)}
    keys |= set(unused)
    deferred = 0
    if few:
        waiting: dict[str, list[Document]] = {}
        for each in look.left():
            waiting.setdefault(key_of(look.limit, each), []).append(each)
        deferred = yield from limit_waiting.defer(terms.queue, terms.kind, waiting, now)
        if deferred == sum(map(len, waiting.values())):
            look.finished(look.left())
        keys |= waiting.keys()
        if limit_waiting.defers(look.limit, instead=scan.limit.limit):
            yield from limit_waiting.lift(terms.queue)  # another thread has read of a change
            return True
    restored = (yield from limit_waiting.restore(terms.queue, scan.limit, keys)) if keys else None
    return bool(deferred or (restored and restored.ready))
