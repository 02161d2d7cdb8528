"""Move: take a held message to another queue, in one atomic update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypedDict, Unpack

from pyqueue import arguments
from pyqueue.backends import forms, namespace, transitions, uniqueness
from pyqueue.backends.applying import Settlement, apply, settle
from pyqueue.backends.forms import Form, Held, Move, Outcomes
from pyqueue.backends.kind import UpdateFields, require, require_target
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.clock import BAND
from pyqueue.errors import ConfigurationError, DuplicateKey
from pyqueue.messages import UNCHANGED, Message, Reservation
from pyqueue.payloads import Codec, encode
from pyqueue.requests import Find, Plan, ServerTime

#: The update operators that a move accepts.
OPERATORS: Final = (
    *("$set", "$unset", "$inc", "$mul", "$min", "$max"),
    *("$rename", "$push", "$pull", "$addToSet"),
)


class MoveOptions(TypedDict, total=False):
    """The options of a move; see ``Queue.move``."""

    headers: Mapping[str, Any] | None
    delay: float | timedelta | None
    at: datetime | None
    key: str | None
    priority: int | None
    group: str | None
    update: Mapping[str, Any] | None
    session: object


def dump(codec: Codec[Any], payload: Any) -> Any:
    """Return the stored value of a payload.

    Raises:
        InvalidMessage: The payload does not fit the model, or cannot be stored.
    """
    value = codec.dump(payload)
    encode({"payload": value})
    return value


def move(
    terms: QueueTerms,
    pairs: Sequence[tuple[object, Any]],
    *,
    to: Target | str,
    **options: Unpack[MoveOptions],
) -> Plan[None]:
    """Move messages, each in one atomic update. ``pairs``: reservations and payloads."""
    require(terms.kind, terms.queue, "move")
    held = arguments.reservations(terms.queue, tuple(each for each, _ in pairs))
    key, session = options.get("key"), options.get("session")
    delay, at = options.get("delay"), options.get("at")
    check_key(key, held)
    edits = _edits(options.get("update"))
    if edits and any(payload is not UNCHANGED for _, payload in pairs):
        raise ConfigurationError("payload, update: pass one of the two, not both")
    labels = arguments.headers(options.get("headers")) or {}
    arguments.starting(BAND, delay, at)
    codec = Codec[Any]() if isinstance(to, str) else to.codec
    if isinstance(to, str):
        arguments.queue_name(to)
    values = {id(each): stored_payload(codec, payload) for each, payload in pairs}
    if edits:
        for form, some in forms.by_form(held):
            form.refuse(some, "update")
    priority, group = options.get("priority"), options.get("group")
    _check_place(to, priority, group)

    def moved() -> Plan[None]:
        target = yield from ready_target(to, held, priority, group)
        yield from uniqueness.release(target.queue, [] if key is None else [key], session)
        how = Move(target, labels, key, delay, at, priority=priority, group=group, edits=edits)

        def settled(form: Form[Any], some: Held) -> Plan[None]:
            return form.move(terms, [(each, values[id(each)]) for each in some], how, session)

        yield from forms.settle(held, settled)

    return moved()


def move_documents(
    terms: QueueTerms, pairs: Sequence[tuple[Reservation[Any], Any]], move: Move, session: object
) -> Plan[None]:
    """Move messages that are separate documents. Moves that change nothing else share commands."""
    same: Hashable = ("move", id(move))
    alike = _stayed_alike([held for held, _ in pairs])
    settlements = []
    for held, value in pairs:
        settlement = move_settlement(terms, held, value, move)
        shared = alike and value is UNCHANGED and move.key is None and settlement.group is None
        settlements.append(settlement._replace(group=(same, held.priority) if shared else None))
    try:
        yield from settle(terms.queue, settlements, session)
    except DuplicateKey as clash:
        raise key_taken(move.target, str(move.key)) from clash


def stay_of(message: Message[Any]) -> dict[str, Any]:
    """Return what a message's trail notes about a stay in a queue: the tries and the last wait."""
    if not isinstance(message, Reservation):
        return {"tries": message.tries}  # it is not known when it was last claimed
    waited_s = max(0.0, (message.reserved - message.when).total_seconds())
    return {"tries": message.tries, "waited": waited_s}


