"""The loops and the worker of the workload, without faults: the ledger has what they did."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pyqueue import AsyncClient, Client
from tests.chaos import ledger
from tests.chaos.drivers import AsyncRunner, run_blocking
from tests.chaos.ledger import Ledger
from tests.chaos.names import LOOPS, TICKS
from tests.chaos.workload import Role, Workload
from tests.support.eventually import eventually

MESSAGES = 100


class NoPauses(random.Random):
    """Never pauses, cancels calls at once, and leaves loops often."""

    def random(self) -> float:
        return 0.4 * super().random()

    def uniform(self, a: float, b: float) -> float:
        return 0.0


class CountingLedger(Ledger):
    """A ledger that counts its lines by operation and by outcome."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counted: Counter[str] = Counter()

    def _write(self, line: list[Any]) -> None:
        super()._write(line)
        self.counted[line[3]] += 1


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    spec = {"seed": 1, "rate": 1.0, "ledger": str(tmp_path / "ledger")}
    found = Workload({**spec, "name": "consumer-1.1", "role": "consumer-1"})
    found.dice = NoPauses(1)
    return found


def settled(path: Path, *operations: str) -> dict[str, set[str]]:
    """Return the ids that calls settled, by their outcome; "" if the ledger has none."""
    found: dict[str, set[str]] = {}
    calls: dict[int, set[str]] = {}
    for what, number, _, *more in ledger.read(path):
        if what == "call" and more[0] in operations:
            calls[number] = {id for ids in (more[2] or {}).values() for id in ids}
        elif what == "result" and number in calls:
            found.setdefault(more[0], set()).update(calls.pop(number))
    found[""] = {id for ids in calls.values() for id in ids}
    return found


def stop_at(workload: Workload, book: CountingLedger, *lines: str) -> threading.Thread:
    """Stop the workload when its ledger has such lines, from another thread."""

    def stop() -> None:
        try:
            eventually(lambda: all(book.counted[each] for each in lines))
        finally:
            workload.stopping.set()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


# PyMongo drops the connection of a cancelled command.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_loop_of_the_workload_records_each_commit(
    workload: Workload, tmp_path: Path, url: str, asynchronous: bool
) -> None:
    """Loops end in every way, and nothing is lost."""
    workload.role = Role("consumer", asynchronous, (("loop", LOOPS),))
    workload.ledger = book = CountingLedger(tmp_path / "book")
    with Client(url, namespace="load") as client:
        loops = client.queue(LOOPS)
        ids = [str(number) for number in range(MESSAGES)]
        loops.push_many([{"n": id, "trail": []} for id in ids], ids=ids)
        more = ("cancelled",) if asynchronous else ()
        stopper = stop_at(workload, book, "next", "commit", "rollback", "release", "exit", *more)
        if asynchronous:
            asyncio.run(consume(workload, url))
            gc.collect()  # PyMongo warns here of sockets that it left open
        else:
            run_blocking(workload, client)
        stopper.join()
        found = settled(tmp_path / "book", "next", "commit")
        left = {str(each.id) for each in loops.browse(limit=MESSAGES).messages}
    assert set(found) <= {"ok", "cancelled", ""}
    assert found["ok"]
    assert found["ok"].isdisjoint(left)
    assert found["ok"] | left | found.get("cancelled", set()) == set(ids)


async def consume(workload: Workload, url: str) -> None:
    async with AsyncClient(url, namespace="load") as client:
        await AsyncRunner(workload, client).run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_worker_of_the_workload_ends_when_it_is_stopped(
    workload: Workload, tmp_path: Path, url: str, asynchronous: bool
) -> None:
    workload.role = Role("consumer", asynchronous, (("work", TICKS),))
    workload.ledger = book = CountingLedger(tmp_path / "book")
    with Client(url, namespace="load") as client:
        client.queue(TICKS).push({"n": "a", "trail": []}, id="a")
        stopper = stop_at(workload, book, "commit")
        if asynchronous:
            asyncio.run(consume(workload, url))
            gc.collect()  # PyMongo warns here of sockets that it left open
        else:
            run_blocking(workload, client)
        stopper.join()
        assert client.queue(TICKS).counts().total == 0
    assert settled(tmp_path / "book", "commit") == {"": {"a"}}
