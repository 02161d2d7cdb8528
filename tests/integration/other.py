"""Another process with a client of its own; it does what it is told, one line after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Other", "other_process"]

_SERVE = """
import sys
from pyqueue import Client
clients = []
def fresh(url, signals):
    clients.append(Client(url, signals=signals))
    return clients[-1].queue("jobs")
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
for client in clients:
    client.close()
"""


class Other:
    """The process; ``fresh(url, signals)`` is the queue "jobs" of a new client there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, statement: str) -> None:
        """Have it do this; returns once it is done."""
        assert self._process.stdin is not None
        print(statement, file=self._process.stdin, flush=True)
        self.expect("done")

    def expect(self, word: str) -> None:
        """Wait until it says this."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert said == word, f"the other process said {said!r}"


@contextmanager
def other_process() -> Iterator[Other]:
    """Start it; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        other = Other(process)
        other.expect("ready")
        yield other
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
