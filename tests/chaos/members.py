"""The replica set of the fault suite: three mongods, and the faults of a single server.

A watchdog ends each mongod when this process ends (see ``pyqueue/_watchdog.py``). The members know
each other by the addresses of proxies, and clients reach them by other proxies; see ``proxies``.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from pyqueue import _watchdog, embedded
from pyqueue.errors import Unavailable
from tests.chaos.proxies import REPLICA_SET, Proxies, url_of

START_TIMEOUT_S = 60.0

#: The server aborts a transaction whose client is gone after this time. Its default is a minute.
TRANSACTION_LIFETIME_S = 8
#: A silent primary is replaced after two seconds. Its successor waits up to one second for writes
#: that only the old primary had.
_SETTINGS = {
    "electionTimeoutMillis": 2000,
    "heartbeatIntervalMillis": 500,
    "heartbeatTimeoutSecs": 2,
    "catchUpTimeoutMillis": 1000,
}
#: With SIGXFSZ ignored, a write beyond the limit on file sizes fails as it does on a full disk.
_FULL_DISK_FAILS = ["/bin/sh", "-c", 'trap "" XFSZ; exec "$@"', "mongod"]

Document = dict[str, Any]


class Member:
    """A mongod that can be killed, suspended, made to fail, and started again on the same port.

    Args:
        place: Its number in the replica set.
        path: A folder for its data and its log.
        mongod: The path of the program.
    """

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
            appname="faults",  # so that fail points for pyqueue's clients do not strike
        )
        (path / "db").mkdir(parents=True)
        for name in ("lock", "mongod.log"):
            (path / name).open("a").close()

    def start(self) -> None:
        """Start the server unless it runs."""
        if self.running:
            return
        parameters = {
            **embedded._PARAMETERS,
            "enableTestCommands": True,
            "transactionLifetimeLimitSeconds": TRANSACTION_LIFETIME_S,
        }
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
        """Whether the process exists, suspended or not."""
        return self._watchdog is not None and self._watchdog.poll() is None

    @property
    def pid(self) -> int:
        """The process id of mongod, known after its first answer."""
        if not self._pid:  # signals to 0 would reach this process
            raise Unavailable(f"member {self.place} has not answered since its start")
        return self._pid

    def hello(self) -> Document:
        """Return its reply to ``hello``, or an empty document if it does not answer."""
        if self.running and not self.suspended:
            with suppress(PyMongoError):
                reply = self.mongo.admin.command("hello")
                self._pid = self._pid or int(self.mongo.admin.command("serverStatus")["pid"])
                return reply
        return {}

    def kill(self, *, wait: bool = True) -> None:
        """Kill the server and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        if wait:
            self.wait()

    def suspend(self) -> None:
        """Stop the server by SIGSTOP: its connections stay open and get no answers."""
        os.kill(self.pid, signal.SIGSTOP)
        self.suspended = True

    def resume(self) -> None:
        """Continue the suspended server."""
        os.kill(self.pid, signal.SIGCONT)
        self.suspended = False

    def limit_files(self, size: int) -> None:
        """Make every write beyond ``size`` bytes of a file fail."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def command(self, name: str, *args: Any, **options: Any) -> Document:
        """Run a command of the database ``admin``."""
        return self.mongo.admin.command(name, *args, **options)

    def fail_point(self, name: str, mode: object, data: Mapping[str, object] | None = None) -> int:
        """Set a fail point and return how often it struck since it was last set."""
        return int(
            self.command("configureFailPoint", name, mode=mode, data=data or {}).get("count", 0)
        )

    def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._watchdog is not None
        self._watchdog.wait(3 * _watchdog.GRACE_S)

    def close(self) -> None:
        """Kill the server, whatever its state."""
        self.mongo.close()
        if self._watchdog is not None and self.running:
            if self._pid:
                os.kill(self._pid, signal.SIGKILL)  # its data are not needed any more
            self._watchdog.terminate()
            self.wait()

    def log_end(self) -> str:
        """Return the last lines of its log."""
        return "\n".join((self._path / "mongod.log").read_text(errors="replace").splitlines()[-8:])


def _answers(member: Member) -> bool:
    return bool(member.hello())


class ReplicaSet:
    """Three members of a replica set; a context manager that ends them.

    Args:
        path: A folder for their data.

    Raises:
        Unavailable: A member did not start.
    """

    def __init__(self, path: Path) -> None:
        mongod = embedded.find_mongod()
        self.members = [Member(place, path / f"member-{place}", mongod) for place in range(3)]
        self.network = Proxies(path, [each.port for each in self.members])
        try:
            for member in self.members:
                member.start()
            for member in self.members:
                self._until(partial(_answers, member), f"member {member.place} did not start")
            hosts = [
                {"_id": place, "host": f"127.0.0.1:{port}"}
                for place, port in enumerate(self.network.ports)
            ]
            self.members[0].command(
                "replSetInitiate", {"_id": REPLICA_SET, "members": hosts, "settings": _SETTINGS}
            )
            self._until(self.healthy, "there is no primary with two secondaries")
        except BaseException:
            self.close()
            raise

    def _until(self, condition: Callable[[], bool], error: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline or not all(each.running for each in self.members):
                raise Unavailable(f"{error}; {self.state()}")
            time.sleep(0.05)

    @property
    def url(self) -> str:
        """The URL with the real addresses of the members."""
        return url_of([each.port for each in self.members])

    def primary(self) -> Member | None:
        """Return the member that takes writes, if there is one."""
        replies = [(each.hello(), each) for each in self.members]
        return max(
            (
                (str(hello["electionId"]), each)
                for hello, each in replies
                if hello.get("isWritablePrimary")
            ),
            key=lambda pair: pair[0],
            default=("", None),
        )[1]

    def healthy(self) -> bool:
        """Return whether there are a primary and two secondaries."""
        replies = [each.hello() for each in self.members]
        return sorted(
            (bool(each.get("isWritablePrimary")), bool(each.get("secondary"))) for each in replies
        ) == [
            (False, True),
            (False, True),
            (True, False),
        ]

    def state(self) -> str:
        """Return the state of each member, and the ends of their logs."""
        members = []
        for each in self.members:
            hello = each.hello()
            names = [name for name in ("isWritablePrimary", "secondary") if hello.get(name)]
            state = ", ".join(names) or ("runs" if each.running else "has ended")
            members.append(f"member {each.place}: {state}; the end of its log:\n{each.log_end()}")
        return "\n".join(members)

    def keep_apart(self, member: Member, others: Sequence[Member]) -> None:
        """Let no message pass between a member and some other members, and all elsewhere."""
        for each in self.members:
            if each is member:
                ports = [other.port for other in others]
            else:
                ports = [member.port] if each in others else []
            self.network.change(each.place, apart=ports)

    def close(self) -> None:
        """End the members."""
        for member in self.members:
            with suppress(OSError):
                member.close()
        self.network.close()

    def __enter__(self) -> ReplicaSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
