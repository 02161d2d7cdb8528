"""What the tests of Spark share: queues of their own, on one database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyqueue import Client
from tests.spark.fakes import Flow, faked

__all__ = ["faked"]

HERE = Path(__file__).parent

#: The modules whose tests start processes with a JVM of their own.
JVMS = ("test_kill", "test_session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They go where the session is: one JVM after the other."""
    for item in items:
        if HERE in item.path.parents and item.path.stem in JVMS:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def shared(database: str) -> Iterator[Client]:
    """A client of it, which has reached the server before."""
    with Client(database, signals="none:") as client:
        client.queues()
        yield client


@pytest.fixture
def flow(shared: Client) -> Flow:
    """Two queues, and what goes between them."""
    return Flow(shared)
