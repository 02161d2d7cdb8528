"""Claim from an ordered queue: the first messages of groups of which no message is held.

A look reads a page of what is ready, and claims of each free group the message that comes first on
that page. The unique index on locks keeps a second message of the group from being held. The look
then reads which message of each claimed group waits now, and gives back what it should not have
claimed because an earlier one waits. Nothing changes the order behind that lock, so what is handed
out is the first of its group.

If a look finds too few free groups, what waits behind a held message is in its way. It defers that;
see ``groups``. A page that is full of it says nothing about other groups. Then the look also walks
over the index of groups, as each rescan does.

With a limit on concurrency, a look claims as many first messages as there are free slots; see
``limits.scan``. The rest waits where it is.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue.backends import transitions
from pyqueue.backends.byte_limit import ByteLimit
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.claiming import Taken, claim, take_first
from pyqueue.backends.limits import scan as limit_scan
from pyqueue.backends.limits.pacing import paced
from pyqueue.backends.limits.slots import FreeSlots, free
from pyqueue.backends.ordered import groups
from pyqueue.backends.ordered.groups import GROUPED, rank
from pyqueue.backends.scan import ScanState, due_of
from pyqueue.backends.turns import (
    DEFERRED_FOR,
    MAX_PAGE,
    FirstOfEach,
    group_in,
    place_firsts,
    write_when,
)
from pyqueue.documents import hashable_id
from pyqueue.limits import Limit
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, UpdateEach

#: What a look reads of each message.
FIELDS: Final = dict.fromkeys(("_id", "when", "due", "group", "lock", *GROUPED.places), 1)
#: The size of a page: for each message that is wanted; the same beside competing processes, which
#: then claim different groups of the page; and the least.
PAGE_FACTOR: Final = 2
CONTESTED_PAGE_FACTOR: Final = 8
LEAST_PAGE: Final = 50
#: How often a look tries again after other processes claimed what it had chosen.
ROUNDS: Final = 3
#: The shortest time for which a message is deferred.
LEAST_DEFERRAL: Final = timedelta(seconds=1)


def claim_next(
    terms: ClaimTerms,
    scan: ScanState,
    now: datetime,
    wanted: int,
    room: ByteLimit,
) -> Plan[tuple[list[Document], bool]]:
    """Claim the first messages of free groups. The arguments are those of ``claim``."""
    if scan.rescan_at is None or scan.rescan_at <= now:
        yield from _walk(terms.queue, scan)
        now = yield from ServerTime()  # what it brought forward is ready now
    limit = scan.limit.limit
    take = _take if limit is None or limit.rate is None else paced(_take)
    return (yield from claim(terms, scan, now, wanted, room, delete=False, take=take))


def _walk(queue: str, scan: ScanState) -> Plan[list[Document]]:
    """Look at the next groups, whatever of them is deferred. Return the first messages."""
    after = scan.groups.walked_to
    firsts = yield from groups.restore(queue, None, after)
    names = [each["group"] for each in firsts if isinstance(each["group"], str)]
    scan.groups.walked_to = max(names) if len(firsts) == MAX_PAGE and names else ""
    if after and len(firsts) < MAX_PAGE:  # around the end
        firsts += yield from groups.restore(queue, None, "")
    return firsts


@dataclass(slots=True)
class _Look:
    """What one look has found out about the messages of its page."""

    page: list[Document]
    #: Until when the groups of the page are blocked, at least.
    blocked: dict[Hashable, datetime] = field(default_factory=dict)
    #: The messages of the page that were claimed or deferred.
    done: set[Hashable] = field(default_factory=set)

    def heads(self) -> list[Document]:
        """Return the messages to claim: the first of each free group, in the order of the page."""
        heads: dict[Hashable, Document] = {}
        for place, each in enumerate(self.page):
            name = group_in(each)
            if name is None or "lock" in each:
                heads[place, None] = each  # without a group, or with a lease that lapsed
            elif name not in self.blocked:
                known = heads.get(name)
                if known is None or rank(each) < rank(known):
                    heads[name] = each
        return list(heads.values())

    def waiting(self) -> dict[Hashable, list[Document]]:
        """Return the messages of the page that wait in blocked groups, each group in order."""
        found: dict[Hashable, list[Document]] = {}
        for each in sorted(self.page, key=rank):
            name = group_in(each)
            if (
                name in self.blocked
                and "lock" not in each
                and hashable_id(each["_id"]) not in self.done
            ):
                found.setdefault(name, []).append(each)
        return found

    def first_left(self) -> Document | None:
        """Return the first message of the page that is still ready."""
        return next((each for each in self.page if hashable_id(each["_id"]) not in self.done), None)


def _take(
    terms: ClaimTerms, scan: ScanState, match: Filter, now: datetime, wanted: int, room: ByteLimit
) -> Plan[Taken | None]:
    """Claim the first messages of free groups, as many as may start."""
    order, index = terms.scan
    limit = scan.limit.limit
    if limit is not None and limit.concurrency is None:
        limit = None  # ``paced`` keeps to a rate
    if limit is not None:
        scan.limit.blocked_until = None
    for last in (False,) * (ROUNDS - 1) + (True,):
        size = _page_size(scan, wanted)
        free_to_claim = scan.locked.passing_over(match)  # the last round may have met locked ones
        page = yield from Find(free_to_claim, FIELDS, sort=order, limit=size, hint=index)
        if not page:
            scan.contested = scan.groups.crowded = False
            return [], None, True
        look = _Look(page)
        if scan.groups.meets_locks:
            look.blocked |= yield from groups.locks_of(terms.queue, groups.groups_in(page))
            scan.groups.meets_locks = bool(look.blocked)
        locked = list(look.blocked)
        chosen = look.heads()
        able, free = wanted, None
        if limit is not None:
            free = yield from limit_scan.expected_slots(terms, scan, limit, {"": wanted}, now)
            able = min(wanted, free[""].number)
        few = len(chosen) < able
        scan.groups.crowded = few and len(page) == size
        if scan.groups.crowded:
            chosen += yield from _walked(terms.queue, scan, chosen, now)
            now = yield from ServerTime()
        documents: list[Document] = []
        if chosen and able:
            taken = yield from _claim_heads(terms, scan, chosen, now, able, room, limit, free)
            if taken is None:
                return None
            documents = taken
        kept = yield from _verify(terms, look, documents, now)
        deferred = False
        if few or len(kept) < len(documents):
            deferred = yield from _defer(terms.queue, look, locked, now)
        if free is not None and len(kept) == able < wanted:
            scan.limit.blocked_until = free[""].until or now
        if kept or deferred or room.full or not chosen or not able or last:
            break
        # Other processes have claimed what was chosen.
    left = look.first_left()
    if left is None:
        return kept, {**page[-1], "due": page[-1]["when"]}, len(page) < size
    more = kept or deferred or scan.limit.blocked_until is not None
    return kept, {"_id": None, "when": left["when"], "due": left["when"]}, not more


def _page_size(scan: ScanState, wanted: int) -> int:
    if scan.groups.crowded:
        return MAX_PAGE
    factor = CONTESTED_PAGE_FACTOR if scan.contested else PAGE_FACTOR
    return min(max(factor * wanted, LEAST_PAGE), MAX_PAGE)


def _walked(
    queue: str, scan: ScanState, heads: Sequence[Document], now: datetime
) -> Plan[list[Document]]:
    """Return first messages of further groups that are free."""
    known = {hashable_id(each["_id"]) for each in heads}
    firsts = yield from _walk(queue, scan)
    return [
        each
        for each in firsts
        if due_of(each) <= now and "locked" not in each and hashable_id(each["_id"]) not in known
    ]


def _claim_heads(
    terms: ClaimTerms,
    scan: ScanState,
    heads: Sequence[Document],
    now: datetime,
    wanted: int,
    room: ByteLimit,
    limit: Limit | None,
    slots: dict[str, FreeSlots] | None,
) -> Plan[list[Document] | None]:
    """Claim messages that were chosen. Beside competing processes, claim any of them."""
    if limit is not None and slots is not None:
        found = yield from limit_scan.claim_free(terms, scan, limit, heads, slots, now, room)
        if found is not None and len(found) < min(wanted, len(heads)):
            scan.groups.meets_locks = True  # another message of a group may be held
        return found
    if scan.contested and len(heads) > wanted:
        heads = random.sample(heads, min(2 * wanted, len(heads)))
    free = terms.free([each["_id"] for each in heads], now)
    chosen = terms._replace(chosen=heads)
    taken = yield from take_first(chosen, scan, free, now, min(wanted, len(heads)), room)
    return None if taken is None else taken[0]


def _verify(
    terms: ClaimTerms, look: _Look, documents: Sequence[Document], now: datetime
) -> Plan[list[Document]]:
    """Give back what is not the first of its group, and appoint the heirs of the rest."""
    names = groups.groups_in(documents)
    if not names:
        look.done |= {hashable_id(each["_id"]) for each in documents}
        return list(documents)
    rest = yield from FirstOfEach(terms.queue, GROUPED, names)
    firsts = {group_in(each): each for each in rest}
    kept: list[Document] = []
    early: list[Document] = []
    for each in documents:
        name = group_in(each)
        first = firsts.get(name)
        if name is None or groups.is_first(each, first):
            kept.append(each)
            look.done.add(hashable_id(each["_id"]))
            if name is not None:
                look.blocked[name] = each["when"]
        else:
            early.append(each)
            assert first is not None
            look.blocked[name] = due_of(first)
    if early:
        yield from _release(terms, early, now)
        yield from groups.restore(terms.queue, groups.groups_in(early))
    held = {group_in(each): each["when"] for each in kept}
    heirs = [each for each in rest if group_in(each) in held]
    yield from place_firsts(terms.queue, GROUPED, heirs, held, now)
    return kept


def _release(terms: ClaimTerms, documents: Sequence[Document], now: datetime) -> Plan[None]:
    """Give back claimed messages: the same place, the try not counted."""
    yield from UpdateEach(
        [
            (
                {"_id": each["_id"], "token": each["token"]},
                transitions.releasing(terms.kind, now, now, counted=terms.counts_try),
            )
            for each in documents
        ]
    )
    yield from free(terms.queue, [each.get("slot") for each in documents])


def _defer(queue: str, look: _Look, locked: Sequence[Any], now: datetime) -> Plan[bool]:
    """Defer the messages of the page that wait in blocked groups. Return whether any was.

    Another process may have freed a group meanwhile, and have brought its first message forward
    before this defers it. So what is deferred in such groups is corrected afterwards.
    """
    later: dict[datetime, list[Document]] = {}
    for name, waiting in look.waiting().items():
        until = max(look.blocked[name], now + LEAST_DEFERRAL)
        later.setdefault(until, []).append(waiting[0])
        if waiting[1:]:
            later.setdefault(now + DEFERRED_FOR, []).extend(waiting[1:])
    deferred = 0
    odd = [each for some in later.values() for each in some if due_of(each) != each.get("due")]
    if odd:  # of another program; what is deferred must say since when it is eligible
        yield from UpdateEach(
            [({"_id": each["_id"], "q": queue}, {"$set": {"due": due_of(each)}}) for each in odd]
        )
    for until, some in later.items():
        ids = [each["_id"] for each in some]
        match = {"when": {"$lte": now}, "due": {"$lte": now}}
        done = yield from write_when(queue, GROUPED, ids, match, until)
        deferred += done
        if done == len(ids):
            look.done |= set(map(hashable_id, ids))
    if deferred and locked:
        yield from groups.restore(queue, locked)
    return bool(deferred)
