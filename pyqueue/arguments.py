"""Checks of the arguments that users pass.

Each check runs before anything is written. Its error names the argument and the remedy.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bson import ObjectId

from pyqueue.clock import BAND, seconds
from pyqueue.documents import hashable_id
from pyqueue.errors import ConfigurationError, InvalidName
from pyqueue.limits import shown
from pyqueue.messages import HIGHEST_PRIORITY, MAX_PACK, Backoff, Id, Message, Reservation

_QUEUE = re.compile(r"[A-Za-z0-9_\-.:>]{1,110}")
_NAMESPACE = re.compile(r"(?=.{1,100}$)[A-Za-z_][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+)*")
_LEAST_RETENTION_S = 600
_CENTURY_S = 100 * 365 * 86400.0
#: The largest count that every command of the server accepts.
_MAX_COUNT = (1 << 31) - 1
#: The longest id, in characters.
MAX_ID: Final = 512
_MAX_HEADERS = 64
_MAX_HEADERS_BYTES = 8192


def queue_name(value: Any, argument: str = "name") -> str:
    """Check a queue name, and return it. A final ".dead" does not count toward its length."""
    if not isinstance(value, str):
        raise InvalidName(
            f"{argument}: expected the name of a queue as a str, found {type(value).__name__}"
        )
    stem = value.removesuffix(".dead") or value
    if not _QUEUE.fullmatch(stem):
        raise InvalidName(
            f"{argument}: invalid queue name {value[:120]!r}; use 1-110 of A-Z a-z 0-9 _ - . : >"
        )
    return value


def dead_letter(queue: str, value: Any) -> str:
    """Return the name of a queue's dead-letter queue, by default "<queue>.dead"."""
    if value is None:
        return f"{queue}.dead"
    if value == queue:
        raise ConfigurationError(
            f"dead_letter: queue {queue!r} cannot be its own dead-letter queue; use another name"
        )
    return queue_name(value, "dead_letter")


