"""The parts that all sections of the benchmark share: the server, alternating rounds, raw messages.

Every figure is a ratio to raw pymongo, measured in alternating rounds of the same run. So a busy
machine slows both sides. A section is a function of one ``Bench``; it adds rows and curves and
never prints. The server, the worker processes and the databases belong to context managers.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pymongo
from bson import ObjectId
from pymongo import ReturnDocument, WriteConcern
from rich.console import Console

from pyqueue import AsyncClient, Client, Queue
from pyqueue.embedded import EmbeddedServer, find_mongod
from pyqueue.runtime.connecting import Durability
from tests.bench.figures import (
    Cpu,
    Curve,
    Dots,
    Row,
    Target,
    at_most,
    noise,
    ratios,
    table,
)
from tests.bench.workers import as_coroutine

#: The name of each durability in the report, and the write concern of the raw side.
DURABILITIES: dict[Durability, str] = {"majority": "majority", "acknowledged": "w:1"}
WRITE = {"majority": WriteConcern("majority", j=True), "acknowledged": WriteConcern(1)}
#: The one index that a raw queue needs.
RAW_INDEX = [("q", 1), ("when", 1), ("_id", 1)]
RAW_SORT = [("when", 1), ("_id", 1)]
TEXT = "x" * 167
#: How many messages ``take`` reserves at a time.
BATCH = 100


# ---- rounds


def interleave(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call every side once per round, in alternating order, and return the results of each side.

    The first round warms up and does not count.
    """
    results: list[list[float]] = [[] for _ in sides]
    for index in range(rounds + 1):
        order = list(enumerate(sides))
        for place, side in reversed(order) if index % 2 else order:
            value = side()
            if index:
                results[place].append(value)
    return results


def compared(
    rounds: int, raw: Callable[[], float], ours: Callable[[], float]
) -> tuple[list[float], list[float], list[float]]:
    """Return the results of both sides, and the ratios of the raw side to itself.

    The raw side is measured twice in each round. Its ratio to itself should be 1; how far it is
    from 1 is the noise of this machine.
    """
    before, after, again = interleave(rounds, raw, ours, raw)
    return before, after, ratios(before, again)


def latencies(calls: int, call: Callable[[], object]) -> list[float]:
    """Return the seconds that each call took."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


async def async_latencies(calls: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the seconds that each awaited call took."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times


def timed(work: Callable[[], object], count: int) -> float:
    """Return the seconds that some work takes for each of ``count`` messages."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / count


def micros(*sides: Sequence[float]) -> str:
    """Return the median of each side in microseconds, in words."""
    return ", ".join(f"{statistics.median(side) * 1e6:.0f} us" for side in sides)


# ---- messages


def take(queue: Queue[Any], count: int) -> None:
    """Reserve and commit ``count`` messages, in batches."""
    while count > 0:
        held = queue.reserve_many(min(BATCH, count), timeout=0)
        assert held, "it ran dry"
        queue.commit(*held)
        count -= len(held)


def singles(queue: Queue[Any], calls: int) -> float:
    """Reserve and commit one by one. Return the median of the seconds for each."""

    def one() -> None:
        held = queue.reserve(0)
        assert held is not None
        queue.commit(held)

    return statistics.median(latencies(calls, one))


def empty_scans(queue: Queue[Any], calls: int) -> float:
    """Return the median of the seconds in which a receive finds nothing."""

    def nothing() -> None:
        assert queue.reserve(0) is None

    return statistics.median(latencies(calls, nothing))


def payload(number: int) -> dict[str, Any]:
    """Return a payload of 200 bytes of BSON."""
    return {"n": number, "text": TEXT}


def raw_document(queue: str, number: int = 0, when: datetime | None = None) -> dict[str, Any]:
    """Return a message as a user of the raw driver would store it."""
    return {"q": queue, "when": when or datetime.now(UTC), "payload": payload(number)}


def raw_claim(queue: str) -> dict[str, Any]:
    return {"q": queue, "when": {"$lte": datetime.now(UTC)}}


def raw_lease() -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "$set": {"when": now + timedelta(seconds=60), "token": ObjectId(), "reserved": now},
        "$inc": {"tries": 1},
    }


