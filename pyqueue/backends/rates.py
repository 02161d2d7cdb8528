"""The rate of a limit: how many messages may start now, counted by the server for all processes.

Each key of a limit has one document, a token bucket::

    _id        "~limit:QUEUE~KEY"; without ``q``, so that nothing takes it for a message
    tokens     how many messages could start at ``at``, at most ``burst``
    at         when the tokens were last counted, by the clock of the primary
    granted    how many messages the last look may start
    expires    when the bucket is full, and the server may delete it: one that is missing is full
    processed  the index ``expires`` has only documents with this field

A look asks for permits after it has found messages, and starts as many as it got. The permits are
stored by a majority before the look goes on. Otherwise a fail-over could grant them again. Permits
of a look that dies are lost. What a look did not use, it gives back if it can.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.concurrently import concurrently
from pyqueue.errors import DuplicateKey, Unavailable
from pyqueue.limits import FollowedLimit, Limit, MayStart
from pyqueue.requests import Command, Document, Find, MonotonicTime, Plan

__all__ = [
    "GiveBack",
    "Granted",
    "TakePermits",
    "give_back",
    "may_start",
    "permits",
    "permits_id",
    "return_permits",
    "take",
]

#: How long after a look has asked for permits it may use them, in seconds. Later it asks again:
#: what a process does after a long pause would not fit the window of its permits.
VALID_S: Final = 1.0
#: How often a look asks again after permits came too late.
ROUNDS: Final = 3
#: A bucket that is further ahead of the primary's clock than this means that the clock was set
#: back. A smaller step is waited out: commands of one instant may be carried out in any order.
CLOCK_STEP_MS: Final = 60_000
#: Less than this much of a token may be missing, because sums are rounded. It is not given away.
ROUNDING: Final = 1e-6


class Granted(NamedTuple):
    """The answer to a look that asked for permits."""

    #: How many messages may start now.
    permits: int
    #: When the next one may start, by the clock of the primary.
    next_at: datetime


def permits_id(queue: str, key: str) -> str:
    """Return the _id of the document of one key of a queue."""
    return f"~limit:{queue}~{key}"


@dataclass(slots=True)
class TakePermits(Command[Granted]):
    """Count the tokens of a bucket, and take up to ``wanted`` of them."""

    id: str
    limit: Limit
    wanted: int

    def send(self, collection: Any) -> Any:
        """Send a findAndModify that counts by the server's clock."""
        return collection.find_one_and_update(
            {"_id": self.id}, self.pipeline(), upsert=True, return_document=True
        )

    def pipeline(self) -> list[dict[str, Any]]:
        """Return the update."""
        capacity, token_ms = float(self.limit.capacity), self.limit.token_s * 1000
        set_back = {"$gt": ["$at", {"$subtract": ["$$NOW", -CLOCK_STEP_MS]}]}
        at = {"$cond": [set_back, "$$NOW", {"$max": ["$at", "$$NOW"]}]}
        passed_ms = {"$max": [0, {"$subtract": [at, "$at"]}]}
        filled = {"$add": ["$tokens", {"$divide": [passed_ms, token_ms]}]}
        whole = {"$floor": {"$add": ["$tokens", ROUNDING]}}
        missing_ms = {"$multiply": [{"$subtract": ["$tokens", capacity]}, token_ms]}
        return [
            {
                "$set": {
                    "at": {"$ifNull": ["$at", "$$NOW"]},
                    "tokens": {"$ifNull": ["$tokens", capacity]},
                }
            },
            {"$set": {"at": at, "tokens": {"$min": [capacity, filled]}}},
            {"$set": {"granted": {"$max": [0, {"$min": [self.wanted, whole]}]}}},
            {"$set": {"tokens": {"$subtract": ["$tokens", "$granted"]}}},
            {"$set": {"expires": {"$subtract": ["$at", missing_ms]}, "processed": "$at"}},
        ]

    def read(self, raw: Any) -> Granted:
        """Return what was granted."""
        next_at = _next_at(self.limit, raw["tokens"], raw["at"])
        return Granted(int(raw["granted"]), next_at)


