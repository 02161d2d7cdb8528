"""Read the contents of a queue. Nothing here changes a message or creates a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, cast

from pyqueue import arguments
from pyqueue.backends.invalid import decode
from pyqueue.backends.kind import Kind, ScanStart, require
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import Options
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.transitions import messages_only, record_id
from pyqueue.clock import BAND, BARE_BAND
from pyqueue.messages import KEPT, NEVER, Counts, Finished, Id, Message
from pyqueue.payloads import Codec
from pyqueue.requests import AtOneInstant, Count, Document, Filter, Find, Plan, ServerTime


def options_of(queue: str) -> Plan[Mapping[str, Any]]:
    """Return the options with which programs use a queue, or {} if no program has used it."""
    found = yield from Find({"_id": record_id(queue)}, {"options": 1}, limit=1)
    options = found[0].get("options") if found else None
    if not isinstance(options, Mapping):
        return {}
    return {**Options(dead_letter=f"{queue}.dead").listed(), **options}


def dead_letter_of(queue: str) -> Plan[str]:
    """Return the name of a queue's dead-letter queue, as programs have configured it."""
    options = yield from options_of(queue)
    return arguments.dead_letter(queue, options.get("dead_letter") or None)


def get(queue: str, codec: Codec[Any], id: Id) -> Plan[Message[Any] | None]:
    """Return the message with this id, in any state, or None if the queue has none."""
    spellings = arguments.spellings(id)
    now = yield from ServerTime()
    for each in spellings:
        found = yield from Find({"_id": each, "q": queue, "n": {"$exists": False}}, limit=1)
        if found:
            return decode(codec, found[0], now)
    return None


def peek(queue: str, kind: Kind, codec: Codec[Any], limit: int) -> Plan[list[Message[Any]]]:
    """Return the messages that would be received next."""
    arguments.count("limit", limit)
    now = yield from ServerTime()
    found: list[Document] = []
    for each in (yield from kind.next_ones(queue, now)):
        if len(found) < limit:
            found += yield from replace(each, limit=limit - len(found))
    return [decode(codec, document, now) for document in found]


def counts(queue: str, cap: int | None) -> Plan[Counts]:
    """Count the messages in each state, up to ``cap`` for each, or all if ``cap`` is None."""
    if cap is not None:
        arguments.count("cap", cap)
    now = yield from ServerTime()
    return (yield from AtOneInstant(partial(count, queue, cap, now)))


def states(queue: str, now: datetime) -> dict[str, Filter]:
    """Return the filters of the states in ``Counts``, keyed by state."""
    messages = {"q": queue, **messages_only(queue)}
    later = {**messages, "when": {"$gt": now, "$lt": BAND}}
    return {
        "ready": {**messages, "when": {"$lte": now}},
        "scheduled": {**later, "token": {"$exists": False}},
        "history": {**messages, "when": {"$gte": BAND, "$lt": BARE_BAND}},
        "reserved": {**later, "token": {"$exists": True}},
    }


def count(queue: str, cap: int | None, now: datetime, session: object) -> Plan[Counts]:
    """Count the documents of a queue by state."""
    numbers = {}
    for state, match in states(queue, now).items():
        numbers[state] = yield from Count(match, HOT, cap, session=session)
    return Counts(**numbers)


def next_when(queue: str, start: ScanStart | None = None) -> Plan[datetime | None]:
    """Return the earliest ``when`` of the live messages; for held messages, their lease's end."""
    found = yield from _head(queue, start)
    when = found[0]["when"] if found else None
    return when if isinstance(when, datetime) else None  # a foreign document may hold an array


def due_in(queue: str) -> Plan[float]:
    """Return the seconds until a message becomes ready. This takes only one command.

    0 means that a message is ready, and infinity that there is no live message.
    """
    now = yield from ServerTime()
    found = yield from _head(queue, None)
    if not found:
        return math.inf
    when = found[0]["when"]
    if isinstance(when, datetime) and when > now:
        return (when - now).total_seconds()
    return 0.0  # the `when` of a foreign document may be an array


def _head(queue: str, start: ScanStart | None) -> Plan[list[Document]]:
    """Return a list with the first live message in scan order, or an empty list."""
    live = {"$lt": BAND} if start is None else {"$gte": start[0], "$lt": BAND}
    match = {"q": queue, "when": live, **messages_only(queue)}
    return (yield from Find(match, {"_id": 1, "when": 1}, sort=SCAN_ORDER, limit=1, hint=HOT))


def history(
    queue: str, kind: Kind, codec: Codec[Any], limit: int, since: datetime | None
) -> Plan[list[Finished[Any]]]:
    """Return the finished messages, newest first."""
    arguments.count("limit", limit)
    require(kind, queue, "history")
    least = BAND
    if since is not None:  # the ``when`` of a finished message is its end plus KEPT
        instant = min(NEVER - KEPT, arguments.instant("since", since))
        least = max(BAND, instant + KEPT)
    now = yield from ServerTime()
    when = {"$gte": least, "$lt": BARE_BAND}
    match = {"q": queue, "when": when, "processed": {"$type": "date"}}
    found = yield from Find(match, sort=(("when", -1), ("_id", -1)), limit=limit, hint=HOT)
    return [cast("Finished[Any]", decode(codec, document, now)) for document in found]
