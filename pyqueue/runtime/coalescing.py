"""Coalescing: concurrent calls of one event loop, or of the threads of a client, share batches.

There is no timer. While a batch runs, further calls accumulate. When the batch has ended, they run
as one batch. So a single caller never waits, and many callers share their round trips. This module
knows nothing about queues: the plan of a batch defines its meaning.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final, Generic, Protocol, TypeVar

from pymongo import _csot

from pyqueue.errors import QueueError, TimedOut
from pyqueue.requests import Coalesce, Plan

log = logging.getLogger("pyqueue")

T = TypeVar("T")
R = TypeVar("R")

MAX_BATCH_ITEMS: Final = 256
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024


class Promise(Protocol):
    """The place for the result that a caller waits for."""

    def done(self) -> bool:
        """Return whether the caller is no longer waiting."""


P = TypeVar("P", bound=Promise)


class Drive(Protocol):
    """Runs the plan of a batch."""

    def __call__(self, plan: Plan[T], /) -> Coroutine[Any, Any, T]:
        """Run a plan and return its result."""


class PendingCalls(Generic[P]):
    """The calls with the same key that wait for the next batch, in order of arrival."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Coalesce[Any, Any], P]] = deque()
        #: How many batches are running.
        self.running = 0


class Batch(Generic[P]):
    """The calls of one batch, and the list of their items."""

    __slots__ = ("_pending", "calls", "items")

    def __init__(self, pending: PendingCalls[P]) -> None:
        self._pending = pending
        self.calls: list[tuple[Coalesce[Any, Any], P]] = []
        self.items: list[Any] = []
        self.take()

    def take(self) -> None:
        """Add waiting calls until the batch is full."""
        waiting, calls, size = self._pending.waiting, self.calls, 0
        while waiting:
            request, promise = call = waiting[0]
            size += request.size
            most = 1 if request.alone else MAX_BATCH_ITEMS
            if calls and (len(calls) >= most or size > MAX_BATCH_BYTES):
                break
            waiting.popleft()
            if promise.done():  # it was cancelled before its batch began
                size -= request.size
            else:
                calls.append(call)
                self.items.append(request.item)


def callers_deadline() -> float:
    """Return when the ``pymongo.timeout`` around a call ends, on the monotonic clock.

    The result is infinite without such a timeout. PyMongo has no public function for this.
    """
    deadline: float = _csot.get_deadline()
    return deadline


class Coalescer:
    """Runs concurrent calls in shared batches.

    Each batch runs in its own task, so a cancelled caller cannot stop it halfway. The deadline of a
    caller does not limit the batch; the caller leaves at its deadline, as if it were cancelled.

    Args:
        drive: A function that runs the plan of a batch.
        stats: The counters of the driver, one of which counts the results that were given back.
    """

    def __init__(self, drive: Drive, stats: Counter[str]) -> None:
        self._drive = drive
        self._pending: dict[Hashable, PendingCalls[asyncio.Future[Any]]] = {}
        #: The running batches, keyed by the id() of the list of their items.
        self._batches: dict[int, Batch[asyncio.Future[Any]]] = {}
        #: The tasks of running batches, of plans that give results back, and of other plans that
        #: outlive their callers.
        self.tasks: set[asyncio.Future[Any]] = set()
        self._stats = stats
        #: Whether the last batch had several calls. If so, a call waits until the event loop has
        #: finished its current turn, because callers that got their results together also make
        #: their next calls together.
        self._crowded = False
        #: How many batches are running, across all keys.
        self._running = 0

    def enter(self, request: Coalesce[Any, R]) -> asyncio.Future[R]:
        """Add the item of a request to the next batch. Return the future of its result."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        calls = self._calls(request.key)
        calls.waiting.append((request, future))
        if calls.running < request.max_in_flight:
            self._begin(calls)
            self.spawn(self._run(request.key, calls))
        return future

    def _calls(self, key: Hashable) -> PendingCalls[asyncio.Future[Any]]:
        calls = self._pending.get(key)
        if calls is None:
            calls = self._pending[key] = PendingCalls()
        return calls

    async def join(self, request: Coalesce[Any, R]) -> R:
        """Process the item of a request in a batch. Return its result, or raise its error."""
        if request.undo is None and not self._running and not self._crowded:
            return await self._run_alone(request, self._calls(request.key))
        future = self.enter(request)
        deadline = callers_deadline()
        try:
            if deadline == math.inf:
                return await future
            async with asyncio.timeout(deadline - time.monotonic()):
                return await future
        except (asyncio.CancelledError, TimeoutError) as error:
            # A result that has already arrived is given back, because the caller never sees it.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(request, future.result())
            if isinstance(error, TimeoutError):
                raise TimedOut("the time limit of pymongo.timeout has passed") from error
            raise

    async def _run_alone(
        self, request: Coalesce[Any, R], calls: PendingCalls[asyncio.Future[Any]]
    ) -> R:
        """Run one call without a task: no other call is waiting, and its result needs no undo."""
        self._begin(calls)
        try:
            return (await self._drive(request.batch([request.item])))[0]
        finally:
            if calls.waiting:
                self.spawn(self._run(request.key, calls))
            else:
                self._finish(request.key, calls)

    def _begin(self, calls: PendingCalls[asyncio.Future[Any]]) -> None:
        calls.running += 1
        self._running += 1

    def _finish(self, key: Hashable, calls: PendingCalls[asyncio.Future[Any]]) -> None:
        calls.running -= 1
        self._running -= 1
        if not calls.running and not calls.waiting:
            self._pending.pop(key, None)

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run a coroutine in a task for which ``settled`` waits. Return the task."""
        # Not the context of the caller, because it may have a shorter time limit.
        context = contextvars.Context()
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _run(self, key: Hashable, pending: PendingCalls[asyncio.Future[Any]]) -> None:
        try:
            while True:
                batch = Batch(pending)
                calls, items = batch.calls, batch.items
                if not calls:
                    return
                self._crowded = len(calls) > 1
                self._batches[id(items)] = batch
                try:
                    results = await self._drive(calls[0][0].batch(items))
                except BaseException as error:
                    for _, future in calls:
                        if not future.done():
                            future.set_exception(copy_of(error))
                    if not isinstance(error, Exception):
                        raise
                else:
                    for (request, future), result in zip(calls, results, strict=True):
                        if future.done():
                            self._undo(request, result)
                        else:
                            future.set_result(result)
                finally:
                    del self._batches[id(items)]
        finally:
            self._finish(key, pending)

    def admit(self, items: list[Any]) -> None:
        """Add waiting calls to the running batch whose items are in this list; extend the list."""
        batch = self._batches.get(id(items))
        if batch is not None:
            batch.take()
            self._crowded = self._crowded or len(batch.calls) > 1

    def _undo(self, request: Coalesce[Any, R], result: R) -> None:
        if request.undo is not None and result:
            self._stats["given back"] += 1
            self.spawn(self._give_back(request.undo(result)))

    async def _give_back(self, plan: Plan[None]) -> None:
        """Run a plan that gives back a result. Log its error, because no caller is left."""
        try:
            await self._drive(plan)
        except QueueError as error:
            log.warning(
                "messages of a cancelled call cannot be given back; reservations come back when "
                "their leases end, but popped messages may be lost: %s",
                error,
            )

    async def settled(self) -> None:
        """Wait for all running batches."""
        while self.tasks:
            await asyncio.gather(*self.tasks, return_exceptions=True)


