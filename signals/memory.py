"""The buses that need no server: within one process, and none at all.

All memory buses of a process hear each other, blocking and asyncio ones alike. An event is given to its listeners by
the very call of `emit`; only what the window held back needs a thread, which lives while something is held. Nothing
here may wait: `emit` is called on the hot path of a push.
"""

import os
import threading
from datetime import datetime
from time import monotonic

from signals.api import STATS
from signals.ears import Board, Ear, Steps, check_event
from signals.fronts import AsyncFront, BlockingFront
from signals.window import Window

_boards: dict[tuple[int, str], Board] = {}


class LocalCore:
    """The core of the memory buses, and with `prefix` None of those that carry nothing: see `signals.fronts.Core`."""

    def __init__(self, prefix: str | None, window: float) -> None:
        self._prefix, self._seconds = prefix, window
        self._closed = False
        self.stats = dict.fromkeys(STATS, 0)
        self._ears: set[Ear] = set()
        self.after_fork()

    def after_fork(self) -> None:
        """Start afresh; listeners of the parent are closed."""
        for ear in self._ears:
            ear.after_fork()
        self._ears = set()
        self._lock = threading.RLock()
        self._window = Window(self._seconds)
        self._trailing = False
        self._end = threading.Event()
        self._board = Board(local=True)
        if self._prefix is not None:
            self._board = _boards.setdefault((os.getpid(), self._prefix), self._board)

    def emit(self, topic: str, when: datetime | None) -> None:
        """Give an event to the listeners, or hold it back until the window closes."""
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
                    self._trailing = True
                    try:
                        threading.Thread(
                            target=self._trail, name="signals-memory", daemon=True
                        ).start()
                    except RuntimeError:  # the interpreter ends: there is no later
                        self._trailing = False
                        self._deliver(self._window.flush())

    def enter(self, ear: Ear) -> Steps[None]:
        """Let a listener hear."""
        with self._lock:
            self._ears.add(ear)
            self._board.add(ear)
        if self._closed:
            ear.close()
        yield from ()

    def leave(self, ear: Ear) -> None:
        """Let a listener hear no more."""
        with self._lock:
            self._ears.discard(ear)
            self._board.remove(ear)

    def check(self) -> Steps[None]:
        """There is nothing that could be out of reach."""
        yield from ()

    def pending(self) -> bool:
        """Nothing is worth a delay of the process's end: all listeners are in it."""
        return False

    def close(self) -> Steps[None]:
        """Deliver what is held back and close this bus's listeners; those of others hear on."""
        with self._lock:
            self._closed = True
            self._end.set()
            self._deliver(self._window.flush())
            ears = list(self._ears)
        for ear in ears:
            ear.close()
        yield from ()

    def _deliver(self, events: list[tuple[str, datetime | None]]) -> None:
        self.stats["published"] += len(events)
        for topic, when in events:
            self.stats["heard"] += bool(self._board.hear(topic, when))

    def _trail(self) -> None:
        while True:
            with self._lock:
                self._deliver(self._window.due(monotonic()))
                pause = self._window.next(monotonic())
                self._trailing = pause is not None
            if pause is None:
                return
            self._end.wait(pause)


class MemoryBus(BlockingFront):
    """Wakes listeners of this process, at once and without a server; it hears asyncio buses too.

    `prefix`: buses of another prefix are not heard. `window`: seconds in which events of a topic are merged.
    """

    def __init__(self, prefix: str = "pyqueue", *, window: float = 0.05) -> None:
        super().__init__(f"MemoryBus({prefix!r})", LocalCore(prefix, window))


class AsyncMemoryBus(AsyncFront):
    """`MemoryBus`, for asyncio. Its listeners may be in several event loops, and hear blocking buses too."""

    def __init__(self, prefix: str = "pyqueue", *, window: float = 0.05) -> None:
        super().__init__(f"AsyncMemoryBus({prefix!r})", LocalCore(prefix, window))


class NullBus(BlockingFront):
    """Carries nothing: a listener hears only that the bus was closed, so that its user polls."""

    def __init__(self) -> None:
        super().__init__("NullBus()", LocalCore(None, 0.0))


class AsyncNullBus(AsyncFront):
    """`NullBus`, for asyncio."""

    def __init__(self) -> None:
        super().__init__("AsyncNullBus()", LocalCore(None, 0.0))
