"""``python -m tests.bench.soak``: mixed load for half an hour, and whether anything grows that should not.

One process is the client under test: an AsyncClient whose tasks push, reserve, commit, roll back, move and pop, and a blocking Client whose
threads do the same beside them. Every few seconds it notes its memory, threads, tasks, open files and connections, and how long messages took
from push to receipt. In the end the slopes are told, and every message is accounted for. Exit status 1 if one is missing, or something leaks.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pyqueue import AsyncClient, Client, QueueClosed
from pyqueue.embedded import EmbeddedServer
from tests.bench import plots
from tests.bench.harness import Curve, quantile

#: Tasks and threads of each sort; messages a second that are pushed in all.
TASKS, THREADS, RATE = 8, 2, 100
#: How many messages may be on their way: a slow machine pushes less, so that lag says something of the queue.
UNDER_WAY = 500
QUEUES = ("first", "second", "third")
#: Of the run, how much is warming up; and by how much the least may grow after it, from the first third to the last.
WARM, GROWTH = 0.2, 0.05
MEGABYTE = 2**20


@dataclass(frozen=True)
class Sample:
    """What was seen at a time, in seconds from the beginning."""

    at: float
    memory: float
    threads: int
    tasks: int
    files: int
    connections: int
    lag: float
    lag99: float
    received: int


class Ledger:
    """What was pushed and what was finished, by any task or thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pushed = self.finished = 0
        self.lags: list[float] = []

    @property
    def under_way(self) -> int:
        """How many were pushed and not finished."""
        with self._lock:
            return self.pushed - self.finished

    def push(self, count: int) -> None:
        with self._lock:
            self.pushed += count

    def receive(self, payload: dict[str, Any]) -> None:
        with self._lock:
            self.lags.append(time.time() - payload["at"])

    def finish(self, count: int) -> None:
        with self._lock:
            self.finished += count

    def take(self) -> list[float]:
        with self._lock:
            lags, self.lags = self.lags, []
        return lags


def fresh() -> dict[str, Any]:
    return {"at": time.time(), "text": "x" * 150}


async def produce(client: AsyncClient, ledger: Ledger, stop: asyncio.Event, seed: int) -> None:
    queue, dice = client.queue(QUEUES[0]), random.Random(seed)
    while not stop.is_set():
        count = dice.choice((1, 1, 1, 20))
        if count == 1:
            await queue.push(fresh(), delay=dice.choice((None, None, 0.05)))
        else:
            await queue.push_many([fresh() for _ in range(count)])
        ledger.push(count)
        await asyncio.sleep(count * TASKS / RATE)
        while ledger.under_way > UNDER_WAY and not stop.is_set():  # noqa: ASYNC110  # threads count too
            await asyncio.sleep(0.1)


async def consume(client: AsyncClient, ledger: Ledger, seed: int) -> None:
    """Until the client is closed."""
    dice = random.Random(seed)
    queues = [client.queue(name) for name in QUEUES]
    place = seed % len(queues)
    queue, onward = queues[place], queues[place + 1] if place + 1 < len(queues) else None
    try:
        while True:
            if onward is None and dice.random() < 0.3:
                ledger.finish(len(await queue.pop_many(10, timeout=1)))
                continue
            message = await queue.reserve(dice.choice((0.05, 1, 5)))
            if message is None:
                continue
            if place == 0 and message.tries == 1:
                ledger.receive(message.payload)
            if dice.random() < 0.05:
                await queue.rollback(message, delay=0.01)
            elif onward is not None:
                await queue.move(message, to=onward)
            else:
                await queue.commit(message)
                ledger.finish(1)
    except QueueClosed:
        pass


def threaded(client: Client, ledger: Ledger) -> None:
    """A consumer thread of the last queue, until the client is closed."""
    queue = client.queue(QUEUES[-1])
    try:
        while True:
            with queue.reserved(timeout=1) as message:
                pass
            ledger.finish(message is not None)
    except QueueClosed:
        pass


async def soak(url: str, seconds: float, every: float, told: Any) -> tuple[list[Sample], int]:
    """Run the load; the samples, and how many messages are missing."""
    ledger, samples, process = Ledger(), list[Sample](), psutil.Process()
    async with AsyncClient(url) as client:
        blocking = Client(url)
        workers = [
            threading.Thread(target=threaded, args=(blocking, ledger)) for _ in range(THREADS)
        ]
        for worker in workers:
            worker.start()
        stop, began = asyncio.Event(), time.monotonic()
        producers = [
            asyncio.create_task(produce(client, ledger, stop, seed)) for seed in range(TASKS)
        ]
        consumers = [
            asyncio.create_task(consume(client, ledger, seed)) for seed in range(3 * TASKS)
        ]
        while (left := seconds - (time.monotonic() - began)) > 0:
            await asyncio.sleep(min(left, every))
            lags = ledger.take() or [0.0]
            gc.collect()
            status = await client.database.client.admin.command("serverStatus")
            samples.append(
                Sample(
                    time.monotonic() - began,
                    process.memory_info().rss / MEGABYTE,
                    threading.active_count(),
                    len(asyncio.all_tasks()),
                    process.num_fds(),
                    status["connections"]["current"],
                    statistics.median(lags),
                    quantile(lags, 0.99),
                    len(lags),
                )
            )
            told(samples[-1])
        stop.set()
        await asyncio.gather(*producers)
        end = time.monotonic() + 60
        while ledger.under_way and time.monotonic() < end:  # noqa: ASYNC110  # threads count too
            await asyncio.sleep(0.1)
        stored = sum([(await client.queue(name).counts()).total for name in QUEUES])
        await asyncio.to_thread(blocking.close)
        await client.close()
        await asyncio.gather(*consumers)
        for worker in workers:
            worker.join()
    return samples, ledger.under_way - stored


