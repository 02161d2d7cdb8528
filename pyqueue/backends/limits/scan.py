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
from pyqueue.backends.scan import ScanState
from pyqueue.backends.turns import MAX_PAGE
from pyqueue.documents import hashable_id
from pyqueue.errors import Unavailable
from pyqueue.limits import Limit, key_of
from pyqueue.requests import Document, Find, Plan, ServerTime

#: What a look reads of each message.
FIELDS: Final = dict.fromkeys(("_id", "when", "due", "limited"), 1)
#: How many messages a look reads for each one that is wanted, beside competing processes.
PAGE_FACTOR: Final = 4
#: How long a process waits at most before it looks for other keys behind a page again.
BEHIND_PAUSE: Final = timedelta(seconds=1)
#: The least size of a page whose messages may have different keys.
LEAST_PAGE: Final = 50


#: A message, and the slot that it gets; "" if it needs none.
Chosen = tuple[Document, str]


def walk(queue: str, state: ScanState) -> Plan[None]:
    """Look at the next keys of which messages wait, from time to time; see ``waiting``."""
    limit = state.limit.limit
    if limit is not None and limit.per is not None:
        after = state.groups.walked_to
        state.groups.walked_to = yield from limit_waiting.walk(queue, state.limit, after)


@dataclass(slots=True)
class _Look:
    """What one look has found out about the messages of its page."""

    scan: Scan
    limit: Limit
    permits: Permits
    page: list[Document]
    #: The most messages that the page can have.
    size: int
    #: The slots of each key.
    free: Mapping[str, FreeSlots] = field(default_factory=dict)
    #: What is to be claimed.
    chosen: list[Chosen] = field(default_factory=list)
    #: The messages of the page that were claimed or deferred.
    done: set[Hashable] = field(default_factory=set)
    #: Whether the page is full of messages that may not start.
    crowded: bool = False
    #: Whether too few may start.
    few: bool = False

    def choose(
        self,
        free: Mapping[str, FreeSlots],
        wanted: int,
        order: Sequence[Document],
        most: Mapping[str, int] | None = None,
    ) -> list[Chosen]:
        """Return the messages to claim. ``most``: how many of each key."""
        names = {
            key: each.names[: None if most is None else most[key]] for key, each in free.items()
        }
        chosen: list[Chosen] = []
        for each in order:
            if len(chosen) < wanted and (left := names[key_of(self.limit, each)]):
                chosen.append((each, left.pop()))
        return chosen

    def choose_permitted(
        self, free: Mapping[str, FreeSlots], wanted: int, order: Sequence[Document], now: datetime
    ) -> Plan[list[Chosen]]:
        """Return the messages to claim, as many as have permits."""
        if self.limit.per is None or self.limit.rate is None:
            return self.choose(free, wanted, order)

        def choose(most: Mapping[str, int]) -> Mapping[str, int]:
            return self.count(each for each, _ in self.choose(free, wanted, order, most))

        most = {key: len(each.names) for key, each in free.items()}
        granted = yield from self.permits.ask(choose, most, now)
        return self.choose(free, wanted, order, granted)

    def keep_within(self, permits: Mapping[str, int]) -> None:
        """Keep the first messages that were chosen, as many of each key as have permits."""
        left = Counter(permits)
        found = []
        for each in self.chosen:
            key = key_of(self.limit, each[0])
            left[key] -= 1
            if left[key] >= 0:
                found.append(each)
        self.chosen = found

    def count(self, documents: Iterable[Document]) -> Counter[str]:
        """Return how many messages each key has."""
        return Counter(key_of(self.limit, each) for each in documents)

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


