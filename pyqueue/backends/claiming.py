"""Claim: how one process takes messages that no other process gets.

A claim puts a lease and a new token on the first messages of a queue. A single message takes one
find-and-modify. Several messages take three commands: find candidates, update the candidates that
are still claimable, and read the messages that the token holds. The documents are always read after
the update, because a candidate may have been replaced or moved in between.

After a network error, the outcome of a claim is unknown. A read by token then finds the messages
that the claim holds, so no message stays claimed by accident.

The server ends a claim that takes too long, because the claim may wait for a message that a
transaction holds. ``transaction_locks`` then claims the messages around that message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from bson.errors import BSONError

from pyqueue.backends import invalid, namespace, transitions
from pyqueue.backends.byte_limit import CANDIDATES, SIZED_CANDIDATES, SIZED_CLAIMS, read_claimed
from pyqueue.backends.claim_terms import Scan
from pyqueue.backends.kind import ScanStart, UpdateFields
from pyqueue.backends.scan import Scanned, scan_position
from pyqueue.backends.transaction_locks import RECORD_AHEAD, claim_unlocked, retry_excluded
from pyqueue.backends.transitions import record_id
from pyqueue.concurrently import SHORT_AT_ONCE, concurrently
from pyqueue.documents import hashable_id
from pyqueue.errors import DuplicateKey, InvalidMessage, TimeLimitReached, Unavailable
from pyqueue.messages import Message
from pyqueue.requests import Document, Find, FindAndModify, Plan, ServerTime, Update

#: The maximum number of messages of a claim. Larger competing claims slow each other down.
MAX_CLAIM = 100
#: How many times the claim of one message is repeated after network errors.
MAX_REPEATS = 2

#: A claimed document and its message.
Claimed = tuple[Document, Message[Any]]


class Taken(NamedTuple):
    """The messages that a scan claimed, and how far it got."""

    documents: list[Document]
    #: The last candidate, if all candidates before it have been claimed.
    last: Document | None = None
    #: Whether the scan reached the end of the ready messages.
    ended: bool = False
    #: When the scan had read its page, if much of its time was spent on claims, or None.
    read_at: datetime | None = None

    @classmethod
    def of_page(
        cls,
        documents: list[Document],
        page: Sequence[Document],
        done: Collection[Hashable],
        size: int,
    ) -> Taken:
        """Return the result of a scan that read a page.

        Args:
            documents: The messages that the scan claimed.
            page: The messages that the scan read.
            done: The ids on the page that are no longer ready.
            size: How many messages the scan asked for.
        """
        left = next((each for each in page if hashable_id(each["_id"]) not in done), None)
        # ``scan_position`` takes the place from ``due``. On a page, ``when`` is the place.
        if left is None:
            return cls(documents, {**page[-1], "due": page[-1]["when"]}, len(page) < size)
        # Without an id, the next scan begins at this message, not after it.
        return cls(documents, {**left, "_id": None, "due": left["when"]})


#: Claims messages for a scan. The result is None if the server exceeded the time limit.
Take = Callable[[Scan], Plan[Taken | None]]


def claim(scan: Scan, take: Take | None = None) -> Plan[tuple[list[Document], bool]]:
    """Claim the first messages of a queue, and update this process's knowledge of it.

    Args:
        scan: Which messages to claim, and how.
        take: How to choose and claim messages, or None to take the first messages.

    Returns:
        The claimed documents, and whether no more messages were ready.
    """
    terms, state, line, now = scan.terms, scan.state, scan.line, scan.now
    start = state.start(now, line)  # None for a kind that does not scan forward
    candidates = line.claimable(terms.kind, terms.queue, now, start)
    scan.match = state.transaction_locks.passing_over(candidates)
    if scan.deletes:
        take = _pop_first
    taken = yield from (take or take_first)(scan)
    if taken is None:  # the server is slow, and the next claim has a longer limit
        after = yield from ServerTime()
        return (yield from claim(replace(scan, now=after), take))
    documents = taken.documents
    if scan.room.full and not documents:
        return [], False  # it claimed nothing, so it learned nothing about the head of the queue
    after = yield from ServerTime()
    if terms.kind.scans_forward:
        yield from _learn(scan, start, now, taken, after)
    if not documents and start is not None and state.wants_rescan(after):
        return (yield from claim(replace(scan, now=after), take))  # a rescan is due
    if (retry_at := state.transaction_locks.retry_at) is not None:
        state.wake_at(retry_at)
    return documents, taken.ended


def _learn(
    scan: Scan, start: ScanStart | None, began: datetime, taken: Taken, after: datetime
) -> Plan[None]:
    """Learn from a claim where the next scan begins.

    The scan ran from ``began`` to ``after``. It began at ``start``, or at the very start if None.
    """
    terms, state, line, last = scan.terms, scan.state, scan.line, taken.last
    place = None if last is None else scan_position(last, began)
    level = None if last is None else last.get("priority")
    # Excluded messages remain: the queue has not ended, and the next scan begins at the first one.
    passed_over = state.transaction_locks.first_when
    ended = taken.ended and passed_over is None
    seen = Scanned(start, began, taken.read_at or after, place, ended, level=level)
    state.scanned(seen, terms.poll_s, line)
    if passed_over is not None:
        line.move_back(passed_over)
    if (line.in_ranges or not taken.documents) and state.sentinel.is_due(after):
        # The claimed documents must reach the caller even if the record cannot be moved.
        with suppress(Unavailable) if taken.documents else nullcontext():
            yield from _move_sentinels(scan, after)


def _move_sentinels(scan: Scan, now: datetime) -> Plan[None]:
    """Set the ``when`` of the queue's records ahead of now, so that scans end there."""
    queue, state = scan.terms.queue, scan.state
    state.sentinel.at = now + RECORD_AHEAD
    levels = [each for memory in list(state.memories.values()) for each in memory.records(queue)]
    records: list[object] = [record_id(queue), *levels]
    behind = {"_id": {"$in": records}, "when": {"$lt": now + timedelta(seconds=1)}}
    ahead = {"$set": {"when": state.sentinel.at}}
    # The driver repeats an update of one document after a network error.
    yield from Update(behind, ahead, many=len(records) > 1, w1=True)


