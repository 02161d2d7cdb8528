"""Subscriptions, the hub that delivers events to them, and the place that connects hubs.

Nothing here talks to a server. ``Subscription`` and ``Hub`` contain the rules of delivery;
``ThreadListener`` and ``TaskListener`` only add how a thread or a task waits. A ``Place`` connects
the hubs of one process, so that an event reaches all of them without a server.
"""

import asyncio
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from time import monotonic
from typing import Self

from signals.api import BusError
from signals.transport import Flag, LoopFlag, Procedure, run, run_async
from signals.window import earliest

UNSUBSCRIBE_DELAY_S = 5.0
"""How long a topic without listeners stays subscribed, because a consumer often returns soon."""

LONGEST_WAIT_S = 3600.0
"""The longest single wait, because platforms limit waits. A longer wait consists of several."""


def check_event(topic: str, when: datetime | None) -> None:
    """Raise BusError for a topic or an instant that no bus can carry.

    Without this check, a runner would try to send such an event forever, and delay later events.
    """
    if not isinstance(topic, str) or not topic:
        given = "an empty one" if topic == "" else type(topic).__name__
        raise BusError(f"invalid topic: expected a non-empty str, found {given}")
    try:
        topic.isascii() or topic.encode()
    except UnicodeEncodeError:
        raise BusError(f"invalid topic {topic!r}; use a str that UTF-8 can encode") from None
    if when is None or (isinstance(when, datetime) and when.tzinfo is UTC):
        return
    if not isinstance(when, datetime) or when.utcoffset() is None:
        raise BusError("invalid `when`: expected a timezone-aware datetime or None")
    try:
        when.astimezone(UTC)
    except OverflowError:
        raise BusError("invalid `when`: use a time between the years 1 and 9999 in UTC") from None


class Subscription:
    """The state of one listener: whether it heard an event, and the earliest ``when`` it heard."""

    def __init__(self, topic: str, enter: "Enter", leave: "Leave") -> None:
        check_event(topic, None)
        self.topic = topic
        self.when: datetime | None = None
        self.closed = False
        self.ready: Flag | None = None  # set once the bus is known to hear the topic
        self.alert: Callable[[], object] | None = None  # called on each event, in any thread
        self._enter, self._leave = enter, leave
        self._lock = threading.RLock()
        self._flag: Flag | None = None
        self._heard = False
        self._next: datetime | None = None

    def open(self, make_flag: Callable[[], Flag]) -> None:
        """Create the flags, when the listener is entered: asyncio flags need a running loop."""
        if self._flag is not None or self.closed:
            raise BusError(
                "a listener can be entered only once, and not after it was closed; get another "
                "listener from an open bus"
            )
        self._flag, self.ready = make_flag(), make_flag()

    def deliver(self, when: datetime | None) -> None:
        """Remember an event and wake the waiter."""
        with self._lock:
            if self._heard:
                self._next = earliest(self._next, when)
                return  # the flag is set already
            self._next, self._heard = when, True
            assert self._flag is not None  # the hub has only listeners that were entered
            self._flag.set()
            self._call_alert()

    def confirm(self) -> None:
        """Record that the server confirmed the topic.

        The first confirmation completes entering. A later confirmation means that the bus works
        again after a break, so events may have been lost, and the listener is woken.
        """
        assert self.ready is not None
        if self.ready.is_set():
            self.deliver(None)
        else:
            self.ready.set()

    def take(self) -> bool:
        """Return whether an event was heard, and clear the flag. If one was heard, set ``when``."""
        with self._lock:
            if self.closed:
                return False
            heard, self._heard = self._heard, False
            assert self._flag is not None  # ``wait`` checks that the listener was entered
            self._flag.clear()
            if heard:
                self.when = self._next
            return heard

    def after_fork(self) -> None:
        """Close the child's copy of a parent's listener, whose lock may be held forever."""
        self._lock = threading.RLock()
        self.closed = True

    def close(self) -> None:
        """Stop listening and wake the waiting caller."""
        self._leave(self)
        with self._lock:
            self.closed = True
            for flag in (self._flag, self.ready):
                if flag:
                    flag.set()
            self._call_alert()

    def _call_alert(self) -> None:
        alert = self.alert  # the waiting thread may set it to None at any moment
        if alert is not None:
            alert()


Enter = Callable[[Subscription], Procedure[None]]
"""A function of a runner that starts to deliver events to a listener."""

Leave = Callable[[Subscription], None]
"""A function of a runner that stops delivering events to a listener."""


