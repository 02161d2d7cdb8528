"""Listeners and the table that gives them events: what every bus of this package shares on its hearing side.

Nothing here talks to a server. The rules of hearing are in `Ear` and `Board`, once; `ThreadListener` and
`TaskListener` add only how a thread, or a task, waits.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from signals.api import BusError
from signals.window import earliest

T = TypeVar("T")

Steps = Generator[Any, Any, T]
"""A procedure written once for threads and for tasks. It says `answer = yield call()`: in blocking code `call()` has by
then done its work and is the answer itself; in asyncio code it is an awaitable, and the driver awaits it."""

LINGER = 5.0
"""Seconds that a topic nobody listens to any more is kept, since a consumer often comes back for the next message."""


def run(steps: Steps[T]) -> T:
    """Carry out steps whose calls block."""
    answer = None
    while True:
        try:
            answer = steps.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


async def run_async(steps: Steps[T]) -> T:
    """Carry out steps whose calls are awaitables. Cancelling is an exception inside the steps."""
    send: Callable[[Any], Any] = steps.send
    answer: Any = None
    while True:
        try:
            call = send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        try:
            answer, send = await call, steps.send
        except GeneratorExit:
            raise
        except BaseException as error:
            answer, send = error, steps.throw


def check_event(topic: str, when: datetime | None) -> None:
    """Refuse what no bus can carry, before anything is done with it."""
    # What a server's client cannot send would be tried again and again, and hold everything else up.
    if not isinstance(topic, str) or not topic:
        raise BusError(
            f"a topic is a non-empty str, not {'empty' if topic == '' else type(topic).__name__}"
        )
    try:
        topic.isascii() or topic.encode()
    except UnicodeEncodeError:
        raise BusError(f"a topic is a str of Unicode, not {topic!r}") from None
    if when is None or (isinstance(when, datetime) and when.tzinfo is UTC):
        return
    if not isinstance(when, datetime) or when.utcoffset() is None:
        raise BusError("`when` is a timezone-aware datetime or None")
    try:
        when.astimezone(UTC)
    except OverflowError:
        raise BusError("`when` is an instant of the years 1 to 9999, in UTC") from None


class Flag(Protocol):
    """The part of threading.Event that both kinds of listener need."""

    def set(self) -> None: ...  # noqa: D102
    def clear(self) -> None: ...  # noqa: D102
    def is_set(self) -> bool: ...  # noqa: D102


class LoopFlag:
    """An asyncio.Event that any thread may set. A loop that was closed meanwhile is nobody's trouble."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self.clear, self.is_set, self.wait = self._event.clear, self._event.is_set, self._event.wait

    def set(self) -> None:
        """Set it, now if called in its loop, else as soon as the loop comes round."""
        if running_loop() is self._loop:
            self._event.set()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Home(Protocol):
    """What a listener asks of its bus."""

    def enter(self, ear: "Ear") -> Steps[None]: ...  # noqa: D102
    def leave(self, ear: "Ear") -> None: ...  # noqa: D102


class Ear:
    """One listener's state: whether it heard anything since it last said so, and the earliest `when` of that."""

    def __init__(self, home: Home, topic: str) -> None:
        check_event(topic, None)
        self.topic = topic
        self.when: datetime | None = None
        self.closed = False
        self._home = home
        self._lock = threading.RLock()
        self._heard = False
        self._next: datetime | None = None
        self._flag: Flag | None = None
        self.ready: Flag | None = None  # set once the bus surely hears the topic

    def open(self, flag: Callable[[], Flag]) -> None:
        """Make the flags: on entering, because those of asyncio belong to a running loop."""
        if self._flag is not None or self.closed:
            raise BusError("a listener is entered once: ask the bus for another, if it is open")
        self._flag, self.ready = flag(), flag()

    def put(self, when: datetime | None) -> None:
        """Hear an event."""
        with self._lock:
            self._next = earliest(self._next, when) if self._heard else when
            self._heard = True
            assert self._flag is not None  # only who entered is given events
            self._flag.set()

    def confirm(self) -> None:
        """Hear that the topic is subscribed: the first time it ends entering, again it means something may be lost."""
        assert self.ready is not None
        if self.ready.is_set():
            self.put(None)
        else:
            self.ready.set()

    def take(self) -> bool:
        """Say whether anything was heard, and forget it."""
        with self._lock:
            if self.closed:
                return False
            heard, self._heard = self._heard, False
            assert self._flag is not None  # only who entered waits
            self._flag.clear()
            if heard:
                self.when = self._next
            return heard

    def after_fork(self) -> None:
        """Be closed in the child: what it listened to is the parent's."""
        self._lock = threading.RLock()
        self.closed = True

    def close(self) -> None:
        """Stop hearing, and wake whoever waits."""
        self._home.leave(self)
        with self._lock:
            self.closed = True
            for flag in (self._flag, self.ready):
                if flag:
                    flag.set()


