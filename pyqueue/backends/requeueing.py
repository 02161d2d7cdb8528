"""Requeue: make a message that waits for its time, or in a dead-letter queue, ready now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.managing import REDRIVE_FIELDS, redrive_one
from pyqueue.backends.options import QueueTerms
from pyqueue.clock import BAND
from pyqueue.documents import invalid_fields
from pyqueue.messages import Id
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, Signal, Update

#: The plans for kinds whose messages may share documents, by the name of the kind.
_packed: dict[str, Callable[[QueueTerms, Id], Plan[bool]]] = {}


def register(kind: str, plan: Callable[[QueueTerms, Id], Plan[bool]]) -> None:
    """Register how to requeue a message of a kind that has no document with its id."""
    _packed[kind] = plan


def requeue(terms: QueueTerms, id: Id) -> Plan[bool]:
    """Make a message ready now. Return whether it is ready.

    A scheduled message keeps its tries, and in an ordered queue its place. A dead message goes back
    to the queue that it came from.

    Raises:
        ConfigurationError: the queue is of another kind, or a dead message came from a stream.
    """
    queue, kind = terms.queue, terms.kind
    spellings = arguments.spellings(id)
    yield from namespace.check_kind(queue, kind)
    document = yield from _find(queue, spellings)
    if document is None:
        packed = _packed.get(terms.kind_name)
        return False if packed is None else (yield from packed(terms, id))
    now = yield from ServerTime()
    if "processed" in document or "when" not in document or invalid_fields(document):
        return False
    if transitions.is_held(document, now):
        return False
    if "dead" in document:
        return (yield from redrive_one(queue, kind, document, now))
    return bool(document["when"] <= now) or (yield from _bring_forward(queue, document, now))


def _find(queue: str, spellings: Sequence[Id]) -> Plan[Document | None]:
    """Return the fields that requeueing needs; None if the queue has no such document."""
    for each in spellings:
        # The id of a pack is not the id of a message.
        match: Filter = {"_id": each, "q": queue, "n": {"$exists": False}}
        fields = {**REDRIVE_FIELDS, "due": 1, "processed": 1}
        for document in (yield from Find(match, fields, limit=1)):
            return document
    return None


def _bring_forward(queue: str, document: Document, now: datetime) -> Plan[bool]:
    """Make a scheduled message ready. Return False if it changed in the meantime."""
    # Consumers of queues with groups or limits change ``when`` all the time.
    due = document.get("due")
    match = {
        "_id": document["_id"],
        "q": queue,
        "when": {"$lt": BAND},
        "due": {"$eq": due},
        "token": {"$exists": False},
    }
    put: dict[str, Any] = {"when": now}
    if not isinstance(due, datetime) or due > now:  # a deferred message keeps its ``due``
        put["due"] = now
    if not (yield from Update(match, {"$set": put})).matched:
        return False
    yield from Signal(queue, now)
    return True
