"""Streams: give callers the messages of the ranges that were claimed for them.

Ranges are claimed before their messages are read. So a caller may get fewer messages than were
claimed, because some exceed its byte limit, are buried, or were deleted by the retention.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

import bson

from pyqueue.backends.invalid import Misfits
from pyqueue.backends.streams import log as stream_log
from pyqueue.backends.streams.entries import Range
from pyqueue.backends.streams.log import Pack
from pyqueue.backends.streams.ranges import Ending, Taken, skip_steps
from pyqueue.backends.streams.settling import (
    Buried,
    GroupState,
    change,
    entomb,
    give_back,
    reload,
    settle,
)
from pyqueue.documents import message_of
from pyqueue.error_records import error_record
from pyqueue.errors import LeaseLost, Unavailable
from pyqueue.facts import ErrorInfo
from pyqueue.hooks import tell_burial
from pyqueue.limits import FollowedLimit
from pyqueue.messages import StreamReservation
from pyqueue.payloads import OPTIONS, Codec
from pyqueue.requests import Document, Plan, ServerTime

log = logging.getLogger("pyqueue")

#: How many packs a process keeps in memory, and their maximum size. So a consumer that receives one
#: message at a time reads each pack only once.
_MAX_KEPT: Final = 2
_MAX_KEPT_BYTES: Final = 2**20


class Terms(NamedTuple):
    """How a group receives messages. Concurrent calls with equal terms share their claims."""

    state: GroupState
    start: object
    codec: Codec[Any]
    lease_s: float
    max_tries: int | None
    dead_letter: str
    owner: str
    misfits: Misfits
    limit: FollowedLimit


Received = list[StreamReservation[Any]]


class Share:
    """The messages that one of several callers gets."""

    __slots__ = ("_most", "full", "messages", "room")

    def __init__(self, messages: Received, most: int, room: int) -> None:
        self.messages = messages
        self._most = most
        #: How many bytes still fit.
        self.room = room
        #: Whether the caller gets no further messages from this claim, even if it wants some.
        self.full = False

    @property
    def wanted(self) -> int:
        """How many more messages the caller wants."""
        return 0 if self.full or self.room <= 0 else self._most - len(self.messages)


def packs_of(
    state: GroupState, ranges: Sequence[Range], max_bytes: int
) -> Plan[tuple[list[Pack], int]]:
    """Return the packs that contain these ranges. Read the packs that this process has not kept.

    Returns:
        The packs, and the first position of the log, or 0 instead if no pack is missing.
    """
    packs: list[Pack] = []
    missing = False
    spans: list[list[int]] = []  # the ranges; adjacent ranges are joined and read together
    for each in sorted(ranges, key=lambda one: one.start):
        if spans and each.start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], each.end)
        else:
            spans.append([each.start, each.end])
    for low, high in spans:
        kept = [each for each in state.kept if each.first <= low and high <= each.end]
        found = kept[:1] or (
            yield from stream_log.fetch(state.stream, low, high, max_bytes=max_bytes)
        )
        packs += found
        missing |= not found or found[0].first > low or found[-1].end < high
    state.kept = [each for each in packs[-_MAX_KEPT:] if each.size <= _MAX_KEPT_BYTES]
    if not missing:
        return packs, 0
    return packs, (yield from stream_log.bounds(state.stream))[0]


@dataclass(slots=True)
class _Delivery:
    """The outcome for each position of a claimed range."""

    terms: Terms
    share: Share
    range: Range
    #: Whether the message of the range is buried because it was tried too often.
    out_of_tries: bool
    #: Whether to measure each message, because not all of them may fit.
    measured: bool
    #: Positions that go back to the group: the first message that does not fit, and all after it.
    rest: list[int] = field(default_factory=list)
    #: Positions whose messages the retention of the stream deleted.
    skipped: list[int] = field(default_factory=list)
    dead: list[Buried] = field(default_factory=list)

    def divide(self, packs: Sequence[Pack], first: int, now: datetime) -> None:
        """Decide the outcome for each position. ``first``: see ``deliver``."""
        for position, pack in _with_packs(self.range.positions(), packs):
            if pack is not None:
                self.take(pack, position, now)
            else:
                (self.skipped if position < first else self.rest).append(position)

    def take(self, pack: Pack, position: int, now: datetime) -> None:
        """Give the caller a message, bury it, or give it back because it does not fit."""
        share, size = self.share, 0
        if self.measured:
            size = len(bson.encode(pack.entry(position), codec_options=OPTIONS))
        if self.rest or (self.measured and size > share.room and share.messages):
            share.room = 0  # all further positions go back, to keep the order
            self.rest.append(position)
            return
        share.room -= size  # buried messages count, too, to limit the work of one call
        decoded = _message(self.terms, self.range, pack, position, now)
        if isinstance(decoded, Exception) or self.out_of_tries:
            burial = _burial(self.terms, self.range, pack, position, decoded, now=now)
            self.dead.append(burial)
        else:
            self.terms.misfits.count_valid()  # consumers stop if too few messages are valid
            share.messages.append(decoded)


def deliver(
    terms: Terms, taken: Taken, share: Share, packs: Sequence[Pack], first: int, now: datetime
) -> Plan[bool]:
    """Give a caller the messages of a range. Return whether messages went back to the group.

    Invalid messages and messages that were tried too often go to the dead-letter queue. Positions
    whose messages the stream no longer retains are skipped.

    Args:
        terms: How messages are received.
        taken: The claimed range.
        share: The caller's share of messages. This function adds to it.
        packs: The packs that were read, in order.
        first: The first position that the log still has, or 0 if no pack is missing.
        now: The current instant.
    """
    one, state = taken.range, terms.state
    # One message may have caused all failures of a range. So only a message alone is out of tries.
    out_of_tries = taken.alone and terms.max_tries is not None and one.tries > terms.max_tries
    touched = [each for each in packs if each.first < one.end and each.end > one.start]
    measured = sum(each.size for each in touched) > share.room
    delivery = _Delivery(terms, share, one, out_of_tries, measured)
    before = len(share.messages)
    delivery.divide(touched, first, now)
    received = len(share.messages) > before
    if one.lapses and received:
        share.full = True  # lapsed messages are received alone
    if received and not measured:
        share.room -= sum(each.size for each in touched)
    if rest := delivery.rest:  # first, because the other steps may fail
        yield from give_back(state, {one.token: rest})
    if delivery.dead:
        with suppress(LeaseLost):
            yield from _bury(state, terms.dead_letter, delivery.dead)
    if delivery.skipped:
        yield from _skip(state, one.token, delivery.skipped, first)
    if rest and not touched and not share.messages:
        text = f"stream {state.stream!r}: no majority has stored position {rest[0]} yet; try again"
        raise Unavailable(text)
    return bool(rest)


def _bury(state: GroupState, dead_letter: str, dead: Sequence[Buried]) -> Plan[None]:
    """Bury messages. Tell the hooks about each message that was still held."""
    lost = yield from entomb(state, dead_letter, dead)
    for each in dead:
        if (each.position, each.token) not in lost:
            document: Document = {"_id": f"{state.stream}~{each.position}", "q": state.stream}
            document |= {"when": each.pushed, "pushed": each.pushed, "tries": each.tries}
            document |= each.document
            message = message_of(document, document["payload"], each.pushed)
            yield from tell_burial(state.label, message, dead_letter)


def _with_packs(
    positions: Iterable[int], packs: Sequence[Pack]
) -> Iterator[tuple[int, Pack | None]]:
    """Yield positions in order, each with the pack that contains it, or with None."""
    following = iter(packs)
    pack = next(following, None)
    for position in positions:
        while pack is not None and pack.end <= position:
            pack = next(following, None)
        yield position, pack if pack is not None and pack.first <= position else None


def _message(
    terms: Terms, one: Range, pack: Pack, position: int, now: datetime
) -> StreamReservation[Any] | Exception:
    """Return a message, or the error of the model if the message does not fit it."""
    entry = pack.entry(position)
    try:
        payload = terms.codec.load(entry["p"])
    except Exception as misfit:  # the validators of a model are user code
        return misfit
    stream, pushed = terms.state.stream, pack.pushed
    return StreamReservation(
        id=f"{stream}~{position}",
        queue=stream,
        payload=payload,
        headers=dict(entry["h"]) if "h" in entry else {},
        key=None,
        when=pushed,
        pushed=pushed,
        tries=one.tries,
        error=ErrorInfo.of(one.error),
        progress=None,
        checkpoint=None,
        trail=[],
        state="reserved",
        dead=None,
        token=one.token,
        until=one.until,
        owner=terms.owner,
        lease=terms.lease_s,
        reserved=now,
        deliveries=one.tries,
        position=position,
        group=terms.state.name,
    )


def _burial(
    terms: Terms, one: Range, pack: Pack, position: int, decoded: object, now: datetime
) -> Buried:
    """Return a message to bury. ``decoded``: the message, or the error that the model raised."""
    entry = pack.entry(position)
    document = {"payload": entry["p"]}
    if entry.get("h"):
        document["headers"] = entry["h"]
    if terms.codec.name is not None:
        document["type"] = terms.codec.name
    if isinstance(decoded, Exception):
        misfit = error_record(decoded, now)
        id, text = f"{terms.state.stream}~{position}", str(misfit["message"])
        terms.misfits.add(
            terms.state.stream, terms.codec.name, terms.dead_letter, id, text, now=now
        )
        error: Mapping[str, Any] | None = misfit
        reason, tries = "invalid", one.tries
    else:  # this claim only buries the message, and is not a try
        error, reason, tries = one.error, "tries", one.tries - 1
    return Buried(one.token, position, document, pack.pushed, tries, error=error, reason=reason)


def _skip(state: GroupState, token: str, positions: Sequence[int], first: int) -> Plan[None]:
    """Skip messages that the retention deleted, and messages below ``first`` that are not held."""
    yield from settle(state, [Ending(token, frozenset(positions), skipped=True)])
    number = len(positions)
    group = yield from reload(state)
    now = yield from ServerTime()
    for more, step in [] if group is None else skip_steps(group, first, now):
        if (yield from change(state, step)) is not None:
            number += more
    log.warning(
        "stream %r: group %r is behind the retention of the stream: %d messages were deleted "
        "before it had finished them, and it continues at position %d",
        state.stream,
        state.name,
        number,
        first,
    )
