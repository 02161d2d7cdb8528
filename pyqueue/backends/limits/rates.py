"""The rate of a limit: how many messages may start now, counted by the server for all processes.

Each key of a limit has one document, a token bucket::

    _id        "~limit:QUEUE~KEY"; without ``q``, so that nothing takes it for a message
    tokens     how many messages could start at ``at``, at most ``burst``
    at         when the tokens were last counted, by the clock of the primary
    granted    how many messages the last claim may start
    asked      when that claim asked, by the clock of the primary
    expires    when the bucket is full, and the server may delete it: one that is missing is full
    processed  the index ``expires`` has only documents with this field

A claim asks for permits after it has found messages, and starts as many as it got. The permits are
stored by a majority before the claim goes on. Otherwise a fail-over could grant them again. Permits
of a claim that dies are lost. What a claim did not use, it gives back if it can. ``permits`` has
what all users of permits share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.backends.scan import FIRST
from pyqueue.clock import BAND
from pyqueue.concurrently import concurrently
from pyqueue.errors import DuplicateKey, Unavailable
from pyqueue.limits import FollowedLimit, Limit, MayStart
from pyqueue.requests import Command, Document, Find, MonotonicTime, Plan

#: How long permits are valid at least, in seconds.
VALID_S: Final = 1.0
#: A bucket that is further ahead of the primary's clock than this means that the clock was set
#: back. A smaller step is waited out: commands of one instant may be carried out in any order.
CLOCK_STEP_MS: Final = 60_000
#: Less than this much of a token may be missing, because sums are rounded. It is not given away.
ROUNDING: Final = 1e-6


class Granted(NamedTuple):
    """The answer to a claim that asked for permits."""

    #: How many messages may start now.
    permits: int
    #: When the next one may start, by the clock of the primary.
    next_at: datetime
    #: When they were granted, by the clock of the primary.
    asked: datetime
    #: When they were asked for, by the monotonic clock of this process.
    sent: float = 0
    #: How long the answer took, in seconds.
    trip_s: float = 0
    #: How long they are valid, in seconds.
    valid_s: float = VALID_S

    @property
    def until(self) -> datetime:
        """Until when they are valid, by the clock of the primary."""
        return self.asked + timedelta(seconds=self.valid_s)


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
        # A bucket that pyqueue would not write is full. Other types come before or behind dates.
        a_date = {"$min": [BAND, {"$max": [FIRST, "$at"]}]}
        a_number = {"$cond": [{"$isNumber": "$tokens"}, "$tokens", capacity]}
        return [
            {"$set": {"at": a_date, "tokens": a_number}},
            {"$set": {"at": at, "tokens": {"$min": [capacity, filled]}}},
            {"$set": {"granted": {"$max": [0, {"$min": [self.wanted, whole]}]}}},
            {"$set": {"tokens": {"$subtract": ["$tokens", "$granted"]}, "asked": "$$NOW"}},
            {"$set": {"expires": {"$subtract": ["$at", missing_ms]}, "processed": "$at"}},
        ]

    def read(self, raw: Any) -> Granted:
        """Return what was granted."""
        next_at = _next_at(self.limit, raw["tokens"], raw["at"])
        return Granted(int(raw["granted"]), next_at, raw["asked"])


@dataclass(slots=True)
class GiveBack(Command[object]):
    """Put tokens back into a bucket. A bucket that is missing is full.

    If the permits are no longer valid, it puts back fewer: less what came since. The bucket may
    have been full since, and more messages than the burst would start within a short time.
    """

    id: str
    limit: Limit
    unused: Granted

    def send(self, collection: Any) -> Any:
        """Send a findAndModify that counts by the server's clock."""
        since_ms = {"$subtract": ["$$NOW", self.unused.asked]}
        since = {"$divide": [since_ms, self.limit.token_s * 1000]}
        is_valid = {"$lt": ["$$NOW", self.unused.until]}
        rest = {"$max": [0, {"$subtract": [self.unused.permits, since]}]}
        tokens = {"$add": ["$tokens", {"$cond": [is_valid, self.unused.permits, rest]}]}
        capped = {"$min": [float(self.limit.capacity), tokens]}
        return collection.find_one_and_update({"_id": self.id}, [{"$set": {"tokens": capped}}])


def take(
    queue: str, limit: Limit, wanted: Mapping[str, int], stop: float = math.inf
) -> Plan[dict[str, Granted]]:
    """Ask for permits to start messages.

    Args:
        queue: the name of the queue.
        limit: its limit, which has a rate.
        wanted: how many messages are to start, by key.
        stop: when to ask for no more keys, by the monotonic clock.

    Returns:
        What was granted, by key, without the keys that it did not ask for. It asks for the first.
    """
    stops = [math.inf] + [stop] * len(wanted)
    questions = [
        _take_one(queue, limit, key, number, until)
        for (key, number), until in zip(wanted.items(), stops, strict=False)
    ]
    answers = yield from concurrently(questions)
    return {key: each for key, each in zip(wanted, answers, strict=True) if each is not None}


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
        if isinstance(each.get("at"), datetime) and isinstance(each.get("tokens"), (int, float)):
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


def _take_one(queue: str, limit: Limit, key: str, wanted: int, stop: float) -> Plan[Granted | None]:
    while (sent := (yield from MonotonicTime())) < stop:
        try:
            granted = yield from TakePermits(permits_id(queue, key), limit, wanted, majority=True)
        except DuplicateKey:
            continue  # two claims made the document at once
        return granted._replace(sent=sent, trip_s=(yield from MonotonicTime()) - sent)
    return None


def give_back(queue: str, limit: Limit, key: str, unused: Granted) -> Plan[None]:
    """Return permits that were not used. If this fails, they are lost."""
    with suppress(Unavailable):
        yield from GiveBack(permits_id(queue, key), limit, unused, w1=True)
