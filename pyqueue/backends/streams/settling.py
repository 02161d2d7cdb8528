"""Streams: how a consumer group ends its claims and extends their leases.

A burial changes two documents: the group finishes the message, and a copy appears in the
dead-letter queue. The copy is first inserted hidden, with majority write concern. The update that
ends the claim adds the copy to the list ``left``, which commits the burial. Then the copy is
published and removed from the list. Each claim publishes the copies that it finds in the list. So
even if a process dies in between, the message ends up in exactly one of the two places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.streams.entries import Range
from pyqueue.backends.streams.log import Pack
from pyqueue.backends.streams.ranges import (
    MAX_HELD,
    Back,
    Ending,
    Group,
    Step,
    group_id,
    settle_step,
)
from pyqueue.error_records import error_record
from pyqueue.errors import ConfigurationError, LeaseLost, QueueError, Unavailable, first_ten
from pyqueue.facts import as_stored
from pyqueue.messages import Backoff, StreamReservation
from pyqueue.payloads import Codec, encode
from pyqueue.requests import (
    Coalesce,
    Delete,
    Document,
    Find,
    FindAndModify,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
)

#: The longest error text in the document of a group, and the other error fields that it stores.
_MAX_ERROR_TEXT: Final = 200
_ERROR_FIELDS: Final = ("type", "at", "fp")
#: A burial fails if inserting its copies took longer than this. Copies of burials that were never
#: committed are deleted after a day.
_MAX_BURIAL: Final = timedelta(minutes=10)
_ABANDONED: Final = timedelta(days=1)

Held = Sequence[StreamReservation[Any]]


class GroupState:
    """What a process remembers about a consumer group between calls.

    Args:
        stream: The name of the stream.
        group: The name of the group.
    """

    def __init__(self, stream: str, group: str) -> None:
        self.stream = stream
        self.name = group
        self.id = group_id(stream, group)
        #: The group as it was last read, or None if it must be read.
        self.seen: Group | None = None
        #: When the group was created, or None if it is not known to exist.
        self.made: datetime | None = None
        #: The last known tail of the log, as a majority stored it. The log may be longer.
        self.tail = 0
        #: Whether this process has deleted the copies of burials that were never committed.
        self.swept = False
        #: The packs that were read last.
        self.kept: list[Pack] = []

    @property
    def label(self) -> str:
        """The name of the group in places where a queue name is expected. No queue can have it."""
        return f"{self.stream}~{self.name}"

    @property
    def hidden(self) -> str:
        """The ``q`` of copies of buried messages that are not published yet."""
        return f"~handover:{self.label}"


def reload(state: GroupState) -> Plan[Group | None]:
    """Read the group. Return None if it does not exist."""
    before = state.seen
    found = yield from Find({"_id": state.id}, limit=1)
    group = Group.of(found[0]) if found else None
    made = None if group is None else group.made
    if made != state.made:  # the group was made anew, perhaps with a new log
        state.made, state.tail, state.kept = made, 0, []
    if state.seen is before:  # no other result arrived during the read
        state.seen = group
    else:
        _learn(state, group)
    return group


def change(state: GroupState, step: Step, *, w1: bool = False) -> Plan[Group | None]:
    """Update the group if ``step`` matches it. Return its new state, or None if it did not match.

    Each change increments ``changes``, which tells a later state from an earlier one.
    """
    update = step.update
    counted: Any
    if isinstance(update, list):
        counted = [*update, {"$set": {"changes": {"$add": [{"$ifNull": ["$changes", 0]}, 1]}}}]
    else:
        counted = {**update, "$inc": {**update.get("$inc", {}), "changes": 1}}
    found = yield from FindAndModify({"_id": state.id, **step.match}, counted, w1=w1)
    group = Group.of(found) if found is not None else None
    _learn(state, group)
    return group


def _learn(state: GroupState, group: Group | None) -> None:
    """Remember the group, unless a later state is known: results may arrive out of order."""
    if group is None or state.seen is None or group.changes >= state.seen.changes:
        state.seen = group


# ---- settle


def settle(state: GroupState, endings: Sequence[Ending]) -> Plan[list[frozenset[int]]]:
    """End claims as ``endings`` say. Return the positions of each ending that were not held."""
    return (
        yield from Coalesce(
            ("stream settle", state.id), endings, partial(_settle_batch, state), max_in_flight=2
        )
    )


def _settle_batch(
    state: GroupState, batch: Sequence[Sequence[Ending]]
) -> Plan[list[list[frozenset[int]]]]:
    """End claims for several callers. Return for each caller the result of ``settle``."""
    flat = [ending for endings in batch for ending in endings]
    results = yield from _settle_all(state, flat)
    answers: list[list[frozenset[int]]] = []
    at = 0
    for endings in batch:
        answers.append(results[at : at + len(endings)])
        at += len(endings)
    return answers


def _settle_all(state: GroupState, endings: Sequence[Ending]) -> Plan[list[frozenset[int]]]:
    """End claims in one or more updates. Return, for each ending, the positions no longer held."""
    pending = dict(enumerate(endings))
    results: dict[int, frozenset[int]] = {}
    group = state.seen
    fresh = False  # whether ``group`` was just read or returned by an update
    while pending:
        if group is None:
            group, fresh = (yield from reload(state)), True
            if group is None:
                break  # the group was deleted
        # One step at a time, because each is computed from the group that the last one returned.
        one, lost = settle_step(group, pending, (yield from ServerTime()))
        if lost and not fresh:
            group = None  # the known group may be stale: read it before giving up
            continue
        for number, positions in lost.items():
            results[number] = positions
            del pending[number]
        if one is None:
            continue
        was_full = len(group.out) >= MAX_HELD
        group = yield from change(state, one.step)
        fresh = group is not None
        if group is not None:
            for number, missing in one.endings:
                results[number] = missing
                del pending[number]
            if was_full:  # other processes may wait until ``out`` has room
                yield from Signal(state.stream, (yield from ServerTime()))
    return [results.get(number, each.positions) for number, each in enumerate(endings)]


def give_back(state: GroupState, ranges: Mapping[str, Range | Sequence[int]]) -> Plan[None]:
    """Return messages to the group that no caller receives, without counting the try.

    ``ranges``: the positions of the messages, by the token of their claim.
    """
    now = yield from ServerTime()
    back = Back(now, counted=False)
    endings = [
        Ending(token, frozenset(each.positions() if isinstance(each, Range) else each), back)
        for token, each in ranges.items()
    ]
    with suppress(Unavailable):  # the messages then come back when the lease ends
        if endings:
            yield from settle(state, endings)


def reservations(state: GroupState, given: Sequence[object]) -> list[StreamReservation[Any]]:
    """Return the given reservations without duplicates. Check that they are of this group."""
    unique: dict[tuple[int, str], StreamReservation[Any]] = {}
    for each in given:
        if not isinstance(each, StreamReservation):
            raise ConfigurationError(
                f"reservations: expected reservations from the consumer's reserve(), found "
                f"{type(each).__name__}"
            )
        if (each.queue, each.group) != (state.stream, state.name):
            raise ConfigurationError(
                f"reservations: message {each.id} was reserved by group {each.group!r} of stream "
                f"{each.queue!r}; settle it with that group, not {state.name!r} of {state.stream!r}"
            )
        unique[each.position, each.token] = each
    return list(unique.values())


def commit(state: GroupState, given: Sequence[object]) -> Plan[None]:
    """Finish messages for the group."""
    held = reservations(state, given)
    yield from _settle_held(state, held, {})


def rollback(
    state: GroupState,
    given: Sequence[object],
    delay_by_tries: Mapping[int, float],
    record: Mapping[str, Any] | None,
    *,
    counted: bool = True,
) -> Plan[None]:
    """Return messages to the group for another try.

    Args:
        state: The state of the group.
        given: The reservations of the messages.
        delay_by_tries: The delay before the next try, in seconds, keyed by the number of tries.
        record: The error that the messages store, or None to keep their last error.
        counted: Whether this try counts.
    """
    held = reservations(state, given)
    if not held:
        return
    now = yield from ServerTime()
    if record is not None:
        short = {"message": str(record["message"])[:_MAX_ERROR_TEXT]}
        record = {name: record[name] for name in _ERROR_FIELDS} | short
    backs = {
        tries: Back(now + timedelta(milliseconds=round(delay_s * 1000)), counted, record)
        for tries, delay_s in delay_by_tries.items()
    }
    failure: LeaseLost | None = None
    try:
        yield from _settle_held(state, held, backs)
    except LeaseLost as error:
        failure = error
    for when in sorted({each.when for each in backs.values()}):
        yield from Signal(state.stream, when)
    if failure is not None:
        raise failure


def delay_by_tries(
    held: Held, backoff: Backoff, delay: float | timedelta | None
) -> dict[int, float]:
    """Return the delay before the next try, in seconds, keyed by the number of tries so far.

    Messages with equal tries get the same delay, so that they come back together.
    """
    given_s = None if delay is None else arguments.duration("delay", delay)
    return {
        tries: backoff.delay(tries) if given_s is None else given_s
        for tries in {each.tries for each in held}
    }


def _settle_held(state: GroupState, held: Held, backs: Mapping[int, Back]) -> Plan[None]:
    """End claims. Raise LeaseLost if any reservations are no longer held.

    ``backs`` says how messages go back to the group, keyed by their number of tries. If ``backs``
    is empty, the messages are finished.
    """
    groups: dict[tuple[str, int], list[StreamReservation[Any]]] = {}
    for each in held:
        groups.setdefault((each.token, each.tries), []).append(each)
    endings = [
        Ending(token, frozenset(each.position for each in members), backs[tries] if backs else None)
        for (token, tries), members in groups.items()
    ]
    if not endings:
        return
    results = yield from settle(state, endings)
    lost = [
        each
        for members, missing in zip(groups.values(), results, strict=True)
        for each in members
        if each.position in missing
    ]
    raise_lost(state, held, lost)


def raise_lost(state: GroupState, held: Held, lost: Held) -> None:
    """Raise LeaseLost if ``lost`` contains any of the reservations ``held``."""
    if lost:
        raise LeaseLost(
            f"{len(lost)} of {len(held)} reservations of group {state.name!r} of stream "
            f"{state.stream!r} are no longer held: positions "
            f"{first_ten([each.position for each in lost])}",
            lost=lost,
        )


# ---- leases


def extend(
    state: GroupState, given: Sequence[object], lease: float | timedelta | None
) -> Plan[None]:
    """Renew the leases of messages, starting now. Messages of one claimed range share a lease.

    Raises:
        LeaseLost: Some messages were no longer held. The other leases are extended.
    """
    held = reservations(state, given)
    lease_s = None if lease is None else arguments.duration("lease", lease, positive=True)
    lost = yield from _extend(state, held, lease_s, w1=False)
    raise_lost(state, held, lost)


def renew(state: GroupState, held: Held) -> Plan[list[QueueError | None]]:
    """Extend each lease by its own length. Return for each reservation None or an error."""
    lost = {id(each) for each in (yield from _extend(state, held, None, w1=True))}
    text = "is no longer held: its lease ended, or it was settled"
    return [
        LeaseLost(f"message {each.id} {text}", lost=[each]) if id(each) in lost else None
        for each in held
    ]


def _extend(state: GroupState, held: Held, lease_s: float | None, *, w1: bool) -> Plan[Held]:
    """Extend leases, with one command per range. Return the reservations that are not held now."""
    now = yield from ServerTime()
    lost: list[StreamReservation[Any]] = []
    ranges: dict[str, list[StreamReservation[Any]]] = {}
    for each in held:
        ranges.setdefault(each.token, []).append(each)
    for token, members in ranges.items():
        length_s = max(each.lease for each in members) if lease_s is None else lease_s
        until = now + timedelta(milliseconds=round(length_s * 1000))
        # $max never shortens the lease, because other messages of the range may be held, too.
        step = Step({"out": {"$elemMatch": {"t": token}}}, {"$max": {"out.$.u": until}})
        group = yield from change(state, step, w1=w1)
        found = None if group is None else group.held(token)
        still_held = set() if found is None else set(found.positions())
        for each in members:
            if found is not None and each.position in still_held:
                each.until, each.lease = found.until, length_s
            else:
                lost.append(each)
    return lost


# ---- the dead-letter queue


class Buried(NamedTuple):
    """A message on its way to the dead-letter queue."""

    token: str
    position: int
    #: Fields of its copy: payload, headers and type.
    document: Mapping[str, Any]
    pushed: datetime
    tries: int
    error: Mapping[str, Any] | None
    reason: str


def bury(
    state: GroupState,
    codec: Codec[Any],
    dead_letter: str,
    held: Held,
    reason: str,
    error: BaseException | str | None,
) -> Plan[None]:
    """Send messages that the caller holds to the dead-letter queue.

    Args:
        state: The state of the group.
        codec: How payloads are stored.
        dead_letter: The name of the dead-letter queue.
        held: The reservations of the messages.
        reason: Why the messages are buried, in one word.
        error: The error to store in the messages, or None if each keeps its last error.
    """
    if not held:
        return
    record = None if error is None else error_record(error, (yield from ServerTime()))
    messages = []
    for each in held:
        document: Document = {"payload": codec.dump(each.payload)}
        if each.headers:
            document["headers"] = each.headers
        if codec.name is not None:
            document["type"] = codec.name
        at, tries = each.position, each.tries
        why = record or as_stored(each.error)
        messages.append(
            Buried(each.token, at, document, each.pushed, tries, error=why, reason=reason)
        )
    missing = yield from entomb(state, dead_letter, messages)
    raise_lost(state, held, [each for each in held if (each.position, each.token) in missing])


def entomb(
    state: GroupState, dead_letter: str, messages: Sequence[Buried]
) -> Plan[set[tuple[int, str]]]:
    """Move messages to the dead-letter queue, following the steps in the module docstring.

    Return the position and the token of each message that was no longer held.
    """
    target = yield from namespace.target(dead_letter)
    now = yield from ServerTime()
    copies = [_copy(state, target.queue, each, now) for each in messages]
    refused = yield from Insert([encode(each) for each in copies], majority=True)
    if refused:
        raise refused[0].error
    if (yield from ServerTime()) - now > _MAX_BURIAL:
        # Old copies may be deleted before the burial is committed; see ``delete_undecided``.
        raise Unavailable("burying the messages took too long, so none was buried; try again")
    endings = [
        Ending(each.token, frozenset({each.position}), copy=copy["_id"])
        for each, copy in zip(messages, copies, strict=True)
    ]
    results = yield from settle(state, endings)
    lost = [copy["_id"] for copy, missing in zip(copies, results, strict=True) if missing]
    decided = [copy["_id"] for copy in copies if copy["_id"] not in lost]
    if decided:
        yield from publish_left(state, decided)
    if lost:
        yield from Delete({"_id": {"$in": lost}, "q": state.hidden}, many=True)
    return {
        (each.position, each.token)
        for each, missing in zip(messages, results, strict=True)
        if missing
    }


def _copy(state: GroupState, queue: str, message: Buried, now: datetime) -> Document:
    """Return the document of a buried message, still hidden. ``queue``: the dead-letter queue."""
    death: Document = {"from": state.stream, "at": now, "reason": message.reason}
    death |= {"tries": message.tries, "error": message.error}
    death |= {"group": state.name, "position": message.position}
    copy: Document = {"_id": ObjectId(), "q": state.hidden, "to": queue, "copied": now}
    copy |= {**message.document, "pushed": message.pushed, "dead": death}
    copy["trail"] = [{"q": state.stream, "at": now, "tries": message.tries}]
    if message.error is not None:
        copy["error"] = message.error
    return copy


def publish_left(state: GroupState, ids: Sequence[Any]) -> Plan[None]:
    """Publish the copies of buried messages, which the ``left`` field of the group lists.

    A repeated call changes nothing.
    """
    found = yield from Find({"_id": {"$in": list(ids)}, "q": state.hidden}, {"to": 1})
    targets: dict[str, list[Any]] = {}
    for each in found:
        targets.setdefault(each["to"], []).append(each["_id"])
    for queue, copies in targets.items():
        target = yield from namespace.target(queue)
        now = yield from ServerTime()
        put = target.kind.entering(queue, now)
        update = {"$set": put, "$unset": transitions.unset("to", "copied")}
        match = {"_id": {"$in": copies}, "q": state.hidden}
        yield from Update(match, update, many=True, majority=True)
        yield from Signal(queue, now)
    yield from change(state, Step({}, {"$pull": {"left": {"$in": list(ids)}}}))


def delete_undecided(state: GroupState) -> Plan[None]:
    """Delete old hidden copies of messages that were never buried, once per process."""
    if state.swept or state.seen is None:
        return
    state.swept = True
    old = (yield from ServerTime()) - _ABANDONED
    match = {"q": state.hidden, "copied": {"$lt": old}, "_id": {"$nin": list(state.seen.left)}}
    yield from Delete(match, many=True)
