"""The groups of an ordered queue: which message is first, and how the next message gets its turn.

While a message is held, its group is in the field ``lock`` instead of ``group``. A unique index on
``lock`` prevents a second held message of the group. The index on ``group`` lists the waiting
messages in order. The lock is a field of the held message, so nothing else has to be cleaned up.

A scan defers messages that it meets behind another message of their group; see ``turns``. The first
waiting message, the *heir*, is deferred only until the lease of the held message ends, so it comes
back even if the holder is killed. A holder that ends its claim brings the heir forward at once.
``restore`` corrects longer deferrals. Without it, a message waits until its deferral ends.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from bson import ObjectId

from pyqueue.backends.scan import FIRST
from pyqueue.backends.turns import FirstOfEach, Order, group_in, place_firsts, set_aside
from pyqueue.clock import next_number
from pyqueue.documents import hashable_id
from pyqueue.requests import Document, Find, Plan, ServerTime, Signal, Update

#: The name of the index of the waiting messages.
GROUPS: Final = "turns"
#: The name of the unique index of the held messages, and its keys.
LOCKS: Final = "lock"
LOCK_KEYS: Final = (("lock", 1), ("q", 1))
#: The _id and ``q`` of a document with permanent entries in the index of locks.
_LOCK_BOUNDS: Final = "~locks"
_MILLISECOND: Final = timedelta(milliseconds=1)
GROUPED: Final = Order("group", ("seq", "no"), GROUPS)
GROUP_KEYS: Final = (("q", 1), ("group", 1), *GROUPED.sort)


# ---- the order of a group


def place_at(when: datetime) -> dict[str, int]:
    """Return the fields that order a message in its group, if it enters with this ``when``.

    ``seq`` has 1000 numbers per millisecond, and release 0.1 used them one by one. This release
    uses only the last of them, so its messages follow messages of 0.1. ``no`` orders them.
    """
    return {"seq": 1000 * ((when - FIRST) // _MILLISECOND) + 999, "no": next_number()}


def rank(document: Mapping[str, Any]) -> tuple[int, int, bool, Any]:
    """Return the sort key of a message in its group. It gives the same order as the index."""
    seq, no = (_number(document.get(name)) for name in GROUPED.places)
    id = document["_id"]
    return seq, no, isinstance(id, ObjectId), id if isinstance(id, (ObjectId, str)) else repr(id)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def is_first(document: Mapping[str, Any], rest: Mapping[str, Any] | None) -> bool:
    """Return whether a message precedes ``rest``, the first waiting message, if any."""
    return rest is None or rank(document) < rank(rest)


def groups_in(documents: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the groups of messages, as they are stored, without duplicates."""
    found: dict[Hashable, Any] = {}
    for each in documents:
        if (name := group_in(each)) is not None:
            found[name] = each.get("group", each.get("lock"))
    return list(found.values())


# ---- the first message of a group


def locks_of(queue: str, names: Collection[Any]) -> Plan[dict[Hashable, datetime]]:
    """Return when the held message's lease ends, for each of these groups with a held message."""
    if not names:
        return {}
    match = {"q": queue, "lock": {"$in": list(names)}}
    found = yield from Find(match, {"lock": 1, "when": 1}, hint=LOCKS)
    held = yield from set_aside(queue, found, "lock")
    return {hashable_id(each["lock"]): each["when"] for each in held}


def restore(queue: str, names: Collection[Any] | None, after: str = "") -> Plan[list[Document]]:
    """Correct deferrals in the groups ``names``; None means the next groups after ``after``.

    Returns:
        The first waiting message of each group. If a message of the group is held, it has the
        additional field ``locked``.
    """
    some = names if names is None else list(names)
    firsts = yield from FirstOfEach(queue, GROUPED, some, after)
    locks = yield from locks_of(queue, groups_in(firsts))
    now = yield from ServerTime()
    if (yield from place_firsts(queue, GROUPED, firsts, locks, now)):
        yield from Signal(queue, now)
    return [{**each, "locked": True} if group_in(each) in locks else each for each in firsts]


def put_lock_bounds() -> Plan[None]:
    """Insert permanent entries into the index of locks, one for each hash prefix of a group."""
    # To insert a lock, the server walks over deleted entries up to the next live entry.
    locks = [*(f"{number:03x}" for number in range(4096)), "g"]
    record = {"q": _LOCK_BOUNDS, "record": True, "lock": locks}
    yield from Update({"_id": _LOCK_BOUNDS}, {"$setOnInsert": record}, upsert=True)
