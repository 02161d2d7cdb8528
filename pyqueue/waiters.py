"""The line of a queue's consumers that wait, in one client.

One of them leads: it listens to the bus and keeps the time. The others sleep until they are called. Whoever stops receiving calls
the next one if nobody leads any more, so that one push wakes one consumer, and no wake-up is lost with a consumer that is gone.
It does no I/O of its own; the drivers wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from threading import Lock
from typing import Any

from pyqueue.backends.scan import ScanState

__all__ = ["Waiters"]


class Waiters:
    """The waiting consumers of one queue in one client, and what the client knows of the queue's head."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.scan = ScanState()
        #: What hears the bus, once somebody waited; of the kind that the client's bus makes.
        self.listener: Any = None
        self._lock = Lock()
        self._led = False
        self._until: datetime | None = None
        self._guarded: datetime | None = None
        self._burst = 1
        self._followers: OrderedDict[Callable[[], object], None] = OrderedDict()

    def enter(self, call: Callable[[], object], until: datetime) -> bool:
        """Join. True: you lead, so listen. False: you follow; ``call`` will be called when it is your turn."""
        with self._lock:
            self._burst = 1  # whoever waits has found nothing
            if self._led:
                self._followers[call] = None
                return False
            self._led, self._until = True, until
            return True

    def guard(self, until: datetime) -> bool:
        """Have a follower keep a time that is earlier than what the others keep; whether it is the one to do so."""
        with self._lock:
            if any(kept is not None and kept <= until for kept in (self._until, self._guarded)):
                return False
            self._guarded = until
            return True

    def leave(self, call: Callable[[], object], led: bool, guards: bool = False) -> None:
        """Stop waiting."""
        with self._lock:
            if led:
                self._led, self._until = False, None
            else:
                self._followers.pop(call, None)
            if guards:
                self._guarded = None

    def wake_next(self, found: bool) -> None:
        """Call the next ones if nobody leads: one, or after each find twice as many, so that many messages soon have many at work."""
        number = self._burst if found else 1
        self._burst = min(number * 2, 64) if found else 1
        if self._followers:
            with self._lock:
                for _ in range(0 if self._led else min(number, len(self._followers))):
                    call, _ = self._followers.popitem(last=False)
                    call()

    def on_signal(self, when: datetime | None, now: datetime) -> bool:
        """Take in what was heard; whether there may be something by now."""
        if when is None:
            self.scan.on_missed_signals()
            return True
        if when > now:
            self.scan.wake_at(when)
            return False
        self.scan.on_signal(when)
        return True

    def close(self) -> None:
        """Call everyone."""
        with self._lock:
            followers, self._followers = list(self._followers), OrderedDict()
        for call in followers:
            call()