def _taken(first: Document | None) -> Taken:
    return Taken([], ended=True) if first is None else Taken([first], first)


def _pop_first(scan: Scan) -> Plan[Taken | None]:
    order, index = scan.ordering
    try:
        document = yield from FindAndModify(scan.match, None, sort=order, hint=index)
    except Unavailable:
        # The deletion may have met a message that a transaction holds.
        scan.state.transaction_locks.on_time_limit(scan.now)
        raise
    except (InvalidMessage, BSONError) as error:
        text = f"payload: the popped message cannot be decoded, and was deleted ({error})"
        raise InvalidMessage(text) from error
    return _taken(document)


@dataclass(slots=True)
class _Claim:
    """One attempt of a scan to claim messages."""

    scan: Scan
    update: UpdateFields
    #: How long the server may work on the claim, in seconds, or None if the server is very slow.
    limit_s: float | None
    #: When its last command was sent.
    sent: datetime

    @property
    def token(self) -> str:
        """The token of the claim."""
        return str(self.update["$set"]["token"])

    def left_s(self) -> float:
        """Return the next command's limit in seconds, which leaves time to find out the outcome."""
        terms = self.scan.terms
        return terms.left_s(self.scan.now, self.sent, terms.recovery_timeout_s)

    def held(self, timeout_s: float | None = None) -> Plan[list[Document]]:
        """Return the messages that the claim holds."""
        held = transitions.token_filter(self.scan.terms.queue, self.update)
        return (yield from Find(held, hint=namespace.HOT, max_time_s=timeout_s))


def take_first(scan: Scan) -> Plan[Taken | None]:
    """Claim the first messages of a scan. Return None if the server exceeded the time limit."""
    state, room, wanted = scan.state, scan.room, scan.wanted
    locked = state.transaction_locks
    claim = _Claim(scan, scan.update(), locked.limit_s(scan.now), scan.now)
    room.begin()
    # A claim one by one learns the size of a message only afterwards.
    few = wanted if wanted == 1 else room.few(wanted)
    try:
        # A claim of chosen messages has their slots and permits.
        retries = claim.limit_s and scan.one_update and scan.choice is None
        if retries and (yield from retry_excluded(scan.one_by_one(claim.update), locked, few)):
            return Taken(room.cut((yield from claim.held())))
        if wanted == 1 and room.takes_any:
            return _taken((yield from _claim_first(claim)))
        return (yield from _claim_many(claim))
    except TimeLimitReached:
        if claim.limit_s is None or not scan.one_update:
            raise
        found = yield from _claim_unlocked(claim, few)
        return None if found is None else Taken(room.cut(found))
    except DuplicateKey:
        state.contested = state.groups.meets_locks = True  # another message of a group is held
        return Taken(room.cut((yield from claim.held())))
    except (InvalidMessage, BSONError):
        return Taken(room.cut((yield from _claim_each(claim, few))))


