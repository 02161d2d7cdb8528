"""Renew leases while a block or a handler runs. Each client has one renewer.

``Schedule`` knows which leases are due, and which leases share a command. The blocking renewer is a
thread, the async renewer a task. Each starts the renewals that are due, and sleeps until the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from pyqueue.backends.extending import MAX_GROUP
from pyqueue.errors import Fenced, LeaseLost, QueueClosed, QueueError, Unavailable

log = logging.getLogger("pyqueue")

#: How many renewals run at once, so that a renewal that waits for a lock does not delay the rest.
MAX_IN_FLIGHT: Final = 8
#: At most one failure is logged in this number of seconds, because in an outage all renewals fail.
LOG_INTERVAL_S: Final = 10.0


class Leased(Protocol):
    """A reservation, or a claim of many messages, whose lease can be renewed."""

    @property
    def id(self) -> object:
        """The name that the log shows."""

    @property
    def lease(self) -> float:
        """The length of the lease in seconds."""


@dataclass(frozen=True)
class NamedLease:
    """The name and the length of a lease."""

    #: The name that the log shows.
    id: str
    #: The length of the lease in seconds.
    lease: float


L = TypeVar("L", bound=Leased)
#: For each lease, None or the error of its renewal. None in place of the list: all were extended.
Results = Sequence[QueueError | None] | None
#: A function that extends the leases of a group: a synchronous or a coroutine function.
Extend = TypeVar("Extend", bound=Callable[..., object])

#: A "suspended" reservation is being settled in a transaction, or was abandoned. The lease of a
#: "lost" reservation was lost.
State = Literal["renewed", "suspended", "lost"]


@dataclass(slots=True)
class Entry(Generic[Extend]):
    """A reservation whose lease a renewer extends."""

    reservation: Leased
    extend: Extend
    #: Called once when the lease is lost, or when the client was closed, which ends the renewal.
    lost: Callable[[], object]
    #: Entries with equal groups, except None, are extended together, by ``extend`` of the first.
    group: Hashable = None
    due: float = 0.0
    #: When the last renewal began.
    began: float = 0.0
    state: State = "renewed"
    #: How many settlements of the reservation are in progress.
    settling: int = 0
    #: The seconds from planning the next renewal until it is due. The schedule groups by this.
    after: float = 0.0


class Schedule(Generic[Extend]):
    """Determines when each reservation is renewed: after a third of its lease.

    If the claim took long, the reservation is renewed at once. After a failure, or a renewal that
    took long, the next renewal follows after a tenth of the lease, because a lease runs from the
    beginning of its renewal. Entries with the same group and the same interval form one line, in
    the order of arrival, which is also the order in which they are due. So each step takes the same
    time for any number of entries. Failed renewals are repeated separately.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry[Extend]] = {}
        self._lines: dict[tuple[Hashable, float], OrderedDict[int, Entry[Extend]]] = {}
        #: Until when the renewer sleeps.
        self._asleep_until = -math.inf

    def add(self, entry: Entry[Extend], age_s: float = 0.0) -> bool:
        """Start renewing a reservation. Return whether the renewer must now wake up earlier."""
        self.entries[id(entry.reservation)] = entry
        lease_s = entry.reservation.lease
        # A claim on a slow server may have used up a part of the lease.
        self._plan(entry, lease_s / 3 if age_s < lease_s / 10 else 0.0)
        return entry.due < self._asleep_until

    def state(self, reservation: Leased) -> State | None:
        """Return the state of a reservation, or None if it is not registered."""
        entry = self.entries.get(id(reservation))
        return None if entry is None else entry.state

    def _plan(self, entry: Entry[Extend], after: float) -> None:
        self._take_out(entry)
        entry.after, entry.due = after, time.monotonic() + after
        line = self._lines.get((entry.group, after))
        if line is None:
            line = self._lines[entry.group, after] = OrderedDict()
        line[id(entry)] = entry

    def _take_out(self, entry: Entry[Extend]) -> None:
        line = self._lines.get((entry.group, entry.after))
        if line is not None and line.pop(id(entry), None) is not None and not line:
            del self._lines[entry.group, entry.after]

    def suspend(self, reservation: Leased) -> None:
        """Stop renewing a reservation for now."""
        entry = self.entries.get(id(reservation))
        if entry is not None:
            entry.state = "suspended"
            self._take_out(entry)

    def settling(self, reservation: Leased, begins: bool) -> None:
        """Record that a settlement of a reservation begins, or that the settlement failed.

        During a settlement, a renewal may fail because the message has been settled.
        """
        entry = self.entries.get(id(reservation))
        if entry is not None:
            entry.settling += 1 if begins else -1

    def discard(self, reservation: Leased) -> State | None:
        """Stop renewing a reservation. Return its last state, or None if it was not registered."""
        entry = self.entries.pop(id(reservation), None)
        if entry is None:
            return None
        self._take_out(entry)
        return entry.state

    def take(self) -> list[Entry[Extend]]:
        """Remove and return the entries to renew together next, or [] if no entry is due.

        Entries of the same group that are due soon are included, so that leases that began one
        after another share a command.
        """
        line = min(self._lines.values(), key=_due, default=None)
        now = time.monotonic()
        if line is None or _due(line) > now:
            return []
        first = next(iter(line.values()))
        soon = now + first.after / 10
        most = 1 if first.group is None else MAX_GROUP
        batch = list(islice(takewhile(lambda each: each.due <= soon, line.values()), most))
        for entry in batch:
            self._take_out(entry)
            entry.began = now
            if entry.state != "renewed":  # it was abandoned
                self.entries.pop(id(entry.reservation), None)
        return [entry for entry in batch if entry.state == "renewed"]

    def pause(self) -> float | None:
        """Return the seconds until the next entry is due, or None if there is no entry.

        The renewer must sleep for this time.
        """
        self._asleep_until = min(map(_due, self._lines.values()), default=math.inf)
        if self._asleep_until == math.inf:
            return None
        return max(0.0, self._asleep_until - time.monotonic())

    def renewed(self, entry: Entry[Extend], error: QueueError | None) -> bool:
        """Record the outcome of a renewal, and plan the next one unless the lease is lost.

        Returns:
            Whether this outcome ends the renewals. If so, the caller calls ``entry.lost``.
        """
        if self.entries.get(id(entry.reservation)) is not entry or entry.state != "renewed":
            return False  # the message was settled in the meantime, or is being settled
        lease_s = entry.reservation.lease
        if error is None:
            late = time.monotonic() - entry.began > lease_s / 10
            self._plan(entry, lease_s / 10 if late else lease_s / 3)
        elif isinstance(error, (LeaseLost, Fenced)) and not entry.settling:
            entry.state = "lost"
            return True
        elif isinstance(error, QueueClosed):
            return True  # settling the message raises QueueClosed
        else:
            self._plan(entry, lease_s / 10)
        return False


