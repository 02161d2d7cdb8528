"""Apply settlements: update the messages that a holder still holds.

A settlement is one reservation and the update that settles its message. Settlements with equal
updates go in one command, and concurrent single settlements are coalesced. A batch reports only how
many messages matched. If fewer matched than expected, the stored documents show which, because each
update writes a value that no other update writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from pyqueue.backends import transitions, uniqueness
from pyqueue.backends.kind import Kind
from pyqueue.documents import hashable_ids, stored_group
from pyqueue.errors import (
    ConfigurationError,
    Disconnected,
    DuplicateKey,
    InvalidMessage,
    LeaseLost,
    QueueError,
    TimedOut,
    Unavailable,
    first_ten,
)
from pyqueue.messages import Reservation, seconds_left
from pyqueue.requests import (
    MAX_LOCKABLE,
    Coalesce,
    Delete,
    Document,
    Filter,
    Find,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateDocument,
    UpdateEach,
)

#: The maximum number of messages that one command settles or writes.
MAX_BATCH: Final = 1000
#: A settlement inside a transaction needs this much time before the lease ends, in seconds.
MIN_TRANSACTION_LEASE_S: Final = 20.0

#: The update of one settlement, or None to delete the message.
SettlementUpdate = dict[str, dict[str, Any]] | None


class Settlement(NamedTuple):
    """One reservation, and how settling it changes the message."""

    held: Reservation[Any]
    #: Returns the update, given the instant of settling.
    build: Callable[[datetime], SettlementUpdate]
    #: Settlements with equal groups have equal updates and share a command, unless this is None.
    group: Hashable = None
    #: The kind of the queue if the settlement ends the claim, or None if the message stays held.
    kind: Kind | None = None


#: How a settlement went. "unknown": the message was settled, by this command or by another one.
SettlementResult = Literal["done", "lost", "unknown"] | QueueError


class _Part(NamedTuple):
    """The settlements of one command."""

    queue: str
    session: object
    settlements: Sequence[Settlement]
    #: The positions of the settlements in ``updates`` and ``results``, which cover the whole call.
    places: Sequence[int]
    updates: Sequence[SettlementUpdate]
    #: Each result is initially "done". A failure replaces it.
    results: list[SettlementResult]
    #: Whether there are two tries, each with half of the client's time limit.
    two_tries: bool = False

    def at(self, places: Sequence[int]) -> _Part:
        settlements = [self.settlements[place] for place in places]
        return self._replace(settlements=settlements, places=places)

    def slice(self, start: int, stop: int | None) -> _Part:
        settlements, places = self.settlements[start:stop], self.places[start:stop]
        return self._replace(settlements=settlements, places=places)


class _Interrupted(NamedTuple):
    """A possibly applied update: its shared command timed out or lost its connection."""

    update: SettlementUpdate


def settle(queue: str, settlements: Sequence[Settlement], session: object = None) -> Plan[None]:
    """Apply each settlement to its message, if the reservation still holds it.

    Raises:
        LeaseLost: Some messages were no longer held; the other messages are settled.
    """
    if session is None and len(settlements) == 1:
        outcome = yield shared(queue, settlements[0])
        if outcome != "done":
            yield from settled(queue, settlements[0], outcome)
        return
    results = yield from apply(queue, settlements, session)
    if results.count("done") < len(results):
        _raise_failures(queue, settlements, results)


def _raise_failures(
    queue: str, settlements: Sequence[Settlement], results: Sequence[SettlementResult]
) -> None:
    lost: list[Reservation[Any]] = []
    unknown: list[Reservation[Any]] = []
    failed: list[tuple[Reservation[Any], QueueError]] = []
    for settlement, result in zip(settlements, results, strict=True):
        if isinstance(result, QueueError):
            failed.append((settlement.held, result))
        elif result != "done":
            (lost if result == "lost" else unknown).append(settlement.held)
    if failed:
        error = failed[0][1]
        if isinstance(error, Unavailable):
            raise Unavailable(str(error), ids=[held.id for held, _ in failed]) from error
        raise error
    raise_lost(queue, len(settlements), lost, unknown)


def raise_lost(
    queue: str,
    number: int,
    lost: Sequence[Reservation[Any]],
    unknown: Sequence[Reservation[Any]] = (),
) -> None:
    """Raise LeaseLost if at least one of ``number`` reservations is lost or unknown."""
    if gone := [held.id for held in (*lost, *unknown)]:
        raise LeaseLost(
            f"{len(gone)} of {number} reservations of queue {queue!r} are no longer held: "
            f"messages {first_ten(gone)}",
            lost=lost,
            unknown=unknown,
        )


#: How a settlement went in a command that callers shared.
SharedOutcome = SettlementResult | _Interrupted


def shared(queue: str, settlement: Settlement) -> Coalesce[Settlement, SharedOutcome]:
    """Return the request that settles one message in a command that concurrent calls share."""
    key, batch = ("settle", queue), partial(_apply_for_callers, queue)
    return Coalesce(key, settlement, batch, max_in_flight=MAX_LOCKABLE)


def settled(queue: str, settlement: Settlement, outcome: SharedOutcome) -> Plan[None]:
    """Complete a settlement after its shared command; ``outcome`` is the answer to ``shared``.

    If an open transaction locks one message, the whole command waits. If the command times out,
    each caller tries once more alone, so that only the caller of the locked message fails. Callers
    also retry alone after a lost connection: the driver does not repeat a multi-message command.

    Raises:
        LeaseLost: The message was no longer held.
    """
    if isinstance(outcome, _Interrupted):
        outcome = yield from _settle_alone(queue, settlement, outcome)
    if outcome != "done":
        _raise_failures(queue, [settlement], [outcome])


def _settle_alone(
    queue: str, settlement: Settlement, outcome: _Interrupted
) -> Plan[SettlementResult]:
    """Try a settlement again, alone, after its shared command was interrupted."""
    results: list[SettlementResult] = ["done"]
    updates = [outcome.update]
    part = _Part(queue, None, [settlement], [0], updates, results=results, two_tries=True)
    try:
        # This waits for the majority even if it matches nothing, so it waits for the shared
        # command.
        yield from _apply_part(part)
    except Unavailable as error:
        return error
    if results[0] == "lost":
        results[0] = yield from _resolve_repeated(settlement.held, outcome.update)
        yield from _signal(part)
    yield from _release_waiting(queue, [settlement], results)
    return results[0]


def _resolve_repeated(held: Reservation[Any], update: SettlementUpdate) -> Plan[SettlementResult]:
    """Find out whether an update that no longer matches was applied by its first attempt."""
    found = yield from Find({"_id": held.id}, limit=1)
    applied = _was_applied(found[0] if found else None, held, update)
    if applied is None:
        # While the lease runs, no other call settles the message.
        applied = held.until > (yield from ServerTime()) or None
    return "unknown" if applied is None else "done" if applied else "lost"


def _apply_for_callers(
    queue: str, settlements: Sequence[Settlement]
) -> Plan[list[SettlementResult | _Interrupted]]:
    """Apply the settlements of several callers, each of whom can try again."""
    whole = yield from _apply(queue, settlements, None, two_tries=len(settlements) > 1)
    return [
        _Interrupted(update)
        if whole.two_tries and isinstance(result, (TimedOut, Disconnected))
        else result
        for result, update in zip(whole.results, whole.updates, strict=True)
    ]


def apply(
    queue: str, settlements: Sequence[Settlement], session: object = None
) -> Plan[list[SettlementResult]]:
    """Apply settlements in few commands: settlements with equal updates share a command.

    A reservation whose lease seems to have ended is settled alone, so that its result is exact.

    Returns:
        One result per settlement.
    """
    return (yield from _apply(queue, settlements, session)).results


def _apply(
    queue: str, settlements: Sequence[Settlement], session: object, *, two_tries: bool = False
) -> Plan[_Part]:
    """Apply settlements. Return a part that covers all of them, with their updates and results."""
    now = yield from ServerTime()
    if session is not None:
        for settlement in settlements:
            check_time_left(settlement.held, now)
    updates, commands = _divide(settlements, now)
    every = range(len(settlements))
    results: list[SettlementResult] = ["done"] * len(settlements)
    whole = _Part(queue, session, settlements, every, updates, results=results, two_tries=two_tries)
    parts = [whole] if len(settlements) == 1 else [whole.at(places) for places in commands]
    for index, part in enumerate(parts):
        try:
            yield from _apply_part(part)
        except Unavailable as error:
            for unfinished in parts[index:]:
                _report(unfinished, unfinished.places, error)
            break
    yield from _release_waiting(queue, settlements, results, session)
    return whole


def _release_waiting(
    queue: str,
    settlements: Sequence[Settlement],
    results: Sequence[SettlementResult],
    session: object = None,
) -> Plan[None]:
    """Release the messages that waited for claims that may have ended."""
    ended = [
        each
        for each, result in zip(settlements, results, strict=True)
        if each.kind is not None and result != "lost"
    ]
    if ended and (kind := ended[0].kind) is not None:
        yield from kind.ended(queue, [stored_claim(each.held) for each in ended], session)


def stored_claim(held: Reservation[Any]) -> Document:
    """Return a claim's lock and slot as stored. They show which messages wait for its end."""
    stored: Document = {}
    if held.group is not None:
        stored["lock"] = stored_group(held.group)
    if held.slot is not None:
        stored["slot"] = held.slot
    return stored


