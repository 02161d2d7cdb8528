"""Prints the cost of the buses on this machine: `python -m tests.signals.measure`.

docs/topics/signals.md quotes its figures.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pymongo import MongoClient

import signals
from pyqueue.embedded import EmbeddedServer
from tests.support.servers import RedisServer

FLOOD = """
import sys, time, datetime, signals, pymongo
url, seconds = sys.argv[1], float(sys.argv[2])
if url.startswith("redis"):
    bus = signals.open(url)
else:
    bus = signals.open("capped:", pymongo.MongoClient(url)["measure"])
end = time.monotonic() + seconds
while time.monotonic() < end:
    for number in range(50):
        bus.emit(f"topic-{number}", datetime.datetime.now(datetime.UTC))
    time.sleep(0.05)
bus.close()
"""


def latency(make: Callable[[], Any], rounds: int = 300) -> tuple[str, str]:
    """Return the milliseconds of a wake-up (p50 / p99) and the microseconds of an `emit`.

    A wake-up lasts from `emit` on one bus to the return of `wait` on another.
    """
    waits, emits = [], []
    with make() as bus, make() as other, bus.listen("a") as listener:
        for _ in range(rounds):
            began = time.perf_counter()
            other.emit("a", datetime.now(UTC))
            emits.append(time.perf_counter() - began)
            assert listener.wait(5)
            waits.append(time.perf_counter() - began)
            time.sleep(0.055)  # until the window closes, so that each event is sent at once
    p99 = statistics.quantiles(waits, n=100)[98]
    return (
        f"{statistics.median(waits) * 1e3:.2f} / {p99 * 1e3:.2f}",
        f"{statistics.median(emits) * 1e6:.0f}",
    )


def cpu(make: Callable[[], Any], flood: str | None, seconds: float = 5.0) -> str:
    """Return the percentage of one core that 50 listeners of one bus take.

    They are idle, or a second process sends them 1 000 events per second.
    """
    with contextlib.ExitStack() as stack:
        bus = stack.enter_context(make())
        for number in range(50):
            stack.enter_context(bus.listen(f"topic-{number}"))
        child = (
            subprocess.Popen([sys.executable, "-c", FLOOD, flood, str(seconds + 2)])
            if flood
            else None
        )
        time.sleep(1)
        heard, began, used = bus.stats["heard"], time.monotonic(), time.process_time()
        time.sleep(seconds)
        used, elapsed = time.process_time() - used, time.monotonic() - began
        rate = (bus.stats["heard"] - heard) / elapsed
        if child:
            child.wait()
    return f"{used / elapsed * 100:.2f}" + (f" (at {rate:.0f}/s)" if flood else "")


def main() -> None:
    """Print the table."""
    with contextlib.ExitStack() as stack:
        redis = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(redis.kill)
        mongo = stack.enter_context(
            EmbeddedServer(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        database = stack.enter_context(MongoClient[dict[str, Any]](mongo.url))["measure"]
        makers: dict[str, tuple[Callable[[], Any], str | None]] = {
            "memory": (signals.MemoryBus, None),
            "redis": (lambda: signals.RedisBus(redis.url), redis.url),
            "capped": (lambda: signals.CappedBus(database), mongo.url),
        }
        print("bus | wake-up p50 / p99, ms | emit, us | idle, % CPU | 1 000 events/s, % CPU")
        for name, (make, flood) in makers.items():
            print(
                name,
                *latency(make),
                cpu(make, None),
                cpu(make, flood) if flood else "-",
                sep=" | ",
                flush=True,
            )


if __name__ == "__main__":
    main()
