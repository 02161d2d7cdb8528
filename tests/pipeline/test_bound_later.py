"""Workers that are created without a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, QueueSpec, Worker
from pyqueue.pipeline import Report
from pyqueue.testing import drain
from tests.pipeline.place import Place, counted

JOBS = QueueSpec("jobs", int, lease=15)


def make(done: list[Any]) -> Worker[Report]:
    worker = Worker(concurrency=2, name="late")

    @worker.on(JOBS)
    def work(job: int) -> None:
        done.append(job)

    @worker.on("other", max_tries=3, lease=7)
    async def other(payload: Any) -> None:
        done.append(payload)

    return worker


@pytest.fixture
def environment(server: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A server that the environment names."""
    monkeypatch.setenv("PYQUEUE_URL", server.target)
    monkeypatch.setenv("PYQUEUE_NAMESPACE", server.namespace)
    monkeypatch.delenv("PYQUEUE_SIGNALS", raising=False)
    return server


def test_run_creates_a_client_from_the_environment(environment: Place) -> None:
    done: list[Any] = []
    worker = make(done)
    for n in range(2):
        environment.queue("jobs").push(n)
        environment.queue("other").push(n)
        report = worker.run(until_empty=True, handle_signals=False)
        assert counted(report, "jobs") == {"in": 1, "out": 1}
    assert sorted(done) == [0, 0, 1, 1]


def test_run_without_a_client_needs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYQUEUE_URL", raising=False)
    with pytest.raises(ConfigurationError, match="PYQUEUE_URL: expected the URL of a server"):
        make([]).run(until_empty=True)


def test_bind_gives_a_client_again_and_again(memory: Place) -> None:
    done: list[Any] = []
    worker = make(done)
    for _ in range(2):
        with Client("memory:") as client:
            client.queue(JOBS).push(1)
            report = worker.bind(client).run(until_empty=True, handle_signals=False)
        assert report.stages["jobs"]["out"] == 1

    async def work() -> Report:
        async with AsyncClient("memory:") as client:
            await client.queue(JOBS).push(2)
            return await worker.bind(client).run(until_empty=True, handle_signals=False)

    assert asyncio.run(work()).stages["jobs"]["out"] == 1
    assert done == [1, 1, 2]


def test_bound_worker_keeps_the_options_of_its_queues(offline: Client) -> None:
    worker = make([]).bind(offline)
    stages = worker.graph.stages
    assert [stage.queue._backend.options.lease for stage in stages.values()] == [15, 7]


def test_testing_kit_needs_a_client(offline: Client) -> None:
    worker = make([])
    with pytest.raises(ConfigurationError, match="'late' was created without a client"):
        drain(worker)
    offline.queue(JOBS).push(1)
    assert drain(worker.bind(offline)).stages["jobs"]["out"] == 1


def test_wrong_uses_of_bind_are_refused(offline: Client, memory: Place) -> None:
    with pytest.raises(ConfigurationError, match="'worker' was created with a client"):
        Worker(offline).bind(offline)
    wrong: Any = "memory:"
    with pytest.raises(ConfigurationError, match="client: expected a Client"):
        make([]).bind(wrong)
    with pytest.raises(ConfigurationError, match="queue: 'jobs' belongs to a client"):
        Worker().on(offline.queue(JOBS), print)
    running = memory.start(lambda client: make([]).bind(client))
    with pytest.raises(ConfigurationError, match="'late' is running; stop it first"):
        running.runner.bind(offline)
    running.finish()
