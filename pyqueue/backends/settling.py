"""The operations by which a holder settles its messages. Moves are in ``moving``.

Each operation checks its arguments, and settles reservations by the form of their class; see
``forms``. Most messages are documents: each gets one settlement, which ``applying`` carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Unpack

from pyqueue import arguments
from pyqueue.backends import forms, gathering, namespace, results, transitions, uniqueness
from pyqueue.backends.applying import (
    MAX_BATCH,
    Settlement,
    SettlementUpdate,
    settle,
    stored_claim,
)
from pyqueue.backends.extending import extend_documents
from pyqueue.backends.forms import (
    Extension,
    Failure,
    Failures,
    Form,
    Held,
    Move,
    Outcomes,
    RollbackOptions,
)
from pyqueue.backends.handover import Handover, Result, discard, hand_over_whole
from pyqueue.backends.keeping import Finish, finish_of, finishing
from pyqueue.backends.kind import Kind, UpdateFields, require_target
from pyqueue.backends.moving import dump, key_taken, move_documents, move_each, stay_of
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.backends.outputs import Output, Then, documents
from pyqueue.error_records import error_record, failed_try
from pyqueue.errors import ConfigurationError, LeaseLost
from pyqueue.facts import ErrorInfo, as_stored, kept_s
from pyqueue.gathers import ending_gather
from pyqueue.limits import shown
from pyqueue.messages import UNCHANGED, Id, Reservation
from pyqueue.payloads import encode
from pyqueue.requests import Document, Find, Plan, ServerTime

#: What a commit writes if it gives neither a payload nor a result.
NOTHING: Final[Mapping[str, Any]] = {}


def commit(
    terms: QueueTerms,
    given: Sequence[object],
    *,
    payload: Any = UNCHANGED,
    result: Any = UNCHANGED,
    session: object = None,
) -> Plan[None]:
    """Finish messages."""
    held = arguments.reservations(terms.queue, tuple(given))
    put: Document = {}
    if payload is not UNCHANGED:
        put["payload"] = dump(terms.codec, payload)
    if result is not UNCHANGED:
        put["result"] = results.checked(result)
    for name in put:
        for form, some in forms.by_form(held):
            form.refuse(some, name)
    return forms.settle(held, lambda form, some: form.commit(terms, some, put, session))


def fan_out(
    terms: QueueTerms,
    held: Reservation[Any],
    outputs: Sequence[Output],
    then: Then | None = None,
) -> Plan[None]:
    """Finish a message and write its outputs, or do neither. The outputs inherit its headers.

    If this raises Unavailable, call it again with the same outputs. If another message takes the
    key of an output at the last moment, the output enters its queue without the key.

    Args:
        terms: The queue of the message.
        held: The reservation of the message.
        outputs: The messages that replace it.
        then: The message that enters its queue once all outputs have ended. If None, the outputs
            belong to the gather of the finished message, if it is in one.

    Raises:
        LeaseLost: The message is no longer held, and no output was written.
        TargetRefused: A target does not support the priority or the group of an output.
        DuplicateKey: Another message has the key of an output. No output was written.
    """
    every = outputs if then is None else [*outputs, then.output]
    for each in every:
        require_target(each.target.kind, each.target.queue, each.priority, each.group)
    values = [dump(each.target.codec, each.payload) for each in every]
    yield from _refuse_taken_keys(held, [each for each in outputs if each.key is not None])
    targets = {each.target.queue: each.target for each in every}
    for target in targets.values():
        levels = {each.priority for each in every if each.target.queue == target.queue}
        yield from namespace.ensure(target.queue, target.kind, target.options, levels)
    if then is not None:
        yield from gathering.prepare(then.output.id)
    now = yield from ServerTime()
    copies = documents(held, outputs, then, values, now)
    handover, result = yield from forms.form_of(held).hand_over(terms, held, copies)
    if result != "done":  # a repeated call may have written copies again that were finished
        yield from discard(handover)
    if result == "lost":
        raise _lost(held)
    yield from terms.kind.ended(terms.queue, [stored_claim(held)])


def _refuse_taken_keys(held: Reservation[Any], outputs: Sequence[Output]) -> Plan[None]:
    """Refuse keys that other messages have, or that several outputs share.

    The key of the finished message counts as free, and so do the keys of outputs that an earlier
    call wrote.
    """
    ids: dict[tuple[str, str | None], Id] = {}
    for each in outputs:
        queue, key = each.target.queue, each.key
        taken = ids.setdefault((queue, key), each.id) != each.id
        yield from uniqueness.release(queue, [str(key)])
        for other in (yield from Find({"q": queue, "key": key}, {"_id": 1}, limit=1)):
            taken = taken or other["_id"] not in (each.id, held.id)
        if taken:
            raise key_taken(each.target, str(key))


def _lost(held: Reservation[Any]) -> LeaseLost:
    text = f"message {held.id} of queue {held.queue!r} is no longer held"
    return LeaseLost(text, lost=[held])


def rollback(
    terms: QueueTerms, given: Sequence[object], **options: Unpack[RollbackOptions]
) -> Plan[None]:
    """Give messages back for another try, and bury messages that have no try left."""
    held = arguments.reservations(terms.queue, tuple(given))
    delay, error = options.get("delay"), options.get("error")
    delay_s = None if delay is None else arguments.duration("delay", delay)
    counted = arguments.flag("counted", options.get("counted", True))
    record = yield from noted(held, error)
    failure = Failure(record, delay_s, options.get("session"), counted)
    yield from forms.settle(held, lambda form, some: form.roll_back(terms, some, failure))


def noted(
    held: Sequence[Reservation[Any]], error: BaseException | str | None
) -> Plan[dict[str, object] | None]:
    """Set the error of the reservations, if there is an error. Return its stored form, or None."""
    if error is None:
        return None
    record = error_record(error, (yield from ServerTime()))
    for each in held:
        each.error = ErrorInfo.of(record)
    return record


def release(terms: QueueTerms, given: Sequence[object], *, seen: bool = True) -> Plan[None]:
    """Give messages back unprocessed, with their old ``when``. The try does not count.

    ``seen``: whether a caller has received them, so that they count as delivered.
    """
    held = arguments.reservations(terms.queue, tuple(given))
    yield from forms.settle(held, lambda form, some: form.release(terms, some, seen=seen))


def bury(
    terms: QueueTerms, given: Sequence[object], *, error: BaseException | str | None = None
) -> Plan[None]:
    """Send messages to the dead-letter queue now."""
    held = arguments.reservations(terms.queue, tuple(given))
    for each in held:
        if each.dead is not None:
            raise ConfigurationError(
                f"reservations: message {each.id} is already in a dead-letter queue; commit it, or "
                "call redrive() on the queue"
            )

    def buried() -> Plan[None]:
        failure = Failure((yield from noted(held, error)))
        yield from forms.settle(held, lambda form, some: form.bury(terms, some, failure))

    return buried()


# ---- messages that are documents


class Documents(Form[Reservation[Any]]):
    """The way to settle messages that are separate documents: by updates of these documents."""

    def refuse(self, held: Held, argument: str) -> None:
        """Do nothing, because a document can store any value that a holder writes."""

    def commit(
        self, terms: QueueTerms, held: Held, put: Mapping[str, Any], session: object
    ) -> Plan[None]:
        """Finish messages."""
        return _finish(terms, held, "committed", put, session)

    def roll_back(self, terms: QueueTerms, held: Held, failure: Failure) -> Plan[None]:
        """Give messages back for another try, and bury messages that have no try left."""
        kind, options, error = terms.kind, terms.options, failure.error
        dead_letter: Target | None = None
        settlements, buried = [], list[Reservation[Any]]()
        place = yield from kind.place_again(terms.queue)
        for each in held:
            if failure.is_last(each, options.max_tries):
                buried.append(each)
                if dead_letter is None:
                    levels = {one.priority for one in held}
                    dead_letter = yield from _dead_letter(terms, levels)
                settlements.append(_burial(terms, each, dead_letter, "tries", error))
                continue
            delay_s = failure.delay_s
            delay_s = options.backoff.delay(each.tries) if delay_s is None else delay_s
            build = _rolling_back(kind, each, failure, delay_s)
            new_place = None if each.group is None else place
            if new_place is not None:
                build = partial(_placed_again, build, new_place)
            # Attempts with the same error differ by these facts of their reservations.
            told = None if error is None else (id(error), each.tries, each.owner, each.reserved)
            first = _knows_no_attempts(each)
            untried = not failure.counted and each.tries == 1
            group = ("rollback", delay_s, failure.counted, untried, told, first, new_place)
            settlements.append(Settlement(each, build, group, kind))
        plan = settle(terms.queue, settlements, failure.session)
        yield from results.announced(buried, plan, failure.session)

    def release(self, terms: QueueTerms, held: Held, *, seen: bool) -> Plan[None]:
        """Give messages back unprocessed. ``seen``: whether a caller has received them."""
        kind, uncounted = terms.kind, ("tries",) if seen else transitions.COUNTS
        settlements = [
            Settlement(
                each,
                partial(_releasing, kind, each.when, uncounted, each.tries == 1),
                ("release", each.when, uncounted, each.tries == 1),
                kind,
            )
            for each in held
        ]
        yield from settle(terms.queue, settlements)

    def bury(self, terms: QueueTerms, held: Held, failure: Failure) -> Plan[None]:
        """Send messages to the dead-letter queue."""
        target = yield from _dead_letter(terms, {each.priority for each in held})
        settlements = [_burial(terms, each, target, "buried", failure.error) for each in held]
        yield from results.announced(held, settle(terms.queue, settlements))

    def move(
        self,
        terms: QueueTerms,
        pairs: Sequence[tuple[Reservation[Any], Any]],
        move: Move,
        session: object,
    ) -> Plan[None]:
        """Move messages to another queue."""
        return move_documents(terms, pairs, move, session)

    def moves(
        self,
        terms: QueueTerms,
        target: Target,
        pairs: Sequence[tuple[Reservation[Any], NewMessage]],
    ) -> list[Plan[Outcomes]]:
        """Return plans that together move messages, each with its new content."""
        starts = range(0, len(pairs), MAX_BATCH)
        return [move_each(terms, target, pairs[start : start + MAX_BATCH]) for start in starts]

    def hand_over(
        self, terms: QueueTerms, held: Reservation[Any], copies: Sequence[Document]
    ) -> Plan[tuple[Handover, Result]]:
        """Finish a message; publish documents in its place. Return the handover and its result."""
        kind = terms.kind
        handover = Handover(terms.queue, held.id, held.token, copies, new=True)
        # A hidden source cannot keep its key taken, so the finished message does not, either.
        stay_s, now = kept_s(terms.options.history, held.keep), (yield from ServerTime())
        finish = Finish("committed", stay_s, held.key is not None)
        match = transitions.holds_filter([held])
        result = yield from hand_over_whole(handover, match, kind, finishing(kind, finish, now))
        yield from results.announce([held.keep, held.gather])
        return handover, result

    def extend(self, held: Held, how: Extension) -> Plan[Failures]:
        """Extend leases. Return the failures."""
        return extend_documents(held, how)


forms.register(Reservation, Documents())


def finish_cancelled(terms: QueueTerms, held: Held) -> Plan[None]:
    """End cancelled messages whose holder has stopped working on them.

    Raises:
        LeaseLost: Some messages were no longer held; the rest have ended.
    """
    return _finish(terms, held, "cancelled", {}, None)


def _finish(
    terms: QueueTerms, held: Held, outcome: str, put: Mapping[str, Any], session: object
) -> Plan[None]:
    """Finish messages that have their own documents. Write ``put`` to those that are kept."""
    # A payload belongs to one call, so other calls do not share its command.
    own = object() if put else None
    settlements = [finishing_one(terms, each, outcome, put, own) for each in held]
    return results.announced(held, settle(terms.queue, settlements, session), session)


def finishing_one(
    terms: QueueTerms,
    held: Reservation[Any],
    outcome: str = "committed",
    put: Mapping[str, Any] = NOTHING,
    own: object = None,
) -> Settlement:
    """Return the settlement that finishes a message; calls share a command if ``own`` is equal."""
    keyed = held.key is not None
    finish = finish_of(outcome, terms.options.history, held.keep, keyed=keyed)
    build = partial(_finishing, terms.kind, finish, put)
    return Settlement(held, build, ("finish", finish, own), terms.kind)


def _finishing(
    kind: Kind, finish: Finish, put: Mapping[str, Any], now: datetime
) -> SettlementUpdate:
    """Return the update that finishes a message and writes ``put``, or None to delete it."""
    update = finishing(kind, finish, now)
    if update is not None:
        # A new token tells this settlement from an earlier one by the same holder.
        update["$set"] |= {"token": transitions.new_token(), **({} if finish.bare else put)}
    return update


def _dead_letter(terms: QueueTerms, levels: Collection[int | None]) -> Plan[Target]:
    """Return the dead-letter queue, for messages with these priorities."""
    name = terms.options.dead_letter
    return namespace.dead_letter_target(terms.queue, terms.kind, name, levels)


def _rolling_back(
    kind: Kind, held: Reservation[Any], failure: Failure, delay_s: float
) -> Callable[[datetime], UpdateFields]:
    """Return the function that builds the update of a rollback."""
    build = partial(transitions.rolling_back, kind, delay_s, failure.error)
    if not failure.counted:
        return partial(_uncounted, build, held.tries == 1)
    attempt = failed_try(held, failure.error)
    if attempt is not None and _knows_no_attempts(held):
        return partial(_with_first_attempt, build, attempt)
    return partial(_with_attempt, build, attempt)


def _uncounted(
    build: Callable[[datetime], UpdateFields], first: bool, now: datetime
) -> UpdateFields:
    """Return a rollback update that does not count the try, and notes no attempt.

    ``first``: whether it was the first try, so that the message may expire again.
    """
    update = build(now) | {"$inc": {"tries": -1}}
    return transitions.untried(update) if first else update


def _releasing(
    kind: Kind, due: datetime, uncounted: Sequence[str], first: bool, now: datetime
) -> UpdateFields:
    """Return the update that gives a message back unprocessed. ``first``: as in ``_uncounted``."""
    update = transitions.releasing(kind, due, now, uncounted=uncounted)
    return transitions.untried(update) if first else update


def _knows_no_attempts(held: Reservation[Any]) -> bool:
    """Return whether this is a dead message that shows no attempts.

    Another program may have stored attempts that are not a list. A live message is buried because
    of such a value, but a dead message is delivered, and shows no attempts.
    """
    return held.dead is not None and not held.attempts


def _with_first_attempt(
    build: Callable[[datetime], UpdateFields], attempt: Mapping[str, Any], now: datetime
) -> UpdateFields:
    """Return a rollback update that notes a failed try in place of the stored attempts."""
    update = build(now)
    update["$set"]["attempts"] = [attempt]
    return update


def _with_attempt(
    build: Callable[[datetime], UpdateFields], attempt: Mapping[str, Any] | None, now: datetime
) -> UpdateFields:
    """Return a rollback update that also notes a failed try, if there is one."""
    return transitions.noting(build(now), attempt)


def _placed_again(
    build: Callable[[datetime], UpdateFields],
    place: Callable[[datetime], dict[str, Any]],
    now: datetime,
) -> UpdateFields:
    """Return a rollback update that also gives the message a new place.

    The message gets the place of a new message that becomes ready at the same instant.
    """
    update = build(now)
    update["$set"] |= place(update["$set"]["when"])
    return update


def _burial(
    terms: QueueTerms,
    held: Reservation[Any],
    target: Target,
    reason: str,
    error: Mapping[str, Any] | None,
) -> Settlement:
    """Return the settlement that buries a message, and stores this reason."""
    attempt = failed_try(held, error)

    def build(now: datetime) -> SettlementUpdate:
        death = {"reason": reason, "tries": held.tries, "error": error or as_stored(held.error)}
        put = target.kind.entering(target.queue, now, held.priority, held.group)
        keyed = held.key is not None
        update = transitions.burying(terms.kind, terms.queue, put, now, death, keyed=keyed)
        update = ending_gather(update, held.gather)
        return transitions.noting(update, attempt, stay_of(held))

    return Settlement(held, build, None, terms.kind)


# ---- notes of the holder


def progress(queue: str, held: object, fraction: float, note: str | None) -> Plan[None]:
    """Store the progress of the work on a message."""
    check_progress(fraction, note)
    yield from _write_note(queue, held, partial(_progress, fraction, note))


def check_progress(fraction: float, note: str | None) -> None:
    """Refuse an invalid progress value.

    Raises:
        ConfigurationError: An argument is not allowed.
    """
    number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if not number or not 0 <= fraction <= 1:
        text = f"fraction: {shown(fraction)} is not allowed; use a number from 0 to 1"
        raise ConfigurationError(text)
    if note is not None:
        short = isinstance(note, str) and len(note) <= 2048
        if not short or not arguments.is_unicode(note):
            text = "note: expected a str of at most 2048 Unicode characters"
            raise ConfigurationError(text)


def _progress(fraction: float, note: str | None, now: datetime) -> SettlementUpdate:
    return {"$set": {"progress": {"fraction": fraction, "note": note, "at": now}}}


def checkpoint(queue: str, held: object, state: Any) -> Plan[None]:
    """Store the state of the work on a message for its next try."""
    encode({"state": state})  # raises InvalidMessage if it cannot be stored
    yield from _write_note(queue, held, partial(_checkpoint, state))


def _checkpoint(state: Any, now: datetime) -> SettlementUpdate:
    return {"$set": {"checkpoint": state}}


def _write_note(queue: str, held: object, build: partial[SettlementUpdate]) -> Plan[None]:
    """Change a held message by the update that ``build`` returns. The message stays held."""
    (reservation,) = arguments.reservations(queue, (held,))
    forms.form_of(reservation).refuse([reservation], "reservation")
    yield from settle(queue, [Settlement(reservation, build)])
