"""Claim from an ordered queue: the first message of each group that has no held message.

A scan reads a page of ready messages. From each free group it claims the message that comes first
on the page. The unique index on locks prevents a second held message of the group. The scan then
reads the first waiting message of each claimed group. If that message precedes the claimed message,
the scan puts the claimed message back. From then on, the lock keeps the order fixed. So every
message that is handed out is the first of its group.

A scan that finds too few free groups defers the messages that wait behind a held message; see
``groups``. If the page is full of such messages, the scan learns nothing about other groups. It
then also walks over the index of groups, as each rescan does.

With a limit on concurrency, a scan claims one first message for each free slot; see
``limits.scan``. Other messages stay in place.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue.backends import transitions
from pyqueue.backends.claim_terms import Choice, Scan
from pyqueue.backends.claiming import Taken, claim, take_first
from pyqueue.backends.kind import UpdateFields
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
    tidy_up,
    write_due,
    write_when,
)
from pyqueue.documents import hashable_id, may_expire
from pyqueue.limits import WHOLE_QUEUE, Limit
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, UpdateEach

#: The fields that a scan reads of each message.
FIELDS: Final = dict.fromkeys(("_id", "when", "due", "group", "lock", *GROUPED.places), 1)
#: The page size per wanted message; a larger page size if other processes compete, so that they
#: claim different groups of the page; and the minimum page size.
PAGE_FACTOR: Final = 2
CONTESTED_PAGE_FACTOR: Final = 8
LEAST_PAGE: Final = 50
#: How many rounds a scan may have. It begins another round if other processes took its messages.
ROUNDS: Final = 3
#: The shortest time for which a message is deferred.
LEAST_DEFERRAL: Final = timedelta(seconds=1)


def claim_next(scan: Scan) -> Plan[tuple[list[Document], bool]]:
    """Claim the first messages of free groups; see ``claim`` for the arguments."""
    if scan.state.wants_rescan(scan.now):
        yield from _walk(scan.terms.queue, scan.state)
        scan.now = yield from ServerTime()  # messages that were brought forward are ready now
    scan.state.transaction_locks.readmit(scan.now)  # otherwise they are on no page
    limit = scan.state.limit.limit
    return (yield from claim(scan, _take if limit is None or limit.rate is None else paced(_take)))


def _walk(queue: str, state: ScanState) -> Plan[list[Document]]:
    """Correct deferrals in the next groups of the index. Return the first message of each group."""
    after = state.groups.walked_to
    firsts = yield from groups.restore(queue, None, after)
    names = [each["group"] for each in firsts if isinstance(each["group"], str)]
    state.groups.walked_to = max(names) if len(firsts) == MAX_PAGE and names else ""
    if after and len(firsts) < MAX_PAGE:  # wrap around
        firsts += yield from groups.restore(queue, None, "")
    return firsts


@dataclass(slots=True)
class _Page:
    """The page of one scan, and the state of its messages as the scan knows it."""

    scan: Scan
    messages: list[Document]
    #: The maximum number of messages on the page.
    size: int
    #: The limit on concurrency, or None if the queue has none.
    limit: Limit | None
    #: The free slots, or {} if there is no limit.
    free: Mapping[str, FreeSlots] = field(default_factory=dict)
    #: Until when each blocked group is blocked at least. Other groups are expected to be free.
    blocked: dict[Hashable, datetime] = field(default_factory=dict)
    #: The messages of the page that were claimed or deferred.
    done: set[Hashable] = field(default_factory=set)

    @property
    def may_start(self) -> int:
        """How many messages this scan may claim."""
        wanted = self.scan.wanted
        return wanted if self.limit is None else min(wanted, self.free[WHOLE_QUEUE].number)

    @property
    def is_left(self) -> bool:
        """Whether a message of the page was neither claimed nor deferred."""
        return any(hashable_id(each["_id"]) not in self.done for each in self.messages)

    def heads(self) -> list[Document]:
        """Return the messages to claim, in page order.

        These are the first message of each free group, and the messages that need not wait for
        another message: messages without a group, and messages whose lease has lapsed.
        """
        heads: dict[Hashable, Document] = {}
        for place, each in enumerate(self.messages):
            name = group_in(each)
            if name is None or "lock" in each:
                heads[place, None] = each  # a key that no group has
            elif name not in self.blocked:
                known = heads.get(name)
                if known is None or rank(each) < rank(known):
                    heads[name] = each
        return list(heads.values())

    def waiting(self) -> dict[Hashable, list[Document]]:
        """Return the messages of the page that wait in blocked groups, in group order."""
        found: dict[Hashable, list[Document]] = {}
        for each in sorted(self.messages, key=rank):
            name = group_in(each)
            if (
                name in self.blocked
                and "lock" not in each
                and hashable_id(each["_id"]) not in self.done
            ):
                found.setdefault(name, []).append(each)
        return found


def _take(scan: Scan) -> Plan[Taken | None]:
    """Claim the first messages of free groups, within the limit on concurrency."""
    state = scan.state
    limit = state.limit.limit
    if limit is not None and limit.concurrency is None:
        limit = None  # it has only a rate, which ``paced`` enforces
    if limit is not None:
        state.limit.blocked_until = None
    scan = replace(scan)  # its instant advances
    taken: Taken | None = None
    for _ in range(ROUNDS):
        page = yield from _read_page(scan, limit)
        if not page.messages:
            state.contested = state.groups.crowded = False
            return Taken([], ended=True)
        taken, again = yield from _claim_free_groups(page)
        if not again:
            break
        # Other processes have claimed the chosen messages: try the next messages.
    return taken


def _read_page(scan: Scan, limit: Limit | None) -> Plan[_Page]:
    """Read a page, and learn which of its groups are blocked."""
    state, (order, index) = scan.state, scan.ordering
    size = _page_size(scan)
    # In the last round, messages that transactions hold may have been excluded.
    free_to_claim = state.transaction_locks.passing_over(scan.match)
    messages = yield from Find(free_to_claim, FIELDS, sort=order, limit=size, hint=index)
    page = _Page(scan, messages, size, limit)
    if messages and state.groups.meets_locks:  # otherwise no group is expected to be locked
        page.blocked |= yield from groups.locks_of(scan.terms.queue, groups.groups_in(messages))
        state.groups.meets_locks = bool(page.blocked)
    return page


def _claim_free_groups(page: _Page) -> Plan[tuple[Taken | None, bool]]:
    """Claim the first messages of the free groups of a page.

    Returns:
        The result, or None if the server exceeded the time limit; and whether to try again.
    """
    scan, limit = page.scan, page.limit
    locked_groups, chosen = list(page.blocked), page.heads()
    if limit is not None:
        page.free = yield from limit_scan.expected_slots(scan, limit, {WHOLE_QUEUE: scan.wanted})
    too_few = len(chosen) < page.may_start
    scan.state.groups.crowded = too_few and len(page.messages) == page.size
    if scan.state.groups.crowded:
        chosen += yield from _walked(scan, chosen)
        scan.now = yield from ServerTime()
    can_claim = bool(chosen) and page.may_start > 0
    documents: list[Document] | None = []
    if can_claim:
        documents = yield from _claim_heads(page, chosen)
    if documents is None:
        return None, False
    kept = yield from _keep_firsts(page, documents)
    deferred = False
    if too_few or len(kept) < len(documents):
        deferred = yield from tidy_up(scan.state, _defer(page, locked_groups), kept)
    nothing = not kept and not deferred
    return _taken(page, kept, nothing=nothing), can_claim and nothing and not scan.room.full


def _taken(page: _Page, kept: list[Document], *, nothing: bool) -> Taken:
    """Return the result of a scan, and note until when the limit blocks further starts.

    ``nothing``: whether the scan neither claimed nor deferred a message.
    """
    scan, followed = page.scan, page.scan.state.limit
    if page.limit is not None and len(kept) == page.may_start < scan.wanted:
        followed.blocked_until = page.free[WHOLE_QUEUE].until or scan.now
    taken = Taken.of_page(kept, page.messages, page.done, page.size)
    if page.is_left and nothing and followed.blocked_until is None:
        # Scanning again would find the same messages. The consumer waits, as in an empty queue.
        return taken._replace(ended=True)
    return taken


def _page_size(scan: Scan) -> int:
    state = scan.state
    if state.groups.crowded:
        return MAX_PAGE
    factor = CONTESTED_PAGE_FACTOR if state.contested else PAGE_FACTOR
    return min(max(factor * scan.wanted, LEAST_PAGE), MAX_PAGE)


def _walked(scan: Scan, heads: Sequence[Document]) -> Plan[list[Document]]:
    """Return the first messages of free groups from a walk over the index of groups."""
    known = {hashable_id(each["_id"]) for each in heads}
    firsts = yield from _walk(scan.terms.queue, scan.state)
    return [
        each
        for each in firsts
        if due_of(each) <= scan.now
        and "locked" not in each  # ``groups.restore`` adds this field
        and hashable_id(each["_id"]) not in known
    ]


def _claim_heads(page: _Page, heads: Sequence[Document]) -> Plan[list[Document] | None]:
    """Claim the first of the chosen messages, or random ones if other processes compete."""
    scan, state = page.scan, page.scan.state
    if page.limit is not None:
        found = yield from limit_scan.claim_free(scan, page.limit, heads, page.free)
        if found is not None and len(found) < min(page.may_start, len(heads)):
            state.groups.meets_locks = True  # another message of a group may be held
        return found
    if state.contested and len(heads) > scan.wanted:
        heads = random.sample(heads, min(2 * scan.wanted, len(heads)))
    # Messages beyond the wanted number are for callers that arrive during the claim.
    chosen = scan.choose(Choice(heads))
    taken = yield from take_first(replace(chosen, wanted=min(scan.wanted, len(heads))))
    return None if taken is None else taken.documents


def _keep_firsts(page: _Page, documents: Sequence[Document]) -> Plan[list[Document]]:
    """Put back claimed messages that are not the first of their groups. Return the other messages.

    For each returned message, the next message of its group is deferred until its lease ends.
    """
    queue, now = page.scan.terms.queue, page.scan.now
    names = groups.groups_in(documents)
    if not names:
        page.done |= {hashable_id(each["_id"]) for each in documents}
        return list(documents)
    waiting = yield from FirstOfEach(queue, GROUPED, names)
    firsts = {group_in(each): each for each in waiting}
    kept: list[Document] = []
    not_first: list[Document] = []
    for each in documents:
        name = group_in(each)
        first = firsts.get(name)
        if name is None or groups.is_first(each, first):
            kept.append(each)
            page.done.add(hashable_id(each["_id"]))
            if name is not None:
                page.blocked[name] = each["when"]
        else:
            not_first.append(each)
            assert first is not None
            page.blocked[name] = due_of(first)
    if not_first:
        yield from _release(page.scan, not_first)
        yield from groups.restore(queue, groups.groups_in(not_first))
    held = {group_in(each): each["when"] for each in kept}  # the end of the lease, by group
    heirs = [each for each in waiting if group_in(each) in held]
    yield from place_firsts(queue, GROUPED, heirs, held, now)
    return kept


def _release(scan: Scan, documents: Sequence[Document]) -> Plan[None]:
    """Return claimed messages to their places in the queue, without counting the try."""
    terms, now = scan.terms, scan.now
    uncounted = transitions.COUNTS if terms.counts_try else ()
    pairs = list[tuple[Filter, UpdateFields]]()
    for each in documents:
        update = transitions.releasing(terms.kind, due_of(each), now, uncounted=uncounted)
        if may_expire(each, terms.counts_try):
            update = transitions.untried(update)
        pairs.append(({"_id": each["_id"], "token": each["token"]}, update))
    yield from UpdateEach(pairs)
    yield from free(terms.queue, [each.get("slot") for each in documents])


def _defer(page: _Page, locked_groups: Sequence[Any]) -> Plan[bool]:
    """Defer the page's messages that wait in blocked groups. Return whether it deferred a message.

    Just before this defers the first message of a locked group, another process may free the group
    and bring that message forward. So this corrects the deferrals in these groups afterwards.
    """
    queue, now = page.scan.terms.queue, page.scan.now
    groups_waiting = page.waiting()
    yield from write_due(queue, [each for some in groups_waiting.values() for each in some])
    later: dict[datetime, list[Document]] = {}
    for name, (first, *rest) in groups_waiting.items():
        until = max(page.blocked[name], now + LEAST_DEFERRAL)
        later.setdefault(until, []).append(first)
        if rest:
            later.setdefault(now + DEFERRED_FOR, []).extend(rest)
    deferred = 0
    for until, some in later.items():
        ids = [each["_id"] for each in some]
        match = {"when": {"$lte": now}, "due": {"$lte": now}}
        done = yield from write_when(queue, GROUPED, ids, match, until)
        deferred += done
        if done == len(ids):
            page.done |= set(map(hashable_id, ids))
    if deferred and locked_groups:
        yield from groups.restore(queue, locked_groups)
    return bool(deferred)