def _divide(
    settlements: Sequence[Settlement], now: datetime
) -> tuple[list[SettlementUpdate], list[list[int]]]:
    """Return the update of each settlement, and the positions of each command's settlements."""
    if len(settlements) == 1:
        return [settlements[0].build(now)], [[0]]
    ids = hashable_ids([each.held.id for each in settlements])
    repeated = _repeated(ids)
    groups: dict[Hashable, list[int]] = {}
    for place, each in enumerate(settlements):
        alone = each.group is None or each.held.until <= now or ids[place] in repeated
        groups.setdefault(("alone", place) if alone else each.group, []).append(place)
    updates: list[SettlementUpdate] = [None] * len(settlements)
    commands: list[list[int]] = []
    different: list[int] = []  # the settlements that share a bulk write
    for places in groups.values():
        first = settlements[places[0]]
        update = first.build(now)
        if update is not None and "token" in update.get("$unset", ()):
            # This tells the settlement from any other, whatever happens to the message afterwards.
            update["$set"]["left"] = transitions.new_token()
        for place in places:
            updates[place] = update
        live = first.held.until > now and ids[places[0]] not in repeated
        if len(places) == 1 and update is not None and live:
            different += places
        else:
            commands += _chunks(places)
    return updates, commands + _chunks(different)


