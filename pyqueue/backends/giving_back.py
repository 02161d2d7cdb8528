"""Put back messages whose caller was cancelled, or that exceed the caller's limits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pyqueue.backends import transitions
from pyqueue.backends.kind import Kind, UpdateFields
from pyqueue.backends.scan import FIRST
from pyqueue.documents import may_expire
from pyqueue.requests import Document, Plan, ServerTime, Signal, UpdateEach


def give_back(
    queue: str, kind: Kind, documents: Sequence[Document], *, counted: bool = True
) -> Plan[None]:
    """Put claimed messages that no caller received back into their queue.

    A message with an invalid ``due`` goes first: its ``when`` is the end of the lease, not a place.
    """
    now = yield from ServerTime()
    uncounted = transitions.COUNTS if counted else ()
    stored = [document.get("due") for document in documents]
    places = [due if isinstance(due, datetime) else FIRST for due in stored]
    updates: list[UpdateFields] = []
    for document, place in zip(documents, places, strict=True):
        update = transitions.releasing(kind, place, now, uncounted=uncounted)
        updates.append(transitions.untried(update) if may_expire(document, counted) else update)
    mine = [{"_id": document["_id"], "token": document["token"]} for document in documents]
    yield from UpdateEach(list(zip(mine, updates, strict=True)))
    yield from Signal(queue, min(places))
