"""The slots of a limit on concurrency: a message that is held has one, and no other message has it.

While a message of a queue with such a limit is held, its field ``slot`` says which of the N slots
it takes. The index ``slot`` is unique. So no two messages have the same slot, whichever processes
claim them, and at most N are held. The end of each claim removes the slot in the same update, so no
slot can leak. A message whose holder was killed keeps its slot until its lease ends. A look that
needs the slot then ends that claim, and the former holder settles and extends nothing any more.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyqueue.backends import invalid, transitions
from pyqueue.backends.indexes import SLOTS
from pyqueue.backends.kind import Kind
from pyqueue.documents import stored_group
from pyqueue.errors import DuplicateKey, InvalidMessage
from pyqueue.messages import Reservation
from pyqueue.requests import (
    Document,
    Find,
    Plan,
    ServerTime,
    Signal,
    UpdateDocument,
    UpdateEach,
)

__all__ = ["FreeSlots", "claim_slots", "free_slots", "go_on", "slot_of"]

#: How long one command claims several messages, in seconds. It waits for a message that a
#: transaction holds. Messages are then claimed one by one, which gets past that one.
CLAIM_TIMEOUT_S: Final = 2.0


def slot_of(number: int) -> str:
    """Return the stored form of a slot: behind a short hash, which spreads it over the index."""
    return stored_group(f"#{number}")


class FreeSlots(NamedTuple):
    """What is known of the slots of a queue."""

    #: Those that a message can take, in random order: other processes take some at the same time.
    names: list[str]
    #: When the first lease of the rest ends; None: no message is held.
    until: datetime | None


def free_slots(
    queue: str, kind: Kind, concurrency: int, wanted: int, now: datetime
) -> Plan[FreeSlots]:
    """Return which slots are free. If those are too few, end the claims whose leases have ended."""
    names = [slot_of(number) for number in range(concurrency)]
    match = {"q": queue, "slot": {"$in": names}}
    found = yield from Find(match, {"slot": 1, "when": 1, "token": 1}, hint=SLOTS)
    held = {each["slot"]: each for each in found}
    free = [each for each in names if each not in held]
    if len(free) < wanted and (lapsed := [each for each in found if _has_lapsed(each, now)]):
        yield from _end(kind, lapsed, now)
        free += [held.pop(each["slot"])["slot"] for each in lapsed]
    random.shuffle(free)
    until = min((each["when"] for each in held.values()), default=None)
    return FreeSlots(free, until)


def _has_lapsed(document: Document, now: datetime) -> bool:
    when = document["when"]
    return isinstance(when, datetime) and when <= now


def _end(kind: Kind, lapsed: Sequence[Document], now: datetime) -> Plan[None]:
    """End claims whose leases have ended, unless they were extended meanwhile."""
    update = transitions.lapsing(kind)
    yield from UpdateEach(
        [
            ({"_id": each["_id"], "token": each.get("token"), "when": {"$lte": now}}, update)
            for each in lapsed
        ],
        w1=True,
    )


def claim_slots(
    queue: str,
    kind: Kind,
    dead_letter: str,
    ids: Sequence[Any],
    slots: Sequence[str],
    update: UpdateDocument,
    now: datetime,
    timeout_s: float,
) -> Plan[int]:
    """Claim messages, each with a slot. Return how many were claimed.

    A message is left alone if it is not free any more, if another one has its slot by now, or if
    the server refuses to claim it.
    """
    pairs = [
        (
            {"_id": id, "q": queue, "when": {"$lte": now}},
            {**update, "$set": {**update["$set"], "slot": slot}},
        )
        for id, slot in zip(ids, slots, strict=True)
    ]
    matched, failures = yield from UpdateEach(
        pairs, w1=True, max_time_s=min(timeout_s, CLAIM_TIMEOUT_S)
    )
    for each in failures:
        if isinstance(each.error, InvalidMessage):
            one = pairs[each.place][0]
            with suppress(InvalidMessage):  # a claim of this message alone raises it
                yield from invalid.bury_refused(queue, kind, dead_letter, one, each.error, now)
        elif not isinstance(each.error, DuplicateKey):
            raise each.error
    return matched


# ---- the end of a claim


def go_on(queue: str, held: Iterable[Reservation[Any]], session: object = None) -> Plan[None]:
    """Let consumers look that wait for slots, once messages that had some are no longer held."""
    # What an older release has pickled has no slot.
    if any(getattr(each, "slot", None) is not None for each in held):
        yield from Signal(queue, (yield from ServerTime()), session)
