"""Claim from a queue with a limit: take the first messages that may start.

A scan reads a page of ready messages in the order of the queue. It finds out how many messages of
each key may start, and claims the first of them. Without ``per``, other messages stay in place.
With ``per``, a scan that finds too few messages defers those that cannot start yet. The end of a
claim brings the next messages forward and wakes waiting consumers; see ``slots`` and ``waiting``.
``pacing`` adds a rate without ``per``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue.backends.claim_terms import Scan
from pyqueue.backends.claiming import MAX_CLAIM, Taken, take_first
from pyqueue.backends.limits import slots
from pyqueue.backends.limits import waiting as limit_waiting
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.limits.slot_claims import with_slots
from pyqueue.backends.limits.slots import FreeSlots
from pyqueue.backends.scan import ScanState, due_of
from pyqueue.backends.turns import MAX_PAGE, tidy_up
from pyqueue.documents import hashable_id
from pyqueue.errors import Unavailable
from pyqueue.limits import WHOLE_QUEUE, Limit, key_of
from pyqueue.requests import Document, Find, MonotonicTime, Plan, ServerTime

#: The fields that a scan reads of each message.
FIELDS: Final = dict.fromkeys(("_id", "when", "due", "limited"), 1)
#: How many messages a scan reads per wanted message, with ``per`` or if other processes compete.
PAGE_FACTOR: Final = 4
#: The longest pause after a search behind a page that found no message with another key.
BEHIND_PAUSE: Final = timedelta(seconds=1)
#: The minimum size of a page with ``per``, so that it may have messages of different keys.
LEAST_PAGE: Final = 50
#: How long a scan claims messages one by one, in seconds, if transactions may hold some of them.
ONE_BY_ONE_S: Final = 0.5


#: A message and its slot, or "" if it needs no slot.
Chosen = tuple[Document, str]


def walk(queue: str, state: ScanState) -> Plan[None]:
    """Correct the start times of deferred messages for the next keys; see ``waiting``."""
    limit = state.limit.limit
    if limit is not None and limit.per is not None:
        after = state.groups.walked_to
        state.groups.walked_to = yield from limit_waiting.walk(queue, state.limit, after)


@dataclass(slots=True)
class _Page:
    """The page of one scan, and the state of its messages as the scan knows it."""

    scan: Scan
    limit: Limit
    permits: Permits
    messages: list[Document]
    #: The maximum number of messages on the page.
    size: int
    #: The free slots of each key.
    free: Mapping[str, FreeSlots] = field(default_factory=dict)
    #: The messages to claim.
    chosen: list[Chosen] = field(default_factory=list)
    #: The messages of the page that were claimed or deferred.
    done: set[Hashable] = field(default_factory=set)
    #: Whether the page is full of messages that cannot start yet.
    crowded: bool = False
    #: Whether the limit let the scan choose fewer messages than it could use.
    too_few: bool = False

    def choose(
        self,
        free: Mapping[str, FreeSlots],
        wanted: int,
        order: Sequence[Document],
        most: Mapping[str, int] | None = None,
    ) -> list[Chosen]:
        """Return messages to claim, each with a slot. ``most``: the maximum number for each key."""
        names = {
            key: each.names[: None if most is None else most[key]] for key, each in free.items()
        }
        chosen: list[Chosen] = []
        for each in order:
            if len(chosen) < wanted and (names_left := names[key_of(self.limit, each)]):
                chosen.append((each, names_left.pop()))
        return chosen

    def choose_permitted(
        self, free: Mapping[str, FreeSlots], wanted: int, order: Sequence[Document], now: datetime
    ) -> Plan[list[Chosen]]:
        """Choose messages to claim, and get a permit for each message if each key has a rate."""
        if self.limit.per is None or self.limit.rate is None:
            return self.choose(free, wanted, order)

        def choose(most: Mapping[str, int]) -> Mapping[str, int]:
            return self.count(each for each, _ in self.choose(free, wanted, order, most))

        most = {key: len(each.names) for key, each in free.items()}
        granted = yield from self.permits.ask(choose, most, now)
        return self.choose(free, wanted, order, granted)

    def keep_within(self, permits: Mapping[str, int]) -> None:
        """Keep only the first chosen messages of each key, one for each permit of the key."""
        left = Counter(permits)
        found = []
        for each in self.chosen:
            key = key_of(self.limit, each[0])
            left[key] -= 1
            if left[key] >= 0:
                found.append(each)
        self.chosen = found

    def count(self, documents: Iterable[Document]) -> Counter[str]:
        """Return the number of messages of each key."""
        return Counter(key_of(self.limit, each) for each in documents)

    def headers(self) -> list[Any]:
        """Return the values of the limit's header on the page, with None for a missing header."""
        found = [each.get("headers") for each in self.messages]
        name = self.limit.header
        values = [each.get(name) if isinstance(each, Mapping) else None for each in found]
        return [*{hashable_id(each): each for each in values}.values()]

    def mark_done(self, documents: Sequence[Document]) -> None:
        """Note that these messages were claimed or deferred."""
        self.done |= {hashable_id(each["_id"]) for each in documents}

    def still_ready(self) -> list[Document]:
        """Return the messages of the page that are still ready, as far as the scan knows."""
        return [each for each in self.messages if hashable_id(each["_id"]) not in self.done]


