"""Packs: how a message leaves its pack and becomes an ordinary message.

A message leaves its pack if it is buried, moved, or returned without the other messages of the
pack. Two documents change: the pack drops the message, and a new document is created with the same
id. The plans of ``handover`` do this without a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from pyqueue.backends import namespace, transitions
from pyqueue.backends.applying import check_time_left, raise_lost
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.settling import (
    Group,
    Held,
    at_bits,
    by_pack,
    end_claim,
    give_back,
    roll_back_whole,
    still_held,
    unknown_end,
)
from pyqueue.backends.forms import Failure, each_part
from pyqueue.backends.handover import Handover, Result, hand_over
from pyqueue.backends.hidden import copy_filter, is_copy, returning
from pyqueue.backends.moving import stay_of
from pyqueue.backends.options import QueueTerms, Target
from pyqueue.errors import DuplicateKey, QueueError, Unavailable, first_ten
from pyqueue.facts import as_stored
from pyqueue.messages import TRAIL_LENGTH, Id, PackedReservation
from pyqueue.payloads import encode
from pyqueue.requests import (
    Coalesce,
    Delete,
    Document,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
)

ErrorRecord = Mapping[str, Any] | None
#: Makes the document of a leaving message, given its stored fields and the current instant.
Make = Callable[[Document, datetime], Document]
#: The place of a leaving message in its pack, and the function that makes its new document.
Leaver = tuple[int, Make]
#: Settles a whole pack with one update. Returns False if the pack cannot be settled as a whole.
Whole = Callable[[Group, Held], Plan[bool]]


def leave(
    group: Group, leavers: Sequence[Leaver], *, together: bool = False, session: object = None
) -> Plan[tuple[int, int]]:
    """Take messages out of a pack, and store new documents for them.

    Args:
        group: The messages, and the claim that holds them.
        leavers: The places of the messages, each with the function that makes its new document.
        together: Whether the messages share documents at their destination; see ``packs.parts``.
        session: The session of the caller's transaction, or None.

    Returns:
        A bit mask of the messages that were no longer held, and a bit mask of the messages for
        which it is unknown whether they have left the pack.
    """
    fields = dict.fromkeys(("b", "at", "w", "type", "pushed", "trail", "token"), 1)
    match = {"_id": group.pack, "token": group.token}
    found = yield from Find(match, fields, limit=1, session=session)
    bits, lost = group.bits, 0
    now = yield from ServerTime()
    hold = group.hold if session is None else None  # the transaction may be aborted
    copies = [(place, make(_stored(found[0], place), now)) for place, make in leavers if found]
    for _, copy in copies:
        encode(copy)  # raises before anything is written if a document is too large
    taken: set[Id] = set()  # the ids that belong to other documents
    call = transitions.new_token()
    while bits:
        still = yield from still_held(group._replace(bits=bits, hold=hold), session)
        lost |= bits & ~still
        bits = still
        if not bits:
            break
        messages = [copy for place, copy in copies if bits >> place & 1]
        documents = _with_free_ids(group, messages, taken, together=together)
        try:
            if session is not None:
                yield from _leave_in_transaction(group._replace(bits=bits), documents, session)
                return lost, 0
            handover = Handover(group.queue, group.pack, group.token, documents, call)
            result = yield from _hand_over_bits(group._replace(bits=bits), handover)
        except DuplicateKey as clash:
            # A message key is taken, or so is an id that ``_with_free_ids`` chose.
            if not clash.ids or not taken.isdisjoint(clash.ids):
                raise
            taken.update(clash.ids)
            continue
        if result == "done":
            return lost, 0
        if result == "unknown":
            return lost, bits
        # "lost": read again which of the messages are still held.
    if hold and lost:  # note that these messages are no longer in the pack
        hold.begin(None)
        hold.settled(lost, None, matched=True)
    yield from end_claim(group._replace(hold=hold))
    return lost, 0


def _with_free_ids(
    group: Group, messages: Sequence[Document], taken: Collection[Id], *, together: bool
) -> list[Document]:
    """Return the documents to store for messages that leave a pack.

    The ids in ``taken`` belong to other documents. A message with such an id becomes a pack with
    one message if it stays in its queue. It keeps its id, so that a consumer recognizes it. If
    the message moves to another queue or has a key, it gets a new id, and its trail records the
    old one.
    """
    if together:
        return packs.parts(group.pack, group.token, messages, taken)
    found: list[Document] = []
    for each in messages:
        if each["_id"] not in taken:
            found.append(each)
        elif each["q"] == group.queue and "key" not in each:
            found += packs.parts(group.pack, group.token, [each], taken)
        else:
            *passed_before, last = each["trail"]
            place = int(each["_id"].partition(":")[2])
            id = packs.part_id(group.pack, group.token, [place])
            found.append(each | {"_id": id, "trail": [*passed_before, last | {"id": each["_id"]}]})
    return found


def _leave_in_transaction(
    group: Group, documents: Sequence[Document], session: object
) -> Plan[None]:
    """Take messages out of a pack in a transaction. The pack stays held until its lease ends.

    Raises:
        DuplicateKey: Other documents have some of the ids, and nothing was written.
    """
    # A failed insert would abort the transaction.
    stored = yield from Find({"_id": {"$in": [each["_id"] for each in documents]}}, session=session)
    if others := [each["_id"] for each in stored if not is_copy(each)]:
        raise DuplicateKey(f"other documents have the ids {first_ten(others)}", ids=others)
    # This matches, because ``still_held`` read the same state in this transaction.
    yield from Update(group.fence, packs.setting(group.bits), session=session)
    for each in stored:  # its former holder can no longer commit it
        yield from Delete(copy_filter(each), session=session)
    for failure in (yield from Insert([encode(each) for each in documents], session=session)):
        raise failure.error
    for queue, when in {(each["q"], each["when"]) for each in documents}:
        yield from Signal(queue, when, session)


def _hand_over_bits(group: Group, handover: Handover) -> Plan[Result]:
    """Take messages out of a pack and publish them. Record the result in ``group.hold``."""
    hold = group.hold
    if hold:
        hold.begin(None)  # the claim continues
    try:
        result = yield from hand_over(handover, group.fence, packs.setting(group.bits))
    except DuplicateKey:  # nothing has left the pack
        if hold:
            hold.settled(0, None, matched=False)
        raise
    except BaseException:  # it is unknown whether messages have left
        if hold:
            hold.lose()
        raise
    if hold:
        hold.settled(group.bits if result == "done" else 0, None, matched=result == "done")
    if result == "done":
        yield from end_claim(group)
    return result


def hand_over_shared(group: Group, handover: Handover) -> Plan[Result]:
    """Take messages out of a pack. Concurrent calls for one pack share their commands."""
    key = ("hand over packed", group.queue, group.pack, group.token)
    call = group, handover
    result = yield from Coalesce(key, call, _hand_over_for_callers, max_in_flight=1)
    if result is None:  # the shared command failed: try alone
        result = yield from _hand_over_bits(group, handover)
    return result


def _hand_over_for_callers(
    calls: Sequence[tuple[Group, Handover]],
) -> Plan[Sequence[Result | None]]:
    """Take messages out of a pack for several callers. Return None for each to retry alone."""
    group, handover = calls[0]
    if len(calls) == 1:
        return [(yield from _hand_over_bits(group, handover))]
    bits = 0
    for one, _ in calls:
        bits |= one.bits
    copies = [copy for _, each in calls for copy in each.copies]
    result: Result = "lost"
    # If two calls hand over the same message, each must try alone: only one may succeed.
    if bits.bit_count() == sum(one.bits.bit_count() for one, _ in calls):
        with suppress(QueueError):
            result = yield from _hand_over_bits(
                group._replace(bits=bits), handover._replace(copies=copies)
            )
    return [result if result == "done" else None] * len(calls)


def _stored(pack: Document, place: int) -> Document:
    """Return the fields that a message keeps when it leaves its pack."""
    kept = ("_id", "pushed", "type", "headers", "trail", "payload")
    document = packs.document_in(pack, place)
    return {name: document[name] for name in kept if name in document}


def trail_after(
    document: Document, queue: str, now: datetime, stay: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``trail`` field that a message has after it leaves this queue.

    ``stay``: facts about the stay of the message in the queue, such as its tries.
    """
    trail = [*document.get("trail", ()), {"q": queue, "at": now, **stay}]
    return {"trail": trail[-TRAIL_LENGTH:]}


