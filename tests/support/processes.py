"""Other processes: programs that a test starts and kills, and a second Python with a client."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from pyqueue import Client, Reservation

#: The root of the repository.
ROOT = Path(__file__).parents[2]


@contextmanager
def program(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    stderr: int | None = None,
    new_session: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Run this Python with these arguments; kill it at the end, with all processes it started.

    Args:
        arguments: For example ``"-m", "tests.pipeline.stages", "slow"``.
        env: The environment; None: the tests' own.
        cwd: The directory it runs in.
        stderr: As ``subprocess.Popen`` takes it; None lets pytest show it.
        new_session: Whether it leads its own session, out of reach of the terminal.
    """
    started = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=None if env is None else {**env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=new_session,
    )
    try:
        yield started
    finally:
        kill_tree(started)


def kill_tree(started: subprocess.Popen[str]) -> None:
    """Kill a program and everything that it started, and close its pipes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(started.pid)
        # Stopped first, so that none of them can start another or clean up after a sibling.
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
    for pipe in (started.stdout, started.stderr):
        if pipe is not None:
            pipe.close()


def gone(process: psutil.Process) -> bool:
    """Return whether a process has ended, be it reaped or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def last_json(started: subprocess.Popen[str], timeout: float = 300.0) -> dict[str, Any]:
    """Wait until a program ends well; return the JSON object of its last line."""
    output, _ = started.communicate(timeout=timeout)
    assert started.returncode == 0, output
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def spawn_pool(processes: int) -> ProcessPoolExecutor:
    """Return a pool of fresh processes: none of them is a fork of the tests' process."""
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"))


# ---- functions that such a pool can run


def open_and_use(url: str, payload: Any) -> Any:
    """Open the namespace, push one message and receive one; return its payload."""
    with Client(url) as client:
        queue = client.queue("jobs")
        queue.push(payload)
        reservation = queue.reserve(20)
        assert reservation is not None
        queue.commit(reservation)
        return reservation.payload


def settle(url: str, reservation: Reservation[Any]) -> str:
    """Extend and commit a message that another process reserved; return its owner."""
    with Client(url) as client:
        queue = client.queue(reservation.queue)
        queue.extend(reservation)
        queue.commit(reservation)
        return reservation.owner


# ---- a process that does one statement after the other

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


class Peer:
    """A second process. In its statements, ``fresh(url, signals)`` is "jobs" of a new client."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, statement: str) -> None:
        """Run a statement there; return once it is done."""
        assert self._process.stdin is not None
        print(statement, file=self._process.stdin, flush=True)
        self.expect("done")

    def expect(self, word: str) -> None:
        """Wait until the process prints this word."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert said == word, f"the second process said {said!r}"


@contextmanager
def peer_process() -> Iterator[Peer]:
    """Start a second process; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        peer = Peer(process)
        peer.expect("ready")
        yield peer
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
