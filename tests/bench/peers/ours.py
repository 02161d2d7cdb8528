"""pyqueue, used as in its quickstart."""

import asyncio
import json
import sys
import time
import uuid

from pyqueue import AsyncClient


async def main(url: str, count: int, callers: int) -> None:
    async with AsyncClient(url, namespace=f"ours{uuid.uuid4().hex[:8]}") as client:
        queue = client.queue("jobs")
        numbers = iter(range(count))
        received: list[int] = []

        async def push() -> None:
            for number in numbers:
                await queue.push({"n": number, "text": "x" * 167})

        async def receive() -> None:
            while (reservation := await queue.reserve(0)) is not None:
                await queue.commit(reservation)
                received.append(reservation.payload["n"])

        start = time.perf_counter()
        await asyncio.gather(*(push() for _ in range(callers)))
        middle = time.perf_counter()
        await asyncio.gather(*(receive() for _ in range(callers)))
        end = time.perf_counter()
    times = {"push": middle - start, "receive": end - middle}
    print(json.dumps(times | {"received": len(received), "distinct": len(set(received))}))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
