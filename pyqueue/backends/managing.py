"""Manage: what anyone may do to the messages of a queue that are not held."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.applying import MAX_BATCH, update_with_key
from pyqueue.backends.kind import Kind, require
from pyqueue.documents import invalid_fields
from pyqueue.errors import InvalidName
from pyqueue.messages import Id
from pyqueue.requests import Delete, Document, Find, Plan, ServerTime, Signal, Update

__all__ = ["notify", "pause", "purge", "redrive", "remove", "replay"]

_REDRIVE_FIELDS: Final = {"dead": 1, "key": 1, "last_key": 1, "token": 1, "trail": 1}


def redrive(queue: str, kind: Kind, limit: int | None) -> Plan[int]:
    """Send dead messages back to the queues that they came from. Return how many."""
    if limit is not None:
        arguments.count("limit", limit)
    require(kind, queue, "dead_letter")
    yield from namespace.check_kind(queue, kind)
    moved = 0
    now = yield from ServerTime()
    while limit is None or moved < limit:
        wanted = MAX_BATCH if limit is None else min(MAX_BATCH, limit - moved)
        match = transitions.not_held_filter(queue, now) | {"dead": {"$exists": True}}
        found = yield from Find(
            match, _REDRIVE_FIELDS, sort=kind.order, limit=wanted, hint=kind.index
        )
        batch = 0
        for document in found:
            batch += yield from _redrive_one(queue, kind, document, now)
        moved += batch
        if len(found) < wanted or not batch:
            break
    return moved


def _redrive_one(queue: str, kind: Kind, document: Document, now: datetime) -> Plan[bool]:
    """Send one dead message back. Return False if it stays."""
    if invalid_fields(document):
        return False  # a foreign document does not say where it came from
    try:
        name = arguments.queue_name(document["dead"]["from"])
    except InvalidName:
        return False
    home = yield from namespace.target(name)
    update = transitions.redriving(kind, queue, home.kind.entering(home.queue, now), now)
    match = {
        "_id": document["_id"],
        "q": queue,
        "token": {"$eq": document.get("token")},
        "dead": {"$exists": True},
    }
    key = document.get("key") or document.get("last_key")
    done = yield from update_with_key(match, update, key)
    yield from Signal(home.queue, now)
    return done


def remove(queue: str, kind: Kind, history_s: float | None, id: Id) -> Plan[bool]:
    """Remove a message that is not held. Return whether there was one."""
    arguments.identity(id)
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    match = transitions.not_held_filter(queue, now) | {"_id": id}
    found = yield from Find(match, {"key": 1, "dead": 1}, limit=1)
    if not found:
        return False
    keyed = "key" in found[0] or "dead" in found[0]
    update = kind.finishing(now, "removed", history_s, keyed=keyed)
    if update is None:
        return bool((yield from Delete(match)))
    return bool((yield from Update(match, update)).matched)


def purge(queue: str, kind: Kind) -> Plan[int]:
    """Delete the messages that are ready or scheduled. Return how many."""
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    return (yield from Delete(transitions.not_held_filter(queue, now), many=True))


def replay(queue: str, kind: Kind, ids: Sequence[Id]) -> Plan[int]:
    """Make finished messages ready again. Return how many."""
    require(kind, queue, "history")
    for id in ids:
        arguments.identity(id)
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    update = transitions.replaying(kind, queue, now)
    finished = {"q": queue, "processed": {"$exists": True}}
    found = yield from Find({"_id": {"$in": list(ids)}, **finished}, {"last_key": 1})
    done = 0
    for document in found:
        match = {"_id": document["_id"], **finished}
        done += yield from update_with_key(match, update, document.get("last_key"))
    if done:
        yield from Signal(queue, now)
    return done


def pause(queue: str, kind: Kind, value: bool) -> Plan[None]:
    """Pause the consumers of every process, or resume them."""
    yield from namespace.check_kind(queue, kind)
    yield from namespace.set_paused(queue, kind.name, value)
    yield from Signal(queue, None)


def notify(queue: str) -> Plan[None]:
    """Wake waiting consumers, and have them look for old messages, too."""
    yield from Signal(queue, None)
