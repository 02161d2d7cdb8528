"""The uses of queues that are deleted when unused, as one client notes them.

The client notes its first use of such a queue at once, and then one use in each quarter of the
queue's ``auto_delete`` time; see ``uses``. As long as a consumer waits, the queue is in use. Notes
are stored in the background, except before a program that gives the option reads the record.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import datetime, timedelta
from threading import Lock

from pyqueue.backends.uses import interval_s, note, seconds_of
from pyqueue.errors import QueueError
from pyqueue.requests import Plan

log = logging.getLogger("pyqueue")


class Uses:
    """When a client next notes its use of each queue that is deleted when unused.

    Args:
        now: Returns the present instant, by the primary's clock.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._lock = Lock()
        #: The queues, each with its ``auto_delete`` in seconds, and when its next use is noted.
        self.queues: dict[str, tuple[float, datetime]] = {}

    def naming(self, queue: str, shape: object) -> Plan[None]:
        """Note a use of a queue by a program that gives ``auto_delete``, if a note is due.

        The first use is noted before the option is stored in the record. Otherwise, if the process
        died in between, the queue would never be deleted.

        Args:
            queue: The name of the queue.
            shape: The shared options that the program gives.
        """
        seconds_s = seconds_of(shape)
        # The client may know the queue before it has noted a use, because it first read its kind.
        if seconds_s is not None and (queue not in self.queues or self.left_s(queue) == 0):
            yield from note(queue, seconds_s)
            self.queues[queue] = seconds_s, self._after(seconds_s)

    def follow(self, queue: str, shape: object) -> None:
        """Learn from the shared options of a queue, ``shape``, whether to note its uses."""
        seconds_s = seconds_of(shape)
        if seconds_s is None:
            self.queues.pop(queue, None)
        elif self.queues.get(queue, (None,))[0] != seconds_s:
            self.queues[queue] = seconds_s, self._now()

    def due(self, queue: str) -> Plan[None] | None:
        """Return the plan that notes that a queue is used, or None if no note is due.

        The next note is then due after a quarter of the queue's ``auto_delete`` time.
        """
        with self._lock:
            known = self.queues.get(queue)
            if known is None or self.left_s(queue) > 0:
                return None
            self.queues[queue] = known[0], self._after(known[0])
        return _noting(queue, known[0])

    def left_s(self, queue: str) -> float:
        """Return in how many seconds the next note of a queue is due, or infinity if never."""
        known = self.queues.get(queue)
        if known is None:
            return math.inf
        left_s = (known[1] - self._now()).total_seconds()
        # A time that is much further ahead comes from a clock that was set back since.
        return left_s if 0 < left_s < interval_s(known[0]) + 1 else 0.0

    def forget_idle(self, idle_s: float) -> None:
        """Forget the queues that this client has not used for this many seconds."""
        since = self._now() - timedelta(seconds=idle_s)
        for queue, (_, at) in list(self.queues.items()):
            if at < since:
                self.queues.pop(queue, None)

    def _after(self, seconds_s: float) -> datetime:
        """Return when the next note is due if a use is noted now."""
        return self._now() + timedelta(seconds=interval_s(seconds_s))


def _noting(queue: str, seconds_s: float) -> Plan[None]:
    try:
        yield from note(queue, seconds_s)
    except QueueError as error:  # the next note is due after a quarter of the time
        log.warning("queue %r: cannot note that it is used: %s", queue, error)
