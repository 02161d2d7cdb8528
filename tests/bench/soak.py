"""``python -m tests.bench.soak``: a mixed load for half an hour, to find leaks.

The tasks of an AsyncClient push, reserve, commit, roll back, move and pop; the threads of a
blocking Client in the same process consume, too. Every few seconds the program samples its memory,
threads, tasks, open files and connections, and the time of messages from push to receipt. At the
end it prints how each of them grew. The exit status is 1 if a message is missing or something
leaks.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pyqueue import AsyncClient, Client, QueueClosed
from pyqueue.embedded import EmbeddedServer
from tests.bench import plots
from tests.bench.figures import Curve, quantile

#: Producer tasks, consumer threads, and messages pushed per second.
TASKS, THREADS, RATE = 8, 2, 100
#: Producers wait at this many unfinished messages. So on a slow machine the lag still shows the
#: queue.
MAX_UNFINISHED = 500
QUEUES = ("first", "second", "third")
#: The share of the run that warms up. It does not count.
WARM_UP = 0.2
#: How much the minimum may grow from the first third of the remaining run to the last.
GROWTH = 0.05
MEGABYTE = 2**20


@dataclass(frozen=True)
class Sample:
    """The state at a time, in seconds from the beginning."""

    at: float
    memory: float
    threads: int
    tasks: int
    files: int
    connections: int
    lag: float
    lag99: float
    received: int


class Counter:
    """Counts the messages that all tasks and threads pushed and finished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pushed = self.finished = 0
        self.lags: list[float] = []

    @property
    def unfinished(self) -> int:
        """The number of messages that were pushed and not finished."""
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


async def produce(client: AsyncClient, counter: Counter, stop: asyncio.Event, seed: int) -> None:
    queue, dice = client.queue(QUEUES[0]), random.Random(seed)
    while not stop.is_set():
        count = dice.choice((1, 1, 1, 20))
        if count == 1:
            await queue.push(fresh(), delay=dice.choice((None, None, 0.05)))
        else:
            await queue.push_many([fresh() for _ in range(count)])
        counter.push(count)
        await asyncio.sleep(count * TASKS / RATE)
        while counter.unfinished > MAX_UNFINISHED and not stop.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def consume(client: AsyncClient, counter: Counter, seed: int) -> None:
    """Consume until the client is closed."""
    dice = random.Random(seed)
    queues = [client.queue(name) for name in QUEUES]
    place = seed % len(queues)
    queue, onward = queues[place], queues[place + 1] if place + 1 < len(queues) else None
    try:
        while True:
            if onward is None and dice.random() < 0.3:
                counter.finish(len(await queue.pop_many(10, timeout=1)))
                continue
            message = await queue.reserve(dice.choice((0.05, 1, 5)))
            if message is None:
                continue
            if place == 0 and message.tries == 1:
                counter.receive(message.payload)
            if dice.random() < 0.05:
                await queue.rollback(message, delay=0.01)
            elif onward is not None:
                await queue.move(message, to=onward)
            else:
                await queue.commit(message)
                counter.finish(1)
    except QueueClosed:
        pass


def threaded(client: Client, counter: Counter) -> None:
    """Consume the last queue in a thread until the client is closed."""
    queue = client.queue(QUEUES[-1])
    try:
        while True:
            with queue.reserved(timeout=1) as message:
                pass
            counter.finish(message is not None)
    except QueueClosed:
        pass


async def soak(
    url: str, seconds: float, every: float, on_sample: Callable[[Sample], None]
) -> tuple[list[Sample], int]:
    """Run the load.

    Returns:
        The samples, and the number of missing messages.
    """
    counter, samples, process = Counter(), list[Sample](), psutil.Process()
    async with AsyncClient(url) as client:
        blocking = Client(url)
        workers = [
            threading.Thread(target=threaded, args=(blocking, counter)) for _ in range(THREADS)
        ]
        for worker in workers:
            worker.start()
        stop, began = asyncio.Event(), time.monotonic()
        producers = [
            asyncio.create_task(produce(client, counter, stop, seed)) for seed in range(TASKS)
        ]
        consumers = [
            asyncio.create_task(consume(client, counter, seed)) for seed in range(3 * TASKS)
        ]
        while (left := seconds - (time.monotonic() - began)) > 0:
            await asyncio.sleep(min(left, every))
            lags = counter.take() or [0.0]
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
            on_sample(samples[-1])
        stop.set()
        await asyncio.gather(*producers)
        end = time.monotonic() + 60
        while counter.unfinished and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        stored = sum([(await client.queue(name).counts()).total for name in QUEUES])
        await asyncio.to_thread(blocking.close)
        await client.close()
        await asyncio.gather(*consumers)
        for worker in workers:
            worker.join()
    return samples, counter.unfinished - stored


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the growth per hour of the best straight line."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope * 3600


def summary(samples: list[Sample], missing: int) -> dict[str, Any]:
    """Return the figures of the samples, with the names of those that leak."""
    warm = samples[int(len(samples) * WARM_UP) :]
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
        # The minimum leaves out changes that come and go with the load.
        early, late = min(values[:third]), min(values[-third:])
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
    """Return the plots as SVG, by name."""
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
        prog="python -m tests.bench.soak", description="Run a mixed load and look for leaks."
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--json", action="store_true", help="print one object on the last line")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw memory, lag and counts as SVG files"
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

        def show(sample: Sample) -> None:
            held = f"{sample.memory:.0f} MB, {sample.threads} threads, {sample.tasks} tasks"
            description = f"{held}, p99 {sample.lag99 * 1000:.0f} ms"
            bar.update(task, completed=sample.at, description=description)

        samples, missing = asyncio.run(soak(server.url, seconds, max(1.0, seconds / 180), show))
    verdict = summary(samples, missing)
    if given.plots is not None:
        given.plots.mkdir(parents=True, exist_ok=True)
        for name, text in drawn(samples).items():
            (given.plots / f"{name}.svg").write_text(text)
    for name in ("memory", "threads", "tasks", "files", "connections"):
        each = verdict[name]
        growth = f"{each['early']:8.1f} -> {each['late']:8.1f}"
        print(f"{name:12} {growth}  most {each['most']:8.1f}  {each['per_hour']:+8.2f} per hour")
    lag, lag99 = verdict["lag_ms"], verdict["lag99_ms"]
    medians = f"lag p50 {lag['median']:.1f} ms, p99 {lag99['median']:.1f} ms"
    print(f"{medians} (worst {lag99['most']:.0f} ms)")
    received = f"{verdict['received']} messages in {verdict['seconds']:.0f} s"
    print(f"{received}; missing {missing}; leaks: {', '.join(verdict['leaks']) or 'none'}")
    if given.json:
        print(json.dumps(verdict | {"series": [asdict(each) for each in samples]}))
    return 1 if missing or verdict["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
