"""What all sections of the bench share: the server, rounds that alternate, medians, targets, the table and the JSON.

Every figure is a ratio to raw pymongo measured in the same run, block by block in turn, so that what else the machine does strikes both.
A section is a function of one ``Bench``; it reports rows and curves, and never prints. Nothing here outlives the run: the server, the
worker processes and the databases belong to context managers.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import pymongo
from bson import ObjectId
from pymongo import ReturnDocument, WriteConcern
from rich.console import Console
from rich.table import Table

from pyqueue import AsyncClient, Client
from pyqueue.embedded import EmbeddedServer, find_mongod

#: How each durability is shown, and what raw pymongo is told for it.
DURABILITIES = {"majority": "majority", "acknowledged": "w:1"}
WRITE = {"majority": WriteConcern("majority", j=True), "acknowledged": WriteConcern(1)}
#: The one index that a raw queue needs.
RAW_INDEX = [("q", 1), ("when", 1), ("_id", 1)]
RAW_SORT = [("when", 1), ("_id", 1)]
TEXT = "x" * 167


# ---- figures


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of each round's pair."""
    return [a / b for a, b in zip(over, under, strict=True)]


@dataclass(frozen=True, slots=True)
class Target:
    """A limit of hot-paths: ``sign`` is ">=" or "<="."""

    sign: str
    limit: float

    def met(self, value: float) -> bool:
        return value >= self.limit if self.sign == ">=" else value <= self.limit

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"


def at_least(limit: float) -> Target:
    return Target(">=", limit)


def at_most(limit: float) -> Target:
    return Target("<=", limit)


@dataclass(slots=True)
class Row:
    """One figure: a value for each round, and how many operations stand behind it."""

    name: str
    unit: str
    values: list[float]
    n: int
    target: Target | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quantile(self.values, 0.25), quantile(self.values, 0.75)

    @property
    def met(self) -> bool | None:
        """Whether the target is met by the median; None without one."""
        return None if self.target is None else self.target.met(self.median)

    @property
    def wrong(self) -> bool:
        """Whether messages were lost or received twice: no matter of speed."""
        return self.unit == "count" and self.met is False

    def shown(self) -> dict[str, Any]:
        """As JSON shows it."""
        low, high = self.quartiles
        rest = {
            "median": self.median,
            "quartiles": [low, high],
            "target": self.target and str(self.target),
        }
        return asdict(self) | rest | {"met": self.met}


@dataclass(slots=True)
class Curve:
    """What a plot shows: lines of points by name."""

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    log_x: bool = True
    log_y: bool = True

    def add(self, line: str, x: float, y: float) -> None:
        self.lines.setdefault(line, []).append((x, y))


def histogram(curve: Curve, line: str, values: Sequence[float], per_decade: int = 8) -> None:
    """Add how many percent of the values lie around each of some points, equally spaced on a logarithmic scale."""
    step = 10 ** (1 / per_decade)
    edge = 10.0**-2
    while edge < 1e5:
        inside = sum(edge <= value < edge * step for value in values)
        if inside or line in curve.lines:
            curve.add(line, edge * step**0.5, 100 * inside / len(values))
        edge *= step
        if edge > max(values):
            break


def table(section: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=section, title_justify="left", title_style="bold")
    for column in ("figure", "median", "quartiles", "unit", "n", "target", "", "note"):
        shown.add_column(column, justify="right" if column in ("median", "n", "target") else "left")
    for row in rows:
        low, high = (number(each) for each in row.quartiles)
        met = {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.met]
        target = "" if row.target is None else str(row.target)
        shown.add_row(
            row.name,
            number(row.median),
            f"{low} - {high}",
            row.unit,
            str(row.n),
            target,
            met,
            row.note,
        )
    return shown


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


# ---- rounds


