"""The life of a bus that has a server: one procedure that publishes, one that listens, written once for both twins.

The publishing procedure sends what the window gives out and keeps, merged, what a broken server refused; the listening
one asks for topics, reads, and begins again when the server breaks, waking every listener once since signals may have
been lost. Both hold off longer and longer while things stay broken, and neither ever raises into anybody's code. What a
server needs to be told is in a `Wire`; threads and tasks differ in `Threads` and `Tasks` only.
"""

import asyncio
import contextlib
import contextvars
import logging
import random
import threading
from collections.abc import Callable
from datetime import datetime
from time import monotonic
from typing import Any, Protocol

from signals.api import STATS, BusError
from signals.ears import Board, Ear, LoopFlag, Steps, check_event, run, run_async, running_loop
from signals.window import Window, earliest

logger = logging.getLogger("signals")

NUDGE = ""
"""A topic that nobody can listen to: publishing it makes this bus's own listening procedure return from its read."""

PATIENCE = 1.0
"""Seconds that entering a listener waits to be heard, and that closing waits for each procedure to end."""


class Wire(Protocol):
    """What one kind of server is told. Each method is steps (see `Steps`) and may raise whatever its client raises."""

    hears_all: bool
    """Whether `start` hears every topic, so that `change` has nothing to ask for."""

    def publish(self, events: dict[str, datetime | None]) -> Steps[None]:
        """Send these events."""

    def start(self) -> Steps[None]:
        """Begin to listen."""

    def change(self, add: list[str], drop: list[str]) -> Steps[None]:
        """Ask for topics, and drop some."""

    def read(
        self, hear: Callable[[str, datetime | None], None], confirm: Callable[[str], None]
    ) -> Steps[None]:
        """Wait up to a second for something, and tell what was heard, or that a topic is heard from now on."""

    def stop(self) -> Steps[None]:
        """End listening."""

    def check(self) -> Steps[None]:
        """Raise unless all of the above is possible."""

    def close(self) -> Steps[None]:
        """Release what belongs to the bus."""

    def after_fork(self) -> None:
        """Forget the connections of the parent."""

    def explain(self, error: Exception) -> str:
        """Describe an error without telling any secret."""


