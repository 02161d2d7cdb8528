"""The slots of a limit on concurrency: a message that is held has one, and no other message has it.

While a message of a queue with such a limit is held, its field ``slot`` says which of the N slots
it takes; with ``per``, each key has N slots. The index ``slot`` is unique. So no two messages have
the same slot, whichever processes claim them, and at most N are held. The end of each claim removes
the slot in the same update, so no slot can leak. A message whose holder was killed keeps its slot
until its lease ends. A look that needs the slot then ends that claim, and the former holder settles
and extends nothing any more.

With ``per``, messages of a key without a free slot would slow down every look for messages of other
keys. A look that meets them defers them, as it does with ordered groups; see ``groups``. The field
``limited`` of a deferred message has its key. The first one of a key comes when a slot is free, at
the latest when the first lease of the key ends.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyqueue.backends import transitions
from pyqueue.backends.groups import (
    DEFERRED_FOR,
    MAX_PAGE,
    FirstOfEach,
    bring_forward,
    place_firsts,
    write_when,
)
from pyqueue.backends.indexes import LIMITED, SLOTS
from pyqueue.backends.kind import Kind
from pyqueue.backends.scan import due_of
from pyqueue.documents import stored_group
from pyqueue.errors import TimedOut
from pyqueue.limits import Limit
from pyqueue.messages import Reservation
from pyqueue.requests import (
    Document,
    Filter,
    Find,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateDocument,
    UpdateEach,
)

__all__ = [
    "FreeSlots",
    "any_slots",
    "defer",
    "defers",
    "free_slots",
    "go_on",
    "key_of_slot",
    "lift",
    "restore",
    "slot_of",
    "slots_of",
    "walk",
]

#: The most messages of a key that one look brings forward.
MAX_FORWARD: Final = 100
#: How long one command defers messages, in seconds. It waits for one that a transaction holds.
DEFER_TIMEOUT_S: Final = 2.0


def slot_of(key: str, number: int) -> str:
    """Return the stored form of a slot: behind a short hash, which spreads it over the index."""
    return stored_group(f"{key}#{number}")


def key_of_slot(slot: str) -> str:
    """Return the key that a slot belongs to."""
    return slot.partition(":")[2].rpartition("#")[0]


# ---- what is free


class FreeSlots(NamedTuple):
    """What is known of the slots of one key."""

    #: As many as are of use, in random order: other processes take some at the same time.
    names: list[str]
    #: How many are free.
    number: int
    #: When the first lease of the rest ends; None: no message is held.
    until: datetime | None


def free_slots(
    queue: str, kind: Kind, concurrency: int, wanted: Mapping[str, int], now: datetime
) -> Plan[dict[str, FreeSlots]]:
    """Return which slots of each key are free, and end claims whose leases have ended for more.

    ``wanted``: how many are of use, by key.
    """
    held = yield from _held(queue, concurrency, wanted)
    result: dict[str, FreeSlots] = {}
    lapsed: list[Document] = []
    for key, number in wanted.items():
        taken = held[key]
        over = [name for name, each in taken.items() if _has_lapsed(each, now)]
        names = [name for name in _names(key, concurrency) if name not in taken]
        if len(names) < number:
            lapsed += [taken.pop(name) for name in over]
            names += over
        random.shuffle(names)
        until = min((each["when"] for each in taken.values()), default=None)
        result[key] = FreeSlots(names[:number], len(names), until)
    if lapsed:
        yield from _end(kind, lapsed, now)
    return result


def any_slots(concurrency: int, wanted: Mapping[str, int]) -> dict[str, FreeSlots]:
    """Return slots of each key as if all were free."""
    result: dict[str, FreeSlots] = {}
    for key, number in wanted.items():
        some = random.sample(range(concurrency), min(number, concurrency))
        result[key] = FreeSlots([slot_of(key, each) for each in some], concurrency, None)
    return result


def _names(key: str, concurrency: int) -> list[str]:
    return [slot_of(key, number) for number in range(concurrency)]


def _held(
    queue: str, concurrency: int, keys: Collection[str]
) -> Plan[dict[str, dict[str, Document]]]:
    """Return the messages that have slots of these keys, by key and slot."""
    names = [name for key in keys for name in _names(key, concurrency)]
    held: dict[str, dict[str, Document]] = {key: {} for key in keys}
    match = {"q": queue, "slot": {"$in": names}}
    for each in (yield from Find(match, {"slot": 1, "when": 1, "token": 1}, hint=SLOTS)):
        held[key_of_slot(each["slot"])][each["slot"]] = each
    return held


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


# ---- what waits


def defer(queue: str, waiting: Mapping[str, Sequence[Document]], now: datetime) -> Plan[int]:
    """Defer messages that wait for a slot. Return how many were deferred.

    The first one of each key has to be brought forward then; see ``restore``.

    Args:
        queue: the name of the queue.
        waiting: the messages, by key.
        now: the instant.
    """
    odd = [each for some in waiting.values() for each in some if due_of(each) != each.get("due")]
    if odd:  # of another program; what is deferred must say since when it is eligible
        yield from UpdateEach(
            [({"_id": each["_id"], "q": queue}, {"$set": {"due": due_of(each)}}) for each in odd]
        )
    ready = {"q": queue, "when": {"$lte": now}, "due": {"$lte": now}, "token": {"$exists": False}}
    pairs: list[tuple[Filter, UpdateDocument]] = [
        (
            {"_id": {"$in": [each["_id"] for each in some]}, **ready},
            {"$set": {"when": now + DEFERRED_FOR, "limited": key}},
        )
        for key, some in waiting.items()
    ]
    with suppress(TimedOut):  # a transaction holds one of them, and they stay where they are
        return (yield from UpdateEach(pairs, many=True, w1=True, max_time_s=DEFER_TIMEOUT_S))[0]
    return 0


class Restored(NamedTuple):
    """What was found of keys whose messages wait."""

    #: The keys of which some wait.
    keys: list[str]
    #: How many messages are ready now.
    ready: int


def restore(
    queue: str, concurrency: int, keys: Collection[str] | None, after: str = ""
) -> Plan[Restored]:
    """Correct what is deferred of these keys; None: of the next keys behind ``after``."""
    firsts = yield from FirstOfEach(
        queue, keys if keys is None else list(keys), after, order=LIMITED
    )
    names = [each["limited"] for each in firsts]
    if not names:
        return Restored([], 0)
    held = yield from _held(queue, concurrency, names)
    now = yield from ServerTime()
    ends = {
        key: sorted(each["when"] for each in some.values() if not _has_lapsed(each, now))
        for key, some in held.items()
    }
    full: dict[Hashable, datetime] = {
        key: some[0] for key, some in ends.items() if len(some) >= concurrency
    }
    ready = yield from place_firsts(queue, firsts, full, now, order=LIMITED)
    if keys is not None:
        for key, some in ends.items():
            if (spare := concurrency - len(some)) > 1:
                ready += yield from _bring_more(queue, key, min(spare, MAX_FORWARD), now)
    if ready:
        yield from Signal(queue, now)
    return Restored(names, ready)


def _bring_more(queue: str, key: str, number: int, now: datetime) -> Plan[int]:
    """Bring the first messages of a key forward that has several free slots."""
    match = {"q": queue, "limited": key}
    fields = {"when": 1, "due": 1}
    order = ((LIMITED.place, 1), ("_id", 1))
    some = yield from Find(match, fields, sort=order, limit=number, hint=LIMITED.by)
    later = [each["_id"] for each in some if each["when"] > now >= due_of(each)]
    if not later:
        return 0
    deferred = {"when": {"$gt": now}, "due": {"$lte": now}}
    return (yield from write_when(queue, later, deferred, now, order=LIMITED))


def walk(queue: str, concurrency: int, after: str) -> Plan[str]:
    """Correct what is deferred of the next keys. Return where to go on."""
    keys, _ = yield from restore(queue, concurrency, None, after)
    if after and len(keys) < MAX_PAGE:  # around the end
        yield from restore(queue, concurrency, None, "")
    return max(keys) if len(keys) == MAX_PAGE else ""


def defers(limit: Limit | None, *, instead: Limit | None) -> bool:
    """Return whether messages may wait for slots of a limit that the queue has no more."""
    if limit is None or limit.per is None or limit.concurrency is None:
        return False
    return instead is None or (instead.per, instead.concurrency is None) != (limit.per, False)


def lift(queue: str) -> Plan[None]:
    """Let everything go on that is deferred: the queue has no such limit any more."""
    now = yield from ServerTime()
    waiting = {"q": queue, "limited": {"$exists": True}}
    put = {"$set": {"when": now}, "$unset": transitions.unset("limited")}
    if (yield from Update(waiting, put, many=True)).matched:
        yield from Signal(queue, now)


# ---- the end of a claim


def go_on(queue: str, slots: Iterable[str | None], session: object = None) -> Plan[None]:
    """Let messages go on that wait for these slots, once their messages are no longer held."""
    keys = {key_of_slot(each) for each in slots if each is not None}
    if "" in keys:
        yield from Signal(queue, (yield from ServerTime()), session)
    if names := [key for key in keys if key]:
        yield from bring_forward(queue, names, session, LIMITED)


def slots_of(held: Iterable[Reservation[Any]]) -> list[str | None]:
    """Return the slots of reservations. What an older release has pickled has none."""
    return [getattr(each, "slot", None) for each in held]
