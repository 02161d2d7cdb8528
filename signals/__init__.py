"""Wake-up buses: tell waiting consumers, in any process, that it is worth looking now.

    import signals
    from datetime import UTC, datetime

    bus = signals.open("memory:")                # or "redis://host/0", or "capped:" with database=
    with bus.listen("orders") as listener:       # hears from here on: look first, then wait
        bus.emit("orders", datetime.now(UTC))
        assert listener.wait(timeout=5)
    bus.close()

A bus says *look*, never *what is there*: losing a signal costs a listener time until its own next poll, nothing else.
So no bus here may fail, slow down or block whoever emits. The package stands alone and imports nothing from pyqueue.
"""

from typing import Any

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


def open(url: str, database: Any = None, *, prefix: str = "pyqueue") -> Bus:
    """Open the bus that `url` names.

    `url`: "memory:", "redis://...", "rediss://...", "unix://...", "capped:" or "none:". `database`: for "capped:", the
    PyMongo database. `prefix`: goes before every topic, or names the capped collection ("<prefix>.signals"); buses of
    another prefix are not heard. Nothing is connected yet. Raises BusError for any other URL.
    """
    bus: Bus = _find(url, database, prefix, NullBus, MemoryBus, RedisBus, CappedBus)
    return bus


def open_async(url: str, database: Any = None, *, prefix: str = "pyqueue") -> AsyncBus:
    """Open the asyncio bus that `url` names; as `open`, where `database` is an AsyncDatabase or one of motor."""
    bus: AsyncBus = _find(
        url, database, prefix, AsyncNullBus, AsyncMemoryBus, AsyncRedisBus, AsyncCappedBus
    )
    return bus


def _find(
    url: str, database: Any, prefix: str, null: Any, memory: Any, redis: Any, capped: Any
) -> Any:
    scheme = str(url).partition(":")[0]
    match scheme:
        case "memory":
            return memory(prefix)
        case "none":
            return null()
        case "redis" | "rediss" | "unix":
            return redis(url, prefix=prefix)
        case "capped":
            return capped(database, prefix=prefix)
    allowed = '"memory:", "redis://...", "rediss://...", "unix://...", "capped:", "none:"'
    raise BusError(f"unknown bus {scheme + ':'!r}; allowed are {allowed}")
