"""The buses that need no server: ``MemoryBus`` within one process, and ``NullBus``.

All memory buses of a process with one prefix hear each other, blocking and asyncio ones alike.
``emit`` itself delivers an event.
"""

from datetime import datetime

from signals.hub import check_event
from signals.runner import AsyncFacade, BlockingFacade, LocalRunner


class MemoryBus(BlockingFacade):
    """Wakes listeners of this process at once, without a server. It hears asyncio buses too.

    Args:
        prefix: buses with another prefix are not heard.
    """

    def __init__(self, prefix: str = "pyqueue") -> None:
        super().__init__(LocalRunner(f"MemoryBus({prefix!r})", ("memory", prefix)))


class AsyncMemoryBus(AsyncFacade):
    """``MemoryBus`` for asyncio. Its listeners may live in several event loops."""

    def __init__(self, prefix: str = "pyqueue") -> None:
        super().__init__(LocalRunner(f"AsyncMemoryBus({prefix!r})", ("memory", prefix)))


class NullRunner(LocalRunner):
    """Runs a bus that carries nothing."""

    def emit(self, topic: str, when: datetime | None) -> None:
        """Count an event."""
        check_event(topic, when)
        with self._lock:
            self.stats["emitted"] += 1
            self.stats["failed"] += self._closed


class NullBus(BlockingFacade):
    """Carries nothing, so its users poll. A listener wakes only when it or the bus is closed."""

    def __init__(self) -> None:
        super().__init__(NullRunner("NullBus()", "none"))


class AsyncNullBus(AsyncFacade):
    """``NullBus`` for asyncio."""

    def __init__(self) -> None:
        super().__init__(NullRunner("AsyncNullBus()", "none"))
