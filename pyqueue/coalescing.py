"""Joining concurrent calls of one event loop into batches.

There is no timer: while a batch is under way the next calls gather, and go together when it is back. So a lone caller waits for nobody,
and many callers share their round trips. It knows nothing of queues: what a batch means is its plan's.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Hashable
from typing import Any, Final

from pyqueue.requests import Coalesce

__all__ = ["Coalescer"]

#: What goes into one batch at most.
COUNT: Final = 256
BYTES: Final = 8 * 1024 * 1024

Drive = Callable[[Generator[Any, Any, Any]], Awaitable[Any]]
Call = tuple[Coalesce[Any, Any], asyncio.Future[Any]]


class PendingCalls:
    """The calls with one key that wait for the next batch, first come first served."""

    __slots__ = ("crowded", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Call] = deque()
        self.running = 0
        #: Whether the last batch held several: then nobody goes alone, since the others come in the same turn of the loop.
        self.crowded = False


class Coalescer:
    """Joins calls, and runs their batches in tasks of its own: a cancelled caller cannot stop a batch half way."""

    def __init__(self, drive: Drive, stats: Counter[str]) -> None:
        self._drive = drive
        self._pending: dict[Hashable, PendingCalls] = {}
        #: What runs on behalf of callers, gone ones included.
        self.tasks: set[asyncio.Task[Any]] = set()
        self._stats = stats

    async def join(self, request: Coalesce[Any, Any]) -> Any:
        """Have the item done; the answer is its own, as is the error."""
        lane = self._pending.get(request.key)
        if lane is None:
            lane = self._pending[request.key] = PendingCalls()
        if request.undo is None and not lane.running and not lane.crowded:
            return await self._alone(request, lane)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        call = (request, future)
        lane.waiting.append(call)
        if lane.running < request.max_in_flight:
            lane.running += 1
            self._spawn(self._run(request.key, lane))
        try:
            return await future
        except asyncio.CancelledError:
            # Cancelled as the answer was already there: nobody else will see it.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(request, future.result())
            raise

    async def _alone(self, request: Coalesce[Any, Any], lane: PendingCalls) -> Any:
        """Nobody to wait for, and nothing to give back: no task is needed."""
        lane.running += 1
        try:
            return (await self._drive(request.batch([request.item])))[0]
        finally:
            if lane.waiting:
                self._spawn(self._run(request.key, lane))
            else:
                self._left(request.key, lane)

    def _left(self, key: Hashable, lane: PendingCalls) -> None:
        lane.running -= 1
        if not lane.running and not lane.waiting and not lane.crowded:
            self._pending.pop(key, None)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, key: Hashable, lane: PendingCalls) -> None:
        try:
            while batch := self._take(lane):
                first = batch[0][0]
                try:
                    answers = await self._drive(first.batch([request.item for request, _ in batch]))
                except BaseException as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(_copy(error))
                    if not isinstance(error, Exception):
                        raise
                else:
                    for (request, future), answer in zip(batch, answers, strict=True):
                        if future.done():
                            self._undo(request, answer)
                        else:
                            future.set_result(answer)
        finally:
            self._left(key, lane)

    def _take(self, lane: PendingCalls) -> list[Call]:
        batch: list[Call] = []
        size = 0
        while (
            lane.waiting
            and len(batch) < COUNT
            and (not batch or size + lane.waiting[0][0].size <= BYTES)
        ):
            request, future = lane.waiting.popleft()
            if not future.done():  # else it was cancelled before anything was done for it
                batch.append((request, future))
                size += request.size
        if batch:
            lane.crowded = len(batch) > 1 and batch[0][0].undo is None
        return batch

    def _undo(self, request: Coalesce[Any, Any], answer: Any) -> None:
        if request.undo is not None and answer:
            self._stats["given back"] += 1
            self._spawn(self._drive(request.undo(answer)))

    async def settled(self) -> None:
        """Wait for what runs on behalf of callers."""
        while self.tasks:
            await asyncio.gather(*self.tasks, return_exceptions=True)


def _copy(error: BaseException) -> BaseException:
    """An error for one caller of several: each gets a traceback of its own."""
    try:
        copy = type(error)(*error.args)
    except TypeError:
        return error
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__ or error
    return copy