def _due(line: OrderedDict[int, Entry[Any]]) -> float:
    return next(iter(line.values())).due


class BaseRenewer(Generic[Extend]):
    """The part of a renewer that is the same for blocking and for async code.

    Args:
        guard: A context manager that is entered while the schedule is read or changed.
    """

    def __init__(self, guard: AbstractContextManager[object]) -> None:
        self._schedule = Schedule[Extend]()
        self._guard = guard
        self._silent_until = -math.inf
        self._unlogged = 0

    def add(
        self,
        reservation: L,
        extend: Callable[[Sequence[L]], Any],
        lost: Callable[[], object] = lambda: None,
        group: Hashable = None,
        age_s: float = 0.0,
    ) -> None:
        """Renew a reservation until it is discarded or lost.

        Args:
            reservation: The reservation whose lease is extended.
            extend: A function that extends the leases of a list of reservations.
            lost: A function that is called when the lease is lost.
            group: Reservations with equal groups, except None, are extended together.
            age_s: How many seconds of the lease have passed.
        """
        raise NotImplementedError

    def registered(self, reservations: Iterable[L]) -> list[L]:
        """Return those of the reservations that are registered for renewal."""
        entries = self._schedule.entries  # reading needs no lock
        return [each for each in reservations if id(each) in entries]

    def suspend(self, reservation: Leased) -> None:
        """Stop renewing a reservation for now."""
        with self._guard:
            self._schedule.suspend(reservation)

    def settling(self, reservation: Leased, begins: bool) -> None:
        """Record that a settlement of a reservation begins, or that the settlement failed."""
        if id(reservation) in self._schedule.entries:  # most are not, and need no lock
            with self._guard:
                self._schedule.settling(reservation, begins)

    def is_settling(self, reservation: Leased) -> bool:
        """Return whether a settlement of a reservation is in progress."""
        entry = self._schedule.entries.get(id(reservation))
        return entry is not None and entry.settling > 0

    def state(self, reservation: Leased) -> State | None:
        """Return the state of a reservation, or None if it is not registered."""
        with self._guard:
            return self._schedule.state(reservation)

    def discard(self, reservation: Leased) -> State | None:
        """Stop renewing a reservation. Return its last state, or None if it was not registered."""
        if id(reservation) not in self._schedule.entries:
            return None
        with self._guard:
            return self._schedule.discard(reservation)

    def abandon(self, reservation: Leased) -> State | None:
        """Stop renewing, as ``discard`` does, but from any thread and without the guard.

        The garbage collector may call this while the schedule changes, so it only marks the entry.
        """
        entry = self._schedule.entries.get(id(reservation))
        if entry is None:
            return None
        state, entry.state = entry.state, "suspended"
        return state

    def _note(
        self, batch: Sequence[Entry[Extend]], results: Results, failure: BaseException | None
    ) -> list[Entry[Extend]]:
        """Record the outcome of a batch. Return the entries whose loss the caller must report.

        Args:
            batch: The entries that were renewed together.
            results: The result of ``extend``.
            failure: The exception that ``extend`` raised, or None.
        """
        if failure is not None:
            error = failure if isinstance(failure, QueueError) else Unavailable(str(failure))
            results = [error] * len(batch)
        elif results is None:
            results = [None] * len(batch)
        found = list(zip(batch, results, strict=True))
        ended = [entry for entry, error in found if self._schedule.renewed(entry, error)]
        failed = [
            (entry.reservation.id, error)
            for entry, error in found
            if error is not None and not isinstance(error, (LeaseLost, Fenced, QueueClosed))
        ]
        if failed:
            id, error = failed[0]
            more = f" and of {len(failed) - 1} more" if len(failed) > 1 else ""
            self._warn(
                f"could not renew the lease of {id}{more}, trying again: {error}",
                None if isinstance(failure, QueueError) else failure,
            )
        return ended

    def _report(self, ended: Sequence[Entry[Extend]]) -> None:
        """Call the callbacks for lost leases. A callback that fails does not stop the renewer."""
        for entry in ended:
            try:
                entry.lost()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._warn(
                    f"the callback for the lost lease of {entry.reservation.id} failed", error
                )

    def _warn(self, text: str, error: BaseException | None) -> None:
        now = time.monotonic()
        if now < self._silent_until:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more failures since the last line)" if self._unlogged else ""
        self._silent_until, self._unlogged = now + LOG_INTERVAL_S, 0
        log.warning("%s%s", text, more, exc_info=error)


