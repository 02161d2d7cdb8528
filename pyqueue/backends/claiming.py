"""Claim: how one process takes messages that no other process gets.

A claim puts a lease and a new token on the first messages of a queue. A single message takes one
find-and-modify. Several take three commands: find candidates, update those that are still
claimable, and read what the token holds. The documents are always read after the update, because a
candidate may have been replaced or moved in between.

After a network error the outcome of a claim is unknown. The token then finds what it holds, so no
message stays claimed by accident.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from bson.errors import BSONError

from pyqueue.backends import invalid, namespace, transitions
from pyqueue.backends.kind import Kind
from pyqueue.backends.scan import ScanStart, ScanState, scan_position
from pyqueue.documents import hashable_id
from pyqueue.errors import InvalidMessage, Unavailable
from pyqueue.messages import Message
from pyqueue.requests import Document, Filter, Find, FindAndModify, Plan, ServerTime, Update

__all__ = ["MAX_CLAIM", "ClaimTerms", "Claimed", "claim"]

#: The most messages of one claim: above about 100, competing claims collapse.
MAX_CLAIM = 100

#: A claimed document and its message.
Claimed = tuple[Document, Message[Any]]
ClaimUpdate = Mapping[str, Mapping[str, Any]]


class ClaimTerms(NamedTuple):
    """From which queue a claim takes messages, and what it does with them."""

    queue: str
    kind: Kind
    #: The queue that takes documents that cannot be claimed.
    dead_letter: str
    owner: str
    lease_s: float
    counts_try: bool
    #: The time limit of one command, in seconds.
    command_timeout_s: float
    #: The longest time between rescans of an idle queue, in seconds.
    poll_s: float

    @property
    def claim_timeout_s(self) -> float:
        """The time limit of the claim. It leaves time to find out what became of it."""
        return max(self.command_timeout_s / 2, self.command_timeout_s - 1)

    @property
    def recovery_timeout_s(self) -> float:
        """The time limit for finding out what became of a claim."""
        return self.command_timeout_s - self.claim_timeout_s

    def update(self, now: datetime) -> dict[str, dict[str, Any]]:
        """Return the update of a claim at this instant, with a new token."""
        return transitions.claiming(now, self.lease_s, self.owner, count=self.counts_try)


def claim(
    terms: ClaimTerms, scan: ScanState, now: datetime, wanted: int, *, delete: bool
) -> Plan[tuple[list[Document], bool]]:
    """Claim the first messages of a queue, and update the scan state.

    Args:
        terms: how to claim.
        scan: what this process knows about the head of the queue.
        now: the instant.
        wanted: how many to claim at most.
        delete: delete the first message instead of claiming it.

    Returns:
        The claimed documents, and whether the queue had no more.
    """
    kind = terms.kind
    start = scan.start(now)  # None for a kind that does not scan forward
    match = kind.claimable(terms.queue, now, start)
    update = None if delete else terms.update(now)
    last: ScanStart | None = None
    try:
        if update is None or wanted == 1:
            document = yield from _claim_first(terms, match, update)
            documents = [] if document is None else [document]
            if document is not None:
                last = scan_position(document, now)
            ended = document is None
        else:
            documents, last, ended = yield from _claim_many(terms, scan, match, now, wanted, update)
    except (InvalidMessage, BSONError) as error:
        if update is None:
            text = f"payload: what was popped cannot be read, and is gone: {error}"
            raise InvalidMessage(text) from error
        documents = yield from _claim_each(terms, match, now, wanted, update)
        ended = False
    after = yield from ServerTime()
    if kind.scans_forward:
        scan.scanned(start, now, after, last, terms.poll_s, ended=ended)
        if not documents and scan.wants_sentinel(after):
            yield from _move_sentinel(terms.queue, scan, after)
    if not documents and start is not None and scan.start(after) is None:
        return (yield from claim(terms, scan, after, wanted, delete=delete))  # a rescan is due
    return documents, ended


def _move_sentinel(queue: str, scan: ScanState, now: datetime) -> Plan[None]:
    """Put the record of the queue ahead of now, where empty scans then end."""
    scan.sentinel = now + timedelta(seconds=2)
    behind = {"_id": namespace.record_id(queue), "when": {"$lt": now + timedelta(seconds=1)}}
    yield from Update(behind, {"$set": {"when": scan.sentinel}}, w1=True)


def _claim_first(
    terms: ClaimTerms, match: Filter, update: ClaimUpdate | None
) -> Plan[Document | None]:
    kind = terms.kind
    if update is None:
        return (yield from FindAndModify(match, None, sort=kind.order, hint=kind.index))
    try:
        return (
            yield from FindAndModify(
                match,
                update,
                sort=kind.order,
                hint=kind.index,
                w1=True,
                max_time_s=terms.claim_timeout_s,
            )
        )
    except Unavailable:
        # The server may have claimed a message. If so, the token finds it.
        held = transitions.token_filter(terms.queue, update)
        found = yield from Find(held, limit=1, hint=kind.index, max_time_s=terms.recovery_timeout_s)
        if not found:
            raise
        return found[0]


def _claim_many(
    terms: ClaimTerms,
    scan: ScanState,
    match: Filter,
    now: datetime,
    wanted: int,
    update: ClaimUpdate,
) -> Plan[tuple[list[Document], ScanStart | None, bool]]:
    """Claim up to ``wanted`` messages.

    Returns:
        The documents; the position of the last candidate, if all before it are claimed by now; and
        whether the scan saw the end of the queue.
    """
    kind = terms.kind
    skip = random.randrange(2 * wanted) if scan.contested else 0
    repeated = False
    while True:
        seen = yield from Find(
            match,
            {"_id": 1, "when": 1},
            sort=kind.order,
            limit=wanted,
            skip=skip,
            hint=kind.index,
        )
        ids = [each["_id"] for each in seen]
        if not ids and not skip:
            scan.contested = False
            return [], None, True
        matched = 0
        lost: Unavailable | None = None
        if ids:
            still = transitions.still_claimable(terms.queue, ids, now)
            limit_s = terms.claim_timeout_s
            try:
                change = yield from Update(still, update, many=True, w1=True, max_time_s=limit_s)
                matched = change.matched
            except Unavailable as error:
                lost = error  # the driver does not repeat an update of many; the token decides
        scan.contested = matched < len(ids)
        if matched or lost:
            mine = {"_id": {"$in": ids}, "token": update["$set"]["token"]}
            found = yield from Find(mine, max_time_s=terms.recovery_timeout_s if lost else None)
            if lost and not found:
                if repeated:
                    raise lost
                repeated = True  # the update never arrived, and the server is back
                continue
            place = {hashable_id(id): index for index, id in enumerate(ids)}
            found.sort(key=lambda each: place[hashable_id(each["_id"])])
            # After a skip, nothing is known about what lies before.
            last = None if skip else scan_position(seen[-1], now)
            return found, last, not skip and len(ids) < wanted
        # Other processes claimed all candidates, or there are none that far on.
        skip = random.randrange(2 * wanted) if ids else 0


def _claim_each(
    terms: ClaimTerms, match: Filter, now: datetime, wanted: int, update: ClaimUpdate
) -> Plan[list[Document]]:
    """Claim one by one after the server refused a claim or returned an unreadable document.

    The server cannot increment ``tries`` that are not a number, and it refuses a document that
    would become too large. Such documents are buried on the way.
    """
    kind, queue = terms.kind, terms.queue
    held_filter = transitions.token_filter(queue, update)
    held = yield from Find(held_filter, {"_id": 1}, hint=kind.index)
    if len(held) < wanted:
        free = yield from Find(
            match, {"_id": 1}, sort=kind.order, limit=wanted - len(held), hint=kind.index
        )
        for each in free:
            one = {"_id": each["_id"], "q": queue, "when": {"$lte": now}}
            try:
                yield from Update(one, update, w1=True)
            except InvalidMessage as refusal:
                fault = yield from invalid.find_fault(one)
                if fault is not None:
                    yield from invalid.bury_unclaimable(
                        queue, kind, terms.dead_letter, one, fault, now
                    )
                elif (yield from Find(one, {"_id": 1}, limit=1)):
                    raise refusal
                # Otherwise another process has claimed it.
        held = yield from Find(held_filter, {"_id": 1}, hint=kind.index)
    taken: list[Document] = []
    for each in held:
        mine = {"_id": each["_id"], "token": update["$set"]["token"]}
        try:
            taken += yield from Find(mine, limit=1)
        except (InvalidMessage, BSONError) as fault:
            yield from invalid.bury_unclaimable(queue, kind, terms.dead_letter, mine, fault, now)
    return taken
