"""Decides which events are sent now and which are merged and sent when a short window closes.

A burst of pushes must not become a burst of wake-ups, and merging must not lose a wake-up.

- The first event of a topic is sent at once (the leading edge) and opens the topic's window.
- Later events of that topic are merged until the window closes.
- Then the merged event is sent (the trailing edge) and opens the next window.

An event is never dropped, even if it equals an earlier one: the consumer that the earlier event
woke may have looked before the second message was stored.

This module reads no clock and does no I/O.
"""

import heapq
from datetime import datetime


def earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    """Merge the instants of two events: None ("read the record") wins, else the earlier one."""
    return None if one is None or other is None else min(one, other)


class Window:
    """Merges the events of each topic so that at most one is sent per window.

    Args:
        seconds: the length of the window. Every ``now`` is in seconds of one monotonic clock.
    """

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds
        # Open windows by topic. All have one length, so the order of opening is the order of end.
        self._ends: dict[str, float] = {}
        self._held: dict[str, datetime | None] = {}
        self._trailing: list[tuple[float, str]] = []  # heap: when each held topic is due

    def __len__(self) -> int:
        """Return how many topics are held back."""
        return len(self._held)

    def offer(self, topic: str, when: datetime | None, now: float) -> bool:
        """Take an event. Return True to send it now, False if it is held back until ``due``."""
        self._forget(now)
        if topic in self._held:
            self._held[topic] = earliest(self._held[topic], when)
            return False
        end = self._ends.get(topic)
        if end is None or end <= now:
            self._open(topic, now)
            return True
        self._held[topic] = when
        heapq.heappush(self._trailing, (end, topic))
        return False

    def due(self, now: float) -> list[tuple[str, datetime | None]]:
        """Return the events whose windows have closed. Each opens the next window of its topic."""
        events = []
        while self._trailing and self._trailing[0][0] <= now:
            topic = heapq.heappop(self._trailing)[1]
            events.append((topic, self._held.pop(topic)))
            self._open(topic, now)
        self._forget(now)
        return events

    def next(self, now: float) -> float | None:
        """Return the seconds until an event is due (0: now), or None if none is held back."""
        return max(0.0, self._trailing[0][0] - now) if self._trailing else None

    def flush(self) -> list[tuple[str, datetime | None]]:
        """Return every event that is held back, without waiting for its window: for closing."""
        events = list(self._held.items())
        self._held.clear()
        self._trailing.clear()
        return events

    def _open(self, topic: str, now: float) -> None:
        self._ends.pop(topic, None)  # reinserted at the end, which keeps the order
        self._ends[topic] = now + self.seconds

    def _forget(self, now: float) -> None:
        while self._ends:
            topic = next(iter(self._ends))
            if self._ends[topic] > now or topic in self._held:
                return
            del self._ends[topic]
