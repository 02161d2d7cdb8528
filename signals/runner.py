"""The runners, with and without a server, and the blocking and asyncio facades of every bus.

Every runner delivers an event to the listeners of its process at once, and unmerged. A runner with
a server has two procedures that reach other processes. One publishes the events that the window
releases, and keeps the events that it could not send. The other subscribes, reads, and starts again
after a break; it then wakes every listener once, because signals may have been lost. Both retry
with growing delays, and neither raises an error in the user's code.
"""

import atexit
import contextlib
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Hashable
from datetime import datetime
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn, Self

from signals.api import STATS, BusError, Stats
from signals.hub import Hub, Subscription, TaskListener, ThreadListener, check_event, place_of
from signals.transport import Procedure, Runtime, ThreadRuntime, Transport, run, run_async
from signals.window import Window, earliest

logger = logging.getLogger("signals")

WAKE_SELF = ""
"""A topic without listeners. A runner publishes it to make its own ``Transport.read`` return."""

ENTER_TIMEOUT_S = 1.0
"""How many seconds entering a listener waits for the server to confirm the topic."""

STABLE_S = 5.0
"""How many seconds listening must work before a runner reports success and resets its delays."""


_dice = random.SystemRandom()
"""A separate generator, because buses must not disturb the random seed of the user's code."""


