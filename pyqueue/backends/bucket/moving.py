"""Packs: how their messages move to another queue.

Outside a transaction, one update moves all messages left in a pack to another bucket. If only some
move, they share a new document there. In a queue of another kind, each becomes an ordinary message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pyqueue import arguments
from pyqueue.backends import transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.leaving import Make, leave_each, passed
from pyqueue.backends.bucket.settling import Group, Held, by_pack
from pyqueue.backends.forms import Move
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.moving import refuse_taken
from pyqueue.backends.options import QueueTerms, Target
from pyqueue.messages import UNCHANGED, PackedReservation
from pyqueue.payloads import encode
from pyqueue.requests import Document, Plan, ServerTime, Signal, Update


def move(
    terms: QueueTerms,
    pairs: Sequence[tuple[PackedReservation[Any], Any]],
    move: Move,
    session: object,
) -> Plan[None]:
    """Pass messages on to another queue. ``pairs``: reservations, each with its stored payload.

    A payload may be UNCHANGED.
    """
    queue, target, key = terms.queue, move.target, move.key
    yield from refuse_taken(target, key, session)
    values = {id(each): value for each, value in pairs}

    def whole(one: Group, members: Held) -> Plan[bool]:
        changed = {
            f"b.{each.place}.p": values[id(each)]
            for each in members
            if values[id(each)] is not UNCHANGED
        }
        for each in members:
            changed |= {f"b.{each.place}.h.{name}": label for name, label in move.labels.items()}
        return _move_whole(one, target, changed, move.delay)

    def make(each: PackedReservation[Any]) -> Make:
        value = values[id(each)]

        def moved(stored: Document, now: datetime) -> Document:
            when = arguments.starting(now, move.delay, None)
            put = target.kind.entering(target.queue, when, move.priority, move.group)
            document = stored | put | passed(stored, queue, now)
            document.pop("type", None)
            if target.codec.name is not None:
                document["type"] = target.codec.name
            if labels := {**stored.get("headers", {}), **move.labels}:
                document["headers"] = labels
            if key is not None:
                document["key"] = key
            if value is not UNCHANGED:
                document["payload"] = value
            return document

        return moved

    reservations = [each for each, _ in pairs]
    groups = by_pack(queue, terms.kind, reservations)
    together = "packs" in target.kind.capabilities and key is None
    yield from leave_each(
        queue,
        reservations,
        groups,
        make,
        whole=whole if together else None,
        together=together,
        session=session,
    )


def _move_whole(
    group: Group, target: Target, changed: Mapping[str, Any], delay: float | timedelta | None
) -> Plan[bool]:
    """Move a pack to another bucket. Return False if the pack cannot move as a whole.

    Args:
        group: its messages.
        target: the bucket.
        changed: the fields to write into its messages.
        delay: seconds until they can be received there.
    """
    size = len(encode(changed).raw)
    if size > packs.MAX_PACK_BYTES:
        return False
    now = yield from ServerTime()
    when = arguments.starting(now, delay, None)
    hold = group.hold
    if hold is not None and not hold.begin_whole(group.bits, alone=True):
        return False
    put = {**target.kind.entering(target.queue, when), **changed, "c": 0}
    if target.codec.name is not None:
        put["type"] = target.codec.name
    update = transitions.leaving(group.kind, group.queue, put, now)
    del update["$rename"]  # a pack has no key
    update["$unset"]["level"] = ""
    # The pack has no other messages, and no message that left it is still hidden.
    complete: Document = {"n": group.bits.bit_count(), HANDED: []}
    if changed:
        update["$inc"] = {"z": size}
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
