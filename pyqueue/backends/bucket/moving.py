"""Packs: how their messages move to another queue.

Outside a transaction, one update moves a whole pack to another bucket. If only some messages of a
pack move, they share a new document there. In a queue of another kind, each has its own document.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import bson

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.leaving import Make, leave_each, trail_after
from pyqueue.backends.bucket.settling import Group, Held, by_pack
from pyqueue.backends.forms import Move, Outcomes
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.moving import refuse_taken, stay_of, stored_payload
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.errors import DuplicateKey, InvalidMessage, LeaseLost, Unavailable
from pyqueue.messages import UNCHANGED, PackedReservation
from pyqueue.payloads import OPTIONS
from pyqueue.requests import Document, Plan, ServerTime, Signal, Update


class _Content(NamedTuple):
    """The changes to make to a message that moves."""

    #: The new payload in stored form, or UNCHANGED.
    value: Any
    #: Headers to merge into its headers.
    labels: Mapping[str, Any]


#: The changes, keyed by the ``id()`` of the reservation.
_Contents = Mapping[int, _Content]


def move(
    terms: QueueTerms,
    pairs: Sequence[tuple[PackedReservation[Any], Any]],
    move: Move,
    session: object,
) -> Plan[None]:
    """Move messages to another queue. ``pairs``: reservations, each with its new payload.

    A payload is in stored form, or it is UNCHANGED.
    """
    contents = {id(each): _Content(value, move.labels) for each, value in pairs}
    yield from _move(terms, [each for each, _ in pairs], contents, move, session)


def moves(
    terms: QueueTerms,
    target: Target,
    pairs: Sequence[tuple[PackedReservation[Any], NewMessage]],
) -> list[Plan[Outcomes]]:
    """Return a plan for each pack, which moves messages of the pack with their new contents."""
    claims: dict[Hashable, list[tuple[PackedReservation[Any], NewMessage]]] = {}
    for held, new in pairs:
        claims.setdefault((held.pack, held.token), []).append((held, new))
    return [_move_pack(terms, target, some) for some in claims.values()]


def _move_pack(
    terms: QueueTerms,
    target: Target,
    pairs: Sequence[tuple[PackedReservation[Any], NewMessage]],
) -> Plan[Outcomes]:
    """Move messages of one pack. Messages with equal times and options are moved together."""
    levels = {new.priority for _, new in pairs}
    yield from namespace.ensure(target.queue, target.kind, target.options, levels)
    now = yield from ServerTime()
    contents: dict[int, _Content] = {}
    alike: dict[tuple[Any, ...], list[PackedReservation[Any]]] = {}
    for held, new in pairs:
        labels = arguments.headers(new.headers) or {}
        contents[id(held)] = _Content(stored_payload(target.codec, new.payload), labels)
        key = None if new.key is None else arguments.key(new.key)
        at = new.at if new.at is not None and new.at > now else None
        alike.setdefault((key, new.delay, at, new.priority, new.group), []).append(held)
    outcomes: Outcomes = []
    for (key, delay, at, priority, group), some in alike.items():
        move = Move(target, {}, key, delay, at, priority=priority, group=group)
        outcomes += yield from _outcomes(some, _move(terms, some, contents, move, None))
    return outcomes


def _outcomes(held: Held, moving: Plan[None]) -> Plan[Outcomes]:
    """Run a plan that moves messages. Return the outcome for each message."""
    try:
        yield from moving
    except LeaseLost as error:
        lost, unknown = ({id(each) for each in some} for some in (error.lost, error.unknown))
        return [
            (each, "lost" if id(each) in lost else "unknown" if id(each) in unknown else "done")
            for each in held
        ]
    except (DuplicateKey, InvalidMessage, Unavailable) as error:
        return [(each, error) for each in held]
    return [(each, "done") for each in held]


def _move(
    terms: QueueTerms, held: Held, contents: _Contents, move: Move, session: object
) -> Plan[None]:
    """Move messages. In another bucket, messages of one pack share a pack unless they get a key."""
    queue, target, key = terms.queue, move.target, move.key
    yield from refuse_taken(target, key, session)

    def whole(one: Group, members: Held) -> Plan[bool]:
        changed: dict[str, Any] = {}
        for each in members:
            value, labels = contents[id(each)]
            if value is not UNCHANGED:
                changed[f"b.{each.place}.p"] = value
            changed |= {f"b.{each.place}.h.{name}": label for name, label in labels.items()}
        return _move_whole(one, move, changed, stay_of(members[0]))

    def make(each: PackedReservation[Any]) -> Make:
        value, labels = contents[id(each)]

        def moved(stored: Document, now: datetime) -> Document:
            when = arguments.starting(now, move.delay, move.at)
            put = target.kind.entering(target.queue, when, move.priority, move.group)
            document = stored | put | trail_after(stored, queue, now, stay_of(each))
            document.pop("type", None)
            if target.codec.name is not None:
                document["type"] = target.codec.name
            if merged := {**stored.get("headers", {}), **labels}:
                document["headers"] = merged
            if key is not None:
                document["key"] = key
            if value is not UNCHANGED:
                document["payload"] = value
            return document

        return moved

    groups = by_pack(queue, terms.kind, held)
    together = "packs" in target.kind.capabilities and key is None  # a pack has no key
    yield from leave_each(
        queue,
        held,
        groups,
        make,
        whole=whole if together else None,
        together=together,
        session=session,
    )


def _move_whole(
    group: Group, move: Move, changed: Mapping[str, Any], stay: Mapping[str, Any]
) -> Plan[bool]:
    """Move a pack to another bucket. Return False if the pack cannot move as a whole.

    Args:
        group: The messages of the pack.
        move: The queue that the messages enter, and how they enter it.
        changed: The fields to set in the pack: the new payloads and headers of its messages.
        stay: Facts to add to the trail of each message, such as its tries in this queue.
    """
    target = move.target
    # Each payload was checked alone. If all are too large for one document, they move in parts.
    size = len(bson.encode(changed, codec_options=OPTIONS))
    if size > packs.MAX_PACK_BYTES:
        return False
    now = yield from ServerTime()
    when = arguments.starting(now, move.delay, move.at)
    hold = group.hold
    if hold is not None and not hold.begin_whole(group.bits, alone=True):
        return False
    put = {**target.kind.entering(target.queue, when), **changed, "c": 0}  # not claimed there yet
    if target.codec.name is not None:
        put["type"] = target.codec.name
    update = transitions.leaving(group.kind, group.queue, put, now)
    update = transitions.noting(update, None, stay)
    del update["$rename"]  # a pack has no key
    update["$unset"]["level"] = ""
    # Match only if the pack has no other messages, and no message that left it is still hidden.
    complete: Document = {"n": group.bits.bit_count(), HANDED: []}
    if changed:
        update["$inc"] = {"z": size}  # an upper bound of the size in bytes
        complete["z"] = {"$lte": packs.MAX_PACK_BYTES - size}
    try:
        matched = bool((yield from Update(group.fence | complete, update)).matched)
    except BaseException:
        if hold is not None:
            hold.lose()
        raise
    if hold is not None:
        hold.settled(0, "return", matched=matched)
    if matched:
        yield from Signal(target.queue, when)
    return matched
