"""Packs: find the chosen ids that name messages of stored packs.

The unique index rejects the id of a stored document. It does not cover the ids inside packs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyqueue.backends.bucket import packs
from pyqueue.backends.handover import NOTHING
from pyqueue.backends.hidden import MARK
from pyqueue.backends.inserting import find_usable, keep_out, was_in
from pyqueue.messages import Id
from pyqueue.requests import Document, Plan, Update


def in_stored_packs(
    queue: str, ids: Sequence[Id], session: object
) -> Plan[tuple[frozenset[Id], list[Id]]]:
    """Find the ids that name messages of stored packs. Keep other named packs from being stored.

    A caller repeats an unacknowledged push with its ids, and the first insert may still arrive. So
    if a pack is not stored, a placeholder with its _id is stored. Ids without padding need no
    placeholder: only earlier releases made such packs. Callers may build such ids from the ids of
    their messages.

    Returns:
        The ids in packs that are or were in this queue, and the ids in packs of other queues.
    """
    named = packs.by_first_pack(ids)
    there: set[Id] = set()
    foreign: set[Id] = set()
    for pack, members in named.items():
        if any(place.padded for _, place in members):
            yield from keep_out({"_id": pack}, session)
        fields = {"q": 1, "trail": 1, **packs.INDEX_FIELDS}
        for each in (yield from find_usable(packs.packs_of(pack), fields, session)):
            found = {id for id, place in members if packs.index_in(each, place) is not None}
            if found and (MARK in each or (yield from _is_durable(each, session))):
                (there if was_in(queue, each) else foreign).update(found)
    return frozenset(there), [id for id in ids if id in foreign - there]


def _is_durable(document: Document, session: object) -> Plan[bool]:
    """Wait until no fail-over can undo the read. Return False if a fail-over just did."""
    if session is not None:
        return True
    return bool((yield from Update({"_id": document["_id"]}, NOTHING, majority=True)).matched)
