"""Receive: wait for messages, claim them, and check them before a caller gets them.

A reserve is a claim. A pop of one message without a model and without history is a bare delete.
Every other pop claims the messages, checks them and finishes them before it returns, so that it
never loses a message that it could not deliver. Waiting happens between claims, and a cancelled
caller holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, Required, TypedDict, Unpack

from pyqueue import arguments
from pyqueue.backends import invalid, namespace, reading
from pyqueue.backends.byte_limit import ByteLimit, Limits, size_of
from pyqueue.backends.claim_terms import ClaimTerms, Scan
from pyqueue.backends.claiming import MAX_CLAIM, Claimed
from pyqueue.backends.giving_back import give_back
from pyqueue.backends.options import Options, QueueTerms
from pyqueue.backends.scan import ByAge, ScanState
from pyqueue.concurrently import SHORT_AT_ONCE, concurrently
from pyqueue.documents import message_of
from pyqueue.error_records import error_record
from pyqueue.errors import ConfigurationError, InvalidMessage, Unavailable
from pyqueue.limits import check_call
from pyqueue.messages import MAX_RECEIVED_BYTES, Duration, Message
from pyqueue.payloads import Codec
from pyqueue.requests import (
    Coalesce,
    Document,
    EnsureQueue,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Wait,
)

#: How long a pause may go unnoticed if no bus announces it.
PAUSE_READ_INTERVAL: Final = timedelta(seconds=5)
#: For how long a receive with claimed messages keeps claiming: in a queue with a limit, and in any
#: queue as a part of the lease. New permits, a slow server or malformed messages can prolong it.
CLAIM_ON: Final = timedelta(seconds=0.5)
CLAIM_ON_LEASE: Final = 1 / 4
#: The shortest time between two reads of the next ``when``.
NEXT_WHEN_INTERVAL: Final = timedelta(seconds=1)


class Waiting(Protocol):
    """The consumers of one queue that wait in this client."""

    scan: ScanState
    misfits: invalid.Misfits
    prepared: Prepared | None  # the values that the last call prepared
    poll_share: float  # after which part of ``poll`` the consumers check the queue

    def upkeep(self, queue: str, now: datetime) -> Plan[None]:
        """Finish the handovers of processes that died, from time to time."""

    def wake_next(self, found: bool) -> None:
        """Wake the next consumers, after a consumer has received messages or given up."""


class Reception(NamedTuple):
    """How messages are received. Concurrent calls with equal values share their claims."""

    terms: ClaimTerms
    codec: Codec[Any]
    max_tries: int | None
    pop: bool
    misfits: invalid.Misfits

    @property
    def bare(self) -> bool:
        """Whether a single message may be deleted without claiming it first."""
        bare_pop = self.pop and self.terms.kind.bare_pop
        return bare_pop and self.codec.model is None and self.terms.history_s is None

    @property
    def lease_s(self) -> float | None:
        """The length of the lease of a reservation, or None for a pop."""
        return None if self.pop else self.terms.lease_s


class Claims(NamedTuple):
    """The functions that make and undo the claims of a queue. A kind may use other functions."""

    #: Claim once for several callers; see ``claim_for_callers``.
    claim: Callable[[Reception, ScanState, list[Limits]], Plan[list[list[Claimed]]]]
    #: Give back the messages that were received for a cancelled caller.
    undo: Callable[[Reception, Sequence[Claimed]], Plan[None]]
    #: Whether threads share claims.
    threads: bool = False


#: The arguments of a receive: how, from whom, how many, the lease in seconds, whether to pop, and
#: the counter of messages that cannot be delivered, or None for the counter of the consumers.
Call = tuple[QueueTerms, Claims, Limits, float | None, bool, invalid.Misfits | None]


class Prepared(NamedTuple):
    """The values that a receive prepares. Later calls with equal arguments use them again."""

    call: Call
    terms: ClaimTerms
    #: The request that ensures the record, and the request that claims.
    ensuring: EnsureQueue
    claiming: Coalesce[Limits, list[Claimed]]


def _prepare(waiting: Waiting, call: Call) -> Prepared:
    queue_terms, claims, limits, lease_s, pop, misfits = call
    options, codec = queue_terms.options, queue_terms.codec
    lease_s = queue_terms.command_timeout_s if pop else lease_s or options.lease
    terms = ClaimTerms.of(queue_terms, lease_s, counts_try=not pop)
    misfits = misfits or waiting.misfits
    how = Reception(terms, codec, options.max_tries, pop, misfits)
    ensuring = namespace.ensuring(terms.queue, terms.kind, options, receives=True)
    claiming = Coalesce(  # calls that receive in the same way share it
        how,
        limits,
        partial(claims.claim, how, waiting.scan),
        undo=partial(claims.undo, how),
        max_in_flight=1,  # concurrent claims of one process would compete
        threads=claims.threads,
    )
    return Prepared(call, terms, ensuring, claiming)


class ReceiveOptions(TypedDict, total=False):
    """How one call receives; see ``Queue.reserve_many``."""

    timeout: Required[Duration | None]
    max_bytes: int
    pop: bool
    lease: Duration | None
    misfits: invalid.Misfits | None
    is_known: bool  # whether the record of the queue need not be asked for
    looked: bool  # whether the caller has looked for messages just before, and found none


def receive(
    queue_terms: QueueTerms,
    waiting: Waiting,
    claims: Claims,
    limit: int,
    **given: Unpack[ReceiveOptions],
) -> Plan[list[Any]]:
    """Receive up to ``limit`` messages; wait for the first one."""
    queue, options, state = queue_terms.queue, queue_terms.options, waiting.scan
    limits = Limits(limit, given.get("max_bytes", MAX_RECEIVED_BYTES))
    timeout_s, lease_s = checked(*limits, given["timeout"], given.get("lease"))
    pop = given.get("pop", False)
    call = (queue_terms, claims, limits, lease_s, pop, given.get("misfits"))
    prepared = waiting.prepared
    if prepared is None or prepared.call != call:
        prepared = waiting.prepared = _prepare(waiting, call)
    terms = prepared.terms
    if not given.get("is_known"):
        yield from namespace.ensured(prepared.ensuring, terms.kind)
    now = yield from ServerTime()
    # On the monotonic clock: the primary's clock may be set while the caller waits.
    deadline = (yield from MonotonicTime()) + timeout_s if timeout_s else None
    found = False
    try:
        while True:
            state.observe(now)
            if wants_record(state, now):
                yield from _read_record(terms, options, state, now)
            yield from waiting.upkeep(queue, now)
            check_call(queue, state.limit.limit, "pop" if pop else None)
            if not stopped(state) and not given.pop("looked", False):
                claimed: list[Claimed] = yield prepared.claiming
                if claimed:
                    found = True
                    return [message for _, message in claimed]
            if timeout_s == 0 or (deadline and (yield from MonotonicTime()) >= deadline):
                return []
            began_to_listen = yield from Listen(waiting)
            now = yield from ServerTime()
            if began_to_listen:
                continue  # scan again, so that no message is missed
            now = yield from _wait(queue, waiting, now, options.poll * waiting.poll_share, deadline)
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


def wants_record(state: ScanState, now: datetime) -> bool:
    """Return whether it is time to read the record of the queue."""
    if not state.limit.known:
        return True  # even if another thread has begun to read it
    return state.flag_read is None or now - state.flag_read >= PAUSE_READ_INTERVAL


def _read_record(
    terms: ClaimTerms, options: Options, state: ScanState, now: datetime
) -> Plan[None]:
    state.flag_read = now
    record = yield from namespace.followed(terms.queue, terms.kind, options, terms.owner)
    yield from terms.kind.follow(terms, state, record, now)
    state.paused = bool(record.get("paused"))


def stopped(state: ScanState) -> bool:
    """Return whether the queue is paused, or its limit cannot be read."""
    return state.paused or state.limit.unreadable is not None


def _wait(
    queue: str, waiting: Waiting, now: datetime, poll_s: float, deadline: float | None
) -> Plan[datetime]:
    """Wait until it is time to scan again. Return that instant."""
    woken = False
    while not woken:
        until = yield from wake_time(queue, waiting.scan, now, poll_s)
        woken = yield from Wait(waiting, until, deadline)
        now = yield from ServerTime()
    return now


def wake_time(queue: str, state: ScanState, now: datetime, poll_s: float) -> Plan[datetime]:
    """Return when to scan again if no event arrives."""
    limit, until = state.limit, now + timedelta(seconds=poll_s)
    soonest = now + timedelta(milliseconds=1)
    if stopped(state):
        return min(until, now + PAUSE_READ_INTERVAL)
    if limit.next_start is not None and limit.waits(now):  # for a permit
        return max(min(until, limit.next_start), soonest)
    until = _earliest(until, state.rescan_at, limit.first_start(now))
    if limit.blocked_until is not None:  # nothing can start before then
        return max(min(until, limit.blocked_until, now + PAUSE_READ_INTERVAL), soonest)
    if not state.due_known:
        until = _earliest(until, (yield from _read_due(queue, state, now)))
    return max(_earliest(until, state.due), soonest)


def _read_due(queue: str, state: ScanState, now: datetime) -> Plan[datetime | None]:
    """Read when the next message becomes ready. If it is too early, return when to read."""
    if state.due_read is not None and state.due_read + NEXT_WHEN_INTERVAL > now:
        return state.due_read + NEXT_WHEN_INTERVAL
    state.due_known, state.due_read = True, now
    when = yield from reading.next_when(queue, state.lower_bound)
    if when is not None:
        state.wake_at(when)
    return None


def _earliest(*given: datetime | None) -> datetime:
    return min(each for each in given if each is not None)


# ---- claiming


def _undo(how: Reception, claimed: Sequence[Claimed]) -> Plan[None]:
    """Return a cancelled caller's messages to their places, without counting the try."""
    return give_back(how.terms.queue, how.terms.kind, [document for document, _ in claimed])


