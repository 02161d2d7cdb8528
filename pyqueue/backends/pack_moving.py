"""Packs: how their messages move to another queue.

All that is left of a pack moves to another bucket by one update of the pack. A part of it gets a
document for itself there. In a queue of another kind, each message becomes an ordinary one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, Unpack

from pyqueue import arguments, packs
from pyqueue.backends import transitions
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import Target
from pyqueue.backends.pack_leaving import Make, leave_each, passed
from pyqueue.backends.pack_settling import Group, Held, by_pack
from pyqueue.messages import UNCHANGED, PackedReservation
from pyqueue.payloads import encode
from pyqueue.requests import Document, Plan, ServerTime, Signal, Update

__all__ = ["SimpleMoveOptions", "move"]


class SimpleMoveOptions(TypedDict, total=False):
    """The options of a move that any message takes."""

    headers: Mapping[str, Any] | None
    delay: float | timedelta | None
    key: str | None
    priority: int | None
    group: str | None
    session: object


def move(
    queue: str,
    kind: Kind,
    held: Sequence[tuple[PackedReservation[Any], Any]],
    target: Target,
    **options: Unpack[SimpleMoveOptions],
) -> Plan[None]:
    """Pass messages on to another queue. ``held``: reservations, each with its stored payload.

    A payload may be UNCHANGED.
    """
    added, delay, key = options.get("headers") or {}, options.get("delay"), options.get("key")
    values = {id(each): value for each, value in held}

    def whole(one: Group, members: Held) -> Plan[bool]:
        changed = {
            f"b.{each.place}.p": values[id(each)]
            for each in members
            if values[id(each)] is not UNCHANGED
        }
        for each in members:
            changed |= {f"b.{each.place}.h.{name}": label for name, label in added.items()}
        return _move_whole(one, target, changed, delay)

    def make(each: PackedReservation[Any]) -> Make:
        value = values[id(each)]

        def moved(stored: Document, now: datetime) -> Document:
            when = arguments.starting(now, delay, None)
            turn = options.get("priority"), options.get("group")
            put = target.kind.entering(target.queue, when, *turn)
            document = stored | put | passed(stored, queue, now)
            document.pop("type", None)
            if target.codec.name is not None:
                document["type"] = target.codec.name
            if labels := {**stored.get("headers", {}), **added}:
                document["headers"] = labels
            if key is not None:
                document["key"] = key
            if value is not UNCHANGED:
                document["payload"] = value
            return document

        return moved

    reservations = [each for each, _ in held]
    groups = by_pack(queue, kind, reservations)
    together = "packs" in target.kind.capabilities and key is None
    yield from leave_each(
        queue,
        reservations,
        groups,
        make,
        whole=whole if together else None,
        together=together,
        session=options.get("session"),
    )


def _move_whole(
    group: Group, target: Target, changed: Mapping[str, Any], delay: float | timedelta | None
) -> Plan[bool]:
    """Move a pack to another bucket. The result is False if there is more in it than these.

    Args:
        group: its messages.
        target: the bucket.
        changed: what is written into its messages.
        delay: seconds until they can be received there.
    """
    size = len(encode(changed).raw)
    if size > packs.MAX_PACK_BYTES:
        return False
    hold = group.hold
    if hold is not None and not hold.begin_whole(group.bits, alone=True):
        return False
    now = yield from ServerTime()
    when = arguments.starting(now, delay, None)
    put = {**target.kind.entering(target.queue, when), **changed, "c": 0}
    if target.codec.name is not None:
        put["type"] = target.codec.name
    update = transitions.leaving(group.kind, group.queue, put, now)
    del update["$rename"]
    update["$unset"]["level"] = ""
    alone = {"n": group.bits.bit_count(), HANDED: []}
    if changed:
        update["$inc"] = {"z": size}
        alone["z"] = {"$lte": packs.MAX_PACK_BYTES - size}
    try:
        matched = bool((yield from Update(group.fence | alone, update)).matched)
    except BaseException:
        if hold is not None:
            hold.lose()
        raise
    if hold is not None:
        hold.settled(0, "return", matched=matched)
    if matched:
        yield from Signal(target.queue, when)
    return matched
