"""Queues that a program says once: for clients, workers, and the targets of stages."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, InvalidName, QueueSpec, To, Worker
from pyqueue.pipeline import Pipeline
from pyqueue.queue_base import backend_of
from pyqueue.specs import DEFAULTS
from tests.pipeline.place import Place, counted


@dataclass
class Job:
    """A payload."""

    order: int


JOBS = QueueSpec("jobs", Job, lease=15, max_tries=3)
MAIL = QueueSpec("mail", int, kind="priority", lease=7)


def test_defaults_are_those_of_a_queue() -> None:
    parameters = inspect.signature(Client.queue).parameters
    given = {name: each.default for name, each in parameters.items() if name in DEFAULTS}
    assert given == DEFAULTS
    assert {*parameters} - {*DEFAULTS} == {"self", "name", "model"}


@pytest.mark.parametrize("client", [Client("memory:"), AsyncClient("memory:")])
def test_client_makes_the_queue_of_a_spec(client: Any) -> None:
    queue = client.queue(JOBS)
    backend = backend_of(queue)
    assert (queue.name, backend.codec.model) == ("jobs", Job)
    assert (backend.options.lease, backend.options.max_tries) == (15, 3)
    assert client.queue(JOBS, lease=60).name == "jobs"  # the default
    assert repr(JOBS) == "QueueSpec('jobs')"


@pytest.mark.parametrize(
    ("given", "said"),
    [({"lease": 9}, "lease: queue 'jobs'"), ({"model": int}, "model: queue 'jobs'")],
)
def test_options_beside_a_spec_are_refused(
    offline: Client, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        offline.queue(JOBS, **given)
    with pytest.raises(ConfigurationError, match=said):
        Worker(offline).on(JOBS, print, **given)


def test_spec_of_no_queue_is_refused() -> None:
    wrong: dict[str, Any] = {"leese": 3}
    unknown: dict[str, Any] = {"x": 1}
    with pytest.raises(ConfigurationError, match=r"leese: .* did you mean 'lease'"):
        QueueSpec("jobs", **wrong)
    with pytest.raises(ConfigurationError, match="x: a queue has no such option; use one of lease"):
        QueueSpec("jobs", **unknown)
    with pytest.raises(InvalidName, match="name: "):
        QueueSpec("a b")


def test_worker_consumes_a_spec(place: Place) -> None:
    got: list[Any] = []

    def work(payload: Any, delivery: Any) -> None:
        got.append((payload, delivery.message.lease))

    place.client.queue(JOBS).push(Job(7))
    report = place.run(
        lambda client: Worker(client).on(JOBS, place.handler(work)), until_empty=True
    )
    assert counted(report, "jobs") == {"in": 1, "out": 1}
    assert got == [(Job(7), 15)]


@pytest.mark.parametrize("stage", ["link", "choice", "sink"])
def test_output_has_the_options_of_its_spec(place: Place, stage: str) -> None:
    """The priority would be refused by a standard queue."""

    def work(payload: Any, delivery: Any) -> Any:
        return To("mail", payload["n"], priority=9)

    def build(client: Any) -> Pipeline:
        to: Any = MAIL if stage == "link" else [MAIL]
        built: Pipeline = getattr(client.pipeline(), stage)("in", place.handler(work), to=to)
        return built

    place.queue("in").push_many([{"n": 1}, {"n": "two"}])
    report = place.run(build, until_empty=True)
    assert counted(report, "in") == {"in": 2, "out": 1, "dead": 1}
    (message,) = place.client.queue(MAIL).peek()
    assert (message.payload, message.priority) == (1, 9)
    dead = place.queue("in.dead").pop(0)
    assert dead is not None
    assert dead.error is not None
    assert dead.error.type == "InvalidMessage"


def test_two_specs_of_one_target_must_be_equal(offline: Client) -> None:
    pipeline = offline.pipeline().link("a", print, to=MAIL)
    pipeline.link("b", print, to=QueueSpec("mail", int, kind="priority", lease=7))
    with pytest.raises(ConfigurationError, match="to: two different specs of queue 'mail'"):
        pipeline.link("c", print, to=QueueSpec("mail", int))
