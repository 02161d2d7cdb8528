"""The processes of the suite: how the program starts, tells and ends them, and how one of them begins.

Each is ``python -m tests.chaos.roles ROLE``. The first line of its standard input says what it is to know, each further one is an order; all
lines are JSON. The kernel kills it when the thread that started it ends, so that one that is suspended does not outlive the program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyqueue import _watchdog
from pyqueue.errors import QueueError

__all__ = ["Process", "begin"]

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0  # seconds for a process to end when it was told to


class Process:
    """A process of the suite, as the program holds it."""

    def __init__(
        self, role: str, folder: Path, spec: dict[str, Any], name: str | None = None
    ) -> None:
        self.role = role
        self.name = name or role
        self._errors = folder / f"{self.name}.stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.chaos.roles", role],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C is for the program
            )
        self.suspended = False
        self.tell({"parent": os.getpid(), **spec})

    def tell(self, order: object) -> None:
        """Give it an order, without waiting; one that has ended hears nothing."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def hear(self) -> Any:
        """Wait for the next line it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self.failure()
        return json.loads(line)

    def check(self) -> None:
        """Raise QueueError if it ended by itself."""
        if self._process.poll() is not None:
            raise self.failure()

    def failure(self) -> QueueError:
        """That it ended by itself, and what it said to that."""
        self.kill()
        said = self._errors.read_text(errors="replace").strip()
        return QueueError(
            f"{self.name} ended by itself, with status {self._process.returncode}: {said[-2000:]}"
        )

    def suspend(self) -> None:
        """Stop it where it stands."""
        self._process.send_signal(signal.SIGSTOP)
        self.suspended = True

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)
        self.suspended = False

    def end(self) -> None:
        """Wait for it to end by itself, well; it was told to."""
        try:
            status = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise QueueError(f"{self.name} did not end when it was told to") from None
        if status:
            raise self.failure()
        self._close()

    def kill(self) -> None:
        """End it by SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(BrokenPipeError):
                pipe.close()


def begin(roles: dict[str, Callable[[dict[str, Any]], None]]) -> None:
    """Be a process of the suite: take the role that the command line names."""
    spec = json.loads(sys.stdin.readline())
    _watchdog.die_with_parent(spec["parent"])
    roles[sys.argv[1]](spec)