@dataclass(slots=True)
class GiveBack(Command[object]):
    """Put tokens back into a bucket. A bucket that is missing is full."""

    id: str
    limit: Limit
    count: int

    def send(self, collection: Any) -> Any:
        """Send a findAndModify."""
        tokens = {"$add": ["$tokens", self.count]}
        capped = {"$min": [float(self.limit.capacity), tokens]}
        return collection.find_one_and_update({"_id": self.id}, [{"$set": {"tokens": capped}}])


def take(queue: str, limit: Limit, wanted: Mapping[str, int]) -> Plan[dict[str, Granted]]:
    """Ask for permits to start messages.

    Args:
        queue: the name of the queue.
        limit: its limit, which has a rate.
        wanted: how many messages are to start, by key.

    Returns:
        What was granted, by key. None of it may be used much later.
    """
    for _ in range(ROUNDS):
        asked = yield from MonotonicTime()
        keys = list(wanted)
        answers = yield from concurrently(
            [_take_one(queue, limit, key, wanted[key]) for key in keys]
        )
        granted = dict(zip(keys, answers, strict=True))
        if (yield from MonotonicTime()) - asked <= VALID_S:
            return granted
        unused = {key: each.permits for key, each in granted.items()}
        yield from give_back(queue, limit, unused)
    return {key: each._replace(permits=0) for key, each in granted.items()}


def permits(queue: str, key: str, followed: FollowedLimit, now: datetime, wanted: int) -> Plan[int]:
    """Return how many messages of one key may start, unless it is known that none may.

    ``followed`` remembers when the next one may start, if these are fewer than ``wanted``.
    """
    limit = followed.limit
    if limit is None or limit.rate is None:  # another thread has read that it is gone
        return wanted
    if followed.waits(now):
        return 0
    granted = (yield from take(queue, limit, {key: wanted}))[key]
    few = granted.permits < wanted
    followed.expect("", granted.next_at if few else None, now)
    return granted.permits


def may_start(
    queue: str, limit: Limit, followed: FollowedLimit, keys: Collection[str], now: datetime
) -> Plan[dict[str, MayStart]]:
    """Return how many messages of each key may start now, and when the next one may.

    This only reads. ``followed`` remembers it.
    """
    ids = {permits_id(queue, key): key for key in keys}
    found = {key: MayStart(limit.capacity, now) for key in keys}
    fields = {"tokens": 1, "at": 1}
    for each in (yield from Find({"_id": {"$in": list(ids)}}, fields)) if ids else ():
        found[ids[each["_id"]]] = _counted(limit, each, now)
    for key, counted in found.items():
        followed.expect(key, None if counted.number else counted.next_at, now)
    return found


def _counted(limit: Limit, bucket: Document, now: datetime) -> MayStart:
    """Return what a bucket would grant, as ``TakePermits`` counts."""
    at = bucket["at"]
    if at > now + timedelta(milliseconds=CLOCK_STEP_MS):
        at = now
    passed_s = max(0.0, (now - at).total_seconds())
    tokens = min(float(limit.capacity), bucket["tokens"] + passed_s / limit.token_s)
    number = math.floor(tokens + ROUNDING)
    return MayStart(number, now if number else _next_at(limit, tokens, max(at, now)))


def _next_at(limit: Limit, tokens: float, at: datetime) -> datetime:
    """Return when the next token comes, if there are so many at an instant."""
    missing = max(0.0, 1 - tokens)
    return at + timedelta(milliseconds=math.ceil(missing * limit.token_s * 1000))


def return_permits(queue: str, key: str, followed: FollowedLimit, unused: int) -> Plan[None]:
    """Return what ``permits`` granted and was not used."""
    if unused > 0 and followed.limit is not None:
        followed.forget()
        yield from give_back(queue, followed.limit, {key: unused})


def _take_one(queue: str, limit: Limit, key: str, wanted: int) -> Plan[Granted]:
    while True:
        try:
            return (yield from TakePermits(permits_id(queue, key), limit, wanted, majority=True))
        except DuplicateKey:
            continue  # two looks made the document at once


def give_back(queue: str, limit: Limit, unused: Mapping[str, int]) -> Plan[None]:
    """Return permits that were not used. If this fails, they are lost.

    Args:
        queue: the name of the queue.
        limit: its limit.
        unused: how many, by key.
    """
    for key, count in unused.items():
        if count > 0:
            with suppress(Unavailable):
                yield from GiveBack(permits_id(queue, key), limit, count, w1=True)
