"""The hook of telemetry that records which workers and pipelines are running."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache
from importlib import metadata
from typing import Any, Final
from uuid import uuid4

from pyqueue.hooks import Running
from pyqueue.telemetry.storing import Upsert

#: How long the document of a process that died is kept, so that people see that it is silent.
_KEPT_SILENT: Final = timedelta(hours=1)
#: How long the graph of a pipeline is kept after its last run.
_KEPT_GRAPH: Final = timedelta(days=7)
#: The seconds between two measurements of an event loop.
_TURN_S: Final = 0.5


class _Lag:
    """Measures how late the event loop of a run calls its timers.

    A handler that computes for long in the loop delays all other handlers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worst_s = 0.0
        self._set_timer()

    def _set_timer(self) -> None:
        self._due = self._loop.time() + _TURN_S
        self._timer = self._loop.call_at(self._due, self._turn)

    def _turn(self) -> None:
        self._worst_s = max(self._worst_s, self._loop.time() - self._due)
        self._set_timer()

    def take_s(self) -> float:
        """Return the longest delay since the last call, in seconds. Any thread may call it."""
        late_s = self._loop.time() - self._due  # the loop may be blocked now
        worst_s, self._worst_s = max(self._worst_s, late_s), 0.0
        return worst_s

    def end(self) -> None:
        """End the measurement."""
        self._timer.cancel()


class _Run:
    """A run, and the lag of its event loop."""

    def __init__(self, runner: Running) -> None:
        self.runner = runner
        #: The lag of its event loop, or None if it has no event loop.
        self.lag: _Lag | None = None
        with suppress(RuntimeError):
            self.lag = _Lag()


class Presence:
    """Records which workers and pipelines of a client are running.

    Args:
        owner: Returns the label of the client.
        begin: Called when there is something to store.
    """

    def __init__(self, owner: Callable[[], str], begin: Callable[[], object]) -> None:
        self._owner, self._begin = owner, begin
        self.reset()

    def reset(self) -> None:
        """Forget all runs, in a forked child."""
        self._runs: dict[str, _Run] = {}
        #: When each run whose document might be stored was first recorded, keyed by its id.
        self._began: dict[str, datetime] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing runs, and nothing has ended since the last flush."""
        return not self._runs and not self._began

    @contextmanager
    def running(self, runner: Running) -> Iterator[None]:
        """Show a worker or a pipeline as running until the block ends."""
        id = uuid4().hex
        run = self._runs[id] = _Run(runner)
        self._begin()
        try:
            yield
        finally:
            self._runs.pop(id, None)
            if run.lag is not None:
                run.lag.end()

    def ended(self) -> Sequence[str]:
        """Return the ids of the ended runs whose documents might still be stored."""
        return [id for id in list(self._began) if id not in self._runs]

    def forget(self, ended: Sequence[str]) -> None:
        """Forget runs whose documents were deleted."""
        for id in ended:
            self._began.pop(id, None)

    def beats(self, now: datetime, every_s: float) -> list[Upsert]:
        """Return the upserts that record each run, and the graph of each pipeline.

        Args:
            now: The instant of this beat, the sign of life of the runs.
            every_s: The seconds until the next beat.
        """
        upserts: list[Upsert] = []
        for id, run in list(self._runs.items()):
            described = run.runner.describe()
            if described["kind"] == "pipeline":
                upserts.append(_graph(described, now))
            shown = {
                **described,
                **_process(),
                "lag": None if run.lag is None else run.lag.take_s(),
                "owner": self._owner(),
                "started": self._began.setdefault(id, now),
                "beat": now,
                "every": every_s,
                "expires": now + _KEPT_SILENT,
            }
            upserts.append(({"_id": id}, {"$set": shown}))
        return upserts


def _graph(described: dict[str, Any], now: datetime) -> Upsert:
    """Return the upsert that stores a pipeline's graph, to be kept for a week after a run."""
    name = described["name"]
    graph = {"kind": "graph", "name": name, "stages": described["stages"]}
    return {"_id": f"graph {name}"}, {"$set": {**graph, "expires": now + _KEPT_GRAPH}}


def _process() -> dict[str, Any]:
    """Describe this process. ``memory`` is its peak use of memory, in bytes."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": _version(),
        "memory": _peak_memory(),
    }


def _peak_memory() -> int:
    """Return the peak use of memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # other systems count in KiB


@cache
def _version() -> str:
    try:
        return metadata.version("pyqueue-mongo")
    except metadata.PackageNotFoundError:  # run from a checkout
        return ""
