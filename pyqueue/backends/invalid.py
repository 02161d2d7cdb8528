"""Stored documents that are not valid messages.

Any program may write to the collection. A document that pyqueue would not write, or whose payload
does not fit the model, must not stop the queue. It goes to the dead-letter queue with the reason,
and a consumer never receives it. A lookup returns the raw payload, and ``error`` describes the
fault. Claims cannot find a document whose ``when`` is not a date: ``turns`` sets it aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from bson.datetime_ms import DatetimeMS
from bson.errors import BSONError

from pyqueue.backends import namespace, transitions
from pyqueue.backends.kind import Kind
from pyqueue.documents import group_of, invalid_fields, message_of, priority_of, without_fields
from pyqueue.error_records import error_record
from pyqueue.errors import InvalidMessage
from pyqueue.facts import ErrorInfo, Gather
from pyqueue.gathers import ending_gather
from pyqueue.hooks import tell_burial
from pyqueue.messages import Message
from pyqueue.payloads import Codec, encode, error_text
from pyqueue.requests import Document, Filter, Find, Plan, Signal, Update

log = logging.getLogger("pyqueue")

#: The fields that describe a message and are optional.
LABEL_FIELDS: Final = ("headers", "key", "last_key", "pushed", "trail", "type")
#: A consumer that may stop does so when at least MIN_MISFITS, and more than half, of its first
#: messages are wrong. After CHECKED_FIRST messages it no longer stops.
MIN_MISFITS: Final = 10
CHECKED_FIRST: Final = 100
#: While invalid messages arrive, a warning is logged at least this often.
WARNING_INTERVAL: Final = timedelta(seconds=60)


@dataclass(slots=True)
class Tally:
    """How many of the first messages of a consumer were valid, and how many were invalid."""

    first: int = CHECKED_FIRST
    right: int = 0
    wrong: int = 0

    @property
    def seen(self) -> int:
        """How many messages were counted."""
        return self.right + self.wrong

    @property
    def stops(self) -> bool:
        """Whether too many messages are invalid, so that the consumer should stop."""
        return self.seen <= self.first and self.wrong >= MIN_MISFITS and self.wrong > self.right


class Misfits:
    """The invalid messages that a consumer claimed and buried.

    Warnings are logged for the first, second, fourth, eighth, ... message, and once a minute.

    Args:
        count: Called for each invalid message.
        stop: Whether the consumer stops when most of its first messages are invalid.
    """

    def __init__(self, count: Callable[[], object] | None = None, *, stop: bool = False) -> None:
        self._count = count
        self._tally = Tally()
        self._warned: datetime | None = None
        self._checks = stop
        #: Why the consumer must stop, or None.
        self.verdict: str | None = None

    def count_valid(self, number: int = 1) -> None:
        """Count valid messages."""
        self._tally.right += number

    def add(
        self, queue: str, model: str | None, dead_letter: str, id: object, error: str, now: datetime
    ) -> None:
        """Count a buried message, and log a warning if one is due."""
        if self._count is not None:
            self._count()
        self._tally.wrong += 1
        number = self._tally.wrong
        reason = " ".join(error.split())
        overdue = self._warned is None or now - self._warned >= WARNING_INTERVAL
        if overdue or not number & (number - 1):  # 1, 2, 4, ...
            self._warned = now
            text = "queue %r: message %s is not valid and goes to %r (%d so far): %s"
            log.warning(text, queue, id, dead_letter, number, reason)
        if self._checks and self._tally.stops:
            fitting = "valid messages" if model is None else f"valid {model} payloads"
            self.verdict = (
                f"the stage of queue {queue!r} stops: {number} of its first {self._tally.seen} "
                f"messages are not {fitting}, and went to {dead_letter!r}; the last one, {id}: "
                f"{reason}. Correct the model or the producer, and send the messages back with "
                f'"pyqueue redrive {dead_letter}"; or set on_invalid="bury" for the stage, so that '
                "it buries such messages and continues"
            )


def invalid_claimed_fields(document: Document) -> list[str] | None:
    """Return the invalid fields of a claimed document, or None if it was buried before.

    A message that was buried before is delivered even if some of its fields are invalid.
    """
    invalid = invalid_fields(document)
    if "processed" in document:  # a finished message cannot be settled
        return [*invalid, "processed"]
    return None if "dead" in document and "dead" not in invalid else invalid


def invalid_document_error(document: Document, invalid: Sequence[str]) -> InvalidMessage:
    """Return the error that describes the invalid fields of a stored document.

    Texts and containers may hold secrets, so only their types are shown.
    """
    values = "; ".join(f"{name} is {_shown(document[name])}" for name in invalid)
    return InvalidMessage(f"the stored document has invalid fields: {values}")


def _shown(value: object) -> str:
    plain = isinstance(value, (bool, int, float, datetime, DatetimeMS, type(None)))
    return repr(value)[:100] if plain else f"of type {type(value).__name__}"


def decode(
    codec: Codec[Any], document: Document, now: datetime, lease_s: float | None = None
) -> Message[Any]:
    """Return the message that a document stores.

    If the document is invalid or does not fit the model, the message has the raw payload, and its
    ``error`` describes the fault.
    """
    invalid = invalid_fields(document)
    try:
        if invalid:
            raise invalid_document_error(document, invalid)
        payload = codec.load(document.get("payload"))
    except Exception as misfit:  # the validators of a model are user code
        valid = without_fields(document, invalid)
        valid.setdefault("q", "")  # if the stored one was invalid
        message = message_of(valid, document.get("payload"), now, lease=lease_s)
        message.error = ErrorInfo.of(error_record(misfit, now))
        return message
    return message_of(document, payload, now, lease=lease_s)


class Graveyard(NamedTuple):
    """A queue, and the dead-letter queue in which its messages are buried."""

    queue: str
    kind: Kind
    dead_letter: str


class Refusal(NamedTuple):
    """Why a claimed document is buried instead of delivered."""

    reason: str
    tries: int
    error: Mapping[str, Any] | None
    #: The fields that are invalid.
    fields: Sequence[str]


def bury_claimed(
    graveyard: Graveyard, document: Document, refusal: Refusal, now: datetime
) -> Plan[None]:
    """Move a claimed message to the dead-letter queue, without its invalid fields."""
    queue, kind, invalid = graveyard.queue, graveyard.kind, refusal.fields
    priority = priority_of(document)
    target = yield from namespace.dead_letter_target(*graveyard, [priority])
    death = {"reason": refusal.reason, "tries": refusal.tries, "error": refusal.error}
    keyed = "key" in document and "key" not in invalid
    put = target.kind.entering(target.queue, now, priority, group_of(document))
    update = transitions.burying(kind, queue, put, now, death, keyed=keyed)
    update = ending_gather(update, Gather.of(document.get("gather")))
    holds = {"_id": document["_id"], "token": document["token"]}
    buried = yield from Update(holds, _without_invalid(update, invalid))
    yield from Signal(target.queue, now)
    if buried.matched:
        yield from tell_burial(queue, decode(Codec(), document, now), target.queue)
    yield from kind.ended(queue, [document])


def bury_unclaimable(
    graveyard: Graveyard, match: Filter, fault: Exception, now: datetime
) -> Plan[None]:
    """Bury a document that cannot be claimed. If the server refuses, hide it from all claims."""
    queue, kind, dead_letter = graveyard
    target = yield from namespace.dead_letter_target(queue, kind, dead_letter, [None])
    death = {"reason": "invalid", "tries": 0, "error": error_record(fault, now)}
    put = target.kind.entering(target.queue, now)
    update = transitions.burying(kind, queue, put, now, death, keyed=False)
    ended = yield from Find(match, transitions.waited_for(kind), limit=1)
    text = "queue %r: message %r cannot be claimed and goes to %r: %s"
    log.warning(text, queue, match["_id"], dead_letter, " ".join(error_text(fault).split()))
    try:
        buried = yield from Update(match, _without_invalid(update, LABEL_FIELDS))
    except InvalidMessage as refusal:
        log.error(
            "queue %r: message %r cannot be buried and is hidden: %s", queue, match["_id"], refusal
        )
        yield from Update(match, {"$unset": transitions.unset("when", *kind.held_fields)})
    else:
        yield from Signal(target.queue, now)
        if buried.matched:
            known = decode(Codec(), {"_id": match["_id"], "q": queue}, now)
            yield from tell_burial(queue, known, target.queue)
    yield from kind.ended(queue, ended)


def bury_refused(
    graveyard: Graveyard, one: Filter, refusal: InvalidMessage, now: datetime
) -> Plan[None]:
    """Bury an invalid message that the server refused to claim, if the message is still free.

    Raises:
        InvalidMessage: The server's refusal, if the message is valid.
    """
    # A second read could find a message that another consumer held for a moment.
    try:
        found = yield from Find(one, limit=1)
        fault = _fault_of(found[0]) if found else None
    except (InvalidMessage, BSONError) as error:  # too large, or unreadable
        found, fault = [{}], error
    if fault is not None:
        yield from bury_unclaimable(graveyard, one, fault, now)
    elif found:
        raise refusal


def _fault_of(document: Document) -> Exception | None:
    """Return the error of a document that the server refused to claim, or None if it is valid."""
    if invalid := invalid_fields(document):
        return invalid_document_error(document, invalid)
    encode(document)  # raises InvalidMessage if it cannot be stored
    return None


def _without_invalid(
    update: dict[str, dict[str, Any]], invalid: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the update of a burial without invalid fields, so that the server accepts it."""
    cleaned = {operator: dict(fields) for operator, fields in update.items()}
    if "trail" in invalid:
        cleaned["$set"]["trail"] = cleaned.pop("$push")["trail"]["$each"]  # $push needs an array
    kept = {"_id", *cleaned["$set"], *cleaned.get("$rename", {}).values()}
    cleaned["$unset"].update(transitions.unset(*(name for name in invalid if name not in kept)))
    return cleaned
