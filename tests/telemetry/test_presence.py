"""Which workers and pipelines run: the stored documents, from their first beat to their end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC
from typing import Any

import pytest

from pyqueue import Client, Worker
from pyqueue.telemetry import flushing
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