def _repeated(ids: Sequence[Hashable]) -> Collection[Hashable]:
    """Return the ids that occur more than once. Most batches have no such id."""
    if len(set(ids)) == len(ids):
        return ()
    return {id for id, times in Counter(ids).items() if times > 1}


def _chunks(places: list[int]) -> list[list[int]]:
    return [places[start : start + MAX_BATCH] for start in range(0, len(places), MAX_BATCH)]


def _apply_part(part: _Part) -> Plan[None]:
    """Apply settlements with one command."""
    places, updates, results = part.places, part.updates, part.results
    update = updates[places[0]]
    many = len(places) > 1
    match = transitions.holds_filter([each.held for each in part.settlements])
    try:
        if update is None:
            done = yield from Delete(
                match, many=many, session=part.session, half_time=part.two_tries
            )
        elif not many or all(updates[place] is update for place in places):
            change = yield from Update(
                match, update, many=many, session=part.session, half_time=part.two_tries
            )
            done = change.matched
        else:
            done = yield from _update_each(part)
    except (DuplicateKey, InvalidMessage) as error:
        if not many:  # the key is taken in the other queue, or the update does not fit
            results[places[0]] = error
            return
        # The server refused the whole command. Halve it to find the settlement that is at fault.
        half = len(places) // 2
        yield from _apply_part(part.slice(0, half))
        yield from _apply_part(part.slice(half, None))
        return
    if done < len(places):
        yield from _resolve_partial(part, len(places) - done)
    yield from _signal(part)


def _signal(part: _Part) -> Plan[None]:
    """Signal the queues into which a command has put messages."""
    signals = set()
    for place in part.places:
        settled = part.updates[place] or {}
        # If both are true, the message is in a queue, and no longer held.
        if part.results[place] == "done" and "token" in settled.get("$unset", {}):
            put = settled["$set"]
            signals.add((put.get("q", part.queue), put["when"]))
    for queue, when in signals:
        yield from Signal(queue, when, part.session)


