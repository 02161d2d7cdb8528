"""The fixtures of the kit, in memory and on the server of the run."""

from __future__ import annotations

import pytest

from pyqueue.testing.plugin import pyqueue_async_client, pyqueue_client, pyqueue_target
from tests.support.samples import sample
from tests.support.shared import Mongod

__all__ = ["pyqueue_async_client", "pyqueue_client", "pyqueue_target"]


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one case of each test on a server. In memory, all of them run."""
    sample(items, 1, lambda params: params.get("pyqueue_url") == "server")


@pytest.fixture(params=["memory", "server"])
def pyqueue_url(request: pytest.FixtureRequest) -> str:
    """Where a test runs."""
    if request.param == "memory":
        return "memory:"
    mongod: Mongod = request.getfixturevalue("mongod")
    return mongod.url


@pytest.fixture
def anyio_backend() -> str:
    """Run async tests on asyncio."""
    return "asyncio"
