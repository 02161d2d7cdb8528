"""SAQ on Redis: enqueue, and a worker with one job at a time for each caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, serve, skip

try:
    import saq  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    skip("pip install saq[redis]")


class Jobs:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def push(self, body: dict[str, Any]) -> None:
        await self._queue.enqueue("work", body=body)

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        raise NotImplementedError

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        return self._consuming(callers, handle)

    @asynccontextmanager
    async def _consuming(self, callers: int, handle: Handle) -> AsyncIterator[None]:
        async def work(_: Any, *, body: dict[str, Any]) -> None:
            await handle(body)

        worker = saq.Worker(self._queue, functions=[("work", work)], concurrency=callers)
        worker.SIGNALS = []
        task = asyncio.create_task(worker.start())
        yield
        await asyncio.sleep(0.05)  # the last jobs finish
        await worker.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def delete(self) -> None:
        await self._queue.disconnect()


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Open]:
    queues: dict[str, Any] = {}

    async def opened(name: str) -> Jobs:
        if name not in queues:
            queues[name] = saq.Queue.from_url(url, name=name)
            await queues[name].connect()
        return Jobs(queues[name])

    yield opened


if __name__ == "__main__":
    serve(peer)
