"""Requeue: make a scheduled message or a dead letter ready now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.kind import UpdateFields
from pyqueue.backends.managing import REDRIVE_FIELDS, as_read, redrive_one
from pyqueue.backends.options import QueueTerms
from pyqueue.documents import invalid_fields
from pyqueue.messages import Id
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, Signal, Update

#: The plans for kinds whose messages may share documents, keyed by the name of the kind.
_packed: dict[str, Callable[[QueueTerms, Id], Plan[bool]]] = {}


def register(kind: str, plan: Callable[[QueueTerms, Id], Plan[bool]]) -> None:
    """Register the plan by which a kind requeues a message that shares a document."""
    _packed[kind] = plan


def requeue(terms: QueueTerms, id: Id) -> Plan[bool]:
    """Make a message ready now. Return whether it is ready.

    A scheduled message keeps its tries, and in an ordered queue its place. A dead message goes back
    to the queue that it came from.

    Raises:
        ConfigurationError: The queue is of another kind, or a dead message came from a stream.
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
    if document["when"] <= now:
        return "cancel" not in document or (yield from _lift(queue, document, now))
    return (yield from _bring_forward(queue, document, now))


def _find(queue: str, spellings: Sequence[Id]) -> Plan[Document | None]:
    """Return the fields that requeueing needs, or None if the queue has no document with the id."""
    for each in spellings:
        # The id of a pack is not the id of a message.
        match: Filter = {"_id": each, "q": queue, "n": {"$exists": False}}
        fields = {**REDRIVE_FIELDS, "due": 1, "processed": 1, "cancel": 1}
        for document in (yield from Find(match, fields, limit=1)):
            return document
    return None


def _bring_forward(queue: str, document: Document, now: datetime) -> Plan[bool]:
    """Make a scheduled message ready. Return False if it changed in the meantime."""
    match = as_read(queue, document, now)
    if not (yield from Update(match, brought_forward(document, now))).matched:
        return False
    yield from Signal(queue, now)
    return True


def brought_forward(document: Document, now: datetime) -> UpdateFields:
    """Return the update that makes a scheduled message ready."""
    put: dict[str, Any] = {"when": now}
    due = document.get("due")
    if not isinstance(due, datetime) or due > now:  # a deferred message keeps its ``due``
        put["due"] = now
    update: UpdateFields = {"$set": put}
    if "cancel" in document:
        update["$unset"] = transitions.unset(*transitions.ENDS)
    return update


def _lift(queue: str, document: Document, now: datetime) -> Plan[bool]:
    """Undo the cancellation of a ready message, so that it is delivered. Return False if held."""
    match = {"_id": document["_id"], "q": queue, "when": {"$lte": now}}
    change = yield from Update(match, {"$unset": transitions.unset(*transitions.ENDS)})
    return bool(change.matched)
