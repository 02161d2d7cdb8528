"""Limits of queues on the command line: their text, and the faults of stored limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pyqueue import Client, ConfigurationError, Limit
from pyqueue.backends.kind import known, require_limit
from pyqueue.backends.namespace import RECORD_IDS
from pyqueue.durations import seconds_of
from pyqueue.limits import limit_or_none


def limit_text(limit: Limit) -> str:
    """Return a limit as a text that ``limit_of`` accepts."""
    return ",".join(f"{name}={value}" for name, value in limit.stored().items())


def limit_of(text: str) -> Limit | Literal[False]:
    """Return the limit that a text such as "rate=100,period=60" describes, or False for "none".

    Raises:
        ConfigurationError: A value is not allowed.
    """
    if text == "none":
        return False
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in Limit.__dataclass_fields__ or not equals:
            raise ConfigurationError(
                f"limit: {part.strip()!r} is not allowed; use NAME=VALUE pairs, "
                "separated by commas, where NAME is one of "
                f"{', '.join(Limit.__dataclass_fields__)}, or 'none'"
            )
        if name in given:
            raise ConfigurationError(f"limit: {name} is set twice; set it once")
        given[name] = value if name == "per" else _number(name, value)
    return Limit(**given)


def _number(name: str, text: str) -> float:
    for of in (int, float):
        try:
            return of(text)
        except ValueError:
            continue
    if name == "period":
        try:
            return seconds_of(text)
        except ValueError as error:
            raise ConfigurationError(f"period: {error}") from None
    raise ConfigurationError(f"{name}: {text!r} is not allowed; use a number")


def wrong_limits(client: Client) -> Iterator[str]:
    """Yield the faults of stored limits. A queue with a faulty limit delivers nothing."""
    match = {"_id": RECORD_IDS, "shape.limit": {"$exists": True}}
    for record in client.database[client.namespace].find(match, {"q": 1, "kind": 1, "shape": 1}):
        queue, kind = str(record.get("q")), record.get("kind")
        try:
            limit = limit_or_none(queue, record.get("shape"))
            if limit is not None and kind in known():
                require_limit(known()[kind], queue, limit)
        except ConfigurationError as error:
            yield str(error)
