"""Packs: read the messages of a queue, and manage messages that are not held."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from pyqueue import arguments
from pyqueue.backends import managing, namespace, reading, transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.kind import PACKS
from pyqueue.backends.bucket.receiving import is_valid_pack
from pyqueue.backends.bucket.settling import REST, REST_FIELDS, end_rest
from pyqueue.backends.handover import finish
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.invalid import decode
from pyqueue.backends.kind import Kind
from pyqueue.clock import BAND
from pyqueue.errors import Unavailable
from pyqueue.messages import Counts, Id, Message
from pyqueue.payloads import Codec
from pyqueue.requests import (
    AtOneInstant,
    Command,
    Document,
    Filter,
    Find,
    FindAndModify,
    Plan,
    ServerTime,
    Update,
)


@dataclass(slots=True)
class CountPacked(Command[int]):
    """Count the messages in the matching packs, minus the number of these packs."""

    filter: Filter
    cap: int | None = None
    #: The index to use. The default index covers the query.
    hint: str = PACKS
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send an aggregate that counts the packs and adds up their messages."""
        limit = [] if self.cap is None else [{"$limit": self.cap}]
        match = {"$match": {**self.filter, "n": {"$exists": True}}}
        added = {"$group": {"_id": None, "n": {"$sum": "$n"}, "packs": {"$sum": 1}}}
        return collection.aggregate([match, *limit, added], hint=self.hint, session=self.session)

    def read(self, raw: Any) -> int:
        """Return the number of messages less the number of packs."""
        return sum(each["n"] - each["packs"] for each in raw)


def counts(queue: str, cap: int | None) -> Plan[Counts]:
    """Count the messages in each state, up to ``cap`` for each, or all if ``cap`` is None."""
    if cap is not None:
        arguments.count("cap", cap)
    now = yield from ServerTime()
    return (yield from AtOneInstant(partial(_count, queue, cap, now)))


def _count(queue: str, cap: int | None, now: datetime, session: object) -> Plan[Counts]:
    """Count the documents in each state, and then add the messages in packs."""
    documents = yield from reading.count(queue, cap, now, session)
    return (yield from in_packs(queue, documents, cap, now, session))


def in_packs(
    queue: str, documents: Counts, cap: int | None, now: datetime, session: object = None
) -> Plan[Counts]:
    """Add the messages in packs to the counts of documents.

    Args:
        queue: The name of the queue.
        documents: The counts of documents, in which each pack counts as one.
        cap: The maximum number of documents to count in each state, or None to count all.
        now: The current instant.
        session: The session in which ``documents`` were counted, or None.
    """
    # BAND is the smallest ``when`` of finished messages.
    later: Filter = {"q": queue, "when": {"$gt": now, "$lt": BAND}}
    ready: Filter = {"q": queue, "when": {"$lte": now}}
    waiting = yield from CountPacked(later, cap, session=session)
    reserved = 0
    if waiting:
        # Match any token: the index finds strings, but not missing fields.
        token = {"token": {"$gt": ""}}
        reserved = yield from CountPacked({**later, **token}, cap, session=session)
    more = Counts(
        ready=documents.ready + (yield from CountPacked(ready, cap, session=session)),
        scheduled=documents.scheduled + waiting - reserved,
        reserved=documents.reserved + reserved,
        history=documents.history,
    )
    if cap is None:
        return more
    # A capped count has no history.
    return Counts(*(min(cap, each) for each in (more.ready, more.scheduled, more.reserved)))


# ---- reading


def find_packed(match: Filter, place: packs.Place) -> Plan[list[Document]]:
    """Return a list with the packed message at ``place``, or [] if no matching pack contains it.

    ``match``: a filter that the pack must match, too.
    """
    for pack in (yield from Find({**packs.packs_of(place.pack), **match})):
        index = packs.index_in(pack, place) if is_valid_pack(pack) else None
        if index is not None and packs.alive_of(pack) >> index & 1:
            return [packs.document_in(pack, index)]
    return []