def _stayed_alike(held: Sequence[Reservation[Any]]) -> bool:
    """Return whether the trails of all messages get equal entries.

    If not, each message gets its own update, and one bulk write sends all updates. To update
    messages with equal entries together would take a command for each group.
    """
    return len({tuple(stay_of(each).values()) for each in held}) == 1


def stored_payload(codec: Codec[Any], payload: Any) -> Any:
    """Return the stored value of a payload, or UNCHANGED if the payload is UNCHANGED."""
    return payload if payload is UNCHANGED else dump(codec, payload)


def key_taken(target: Target, key: str) -> DuplicateKey:
    """Return the error for a key that another message of the target has."""
    text = f"key: queue {target.queue!r} already has a message with the key {key!r}"
    return DuplicateKey(text, keys=[key])


def check_key(key: str | None, held: Sequence[object]) -> None:
    """Refuse a key that is not allowed, or a key for several messages."""
    if key is None:
        return
    if len(held) > 1:
        raise ConfigurationError(
            "key: cannot be set for several messages, because a key belongs to one message; move "
            "one reservation at a time"
        )
    arguments.key(key)


def refuse_taken(target: Target, key: str | None, session: object) -> Plan[None]:
    """Refuse a key that another message of the target has, before anything is written."""
    match = {"q": target.queue, "key": key}
    if key is not None and (yield from Find(match, {"_id": 1}, limit=1, session=session)):
        raise key_taken(target, key)


def _check_place(to: Target | str, priority: int | None, group: str | None) -> None:
    """Refuse a priority or a group that is not allowed, or that the target does not support."""
    if priority is not None:
        arguments.priority(priority)
    if group is not None:
        arguments.ordered_group(group)
    if not isinstance(to, str):
        require_target(to.kind, to.queue, priority, group)


def ready_target(
    to: Target | str,
    messages: Sequence[Message[Any]],
    priority: int | None,
    group: str | None,
) -> Plan[Target]:
    """Return the target of a move, after making sure that its record lists the priorities."""
    if isinstance(to, str) and (priority is not None or group is not None):
        name = (yield from namespace.kind_of(to)) or "standard"
        require_target(namespace.target_kind(to, name), to, priority, group)
    levels = {each.priority if priority is None else priority for each in messages}
    if isinstance(to, str):
        return (yield from namespace.target(to, levels))
    yield from namespace.ensure(to.queue, to.kind, to.options, levels)
    return to


def move_settlement(
    terms: QueueTerms, held: Reservation[Any], value: Any, move: Move
) -> Settlement:
    """Return the settlement that moves one message; see ``move_update``.

    The settlement has a ``group`` only for messages of ordered groups, which need separate updates.
    """
    group = held.group if move.group is None else move.group
    batch = None if group is None else ("group", group)
    return Settlement(held, partial(move_update, terms, held, value, move), batch, terms.kind)


def move_update(
    terms: QueueTerms, message: Message[Any], value: Any, move: Move, now: datetime
) -> UpdateFields:
    """Return the update that moves one message.

    Args:
        terms: The queue that the message leaves.
        message: The message to move.
        value: The stored value of its new payload, or UNCHANGED.
        move: The target, and what changes on the way there.
        now: The current instant.
    """
    kind = terms.kind
    # The message keeps its place among the messages of its group that move the same way.
    stays = move.group is None and move.delay is None and move.at is None
    put = _entering(message, value, move, now)
    keep = kind.place_fields if stays and "group" in put else ()
    for each in keep:
        del put[each]
    update = transitions.leaving(kind, terms.queue, put, now, keep=keep)
    update = transitions.noting(update, None, stay_of(message))
    for operator, fields in (move.edits or {}).items():
        update[operator] = {**update.get(operator, {}), **fields}
    return update