class ThreadListener(Subscription):
    """A listener for blocking code."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for an event, up to ``timeout`` seconds. None means no limit.

        Returns:
            True if an event has arrived since ``wait`` last returned True.
        """
        if self._flag is None:
            raise BusError("enter the listener first: `with bus.listen(topic) as listener:`")
        assert isinstance(self._flag, threading.Event)
        end = None if timeout is None else monotonic() + timeout
        while not self.take():
            left = LONGEST_WAIT_S if end is None else end - monotonic()
            if self.closed or left <= 0:
                return False
            self._flag.wait(min(left, LONGEST_WAIT_S))
        return True

    def __enter__(self) -> Self:
        self.open(threading.Event)
        try:
            run(self._enter(self))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TaskListener(Subscription):
    """A listener for asyncio code."""

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for an event, up to ``timeout`` seconds. None means no limit.

        Returns:
            True if an event has arrived since ``wait`` last returned True.
        """
        if self._flag is None:
            raise BusError("enter the listener first: `async with bus.listen(topic) as listener:`")
        assert isinstance(self._flag, LoopFlag)
        try:
            async with asyncio.timeout(timeout):
                while not self.take():
                    if self.closed:
                        return False
                    await self._flag.wait()
                return True
        except TimeoutError:
            return False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.open(lambda: LoopFlag(loop))
        try:
            await run_async(self._enter(self))
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


class Hub:
    """The table from topics to subscriptions, and the topics that the server is known to send.

    Args:
        stats: The counters of the bus. The hub counts the events that its listeners hear.
        local: Whether there is no server, so that every topic is heard at once.
    """

    def __init__(self, stats: dict[str, int], *, local: bool = False) -> None:
        self._stats = stats
        self._delay = 0.0 if local else UNSUBSCRIBE_DELAY_S
        self._lock = threading.RLock()
        self._subscriptions: dict[str, set[Subscription]] = {}
        self._left: dict[str, float] = {}  # topics without listeners, and since when; oldest first
        self._new: set[str] = set()  # topics to subscribe to
        self._asked: set[str] = set()  # topics that the server was asked for
        self._live: set[str] = set()  # topics that the server confirmed
        self._all = local  # whether every topic is heard without subscribing

    def add(self, subscription: Subscription) -> None:
        """Start to deliver the events of a topic to ``subscription``, which names the topic."""
        topic = subscription.topic
        with self._lock:
            self._subscriptions.setdefault(topic, set()).add(subscription)
            self._left.pop(topic, None)
            if not self._all and topic not in self._asked:
                self._new.add(topic)
            if self._all or topic in self._live:
                subscription.confirm()

    def remove(self, subscription: Subscription) -> None:
        """Stop delivering events to ``subscription``."""
        topic = subscription.topic
        with self._lock:
            found = self._subscriptions.get(topic, set())
            found.discard(subscription)
            if not found and self._subscriptions.pop(topic, None) is not None and self._delay:
                self._left[topic] = monotonic()

    def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions, without the lock, which may be held forever after a fork."""
        return [each for found in list(self._subscriptions.values()) for each in list(found)]

    def deliver(self, topic: str, when: datetime | None) -> None:
        """Deliver an event to the listeners of its topic."""
        with self._lock:
            found = tuple(self._subscriptions.get(topic, ()))
            self._stats["heard"] += bool(found)
            for subscription in found:
                subscription.deliver(when)

    def confirm(self, topic: str | None = None) -> None:
        """Record that the server now sends the events of ``topic``, or of every topic if None.

        Listeners that were entered earlier are woken because they may have missed an event.
        """
        with self._lock:
            if topic is None:
                self._all = True
                confirmed = list(self._subscriptions.values())
            else:
                self._live.add(topic)
                confirmed = [self._subscriptions.get(topic, set())]
            for found in confirmed:
                for subscription in tuple(found):
                    subscription.confirm()

    def lose(self) -> None:
        """Record that the server sends no more events. Every topic needs a new subscription."""
        with self._lock:
            self._all = False
            self._new = set(self._subscriptions)
            self._asked.clear()
            self._live.clear()
            self._left.clear()

    def changes(self, now: float) -> tuple[bool, list[str], list[str]]:
        """Return the changes to request from the server, and count them as done.

        Returns:
            Whether to listen at all, the topics to subscribe to, and those to unsubscribe from.
        """
        with self._lock:
            drop = []
            while self._left and next(iter(self._left.values())) + self._delay <= now:
                topic = next(iter(self._left))
                del self._left[topic]
                self._live.discard(topic)
                if topic in self._asked:
                    self._asked.discard(topic)
                    drop.append(topic)
            add = [topic for topic in self._new if topic in self._subscriptions]
            self._new.clear()
            self._asked.update(add)
            return bool(self._subscriptions or self._left), add, drop


class Place:
    """Connects the buses of this process that reach the same listeners.

    A bus delivers its events directly to every hub of its place. The server also sends these events
    back to this process. Every event carries the ``origin`` of its place, so that no event is
    delivered twice. Two buses of one server may have different places, for example if the address
    is written differently; then they hear each other through the server.
    """

    def __init__(self) -> None:
        self.origin = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._hubs: tuple[weakref.ref[Hub], ...] = ()  # weak, because some buses are never closed

    def join(self, hub: Hub) -> None:
        """Deliver all later events of this place to ``hub``."""
        with self._lock:
            kept = (reference for reference in self._hubs if reference() is not None)
            self._hubs = (*kept, weakref.ref(hub))

    def deliver(self, topic: str, when: datetime | None) -> None:
        """Deliver an event to the listeners of every bus of this place."""
        for reference in self._hubs:
            hub = reference()
            if hub is not None:
                hub.deliver(topic, when)


_places: dict[tuple[int, Hashable], Place] = {}


def place_of(key: Hashable) -> Place:
    """Return the place for buses with an equal ``key`` in this process. A fork has other places."""
    return _places.setdefault((os.getpid(), key), Place())
