"""``AsyncStream``: the twin of ``Stream`` for async code. It shares its docstrings."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TypeVar

from pyqueue.async_queues import shares_docstrings
from pyqueue.messages import Headers, StreamMessage
from pyqueue.plan_runner import AsyncPlanRunner
from pyqueue.requests import Plan
from pyqueue.streams import Stream, StreamBase

__all__ = ["AsyncStream"]

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
