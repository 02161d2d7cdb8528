"""Delete the queues that no process has used for the time that their ``auto_delete`` sets.

Each client that receives checks them about once a minute, with its pass over all queues, and so
does ``pyqueue doctor``. One read of an index finds the queues whose time may be over; see ``uses``.

A queue is deleted as ``delete_queue`` deletes it without ``force``: never while it has a message
that can be received, and a message that is pushed at the same time stays. Right before its record
is deleted, the pass makes sure that no use was noted since it read the last one. A process that
uses the queue after that makes the record live again, and notes the use in a new document.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue.backends import transitions
from pyqueue.backends.all_queues import delete_queue
from pyqueue.backends.kind import known
from pyqueue.backends.namespace import HOT, STREAM
from pyqueue.backends.recovering import PASSES
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.uses import USES, queue_of, seconds_of, unused_at
from pyqueue.errors import ConfigurationError, InvalidName
from pyqueue.requests import Delete, Document, Filter, Find, Plan, ServerTime, Update

log = logging.getLogger("pyqueue")

#: How many queues one read returns, and how many reads a pass makes at most.
PAGE_SIZE: Final = 100
_MAX_PAGES: Final = 10
#: The shortest and the longest time before a queue is checked again, in seconds. A queue that is
#: unused, but has messages, is checked again after its ``auto_delete``, within these bounds.
_LEAST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 600.0


def delete_unused() -> Plan[list[str]]:
    """Delete the queues that were unused for their ``auto_delete`` and have no live message.

    Returns:
        The names of the deleted queues.
    """
    deleted: list[str] = []
    for _ in range(_MAX_PAGES):
        now = yield from ServerTime()
        due = {"q": USES, "when": {"$lte": now}}
        page = yield from Find(due, sort=SCAN_ORDER, limit=PAGE_SIZE, hint=HOT)
        for stored in page:
            gone = yield from _delete_if_unused(stored, now)
            deleted += [queue_of(stored)] if gone else []
        if len(page) < PAGE_SIZE:
            break
    return deleted


def listed(count: int) -> Plan[list[str]]:
    """Return the names of up to ``count`` queues that are deleted when unused, soonest first."""
    page = yield from Find({"q": USES}, {"_id": 1}, sort=SCAN_ORDER, limit=count, hint=HOT)
    return [queue_of(each) for each in page]


def _delete_if_unused(stored: Document, now: datetime) -> Plan[bool]:
    """Delete a queue if its time is over and it has no message. Return whether it was deleted.

    Args:
        stored: The document that notes its use, as read.
        now: The current instant.
    """
    queue, unused = queue_of(stored), (yield from _take(stored, now))
    if unused is None:
        return False
    if (yield from Find(transitions.live(queue, None), {"_id": 1}, limit=1, hint=HOT)):
        return False
    try:
        yield from delete_queue(queue, False, _is_there(unused))
    except (ConfigurationError, InvalidName) as error:  # for example, a message has come
        log.info("queue %r is unused, but was not deleted: %s", queue, error)
        return False
    return bool((yield from Delete(unused)))


def _take(stored: Document, now: datetime) -> Plan[Filter | None]:
    """Set when an unused queue is checked again, so that no other process checks it now.

    Returns:
        The filter that matches the document until another use is noted. None if the queue was used,
        or is never deleted, or if another process was faster.
    """
    fields = {"kind": 1, "shape": 1, "deleted": 1}
    record_id = transitions.record_id(queue_of(stored))
    found = yield from Find({"_id": record_id}, fields, limit=1)
    record, as_read = (found[0] if found else {}), _as_read(stored)
    seconds_s = _seconds_of(record)
    if seconds_s is None:
        yield from Delete(as_read)
        return None
    used = stored.get("used")
    until = unused_at(used if isinstance(used, datetime) else stored["when"], seconds_s)
    if until > now:
        yield from Update(as_read, {"$set": {"when": until}})
        return None
    pause_s = min(max(seconds_s, _LEAST_PAUSE_S), _MAX_PAUSE_S)
    again = now + timedelta(milliseconds=round(pause_s * 1000))
    taken = yield from Update(as_read, {"$set": {"when": again}})
    if not taken.matched or (record and record.get("kind") not in known()):
        return None  # a newer release has made a queue of another kind
    return {**as_read, "when": again}


def _as_read(stored: Document) -> Filter:
    """Return the filter that matches the note of a queue's last use until another is written."""
    used = {"$eq": stored.get("used")}
    return {"_id": stored["_id"], "q": USES, "when": stored["when"], "used": used}


def _seconds_of(record: Mapping[str, Any]) -> float | None:
    """Return after how many unused seconds a queue is deleted, or None if it is not deleted.

    ``record``: the queue's record, or {} if there is none. If it is missing or marked as deleted, a
    process may have died during the deletion, which is then completed now.
    """
    if record.get("kind") == STREAM:
        return None
    seconds_s = seconds_of(record.get("shape"))
    ended = not record or "deleted" in record
    return 0.0 if seconds_s is None and ended else seconds_s


def _is_there(match: Filter) -> Plan[bool]:
    """Return whether there is a document that matches."""
    return bool((yield from Find(match, {"_id": 1}, limit=1)))


PASSES[USES] = delete_unused