#: The arguments of a raw claim by find_one_and_delete, and by find_one_and_update.
RAW_POP: dict[str, Any] = {"sort": RAW_SORT}
RAW_RESERVE: dict[str, Any] = {"sort": RAW_SORT, "return_document": ReturnDocument.AFTER}


def fill(
    collection: Any,
    queue: str,
    count: int,
    *,
    same: bool = False,
    ahead: float = 0,
    start: int = 0,
    **more: Any,
) -> None:
    """Store messages in the form of ``push``, faster than ``push`` does.

    Args:
        collection: The collection of the namespace.
        queue: The name of the queue.
        count: The number of messages.
        same: Make all of them eligible at the same instant, not one per millisecond up to now.
        ahead: Seconds by which they are scheduled.
        start: The number of the first one.
        more: Further fields.
    """
    base = datetime.now(UTC) + timedelta(seconds=ahead)
    collection = collection.with_options(write_concern=WriteConcern(1))
    for first in range(0, count, 10_000):
        batch = []
        for number in range(first, min(first + 10_000, count)):
            when = base if same else base - timedelta(milliseconds=count - number)
            document = {"q": queue, "when": when, "due": when, "tries": 0, "pushed": when, **more}
            batch.append(document | {"payload": payload(start + number)})
        collection.insert_many(batch, ordered=False)


# ---- the run


