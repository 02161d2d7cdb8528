"""Claim from a queue with a rate: no more messages than have permits; see ``rates``.

A look finds out how many messages it could claim, asks for as many permits, and claims so many
messages at most. It gives back what it did not use. A look that gets no permit claims nothing, and
the consumer waits until the next message may start.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pyqueue.backends.byte_limit import ByteLimit
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.claiming import MAX_CLAIM, Take, Taken, take_first
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.scan import ScanState
from pyqueue.documents import hashable_id
from pyqueue.requests import Document, Filter, Find, Plan

#: What a look reads of each message.
FIELDS: Final = {"_id": 1, "when": 1}
#: How many messages a look reads for each one that is wanted, beside competing processes.
PAGE_FACTOR: Final = 4


def paced(take: Take | None) -> Take:
    """Return what claims with ``take`` as many messages as have permits; None: the first ones."""

    def take_paced(
        terms: ClaimTerms,
        scan: ScanState,
        match: Filter,
        now: datetime,
        wanted: int,
        room: ByteLimit,
    ) -> Plan[Taken | None]:
        scan.limit.blocked_until = scan.limit.next_start if scan.limit.waits(now) else None
        if scan.limit.blocked_until is not None:
            return [], None, False
        size = _page_size(scan, wanted)
        page = yield from _page(terms, match, size)
        if not page:
            scan.contested = False
            return [], None, True
        most = min(wanted, len(page))
        permits, contested = Permits(terms.queue, scan.limit), scan.contested
        number = yield from permits.number(most, now)
        taken: Taken | None = _left([], page, size)
        if number:
            room.closed = True  # calls that come meanwhile have no permits
            within = terms._replace(until=permits.until)
            if take is None:
                taken = yield from _take_of(page, within, scan, now, number, size, room)
            else:
                taken = yield from take(within, scan, match, now, number, room)
            used = 0 if taken is None else len(taken[0])
            late = used < number and (yield from permits.late())
            yield from permits.give_back({"": used})
            if late and taken is not None:  # the rest of the page is as it was
                scan.contested, scan.limit.blocked_until = contested, now
                return _left(taken[0], page, size, room.excess)
            if used < number:
                return taken
        if number < most:
            scan.limit.blocked_until = scan.limit.next_start or now
        return taken

    return take_paced


def _page_size(scan: ScanState, wanted: int) -> int:
    return max(wanted, min(wanted * PAGE_FACTOR, MAX_CLAIM)) if scan.contested else wanted


def _page(terms: ClaimTerms, match: Filter, size: int) -> Plan[list[Document]]:
    """Return the first messages."""
    order, index = terms.scan
    fields = {**FIELDS, "priority": 1} if terms.by_level else FIELDS
    return (yield from Find(match, fields, sort=order, limit=size, hint=index))


def _take_of(
    page: Sequence[Document],
    terms: ClaimTerms,
    scan: ScanState,
    now: datetime,
    wanted: int,
    size: int,
    room: ByteLimit,
) -> Plan[Taken | None]:
    """Claim so many messages of a page."""
    chosen = page[:wanted]
    if scan.contested and not terms.by_level:  # else lower levels would come before higher ones
        chosen = random.sample(page, min(wanted, len(page)))
    ids = [each["_id"] for each in chosen]
    free = terms.free(ids, now)
    taken = yield from take_first(terms._replace(chosen=chosen), scan, free, now, len(chosen), room)
    if taken is None:
        return None
    documents = taken[0]
    scan.contested = len(documents) < len(chosen) and not room.full
    return _left(documents, page, size, room.excess)


def _left(
    documents: list[Document],
    page: Sequence[Document],
    size: int,
    excess: Sequence[Document] = (),
) -> Taken:
    """Return what was claimed, and where the next look goes on."""
    ids = {hashable_id(each["_id"]) for each in (*documents, *excess)}
    left = next((each for each in page if hashable_id(each["_id"]) not in ids), None)
    if left is None:
        return documents, {**page[-1], "due": page[-1]["when"]}, len(page) < size
    return documents, {**left, "_id": None, "due": left["when"]}, False