def take(scan: Scan) -> Plan[Taken | None]:
    """Claim the first messages that may start."""
    state, followed = scan.state, scan.state.limit
    followed.blocked_until = None
    permits, (order, index) = Permits(scan.terms.queue, followed), scan.ordering
    limit = permits.limit
    if limit is None:  # another thread has read that there is no limit now
        return (yield from take_first(scan))
    size = _page_size(scan, limit)
    fields = _fields(scan, limit)
    messages = yield from Find(scan.match, fields, sort=order, limit=size, hint=index)
    read_at = yield from ServerTime()
    if not messages:
        state.contested = state.groups.crowded = False
        return Taken([], ended=True)
    page = _Page(scan, limit, permits, messages, size)
    late = yield from _choose(page)
    contested = state.contested
    # Without ``per``, ``paced`` got the permits and stored in the scan when they expire.
    within = replace(scan, until=permits.until or scan.until)
    documents = yield from _claim_and_learn(within, limit, page.chosen, page.free)
    if documents is not None and len(documents) < len(page.chosen):
        page.too_few = False  # other processes took some, or the permits were late
        if (yield from permits.late()):
            late, state.contested = True, contested
    unused = yield from permits.give_back_unused(page.count(documents or ()))
    if documents is None:
        return None
    page.mark_done([*documents, *scan.room.excess])
    moved = yield from tidy_up(state, _leave_rest(page, unused), documents)
    if late:  # the consumer scans again at once
        followed.blocked_until = scan.now
    taken = Taken.of_page(documents, messages, page.done, size)
    return taken._replace(ended=taken.ended and not moved, read_at=read_at)


def _page_size(scan: Scan, limit: Limit) -> int:
    wanted, state = scan.wanted, scan.state
    if limit.per is not None:
        return MAX_PAGE if state.groups.crowded else max(LEAST_PAGE, PAGE_FACTOR * wanted)
    return max(wanted, min(wanted * PAGE_FACTOR, MAX_CLAIM)) if state.contested else wanted


def _fields(scan: Scan, limit: Limit) -> dict[str, Any]:
    """Return the fields that a scan reads of each message."""
    fields: dict[str, Any] = {**FIELDS, **scan.line.fields}
    return fields if limit.per is None else {**fields, limit.per: 1, "token": 1}


def expected_slots(
    scan: Scan, limit: Limit, useful: Mapping[str, int]
) -> Plan[dict[str, FreeSlots]]:
    """Return the free slots of each key, up to the ``useful`` number.

    This assumes that all slots are free if the last scan met no taken slot and left enough of them
    free. While slots above a lowered limit are taken, the slots are always read.
    """
    followed = scan.state.limit
    if limit.concurrency is not None and not followed.meets_slots and followed.drain is None:
        return slots.any_slots(limit.concurrency, useful)
    return (yield from _free_slots(scan, limit, useful))


