"""What a bus is: the protocols that every bus fulfils, and the one error.

Code that uses a bus needs only these. They hold no behaviour; a bus of your own need not inherit from anything here.
"""

from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self


class BusError(Exception):
    """A bus cannot be used as asked: wrong password, not permitted, unreachable at `check`, a wrong argument."""


class Listener(Protocol):
    """Hears the events of one topic, from entering its `with` block until leaving it."""

    @property
    def when(self) -> datetime | None:
        """The earliest instant heard by the last `wait` that returned True; None: read the record and look."""

    @property
    def closed(self) -> bool:
        """True once the listener or its bus was closed; every `wait` then returns False at once."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever). True if anything was heard since a wait last returned True."""

    def close(self) -> None:
        """Stop hearing, and wake whoever waits. May be called from any thread."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class AsyncListener(Protocol):
    """`Listener`, for asyncio."""

    @property
    def when(self) -> datetime | None:
        """The earliest instant heard by the last `wait` that returned True; None: read the record and look."""

    @property
    def closed(self) -> bool:
        """True once the listener or its bus was closed; every `wait` then returns False at once."""

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever). True if anything was heard since a wait last returned True."""

    def close(self) -> None:
        """Stop hearing, and wake whoever waits. May be called from any task or thread."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Bus(Protocol):
    """Carries wake-ups between processes. Losing one costs time, never a message: whoever listens also polls.

    A bus may have two more members, used where they exist: `check()`, which raises BusError if the bus cannot be
    reached or used, and `stats`, a mapping of counters.
    """

    def emit(self, topic: str, when: datetime | None) -> None:
        """Say that `topic` has something from `when` on (aware), or that its record changed (None).

        Returns at once, and never raises for a bus that is down.
        """

    def listen(self, topic: str) -> Listener:
        """Return a listener for a `with` block: it hears from entering on, so look after entering, then wait."""

    def close(self) -> None:
        """Send what is held back, within a second, and wake every listener."""


class AsyncBus(Protocol):
    """`Bus`, for asyncio: `emit` stays a plain call, `close` is awaited."""

    def emit(self, topic: str, when: datetime | None) -> None:
        """Say that `topic` has something from `when` on (aware), or that its record changed (None).

        Returns at once, and never raises for a bus that is down.
        """

    def listen(self, topic: str) -> AsyncListener:
        """Return a listener for an `async with` block: it hears from entering on, so look after, then wait."""

    async def close(self) -> None:
        """Send what is held back, within a second, and wake every listener."""


STATS = ("emitted", "published", "merged", "failed", "heard", "restarts")
"""The counters of `stats`: events given to `emit`; sent out; merged into another; refused by the server or by a closed
bus; heard by a listener of this bus; times that listening had to begin again."""

Stats = Mapping[str, int]
