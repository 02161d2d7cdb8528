"""Giving back what was received for a caller that was cancelled, or that was too much for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pyqueue.backends import transitions
from pyqueue.backends.applying import update_with_key
from pyqueue.backends.claiming import Claimed
from pyqueue.backends.kind import Kind
from pyqueue.backends.scan import FIRST, due_of
from pyqueue.requests import Document, Insert, Plan, ServerTime, Signal, UpdateEach

__all__ = ["give_back", "insert_again", "undo_pop", "undo_reserve"]


def insert_again(documents: list[Document]) -> Plan[None]:
    """Insert deleted documents again, without those keys that were taken in the meantime."""
    failures = yield from Insert(documents)
    clashing = [documents[failure.place] for failure in failures if failure.field == "key"]
    if clashing:
        for document in clashing:
            document["last_key"] = document.pop("key")
        yield from Insert(clashing)


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

    A message loses its key if that was taken in the meantime.
    """
    if history_s is None:
        again = []
        for document, _ in claimed:
            free = {name: document[name] for name in document if name not in kind.held_fields}
            again.append(free | {"when": due_of(document)})
        yield from insert_again(again)
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