def _free_slots(scan: Scan, limit: Limit, useful: Mapping[str, int]) -> Plan[dict[str, FreeSlots]]:
    if limit.concurrency is None:
        return slots.no_slots(useful)
    terms = scan.terms
    return (
        yield from slots.free_slots(terms.queue, terms.kind, scan.state.limit, useful, scan.now)
    )


def _choose(page: _Page) -> Plan[bool]:
    """Choose the messages to claim. Return whether some permits expired before their use."""
    scan, limit, ready, permits = page.scan, page.limit, page.messages, page.permits
    wanted = scan.wanted
    useful = {key: min(number, wanted) for key, number in page.count(ready).items()}
    page.free = yield from expected_slots(scan, limit, useful)
    # With several ranges, a shuffle would put messages of later ranges before earlier ranges.
    shuffled = scan.state.contested and not scan.line.in_ranges
    order = random.sample(ready, len(ready)) if shuffled else ready
    page.chosen = yield from page.choose_permitted(page.free, wanted, order, scan.now)
    found = len(page.chosen)
    page.crowded = limit.per is not None and found < wanted and len(ready) == page.size
    # If there was no time to ask for some permits, more messages might start.
    page.too_few = found < min(wanted, len(ready)) and not permits.cut
    if page.crowded and not (yield from permits.spent()):
        page.chosen += yield from _behind(page, wanted - found)
    if not (yield from permits.drop_late()):
        return False
    page.keep_within(permits.held)
    page.too_few = False  # with new permits, the other messages may start
    return True


def claim_free(
    scan: Scan, limit: Limit, page: Sequence[Document], free: Mapping[str, FreeSlots]
) -> Plan[list[Document] | None]:
    """Claim messages of a page, each with a free slot. Return None after a timeout."""
    order = random.sample(page, len(page)) if scan.state.contested else page
    chosen = list(zip(order, free[WHOLE_QUEUE].names[::-1], strict=False))  # as ``choose`` does
    return (yield from _claim_and_learn(scan, limit, chosen, free))


def _claim_and_learn(
    scan: Scan, limit: Limit, chosen: Sequence[Chosen], free: Mapping[str, FreeSlots]
) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot. Remember whether the next scan must read the slots."""
    state = scan.state
    assumed_free = limit.concurrency is not None and not state.limit.meets_slots
    documents: list[Document] = []
    if chosen:
        taken = yield from _claim(scan, chosen)
        if taken is None:
            return None
        documents = taken
        state.contested = not assumed_free and len(documents) < len(chosen)
    used = Counter(key_of(limit, each) for each, _ in chosen)
    half = (limit.concurrency or 0) / 2
    leaves_few = any(each.number - used[key] < half for key, each in free.items())
    state.limit.meets_slots = leaves_few or len(documents) < len(chosen)
    return documents


def _claim(scan: Scan, chosen: Sequence[Chosen]) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot. Return None if the server exceeded a time limit."""
    locked = scan.state.transaction_locks
    began = yield from MonotonicTime()
    if len(chosen) > 1 and began >= locked.singly_until:
        # One message that a transaction holds can block a claim of several. The next claims
        # would lose as much time, so for a while they claim messages one by one.
        with suppress(Unavailable):
            taken = yield from take_first(scan.choose(with_slots(chosen)))
            if taken is not None and (taken.documents or scan.room.full):
                return taken.documents  # if the room is full, no further message fits
        locked.on_blocked_claim(began, (yield from MonotonicTime()))
    return (yield from _claim_one_by_one(scan, chosen))


def _claim_one_by_one(scan: Scan, chosen: Sequence[Chosen]) -> Plan[list[Document] | None]:
    """Claim messages with one command for each, until ``ONE_BY_ONE_S`` seconds have passed."""
    room, documents = scan.room, list[Document]()
    number = len(chosen)
    most = room.few(number) if room.wants_sizes(number) else number
    began = yield from MonotonicTime()
    # In order, because the next claims pass over the first message if it is locked.
    for each in sorted(chosen, key=lambda pair: due_of(pair[0]))[:most]:
        taken = yield from take_first(scan.choose(with_slots([each])))
        if taken is None:
            return documents or None
        documents += taken.documents
        if room.full or (yield from MonotonicTime()) - began > ONE_BY_ONE_S:
            break
    return room.cut(documents) if len(documents) > 1 else documents


