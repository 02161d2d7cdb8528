"""The rate of a limit: how many messages may start now, counted by the server for all processes.

Each key of a limit has one document, a token bucket::

    _id        "~limit:QUEUE~KEY"; without ``q``, so that nothing takes it for a message
    tokens     how many messages could start at ``at``, up to ``burst``
    at         when the tokens were last counted, by the clock of the primary
    granted    how many messages the last claim may start
    asked      when that claim asked, by the clock of the primary
    expires    when the bucket is full and may be deleted: a missing bucket counts as full
    processed  the index ``expires`` contains only documents with this field

A claim first finds messages, then asks for permits, and starts one message for each permit. A
majority stores the grant before the claim continues. Otherwise a fail-over could grant the permits
again. If a claim dies, its permits are lost. A claim gives unused permits back if it can.
``permits`` contains the code that all users of permits share.
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

#: The shortest validity of permits, in seconds.
VALID_S: Final = 1.0
#: A bucket further ahead of the primary's clock than this shows that the clock was set back. A
#: smaller step is waited out: commands of one instant may be executed in any order.
CLOCK_STEP_MS: Final = 60_000
#: A token counts as whole if no more than this is missing, because sums are rounded. The missing
#: part is not given away.
ROUNDING: Final = 1e-6


class Granted(NamedTuple):
    """The answer to a claim that asked for permits."""

    #: How many messages may start now.
    permits: int
    #: When the next message may start, by the clock of the primary.
    next_at: datetime
    #: When the permits were granted, by the clock of the primary.
    asked: datetime
    #: When the claim asked, by the monotonic clock of this process.
    sent: float = 0
    #: How long the answer took, in seconds.
    trip_s: float = 0
    #: How long the permits are valid, in seconds.
    valid_s: float = VALID_S

    @property
    def until(self) -> datetime:
        """When the permits expire, by the clock of the primary."""
        return self.asked + timedelta(seconds=self.valid_s)


def permits_id(queue: str, key: str) -> str:
    """Return the _id of the token bucket of one key of a queue."""
    return f"~limit:{queue}~{key}"


@dataclass(slots=True)
class TakePermits(Command[Granted]):
    """Count the tokens of a bucket and take up to ``wanted`` of them."""

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
        # Each expression reads the fields as the earlier stages of the update have set them.
        set_back = {"$gt": ["$at", {"$subtract": ["$$NOW", -CLOCK_STEP_MS]}]}
        at = {"$cond": [set_back, "$$NOW", {"$max": ["$at", "$$NOW"]}]}
        passed_ms = {"$max": [0, {"$subtract": [at, "$at"]}]}
        filled = {"$add": ["$tokens", {"$divide": [passed_ms, token_ms]}]}
        whole = {"$floor": {"$add": ["$tokens", ROUNDING]}}
        missing_ms = {"$multiply": [{"$subtract": ["$tokens", capacity]}, token_ms]}
        # Without valid tokens a bucket counts as full. Other types sort before or after dates.
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
        """Return the grant."""
        next_at = _next_at(self.limit, raw["tokens"], raw["at"])
        return Granted(int(raw["granted"]), next_at, raw["asked"])


@dataclass(slots=True)
class GiveBack(Command[object]):
    """Put unused tokens back into a bucket. A missing bucket is full already."""

    id: str
    limit: Limit
    unused: Granted

    def send(self, collection: Any) -> Any:
        """Send a findAndModify. Expired permits come back less the tokens accrued since the grant.

        Otherwise a bucket that was full in between could let more messages than the burst start.
        """
        since_ms = {"$subtract": ["$$NOW", self.unused.asked]}
        accrued = {"$divide": [since_ms, self.limit.token_s * 1000]}
        is_valid = {"$lt": ["$$NOW", self.unused.until]}
        rest = {"$max": [0, {"$subtract": [self.unused.permits, accrued]}]}
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
        stop: when to stop asking for further keys, by the monotonic clock.

    Returns:
        The grants by key, without the keys that were not asked for. The first key is always
        asked for.
    """
    stops = [math.inf] + [stop] * len(wanted)  # no stop for the first key
    questions = [
        _take_one(queue, limit, key, number, until)
        for (key, number), until in zip(wanted.items(), stops, strict=False)
    ]
    answers = yield from concurrently(questions)
    return {key: each for key, each in zip(wanted, answers, strict=True) if each is not None}


def may_start(
    queue: str, limit: Limit, followed: FollowedLimit, keys: Collection[str], now: datetime
) -> Plan[dict[str, MayStart]]:
    """Return how many messages of each key may start now, and when the next one may start.

    This takes no permits. ``followed`` remembers the result.
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
    """Return how many permits a bucket could grant, counted like ``TakePermits``."""
    at = bucket["at"]
    if at > now + timedelta(milliseconds=CLOCK_STEP_MS):
        at = now
    passed_s = max(0.0, (now - at).total_seconds())
    tokens = min(float(limit.capacity), bucket["tokens"] + passed_s / limit.token_s)
    number = math.floor(tokens + ROUNDING)
    return MayStart(number, now if number else _next_at(limit, tokens, max(at, now)))


def _next_at(limit: Limit, tokens: float, at: datetime) -> datetime:
    """Return when the next whole token is available, given the number of tokens at an instant."""
    missing = max(0.0, 1 - tokens)
    return at + timedelta(milliseconds=math.ceil(missing * limit.token_s * 1000))


def _take_one(queue: str, limit: Limit, key: str, wanted: int, stop: float) -> Plan[Granted | None]:
    while (sent := (yield from MonotonicTime())) < stop:
        try:
            granted = yield from TakePermits(permits_id(queue, key), limit, wanted, majority=True)
        except DuplicateKey:
            continue  # two claims created the document at once
        return granted._replace(sent=sent, trip_s=(yield from MonotonicTime()) - sent)
    return None


def give_back(queue: str, limit: Limit, key: str, unused: Granted) -> Plan[None]:
    """Give back unused permits. If this fails, they are lost."""
    with suppress(Unavailable):
        yield from GiveBack(permits_id(queue, key), limit, unused, w1=True)
