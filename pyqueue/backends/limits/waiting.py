"""Defer messages of a limit ``per`` key that may not start yet, and bring them forward in time.

A scan that meets them defers them; see ``turns``. The field ``limited`` of a deferred message has
its key. The first one of a key comes when the next message of that key may start: when a slot is
free, at the latest when the first lease of the key ends, and when there is a permit. The scan that
claims it brings the next one forward, and ``restore`` corrects what was deferred for too long.
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
    place_firsts,
    set_aside,
    write_when,
)
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

#: The most messages of a key that one look brings forward.
MAX_FORWARD: Final = 100
#: How long one command defers messages, in seconds. It waits for one that a transaction holds.
DEFER_TIMEOUT_S: Final = 2.0


def _may_start(
    queue: str, limit: Limit, followed: FollowedLimit, keys: Collection[str], now: datetime
) -> Plan[dict[str, MayStart]]:
    """Return how many messages of each key may start now, and when the next one may."""
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
    """Defer messages that may not start. Return how many were deferred.

    The first one of each key has to be brought forward then; see ``restore``. A claim whose lease
    has ended is ended for good: an extension would take a deferral for the end of its lease.

    Args:
        queue: the name of the queue.
        kind: its kind.
        waiting: the messages, by key.
        now: the instant.
    """
    if lapsed := [each for some in waiting.values() for each in some if "token" in each]:
        yield from slots.end_lapsed(kind, lapsed, now)
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
    queue: str, followed: FollowedLimit, keys: Collection[str] | None, after: str = ""
) -> Plan[Restored]:
    """Correct what is deferred of these keys; None: of the next keys behind ``after``."""
    some = keys if keys is None else list(keys)
    firsts = yield from FirstOfEach(queue, LIMITED, some, after)
    names = [each["limited"] for each in firsts if isinstance(each["limited"], str)]
    if not names:
        return Restored([], 0)
    now = yield from ServerTime()
    if (limit := followed.limit) is None or limit.per is None:
        return Restored(names, 0)  # another thread has read that it is gone
    found = yield from _may_start(queue, limit, followed, names, now)
    later: dict[Hashable, datetime] = {
        key: each.next_at for key, each in found.items() if not each.number
    }
    ready = yield from place_firsts(queue, LIMITED, firsts, later, now)
    if keys is not None:
        for key, each in found.items():
            if each.number > 1:
                ready += yield from _bring_more(queue, key, min(each.number, MAX_FORWARD), now)
    if ready:
        yield from Signal(queue, now)
    elif keys is not None and later and limit.rate is not None:
        yield from Signal(queue, min(later.values()))  # no other event tells consumers
    return Restored(names, ready)


def _bring_more(queue: str, key: str, number: int, now: datetime) -> Plan[int]:
    """Bring the first messages of a key forward of which several may start."""
    match = {"q": queue, "limited": key}
    fields = {"when": 1, "due": 1, LIMITED.field: 1}
    some = yield from Find(match, fields, sort=LIMITED.sort, limit=number, hint=LIMITED.by)
    sound = yield from set_aside(queue, some, LIMITED.field)
    later = [each["_id"] for each in sound if each["when"] > now >= due_of(each)]
    if not later:
        return 0
    deferred = {"when": {"$gt": now}, "due": {"$lte": now}}
    return (yield from write_when(queue, LIMITED, later, deferred, now))


def walk(queue: str, followed: FollowedLimit, after: str) -> Plan[str]:
    """Correct what is deferred of the next keys. Return where to go on."""
    keys, _ = yield from restore(queue, followed, None, after)
    if after and len(keys) < MAX_PAGE:  # around the end
        yield from restore(queue, followed, None, "")
    return max(keys) if len(keys) == MAX_PAGE else ""


def defers(limit: Limit | None, *, instead: Limit | None) -> bool:
    """Return whether messages may wait under a limit that the queue has no more."""
    if limit is None or limit.per is None:
        return False
    return instead is None or instead.per != limit.per


def lift(queue: str) -> Plan[None]:
    """Let everything go on that is deferred: the queue has no such limit any more."""
    now = yield from ServerTime()
    waiting = {"q": queue, "limited": {"$exists": True}}
    put = {"$set": {"when": now}, "$unset": transitions.unset("limited")}
    if (yield from Update(waiting, put, many=True)).matched:
        yield from Signal(queue, now)