class RetryDelays:
    """The delays after consecutive failures: 0.1 s, doubled up to 5 s, shortened by up to half."""

    def __init__(self) -> None:
        self._next = 0.1

    def next(self) -> float:
        """Return the next delay in seconds. It is random, so that clients return one by one."""
        delay, self._next = self._next, min(self._next * 2, 5.0)
        return delay * _dice.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with the shortest delay."""
        self._next = 0.1


class LocalRunner:
    """Runs a bus within this process: its counters, its hub, its listeners, and its closing.

    Attributes:
        name: How the bus appears in log lines; it contains no password.
        stats: The counters; see ``signals.STATS``.
    """

    #: Whether a topic is heard without the confirmation of a server.
    local = True

    def __init__(self, name: str, place: Hashable) -> None:
        self.name = name
        self.stats = dict.fromkeys(STATS, 0)
        self._closed = False
        self._entered: set[Subscription] = set()
        self._key = place
        self._reset()
        _runners.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may emit or close
        self.hub = Hub(self.stats, local=self.local)
        self._place = place_of(self._key)
        self._place.join(self.hub)

    def after_fork(self) -> None:
        """Start again in a forked child: its threads are gone, and a lock may be held forever."""
        for subscription in self._entered:
            subscription.after_fork()
        self._entered = set()
        self._reset()

    def emit(self, topic: str, when: datetime | None) -> None:
        """Deliver an event. Never wait, and raise BusError only for an invalid argument."""
        check_event(topic, when)
        with self._lock:
            self.stats["emitted"] += 1
            self.stats["failed" if self._closed else "published"] += 1
            if not self._closed:
                self._place.deliver(topic, when)

    def enter(self, subscription: Subscription) -> Procedure[None]:
        """Start to deliver events to a listener."""
        with self._lock:
            if not self._closed:
                self._entered.add(subscription)
                self.hub.add(subscription)
        if self._closed:
            subscription.close()
        yield from ()

    def leave(self, subscription: Subscription) -> None:
        """Stop delivering events to a listener."""
        with self._lock:
            self._entered.discard(subscription)
            self.hub.remove(subscription)

    def check(self) -> Procedure[None]:
        """Raise BusError if the bus cannot be used."""
        yield from ()

    def pending(self) -> bool:
        """Return whether the process must wait for events of this bus before it exits."""
        return False

    def close(self) -> Procedure[None]:
        """Close the listeners of this bus."""
        with self._lock:
            self._closed = True
            entered = list(self._entered)
        for subscription in entered:
            subscription.close()
        yield from ()


class Runner(LocalRunner):
    """Runs a bus that has a server.

    Args:
        kind: The name of the bus class.
        connect: A function that creates the transport without I/O; called again in a forked child.
        window: The length of the time window in which events of one topic are merged, in seconds.
        runtime: A function that creates the runtime in which the procedures run.
    """

    local = False

    def __init__(
        self,
        kind: str,
        connect: Callable[[], Transport],
        window: float,
        runtime: Callable[[], Runtime],
    ) -> None:
        self._connect, self._make_runtime, self._seconds = connect, runtime, window
        self._transport = connect()
        super().__init__(f"{kind}({self._transport})", self._transport.place)

    def after_fork(self) -> None:
        """Start again in a forked child, with a new transport."""
        self._transport = self._connect()
        super().after_fork()

    def _reset(self) -> None:
        super()._reset()
        self._window = Window(self._seconds)
        self._runtime = self._make_runtime()
        self._outbox: dict[str, datetime | None] = {}  # to be sent at once
        self._started: set[str] = set()  # which procedures run
        self._broken: set[str] = set()  # which procedures fail
        # The flags are made at first use because asyncio flags belong to a loop.
        self._to_publish: Any = None  # there may be something to publish
        self._to_listen: Any = None  # there may be a new topic to subscribe to
        self._ending: Any = None  # the bus is being closed

    def emit(self, topic: str, when: datetime | None) -> None:
        """Deliver an event in this process, and queue it for publishing, without waiting."""
        check_event(topic, when)
        usable = self._runtime.bind(here=False)
        with self._lock:
            self.stats["emitted"] += 1
            if not self._closed:
                self._place.deliver(topic, when)
            if self._closed or not usable or not self._start("publishing"):
                self.stats["failed"] += 1
                return
            held = len(self._window)
            if self._window.offer(topic, when, monotonic()):
                self._put(topic, when)
            else:
                self.stats["merged"] += 1
                if len(self._window) == held:
                    return  # the procedure already knows when this topic is due
        self._to_publish.set()

    def enter(self, subscription: Subscription) -> Procedure[None]:
        """Start to deliver events to a listener. Wait for the server, up to ENTER_TIMEOUT_S."""
        ready = subscription.ready
        assert ready is not None
        self._runtime.bind(here=True)
        yield from super().enter(subscription)
        with self._lock:
            if self._closed:
                return
            self._start("listening")
            if not ready.is_set() and self._start("publishing"):
                self._put(WAKE_SELF, None)
        self._to_listen.set()
        if not ready.is_set():
            self._to_publish.set()
            yield self._runtime.wait(ready, ENTER_TIMEOUT_S)
            ready.set()  # a later confirmation means that the bus came back, and wakes the listener

    def check(self) -> Procedure[None]:
        """Raise BusError if the bus cannot publish and listen."""
        self._runtime.bind(here=True)
        try:
            yield from self._transport.check()
        except BusError:
            raise
        except Exception as error:
            # Not chained: the text of a client library's error may contain the password.
            raise BusError(f"{self.name}: {self._transport.explain(error)}") from None

    def pending(self) -> bool:
        """Return whether events still have to be sent when the interpreter exits."""
        blocking = isinstance(self._runtime, ThreadRuntime)
        return blocking and bool(self._outbox or len(self._window))

    def close(self) -> Procedure[None]:
        """Send the events that are held back, close every listener, and end both procedures."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if "listening" in self._started:
                self._start("publishing")
                self._put(WAKE_SELF, None)
            entered = list(self._entered)
        for flag in (self._ending, self._to_publish, self._to_listen):
            if flag is not None:
                flag.set()
        for subscription in entered:
            subscription.close()
        yield self._runtime.join()
        with contextlib.suppress(Exception):
            yield from self._transport.close()

    def _start(self, which: str) -> bool:
        """Start a procedure unless it is running. Return False if it cannot start, as at exit."""
        if which in self._started:
            return True
        try:
            if self._to_publish is None:
                flags = [self._runtime.flag() for _ in range(3)]
                self._ending, self._to_listen, self._to_publish = flags
            procedure = self._publish() if which == "publishing" else self._listen()
            self._runtime.start(procedure, f"signals_{which}")
        except RuntimeError as error:
            self._failed(which, error)
            return False
        self._started.add(which)
        return True

    def _put(self, topic: str, when: datetime | None) -> None:
        if topic in self._outbox:
            self.stats["merged"] += topic != WAKE_SELF
            when = earliest(self._outbox[topic], when)
        self._outbox[topic] = when

    def _publish(self) -> Procedure[None]:
        delays = RetryDelays()
        while True:
            with self._lock:
                self._to_publish.clear()
                now = monotonic()
                for topic, when in self._window.flush() if self._closed else self._window.due(now):
                    self._put(topic, when)
                events, self._outbox = self._outbox, {}
                closed = self._closed
            count = len(events) - (WAKE_SELF in events)
            try:
                if events:
                    yield from self._transport.publish(events, self._place.origin)
            except Exception as error:
                with self._lock:
                    self.stats["failed"] += count
                    self._failed("publishing", error)
                    events.pop(WAKE_SELF, None)
                    for topic, when in events.items():
                        self._put(topic, when)  # to be sent later, to wake the listeners late
                if closed:
                    return
                yield self._runtime.wait(self._ending, delays.next())
                continue
            with self._lock:
                self.stats["published"] += count
                if events:
                    delays.reset()
                    self._works("publishing")
                pause = self._window.next(monotonic())
            if closed:
                return
            yield self._runtime.wait(self._to_publish, pause)

    def _listen(self) -> Procedure[None]:
        delays = RetryDelays()
        since: float | None = None  # when listening began; None while it is stopped or broken
        starts = 0
        try:
            while not self._closed:
                self._to_listen.clear()
                now = monotonic()
                wanted, add, drop = self.hub.changes(now)
                try:
                    if not wanted:
                        if since is not None:
                            since, starts = None, 0
                            self.hub.lose()
                            yield from self._transport.stop()
                        yield self._runtime.wait(self._to_listen, None)
                        continue
                    if since is None:
                        hears_all = yield from self._transport.start()
                        since = monotonic()
                        starts += 1
                        self.stats["restarts"] += starts > 1
                        if hears_all:
                            self.hub.confirm()
                    if add or drop:
                        yield from self._transport.subscribe(add, drop)
                    yield from self._transport.read(self._deliver, self.hub.confirm)
                    if now - since > STABLE_S:  # before that it may break again and again
                        delays.reset()
                        self._works("listening")
                except Exception as error:
                    since, starts = None, max(starts, 1)
                    self.hub.lose()
                    if not self._closed:
                        self._failed("listening", error)
                    yield from self._stop_quietly()
                    yield self._runtime.wait(self._ending, delays.next())
        except GeneratorExit:
            raise  # the event loop was dropped with this procedure: nothing can be awaited now
        except BaseException:
            yield from self._stop_quietly()
            raise
        else:
            yield from self._stop_quietly()

    def _deliver(self, topic: str, when: datetime | None, origin: str) -> None:
        if origin != self._place.origin:  # else ``emit`` delivered it
            self.hub.deliver(topic, when)

    def _stop_quietly(self) -> Procedure[None]:
        with contextlib.suppress(Exception):
            yield from self._transport.stop()

    def _failed(self, which: str, error: Exception) -> None:
        """Log the first failure, and no more failures until every procedure works again."""
        with self._lock:
            if not self._broken:
                text = "%s: signals are down, so consumers poll until signals work again: %s"
                logger.warning(text, self.name, self._transport.explain(error))
            self._broken.add(which)

    def _works(self, which: str) -> None:
        with self._lock:
            if which in self._broken:
                self._broken.discard(which)
                if not self._broken:
                    logger.info("%s: works again", self.name)


