"""The figures that telemetry keeps in memory: numbers of messages, and how long things took."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from typing import Final

#: The numbers of messages that are counted.
COUNTS: Final = (
    *("pushed", "received", "finished", "moved", "retried", "released", "dead", "lost"),
    *("cancelled", "expired"),
)
#: The times that are measured: from eligible to received, from received to settled, and from the
#: first push to the end.
TIMES: Final = ("waiting", "working", "end_to_end")
#: The upper bounds of the buckets of histograms, in seconds. One more bucket has no bound.
BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
#: How many targets of moves are counted separately for one queue.
MAX_TARGETS: Final = 50
#: The name under which everything beyond a limit is counted. No queue has this name.
OTHER: Final = "~other"


class Histogram:
    """The distribution of a duration."""

    __slots__ = ("numbers", "seconds")

    def __init__(self) -> None:
        #: How many values each bucket has; the last bucket is for values above all bounds.
        self.numbers = [0] * (len(BOUNDS_S) + 1)
        #: The sum of the values.
        self.seconds = 0.0

    def add(self, seconds: float, number: int = 1) -> None:
        """Add a value, ``number`` times. Negative values count as 0."""
        seconds = max(0.0, seconds)
        self.numbers[bisect_left(BOUNDS_S, seconds)] += number
        self.seconds += seconds * number

    def add_since(self, instants: Iterable[datetime], now: datetime) -> None:
        """Add the time from each instant until now. Neighbors often share an instant."""
        for instant, run in groupby(instants):
            self.add((now - instant).total_seconds(), sum(1 for _ in run))


class Figures:
    """The figures of one queue."""

    __slots__ = ("counts", "moved", "times")

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        #: The numbers of moved messages, keyed by target.
        self.moved: defaultdict[str, int] = defaultdict(int)
        self.times = {name: Histogram() for name in TIMES}

    def move(self, target: str, number: int) -> None:
        """Count messages that moved to a target."""
        if target not in self.moved and len(self.moved) >= MAX_TARGETS:
            target = OTHER
        self.moved[target] += number


def quantile(numbers: Sequence[int], share: float) -> float | None:
    """Return the time below which a share of the values of a histogram lies, in seconds.

    The time is interpolated within its bucket, so it is an estimate. Values above all bounds count
    as the last bound.

    Args:
        numbers: How many values each bucket has.
        share: The share of the values, from 0 to 1.

    Returns:
        The time, or None if there are no values.
    """
    total = sum(numbers)
    if not total:
        return None
    rank, below, lower = share * total, 0, 0.0
    for number, bound in zip(numbers, BOUNDS_S, strict=False):
        if number and below + number >= rank:
            return lower + (bound - lower) * (rank - below) / number
        below += number
        lower = bound
    return BOUNDS_S[-1]