def targets(queue: str, value: Any, *, least: int = 1) -> tuple[str, ...]:
    """Check the names of a stage's target queues, and return them. None may be listed twice."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigurationError(f"to: the stage of queue {queue!r} needs a list of queue names")
    names = tuple(map(queue_name, value))
    if len(names) < least:
        raise ConfigurationError(
            f"to: the stage of queue {queue!r} leads nowhere; "
            "name the next queue, or make the stage a sink"
        )
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ConfigurationError(
            f"to: the stage of queue {queue!r} lists {twice[0]!r} twice; list each target once"
        )
    return names


def choices(queue: str, to: Any) -> tuple[bool, tuple[str, ...]]:
    """Return whether each row of a Spark stage names its target queue, and the possible targets.

    ``to`` is a str for one target, a list if each row names one of them, and None for no target.
    """
    if to is None:
        return False, ()
    if isinstance(to, str):
        return False, (queue_name(to),)
    return True, targets(queue, to)


def transaction_body(name: str, function: Any, *, awaited: bool) -> Callable[..., Any]:
    """Wrap a function in a check of its result, which must be awaitable only if ``awaited``.

    Args:
        name: The name of the argument that is the function, for error texts.
        function: The function to wrap. If it is not callable, or is async but must not be, this
            raises at once.
        awaited: Whether the caller awaits the result, as an AsyncClient does.
    """
    fitting, reason = (
        ("an async function", "an AsyncClient awaits it")
        if awaited
        else ("a synchronous function", "only an AsyncClient takes async functions")
    )
    given = "" if callable(function) else f", found {type(function).__name__}"
    refused = ConfigurationError(f"{name}: expected {fitting}{given}; {reason}")
    if not callable(function) or (inspect.iscoroutinefunction(function) and not awaited):
        raise refused

    def call(*args: Any) -> Any:
        result = function(*args)
        if inspect.isawaitable(result) != awaited:
            if inspect.iscoroutine(result):
                result.close()
            raise refused
        return result

    return call


def takes_second(what: str, function: Callable[..., Any], names: tuple[str, str]) -> bool:
    """Return whether a function takes the second of two arguments, and not only the first.

    Args:
        what: The beginning of the error text, which names the function.
        function: The function whose parameters are examined.
        names: The names of the two arguments. If the second parameter of the function is optional,
            it counts only if it has the second of these names.
    """
    first, second = names
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # a builtin without a signature
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    required = [each for each in positional if each.default is each.empty]
    required_by_name = [
        each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if len(required) > 2 or required_by_name or not (positional or takes_any):
        raise ConfigurationError(
            f"{what}: expected a function that takes ({first}) or ({first}, {second})"
        )
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == second)


def group(value: Any, name: str = "group") -> str:
    """Check the name of a claim or consumer group by the rules for queue names, and return it."""
    if not isinstance(value, str) or not _QUEUE.fullmatch(value):
        raise ConfigurationError(
            f"{name}: invalid name {shown(value)}; use 1-110 of A-Z a-z 0-9 _ - . : >"
        )
    return value


def namespace_name(value: Any) -> str:
    """Check the name of a namespace, which is also its collection name, and return it."""
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value) or value.startswith("system."):
        raise InvalidName(
            f"namespace: invalid namespace name {shown(value)}; start with a letter or "
            "_, then use up to 99 of A-Z a-z 0-9 _ - and single dots"
        )
    return value


def collection_name(namespace: str, suffix: Any) -> str:
    """Return the name of another collection of a namespace, "<namespace>.<suffix>"."""
    name = f"{namespace}.{suffix}"
    if not isinstance(suffix, str) or not _NAMESPACE.fullmatch(name):
        raise InvalidName(
            f"suffix: {shown(suffix)} is not allowed; use A-Z a-z 0-9 _ - and single dots, up to "
            f"{99 - len(namespace)} characters"
        )
    return name


def duration(name: str, value: Any, *, positive: bool = False, most: str = "100 years") -> float:
    """Check that a duration is from 0 seconds to 100 years long, and return it in seconds.

    A caller that allows less gives ``most`` for the text of the error, and checks it afterwards.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, timedelta)):
        raise ConfigurationError(
            f"{name}: expected seconds (int or float) or a timedelta, found {type(value).__name__}"
        )
    try:
        length = seconds(value)
    except OverflowError:  # an int that no float can hold
        length = math.inf
    if (
        not math.isfinite(length)
        or length < 0
        or length > _CENTURY_S
        or (positive and length < 0.001)
    ):
        bound = "more than 0" if positive else "0 or more"
        raise ConfigurationError(
            f"{name}: {shown(value)} is not allowed; use {bound} seconds, and at most {most}"
        )
    return length


def retention(value: Any) -> float:
    """Check the retention of a stream, at least 10 minutes, and return it in seconds."""
    length = duration("retention", value)
    if length < _LEAST_RETENTION_S:
        raise ConfigurationError(
            f"retention: {shown(value)} is not allowed; use at least {_LEAST_RETENTION_S} "
            "seconds, because younger messages are never deleted"
        )
    return length


def instant(name: str, value: Any) -> datetime:
    """Check that an aware datetime is before the year 8000. Return it as UTC, in whole ms."""
    if not isinstance(value, datetime):
        raise ConfigurationError(
            f"{name}: expected a timezone-aware datetime, found {type(value).__name__}"
        )
    if value.utcoffset() is None:
        raise ConfigurationError(
            f"{name}: {value!r} has no time zone; "
            "use an aware datetime, such as datetime.now(timezone.utc)"
        )
    try:
        moment = value.astimezone(UTC)
    except OverflowError:  # at the first or last day of Python's calendar
        moment = BAND if value.year > 1 else datetime.min.replace(tzinfo=UTC)
    if moment >= BAND:
        raise ConfigurationError(
            f"{name}: {value!r} is too far in the future; use an instant before the year 8000"
        )
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def starting(now: datetime, delay: Any, at: Any) -> datetime:
    """Return when a message becomes eligible: after ``delay`` or at ``at``, but not before now."""
    if delay is not None and at is not None:
        raise ConfigurationError("delay, at: pass one of the two, not both")
    if at is not None:
        return max(now, instant("at", at))
    if delay is not None:
        return now + timedelta(milliseconds=math.ceil(duration("delay", delay) * 1000))
    return now


