"""What callers may pass: every check that refuses bad input before anything is written, each naming the argument and the remedy."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId

from pyqueue.clock import BAND, seconds
from pyqueue.errors import ConfigurationError, InvalidName
from pyqueue.messages import Backoff, Id, Reservation, hashable_id

__all__ = [
    "backoff",
    "count",
    "duration",
    "group",
    "headers",
    "identity",
    "instant",
    "is_unicode",
    "key",
    "namespace_name",
    "one_of",
    "queue_name",
    "reservations",
    "starting",
]

_QUEUE = re.compile(r"[A-Za-z0-9_\-.:>]{1,110}")
_NAMESPACE = re.compile(r"(?=.{1,100}$)[A-Za-z_][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+)*")
_CENTURY = 100 * 365 * 86400.0
#: The largest number that every command takes where it counts.
_MOST = (1 << 31) - 1


def queue_name(value: Any) -> str:
    """A queue's name: 1-110 of A-Z a-z 0-9 _ - . : > (a trailing ".dead" not counted)."""
    if not isinstance(value, str):
        raise InvalidName(f"name: a queue's name is a str, not {type(value).__name__}")
    stem = value.removesuffix(".dead") or value
    if not _QUEUE.fullmatch(stem):
        raise InvalidName(
            f"name: {value[:120]!r} is no queue name: 1-110 characters of A-Z a-z 0-9 _ - . : > are allowed"
        )
    return value


def group(value: Any, name: str = "group") -> str:
    """A claim group's name: as a queue's."""
    if not isinstance(value, str) or not _QUEUE.fullmatch(value):
        raise ConfigurationError(
            f"{name}: {_shown(value)} is no name: 1-110 characters of A-Z a-z 0-9 _ - . : > are allowed"
        )
    return value


def namespace_name(value: Any) -> str:
    """A namespace's name, which is its collection's."""
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value) or value.startswith("system."):
        raise InvalidName(
            f"namespace: {_shown(value)} is no namespace name: a letter or _, then up to 99 of A-Z a-z 0-9 _ - are allowed, "
            "and single dots between them"
        )
    return value


def duration(name: str, value: Any, *, positive: bool = False) -> float:
    """A duration in seconds, from seconds or a timedelta: finite, not negative, at most 100 years."""
    if isinstance(value, bool) or not isinstance(value, (int, float, timedelta)):
        raise ConfigurationError(
            f"{name}: give seconds (int or float) or a timedelta, not {type(value).__name__}"
        )
    try:
        length = seconds(value)
    except OverflowError:  # an int beyond every float
        length = math.inf
    if (
        not math.isfinite(length)
        or length < 0
        or length > _CENTURY
        or (positive and length < 0.001)
    ):
        bound = "more than 0" if positive else "0 or more"
        raise ConfigurationError(
            f"{name}: {_shown(value)} is not allowed: {bound} seconds, and at most 100 years"
        )
    return length


def instant(name: str, value: Any) -> datetime:
    """An aware instant before the year 8000, as UTC in whole milliseconds, the resolution of what is stored."""
    if not isinstance(value, datetime):
        raise ConfigurationError(
            f"{name}: give a timezone-aware datetime, not {type(value).__name__}"
        )
    if value.utcoffset() is None:
        raise ConfigurationError(
            f"{name}: {value!r} has no time zone: give an aware datetime, e.g. datetime.now(timezone.utc)"
        )
    try:
        moment = value.astimezone(UTC)
    except OverflowError:  # at either end of Python's calendar
        moment = BAND if value.year > 1 else datetime.min.replace(tzinfo=UTC)
    if moment >= BAND:
        raise ConfigurationError(
            f"{name}: {value!r} is too far away: instants before the year 8000 are allowed"
        )
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def starting(now: datetime, delay: Any, at: Any) -> datetime:
    """When a message becomes eligible: after ``delay``, or ``at`` an instant (one that has passed is now)."""
    if delay is not None and at is not None:
        raise ConfigurationError("delay, at: give one of the two, not both")
    if at is not None:
        return max(now, instant("at", at))
    if delay is not None:
        return now + timedelta(milliseconds=math.ceil(duration("delay", delay) * 1000))
    return now