class Pauses:
    """How long to hold off after each failure in a row: 0.1 s, doubling up to 5 s, each shortened by up to a half."""

    def __init__(self) -> None:
        self._next = 0.1

    def next(self) -> float:
        """Return the next pause, in seconds; at random, so that many clients do not come back as one."""
        pause, self._next = self._next, min(self._next * 2, 5.0)
        return pause * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin again with the shortest: it works."""
        self._next = 0.1


class Side(Protocol):
    """How procedures run, and how they wait: in threads, or in the tasks of one event loop."""

    def bind(self, *, here: bool) -> bool: ...  # noqa: D102
    def flag(self) -> Any: ...  # noqa: D102
    def start(self, steps: Steps[None], name: str) -> None: ...  # noqa: D102
    def wait(self, flag: Any, timeout: float | None) -> Any: ...  # noqa: D102
    def join(self) -> Any: ...  # noqa: D102


class Threads:
    """Runs procedures in threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def bind(self, *, here: bool) -> bool:
        """Say that it can run."""
        return True

    def flag(self) -> threading.Event:
        """Make a flag to wait for."""
        return threading.Event()

    def start(self, steps: Steps[None], name: str) -> None:
        """Run a procedure beside all else."""
        thread = threading.Thread(target=run, args=(steps,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self, flag: threading.Event, timeout: float | None) -> None:
        """Wait for a flag."""
        flag.wait(timeout)

    def join(self) -> None:
        """Wait for all procedures, for a while. One that hangs in a dead connection ends with it."""
        for thread in self._threads:
            thread.join(PATIENCE)


class Tasks:
    """Runs procedures in tasks of the event loop in which the bus was first used."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def bind(self, *, here: bool) -> bool:
        """Belong to the running loop; False if that loop was closed.

        Raises BusError where no loop runs yet, and with `here` in any other loop than the bus's own.
        """
        running = running_loop()
        self._loop = self._loop or running
        if self._loop is None:
            raise BusError("this bus is for asyncio: use it while an event loop runs")
        if here and running is not self._loop:
            raise BusError("an asyncio bus belongs to the event loop in which it was first used")
        return not self._loop.is_closed()

    def flag(self) -> LoopFlag:
        """Make a flag to wait for."""
        assert self._loop is not None
        return LoopFlag(self._loop)

    def start(self, steps: Steps[None], name: str) -> None:
        """Run a procedure beside all else."""
        assert self._loop is not None
        # In a context of its own: the bus must not live under a deadline that its first user happened to have set.
        if running_loop() is self._loop:
            self._create(steps, name)
        else:
            self._loop.call_soon_threadsafe(self._create, steps, name)

    def _create(self, steps: Steps[None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(
            run_async(steps), name=name, context=contextvars.Context()
        )
        self._tasks.append(task)

    async def wait(self, flag: LoopFlag, timeout: float | None) -> None:
        """Wait for a flag."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await flag.wait()

    async def join(self) -> None:
        """Wait for all procedures, for a while; then cancel them."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=PATIENCE)
        finally:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ServedCore:
    """The core of a bus that has a server: see `signals.fronts.Core`."""

    def __init__(self, name: str, wire: Wire, window: float, *, asynchronous: bool) -> None:
        self._name, self._wire, self._seconds = name, wire, window
        self._make_side: type[Side] = Tasks if asynchronous else Threads
        self._closed = False
        self.stats = dict.fromkeys(STATS, 0)
        self.board = Board()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may emit, or close
        self._side = self._make_side()
        self._window = Window(self._seconds)
        self._outbox: dict[str, datetime | None] = {}  # to be sent at once
        self._troubles: set[str] = set()
        self._publishing = self._listening = False
        # Made at first use: those of asyncio belong to a loop.
        self._post: Any = None  # there may be something to send
        self._turn: Any = None  # there may be somebody to listen for
        self._end: Any = None  # the bus is being closed

    def after_fork(self) -> None:
        """Start afresh in the child of a fork."""
        for ear in self.board.unlocked():
            ear.after_fork()
        self.board = Board()
        self._wire.after_fork()
        self._reset()

    def emit(self, topic: str, when: datetime | None) -> None:
        """Take an event for publishing. Never waits, and raises for a wrong argument only."""
        check_event(topic, when)
        usable = self._side.bind(here=False)
        with self._lock:
            self.stats["emitted"] += 1
            if self._closed or not usable or not self._begin("_publishing", self._publish):
                self.stats["failed"] += 1
                return
            held = len(self._window)
            if self._window.offer(topic, when, monotonic()):
                self._put(topic, when)
            else:
                self.stats["merged"] += 1
                if len(self._window) == held:
                    return  # the procedure knows already when to wake for this topic
        self._post.set()

    def enter(self, ear: Ear) -> Steps[None]:
        """Let a listener hear: on return it does, unless the server is out of reach for longer than PATIENCE."""
        assert ear.ready is not None
        self._side.bind(here=True)
        with self._lock:
            if not self._closed:
                self.board.add(ear)
                self._begin("_listening", self._listen)
                if not ear.ready.is_set() and self._begin("_publishing", self._publish):
                    self._put(NUDGE, None)
        if self._closed:
            ear.close()
            return
        self._turn.set()
        if not ear.ready.is_set():
            self._post.set()
            yield self._side.wait(ear.ready, PATIENCE)
            ear.ready.set()  # heard of later, it is a return of the bus, which wakes

    def leave(self, ear: Ear) -> None:
        """Let a listener hear no more."""
        self.board.remove(ear)

    def pending(self) -> bool:
        """Say whether something still has to be sent."""
        return bool(self._outbox or len(self._window))

    def check(self) -> Steps[None]:
        """Raise BusError unless the server can be reached and used as a bus needs."""
        self._side.bind(here=True)
        try:
            yield from self._wire.check()
        except BusError:
            raise
        except Exception as error:
            # Not chained: what a client library says of an address may hold the password.
            raise BusError(f"{self._name}: {self._wire.explain(error)}") from None

    def close(self) -> Steps[None]:
        """Send what is held back, wake every listener, end both procedures; within a few seconds at the very worst."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._listening:
                self._begin("_publishing", self._publish)
                self._put(NUDGE, None)
        for flag in (self._end, self._post, self._turn):
            if flag is not None:
                flag.set()
        for ear in self.board.ears():
            ear.close()
        yield self._side.join()
        with contextlib.suppress(Exception):
            yield from self._wire.close()

    def _begin(self, which: str, procedure: Any) -> bool:
        """Start a procedure at first use; False if that cannot be, as while the interpreter ends."""
        if getattr(self, which):
            return True
        try:
            if self._post is None:
                self._end, self._turn, self._post = (self._side.flag() for _ in range(3))
            self._side.start(procedure(), f"signals{which}")
        except RuntimeError as error:
            self._failed(which, error)
            return False
        setattr(self, which, True)
        return True

    def _hear(self, topic: str, when: datetime | None) -> None:
        self.stats["heard"] += bool(self.board.hear(topic, when))

    def _put(self, topic: str, when: datetime | None) -> None:
        if topic in self._outbox:
            self.stats["merged"] += topic != NUDGE
            when = earliest(self._outbox[topic], when)
        self._outbox[topic] = when

    def _publish(self) -> Steps[None]:
        pauses = Pauses()
        while True:
            with self._lock:
                self._post.clear()
                now = monotonic()
                for topic, when in self._window.flush() if self._closed else self._window.due(now):
                    self._put(topic, when)
                events, self._outbox = self._outbox, {}
                closed = self._closed
            count = len(events) - (NUDGE in events)
            try:
                if events:
                    yield from self._wire.publish(events)
            except Exception as error:
                with self._lock:
                    self.stats["failed"] += count
                    self._failed("_publishing", error)
                    events.pop(NUDGE, None)
                    for topic, when in events.items():
                        self._put(topic, when)  # sent later it still wakes those who hear it then
                if closed:
                    return
                yield self._side.wait(self._end, pauses.next())
                continue
            with self._lock:
                self.stats["published"] += count
                if events:
                    pauses.reset()
                    self._worked("_publishing")
                pause = self._window.next(monotonic())
            if closed:
                return
            yield self._side.wait(self._post, pause)

    def _listen(self) -> Steps[None]:
        pauses = Pauses()
        since: float | None = None  # when listening began; None while it does not
        starts = 0
        try:
            while not self._closed:
                self._turn.clear()
                now = monotonic()
                wanted, add, drop = self.board.changes(now)
                try:
                    if not wanted:
                        if since is not None:
                            since = None
                            self.board.lose()
                            starts = 0
                            yield from self._wire.stop()
                        yield self._side.wait(self._turn, None)
                        continue
                    if since is None:
                        yield from self._wire.start()
                        since = monotonic()
                        starts += 1
                        self.stats["restarts"] += starts > 1
                        if self._wire.hears_all:
                            self.board.confirm()
                    if add or drop:
                        yield from self._wire.change(add, drop)
                    yield from self._wire.read(self._hear, self.board.confirm)
                    if (
                        now - since > 5.0
                    ):  # what works for less than that may be breaking again and again
                        pauses.reset()
                        self._worked("_listening")
                except Exception as error:
                    since = None
                    starts = max(starts, 1)
                    self.board.lose()
                    if not self._closed:
                        self._failed("_listening", error)
                    yield from self._stop_quietly()
                    yield self._side.wait(self._end, pauses.next())
        except GeneratorExit:
            raise  # dropped unfinished, as when a loop is thrown away: nothing can be awaited any more
        except BaseException:
            yield from self._stop_quietly()
            raise
        else:
            yield from self._stop_quietly()

    def _stop_quietly(self) -> Steps[None]:
        with contextlib.suppress(Exception):
            yield from self._wire.stop()

    def _failed(self, which: str, error: Exception) -> None:
        with self._lock:
            if not self._troubles:
                text = "%s: no signals until it works again, consumers fall back to polling: %s"
                logger.warning(text, self._name, self._wire.explain(error))
            self._troubles.add(which)

    def _worked(self, which: str) -> None:
        with self._lock:
            if which in self._troubles:
                self._troubles.discard(which)
                if not self._troubles:
                    logger.info("%s: works again", self._name)
