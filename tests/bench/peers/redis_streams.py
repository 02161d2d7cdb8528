"""A Redis stream with a consumer group: XADD, XREADGROUP, XACK. Entries stay until trimmed."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, looping, serve, skip

try:
    from redis import asyncio as redis
    from redis.exceptions import ResponseError
except ImportError:
    skip("pip install redis")

GROUP = "workers"


class Stream:
    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        await self._client.xadd(self._name, {"body": json.dumps(body)})

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        async with self._client.pipeline(transaction=False) as pipeline:
            for body in bodies:
                pipeline.xadd(self._name, {"body": json.dumps(body)})
            await pipeline.execute()

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        names = itertools.count()

        async def receive() -> Any:
            consumer = f"consumer{next(names) % callers}"
            found = await self._client.xreadgroup(
                GROUP, consumer, {self._name: ">"}, count=batch, block=2000
            )
            return found and found[0][1]

        async def work(entries: Any) -> None:
            for _, fields in entries:
                await handle(json.loads(fields[b"body"]))
            await self._client.xack(self._name, GROUP, *(number for number, _ in entries))

        return looping(callers, receive, work)

    async def delete(self) -> None:
        await self._client.delete(self._name)


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Open]:
    async with redis.from_url(url) as client:

        async def opened(name: str) -> Stream:
            try:
                await client.xgroup_create(name, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            return Stream(client, name)

        yield opened


if __name__ == "__main__":
    serve(peer)