def _entering(message: Message[Any], value: Any, move: Move, now: datetime) -> dict[str, Any]:
    """Return the fields with which a message enters the target; see ``move_update``."""
    target = move.target
    priority = message.priority if move.priority is None else move.priority
    group = message.group if move.group is None else move.group
    when = arguments.starting(now, move.delay, move.at)
    put = target.kind.entering(target.queue, when, priority, group)
    put.update({f"headers.{name}": label for name, label in move.labels.items()})
    if target.codec.name is not None:
        put["type"] = target.codec.name
    if value is not UNCHANGED:
        put["payload"] = value
    if move.key is not None:
        put["key"] = move.key
        if message.key is not None:
            put["last_key"] = message.key
    return put


def moves(
    terms: QueueTerms, target: Target, pairs: Sequence[tuple[Reservation[Any], NewMessage]]
) -> list[Plan[Outcomes]]:
    """Return plans that together move messages, each as its form requires; see ``Form.moves``."""
    new = {id(held): row for held, row in pairs}
    return [
        plan
        for form, some in forms.by_form([held for held, _ in pairs])
        for plan in form.moves(terms, target, [(each, new[id(each)]) for each in some])
    ]


def move_each(
    terms: QueueTerms, target: Target, pairs: Sequence[tuple[Reservation[Any], NewMessage]]
) -> Plan[Outcomes]:
    """Move messages, each in one atomic update with its payload, headers, key and instant.

    A payload may be UNCHANGED. Headers are merged into the headers of the message. Without a new
    key, a message leaves its key behind. Unchanged messages that become ready immediately share
    commands.

    Returns:
        Each reservation, with the result of its move.
    """
    levels = {held.priority if new.priority is None else new.priority for held, new in pairs}
    yield from namespace.ensure(target.queue, target.kind, target.options, levels)
    keys = [new.key for _, new in pairs if new.key is not None]
    yield from uniqueness.release(target.queue, keys)
    now = yield from ServerTime()
    alike = _stayed_alike([held for held, _ in pairs])
    settlements = []
    for held, new in pairs:
        labels = arguments.headers(new.headers) or {}
        key = None if new.key is None else arguments.key(new.key)
        value = stored_payload(target.codec, new.payload)
        at = new.at if new.at is not None and new.at > now else None
        how = Move(target, labels, key, new.delay, at, priority=new.priority, group=new.group)
        settlement = move_settlement(terms, held, value, how)
        changed = not alike or value is not UNCHANGED or key is not None or labels
        # Settlements with equal batch keys share a command; one without a key has its own.
        shared = not changed and at is None and new.delay is None and settlement.group is None
        batch_key: Hashable = ("move", id(target), held.priority, new.priority)
        settlements.append(settlement._replace(group=batch_key if shared else None))
    results = yield from apply(terms.queue, settlements)
    return [(each.held, result) for each, result in zip(settlements, results, strict=True)]


def _edits(update: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the caller's update operators, with each field as a field of the payload."""
    if update is None:
        return {}
    if not isinstance(update, Mapping) or not all(
        isinstance(fields, Mapping) for fields in update.values()
    ):
        operators = ", ".join(OPERATORS)
        raise ConfigurationError(f"update: expected operators, each with fields; use {operators}")
    edits: dict[str, dict[str, Any]] = {}
    for operator, fields in update.items():
        arguments.one_of("update", operator, OPERATORS)
        edits[operator] = _in_payload(operator, fields)
    encode({"update": edits})
    return edits


def _in_payload(operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an update operator as fields of the payload."""
    renames = operator == "$rename"
    names = [*fields, *fields.values()] if renames else [*fields]
    if not all(isinstance(name, str) and name for name in names):
        text = f"update: the payload fields of {operator} must be non-empty strs"
        raise ConfigurationError(text)
    return {
        f"payload.{name}": f"payload.{value}" if renames else value
        for name, value in fields.items()
    }
