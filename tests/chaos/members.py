"""The replica set that is made to fail: three mongods of this process, and what can be done to them.

Their watchdogs see to it that none outlives this process (see ``pyqueue/_watchdog.py``). The members know one another by their real addresses;
clients reach them through ``proxies``.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from pyqueue import _watchdog, embedded
from pyqueue.errors import Unavailable

__all__ = ["Member", "ReplicaSet", "url_of"]

PATIENCE = 60.0  # seconds until all members are to be up, at first and after a fault

_NAME = "pyqueue"  # of the replica set, as the options of an embedded server have it
#: A primary that answers nothing is replaced after two seconds, and its successor does not wait for what only the old one had.
_SETTINGS = {
    "electionTimeoutMillis": 2000,
    "heartbeatIntervalMillis": 500,
    "heartbeatTimeoutSecs": 2,
    "catchUpTimeoutMillis": 1000,
}
#: With SIGXFSZ ignored, a write beyond the limit fails, as on a full disk, instead of ending the process.
_FULL_DISK_FAILS = ["/bin/sh", "-c", 'trap "" XFSZ; exec "$@"', "mongod"]

Document = dict[str, Any]


def url_of(ports: list[int], database: str = "") -> str:
    """The URL of the replica set whose members are reached at these ports."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return f"mongodb://{hosts}/{database}?replicaSet={_NAME}"


class Member:
    """A mongod that can be killed, suspended, told to fail, and started again on the same port."""

    def __init__(self, place: int, path: Path, mongod: str) -> None:
        self.place = place
        self.port = embedded._free_port(0)
        self._path = path
        self._mongod = mongod
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self.suspended = False
        self.mongo: MongoClient[Document] = MongoClient(
            "127.0.0.1",
            self.port,
            directConnection=True,
            serverSelectionTimeoutMS=500,
            connectTimeoutMS=1000,
            socketTimeoutMS=10_000,
            w=1,
            appname="faults",  # fail points ask for the name that pyqueue's clients have
        )
        (path / "db").mkdir(parents=True)
        for name in ("lock", "mongod.log"):
            (path / name).open("a").close()

    def start(self) -> None:
        """Start it, if it does not run."""
        if self.running:
            return
        parameters = {**embedded._PARAMETERS, "enableTestCommands": True}
        command = [
            *_FULL_DISK_FAILS,
            *(
                self._mongod,
                f"--dbpath={self._path / 'db'}",
                f"--port={self.port}",
                *embedded._OPTIONS,
            ),
            *(f"--setParameter={name}={str(value).lower()}" for name, value in parameters.items()),
        ]
        watchdog = [
            sys.executable,
            "-I",
            "-S",
            _watchdog.__file__,
            str(os.getpid()),
            str(self._path),
            str(self.port),
        ]
        self._pid = 0
        self._watchdog = subprocess.Popen(
            watchdog + command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        """Whether there is a process, suspended or not."""
        return self._watchdog is not None and self._watchdog.poll() is None

    @property
    def pid(self) -> int:
        """The process id of mongod, known since it answered."""
        if not self._pid:  # 0 would mean this process
            raise Unavailable(f"member {self.place} has not answered since it was started")
        return self._pid

    def hello(self) -> Document:
        """What it says of itself; nothing if it does not answer."""
        if self.running and not self.suspended:
            with suppress(PyMongoError):
                said = self.mongo.admin.command("hello")
                self._pid = self._pid or int(self.mongo.admin.command("serverStatus")["pid"])
                return said
        return {}

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def suspend(self) -> None:
        """Stop it where it stands: its connections stay open, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        self.suspended = True

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)
        self.suspended = False

    def limit_files(self, size: int) -> None:
        """Have it fail at the first write beyond so many bytes of a file."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def command(self, name: str, *args: Any, **options: Any) -> Document:
        """Have it carry out a command of the database ``admin``."""
        return self.mongo.admin.command(name, *args, **options)

    def fail_point(self, name: str, mode: object, data: Mapping[str, object] | None = None) -> int:
        """Set a fail point; how often it was met since it was set before."""
        return int(
            self.command("configureFailPoint", name, mode=mode, data=data or {}).get("count", 0)
        )

    def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._watchdog is not None
        self._watchdog.wait(3 * _watchdog.GRACE_S)

    def close(self) -> None:
        """End it in any case."""
        self.mongo.close()
        if self._watchdog is not None and self.running:
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)  # the data go, too: nothing is to be saved
            self._watchdog.terminate()
            self.wait()

    def log_end(self) -> str:
        """The end of its log."""
        return "\n".join((self._path / "mongod.log").read_text(errors="replace").splitlines()[-5:])


class ReplicaSet:
    """Three members, started and initiated; a context manager that ends them."""

    def __init__(self, path: Path) -> None:
        mongod = embedded.find_mongod()
        self.members = [Member(place, path / f"member-{place}", mongod) for place in range(3)]
        try:
            for member in self.members:
                member.start()
            for member in self.members:
                self._until(
                    lambda member=member: bool(member.hello()),
                    f"member {member.place} did not start",
                )
            hosts = [{"_id": each.place, "host": f"127.0.0.1:{each.port}"} for each in self.members]
            self.members[0].command(
                "replSetInitiate", {"_id": _NAME, "members": hosts, "settings": _SETTINGS}
            )
            self._until(self.healthy, "there is no primary with two secondaries")
        except BaseException:
            self.close()
            raise

    def _until(self, what: Any, else_: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            if time.monotonic() > deadline or not all(each.running for each in self.members):
                logs = "\n".join(each.log_end() for each in self.members)
                raise Unavailable(f"{else_}; the ends of the logs:\n{logs}")
            time.sleep(0.05)

    @property
    def url(self) -> str:
        """Where the members really are."""
        return url_of([each.port for each in self.members])

    def primary(self) -> Member | None:
        """The member that takes writes, if there is one."""
        said = [(each.hello(), each) for each in self.members]
        return max(
            (
                (str(hello["electionId"]), each)
                for hello, each in said
                if hello.get("isWritablePrimary")
            ),
            key=lambda pair: pair[0],
            default=("", None),
        )[1]

    def healthy(self) -> bool:
        """Whether there is one primary, and the others follow it."""
        said = [each.hello() for each in self.members]
        return sorted(
            (bool(each.get("isWritablePrimary")), bool(each.get("secondary"))) for each in said
        ) == [
            (False, True),
            (False, True),
            (True, False),
        ]

    def close(self) -> None:
        """End them."""
        for member in self.members:
            with suppress(OSError):
                member.close()

    def __enter__(self) -> ReplicaSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
