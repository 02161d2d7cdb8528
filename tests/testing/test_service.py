"""The typed service: its app and the test each make a client of one URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient as Http

from pyqueue import AsyncClient, Worker
from pyqueue.testing import AsyncTestClient, TestClient, assert_enqueued, drain
from pyqueue.web import Dashboard
from tests.typed.service import make_app, make_pipeline, work_off, work_off_async


@pytest.fixture
def http(pyqueue_target: str) -> Iterator[Http]:
    """The running app."""
    with Http(make_app(pyqueue_target)) as http:
        yield http


def test_test_and_app_share_a_database(http: Http, pyqueue_client: TestClient) -> None:
    assert http.get("/orders/7").status_code == 404
    assert http.post("/orders/7", json={"book": "Emma"}).json() == {"id": "ship-7"}
    assert_enqueued(pyqueue_client, "ship", where={"payload.order": "7"})
    assert http.get("/orders/7").json() == {"state": "ready", "tries": 0, "done": 0.0}
    report = work_off(pyqueue_client)
    assert report.stages["ship"]["out"] == 1
    (letter,) = assert_enqueued(pyqueue_client, "mail", where={"priority": 9})
    assert letter.payload == {"text": "post: parcel 1"}
    stored = pyqueue_client.database["orders"].find_one({})
    assert stored == {"_id": "7", "book": "Emma", "copies": 1}


def test_pipeline_of_the_service_runs(pyqueue_client: TestClient) -> None:
    pyqueue_client.queue("ship").push({"order": "7"}, delay=60)
    report = drain(make_pipeline(pyqueue_client))
    assert {name: stage["out"] for name, stage in report.stages.items()} == {"ship": 1, "mail": 1}


@pytest.mark.anyio
async def test_async_worker_of_the_service_runs(pyqueue_async_client: AsyncTestClient) -> None:
    async with pyqueue_async_client as client:
        await client.queue("ship").push({"order": "7"})
        report = await work_off_async(client)
        assert report.stages["ship"]["out"] == 1


def test_lifespan_binds_worker_and_mounts_dashboard(
    pyqueue_target: str, pyqueue_client: TestClient
) -> None:
    """Nothing of the app needs a client before its lifespan, so each test may start it again."""
    worker: Worker[Any] = Worker()
    worker.on("greet", lambda name: f"hello {name}")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncClient(pyqueue_target) as client:
            app.mount("/queues", Dashboard(client, allow="anyone"))
            running = asyncio.create_task(worker.bind(client).run(handle_signals=False))
            yield
            worker.stop()
            await running

    for name in ("Ann", "Bob"):
        with Http(FastAPI(lifespan=lifespan), base_url="http://localhost") as http:
            assert pyqueue_client.request("greet", name, timeout=20) == f"hello {name}"
            [row] = http.get("/queues/json").json()["rows"]
            assert row["name"] == "greet"
