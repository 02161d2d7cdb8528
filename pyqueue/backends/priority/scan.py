"""Claim from a queue with priorities: by level, and from time to time by age.

The record of the queue lists the levels in use. A scan by level misses messages in other levels and
messages without a priority. A scan by age finds them. It replaces one scan in 16, and it follows
each rescan by level that finds nothing. In a strict queue, a search replaces the scan by age. The
search lists missing levels, and gives messages without a priority the default priority.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pyqueue.backends import namespace, transitions
from pyqueue.backends.claim_terms import Scan
from pyqueue.backends.claiming import Take, claim
from pyqueue.backends.namespace import HOT
from pyqueue.backends.pages import page_end
from pyqueue.backends.priority.levels import LevelStarts
from pyqueue.backends.scan import SCAN_ORDER, due_of
from pyqueue.documents import listed_levels, priority_of
from pyqueue.messages import DEFAULT_PRIORITY, HIGHEST_PRIORITY
from pyqueue.requests import Document, Find, Plan, Update

#: The maximum number of messages that one search for unlisted levels reads.
WALK: Final = 100
PRIORITIES: Final = list(range(HIGHEST_PRIORITY + 1))


def claim_next(scan: Scan, take: Take | None = None) -> Plan[tuple[list[Document], bool]]:
    """Claim the next messages of a queue with priorities; see ``claim`` for the arguments."""
    levels = scan.state.of(LevelStarts)
    by_level = replace(scan, line=levels)
    age_turn = bool(levels.in_use) and levels.is_age_turn()
    found: tuple[list[Document], bool] = [], True
    if levels.in_use and not age_turn:
        rescans = levels.rescans
        found = yield from claim(by_level, take)
        if found[0] or scan.room.full or levels.rescans == rescans:
            return found
        # This was a rescan that found nothing. There may be messages in other levels.
    if not levels.strict:
        found = yield from claim(scan, take)
        if found[0] or scan.room.full or not age_turn:
            return found
    elif not (yield from _list_levels(scan, levels)) and not age_turn:
        return found
    return (yield from claim(by_level, take))


def _list_levels(scan: Scan, levels: LevelStarts) -> Plan[bool]:
    """Find messages that scans by level miss, and list their levels. Return whether there are any.

    Other programs wrote these messages. A message without a priority gets the default priority.

    Each call reads up to ``WALK`` messages by age, and the next call continues after them.
    """
    queue = scan.terms.queue
    match = transitions.scan_range(
        queue, {"$lte": scan.now}, levels.walked_to, transitions.messages_only(queue)
    )
    fields = {"_id": 1, "when": 1, "priority": 1}
    page = yield from Find(match, fields, sort=SCAN_ORDER, limit=WALK, hint=HOT)
    levels.walked_to = page_end(page) if len(page) == WALK else None
    without = [each for each in page if priority_of(each) is None]
    unlisted = [each for each in page if priority_of(each) not in levels.in_use]
    if not unlisted:
        return False
    new = {DEFAULT_PRIORITY if (level := priority_of(each)) is None else level for each in unlisted}
    yield from namespace.ensure(queue, scan.terms.kind, None, new)
    levels.in_use = listed_levels([*levels.in_use, *new])
    if without:
        ids = [each["_id"] for each in without]
        still = {"_id": {"$in": ids}, "q": queue, "priority": {"$nin": PRIORITIES}}
        yield from Update(still, {"$set": {"priority": DEFAULT_PRIORITY}}, many=True)
    scan.state.move_start_back(min(map(due_of, unlisted)))
    return True
