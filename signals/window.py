"""Decides which events are sent now and which wait for the end of a short window, merged into one.

A burst of pushes must not become a burst of wake-ups, and no wake-up may be lost to the merging. So the first event of
a topic goes at once (the leading edge), those that follow within the window are merged, and what was merged goes when
the window closes (the trailing edge). This module must never drop an event, however like an earlier one it looks: who
was woken by the first may have looked before the second message was stored. It reads no clock and does no I/O.
"""

import heapq
from datetime import datetime


def earliest(one: datetime | None, other: datetime | None) -> datetime | None:
    """Merge the instants of two events: None ("read the record and look") wins, else the earlier one."""
    return None if one is None or other is None else min(one, other)


class Window:
    """Merges the events of each topic so that at most one is sent per window.

    `seconds` is the window's length. Every `now` is in seconds of one clock that never goes backwards.
    """

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds
        self._ends: dict[
            str, float
        ] = {}  # the open windows; all are equally long, so this is in order of end
        self._held: dict[str, datetime | None] = {}
        self._trailing: list[tuple[float, str]] = []  # heap: when each held topic goes

    def __len__(self) -> int:
        """How many topics are held back."""
        return len(self._held)

    def offer(self, topic: str, when: datetime | None, now: float) -> bool:
        """Take an event. True: send it now. False: it is held, and `due` gives it out when the window closes."""
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
        """Give out what was held back by windows that are over. Each opens its topic's next window."""
        events = []
        while self._trailing and self._trailing[0][0] <= now:
            topic = heapq.heappop(self._trailing)[1]
            events.append((topic, self._held.pop(topic)))
            self._open(topic, now)
        self._forget(now)
        return events

    def next(self, now: float) -> float | None:
        """Seconds until something is due (0 if it is already), or None while nothing is held back."""
        return max(0.0, self._trailing[0][0] - now) if self._trailing else None

    def flush(self) -> list[tuple[str, datetime | None]]:
        """Give out all that is held back, without waiting for any window: for closing."""
        events = list(self._held.items())
        self._held.clear()
        self._trailing.clear()
        return events

    def _open(self, topic: str, now: float) -> None:
        self._ends.pop(topic, None)  # put back at the end: keeps the order
        self._ends[topic] = now + self.seconds

    def _forget(self, now: float) -> None:
        while self._ends:
            topic = next(iter(self._ends))
            if self._ends[topic] > now or topic in self._held:
                return
            del self._ends[topic]
