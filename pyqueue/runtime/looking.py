"""Check a gather soon after one of its messages has ended, but not in the call that ends it.

A check finds out whether all messages of a gather have ended. One check serves all messages that
end within a short time. If it fails, a process that runs schedules repeats it later.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import pymongo

from pyqueue.backends.gathering import Known, look
from pyqueue.errors import QueueError
from pyqueue.messages import Id
from pyqueue.requests import Plan

log = logging.getLogger("pyqueue")

#: How many seconds after the end of a message its gather is checked.
_SOON_S: Final = 0.05
#: How many seconds one round of checks may take.
_LIMIT_S: Final = 5.0
#: How many gathers a client remembers at most.
_MAX_KNOWN: Final = 1000


class Looks:
    """The gathers that a client will check soon."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        #: The gathers to check. A new number means that another message has ended in the meantime.
        self._pending: dict[Id, int] = {}
        self._known: dict[Id, Known] = {}

    @property
    def pending(self) -> bool:
        """Whether there are gathers to check."""
        return bool(self._pending)

    def add(self, id: Id) -> None:
        """Check a gather soon."""
        self._pending[id] = next(self._numbers)
        self._begin()

    def _begin(self) -> None:
        """Start the thread or the task that checks, unless it is already running."""
        raise NotImplementedError

    def plan(self) -> Plan[None]:
        """Check every pending gather. Several threads or tasks may do this at once."""
        for id, number in self._pending.copy().items():
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            try:
                if (yield from look(id, self._known.setdefault(id, Known()))):
                    self._known.pop(id, None)
            except QueueError as error:
                log.warning("gather %s: not checked; a worker will check it later: %s", id, error)
            if self._pending.get(id) == number:
                self._pending.pop(id, None)


class ThreadLooks(Looks):
    """The checks of a blocking client, in a thread that ends when no gather is pending.

    Args:
        run: A function that runs a plan.
    """

    def __init__(self, run: Callable[[Plan[None]], None]) -> None:
        super().__init__()
        self._run = run
        self._working = _thread.allocate_lock()

    def _begin(self) -> None:
        if self._working.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._work, ())
            except RuntimeError:  # the system has no thread left, or the program ends
                self._working.release()

    def _work(self) -> None:
        try:
            while self._pending:
                time.sleep(_SOON_S)
                self.now()
        finally:
            self._working.release()
        if self._pending:  # a gather was added after the loop had ended
            self._begin()

    def now(self, limit_s: float = _LIMIT_S) -> None:
        """Check every pending gather now, for at most ``limit_s`` seconds."""

        def work() -> None:
            with pymongo.timeout(limit_s):
                self._run(self.plan())

        try:
            # In a copy of the context, so that the deadline limits no later command of this thread.
            contextvars.copy_context().run(work)
        except QueueError:  # the client was closed
            self._pending.clear()


class TaskLooks(Looks):
    """The checks of an async client, in a task that ends when no gather is pending.

    Args:
        run: A function that runs a plan.
        spawn: A function that starts a task. Closing the client waits for this task.
    """

    def __init__(
        self,
        run: Callable[[Plan[None]], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        super().__init__()
        self._run = run
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None

    def _begin(self) -> None:
        # A program may cancel every task that runs.
        if self._task is None or self._task.done():
            self._task = self._spawn(self._work())

    async def _work(self) -> None:
        while self._pending:
            await asyncio.sleep(_SOON_S)
            try:
                with pymongo.timeout(_LIMIT_S):
                    await self._run(self.plan())
            except QueueError:  # the client was closed
                self._pending.clear()
