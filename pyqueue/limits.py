"""Limits on a queue: how many messages are reserved at a time, and how many start per period.

A limit is stored in the record of the queue, so that all of its consumers obey it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple

from pyqueue.clock import seconds
from pyqueue.errors import ConfigurationError

log = logging.getLogger("pyqueue")

#: A scan lists the reserved messages. With a larger limit it would take too long.
MAX_CONCURRENCY: Final = 10_000
_MAX_COUNT: Final = (1 << 31) - 1
_CENTURY_S: Final = 100 * 365 * 86400.0
#: A consumer asks again after this time at the latest: another one may have returned permits.
_RETRY: Final = timedelta(seconds=5)
#: The number of keys for which a consumer remembers when the next message may start.
_MAX_KEYS: Final = 10_000
#: Keys are stored in indexes. A longer key is replaced by its hash.
_MAX_KEY: Final = 200
#: The key under which all messages of a queue count if its limit has no ``per``.
WHOLE_QUEUE: Final = ""
_HEADER: Final = "headers."
_FIELDS: Final = ("concurrency", "rate", "period", "burst", "per")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Limit:
    """A limit on a queue, across all processes: ``concurrency``, ``rate``, or both.

    In any interval of t seconds, at most ``burst + rate * t / period`` messages start. A message
    starts when it is claimed, and a retry counts as another start.

    Args:
        concurrency: The maximum number of messages that are reserved at a time.
        rate: The maximum number of messages that start per period, on average.
        period: The length of a period, in seconds.
        burst: How many messages may start at once after a pause; 1 by default.
        per: "headers.NAME": each value of this header has a separate limit. All messages without
            the header share one limit.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    concurrency: int | None = None
    rate: float | None = None
    period: float | timedelta = 1
    burst: int | None = None
    per: str | None = None

    def __post_init__(self) -> None:
        if self.concurrency is None and self.rate is None:
            raise ConfigurationError(
                "limit: set concurrency (messages held at once) or rate (starts per period)"
            )
        _check_count("concurrency", self.concurrency, MAX_CONCURRENCY)
        _check_count("burst", self.burst)
        if self.rate is None:
            if self.burst is not None:
                raise ConfigurationError("burst: has no effect without a rate; set rate, too")
            if self.period != 1:
                raise ConfigurationError("period: has no effect without a rate; set rate, too")
        else:
            _check_number("rate", self.rate)
            period_s = self.period_s
            if not 0.001 <= period_s <= _CENTURY_S:
                raise ConfigurationError(
                    f"period: {shown(self.period)} is not allowed; use more than 0 seconds, and "
                    "at most 100 years"
                )
            if self.capacity / self.rate * period_s > _CENTURY_S:
                raise ConfigurationError(
                    f"rate: {shown(self.rate)} is too low; a burst would take more than 100 years "
                    "to refill, so use more starts per period"
                )
        if self.per is not None:
            _check_per(self.per)

    @property
    def period_s(self) -> float:
        """The length of a period in seconds."""
        period = self.period
        if isinstance(period, bool) or not isinstance(period, (int, float, timedelta)):
            raise ConfigurationError(
                f"period: expected seconds (int or float) or a timedelta, found "
                f"{type(period).__name__}"
            )
        try:
            return seconds(period)
        except OverflowError:  # an int that no float can hold
            return math.inf

    @property
    def capacity(self) -> int:
        """How many messages may start at once after a pause."""
        return 1 if self.burst is None else self.burst

    @property
    def token_s(self) -> float:
        """How many seconds pass until one more message may start."""
        return 0.0 if self.rate is None else self.period_s / self.rate

    @property
    def header(self) -> str | None:
        """The name of the header whose values have separate limits."""
        return None if self.per is None else self.per.removeprefix(_HEADER)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.stored().items())
        return f"Limit({given})"

    def stored(self) -> dict[str, object]:
        """Return the values that were given, in the form that the record of a queue stores."""
        found = {name: getattr(self, name) for name in _FIELDS}
        found["period"] = None if self.rate is None else self.period_s
        return {name: value for name, value in found.items() if value is not None}


class MayStart(NamedTuple):
    """How many messages of one key may start under a limit."""

    #: How many messages may start now.
    number: int
    #: When the next message after these may start.
    next_at: datetime


