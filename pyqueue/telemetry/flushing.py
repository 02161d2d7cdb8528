"""Telemetry of a client: it counts in hooks, and stores the figures every few seconds.

``Telemetry`` does so in a thread, ``AsyncTelemetry`` in a task. A flush that fails is dropped and
counted, and nothing else is affected: no operation waits for a flush, and the figures in memory
have a fixed size.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, overload

from pyqueue import arguments
from pyqueue.errors import NotPermitted, QueueClosed
from pyqueue.hooks import HookCalls
from pyqueue.memory_sessions import in_memory
from pyqueue.requests import Plan, ServerTime
from pyqueue.runtime import forks
from pyqueue.runtime.connecting import AsyncConnection, BaseConnection, Connection
from pyqueue.runtime.drivers import run_aside, run_aside_async
from pyqueue.telemetry import storing
from pyqueue.telemetry.counting import Counting
from pyqueue.telemetry.presence import Presence
from pyqueue.telemetry.storing import Upsert

log = logging.getLogger("pyqueue")

#: The seconds between two flushes, and how much this varies at random.
INTERVAL_S: Final = 5.0
_JITTER: Final = 0.2
#: The longest interval after failures.
_MAX_INTERVAL_S: Final = 60.0
#: The seconds that a flush may take, and the further seconds for each queue.
LIMIT_S: Final = 2.0
_LIMIT_PER_QUEUE_S: Final = 0.005
#: The seconds that the last flush may take. The server may be gone.
_LAST_LIMIT_S: Final = 1.0
#: The minimum interval after a flush, in seconds for each queue of the flush.
_PER_QUEUE_S: Final = 0.25
#: How many workers of all processes together may flush in one second.
_WORKERS_PER_S: Final = 50
#: The number of flushes after which the running workers are counted again.
_COUNT_EVERY: Final = 12
#: A separate generator, because the program may have seeded the global one.
_random = random.SystemRandom()


class Pace:
    """Decides how long to wait until the next flush."""

    def __init__(self) -> None:
        #: How many flushes failed in a row.
        self.failures = 0
        #: How many queues the last flush had.
        self.queues = 0
        #: How many workers are running, in all processes.
        self.workers = 0

    def interval_s(self) -> float:
        """Return the seconds between two flushes, without the random part."""
        usual_s = max(INTERVAL_S, self.queues * _PER_QUEUE_S, self.workers / _WORKERS_PER_S)
        if not self.failures:
            return usual_s
        return max(usual_s, min(_MAX_INTERVAL_S, usual_s * 2.0 ** min(self.failures, 10)))

    def pause_s(self) -> float:
        """Return the seconds to wait before the next flush."""
        return self.interval_s() * _random.uniform(1 - _JITTER, 1 + _JITTER)

    def limit_s(self) -> float:
        """Return the seconds that a flush may take."""
        return LIMIT_S + _LIMIT_PER_QUEUE_S * self.queues


class BaseTelemetry:
    """The part of telemetry that is the same for blocking and for async code."""

    def __init__(self, connection: BaseConnection[Any]) -> None:
        # A strong reference would keep a client alive that was dropped without being closed.
        self._connection: Callable[[], BaseConnection[Any] | None] = weakref.ref(connection)
        self._namespace = connection.namespace
        self.counting = Counting(self._now, self._begin)
        self.presence = Presence(connection.owner, self._begin)
        self._pace = Pace()
        self._prepared: set[str] = set()
        self._flushes = 0
        self._driver: Any = None
        self._closed = False
        forks.connections.add(self)
        hooks = connection.hooks or HookCalls(())
        for each in (self.counting, self.presence):
            hooks.add(each)
        connection.hooks = hooks

    def begin_again(self) -> None:
        """Count from zero in a forked child. The parent itself stores the earlier figures."""
        self.counting.reset()
        self.presence.reset()
        self._driver = None
        self._pace = Pace()

    def _begin(self) -> None:
        """Start the thread or the task that flushes, unless it already runs."""
        raise NotImplementedError

    @property
    def _ends(self) -> bool:
        """Whether no further flush is possible."""
        return self._closed or self.counting.off or self._connection() is None

    def _opened(self) -> Any:
        """Return the driver.

        Raises:
            QueueClosed: The client was closed, or dropped.
        """
        if self._driver is None:
            connection = self._connection()
            if connection is None:
                raise QueueClosed("the client was dropped")
            self._driver = connection.open()
        return self._driver

    def _now(self) -> datetime:
        now: datetime = self._opened().clock.now()
        return now

    @property
    def _limit_s(self) -> float:
        """How long the next flush may take, in seconds."""
        limit_s = self._pace.limit_s()
        return min(limit_s, _LAST_LIMIT_S) if self._closed else limit_s

    def _plan(self) -> Plan[None] | None:
        """Take the figures. Return the plan that stores them, or None if there are none."""
        if self.counting.off or (self.counting.empty and self.presence.empty):
            return None
        now = self._now()
        beats = self.presence.beats(now, self._pace.interval_s())
        ended = self.presence.ended()
        counted = self.counting.take()
        writes = {
            storing.METRICS: list(storing.metrics(counted.figures, now)),
            storing.ERRORS: list(storing.errors(counted.errors, now)),
            storing.WORKERS: beats,
        }
        self._pace.queues = len(counted.figures)
        return self._store(writes, ended)

    def _store(self, writes: Mapping[str, Sequence[Upsert]], ended: Sequence[str]) -> Plan[None]:
        yield from storing.write(self._prepared, writes, ended)
        self.presence.forget(ended)
        self._flushes += 1
        self._pace.failures = 0
        if self._flushes % _COUNT_EVERY == 0:
            self._pace.workers = yield from storing.live_workers((yield from ServerTime()))

    def _failed(self, error: Exception) -> None:
        """Record that a flush was lost. Stop counting if the user may not store the figures."""
        if isinstance(error, QueueClosed):
            return
        if isinstance(error, NotPermitted):
            self.counting.off = True
            self.counting.take()
            log.warning(
                "telemetry of namespace %r is off, because the database user may not store it; "
                "see docs/how-to/least-privileges.md: %s",
                self._namespace,
                error,
            )
            return
        self._pace.failures += 1
        if self._driver is not None:
            self._driver.stats["lost flushes"] += 1
        if self._pace.failures == 1:
            text = "telemetry of namespace %r: a flush was lost: %s"
            log.warning(text, self._namespace, error)


class Telemetry(BaseTelemetry):
    """Telemetry of a blocking client."""

    def __init__(self, connection: Connection) -> None:
        self._renew()
        super().__init__(connection)

    def _renew(self) -> None:
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._flushing = threading.Lock()

    def begin_again(self) -> None:
        """Count from zero in a forked child, which has no thread."""
        super().begin_again()
        self._renew()

    def _begin(self) -> None:
        if self._thread is None and not self._ends:
            thread = threading.Thread(target=self._run, name="pyqueue-telemetry", daemon=True)
            with suppress(RuntimeError):  # the system has no thread left, or the program ends
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._closing.wait(self._pace.pause_s()) and not self._ends:
            self.flush()

    def flush(self) -> None:
        """Store the figures. This takes a few seconds at most, and never raises an error."""
        with self._flushing:
            try:
                plan = self._plan()
                if plan is not None:
                    run_aside(self._opened(), plan, self._limit_s)
            except Exception as error:
                self._failed(error)

    def close(self) -> None:
        """Store the figures, and stop."""
        if not self._closed:
            self._closed = True
            self._closing.set()
            self.flush()  # after a flush that runs: the thread then has nothing left to wait for
            if self._thread not in (None, threading.current_thread()):
                self._thread.join()


class AsyncTelemetry(BaseTelemetry):
    """Telemetry of an async client."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._renew()
        super().__init__(connection)

    def _renew(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()

    def begin_again(self) -> None:
        """Count from zero in a forked child, which has no task."""
        super().begin_again()
        self._renew()

    def _begin(self) -> None:
        # A program may cancel every task that runs.
        if (self._task is None or self._task.done()) and not self._ends:
            with suppress(RuntimeError):  # another thread reports an event
                loop = asyncio.get_running_loop()
                # In a new context: the caller's context may limit the time of commands.
                self._task = loop.create_task(
                    self._run(), name="pyqueue-telemetry", context=contextvars.Context()
                )

    async def _run(self) -> None:
        while not self._ends:
            await asyncio.sleep(self._pace.pause_s())
            await self.flush()

    async def flush(self) -> None:
        """Store the figures. This takes a few seconds at most, and never raises an error."""
        async with self._flushing:
            try:
                plan = self._plan()
                if plan is not None:
                    await run_aside_async(self._opened(), plan, self._limit_s)
            except Exception as error:
                self._failed(error)

    async def close(self) -> None:
        """Store the figures, and stop."""
        if self._closed:
            return
        self._closed = True
        async with self._flushing:  # a flush that runs ends first
            if self._task is not None:
                self._task.cancel()
        await self.flush()


@overload
def attach(connection: Connection, wanted: bool | None) -> Telemetry | None: ...
@overload
def attach(connection: AsyncConnection, wanted: bool | None) -> AsyncTelemetry | None: ...
def attach(
    connection: Connection | AsyncConnection, wanted: bool | None
) -> Telemetry | AsyncTelemetry | None:
    """Add telemetry to a connection that is not open yet.

    Args:
        connection: The connection of a client.
        wanted: Whether to add it. None adds it if there is a server: figures in memory have no
            other reader, and are lost with the process.

    Raises:
        ConfigurationError: ``wanted`` is neither True nor False nor None.
    """
    if wanted is None:
        wanted = not in_memory(connection.target)
    if not arguments.flag("telemetry", wanted):
        return None
    if isinstance(connection, Connection):
        return Telemetry(connection)
    return AsyncTelemetry(connection)
