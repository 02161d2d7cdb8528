"""A server that tests may stop or make fail, a proxy in front of it, and an invented run."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from pymongo import MongoClient

from pyqueue.embedded import EmbeddedServer
from tests.chaos.scenario import Scenario
from tests.support.proxy import Proxy
from tests.support.servers import require_mongod

#: A short command timeout, and how much later an answer may come on a busy machine.
TIMEOUT_S = 1.0
SLACK_S = 2.2


def through(proxy: Proxy, database: str) -> str:
    """Return the URL of a database behind a proxy."""
    return f"mongodb://127.0.0.1:{proxy.port}/{database}?directConnection=true"


class Server:
    """A mongod that can be stopped, killed and started again on the same port."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = False
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the server unless it runs."""
        if not self.running:
            self._embedded = EmbeddedServer(self.path, parameters={"enableTestCommands": 1})
            assert self.port in (0, self._embedded.port), "the port was taken by another program"
            self.port = self._embedded.port
            self.running = True

    def stop(self) -> None:
        """Shut the server down."""
        self._embedded.close()
        self.running = False

    def kill(self) -> None:
        """Kill the server: writes that it has not stored are lost."""
        process = psutil.Process(self._embedded.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        self.stop()

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"mongodb://127.0.0.1:{self.port}/{database}?replicaSet=pyqueue"

    def fail(self, times: int, command: str, **data: object) -> None:
        """Make the next commands of this name fail if a client of pyqueue sends them."""
        with MongoClient[dict[str, Any]](self.url("admin")) as mongo:
            mongo.admin.command(
                "configureFailPoint",
                "failCommand",
                mode={"times": times},
                data={"failCommands": [command], "appName": "pyqueue", **data},
            )

    def has_failed(self) -> bool:
        """Turn ``fail`` off, and return whether a command has failed."""
        with MongoClient[dict[str, Any]](self.url("admin")) as mongo:
            found = mongo.admin.command("configureFailPoint", "failCommand", mode="off")
            return int(found["count"]) > 0


@pytest.fixture(scope="session")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require_mongod()
    server = Server(tmp_path_factory.mktemp("faulty"))
    yield server
    if server.running:
        server.stop()


@pytest.fixture
def server(own_server: Server) -> Iterator[Server]:
    """A running server that the test may stop. Each test uses another database of it."""
    own_server.start()
    yield own_server
    gc.collect()  # a warning about an object that the test left open belongs to this test


@pytest.fixture
def database() -> str:
    """The name of a database that only this test uses."""
    return f"t{uuid4().hex[:16]}"


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def scenario() -> Scenario:
    """An invented run for the checker, in which nothing has happened yet."""
    return Scenario()