class Drain(NamedTuple):
    """A former limit on concurrency, kept as long as messages may still be held under it."""

    #: The largest limit that applied before.
    concurrency: int
    #: When the limit was lowered.
    at: datetime

    @classmethod
    def of(cls, stored: object) -> Drain | None:
        """Return the drain that the record of a queue stores, or None if it has no valid drain."""
        if not isinstance(stored, Mapping):
            return None
        number, at = stored.get("concurrency"), stored.get("at")
        if not isinstance(number, int) or not isinstance(at, datetime):
            return None
        return cls(min(number, MAX_CONCURRENCY), at)


def drain_of(before: object, drain: Drain | None, after: object, now: datetime) -> Drain | None:
    """Return the drain to store with a changed limit, or None if the limit was not lowered.

    Args:
        before: The limit as the record stores it.
        drain: The drain that the record has so far, or None.
        after: The limit to be stored. A limit without concurrency also counts as lowered, because
            the next change may set a lower concurrency.
        now: The current instant.
    """
    former, lower = (
        each.get("concurrency", 0) if isinstance(each, Mapping) else 0 for each in (before, after)
    )
    most = max(former, 0 if drain is None else drain.concurrency)
    return Drain(most, now) if most > lower else None


def key_of(limit: Limit, document: Mapping[str, Any]) -> str:
    """Return the key under which a limit counts a message, or ``WHOLE_QUEUE`` without ``per``.

    Messages without the header share the key "-". Equal values of different types have different
    keys. The key of a long value is "#" with the hash of the value.
    """
    if limit.header is None:
        return WHOLE_QUEUE
    headers = document.get("headers")
    value = headers.get(limit.header) if isinstance(headers, Mapping) else None
    if isinstance(value, str):
        if len(value) <= _MAX_KEY:
            return f"={value}"
        return f"#{sha256(value.encode()).hexdigest()}"
    return repr(value) if isinstance(value, (bool, int, float)) else "-"


def _check_count(name: str, value: Any, most: int = _MAX_COUNT) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigurationError(
            f"{name}: {shown(value)} is not allowed; use a whole number from 1 to {most}"
        )


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e9:
        raise ConfigurationError(
            f"{name}: {shown(value)} is not allowed; use a number above 0, and at most 1e9"
        )


def _check_per(value: Any) -> None:
    name = value.removeprefix(_HEADER) if isinstance(value, str) else ""
    try:
        name.encode()
    except UnicodeEncodeError:
        name = ""
    if (
        not isinstance(value, str)
        or not value.startswith(_HEADER)
        or not name
        or "." in name
        or name.startswith("$")
        or "\0" in name
    ):
        raise ConfigurationError(
            f'per: {shown(value)} is not allowed; use "headers.NAME", where NAME is a '
            "header name without a dot or a leading $"
        )


def shown(value: object) -> str:
    """Return a value in the form that error texts show."""
    try:
        return repr(value)[:120]
    except Exception:  # a user's __repr__, an int of thousands of digits, or too deep nesting
        return f"this {type(value).__name__}"


def check_limit(value: Any) -> Limit:
    """Check a limit that a caller gave, and return it.

    Raises:
        ConfigurationError: The value is not a Limit.
    """
    if not isinstance(value, Limit):
        raise ConfigurationError(f"limit: expected a Limit, found {type(value).__name__}")
    return value


def check_call(queue: str, limit: Limit | None, call: str | None) -> None:
    """Refuse a call that cannot obey the limit of a queue.

    Args:
        queue: The name of the queue.
        limit: The limit of the queue, or None if it has none.
        call: "pop" or "claim", which cannot obey every limit; None for a call that can.

    Raises:
        ConfigurationError: The call cannot obey the limit.
    """
    if limit is not None and limit.concurrency is not None and call is not None:
        raise ConfigurationError(
            f"{call}: queue {queue!r} has a limit on concurrency, which counts reserved messages; "
            "reserve messages and commit them instead"
        )
    if limit is not None and limit.per is not None and call == "claim":
        raise ConfigurationError(
            f"{call}: queue {queue!r} has a limit per key, which a named claim cannot enforce; "
            "reserve messages and commit them instead"
        )