def interleave(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call every side once in each round, the order reversed from round to round; a first round is thrown away."""
    results: list[list[float]] = [[] for _ in sides]
    for index in range(rounds + 1):
        order = list(enumerate(sides))
        for place, side in reversed(order) if index % 2 else order:
            value = side()
            if index:
                results[place].append(value)
    return results


def latencies(calls: int, call: Callable[[], object]) -> list[float]:
    """The seconds that each of some calls took."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


async def async_latencies(calls: int, call: Callable[[], Awaitable[object]]) -> list[float]:
    """As ``latencies``."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times


# ---- messages


def payload(number: int) -> dict[str, Any]:
    """200 bytes of BSON."""
    return {"n": number, "text": TEXT}


def raw_document(queue: str, number: int = 0, when: datetime | None = None) -> dict[str, Any]:
    """A message as a raw user would store it."""
    return {"q": queue, "when": when or datetime.now(UTC), "payload": payload(number)}


def raw_claim(queue: str) -> dict[str, Any]:
    return {"q": queue, "when": {"$lte": datetime.now(UTC)}}


def raw_lease() -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "$set": {"when": now + timedelta(seconds=60), "token": ObjectId(), "reserved": now},
        "$inc": {"tries": 1},
    }


#: The arguments of a raw claim: by find_one_and_delete, and by find_one_and_update.
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
    """Store messages as ``push`` does, without asking it: eligible one after the other up to now, or all at the same instant.

    ``ahead``: seconds by which they are scheduled; ``more``: further fields.
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


# ---- worker processes


class Workers:
    """Child processes that call functions for us, all at the same time."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(
            count
        )  # kept: the children attach to it by name while it lives here
        self._pipes: list[Connection] = []
        self._children = []
        for place in range(count):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, self._barrier, place), daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have every child call a function, which may be a coroutine function; its first argument is the child's ``Start``."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self) -> list[Any]:
        """What they returned; raises what one of them raised."""
        answers = [pipe.recv() for pipe in self._pipes]
        for failed, value in answers:
            if failed:
                raise RuntimeError(f"a worker process failed: {value}")
        return [value for _, value in answers]

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.start(function, *arguments)
        return self.results()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(0 if kind else 5)
            child.terminate()
            child.join()


@dataclass(slots=True)
class Start:
    """A child's place among the others, and how it waits for them."""

    place: int
    wait: Callable[[], object]


def _serve(pipe: Connection, barrier: Any, place: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a Ctrl-C is the parent's, which ends this process
    start = Start(place, lambda: barrier.wait(60))
    with asyncio.Runner() as runner, suppress(EOFError, OSError):
        while True:
            function, arguments = pipe.recv()
            try:
                value = function(start, *arguments)
                if inspect.isawaitable(value):
                    value = runner.run(_awaited(value))
                pipe.send((False, value))
            except Exception as error:
                barrier.abort()
                pipe.send((True, f"{type(error).__name__}: {error}"))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


# ---- the run


class Bench:
    """One run: its server, how thorough it is, and what has been measured."""

    def __init__(self, server: EmbeddedServer, *, quick: bool) -> None:
        self.server = server
        self.quick = quick
        self.rows: list[Row] = []
        self.curves: list[Curve] = []
        self._databases = 0

    def either(self, quick: int, full: int) -> int:
        """How much of something, by how thorough the run is."""
        return quick if self.quick else full

    def row(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        n: int,
        target: Target | None = None,
        note: str = "",
    ) -> Row:
        row = Row(name, unit, list(values), n, target, note)
        self.rows.append(row)
        return row

    def speed(
        self,
        name: str,
        raw: Sequence[float],
        ours: Sequence[float],
        n: int,
        target: Target | None = None,
    ) -> Row:
        """How many times as fast as raw we are, from seconds per message."""
        return self.row(name, "x raw speed", ratios(raw, ours), n, target, _micros(raw, ours))

    def cost(
        self,
        name: str,
        raw: Sequence[float],
        ours: Sequence[float],
        n: int,
        target: Target | None = None,
    ) -> Row:
        """How many times as long as raw we take, from seconds per message."""
        return self.row(name, "x raw cost", ratios(ours, raw), n, target, _micros(raw, ours))

    def zero(self, name: str, count: int, n: int) -> None:
        """Something of which there must be none."""
        self.row(name, "count", [count], n, at_most(0))

    def curve(self, curve: Curve) -> Curve:
        self.curves.append(curve)
        return curve

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a database of its own, dropped in the end."""
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
    def blocking(self, durability: str, **options: Any) -> Iterator[tuple[Client, Any]]:
        """Our client and a raw collection with the same write concern, in one database."""
        with (
            self.database() as url,
            Client(url, durability=durability, **options) as client,
            pymongo.MongoClient[Any](url, tz_aware=True) as mongo,
        ):
            raw = mongo.get_default_database().get_collection(
                "raw", write_concern=WRITE[durability]
            )
            raw.create_index(RAW_INDEX)
            yield client, raw

    @asynccontextmanager
    async def asynchronous(
        self, url: str, durability: str, **options: Any
    ) -> AsyncIterator[tuple[AsyncClient, Any]]:
        """As ``blocking``."""
        async with (
            AsyncClient(url, durability=durability, **options) as client,
            pymongo.AsyncMongoClient[Any](url, tz_aware=True) as mongo,
        ):
            raw = mongo.get_default_database().get_collection(
                "raw", write_concern=WRITE[durability]
            )
            await raw.create_index(RAW_INDEX)
            yield client, raw

    @contextmanager
    def looped(
        self, durability: str, **options: Any
    ) -> Iterator[tuple[asyncio.Runner, AsyncClient, Any, Any]]:
        """An event loop to run things in, our async client, a raw async collection, and our collection for a blocking ``fill``."""
        with ExitStack() as stack:
            url = stack.enter_context(self.database())
            mongo = stack.enter_context(pymongo.MongoClient[Any](url, tz_aware=True))
            runner = stack.enter_context(asyncio.Runner())
            pair = self.asynchronous(url, durability, **options)
            client, raw = runner.run(_awaited(pair.__aenter__()))
            stack.callback(lambda: runner.run(_awaited(pair.__aexit__(None, None, None))))
            yield runner, client, raw, mongo.get_default_database()[client.namespace]


def _micros(raw: Sequence[float], ours: Sequence[float]) -> str:
    return f"{statistics.median(raw) * 1e6:.0f} us raw, {statistics.median(ours) * 1e6:.0f} us ours"


Section = Callable[[Bench], None]


def measure(
    sections: dict[str, Section], *, quick: bool, console: Console
) -> tuple[dict[str, Any], list[Row], list[Curve]]:
    """Run sections, each on a server of its own, printing the table of each; answers what JSON shows, the rows and the curves."""
    began = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "quick": quick, "sections": {}}
    rows: list[Row] = []
    curves: list[Curve] = []
    console.print(" ".join(f"{name}={value}" for name, value in report["machine"].items()))
    for name, section in sections.items():
        # A server for each, since what one section leaves in the cache changes what the next one measures.
        with (
            tempfile.TemporaryDirectory(prefix="pyqueue-bench-") as folder,
            EmbeddedServer(folder) as server,
        ):
            enlarge_cache(server)
            bench, start = Bench(server, quick=quick), time.monotonic()
            try:
                section(bench)
            finally:  # what there is, even if it failed
                seconds = time.monotonic() - start
                console.print(table(f"{name} ({seconds:.0f} s)", bench.rows))
            report["sections"][name] = {
                "seconds": seconds,
                "rows": [row.shown() for row in bench.rows],
            }
            rows += bench.rows
            curves += bench.curves
    report["seconds"] = time.monotonic() - began
    report["curves"] = [asdict(curve) for curve in curves]
    return report, rows, curves


def mongod_version() -> str:
    said = subprocess.run(
        [find_mongod(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    return said.split()[2]


def enlarge_cache(server: EmbeddedServer) -> None:
    """Give the server 2 GB, as a real one has at least.

    The 0.25 GB of an embedded one evict the pages of deleted index entries, and so hide what they cost: 2x instead of 20x.
    """
    with pymongo.MongoClient[Any](server.url) as mongo:
        mongo.admin.command("setParameter", 1, wiredTigerEngineRuntimeConfig="cache_size=2G")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "pymongo": pymongo.version,
        "mongod": mongod_version(),
    }
