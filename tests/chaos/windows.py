"""The time spans of a run in which faults were in progress, and whom they excuse.

A fault is in progress from its beginning until the recovery from it. A fault of the servers or the
network excuses every wait. A fault of a process excuses this process only, and an open transaction
excuses only calls and waits for the messages that it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

#: Stands for all keys among the ids that a transaction holds.
KEYS_LOCKED = "~keys"
#: The recovery from a fault, if nothing else is known.
RECOVERY_S = 1.0

Span = tuple[float, float]


class Lock(NamedTuple):
    """A transaction of another program that held messages."""

    began: float
    ended: float
    #: Of the messages, and the name of their queue.
    ids: Sequence[str]


class Wait(NamedTuple):
    """A message that could be received from ``since`` to ``until``."""

    id: str
    queue: str
    when: float
    since: float
    until: float


class Scope(NamedTuple):
    """The calls that a fault excuses, and the longest time after its end, in seconds."""

    excuses: Literal["all", "process", "none"] = "none"
    recovery_s: float = RECOVERY_S


class Spans:
    """Time spans, merged where they overlap.

    Args:
        spans: Pairs of beginning and end, in any order.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        merged: list[Span] = []
        for begin, end in sorted(spans):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        self._spans = merged
        self._begins = [begin for begin, _ in merged]
        #: The seconds of the spans before each one.
        self._before = list(accumulate((end - begin for begin, end in merged), initial=0.0))

    def seconds(self, begin: float, end: float) -> float:
        """Return how many seconds between two times the spans cover."""
        return max(0.0, self._until(end) - self._until(begin))

    def _until(self, time: float) -> float:
        place = bisect_right(self._begins, time) - 1
        if place < 0:
            return 0.0
        begin, end = self._spans[place]
        return self._before[place] + min(time, end) - begin

    def within(self, begin: float, end: float) -> list[Span]:
        """Return the parts of the spans that lie between two times."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        last = bisect_right(self._begins, end)
        cut = [(max(begin, a), min(end, b)) for a, b in self._spans[first:last]]
        return [(a, b) for a, b in cut if a <= b]

    def without(self, begin: float, end: float) -> list[Span]:
        """Return the parts between two times that no span covers."""
        found, at = [], begin
        for a, b in self.within(begin, end):
            if a > at:
                found.append((at, a))
            at = max(at, b)
        if at < end:
            found.append((at, end))
        return found

    def plus(self, more: Iterable[Span]) -> Spans:
        """Return these spans and more of them."""
        return Spans([*self._spans, *more])


@dataclass
class Windows:
    """When faults were in progress."""

    #: Any fault.
    faults: Spans = field(default_factory=Spans)
    #: The faults that excuse everybody.
    servers: Spans = field(default_factory=Spans)
    #: The faults of each process, by its name.
    processes: Mapping[str, Spans] = field(default_factory=dict)
    #: When a transaction held each message, by its id.
    locked: Mapping[str, Sequence[Span]] = field(default_factory=dict)

    def excuses(self, process: str, began: float, ended: float) -> bool:
        """Return whether a fault excuses a call of this process."""
        spans = [self.servers, *filter(None, [self.processes.get(process)])]
        return any(each.within(began, ended) for each in spans)


def windows_of(
    events: Sequence[Mapping[str, Any]],
    recovered: Mapping[float, float],
    scopes: Mapping[str, Scope],
    locks: Sequence[Lock] = (),
) -> Windows:
    """Return when the faults of a run were in progress.

    Args:
        events: The faults, with times on the monotonic clock. A fault of a process names the
            process first in "what".
        recovered: For each fault of the servers, by its beginning, the seconds to the first
            successful calls that began after it, as the ledgers show them.
        scopes: The scope of each kind of fault.
        locks: The transactions that held messages.
    """
    faults: list[Span] = []
    servers: list[Span] = []
    processes: dict[str, list[Span]] = defaultdict(list)
    locked: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        kind, at = event["kind"], event["at"]
        scope = scopes[kind]
        seconds = max(event["seconds"], recovered.get(at, 0.0))
        # The step that breaks something takes time, too.
        span = (event.get("began", at), at + seconds + scope.recovery_s)
        faults.append(span)
        if scope.excuses == "all":
            servers.append(span)
        elif scope.excuses == "process":
            processes[event["what"].partition(",")[0]].append(span)
    for lock in locks:
        # A message that was found locked is left out for up to as long as it was locked.
        until = 2 * lock.ended - lock.began + RECOVERY_S
        faults.append((lock.began, until))
        for id in lock.ids:
            locked[id].append((lock.began, until))
    return Windows(
        Spans(faults),
        Spans(servers),
        {name: Spans(spans) for name, spans in processes.items()},
        locked,
    )
