"""Renewing leases while a block or a handler works. Each client has one renewer.

``Schedule`` knows which leases are due. The two renewers, a thread and a task, wait and extend
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Generic, Literal, Protocol, TypeVar

from pyqueue.errors import Fenced, LeaseLost, QueueClosed, QueueError

__all__ = ["AsyncRenewer", "Entry", "LeaseRenewer", "Leased", "Renewer", "Schedule"]

log = logging.getLogger("pyqueue")


class Leased(Protocol):
    """A reservation, or a claim of many messages, whose lease can be renewed."""

    @property
    def id(self) -> object:
        """The name that the log shows."""

    @property
    def lease(self) -> float:
        """The length of the lease in seconds."""


L = TypeVar("L", bound=Leased)
#: What extends a lease: a function for threads, or a coroutine function.
Extend = TypeVar("Extend", bound=Callable[[], object])

#: A suspended reservation is being settled in a transaction. A lost one belongs to another holder.
State = Literal["renewed", "suspended", "lost"]


class LeaseRenewer(Protocol):
    """The part of a renewer that is the same for blocking and for async code."""

    def add(
        self, reservation: L, extend: Callable[[L], Any], lost: Callable[[], object] = ...
    ) -> None:
        """Renew a reservation until it is discarded or lost."""

    def suspend(self, reservation: Leased) -> None:
        """Stop renewing a reservation for now."""

    def discard(self, reservation: Leased) -> State | None:
        """Stop renewing. Return the last state, or None if the reservation was not registered."""


@dataclass(slots=True)
class Entry(Generic[Extend]):
    """A reservation that is renewed."""

    reservation: Leased
    extend: Extend
    #: Called once when the lease is lost.
    lost: Callable[[], object]
    due: float = 0.0
    state: State = "renewed"
    #: The interval under which the schedule keeps it.
    after: float = 0.0


class Schedule(Generic[Extend]):
    """Says when each reservation is renewed: a third into its lease.

    After a failure the next try follows a tenth of the lease later. Entries with the same interval
    are kept together, in the order they came, which is also the order they are due. So each step
    takes the same time, however many entries there are.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry[Extend]] = {}
        self._by_interval: dict[float, OrderedDict[int, Entry[Extend]]] = {}
        #: Until when the renewer sleeps.
        self._asleep_until = -math.inf

    def add(self, entry: Entry[Extend]) -> bool:
        """Start renewing a reservation. Return whether the renewer must wake up earlier for it."""
        self.entries[id(entry.reservation)] = entry
        self._plan(entry, entry.reservation.lease / 3)
        return entry.due < self._asleep_until

    def _plan(self, entry: Entry[Extend], after: float) -> None:
        self._take_out(entry)
        entry.after, entry.due = after, time.monotonic() + after
        entries = self._by_interval.get(after)
        if entries is None:
            entries = self._by_interval[after] = OrderedDict()
        entries[id(entry)] = entry

    def _take_out(self, entry: Entry[Extend]) -> None:
        entries = self._by_interval.get(entry.after)
        if entries is not None and entries.pop(id(entry), None) is not None and not entries:
            del self._by_interval[entry.after]

    def suspend(self, reservation: Leased) -> None:
        """Stop renewing a reservation for now."""
        entry = self.entries.get(id(reservation))
        if entry is not None:
            entry.state = "suspended"
            self._take_out(entry)

    def discard(self, reservation: Leased) -> State | None:
        """Stop renewing. Return the last state, or None if the reservation was not registered."""
        entry = self.entries.pop(id(reservation), None)
        if entry is None:
            return None
        self._take_out(entry)
        return entry.state

    def due(self) -> list[Entry[Extend]]:
        """Return the entries that are due now."""
        now = time.monotonic()
        return [
            entry
            for entries in self._by_interval.values()
            for entry in takewhile(lambda each: each.due <= now, entries.values())
        ]

    def pause(self) -> float | None:
        """Return the seconds until the next entry is due, or None if there is none.

        The renewer sleeps for so long.
        """
        self._asleep_until = min(
            (next(iter(entries.values())).due for entries in self._by_interval.values()),
            default=math.inf,
        )
        if self._asleep_until == math.inf:
            return None
        return max(0.0, self._asleep_until - time.monotonic())

    def renewed(self, entry: Entry[Extend], error: QueueError | None) -> None:
        """Note the outcome of a renewal, and plan the next one unless the lease is lost."""
        if self.entries.get(id(entry.reservation)) is not entry or entry.state != "renewed":
            return  # it was settled in the meantime, or is being settled
        if error is None:
            self._plan(entry, entry.reservation.lease / 3)
        elif isinstance(error, (LeaseLost, Fenced, QueueClosed)):
            entry.state = "lost"
            self._take_out(entry)
            entry.lost()
        else:
            log.warning(
                "could not renew the lease of %s, trying again: %s", entry.reservation.id, error
            )
            self._plan(entry, entry.reservation.lease / 10)


class Renewer:
    """Renews the leases of a blocking client in a daemon thread.

    The thread starts with the first reservation.
    """

    def __init__(self) -> None:
        self._schedule = Schedule[Callable[[], None]]()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(
        self,
        reservation: L,
        extend: Callable[[L], None],
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Renew a reservation until it is discarded or lost."""
        with self._changed:
            early = self._schedule.add(Entry(reservation, partial(extend, reservation), lost))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pyqueue-renewer", daemon=True
                )
                self._thread.start()
            elif early:
                self._changed.notify()

    def suspend(self, reservation: Leased) -> None:
        """Stop renewing a reservation for now."""
        with self._changed:
            self._schedule.suspend(reservation)

    def discard(self, reservation: Leased) -> State | None:
        """Stop renewing. Return the last state, or None if the reservation was not registered."""
        with self._changed:
            return self._schedule.discard(reservation)

    def close(self) -> None:
        """Stop renewing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                due = self._schedule.due()
                if not due:
                    self._changed.wait(self._schedule.pause())
                    continue
            for entry in due:
                error: QueueError | None = None
                try:
                    entry.extend()
                except QueueError as failure:
                    error = failure
                with self._changed:
                    self._schedule.renewed(entry, error)


class AsyncRenewer:
    """Renews the leases of an async client in a task, which starts with the first reservation."""

    def __init__(self) -> None:
        self._schedule = Schedule[Callable[[], Awaitable[None]]]()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(
        self,
        reservation: L,
        extend: Callable[[L], Awaitable[None]],
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Renew a reservation until it is discarded or lost."""
        early = self._schedule.add(Entry(reservation, partial(extend, reservation), lost))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pyqueue-renewer")
        elif early:
            self._changed.set()

    def suspend(self, reservation: Leased) -> None:
        """Stop renewing a reservation for now."""
        self._schedule.suspend(reservation)

    def discard(self, reservation: Leased) -> State | None:
        """Stop renewing. Return the last state, or None if the reservation was not registered."""
        return self._schedule.discard(reservation)

    async def close(self) -> None:
        """Stop renewing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            due = self._schedule.due()
            if not due:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._schedule.pause()):
                        await self._changed.wait()
                continue
            for entry in due:
                error: QueueError | None = None
                try:
                    await entry.extend()
                except QueueError as failure:
                    error = failure
                self._schedule.renewed(entry, error)
