"""The first use of a queue by many callers of one client at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymongo

from pyqueue import AsyncClient, Client
from tests.integration.test_sent import Recorder

CALLERS = 16


def assert_shared(recorder: Recorder) -> None:
    """Check that callers shared the reads of the record, and that it was created once."""
    names = of_the_record(recorder)
    assert names.count("findAndModify") == 1
    assert len(names) <= CALLERS // 2, "each caller would read it for its kind, and again"


def of_the_record(recorder: Recorder) -> list[str]:
    """Return the names of the commands about the record of queue "q"."""
    return [
        each["name"]
        for each in recorder.commands
        if (each.get("filter") or each.get("query") or {}).get("_id") == "~queue:q"
    ]


def test_tasks_read_the_record_of_a_new_queue_once(url: str) -> None:
    recorder = Recorder()

    async def run() -> None:
        mongo = pymongo.AsyncMongoClient[Any](url, event_listeners=[recorder])
        async with AsyncClient(mongo.get_default_database(), signals="none:") as client:
            await client.queue("other").push(0)
            with recorder.recording():
                await asyncio.gather(*(client.queue("q").push(n) for n in range(CALLERS)))
            assert (await client.queue("q").counts()).ready == CALLERS
        await mongo.close()

    asyncio.run(run())
    assert_shared(recorder)


def test_threads_read_the_record_of_a_new_queue_once(url: str) -> None:
    recorder = Recorder()
    with (
        pymongo.MongoClient[Any](url, event_listeners=[recorder]) as mongo,
        Client(mongo.get_default_database(), signals="none:") as client,
        ThreadPoolExecutor(CALLERS) as threads,
    ):
        client.queue("other").push(0)
        with recorder.recording():
            list(threads.map(lambda n: client.queue("q").push(n), range(CALLERS)))
        assert client.queue("q").counts().ready == CALLERS
    assert_shared(recorder)
