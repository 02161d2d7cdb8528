"""Claim several messages with one command, and give each a different slot; see ``slots``."""

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

#: The time limit of one command that claims several messages, in seconds. A message that is locked
#: by a transaction makes the command wait. The other messages are then claimed one by one.
CLAIM_TIMEOUT_S: Final = 2.0


def with_slots(chosen: Sequence[tuple[Document, str]]) -> Choice:
    """Return a choice of messages to claim, each with its slot.

    A slot is "" if the message needs none, because the limit does not restrict concurrency.
    """
    documents = [each for each, _ in chosen]
    slots = {hashable_id(each["_id"]): slot for each, slot in chosen if slot}
    removes = ("limited",)  # a claimed message no longer waits for the limit
    if len(slots) > 1:  # one update cannot give messages different slots
        return Choice(documents, removes=removes, claim_each=partial(_claim_slots, slots))
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

    A message is skipped if it is no longer free, or if its slot was taken in the meantime. An
    invalid message that the server refuses to update goes to the dead-letter queue.
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
            with suppress(InvalidMessage):  # a claim of this message alone raises the error again
                yield from invalid.bury_refused(terms.graveyard, one, each.error, scan.now)
        elif not isinstance(each.error, DuplicateKey):
            raise each.error
    return matched
