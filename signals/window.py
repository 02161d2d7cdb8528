"""Decides which events are sent now, and which are merged and sent when a short window closes.

A flood of pushes must not become a flood of wake-ups, and merging must not lose a wake-up.

- The first event of a topic is sent at once and opens the topic's window.
- A few more events may follow at once in that window. They are the topic's burst.
- Events beyond the burst are merged until the window closes.
- Then the merged event is sent (the trailing edge) and opens the next window, without a burst.
- The burst is available again after a whole window in which nothing was merged. If the burst were
  refilled steadily, a flood would send many times as many events.

An event is never dropped, even if it equals an earlier one: the consumer that the earlier event
woke may have checked its queue before the second message was stored.

This module reads no clock and does no I/O.
"""

import heapq
from datetime import datetime


def earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    """Return the earlier instant of two events, or None ("read the record") if either is None."""
    return None if one is None or other is None else min(one, other)


class Window:
    """Merges the events of each topic, so that in a flood one event is sent per window.

    Args:
        seconds: The length of the window. Every ``now`` is in seconds of one monotonic clock.
        burst: How many events of a topic are sent at once, after a quiet window, before merging
            begins.
    """

    def __init__(self, seconds: float = 0.05, burst: int = 8) -> None:
        self.seconds = seconds
        self.burst = burst
        # Open windows, keyed by topic: the end, and how many more events may be sent before it. All
        # windows have the same length, so they end in the order in which they were opened.
        self._open: dict[str, tuple[float, int]] = {}
        self._held: dict[str, datetime | None] = {}
        self._trailing: list[tuple[float, str]] = []  # heap: when each held topic is due

    def __len__(self) -> int:
        """Return how many topics are held back."""
        return len(self._held)

    def offer(self, topic: str, when: datetime | None, now: float) -> bool:
        """Take an event. Return True if it is to be sent now, False if ``due`` returns it later."""
        self._forget(now)
        if topic in self._held:
            self._held[topic] = earliest(self._held[topic], when)
            return False
        end, left = self._open.get(topic, (now, 0))
        if end <= now:
            self._start(topic, now, self.burst - 1)
            return True
        if left:
            self._open[topic] = (end, left - 1)
            return True
        self._held[topic] = when
        heapq.heappush(self._trailing, (end, topic))
        return False

    def due(self, now: float) -> list[tuple[str, datetime | None]]:
        """Return the events whose windows have closed. Each event opens its topic's next window."""
        events = []
        while self._trailing and self._trailing[0][0] <= now:
            topic = heapq.heappop(self._trailing)[1]
            events.append((topic, self._held.pop(topic)))
            self._start(topic, now, 0)
        self._forget(now)
        return events

    def next(self, now: float) -> float | None:
        """Return the seconds until the next held event is due, or None if there is none."""
        return max(0.0, self._trailing[0][0] - now) if self._trailing else None

    def flush(self) -> list[tuple[str, datetime | None]]:
        """Return every event that is held back, without waiting for its window, to close a bus."""
        events = list(self._held.items())
        self._held.clear()
        self._trailing.clear()
        return events

    def _start(self, topic: str, now: float, left: int) -> None:
        self._open.pop(topic, None)  # inserted again at the end, which keeps the order
        self._open[topic] = (now + self.seconds, left)

    def _forget(self, now: float) -> None:
        while self._open:
            topic = next(iter(self._open))
            if self._open[topic][0] > now or topic in self._held:
                return
            del self._open[topic]
