"""Functions that the recipes of the tests name, and programs that tests signal and kill."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from pydantic import BaseModel

from pyqueue import AsyncClient, Client, Delivery, Many, To, Worker
from tests.support.eventually import eventually

NO_FUNCTION = 5
#: How many messages the program "batches" finds.
TOTAL = 200


class Row(BaseModel):
    """A raw line."""

    number: int


def parse(row: Row) -> int:
    return row.number


class Routes:
    """An import path may name an attribute of an attribute."""

    @staticmethod
    async def route(number: int) -> To[Any]:
        return To("even" if number % 2 == 0 else "odd")


def store(number: int) -> None:
    assert number >= 0


def store_all(numbers: list[int]) -> None:
    for number in numbers:
        store(number)


# ---- programs


def work(url: str) -> None:
    """Run a worker whose handler prints that it has begun, and never ends."""

    def handle(payload: Any, delivery: Delivery[Any]) -> None:
        print("begun", flush=True)
        threading.Event().wait()

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with Client(url) as client:
        report = Worker(client, concurrency=1).on("in", handle).run()
        print(report.stages["in"], flush=True)


def store_batches(client: Client, killed: bool) -> Worker:
    """Store rows in batches. A process that is to be killed holds the third batch."""
    stored, queue = client.database["stored"], client.queue("in")

    def store(rows: list[int], deliveries: list[Delivery[int]]) -> None:
        size = len(rows)
        stored.insert_many([{"row": each.message.payload, "size": size} for each in deliveries])
        if killed and stored.count_documents({}) == 3 * size:
            eventually(lambda: queue.counts().total == TOTAL - 2 * size, "two commits")
            print("begun", flush=True)
            threading.Event().wait()

    return Worker(client, concurrency=1).on("in", store, batch=50, window=0.1, lease=3600)


def pipeline(client: Any, *, lease: float = 1) -> Any:
    """Build stages with a choice and a fan-out: parse and route numbers, split the even numbers."""

    async def parse(text: str) -> int:
        return int(text)

    async def route(number: int) -> To[Any]:
        return To("even" if number % 2 == 0 else "odd", number)

    async def split(number: int) -> Many:
        return Many([To("parts", {"of": number, "part": part}) for part in range(3)])

    built = client.pipeline("kill").link("raw", parse, to="parsed", lease=lease, max_tries=None)
    built.choice("parsed", route, to=["even", "odd"], lease=lease, max_tries=None)
    return built.choice("even", split, to=["parts"], lease=lease, max_tries=None)


def run_pipeline(url: str, blocking: bool) -> None:
    """Run the pipeline until it is killed."""
    if blocking:
        with Client(url) as client:
            pipeline(client).run(concurrency=16)
        return
    import asyncio

    async def main() -> None:
        async with AsyncClient(url) as client:
            await pipeline(client).run(concurrency=16)

    asyncio.run(main())


if __name__ == "__main__":
    if sys.argv[1] == "batches":
        with Client(sys.argv[2]) as client:
            store_batches(client, killed=True).run()
    elif sys.argv[1] == "pipeline":
        run_pipeline(sys.argv[2], sys.argv[3] == "blocking")
    else:
        work(sys.argv[2])
