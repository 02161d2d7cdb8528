"""One mongod for all workers of a run of pytest.

The first worker that needs it starts a small process that holds the server. That process belongs to
the run and not to the worker, so the server survives the worker, and it ends with the run: the run
stops it at its end, and it notices by itself if the run is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import psutil
from pymongo import MongoClient

from pyqueue import _watchdog
from tests.support.eventually import eventually
from tests.support.processes import ROOT
from tests.support.servers import MEMORY, mongod_process


@dataclass(frozen=True)
class Mongod:
    """A running mongod: a replica set of one member."""

    path: Path
    port: int
    pid: int

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        return f"mongodb://127.0.0.1:{self.port}/?replicaSet=pyqueue"


@dataclass(frozen=True)
class Run:
    """A run of pytest: the process that controls the workers, and a directory for the server."""

    controller: int
    directory: str

    @classmethod
    def begin(cls) -> Run:
        """Begin a run in this process. The directory is made when it is needed."""
        base = MEMORY or Path(tempfile.gettempdir())
        return cls(os.getpid(), str(base / f"pyqueue-tests-{uuid4().hex[:12]}"))

    def mongod(self) -> Mongod:
        """Return the run's server; start it if no worker did so before."""
        directory = Path(self.directory)
        directory.mkdir(mode=0o700, exist_ok=True)
        with (directory / "starting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, or by a crash
            ready = directory / "ready"
            if not ready.exists():
                self._start(directory, ready)
        return Mongod(directory, **json.loads(ready.read_text()))

    def _start(self, directory: Path, ready: Path) -> None:
        command = [sys.executable, "-m", "tests.support.shared", str(self.controller)]
        with (directory / "holder.log").open("wb") as log:
            holder = subprocess.Popen(
                [*command, self.directory],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )
        eventually(lambda: ready.exists() or holder.poll() is not None, "a shared mongod")
        assert ready.exists(), (directory / "holder.log").read_text()[-4000:]
        holder.returncode = 0  # it outlives this process on purpose, so nothing waits for it

    def end(self) -> None:
        """Stop the server, if it runs, and remove its directory."""
        directory = Path(self.directory)
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            holder = psutil.Process(int((directory / "holder").read_text()))
            holder.terminate()
            holder.wait(30)
        shutil.rmtree(directory, ignore_errors=True)


def hold(controller: int, directory: Path) -> None:
    """Run the server until the controlling process ends or SIGTERM comes."""
    end_of_run = _watchdog.pidfd(controller)
    try:
        (directory / "holder").write_text(str(os.getpid()))
        with mongod_process(directory, replica_set="pyqueue") as port:
            with MongoClient[dict[str, int]]("127.0.0.1", port, directConnection=True) as mongo:
                pid = mongo.admin.command("serverStatus")["pid"]
            part = directory / "ready.part"
            part.write_text(json.dumps({"port": port, "pid": pid}))
            part.rename(directory / "ready")
            select.select([end_of_run], [], [])
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _stop(*_: object) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    hold(int(sys.argv[1]), Path(sys.argv[2]))
