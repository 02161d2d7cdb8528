"""The rate of a limit: the server counts, for all processes, how many messages may start now.

Each key of a limit has one document, a token bucket::

    _id        "~limit:QUEUE~KEY"; there is no ``q``, so nothing mistakes it for a message
    tokens     how many messages could start at ``at``, up to ``burst``
    at         when the tokens were last counted, by the clock of the primary
    granted    how many permits the last claim got
    asked      when that claim asked for permits, by the clock of the primary
    expires    when the bucket is full and may be deleted: a missing bucket counts as full
    processed  the index ``expires`` contains only documents with this field

A claim first finds messages, then asks for permits, and starts one message for each permit. It
waits until a majority has stored the grant. Otherwise, after a fail-over, the same permits could
be granted again. If a process dies during a claim, its permits are lost. A claim gives unused
permits back if it can. ``permits`` contains the code that all users of permits share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.backends.scan import FIRST
from pyqueue.clock import BAND
from pyqueue.concurrently import SHORT_AT_ONCE, concurrently
from pyqueue.errors import DuplicateKey, Unavailable
from pyqueue.limits import FollowedLimit, Limit, MayStart
from pyqueue.requests import Command, Document, Find, MonotonicTime, Plan, UpdateEach

#: The shortest time for which permits are valid, in seconds.
VALID_S: Final = 1.0
#: If ``at`` is further ahead of the primary's clock than this, the clock was set back. A smaller
#: difference is waited out, because commands of one instant may be executed in any order.
CLOCK_STEP_MS: Final = 60_000
#: A token counts as whole if no more than this part is missing, because sums are rounded. The
#: missing part stays subtracted from the bucket.
ROUNDING: Final = 1e-6


class Granted(NamedTuple):
    """The permits that a claim got, and the times that the claim needs to know."""

    #: How many messages may start now.
    permits: int
    #: When the next message may start, by the clock of the primary.
    next_at: datetime
    #: When the permits were granted, by the clock of the primary.
    asked: datetime
    #: When the claim asked, by the monotonic clock of this process.
    sent: float = 0
    #: How long the server took to answer, in seconds.
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
    """Update the number of tokens in a bucket, and take up to ``wanted`` of them."""

    id: str
    limit: Limit
    wanted: int

    def send(self, collection: Any) -> Any:
        """Send a findAndModify that counts the tokens by the server's clock."""
        return collection.find_one_and_update(
            {"_id": self.id}, self.pipeline(), upsert=True, return_document=True
        )

    def pipeline(self) -> list[dict[str, Any]]:
        """Return the update as an aggregation pipeline."""
        capacity, token_ms = float(self.limit.capacity), self.limit.token_s * 1000
        # Each stage of the update reads the fields as the earlier stages have set them.
        set_back = {"$gt": ["$at", {"$subtract": ["$$NOW", -CLOCK_STEP_MS]}]}
        at = {"$cond": [set_back, "$$NOW", {"$max": ["$at", "$$NOW"]}]}
        passed_ms = {"$max": [0, {"$subtract": [at, "$at"]}]}
        filled = {"$add": ["$tokens", {"$divide": [passed_ms, token_ms]}]}
        whole = {"$floor": {"$add": ["$tokens", ROUNDING]}}
        missing_ms = {"$multiply": [{"$subtract": ["$tokens", capacity]}, token_ms]}
        # A bucket with invalid tokens counts as full. Other types sort before or after dates.
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
        """Return the permits that were granted, with their times."""
        next_at = _next_at(self.limit, raw["tokens"], raw["at"])
        return Granted(int(raw["granted"]), next_at, raw["asked"])


def take(
    queue: str, limit: Limit, wanted: Mapping[str, int], stop: float = math.inf
) -> Plan[dict[str, Granted]]:
    """Ask for permits to start messages.

    Args:
        queue: The name of the queue.
        limit: The limit of the queue, which has a rate.
        wanted: How many messages are to start, keyed by limit key.
        stop: When to stop asking for more keys, by the monotonic clock.

    Returns:
        The grants, keyed by limit key. A key is missing if there was no time to ask for its
        permits. The first key is never missing.
    """
    stops = [math.inf] + [stop] * len(wanted)  # no stop for the first key
    questions = [
        _take_one(queue, limit, key, number, until)
        for (key, number), until in zip(wanted.items(), stops, strict=False)
    ]
    answers = yield from concurrently(questions, SHORT_AT_ONCE)
    return {key: each for key, each in zip(wanted, answers, strict=True) if each is not None}


def may_start(
    queue: str, limit: Limit, followed: FollowedLimit, keys: Collection[str], now: datetime
) -> Plan[dict[str, MayStart]]:
    """Return how many messages of each key may start now, and when the next message may start.

    This takes no permits. It notes in ``followed`` when messages of keys without permits may start.
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
    """Return how many permits a bucket could grant now, as ``TakePermits`` counts them."""
    at = bucket["at"]
    if at > now + timedelta(milliseconds=CLOCK_STEP_MS):
        at = now
    passed_s = max(0.0, (now - at).total_seconds())
    tokens = min(float(limit.capacity), bucket["tokens"] + passed_s / limit.token_s)
    number = math.floor(tokens + ROUNDING)
    return MayStart(number, now if number else _next_at(limit, tokens, max(at, now)))


def _next_at(limit: Limit, tokens: float, at: datetime) -> datetime:
    """Return when the next whole token is available, given the number of tokens at ``at``."""
    missing = max(0.0, 1 - tokens)
    return at + timedelta(milliseconds=math.ceil(missing * limit.token_s * 1000))


def _take_one(queue: str, limit: Limit, key: str, wanted: int, stop: float) -> Plan[Granted | None]:
    while (sent := (yield from MonotonicTime())) < stop:
        try:
            granted = yield from TakePermits(permits_id(queue, key), limit, wanted, majority=True)
        except DuplicateKey:
            continue  # two claims tried to create the bucket at once
        return granted._replace(sent=sent, trip_s=(yield from MonotonicTime()) - sent)
    return None


def give_back(queue: str, limit: Limit, unused: Sequence[tuple[str, Granted]]) -> Plan[None]:
    """Put unused permits, each with its limit key, back into the buckets as tokens.

    A missing bucket is already full. If the server is unavailable, the permits are lost.
    """
    pairs: list[Any] = [
        ({"_id": permits_id(queue, key)}, _giving_back(limit, each)) for key, each in unused
    ]
    with suppress(Unavailable):
        yield from UpdateEach(pairs, w1=True)


def _giving_back(limit: Limit, unused: Granted) -> list[dict[str, Any]]:
    """Return the update of a bucket, less the tokens that the bucket gained since the grant.

    Otherwise more messages than the burst could start, if the bucket was full in between.
    """
    accrued = {"$divide": [{"$subtract": ["$$NOW", unused.asked]}, limit.token_s * 1000]}
    rest = {"$max": [0, {"$subtract": [unused.permits, accrued]}]}
    capped = {"$min": [float(limit.capacity), {"$add": ["$tokens", rest]}]}
    return [{"$set": {"tokens": capped}}]
