"""Telemetry sends no command if it is off, and changes no command of a queue if it is on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pymongo
import pytest

from pyqueue import Client, Worker
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry import flushing, storing
from tests.integration.test_sent import (
    BUCKET,
    CASES,
    WRITES,
    Case,
    Place,
    Recorder,
    opened,
    packed,
    sent,
)

#: The commands of some operations, as clients sent them before there was telemetry.
BEFORE: Final[Mapping[str, tuple[Case, list[str]]]] = {
    "push": (Case("push", lambda queue, held: queue.push(1), ready=0), ["insert"]),
    "push_many": (
        Case("push_many", lambda queue, held: queue.push_many([1, 2]), ready=0),
        ["insert"],
    ),
    # The first receive reads the record of the queue.
    "reserve": (Case("reserve", lambda queue, held: queue.reserve(0)), ["find", "findAndModify"]),
    "commit": (Case("commit", lambda queue, held: queue.commit(*held), held=1), ["delete"]),
    "pipeline-step": (
        Case("move", lambda queue, held: queue.move(*held, to="other", payload=2), held=1),
        ["update"],
    ),
    "bucket-push": (
        Case(
            "push_many",
            lambda queue, held: queue.push_many([1, 2, 3]),
            options=BUCKET,
            ready=0,
        ),
        ["insert"],
    ),
    "bucket-reserve": (
        packed("reserve_many", lambda queue, held: queue.reserve_many(5, timeout=0)),
        ["find", "findAndModify"],
    ),
    "bucket-commit": (
        packed("commit", lambda queue, held: queue.commit(*held), held=5),
        ["delete"],
    ),
}
#: The fields of a command that the driver adds, or that depend on the time.
ADDED: Final = {"lsid", "$clusterTime", "txnNumber", "$db", "maxTimeMS"}


@pytest.fixture
def raw(url: str) -> Iterator[Any]:
    """The database, without pyqueue."""
    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        yield mongo.get_default_database()


def recorded(place: Place, case: Case, name: str, raw: Any) -> list[dict[str, Any]]:
    """Make a call on a queue, and empty its namespace. Return the commands of the call."""
    found = [each for each in sent(place, case, name) if of_queues(each)]
    raw[place.client.namespace].delete_many({"record": {"$exists": False}})
    return found


def of_queues(command: Mapping[str, Any]) -> bool:
    """Return whether a command is for the collection of the queues, and not for telemetry's."""
    collection = command.get("collection", command[command["name"]])
    return str(collection).rpartition(".")[2] not in storing.SUFFIXES


def shape(value: object) -> object:
    """Return a value of a command with a type in place of each number, text and so on."""
    if isinstance(value, Mapping):
        return {name: shape(each) for name, each in value.items() if name not in ADDED}
    if isinstance(value, (list, tuple)):
        return [shape(each) for each in value]
    return type(value).__name__


# ---- off


@pytest.mark.parametrize("driver", ["blocking", "async"])
def test_client_without_telemetry_sends_what_it_sent_before(
    driver: str, url: str, raw: Any
) -> None:
    with opened(driver, url, "majority", telemetry=False, hooks=()) as place:
        place.client.queue("other", kind="standard").resume()  # makes its record
        found = {
            name: [each["name"] for each in recorded(place, case, name, raw)]
            for name, (case, _) in BEFORE.items()
        }
    assert found == {name: commands for name, (_, commands) in BEFORE.items()}


def test_client_without_telemetry_calls_nothing(url: str) -> None:
    """Without hooks, a call runs the same plan as before there were hooks."""
    before = set(threading.enumerate())
    with Client(url, telemetry=False, hooks=()) as client:
        client.queue("a").push(1)
        assert runner_of(client).hooks is None
        begun = {*threading.enumerate()} - before
        assert not [each for each in begun if each.name == "pyqueue-telemetry"]


# ---- on


def test_telemetry_changes_no_command_of_a_queue(url: str, raw: Any) -> None:
    shapes: dict[str, list[object]] = {}
    # A claim asks for the messages that it reports to hooks.
    cases = [case for case in CASES if case.method != "claim"]
    for namespace, telemetry in (("off", False), ("on", True)):
        with opened("blocking", url, "majority", namespace=namespace, telemetry=telemetry) as place:
            shapes[namespace] = [
                # A loop sends some of its commands at once, in any order.
                (
                    case.method,
                    sorted(repr(shape(each)) for each in recorded(place, case, name, raw)),
                )
                for name, case in ((f"jobs{place}", case) for place, case in enumerate(cases))
            ]
    assert shapes["on"] == shapes["off"]
    assert f"on.{storing.METRICS}" in raw.list_collection_names()


@pytest.mark.parametrize("telemetry", [False, True])
def test_step_of_a_pipeline_writes_what_it_wrote_before(telemetry: bool, url: str) -> None:
    """A link claims the message and moves it, and a sink claims it and commits it."""
    recorder = Recorder()
    with opened("blocking", url, "majority", recorder, telemetry=telemetry) as place:
        pass_one(place.client)  # makes the records
        with recorder.recording():
            pass_one(place.client)
    writes = [each for each in recorder.commands if each["name"] in WRITES and of_queues(each)]
    # A consumer moves the record of its queue out of the way of scans, sooner or later.
    of_message = [each["name"] for each in writes if "~queue:" not in repr(each)]
    assert Counter(of_message) == {"insert": 1, "update": 3, "delete": 1}


def pass_one(client: Client) -> None:
    """Pass one message through a pipeline of a link and a sink."""
    passed: list[int] = []
    client.queue("in").push(1)
    pipeline = client.pipeline("p").link("in", lambda payload: payload + 1, to="out")
    pipeline.sink("out", passed.append)
    pipeline.run(until_empty=True, handle_signals=False)
    assert passed == [2]


def test_idle_worker_sends_one_command_per_flush(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each twelfth flush counts the workers, too."""
    monkeypatch.setattr(flushing, "INTERVAL_S", 3600.0)
    recorder = Recorder()
    with opened("blocking", url, "majority", recorder, telemetry=True) as place:
        telemetry = place.client._telemetry
        worker = Worker(place.client).on("a", print)
        with telemetry.presence.running(worker), recorder.recording():
            for _ in range(24):
                telemetry.flush()
            found = Counter(each["name"] for each in recorder.commands)
    assert found == {"update": 24, "aggregate": 2}
