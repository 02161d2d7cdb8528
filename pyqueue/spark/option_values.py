"""The values of single options: each function checks one text and returns what it means."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from pyqueue import arguments
from pyqueue.errors import ConfigurationError

__all__ = ["count", "delay", "number", "position", "queue_names", "yes_or_no"]

_YES_OR_NO: Final = ("true", "false")
_TIME: Final = re.compile(r"([0-9]{1,9}) ?(ms|s|m|h)")
_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def position(name: str, given: str) -> str:
    """Return where a read of a stream begins or ends."""
    if given in ("first", "last") or (given.isascii() and given.isdecimal() and len(given) < 16):
        return given
    try:
        return arguments.instant(name, datetime.fromisoformat(given)).isoformat()
    except ValueError:  # the errors of ``instant`` are, too
        raise ConfigurationError(
            f'{name}: {given!r} is not allowed: give "first", "last", a position, or an instant '
            "with its time zone, such as 2026-01-31T12:00:00Z"
        ) from None


def queue_names(queue: str | None, queues: str | None, stream: str | None) -> tuple[str, ...]:
    """Return the queues of a write, or the one of a read; of a read of a stream, the stream."""
    if stream is not None:
        return (arguments.queue_name(stream),)
    if queue is not None and queues is not None:
        raise ConfigurationError(
            "queue, queues: give one of the two. With queues, the column queue of each row names "
            "one of them"
        )
    if queues is None:
        if queue is None:
            raise ConfigurationError(
                'queue: name the queue: .option("queue", "..."); or, for a read of a stream, '
                '.option("stream", "..."). In SQL use CREATE TEMPORARY VIEW ... USING pyqueue '
                "OPTIONS (...): Spark does not give the options of a table to its data source"
            )
        return (arguments.queue_name(queue),)
    names = [arguments.queue_name(name.strip()) for name in queues.split(",")]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"queues: {queues!r} is not allowed: name each queue once, separated by commas"
        )
    return tuple(names)


def yes_or_no(name: str, given: str | None) -> bool:
    """Return whether the text is "true"; it may be "false"."""
    return arguments.one_of(name, (given or "").lower(), _YES_OR_NO) == _YES_OR_NO[0]


def count(name: str, given: str | None, most: int, *, least: int = 1) -> int:
    """Return a whole number from ``least`` to ``most``."""
    if given is None or not given.isdecimal() or not least <= int(given) <= most:
        raise ConfigurationError(
            f"{name}: {given!r} is not allowed: give a whole number from {least} to {most}"
        )
    return int(given)


def delay(given: str) -> float:
    """Return the seconds of a time such as "30s", as Spark's source of Kafka takes it."""
    found = _TIME.fullmatch(given)
    if found is None or not (seconds := float(found[1]) * _UNITS[found[2]]):
        raise ConfigurationError(
            f'maxTriggerDelay: {given!r} is not allowed: give a time, such as "30s", "15m" or "1h"'
        )
    return seconds


def number(given: str | None) -> float | str | None:
    """Return the number; a text that is none is returned unchanged, for the check to refuse."""
    try:
        return float(given or "")
    except ValueError:
        return given
