"""The protocols that every bus implements, and their only error.

Code that uses a bus needs only this module. The protocols contain no behavior, and a bus that you
write need not inherit from them.
"""

from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self


class BusError(Exception):
    """A bus cannot be used: an invalid argument, a wrong password, no permission, or no server."""


class Listener(Protocol):
    """Hears the events of one topic while its ``with`` block runs.

    A listener may have one more member: ``alert``, a function without arguments, or None. The
    listener calls ``alert`` for each event and when it is closed, in any thread. A caller that
    waits for several listeners at once sets ``alert``; if a listener lacks it, the caller has to
    check that listener again and again.
    """

    @property
    def when(self) -> datetime | None:
        """The earliest ``when`` that the last successful ``wait`` heard.

        None means that the record of the queue may have changed: read the record again.
        """

    @property
    def closed(self) -> bool:
        """Whether the listener or its bus was closed. If so, ``wait`` returns False at once."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for an event, up to ``timeout`` seconds. None means no limit.

        Returns:
            True if an event has arrived since ``wait`` last returned True.
        """

    def close(self) -> None:
        """Stop listening and wake the waiting caller. Any thread may call this."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class AsyncListener(Protocol):
    """``Listener`` for asyncio: ``wait`` is awaited, and the block is ``async with``."""

    @property
    def when(self) -> datetime | None:
        """The earliest ``when`` that the last successful ``wait`` heard.

        None means that the record of the queue may have changed: read the record again.
        """

    @property
    def closed(self) -> bool:
        """Whether the listener or its bus was closed. If so, ``wait`` returns False at once."""

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for an event, up to ``timeout`` seconds. None means no limit.

        Returns:
            True if an event has arrived since ``wait`` last returned True.
        """

    def close(self) -> None:
        """Stop listening and wake the waiting caller. Any task or thread may call this."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Bus(Protocol):
    """Carries wake-ups between processes. A lost wake-up only costs time, because consumers poll.

    A bus may have two more members, which are used if they exist: ``check()``, which raises
    BusError if the bus cannot be used, and ``stats``, a mapping of counters.
    """

    def emit(self, topic: str, when: datetime | None) -> None:
        """Announce a message, or, if ``when`` is None, a change of the queue's record.

        The message is ready from ``when`` on. This returns at once, and does not raise an error if
        the server is down.
        """

    def listen(self, topic: str) -> Listener:
        """Return a listener for ``with``. Enter it, check the queue, and only then wait."""

    def close(self) -> None:
        """Try for up to a second to send the events that are held back. Wake every listener."""


class AsyncBus(Protocol):
    """``Bus`` for asyncio: ``emit`` is synchronous, and ``close`` is awaited."""

    def emit(self, topic: str, when: datetime | None) -> None:
        """Announce a message, or, if ``when`` is None, a change of the queue's record.

        The message is ready from ``when`` on. This returns at once, and does not raise an error if
        the server is down.
        """

    def listen(self, topic: str) -> AsyncListener:
        """Return a listener for ``async with``. Enter it, check the queue, and only then wait."""

    async def close(self) -> None:
        """Try for up to a second to send the events that are held back. Wake every listener."""


STATS = ("emitted", "published", "merged", "failed", "heard", "restarts")
"""The counters of ``stats``.

- ``emitted``: events given to ``emit``.
- ``published``: events sent.
- ``merged``: events that were merged into another event.
- ``failed``: events that the server or a closed bus refused.
- ``heard``: events that reached a listener of this bus.
- ``restarts``: how many times listening started again after a break.
"""

Stats = Mapping[str, int]
