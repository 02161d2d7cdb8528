"""Settle: what the holder of a reservation does with its message; ``moving`` has the moves.

Each operation checks its arguments, and makes one settlement for each reservation. ``applying``
carries the settlements out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from pyqueue import arguments
from pyqueue.backends import namespace, pack_leaving, pack_settling, transitions
from pyqueue.backends.applying import Settlement, SettlementUpdate, settle
from pyqueue.backends.groups import bring_forward, place_at
from pyqueue.backends.handover import Handover, discard, hand_over_whole
from pyqueue.backends.invalid import error_record
from pyqueue.backends.kind import Kind, require_target
from pyqueue.backends.moving import dump, freed_by
from pyqueue.backends.options import Options, Target
from pyqueue.backends.pack_settling import by_form
from pyqueue.backends.pushing import new_document
from pyqueue.backends.slots import go_on, slots_of
from pyqueue.backends.transitions import UpdateFields
from pyqueue.errors import ConfigurationError, LeaseLost
from pyqueue.limits import shown
from pyqueue.messages import UNCHANGED, Id, PackedReservation, Reservation
from pyqueue.payloads import Codec, encode
from pyqueue.requests import Plan, ServerTime

__all__ = [
    "Output",
    "bury",
    "check_progress",
    "checkpoint",
    "commit",
    "fan_out",
    "progress",
    "release",
    "rollback",
]

ErrorRecord = Mapping[str, Any] | None


def commit(
    queue: str,
    kind: Kind,
    codec: Codec[Any],
    history_s: float | None,
    given: Sequence[object],
    *,
    payload: Any = UNCHANGED,
    session: object = None,
) -> Plan[None]:
    """Finish messages."""
    held = arguments.reservations(queue, tuple(given))
    value = UNCHANGED if payload is UNCHANGED else dump(codec, payload)
    packed = [each.id for each in held if isinstance(each, PackedReservation)]
    if packed and value is not UNCHANGED:
        raise ConfigurationError(
            f"payload: message {packed[0]} shares a document with more messages, and its queue "
            "keeps no history: leave it out"
        )
    yield from by_form(
        held,
        partial(pack_settling.commit, queue, kind, session=session),
        partial(_commit, queue, kind, history_s, value, session),
    )


def _commit(
    queue: str,
    kind: Kind,
    history_s: float | None,
    value: Any,
    session: object,
    held: Sequence[Reservation[Any]],
) -> Plan[None]:
    def finish(keyed: bool, now: datetime) -> SettlementUpdate:
        update = kind.finishing(now, "committed", history_s, keyed=keyed)
        if update is not None:
            # A new token tells this commit from an earlier one of the same holder.
            update["$set"]["token"] = transitions.new_token()
            if value is not UNCHANGED:
                update["$set"]["payload"] = value
        return update

    group = ("commit", history_s, None if value is UNCHANGED else id(finish))
    yield from settle(
        queue,
        [
            Settlement(
                each,
                partial(finish, each.key is not None),
                (*group, each.key is not None),
                frees=freed_by(kind, each),
            )
            for each in held
        ],
        session,
    )


class Output(NamedTuple):
    """A new message that a finished one leaves behind."""

    #: A new id. A call that is repeated has the same one.
    id: Id
    target: Target
    payload: Any
    priority: int | None
    group: str | None = None


def fan_out(source: Target, held: Reservation[Any], outputs: Sequence[Output]) -> Plan[None]:
    """Finish a message, and make others of it, which get its headers. All of it happens, or none.

    Call it again with the same outputs if it is unavailable.

    Args:
        source: the queue of the message.
        held: its reservation.
        outputs: what it becomes.

    Raises:
        LeaseLost: the message is no longer held, and no output was written.
        TargetRefused: a target has no priorities, or no groups.
    """
    queue, kind = source.queue, source.kind
    headers = arguments.headers(held.headers)
    for each in outputs:
        require_target(each.target.kind, each.target.queue, each.priority, each.group)
    values = [dump(each.target.codec, each.payload) for each in outputs]
    targets = {each.target.queue: each.target for each in outputs}
    for target in targets.values():
        levels = {each.priority for each in outputs if each.target.queue == target.queue}
        yield from namespace.ensure(target.queue, target.kind, target.options, levels)
    now = yield from ServerTime()
    copies = [
        new_document(
            each.target.queue,
            each.target.kind,
            each.target.codec.name,
            now,
            now,
            value,
            headers,
            None,
            each.id,
            each.priority,
            each.group,
        )
        for each, value in zip(outputs, values, strict=True)
    ]
    if isinstance(held, PackedReservation):
        (group, _), *_ = pack_settling.by_pack(queue, kind, [held])
        handover = Handover(queue, held.pack, held.token, copies)
        result = yield from pack_leaving.hand_over_shared(group, handover)
    else:
        handover = Handover(queue, held.id, held.token, copies)
        history_s = None if source.options is None else source.options.history
        finishing = kind.finishing(now, "committed", history_s, keyed=held.key is not None)
        match = transitions.holds_filter([held])
        result = yield from hand_over_whole(handover, match, kind, finishing)
    if result != "done":  # a repeated call may have written copies again that were finished
        yield from discard(handover)
    if result == "lost":
        raise _lost(held)
    if (freed := freed_by(kind, held)) is not None:
        yield from bring_forward(queue, [freed])
    yield from go_on(queue, slots_of([held]))


def _lost(held: Reservation[Any]) -> LeaseLost:
    text = f"message {held.id} of queue {held.queue!r} is no longer held"
    return LeaseLost(text, lost=[held])


def rollback(
    queue: str,
    kind: Kind,
    options: Options,
    given: Sequence[object],
    *,
    delay: float | timedelta | None = None,
    error: BaseException | str | None = None,
    session: object = None,
) -> Plan[None]:
    """Give messages back for another try, and bury those that had their last try."""
    held = arguments.reservations(queue, tuple(given))
    delay_s = None if delay is None else arguments.duration("delay", delay)
    record = None if error is None else error_record(error, (yield from ServerTime()))
    how = (queue, kind, options, delay_s, record, session)
    yield from by_form(held, partial(pack_leaving.rollback, *how), partial(_roll_back, *how))


def _roll_back(
    queue: str,
    kind: Kind,
    options: Options,
    given_delay_s: float | None,
    record: ErrorRecord,
    session: object,
    held: Sequence[Reservation[Any]],
) -> Plan[None]:
    dead_letter: Target | None = None
    settlements = []
    skips = "group" in kind.capabilities and (yield from _skips(queue))
    for each in held:
        last_try = options.max_tries is not None and each.tries >= options.max_tries
        if last_try and each.dead is None:
            if dead_letter is None:
                name, levels = options.dead_letter, {each.priority for each in held}
                dead_letter = yield from namespace.dead_letter_target(queue, kind, name, levels)
            settlements.append(_burial(queue, kind, each, dead_letter, "tries", record))
            continue
        delay_s = options.backoff.delay(each.tries) if given_delay_s is None else given_delay_s
        group = ("rollback", delay_s, None if record is None else id(record))
        build = partial(transitions.rolling_back, kind, delay_s, record)
        if skips and each.group is not None:
            build = partial(_skipping, build)
        settlements.append(Settlement(each, build, group, frees=freed_by(kind, each)))
    yield from settle(queue, settlements, session)


def _skips(queue: str) -> Plan[bool]:
    """Return whether a group goes on while a message of it waits for its next try."""
    shape = (yield from namespace.flags(queue)).get("shape")
    return isinstance(shape, Mapping) and shape.get("on_failure") == "skip"


def _skipping(build: Callable[[datetime], UpdateFields], now: datetime) -> UpdateFields:
    """Return a rollback that also gives the message a new place in its group: where it comes back.

    So the messages that entered before that instant come first.
    """
    update = build(now)
    update["$set"] |= place_at(update["$set"]["when"])
    return update


def release(queue: str, kind: Kind, given: Sequence[object]) -> Plan[None]:
    """Give messages back unprocessed: to their old places, the tries not counted."""
    held = arguments.reservations(queue, tuple(given))
    inside = partial(pack_leaving.release, queue, kind)
    yield from by_form(held, inside, partial(_release, queue, kind))


def _release(queue: str, kind: Kind, held: Sequence[Reservation[Any]]) -> Plan[None]:
    yield from settle(
        queue,
        [
            Settlement(
                each,
                partial(transitions.releasing, kind, each.when),
                ("release", each.when),
                frees=freed_by(kind, each),
            )
            for each in held
        ],
    )


def bury(
    queue: str,
    kind: Kind,
    dead_letter: str,
    given: Sequence[object],
    *,
    error: BaseException | str | None = None,
) -> Plan[None]:
    """Send messages to the dead-letter queue now."""
    held = arguments.reservations(queue, tuple(given))
    for each in held:
        if each.dead is not None:
            raise ConfigurationError(
                f"reservations: message {each.id} is in a dead-letter queue already; commit it, or "
                "redrive() the queue"
            )
    record = None if error is None else error_record(error, (yield from ServerTime()))
    how = (queue, kind, dead_letter, "buried", record)
    yield from by_form(held, partial(pack_leaving.bury, *how), partial(_bury, *how))


def _bury(
    queue: str,
    kind: Kind,
    dead_letter: str,
    reason: str,
    record: ErrorRecord,
    held: Sequence[Reservation[Any]],
) -> Plan[None]:
    levels = {each.priority for each in held}
    target = yield from namespace.dead_letter_target(queue, kind, dead_letter, levels)
    settlements = [_burial(queue, kind, each, target, reason, record) for each in held]
    yield from settle(queue, settlements)


def _burial(
    queue: str,
    kind: Kind,
    held: Reservation[Any],
    target: Target,
    reason: str,
    error: ErrorRecord,
) -> Settlement:
    def build(now: datetime) -> SettlementUpdate:
        death = {"reason": reason, "tries": held.tries, "error": error or held.error}
        put = target.kind.entering(target.queue, now, held.priority, held.group)
        return transitions.burying(kind, queue, put, now, death, keyed=held.key is not None)

    return Settlement(held, build, frees=freed_by(kind, held))


# ---- notes of the holder


def progress(queue: str, held: object, fraction: float, note: str | None) -> Plan[None]:
    """Store how far the work on a message is."""
    check_progress(fraction, note)
    yield from _write(queue, held, partial(_progress, fraction, note))


def check_progress(fraction: float, note: str | None) -> None:
    """Refuse what is no progress.

    Raises:
        ConfigurationError: an argument is not allowed.
    """
    number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not number or not 0 <= fraction <= 1:
        text = f"fraction: {shown(fraction)} is not allowed: give a number from 0 to 1"
        raise ConfigurationError(text)
    if note is not None:
        short = isinstance(note, str) and len(note) <= 2048
        if not short or not arguments.is_unicode(note):
            text = "note: give a str of at most 2048 characters of Unicode"
            raise ConfigurationError(text)


def _progress(fraction: float, note: str | None, now: datetime) -> SettlementUpdate:
    return {"$set": {"progress": {"fraction": fraction, "note": note, "at": now}}}


def checkpoint(queue: str, held: object, state: Any) -> Plan[None]:
    """Store a state for the next try."""
    encode({"state": state})
    yield from _write(queue, held, partial(_checkpoint, state))


def _checkpoint(state: Any, now: datetime) -> SettlementUpdate:
    return {"$set": {"checkpoint": state}}


def _write(queue: str, held: object, build: partial[SettlementUpdate]) -> Plan[None]:
    (reservation,) = arguments.reservations(queue, (held,))
    if isinstance(reservation, PackedReservation):
        raise ConfigurationError(
            f"reservation: message {reservation.id} shares a document with more messages, which "
            "cannot store progress or checkpoints: push it with a key, or to a queue of another "
            "kind"
        )
    yield from settle(queue, [Settlement(reservation, build)])
