"""Manage: operations on a queue that need no reservation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.applying import MAX_BATCH, update_with_key
from pyqueue.backends.ending import Ending, end_free
from pyqueue.backends.kind import Kind, ScanStart, UpdateFields, require
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import Options
from pyqueue.backends.pages import page_end
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.clock import BAND, BARE_BAND
from pyqueue.documents import group_of, hashable_id, invalid_fields, priority_of
from pyqueue.errors import InvalidName, Unavailable
from pyqueue.messages import Id
from pyqueue.requests import (
    Delete,
    Document,
    Filter,
    Find,
    FindAndModify,
    Plan,
    ServerTime,
    Signal,
    Update,
)

REDRIVE_FIELDS: Final = {
    **dict.fromkeys(("when", "dead", "key", "last_key", "token", "trail", "priority"), 1),
    **dict.fromkeys(("group", "lock", "last_group"), 1),
}
#: The longest and the shortest time limit of the deletes of a purge. Each delete that a transaction
#: keeps from making progress halves the limit of the next.
_PURGE_TIMEOUT_S: Final = 1.0
_LEAST_PURGE_TIMEOUT_S: Final = 0.05


def redrive(queue: str, kind: Kind, limit: int | None) -> Plan[int]:
    """Send dead messages back to the queues that they came from. Return how many were sent.

    The queue is read in pages, in scan order. Messages without a valid origin are skipped.

    Raises:
        Unavailable: The server did not answer. The error text has the number of moved messages.
    """
    if limit is not None:
        arguments.count("limit", limit)
    require(kind, queue, "dead_letter")
    yield from namespace.check_kind(queue, kind)
    moved = 0
    now = yield from ServerTime()
    start: ScanStart | None = None
    try:
        while True:
            match = {**transitions.live(queue, start), "dead": {"$exists": True}}
            page = yield from Find(
                match, REDRIVE_FIELDS, sort=SCAN_ORDER, limit=MAX_BATCH, hint=HOT
            )
            for document in page:
                if moved == limit:
                    return moved
                if not transitions.is_held(document, now):
                    moved += yield from redrive_one(queue, kind, document, now)
            end = page_end(page)
            if len(page) < MAX_BATCH or end is None:
                return moved
            start = end
    except Unavailable as error:
        raise Unavailable(
            f"{error}; {moved} messages were sent back; call redrive() again for the rest"
        ) from error


class WayHome(NamedTuple):
    """How a dead message goes back to the queue that it came from."""

    #: The queue that the message came from.
    home: str
    update: UpdateFields
    #: The key that the message gets back if the key is free in that queue.
    key: str | None


def way_home(
    queue: str, kind: Kind, document: Document, now: datetime, at: datetime | None = None
) -> Plan[WayHome | None]:
    """Return how a dead message goes back, or None if the message names no valid origin.

    Args:
        queue: The queue that the message is in now.
        kind: The kind of that queue.
        document: The dead message.
        now: The current instant.
        at: When the message becomes ready again, or None for now.

    Raises:
        TargetRefused: The message came from a stream.
    """
    if invalid_fields(document):
        return None  # a foreign document does not say where it came from
    try:
        name = arguments.queue_name(document["dead"]["from"])
    except InvalidName:
        return None
    priority = priority_of(document)
    home = yield from namespace.target(name, [priority])
    put = home.kind.entering(home.queue, at or now, priority, group_of(document))
    update = transitions.redriving(kind, queue, put, now)
    return WayHome(home.queue, update, document.get("key") or document.get("last_key"))


def redrive_one(queue: str, kind: Kind, document: Document, now: datetime) -> Plan[bool]:
    """Send one dead message back. Return False if it stays."""
    way = yield from way_home(queue, kind, document, now)
    if way is None:
        return False
    match = {
        "_id": document["_id"],
        "q": queue,
        "token": {"$eq": document.get("token")},
        "dead": {"$exists": True},
        "processed": {"$exists": False},  # the end of a dead letter may have no token
    }
    done = yield from update_with_key(match, way.update, way.key)
    yield from Signal(way.home, now)
    yield from kind.ended(queue, [document])
    return done


def as_read(queue: str, document: Document, now: datetime) -> dict[str, object]:
    """Return the filter that matches a message as it was read, unless a consumer holds it now.

    The filter does not require the same ``when``, because consumers often change it in queues with
    groups or limits.
    """
    # A lapsed lease may have been extended. A finished message keeps its token.
    free = {"$lte": now} if "token" in document else {"$lt": BAND}
    same = {name: {"$eq": document.get(name)} for name in ("due", "token")}
    return {"_id": document["_id"], "q": queue, "when": free, **same}


def remove(queue: str, kind: Kind, history_s: float | None, id: Id) -> Plan[bool]:
    """Remove a message that is not held. Return whether a message was removed."""
    spellings = arguments.spellings(id)
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    for each in spellings:
        names = ("key", "dead", "group", "lock", "limited", "keep", "gather", "token", "slot")
        fields = dict.fromkeys(names, 1)
        # The id of a pack is not the id of a message.
        match: Filter = {"_id": each, "q": queue, "n": {"$exists": False}}
        found = yield from Find(match, fields, limit=1)
        if found:
            break
    else:
        return False
    return (yield from end_free(queue, kind, found[0], Ending("removed", history_s), now))


def reprioritize(queue: str, kind: Kind, id: Id, priority: int) -> Plan[bool]:
    """Give a live message another priority. Return whether there was such a message.

    A held message keeps its lease, and has the new priority when it comes back.
    """
    level = arguments.priority(priority)
    require(kind, queue, "priority")
    spellings = arguments.spellings(id)
    yield from namespace.check_kind(queue, kind)
    for each in spellings:
        live = {"_id": each, "q": queue, "when": {"$lt": BAND}}
        if not (yield from Find(live, {"_id": 1}, limit=1)):
            continue
        yield from namespace.ensure(queue, kind, None, [level])
        changed = yield from FindAndModify(live, {"$set": {"priority": level}})
        if changed is not None:  # otherwise it has left the queue since
            yield from Signal(queue, changed["when"])
            return True
    return False


def purge(queue: str, kind: Kind, *, singles: bool = False) -> Plan[int]:
    """Delete the messages that are ready or scheduled. Return how many were deleted.

    ``singles``: whether to leave out packs, which store several messages; see ``bucket.managing``.

    The queue is read in pages. Messages that an open transaction holds are tried again at the end:
    first one by one, then in one command, which may take up to the time limit of the client.

    Raises:
        Unavailable: The server did not answer, or messages are still held by a transaction. The
            error text has the number of deleted messages.
    """
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    purged = 0
    start: ScanStart | None = None
    locked: list[object] = []
    try:
        while True:
            page = yield from Find(
                {
                    **transitions.live(queue, start),
                    **({"n": {"$exists": False}} if singles else {}),
                },
                {"_id": 1, "when": 1},
                sort=SCAN_ORDER,
                limit=MAX_BATCH,
                hint=HOT,
            )
            ids = [document["_id"] for document in page]
            deleted, passed = yield from _delete_each(queue, ids, now, MAX_BATCH)
            purged += deleted
            locked += passed
            end = page_end(page)
            if len(page) < MAX_BATCH or end is None:
                break
            start = end
        if locked:
            deleted, locked = yield from _delete_each(queue, locked, now, 1)
            purged += deleted
        if locked:
            purged += yield from Delete(_deletable(queue, locked, now), many=True, hint="_id_")
    except Unavailable as error:
        raise Unavailable(
            f"{error}; {purged} messages were deleted; call purge() again for the rest"
        ) from error
    return purged


def _deletable(queue: str, ids: Sequence[object], now: datetime) -> Filter:
    """Return the filter that matches the messages with these ids that no consumer holds."""
    return transitions.not_held_filter(queue, now) | {"_id": {"$in": ids}}


def _delete_each(
    queue: str, ids: Sequence[object], now: datetime, most: int
) -> Plan[tuple[int, list[object]]]:
    """Delete the messages with these ids, unless they are held under a lease.

    The server deletes in order and waits at a message that a transaction holds. A read does not
    wait, and shows how far the delete got. If the delete made no progress, this skips the first
    message, and doubles the number of skipped messages each time, up to ``most``.

    Returns:
        How many messages were deleted, and the ids of the messages that were skipped.
    """
    rest = sorted(ids, key=lambda id: (isinstance(id, ObjectId), str(id)))
    passed: list[object] = []
    deleted, skip, limit_s = 0, 1, _PURGE_TIMEOUT_S
    while True:
        # A delete of nothing waits until all earlier deletes are durable.
        time_s = limit_s if rest else None
        try:
            match = _deletable(queue, rest, now)
            deleted += yield from Delete(match, many=True, hint="_id_", max_time_s=time_s)
            return deleted, passed
        except Unavailable:
            if not rest:
                raise
            fields = {"token": 1, "when": 1}
            stored = yield from Find({"_id": {"$in": rest}, "q": queue}, fields)
        gone = len(rest) - len(stored)
        deleted += gone
        left = {hashable_id(each["_id"]) for each in stored if not transitions.is_held(each, now)}
        rest = [id for id in rest if hashable_id(id) in left]
        if gone:
            skip, limit_s = 1, _PURGE_TIMEOUT_S
        else:
            passed += rest[:skip]
            rest, skip = rest[skip:], min(2 * skip, most)
            limit_s = max(limit_s / 2, _LEAST_PURGE_TIMEOUT_S)


def replay(queue: str, kind: Kind, ids: Sequence[Id]) -> Plan[int]:
    """Make finished messages ready again. Return how many became ready."""
    require(kind, queue, "history")
    spellings = [arguments.spellings(id) for id in ids]
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    finished = {"q": queue, "processed": {"$exists": True}, "when": {"$lt": BARE_BAND}}
    wanted = [each for some in spellings for each in some]
    fields = {"last_key": 1, "priority": 1, "last_group": 1}
    found = yield from Find({"_id": {"$in": wanted}, **finished}, fields)
    if found:
        yield from namespace.ensure(queue, kind, None, {priority_of(each) for each in found})
    by_id = {document["_id"]: document for document in found}
    named = (next((each for each in some if each in by_id), None) for some in spellings)
    done = 0
    for document in [by_id[each] for each in dict.fromkeys(named) if each is not None]:
        match = {"_id": document["_id"], **finished}
        put = kind.entering(queue, now, priority_of(document), group_of(document))
        update = transitions.replaying(kind, queue, put, now)
        done += yield from update_with_key(match, update, document.get("last_key"))
    if done:
        yield from Signal(queue, now)
    return done


def paused(queue: str) -> Plan[bool]:
    """Return whether a queue is paused. A queue without a record is not."""
    return bool((yield from namespace.flags(queue)).get("paused"))


def pause(queue: str, kind: Kind, options: Options, value: bool) -> Plan[None]:
    """Pause the consumers of every process, or resume them."""
    yield from namespace.ensure(queue, kind, options)
    yield from set_paused(queue, kind.name, value)
    yield from Signal(queue, None)


def notify(queue: str) -> Plan[None]:
    """Wake waiting consumers. Their next scan also finds messages that earlier scans missed."""
    yield from Signal(queue, None)


def set_paused(queue: str, kind: str, value: bool) -> Plan[None]:
    """Pause or resume a queue. If its record is missing or marked as deleted, restore it."""
    now = yield from ServerTime()
    record = namespace.new_record(queue, now, kind, {})
    put = {"paused": value, "q": record.pop("q")}  # a record that was deleted has another ``q``
    change = {"$set": put, "$unset": namespace.DELETION_MARKS, "$setOnInsert": record}
    yield from Update({"_id": transitions.record_id(queue)}, change, upsert=True)


def ping() -> Plan[None]:
    """Check that the server answers. The driver also creates the indexes that are missing."""
    yield from ServerTime()
