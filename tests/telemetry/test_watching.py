"""All that telemetry has stored, read for a dashboard: figures, errors, workers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import Client, Latency
from pyqueue.errors import NotPermitted
from pyqueue.requests import Find
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry import watching
from pyqueue.telemetry.reading import stats_over_time
from pyqueue.telemetry.watching import error_groups, graphs, recent_stats, runs
from tests.support.eventually import eventually


@pytest.fixture
def memory() -> Iterator[Client]:
    with Client("memory:", telemetry=True, owner="me") as client:
        yield client


def flush(client: Client) -> None:
    telemetry: Any = client._telemetry
    telemetry.flush()


def test_recent_figures_are_those_of_each_queue(memory: Client) -> None:
    for name, number in (("a", 3), ("b.c", 5)):
        queue = memory.queue(name)
        queue.push_many(range(number))
        queue.commit(*queue.reserve_many(2, timeout=0))
    flush(memory)
    found = runner_of(memory).run(recent_stats())
    assert set(found) == {"a", "b.c"}
    for name in found:
        alone = memory.queue(name).stats(3600)
        assert found[name].counts == alone.counts
        assert found[name].points == alone.points
        assert found[name].end_to_end == alone.end_to_end


def test_figures_of_older_minutes_are_left_out(
    memory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.queue("a").push(1)
    flush(memory)
    metrics = memory.collection("metrics")
    (document,) = list(metrics.find({"_id": {"$regex": "^m"}}))
    for back in (5, 90):
        at = document["at"] - timedelta(minutes=back)
        metrics.insert_one({**document, "_id": f"m{at:%Y%m%d%H%M} a", "at": at})
    metrics.insert_one({"_id": "m2", "q": 7})
    run = runner_of(memory).run
    assert run(recent_stats())["a"].counts["pushed"] == 2
    assert run(recent_stats(100))["a"].counts["pushed"] == 3
    monkeypatch.setattr(watching, "_MAX_MINUTES", 1)
    assert run(recent_stats())["a"].counts["pushed"] == 1


def test_error_groups_come_last_first(memory: Client) -> None:
    queue = memory.queue("a")
    for error in ("first", "second"):
        queue.push(1)
        held = queue.reserve(0)
        assert held is not None
        # A try that ends in the millisecond of its claim does not count.
        began = held.reserved
        eventually(lambda: datetime.now(UTC) - began > timedelta(milliseconds=2))  # noqa: B023
        queue.bury(held, error=error)
        flush(memory)
    found = runner_of(memory).run(error_groups())
    assert [each.message for each in found] == ["second", "first"]
    (last, first) = found
    assert (last.queue, last.type, last.tries, last.dead) == ("a", "error", 1, 1)
    assert first.fp != last.fp
    assert last.first is not None
    assert last.ids == [memory.queue("a.dead").browse(newest=True).messages[0].id]


def test_runs_are_silent_after_three_beats(memory: Client) -> None:
    now = datetime.now(UTC)
    workers = memory.collection("workers")
    stages = [{"q": "a"}, {"q": "s~g"}]
    for name, back in (("b", 14), ("c", 16), ("a", 1)):
        beat = now - timedelta(seconds=back)
        worker = {"kind": "worker", "name": name, "beat": beat, "every": 5.0, "stages": stages}
        workers.insert_one({"_id": name, **worker})
    workers.insert_one({"_id": "graph", "kind": "graph"})
    workers.insert_one({"_id": "x", "kind": "pipeline"})
    found = runner_of(memory).run(runs())
    assert [(each.name, each.silent) for each in found] == [
        *[("", True), ("a", False), ("b", False), ("c", True)]
    ]
    assert [found[1].works_on(name) for name in ("a", "s", "s~g", "g", "")] == [
        *(True, True, True, False, False)
    ]


def test_times_of_each_minute_are_found(memory: Client) -> None:
    queue = memory.queue("a")
    queue.push_many(range(3))
    queue.commit(*queue.reserve_many(3, timeout=0))
    flush(memory)
    metrics = memory.collection("metrics")
    earlier = timedelta(minutes=5)
    for document in list(metrics.find({"_id": {"$regex": "^m"}, "working": {"$exists": True}})):
        at = document["at"] - earlier
        slow = {"15": 2, "sum": 200.0}  # between 60 and 120 s
        old = {"_id": f"m{at:%Y%m%d%H%M} a", "at": at, "q": "a", "working": slow}
        metrics.insert_one({**old, "finished": 2})
    stats, took = runner_of(memory).run(stats_over_time("a", 3600))
    assert stats.counts == queue.stats(3600).counts
    assert {*took} == {*stats.points}
    (old_at, *_, new_at) = took
    assert took[old_at]["working"].count == 2
    assert 60 < (took[old_at]["working"].p50 or 0) < 120
    assert took[old_at]["waiting"] == Latency()
    assert 0 < (took[new_at]["working"].p95 or 0) < 60
    assert stats.working.count == 5


def test_graphs_are_sorted_by_name(memory: Client) -> None:
    workers = memory.collection("workers")
    for name in ("b", "a"):
        stages = [{"q": name}]
        graph = {"_id": f"graph {name}", "kind": "graph", "name": name, "stages": stages}
        workers.insert_one(graph)
    workers.insert_one({"_id": "x", "kind": "pipeline", "name": "c"})
    found = runner_of(memory).run(graphs())
    assert [(each.name, each.stages[0]["q"]) for each in found] == [("a", "a"), ("b", "b")]


def test_without_permissions_nothing_is_found(
    memory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Find, collection: Any) -> Any:
        raise NotPermitted("no")

    monkeypatch.setattr(Find, "send", refused)
    run = runner_of(memory).run
    assert (run(recent_stats()), run(error_groups()), run(runs())) == ({}, [], [])
    assert run(graphs()) == []
