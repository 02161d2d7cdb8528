"""The consumers of a queue that wait in one client: a leader and its followers.

The leader listens to the bus and watches the time. The followers sleep until they are woken. A
consumer that stops receiving wakes the next follower, unless there is a leader. So one push wakes
one consumer, and no wake-up is lost when a consumer leaves. This module does no I/O; the drivers
wait.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from threading import Lock
from typing import Final

from pyqueue.backends.invalid import Misfits
from pyqueue.backends.receiving import Prepared
from pyqueue.backends.recovering import Recovery, Sweep, recover_next
from pyqueue.backends.scan import ScanState
from pyqueue.clock import Clock
from pyqueue.requests import Plan, Wait

#: The maximum number of consumers that are woken when one consumer finds a message.
_MAX_BURST: Final = 64


class Waiters:
    """The waiting consumers of one queue in one client, and the client's knowledge of the queue.

    Args:
        topic: The topic of the queue on the bus.
        count_misfit: A function that is called for each claimed message that cannot be delivered.
        sweep: The time of the next upkeep, which all queues of the client share. None creates it.
        poll_share: After which part of ``poll`` the consumers check the queue.
    """

    def __init__(
        self,
        topic: str,
        count_misfit: Callable[[], object] | None = None,
        sweep: Sweep | None = None,
        poll_share: float = 1.0,
    ) -> None:
        self.topic = topic
        self.poll_share = poll_share
        #: The messages that consumers claimed but could not deliver.
        self.misfits = Misfits(count_misfit)
        #: Where the next scan of the queue starts.
        self.scan = ScanState()
        #: The values that the last receive prepared, which the next receive may use again.
        self.prepared: Prepared | None = None
        self._recovery = Recovery(sweep or Sweep())
        #: When this object was last used, by the monotonic clock.
        self.used = 0.0
        self._lock = Lock()
        self._has_leader = False
        #: Until when the leader waits.
        self._until: datetime | None = None
        #: Until when a follower waits, if one watches an earlier time than the leader.
        self._guarded: datetime | None = None
        self._burst = 1
        self._followers: OrderedDict[Callable[[], object], None] = OrderedDict()

    @property
    def has_leader(self) -> bool:
        """Whether there is a leader."""
        return self._has_leader

    @property
    def count(self) -> int:
        """How many consumers wait, including the leader."""
        return int(self._has_leader) + len(self._followers)

    def upkeep(self, queue: str, now: datetime) -> Plan[None]:
        """Finish operations that dead processes left unfinished, if this is due."""
        return recover_next(queue, self._recovery, now)

    def needs_upkeep(self, now: datetime) -> bool:
        """Return whether ``upkeep`` has something to do."""
        return self._recovery.is_due(now)

    def enter(self, wake: Callable[[], object], until: datetime) -> bool:
        """Start waiting. Return True if the caller is the leader, which listens until ``until``.

        Return False for a follower; ``wake`` is called when its turn comes.
        """
        with self._lock:
            self._burst = 1  # a consumer waits only after it found nothing
            if self._has_leader:
                self._followers[wake] = None
                return False
            self._has_leader, self._until = True, until
            return True

    def guard(self, until: datetime) -> bool:
        """Return whether this follower must watch for ``until``: no consumer watches that early."""
        with self._lock:
            if any(kept is not None and kept <= until for kept in (self._until, self._guarded)):
                return False
            self._guarded = until
            return True

    def leave(self, wake: Callable[[], object], led: bool, guards: bool = False) -> None:
        """Stop waiting. ``led`` and ``guards`` are what ``enter`` and ``guard`` returned."""
        with self._lock:
            if led:
                self._has_leader, self._until = False, None
            else:
                self._followers.pop(wake, None)
            if guards:
                self._guarded = None

    def wake_next(self, found: bool) -> None:
        """Wake followers, unless there is a leader.

        The first call wakes one follower. Each call after a message was found (``found``) doubles
        the number, so that many messages soon have many consumers.
        """
        number = self._burst if found else 1
        self._burst = min(number * 2, _MAX_BURST) if found else 1
        if self._followers:
            with self._lock:
                for _ in range(0 if self._has_leader else min(number, len(self._followers))):
                    wake, _ = self._followers.popitem(last=False)
                    wake()

    def on_signal(self, when: datetime | None, now: datetime) -> bool:
        """Learn from an event of the bus. Return whether a message may be ready by now."""
        if when is None:
            self.scan.on_missed_signals()
            return True
        if when > now:
            self.scan.wake_at(when)
            return False
        self.scan.on_signal(when)
        return True

    def reset(self) -> None:
        """Forget the facts about the queue, so that its waiting consumers scan all of it."""
        self.scan.forget()
        self.scan, self.prepared = ScanState(), None

    def wake_all(self) -> None:
        """Wake every follower."""
        with self._lock:
            followers, self._followers = list(self._followers), OrderedDict()
        for wake in followers:
            wake()


def seconds_left(request: Wait, clock: Clock | None) -> float | None:
    """Return how many seconds a consumer may wait at most, or None for no limit.

    Args:
        request: The wait of the consumer.
        clock: The clock if this consumer watches the time for all consumers of its queue, or None.
    """
    limits = []
    if clock is not None:
        limits.append((request.until - clock.now()).total_seconds())
    if request.deadline is not None:
        limits.append(request.deadline - time.monotonic())
    return max(0.0, min(limits)) if limits else None
