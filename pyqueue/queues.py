"""``Queue``: each operation is one line that runs the plan of the same name.

The plans in ``backends`` say what an operation means. The docstrings of ``Queue`` say what it takes and
returns; ``AsyncQueue`` shares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.claim import Claim, claimed
from pyqueue.errors import ConfigurationError, LeaseLost, QueueError
from pyqueue.messages import (
    UNCHANGED,
    Counts,
    Duration,
    Finished,
    Id,
    Message,
    QueueOptions,
    Reservation,
)
from pyqueue.plan_runner import PlanRunner, RunnerBase
from pyqueue.requests import Plan

__all__ = ["Duration", "OnDuplicate", "Queue", "QueueBase", "QueueOptions", "backend_of"]

T = TypeVar("T")
R = TypeVar("R")
Runs = TypeVar("Runs", bound=RunnerBase)

OnDuplicate = Literal["ignore", "replace", "error"]


class QueueBase(Generic[T, Runs]):
    """The part of a queue that is the same for blocking and for async code."""

    def __init__(self, runner: Runs, backend: QueuePlans) -> None:
        self._runner = runner
        self._backend = backend
        #: The queue's name.
        self.name = backend.queue

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, namespace={self._runner.namespace!r})"

    def _receive(
        self, limit: int, timeout: Any, *, pop: bool = False, lease: Any = None
    ) -> Plan[list[Any]]:
        return self._backend.receive(
            self._runner.waiters(self.name), limit, timeout=timeout, pop=pop, lease=lease
        )

    def _move(
        self, given: Iterable[tuple[Any, Any]], to: Any, session: Any, **options: Any
    ) -> Plan[None]:
        if isinstance(to, QueueBase):
            other, own = to._runner, self._runner
            if (other.namespace, other.url) != (own.namespace, own.url):
                raise ConfigurationError(
                    f"to: queue {to.name!r} is of another namespace; "
                    f"a message moves within one ({own.namespace!r})"
                )
            to = to._backend
        elif not isinstance(to, str):
            raise ConfigurationError(
                f"to: give a Queue of the same namespace or a queue's name, not {type(to).__name__}"
            )
        pairs = list(given) if isinstance(given, Iterable) else [given]
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            raise ConfigurationError("pairs: give pairs of a reservation and its payload")
        plan = self._backend.move(pairs, to=to, session=session, **options)
        return self._settles([each for each, _ in pairs], session, plan)

    def _settles(self, reservations: Iterable[Any], session: Any, plan: Plan[None]) -> Plan[None]:
        """Renew no longer what a plan settles.

        In a transaction that is already so while it is settled: a renewal between the transaction's first command and the
        settle would end it with a write conflict.
        """
        held = list(reservations)
        renewer = self._runner.renewer
        if session is not None:
            for each in held:
                renewer.suspend(each)
        try:
            yield from plan
        except LeaseLost:
            for each in held:
                renewer.discard(each)
            raise
        if session is None:
            for each in held:
                renewer.discard(each)


def backend_of(queue: QueueBase[Any, Any]) -> QueuePlans:
    """Return the plans of a queue, for the other modules of pyqueue."""
    return queue._backend


class Queue(QueueBase[T, PlanRunner]):
    """A queue, for blocking code. Made by ``Client.queue``; making one does no I/O.

    Durations are seconds or timedeltas, instants aware datetimes. Every operation may raise ``Unavailable`` (the server was not
    reached in time) and ``QueueClosed``; bad arguments raise ``ConfigurationError`` before anything is written.
    """

    def _run(self, plan: Plan[R]) -> R:
        return self._runner.run(plan)

    def push(
        self,
        payload: T,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        on_duplicate: OnDuplicate = "ignore",
        headers: dict[str, Any] | None = None,
        id: Id | None = None,
        session: Any = None,
    ) -> Id | None:
        """Push a message.

        Args:
            payload: any BSON value, or what the queue's model takes.
            delay: seconds until it can be received; not with ``at``.
            at: the instant from which it can be received; one that has passed means now.
            key: a message key, 1-512 characters, unique among the live messages of the queue.
            on_duplicate: if the key is taken: "ignore" the push; "replace" the payload, headers and time of the live message
                (tries start again, and whoever holds it loses its lease); or raise an "error".
            headers: small labels, {str: str | int | float | bool}.
            id: an ObjectId, or a str of 1-512 characters not starting with "~". The same id again is one message.
            session: a transaction's session: the push happens when that commits.

        Returns:
            The message's id; None if a key was taken and ``on_duplicate`` is "ignore".

        Raises:
            InvalidMessage: the payload is not BSON, too large or not of the model.
            DuplicateKey: the key is taken and ``on_duplicate`` is "error"; or the id belongs to a message never in this queue.
        """
        return self._run(
            self._backend.push(
                [payload],
                delay=delay,
                at=at,
                headers=headers,
                keys=None if key is None else [key],
                on_duplicate=on_duplicate,
                ids=None if id is None else [id],
                session=session,
            )
        )[0]

    def push_many(
        self,
        payloads: Iterable[T],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        headers: dict[str, Any] | None = None,
        keys: Sequence[str | None] | None = None,
        on_duplicate: OnDuplicate = "ignore",
        ids: Sequence[Id | None] | None = None,
        session: Any = None,
    ) -> list[Id | None]:
        """Push many messages at once; one that is refused (see ``push``) means that none is written.

        Args:
            payloads: the payloads.
            delay: seconds until they can be received; not with ``at``.
            at: the instant from which they can be received.
            headers: for each of them.
            keys: one for each payload, None for none.
            on_duplicate: as in ``push``; with "error" the others are written, then DuplicateKey names the ``keys``.
            ids: one for each payload, None for one made here.
            session: a transaction's session.

        Returns:
            Their ids, with None for each that a taken key kept out.

        Raises:
            InvalidMessage: a payload cannot be stored; nothing was written.
            DuplicateKey: as in ``push``.
        """
        return self._run(
            self._backend.push(
                payloads,
                delay=delay,
                at=at,
                headers=headers,
                keys=keys,
                on_duplicate=on_duplicate,
                ids=ids,
                session=session,
            )
        )

    def pop(self, timeout: Duration | None = None) -> Message[T] | None:
        """Receive a message and finish it at once: at most once, it is gone if this process dies now.

        Args:
            timeout: seconds to wait for one; None waits for ever, 0 not at all.

        Returns:
            The message, or None after the time-out.
        """
        return next(iter(self._run(self._receive(1, timeout, pop=True))), None)

    def pop_many(self, limit: int, *, timeout: Duration | None = None) -> list[Message[T]]:
        """Receive up to ``limit`` messages and finish them: waits for the first, takes what is there.

        Args:
            limit: how many at most.
            timeout: seconds to wait for the first; None waits for ever, 0 not at all.

        Returns:
            The messages, in order; none after the time-out.
        """
        return self._run(self._receive(limit, timeout, pop=True))

    def reserve(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> Reservation[T] | None:
        """Receive a message under a lease: at least once, it comes back if it is not settled in time.

        Args:
            timeout: seconds to wait for one; None waits for ever, 0 not at all.
            lease: seconds for which nobody else receives it; None: the queue's.

        Returns:
            The reservation, to be settled by commit, rollback, move, bury or release; or None after the time-out.
        """
        return next(iter(self._run(self._receive(1, timeout, lease=lease))), None)

    def reserve_many(
        self, limit: int, *, timeout: Duration | None = None, lease: Duration | None = None
    ) -> list[Reservation[T]]:
        """Receive up to ``limit`` messages under a lease: waits for the first, takes what is there.

        Args:
            limit: how many at most.
            timeout: seconds to wait for the first; None waits for ever, 0 not at all.
            lease: seconds; None: the queue's.

        Returns:
            The reservations, in order; none after the time-out.
        """
        return self._run(self._receive(limit, timeout, lease=lease))

    @contextmanager
    def reserved(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> Iterator[Reservation[T] | None]:
        """Reserve for a ``with`` block: commits when it ends, rolls back when it raises (and lets the exception pass).

        The lease is renewed while the block runs. A reservation that the block settled itself is left alone.

        Args:
            timeout: seconds to wait for a message; None waits for ever, 0 not at all.
            lease: seconds; None: the queue's.

        Returns:
            A context manager giving the reservation, or None after the time-out.

        Raises:
            LeaseLost: on leaving, if another holds the message by now.
        """
        reservation = self.reserve(timeout, lease=lease)
        if reservation is None:
            yield None
            return
        renewer = self._runner.renewer
        renewer.add(reservation, self.extend)
        try:
            yield reservation
        except BaseException as error:
            if renewer.discard(reservation):
                with suppress(QueueError):  # the block's exception is the one to hear of
                    self.rollback(reservation, error=error)
            raise
        if renewer.discard(reservation) == "renewed":
            self.commit(reservation)

    def commit(
        self, *reservations: Reservation[T], payload: Any = UNCHANGED, session: Any = None
    ) -> None:
        """Finish messages: into the history if the queue keeps one, else they are gone.

        Args:
            reservations: what was reserved from this queue.
            payload: what the history keeps instead of the payload.
            session: a transaction's session.

        Raises:
            LeaseLost: some were no longer held (``lost``, ``unknown``); all the others are finished.
            ConfigurationError: with a session, a lease with too little time left.
        """
        return self._run(
            self._settles(
                reservations,
                session,
                self._backend.commit(reservations, payload=payload, session=session),
            )
        )

    def rollback(
        self,
        *reservations: Reservation[T],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
        session: Any = None,
    ) -> None:
        """Give messages back for another try; one that had its last try is buried.

        Args:
            reservations: what was reserved from this queue.
            delay: seconds until the next try; None: the queue's backoff for this try; 0: at once.
            error: why; kept in ``Message.error``.
            session: a transaction's session.

        Raises:
            LeaseLost: some were no longer held; all the others are rolled back.
        """
        return self._run(
            self._settles(
                reservations,
                session,
                self._backend.rollback(reservations, delay=delay, error=error, session=session),
            )
        )

    def extend(self, *reservations: Reservation[T], lease: Duration | None = None) -> None:
        """Hold messages for another lease, counted from now; updates ``until``.

        Args:
            reservations: what was reserved from this queue.
            lease: seconds; None: as long as the lease that each was reserved with.

        Raises:
            LeaseLost: some were no longer held; all the others are extended.
        """
        return self._run(self._backend.extend(reservations, lease=lease))

    def release(self, *reservations: Reservation[T]) -> None:
        """Give messages back unworked: to their old places, the tries not counted.

        Args:
            reservations: what was reserved from this queue.

        Raises:
            LeaseLost: some were no longer held; all the others are released.
        """
        return self._run(self._settles(reservations, None, self._backend.release(reservations)))

    def move(
        self,
        *reservations: Reservation[T],
        to: Queue[Any] | str,
        payload: Any = UNCHANGED,
        update: dict[str, Any] | None = None,
        headers: dict[str, Any] | None = None,
        delay: Duration | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> None:
        """Pass messages on to another queue, each in one atomic update: never lost, never in both.

        Args:
            reservations: what was reserved from this queue.
            to: a Queue of the same namespace, or a queue's name.
            payload: the new payload of each; it is what the target's model takes.
            update: instead of a payload, MongoDB's $set $unset $inc $mul $min $max $rename $push $pull $addToSet on the payload.
            headers: merged into the headers.
            delay: seconds until it can be received there.
            key: its message key there; for one reservation only.
            session: a transaction's session.

        Raises:
            LeaseLost: some were no longer held; all the others are moved.
            DuplicateKey: the key is taken there; the reservation is still held.
            InvalidMessage: the payload, or what the update makes of it, cannot be stored.
        """
        return self._run(
            self._move(
                [(each, payload) for each in reservations],
                to,
                session,
                update=update,
                headers=headers,
                delay=delay,
                key=key,
            )
        )

    def move_many(
        self,
        pairs: Iterable[tuple[Reservation[T], Any]],
        *,
        to: Queue[Any] | str,
        update: dict[str, Any] | None = None,
        headers: dict[str, Any] | None = None,
        delay: Duration | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> None:
        """Pass messages on, each with a payload of its own.

        Args:
            pairs: of a reservation and its new payload (or UNCHANGED).
            to: as in ``move``.
            update: as in ``move``.
            headers: as in ``move``.
            delay: as in ``move``.
            key: as in ``move``.
            session: as in ``move``.

        Raises:
            LeaseLost: some were no longer held; all the others are moved.
            InvalidMessage: a payload cannot be stored; nothing was moved.
        """
        return self._run(
            self._move(pairs, to, session, update=update, headers=headers, delay=delay, key=key)
        )

    def bury(self, *reservations: Reservation[T], error: BaseException | str | None = None) -> None:
        """Send messages to the dead-letter queue now.

        Args:
            reservations: what was reserved from this queue.
            error: why; kept in ``Message.dead`` and ``Message.error``.

        Raises:
            LeaseLost: some were no longer held; all the others are buried.
            ConfigurationError: a message is in a dead-letter queue already.
        """
        return self._run(
            self._settles(reservations, None, self._backend.bury(reservations, error=error))
        )

    def progress(
        self, reservation: Reservation[T], fraction: float, note: str | None = None
    ) -> None:
        """Say how far the work is, for others to read in ``Message.progress``.

        Args:
            reservation: what was reserved from this queue.
            fraction: from 0 to 1.
            note: a few words.

        Raises:
            LeaseLost: it is no longer held.
        """
        return self._run(self._backend.progress(reservation, fraction, note))

    def checkpoint(self, reservation: Reservation[T], state: Any) -> None:
        """Keep a state of the work, for the next try to find in ``Message.checkpoint``.

        Args:
            reservation: what was reserved from this queue.
            state: any BSON value.

        Raises:
            LeaseLost: it is no longer held.
            InvalidMessage: the state is not BSON.
        """
        return self._run(self._backend.checkpoint(reservation, state))

    def claim(
        self, group: str, *, limit: int, lease: Duration | None = None
    ) -> AbstractContextManager[Claim]:
        """Claim many messages for a ``with`` block, under one lease that is renewed: for staging them into Spark, or anywhere in bulk.

        What an earlier claim of the group left behind, by a process that died, say, is taken over first. A block that raises, or ends
        without ``commit()``, rolls back.

        Args:
            group: the durable name of this consumer: 1-110 of A-Z a-z 0-9 _ - . : >. One process at a time uses it.
            limit: how many messages at most, up to 100 000.
            lease: seconds for which they are held if this process dies; None: the queue's.

        Returns:
            A context manager giving the Claim, which is empty if nothing is ready.

        Raises:
            Fenced: on settling, if another process claimed for the group meanwhile.
            LeaseLost: on ``commit()``, if others hold some of the messages by now.
        """
        return claimed(self._runner, self._backend, group, limit, lease)

    def redrive(self, limit: int | None = None) -> int:
        """Send buried messages back to the queues they came from, with their keys if those are free, tries 0.

        Args:
            limit: how many at most; None: all.

        Returns:
            How many went; 0 for a queue that is no dead-letter queue.
        """
        return self._run(self._backend.redrive(limit))

    def remove(self, id: Id) -> bool:
        """Take a message out of the queue.

        Args:
            id: the message's.

        Returns:
            False if there is none with this id, it is finished, or it is held under a live lease.
        """
        return self._run(self._backend.remove(id))

    def get(self, id: Id) -> Message[T] | Finished[T] | None:
        """Look a message up, whatever its state.

        Args:
            id: the message's.

        Returns:
            The message, or None if this queue has none with the id. One that does not fit the model has its raw payload.
        """
        return self._run(self._backend.get(id))

    def peek(self, limit: int = 10) -> list[Message[T]]:
        """See what would be received next; takes nothing.

        Args:
            limit: how many at most.

        Returns:
            Ready messages, in order. One that does not fit the model has its raw payload, and ``error`` says why.
        """
        return self._run(self._backend.peek(limit))

    def counts(self) -> Counts:
        """Count the messages by state. The cost grows with their number.

        Returns:
            ready, scheduled, reserved, their total, and history.
        """
        return self._run(self._backend.counts())

    def next_when(self) -> datetime | None:
        """When the next message becomes (or became) eligible, the ends of leases included.

        Returns:
            The instant, or None for an empty queue.
        """
        return self._run(self._backend.next_when())

    def pause(self) -> None:
        """Keep the consumers of every process from receiving, within 5 s (at once with a bus). Pushes go on."""
        return self._run(self._backend.pause(True))

    def resume(self) -> None:
        """Let the consumers go on."""
        return self._run(self._backend.pause(False))

    def paused(self) -> bool:
        """Ask whether the queue is paused.

        Returns:
            True if it is.
        """
        return self._run(self._backend.paused())

    def notify(self) -> None:
        """Wake waiting consumers, after a transaction of your own."""
        return self._run(self._backend.notify())

    def purge(self) -> int:
        """Delete all ready and scheduled messages. What is held, and the history, stay; nothing is added to the history.

        Returns:
            How many were deleted.
        """
        return self._run(self._backend.purge())

    def history(self, limit: int = 100, *, since: datetime | None = None) -> list[Finished[T]]:
        """Look at finished messages, newest first.

        Args:
            limit: how many at most.
            since: only those finished at or after this instant.

        Returns:
            Finished messages, with ``outcome`` and ``processed``.
        """
        return self._run(self._backend.history(limit, since=since))

    def replay(self, *ids: Id) -> int:
        """Make finished messages ready again, with their keys if those are free, tries 0.

        Args:
            ids: of messages in the history.

        Returns:
            How many there were.
        """
        return self._run(self._backend.replay(ids))
