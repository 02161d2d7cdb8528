"""Claim several messages with a slot each, by one command; see ``slots``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from pyqueue.backends import invalid
from pyqueue.backends.claim_terms import Choice, Scan
from pyqueue.documents import hashable_id
from pyqueue.errors import DuplicateKey, InvalidMessage
from pyqueue.requests import Document, Plan, UpdateDocument, UpdateEach

#: How long one command claims several messages, in seconds. It waits for a message that a
#: transaction holds. Messages are then claimed one by one, which gets past that one.
CLAIM_TIMEOUT_S: Final = 2.0


def with_slots(chosen: Sequence[tuple[Document, str]]) -> Choice:
    """Return the choice of messages, each with its slot, or with "" if it needs none."""
    documents = [each for each, _ in chosen]
    slots = {hashable_id(each["_id"]): slot for each, slot in chosen if slot}
    removes = ("limited",)
    if len(slots) > 1:
        return Choice(documents, {}, removes, partial(_claim_slots, slots))
    slot = next(iter(slots.values()), None)
    return Choice(documents, {} if slot is None else {"slot": slot}, removes)


def _claim_slots(
    slots: Mapping[Hashable, str],
    scan: Scan,
    ids: Sequence[Any],
    update: UpdateDocument,
    timeout_s: float,
) -> Plan[int]:
    """Claim messages, each with its slot. Return how many were claimed.

    A message is left alone if it is not free any more, if another one has its slot by now, or if
    the server refuses to claim it.
    """
    terms, free = scan.terms, scan.free(())
    pairs = [
        (
            {**free, "_id": id},
            {**update, "$set": {**update["$set"], "slot": slots[hashable_id(id)]}},
        )
        for id in ids
    ]
    matched, failures = yield from UpdateEach(
        pairs, w1=True, max_time_s=min(timeout_s, CLAIM_TIMEOUT_S)
    )
    for each in failures:
        if isinstance(each.error, InvalidMessage):
            one = pairs[each.place][0]
            with suppress(InvalidMessage):  # a claim of this message alone raises it
                yield from invalid.bury_refused(terms.graveyard, one, each.error, scan.now)
        elif not isinstance(each.error, DuplicateKey):
            raise each.error
    return matched