def _behind(page: _Page, wanted: int) -> Plan[list[Chosen]]:
    """Return messages to claim that come after the page and whose keys are not on the page.

    To find them, the server reads all messages with the keys on the page. So after a search that
    finds none, this process waits before the next search: three times as long as the search took,
    up to ``BEHIND_PAUSE``.
    """
    scan, limit, followed = page.scan, page.limit, page.scan.state.limit
    order, index = scan.ordering
    assert limit.per is not None
    elsewhere = {**scan.match, limit.per: {"$nin": page.headers()}}
    now = yield from ServerTime()
    # If the pause seems longer than ``BEHIND_PAUSE``, the clock was set back.
    if followed.behind_at is not None and now < followed.behind_at <= now + BEHIND_PAUSE:
        return []
    fields = _fields(scan, limit)
    behind = yield from Find(elsewhere, fields, sort=order, limit=wanted, hint=index)
    if not behind:
        after = yield from ServerTime()
        followed.behind_at = after + min(3 * (after - now), BEHIND_PAUSE)
        return []
    free = yield from _free_slots(replace(scan, now=now), limit, page.count(behind))
    return (yield from page.choose_permitted(free, wanted, behind, now))


def _leave_rest(page: _Page, unused: Collection[str]) -> Plan[bool]:
    """Learn when the unclaimed messages may start. With ``per``, defer them if they block a scan.

    Args:
        page: The page of the scan, after its claims.
        unused: The keys whose permits the claim gave back, at least in part.

    Returns:
        Whether messages behind the page may be ready now.
    """
    state, followed = page.scan.state, page.scan.state.limit
    if page.limit.per is None:
        if page.too_few:
            followed.blocked_until = page.free[WHOLE_QUEUE].until or page.scan.now
        return False
    state.groups.crowded = page.too_few and page.crowded
    moved = yield from _defer_and_restore(page, unused)
    if not page.chosen and not moved:
        # Other processes have changed these messages. If no start is known, scan again at once.
        start = None if page.permits.cut else followed.first_start(page.scan.now)
        followed.blocked_until = start or page.scan.now
    return moved


def _defer_and_restore(page: _Page, unused: Collection[str]) -> Plan[bool]:
    """Defer messages that block messages of other keys, and bring forward those that may start.

    Args:
        page: The page of the scan, after its claims.
        unused: The keys whose permits the claim gave back, at least in part.

    Returns:
        Whether messages behind the page may be ready now.
    """
    queue, followed = page.scan.terms.queue, page.scan.state.limit
    # If a claimed message had been deferred, the next message of its key must be brought forward.
    claimed = [each for each, _ in page.chosen if hashable_id(each["_id"]) in page.done]
    keys = {each["limited"] for each in claimed if isinstance(each.get("limited"), str)}
    keys |= set(unused)
    deferred = 0
    if page.too_few:
        deferred, blocked = yield from _defer_left(page)
        keys |= blocked
        if limit_waiting.defers(page.limit, instead=followed.limit):
            # Another thread has read a changed limit, so no message may wait for the old limit.
            yield from limit_waiting.lift(queue)
            return True
    restored = (yield from limit_waiting.restore(queue, followed, keys)) if keys else None
    return bool(deferred or (restored and restored.ready))


def _defer_left(page: _Page) -> Plan[tuple[int, Set[str]]]:
    """Defer the ready messages left on the page. Return how many were deferred, and their keys."""
    scan = page.scan
    waiting: dict[str, list[Document]] = {}
    for each in page.still_ready():
        waiting.setdefault(key_of(page.limit, each), []).append(each)
    deferred = yield from limit_waiting.defer(scan.terms.queue, scan.terms.kind, waiting, scan.now)
    if deferred == sum(map(len, waiting.values())):
        page.mark_done(page.still_ready())
    return deferred, waiting.keys()
