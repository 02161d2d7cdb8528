"""Renewing leases while a block or a handler works: one renewer for each client.

``Schedule`` knows what is due; the two renewers, a thread and a task, only wait and run the plan.
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
from itertools import takewhile
from typing import Any, Literal, Protocol, TypeVar

from pyqueue.errors import Fenced, LeaseLost, QueueClosed, QueueError

__all__ = ["AsyncRenewer", "LeaseRenewer", "Leased", "Renewer", "Schedule"]

log = logging.getLogger("pyqueue")


class Leased(Protocol):
    """What can be renewed: a reservation, or a claim of many messages."""

    @property
    def id(self) -> Any:
        """How the log names it."""

    @property
    def lease(self) -> float:
        """Its length, in seconds."""


L = TypeVar("L", bound=Leased)

#: A suspended reservation is being settled in a transaction; a lost one is another's by now.
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
class Entry:
    """A reservation that is renewed."""

    reservation: Leased
    extend: Callable[[Any], Any]
    lost: Callable[[], object]
    due: float = 0.0
    state: State = "renewed"
    #: The interval whose lane it is in.
    after: float = 0.0


class Schedule:
    """Which reservations are to be renewed when: a third into the lease; after a failure a tenth of it later.

    Entries that are due after the same interval are in one lane, in the order they came, which is the order they are due. So each step
    costs the same however many there are.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._lanes: dict[float, OrderedDict[int, Entry]] = {}
        #: Until when the renewer sleeps.
        self._asleep = -math.inf

    def add(self, entry: Entry) -> bool:
        """Keep renewing it. Answers whether the renewer has to be woken for it."""
        self.entries[id(entry.reservation)] = entry
        self._line_up(entry, entry.reservation.lease / 3)
        return entry.due < self._asleep

    def _line_up(self, entry: Entry, after: float) -> None:
        self._take_out(entry)
        entry.after, entry.due = after, time.monotonic() + after
        lane = self._lanes.get(after)
        if lane is None:
            lane = self._lanes[after] = OrderedDict()
        lane[id(entry)] = entry

    def _take_out(self, entry: Entry) -> None:
        lane = self._lanes.get(entry.after)
        if lane is not None and lane.pop(id(entry), None) is not None and not lane:
            del self._lanes[entry.after]

    def suspend(self, reservation: Leased) -> None:
        """Do not renew it for now."""
        entry = self.entries.get(id(reservation))
        if entry is not None:
            entry.state = "suspended"
            self._take_out(entry)

    def discard(self, reservation: Leased) -> State | None:
        """Renew it no longer. Answers what it was; None if it was not here."""
        entry = self.entries.pop(id(reservation), None)
        if entry is None:
            return None
        self._take_out(entry)
        return entry.state

    def due(self) -> list[Entry]:
        """What is to be renewed now."""
        now = time.monotonic()
        return [
            entry
            for lane in self._lanes.values()
            for entry in takewhile(lambda each: each.due <= now, lane.values())
        ]

    def pause(self) -> float | None:
        """Seconds until the next is due, for which the renewer will sleep; None: there is none."""
        self._asleep = min(
            (next(iter(lane.values())).due for lane in self._lanes.values()), default=math.inf
        )
        return None if self._asleep == math.inf else max(0.0, self._asleep - time.monotonic())

    def renewed(self, entry: Entry, error: QueueError | None) -> None:
        """Take in how a renewal went."""
        if self.entries.get(id(entry.reservation)) is not entry or entry.state != "renewed":
            return  # settled, or being settled, meanwhile
        if error is None:
            self._line_up(entry, entry.reservation.lease / 3)
        elif isinstance(error, (LeaseLost, Fenced, QueueClosed)):
            entry.state = "lost"
            self._take_out(entry)
            entry.lost()
        else:
            log.warning(
                "could not renew the lease of %s, trying again: %s", entry.reservation.id, error
            )
            self._line_up(entry, entry.reservation.lease / 10)


class Renewer:
    """A daemon thread that renews, for a blocking client. It starts with the first reservation to renew."""

    def __init__(self) -> None:
        self._schedule = Schedule()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(
        self,
        reservation: L,
        extend: Callable[[L], None],
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Renew a reservation until it is discarded, or lost."""
        with self._changed:
            early = self._schedule.add(Entry(reservation, extend, lost))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="pyqueue-renewer", daemon=True
                )
                self._thread.start()
            elif early:
                self._changed.notify()

    def suspend(self, reservation: Leased) -> None:
        """Do not renew it for now."""
        with self._changed:
            self._schedule.suspend(reservation)

    def discard(self, reservation: Leased) -> State | None:
        """Renew it no longer. Answers what it was; None if it was not here."""
        with self._changed:
            return self._schedule.discard(reservation)

    def close(self) -> None:
        """Stop."""
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
                    entry.extend(entry.reservation)
                except QueueError as failure:
                    error = failure
                with self._changed:
                    self._schedule.renewed(entry, error)


class AsyncRenewer:
    """A task that renews, for an async client."""

    def __init__(self) -> None:
        self._schedule = Schedule()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(
        self,
        reservation: L,
        extend: Callable[[L], Awaitable[None]],
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Renew a reservation until it is discarded, or lost."""
        early = self._schedule.add(Entry(reservation, extend, lost))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pyqueue-renewer")
        elif early:
            self._changed.set()

    def suspend(self, reservation: Leased) -> None:
        """Do not renew it for now."""
        self._schedule.suspend(reservation)

    def discard(self, reservation: Leased) -> State | None:
        """Renew it no longer. Answers what it was; None if it was not here."""
        return self._schedule.discard(reservation)

    async def close(self) -> None:
        """Stop."""
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
                    await entry.extend(entry.reservation)
                except QueueError as failure:
                    error = failure
                self._schedule.renewed(entry, error)