#: The renewer of a client, for blocking or for async code.
LeaseRenewer: TypeAlias = BaseRenewer[Any]


class Renewer(BaseRenewer[Callable[..., Results]]):
    """Renews the leases of a blocking client. A daemon thread starts with the first reservation.

    The thread waits until the next entry is due. Each renewal runs in a separate thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        super().__init__(self._changed)
        self._thread: threading.Thread | None = None
        self._in_flight: set[threading.Thread] = set()
        self._closed = False

    def add(
        self,
        reservation: L,
        extend: Callable[[Sequence[L]], Results],
        lost: Callable[[], object] = lambda: None,
        group: Hashable = None,
        age_s: float = 0.0,
    ) -> None:
        """Renew a reservation until it is discarded or lost."""
        with self._changed:
            early = self._schedule.add(Entry(reservation, extend, lost, group), age_s)
            if self._thread is None:
                self._thread = self._new_thread(self._run)
                try:
                    self._thread.start()
                except RuntimeError as error:  # the system has no thread left
                    self._thread = None
                    self._warn(f"no lease is renewed until the next message: {error}", None)
            elif early:
                self._changed.notify()

    def close(self) -> None:
        """Stop renewing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            threads = [*self._in_flight, *([self._thread] if self._thread else [])]
        end = time.monotonic() + 5
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _new_thread(self, call: Callable[..., None], *args: Any) -> threading.Thread:
        return threading.Thread(target=call, args=args, name="pyqueue-renewer", daemon=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                full = len(self._in_flight) >= MAX_IN_FLIGHT
                batch = [] if full else self._schedule.take()
                if not batch:
                    self._changed.wait(None if full else self._schedule.pause())
                    continue
                thread = self._new_thread(self._renew, batch)
                try:
                    thread.start()
                    self._in_flight.add(thread)
                except RuntimeError as error:  # the system has no thread left
                    self._note(batch, None, error)
            del batch, thread  # keep no queue alive while waiting

    def _renew(self, batch: Sequence[Entry[Callable[..., Results]]]) -> None:
        results: Results = None
        failure: BaseException | None = None
        try:
            results = batch[0].extend([each.reservation for each in batch])
        except BaseException as error:
            failure = error
        with self._changed:
            self._in_flight.discard(threading.current_thread())
            self._changed.notify()
            ended = self._note(batch, results, failure)
        self._report(ended)


class AsyncRenewer(BaseRenewer[Callable[..., Awaitable[Results]]]):
    """Renews the leases of an async client. A task starts with the first reservation.

    The task waits until the next entry is due. Each renewal runs in a separate task.
    """

    def __init__(self) -> None:
        super().__init__(contextlib.nullcontext())
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._in_flight: set[asyncio.Task[None]] = set()

    def add(
        self,
        reservation: L,
        extend: Callable[[Sequence[L]], Awaitable[Results]],
        lost: Callable[[], object] = lambda: None,
        group: Hashable = None,
        age_s: float = 0.0,
    ) -> None:
        """Renew a reservation until it is discarded or lost."""
        early = self._schedule.add(Entry(reservation, extend, lost, group), age_s)
        if self._task is None or self._task.done():  # a program may cancel every task that runs
            # In a new context, because the caller's context may limit the time of commands.
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="pyqueue-renewer", context=contextvars.Context()
            )
        elif early:
            self._changed.set()

    async def close(self) -> None:
        """Stop renewing."""
        tasks = [*self._in_flight, *([self._task] if self._task else [])]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            full = len(self._in_flight) >= MAX_IN_FLIGHT
            batch = [] if full else self._schedule.take()
            if batch:
                task = asyncio.create_task(self._renew(batch), name="pyqueue-renewal")
                self._in_flight.add(task)
                task.add_done_callback(self._ended)
                del batch, task  # keep no queue alive while waiting
                continue
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if full else self._schedule.pause()):
                    await self._changed.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._changed.set()

    async def _renew(self, batch: Sequence[Entry[Callable[..., Awaitable[Results]]]]) -> None:
        results: Results = None
        failure: BaseException | None = None
        try:
            results = await batch[0].extend([each.reservation for each in batch])
        except asyncio.CancelledError as error:
            failure = error
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                for entry in batch:  # a later task renews them
                    self._schedule.renewed(entry, Unavailable("the renewal was cancelled"))
                raise
        except Exception as error:
            failure = error
        self._report(self._note(batch, results, failure))
