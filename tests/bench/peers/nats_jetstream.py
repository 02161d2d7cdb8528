"""A NATS JetStream work queue in files, with a pull consumer. Acks are not confirmed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, looping, serve, skip

try:
    import nats  # type: ignore[import-not-found, unused-ignore]
    from nats.js import api  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    skip("pip install nats-py")


class Subject:
    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        await self._stream.publish(self._name, json.dumps(body).encode())

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        sent = [
            await self._stream.publish_async(self._name, json.dumps(body).encode())
            for body in bodies
        ]
        await asyncio.gather(*sent)

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        return self._consuming(callers, batch, handle)

    @asynccontextmanager
    async def _consuming(self, callers: int, batch: int, handle: Handle) -> AsyncIterator[None]:
        free = [
            await self._stream.pull_subscribe_bind("workers", stream=self._name)
            for _ in range(callers)
        ]

        async def receive() -> Any:
            subscription = free.pop()
            try:
                return await subscription.fetch(batch, timeout=5)
            except nats.errors.TimeoutError:
                return None
            finally:
                free.append(subscription)

        async def work(messages: Any) -> None:
            for message in messages:
                await handle(json.loads(message.data))
                await message.ack()

        async with looping(callers, receive, work):
            yield
        for subscription in free:
            await subscription.unsubscribe()

    async def delete(self) -> None:
        await self._stream.delete_stream(self._name)


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Open]:
    connection = await nats.connect(url)
    stream = connection.jetstream()

    async def opened(name: str) -> Subject:
        kept = api.RetentionPolicy.WORK_QUEUE
        await stream.add_stream(
            name=name, subjects=[name], retention=kept, storage=api.StorageType.FILE
        )
        await stream.add_consumer(name, durable_name="workers", ack_policy=api.AckPolicy.EXPLICIT)
        return Subject(stream, name)

    try:
        yield opened
    finally:
        await connection.close()


if __name__ == "__main__":
    serve(peer)