def claim_for_callers(
    how: Reception, state: ScanState, limits: list[Limits]
) -> Plan[list[list[Claimed]]]:
    """Claim once for several callers, including callers that join late. Split the result."""
    room = ByteLimit(state, limits)
    claimed = yield from _claim_messages(how, state, limits, room)
    shares, rest = _split(claimed, limits, room)
    if rest:
        yield from give_back_excess(how.terms, [document for document, _ in rest])
    return shares


def _split(
    claimed: list[Claimed], limits: Sequence[Limits], room: ByteLimit
) -> tuple[list[list[Claimed]], list[Claimed]]:
    """Return the messages for each caller, in order, and the messages that are left over."""
    if len(limits) == 1:  # claims whose outcome was unknown at first may add to its messages
        return [claimed[: limits[0].messages]], claimed[limits[0].messages :]
    # The sizes matter only to callers that want several messages, if these may be too large.
    least = min((each.bytes for each in limits if each.messages > 1), default=None)
    measured = room.full or (least is not None and room.taken_at_most > least)
    shares: list[list[Claimed]] = []
    place = 0
    for index, limit in enumerate(limits):
        share: list[Claimed] = []
        size = 0
        # If messages were left behind, each caller gets at least one.
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
    how: Reception, state: ScanState, limits: list[Limits], room: ByteLimit
) -> Plan[list[Claimed]]:
    """Claim messages for the callers. Bury messages that were tried too often or are invalid."""
    terms, limit = how.terms, state.limit
    claimed: list[Claimed] = []
    began = yield from ServerTime()
    part = timedelta(seconds=CLAIM_ON_LEASE * terms.lease_s)
    longest = min(CLAIM_ON, part) if limit.limit else part
    while (wanted := wanted_by(limits) - len(claimed)) > 0 and not (claimed and room.full):
        now = yield from ServerTime()
        if is_stopped(how, claimed) or (claimed and now - began > longest):
            break
        scan = Scan(terms, state, ByAge(state), room, now, wanted=min(wanted, MAX_CLAIM))
        try:
            documents, ended = yield from terms.kind.claim(scan)
        except Unavailable:
            if claimed:
                break  # the messages of the earlier scans still reach the callers
            raise
        if room.excess:
            yield from give_back_excess(terms, room.take_excess())
        accepted = yield from accept_each(how, documents, now)
        room.add([document for document, _ in accepted])
        claimed += accepted
        if claimed and not how.pop:
            state.wake_at(now + timedelta(seconds=terms.lease_s))
        # If messages wait for earlier messages, the next scan would have to defer more and more.
        if ended or limit.blocked_until or (claimed and state.groups.crowded):
            break
    return claimed


