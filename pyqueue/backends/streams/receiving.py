"""Streams: how a consumer group receives messages.

A claim reads the group, takes ranges of positions with one update, and then reads their packs, as a
majority stored them. Only the update determines the holder of a message. So a process may use the
state of the group that an earlier call read. If that state is stale, the update matches nothing,
and the process reads the group again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from pyqueue import arguments
from pyqueue.backends import transitions
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.options import QueueShape
from pyqueue.backends.streams import log as stream_log
from pyqueue.backends.streams.delivering import Received, Share, Terms, deliver, packs_of
from pyqueue.backends.streams.ranges import Group, Step, Taken, claim_step
from pyqueue.backends.streams.settling import (
    GroupState,
    change,
    delete_undecided,
    give_back,
    publish_left,
    reload,
)
from pyqueue.errors import DuplicateKey, QueueError, Unavailable
from pyqueue.limits import WHOLE_QUEUE, FollowedLimit
from pyqueue.messages import StreamReservation
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

#: How often a process checks for the end of a pause if no signal arrives, in seconds.
PAUSE_READ_INTERVAL_S: Final = 5.0


class Limits(NamedTuple):
    """The limits of one call that receives messages."""

    messages: int
    bytes: int


def create(state: GroupState, start: object) -> Plan[Group]:
    """Return the group. Create it if it does not exist.

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
        text = f"group {state.name!r} of stream {state.stream!r} was just deleted; try again"
        raise Unavailable(text)
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
    """Receive up to ``limit`` messages. Wait up to ``timeout`` for the first message."""
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
                continue  # the subscription is new: claim again, so that no message is missed
            woken = False
            while not woken:
                until = yield from wake_time(state, waiting, terms.limit, poll_s)
                woken = yield from Wait(waiting, until, deadline)
    finally:
        waiting.wake_next(found)


def _follow_limit(stream: str, shape: Mapping[str, object], followed: FollowedLimit) -> Plan[None]:
    """Learn the limit of the stream. The client reads it again every few seconds."""
    yield from stream_log.ensure(stream, shape)
    followed.follow(stream, (yield from QueueShape(stream)))
    if followed.limit is not None:
        stream_log.require_limit(stream, followed.limit)


def wake_time(
    state: GroupState, waiting: Any, limit: FollowedLimit, poll_s: float
) -> Plan[datetime]:
    """Return when to claim again if no event arrives. Forget a signaled instant that has passed.

    Args:
        state: The state of the group.
        waiting: The waiting consumers of the group. ``scan.due`` is the next signaled instant.
        limit: The limit of the stream.
        poll_s: The longest wait, in seconds.
    """
    now = yield from ServerTime()
    scan, group = waiting.scan, state.seen
    if scan.due is not None and scan.due <= now:
        scan.due = None  # its messages were found by the claim before this wait
    until = [now + timedelta(seconds=poll_s * waiting.poll_share)]
    start = limit.next_start if limit.waits(now) else None
    if start is not None:
        until.append(start)
    if limit.unreadable is not None or (group is not None and group.paused):
        until.append(now + timedelta(seconds=PAUSE_READ_INTERVAL_S))
    elif group is None:
        until.append(now)  # another call has found that the known group is stale
    else:
        due = group.due() if start is None else None  # if due already, it still waits for ``start``
        until += [each for each in (due, scan.due) if each is not None]
    return max(min(until), now + timedelta(milliseconds=1))


def _give_back(
    state: GroupState, received: Iterable[StreamReservation[Any]], claimed: Sequence[Taken] = ()
) -> Plan[None]:
    """Return messages to the group that no caller receives, without counting the try.

    Args:
        state: The state of the group.
        received: Messages that were claimed and read.
        claimed: Claimed ranges whose messages were not read yet.
    """
    positions = {each.range.token: [*each.range.positions()] for each in claimed}
    for each in received:
        positions.setdefault(each.token, []).append(each.position)
    yield from give_back(state, positions)


# ---- claim


