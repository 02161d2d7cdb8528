"""Fixtures of the Spark tests: separate queues for each test, in one shared database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyqueue import Client
from tests.spark.fakes import Flow, faked

__all__ = ["faked"]  # fixtures


@pytest.fixture(scope="session")
def shared(database: str) -> Iterator[Client]:
    """A client of the shared database. It has reached the server before a test counts commands."""
    with Client(database, signals="none:", telemetry=False) as client:
        client.queues()
        yield client


@pytest.fixture
def flow(shared: Client) -> Iterator[Flow]:
    """Two queues, and stages between them."""
    flow = Flow(shared)
    yield flow
    flow.release()
