"""Workers as processes: signalled, and killed at random."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import Client, Worker
from tests.pipeline.place import counted
from tests.pipeline.stages import TOTAL, store_batches
from tests.support.eventually import LONG, eventually
from tests.support.kills import recover_all
from tests.support.processes import program

#: The ``q`` of copies of processes that died before they had decided.
HIDDEN = re.compile("^~handover:")


def process(*arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run one of the programs of ``stages``."""
    return program("-m", "tests.pipeline.stages", *arguments)


def expect(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline() == f"{line}\n"


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that ends workers, with a handler of the program, which they restore."""
    before = signal.signal(request.param, former := lambda *_: None)
    yield request.param
    assert signal.signal(request.param, before) is former


def test_signal_lets_the_handler_end(client: Client, number: signal.Signals) -> None:
    """No other handler begins."""
    queue = client.queue("in")
    queue.push_many([1, 2])

    def handle(payload: int) -> None:
        os.kill(os.getpid(), number)
        run = worker._run
        assert run is not None
        eventually(lambda: run._stopping, "it is being stopped")

    worker = Worker(client, concurrency=1).on("in", handle)
    assert counted(worker.run(), "in").items() >= {"in": 1, "out": 1}.items()
    assert [(each.payload, each.tries) for each in queue.peek()] == [(2, 0)]


def test_second_signal_gives_everything_back(url: str, client: Client) -> None:
    """The process ends although the handler's thread never does."""
    queue = client.queue("in")
    queue.push_many([1, 2])
    with process("deaf", url) as worker:
        expect(worker, "begun")
        worker.send_signal(signal.SIGTERM)
        expect(worker, "SIGTERM: ending")
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=LONG)
        assert worker.returncode == 0
        assert "'in': 1, 'out': 0, 'dropped': 0, 'retried': 1" in output
    assert {each.payload: each.tries for each in queue.peek()} == {1: 1, 2: 0}


def test_killed_with_a_batch_in_flight(url: str, client: Client) -> None:
    """Only the messages of the batch that was not committed come again, in smaller calls."""
    queue = client.queue("in")
    queue.push_many(range(TOTAL))
    with process("batches", url) as worker:
        expect(worker, "begun")
        worker.kill()
        worker.wait(LONG)
    assert queue.counts().reserved == 50
    held = {"q": "in", "token": {"$exists": True}}
    lapsed = {"$set": {"when": datetime.now(UTC) - timedelta(seconds=1)}}
    client.database[client.namespace].update_many(held, lapsed)  # as if an hour had passed
    report = store_batches(client, killed=False).run(until_empty=True)
    assert report.stages["in"]["out"] == TOTAL - 100
    assert queue.counts().total == 0
    sizes: dict[int, list[int]] = {}
    for each in client.database["stored"].find():
        sizes.setdefault(each["row"], []).append(each["size"])
    assert sorted(sizes) == list(range(TOTAL))
    again = {row: sorted(seen) for row, seen in sizes.items() if len(seen) > 1}
    assert sorted(again) == list(range(100, 150))
    assert all(len(seen) == 2 and seen[0] <= 50 // 8 for seen in again.values()), again


# ---- killed at random


def moved_on(client: Client, before: int) -> bool:
    """Return whether more items than before are done, or no item is left."""
    return client.queue("odd").counts().total > before or client.queue("raw").next_when() is None


def run_and_kill(url: str, items: int, kills: int, seed: int, pause: tuple[float, float]) -> None:
    """Push the items, kill the process that handles them again and again, and audit the result.

    The messages themselves are the ledger: an item that a move lost is missing at the end, and an
    item that was moved twice is there twice. The trail of each message names its stages.
    """
    rng = random.Random(seed)
    began = time.monotonic()
    with Client(url) as client:
        ids = client.queue("raw").push_many([str(number) for number in range(items)])
        numbers = dict(zip(ids, range(items), strict=True))
        stages = [client.queue(name, lease=1, max_tries=None) for name in ("raw", "parsed", "even")]

        def empty() -> bool:
            return all(queue.next_when() is None for queue in stages)

        done = 0
        while done < kills or not empty():
            with process("pipeline", url, rng.choice(["blocking", "async"])) as worker:
                if done < kills:
                    before = client.queue("odd").counts().total
                    eventually(partial(moved_on, client, before), "an item that is through")
                    time.sleep(rng.uniform(*pause))
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.wait(LONG)
                    done += 1
                else:
                    running = lambda: worker.poll() is None  # noqa: E731
                    eventually(empty, "empty queues", seconds=10 * LONG, alive=running)
        recover_all(client, "even")
        audit(client, numbers)
        assert [queue.counts().total for queue in stages] == [0, 0, 0]
    print(f"{items} items, {kills} kills: {time.monotonic() - began:.1f} s")


def audit(client: Client, numbers: dict[Any, int]) -> None:
    """Assert that every item passed each of its stages exactly once."""
    moves: Counter[tuple[Any, str]] = Counter()
    found = client.database["pyqueue"].find({"record": {"$exists": False}, "q": {"$not": HIDDEN}})
    parts: Counter[tuple[int, int]] = Counter()
    for message in found:
        if message["q"] == "parts":
            parts[message["payload"]["of"], message["payload"]["part"]] += 1
            continue
        assert message["q"] == "odd", message
        assert "token" not in message, "the message is held"
        assert message["payload"] == numbers[message["_id"]]
        moves.update((message["_id"], mark["q"]) for mark in message["trail"])
    odd = {id for id, number in numbers.items() if number % 2}
    assert moves == Counter((id, stage) for id in odd for stage in ("raw", "parsed"))
    even = [number for number in numbers.values() if number % 2 == 0]
    assert parts == Counter((number, part) for number in even for part in range(3))


def test_killed_at_random(url: str) -> None:
    run_and_kill(url, items=100, kills=1, seed=7, pause=(0.0, 0.1))


@pytest.mark.slow
def test_killed_at_random_often(url: str) -> None:
    run_and_kill(url, items=20_000, kills=50, seed=11, pause=(0.0, 0.5))
