"""The buses that need no server: ``MemoryBus`` within one process, and ``NullBus``.

All memory buses of a process with one prefix hear each other, blocking and asyncio ones alike.
``emit`` itself delivers an event. Only events that the window holds back need a thread, which lives
while something is held back. Nothing here may wait, because a push calls ``emit``.
"""

import os
import threading
from datetime import datetime
from time import monotonic

from signals.hub import Hub, check_event
from signals.runner import AsyncFacade, BaseRunner, BlockingFacade
from signals.transport import Procedure

_hubs: dict[tuple[int, str], Hub] = {}  # by process id, so that a fork does not share them


class MemoryRunner(BaseRunner):
    """Runs a bus within this process. With ``prefix`` None it carries nothing."""

    def __init__(self, kind: str, prefix: str | None, window: float) -> None:
        self._prefix = prefix
        super().__init__(kind if prefix is None else f"{kind}({prefix!r})", window)

    def _reset(self) -> None:
        super()._reset()
        self._trailing = False  # whether the thread runs
        self._ending = threading.Event()

    def _make_hub(self) -> Hub:
        hub = Hub(local=True)
        return hub if self._prefix is None else _hubs.setdefault((os.getpid(), self._prefix), hub)

    def emit(self, topic: str, when: datetime | None) -> None:
        """Deliver an event, or hold it back until the window closes."""
        check_event(topic, when)
        with self._lock:
            self.stats["emitted"] += 1
            if self._closed:
                self.stats["failed"] += 1
            elif self._prefix is None:
                pass
            elif self._window.offer(topic, when, monotonic()):
                self._deliver([(topic, when)])
            else:
                self.stats["merged"] += 1
                if not self._trailing:
                    self._start_trailing()

    def close(self) -> Procedure[None]:
        """Deliver the events that are held back and close the listeners of this bus."""
        with self._lock:
            self._closed = True
            self._ending.set()
            self._deliver(self._window.flush())
            entered = list(self._entered)
        for subscription in entered:
            subscription.close()
        yield from ()

    def _deliver(self, events: list[tuple[str, datetime | None]]) -> None:
        self.stats["published"] += len(events)
        for topic, when in events:
            self.stats["heard"] += self.hub.deliver(topic, when)

    def _start_trailing(self) -> None:
        self._trailing = True
        try:
            threading.Thread(target=self._trail, name="signals-memory", daemon=True).start()
        except RuntimeError:  # the interpreter exits, so nothing can be delivered later
            self._trailing = False
            self._deliver(self._window.flush())

    def _trail(self) -> None:
        while True:
            with self._lock:
                self._deliver(self._window.due(monotonic()))
                pause = self._window.next(monotonic())
                self._trailing = pause is not None
            if pause is None:
                return
            self._ending.wait(pause)


class MemoryBus(BlockingFacade):
    """Wakes listeners of this process at once, without a server. It hears asyncio buses too.

    Args:
        prefix: buses with another prefix are not heard.
        window: seconds in which events of one topic are merged.
    """

    def __init__(self, prefix: str = "pyqueue", *, window: float = 0.05) -> None:
        super().__init__(MemoryRunner("MemoryBus", prefix, window))


class AsyncMemoryBus(AsyncFacade):
    """``MemoryBus`` for asyncio. Its listeners may live in several event loops."""

    def __init__(self, prefix: str = "pyqueue", *, window: float = 0.05) -> None:
        super().__init__(MemoryRunner("AsyncMemoryBus", prefix, window))


class NullBus(BlockingFacade):
    """Carries nothing, so its users poll. A listener wakes only when it or the bus is closed."""

    def __init__(self) -> None:
        super().__init__(MemoryRunner("NullBus()", None, 0.0))


class AsyncNullBus(AsyncFacade):
    """``NullBus`` for asyncio."""

    def __init__(self) -> None:
        super().__init__(MemoryRunner("AsyncNullBus()", None, 0.0))
