"""Packs: make a scheduled message of a pack ready now, by taking it out of its pack."""

from __future__ import annotations

from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.holding import hold, requeue
from pyqueue.backends.bucket.kind import Bucket
from pyqueue.backends.bucket.settling import REST_FIELDS, end_rest
from pyqueue.backends.options import QueueTerms
from pyqueue.backends.requeueing import register
from pyqueue.errors import LeaseLost
from pyqueue.messages import Id
from pyqueue.requests import Document, Find, Plan, ServerTime


def requeue_packed(terms: QueueTerms, id: Id) -> Plan[bool]:
    """Make a message that is in a pack ready at once. Return False if it is missing or held."""
    named = packs.place_of(id)
    if named is None:
        return False
    # Documents of other programs may only resemble packs.
    match = {**packs.packs_of(named.pack), "q": terms.queue, "done": {"$type": "array"}}
    fields = {**packs.INDEX_FIELDS, **REST_FIELDS, "when": 1, "done": 1}
    for document in (yield from Find(match, fields)):
        index = packs.index_in(document, named)
        if index is not None and packs.alive_of(document) >> index & 1:
            return (yield from _requeue(terms, document, index))
    return False


def _requeue(terms: QueueTerms, pack: Document, place: int) -> Plan[bool]:
    """Make one message of a pack ready. Return False if the pack is held."""
    if (yield from end_rest(terms.queue, pack)):
        return True  # its pack was claimed before, so it was already ready
    now = yield from ServerTime()
    if pack["when"] <= now:
        return True
    held = yield from hold(terms, pack, [place])
    if not held:
        return False
    try:
        yield from requeue(terms, held, None)
    except LeaseLost:
        return False
    return True


register(Bucket.name, requeue_packed)