def is_stopped(how: Reception, claimed: Sequence[Claimed]) -> bool:
    """Return whether claiming stops because too many messages are invalid.

    Raises:
        ConfigurationError: Claiming stops, and no message has been claimed.
    """
    if how.misfits.verdict is not None and not claimed:
        raise ConfigurationError(how.misfits.verdict)
    return how.misfits.verdict is not None


def accept_each(
    how: Reception, documents: Sequence[Document], now: datetime
) -> Plan[list[Claimed]]:
    """Return the messages of the claimed documents that can be delivered; bury the other ones."""
    found = [(each, _message_or_refusal(how, each, now)) for each in documents]
    refused = [(each, why) for each, why in found if isinstance(why, invalid.Refusal)]
    burials = [invalid.bury_claimed(how.terms.graveyard, each, why, now) for each, why in refused]
    # Many burials one after the other could take longer than the leases of the messages.
    yield from concurrently(burials, SHORT_AT_ONCE)
    for each, why in refused:
        _count_misfit(how, each, why, now)
    return [(each, whole) for each, whole in found if not isinstance(whole, invalid.Refusal)]


def wanted_by(limits: Sequence[Limits]) -> int:
    """Return how many messages the calls with these limits want together."""
    return sum(each.messages for each in limits)


def give_back_excess(terms: ClaimTerms, documents: list[Document]) -> Plan[None]:
    """Return excess messages to their places, without counting the try."""
    with suppress(Unavailable):  # then they come back when the leases lapse
        yield from give_back(terms.queue, terms.kind, documents, counted=terms.counts_try)


