"""``AsyncQueue``: the twin of ``Queue`` for async code. It shares the docstrings of ``Queue``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

from pyqueue.backends.moving import MoveOptions
from pyqueue.backends.pushing import PushOptions
from pyqueue.claim import AsyncClaim, claimed_async
from pyqueue.messages import (
    MAX_BATCH_BYTES,
    MAX_RECEIVED_BYTES,
    UNCHANGED,
    Counts,
    Duration,
    Finished,
    Headers,
    Id,
    Message,
    Reservation,
)
from pyqueue.queue_base import QueueBase
from pyqueue.queues import OnDuplicate, Queue
from pyqueue.requests import Plan
from pyqueue.reserved import OnLost, check_on_lost, held_async
from pyqueue.runtime.plan_runner import AsyncPlanRunner

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def shares_docstrings(source: type) -> Callable[[C], C]:
    """Give the methods of a twin the docstrings of the class it twins."""

    def share(twin: C) -> C:
        for name, method in vars(twin).items():
            if callable(method) and not name.startswith("_") and not method.__doc__:
                method.__doc__ = getattr(source, name).__doc__
        return twin

    return share


@shares_docstrings(Queue)
class AsyncQueue(QueueBase[T, AsyncPlanRunner]):
    """A queue, for async code: the twin of ``Queue``.

    ``AsyncClient.queue`` makes it, without I/O.
    """

    def _run(self, plan: Plan[R]) -> Awaitable[R]:
        return self._runner.run(plan)

    async def push(
        self,
        payload: T,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        on_duplicate: OnDuplicate = "ignore",
        headers: Headers | None = None,
        id: Id | None = None,
        priority: int | None = None,
        group: str | None = None,
        session: Any = None,
    ) -> Id | None:
        own = {"keys": key, "ids": id, "priorities": priority, "groups": group}
        same = PushOptions(delay=delay, at=at, headers=headers, on_duplicate=on_duplicate)
        same["session"] = session
        return (await self._run(self._push(payload, own, same)))[0]

    async def push_many(
        self,
        payloads: Iterable[T],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        headers: Headers | None = None,
        keys: Sequence[str | None] | None = None,
        on_duplicate: OnDuplicate = "ignore",
        ids: Sequence[Id | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        groups: Sequence[str | None] | None = None,
        session: Any = None,
    ) -> list[Id | None]:
        return await self._run(
            self._backend.push(
                payloads,
                delay=delay,
                at=at,
                headers=headers,
                keys=keys,
                on_duplicate=on_duplicate,
                ids=ids,
                priorities=priorities,
                groups=groups,
                session=session,
            )
        )

    async def pop(self, timeout: Duration | None = None) -> Message[T] | None:
        received = await self._run(self._receive(1, timeout, pop=True))
        return received[0] if received else None

    async def pop_many(
        self,
        limit: int,
        *,
        timeout: Duration | None = None,
        max_bytes: int = MAX_RECEIVED_BYTES,
    ) -> list[Message[T]]:
        return await self._run(self._receive(limit, timeout, max_bytes=max_bytes, pop=True))

    async def reserve(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> Reservation[T] | None:
        received = await self._run(self._receive(1, timeout, lease=lease))
        return received[0] if received else None

    async def reserve_many(
        self,
        limit: int,
        *,
        timeout: Duration | None = None,
        lease: Duration | None = None,
        max_bytes: int = MAX_RECEIVED_BYTES,
    ) -> list[Reservation[T]]:
        return await self._run(self._receive(limit, timeout, max_bytes=max_bytes, lease=lease))

    @asynccontextmanager
    async def reserved(
        self,
        timeout: Duration | None = None,
        *,
        lease: Duration | None = None,
        on_lost: OnLost[T] = None,
    ) -> AsyncIterator[Reservation[T] | None]:
        check_on_lost(on_lost)
        reservation = await self.reserve(timeout, lease=lease)
        if reservation is None:
            yield None
            return
        async with held_async(self._runner, self, reservation, on_lost):
            yield reservation

    async def commit(
        self, *reservations: Reservation[T], payload: Any = UNCHANGED, session: Any = None
    ) -> None:
        return await self._run(
            self._settles(
                reservations,
                session,
                self._backend.commit(reservations, payload=payload, session=session),
            )
        )

    async def rollback(
        self,
        *reservations: Reservation[T],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
        session: Any = None,
    ) -> None:
        return await self._run(
            self._settles(
                reservations,
                session,
                self._backend.rollback(reservations, delay=delay, error=error, session=session),
            )
        )

    async def extend(self, *reservations: Reservation[T], lease: Duration | None = None) -> None:
        return await self._run(self._backend.extend(reservations, lease=lease))

    async def release(self, *reservations: Reservation[T]) -> None:
        return await self._run(
            self._settles(reservations, None, self._backend.release(reservations))
        )

    async def move(
        self,
        *reservations: Reservation[T],
        to: AsyncQueue[Any] | str,
        payload: Any = UNCHANGED,
        update: dict[str, Any] | None = None,
        headers: Headers | None = None,
        delay: Duration | None = None,
        key: str | None = None,
        priority: int | None = None,
        group: str | None = None,
        session: Any = None,
    ) -> None:
        pairs = [(each, payload) for each in reservations]
        edits = MoveOptions(update=update, headers=headers, delay=delay, key=key)
        edits |= MoveOptions(priority=priority, group=group, session=session)
        return await self._run(self._move(pairs, to, edits))

    async def move_many(
        self,
        pairs: Iterable[tuple[Reservation[T], Any]],
        *,
        to: AsyncQueue[Any] | str,
        update: dict[str, Any] | None = None,
        headers: Headers | None = None,
        delay: Duration | None = None,
        key: str | None = None,
        priority: int | None = None,
        group: str | None = None,
        session: Any = None,
    ) -> None:
        edits = MoveOptions(update=update, headers=headers, delay=delay, key=key)
        edits |= MoveOptions(priority=priority, group=group, session=session)
        return await self._run(self._move(pairs, to, edits))

    async def bury(
        self, *reservations: Reservation[T], error: BaseException | str | None = None
    ) -> None:
        return await self._run(
            self._settles(reservations, None, self._backend.bury(reservations, error=error))
        )

    async def progress(
        self, reservation: Reservation[T], fraction: float, note: str | None = None
    ) -> None:
        return await self._run(self._backend.progress(reservation, fraction, note))

    async def checkpoint(self, reservation: Reservation[T], state: Any) -> None:
        return await self._run(self._backend.checkpoint(reservation, state))

    def claim(
        self,
        group: str,
        *,
        limit: int,
        lease: Duration | None = None,
        max_bytes: int = MAX_BATCH_BYTES,
    ) -> AbstractAsyncContextManager[AsyncClaim]:
        return claimed_async(self._runner, self._backend, group, limit, lease, max_bytes)

    async def redrive(self, limit: int | None = None) -> int:
        return await self._run(self._backend.redrive(limit))

    async def remove(self, id: Id) -> bool:
        return await self._run(self._backend.remove(id))

    async def reprioritize(self, id: Id, priority: int) -> bool:
        return await self._run(self._reprioritize(id, priority))

    async def get(self, id: Id) -> Message[T] | Finished[T] | None:
        return await self._run(self._backend.get(id))

    async def peek(self, limit: int = 10) -> list[Message[T]]:
        return await self._run(self._backend.peek(limit))

    async def counts(self, cap: int | None = None) -> Counts:
        return await self._run(self._backend.counts(cap))

    async def next_when(self) -> datetime | None:
        return await self._run(self._backend.next_when())

    async def pause(self) -> None:
        return await self._run(self._backend.pause(True))

    async def resume(self) -> None:
        return await self._run(self._backend.pause(False))

    async def paused(self) -> bool:
        return await self._run(self._backend.paused())

    async def notify(self) -> None:
        return await self._run(self._notify())

    async def purge(self) -> int:
        return await self._run(self._backend.purge())

    async def history(
        self, limit: int = 100, *, since: datetime | None = None
    ) -> list[Finished[T]]:
        return await self._run(self._backend.history(limit, since=since))

    async def replay(self, *ids: Id) -> int:
        return await self._run(self._backend.replay(ids))
