"""Claim from a queue with a limit: as many of the first messages as may start.

A look reads a page of what is ready, in the order of the queue, asks how many messages may start,
and claims the first ones of the page. What is left waits where it is. The end of a claim signals,
so that consumers that wait look at once; see ``slots``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from pyqueue.backends.byte_limit import ByteLimit
from pyqueue.backends.claiming import MAX_CLAIM, ClaimTerms, Taken, take_first
from pyqueue.backends.scan import ScanState
from pyqueue.backends.slots import free_slots
from pyqueue.documents import hashable_id
from pyqueue.errors import Unavailable
from pyqueue.requests import Document, Filter, Find, Plan

__all__ = ["take"]

#: What a look reads of each message.
FIELDS: Final = {"_id": 1, "when": 1}
#: How many messages a look reads for each one that is wanted, beside competing processes.
PAGE_FACTOR: Final = 4


def take(
    terms: ClaimTerms, scan: ScanState, match: Filter, now: datetime, wanted: int, room: ByteLimit
) -> Plan[Taken | None]:
    """Claim the first messages, as many as have a slot."""
    scan.limit.blocked_until = None
    limit, (order, index) = scan.limit.limit, terms.scan
    assert limit is not None
    assert limit.concurrency is not None
    fields = {**FIELDS, "priority": 1} if terms.by_level else FIELDS
    size = min(wanted * PAGE_FACTOR, MAX_CLAIM) if scan.contested else wanted
    page = yield from Find(match, fields, sort=order, limit=size, hint=index)
    if not page:
        scan.contested = False
        return [], None, True
    most = min(wanted, len(page))
    free = yield from free_slots(terms.queue, terms.kind, limit.concurrency, most, now)
    number = min(most, len(free.names))
    if number < wanted and number < len(page):
        scan.limit.blocked_until = free.until or now
    documents: list[Document] = []
    if number:
        chosen = page[:number]
        if scan.contested and not terms.by_level:  # else lower levels would come before higher ones
            chosen = random.sample(page, number)
        taken = yield from _claim(terms, scan, chosen, free.names, now, room)
        if taken is None:
            return None
        documents = taken
        scan.contested = len(documents) < number
    done = {hashable_id(each["_id"]) for each in (*documents, *room.excess)}
    left = next((each for each in page if hashable_id(each["_id"]) not in done), None)
    if left is None:
        return documents, page[-1], len(page) < size
    return documents, {**left, "_id": None}, False


def _claim(
    terms: ClaimTerms,
    scan: ScanState,
    chosen: Sequence[Document],
    names: Sequence[str],
    now: datetime,
    room: ByteLimit,
) -> Plan[list[Document] | None]:
    """Claim messages, each with a slot. The result is None if the server is too slow."""
    if scan.locked.due(now) is not None:
        chosen = chosen[:1]
    while True:
        ids = [each["_id"] for each in chosen]
        free = {"_id": {"$in": ids}, "q": terms.queue, "when": {"$lte": now}}
        slots = dict(zip(map(hashable_id, ids), names, strict=False))
        alone = terms._replace(chosen=chosen, slots=slots)
        if len(ids) == 1:
            taken = yield from take_first(alone, scan, free, now, 1, room)
            return None if taken is None else taken[0]
        # What stops a claim of several, such as a transaction, may spare a claim of one.
        with suppress(Unavailable):
            taken = yield from take_first(alone, scan, free, now, len(ids), room)
            if taken is not None and (taken[0] or room.full):
                return taken[0]
        chosen = chosen[:1]
