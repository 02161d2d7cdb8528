"""The slots of a limit on concurrency: each held message has its own slot.

With a limit of N, a queue has N slots; with ``per``, each key has N slots. The field ``slot`` of a
held message names its slot. The index ``slot`` is unique, so two messages never share a slot, even
if different processes claim them. Therefore no more than N messages are held at a time. The update
that ends a claim also removes the slot from the message, so no slot can leak. If a holder is
killed, its message keeps the slot until the lease ends. A scan that needs the slot then ends that
claim, so the former holder can no longer settle the message or extend its lease.

After a limit is lowered, some messages have slots above the new limit until their claims end. Until
then, fewer slots are usable; see ``_usable``. The record of the queue keeps the former limit in
``drain`` until no message is left that may have been claimed under it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.backends import transitions
from pyqueue.backends.kind import Kind
from pyqueue.backends.limits.indexes import LIMITED, SLOTS
from pyqueue.backends.turns import bring_forward, set_aside
from pyqueue.documents import stored_group
from pyqueue.limits import WHOLE_QUEUE, Drain, FollowedLimit, MayStart
from pyqueue.requests import Document, Find, Plan, ServerTime, Signal, Update, UpdateEach

#: How long a claim under a former limit may still arrive. Consumers follow a changed limit within
#: 5 s, but a command may wait, and the process that changed the limit may have a slow clock.
REMEMBERED_FOR: Final = timedelta(seconds=60)
#: How many slots one command reads. Their names may have hundreds of bytes each.
_PORTION: Final = 10_000


def slot_of(key: str, number: int) -> str:
    """Return the stored name of a slot. A short hash prefix spreads the names over the index."""
    return stored_group(f"{key}#{number}")


def key_of_slot(slot: str) -> str:
    """Return the key that a slot belongs to."""
    return slot.partition(":")[2].rpartition("#")[0]


# ---- free slots


class FreeSlots(NamedTuple):
    """The free slots of one key, as far as this process knows."""

    #: Free slots, up to the wanted number. Their order is random, because other processes compete.
    names: list[str]
    #: The total number of free slots.
    number: int
    #: When the first lease of a taken slot ends, or None if no slot is known to be taken.
    until: datetime | None


def free_slots(
    queue: str,
    kind: Kind,
    followed: FollowedLimit,
    wanted: Mapping[str, int],
    now: datetime,
    *,
    again: bool = True,
) -> Plan[dict[str, FreeSlots]]:
    """Return the free slots of each key. If a key has too few, first end its lapsed claims.

    Args:
        queue: The name of the queue.
        kind: The kind of the queue.
        followed: The limit of the queue.
        wanted: How many slots the caller can use, keyed by limit key.
        now: The current instant.
        again: Whether to read the slots a second time after ending claims, if slots above a
            lowered limit may still be taken.
    """
    limits = _limits(followed)
    held = yield from _held(queue, max(limits), wanted)
    result: dict[str, FreeSlots] = {}
    to_end: list[Document] = []
    for key, number in wanted.items():
        taken = held[key]
        # A slot with a lapsed lease counts as taken, because the holder may still extend the lease.
        lapsed = [name for name, each in taken.items() if _has_lapsed(each, now)]
        usable = _names(key, _usable(*limits, key, taken))
        names = [name for name in usable if name not in taken]
        if len(names) < number:
            to_end += [taken.pop(name) for name in lapsed]
            names += [name for name in lapsed if name in usable]  # free once the claims end
        random.shuffle(names)
        until = min((each["when"] for each in taken.values()), default=None)
        result[key] = FreeSlots(names[:number], len(names), until)
    if to_end:
        yield from end_lapsed(kind, to_end, now)
        if again and limits[1] > limits[0]:  # a slot freed above the limit frees one below it
            return (yield from free_slots(queue, kind, followed, wanted, now, again=False))
    return result


def any_slots(concurrency: int, wanted: Mapping[str, int]) -> dict[str, FreeSlots]:
    """Return random slots of each key, as if all slots were free."""
    result: dict[str, FreeSlots] = {}
    for key, number in wanted.items():
        some = random.sample(range(concurrency), min(number, concurrency))
        result[key] = FreeSlots([slot_of(key, each) for each in some], concurrency, None)
    return result


def may_start(
    queue: str, followed: FollowedLimit, keys: Collection[str], now: datetime
) -> Plan[dict[str, MayStart]]:
    """Return how many messages of each key may start now, and when the next message may start."""
    limits = _limits(followed)
    held = yield from _held(queue, max(limits), keys)
    found: dict[str, MayStart] = {}
    for key, some in held.items():
        live = {name: each for name, each in some.items() if not _has_lapsed(each, now)}
        usable = _names(key, _usable(*limits, key, some))
        free = len([name for name in usable if name not in live])
        soonest = min((each["when"] for each in live.values()), default=now)
        found[key] = MayStart(free, now if free else soonest)
    return found


def no_slots(wanted: Mapping[str, int]) -> dict[str, FreeSlots]:
    """Return placeholders for messages that need no slot: one empty name for each of them."""
    return {key: FreeSlots([""] * number, number, None) for key, number in wanted.items()}


def _limits(followed: FollowedLimit) -> tuple[int, int]:
    """Return the limit on concurrency, and the former limit under which messages may be held."""
    limit, drain = followed.limit, followed.drain
    concurrency = 0 if limit is None else limit.concurrency or 0
    return concurrency, concurrency if drain is None else drain.concurrency


def _usable(concurrency: int, former: int, key: str, held: Collection[str]) -> int:
    """Return how many of the first slots may be used while slots above a lowered limit are taken.

    The slots below this number and the taken slots from this number on do not exceed the limit.
    Slots above the limit are not taken again once they are free. So this stays true while other
    processes claim.
    """
    if former <= concurrency:
        return concurrency
    taken = [name in held for name in _names(key, former)]
    usable, above = concurrency, sum(taken[concurrency:])
    while usable and usable + above > concurrency:
        usable -= 1
        above += taken[usable]
    return usable


def follow_drain(
    queue: str, followed: FollowedLimit, record: Mapping[str, Any], now: datetime
) -> Plan[None]:
    """Learn the former limit on concurrency from the record of a queue.

    Remove that limit from the record if no message is left that may have been claimed under it.
    """
    followed.drain = drain = Drain.of(record.get("drain"))
    if drain is None or now < drain.at + REMEMBERED_FOR:
        return
    old = {"$lt": drain.at + REMEMBERED_FOR}
    held = {"q": queue, "slot": {"$exists": True}, "reserved": old}
    if not (yield from Find(held, {"_id": 1}, limit=1, hint=SLOTS)):
        same = {"_id": record["_id"], "drain": record["drain"]}
        yield from Update(same, {"$unset": {"drain": ""}})


def _names(key: str, concurrency: int) -> list[str]:
    return [slot_of(key, number) for number in range(concurrency)]


def _held(
    queue: str, concurrency: int, keys: Collection[str]
) -> Plan[dict[str, dict[str, Document]]]:
    """Return the messages that have slots of these keys, keyed by key and then by slot."""
    names = [name for key in keys for name in _names(key, concurrency)]
    held: dict[str, dict[str, Document]] = {key: {} for key in keys}
    found: list[Document] = []
    for start in range(0, len(names), _PORTION):
        match = {"q": queue, "slot": {"$in": names[start : start + _PORTION]}}
        found += yield from Find(match, {"slot": 1, "when": 1, "token": 1}, hint=SLOTS)
    for each in (yield from set_aside(queue, found, "slot")):
        held[key_of_slot(each["slot"])][each["slot"]] = each
    return held


def _has_lapsed(document: Document, now: datetime) -> bool:
    return bool(document["when"] <= now)


def end_lapsed(kind: Kind, lapsed: Sequence[Document], now: datetime) -> Plan[None]:
    """End claims whose leases have ended, except leases that were extended in the meantime."""
    update = transitions.lapsing(kind)
    yield from UpdateEach(
        [
            ({"_id": each["_id"], "token": each.get("token"), "when": {"$lte": now}}, update)
            for each in lapsed
        ],
        w1=True,
    )


# ---- the end of a claim


def free(queue: str, slots: Iterable[object], session: object = None) -> Plan[None]:
    """Let waiting messages start, because these slots are free now.

    Values in ``slots`` that are not the name of a slot are ignored.
    """
    keys = {key_of_slot(each) for each in slots if isinstance(each, str)}
    if WHOLE_QUEUE in keys:  # without ``per``, no message is deferred: wake consumers
        yield from Signal(queue, (yield from ServerTime()), session)
    if names := [key for key in keys if key != WHOLE_QUEUE]:
        yield from bring_forward(queue, LIMITED, names, session)