def _message_or_refusal(
    how: Reception, document: Document, now: datetime
) -> Message[Any] | invalid.Refusal:
    """Return the message of a claimed document, or why the document must be buried."""
    fields = invalid.invalid_claimed_fields(document)
    if fields is None:  # a dead letter is delivered in any case
        return invalid.decode(how.codec, document, now, how.lease_s)
    tries = 0 if "tries" in fields else int(document.get("tries", 0))
    out_of_tries = how.max_tries is not None and not how.pop and tries > how.max_tries
    if out_of_tries and not fields:  # the claim counted a try, but the message is not delivered
        return invalid.Refusal("tries", tries - 1, document.get("error"), fields)
    try:
        if fields:
            raise invalid.invalid_document_error(document, fields)
        if "payload" not in document:
            raise InvalidMessage("the stored document has no payload")
        message = message_of(document, how.codec.load(document["payload"]), now, lease=how.lease_s)
        how.misfits.count_valid()
        return message
    except Exception as misfit:  # the validators of a model are user code
        return invalid.Refusal("invalid", tries, error_record(misfit, now), fields)


def _count_misfit(how: Reception, document: Document, why: invalid.Refusal, now: datetime) -> None:
    if why.reason == "invalid" and why.error is not None:
        id, text = document["_id"], str(why.error["message"])
        queue, dead_letter = how.terms.queue, how.terms.dead_letter
        how.misfits.add(queue, how.codec.name, dead_letter, id, text, now=now)


CLAIMS: Final = Claims(claim_for_callers, _undo)