def leave_each(
    queue: str,
    held: Held,
    groups: Sequence[tuple[Group, Held]],
    make: Callable[[PackedReservation[Any]], Make],
    *,
    whole: Whole | None = None,
    together: bool = False,
    session: object = None,
) -> Plan[None]:
    """Take messages out of their packs, except from packs that ``whole`` settles as a whole.

    Args:
        queue: The name of the queue.
        held: The reservations of the messages.
        groups: The same reservations, divided by pack.
        make: Takes a reservation, and returns the function that makes the new document.
        whole: Settles a pack as a whole if it can. If None, each message leaves its pack.
        together: Whether the messages share documents at their destination.
        session: The session of the caller's transaction, or None.
    """
    if session is not None:
        # ``whole`` would write outside the transaction.
        whole, now = None, (yield from ServerTime())
        for one in held:
            check_time_left(one, now)
    lost: list[PackedReservation[Any]] = []
    unknown: list[PackedReservation[Any]] = []
    for number, (group, members) in enumerate(groups):
        leavers = [(each.place, make(each)) for each in members]
        try:
            if whole is not None and (yield from whole(group, members)):
                continue
            gone, unclear = yield from leave(group, leavers, together=together, session=session)
        except Unavailable as error:
            rest = [each for _, some in groups[number:] for each in some]
            raise unknown_end(error, [*unknown, *rest]) from error
        lost += at_bits(members, gone)
        unknown += at_bits(members, unclear)
    raise_lost(queue, len(held), lost, unknown)


