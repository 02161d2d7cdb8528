"""Packs: find out which ids chosen by callers already belong to messages of stored packs.

The unique index rejects the _id of a stored document, but not the id of a message in a pack.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyqueue.backends.bucket import packs
from pyqueue.backends.hidden import MARK, NOTHING
from pyqueue.backends.inserting import find_usable, store_placeholder, was_in
from pyqueue.messages import Id
from pyqueue.requests import Document, Plan, Update


def in_stored_packs(
    queue: str, ids: Sequence[Id], session: object
) -> Plan[tuple[frozenset[Id], list[Id]]]:
    """Find the ids of messages in stored packs. Block late inserts of packs that are not stored.

    A caller may repeat an unacknowledged push with the same ids while the first insert is still on
    its way. So if a pack is not stored, a placeholder with its _id is stored, which makes the late
    insert fail. An id without leading zeros after the colon needs no placeholder: it comes from a
    pack of an earlier release, or from a caller who built it from another id.

    Returns:
        The ids whose packs are or were in this queue, and the ids whose packs were never in it.
    """
    here: set[Id] = set()
    elsewhere: set[Id] = set()
    fields = {"q": 1, "trail": 1, **packs.INDEX_FIELDS}  # ``was_in`` needs the first two
    for first_pack, members in packs.by_first_pack(ids).items():
        if any(place.padded for _, place in members):
            yield from store_placeholder({"_id": first_pack}, session)
        for pack in (yield from find_usable(packs.packs_of(first_pack), fields, session)):
            found = {id for id, place in members if packs.index_in(pack, place) is not None}
            # A pack counts if no fail-over can undo it. A hidden copy always counts: the update of
            # ``_is_durable`` would remove its MARK.
            if found and (MARK in pack or (yield from _is_durable(pack, session))):
                (here if was_in(queue, pack) else elsewhere).update(found)
    return frozenset(here), [id for id in ids if id in elsewhere - here]


def _is_durable(document: Document, session: object) -> Plan[bool]:
    """Wait until no fail-over can undo a document. Return False if it is no longer stored."""
    if session is not None:
        return True  # the commit of the transaction waits for its reads, too
    return bool((yield from Update({"_id": document["_id"]}, NOTHING, majority=True)).matched)
