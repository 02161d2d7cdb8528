"""Claim from a queue with a rate: each claimed message needs a permit; see ``rates``.

A scan counts the messages that it could claim, and asks for one permit for each of them. It claims
no more messages than it gets permits for, and gives unused permits back. Without a permit it claims
nothing, and the consumer waits until the next message may start.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pyqueue.backends.claim_terms import Choice, Scan
from pyqueue.backends.claiming import MAX_CLAIM, Take, Taken, take_first
from pyqueue.backends.limits.permits import Permits
from pyqueue.documents import hashable_id
from pyqueue.limits import WHOLE_QUEUE
from pyqueue.requests import Document, Find, Plan

#: The fields that a scan reads of each message.
FIELDS: Final = {"_id": 1, "when": 1}
#: How many messages a scan reads for each wanted message if other processes compete for them.
PAGE_FACTOR: Final = 4


def paced(take: Take | None) -> Take:
    """Return a function that claims only with permits, and by calling ``take`` if it is given."""

    def take_paced(scan: Scan) -> Plan[Taken | None]:
        state, followed, now = scan.state, scan.state.limit, scan.now
        followed.blocked_until = followed.next_start if followed.waits(now) else None
        if followed.blocked_until is not None:
            return Taken([])
        size = _page_size(scan)
        order, index = scan.ordering
        fields = {**FIELDS, **scan.line.fields}
        page = yield from Find(scan.match, fields, sort=order, limit=size, hint=index)
        if not page:
            state.contested = False
            return Taken([], ended=True)
        wanted = min(scan.wanted, len(page))
        permits, contested = Permits(scan.terms.queue, followed), state.contested
        granted = yield from permits.number(wanted, now)
        taken: Taken | None = Taken.of_page([], page, (), size)
        if granted:
            scan.room.closed = True  # calls that arrive later have no permits
            within = replace(scan, until=permits.until, wanted=granted)
            if take is None:
                taken = yield from _claim_from(page, size, within)
            else:
                taken = yield from take(within)
            used = 0 if taken is None else len(taken.documents)
            late = used < granted and (yield from permits.late())
            yield from permits.give_back_unused({WHOLE_QUEUE: used})
            if late and taken is not None:
                # The server refused the claims because they were late, which does not mean that
                # other processes compete. The page is still valid, so the consumer scans at once.
                state.contested, followed.blocked_until = contested, now
                return _taken_from(page, size, scan, taken.documents)
            if used < granted:  # the permits were not the limit
                return taken
        if granted < wanted:
            followed.blocked_until = followed.next_start or now
        return taken

    return take_paced


def _page_size(scan: Scan) -> int:
    wanted = scan.wanted
    return max(wanted, min(wanted * PAGE_FACTOR, MAX_CLAIM)) if scan.state.contested else wanted


def _claim_from(page: Sequence[Document], size: int, scan: Scan) -> Plan[Taken | None]:
    """Claim the wanted messages of a page. ``size``: the maximum number of messages on it."""
    chosen = page[: scan.wanted]
    if scan.state.contested and not scan.line.in_ranges:  # otherwise later ranges would come first
        chosen = random.sample(page, min(scan.wanted, len(page)))
    taken = yield from take_first(scan.choose(Choice(chosen)))
    if taken is None:
        return None
    scan.state.contested = len(taken.documents) < len(chosen) and not scan.room.full
    return _taken_from(page, size, scan, taken.documents)


def _taken_from(page: Sequence[Document], size: int, scan: Scan, claimed: list[Document]) -> Taken:
    """Return the result of a scan: the claimed messages, and where the next scan begins."""
    done = {hashable_id(each["_id"]) for each in (*claimed, *scan.room.excess)}
    return Taken.of_page(claimed, page, done, size)
