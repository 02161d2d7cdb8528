"""The buses that need no server: ``MemoryBus``, for one process, and ``NullBus``.

All memory buses of a process that have the same prefix hear each other, both blocking and asyncio
buses. ``emit`` delivers an event before it returns.
"""

from signals.hub import Place
from signals.runner import AsyncFacade, BlockingFacade, LocalRunner


class MemoryBus(BlockingFacade):
    """Wakes listeners of this process at once, without a server. It also hears asyncio buses.

    Args:
        prefix: A name. The bus hears only buses with the same prefix.
    """

    def __init__(self, prefix: str = "pyqueue") -> None:
        super().__init__(LocalRunner(f"MemoryBus({prefix!r})", ("memory", prefix)))


class AsyncMemoryBus(AsyncFacade):
    """``MemoryBus`` for asyncio. Its listeners may be used in different event loops."""

    def __init__(self, prefix: str = "pyqueue") -> None:
        super().__init__(LocalRunner(f"AsyncMemoryBus({prefix!r})", ("memory", prefix)))


class NullRunner(LocalRunner):
    """Runs a bus that delivers events only to its own listeners."""

    def _reset(self) -> None:
        super()._reset()
        self._place = Place()
        self._place.join(self.hub)


class NullBus(BlockingFacade):
    """A bus that reaches no other bus, so consumers that use other buses have to poll."""

    def __init__(self) -> None:
        super().__init__(NullRunner("NullBus()", "none"))


class AsyncNullBus(AsyncFacade):
    """``NullBus`` for asyncio."""

    def __init__(self) -> None:
        super().__init__(NullRunner("AsyncNullBus()", "none"))