def _claim_first(claim: _Claim) -> Plan[Document | None]:
    scan, repeats = claim.scan, MAX_REPEATS
    order, index = scan.ordering
    while True:
        try:
            return (
                yield from FindAndModify(
                    scan.match,
                    claim.update,
                    sort=order,
                    hint=index,
                    w1=True,
                    max_time_s=claim.left_s(),
                    server_limit_s=claim.limit_s,
                )
            )
        except Unavailable as error:
            # The server may have claimed a message. If so, the token finds it.
            after = yield from ServerTime()
            found = yield from claim.held(scan.terms.left_s(scan.now, after))
            if found:
                return found[0]
            if not repeats or claim.limit_s is None or isinstance(error, TimeLimitReached):
                raise
        # The driver does not repeat a command with a time limit. By now there is a primary.
        repeats -= 1
        claim.sent = yield from ServerTime()


def _claim_unlocked(claim: _Claim, wanted: int) -> Plan[list[Document] | None]:
    """Claim messages one by one after a timeout. Return None if a slow server claimed none."""
    scan, locked = claim.scan, claim.scan.state.transaction_locks
    failure: Unavailable | None = None
    is_quick = True
    try:
        claims = scan.one_by_one(claim.update)
        is_quick = yield from claim_unlocked(claims, scan.ordering, locked, scan.match, wanted)
        if not is_quick:
            locked.on_slow_server(scan.now, (yield from ServerTime()))
    except Unavailable as error:
        failure = error
    documents = yield from claim.held()  # by the token: the claim that timed out may hold some
    if failure and not documents:
        raise failure
    return documents if documents or is_quick else None


def _candidates(scan: Scan, skip: int) -> Plan[list[Document]]:
    """Read the candidates that fit. Increase ``scan.wanted`` for callers that arrived late.

    If late callers were left out, the callers of a process would split into groups that wait for
    each other's claims, and small groups cost most.
    """
    room, wanted, state = scan.room, scan.wanted, scan.state
    order, index = scan.ordering
    sized = room.wants_sizes(wanted)
    fields = {**(SIZED_CANDIDATES if sized else CANDIDATES), **scan.line.fields}
    # Late callers may add up to the size of the last claim.
    limit = wanted if sized else max(wanted, min(wanted + state.last_claim, MAX_CLAIM))
    if scan.choice is None or sized:
        seen = yield from Find(scan.match, fields, sort=order, limit=limit, skip=skip, hint=index)
    else:
        seen = list(scan.choice.documents[:limit])
    if sized:
        return seen[: room.fitting([each.get("bytes", 0) for each in seen])]
    if len(seen) > wanted:
        # Never want more than the read asked for: otherwise the queue would seem to end here.
        wanted = scan.wanted = min(wanted + (yield from room.latecomers()), limit)
    state.last_claim = min(len(seen), wanted)
    return seen[:wanted]


def _random_skip(scan: Scan) -> int:
    """Return how many candidates to leave to competing processes."""
    if scan.line.in_ranges or scan.choice is not None:
        return 0
    return random.randrange(2 * scan.wanted)


def _claim_many(claim: _Claim) -> Plan[Taken]:
    """Claim the wanted messages with one update."""
    scan = claim.scan = replace(claim.scan)  # only this claim serves its late callers
    state, room = scan.state, scan.room
    skip = _random_skip(scan) if state.contested else 0
    was_repeated = False
    while True:
        room.begin()
        seen = yield from _candidates(scan, skip)
        if not seen and room.full:
            return Taken([])
        if not seen and not skip:
            state.contested = False
            return Taken([], ended=True)
        ids = [each["_id"] for each in seen]
        matched, failure = yield from _write_claims(claim, ids)
        state.contested = matched < len(ids) and not failure
        if not matched and not failure and not scan.choice:
            # Other processes claimed all candidates: scan further on. Or the skip went past the
            # end: scan from the start.
            skip = _random_skip(scan) if ids else 0
            continue
        found = yield from _read_claims(claim, ids, matched, failure)
        if found or room.excess or not failure:
            return _taken_of(scan, seen, found, is_certain=not skip and not failure)
        # The update failed and claimed nothing.
        if was_repeated or not scan.one_update or isinstance(failure, TimeLimitReached):
            raise failure
        was_repeated = True  # the update never arrived, and the server is back
        claim.sent = yield from ServerTime()


