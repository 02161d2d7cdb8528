"""The pytest plugin: fixtures that give each test a client of an empty database."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyqueue.testing import AsyncTestClient, TestClient


@pytest.fixture
def pyqueue_url() -> str:
    """Return the server for tests: the value of PYQUEUE_TEST_URL, or "memory:".

    Override this fixture to choose a server for some tests.
    """
    return os.environ.get("PYQUEUE_TEST_URL") or "memory:"


@pytest.fixture
def pyqueue_target(pyqueue_url: str) -> Iterator[str]:
    """Return the URL of an empty database for this test and for the program under test."""
    token = secrets.token_hex(6)
    if pyqueue_url.startswith("memory:"):
        from pyqueue.runtime.shared_memory import shared_memory

        name = pyqueue_url.removeprefix("memory:") or f"test_{token}"
        kept = shared_memory(name)  # the database stays until the test ends
        yield f"memory:{name}"
        del kept
        return
    import pymongo

    name = f"pyqueue_test_{token}"
    url = _with_database(pyqueue_url, name)
    yield url
    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        mongo.drop_database(name)


@pytest.fixture
def pyqueue_client(pyqueue_target: str) -> Iterator[TestClient]:
    """Return a ``TestClient`` of an empty database."""
    from pyqueue.testing import TestClient

    with TestClient(pyqueue_target) as client:
        yield client


@pytest.fixture
def pyqueue_async_client(pyqueue_target: str) -> AsyncTestClient:
    """Return an ``AsyncTestClient`` of an empty database. Enter it with ``async with``."""
    from pyqueue.testing import AsyncTestClient

    return AsyncTestClient(pyqueue_target)


def _with_database(url: str, name: str) -> str:
    """Return the URL with the database ``name`` in place of its database."""
    front, _, query = url.partition("?")
    scheme, _, rest = front.partition("://")
    hosts, _, former = rest.partition("/")
    if "@" in hosts and former and "authsource=" not in query.lower():
        query = f"{query}&authSource={former}".lstrip("&")
    return f"{scheme}://{hosts}/{name}?{query}".rstrip("?")
