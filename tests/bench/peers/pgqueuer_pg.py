"""PgQueuer on PostgreSQL, through a pool of asyncpg and with uvloop, as its command uses it.

Its worker takes 10 jobs at a time by default, for one caller as well, and acknowledges finished
jobs together. A batch is the batch_size of the worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, serve, skip

try:
    import asyncpg  # type: ignore[import-not-found, unused-ignore]
    import uvloop  # type: ignore[import-not-found, unused-ignore]
    from pgqueuer import PgQueuer  # type: ignore[import-not-found, unused-ignore]
    from pgqueuer.db import AsyncpgPoolDriver  # type: ignore[import-not-found, unused-ignore]
    from pgqueuer.queries import Queries  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    skip("pip install pgqueuer[asyncpg]")


DEFAULT_BATCH = 10


class Jobs:
    def __init__(self, dsn: str, queries: Any, name: str) -> None:
        self._dsn = dsn
        self._queries = queries
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        await self._queries.enqueue(self._name, json.dumps(body).encode())

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        count = len(bodies)
        payloads = [json.dumps(body).encode() for body in bodies]
        await self._queries.enqueue([self._name] * count, payloads, [0] * count)

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        return self._consuming(max(batch, callers // 2, DEFAULT_BATCH), handle)

    @asynccontextmanager
    async def _consuming(self, size: int, handle: Handle) -> AsyncIterator[None]:
        async with asyncpg.create_pool(self._dsn) as pool:
            worker = PgQueuer(AsyncpgPoolDriver(pool))

            @worker.entrypoint(self._name)  # type: ignore[untyped-decorator, misc, unused-ignore]
            async def work(job: Any) -> None:
                await handle(json.loads(job.payload))

            run = worker.qm.run(batch_size=size, max_concurrent_tasks=2 * size)
            task = asyncio.create_task(run)
            yield
            worker.qm.shutdown.set()
            await task

    async def delete(self) -> None:
        await self._queries.clear_queue(self._name)


@asynccontextmanager
async def peer(dsn: str) -> AsyncIterator[Open]:
    async with asyncpg.create_pool(dsn) as pool:
        queries = Queries(AsyncpgPoolDriver(pool))
        if not await queries.schema_is_installed():
            await queries.install()

        async def opened(name: str) -> Jobs:
            return Jobs(dsn, queries, name)

        yield opened


if __name__ == "__main__":
    uvloop.install()
    serve(peer)