def _taken_of(
    scan: Scan, seen: Sequence[Document], found: list[Document], *, is_certain: bool
) -> Taken:
    """Return the result of a scan that claimed candidates.

    ``is_certain`` is false after a skip, and after a failed update, which may be half done.
    """
    if not is_certain:
        return Taken(found)
    if scan.room.excess and found:
        return Taken(found, found[-1])
    ended = not scan.room.full and len(seen) < scan.wanted
    return Taken(found, seen[-1], ended)


def _write_claims(claim: _Claim, ids: Sequence[Any]) -> Plan[tuple[int, Unavailable | None]]:
    """Claim the messages with these ids that are still free.

    Returns:
        How many messages were claimed, and the error that makes this number unknown, or None.
    """
    if not ids:
        return 0, None
    scan, left_s = claim.scan, claim.left_s()
    try:
        if scan.choice is not None and scan.choice.claim_each is not None:
            return (yield from scan.choice.claim_each(scan, ids, claim.update, left_s)), None
        change = yield from Update(
            scan.free(ids),
            claim.update,
            many=True,
            w1=True,
            max_time_s=left_s,
            server_limit_s=claim.limit_s,
        )
    except Unavailable as error:
        claim.sent = yield from ServerTime()
        return 0, error  # the driver does not repeat such an update; the token decides
    return change.matched, None


def _read_claims(
    claim: _Claim, ids: Sequence[Any], matched: int, failure: Unavailable | None
) -> Plan[list[Document]]:
    """Return the messages with these ids that were claimed, as far as the byte limit allows."""
    scan = claim.scan
    mine = {"_id": {"$in": ids}, "token": claim.token}
    if failure is None:
        return (yield from read_claimed(scan.room, mine, ids, matched, None))
    # Any of them may be claimed. Read them while enough of the lease is left.
    left_s = scan.terms.left_s(scan.now, claim.sent)
    return (yield from read_claimed(scan.room, mine, ids, len(ids), left_s))


def _claim_each(claim: _Claim, few: int) -> Plan[list[Document]]:
    """Claim messages one by one after the server refused a claim, or a document was unreadable.

    The server cannot increment ``tries`` if it is not a number, and it refuses a document that
    would become too large. Such documents go to the dead-letter queue. The messages that the
    refused claim holds remain, as far as they fit. If they are fewer than ``few``, this claims the
    difference, unless each message needs its own update.
    """
    scan = claim.scan
    order, index = scan.ordering
    mine = transitions.token_filter(scan.terms.queue, claim.update)
    held = yield from Find(mine, SIZED_CLAIMS, hint=namespace.HOT)
    if scan.one_update and len(held) < few:
        rest = few - len(held)
        free = yield from Find(scan.match, {"_id": 1}, sort=order, limit=rest, hint=index)
        for each in free:
            try:
                yield from scan.one_by_one(claim.update).claim(each["_id"], claim.limit_s)
            except TimeLimitReached:
                if claim.limit_s is None:
                    raise  # otherwise it may be locked, and the next claim finds out
        held = yield from Find(mine, SIZED_CLAIMS, hint=namespace.HOT)
    fits = scan.room.fitting([each.get("bytes", 0) for each in held])
    scan.room.excess += held[fits:]
    reads = [_read_or_bury(claim, each["_id"]) for each in held[:fits]]
    return [each for read in (yield from concurrently(reads, SHORT_AT_ONCE)) for each in read]


def _read_or_bury(claim: _Claim, id: Any) -> Plan[list[Document]]:
    one = {"_id": id, "token": claim.token}
    try:
        return (yield from Find(one, limit=1))
    except (InvalidMessage, BSONError) as fault:
        terms, now = claim.scan.terms, claim.scan.now
        yield from invalid.bury_unclaimable(terms.graveyard, one, fault, now)
        return []
