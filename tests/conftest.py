"""Fixtures that all tests share: one real mongod for a run, a database of its own for each test.

A missing server skips at home and fails under CI=true: nothing may hide there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pymongo
import pytest

from pyqueue import Client
from pyqueue.embedded import EmbeddedServer
from tests.spark.session import database, log, password, signed_in, spark
from tests.support.servers import missing, require_mongod

__all__ = ["database", "log", "missing", "password", "signed_in", "spark"]

# Not in UTC, so that a naive datetime anywhere shows; whatever these tests start has it too.
os.environ["TZ"] = "EST5EDT"
time.tzset()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that share a Spark session go to one worker."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def mongod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A mongod of this run's own: a one-node replica set."""
    require_mongod()
    with EmbeddedServer(tmp_path_factory.mktemp("mongod")) as server:
        yield server


@pytest.fixture(scope="session")
def mongo(mongod: EmbeddedServer) -> Iterator[pymongo.MongoClient[dict[str, Any]]]:
    """A raw pymongo client, to look behind the queues."""
    with pymongo.MongoClient[dict[str, Any]](mongod.url, tz_aware=True) as client:
        yield client


@pytest.fixture
def url(mongod: EmbeddedServer, mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The URL of an empty database of this test's own."""
    name = f"t{uuid4().hex[:16]}"
    base, _, query = mongod.url.partition("?")
    yield f"{base.rstrip('/')}/{name}?{query}"
    mongo.drop_database(name)


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A blocking client on an empty database."""
    with Client(url) as client:
        yield client
