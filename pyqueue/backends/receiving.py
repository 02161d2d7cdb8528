"""Receive: wait for messages, claim them, and check them before a caller gets them.

A reserve is a claim. A pop of one message without a model and without history is a bare delete.
Every other pop claims the messages, checks them and finishes them before it returns, so that it
never loses what it could not deliver. Waiting happens between claims, and a caller that is
cancelled holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from pyqueue import arguments
from pyqueue.backends import invalid, namespace, reading, recovering
from pyqueue.backends.bucket.stock import Stock
from pyqueue.backends.byte_limit import ByteLimit, Limits, size_of
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.claiming import MAX_CLAIM, Claimed
from pyqueue.backends.giving_back import (
    give_back,
    insert_again,
    renamed,
    undo_pop,
    undo_reserve,
)
from pyqueue.backends.options import Options, QueueTerms
from pyqueue.backends.scan import ScanState
from pyqueue.documents import hashable_id, message_of
from pyqueue.errors import ConfigurationError, InvalidMessage, Unavailable
from pyqueue.limits import check_call
from pyqueue.messages import MAX_RECEIVED_BYTES, Duration, Message
from pyqueue.payloads import Codec
from pyqueue.requests import (
    Coalesce,
    Delete,
    Document,
    Find,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Update,
    Wait,
)

#: How long a pause may go unnoticed without a bus.
PAUSE_READ_INTERVAL: Final = timedelta(seconds=5)
#: How long a receive looks on at most after it has claimed something, if the queue has a limit.
#: Permits and slots come meanwhile, and the leases of its first messages would end.
LOOK_ON: Final = timedelta(seconds=0.5)
#: The shortest time between two reads of the next ``when``.
NEXT_WHEN_INTERVAL: Final = timedelta(seconds=1)


class Waiting(Protocol):
    """The consumers of one queue that wait in this client."""

    scan: ScanState
    misfits: invalid.Misfits
    #: The packs of the queue that this client holds.
    stock: Stock

    def wake_next(self, found: bool) -> None:
        """Wake the next consumers, after one has received something or given up."""
        ...


class Reception(NamedTuple):
    """How messages are received. Concurrent calls with equal values share their claims."""

    terms: ClaimTerms
    codec: Codec[Any]
    max_tries: int | None
    history_s: float | None
    pop: bool
    misfits: invalid.Misfits

    @property
    def bare(self) -> bool:
        """Whether a single message may be deleted without claiming it first."""
        bare_pop = self.pop and self.terms.kind.bare_pop
        return bare_pop and self.codec.model is None and self.history_s is None

    @property
    def lease_s(self) -> float | None:
        """The length of the lease of a reservation; None for a pop."""
        return None if self.pop else self.terms.lease_s


class Claims(NamedTuple):
    """How the claims of a queue are made, for a kind with other claims than the standard one."""

    #: Claim once for several callers; see ``_claim_for_callers``.
    claim: Callable[[Reception, ScanState, list[Limits]], Plan[list[list[Claimed]]]]
    #: Give back what was received for a cancelled caller.
    undo: Callable[[Reception, Sequence[Claimed]], Plan[None]]
    #: Whether threads share claims.
    threads: bool = False

    def together(
        self, how: Reception, scan: ScanState, limits: Limits
    ) -> Coalesce[Limits, list[Claimed]]:
        """Return the request of a claim that calls which receive in the same way share."""
        return Coalesce(
            how,
            limits,
            partial(self.claim, how, scan),
            undo=partial(self.undo, how),
            max_in_flight=1,  # concurrent claims of one process would compete
            threads=self.threads,
        )


def receive(
    queue_terms: QueueTerms,
    waiting: Waiting,
    limit: int,
    *,
    claims: Claims,
    timeout: Duration | None,
    max_bytes: int = MAX_RECEIVED_BYTES,
    pop: bool = False,
    lease: Duration | None = None,
    misfits: invalid.Misfits | None = None,
) -> Plan[list[Any]]:
    """Receive up to ``limit`` messages; wait for the first one up to ``timeout``."""
    queue, kind, options = queue_terms.queue, queue_terms.kind, queue_terms.options
    timeout_s, lease_s = checked(limit, max_bytes, timeout, lease)
    lease_s = queue_terms.command_timeout_s if pop else lease_s or options.lease
    terms = ClaimTerms.of(queue_terms, lease_s, counts_try=not pop)
    misfits = misfits or waiting.misfits
    how = Reception(terms, queue_terms.codec, options.max_tries, options.history, pop, misfits)
    scan = waiting.scan
    yield from namespace.ensure(queue, kind, options, receives=True)
    now = yield from ServerTime()
    # On the monotonic clock: the primary's may be set while the caller waits.
    deadline = (yield from MonotonicTime()) + timeout_s if timeout_s else None
    found = False
    try:
        while True:
            scan.observe(now)
            if _wants_record(scan, now):
                yield from _read_record(terms, options, scan, now)
            yield from recovering.recover_next(queue, scan, now)
            check_call(queue, scan.limit.limit, "pop" if pop else None)
            if not _stopped(scan):
                claimed = yield from claims.together(how, scan, Limits(limit, max_bytes))
                if claimed:
                    found = True
                    return [message for _, message in claimed]
            if timeout_s == 0 or (deadline and (yield from MonotonicTime()) >= deadline):
                return []
            now = yield from ServerTime()
            if (yield from Listen(waiting)):
                now = yield from ServerTime()
                continue  # the subscription is new: look again, so that no message is missed
            look = False
            while not look:
                until = yield from _wake_time(queue, scan, now, options.poll)
                look = yield from Wait(waiting, until, deadline)
                now = yield from ServerTime()
    finally:
        waiting.wake_next(found)


def checked(
    limit: int, max_bytes: int, timeout: Duration | None, lease: Duration | None
) -> tuple[float | None, float | None]:
    """Check the arguments of a receive. Return its timeout and its lease, in seconds."""
    arguments.count("limit", limit)
    arguments.count("max_bytes", max_bytes)
    timeout_s = None if timeout is None else arguments.duration("timeout", timeout)
    lease_s = None if lease is None else arguments.duration("lease", lease, positive=True)
    return timeout_s, lease_s


# ---- waiting


def _wants_record(scan: ScanState, now: datetime) -> bool:
    if not scan.limit.known:
        return True  # another thread may be reading it
    return scan.flag_read is None or now - scan.flag_read >= PAUSE_READ_INTERVAL


def _read_record(terms: ClaimTerms, options: Options, scan: ScanState, now: datetime) -> Plan[None]:
    scan.flag_read = now
    record = yield from namespace.followed(terms.queue, terms.kind, options, terms.owner)
    yield from terms.kind.follow(terms, scan, record, now)
    scan.paused = bool(record.get("paused"))


def _stopped(scan: ScanState) -> bool:
    """Return whether nothing may be claimed."""
    return scan.paused or scan.limit.unreadable is not None


def _wake_time(queue: str, scan: ScanState, now: datetime, poll_s: float) -> Plan[datetime]:
    """Return when to look again if no event arrives."""
    until = now + timedelta(seconds=poll_s)
    if _stopped(scan):
        return min(until, now + PAUSE_READ_INTERVAL)
    if scan.limit.next_start is not None and scan.limit.waits(now):
        return max(min(until, scan.limit.next_start), now + timedelta(milliseconds=1))
    if scan.rescan_at is not None:
        until = min(until, scan.rescan_at)
    if (start := scan.limit.first_start(now)) is not None:
        until = min(until, start)
    if scan.limit.blocked_until is not None:  # what is ready by then does not matter
        until = min(until, scan.limit.blocked_until, now + PAUSE_READ_INTERVAL)
        return max(until, now + timedelta(milliseconds=1))
    if not scan.due_known:
        if scan.due_read is not None and scan.due_read + NEXT_WHEN_INTERVAL > now:
            until = min(until, scan.due_read + NEXT_WHEN_INTERVAL)
        else:
            scan.due_known, scan.due_read = True, now
            when = yield from reading.next_when(queue, scan.lower_bound)
            if when is not None:
                scan.wake_at(when)
    if scan.due is not None:
        until = min(until, scan.due)
    return max(until, now + timedelta(milliseconds=1))


# ---- claiming


def undo(how: Reception, claimed: Sequence[Claimed]) -> Plan[None]:
    """Give back what was received for a cancelled caller."""
    queue, kind = how.terms.queue, how.terms.kind
    if how.pop:
        return undo_pop(queue, kind, how.history_s, claimed)
    return undo_reserve(queue, kind, claimed)


def _claim_for_callers(
    how: Reception, scan: ScanState, limits: list[Limits]
) -> Plan[list[list[Claimed]]]:
    """Claim once for several callers, and for those that come meanwhile; split the result."""
    room = ByteLimit(scan, limits)
    claimed, finished = yield from _claim_messages(how, scan, limits, room)
    shares, rest = _split(claimed, limits, room)
    if rest:
        yield from give_back_excess(how.terms, [document for document, _ in rest])
    if not how.pop or finished or not claimed:
        return shares
    now = yield from ServerTime()
    taken = [document for share in shares for document, _ in share]
    lost = yield from finish_popped(how.terms, how.history_s, taken, now)
    return [
        [
            (document, message)
            for document, message in share
            if (hashable_id(document["_id"]), document["token"]) not in lost
        ]
        for share in shares
    ]


def _split(
    claimed: list[Claimed], limits: Sequence[Limits], room: ByteLimit
) -> tuple[list[list[Claimed]], list[Claimed]]:
    """Return the share of each caller, in order, and what does not fit into any of them."""
    if len(limits) == 1:
        return [claimed], []
    # The sizes matter only to callers of several messages, and only if these may be too large.
    least = min((each.bytes for each in limits if each.messages > 1), default=None)
    measured = room.full or (least is not None and room.taken_at_most > least)
    shares: list[list[Claimed]] = []
    place = 0
    for index, limit in enumerate(limits):
        share: list[Claimed] = []
        size = 0
        # If messages were left behind, each caller gets one.
        end = len(claimed) - (len(limits) - 1 - index if room.full else 0)
        while place < len(claimed) and len(share) < limit.messages:
            size += size_of(claimed[place][0]) if measured else 0
            if share and (size > limit.bytes or place >= end):
                break
            share.append(claimed[place])
            place += 1
        shares.append(share)
    return shares, claimed[place:]


def _claim_messages(
    how: Reception, scan: ScanState, limits: list[Limits], room: ByteLimit
) -> Plan[tuple[list[Claimed], bool]]:
    """Claim what the callers want. Bury messages that were tried too often or are invalid.

    The result is the messages, and whether they are finished already.
    """
    terms = how.terms
    claimed: list[Claimed] = []
    began = yield from ServerTime()
    while len(claimed) < (limit := _wanted(limits)) and not (claimed and room.full):
        if how.misfits.verdict is not None:
            if claimed:
                break
            raise ConfigurationError(how.misfits.verdict)
        now = yield from ServerTime()
        if claimed and scan.limit.limit is not None and now - began > LOOK_ON:
            break
        bare = (
            how.bare and limit == 1 and scan.limit.limit is None and not scan.locked.pops_claim(now)
        )
        wanted = min(limit - len(claimed), MAX_CLAIM)
        documents, ended = yield from terms.kind.claim(terms, scan, now, wanted, room, delete=bare)
        if room.excess:
            yield from give_back_excess(terms, room.take_excess())
        before = len(claimed)
        for document in documents:
            if bare:
                if "payload" in document and not invalid.invalid_claimed_fields(document):
                    return [(document, invalid.decode(how.codec, document, now))], True
                document = yield from _put_back(terms, document, now)
            message = _message_or_refusal(how, document, now)
            if isinstance(message, _Refusal):
                yield from _bury(how, document, now, message)
            else:
                claimed.append((document, message))
        room.add([document for document, _ in claimed[before:]])
        if claimed and not how.pop:
            scan.wake_at(now + timedelta(seconds=terms.lease_s))
        if ended or scan.limit.blocked_until is not None:
            break
        if claimed and scan.groups.crowded:  # looking on would defer more and more first
            break
    return claimed, False


def _wanted(limits: Sequence[Limits]) -> int:
    return sum(each.messages for each in limits)


def give_back_excess(terms: ClaimTerms, documents: list[Document]) -> Plan[None]:
    """Give back what was claimed and is too much: the same place, the try not counted."""
    with suppress(Unavailable):  # then it comes back when the lease lapses
        yield from give_back(terms.queue, terms.kind, documents, counted=terms.counts_try)


def accept(how: Reception, document: Document, now: datetime) -> Plan[Message[Any] | None]:
    """Return the message of a claimed document; or bury it and return None."""
    message = _message_or_refusal(how, document, now)
    if isinstance(message, _Refusal):
        yield from _bury(how, document, now, message)
        return None
    return message


class _Refusal(NamedTuple):
    """Why a claimed document is buried instead of delivered."""

    reason: str
    tries: int
    error: Any
    #: The fields that are invalid.
    fields: Sequence[str]


def _message_or_refusal(
    how: Reception, document: Document, now: datetime
) -> Message[Any] | _Refusal:
    fields = invalid.invalid_claimed_fields(document)
    if fields is None:
        return invalid.decode(how.codec, document, now, how.lease_s)
    tries = 0 if "tries" in fields else int(document.get("tries", 0))
    exhausted = how.max_tries is not None and not how.pop and tries > how.max_tries
    if exhausted and not fields:
        return _Refusal("tries", tries - 1, document.get("error"), fields)
    try:
        if fields:
            raise invalid.invalid_document_error(document, fields)
        if "payload" not in document:
            raise InvalidMessage("the stored document has no payload")
        payload = how.codec.load(document["payload"])
        message = message_of(document, payload, now, lease=how.lease_s)
        how.misfits.delivered()
        return message
    except Exception as misfit:  # the validators of a model are user code
        return _Refusal("invalid", tries, invalid.error_record(misfit, now), fields)


def _bury(how: Reception, document: Document, now: datetime, refusal: _Refusal) -> Plan[None]:
    terms = how.terms
    yield from invalid.bury_claimed(
        terms.queue,
        terms.kind,
        terms.dead_letter,
        document,
        now,
        reason=refusal.reason,
        tries=refusal.tries,
        error=refusal.error,
        invalid=refusal.fields,
    )
    if refusal.reason == "invalid":
        text = str(refusal.error["message"])
        id, dead_letter = document["_id"], terms.dead_letter
        how.misfits.add(terms.queue, how.codec.name, dead_letter, id, text, now)


def _put_back(terms: ClaimTerms, document: Document, now: datetime) -> Plan[Document]:
    """Insert a deleted document again, held by this claim: it must not be delivered as it is."""
    held = document | terms.update(now)["$set"]
    yield from insert_again([held], partial(renamed, now=now))
    return held


def finish_popped(
    terms: ClaimTerms, history_s: float | None, claimed: list[Document], now: datetime
) -> Plan[set[tuple[Hashable, str]]]:
    """Finish what a pop claimed, before a caller gets any of it.

    The result is the ids and tokens of those messages that this call did not finish.
    """
    # By id and token: this pop may have claimed a message again after its first claim lapsed.
    lost: set[tuple[Hashable, str]] = set()
    groups: dict[tuple[str, bool], list[Document]] = {}
    for document in claimed:
        keyed = "key" in document or "dead" in document
        groups.setdefault((document["token"], keyed), []).append(document)
    for (token, keyed), documents in groups.items():
        ids = [document["_id"] for document in documents]
        match = {"_id": {"$in": ids}, "token": token}
        update = terms.kind.finishing(now, "popped", history_s, keyed=keyed)
        if update is None:
            done = yield from Delete(match, many=True)
        else:
            done = (yield from Update(match, update, many=True)).matched
        if done < len(documents):  # some were replaced or taken over while this pop held them
            present = yield from Find({"_id": {"$in": ids}}, {"token": 1})
            tokens = {hashable_id(each["_id"]): each.get("token") for each in present}
            if update is not None:
                lost |= {(id, token) for id in map(hashable_id, ids) if tokens.get(id) != token}
                continue
            gone = [id for id in ids if hashable_id(id) not in tokens]
            if 0 < done < len(gone):
                # Another process finished some of them. Delivering them could be the second time.
                text = "some of what was popped is gone, by this call or by another one"
                raise Unavailable(text, ids=gone)
            lost |= {(id, token) for id in (tokens if done else map(hashable_id, ids))}
    return lost


CLAIMS: Final = Claims(_claim_for_callers, undo)