class ThreadListener(Ear):
    """A listener for blocking code."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever). True if anything was heard since a wait last returned True."""
        if self._flag is None:
            raise BusError("enter the listener first: `with bus.listen(topic) as listener:`")
        assert isinstance(self._flag, threading.Event)
        end = None if timeout is None else monotonic() + timeout
        while not self.take():
            left = 3600.0 if end is None else end - monotonic()
            if self.closed or left <= 0:
                return False
            self._flag.wait(min(left, 3600.0))  # the platform has a longest wait
        return True

    def __enter__(self) -> Self:
        self.open(threading.Event)
        try:
            run(self._home.enter(self))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TaskListener(Ear):
    """A listener for asyncio code."""

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever). True if anything was heard since a wait last returned True."""
        if self._flag is None:
            raise BusError("enter the listener first: `async with bus.listen(topic) as listener:`")
        assert isinstance(self._flag, LoopFlag)
        try:
            async with asyncio.timeout(timeout):
                while not self.take():
                    if self.closed:
                        return False
                    await self._flag.wait()
                return True
        except TimeoutError:
            return False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.open(lambda: LoopFlag(loop))
        try:
            await run_async(self._home.enter(self))
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Board:
    """The table from topics to listeners, and which topics the server is known to send us."""

    def __init__(self, *, local: bool = False) -> None:
        self._linger = 0.0 if local else LINGER
        self._lock = threading.RLock()
        self._ears: dict[str, set[Ear]] = {}
        self._left: dict[str, float] = {}  # topics that nobody listens to since then, oldest first
        self._new: set[str] = set()  # topics to ask the server for
        self._asked: set[str] = set()
        self._live: set[str] = set()
        self._all = local  # every topic is heard, there is nothing to ask for

    def add(self, ear: Ear) -> None:
        """Give `ear` the events of its topic from now on."""
        with self._lock:
            self._ears.setdefault(ear.topic, set()).add(ear)
            self._left.pop(ear.topic, None)
            if not self._all and ear.topic not in self._asked:
                self._new.add(ear.topic)
            if self._all or ear.topic in self._live:
                ear.confirm()

    def remove(self, ear: Ear) -> None:
        """Give `ear` nothing more."""
        with self._lock:
            ears = self._ears.get(ear.topic, set())
            ears.discard(ear)
            if not ears and self._ears.pop(ear.topic, None) is not None and self._linger:
                self._left[ear.topic] = monotonic()

    def ears(self) -> list[Ear]:
        """Return all listeners."""
        with self._lock:
            return self.unlocked()

    def unlocked(self) -> list[Ear]:
        """Return all listeners without the lock, which after a fork nobody may ever give back."""
        return [ear for ears in self._ears.values() for ear in ears]

    def hear(self, topic: str, when: datetime | None) -> int:
        """Give an event to the listeners of its topic; say to how many."""
        with self._lock:
            ears = tuple(self._ears.get(topic, ()))
            for ear in ears:
                ear.put(when)
            return len(ears)

    def confirm(self, topic: str | None = None) -> None:
        """The server sends us `topic` (None: all) from now on. Who listened before may have missed something."""
        with self._lock:
            if topic is None:
                self._all = True
            else:
                self._live.add(topic)
            for ears in self._ears.values() if topic is None else [self._ears.get(topic, set())]:
                for ear in ears:
                    ear.confirm()

    def lose(self) -> None:
        """The server sends us nothing any more: all has to be asked for again."""
        with self._lock:
            self._all = False
            self._new = set(self._ears)
            self._asked.clear()
            self._live.clear()
            self._left.clear()

    def changes(self, now: float) -> tuple[bool, list[str], list[str]]:
        """Return whether to listen at all, and the topics to ask for and to drop, which count as done from here."""
        with self._lock:
            drop = []
            while self._left and next(iter(self._left.values())) + self._linger <= now:
                topic = next(iter(self._left))
                del self._left[topic]
                self._live.discard(topic)
                if topic in self._asked:
                    self._asked.discard(topic)
                    drop.append(topic)
            add = [topic for topic in self._new if topic in self._ears]
            self._new.clear()
            self._asked.update(add)
            return bool(self._ears or self._left), add, drop
