"""The contract suite is written once, against the blocking API, and runs in every place of
``world.PLACES``.

A test that needs what not every place offers says so: ``@pytest.mark.needs("history")``. It is then
not made for the others; what those answer instead is a test of its own (test_kinds.py,
test_transactions.py). So nothing is ever skipped.

All tests of a place share one client and one namespace; each has queue names of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from pyqueue import Client
from tests.contract.world import PLACES, AnyClient, AnyQueue, Began, World, open_world


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(*what): run the contract test only where all of these are offered"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        needs = {each for mark in metafunc.definition.iter_markers("needs") for each in mark.args}
        places = [place for place in PLACES if needs <= place.offers]
        assert places, f"no place offers {needs}"
        metafunc.parametrize(
            "world", places, ids=[place.name for place in places], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A place with a client in it."""
    base = request.getfixturevalue("mongod").url if request.param.server else None
    with open_world(request.param, base) as world:
        yield world


@pytest.fixture(autouse=True)
def began() -> None:
    """Note when the test began: what it checks with ``near`` happens after that."""
    Began.at = datetime.now(UTC)


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    """The place's client."""
    yield world.client
    if not world.place.server:
        world.raw().delete_many(
            {}
        )  # mongomock looks at every document there is, so let there be few


@pytest.fixture
def name() -> str:
    """A queue name of this test's own."""
    return f"q{uuid4().hex[:12]}"


@pytest.fixture
def queue(client: AnyClient, name: str) -> AnyQueue:
    """An empty queue."""
    return client.queue(name)


@pytest.fixture
def other(client: AnyClient, name: str) -> AnyQueue:
    """Another empty queue of the same namespace."""
    return client.queue(f"{name}-other")
