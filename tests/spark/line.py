"""The programs of a line: one of two Python links, a Spark stream, a Spark stage and a Python sink.

Run one with ``python -m tests.spark.line NAME URL FOLDER MASTER BATCH``. Each runs until it is
killed, or until an error ends it; the test starts it again. ::

    raw ──link──> parsed ──stream──> clean ──stage──> last ──sink──> a collection
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from pyqueue import AsyncClient, Client
from tests.spark.programs import session
from tests.support.processes import ROOT

QUEUES = ("raw", "parsed", "clean", "last")
#: The collection with a document for each flight that the sink has seen.
RESULTS = "seen"

FLIGHT = "struct<id: int, carrier: string, delay: int>"


def parse(row: dict[str, str]) -> dict[str, Any]:
    """Convert a line of the file."""
    delay = None if row["arr_delay"] == "NA" else int(row["arr_delay"])
    return {"id": int(row["id"]), "carrier": row["carrier"], "delay": delay}


def started(master: str) -> Any:
    """Start the session of a Spark program. The executors of a cluster find this package."""
    return session(master, **{"spark.executorEnv.PYTHONPATH": str(ROOT)})


def link(url: str, folder: str, master: str, batch: str) -> None:
    """Parse the lines."""

    async def run() -> None:
        async with AsyncClient(url) as client:
            await client.pipeline().link("raw", parse, to="parsed").run(concurrency=64)

    asyncio.run(run())


def bulk_link(url: str, folder: str, master: str, batch: str) -> None:
    """Parse the lines, hundreds at a time."""
    with Client(url) as client:
        raw = client.queue("raw", lease=60)
        while True:
            held = raw.reserve_many(500)
            raw.move_many([(each, parse(each.payload)) for each in held], to="parsed")


def stream(url: str, folder: str, master: str, batch: str) -> None:
    """Copy the flights by a stream with structs."""
    df = started(master).readStream.format("pyqueue")
    options = {"uri": url, "queue": "parsed", "group": "stream", "payloadType": FLIGHT}
    df = df.options(**options, maxMessagesPerBatch=batch, numPartitions="2").load()
    writer = df.writeStream.format("pyqueue").options(uri=url, queue="clean", stage="clean")
    writer.option("checkpointLocation", f"{folder}/stream").start().awaitTermination()


def stage(url: str, folder: str, master: str, batch: str) -> None:
    """Move the flights by a stage."""
    from pyqueue.spark import SparkStage

    moving = SparkStage(
        uri=url,
        source="clean",
        to="last",
        group="stage",
        transform=lambda df: df.select("id", "payload"),
        max_messages=int(batch),
    )
    for _ in moving.run(started(master)):
        pass


def sink(url: str, folder: str, master: str, batch: str) -> None:
    """Store each flight and commit its message, in one transaction."""
    with Client(url) as client:
        last = client.queue("last", lease=60)
        results = client.database[RESULTS]
        while True:
            held = last.reserve_many(200)
            documents = [{"flight": each.payload["id"]} for each in held]

            def store(session: Any, held: Any = held, documents: Any = documents) -> None:
                results.insert_many([{**each} for each in documents], session=session)
                last.commit(*held, session=session)

            client.run_transaction(store)


PROGRAMS: dict[str, Callable[[str, str, str, str], None]] = {
    "link": link,
    "bulk_link": bulk_link,
    "stream": stream,
    "stage": stage,
    "sink": sink,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
