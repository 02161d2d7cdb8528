"""A RabbitMQ quorum queue with publisher confirms, through aio-pika. Acks are not confirmed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, serve, skip

try:
    import aio_pika  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    skip("pip install aio-pika")


class Quorum:
    def __init__(self, connection: Any, channel: Any, name: str) -> None:
        self._connection = connection
        self._channel = channel
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        message = aio_pika.Message(
            json.dumps(body).encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )
        await self._channel.default_exchange.publish(message, routing_key=self._name)

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        await asyncio.gather(*(self.push(body) for body in bodies))

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        return self._consuming(callers, batch, handle)

    @asynccontextmanager
    async def _consuming(self, callers: int, batch: int, handle: Handle) -> AsyncIterator[None]:
        channel = await self._connection.channel()
        await channel.set_qos(prefetch_count=callers * batch)
        queue = await channel.get_queue(self._name, ensure=False)
        unacknowledged = 0

        async def receive(message: Any) -> None:
            nonlocal unacknowledged
            await handle(json.loads(message.body))
            unacknowledged += 1
            if unacknowledged == batch:  # a batch is acknowledged by its last message
                unacknowledged = 0
                await message.ack(multiple=batch > 1)

        tag = await queue.consume(receive)
        yield
        await queue.cancel(tag)
        await channel.close()

    async def delete(self) -> None:
        queue = await self._channel.get_queue(self._name, ensure=False)
        await queue.delete(if_unused=False, if_empty=False)


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Open]:
    connection = await aio_pika.connect_robust(url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)

        async def opened(name: str) -> Quorum:
            arguments = {"x-queue-type": "quorum"}
            await channel.declare_queue(name, durable=True, arguments=arguments)
            return Quorum(connection, channel, name)

        yield opened


if __name__ == "__main__":
    serve(peer)
