"""The check of a schedule: each of its ticks pushes one message, whichever processes run.

The change log shows each decision of the schedule: the tick that it had, and the next one. The ids
of messages name their ticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from tests.chaos.names import TICKS

Line = list[Any]
#: The schedule of the workload, and the seconds between two of its ticks.
SCHEDULE: Final = "beat"
EVERY_S: Final = 2
#: How many ticks that were missed get a message.
_MOST_MISSED = 100


class Ticks:
    """The decisions and the messages of schedules, as the change log shows them."""

    def __init__(self) -> None:
        #: The next tick of each schedule, in milliseconds; None: it is paused.
        self._next: dict[str, int | None] = {}
        #: How many messages each tick must have, and how many it has.
        self._due: Counter[str] = Counter()
        self._came: Counter[str] = Counter()

    def add(self, line: Line) -> bool:
        """Learn from a line. Return whether it is about a schedule."""
        kind, id, *rest = line
        if kind == "tick":
            self._decided(id, rest[0])
            return True
        if kind == "in" and rest[0] == TICKS:
            self._came[id.rpartition(":")[0]] += 1
        return False

    def _decided(self, id: str, put: Mapping[str, Any]) -> None:
        if "gone" in put:
            self._next.pop(id, None)
            return
        tick, following = self._next.get(id), put.get("when")
        if "last" in put and tick is not None and following is not None:
            ticks = range(tick, following, EVERY_S * 1000)
            self._due.update(_name(id, each) for each in ticks[-_MOST_MISSED:])
        if "when" in put:
            self._next[id] = following

    def check(self) -> dict[str, list[str]]:
        """Return the ticks with too few and with too many messages, in words."""
        every = sorted(self._due.keys() | self._came.keys())
        return {
            "lost": [
                f"{tick}: the tick was decided, but its message was never stored"
                for tick in every
                if self._came[tick] < self._due[tick]
            ],
            "settled_twice": [
                f"{tick}: {self._came[tick]} messages were stored for {self._due[tick]} ticks"
                for tick in every
                if self._came[tick] > self._due[tick]
            ],
        }


def _name(id: str, tick: int) -> str:
    """Return how the ids of the messages of a tick begin."""
    instant = datetime.fromtimestamp(tick / 1000, UTC)
    return f"{id.removeprefix('~')}:{instant:%Y%m%dT%H%M%SZ}"
