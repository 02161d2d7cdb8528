"""Workers as processes: signalled, and killed at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pymongo
import pytest

from pyqueue import Client
from tests.integration.eventually import LONG, until

ROOT = Path(__file__).parents[2]
#: Seconds for which the server keeps the transaction of a process that died, 60 by default; and for which a message in one is held, 75.
ORPHANED, HELD = 3, 5


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of the programs of ``stages``, killed in the end if it still runs."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.stages", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def begun(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline() == "begun\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_handler_end(url: str, client: Client, number: signal.Signals) -> None:
    queue = client.queue("in")
    queue.push_many([1, 2])
    with process("slow", url) as worker:
        begun(worker)
        worker.send_signal(number)
        output, _ = worker.communicate(timeout=LONG)
        assert worker.returncode == 0
        assert "'in': 1, 'out': 1" in output
        assert "begun" not in output  # nothing more was begun
    assert [(each.payload, each.tries) for each in queue.peek()] == [(2, 0)]


def test_a_second_signal_ends_at_once_and_gives_everything_back(url: str, client: Client) -> None:
    """Although the handler's thread is deaf."""
    queue = client.queue("in")
    queue.push_many([1, 2])
    with process("deaf", url) as worker:
        begun(worker)
        worker.send_signal(signal.SIGTERM)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "SIGTERM: ending\n"
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=LONG)
        assert worker.returncode == 0
        assert "'in': 1, 'out': 0, 'dropped': 0, 'retried': 1" in output
    assert {each.payload: each.tries for each in queue.peek()} == {1: 1, 2: 0}


# ---- killed at random


def moved_on(client: Client, before: int) -> bool:
    """Whether more items than before are through, or none is left to begin with."""
    return client.queue("odd").counts().total > before or client.queue("raw").next_when() is None


def run_and_kill(url: str, items: int, kills: int, seed: int, pause: tuple[float, float]) -> None:
    """Push the items, kill the process that works on them again and again, and audit where they are in the end.

    The ledger is the messages themselves: an item that a move lost is missing at its end, one that was moved twice is there twice. The
    trail of each tells the stages it passed.
    """
    rng = random.Random(seed)
    began = time.monotonic()
    with Client(url) as client:
        ids = client.queue("raw").push_many([str(number) for number in range(items)])
        numbers = dict(zip(ids, range(items), strict=True))
        stages = [
            client.queue(name, lease=1.5, max_tries=None) for name in ("raw", "parsed", "even")
        ]
        done = 0
        while done < kills or any(queue.next_when() is not None for queue in stages):
            with process("pipeline", url, rng.choice(["blocking", "async"]), str(HELD)) as worker:
                if done < kills:
                    before = client.queue("odd").counts().total
                    until(partial(moved_on, client, before))
                    time.sleep(rng.uniform(*pause))
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.wait(LONG)
                    done += 1
                else:
                    deadline = time.monotonic() + 10 * LONG
                    while any(queue.next_when() is not None for queue in stages):
                        assert time.monotonic() < deadline
                        assert worker.poll() is None
                        time.sleep(0.05)
        audit(client, numbers)
        assert [queue.counts().total for queue in stages] == [0, 0, 0]
    print(f"{items} items, {kills} kills: {time.monotonic() - began:.1f} s")


def audit(client: Client, numbers: dict[Any, int]) -> None:
    """Every item passed each of its stages exactly once."""
    moves: Counter[tuple[Any, str]] = Counter()
    found = client.database["pyqueue"].find({"record": {"$exists": False}})
    parts: Counter[tuple[int, int]] = Counter()
    for message in found:
        if message["q"] == "parts":
            parts[message["payload"]["of"], message["payload"]["part"]] += 1
            continue
        assert message["q"] == "odd", message
        assert "token" not in message, "it is held"
        assert message["payload"] == numbers[message["_id"]]
        moves.update((message["_id"], mark["q"]) for mark in message["trail"])
    odd = {id for id, number in numbers.items() if number % 2}
    assert moves == Counter((id, stage) for id in odd for stage in ("raw", "parsed"))
    even = [number for number in numbers.values() if number % 2 == 0]
    assert parts == Counter((number, part) for number in even for part in range(3))


@pytest.fixture
def short_transactions(own_mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[None]:
    """This worker's server gives up transactions sooner, so that the test need not wait for it."""
    before = own_mongo.admin.command("getParameter", transactionLifetimeLimitSeconds=1)[
        "transactionLifetimeLimitSeconds"
    ]
    own_mongo.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=ORPHANED)
    yield
    own_mongo.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=before)


@pytest.mark.own_mongod
@pytest.mark.usefixtures("short_transactions")
def test_killed_at_random(url: str) -> None:
    run_and_kill(url, items=600, kills=3, seed=7, pause=(0.0, 0.1))


@pytest.mark.slow
@pytest.mark.own_mongod
@pytest.mark.usefixtures("short_transactions")
def test_killed_at_random_often(url: str) -> None:
    run_and_kill(url, items=20_000, kills=50, seed=11, pause=(0.0, 0.5))
