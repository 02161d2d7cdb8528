"""procrastinate on PostgreSQL: concurrent defers, then a worker until the queue is empty."""

import asyncio
import json
import sys
import time

try:
    import procrastinate  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    print(json.dumps({"skipped": "pip install procrastinate"}))
    sys.exit()


async def main(dsn: str, count: int, callers: int) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    received: list[int] = []

    @app.task(queue="bench", name="work")  # type: ignore[untyped-decorator, misc, unused-ignore]
    async def work(n: int, text: str) -> None:
        received.append(n)

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        numbers = iter(range(count))

        async def push() -> None:
            for number in numbers:
                await work.defer_async(n=number, text="x" * 167)

        start = time.perf_counter()
        await asyncio.gather(*(push() for _ in range(callers)))
        middle = time.perf_counter()
        await app.run_worker_async(
            queues=["bench"], wait=False, concurrency=callers, install_signal_handlers=False
        )
        end = time.perf_counter()
    times = {"push": middle - start, "receive": end - middle}
    print(json.dumps(times | {"received": len(received), "distinct": len(set(received))}))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
