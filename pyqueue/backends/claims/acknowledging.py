"""Acknowledge a named claim: finish its messages, and bury any that a reader could not convert.

A reader skips such a message, and notes the reason in its claim. The acknowledgement of the claim
buries the message. A restarted query keeps the notes, because its batch may be committed already.
If the query reads the batch again, perhaps as another type, it writes new notes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from pyqueue.backends import namespace, transitions
from pyqueue.backends.applying import MAX_BATCH
from pyqueue.backends.contents import NOTE, Contents, contents_of
from pyqueue.backends.invalid import Graveyard, bury_unclaimable
from pyqueue.backends.kind import UpdateFields
from pyqueue.backends.options import QueueTerms
from pyqueue.documents import priority_of
from pyqueue.error_records import error_record
from pyqueue.errors import InvalidMessage, Unavailable
from pyqueue.facts import Gather
from pyqueue.gathers import ending_gather
from pyqueue.messages import Id
from pyqueue.requests import (
    Delete,
    Document,
    Filter,
    Find,
    Plan,
    Signal,
    Update,
    UpdateDocument,
    UpdateEach,
)

log = logging.getLogger("pyqueue")


def note(contents: Contents, match: Filter, reasons: Mapping[Id, str | None]) -> Plan[int]:
    """Store in messages why a reader cannot convert them. A repeated call changes nothing.

    Args:
        contents: How the documents of the queue contain messages.
        match: The filter that matches the documents held by the runner.
        reasons: Why each message is bad, keyed by id. None removes the note of a message.

    Returns:
        How many documents with these messages are still held.
    """
    shared = yield from contents.find_shared(match, list(reasons))
    updates: dict[Id, UpdateFields] = {}
    for id, reason in reasons.items():
        spot = shared.get(id)
        document, field = (id, NOTE) if spot is None else (spot.document, spot.field(NOTE))
        operator, value = ("$set", reason) if reason else ("$unset", "")
        updates.setdefault(document, {}).setdefault(operator, {})[field] = value
    pairs: list[tuple[Filter, UpdateDocument]] = [
        ({"_id": document, **match}, update) for document, update in updates.items()
    ]
    held = 0
    for start in range(0, len(pairs), MAX_BATCH):
        done, failures = yield from UpdateEach(pairs[start : start + MAX_BATCH])
        for failure in failures:
            raise failure.error
        held += done
    return held


def bury_noted(terms: QueueTerms, match: Filter, now: datetime) -> Plan[int]:
    """Send matching messages that are noted as bad to the dead-letter queue. Return how many."""
    queue, kind, dead_letter = terms.queue, terms.kind, terms.options.dead_letter
    contents, noted = contents_of(kind), {**match, NOTE: {"$exists": True}}
    found = yield from Find({**noted, **contents.separate}, {"payload": 0}, hint=namespace.CLAIMS)
    reasons = [(each["_id"], each["claim"]["bad"]) for each in found]
    buried = yield from _bury_documents(terms, found, now)
    shared = yield from contents.bury_noted(terms, noted, partial(_error, now))
    reasons, buried = [*reasons, *shared], buried + len(shared)
    if reasons:
        text = "queue %r: %d messages cannot be read, so they went to %r; the first is %s: %s"
        log.warning(text, queue, buried, dead_letter, *reasons[0])
    return buried


def _bury_documents(terms: QueueTerms, found: list[Document], now: datetime) -> Plan[int]:
    """Bury messages that have a document each and are noted as bad. Return how many."""
    if not found:
        return 0
    queue, kind, dead_letter = terms.queue, terms.kind, terms.options.dead_letter
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
            update = ending_gather(update, Gather.of(each.get("gather")))
            pairs.append((_holds(each), update))
        done, failures = yield from UpdateEach(pairs)
        for failure in failures:
            if isinstance(failure.error, Unavailable):
                raise failure.error
            holds = _holds(some[failure.place])
            graveyard = Graveyard(queue, kind, dead_letter)
            # This buries the message without the fields that the server refused.
            yield from bury_unclaimable(graveyard, holds, failure.error, now)
        buried += done + len(failures)
    yield from Signal(target.queue, now)
    return buried


def finish(terms: QueueTerms, match: Filter, now: datetime) -> Plan[int]:
    """Finish the messages in matching documents without a note. Return how many."""
    kind, contents = terms.kind, contents_of(terms.kind)
    match = {**match, NOTE: {"$exists": False}}
    done = yield from contents.finish(match)
    match |= contents.separate
    for keyed in (False, True):  # a message with a key needs another update
        update = kind.finishing(now, "committed", terms.options.history, keyed=keyed)
        if update is None:  # there is no history
            return done + (yield from Delete(match, many=True))
        with_key = {**match, "key": {"$exists": keyed}}
        done += (yield from Update(with_key, update, many=True)).matched
    return done


def _holds(document: Document) -> dict[str, Any]:
    """Return the filter that matches a document as long as its present claim holds it."""
    return {"_id": document["_id"], "token": document["token"]}


def _error(now: datetime, reason: str) -> dict[str, object]:
    """Return the error to store in a message that is noted as bad, given the noted reason."""
    return error_record(InvalidMessage(f"payload: it {reason}"), now)


def _death(document: Document, now: datetime) -> dict[str, Any]:
    """Return the stored facts about the burial of a message that is noted as bad."""
    error = _error(now, document["claim"]["bad"])
    return {"reason": "invalid", "tries": int(document.get("tries", 0)), "error": error}
