"""A RabbitMQ quorum queue with publisher confirms, through aio-pika."""

import asyncio
import json
import sys
import time
import uuid
from typing import Any

try:
    import aio_pika  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    print(json.dumps({"skipped": "pip install aio-pika"}))
    sys.exit()


async def main(url: str, count: int, callers: int) -> None:
    connection = await aio_pika.connect_robust(url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=callers)
        name = f"bench{uuid.uuid4().hex[:8]}"
        queue = await channel.declare_queue(
            name, durable=True, arguments={"x-queue-type": "quorum"}
        )
        numbers = iter(range(count))
        received: list[int] = []
        over = asyncio.Event()

        async def push() -> None:
            for number in numbers:
                body = json.dumps({"n": number, "text": "x" * 167}).encode()
                message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, routing_key=name)

        async def receive(message: Any) -> None:
            await message.ack()
            received.append(json.loads(message.body)["n"])
            if len(received) >= count:
                over.set()

        start = time.perf_counter()
        await asyncio.gather(*(push() for _ in range(callers)))
        middle = time.perf_counter()
        await queue.consume(receive)
        await asyncio.wait_for(over.wait(), 60)
        end = time.perf_counter()
        await queue.delete(if_unused=False, if_empty=False)
    times = {"push": middle - start, "receive": end - middle}
    print(json.dumps(times | {"received": len(received), "distinct": len(set(received))}))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