class Bench:
    """A run of one section.

    Args:
        server: Its server.
        quick: Whether to measure less.
    """

    def __init__(self, server: EmbeddedServer, *, quick: bool) -> None:
        self.server = server
        self.quick = quick
        self.rows: list[Row] = []
        self.curves: list[Curve] = []
        self.dots: list[Dots] = []
        self._databases = 0
        self._mongod = psutil.Process(server.pid)

    def either(self, quick: int, full: int) -> int:
        """Return one of two amounts, for a quick run or a full one."""
        return quick if self.quick else full

    def cpu(self) -> Cpu:
        """Return the processor time of this process and of mongod since they began."""
        server = self._mongod.cpu_times()
        return Cpu(time.process_time(), server.user + server.system)

    def row(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        n: int,
        target: Target | None = None,
        note: str = "",
        *,
        same: Sequence[float] = (),
        cpu: Cpu | None = None,
    ) -> Row:
        """Add a row. ``same`` are the ratios of two equal sides."""
        found = noise(same) if same else None
        row = Row(name, unit, list(values), n, target, note, found, cpu)
        self.rows.append(row)
        return row

    def speed(
        self,
        name: str,
        raw: Sequence[float],
        ours: Sequence[float],
        n: int,
        target: Target | None = None,
        *,
        same: Sequence[float] = (),
        cpu: Cpu | None = None,
    ) -> Row:
        """Add a row: how many times as fast as the raw side, given seconds per message."""
        note = _micros(raw, ours)
        return self.row(name, "x raw speed", ratios(raw, ours), n, target, note, same=same, cpu=cpu)

    def cost(
        self,
        name: str,
        raw: Sequence[float],
        ours: Sequence[float],
        n: int,
        target: Target | None = None,
    ) -> Row:
        """Add a row: how many times as long as the raw side, given seconds per message."""
        return self.row(name, "x raw cost", ratios(ours, raw), n, target, _micros(raw, ours))

    def zero(self, name: str, count: int, n: int) -> None:
        """Add a row whose count must be 0."""
        self.row(name, "count", [count], n, at_most(0))

    def curve(self, curve: Curve) -> Curve:
        """Add a curve and return it."""
        self.curves.append(curve)
        return curve

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new database, which is dropped at the end."""
        self._databases += 1
        name = f"bench{self._databases}"
        base, _, query = self.server.url.partition("?")
        try:
            yield f"{base.rstrip('/')}/{name}?{query}"
        finally:
            with (
                suppress(pymongo.errors.PyMongoError),
                pymongo.MongoClient[Any](self.server.url) as mongo,
            ):
                mongo.drop_database(name)

    @contextmanager
    def blocking(self, durability: Durability, **options: Any) -> Iterator[tuple[Client, Any]]:
        """A client of pyqueue and a raw collection with the same write concern, in one database."""
        with (
            self.database() as url,
            Client(url, durability=durability, **options, telemetry=False) as client,
            pymongo.MongoClient[Any](url, tz_aware=True) as mongo,
        ):
            raw = mongo.get_default_database().get_collection(
                "raw", write_concern=WRITE[durability]
            )
            raw.create_index(RAW_INDEX)
            yield client, raw

    @asynccontextmanager
    async def asynchronous(
        self, url: str, durability: Durability, **options: Any
    ) -> AsyncIterator[tuple[AsyncClient, Any]]:
        """The same as ``blocking`` for async code."""
        async with (
            AsyncClient(url, durability=durability, **options, telemetry=False) as client,
            pymongo.AsyncMongoClient[Any](url, tz_aware=True) as mongo,
        ):
            raw = mongo.get_default_database().get_collection(
                "raw", write_concern=WRITE[durability]
            )
            await raw.create_index(RAW_INDEX)
            yield client, raw

    @contextmanager
    def looped(
        self, durability: Durability, **options: Any
    ) -> Iterator[tuple[asyncio.Runner, AsyncClient, Any, Any]]:
        """An event loop with both sides.

        Yields:
            The runner of the loop, an async client, a raw async collection, and the collection of
            the namespace for a blocking ``fill``.
        """
        with ExitStack() as stack:
            url = stack.enter_context(self.database())
            mongo = stack.enter_context(pymongo.MongoClient[Any](url, tz_aware=True))
            runner = stack.enter_context(asyncio.Runner())
            pair = self.asynchronous(url, durability, **options)
            client, raw = runner.run(as_coroutine(pair.__aenter__()))
            stack.callback(lambda: runner.run(as_coroutine(pair.__aexit__(None, None, None))))
            yield runner, client, raw, mongo.get_default_database()[client.namespace]


def _micros(raw: Sequence[float], ours: Sequence[float]) -> str:
    return f"{statistics.median(raw) * 1e6:.0f} us raw, {statistics.median(ours) * 1e6:.0f} us ours"


Section = Callable[[Bench], None]


def measure(
    sections: dict[str, Section], *, quick: bool, console: Console
) -> tuple[dict[str, Any], list[Row]]:
    """Run sections, each on a new server, and print their tables.

    Returns:
        The JSON report and the rows.
    """
    began = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "quick": quick, "sections": {}}
    report |= {"curves": [], "dots": []}
    rows: list[Row] = []
    console.print(" ".join(f"{name}={value}" for name, value in report["machine"].items()))
    for name, section in sections.items():
        # The pages that one section leaves in the cache would change the figures of the next one.
        with (
            tempfile.TemporaryDirectory(prefix="pyqueue-bench-") as folder,
            EmbeddedServer(folder) as server,
        ):
            enlarge_cache(server)
            bench, start = Bench(server, quick=quick), time.monotonic()
            try:
                section(bench)
            finally:  # also after a failure
                seconds = time.monotonic() - start
                console.print(table(f"{name} ({seconds:.0f} s)", bench.rows))
            report["sections"][name] = {
                "seconds": seconds,
                "rows": [row.shown() for row in bench.rows],
            }
            rows += bench.rows
            report["curves"] += [asdict(curve) for curve in bench.curves]
            report["dots"] += [asdict(dots) for dots in bench.dots]
    report["seconds"] = time.monotonic() - began
    return report, rows


def mongod_version() -> str:
    command = [find_mongod(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[2]


def enlarge_cache(server: EmbeddedServer) -> None:
    """Give the server 2 GB, the least of a real server.

    With its usual 0.25 GB it evicts the pages of deleted index entries. That hides their cost: a
    factor of 2 instead of 20.
    """
    with pymongo.MongoClient[Any](server.url) as mongo:
        mongo.admin.command("setParameter", 1, wiredTigerEngineRuntimeConfig="cache_size=2G")


def machine() -> dict[str, Any]:
    """Return the machine and the versions that were measured."""
    return {
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "pymongo": pymongo.version,
        "mongod": mongod_version(),
    }
