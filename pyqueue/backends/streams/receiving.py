"""Streams: how a consumer group receives messages.

A claim reads the group, takes ranges of positions by one update each, and then reads their packs,
as a majority stored them. Only the update decides who holds what. So what a process remembers of
the group may be old: then the update matches nothing, and the group is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import bson

from pyqueue import arguments
from pyqueue.backends import transitions
from pyqueue.backends.invalid import Misfits, error_record
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.options import QueueShape
from pyqueue.backends.streams import log as stream_log
from pyqueue.backends.streams.entries import Range
from pyqueue.backends.streams.log import Pack
from pyqueue.backends.streams.ranges import (
    Back,
    Ending,
    Group,
    Step,
    Taken,
    claim_step,
    skip_steps,
)
from pyqueue.backends.streams.settling import (
    Buried,
    GroupState,
    change,
    entomb,
    reload,
    settle,
    show_left,
    sweep,
)
from pyqueue.errors import DuplicateKey, LeaseLost, QueueError, Unavailable
from pyqueue.limits import FollowedLimit
from pyqueue.messages import StreamReservation
from pyqueue.payloads import OPTIONS, Codec
from pyqueue.requests import (
    Coalesce,
    FindAndModify,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Wait,
)

log = logging.getLogger("pyqueue")

#: How long a pause may go unnoticed without a bus, in seconds.
PAUSE_READ_INTERVAL_S: Final = 5.0
#: How many packs a process keeps, and of which size: a consumer that receives one message at a time
#: reads each pack once.
_MAX_KEPT: Final = 2
_MAX_KEPT_BYTES: Final = 2**20


class Terms(NamedTuple):
    """How messages are received. Concurrent calls with equal values share their claims."""

    state: GroupState
    start: object
    codec: Codec[Any]
    lease_s: float
    max_tries: int | None
    dead_letter: str
    owner: str
    misfits: Misfits
    limit: FollowedLimit


class Limits(NamedTuple):
    """What one call receives at most."""

    messages: int
    bytes: int


Received = list[StreamReservation[Any]]


def create(state: GroupState, start: object) -> Plan[Group]:
    """Return the group; create it if it is missing.

    Raises:
        ConfigurationError: ``start`` is not allowed.
    """
    found = yield from reload(state)
    if found is not None:
        return found
    position = yield from stream_log.position_at(state.stream, start)
    now = yield from ServerTime()
    new = {"q": f"~group:{state.stream}", "next": position, "skipped": 0, "made": now}
    new |= {"out": [], "back": [], "left": []}
    with suppress(DuplicateKey):  # another process was faster
        yield from FindAndModify(
            {"_id": state.id}, {"$setOnInsert": new}, upsert=True, majority=True
        )
    made = yield from reload(state)
    if made is None:
        raise Unavailable(f"group {state.name!r} of stream {state.stream!r} was deleted just now")
    return made


# ---- receive


def receive(
    terms: Terms,
    waiting: Any,
    limit: int,
    *,
    timeout: float | timedelta | None,
    max_bytes: int,
    poll_s: float,
    shape: Mapping[str, object],
) -> Plan[Received]:
    """Receive up to ``limit`` messages; wait for the first one up to ``timeout``."""
    arguments.count("limit", limit)
    arguments.count("max_bytes", max_bytes)
    timeout_s = None if timeout is None else arguments.duration("timeout", timeout)
    state = terms.state
    deadline = None if timeout_s is None else (yield from MonotonicTime()) + timeout_s
    found = False
    try:
        while True:
            yield from _follow_limit(state.stream, shape, terms.limit)
            received: Received = yield from Coalesce(
                terms,
                Limits(limit, max_bytes),
                partial(_claim_for_callers, terms),
                undo=partial(_give_back, state),
                max_in_flight=1,  # concurrent claims of one process would compete
            )
            if received:
                found = True
                return received
            if deadline is not None and (yield from MonotonicTime()) >= deadline:
                return []
            if (yield from Listen(waiting)):
                continue  # the subscription is new: look again, so that no message is missed
            look = False
            while not look:
                until = yield from _wake_time(state, waiting, terms.limit, poll_s)
                look = yield from Wait(waiting, until, deadline)
    finally:
        waiting.wake_next(found)


def _follow_limit(stream: str, shape: Mapping[str, object], followed: FollowedLimit) -> Plan[None]:
    """Learn the limit of the stream, which the client reads again after some seconds."""
    yield from stream_log.ensure(stream, shape)
    followed.follow(stream, (yield from QueueShape(stream)))
    if followed.limit is not None:
        stream_log.require_limit(stream, followed.limit)


def _wake_time(
    state: GroupState, waiting: Any, limit: FollowedLimit, poll_s: float
) -> Plan[datetime]:
    """Return when to look again if no event arrives."""
    now = yield from ServerTime()
    scan, group = waiting.scan, state.seen
    if scan.due is not None and scan.due <= now:
        scan.due = None
    until = [now + timedelta(seconds=poll_s)]
    if limit.next_start is not None and limit.waits(now):
        until.append(limit.next_start)
    if limit.unreadable is not None or (group is not None and group.paused):
        until.append(now + timedelta(seconds=PAUSE_READ_INTERVAL_S))
    elif group is None:
        until.append(now)  # another call found that what this process knew was old
    else:
        until += [each for each in (group.due(), scan.due) if each is not None]
    return max(min(until), now + timedelta(milliseconds=1))


def _give_back(state: GroupState, received: Received) -> Plan[None]:
    """Give back what was claimed for a cancelled caller: the try is not counted."""
    ranges: dict[str, list[int]] = {}
    for each in received:
        ranges.setdefault(each.token, []).append(each.position)
    yield from _return(state, ranges)


def _return(state: GroupState, ranges: Mapping[str, Range | Sequence[int]]) -> Plan[None]:
    now = yield from ServerTime()
    back = Back(now, counted=False)
    endings = [
        Ending(token, frozenset(each.positions() if isinstance(each, Range) else each), back)
        for token, each in ranges.items()
    ]
    with suppress(Unavailable):  # then they come back when the lease lapses
        if endings:
            yield from settle(state, endings)


# ---- claim


def _claim_for_callers(terms: Terms, limits: Sequence[Limits]) -> Plan[list[Received]]:
    """Claim for several callers. Each gets ranges that no other one shares."""
    shares = [Share([], limit.messages, limit.bytes) for limit in limits]
    while True:
        now = yield from ServerTime()
        wanted = [each.wanted for each in shares]
        served = [bool(each.messages) for each in shares]
        taken = yield from _take(terms, now, wanted, served)
        if not taken:
            break
        room = max(limit.bytes for limit in limits)
        try:
            packs, first = yield from _packs_of(terms.state, [each.range for each in taken], room)
        except QueueError:
            yield from _return(terms.state, {each.range.token: each.range for each in taken})
            raise
        returned = False
        for each in taken:
            returned |= yield from _deliver(terms, each, shares[each.place], packs, first, now)
        if returned:
            break  # what was returned would be claimed again at once
    return [sorted(each.messages, key=attrgetter("position")) for each in shares]


def _take(
    terms: Terms, now: datetime, wanted: Sequence[int], served: Sequence[bool]
) -> Plan[list[Taken]]:
    """Claim ranges for several callers. The result is empty if there is nothing to claim."""
    state = terms.state
    if terms.limit.unreadable is not None:
        return []
    until = now + timedelta(milliseconds=round(terms.lease_s * 1000))
    group = state.seen
    fresh = False
    permits, asked = _Permits(terms), wanted
    while any(wanted):
        if group is None:
            group = yield from create(state, terms.start)
            yield from sweep(state)
        if group.left:
            yield from show_left(state, group.left)
            group = None
            continue
        found = claim_step(group, now, until, state.tail, wanted, served)
        if found is not None and not permits.asked:
            wanted = yield from permits.ask(found[1], wanted, now)
            found = claim_step(group, now, until, state.tail, wanted, served)
            if not any(wanted):
                return []
        if found is not None:
            step, taken = found
            match = {**step.match, "paused": {"$ne": True}, **transitions.in_time(permits.until)}
            group = yield from change(state, Step(match, step.update), w1=True)
            if group is not None:
                yield from permits.give_back(taken)
                return taken
            if (yield from permits.late()):
                yield from permits.give_back([])
                permits, wanted = _Permits(terms), asked
        elif fresh:
            break
        else:  # what this process knows may be old
            _, end = yield from stream_log.bounds(state.stream)
            state.tail = max(state.tail, end)
            group, fresh = None, True
    yield from permits.give_back([])
    return []


class _Permits:
    """The permits of one claim, if the stream has a limit. Each group has permits of its own."""

    __slots__ = ("_permits", "asked")

    def __init__(self, terms: Terms) -> None:
        self._permits = Permits(terms.state.stream, terms.limit, terms.state.name)
        #: Whether nothing is to be asked for any more.
        self.asked = terms.limit.limit is None

    @property
    def until(self) -> datetime | None:
        """The end of the permits; None: it has none."""
        return self._permits.until

    def ask(self, taken: Sequence[Taken], wanted: Sequence[int], now: datetime) -> Plan[list[int]]:
        """Ask for permits for what can be taken. Return how much each caller may take."""
        self.asked = True
        left = yield from self._permits.number(sum(each.range.size for each in taken), now)
        share = [0] * len(wanted)
        for each in taken:
            share[each.place] += min(left, each.range.size)
            left -= min(left, each.range.size)
        return share

    def late(self) -> Plan[bool]:
        """Return whether it is too late to use them."""
        return self._permits.late()

    def give_back(self, taken: Sequence[Taken]) -> Plan[None]:
        """Give back what was not used."""
        yield from self._permits.give_back({"": sum(each.range.size for each in taken)})


# ---- the messages of what was claimed


class Share:
    """What one of several callers gets."""

    __slots__ = ("_most", "full", "messages", "room")

    def __init__(self, messages: Received, most: int, room: int) -> None:
        self.messages = messages
        self._most = most
        #: How many bytes fit.
        self.room = room
        #: Whether it gets no more, whatever it wants.
        self.full = False

    @property
    def wanted(self) -> int:
        """How many more messages the caller wants."""
        return 0 if self.full or self.room <= 0 else self._most - len(self.messages)


def _packs_of(
    state: GroupState, ranges: Sequence[Range], max_bytes: int
) -> Plan[tuple[list[Pack], int]]:
    """Return the packs of ranges; and, if one is missing, the first position of the log, else 0."""
    packs: list[Pack] = []
    missing = False
    spans: list[list[int]] = []
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


def _deliver(
    terms: Terms, taken: Taken, share: Share, packs: Sequence[Pack], first: int, now: datetime
) -> Plan[bool]:
    """Give a caller the messages of a range. Return whether some were returned to the group.

    Invalid messages go to the dead-letter queue, and so does one that was tried too often. What
    the retention of the stream deleted is skipped.
    """
    one, state = taken.range, terms.state
    exhausted = taken.alone and terms.max_tries is not None and one.tries > terms.max_tries
    rest: list[int] = []
    skipped: list[int] = []
    dead: list[Buried] = []
    touched = [each for each in packs if each.first < one.end and each.end > one.start]
    measured = sum(each.size for each in touched) > share.room
    before = len(share.messages)
    following = iter(touched)
    pack = next(following, None)
    for position in one.positions():
        while pack is not None and pack.end <= position:
            pack = next(following, None)
        if pack is None or position < pack.first:
            (skipped if position < first else rest).append(position)
            continue
        entry = pack.entries[position - pack.first]
        size = len(bson.encode(entry, codec_options=OPTIONS)) if measured else 0
        if rest or (measured and size > share.room and share.messages):
            share.room = 0
            rest.append(position)
            continue
        share.room -= size
        message = _message(terms, one, pack, position)
        if isinstance(message, Exception) or exhausted:
            dead.append(_burial(terms, one, pack, position, message, now))
        else:
            terms.misfits.delivered()
            share.messages.append(message)
    if one.lapses and len(share.messages) > before:
        share.full = True  # what lapsed is received apart
    if not measured:
        share.room -= sum(each.size for each in touched) if len(share.messages) > before else 0
    if dead:
        with suppress(LeaseLost):
            yield from entomb(state, terms.dead_letter, dead)
    if skipped:
        yield from _skip(state, one.token, skipped, first)
    if rest:
        yield from _return(state, {one.token: rest})
        if not touched and not share.messages:
            raise Unavailable(f"stream {state.stream!r}: a majority does not have {rest[0]} now")
    return bool(rest)


def _message(
    terms: Terms, one: Range, pack: Pack, position: int
) -> StreamReservation[Any] | Exception:
    """Return a message, or the error of one that does not fit the model."""
    entry = pack.entries[position - pack.first]
    try:
        payload = terms.codec.load(entry["p"])
    except Exception as misfit:  # the validators of a model are user code
        return misfit
    stream, pushed = terms.state.stream, pack.pushed
    return StreamReservation(
        f"{stream}~{position}",
        stream,
        payload,
        dict(entry["h"]) if "h" in entry else {},
        None,
        pushed,
        pushed,
        one.tries,
        None if one.error is None else dict(one.error),
        None,
        None,
        [],
        "reserved",
        None,
        one.token,
        one.until,
        terms.owner,
        terms.lease_s,
        position,
        group=terms.state.name,
    )


def _burial(
    terms: Terms, one: Range, pack: Pack, position: int, found: object, now: datetime
) -> Buried:
    """Return the burial of a message that is invalid, or that was tried too often."""
    entry = pack.entries[position - pack.first]
    document = {"payload": entry["p"]}
    if entry.get("h"):
        document["headers"] = entry["h"]
    if terms.codec.name is not None:
        document["type"] = terms.codec.name
    if isinstance(found, Exception):
        error: Mapping[str, Any] | None = error_record(found, now)
        id, text = f"{terms.state.stream}~{position}", str(error_record(found, now)["message"])
        terms.misfits.add(terms.state.stream, terms.codec.name, terms.dead_letter, id, text, now)
        reason, tries = "invalid", one.tries
    else:
        error, reason, tries = one.error, "tries", one.tries - 1
    return Buried(one.token, position, document, pack.pushed, tries, error, reason)


def _skip(state: GroupState, token: str, positions: Sequence[int], first: int) -> Plan[None]:
    """Pass over messages that the retention of the stream deleted, and all that come before."""
    yield from settle(state, [Ending(token, frozenset(positions), skipped=True)])
    number = len(positions)
    group = yield from reload(state)
    now = yield from ServerTime()
    for gap, step in [] if group is None else skip_steps(group, first, now):
        if (yield from change(state, step)) is not None:
            number += gap
    log.warning(
        "stream %r: group %r is behind the retention of the stream: %d messages were deleted "
        "before it had finished them, and it goes on at position %d",
        state.stream,
        state.name,
        number,
        first,
    )
