"""Run the programs of ``tests.spark.programs``, and wait for them and for queries."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.processes import ROOT, program

#: Far more than a session and a few batches take on a busy machine, in seconds.
SLOW_S = 900.0


def spark_program(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a program; kill it at the end with its JVM and all workers.

    If the test fails, pytest shows the program's standard error.
    """
    return program("-m", "tests.spark.programs", *arguments, env=env, cwd=cwd)


def build_wheel(directory: Path) -> Path:
    """Build the wheel of the packages in a directory; return its path."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = directory.glob("*.whl")
    return wheel


def spark_eventually(condition: Callable[[], object], what: str, running: Any = None) -> None:
    """Wait until the condition holds. Fail if the program or the query ends before.

    The condition is checked rarely, because Spark needs the cores.
    """

    def checked() -> object:
        time.sleep(0.05)
        return condition()

    def alive() -> bool:
        if running is None:
            return True
        if isinstance(running, subprocess.Popen):
            return running.poll() is None
        if running.isActive:
            return True
        raise AssertionError(running.exception())

    eventually(checked, what, seconds=SLOW_S, alive=alive)