def is_unicode(text: str) -> bool:
    """Whether a str has a form in UTF-8: one with a surrogate alone has none, and cannot be stored."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _shown(value: Any) -> str:
    """A value in an error's text."""
    try:
        return repr(value)[:120]
    except Exception:  # of anybody's making; Python itself writes no int of thousands of digits, and nothing that is nested too deeply
        return f"this {type(value).__name__}"


def key(value: Any, name: str = "key") -> str:
    """A message key: a str of 1-512 characters without NUL."""
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= 512
        or "\0" in value
        or not is_unicode(value)
    ):
        raise ConfigurationError(
            f"{name}: {_shown(value)} is not allowed: give a str of 1-512 characters of Unicode without NUL"
        )
    return value


def identity(value: Any) -> Id:
    """An id of the caller's: an ObjectId, or a str of 1-512 characters that does not start with "~"."""
    if isinstance(value, ObjectId):
        return value
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= 512
        or value.startswith("~")
        or "\0" in value
        or not is_unicode(value)
    ):
        raise ConfigurationError(
            f"id: {_shown(value)} is not allowed: give an ObjectId, or a str of 1-512 characters of Unicode without NUL "
            'that does not start with "~"'
        )
    return value


def headers(value: Any) -> dict[str, str | int | float | bool] | None:
    """Headers: {str: str | int | float | bool}, names without dots, without a leading $, not empty."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"headers: give a mapping, not {type(value).__name__}")
    for name, item in value.items():
        if (
            not isinstance(name, str)
            or not name
            or "." in name
            or name.startswith("$")
            or "\0" in name
            or not is_unicode(name)
        ):
            raise ConfigurationError(
                f"headers: the name {_shown(name)} is not allowed: a str without dots and without a leading $"
            )
        if (
            not isinstance(item, (str, int, float, bool))
            or (isinstance(item, int) and not -(1 << 63) <= item < 1 << 63)
            or (isinstance(item, str) and not is_unicode(item))
        ):
            raise ConfigurationError(
                f"headers: {name}: give a str of Unicode, int (64 bit), float or bool, not {type(item).__name__} {_shown(item)}"
            )
    return dict(value)


def backoff(value: Any) -> None:
    """A Backoff whose waits are durations: base and maximum 0 or more, factor 0 or more, jitter from 0 to 1."""
    if not isinstance(value, Backoff):
        raise ConfigurationError(f"backoff: give a Backoff, not {type(value).__name__}")
    for name, most in (
        ("base", _CENTURY),
        ("maximum", _CENTURY),
        ("factor", sys.float_info.max),
        ("jitter", 1),
    ):
        number = getattr(value, name)
        if (
            isinstance(number, bool)
            or not isinstance(number, (int, float))
            or not 0 <= number <= most
        ):
            raise ConfigurationError(
                f"backoff.{name}: {_shown(number)} is not allowed: give a number from 0 to {most:g}"
            )


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in allowed:
        raise ConfigurationError(
            f"{name}: {_shown(value)} is not allowed: give one of {', '.join(map(repr, allowed))}"
        )
    return str(value)


def count(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of 31 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ConfigurationError(
            f"{name}: {_shown(value)} is not allowed: give a whole number from {least} to {_MOST}"
        )
    return value


def reservations(queue: str, given: tuple[Any, ...]) -> list[Reservation[Any]]:
    """Reservations of this queue, each once."""
    unique: dict[tuple[Hashable, str], Reservation[Any]] = {}
    for each in given:
        if not isinstance(each, Reservation):
            raise ConfigurationError(
                f"reservations: give what reserve() returned, not {type(each).__name__}"
            )
        if each.queue != queue:
            raise ConfigurationError(
                f"reservations: message {each.id} was reserved from queue {each.queue!r}; settle it there, not at {queue!r}"
            )
        unique[hashable_id(each.id), each.token] = each
    return list(unique.values())
