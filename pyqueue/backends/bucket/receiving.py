"""Packs: how their messages are received.

A claim takes documents: packs and ordinary messages. The process hands out the messages of a pack
to waiting callers, and then to later callers. It claims again only when none of its packs has a
message left to hand out; see ``stock``.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from typing import Any, Final

import bson

from pyqueue.backends import invalid, namespace
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.leaving import Leaver, burial, leave
from pyqueue.backends.bucket.settling import Group, emptied, end_claim, give_back
from pyqueue.backends.bucket.settling import finish as finish_packed
from pyqueue.backends.bucket.stock import Drawn, HeldPack, Stock, maker
from pyqueue.backends.byte_limit import ByteLimit, Limits, size_of
from pyqueue.backends.claim_terms import ClaimTerms, Scan
from pyqueue.backends.claiming import Claimed
from pyqueue.backends.ending import claim_and_end
from pyqueue.backends.handover import finish
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.popping import finish_popped, insert_again, undo
from pyqueue.backends.receiving import (
    Claims,
    Reception,
    accept_each,
    give_back_excess,
    is_stopped,
    wanted_by,
)
from pyqueue.backends.scan import ByAge, ScanState
from pyqueue.documents import hashable_id, invalid_fields
from pyqueue.error_records import error_record
from pyqueue.errors import Unavailable
from pyqueue.hooks import tell_burial
from pyqueue.limits import WHOLE_QUEUE
from pyqueue.messages import MAX_RECEIVED_BYTES
from pyqueue.payloads import OPTIONS, Codec
from pyqueue.requests import Delete, Document, Plan, ServerTime, Signal, Update

#: A lease may be shorter than requested: by a tenth, or by this many seconds if that is less.
_SLACK_S: Final = 1.0
#: A packed message has no document, so a claimed one is a dict with its ``Drawn`` in this field.
_DRAWN: Final = "drawn"


def claims_of(stock: Stock) -> Claims:
    """Return the functions that claim messages. ``stock``: the packs that this process holds."""
    if stock.claims is None:  # a receive reuses the state of earlier receives with equal claims
        claim, undo = partial(_claim_for_callers, stock), partial(_undo, stock)
        stock.claims = Claims(claim, undo, threads=True)
    return stock.claims


# ---- claiming


@dataclass(slots=True)
class _Haul:
    """The messages that one claim collects for its callers, and when it stops."""

    how: Reception
    stock: Stock
    state: ScanState
    limits: list[Limits]
    claimed: list[Claimed] = field(default_factory=list)
    #: The sizes of the claimed messages, in bytes.
    sizes: list[int] = field(default_factory=list)
    #: Whether the queue has no more messages.
    ended: bool = False
    #: When to stop claiming, once a message has been found.
    until: datetime | None = None

    def goes_on(self, permits: Permits) -> Plan[bool]:
        """Return whether the claim should take more messages."""
        if self.claimed:
            now = yield from ServerTime()
            self.until = self.until or now + timedelta(seconds=self.how.terms.lease_s / 4)
            # Small packs may take many commands. Stop before the first leases end.
            if now > self.until or sum(self.sizes) >= sum(each.bytes for each in self.limits):
                return False
            if (yield from permits.spent()):
                return False
        return not is_stopped(self.how, self.claimed)

    def take(self, need: int, room: ByteLimit) -> Plan[bool]:
        """Take up to ``need`` messages. Return whether there may be more."""
        try:
            found = yield from _draw(self.how, self.stock, need)
            if not found:
                if self.ended:
                    return False
                found, self.ended = yield from _claim_documents(
                    self.how, self.stock, self.state, need
                )
                yield from room.latecomers()
        except Exception:  # no caller gets a message
            yield from _put_back(self.stock, self.how, self.claimed)
            raise
        self.claimed += found
        self.sizes += _sizes(found, min(each.bytes for each in self.limits))
        return True


def _claim_for_callers(
    stock: Stock, how: Reception, state: ScanState, limits: list[Limits]
) -> Plan[list[list[Claimed]]]:
    """Claim once for several callers, including late arrivals. Return the messages of each."""
    room = ByteLimit(state, limits)
    permits = Permits(how.terms.queue, state.limit)
    permitted = yield from _number_permitted(permits, state, limits, room)
    haul = _Haul(how, stock, state, limits)
    while (need := min(wanted_by(limits), permitted) - len(haul.claimed)) > 0:
        if not (yield from haul.goes_on(permits)) or not (yield from haul.take(need, room)):
            break
    shares, rest = _shares(haul.claimed, haul.sizes, limits)
    if rest:
        yield from _put_back(stock, how, rest)
    if state.limit.limit is not None:
        yield from permits.give_back_unused({WHOLE_QUEUE: len(haul.claimed) - len(rest)})
        state.limit.blocked_until = state.limit.next_start  # the next scan waits for permits
    # Messages of packs that were already held need no update. The filter of an update would refuse
    # late permits. So for these messages, only this check prevents a late start.
    if (yield from permits.late()):
        yield from _put_back(stock, how, [each for share in shares for each in share])
        yield from permits.give_back_unused({})
        state.limit.blocked_until = yield from ServerTime()  # the next scan may begin at once
        return [[] for _ in limits]
    if how.pop and haul.claimed:
        lost = yield from _finish_popped(how, [each for share in shares for each in share])
        if lost:
            shares = [[each for each in share if _identity(each) not in lost] for share in shares]
    return shares


def _number_permitted(
    permits: Permits, state: ScanState, limits: Sequence[Limits], room: ByteLimit
) -> Plan[int]:
    """Return how many messages the rate limit allows the claim to hand out.

    The queue may have fewer messages. Only a claim shows this, because a pack has many.
    """
    if state.limit.limit is None:
        return sys.maxsize
    room.closed = True  # calls that arrive later have no permits
    return (yield from permits.number(wanted_by(limits), (yield from ServerTime())))


def _identity(claimed: Claimed) -> tuple[Hashable, str]:
    """Return the id and the token of a message, which together identify its claim."""
    document, message = claimed
    drawn: Drawn | None = document.get(_DRAWN)
    token = document["token"] if drawn is None else drawn.hold.token
    return hashable_id(message.id), token


def _draw(how: Reception, stock: Stock, need: int) -> Plan[list[Claimed]]:
    """Hand out messages of a pack that the process holds, or return [] if there are none."""
    lease_s, counts = how.terms.lease_s, how.terms.counts_try
    while (drawn := stock.draw(need)) is not None:
        hold = drawn.hold
        now = yield from ServerTime()
        until = now + timedelta(seconds=lease_s)
        least_s = lease_s - min(_SLACK_S, lease_s / 10)
        rests = hold.state == "resting"
        too_short = (hold.until - now).total_seconds() < least_s
        if rests or too_short or (counts and not hold.counted):
            if not hold.begin_extending():  # another call is ending or extending its claim
                stock.put_back(drawn)
                return []
            if not (yield from _extend(hold, until, rests=rests, counts=counts)):
                continue
        try:
            found = yield from _messages(how, drawn, now, min(hold.until, until))
        except Exception:
            left = drawn.bits & hold.alive  # some of the messages may be buried by now
            stock.put_back(drawn._replace(bits=left))
            raise
        if found:
            return found
    return []


def _extend(hold: HeldPack, until: datetime, *, rests: bool, counts: bool) -> Plan[bool]:
    """Extend the lease of a pack before its messages are handed out.

    Args:
        hold: This process's record of its claim of the pack.
        until: The new end of the lease, unless the lease already ends later.
        rests: Whether the process kept the pack after its claim ended. The claim then continues.
        counts: Whether the claim is to count as a try.

    Returns:
        Whether the process still holds the pack.
    """
    counted = hold.counted and not rests  # when the claim ended, its try was subtracted
    change: dict[str, dict[str, Any]] = {"$max": {"when": until}}
    if rests:  # a claim that had ended in order continues
        change = {"$set": {"when": until, "orderly": hold.claim - 1}}
    if counts and not counted:
        change["$inc"] = {"tries": 1}
    mine: dict[str, Any] = {"_id": hold.id, "token": hold.token}
    # A call that settles messages of this pack changes ``n``. Without such a call, a smaller ``n``
    # means that messages were removed, so that the copy in memory is out of date.
    if not hold.is_changing:
        mine["n"] = hold.alive.bit_count()
    try:
        held = (yield from Update(mine, change, w1=True)).matched
    except BaseException:
        hold.lose()
        raise
    if held:
        hold.extended(until if rests else max(until, hold.until), counts or counted)
    else:
        hold.lose()
    return bool(held)


def _messages(how: Reception, drawn: Drawn, now: datetime, until: datetime) -> Plan[list[Claimed]]:
    """Return the messages. Those that do not fit the model go to the dead-letter queue instead."""
    terms, load, entries = how.terms, how.codec.load, drawn.document["b"]
    tries = drawn.hold.before + terms.counts_try
    make = maker(drawn, tries, None if how.pop else (now, until, terms.lease_s))
    found: list[Claimed] = []
    misfits: list[tuple[int, Exception]] = []
    for place in packs.places(drawn.bits):
        try:
            payload = load(entries[place].get("p"))
        except Exception as misfit:  # the validators of a model are user code
            misfits.append((place, misfit))
        else:
            found.append(({_DRAWN: drawn, "place": place}, make(place, payload)))
    how.misfits.count_valid(len(found))
    if misfits:
        yield from _bury_misfits(how, drawn, tries, misfits, now)
    return found


def _bury_misfits(
    how: Reception,
    drawn: Drawn,
    tries: int,
    misfits: Sequence[tuple[int, Exception]],
    now: datetime,
) -> Plan[None]:
    """Send messages whose payload does not fit the model to the dead-letter queue.

    Args:
        how: How messages are received.
        drawn: Messages of one pack that were handed out together, including the misfits.
        tries: How many tries the messages have had, including this one.
        misfits: The places of the misfits in the pack, each with the error that the model raised.
        now: The current instant.
    """
    terms, hold = how.terms, drawn.hold
    target = yield from namespace.dead_letter_target(
        terms.queue, terms.kind, terms.dead_letter, priorities=[None]
    )
    leavers: list[Leaver] = []
    for place, misfit in misfits:
        error = error_record(misfit, now)
        leavers.append((place, burial(terms.queue, target, "invalid", {"tries": tries}, error)))
        id, text = hold.message_id(place), str(error["message"])
        how.misfits.add(terms.queue, how.codec.name, terms.dead_letter, id, text, now=now)
    bits = packs.bits_set([place for place, _ in leavers])
    lost, unknown = yield from leave(_group(terms, hold, bits), leavers)
    make = maker(drawn, tries, None)
    for place in packs.places(bits & ~lost & ~unknown):
        message = make(place, drawn.document["b"][place].get("p"))
        yield from tell_burial(terms.queue, message, target.queue)


def _group(terms: ClaimTerms, hold: HeldPack, bits: int) -> Group:
    """Return the messages in the bit mask ``bits`` as a ``Group``, so that they can be settled."""
    return Group(terms.queue, terms.kind, hold.id, hold.token, bits, hold=hold)


def _claim_documents(
    how: Reception, stock: Stock, state: ScanState, need: int
) -> Plan[tuple[list[Claimed], bool]]:
    """Claim documents, and add the packs among them to the stock.

    Returns:
        The ordinary messages, and whether the queue has no more messages.
    """
    terms = how.terms
    now = yield from ServerTime()
    wanted = stock.wanted(need)
    room = ByteLimit(state, [Limits(wanted, MAX_RECEIVED_BYTES)])
    scan = Scan(terms, state, ByAge(state), room, now, wanted=wanted)
    documents, ended = yield from claim_and_end(scan)
    if room.excess:
        yield from give_back_excess(terms, room.take_excess())
    largest, others = 1, []
    for document in documents:
        if is_valid_pack(document):
            largest = max(largest, document["n"])
            yield from _admit(how, stock, document)
        else:
            others.append(document)
    found = yield from accept_each(how, others, now)
    stock.learn(largest, documents != [])
    surplus = stock.surplus(need - len(found))
    for hold in surplus:  # a process keeps no more than one pack beyond the need of its callers
        with suppress(Unavailable):
            yield from give_back(_group(terms, hold, 0))
    if documents and not how.pop:
        state.wake_at(now + timedelta(seconds=terms.lease_s))
    return found, ended and not surplus


def is_valid_pack(document: Document) -> bool:
    """Return whether a claimed document is a pack as pyqueue writes it."""
    if not packs.is_pack(document) or invalid_fields(document):
        return False
    try:
        size = len(document["b"])
        at = document.get("at", range(size))
        if len(at) != size or not all(isinstance(each, int) for each in at):
            return False
        alive = packs.full(size) & ~packs.done_of(document)
        complete = all(name in document for name in ("due", "pushed", "tries", HANDED))
        return complete and alive.bit_count() == document["n"] and isinstance(document["c"], int)
    except (KeyError, TypeError, ValueError):
        return False


def _admit(how: Reception, stock: Stock, document: Document) -> Plan[None]:
    """Add a claimed pack to the stock.

    An empty pack is deleted instead. If a message must leave the pack, this function takes it out,
    ends the claim of the pack, and adds nothing.
    """
    terms = how.terms
    if document.get(HANDED):
        yield from finish(document)  # publishes copies that a former holder handed over
    hold = HeldPack(document, terms.counts_try)
    alive = hold.alive
    if not alive:
        yield from Delete(emptied(hold.id, hold.token))
        return
    # A pack with one message is treated as an ordinary message: bury it if it has no try left.
    out_of_tries = how.max_tries is not None and not how.pop and hold.before >= how.max_tries
    if hold.size == 1 and out_of_tries:
        error = document.get("error")
        target = yield from namespace.dead_letter_target(
            terms.queue, terms.kind, terms.dead_letter, priorities=[None]
        )
        make = burial(terms.queue, target, "tries", {"tries": hold.before}, error)
        if (yield from leave(_group(terms, hold, alive), [(0, make)])) == (0, 0):
            message = invalid.decode(Codec(), packs.document_in(document, 0), hold.until)
            yield from tell_burial(terms.queue, message, target.queue)
        return
    if packs.window(hold.size, alive, hold.level) is None:
        # The last claim handed out only this message, and lapsed. The message leaves the pack, so
        # that each further try counts for this message alone.
        suspect = packs.first_place(alive)
        delivered = int(document.get("deliveries", 0)) - terms.counts_try
        counted = {"tries": hold.before, "deliveries": max(hold.before, delivered)}

        def ordinary(stored: Document, now: datetime) -> Document:
            put = terms.kind.entering(terms.queue, now) | counted
            why = {} if "error" not in document else {"error": document["error"]}
            return stored | put | why

        yield from leave(_group(terms, hold, 1 << suspect), [(suspect, ordinary)])
        return
    stock.add(hold)


# ---- shares


def _sizes(claimed: Sequence[Claimed], least: int) -> list[int]:
    """Return the sizes of messages in bytes. All of them are ordinary, or all come from one pack.

    ``least``: the smallest byte limit that the sizes will be compared with.
    """
    drawn: Drawn | None = claimed[0][0].get(_DRAWN) if claimed else None
    if drawn is None:
        return [size_of(document) for document, _ in claimed]
    entries, size = drawn.document["b"], int(drawn.document.get("z", least))
    if size * 10 <= least:  # all of them fit, so their mean size is enough
        return [-(-size // len(entries))] * len(claimed)
    drawn_places = [document["place"] for document, _ in claimed]
    return [len(bson.encode(entries[place], codec_options=OPTIONS)) for place in drawn_places]


def _shares(
    claimed: list[Claimed], sizes: Sequence[int], limits: Sequence[Limits]
) -> tuple[list[list[Claimed]], list[Claimed]]:
    """Return the messages for each caller, in order, and the messages that are left over."""
    size_before = [0, *accumulate(sizes)]
    shares: list[list[Claimed]] = []
    place = 0
    for limit in limits:
        first = place
        while (
            place < len(claimed)
            and place - first < limit.messages
            and (place == first or size_before[place + 1] - size_before[first] <= limit.bytes)
        ):
            place += 1
        shares.append(claimed[first:place])
    return shares, claimed[place:]


# ---- giving back


def _by_pack(claimed: Sequence[Claimed]) -> tuple[dict[HeldPack, Drawn], list[Claimed]]:
    """Return the messages of packs, keyed by pack, and the ordinary messages."""
    found: dict[HeldPack, tuple[Drawn, list[int]]] = {}
    rest: list[Claimed] = []
    for each in claimed:
        drawn: Drawn | None = each[0].get(_DRAWN)
        if drawn is None:
            rest.append(each)
        else:
            found.setdefault(drawn.hold, (drawn, []))[1].append(each[0]["place"])
    parts = {
        hold: drawn._replace(bits=packs.bits_set(places)) for hold, (drawn, places) in found.items()
    }
    return parts, rest


def _put_back(stock: Stock, how: Reception, claimed: Sequence[Claimed]) -> Plan[None]:
    """Take back messages that no caller has seen. Ordinary messages return to the queue.

    Packed messages return to the stock. A pack returns to the queue once no message is handed out.
    """
    parts, rest = _by_pack(claimed)
    for drawn in parts.values():
        stock.put_back(drawn)
    if rest:
        yield from give_back_excess(how.terms, [document for document, _ in rest])
    for drawn in parts.values():
        with suppress(Unavailable):  # the pack then becomes free when its lease ends
            yield from end_claim(_group(how.terms, drawn.hold, 0))


def _undo(stock: Stock, how: Reception, claimed: Sequence[Claimed]) -> Plan[None]:
    """Take back messages that were received for a cancelled caller.

    Popped messages have already left their packs, so they return as ordinary messages.
    """
    if not how.pop:
        yield from _put_back(stock, how, claimed)
        return
    parts, rest = _by_pack(claimed)
    if rest:
        yield from undo(how, rest)
    terms = how.terms
    for drawn in parts.values():
        pack = drawn.document
        again = []
        for place in packs.places(drawn.bits):
            document = packs.document_in(pack, place)
            free = {name: document[name] for name in document if name not in terms.kind.held_fields}
            entering = terms.kind.entering(terms.queue, pack["due"])
            again.append(free | entering | {"tries": drawn.hold.before})

        def as_part(document: Document, hold: HeldPack = drawn.hold) -> Document:
            """Return a pack that has only this message, and a new _id, because the id is taken."""
            (part,) = packs.parts(hold.id, hold.token, [document], {document["_id"]})
            return part

        yield from insert_again(again, as_part)
        yield from Signal(terms.queue, pack["due"])


def _finish_popped(how: Reception, claimed: Sequence[Claimed]) -> Plan[set[tuple[Hashable, str]]]:
    """Finish popped messages before a caller gets any of them.

    Return the id and token of each message that was no longer held, and so was not finished.
    """
    parts, rest = _by_pack(claimed)
    lost: set[tuple[Hashable, str]] = set()
    if rest:
        now = yield from ServerTime()
        documents = [document for document, _ in rest]
        lost |= yield from finish_popped(how.terms, documents, now)
    for hold, drawn in parts.items():
        not_held = yield from finish_packed(_group(how.terms, hold, drawn.bits))
        lost |= {(hold.message_id(place), hold.token) for place in packs.places(not_held)}
    return lost
