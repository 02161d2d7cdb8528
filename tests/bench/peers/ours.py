"""pyqueue, used as in its quickstart, with the default bus or the one that MORE names.

If MORE is "bucket", the queues are buckets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from pyqueue import AsyncClient, AsyncQueue
from pyqueue.messages import KindName
from tests.bench.peers.program import Handle, Open, looping, serve


class Ours:
    def __init__(self, queue: AsyncQueue[Any]) -> None:
        self._queue = queue

    async def push(self, body: dict[str, Any]) -> None:
        await self._queue.push(body)

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        await self._queue.push_many(bodies)

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        queue = self._queue

        async def one(reservation: Any) -> None:
            await handle(reservation.payload)
            await queue.commit(reservation)

        async def many(reservations: Any) -> None:
            for reservation in reservations:
                await handle(reservation.payload)
            await queue.commit(*reservations)

        if batch > 1:
            return looping(callers, lambda: queue.reserve_many(batch), many)
        return looping(callers, queue.reserve, one)

    async def delete(self) -> None:
        left = await self._queue.purge()
        if left:
            raise RuntimeError(f"{left} messages are left, which were committed")


@asynccontextmanager
async def peer(url: str, more: str = "") -> AsyncIterator[Open]:
    if more == "bucket":  # apart from the standard queues, whose names are the same
        kind: KindName = "bucket"
        client = AsyncClient(url, namespace="buckets", telemetry=False)
    else:
        kind, client = "standard", AsyncClient(url, signals=more or None, telemetry=False)
    async with client:

        async def opened(name: str) -> Ours:
            return Ours(client.queue(name, kind=kind))

        yield opened


if __name__ == "__main__":
    serve(peer)