def _claim_for_callers(terms: Terms, limits: Sequence[Limits]) -> Plan[list[Received]]:
    """Claim for several callers. Each claimed range goes to one of them."""
    shares = [Share([], limit.messages, limit.bytes) for limit in limits]
    while True:
        now = yield from ServerTime()
        wanted = [each.wanted for each in shares]
        served = [bool(each.messages) for each in shares]
        taken = yield from _take_ranges(terms, now, wanted, served)
        if not taken:
            break
        room = max(limit.bytes for limit in limits)
        returned = False
        unread = list(taken)
        try:
            packs, first = yield from packs_of(terms.state, [each.range for each in taken], room)
            while unread:
                each = unread.pop(0)
                returned |= yield from deliver(
                    terms, each, shares[each.place], packs, first, now=now
                )
        except QueueError:
            # No caller gets a message. If a burial failed, its message stays held until the lease
            # ends. If it were given back, the next claims would take it first, and fail, too.
            yield from _give_back(terms.state, chain(*(each.messages for each in shares)), unread)
            raise
        if returned:
            break  # the next round would claim these messages again
    return [sorted(each.messages, key=attrgetter("position")) for each in shares]


def _take_ranges(
    terms: Terms, now: datetime, wanted: Sequence[int], served: Sequence[bool]
) -> Plan[list[Taken]]:
    """Claim ranges for several callers. Return [] if there is nothing to claim.

    Args:
        terms: How messages are received.
        now: The current instant.
        wanted: How many messages each caller wants.
        served: For each caller, whether it already has messages; see ``claim_step``.
    """
    state = terms.state
    if terms.limit.unreadable is not None:
        return []
    until = now + timedelta(milliseconds=round(terms.lease_s * 1000))
    group = state.seen
    fresh = False  # whether the group and the tail were just read
    permits, wanted_at_first = _Permits(terms), wanted
    while any(wanted):
        if group is None:
            group = yield from create(state, terms.start)
            yield from delete_undecided(state)
            if fresh:  # after the group, because a group that was made anew resets the tail
                _, state.tail = yield from stream_log.bounds(state.stream)
        if group.left:
            yield from publish_left(state, group.left)
            group = None
            continue
        found = claim_step(group, now, until, state.tail, wanted, served=served)
        if found is not None and not permits.asked:
            # Ask for permits for the ranges that the claim would take. It may get fewer.
            wanted = yield from permits.ask(found[1], wanted, now)
            found = claim_step(group, now, until, state.tail, wanted, served=served)
            if not any(wanted):
                return []
        if found is not None:
            step, taken = found
            # A former group may have been at the same position of a former log.
            match = {**step.match, "made": group.made, "paused": {"$ne": True}}
            match |= transitions.in_time(permits.until)
            group = yield from change(state, Step(match, step.update), w1=True)
            if group is not None:
                yield from permits.give_back(taken)
                return taken
            if (yield from permits.late()):
                yield from permits.give_back([])
                permits, wanted = _Permits(terms), wanted_at_first
        elif fresh:
            break
        else:  # the group or the tail in memory may be stale
            group, fresh = None, True
    yield from permits.give_back([])
    return []


class _Permits:
    """The permits of one claim, if the stream has a limit. Each group has a separate rate."""

    __slots__ = ("_permits", "asked")

    def __init__(self, terms: Terms) -> None:
        self._permits = Permits(terms.state.stream, terms.limit, terms.state.name)
        #: Whether the claim has asked for permits, or needs none.
        self.asked = terms.limit.limit is None

    @property
    def until(self) -> datetime | None:
        """When the first permits expire, or None if no permits are held."""
        return self._permits.until

    def ask(self, taken: Sequence[Taken], wanted: Sequence[int], now: datetime) -> Plan[list[int]]:
        """Ask for permits for claimed ranges. Return how many messages each caller may take now."""
        self.asked = True
        left = yield from self._permits.number(sum(each.range.size for each in taken), now)
        share = [0] * len(wanted)
        for each in taken:
            share[each.place] += min(left, each.range.size)
            left -= min(left, each.range.size)
        return share

    def late(self) -> Plan[bool]:
        """Return whether some of the permits may have expired."""
        return self._permits.late()

    def give_back(self, taken: Sequence[Taken]) -> Plan[None]:
        """Give back the permits that these claimed ranges do not use."""
        used = sum(each.range.size for each in taken)
        yield from self._permits.give_back_unused({WHOLE_QUEUE: used})
