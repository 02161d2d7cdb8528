"""Flushes: when they happen, and that none of their failures reaches an operation."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import mongomock
import pytest
from pymongo import _csot
from pymongo.errors import AutoReconnect, OperationFailure

from pyqueue import AsyncClient, Client, ConfigurationError
from pyqueue.aside import UpsertEach
from pyqueue.telemetry import flushing
from pyqueue.telemetry.flushing import INTERVAL_S, Pace
from tests.support.eventually import async_eventually, eventually
from tests.support.processes import program

FORK = """
import json, os, sys
from pyqueue import Client

used, unused = (Client(sys.argv[1], telemetry=True) for _ in range(2))
for n in range(3):
    used.queue("a").push(n)
if not (pid := os.fork()):
    used._telemetry.flush()
    unused.queue("b").push(1)
    unused.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
unused.queue("b").push(2)
unused.close()
used.close()
with Client(sys.argv[1]) as client:
    print(json.dumps([client.queue(name).stats().counts["pushed"] for name in "ab"]))
"""

KILLED = """
import sys, time
from pyqueue import Client
from pyqueue.telemetry import flushing

flushing.INTERVAL_S = 0.3
queue = Client(sys.argv[1], telemetry=True).queue("a")
while True:
    queue.push(1)
    print(time.monotonic(), flush=True)
