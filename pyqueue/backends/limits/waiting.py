"""Defer messages that a limit ``per`` key keeps from starting, and bring them forward in time.

A scan that meets such messages defers them; see ``turns``. The field ``limited`` of a deferred
message contains its key. The first message of a key becomes eligible when the key has both a free
slot and a permit. At the latest, a slot becomes free when the first lease of the key ends. A scan
that claims a message brings forward the next message of its key. ``restore`` corrects deferrals
that are too long.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

from pyqueue.backends import transitions
from pyqueue.backends.kind import Kind
from pyqueue.backends.limits import rates, slots
from pyqueue.backends.limits.indexes import LIMITED
from pyqueue.backends.scan import due_of
from pyqueue.backends.turns import (
    DEFERRED_FOR,
    MAX_PAGE,
    FirstOfEach,
    bring_forward,
    place_firsts,
    set_aside,
    write_due,
    write_when,
)
from pyqueue.concurrently import SHORT_AT_ONCE, concurrently
from pyqueue.errors import TimedOut
from pyqueue.limits import FollowedLimit, Limit, MayStart
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

#: The maximum number of messages of one key that one scan brings forward.
MAX_FORWARD: Final = 100
#: The time limit of one command that defers messages, in seconds. The command has to wait for a
#: message that a transaction has locked.
DEFER_TIMEOUT_S: Final = 2.0


def _may_start(
    queue: str, limit: Limit, followed: FollowedLimit, keys: Collection[str], now: datetime
) -> Plan[dict[str, MayStart]]:
    """Return how many messages of each key may start now, and when the next message may start."""
    found: list[Mapping[str, MayStart]] = []
    if limit.concurrency is not None:
        found.append((yield from slots.may_start(queue, followed, keys, now)))
    if limit.rate is not None:
        found.append((yield from rates.may_start(queue, limit, followed, keys, now)))
    return {
        key: MayStart(
            min(each[key].number for each in found), max(each[key].next_at for each in found)
        )
        for key in keys
    }


def defer(
    queue: str, kind: Kind, waiting: Mapping[str, Sequence[Document]], now: datetime
) -> Plan[int]:
    """Defer messages that cannot start yet. Return how many were deferred.

    Afterwards, the caller has to bring the first message of each key forward; see ``restore``.
    Lapsed claims are ended first, because a deferral changes ``when``, which a claim uses for the
    end of its lease.

    Args:
        queue: The name of the queue.
        kind: The kind of the queue.
        waiting: The messages, keyed by limit key.
        now: The current instant.
    """
    if lapsed := [each for some in waiting.values() for each in some if "token" in each]:
        yield from slots.end_lapsed(kind, lapsed, now)
    yield from write_due(queue, [each for some in waiting.values() for each in some])
    ready = {"q": queue, "when": {"$lte": now}, "due": {"$lte": now}, "token": {"$exists": False}}
    pairs: list[tuple[Filter, UpdateDocument]] = [
        (
            {"_id": {"$in": [each["_id"] for each in some]}, **ready},
            {"$set": {"when": now + DEFERRED_FOR, "limited": key}},
        )
        for key, some in waiting.items()
    ]
    with suppress(TimedOut):  # a transaction holds one of them, so all stay in place
        return (yield from UpdateEach(pairs, many=True, w1=True, max_time_s=DEFER_TIMEOUT_S))[0]
    return 0


class Restored(NamedTuple):
    """The result of ``restore``."""

    #: The keys that have waiting messages.
    keys: list[str]
    #: How many messages became ready now.
    ready: int


def restore(
    queue: str, followed: FollowedLimit, keys: Collection[str] | None, after: str = ""
) -> Plan[Restored]:
    """Correct the start times of deferred messages of ``keys``, or of the keys after ``after``."""
    some = keys if keys is None else list(keys)
    firsts = yield from FirstOfEach(queue, LIMITED, some, after)
    names = [each["limited"] for each in firsts if isinstance(each["limited"], str)]
    if not names:
        return Restored([], 0)
    now = yield from ServerTime()
    if (limit := followed.limit) is None or limit.per is None:
        return Restored(names, 0)  # another thread has read that the limit is gone
    found = yield from _may_start(queue, limit, followed, names, now)
    later: dict[Hashable, datetime] = {
        key: each.next_at for key, each in found.items() if not each.number
    }
    ready = yield from place_firsts(queue, LIMITED, firsts, later, now)
    if keys is not None:  # otherwise, correct only the first message of each key
        several = [
            _bring_more(queue, key, min(each.number, MAX_FORWARD), now)
            for key, each in found.items()
            if each.number > 1
        ]
        ready += sum((yield from concurrently(several, SHORT_AT_ONCE)))
    if ready:
        yield from Signal(queue, now)
    elif keys is not None and later and limit.rate is not None:
        yield from Signal(queue, min(later.values()))  # nothing else would wake consumers then
    return Restored(names, ready)


def _bring_more(queue: str, key: str, number: int, now: datetime) -> Plan[int]:
    """Bring the first ``number`` messages of a key forward. Return how many became ready."""
    match = {"q": queue, "limited": key}
    fields = {"when": 1, "due": 1, LIMITED.field: 1}
    some = yield from Find(match, fields, sort=LIMITED.sort, limit=number, hint=LIMITED.by)
    sound = yield from set_aside(queue, some, LIMITED.field)
    later = [each["_id"] for each in sound if each["when"] > now >= due_of(each)]
    if not later:
        return 0
    deferred = {"when": {"$gt": now}, "due": {"$lte": now}}
    return (yield from write_when(queue, LIMITED, later, deferred, now))


def bring_next(queue: str, left: Sequence[Mapping[str, object]], session: object) -> Plan[None]:
    """Bring the next message of each key forward, after other messages left the queue unclaimed.

    Without this, the next messages would wait for a claim. ``left``: the messages that left.
    """
    waited = [each.get("limited") for each in left if "token" not in each]
    keys = {each for each in waited if isinstance(each, str)}
    yield from bring_forward(queue, LIMITED, keys, session)


def walk(queue: str, followed: FollowedLimit, after: str) -> Plan[str]:
    """Correct start times for the keys after ``after``. Return the key to continue after."""
    keys, _ = yield from restore(queue, followed, None, after)
    if after and len(keys) < MAX_PAGE:  # wrap around
        yield from restore(queue, followed, None, "")
    return max(keys) if len(keys) == MAX_PAGE else ""


def defers(limit: Limit | None, *, instead: Limit | None) -> bool:
    """Return whether messages may still wait for ``limit`` after ``instead`` has replaced it."""
    if limit is None or limit.per is None:
        return False
    return instead is None or instead.per != limit.per


def lift(queue: str) -> Plan[None]:
    """Bring all deferred messages forward, because the limit that they wait for was removed."""
    now = yield from ServerTime()
    waiting = {"q": queue, "limited": {"$exists": True}, "token": {"$exists": False}}
    put = {"$set": {"when": now}, "$unset": transitions.unset("limited")}
    if (yield from Update(waiting, put, many=True)).matched:
        yield from Signal(queue, now)