def _update_each(part: _Part) -> Plan[int]:
    """Apply different updates in one bulk write. Return how many settlements matched or failed."""
    pairs: list[tuple[Filter, UpdateDocument]] = [
        (transitions.holds_filter([each.held]), part.updates[place] or {})
        for each, place in zip(part.settlements, part.places, strict=True)
    ]
    done, failures = yield from UpdateEach(pairs, session=part.session, half_time=part.two_tries)
    for failure in failures:
        part.results[part.places[failure.place]] = failure.error
    return done + len(failures)


def _resolve_partial(part: _Part, missing: int) -> Plan[None]:
    """Find out which messages of a command were not settled: the server only says how many."""
    undecided = [place for place in part.places if part.results[place] == "done"]
    if missing == len(part.places):
        _report(part, undecided, "lost")
        return
    ids = [each.held.id for each in part.settlements]
    found = yield from Find({"_id": {"$in": ids}}, session=part.session)
    documents: dict[object, Document] = {each["_id"]: each for each in found}
    unclear: list[int] = []
    for each, place in zip(part.settlements, part.places, strict=True):
        if part.results[place] == "done":
            applied = _was_applied(documents.get(each.held.id), each.held, part.updates[place])
            if applied is None:
                unclear.append(place)
            elif not applied:
                part.results[place] = "lost"
                missing -= 1
    if missing:  # otherwise this command settled all unclear messages
        _report(part, unclear, "lost" if missing == len(unclear) else "unknown")


def _report(part: _Part, places: Iterable[int], result: SettlementResult) -> None:
    for place in places:
        part.results[place] = result


def _was_applied(
    document: Mapping[str, object] | None, held: Reservation[Any], update: SettlementUpdate
) -> bool | None:
    """Return whether this update was applied, as far as the stored document shows.

    Return None if the document cannot show this, because the message is gone, or because a later
    settlement has overwritten the value that identifies this update.
    """
    if update is None:
        return None if document is None else False
    put = update["$set"]
    if "left" in put:
        return _has_left(document, held, put["left"])
    expected = {"token": held.token} | put  # an update without a token keeps the message held
    names = ("q", "when", "due", "processed", "token")
    return document is not None and all(
        document.get(name) == expected[name] for name in names if name in expected
    )


def _has_left(
    document: Mapping[str, object] | None, held: Reservation[Any], left: object
) -> bool | None:
    """Return whether the update that wrote ``left`` was applied, or None if this is unknown."""
    if document is None:
        return None
    if document.get("left") == left:
        return True
    # If the message has left again since, that update wrote another value.
    overwritten = "left" in document and document.get("token") != held.token
    return None if overwritten else False


def check_time_left(held: Reservation[Any], now: datetime) -> None:
    """Refuse a lease that may lapse during the transaction."""
    left_s = seconds_left(held, now)
    if left_s < min(MIN_TRANSACTION_LEASE_S, held.lease / 3):
        raise ConfigurationError(
            f"session: the lease of message {held.id} has only {left_s:.1f} s left, too little for "
            "a transaction; call extend() before the transaction, or reserve with a longer lease= "
            "(a lease that ends during a transaction blocks the queue)"
        )


def update_with_key(
    match: Filter,
    update: Mapping[str, Mapping[str, Any]],
    key: str | None,
    *,
    majority: bool = False,
) -> Plan[bool]:
    """Update one message, and set its key if the key is free. Return whether a message matched."""
    if key is not None:
        keyed = {operator: dict(fields) for operator, fields in update.items()}
        keyed["$set"]["key"] = key
        keyed["$unset"]["last_key"] = ""
        keyed.pop("$rename", None)  # it would write the same fields
        queue = str(update["$set"].get("q", match.get("q")))
        for again in (True, False):
            try:
                return bool((yield from Update(match, keyed, majority=majority)).matched)
            except DuplicateKey:
                if not (again and (yield from uniqueness.release(queue, [key]))):
                    break  # the key is taken
    return bool((yield from Update(match, update, majority=majority)).matched)
