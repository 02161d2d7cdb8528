"""``AsyncStream``: the twin of ``Stream`` for async code. It shares its docstrings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TypeVar

from pyqueue.async_queues import shares_docstrings
from pyqueue.messages import (
    MAX_RECEIVED_BYTES,
    Backoff,
    ConsumerCounts,
    ConsumerInfo,
    Duration,
    Headers,
    StreamMessage,
    StreamReservation,
)
from pyqueue.requests import Plan
from pyqueue.reserved import OnLost, check_on_lost, held_async
from pyqueue.runtime.plan_runner import AsyncPlanRunner
from pyqueue.streams import Consumer, ConsumerBase, Start, Stream, StreamBase

T = TypeVar("T")
R = TypeVar("R")


@shares_docstrings(Stream)
class AsyncStream(StreamBase[T, AsyncPlanRunner]):
    """A stream, for async code: the twin of ``Stream``.

    ``AsyncClient.stream`` makes it, without I/O.
    """

    async def _run(self, plan: Plan[R]) -> R:
        return await self._runner.run(plan)

    async def append(self, payload: T, *, headers: Headers | None = None) -> int:
        return (await self._run(self._backend.append([payload], headers)))[0]

    async def append_many(
        self, payloads: Iterable[T], *, headers: Headers | None = None
    ) -> list[int]:
        return await self._run(self._backend.append(payloads, headers))

    async def read(self, *, after: int | None = None, limit: int = 1000) -> list[StreamMessage[T]]:
        return await self._run(self._backend.read(after, limit))

    async def trim(self, *, before: int | datetime) -> int:
        return await self._run(self._backend.trim(before))

    def consumer(
        self,
        name: str,
        *,
        start: Start = "first",
        lease: Duration = 60,
        max_tries: int | None = 20,
        dead_letter: str | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008  # frozen
        poll: Duration = 15,
    ) -> AsyncConsumer[T]:
        plans = self._group(name, start, lease, max_tries, dead_letter, backoff, poll)
        return AsyncConsumer(self._runner, plans)

    async def consumers(self) -> list[ConsumerInfo]:
        return await self._run(self._backend.groups())

    async def delete_consumer(self, name: str) -> bool:
        return await self._run(self._backend.delete_group(name))


@shares_docstrings(Consumer)
class AsyncConsumer(ConsumerBase[T, AsyncPlanRunner]):
    """A consumer group of a stream, for async code: the twin of ``Consumer``.

    ``AsyncStream.consumer`` makes it, without I/O.
    """

    async def _run(self, plan: Plan[R]) -> R:
        return await self._runner.run(plan)

    async def reserve(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> StreamReservation[T] | None:
        return next(iter(await self._run(self._receive(1, timeout, lease=lease))), None)

    async def reserve_many(
        self,
        limit: int,
        *,
        timeout: Duration | None = None,
        lease: Duration | None = None,
        max_bytes: int = MAX_RECEIVED_BYTES,
    ) -> list[StreamReservation[T]]:
        return await self._run(self._receive(limit, timeout, max_bytes=max_bytes, lease=lease))

    @asynccontextmanager
    async def reserved(
        self,
        timeout: Duration | None = None,
        *,
        lease: Duration | None = None,
        on_lost: OnLost[T] = None,
    ) -> AsyncIterator[StreamReservation[T] | None]:
        check_on_lost(on_lost)
        reservation = await self.reserve(timeout, lease=lease)
        if reservation is None:
            yield None
            return
        async with held_async(self._runner, self, reservation, on_lost):
            yield reservation

    async def commit(self, *reservations: StreamReservation[T]) -> None:
        return await self._run(self._settles(reservations, None, self._plans.commit(reservations)))

    async def rollback(
        self,
        *reservations: StreamReservation[T],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        plan = self._plans.rollback(reservations, delay=delay, error=error)
        return await self._run(self._settles(reservations, None, plan))

    async def extend(
        self, *reservations: StreamReservation[T], lease: Duration | None = None
    ) -> None:
        return await self._run(self._plans.extend(reservations, lease=lease))

    async def release(self, *reservations: StreamReservation[T]) -> None:
        return await self._run(self._settles(reservations, None, self._plans.release(reservations)))

    async def bury(
        self, *reservations: StreamReservation[T], error: BaseException | str | None = None
    ) -> None:
        plan = self._plans.bury(reservations, error=error)
        return await self._run(self._settles(reservations, None, plan))

    async def counts(self) -> ConsumerCounts:
        return await self._run(self._plans.counts())

    async def pause(self) -> None:
        return await self._run(self._plans.pause(True))

    async def resume(self) -> None:
        return await self._run(self._plans.pause(False))

    async def paused(self) -> bool:
        return await self._run(self._plans.paused())

    async def seek(self, position: Start) -> int:
        return await self._run(self._plans.seek(position))
