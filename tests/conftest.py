"""Fixtures that all tests share: one real mongod for a run, and an empty database for each test.

Without a server, tests are skipped at home and fail under ``CI=true``, where every test must run.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import astuple
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pymongo
import pytest
from hypothesis import is_hypothesis_test
from typer.main import get_command

from pyqueue import Client
from pyqueue.embedded import EmbeddedServer
from tests.spark.session import database, log, password, signed_in, spark
from tests.support.samples import sample
from tests.support.servers import MEMORY, require_mongod
from tests.support.shared import Mongod, Run

__all__ = ["database", "log", "password", "signed_in", "spark"]  # fixtures

Mongo = pymongo.MongoClient[dict[str, Any]]

# A run in the background may ignore Ctrl-C, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where the environment forbids bytecode, each of the many processes that tests start would compile
# pyqueue anew, and each worker would rewrite the asserts of all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Not UTC, so that a naive datetime is noticed. Processes that the tests start inherit it.
os.environ["TZ"] = "EST5EDT"
time.tzset()


#: Fixtures that are expensive. All tests that use one run in the same worker.
GROUPS = {"spark", "secured", "guarded", "own_server", "processes"}


#: Cases that ``make test`` deselects by these markers.
DESELECTED = ("slow", "spark_long")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, Any, Any]:
    """Leave out cases that will be deselected: there are thousands, for each worker to collect."""
    done = yield
    expression = metafunc.config.getoption("markexpr")
    unwanted = {name for name in DESELECTED if f"not {name}" in expression}
    calls = metafunc._calls
    wanted = [each for each in calls if not unwanted.intersection(mark.name for mark in each.marks)]
    if any(metafunc.definition.get_closest_marker(name) for name in unwanted):
        wanted = []
    calls[:] = wanted or calls[:1]  # one that stands for all, so that the test is deselected
    return done


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share a server on one worker, and sample the cases of async clients.

    An async client runs the same plans as a blocking one, for which all cases run.
    """
    sample(items, None, lambda params: "async" in params.values())
    for item in items:
        # The second process of such tests is also used by tests of that server.
        peer = "peer" in getattr(item, "fixturenames", ())
        if peer or item.get_closest_marker("own_mongod") is not None:
            item.add_marker(pytest.mark.xdist_group("own_mongod"))
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            # Each process that draws values for the first time reads the package for constants.
            item.add_marker(pytest.mark.xdist_group("hypothesis"))
        for fixture in GROUPS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(fixture))


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Collect no garbage while tests are collected: they and their modules last to the end."""
    if isinstance(collector, pytest.Session):
        gc.disable()


def pytest_collection_finish() -> None:
    """Let later collections of garbage pass over the objects that exist now."""
    gc.collect()
    gc.freeze()
    gc.enable()


# ---- one mongod for a run, whichever its workers

_RUN = pytest.StashKey[Run]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the run, or join it if this is a worker of xdist."""
    given = getattr(config, "workerinput", None)
    config.stash[_RUN] = Run.begin() if given is None else Run(*given["run"])
    # Typer makes the commands anew for each call, which takes longer than most of them do.
    pytest.MonkeyPatch().setattr("typer.testing._get_command", cache(get_command))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist which run it belongs to."""
    node.workerinput["run"] = astuple(node.config.stash[_RUN])


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before xdist makes its scheduler
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by a scheduler whose work does not grow with their number."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.support.scheduling import GroupScheduling  # xdist may be missing elsewhere

    return GroupScheduling(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the run, unless this is a worker."""
    if not hasattr(config, "workerinput"):
        config.stash[_RUN].end()


@pytest.fixture(scope="session")
def mongod(request: pytest.FixtureRequest) -> Mongod:
    """The mongod of this run: a replica set of one member, which all workers share."""
    require_mongod()
    return request.config.stash[_RUN].mongod()


@pytest.fixture(scope="session")
def mongo(mongod: Mongod) -> Iterator[Mongo]:
    """A raw pymongo client of that server, to read the stored documents."""
    with Mongo(mongod.url, tz_aware=True) as client:
        yield client


@pytest.fixture(scope="session")
def own_mongo() -> Iterator[Mongo]:
    """A raw client of a mongod that no other worker uses. See the marker ``own_mongod``."""
    require_mongod()
    with (
        TemporaryDirectory(dir=MEMORY) as path,
        EmbeddedServer(path) as server,
        Mongo(server.url, tz_aware=True) as client,
    ):
        yield client


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty database that only this test uses."""
    own = request.node.get_closest_marker("own_mongod") is not None
    mongo: Mongo = request.getfixturevalue("own_mongo" if own else "mongo")
    name = f"t{uuid4().hex[:16]}"
    assert mongo.address is not None
    host, port = mongo.address
    yield f"mongodb://{host}:{port}/{name}?replicaSet=pyqueue"
    mongo.drop_database(name)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyMongo notice at once that the time for finding a server is over, not within 0.5 s."""
    monkeypatch.setattr("pymongo.common.MIN_HEARTBEAT_INTERVAL", 0.02)


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A blocking client on an empty database, where it stores queues alone."""
    with Client(url, telemetry=False) as client:
        yield client
