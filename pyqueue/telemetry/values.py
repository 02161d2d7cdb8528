"""The values that ``Queue.stats`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took, in seconds.

    The percentiles are estimates from histograms. If nothing was measured, the percentiles and the
    mean are None.
    """

    #: How many messages were measured.
    count: int = 0
    mean: float | None = None
    #: The times that 50 %, 95 % and 99 % of the messages did not exceed.
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The figures of a queue over a period, as ``Queue.stats`` returns them."""

    queue: str
    #: The beginning and the end of the period.
    since: datetime
    until: datetime
    #: How many messages were pushed, received, finished, moved, retried, released, dead (buried),
    #: lost, cancelled and expired.
    counts: Mapping[str, int]
    #: How many messages moved to other queues, keyed by queue.
    moved: Mapping[str, int]
    #: From the time at which a message was eligible until it was received.
    waiting: Latency
    #: From its receipt until it was settled.
    working: Latency
    #: From the first push until it was finished.
    end_to_end: Latency
    #: The counts of each minute, or of each hour if the period is longer than a day, keyed by its
    #: beginning. Counts that are 0 are missing, and so are minutes in which nothing happened.
    points: Mapping[datetime, Mapping[str, int]]

    @property
    def seconds(self) -> float:
        """The length of the period in seconds."""
        return (self.until - self.since).total_seconds()

    def rate(self, name: str) -> float:
        """Return a count as a rate per second.

        Args:
            name: A name of ``counts``, such as "pushed".
        """
        return self.counts[name] / self.seconds if self.seconds > 0 else 0.0