def is_unicode(text: str) -> bool:
    """Return whether a str can be stored, that is, encoded as UTF-8. Lone surrogates cannot be."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def payloads(value: Any, single: str) -> list[Any]:
    """Return the payloads as a list. ``single`` names the operation that takes one payload."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise ConfigurationError(
            f"payloads: expected a list of payloads, found {type(value).__name__}; "
            f"{single} takes a single payload"
        )
    return list(value)


def key(value: Any, name: str = "key") -> str:
    """Check a message key, a str of 1-512 characters without NUL, and return it."""
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= 512
        or "\0" in value
        or not is_unicode(value)
    ):
        raise ConfigurationError(
            f"{name}: {shown(value)} is not allowed; "
            "use a str of 1-512 Unicode characters without NUL"
        )
    return value


def identity(value: Any) -> Id:
    """Check and return an id: an ObjectId, or a str of 1-512 characters without a leading "~"."""
    if isinstance(value, ObjectId):
        return value
    if isinstance(value, Message):
        raise ConfigurationError(f"id: expected the id of a message, found {type(value).__name__}")
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= MAX_ID
        or value.startswith("~")
        or "\0" in value
        or not is_unicode(value)
    ):
        raise ConfigurationError(
            f"id: {shown(value)} is not allowed; use an ObjectId, or a str of 1-512 Unicode "
            'characters that has no NUL and does not start with "~"'
        )
    return value


def spellings(value: Any) -> list[Id]:
    """Return the ids to look up: the given id and, if it is an ObjectId as text, the ObjectId."""
    id = identity(value)
    if isinstance(id, str) and len(id) == 24 and ObjectId.is_valid(id):
        return [id, ObjectId(id)]
    return [id]


def headers(value: Any) -> dict[str, str | int | float | bool] | None:
    """Check headers, and return them: at most 64, with at most 8 KB of names and values.

    Names are not empty, contain no dot and do not start with "$".
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"headers: expected a mapping, found {type(value).__name__}")
    if len(value) > _MAX_HEADERS:
        raise ConfigurationError(
            f"headers: {len(value)} headers are too many; pass at most {_MAX_HEADERS}, and put the "
            "other values into the payload"
        )
    size = 0
    for name, item in value.items():
        _check_header(name, item)
        size += len(name.encode()) + (len(item.encode()) if isinstance(item, str) else 8)
    if size > _MAX_HEADERS_BYTES:
        raise ConfigurationError(
            f"headers: {size} bytes is too large; names and values may take {_MAX_HEADERS_BYTES} "
            "bytes together, so put large values into the payload"
        )
    return dict(value)


def each_headers(
    same: Any, labels: Iterable[Any] | None, number: int
) -> list[Mapping[str, Any] | None]:
    """Check the headers of several messages, and return one entry for each message.

    Args:
        same: The headers of every message.
        labels: The headers of each message, in place of ``same``; None to use ``same`` for all.
        number: How many messages there are.
    """
    if labels is None:
        valid: Mapping[str, Any] | None = headers(same)
        return [valid] * number
    return [headers(each) for each in labels]


def _check_header(name: Any, item: Any) -> None:
    if (
        not isinstance(name, str)
        or not name
        or "." in name
        or name.startswith("$")
        or "\0" in name
        or not is_unicode(name)
    ):
        raise ConfigurationError(
            f"headers: the name {shown(name)} is not allowed; "
            "use a str without dots and without a leading $"
        )
    if (
        not isinstance(item, (str, int, float, bool))
        or (isinstance(item, int) and not -(1 << 63) <= item < 1 << 63)
        or (isinstance(item, str) and not is_unicode(item))
    ):
        raise ConfigurationError(
            f"headers.{name}: expected a str that UTF-8 can encode, a 64-bit int, a float or a "
            f"bool, found {type(item).__name__} {shown(item)}"
        )


def backoff(value: Any) -> None:
    """Check a Backoff: base, factor and maximum must be at least 0, and jitter from 0 to 1."""
    if not isinstance(value, Backoff):
        raise ConfigurationError(f"backoff: expected a Backoff, found {type(value).__name__}")
    for name, most in (
        ("base", _CENTURY_S),
        ("maximum", _CENTURY_S),
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
                f"backoff.{name}: {shown(number)} is not allowed; use a number from 0 to {most:g}"
            )


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Check that a value is one of the allowed words, and return it."""
    if value not in allowed:
        raise ConfigurationError(
            f"{name}: {shown(value)} is not allowed; use one of {', '.join(map(repr, allowed))}"
        )
    return str(value)