def stored_limit(value: object) -> Limit:
    """Return the limit that a record stores. A newer release, or a person, may have written it.

    Raises:
        ConfigurationError: This release cannot read the stored limit.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"expected a document, found {shown(value)}")
    if unknown := sorted(str(name) for name in value if name not in _FIELDS):
        raise ConfigurationError(f"unknown fields {', '.join(map(repr, unknown))}")
    return Limit(**value)


def limit_or_none(queue: str, shape: object) -> Limit | None:
    """Return the limit in the shared options of a record, or None if the queue has none.

    Raises:
        ConfigurationError: This release cannot read the stored limit.
    """
    value = shape.get("limit") if isinstance(shape, Mapping) else None
    if value is None:
        return None
    try:
        return stored_limit(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"limit: the limit of queue {queue!r} cannot be read ({error}); upgrade pyqueue-mongo, "
            "or set the limit again with client.reshape()"
        ) from error


@dataclass(slots=True)
class LastGrants:
    """What a claim learned when it asked for permits."""

    #: How many seconds its request took; of several requests, the quickest.
    trip_s: float = 0
    #: When its first permits were granted, keyed by limit key, by the clock of the primary.
    at: dict[str, datetime] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class FollowedLimit:
    """The limit of a queue as a consumer last read it, and what the consumer has learned since."""

    limit: Limit | None = None
    #: When the next message may start, for each key whose rate lets no message start now.
    _starts: dict[str, datetime] = field(default_factory=dict)
    #: Why the stored limit cannot be read, or None. Unless it is None, nothing may be claimed.
    unreadable: str | None = None
    #: Whether the last scan found taken slots, or left few slots free. If not, the next scan does
    #: not read the slots and assumes that all are free; the unique index refuses a taken slot.
    meets_slots: bool = True
    #: No message may start before this instant, unless a claim ends. None if the limit did not stop
    #: the last scan.
    blocked_until: datetime | None = None
    #: Until this instant, do not scan beyond a page of blocked messages; see ``limits.scan``.
    behind_at: datetime | None = None
    #: A former limit on concurrency under which messages may still be held, or None.
    drain: Drain | None = None
    #: How the last claim got its permits.
    grants: LastGrants = field(default_factory=LastGrants)
    #: Whether the limit was read. Before that, nothing may be claimed.
    known: bool = False
    #: Whether a warning was logged that requests for permits take long.
    noted_slow: bool = False

    def follow(self, queue: str, shape: object) -> None:
        """Take over the limit that is stored in the record of the queue.

        Raises:
            ConfigurationError: The limit cannot be read, and no limit was read before. If one was
                read before, the error is logged once, and no claim is made until it is fixed.
        """
        try:
            limit = limit_or_none(queue, shape)
            if limit != self.limit:
                self.limit, self._starts, self.blocked_until = limit, {}, None
            self.unreadable, self.known = None, True
        except ConfigurationError as error:
            if not self.known:
                raise
            if self.unreadable is None:
                log.error("nothing is received from queue %r: %s", queue, error)
            self.unreadable = str(error)

    @property
    def next_start(self) -> datetime | None:
        """When the next message may start, or None if one may start now or there is no rate."""
        return self._starts.get(WHOLE_QUEUE)

    def waits(self, now: datetime, key: str = WHOLE_QUEUE) -> bool:
        """Return whether no message of a key may start now, as far as this consumer knows."""
        next_start = self._starts.get(key)
        # A start further ahead comes from a clock that was set back since.
        return (
            self.limit is not None and next_start is not None and now < next_start <= now + _RETRY
        )

    def forget(self, key: str = WHOLE_QUEUE) -> None:
        """Assume from now on that messages of a key may start."""
        self._starts.pop(key, None)

    def expect(self, key: str, next_start: datetime | None, now: datetime) -> None:
        """Remember when the next message of a key may start. None means now."""
        self.forget(key)
        if next_start is None:
            return
        if len(self._starts) >= _MAX_KEYS:
            later = {key: each for key, each in self._starts.items() if each > now}
            self._starts = later if len(later) < _MAX_KEYS else {}
        self._starts[key] = min(next_start, now + _RETRY)

    def first_start(self, now: datetime) -> datetime | None:
        """Return the earliest time at which a message of any waiting key may start, or None."""
        return min((each for each in list(self._starts.values()) if each > now), default=None)