"""


def pushed(client: Client, name: str = "a") -> int:
    return client.queue(name).stats().counts["pushed"]


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "pyqueue-telemetry"}


def failing(error: Exception) -> Callable[..., Any]:
    def send(self: UpsertEach, collection: Any) -> Any:
        raise error

    return send


# ---- when


def test_figures_arrive_without_a_close(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "INTERVAL_S", 0.05)
    with Client(url, telemetry=True) as counting:
        for number in (1, 2):
            counting.queue("a").push(number)
            eventually(lambda n=number: pushed(client) == n, "it is stored")  # type: ignore[misc]


def test_figures_of_a_task_arrive_without_a_close(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "INTERVAL_S", 0.05)

    async def work() -> None:
        async with AsyncClient(url, telemetry=True) as counting:
            for number in (1, 2):
                await counting.queue("a").push(number)
                await async_eventually(lambda n=number: pushed(client) == n, "stored")  # type: ignore[misc]
                [task] = [each for each in asyncio.all_tasks() if "telemetry" in each.get_name()]
                if number == 1:  # a program may cancel every task
                    task.cancel()
                    await asyncio.wait([task])

    asyncio.run(work())


@pytest.mark.parametrize(
    ("queues", "workers", "failures", "seconds"),
    [
        (0, 0, 0, INTERVAL_S),
        (20, 250, 0, INTERVAL_S),
        (40, 0, 0, 10),
        (0, 1000, 0, 20),
        (0, 0, 1, 10),
        (0, 0, 30, 60),
        (400, 0, 3, 100),
    ],
)
def test_many_queues_workers_and_failures_slow_it_down(
    queues: int, workers: int, failures: int, seconds: float
) -> None:
    pace = Pace()
    pace.queues, pace.workers, pace.failures = queues, workers, failures
    assert pace.interval_s() == seconds
    assert all(0.8 * seconds <= pace.pause_s() <= 1.2 * seconds for _ in range(50))


def test_client_without_calls_does_no_io(tmp_path: Any) -> None:
    client = Client(f"embedded:{tmp_path}/data", telemetry=True)
    client.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "stored"), [(None, ["pyqueue.metrics"]), (False, [])])
def test_figures_are_stored_unless_that_is_turned_off(
    url: str, client: Client, given: bool | None, stored: list[str]
) -> None:
    with Client(url, telemetry=given) as other:
        other.queue("a").push(1)
    names = client.database.list_collection_names()
    assert [each for each in names if each.endswith(("metrics", "errors", "workers"))] == stored


@pytest.mark.parametrize("target", ["memory:", "memory:shop", mongomock.MongoClient()["shop"]])
@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_no_figures_are_stored_in_memory_unless_asked_for(cls: Any, target: Any) -> None:
    assert cls(target)._telemetry is None
    assert cls(target, telemetry=True)._telemetry is not None


@pytest.mark.parametrize("given", [1, "yes", object()])
def test_other_values_are_refused(given: Any) -> None:
    for cls in (Client, AsyncClient):
        with pytest.raises(ConfigurationError, match="telemetry: expected True or False, found"):
            cls("memory:", telemetry=given)


def test_closing_again_stores_nothing_again(url: str, client: Client) -> None:
    before = threads()  # of clients that other tests share
    counting = Client(url, telemetry=True)
    counting.queue("a").push(1)
    assert threads() - before
    for _ in range(3):
        counting.close()
    assert not threads() - before
    assert pushed(client) == 1


# ---- failures


def test_flush_may_take_two_seconds_and_the_last_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, left = UpsertEach.send, list[float | None]()

    def limited(self: UpsertEach, collection: Any) -> Any:
        left.append(_csot.remaining())
        return send(self, collection)

    monkeypatch.setattr(UpsertEach, "send", limited)
    with Client(url, telemetry=True) as counting:
        counting.queue("a").push(1)
        counting._telemetry.flush()  # type: ignore[union-attr]
        counting.queue("a").push(1)
    flushed, last = left
    assert flushed is not None
    assert last is not None
    assert 1 < flushed <= flushing.LIMIT_S + 0.005
    assert 0.5 < last <= 1  # the server may be gone


def test_lost_flush_is_counted_and_not_repeated(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(url, telemetry=True) as counting:
        telemetry: Any = counting._telemetry
        with monkeypatch.context() as broken:
            broken.setattr(UpsertEach, "send", failing(AutoReconnect("away")))
            for number in (1, 2):
                counting.queue("a").push(number)
                telemetry.flush()
        counting.queue("a").push(3)
        telemetry.flush()
        assert counting.stats["lost flushes"] == 2
        assert counting.stats.get("errors", 0) == 0
        assert pushed(client) == 1
        assert telemetry._pace.failures == 0
    told = [each.getMessage() for each in caplog.records if "telemetry" in each.getMessage()]
    assert len(told) == 1
    assert "a flush was lost: the server did not answer" in told[0]


def test_forbidden_store_turns_it_off_with_one_line(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(UpsertEach, "send", failing(OperationFailure("not authorized", 13)))
    with caplog.at_level(logging.INFO, "pyqueue"), Client(url, telemetry=True) as counting:
        telemetry: Any = counting._telemetry
        for number in range(3):
            counting.queue("a").push(number)
            telemetry.flush()
        assert telemetry.counting.off
        assert counting.queue("a").counts().total == 3
        assert telemetry.counting.take() == ({}, {})
    assert len([each for each in caplog.records if "is off" in each.getMessage()]) == 1


def test_operations_do_not_wait_for_a_slow_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()

    def send(self: UpsertEach, collection: Any) -> Any:
        entered.set()
        assert go.wait(60)
        raise AutoReconnect("too late")

    monkeypatch.setattr(UpsertEach, "send", send)
    monkeypatch.setattr(flushing, "INTERVAL_S", 0.01)
    with Client(url, telemetry=True) as counting:
        queue = counting.queue("a")
        queue.push(0)
        assert entered.wait(60)
        for number in range(20):
            queue.push(number)
            queue.commit(queue.reserve(0))  # type: ignore[arg-type]
        telemetry: Any = counting._telemetry
        assert list(telemetry.counting.take().figures) == ["a"]
        go.set()


def test_operations_do_not_wait_for_a_slow_store_in_a_task(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def answer() -> Any:
        entered.set()
        await go.wait()
        raise AutoReconnect("too late")

    monkeypatch.setattr(UpsertEach, "send", lambda *_: answer())
    monkeypatch.setattr(flushing, "INTERVAL_S", 0.01)

    async def work() -> None:
        async with AsyncClient(url, telemetry=True) as counting:
            queue = counting.queue("a")
            await queue.push(0)
            await asyncio.wait_for(entered.wait(), 60)
            for number in range(20):
                await queue.push(number)
            assert (await queue.counts()).total == 21
            go.set()

    asyncio.run(work())


def test_dropped_client_ends_its_thread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "INTERVAL_S", 0.01)
    before = threads()
    client = Client(url, telemetry=True)
    client.queue("a").push(1)
    own = threads() - before
    assert own
    with pytest.warns(ResourceWarning, match="dropped without being closed"):  # noqa: PT031
        del client
        gc.collect()  # PyMongo keeps an error that it met in a cycle, with the frames of callers
        eventually(lambda: not own & threads(), "the thread ends")


# ---- sessions


def test_session_of_the_program_does_not_count(url: str, client: Client) -> None:
    with Client(url, telemetry=True) as counting:
        queue = counting.queue("a")
        queue.push(0)
        with counting.database.client.start_session() as session, session.start_transaction():
            queue.push(1, session=session)
        with counting.transaction() as session:
            queue.push(2, session=session)
    assert pushed(client) == 2


# ---- processes


def test_forked_child_counts_from_zero(url: str) -> None:
    with program("-c", FORK, url) as forking:
        output, _ = forking.communicate(timeout=120)
    assert forking.returncode == 0
    assert output.splitlines()[-1] == "[3, 2]"


def test_kill_loses_at_most_one_interval(url: str, client: Client) -> None:
    with program("-c", KILLED, url) as pushing:
        assert pushing.stdout is not None
        eventually(lambda: pushed(client) > 0, "figures are stored")
        lines = [pushing.stdout.readline() for _ in range(200)]
        pushing.kill()
        lines += pushing.stdout.readlines()
    times = [float(each) for each in lines if each.endswith("\n")]
    stored, total = pushed(client), client.queue("a").counts().total
    assert 0 < stored <= total
    assert len(times) <= total
    # The first push that is not stored began after the last flush.
    missing = times[stored:]
    assert not missing or missing[-1] - missing[0] <= 0.3 * 1.2 + flushing.LIMIT_S


def test_two_clients_of_one_namespace_are_one_sum(url: str, client: Client) -> None:
    name = f"q{uuid4().hex}"
    for _ in range(2):
        with Client(url, telemetry=True) as counting:
            counting.queue(name).push_many(range(5))
    assert pushed(client, name) == 10
