"""The schedule of a run: which fault is active, and when the next one begins."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from pymongo.errors import PyMongoError

from pyqueue.errors import Unavailable
from tests.chaos.cluster import Cluster
from tests.chaos.nemesis import Fault, Injection, in_rounds

# For a fault and the recovery from it. A member whose disk was full replays a minute of writes.
FAULT_TIMEOUT_S = 120.0
PAUSE_S = (2.0, 8.0)  # the shortest and the longest pause between two faults
POLL_S = 0.05

Event = dict[str, Any]


class Schedule:
    """A sequence of faults, one at a time.

    Args:
        faults: The kinds of faults, by name.
        cluster: The cluster that they act on.
        seed: The seed of all choices.
        ready: Returns whether a fault may begin.
        haste: The factor for the lengths of faults.
        pause: The shortest and the longest pause between two faults, in seconds.
        timeout: Seconds that a fault may take.
    """

    def __init__(
        self,
        faults: dict[str, Fault],
        cluster: Cluster,
        seed: str,
        ready: Callable[[], bool],
        haste: float,
        pause: tuple[float, float],
        *,
        timeout: float = FAULT_TIMEOUT_S,
    ) -> None:
        self._cluster, self._ready, self._haste, self._pause = cluster, ready, haste, pause
        self._timeout = timeout
        self._dice = random.Random(seed)
        self._faults, self._kinds = in_rounds(faults, self._dice), len(faults)
        self._injection: Injection | None = None
        self._due = self._began = time.monotonic()
        #: The faults so far: "kind", "began" (the first step), and "at" (when it was broken),
        #: "seconds" and "what" when they are known.
        self.events: list[Event] = []
        #: The name of the active fault.
        self.active = ""

    @property
    def rounds(self) -> int:
        """How often each kind of fault has been injected."""
        return (len(self.events) - bool(self.active)) // max(self._kinds, 1)

    def step(self, *, more: bool) -> bool:
        """Take the next step if it is due.

        Args:
            more: Whether a new fault may begin.

        Returns:
            Whether a fault is active.

        Raises:
            Unavailable: A fault failed, or took too long.
        """
        now = time.monotonic()
        if now >= self._due:
            if self._injection is None:
                self._begin(more)
            if self._injection is not None:
                self._advance(self._injection)
            if self._injection is not None and now - self._began > self._timeout:
                state = self._cluster.servers.state()
                raise Unavailable(f"{self.active}: not over after {self._timeout:.0f} s; {state}")
        return self._injection is not None

    def _begin(self, more: bool) -> None:
        if more and self._kinds and self._ready():
            self.active, fault = next(self._faults)
            self._began = time.monotonic()
            self._injection = fault(self._cluster, self._dice)
            self.events.append({"kind": self.active, "began": self._began})

    def _advance(self, injection: Injection) -> None:
        try:
            seconds = next(injection)
            # Only now something is broken: calls that began before do not count as recovery.
            self.events[-1].setdefault("at", time.monotonic())
            self._due = time.monotonic() + (POLL_S if seconds is None else seconds * self._haste)
        except PyMongoError as error:
            raise Unavailable(f"{self.active}: {error}") from error
        except StopIteration as stop:
            ended = time.monotonic()
            at = self.events[-1].setdefault("at", ended)
            self.events[-1] |= {"seconds": ended - at, "what": stop.value}
            self._due = ended + self._dice.uniform(*self._pause)
            self._injection, self.active = None, ""