def take(scan: Scan) -> Plan[Taken | None]:
    """Claim the first messages that may start."""
    state, followed = scan.state, scan.state.limit
    followed.blocked_until = None
    permits, (order, index) = Permits(scan.terms.queue, followed), scan.ordering
    limit = permits.limit
    if limit is None:  # another thread has read that it is gone
        return (yield from take_first(scan))
    size = _page_size(scan, limit)
    fields = _fields(scan, limit)
    page = yield from Find(scan.match, fields, sort=order, limit=size, hint=index)
    if not page:
        state.contested = state.groups.crowded = False
        return Taken([], None, True)
    look = _Look(scan, limit, permits, page, size)
    late = yield from _choose(look)
    contested = state.contested
    within = replace(scan, until=permits.until or scan.until)
    documents = yield from _claim_and_learn(within, limit, look.chosen, look.free)
    if documents is not None and len(documents) < len(look.chosen):
        look.few = False
        if (yield from permits.late()):
            late, state.contested = True, contested
    unused = yield from permits.give_back(look.count(documents or ()))
    if documents is None:
        return None
    look.finished([*documents, *scan.room.excess])
    moved = yield from _leave_rest(look, unused)
    if late:  # it comes back at once
        followed.blocked_until = scan.now
    taken = Taken.of_page(documents, page, look.done, size)
    return taken._replace(ended=False) if moved else taken


def _page_size(scan: Scan, limit: Limit) -> int:
    wanted, state = scan.wanted, scan.state
    if limit.per is not None:
        return MAX_PAGE if state.groups.crowded else max(LEAST_PAGE, PAGE_FACTOR * wanted)
    return max(wanted, min(wanted * PAGE_FACTOR, MAX_CLAIM)) if state.contested else wanted


def _fields(scan: Scan, limit: Limit) -> dict[str, Any]:
    """Return what a look reads of each message."""
    fields: dict[str, Any] = {**FIELDS, **scan.line.fields}
    return fields if limit.per is None else {**fields, limit.per: 1, "token": 1}


def expected_slots(
    scan: Scan, limit: Limit, useful: Mapping[str, int]
) -> Plan[dict[str, FreeSlots]]:
    """Return the free slots of each key; as if all were free, unless a look met taken ones.

    ``useful``: how many are of use, by key.
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


def _choose(look: _Look) -> Plan[bool]:
    """Choose what to claim. Return whether permits came too late to be used."""
    scan, limit, page, permits = look.scan, look.limit, look.page, look.permits
    wanted = scan.wanted
    useful = {key: min(number, wanted) for key, number in look.count(page).items()}
    look.free = yield from expected_slots(scan, limit, useful)
    # In ranges, messages of later ranges would come before those of earlier ones.
    shuffled = scan.state.contested and not scan.line.in_ranges
    order = random.sample(page, len(page)) if shuffled else page
    look.chosen = yield from look.choose_permitted(look.free, wanted, order, scan.now)
    found = len(look.chosen)
    look.crowded = limit.per is not None and found < wanted and len(page) == look.size
    look.few = found < min(wanted, len(page)) and not permits.cut
    if look.crowded and not (yield from permits.spent()):
        look.chosen += yield from _behind(look, wanted - found)
    if not (yield from permits.drop_late()):
        return False
    look.keep_within(permits.held)
    look.few = False
    return True


def claim_free(
    scan: Scan, limit: Limit, page: Sequence[Document], free: Mapping[str, FreeSlots]
) -> Plan[list[Document] | None]:
    """Claim the first messages of a page, each with a free slot. None: the server is too slow."""
    order = random.sample(page, len(page)) if scan.state.contested else page
    chosen = list(zip(order, free[""].names[::-1], strict=False))
    return (yield from _claim_and_learn(scan, limit, chosen, free))


def _claim_and_learn(
    scan: Scan, limit: Limit, chosen: Sequence[Chosen], free: Mapping[str, FreeSlots]
) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot, and learn whether the next look may meet taken slots."""
    state = scan.state
    guessed = limit.concurrency is not None and not state.limit.meets_slots
    documents: list[Document] = []
    if chosen:
        taken = yield from _claim(scan, chosen)
        if taken is None:
            return None
        documents = taken
        state.contested = not guessed and len(documents) < len(chosen)
    used = Counter(key_of(limit, each) for each, _ in chosen)
    half = (limit.concurrency or 0) / 2
    leaves_few = any(each.number - used[key] < half for key, each in free.items())
    state.limit.meets_slots = leaves_few or len(documents) < len(chosen)
    return documents


