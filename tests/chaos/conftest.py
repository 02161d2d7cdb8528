"""Servers of the fault tests' own: they stop them, and have them fail."""

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

from pyqueue import ConfigurationError
from pyqueue.embedded import EmbeddedServer, find_mongod
from tests.conftest import missing
from tests.support.proxy import Proxy


class Server:
    """A mongod that can be stopped, killed and started again, always on the same port."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = False
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        if not self.running:
            self._embedded = EmbeddedServer(self.path, parameters={"enableTestCommands": 1})
            assert self.port in (0, self._embedded.port), "another program took the port"
            self.port = self._embedded.port
            self.running = True

    def stop(self) -> None:
        """Shut it down."""
        self._embedded.close()
        self.running = False

    def kill(self) -> None:
        """End it by SIGKILL: whatever it has not written is gone."""
        process = psutil.Process(self._embedded.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        self.stop()

    def url(self, database: str) -> str:
        """The URL of a database."""
        return f"mongodb://127.0.0.1:{self.port}/{database}?replicaSet=pyqueue"

    def fail(self, times: int, command: str, **data: object) -> None:
        """Have the next commands of a name fail, if they come from a client of pyqueue."""
        with MongoClient[dict[str, Any]](self.url("admin")) as mongo:
            mongo.admin.command(
                "configureFailPoint",
                "failCommand",
                mode={"times": times},
                data={"failCommands": [command], "appName": "pyqueue", **data},
            )

    def spent(self) -> bool:
        """Whether all of those have failed."""
        with MongoClient[dict[str, Any]](self.url("admin")) as mongo:
            found = mongo.admin.command("configureFailPoint", "failCommand", mode="off")
            return int(found["count"]) > 0


@pytest.fixture(scope="session")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        find_mongod()
    except ConfigurationError as error:
        missing(str(error))
    server = Server(tmp_path_factory.mktemp("faulty"))
    yield server
    if server.running:
        server.stop()


@pytest.fixture
def server(own_server: Server) -> Iterator[Server]:
    """A running server that the test may stop."""
    own_server.start()
    yield own_server
    gc.collect()  # what the test left unclosed is said here, and not in another test


@pytest.fixture
def database() -> str:
    """The name of a database of the test's own."""
    return f"t{uuid4().hex[:16]}"


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy before that server."""
    with Proxy(server.port) as proxy:
        yield proxy
