"""An asyncio bus with blocking methods, so that both twins run the same tests."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from anyio.from_thread import BlockingPortal

from tests.support.processes import ROOT

NOW = datetime(2030, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
#: For an event that comes at once; a slow machine needs longer.
SECONDS = 20.0


class PortalListener:
    """An AsyncListener that blocking code can use."""

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
    """An AsyncBus that blocking code can use."""

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


def expect(listener: Any, when: datetime | None) -> None:
    """Assert that a listener hears an event, and its instant."""
    assert listener.wait(SECONDS)
    assert listener.when == when


def python(code: str, *arguments: str) -> str:
    """Run code in a new process and return its output."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def closing(*buses: Any) -> Iterator[None]:
    """Close buses at the end, whatever happens."""
    try:
        yield
    finally:
        for bus in buses:
            bus.close()
