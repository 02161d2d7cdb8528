"""Packs: make a message of a pack that waits for its time ready now.

Its pack is claimed as a consumer claims it. The message leaves the pack, and the rest goes back.
"""

from __future__ import annotations

from datetime import datetime

from pyqueue.backends import transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.kind import Bucket
from pyqueue.backends.bucket.leaving import Make, leave
from pyqueue.backends.bucket.settling import REST_FIELDS, Group, end_rest
from pyqueue.backends.options import QueueTerms
from pyqueue.backends.requeueing import register
from pyqueue.messages import Id
from pyqueue.requests import Document, Find, FindAndModify, Plan, ServerTime, Signal, Update

#: How long the pack is held, in seconds. If the process dies, the pack waits that long.
_LEASE_S = 30.0


def requeue_packed(terms: QueueTerms, id: Id) -> Plan[bool]:
    """Make a message of a pack ready now. Return whether it is ready."""
    named = packs.place_of(id)
    if named is None:
        return False
    # Documents of other programs may only resemble packs.
    match = {**packs.packs_of(named.pack), "q": terms.queue, "done": {"$type": "array"}}
    fields = {**packs.INDEX_FIELDS, **REST_FIELDS, "when": 1, "done": 1}
    for document in (yield from Find(match, fields)):
        index = packs.index_in(document, named)
        if index is not None and packs.alive_of(document) >> index & 1:
            yield from end_rest(terms.queue, document)  # a process keeps it, but holds no message
            return (yield from _take_out(terms, document["_id"], index))
    return False


def _take_out(terms: QueueTerms, pack: Id, index: int) -> Plan[bool]:
    """Let one message leave a pack, and become ready. Return False if the pack is held."""
    queue, kind = terms.queue, terms.kind
    now = yield from ServerTime()
    free = transitions.not_held_filter(queue, now) | {"_id": pack}
    found = yield from Find(free, {"when": 1}, limit=1)
    if not found or found[0]["when"] <= now:
        return bool(found)
    update = kind.claiming(transitions.claiming(now, _LEASE_S, terms.owner(), count=False))
    waiting = {**free, "when": {"$gt": now}, **packs.having(1 << index)}
    document = yield from FindAndModify(waiting, update)
    if document is None:
        return False
    token = document["token"]
    group = Group(queue, kind, pack, token, 1 << index, hold=None)
    lost, unknown = yield from leave(group, [(index, _ready(terms, document))])
    yield from _give_back(queue, document)
    return not lost and not unknown


def _ready(terms: QueueTerms, pack: Document) -> Make:
    """Return the function that makes the document of the message."""
    more = {name: pack[name] for name in ("tries", "deliveries", "error") if name in pack}

    def ready(stored: Document, now: datetime) -> Document:
        return stored | terms.kind.entering(terms.queue, now) | more

    return ready


def _give_back(queue: str, document: Document) -> Plan[None]:
    """End the claim of a pack, so that it does not count as lapsed."""
    put = {"when": document["due"], "orderly": document["c"], "level": packs.level_of(document)}
    update = {"$set": put, "$unset": transitions.unset(*transitions.HELD_FIELDS)}
    yield from Update({"_id": document["_id"], "token": document["token"]}, update)
    yield from Signal(queue, document["due"])


register(Bucket.name, requeue_packed)
