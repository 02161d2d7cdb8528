"""Claim: how one process takes messages that no other process gets.

A claim puts a lease and a new token on the first messages of a queue. A single message takes one
find-and-modify. Several take three commands: find candidates, update those that are still
claimable, and read what the token holds. The documents are always read after the update, because a
candidate may have been replaced or moved in between.

After a network error the outcome of a claim is unknown. The token then finds what it holds, so no
message stays claimed by accident.

The server ends a claim that takes too long, because it may wait for a message that a transaction
holds. ``transaction_locks`` then claims the messages around it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any

from bson.errors import BSONError

from pyqueue.backends import invalid, namespace, transitions
from pyqueue.backends.byte_limit import (
    CANDIDATES,
    HELD_CLAIMS,
    SIZED_CANDIDATES,
    ByteLimit,
    read_claimed,
)
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.kind import ScanStart
from pyqueue.backends.limits.slot_claims import claim_slots
from pyqueue.backends.scan import ScanState, scan_position
from pyqueue.backends.transaction_locks import claim_unlocked, retry_excluded
from pyqueue.backends.transitions import record_id
from pyqueue.documents import hashable_id
from pyqueue.errors import DuplicateKey, InvalidMessage, TimeLimitReached, Unavailable
from pyqueue.messages import Message
from pyqueue.requests import Document, Filter, Find, FindAndModify, Plan, ServerTime, Update

#: The most messages of one claim: above about 100, competing claims collapse.
MAX_CLAIM = 100
#: How often the claim of one message is repeated after network errors.
MAX_REPEATS = 2

#: A claimed document and its message.
Claimed = tuple[Document, Message[Any]]
ClaimUpdate = Mapping[str, Mapping[str, Any]]
#: The documents that were claimed; the last candidate, if all before it are claimed by now; and
#: whether the scan saw the end of the queue.
Taken = tuple[list[Document], Document | None, bool]
#: Claims messages that match. The result is None if the server was too slow for the limit.
Take = Callable[[ClaimTerms, ScanState, Filter, datetime, int, ByteLimit], Plan[Taken | None]]


def claim(
    terms: ClaimTerms,
    scan: ScanState,
    now: datetime,
    wanted: int,
    room: ByteLimit,
    *,
    delete: bool,
    take: Take | None = None,
) -> Plan[tuple[list[Document], bool]]:
    """Claim the first messages of a queue, and update the scan state.

    Args:
        terms: how to claim.
        scan: what this process knows about the head of the queue.
        now: the instant.
        wanted: how many to claim at most, but for callers that come meanwhile.
        room: how many bytes to claim at most. It gets what was claimed and does not fit.
        delete: delete the first message instead of claiming it.
        take: how to choose and claim messages; None: the first ones.

    Returns:
        The claimed documents, and whether the queue had no more.
    """
    kind, locked, by_level = terms.kind, scan.locked, terms.by_level
    start = scan.start(now, by_level=by_level)  # None for a kind that does not scan forward
    match = locked.passing_over(_claimable(terms, scan, now, start))
    if delete:
        taken = yield from _pop_first(terms, scan, match, now)
    else:
        taken = yield from (take or take_first)(terms, scan, match, now, wanted, room)
    if taken is None:  # the server is slow, and the next claim has a longer limit
        after = yield from ServerTime()
        return (yield from claim(terms, scan, after, wanted, room, delete=delete, take=take))
    documents, candidate, ended = taken
    if room.full and not documents:
        return [], False  # it claimed nothing, so it learnt nothing about the head of the queue
    after = yield from ServerTime()
    if kind.scans_forward:
        last = None if candidate is None else scan_position(candidate, now)
        level = None if candidate is None else candidate.get("priority")
        behind = locked.first_when
        if behind is not None and last is not None:
            last = min(last, (behind, None), key=lambda each: each[0])
        # What is passed over is still there: the next scans begin before it.
        at_end = ended and behind is None
        scan.scanned(
            start, now, after, last, terms.poll_s, ended=at_end, by_level=by_level, level=level
        )
        if by_level and behind is not None:
            scan.levels.move_back(behind)
        if (by_level or not documents) and scan.wants_sentinel(after):
            with suppress(Unavailable) if documents else nullcontext():  # they must reach callers
                yield from _move_sentinels(terms.queue, scan, after)
    if not documents and start is not None and scan.start(after, by_level=by_level) is None:
        # A rescan is due.
        return (yield from claim(terms, scan, after, wanted, room, delete=delete, take=take))
    if locked.retry_at is not None:
        scan.wake_at(locked.retry_at)
    return documents, ended


def _claimable(
    terms: ClaimTerms, scan: ScanState, now: datetime, start: ScanStart | None
) -> Filter:
    """Return the filter of the messages that may be claimed."""
    if terms.by_level:
        return scan.levels.claimable(terms.queue, now)
    return terms.kind.claimable(terms.queue, now, start)


def _move_sentinels(queue: str, scan: ScanState, now: datetime) -> Plan[None]:
    """Put the record of the queue, and those of its levels, ahead of now, where scans then end."""
    scan.sentinel = now + timedelta(seconds=2)
    records: list[object] = [record_id(queue)]
    records += [transitions.level_record_id(queue, level) for level in scan.levels.in_use]
    behind = {"_id": {"$in": records}, "when": {"$lt": now + timedelta(seconds=1)}}
    ahead = {"$set": {"when": scan.sentinel}}
    # The driver repeats an update of one after a network error.
    yield from Update(behind, ahead, many=len(records) > 1, w1=True)


def _taken(document: Document | None) -> Taken:
    return ([], None, True) if document is None else ([document], document, False)


def _pop_first(
    terms: ClaimTerms, scan: ScanState, match: Filter, now: datetime
) -> Plan[Taken | None]:
    order, index = terms.scan
    try:
        document = yield from FindAndModify(match, None, sort=order, hint=index)
    except Unavailable:
        scan.locked.on_time_limit(now)  # it may have met a locked message
        raise
    except (InvalidMessage, BSONError) as error:
        text = f"payload: what was popped cannot be read, and is gone: {error}"
        raise InvalidMessage(text) from error
    return _taken(document)


def take_first(
    terms: ClaimTerms,
    scan: ScanState,
    match: Filter,
    now: datetime,
    wanted: int,
    room: ByteLimit,
) -> Plan[Taken | None]:
    """Claim messages. The result is None if the server was too slow for the limit of a claim."""
    locked, update = scan.locked, terms.update(now)
    limit_s = locked.limit_s(now)
    room.begin()
    few = wanted if wanted == 1 else room.few(wanted)  # of those whose size is not looked at
    try:
        if (
            limit_s
            and terms.alike
            and (yield from retry_excluded(terms.alone(update, now), locked, few))
        ):
            return room.cut((yield from _held(terms, update))), None, False
        if wanted == 1 and room.takes_any:
            return _taken((yield from _claim_first(terms, match, now, update, limit_s)))
        return (yield from _claim_many(terms, scan, match, now, wanted, room, update, limit_s))
    except TimeLimitReached:
        if limit_s is None or not terms.alike:
            raise
        found = yield from _claim_unlocked(terms, scan, match, now, few, update)
        return None if found is None else (room.cut(found), None, False)
    except DuplicateKey:
        scan.contested = scan.groups.meets_locks = True  # another message of a group is held
        return room.cut((yield from _held(terms, update))), None, False
    except (InvalidMessage, BSONError):
        found = yield from _claim_each(
            terms, match, now, few, room, update, limit_s, more=terms.alike
        )
        return room.cut(found), None, False


def _claim_first(
    terms: ClaimTerms, match: Filter, now: datetime, update: ClaimUpdate, limit_s: float | None
) -> Plan[Document | None]:
    order, index = terms.scan
    after, repeats = now, MAX_REPEATS
    while True:
        try:
            return (
                yield from FindAndModify(
                    match,
                    update,
                    sort=order,
                    hint=index,
                    w1=True,
                    max_time_s=terms.left_s(now, after, terms.recovery_timeout_s),
                    server_limit_s=limit_s,
                )
            )
        except Unavailable as error:
            # The server may have claimed a message. If so, the token finds it.
            after = yield from ServerTime()
            found = yield from _held(terms, update, terms.left_s(now, after))
            if found:
                return found[0]
            if not repeats or limit_s is None or isinstance(error, TimeLimitReached):
                raise
        # The driver does not repeat a command with a limit, and there is a primary again.
        repeats -= 1
        after = yield from ServerTime()


def _held(
    terms: ClaimTerms, update: ClaimUpdate, timeout_s: float | None = None
) -> Plan[list[Document]]:
    """Return what a claim holds."""
    held = transitions.token_filter(terms.queue, update)
    return (yield from Find(held, hint=namespace.HOT, max_time_s=timeout_s))


def _claim_unlocked(
    terms: ClaimTerms,
    scan: ScanState,
    match: Filter,
    now: datetime,
    wanted: int,
    update: ClaimUpdate,
) -> Plan[list[Document] | None]:
    """Claim one by one after a claim timed out. None: the server is slow; nothing is claimed."""
    lost: Unavailable | None = None
    quick = True
    try:
        alone = terms.alone(update, now)
        quick = yield from claim_unlocked(alone, terms.scan, scan.locked, match, wanted)
    except Unavailable as error:
        lost = error
    documents = yield from _held(terms, update)
    if lost and not documents:
        raise lost
    return documents if documents or quick else None


def _candidates(
    terms: ClaimTerms, scan: ScanState, match: Filter, wanted: int, skip: int, room: ByteLimit
) -> Plan[tuple[list[Document], int]]:
    """Read what could be claimed, as far as it fits, and return how many messages are wanted now.

    This takes in callers that come meanwhile. Otherwise the callers of a process would divide into
    groups, each of which waits for the claims of the other, and small groups cost most.
    """
    order, index = terms.scan
    sized = room.wants_sizes(wanted)
    fields = SIZED_CANDIDATES if sized else CANDIDATES
    if terms.by_level:
        fields = {**fields, "priority": 1}  # the index contains it
    # As many may come as the last claim had.
    limit = wanted if sized else max(wanted, min(wanted + scan.last_claim, MAX_CLAIM))
    if terms.chosen is None or sized:
        seen = yield from Find(match, fields, sort=order, limit=limit, skip=skip, hint=index)
    else:
        seen = list(terms.chosen[:limit])
    if sized:
        return seen[: room.fitting([each.get("bytes", 0) for each in seen])], wanted
    if len(seen) > wanted:
        # More than it has read, it leaves to the next scan: the queue does not end here.
        wanted = min(wanted + (yield from room.latecomers()), limit)
    scan.last_claim = min(len(seen), wanted)
    return seen[:wanted], wanted


def _random_skip(terms: ClaimTerms, wanted: int) -> int:
    """Return how many candidates to leave to competing processes.

    A scan by level leaves none, or it would claim lower levels before higher ones.
    """
    if terms.by_level or terms.chosen is not None:
        return 0
    return random.randrange(2 * wanted)


def _claim_many(
    terms: ClaimTerms,
    scan: ScanState,
    match: Filter,
    now: datetime,
    wanted: int,
    room: ByteLimit,
    update: ClaimUpdate,
    limit_s: float | None,
) -> Plan[Taken]:
    """Claim up to ``wanted`` messages with one update."""
    skip = _random_skip(terms, wanted) if scan.contested else 0
    repeated, after = False, now
    while True:
        room.begin()
        seen, wanted = yield from _candidates(terms, scan, match, wanted, skip, room)
        if room.full and not seen:
            return [], None, False
        ids = [each["_id"] for each in seen]
        if not ids and not skip:
            scan.contested = False
            return [], None, True
        matched = 0
        lost: Unavailable | None = None
        if ids:
            left_s = terms.left_s(now, after, terms.recovery_timeout_s)
            try:
                matched = yield from _write_claims(terms, ids, now, update, left_s, limit_s)
            except Unavailable as error:
                lost = error  # the driver does not repeat an update of many; the token decides
                after = yield from ServerTime()
        scan.contested = matched < len(ids) and not lost
        if matched or lost or terms.chosen:
            mine = {"_id": {"$in": ids}, "token": update["$set"]["token"]}
            expected, timeout_s = matched, None
            if lost:
                expected, timeout_s = len(ids), terms.left_s(now, after)
            found = yield from read_claimed(room, mine, ids, expected, timeout_s)
            if lost and not found and not room.excess:
                if repeated or not terms.alike or isinstance(lost, TimeLimitReached):
                    raise lost
                repeated = True  # the update never arrived, and the server is back
                after = yield from ServerTime()
                continue
            # After a skip, nothing is known about what lies before. A lost update may have stopped
            # half way.
            last = None if skip or lost else seen[-1]
            if room.excess and last and found:
                last = found[-1]
            return found, last, not skip and not lost and not room.full and len(ids) < wanted
        # Other processes claimed all candidates, or there are none that far on.
        skip = _random_skip(terms, wanted) if ids else 0


def _write_claims(
    terms: ClaimTerms,
    ids: Sequence[Any],
    now: datetime,
    update: ClaimUpdate,
    timeout_s: float,
    limit_s: float | None,
) -> Plan[int]:
    """Claim messages that are still free. Return how many."""
    if terms.slots is None or terms.alike:
        change = yield from Update(
            terms.free(ids, now),
            update,
            many=True,
            w1=True,
            max_time_s=timeout_s,
            server_limit_s=limit_s,
        )
        return change.matched
    pairs = [
        (
            {**terms.free((), now), "_id": id},
            {**update, "$set": {**update["$set"], "slot": terms.slots[hashable_id(id)]}},
        )
        for id in ids
    ]
    terms_of = terms.queue, terms.kind, terms.dead_letter
    return (yield from claim_slots(*terms_of, pairs, now, timeout_s))


def _claim_each(
    terms: ClaimTerms,
    match: Filter,
    now: datetime,
    wanted: int,
    room: ByteLimit,
    update: ClaimUpdate,
    limit_s: float | None,
    *,
    more: bool,
) -> Plan[list[Document]]:
    """Claim one by one after the server refused a claim or returned an unreadable document.

    The server cannot increment ``tries`` that are not a number, and it refuses a document that
    would become too large. Such documents are buried on the way. Without ``more``, this only reads
    what is claimed already.
    """
    kind, queue, (order, index) = terms.kind, terms.queue, terms.scan
    held_filter = transitions.token_filter(queue, update)
    held = yield from Find(held_filter, HELD_CLAIMS, hint=namespace.HOT)
    if more and len(held) < wanted:
        free = yield from Find(match, {"_id": 1}, sort=order, limit=wanted - len(held), hint=index)
        for each in free:
            try:
                yield from terms.alone(update, now).claim(each["_id"], limit_s)
            except TimeLimitReached:
                if limit_s is None:
                    raise  # else it may be locked, and the next claim finds out
        held = yield from Find(held_filter, HELD_CLAIMS, hint=namespace.HOT)
    room.excess += held[wanted:]
    taken: list[Document] = []
    for each in held[:wanted]:
        mine = {"_id": each["_id"], "token": update["$set"]["token"]}
        try:
            taken += yield from Find(mine, limit=1)
        except (InvalidMessage, BSONError) as fault:
            yield from invalid.bury_unclaimable(queue, kind, terms.dead_letter, mine, fault, now)
    return taken