def count(name: str, value: Any, *, least: int = 1) -> int:
    """Check that a value is a whole number from ``least`` to 2**31 - 1, and return it."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_COUNT:
        raise ConfigurationError(
            f"{name}: {shown(value)} is not allowed; "
            f"use a whole number from {least} to {_MAX_COUNT}"
        )
    return value


def flag(name: str, value: Any) -> bool:
    """Check that a value is True or False, and return it."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}: expected True or False, found {type(value).__name__}")
    return value


def ordered_group(value: Any) -> str:
    """Check a group of an ordered queue, a str of 1-512 characters without NUL, and return it."""
    return key(value, "group")


def priority(value: Any) -> int:
    """Check that a priority is a whole number from 0 to 9, and return it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= HIGHEST_PRIORITY:
        raise ConfigurationError(
            f"priority: {shown(value)} is not allowed; use a whole number from 0 to "
            f"{HIGHEST_PRIORITY}, where higher numbers go first"
        )
    return value


def pack(value: Any) -> int:
    """Check the maximum number of messages in a pack, from 2 to 1000, and return it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= MAX_PACK:
        raise ConfigurationError(
            f"pack: {shown(value)} is not allowed; use a whole number from 2 to {MAX_PACK}"
        )
    return value


def reservation(value: Any) -> Reservation[Any]:
    """Check that a value is a reservation, and return it."""
    if isinstance(value, Reservation):
        return value
    text = f"reservations: expected reservations from reserve(), found {type(value).__name__}"
    if isinstance(value, (list, tuple)):
        text += "; to settle several, unpack them, as in commit(*batch)"
    elif value is None:
        text += "; reserve() returned None because no message came in time"
    elif isinstance(value, Message):
        text += "; pop() has already removed the message"
    elif inspect.isawaitable(value):
        text += "; await reserve() first"
    raise ConfigurationError(text)


def reservations(queue: str, given: tuple[Any, ...]) -> list[Reservation[Any]]:
    """Check that reservations are from this queue, and return them without repetitions."""
    if len(given) == 1 and isinstance(given[0], Reservation) and given[0].queue == queue:
        return [given[0]]
    unique: dict[tuple[Hashable, str], Reservation[Any]] = {}
    for each in given:
        if reservation(each).queue != queue:
            raise ConfigurationError(
                f"reservations: message {each.id} was reserved from queue {each.queue!r}; "
                f"settle it with that queue, not with {queue!r}"
            )
        unique[hashable_id(each.id), each.token] = each
    return list(unique.values())


def owner(label: Any) -> str | None:
    """Check and return the label that names a client as a holder. None stands for the default."""
    if label is not None and (
        not isinstance(label, str) or len(label) > 256 or not is_unicode(label)
    ):
        raise ConfigurationError("owner: expected a str of at most 256 Unicode characters")
    return label


def session(value: Any) -> None:
    """Check that a value is the session of a transaction that has not ended, or None."""
    if value is not None and not hasattr(value, "in_transaction"):
        raise ConfigurationError(
            f"session: expected the session of transaction() or run_transaction(), "
            f"found {type(value).__name__}"
        )
    if getattr(value, "has_ended", False):
        raise ConfigurationError(
            "session: the session has ended; use it within transaction() or run_transaction()"
        )
