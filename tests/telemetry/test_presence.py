"""Which workers and pipelines run: the stored documents, from their first beat to their end."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue import Client, Worker
from pyqueue.telemetry import flushing, presence
from tests.support.eventually import eventually


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let beats follow quickly."""
    monkeypatch.setattr(flushing, "INTERVAL_S", 0.05)


@pytest.fixture
def counting(url: str) -> Iterator[Client]:
    with Client(url, telemetry=True, owner="me") as client:
        yield client


def shown(client: Client) -> list[dict[str, Any]]:
    return list(client.collection("workers").find({"kind": {"$ne": "graph"}}))


def test_worker_is_shown_while_it_runs(counting: Client, client: Client) -> None:
    entered, go = threading.Event(), threading.Event()
    worker = Worker(counting, name="shop", concurrency=3)

    @worker.on("a.b", lease=20, max_tries=4, to=["c"], batch=5)
    def handle(payloads: list[Any]) -> None:
        entered.set()
        go.wait(60)

    client.queue("a.b").push_many(range(2))
    running = threading.Thread(target=worker.run, kwargs={"handle_signals": False})
    running.start()
    try:
        assert entered.wait(60)
        eventually(lambda: any(each["in_progress"] for each in shown(client)), "it is shown")
        (found,) = shown(client)
        assert (found["kind"], found["name"], found["owner"]) == ("worker", "shop", "me")
        assert (found["concurrency"], found["messages"]) == (3, len(found["in_progress"]))
        (stage,) = found["stages"]
        assert (stage["q"], stage["to"], stage["batch"], stage["handler"]) == (
            *("a.b", ["c"], 5, "handle"),
        )
        assert (stage["lease"], stage["max_tries"], stage["dead_letter"]) == (20, 4, "a.b.dead")
        assert found["counters"][0]["q"] == "a.b"
        assert found["counters"][0]["in"] == found["messages"] > 0
        assert {each["q"] for each in found["in_progress"]} == {"a.b"}
        assert found["memory"] > 2**20
        assert 0 <= found["lag"] < 60
        assert {"host", "pid", "version", "started"} <= found.keys()
        beat = found["beat"]
        eventually(lambda: shown(client)[0]["beat"] > beat, "a further beat")
        assert shown(client)[0]["started"] == found["started"]
    finally:
        go.set()
        worker.stop()
        running.join()
    eventually(lambda: not shown(client), "it is gone")


def test_graph_of_a_pipeline_outlives_its_run(counting: Client, client: Client) -> None:
    pipeline = counting.pipeline("flights").link("a", lambda payload: payload, to="b")
    pipeline.sink("b", lambda payload: None)
    client.queue("a").push(1)
    running = threading.Thread(target=pipeline.run, kwargs={"handle_signals": False})
    running.start()
    eventually(lambda: bool(shown(client)), "it is shown")
    pipeline.stop()
    running.join()
    counting.close()
    assert shown(client) == []
    (graph,) = client.collection("workers").find({})
    assert (graph["_id"], graph["name"]) == ("graph flights", "flights")
    assert [(each["q"], each["kind"], each["to"]) for each in graph["stages"]] == [
        ("a", "link", ["b"]),
        ("b", "sink", []),
    ]
    now = client.database.command("hello")["localTime"].replace(tzinfo=UTC)
    assert 6 <= (graph["expires"] - now).days <= 7


def test_short_run_leaves_nothing(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "INTERVAL_S", 60.0)
    with Client(url, telemetry=True) as counting:
        client.queue("a").push(1)
        Worker(counting).on("a", print).run(until_empty=True, handle_signals=False)
    assert shown(client) == []
    assert client.queue("a").stats().counts["finished"] == 1


class Loop:
    """An event loop whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Loop:
        self.timers.append((when, call))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def turn(self, late_s: float) -> None:
        """Call the timer, some seconds late."""
        due, call = self.timers.pop()
        self.now = due + late_s
        call()


def test_lag_is_the_longest_delay_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    lag = presence._Lag()
    for late_s in (0.0, 2.0, 0.5):
        loop.turn(late_s)
    assert (lag.take_s(), lag.take_s()) == (2.0, 0.0)
    loop.now += 30  # it is blocked now, and no timer is called
    assert lag.take_s() > 29
    lag.end()
    assert loop.timers == []


def test_run_without_an_event_loop_has_no_lag() -> None:
    shown = presence.Presence(lambda: "me", lambda: None)
    runner = Worker(Client("memory:")).on("a", print)
    with shown.running(runner):
        (_, beat) = shown.beats(datetime.now(UTC), 5.0)[0]
    assert beat["$set"]["lag"] is None


@pytest.mark.parametrize(("platform", "peak"), [("linux", 2**10), ("darwin", 2**20)])
def test_memory_is_in_bytes_on_every_system(
    platform: str, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux counts the peak in KiB, and macOS in bytes."""
    usage = SimpleNamespace(ru_maxrss=peak)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", platform)
        patched.setattr(resource, "getrusage", lambda who: usage)
        assert presence._process()["memory"] == 2**20