def slope(points: Sequence[tuple[float, float]]) -> float:
    """What is gained in an hour, by the straight line that fits best."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope * 3600


def judged(samples: list[Sample], missing: int) -> dict[str, Any]:
    """What the samples say."""
    warm = samples[int(len(samples) * WARM) :]
    third = max(1, len(warm) // 3)
    verdict: dict[str, Any] = {
        "samples": len(samples),
        "seconds": samples[-1].at,
        "missing": missing,
        "leaks": [],
    }
    verdict["received"] = sum(each.received for each in samples)
    for name, allowed in (
        ("memory", GROWTH),
        ("threads", 0),
        ("tasks", GROWTH),
        ("files", 0),
        ("connections", 0),
    ):
        values = [float(getattr(each, name)) for each in warm]
        early, late = (
            min(values[:third]),
            min(values[-third:]),
        )  # what never goes away; the rest comes and goes with the load
        verdict[name] = {
            "early": early,
            "late": late,
            "most": max(values),
            "per_hour": slope([(each.at, getattr(each, name)) for each in warm]),
        }
        if late > early * (1 + allowed) + (0 if name in ("memory", "tasks") else 1):
            verdict["leaks"].append(name)
    for name in ("lag", "lag99"):
        values = [getattr(each, name) * 1000 for each in warm]
        verdict[f"{name}_ms"] = {"median": statistics.median(values), "most": max(values)}
    return verdict


def drawn(samples: list[Sample]) -> dict[str, str]:
    """The plots, as SVG by name."""
    curves = []
    for name, title, unit, lines in (
        ("memory", "Memory of the client", "MB", {"resident": "memory"}),
        ("lag", "From push to receipt", "ms", {"median": "lag", "p99": "lag99"}),
        (
            "counts",
            "What the client holds",
            "count",
            dict.fromkeys(("threads", "tasks", "files", "connections")),
        ),
    ):
        curve = Curve(f"soak-{name}", title, "seconds", unit, log_x=False, log_y=False)
        for line, what in lines.items():
            for each in samples:
                curve.add(
                    line, each.at, getattr(each, what or line) * (1000 if name == "lag" else 1)
                )
        curves.append(curve)
    return {curve.name: plots.svg(curve) for curve in curves}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.soak", description="Whether anything leaks."
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw memory, lag and counts there, as SVG"
    )
    given = parser.parse_args(arguments)
    seconds, console = given.minutes * 60, Console(stderr=True)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        tempfile.TemporaryDirectory(prefix="pyqueue-soak-") as folder,
        EmbeddedServer(folder) as server,
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task("starting", total=seconds)

        def told(sample: Sample) -> None:
            words = f"{sample.memory:.0f} MB, {sample.threads} threads, {sample.tasks} tasks, p99 {sample.lag99 * 1000:.0f} ms"
            bar.update(task, completed=sample.at, description=words)

        samples, missing = asyncio.run(soak(server.url, seconds, max(1.0, seconds / 180), told))
    verdict = judged(samples, missing)
    if given.plots is not None:
        given.plots.mkdir(parents=True, exist_ok=True)
        for name, text in drawn(samples).items():
            (given.plots / f"{name}.svg").write_text(text)
    for name in ("memory", "threads", "tasks", "files", "connections"):
        each = verdict[name]
        print(
            f"{name:12} {each['early']:8.1f} -> {each['late']:8.1f}  most {each['most']:8.1f}  {each['per_hour']:+8.2f} per hour"
        )
    print(
        f"lag p50 {verdict['lag_ms']['median']:.1f} ms, p99 {verdict['lag99_ms']['median']:.1f} ms (worst {verdict['lag99_ms']['most']:.0f} ms)"
    )
    print(
        f"{verdict['received']} messages in {verdict['seconds']:.0f} s; missing {missing}; leaks: {', '.join(verdict['leaks']) or 'none'}"
    )
    if given.json:
        print(json.dumps(verdict | {"series": [asdict(each) for each in samples]}))
    return 1 if missing or verdict["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