# ---- back to the queue


def rollback(terms: QueueTerms, held: Held, failure: Failure) -> Plan[None]:
    """Return messages to the queue for another try, and bury messages that have no try left.

    If all messages left in a pack return together, they stay in the pack.
    """
    queue, kind, options = terms.queue, terms.kind, terms.options
    given_s, record, session = failure.delay_s, failure.error, failure.session
    out_of_tries: list[PackedReservation[Any]] = []
    rest: list[tuple[Group, Held]] = []
    for group, members in by_pack(queue, kind, held):
        if failure.is_last(members[0], options.max_tries):  # messages of one claim have equal tries
            out_of_tries += members
            continue
        rest.append((group, members))

    def whole(group: Group, members: Held) -> Plan[bool]:
        delay_s = options.backoff.delay(members[0].tries) if given_s is None else given_s
        return roll_back_whole(group, delay_s, record, counted=failure.counted)

    def make(each: PackedReservation[Any]) -> Make:
        delay_s = options.backoff.delay(each.tries) if given_s is None else given_s
        tries = each.tries if failure.counted else each.tries - 1

        def waiting(stored: Document, now: datetime) -> Document:
            when = now + timedelta(milliseconds=round(delay_s * 1000))
            put = kind.entering(queue, when) | _counted(each, tries)
            why = record or as_stored(each.error)
            return stored | put | ({} if why is None else {"error": why})

        return waiting

    returned = [each for _, members in rest for each in members]
    yield from each_part(
        (leave_each(queue, returned, rest, make, whole=whole, session=session), returned),
        (bury(terms, out_of_tries, failure, "tries"), out_of_tries),
    )


def release(terms: QueueTerms, held: Held) -> Plan[None]:
    """Return messages to their old places, unprocessed, without counting the try."""
    queue, kind = terms.queue, terms.kind

    def whole(group: Group, members: Held) -> Plan[bool]:
        return give_back(group)

    def make(each: PackedReservation[Any]) -> Make:
        put = kind.entering(queue, each.when) | returning(each.when)
        put |= _counted(each, each.tries - 1)
        why = {} if each.error is None else {"error": as_stored(each.error)}
        return lambda stored, now: stored | put | why

    yield from leave_each(queue, held, by_pack(queue, kind, held), make, whole=whole)


def _counted(held: PackedReservation[Any], tries: int) -> dict[str, int]:
    """Return the counters of a message that returns to its queue: its tries and deliveries."""
    return {"tries": tries, "deliveries": held.deliveries}


# ---- to the dead-letter queue


def bury(terms: QueueTerms, held: Held, failure: Failure, reason: str = "buried") -> Plan[None]:
    """Send messages to the dead-letter queue now."""
    if not held:
        return
    queue, kind, error = terms.queue, terms.kind, failure.error
    name = terms.options.dead_letter
    target = yield from namespace.dead_letter_target(queue, kind, name, priorities=[None])

    def make(each: PackedReservation[Any]) -> Make:
        why = error or as_stored(each.error)
        return burial(queue, target, reason, stay_of(each), why)

    groups = by_pack(queue, kind, held)
    yield from leave_each(queue, held, groups, make, session=failure.session)


def burial(
    queue: str, target: Target, reason: str, stay: Mapping[str, Any], error: ErrorRecord
) -> Make:
    """Return the function that makes the document of a message for the dead-letter queue.

    ``stay``: facts about the stay of the message in its queue, including its tries.
    """

    def buried(stored: Document, now: datetime) -> Document:
        trail = trail_after(stored, queue, now, stay)
        document = stored | target.kind.entering(target.queue, now) | trail
        death = {"reason": reason, "tries": stay["tries"], "error": error}
        document["dead"] = {"from": queue, "at": now, **death}
        return document | ({} if error is None else {"error": error})

    return buried
