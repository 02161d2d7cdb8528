"""The checker finds counts of telemetry that no ledger explains, and counts that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyqueue import Client
from pyqueue.telemetry.storing import METRICS
from tests.chaos import ledger
from tests.chaos.checker import Ledgers
from tests.chaos.flushes import record_flushes
from tests.chaos.ledger import Ledger
from tests.chaos.names import MIXED
from tests.chaos.scenario import Scenario
from tests.chaos.telemetry_checker import check_telemetry


def flushed(scenario: Scenario, at: float, *, stored: bool = True) -> None:
    scenario.called("flush", "", None, at=at, seconds=0.0)
    if stored:
        scenario.called("flushed", "", None, None, at=at + 0.2)


def pushed(scenario: Scenario, at: float, seconds: float = 0.5) -> None:
    scenario.called("push", "orders", ["a", "b"], "ok", ["a", "b"], at=at, seconds=seconds)


@pytest.mark.parametrize(("count", "wrong"), [(2, 0), (1, 1), (3, 1)])
def test_telemetry_equals_the_ledger_without_faults(
    scenario: Scenario, count: int, wrong: int
) -> None:
    pushed(scenario, 1.0)
    flushed(scenario, 2.0)
    assert len(scenario.check_telemetry({"orders": {"pushed": count}})) == wrong


@pytest.mark.parametrize(("count", "wrong"), [(0, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("excuse", ["lost", "killed", "undone"])
def test_telemetry_may_lack_lost_flushes(
    scenario: Scenario, excuse: str, count: int, wrong: int
) -> None:
    """A flush that failed or was undone, or a process that was killed before it."""
    pushed(scenario, 1.0)
    if excuse != "killed":
        flushed(scenario, 2.0, stored=excuse == "undone")
    broken = [(4.0, 5.0)] if excuse == "undone" else []
    assert len(scenario.check_telemetry({"orders": {"pushed": count}}, *broken)) == wrong
    if excuse == "undone":
        later = scenario.check_telemetry({"orders": {"pushed": 0}}, (9.0, 9.5))
        assert len(later) == 1


@pytest.mark.parametrize("stored", [True, False])
def test_telemetry_of_a_call_beside_a_flush_is_in_it_or_the_next(
    scenario: Scenario, stored: bool
) -> None:
    flushed(scenario, 2.0, stored=stored)
    pushed(scenario, 1.5, 1.0)
    flushed(scenario, 4.0)
    assert bool(scenario.check_telemetry({"orders": {"pushed": 0}})) == stored
    assert scenario.check_telemetry({"orders": {"pushed": 2}}) == []


@pytest.mark.parametrize(
    ("op", "items", "outcome", "result", "counts"),
    [
        ("push", ["a", "b"], "ok", ["a", None], [{"pushed": 1}]),
        ("push", ["a", "b"], "taken", None, [{}, {"pushed": 1}, {"pushed": 2}]),
        ("push", ["a"], "unknown", "no answer", [{}]),
        ("request", ["a"], "timeout", None, [{"pushed": 1}]),
        ("pop", 5, "ok", ["a"], [{"received": 1, "finished": 1}]),
        ("reserve", None, "ok", {"1": {"a": 1, "b": 1}}, [{"received": 2}]),
        ("next", {"1": ["a"]}, "ok", {"2": {"b": 1}}, [{"received": 1, "finished": 1}]),
        ("next", {"1": ["a"]}, "cancelled", None, [{}, {"finished": 1}]),
        ("commit", {"1": ["a", "b"]}, "ok", None, [{"finished": 2}]),
        ("commit", {"1": ["a", "b"]}, "refused", [{"1": ["a"]}, {}], [{"finished": 1}]),
        ("commit", {"1": ["a"]}, None, None, [{}, {"finished": 1}]),
        ("move", {"1": ["a"]}, "ok", None, [{"moved": 1}]),
        ("release", {"1": ["a"]}, "ok", None, [{"released": 1}]),
        ("rollback", {"1": ["a", "b"]}, "ok", None, [{"retried": 1, "dead": 1}, {"retried": 2}]),
        ("bury", {"1": ["a"]}, "ok", None, [{"dead": 1}]),
    ],
)
def test_telemetry_counts_the_outcome_of_each_call(
    scenario: Scenario,
    op: str,
    items: Any,
    outcome: str | None,
    result: Any,
    counts: list[dict[str, int]],
) -> None:
    """Of a call without a result, it may have counted everything or nothing."""
    scenario.called(op, "events", items, outcome, result, at=1.0)
    flushed(scenario, 2.0)
    for each in counts:
        assert scenario.check_telemetry({"events": each}) == []
    assert scenario.check_telemetry({"events": {"pushed": 3, "finished": 3, "moved": 3}})
    assert bool(scenario.check_telemetry({})) == ({} not in counts)


def test_telemetry_of_queues_received_together_is_summed(scenario: Scenario) -> None:
    scenario.called("push", "turns", ["a"], "ok", ["a"], at=1.0)  # perhaps by a child
    scenario.called("commit", MIXED, {"1": ["a"], "2": ["b"]}, at=1.0)
    flushed(scenario, 2.0)
    assert scenario.check_telemetry({"urgent": {"finished": 1}, "turns": {"finished": 1}}) == []
    assert len(scenario.check_telemetry({"urgent": {"finished": 1}})) == 1


def test_telemetry_records_its_flushes(tmp_path: Path, url: str) -> None:
    book = Ledger(tmp_path / "ledger")
    with Client(url, namespace="load", telemetry=True) as client:
        record_flushes(book, client)
        with book.recorded("push", "orders", ["a", "b"]) as call:
            call.result = client.queue("orders").push_many([1, 2], ids=["a", "b"])
    with Client(url, namespace="load") as client:
        stored = list(client.database[f"load.{METRICS}"].find({"_id": {"$regex": "^t "}}))
    found = Ledgers({"producer-1.1": ledger.read(tmp_path / "ledger")})
    assert [flush.stored is None for each in found.processes for flush in each.flushes] == [False]
    assert check_telemetry(found.processes, stored, ()) == []
    assert len(check_telemetry(found.processes, [], ())) == 1
