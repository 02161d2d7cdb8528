"""How figures are stored: the documents, the index, and plans that are cut at each request."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import Client, QueueError, Unavailable
from pyqueue.aside import Beside, aside
from pyqueue.facts import ErrorInfo
from pyqueue.requests import CreateIndex, Find, Indexes, Plan, Update
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry import storing
from pyqueue.telemetry.counting import ErrorGroup
from pyqueue.telemetry.figures import Figures
from pyqueue.telemetry.storing import (
    HOUR,
    METRICS,
    MINUTE,
    TOTAL,
    Upsert,
    escaped,
    unescaped,
    write,
)

NOW = datetime(2126, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
HOURS = timedelta(hours=1)


@pytest.fixture
def memory() -> Iterator[Client]:
    with Client("memory:") as client:
        yield client


def figures(pushed: int = 3) -> Figures:
    found = Figures()
    found.counts["pushed"] = pushed
    found.move("a.b>c", 2)
    found.times["waiting"].add(0.3, 2)
    return found


def stored(client: Client, suffix: str = METRICS) -> dict[str, Any]:
    return {each["_id"]: each for each in client.collection(suffix).find({})}


def run(client: Client, plan: Plan[Any]) -> Any:
    return runner_of(client).run(plan)


def batch(pushed: int = 3, now: datetime = NOW) -> dict[str, list[Upsert]]:
    return {METRICS: list(storing.metrics({"q": figures(pushed)}, now))}


def test_figures_are_added_to_the_minute_the_hour_and_all_time(memory: Client) -> None:
    prepared: set[str] = set()
    run(memory, write(prepared, batch()))
    run(memory, write(prepared, batch(4, NOW + timedelta(minutes=1))))
    found = stored(memory)
    assert {id: each["pushed"] for id, each in found.items()} == {
        "m212601020304 q": 3,
        "m212601020305 q": 4,
        "h2126010203 q": 7,
        "t q": 7,
    }
    hour = found["h2126010203 q"]
    assert hour["q"] == "q"
    assert hour["at"] == NOW.replace(minute=0, second=0, microsecond=0)
    assert hour["to"] == {"a%2Eb>c": 4}
    assert hour["waiting"] == {"8": 4, "sum": pytest.approx(1.2)}
    assert "at" not in found["t q"]
    ends = {id: each["expires"] - NOW for id, each in found.items()}
    assert timedelta(hours=24) < ends["m212601020304 q"] < timedelta(hours=25)
    assert timedelta(days=30) < ends["h2126010203 q"] == ends["t q"] < timedelta(days=30, hours=1)


def test_spans_begin_at_whole_minutes_and_hours() -> None:
    assert MINUTE.start(NOW) == datetime(2126, 1, 2, 3, 4, tzinfo=UTC)
    assert HOUR.start(NOW) == TOTAL.start(NOW) == datetime(2126, 1, 2, 3, tzinfo=UTC)


@pytest.mark.parametrize("name", ["a", "a.b.c", "a>b", "~other", "...", "a:b-c_d"])
def test_names_of_targets_survive_as_fields(name: str) -> None:
    assert "." not in escaped(name)
    assert unescaped(escaped(name)) == name


def test_failed_tries_are_added_to_their_group(memory: Client) -> None:
    def group(number: int) -> ErrorGroup:
        found = ErrorGroup()
        found.tries, found.dead, found.ids = 2, 1, [f"m{number}", f"n{number}"]
        text = {"type": "E", "message": "x" * 300, "at": NOW, "where": "m:f:1", "fp": "f"}
        found.error = ErrorInfo.of(text)
        return found

    for number in range(4):
        now = NOW + number * HOURS
        writes = {storing.ERRORS: list(storing.errors({("f", "q"): group(number)}, now))}
        run(memory, write(set(), writes))
    (found,) = stored(memory, storing.ERRORS).values()
    assert found["_id"] == "f q"
    assert (found["tries"], found["dead"]) == (8, 4)
    assert (found["first"], found["last"]) == (NOW.replace(microsecond=678_000), NOW + 3 * HOURS)
    assert found["ids"] == ["n1", "m2", "n2", "m3", "n3"]
    assert (found["type"], found["where"], len(found["message"])) == ("E", "m:f:1", 200)


def test_group_without_an_error_is_not_stored() -> None:
    assert list(storing.errors({("f", "q"): ErrorGroup()}, NOW)) == []


# ---- the index


def requests_of(client: Client, plan: Plan[Any]) -> list[type]:
    """Run a plan, and return the types of its requests."""
    driver, sent = runner_of(client).open(), []
    answer: Any = None
    try:
        while True:
            request: Any = plan.send(answer)
            sent.append(type(request.command))
            answer = driver.ask(request)
    except StopIteration:
        return sent


def test_index_is_created_once(memory: Client) -> None:
    prepared: set[str] = set()
    first = requests_of(memory, write(prepared, batch()))
    assert first[:2] == [Indexes, CreateIndex]
    assert len(requests_of(memory, write(prepared, batch()))) == 1
    assert CreateIndex not in requests_of(memory, write(set(), batch()))
    assert memory.collection(METRICS).index_information()["expires"]["expireAfterSeconds"] == 0


def test_nothing_to_write_sends_nothing(memory: Client) -> None:
    assert requests_of(memory, write(set(), {METRICS: []})) == []


# ---- plans that are cut


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_flush_that_is_cut_never_adds_too_much(
    memory: Client, place: int, carried_out: bool
) -> None:
    """It fails at one of its requests, before or after the server has carried it out."""
    driver, prepared = runner_of(memory).open(), set[str]()
    plan = write(prepared, batch(10))
    request: Any = next(plan)
    for _ in range(place):
        request = plan.send(driver.ask(request))
    if carried_out:
        driver.ask(request)
    with pytest.raises(Unavailable):
        plan.throw(Unavailable("away"))
    run(memory, write(prepared, batch(1)))
    assert stored(memory)["t q"]["pushed"] == (11 if place == 2 and carried_out else 1)


# ---- commands to other collections


def test_failure_aside_is_no_failure_of_the_queues(
    memory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.queue("q").push(1)
    driver = runner_of(memory).open()
    before, changes = dict(driver.stats), driver.clock.changes
    monkeypatch.setattr(Update, "send", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(memory, iter(aside("x", Update({}, {}))))
    assert driver.stats["errors"] == before.get("errors", 0)
    assert (driver.clock.changes, driver.clock.stale) == (changes, False)


def test_aside_reads_a_cursor_to_its_end(memory: Client) -> None:
    memory.collection("x").insert_many([{"_id": each} for each in range(3)])

    def read() -> Plan[Any]:
        return (yield from aside("x", Find({}, sort=(("_id", 1),))))

    assert [each["_id"] for each in run(memory, read())] == [0, 1, 2]
    assert isinstance(aside("x", Find({})), Beside)
    assert issubclass(Unavailable, QueueError)