class _Turn:
    """A thread that waits for the result of its call, or for its turn to run a batch."""

    __slots__ = ("batch", "error", "result", "woken")

    def __init__(self) -> None:
        #: Released once, when this thread has a result or a batch to run.
        self.woken = threading.Lock()
        self.woken.acquire()
        #: The batch that this thread has to run, or None. The first call is the thread's own.
        self.batch: Batch[_Turn] | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Return False, because a thread always waits for the end of its batch."""
        return False


class ThreadCoalescer:
    """Runs concurrent calls of threads in shared batches, if ``Coalesce.threads`` allows it.

    The thread of the first call of a batch runs the batch, and then gives the next batch to another
    thread. The main thread shares no batch, because Ctrl-C may interrupt it at any time. A thread
    with a ``pymongo.timeout`` shares no batch either, because the timeout limits the whole thread.

    Args:
        drive: A function that runs the plan of a batch.
    """

    def __init__(self, drive: Callable[[Plan[Any]], Any]) -> None:
        self._drive = drive
        self._lock = threading.Lock()
        self._pending: dict[Hashable, PendingCalls[_Turn]] = {}

    def join(self, request: Coalesce[Any, R]) -> R:
        """Process the item of a request in a batch. Return its result, or raise its error."""
        interruptible = threading.current_thread() is threading.main_thread()
        if not request.threads or interruptible or callers_deadline() != math.inf:
            alone: R = self._drive(request.batch([request.item]))[0]
            return alone
        turn = _Turn()
        with self._lock:
            pending = self._pending.get(request.key)
            if pending is None:
                pending = self._pending[request.key] = PendingCalls()
            pending.waiting.append((request, turn))
            if pending.running < request.max_in_flight:
                pending.running += 1
                turn.batch = Batch(pending)
        if turn.batch is None:
            turn.woken.acquire()
        if turn.batch is not None:
            self._run(request.key, pending, turn.batch)
        if turn.error is not None:
            raise turn.error
        answer: R = turn.result
        return answer

    def _run(self, key: Hashable, pending: PendingCalls[_Turn], batch: Batch[_Turn]) -> None:
        calls = batch.calls
        try:
            results = self._drive(calls[0][0].batch(batch.items))
            for (_, turn), result in zip(calls, results, strict=True):
                turn.result = result
        except BaseException as error:
            for _, turn in calls:
                turn.error = copy_of(error)
        finally:
            self._pass_on(key, pending)
            for _, turn in calls[1:]:
                turn.woken.release()

    def _pass_on(self, key: Hashable, pending: PendingCalls[_Turn]) -> None:
        """Let another thread run the next batch."""
        with self._lock:
            batch = Batch(pending)
            if not batch.calls:
                pending.running -= 1
                if not pending.running:
                    del self._pending[key]
                return
        first = batch.calls[0][1]
        first.batch = batch
        first.woken.release()


def copy_of(error: BaseException) -> BaseException:
    """Return a copy of an error, so that each caller gets its own traceback."""
    try:
        copy = type(error)(*error.args)
    except TypeError:
        return error
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__ or error
    return copy
