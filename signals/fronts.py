"""The blocking and the asyncio face of every bus in this package, over a core that serves both.

All rules are in the core; the two faces differ by `await` alone and must stay that way.
"""

import atexit
import os
import weakref
from datetime import datetime
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from signals.api import BusError, Stats
from signals.ears import Ear, Steps, TaskListener, ThreadListener, run, run_async


class Core(Protocol):
    """What a bus does, for either face."""

    stats: dict[str, int]

    def emit(self, topic: str, when: datetime | None) -> None:
        """Take an event. Never waits, and raises for a wrong argument only."""

    def enter(self, ear: Ear) -> Steps[None]:
        """Let a listener hear."""

    def leave(self, ear: Ear) -> None:
        """Let a listener hear no more."""

    def check(self) -> Steps[None]:
        """Raise BusError unless the bus can be used."""

    def close(self) -> Steps[None]:
        """Send what is held back and close every listener."""

    def pending(self) -> bool:
        """Say whether something still has to be sent."""

    def after_fork(self) -> None:
        """Start afresh in the child of a fork: it has none of the threads, and perhaps a lock that stays held."""


class _Front:
    def __init__(self, name: str, core: Core) -> None:
        self._name, self._core = name, core
        _everyone.add(self)

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> Any:
        raise BusError(f"{self._name} cannot be pickled: open another where it is needed")

    @property
    def stats(self) -> Stats:
        """What this bus has counted so far; see `signals.STATS`."""
        return MappingProxyType(self._core.stats)

    def emit(self, topic: str, when: datetime | None) -> None:
        """Say that `topic` has something from `when` on (aware), or that its record changed (None).

        Returns at once, whatever the server does; raises BusError for a wrong argument only.
        """
        self._core.emit(topic, when)


class BlockingFront(_Front):
    """The face for blocking code."""

    def listen(self, topic: str) -> ThreadListener:
        """Return a listener for a `with` block: it hears from entering on, so look after entering, then wait."""
        return ThreadListener(self._core, topic)

    def check(self) -> None:
        """Raise BusError if the server cannot be reached, refuses the password, or does not permit what is needed."""
        run(self._core.check())

    def close(self) -> None:
        """Send what is held back, within a second, and wake this bus's listeners. A client it was given stays open."""
        run(self._core.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncFront(_Front):
    """The face for asyncio."""

    def listen(self, topic: str) -> TaskListener:
        """Return a listener for an `async with` block: it hears from entering on, so look after, then wait."""
        return TaskListener(self._core, topic)

    async def check(self) -> None:
        """Raise BusError if the server cannot be reached, refuses the password, or does not permit what is needed."""
        await run_async(self._core.check())

    async def close(self) -> None:
        """Send what is held back, within a second, and wake this bus's listeners. A client it was given stays open."""
        await run_async(self._core.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


_everyone: weakref.WeakSet[_Front] = weakref.WeakSet()


def _after_fork() -> None:
    for front in list(_everyone):
        front._core.after_fork()


def _at_exit() -> None:
    # A script that pushes and ends has no later chance to say so.
    for front in list(_everyone):
        if isinstance(front, BlockingFront) and front._core.pending():
            front.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