def get(queue: str, codec: Codec[Any], id: Id) -> Plan[Message[Any] | None]:
    """Return the message with this id, in any state, or None if the queue does not have it."""
    message = yield from reading.get(queue, codec, id)
    named = packs.place_of(id)
    if message is not None or named is None:
        return message
    now = yield from ServerTime()
    for document in (yield from find_packed({"q": queue}, named)):
        return decode(codec, document, now)
    return None


def peek(queue: str, kind: Kind, codec: Codec[Any], limit: int) -> Plan[list[Message[Any]]]:
    """Return up to ``limit`` messages that would be received next, in this order."""
    arguments.count("limit", limit)
    now = yield from ServerTime()
    match = kind.claimable(queue, now, None)
    messages: list[Message[Any]] = []
    skip, size = 0, 1  # of the page; a single pack may have enough messages
    while len(messages) < limit:
        found = yield from Find(match, sort=kind.order, limit=size, skip=skip, hint=kind.index)
        for document in found:
            if not is_valid_pack(document):
                messages.append(decode(codec, document, now))
                continue
            for place in packs.places(packs.alive_of(document)):
                if len(messages) == limit:
                    break
                messages.append(decode(codec, packs.document_in(document, place), now))
        if len(found) < size:
            break
        skip, size = skip + size, min(2 * size, limit)
    return messages[:limit]


# ---- managing


def remove(queue: str, kind: Kind, id: Id) -> Plan[bool]:
    """Remove a message that is not held. Return whether a message was removed."""
    arguments.spellings(id)  # refuses an invalid id
    if (yield from managing.remove(queue, kind, None, id)):
        return True
    named = packs.place_of(id)
    if named is None:
        return False
    now = yield from ServerTime()
    free = transitions.not_held_filter(queue, now)
    match = {**packs.packs_of(named.pack), "q": queue}
    for document in (yield from Find(match, {**packs.INDEX_FIELDS, **REST_FIELDS})):
        index = packs.index_in(document, named)
        if index is not None:
            yield from end_rest(queue, document)  # if a process keeps it without holding a message
            bits = 1 << index
            match = {**free, "_id": document["_id"], **packs.having(bits)}
            if (yield from Update(match, packs.setting(bits))).matched:
                return True
    return False


def purge(queue: str, kind: Kind) -> Plan[int]:
    """Delete the messages that are ready or scheduled. Return how many were deleted.

    Raises:
        Unavailable: The server did not answer. The error text says how many messages were deleted.
    """
    yield from namespace.check_kind(queue, kind)
    now = yield from ServerTime()
    free = transitions.not_held_filter(queue, now)
    free_packs = {**free, "n": {"$exists": True}, HANDED: []}
    purged = 0
    try:
        yield from publish_all_handed(queue)
        yield from end_rests(queue, now)
        while True:
            # Without an update, this deletes the pack and returns it, with its number of messages.
            gone = yield from FindAndModify(free_packs, None, sort=(("when", 1),), hint=PACKS)
            if gone is None:
                break
            purged += gone["n"]
    except Unavailable as error:
        raise Unavailable(
            f"{error}; {purged} messages were deleted; to delete the rest, call purge() again"
        ) from error
    return purged + (yield from managing.purge(queue, kind, singles=True))


def end_rests(queue: str, now: datetime) -> Plan[None]:
    """Free the packs of a queue that processes keep without holding any of their messages."""
    soon = {"$gt": now, "$lte": now + 2 * REST}  # a process may estimate the time differently
    match = {"q": queue, "when": soon, "n": {"$exists": True}}
    for document in (yield from Find(match, dict(REST_FIELDS), hint=PACKS)):
        yield from end_rest(queue, document)


def publish_all_handed(queue: str) -> Plan[None]:
    """Publish messages that left their packs but are still hidden. Then packs can be deleted."""
    yield from publish_handed({"q": queue, "n": {"$exists": True}}, PACKS)


def publish_handed(match: Filter, hint: str) -> Plan[None]:
    """Publish messages that left matching packs but are still hidden. ``hint``: the index."""
    handed = {**match, f"{HANDED}.0": {"$exists": True}}
    for document in (yield from Find(handed, {HANDED: 1}, hint=hint)):
        yield from finish(document)
