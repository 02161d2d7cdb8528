"""What the hooks of telemetry count, call by call."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import pytest

from pyqueue import DuplicateKey, LeaseLost, Unavailable
from pyqueue.facts import ErrorInfo
from pyqueue.hooks import Uncommitted
from pyqueue.messages import Message, Reservation
from pyqueue.telemetry import counting
from pyqueue.telemetry.counting import SAMPLES, Counted, Counting
from pyqueue.telemetry.figures import OTHER

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Clocked:
    """A Counting whose time stands still. ``began`` is how often it asked for a flush."""

    def __init__(self) -> None:
        self.began = 0
        self.counting = Counting(lambda: NOW, self.begin)

    def begin(self) -> None:
        self.began += 1


@pytest.fixture
def clocked() -> Clocked:
    return Clocked()


@pytest.fixture
def counts(clocked: Clocked) -> Counting:
    return clocked.counting


def message(id: str = "m", *, age_s: float = 2.0, error: ErrorInfo | None = None) -> Message[Any]:
    then = NOW - timedelta(seconds=age_s)
    return Message(
        *(id, "q", None, {}, None, then, then - timedelta(seconds=1), 1, error),
        *(None, None, [], "ready", None),
    )


def held(
    id: str = "m", token: str = "t", *, tries: int = 1, error: ErrorInfo | None = None
) -> Reservation[Any]:
    """Return a reservation that became eligible 2 s ago and is held for 1 s."""
    then = NOW - timedelta(seconds=2)
    return Reservation(
        *(id, "q", None, {}, None, then, then - timedelta(seconds=1), tries, error),
        *(None, None, [], "reserved", None, token, NOW + timedelta(seconds=59), "me", 60.0),
        reserved=NOW - timedelta(seconds=1),
    )


def error_at(at: datetime, fp: str = "f") -> ErrorInfo:
    stored = {"type": "E", "message": "text", "at": at, "where": "m:f:1", "fp": fp}
    found = ErrorInfo.of(stored)
    assert found is not None
    return found


def numbers(counted: Counted, queue: str = "q") -> dict[str, int]:
    return dict(counted.figures[queue].counts)


# ---- pushes


def test_pushes_count_the_written_messages(counts: Counting) -> None:
    counts.pushed("q", ["a", None, "b"], None)
    counts.pushed("q", ["c"], DuplicateKey("taken"))
    counts.pushed("q", [None], None)
    assert numbers(counts.take()) == {"pushed": 3}


@pytest.mark.parametrize("error", [Uncommitted(), Unavailable("away"), ValueError()])
def test_pushes_with_an_unknown_outcome_do_not_count(
    counts: Counting, error: BaseException
) -> None:
    counts.pushed("q", ["a"], error)
    assert counts.take().figures == {}


# ---- receives


def test_received_messages_waited_since_they_were_eligible(counts: Counting) -> None:
    counts.received("q", [held("a"), held("b")], 0.0)
    counted = counts.take()
    assert numbers(counted) == {"received": 2}
    times = counted.figures["q"].times
    assert [sum(times[name].numbers) for name in times] == [2, 0, 0]
    assert times["waiting"].seconds == 4


def test_popped_messages_are_finished(counts: Counting) -> None:
    counts.received("q", [message("a"), message("b", age_s=1)], 0.0)
    counted = counts.take()
    assert numbers(counted) == {"received": 2, "finished": 2}
    assert counted.figures["q"].times["end_to_end"].seconds == 5


# ---- settlements


@pytest.mark.parametrize(
    ("verb", "name", "times"),
    [
        ("commit", "finished", (1, 3)),
        ("move", "moved", (1, 0)),
        ("rollback", "retried", (1, 0)),
        ("bury", "dead", (1, 0)),
        ("release", "released", (0, 0)),
        ("lost", "lost", (0, 0)),
        ("cancel", "cancelled", (1, 0)),
        ("expire", "expired", (1, 0)),
    ],
)
def test_each_verb_has_its_count(
    counts: Counting, verb: str, name: str, times: tuple[float, float]
) -> None:
    counts.settled("q", verb, [held()], None, "to")
    counted = counts.take()
    figures = counted.figures["q"]
    assert numbers(counted) == {name: 1}
    assert (figures.times["working"].seconds, figures.times["end_to_end"].seconds) == times
    assert figures.moved == ({"to": 1} if verb == "move" else {})


def test_unknown_verb_does_not_count(counts: Counting) -> None:
    counts.settled("q", "polish", [held()], None, None)
    assert counts.take().figures == {}


def test_lost_and_unknown_messages_are_not_settled(counts: Counting) -> None:
    one, two, three, again = held("a"), held("b"), held("c"), held("a", "newer")
    error = LeaseLost("gone", lost=[held("a"), held("z")], unknown=[held("b")])
    counts.settled("q", "commit", [one, two, three, again], error, None)
    assert numbers(counts.take()) == {"lost": 1, "finished": 2}


def test_rollback_that_is_told_twice_counts_each_loss_once(counts: Counting) -> None:
    old, new = held("a", tries=20), held("b")
    error = LeaseLost("gone", lost=[old, new])
    counts.settled("q", "bury", [old], error, "q.dead")
    counts.settled("q", "rollback", [new], error, None)
    assert numbers(counts.take()) == {"lost": 2}


@pytest.mark.parametrize("error", [Uncommitted(), Unavailable("away")])
def test_settlements_with_an_unknown_outcome_do_not_count(
    counts: Counting, error: BaseException
) -> None:
    counts.settled("q", "commit", [held()], error, None)
    assert counts.take().figures == {}


def test_burial_of_an_unreceived_message_counts(counts: Counting) -> None:
    counts.settled("q", "bury", [message()], None, "q.dead")
    counted = counts.take()
    assert numbers(counted) == {"dead": 1}
    assert sum(counted.figures["q"].times["working"].numbers) == 0


# ---- errors


def test_failed_tries_are_grouped_by_fingerprint_and_queue(counts: Counting) -> None:
    for number in range(SAMPLES + 2):
        counts.settled("q", "rollback", [held(f"a{number}", error=error_at(NOW))], None, None)
    counts.settled("q", "bury", [held("b", error=error_at(NOW))], None, "q.dead")
    counts.settled("q", "rollback", [held("c", error=error_at(NOW, "other"))], None, None)
    counts.settled("r", "rollback", [held("d", error=error_at(NOW))], None, None)
    errors = counts.take().errors
    assert {key: (each.tries, each.dead) for key, each in errors.items()} == {
        ("f", "q"): (SAMPLES + 3, 1),
        ("other", "q"): (1, 0),
        ("f", "r"): (1, 0),
    }
    assert errors["f", "q"].ids == [*(f"a{number}" for number in range(3, SAMPLES + 2)), "b"]


def test_error_of_an_earlier_try_counts_only_as_dead(counts: Counting) -> None:
    old = error_at(NOW - timedelta(seconds=30))
    counts.settled("q", "rollback", [held(error=old)], None, None)
    assert counts.take().errors == {}
    counts.settled("q", "bury", [held(error=old)], None, "q.dead")
    counts.settled("q", "bury", [message(error=old)], None, "q.dead")
    (group,) = counts.take().errors.values()
    assert (group.tries, group.dead) == (0, 2)


def test_settlements_without_an_error_have_no_group(counts: Counting) -> None:
    counts.settled("q", "rollback", [held()], None, None)
    counts.settled("q", "commit", [held(error=error_at(NOW))], None, None)
    assert counts.take().errors == {}


# ---- limits


def test_memory_is_bounded(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MAX_QUEUES", 3)
    monkeypatch.setattr(counting, "MAX_GROUPS", 3)
    counts = clocked.counting
    for number in range(10):
        failed = held(error=error_at(NOW, f"f{number}"))
        counts.settled(f"q{number}", "rollback", [failed], None, None)
    counted = counts.take()
    assert set(counted.figures) == {"q0", "q1", "q2", OTHER}
    assert counted.figures[OTHER].counts["retried"] == 7
    assert len(counted.errors) == 3


def test_each_interval_asks_for_a_flush(clocked: Clocked) -> None:
    counts = clocked.counting
    assert counts.empty
    counts.pushed("q", ["a"], None)
    counts.pushed("q", ["b"], None)
    assert (clocked.began, counts.empty) == (1, False)
    counts.take()
    assert counts.empty
    counts.pushed("q", ["c"], None)
    assert clocked.began == 2


def test_nothing_is_kept_when_it_is_off(counts: Counting) -> None:
    counts.off = True
    counts.pushed("q", ["a"], None)
    counts.received("q", [held()], 0.0)
    counts.settled("q", "move", [held()], None, "to")
    assert counts.take() == ({}, {})


def test_threads_lose_no_count(counts: Counting) -> None:
    def push() -> None:
        for _ in range(3000):
            counts.pushed("q", ["a"], None)

    threads = [Thread(target=push) for _ in range(4)]
    for each in threads:
        each.start()
    total = 0
    while any(each.is_alive() for each in threads):
        total += sum(each.counts["pushed"] for each in counts.take().figures.values())
    for each in threads:
        each.join()
    total += sum(each.counts["pushed"] for each in counts.take().figures.values())
    assert total == 12_000
