"""Acknowledge a named claim: finish its messages, but bury those a reader could not convert.

The reader notes such a message in its claim, with the reason, and skips it. The acknowledgement of
the claim buries it. A restarted stream keeps the notes, because its batch may be committed already.
If it reads the batch again, perhaps as another type, it writes new notes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from pyqueue.backends import namespace, transitions
from pyqueue.backends.applying import MAX_BATCH
from pyqueue.backends.invalid import Graveyard, bury_unclaimable, error_record
from pyqueue.backends.kind import Kind
from pyqueue.documents import priority_of
from pyqueue.errors import InvalidMessage, Unavailable
from pyqueue.messages import Id
from pyqueue.requests import Delete, Document, Filter, Find, Plan, Signal, Update, UpdateEach

log = logging.getLogger("pyqueue")

#: The field of a note: the reason. The end of the claim removes it.
NOTE: Final = "claim.bad"


def note(match: Filter, reasons: Mapping[Id, str | None]) -> Plan[int]:
    """Note why messages are bad. Repeating this changes nothing.

    Args:
        match: the filter of the messages that the runner holds.
        reasons: the reasons, by id. None removes an earlier note.

    Returns:
        How many of the messages are still held.
    """
    pairs = [
        ({"_id": id, **match}, {"$set": {NOTE: reason}} if reason else {"$unset": {NOTE: ""}})
        for id, reason in reasons.items()
    ]
    held = 0
    for start in range(0, len(pairs), MAX_BATCH):
        done, failures = yield from UpdateEach(pairs[start : start + MAX_BATCH])
        for failure in failures:
            raise failure.error
        held += done
    return held


def bury_noted(queue: str, kind: Kind, dead_letter: str, match: Filter, now: datetime) -> Plan[int]:
    """Bury the noted messages among those that match. Return how many."""
    noted = {**match, NOTE: {"$exists": True}}
    found = yield from Find(noted, {"payload": 0}, hint=namespace.CLAIMS)
    if not found:
        return 0
    levels = {priority_of(each) for each in found}
    target = yield from namespace.dead_letter_target(queue, kind, dead_letter, levels)
    buried = 0
    for start in range(0, len(found), MAX_BATCH):
        some = found[start : start + MAX_BATCH]
        pairs = []
        for each in some:
            put = target.kind.entering(target.queue, now, priority_of(each))
            death = _death(each, now)
            update = transitions.burying(kind, queue, put, now, death, keyed="key" in each)
            pairs.append((_holds(each), update))
        done, failures = yield from UpdateEach(pairs)
        for failure in failures:
            if isinstance(failure.error, Unavailable):
                raise failure.error
            holds = _holds(some[failure.place])
            graveyard = Graveyard(queue, kind, dead_letter)
            yield from bury_unclaimable(graveyard, holds, failure.error, now)
        buried += done + len(failures)
    first = found[0]
    text = "queue %r: %d messages cannot be read and went to %r; the first is %s: %s"
    log.warning(text, queue, buried, target.queue, first["_id"], first["claim"]["bad"])
    yield from Signal(target.queue, now)
    return buried


def finish(kind: Kind, history_s: float | None, match: Filter, now: datetime) -> Plan[int]:
    """Finish the messages that match and have no note. Return how many."""
    match = {**match, NOTE: {"$exists": False}}
    done = 0
    for keyed in (False, True):
        update = kind.finishing(now, "committed", history_s, keyed=keyed)
        if update is None:
            return (yield from Delete(match, many=True))
        with_key = {**match, "key": {"$exists": keyed}}
        done += (yield from Update(with_key, update, many=True)).matched
    return done


def _holds(document: Document) -> dict[str, Any]:
    return {"_id": document["_id"], "token": document["token"]}


def _death(document: Document, now: datetime) -> dict[str, Any]:
    error = error_record(InvalidMessage(f"payload: it {document['claim']['bad']}"), now)
    return {"reason": "invalid", "tries": int(document.get("tries", 0)), "error": error}
