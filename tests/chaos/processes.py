"""The processes of the fault suite: how the program starts, controls and ends them.

Each runs ``python -m tests.chaos.roles ROLE``. The first line of its standard input is its
specification, each further line is an order. All lines are JSON. The kernel kills the process when
the thread that started it ends, so that a suspended process does not outlive the program.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pyqueue import _watchdog
from pyqueue.errors import QueueError

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 60.0


class Process:
    """A process of the suite, controlled by the program.

    Args:
        role: A role of ``roles``.
        folder: A folder for its standard error.
        spec: The arguments of the role, as JSON.
        name: Its name in errors; the role if None.
    """

    def __init__(
        self, role: str, folder: Path, spec: dict[str, Any], name: str | None = None
    ) -> None:
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
                start_new_session=True,  # Ctrl-C must reach only the program
            )
        self.suspended = False
        self.send({"parent": os.getpid(), **spec})

    def send(self, order: object) -> None:
        """Send an order without waiting. A process that has ended ignores it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    @property
    def has_printed(self) -> bool:
        """Whether ``receive`` has something to return, or an error to raise, at once."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def receive(self) -> Any:
        """Wait for the next line that the process prints and return its value."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def check(self) -> None:
        """Raise QueueError if the process has ended."""
        if self._process.poll() is not None:
            raise self._failure()

    def _failure(self) -> QueueError:
        self.kill()
        errors = self._errors.read_text(errors="replace").strip()
        return QueueError(
            f"{self.name} ended early with status {self._process.returncode}: {errors[-2000:]}"
        )

    def suspend(self) -> None:
        """Stop the process by SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)
        self.suspended = True

    @property
    def is_stopped(self) -> bool:
        """Whether the process is suspended now, by whatever sent it SIGSTOP."""
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:  # it has ended
            return False
        return state.rpartition(")")[2].split()[0] in "Tt"

    def resume(self) -> None:
        """Continue the suspended process."""
        self._process.send_signal(signal.SIGCONT)
        self.suspended = False

    def wait(self, timeout: float = END_TIMEOUT_S) -> None:
        """Wait until the process ends with status 0.

        Args:
            timeout: Seconds to wait.

        Raises:
            QueueError: The process did not end in time, or failed.
        """
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise QueueError(f"{self.name} did not end within {timeout:g} s") from None
        if status:
            raise self._failure()
        self._close()

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(BrokenPipeError):
                pipe.close()


def start_role(roles: dict[str, tuple[str, str]]) -> None:
    """Run the role that the command line names, in a process that ``Process`` started."""
    spec = json.loads(sys.stdin.readline())
    _watchdog.die_with_parent(spec["parent"])
    module, function = roles[sys.argv[1]]
    getattr(import_module(f"tests.chaos.{module}"), function)(spec)
