"""The values of single options: each function checks one text and returns its value."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Final

from pyqueue import arguments
from pyqueue.errors import ConfigurationError

_YES_OR_NO: Final = ("true", "false")
_MAX_EPOCH: Final = 10**12 - 1
#: JSON, or the beginning of a Spark type. Only Spark itself can parse the whole type.
_PAYLOAD_TYPE: Final = re.compile(
    r"(?i)json$|(variant|struct|array|map|string|boolean|byte|tinyint|short|smallint|int|integer|"
    r"long|bigint|float|real|double|dec|decimal|numeric|binary|timestamp|timestamp_ntz|"
    r"timestamp_ltz|date)\b"
)
_TIME: Final = re.compile(r"([0-9]{1,9}) ?(ms|s|m|h)")
_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def position(name: str, given: str) -> str:
    """Check the place where reading a stream begins or ends, and return it."""
    if given in ("first", "last") or (given.isascii() and given.isdecimal() and len(given) < 16):
        return given
    try:
        return arguments.instant(name, datetime.fromisoformat(given)).isoformat()
    except ValueError:  # the base of the errors of ``instant``, too
        raise ConfigurationError(
            f'{name}: {given!r} is not allowed; use "first", "last", a position, or an instant '
            "with its time zone, such as 2026-01-31T12:00:00Z"
        ) from None


def payload_type(name: str, given: str) -> str:
    """Check the type of a payload, and return it."""
    if not _PAYLOAD_TYPE.match(given):
        raise ConfigurationError(
            f'{name}: {given!r} is not allowed; use "json", "variant" or a Spark type, for '
            'example "struct<a: bigint>"'
        )
    return given


def queue_name(name: str, given: str) -> str:
    """Check the name of a queue or a stream, and return it."""
    return arguments.queue_name(given)


def queue_names(name: str, given: str) -> tuple[str, ...]:
    """Check the names of the queues that may be written to, and return them."""
    queues = tuple(arguments.queue_name(each) for each in names(name, given))
    if len(set(queues)) < len(queues):
        raise ConfigurationError(
            f"{name}: {given!r} is not allowed; name each queue once, separated by commas"
        )
    return queues


def names(name: str, given: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [each.strip() for each in given.split(",")]


def group(name: str, given: str) -> str:
    """Check the name of a group, a stage or a query, and return it."""
    return arguments.group(given, name)


def batch_number(name: str, given: str) -> int:
    """Check the number of a batch, and return it."""
    if not given.isdecimal() or int(given) > _MAX_EPOCH:
        raise ConfigurationError(
            f"{name}: {given!r} is not allowed; use the number of the batch, which Spark passes "
            "to the function of foreachBatch as the second argument"
        )
    return int(given)


def id_prefix(name: str, given: str) -> str:
    """Check a prefix of ids, and return it."""
    try:
        return str(arguments.identity(given))
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def one_of(*allowed: str) -> Callable[[str, str], str]:
    """Return a function that checks that a text is one of these words."""
    return lambda name, given: arguments.one_of(name, given, allowed)


def either(no: str, yes: str) -> Callable[[str, str], bool]:
    """Return a function that accepts one of two words, and returns whether the word is ``yes``."""
    return lambda name, given: arguments.one_of(name, given, (no, yes)) == yes


def yes_or_no(name: str, given: str) -> bool:
    """Return whether the text is "true". The only other valid text is "false"."""
    return arguments.one_of(name, given.lower(), _YES_OR_NO) == _YES_OR_NO[0]


def count(most: int, *, least: int = 1) -> Callable[[str, str], int]:
    """Return a function that checks a whole number from ``least`` to ``most``."""

    def check(name: str, given: str) -> int:
        if not given.isdecimal() or not least <= int(given) <= most:
            raise ConfigurationError(
                f"{name}: {given!r} is not allowed; use a whole number from {least} to {most}"
            )
        return int(given)

    return check


def delay(name: str, given: str) -> float:
    """Return the seconds in a duration such as "30s", written as for Spark's Kafka source."""
    found = _TIME.fullmatch(given)
    if found is None or not (length := float(found[1]) * _UNITS[found[2]]):
        raise ConfigurationError(
            f'{name}: {given!r} is not allowed; use a duration, such as "30s", "15m" or "1h"'
        )
    return length


def seconds(name: str, given: str) -> float:
    """Return a positive duration in seconds."""
    try:
        length: float | str = float(given)
    except ValueError:  # refused next
        length = given
    return arguments.duration(name, length, positive=True)
