"""One suite on mongomock and on a server, from blocking code and from async code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any
from uuid import uuid4

import pymongo
import pytest

from pyqueue import Client
from pyqueue.memory import memory_database
from tests.pipeline.place import Gate, Place
from tests.support.samples import sample

#: The places: whether there is a server, a blocking client, and whether handlers are awaited.
#: ``make test-slow`` runs the last place.
PLACES = {
    "memory-blocking-def": (False, True, False),
    "mongod-blocking-async_def": (True, True, True),
    "mongod-async-async_def": (True, False, True),
    "memory-async-def": (False, False, False),
}
#: How many cases of each test ``make test`` runs on a server.
FEW = {"mongod-blocking-async_def": 1, "mongod-async-async_def": 1}
#: The files whose tests ``make test`` runs there from a blocking client, too. They receive, settle,
#: stop and wait; in the rest, only stages differ, for which memory is enough.
FROM_BLOCKING = {"test_batches", "test_many", "test_results", "test_run"}


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a few cases of each test on a server. In memory, all of them run.

    Of a test that takes each kind of handler on each kind of client, keep the two pairs that the
    fixture ``server`` does not give by itself.
    """
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        blocking = params.get("server", params.get("memory"))
        if blocking is not None and params.get("awaited", blocking) is not blocking:
            item.add_marker(pytest.mark.slow)
        elsewhere = item.path.stem not in FROM_BLOCKING
        if elsewhere and params.get("place") == PLACES["mongod-blocking-async_def"]:
            item.add_marker(pytest.mark.slow)
    for name, few in FEW.items():
        sample(items, few, partial(_is_in, PLACES[name]))


def _is_in(place: tuple[bool, bool, bool], params: Mapping[str, object]) -> bool:
    return params.get("place") == place


@pytest.fixture(scope="module")
def shared_url(mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """The URL of a database in which each test of a module has its own namespace."""
    name = f"t{uuid4().hex[:16]}"
    assert mongo.address is not None
    host, port = mongo.address
    yield f"mongodb://{host}:{port}/{name}?replicaSet=pyqueue"
    mongo.drop_database(name)


def make_place(
    request: pytest.FixtureRequest, server: bool, blocking: bool, awaited: bool
) -> Iterator[Place]:
    target = request.getfixturevalue("shared_url") if server else memory_database("pyqueue")
    place = Place(target, blocking=blocking, server=server, awaited=awaited)
    with closing(place.client):
        yield place


@pytest.fixture(
    params=[
        pytest.param(place, id=name, marks=pytest.mark.slow if name == "memory-async-def" else ())
        for name, place in PLACES.items()
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each store, with each kind of client and each kind of handler."""
    yield from make_place(request, *request.param)


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def server(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A server, with each kind of client."""
    yield from make_place(request, True, request.param, not request.param)


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def memory(request: pytest.FixtureRequest) -> Iterator[Place]:
    """mongomock, with each kind of client."""
    yield from make_place(request, False, request.param, not request.param)


@pytest.fixture(params=[False, True], ids=["def", "async_def"])
def awaited(request: pytest.FixtureRequest) -> bool:
    """Each kind of handler, for a test that combines it with each kind of client."""
    return bool(request.param)


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    """A handler that waits: of the kind of ``awaited``, or without it of the test's place."""
    if "awaited" in request.fixturenames:
        gate = Gate(request.getfixturevalue("awaited"))
    else:
        name = next(each for each in ("place", "server") if each in request.fixturenames)
        gate = Gate(request.getfixturevalue(name).awaited)
    yield gate
    gate.open.set()


@pytest.fixture
def offline() -> Iterator[Client]:
    """A client that is never opened, for tests without I/O."""
    with closing(Client("memory:")) as client:
        yield client