def _claim(scan: Scan, chosen: Sequence[Chosen]) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot. The result is None if the server is too slow."""
    if scan.state.locked.due(scan.now) is not None:
        chosen = chosen[:1]
    if len(chosen) > 1:
        # What stops a claim of several, such as a transaction, may spare a claim of one.
        with suppress(Unavailable):
            taken = yield from take_first(scan.choose(with_slots(chosen)))
            if taken is not None and (taken.documents or scan.room.full):
                return taken.documents
    taken = yield from take_first(scan.choose(with_slots(chosen[:1])))
    return None if taken is None else taken.documents


def _behind(look: _Look, wanted: int) -> Plan[list[Chosen]]:
    """Return messages of other keys than those that fill a page.

    The server reads all messages of these keys for it. So if there are none, this process
    looks for them a quarter of its time at most.
    """
    scan, limit, followed = look.scan, look.limit, look.scan.state.limit
    order, index = scan.ordering
    assert limit.per is not None
    elsewhere = {**scan.match, limit.per: {"$nin": look.headers()}}
    now = yield from ServerTime()
    if followed.behind_at is not None and now < followed.behind_at <= now + BEHIND_PAUSE:
        return []
    fields = _fields(scan, limit)
    page = yield from Find(elsewhere, fields, sort=order, limit=wanted, hint=index)
    if not page:
        after = yield from ServerTime()
        followed.behind_at = after + min(3 * (after - now), BEHIND_PAUSE)
        return []
    free = yield from _free_slots(replace(scan, now=now), limit, look.count(page))
    return (yield from look.choose_permitted(free, wanted, page, now))


def _leave_rest(look: _Look, unused: Collection[str]) -> Plan[bool]:
    """Learn when the messages that were not claimed may start.

    Args:
        look: the look.
        unused: the keys of permits that it gave back.

    Returns:
        Whether messages behind the page may be ready now.
    """
    state, followed = look.scan.state, look.scan.state.limit
    if look.limit.per is None:
        if look.few:
            followed.blocked_until = look.free[""].until or look.scan.now
        return False
    state.groups.crowded = look.few and look.crowded
    moved = yield from _let_wait(look, unused)
    if not look.chosen and not moved:  # other processes have changed what it saw
        start = None if look.permits.cut else followed.first_start(look.scan.now)
        followed.blocked_until = start or look.scan.now
    return moved


def _let_wait(look: _Look, unused: Collection[str]) -> Plan[bool]:
    """Defer what is in the way of other keys, if there is too little else.

    What was claimed may have been deferred. Then the next ones of its key take its place. The
    arguments and the result are those of ``_leave_rest``.
    """
    terms, followed = look.scan.terms, look.scan.state.limit
    claimed = [each for each, _ in look.chosen if hashable_id(each["_id"]) in look.done]
    keys = {each["limited"] for each in claimed if isinstance(each.get("limited"), str)}
    keys |= set(unused)
    deferred = 0
    if look.few:
        waiting: dict[str, list[Document]] = {}
        for each in look.left():
            waiting.setdefault(key_of(look.limit, each), []).append(each)
        deferred = yield from limit_waiting.defer(terms.queue, terms.kind, waiting, look.scan.now)
        if deferred == sum(map(len, waiting.values())):
            look.finished(look.left())
        keys |= waiting.keys()
        if limit_waiting.defers(look.limit, instead=followed.limit):
            yield from limit_waiting.lift(terms.queue)  # another thread has read of a change
            return True
    restored = (yield from limit_waiting.restore(terms.queue, followed, keys)) if keys else None
    return bool(deferred or (restored and restored.ready))
