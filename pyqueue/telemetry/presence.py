"""The hook of telemetry that notes which workers and pipelines run."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


class Presence:
    """Notes which workers and pipelines of a client run.

    Args:
        owner: Returns the label of the client.
        begin: Called when there is something to store.
    """

    def __init__(self, owner: Callable[[], str], begin: Callable[[], object]) -> None:
        self._owner, self._begin = owner, begin
        self.reset()

    def reset(self) -> None:
        """Forget everything, in a forked child."""
        self._runs: dict[str, Running] = {}
        #: When the runs that may be stored were first noted, by id.
        self._began: dict[str, datetime] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing runs, and nothing has ended since the last flush."""
        return not self._runs and not self._began

    @contextmanager
    def running(self, runner: Running) -> Iterator[None]:
        """Note that a worker or a pipeline runs, until the block ends."""
        id = uuid4().hex
        self._runs[id] = runner
        self._begin()
        try:
            yield
        finally:
            self._runs.pop(id, None)

    def ended(self) -> Sequence[str]:
        """Return the ids of the runs that have ended and may still be stored."""
        return [id for id in list(self._began) if id not in self._runs]

    def forget(self, ended: Sequence[str]) -> None:
        """Forget runs whose documents were deleted."""
        for id in ended:
            self._began.pop(id, None)

    def beats(self, now: datetime, every_s: float) -> list[Upsert]:
        """Return the upserts that show the runs.

        Args:
            now: The instant of the beat.
            every_s: The seconds until the next beat.
        """
        upserts: list[Upsert] = []
        for id, runner in list(self._runs.items()):
            described = runner.describe()
            if described["kind"] == "pipeline":
                upserts.append(_graph(described, now))
            shown = {
                **described,
                **_process(),
                "owner": self._owner(),
                "started": self._began.setdefault(id, now),
                "beat": now,
                "every": every_s,
                "expires": now + _KEPT_SILENT,
            }
            upserts.append(({"_id": id}, {"$set": shown}))
        return upserts


def _graph(described: dict[str, Any], now: datetime) -> Upsert:
    """Return the upsert that keeps the graph of a pipeline, also while it does not run."""
    name = described["name"]
    graph = {"kind": "graph", "name": name, "stages": described["stages"]}
    return {"_id": f"graph {name}"}, {"$set": {**graph, "expires": now + _KEPT_GRAPH}}


def _process() -> dict[str, Any]:
    """Describe this process. ``memory`` is the most that it has used, in bytes."""
    used_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": _version(),
        "memory": used_kb * 1024,
    }


@cache
def _version() -> str:
    try:
        return metadata.version("pyqueue-mongo")
    except metadata.PackageNotFoundError:  # run from a checkout
        return ""
