"""Starting and killing drivers: the Python process, its JVM, and the workers of that."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

__all__ = ["SLOW", "answer", "killed", "process", "until"]

ROOT = Path(__file__).parents[2]

#: Far more than a session and a few batches take on a busy machine, in seconds.
SLOW = 300.0


@contextmanager
def process(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[str]]:
    """One of the programs, killed in the end if it still runs, with all that it started."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.programs", *arguments],
        cwd=cwd,
        env=None if env is None else {**env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield started
    finally:
        killed(started)


def killed(started: subprocess.Popen[str]) -> None:
    """Kill a program and all that it started, at one go."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(started.pid)
        family = [parent, *parent.children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        family += [each for each in parent.children(recursive=True) if each not in family]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, timeout=20)
    started.wait()
    if started.stdout is not None:
        started.stdout.close()


def answer(started: subprocess.Popen[str]) -> dict[str, Any]:
    """What a program says in the end."""
    output, _ = started.communicate(timeout=SLOW)
    assert started.returncode == 0, output
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


def until(what: Callable[[], object], running: Any = None) -> None:
    """Wait until it is true, while a program or a query runs."""
    deadline = time.monotonic() + SLOW
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        if isinstance(running, subprocess.Popen):
            assert running.poll() is None, "the process ended"
        elif running is not None:
            assert running.isActive, running.exception()
        time.sleep(0.005)