class Facade:
    """The methods that blocking and asyncio buses share. The runner does the work."""

    def __init__(self, runner: LocalRunner) -> None:
        self._runner = runner

    def __repr__(self) -> str:
        return self._runner.name

    def __reduce__(self) -> NoReturn:
        raise BusError(f"cannot pickle {self._runner.name}; open another bus in each process")

    @property
    def stats(self) -> Stats:
        """The counters of this bus; see ``signals.STATS``."""
        return MappingProxyType(self._runner.stats)

    def emit(self, topic: str, when: datetime | None) -> None:
        """Announce a message, or, if ``when`` is None, a change of the queue's record.

        This returns at once, even if the server is down.

        Args:
            topic: The name that listeners listen to.
            when: A timezone-aware instant, from which on the message is ready, or None.

        Raises:
            BusError: An argument is invalid.
        """
        self._runner.emit(topic, when)


class BlockingFacade(Facade):
    """The methods of a bus for blocking code."""

    def listen(self, topic: str) -> ThreadListener:
        """Return a listener for ``with``. Enter it, check the queue, and only then wait."""
        return ThreadListener(topic, self._runner.enter, self._runner.leave)

    def check(self) -> None:
        """Check that the bus can publish and listen.

        Raises:
            BusError: The server is unreachable, refuses the password, or denies a permission.
        """
        run(self._runner.check())

    def close(self) -> None:
        """Try for up to a second to send the events that are held back. Wake the listeners.

        A client that was passed in stays open.
        """
        run(self._runner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncFacade(Facade):
    """The methods of a bus for asyncio."""

    def listen(self, topic: str) -> TaskListener:
        """Return a listener for ``async with``. Enter it, check the queue, and only then wait."""
        return TaskListener(topic, self._runner.enter, self._runner.leave)

    async def check(self) -> None:
        """Check that the bus can publish and listen.

        Raises:
            BusError: The server is unreachable, refuses the password, or denies a permission.
        """
        await run_async(self._runner.check())

    async def close(self) -> None:
        """Try for up to a second to send the events that are held back. Wake the listeners.

        A client that was passed in stays open.
        """
        await run_async(self._runner.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


_runners: weakref.WeakSet[LocalRunner] = weakref.WeakSet()


def _after_fork() -> None:
    for runner in list(_runners):
        runner.after_fork()


def _at_exit() -> None:
    # A script that pushes and exits has no later chance to send its signals.
    for runner in list(_runners):
        if runner.pending():
            run(runner.close())


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
