"""Stored documents that are not valid messages.

Any program may write to the collection. A document that pyqueue would not write, or whose payload
does not fit the model, must not stop the queue. It goes to the dead-letter queue with the reason,
and a consumer never receives it. A lookup shows what there is, and ``error`` says what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from bson.datetime_ms import DatetimeMS
from bson.errors import BSONError

from pyqueue.backends import namespace, transitions
from pyqueue.backends.kind import Kind
from pyqueue.documents import invalid_fields, message_of, without_fields
from pyqueue.errors import ConfigurationError, InvalidMessage
from pyqueue.messages import Message
from pyqueue.payloads import Codec, encode, error_text
from pyqueue.requests import Document, Filter, Find, Plan, Signal, Update

__all__ = [
    "bury_claimed",
    "bury_unclaimable",
    "decode",
    "error_record",
    "find_fault",
    "invalid_claimed_fields",
    "invalid_document_error",
]

log = logging.getLogger("pyqueue")

#: The fields that describe a message and that it can do without.
LABEL_FIELDS: Final = ("headers", "key", "last_key", "pushed", "trail", "type")
#: The longest error text that a message keeps, in bytes.
MAX_ERROR_BYTES: Final = 2048


def error_record(error: BaseException | str, now: datetime) -> dict[str, object]:
    """Return how a message stores an error: its type, its text and the instant.

    Raises:
        ConfigurationError: it is neither an exception nor a str.
    """
    if not isinstance(error, (BaseException, str)):
        raise ConfigurationError(f"error: give an exception or a str, not {type(error).__name__}")
    name = type(error).__name__ if isinstance(error, BaseException) else "error"
    text = error_text(error) if isinstance(error, BaseException) else error
    text = text.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")
    return {"type": name, "message": text, "at": now}


def invalid_claimed_fields(document: Document) -> list[str] | None:
    """Return the invalid fields of a claimed document.

    None means: deliver it in any case, because it was buried before.
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
    return InvalidMessage(f"the stored document is not as pyqueue writes it: {values}")


def _shown(value: object) -> str:
    plain = isinstance(value, (bool, int, float, datetime, DatetimeMS, type(None)))
    return repr(value)[:100] if plain else f"of type {type(value).__name__}"


def decode(
    codec: Codec[Any], document: Document, now: datetime, lease_s: float | None = None
) -> Message[Any]:
    """Return the message of a document.

    If the document is invalid or does not fit the model, the message has the raw payload, and its
    ``error`` says what is wrong.
    """
    invalid = invalid_fields(document)
    try:
        if invalid:
            raise invalid_document_error(document, invalid)
        payload = codec.load(document.get("payload"))
    except Exception as misfit:  # the validators of a model are user code
        valid = without_fields(document, invalid)
        valid.setdefault("q", "")
        message = message_of(valid, document.get("payload"), now, lease=lease_s)
        message.error = error_record(misfit, now)
        return message
    return message_of(document, payload, now, lease=lease_s)


def bury_claimed(
    queue: str,
    kind: Kind,
    dead_letter: str,
    document: Document,
    now: datetime,
    *,
    reason: str,
    tries: int,
    error: Mapping[str, Any] | None,
    invalid: Sequence[str],
) -> Plan[None]:
    """Bury a message that a claim holds, without its invalid fields."""
    target = yield from namespace.dead_letter_target(queue, kind, dead_letter)
    death = {"reason": reason, "tries": tries, "error": error}
    keyed = "key" in document and "key" not in invalid
    put = target.kind.entering(target.queue, now)
    update = transitions.burying(kind, queue, put, now, death, keyed=keyed)
    holds = {"_id": document["_id"], "token": document["token"]}
    yield from Update(holds, _without_invalid(update, invalid))
    yield from Signal(target.queue, now)


def bury_unclaimable(
    queue: str, kind: Kind, dead_letter: str, match: Filter, fault: Exception, now: datetime
) -> Plan[None]:
    """Bury a document that cannot be claimed, or hide it from scans if the server refuses."""
    target = yield from namespace.dead_letter_target(queue, kind, dead_letter)
    death = {"reason": "invalid", "tries": 0, "error": error_record(fault, now)}
    put = target.kind.entering(target.queue, now)
    update = transitions.burying(kind, queue, put, now, death, keyed=False)
    try:
        yield from Update(match, _without_invalid(update, LABEL_FIELDS))
    except InvalidMessage as refusal:
        log.error(
            "queue %r: message %r cannot be buried, it is hidden: %s", queue, match["_id"], refusal
        )
        yield from Update(match, {"$unset": transitions.unset("when", *kind.held_fields)})
    else:
        yield from Signal(target.queue, now)


def find_fault(match: Filter) -> Plan[Exception | None]:
    """Return what is wrong with a document that the server did not claim; None: nothing is."""
    try:
        for document in (yield from Find(match, limit=1)):
            if invalid := invalid_fields(document):
                return invalid_document_error(document, invalid)
            encode(document)
    except (InvalidMessage, BSONError) as error:  # too large, or unreadable
        return error
    return None


def _without_invalid(
    update: dict[str, dict[str, Any]], invalid: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return a burial that also removes invalid fields, so that the server accepts it."""
    cleaned = {operator: dict(fields) for operator, fields in update.items()}
    if "trail" in invalid:
        cleaned["$set"]["trail"] = cleaned.pop("$push")["trail"]["$each"]
    kept = {"_id", *cleaned["$set"], *cleaned.get("$rename", {}).values()}
    cleaned["$unset"].update(transitions.unset(*(name for name in invalid if name not in kept)))
    return cleaned
