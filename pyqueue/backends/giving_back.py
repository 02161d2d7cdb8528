"""Giving back what was received for a caller that was cancelled, or that was too much for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from bson import ObjectId

from pyqueue.backends import transitions
from pyqueue.backends.applying import update_with_key
from pyqueue.backends.claiming import Claimed
from pyqueue.backends.handover import overwrite
from pyqueue.backends.kind import Kind
from pyqueue.backends.scan import FIRST, due_of
from pyqueue.errors import DuplicateKey
from pyqueue.requests import Document, Find, Insert, Plan, ServerTime, Signal, UpdateEach


def insert_again(
    documents: Sequence[Document], elsewhere: Callable[[Document], Document]
) -> Plan[None]:
    """Insert deleted documents again, without those keys that were taken in the meantime.

    Args:
        documents: what this process has deleted, so that no other one can settle it.
        elsewhere: makes the form in which a document is stored if its id belongs to a message of
            another queue.
    """
    while documents:
        again: list[Document] = []
        for failure in (yield from Insert(documents)):
            document = documents[failure.place]
            if failure.field == "_id":
                again += yield from _insert_over(document, elsewhere)
            elif failure.field == "key":
                again.append(_without_key(document))
            else:
                raise failure.error
        documents = again


def _insert_over(
    document: Document, elsewhere: Callable[[Document], Document]
) -> Plan[list[Document]]:
    """Insert a document whose id is taken. Return what is left to insert."""
    try:
        yield from overwrite([document], None)
    except DuplicateKey as clash:
        if document["_id"] in clash.ids:
            same = {"_id": document["_id"], "q": document["q"], "processed": {"$exists": False}}
            # The producer has pushed the same message again.
            there = yield from Find(same, {"_id": 1}, limit=1)
            return [] if there else [elsewhere(document)]
        if "key" not in document:
            raise
        return [_without_key(document)]
    return []


def _without_key(document: Document) -> Document:
    return {"last_key" if name == "key" else name: value for name, value in document.items()}


def renamed(document: Document, now: datetime) -> Document:
    """Return a message with a new id. Its trail has the old one."""
    stop = {"q": document["q"], "at": now, "id": document["_id"]}
    trail = [*document.get("trail", ()), stop][-transitions.TRAIL_LENGTH :]
    return document | {"_id": ObjectId(), "trail": trail}


def undo_reserve(queue: str, kind: Kind, claimed: Sequence[Claimed]) -> Plan[None]:
    """Give back what was reserved for a cancelled caller: the same place, the try not counted."""
    yield from give_back(queue, kind, [document for document, _ in claimed])


def give_back(
    queue: str, kind: Kind, documents: Sequence[Document], *, counted: bool = True
) -> Plan[None]:
    """Give back claimed messages. ``counted``: whether their claim counted a try.

    One whose ``due`` is invalid goes first. Its ``when`` is no place: it is the end of the lease.
    """
    now = yield from ServerTime()
    stored = [document.get("due") for document in documents]
    places = [due if isinstance(due, datetime) else FIRST for due in stored]
    yield from UpdateEach(
        [
            (
                {"_id": document["_id"], "token": document["token"]},
                transitions.releasing(kind, place, now, counted=counted),
            )
            for document, place in zip(documents, places, strict=True)
        ]
    )
    yield from Signal(queue, min(places))


def undo_pop(
    queue: str, kind: Kind, history_s: float | None, claimed: Sequence[Claimed]
) -> Plan[None]:
    """Give back what was popped for a cancelled caller: the same id, place and tries.

    A message loses its key if that was taken in the meantime. If a message of another queue has its
    id, it gets a new one.
    """
    if history_s is None:
        again = []
        for document, _ in claimed:
            free = {name: document[name] for name in document if name not in kind.held_fields}
            again.append(free | {"when": due_of(document)})
        now = yield from ServerTime()
        yield from insert_again(again, partial(renamed, now=now))
    else:
        for document, _ in claimed:
            match = {
                "_id": document["_id"],
                "token": document["token"],
                "processed": {"$exists": True},
            }
            update = transitions.unfinishing(kind, due_of(document))
            yield from update_with_key(match, update, document.get("key"))
    yield from Signal(queue, min(due_of(document) for document, _ in claimed))
