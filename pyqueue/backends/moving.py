"""Move: pass a held message on to another queue, in one atomic update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue import arguments
from pyqueue.backends import namespace, pack_moving, transitions
from pyqueue.backends.applying import (
    Settlement,
    SettlementResult,
    SettlementUpdate,
    apply,
    settle,
)
from pyqueue.backends.groups import GROUPED
from pyqueue.backends.kind import Kind, require, require_target
from pyqueue.backends.options import NewMessage, Target
from pyqueue.backends.pack_moving import SimpleMoveOptions
from pyqueue.backends.pack_settling import Held, by_form
from pyqueue.clock import BAND
from pyqueue.documents import stored_group
from pyqueue.errors import ConfigurationError, DuplicateKey
from pyqueue.messages import UNCHANGED, PackedReservation, Reservation
from pyqueue.payloads import Codec, encode
from pyqueue.requests import Find, Plan, ServerTime

__all__ = ["MoveOptions", "dump", "move", "move_each"]

#: The update operators that a move accepts.
OPERATORS: Final = (
    *("$set", "$unset", "$inc", "$mul", "$min", "$max"),
    *("$rename", "$push", "$pull", "$addToSet"),
)


class MoveOptions(SimpleMoveOptions, total=False):
    """The options of a move; see ``Queue.move``."""

    update: Mapping[str, Any] | None


def dump(codec: Codec[Any], payload: Any) -> Any:
    """Return the stored value of a payload.

    Raises:
        InvalidMessage: it does not fit the model, or cannot be stored.
    """
    value = codec.dump(payload)
    encode({"payload": value})
    return value


def move(
    queue: str,
    kind: Kind,
    pairs: Sequence[tuple[object, Any]],
    *,
    to: Target | str,
    update: Mapping[str, Any] | None = None,
    headers: Mapping[str, Any] | None = None,
    delay: float | timedelta | None = None,
    key: str | None = None,
    priority: int | None = None,
    group: str | None = None,
    session: object = None,
) -> Plan[None]:
    """Pass messages on, each in one atomic update. ``pairs``: a reservation and its payload."""
    require(kind, queue, "move")
    held = arguments.reservations(queue, tuple(each for each, _ in pairs))
    _check_key(key, held)
    edits = _edits(update)
    if edits and any(payload is not UNCHANGED for _, payload in pairs):
        raise ConfigurationError("payload, update: give one of the two, not both")
    labels = arguments.headers(headers) or {}
    arguments.starting(BAND, delay, None)
    codec = Codec[Any]() if isinstance(to, str) else to.codec
    if isinstance(to, str):
        arguments.queue_name(to)
    values = {id(each): _stored(codec, payload) for each, payload in pairs}
    _refuse_packed(held, edits)
    target = yield from _entered(to, held, priority, group)
    same = SimpleMoveOptions(
        headers=labels, delay=delay, key=key, priority=priority, group=group, session=session
    )

    def inside(some: Held) -> Plan[None]:
        yield from _refuse_taken(target, key, session)
        of_packs = [(each, values[id(each)]) for each in some]
        yield from pack_moving.move(queue, kind, of_packs, target, **same)

    def alone(rest: Sequence[Reservation[Any]]) -> Plan[None]:
        settlements = [
            move_settlement(
                queue,
                kind,
                each,
                target,
                values[id(each)],
                labels,
                key=key,
                delay=delay,
                priority=priority,
                group=group,
                edits=edits,
            )
            for each in rest
        ]
        return _settle_moves(queue, target, values, settlements, key, session)

    yield from by_form(held, inside, alone)


def _stored(codec: Codec[Any], payload: Any) -> Any:
    return payload if payload is UNCHANGED else dump(codec, payload)


def _settle_moves(
    queue: str,
    target: Target,
    values: Mapping[int, Any],
    settlements: Sequence[Settlement],
    key: str | None,
    session: object,
) -> Plan[None]:
    """Carry moves out. Those that change nothing but the queue share commands."""
    same: Hashable = ("move", id(target), id(values))
    grouped = []
    for each in settlements:
        shared = values[id(each.held)] is UNCHANGED and key is None and each.group is None
        grouped.append(each._replace(group=(same, each.held.priority) if shared else None))
    try:
        yield from settle(queue, grouped, session)
    except DuplicateKey as clash:
        raise _key_taken(target, str(key)) from clash


def _key_taken(target: Target, key: str) -> DuplicateKey:
    text = f"key: queue {target.queue!r} has a message with the key {key!r}"
    return DuplicateKey(text, keys=[key])


def _check_key(key: str | None, held: Sequence[Reservation[Any]]) -> None:
    if key is None:
        return
    if len(held) > 1:
        raise ConfigurationError(
            "key: belongs to one message; move one reservation at a time with it"
        )
    arguments.key(key)


def _refuse_packed(held: Sequence[Reservation[Any]], edits: Mapping[str, object]) -> None:
    """Refuse what the move of a message out of its pack cannot do."""
    for each in held:
        if edits and isinstance(each, PackedReservation):
            raise ConfigurationError(
                f"update: message {each.id} shares a document with more messages: move it with "
                "payload="
            )


def _refuse_taken(target: Target, key: str | None, session: object) -> Plan[None]:
    """Refuse a key that is taken before anything is written."""
    match = {"q": target.queue, "key": key}
    if key is not None and (yield from Find(match, {"_id": 1}, limit=1, session=session)):
        raise _key_taken(target, key)


def _entered(
    to: Target | str,
    held: Sequence[Reservation[Any]],
    priority: int | None,
    group: str | None,
) -> Plan[Target]:
    """Return the target of a move, with its record made and the new priorities listed there."""
    if priority is not None:
        arguments.priority(priority)
    if group is not None:
        arguments.ordered_group(group)
    if not isinstance(to, str):
        require_target(to.kind, to.queue, priority, group)
    elif priority is not None or group is not None:
        name = (yield from namespace.kind_of(to)) or "standard"
        require_target(namespace.target_kind(to, name), to, priority, group)
    levels = {each.priority if priority is None else priority for each in held}
    if isinstance(to, str):
        return (yield from namespace.target(to, levels))
    yield from namespace.ensure(to.queue, to.kind, to.options, levels)
    return to


def move_settlement(
    queue: str,
    kind: Kind,
    held: Reservation[Any],
    target: Target,
    value: Any,
    labels: Mapping[str, Any],
    *,
    key: str | None = None,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    priority: int | None = None,
    group: str | None = None,
    edits: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settlement:
    """Return the settlement that moves one message.

    Args:
        queue: the queue that it leaves.
        kind: the kind of that queue.
        held: its reservation.
        target: the queue that it enters.
        value: the stored value of its new payload, or UNCHANGED.
        labels: headers to merge into its headers.
        key: its key in the target.
        delay: seconds until it can be received there.
        at: in place of ``delay``, the instant from which on it can be.
        priority: its priority in the target, if that has priorities; None: the one that it has.
        group: its group in the target, if that is ordered; None: the one that it has.
        edits: further update operators, on parts of the payload.
    """
    level = held.priority if priority is None else priority
    name = held.group if group is None else group
    # It keeps its place among the messages of its group that move the same way.
    stays = group is None and delay is None and at is None and freed_by(kind, held) is not None

    def build(now: datetime) -> SettlementUpdate:
        when = arguments.starting(now, delay, at)
        put = target.kind.entering(target.queue, when, level, name)
        put.update({f"headers.{name}": label for name, label in labels.items()})
        if target.codec.name is not None:
            put["type"] = target.codec.name
        if value is not UNCHANGED:
            put["payload"] = value
        if key is not None:
            put["key"] = key
            if held.key is not None:
                put["last_key"] = held.key
        keep = GROUPED.places if stays and "group" in put else ()
        for each in keep:
            del put[each]
        update = transitions.leaving(kind, queue, put, now, keep=keep)
        for operator, fields in (edits or {}).items():
            update[operator] = {**update.get(operator, {}), **fields}
        return update

    # The update of each group is another one.
    alone = None if name is None else ("group", name)
    return Settlement(held, build, alone, frees=freed_by(kind, held))


def freed_by(kind: Kind, held: Reservation[Any]) -> str | None:
    """Return the group of an ordered queue that goes on when this claim ends."""
    # In this order: what an older release has pickled has no group.
    if "group" not in kind.capabilities or held.group is None:
        return None
    return stored_group(held.group)


def move_each(
    queue: str,
    kind: Kind,
    target: Target,
    pairs: Sequence[tuple[Reservation[Any], NewMessage]],
) -> Plan[list[tuple[Reservation[Any], SettlementResult]]]:
    """Move messages, each with its payload, headers, key and instant, in one atomic update each.

    A payload may be UNCHANGED. Headers are merged into those of the message. Without a key, a
    message leaves its key behind. Messages of which nothing changes, and which become ready at
    once, share commands.

    Returns:
        Each reservation, and how its move went.
    """
    levels = {held.priority if new.priority is None else new.priority for held, new in pairs}
    yield from namespace.ensure(target.queue, target.kind, target.options, levels)
    now = yield from ServerTime()
    same: Hashable = ("move", id(target))
    settlements = []
    for held, new in pairs:
        labels = arguments.headers(new.headers) or {}
        key = None if new.key is None else arguments.key(new.key)
        value = _stored(target.codec, new.payload)
        at = new.at if new.at is not None and new.at > now else None
        settlement = move_settlement(
            queue,
            kind,
            held,
            target,
            value,
            labels,
            key=key,
            delay=new.delay,
            at=at,
            priority=new.priority,
            group=new.group,
        )
        changed = value is not UNCHANGED or key is not None or labels
        shared = not changed and at is None and new.delay is None and settlement.group is None
        equal = (same, held.priority, new.priority)
        settlements.append(settlement._replace(group=equal if shared else None))
    results = yield from apply(queue, settlements)
    return [(each.held, result) for each, result in zip(settlements, results, strict=True)]


def _edits(update: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the caller's update operators, on the payload."""
    if update is None:
        return {}
    if not isinstance(update, Mapping) or not all(
        isinstance(fields, Mapping) for fields in update.values()
    ):
        operators = " ".join(OPERATORS)
        raise ConfigurationError(f"update: give a mapping of {operators} to mappings of fields")
    edits: dict[str, dict[str, Any]] = {}
    for operator, fields in update.items():
        arguments.one_of("update", operator, OPERATORS)
        names = [*fields, *(fields.values() if operator == "$rename" else ())]
        if not all(isinstance(name, str) and name for name in names):
            text = f"update: {operator}: the names of payload fields are non-empty strs"
            raise ConfigurationError(text)
        edits[operator] = {
            f"payload.{name}": f"payload.{value}" if operator == "$rename" else value
            for name, value in fields.items()
        }
    encode({"update": edits})
    return edits
