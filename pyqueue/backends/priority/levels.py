"""The levels of a queue with priorities: where the scan of each begins, and which comes next.

A level is one range of the index ``prior``. A scan takes ready messages from the highest level
down, with one filter that has a branch for each level in use. Each level has its own scan start,
as a queue without levels has; see ``scan``. At the end of each level, deleted index entries would
slow a scan down. So the index contains a *level record* there: a document like the record of the
queue, whose ``when`` is kept a second or two ahead of now.

One scan in ``LOOKS_PER_AGE_LOOK`` goes by age over all levels, so that no level starves.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pyqueue.backends.kind import Kind, Ordering, ScanStart
from pyqueue.backends.scan import FIRST, Memory, Scanned
from pyqueue.backends.transitions import level_record_id
from pyqueue.documents import listed_levels
from pyqueue.requests import Filter, Sort

#: The name of the index for claims by level, and its keys.
PRIOR: Final = "prior"
PRIOR_KEYS: Final = (("q", 1), ("priority", -1), ("when", 1), ("_id", 1))
#: The order of claims by level.
LEVEL_ORDER: Final[Sort] = (("priority", -1), ("when", 1), ("_id", 1))
#: One scan in this number of scans goes by age.
LOOKS_PER_AGE_LOOK: Final = 16


def ready_by_level(
    queue: str, levels: Sequence[int], now: datetime, starts: Mapping[int, ScanStart] | None = None
) -> Filter:
    """Return the filter that matches ready messages in these levels, each from its start on."""
    found = starts or {}
    return {
        "$or": [
            branch for level in levels for branch in _branches(queue, level, now, found.get(level))
        ]
    }


def _branches(queue: str, level: int, now: datetime, start: ScanStart | None) -> list[Filter]:
    place = {"q": queue, "priority": level}
    messages = {"_id": {"$ne": level_record_id(queue, level)}}
    if start is None:
        return [{**place, "when": {"$lte": now}, **messages}]
    when, id = start
    if id is None:
        return [{**place, "when": {"$gte": when, "$lte": now}, **messages}]
    after: list[Filter] = [{**place, "when": when, "_id": {"$gt": id, **messages["_id"]}}]
    if isinstance(id, str):  # $gt compares within one type, and every ObjectId follows every str
        after.append({**place, "when": when, "_id": {"$type": "objectId"}})
    return [*after, {**place, "when": {"$gt": when, "$lte": now}, **messages}]


@dataclass(slots=True)
class LevelStarts(Memory):
    """One process's knowledge of the levels of a queue, and the order of claims by level."""

    # One command scans the levels one after the other.
    in_ranges: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, int]] = MappingProxyType({"priority": 1})
    #: The levels in use that the record lists, highest first.
    in_use: tuple[int, ...] = ()
    #: Whether no claim scans by age; see ``Priority.shape``.
    strict: bool = False
    #: Where the scan of each level starts: no message is known below. A missing start is the first.
    starts: dict[int, ScanStart] = field(default_factory=dict)
    #: Where the next search for messages without a listed level continues, or None: at the start.
    walked_to: ScanStart | None = None
    #: The number of rescans begun.
    rescans: int = 0
    _looks: int = 0

    def follow(self, record: Mapping[str, Any]) -> None:
        """Learn from the record of the queue."""
        shape = record.get("shape")
        self.in_use = listed_levels(record.get("levels"))
        self.strict = isinstance(shape, Mapping) and shape.get("strict") is True

    def begin_rescan(self) -> bool:
        """Make the next scans start from the beginning. Return False if no level is in use."""
        if not self.in_use:
            return False
        self.starts = {}
        self.rescans += 1
        return True

    def is_age_turn(self) -> bool:
        """Count a scan. Return whether it goes by age."""
        self._looks += 1
        return self._looks % LOOKS_PER_AGE_LOOK == 0

    def ordering(self, kind: Kind) -> Ordering:
        """Return the order of claims by level, and the index that provides it."""
        return Ordering(LEVEL_ORDER, PRIOR)

    def start(self) -> ScanStart | None:
        """Return a start before every message, because each level has its own start."""
        return FIRST, None  # None alone would mean a rescan

    def claimable(self, kind: Kind, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches the messages that may be claimed by level."""
        return ready_by_level(queue, self.in_use, now, self.starts)

    def learn(self, seen: Scanned, margin: ScanStart) -> None:
        """Set the starts of levels after a scan. Producers may still insert above ``margin``."""
        level, place = None if seen.ended else seen.level, seen.last
        starts = dict(self.starts)
        for each in self.in_use:
            if level is None or (isinstance(level, (int, float)) and each > level):
                starts[each] = margin  # the scan went through all of this level
            elif each == level and place is not None:
                starts[each] = place if place[0] < margin[0] else margin
        self.starts = starts  # replaced, not changed, because threads share it

    def records(self, queue: str) -> Sequence[str]:
        """Return the ids of the level records."""
        return [level_record_id(queue, level) for level in self.in_use]

    def move_back(self, when: datetime) -> None:
        """Make the next scan find messages from ``when`` on, in any level."""
        if not self.starts:
            return
        starts = dict(self.starts)
        for level, start in starts.items():
            if when <= start[0]:
                starts[level] = (when, None)
        self.starts = starts
