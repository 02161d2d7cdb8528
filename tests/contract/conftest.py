"""Fixtures of the contract suite.

The suite is written once, against the blocking API, and runs in every place of ``world.PLACES``.
A test that needs a feature marks it: ``@pytest.mark.needs("history")``. The test is then generated
only for the places that offer the feature. Separate tests cover the refusals of the other places
(test_kinds.py, test_transactions.py). So nothing is ever skipped.

``make test`` runs a selection: see ``Place.runs`` and ``Place.few``. The rest is marked ``slow``.

All tests of a place share one client and one namespace. Each test has its own queue names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import pymongo
import pytest

from pyqueue import Client
from tests.contract.world import (
    PLACES,
    RENAMING_FILE,
    AnyClient,
    AnyQueue,
    Began,
    Place,
    World,
    open_world,
)
from tests.support.samples import sample
from tests.support.shared import Mongod


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "needs(*features): run the contract test only where all of these are offered",
        'differs_by(part): only the "client" or only the "kind" can change the result of the test',
    ):
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        needs = {each for mark in metafunc.definition.iter_markers("needs") for each in mark.args}
        file = metafunc.module.__name__.rpartition(".")[2]
        places = [
            place
            for place in PLACES
            if needs <= place.offers and (place.driver != "renaming" or file == RENAMING_FILE)
        ]
        assert places, f"no place offers {needs}"
        mark = metafunc.definition.get_closest_marker("differs_by")
        differs_by = None if mark is None else mark.args[0]
        runs = {place: place.runs(file, differs_by) for place in places}
        if not any(runs.values()):  # only the other places offer the features of this test
            runs[places[0]] = True
        if "not slow" in metafunc.config.getoption("markexpr"):
            # Collecting thousands of cases only to deselect them takes seconds in each worker.
            places = [place for place in places if runs[place]]
        values = [
            pytest.param(place, id=place.name, marks=() if runs[place] else pytest.mark.slow)
            for place in places
        ]
        metafunc.parametrize("world", values, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one case of each test in most places."""
    for place in PLACES:
        if place.few is not None:
            sample(items, place.few, partial(_is_in, place))


def _is_in(place: Place, params: Mapping[str, object]) -> bool:
    return params.get("world") == place


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Return a place with a client."""
    base = request.getfixturevalue("mongod").url if request.param.server else None
    with open_world(request.param, base) as world:
        yield world


@pytest.fixture(autouse=True)
def began() -> None:
    """Record when the test began, for ``near``."""
    Began.at = datetime.now(UTC)


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    """Return the client of the place."""
    yield world.client
    if not world.place.server:
        # mongomock scans every stored document, so keep them few.
        world.raw().delete_many({})


@pytest.fixture(scope="session")
def emptied(mongod: Mongod) -> Iterator[Any]:
    """Return a database for the blocking clients of one worker. Each leaves it empty."""
    with pymongo.MongoClient[dict[str, Any]](mongod.url) as mongo:
        name = f"t{uuid4().hex[:16]}"
        yield mongo[name]
        mongo.drop_database(name)


@pytest.fixture(params=["memory", "mongod"])
def blocking_client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Return a blocking client of an empty database, for plans that Spark's tasks run."""
    memory = request.param == "memory"
    database = None if memory else request.getfixturevalue("emptied")
    with Client("memory:" if database is None else database) as client:
        yield client
    if database is not None:
        database[client.namespace].delete_many({})


@pytest.fixture
def name() -> str:
    """Return a queue name that no other test uses."""
    return f"q{uuid4().hex[:12]}"


@pytest.fixture
def queue(client: AnyClient, name: str) -> AnyQueue:
    """Return an empty queue."""
    return client.queue(name)


@pytest.fixture
def other(client: AnyClient, name: str) -> AnyQueue:
    """Return another empty queue of the same namespace."""
    return client.queue(f"{name}-other")
