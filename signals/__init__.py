"""Signal buses: wake the waiting consumers of any process when a message may be ready::

    import signals
    from datetime import UTC, datetime

    bus = signals.open("memory:")  # or "redis://host/0", or "capped:" with database=
    with bus.listen("orders") as listener:  # hears from here on: check, then wait
        bus.emit("orders", datetime.now(UTC))
        assert listener.wait(timeout=5)
    bus.close()

A signal tells a consumer to check its queue; it carries no message. If a signal is lost, a consumer
is only late, because it also polls. So a bus never makes the code that emits signals wait or fail.
This package imports nothing from pyqueue.
"""

from signals.api import STATS, AsyncBus, AsyncListener, Bus, BusError, Listener
from signals.capped_bus import AsyncCappedBus, CappedBus
from signals.memory import AsyncMemoryBus, AsyncNullBus, MemoryBus, NullBus
from signals.redis_bus import AsyncRedisBus, RedisBus
from signals.window import Window, earliest

__all__ = [
    "STATS",
    "AsyncBus",
    "AsyncCappedBus",
    "AsyncListener",
    "AsyncMemoryBus",
    "AsyncNullBus",
    "AsyncRedisBus",
    "Bus",
    "BusError",
    "CappedBus",
    "Listener",
    "MemoryBus",
    "NullBus",
    "RedisBus",
    "Window",
    "earliest",
    "open",
    "open_async",
]


def open(url: str, database: object = None, *, prefix: str = "pyqueue") -> Bus:
    """Open the bus that ``url`` names. This does no I/O.

    Args:
        url: "memory:", "redis://...", "rediss://...", "unix://...", "capped:" or "none:".
        database: The PyMongo database, for "capped:" only.
        prefix: The prefix of every topic, or of the capped collection ("<prefix>.signals"). Buses
            with different prefixes do not hear each other.

    Raises:
        BusError: The URL is invalid or names no known bus, or the database is missing.
    """
    match _scheme(url):
        case "memory":
            return MemoryBus(prefix)
        case "none":
            return NullBus()
        case "capped":
            return CappedBus(database, prefix=prefix)
    return RedisBus(url, prefix=prefix)


def open_async(url: str, database: object = None, *, prefix: str = "pyqueue") -> AsyncBus:
    """Open the asyncio bus that ``url`` names. This does no I/O.

    Args:
        url: As for ``open``.
        database: An AsyncDatabase of PyMongo or an AsyncIOMotorDatabase, for "capped:" only.
        prefix: As for ``open``.

    Raises:
        BusError: The URL is invalid or names no known bus, or the database is missing.
    """
    match _scheme(url):
        case "memory":
            return AsyncMemoryBus(prefix)
        case "none":
            return AsyncNullBus()
        case "capped":
            return AsyncCappedBus(database, prefix=prefix)
    return AsyncRedisBus(url, prefix=prefix)


def _scheme(url: str) -> str:
    scheme = str(url).partition(":")[0]
    if scheme not in ("memory", "none", "capped", "redis", "rediss", "unix"):
        allowed = '"memory:", "redis://...", "rediss://...", "unix://...", "capped:", "none:"'
        raise BusError(f"unknown bus {scheme + ':'!r}; use one of {allowed}")
    return scheme
