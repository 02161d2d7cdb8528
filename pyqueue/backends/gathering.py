"""Fan-in: a message that enters its queue once all messages of a gather have ended.

The *record* of a gather is that message. Until then it is hidden, as one document::

    _id      its final id
    q, when  ``GATHERS``, and when a process that ticks schedules looks at it next
    then     where it goes: {to, delay, at, key, priority, group}
    sealed   present once only holders of messages of the gather can add messages to it
    pause    how many seconds pass from the next look to the look after it

The messages of the gather have ``gather: {id, dead}``. A message that leaves it has ``last_gather``
instead, or is gone. A move, a retry, a redrive and a wait in a dead-letter queue keep ``gather``,
and so does a source until its copies are published. So once a sealed gather has no message left, it
never gets one again, because only a holder of its messages could add one. One update at majority
then lets the record enter its queue, so it enters once, even if several processes look.

A *look* checks whether a message is left. It reads at majority, so no fail-over can bring back a
message that it did not find. It first checks that the record is sealed; otherwise it would miss
messages that are pushed after its read and before the seal.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from pyqueue import arguments
from pyqueue.backends import kind as kinds
from pyqueue.backends import namespace
from pyqueue.backends.applying import update_with_key
from pyqueue.backends.hidden import GATHERS
from pyqueue.backends.kind import require_target
from pyqueue.backends.namespace import HOT
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.pushing import Content, new_document
from pyqueue.backends.recovering import ABANDONED, SCHEDULES
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.transitions import unset
from pyqueue.errors import ConfigurationError, QueueError, Unavailable
from pyqueue.gathers import Look
from pyqueue.hooks import Tell
from pyqueue.messages import Id
from pyqueue.payloads import encode
from pyqueue.requests import (
    Count,
    Delete,
    Document,
    Filter,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
)

log = logging.getLogger("pyqueue")

#: The index of the messages of gathers.
GATHERED: Final = "gathers"
#: The first and the longest pause between two looks by processes that tick schedules, in seconds.
_FIRST_PAUSE_S: Final = 10.0
_MAX_PAUSE_S: Final = 300.0


class Route(NamedTuple):
    """Where the message of a gather goes, and when it can be received there."""

    queue: str
    delay: float | timedelta | None = None
    at: datetime | None = None

    def stored(self, content: Content) -> Document:
        """Return the stored form of the route, with the values that a message gets only there."""
        given = {
            "to": self.queue,
            "delay": None if self.delay is None else arguments.duration("delay", self.delay),
            "at": self.at,
            "key": content.key,
            "priority": content.priority,
            "group": content.group,
        }
        return {name: value for name, value in given.items() if value is not None}


def _record(content: Content, route: Route, now: datetime) -> Document:
    hidden = content._replace(key=None, priority=None, group=None)
    document = new_document(GATHERS, kinds.lookup(GUESSED_KIND), now, now, hidden)
    return {**document, "then": route.stored(content)}


def _sealing(now: datetime) -> Document:
    """Return the fields that mark a record as sealed."""
    first = now + timedelta(seconds=_FIRST_PAUSE_S)
    return {"sealed": now, "when": first, "pause": 2 * _FIRST_PAUSE_S}


def sealed_record(content: Content, route: Route, now: datetime) -> Document:
    """Return the record of a gather whose messages are published before it."""
    return {**_record(content, route, now), **_sealing(now)}


# ---- by the process that pushes the messages


def begin(content: Content, route: Route) -> Plan[None]:
    """Store the record of a gather, before its first message is pushed.

    Raises:
        ConfigurationError: The queue of its message is a stream, or does not offer an option; or
            the index is missing, and the database user may not create it.
    """
    target = yield from namespace.target(route.queue, [content.priority])
    require_target(target.kind, target.queue, content.priority, content.group)
    yield from prepare(content.id)
    now = yield from ServerTime()
    record = {**_record(content, route, now), "when": now + ABANDONED}
    for failure in (yield from Insert([encode(record)], majority=True)):
        raise failure.error


def prepare(id: Id | None) -> Plan[None]:
    """Make sure that the index for gathers exists. If it is missing, the driver creates it.

    Raises:
        ConfigurationError: The index is missing, and the database user may not create it.
    """
    yield from Find({"gather.id": id}, {"_id": 1}, limit=1, hint=GATHERED)


def seal(id: Id) -> Plan[None]:
    """Let the message of a gather enter its queue once all messages of the gather have ended.

    Raises:
        Unavailable: The outcome is unknown, or the record is gone.
    """
    now = yield from ServerTime()
    request = Update({"_id": id, "q": GATHERS}, {"$set": _sealing(now)}, majority=True)
    try:
        sealed = bool((yield from request).matched)
    except Unavailable:
        # If this finds no record, the first try has sealed it, and it has entered its queue.
        yield from request
        sealed = True
    if not sealed:
        text = f"message {id} was deleted, because its gather was not sealed within a day"
        raise Unavailable(text, ids=[id])
    yield from Signal(SCHEDULES, now + timedelta(seconds=_FIRST_PAUSE_S))
    yield from Look(id)


def give_up(id: Id) -> Plan[None]:
    """Delete the record of a gather that was not sealed. Its messages stay."""
    yield from Delete(_open(id), w1=True)


def _open(id: object) -> Filter:
    return {"_id": id, "q": GATHERS, "sealed": {"$exists": False}}


# ---- looks


@dataclass(slots=True)
class Known:
    """What a process knows about a gather from earlier looks."""

    #: The record, once it is sealed. It never changes after that.
    record: Document | None = None
    #: The id of a message of the gather that the last look found.
    message: object = None


def look(id: Id, known: Known) -> Plan[bool]:
    """Look at a gather. If all its messages have ended, let the final message enter its queue.

    Args:
        id: The id of the record.
        known: What this process knows about the gather. This call updates it.

    Returns:
        Whether the record is no longer there, so that no process need look again.

    Raises:
        QueueError: The server did not answer, or the message cannot enter its queue.
    """
    if known.message is not None:
        match = {"_id": known.message, "gather.id": id}
        if (yield from Find(match, {"_id": 1}, limit=1, majority=True)):
            return False
    if known.record is None:
        found = yield from Find({"_id": id, "q": GATHERS}, {"payload": 0}, limit=1, majority=True)
        if not found:
            return True
        if "sealed" not in found[0]:
            return False
        known.record = found[0]
    # The youngest message is found at once. The index still has entries of the oldest ones, which
    # have ended.
    left = yield from Find(
        {"gather.id": id},
        {"_id": 1},
        sort=[("_id", -1)],
        limit=1,
        hint=GATHERED,
        majority=True,
    )
    if left:
        known.message = left[0]["_id"]
        return False
    yield from _enter(known.record)
    return True


def _enter(record: Document) -> Plan[None]:
    """Let the message of a gather enter its queue, unless another process was faster."""
    id, then = record["_id"], record.get("then")
    if not isinstance(then, dict) or not isinstance(then.get("to"), str):
        raise ConfigurationError(f"gather {id}: its record has no valid field 'then'")
    priority, group = then.get("priority"), then.get("group")
    target = yield from namespace.target(arguments.queue_name(then["to"]), [priority])
    when = arguments.starting((yield from ServerTime()), then.get("delay"), then.get("at"))
    put = target.kind.entering(target.queue, when, priority, group)
    update = {"$set": put, "$unset": unset("then", "sealed", "pause")}
    match = {"_id": id, "q": GATHERS, "sealed": {"$exists": True}}
    if (yield from update_with_key(match, update, then.get("key"), majority=True)):
        yield from Signal(target.queue, when)
        yield from Tell("pushed", target.queue, [id])


# ---- by processes that tick schedules


def look_when_due(record: Document) -> Plan[bool]:
    """Look at a gather if its time has come. Return whether its record is gone.

    Of several processes, only one looks, because each first tries to set the time of the next look.
    A record that was not sealed in time is deleted.
    """
    id, when, now = record["_id"], record["when"], (yield from ServerTime())
    # Other programs may store dates that datetime cannot hold.
    if not isinstance(when, datetime) or when > now:
        return False
    as_read = {"_id": id, "q": GATHERS, "when": when}
    if "sealed" not in record:
        deleted = yield from Delete({**_open(id), **as_read}, majority=True)
        if deleted:
            log.warning("gather %s: its process did not seal it for a day, so it was deleted", id)
        return bool(deleted)
    pause_s = record.get("pause")
    if not isinstance(pause_s, float) or not _FIRST_PAUSE_S <= pause_s <= _MAX_PAUSE_S:
        pause_s = _MAX_PAUSE_S  # another program has written it
    following = now + timedelta(seconds=pause_s)
    put = {"when": following, "pause": min(2 * pause_s, _MAX_PAUSE_S)}
    if not (yield from Update(as_read, {"$set": put}, w1=True)).matched:
        return False
    try:
        return (yield from look(id, Known()))
    except QueueError as error:
        log.warning("gather %s: looking again in %g s: %s", id, pause_s, error)
        return False


def look_at_due(most: int) -> Plan[tuple[int, int]]:
    """Look at the gathers whose time has come. Return how many are open, and how many ended.

    Args:
        most: The maximum number of gathers to look at, and of gathers to count.
    """
    now = yield from ServerTime()
    match = {"q": GATHERS, "when": {"$lte": now}}
    ended = 0
    for record in (yield from Find(match, sort=SCAN_ORDER, limit=most, hint=HOT)):
        ended += yield from look_when_due(record)
    return (yield from Count({"q": GATHERS}, HOT, cap=most)), ended
