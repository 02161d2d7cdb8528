"""The ``Queue`` class: each method runs a plan, which defines the steps of the operation.

The plans are in ``backends``. The docstrings here describe arguments and results.
The module is long because users look up all operations of a queue in one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, TypeVar, Unpack, overload

from pyqueue.backends.forms import RollbackOptions
from pyqueue.backends.moving import MoveOptions
from pyqueue.backends.pushing import PushOptions
from pyqueue.claim import Claim, ClaimSize, claimed
from pyqueue.each import Each
from pyqueue.facts import Gather
from pyqueue.manageable import Manageable
from pyqueue.messages import (
    MAX_BATCH_BYTES,
    MAX_RECEIVED_BYTES,
    UNCHANGED,
    Duration,
    Headers,
    Id,
    Message,
    Push,
    Reservation,
)
from pyqueue.queue_base import OnDuplicate, PushTerms
from pyqueue.reserved import OnLost, check_on_lost, holding, renewing

T = TypeVar("T")


class Queue(Manageable[T]):
    """A queue, for blocking code. ``Client.queue`` creates it, without I/O.

    Durations are seconds or timedeltas, and instants are aware datetimes. Every operation may raise
    ``Unavailable`` (the server did not answer in time) or ``QueueClosed`` (the client was closed).
    An invalid argument raises ``ConfigurationError`` before anything is written.
    """

    @overload
    def push(self, payload: T, **options: Unpack[PushTerms]) -> Id: ...
    @overload
    def push(self, payload: T, *, key: str | None, **options: Unpack[PushTerms]) -> Id | None: ...
    def push(
        self,
        payload: T,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        on_duplicate: OnDuplicate = "ignore",
        headers: Headers | None = None,
        id: Id | None = None,
        priority: int | None = None,
        group: str | None = None,
        result: Duration | None = None,
        expires: Duration | None = None,
        unique_for: Duration | None = None,
        gather: Gather | None = None,
        also: Sequence[Queue[Any] | str] | None = None,
        session: Any = None,
    ) -> Id | None:
        """Push a message.

        Args:
            payload: A BSON value, or a value of the model of the queue.
            delay: Seconds until the message can be received; not with ``at``.
            at: The instant from which the message can be received. A past instant means now.
            key: A message key, 1-512 characters, unique among the live messages of the queue.
            on_duplicate: What happens if the key is taken. "ignore" writes nothing. "replace"
                overwrites the payload, headers, time and priority of the live message, resets its
                tries, and ends the lease of its holder. "error" raises ``DuplicateKey``.
            headers: Small labels, as a mapping {str: str | int | float | bool}.
            id: An ObjectId, or a str of 1-512 characters not starting with "~". A second push with
                the same id does not store a second message.
            priority: 0 (lowest) to 9, or None for 4. Only with ``kind="priority"``.
            group: The name of a group, 1-512 characters. Messages of a group are received in order,
                one at a time; messages without a group, in any order. Only with ``kind="ordered"``.
            result: Seconds, at most 30 days, for which the finished message and its result are kept
                for ``Client.wait``. If None, they are kept only if the queue has a history.
            expires: Seconds from the push within which the first try must begin. If it does not,
                the message ends with the outcome "expired". None means no time limit.
            unique_for: Seconds for which the key stays taken after a commit or a pop; None means 0.
            gather: The gather that the message joins: from ``Client.gather``, or from the
                ``gather`` of a reservation. An unwritten message joins none. Not with ``session``.
            also: More queues (names or ``Queue`` objects). Either all queues get the message,
                or none. A copy has a new id, no ``result`` and no ``gather``. Not with ``key``.
            session: The session of a transaction. The push happens when the transaction commits.

        Returns:
            The id of the message. None if the key is taken and ``on_duplicate`` is "ignore". With
            "replace", None if a finished message keeps the key taken for its ``unique_for``.

        Raises:
            InvalidMessage: The payload is not BSON, is too large or does not fit the model.
            DuplicateKey: The key is taken and ``on_duplicate`` is "error", or the id belongs to a
                message that was never in this queue.
        """
        own: dict[str, object] = {"keys": key, "ids": id, "priorities": priority, "groups": group}
        own |= {"results": result, "expires": expires, "uniques": unique_for, "gathers": gather}
        same = {"delay": delay, "at": at, "headers": headers, "session": session}
        ids = self._runner.run(self._push(payload, on_duplicate, own, same, also))
        return ids[0]

    def push_many(
        self,
        payloads: Iterable[T] | Iterable[Push[T]],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        headers: Headers | None = None,
        keys: Sequence[str | None] | None = None,
        on_duplicate: OnDuplicate = "ignore",
        ids: Sequence[Id | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        groups: Sequence[str | None] | None = None,
        session: Any = None,
    ) -> list[Id | None]:
        """Push many messages at once. If one is invalid, none is written.

        Args:
            payloads: The payloads, or a ``Push`` for each message. A ``Push`` holds the options of
                its message. The only other arguments are then ``on_duplicate`` and ``session``.
            delay: Seconds until the messages can be received; not with ``at``.
            at: The instant from which the messages can be received.
            headers: The headers of every message.
            keys: One key for each payload, None for a message without a key.
            on_duplicate: As in ``push``. "error" writes all other messages, then raises
                ``DuplicateKey`` with the taken ``keys``.
            ids: One id for each payload, None for a new id.
            priorities: One priority for each payload, None for 4; see ``push``.
            groups: One group for each payload, None for a message without a group; see ``push``.
            session: The session of a transaction.

        Returns:
            One id for each payload, or None as in ``push``. The errors are the same as in ``push``.
        """
        how = PushOptions(delay=delay, at=at, headers=headers, keys=keys, on_duplicate=on_duplicate)
        how |= PushOptions(ids=ids, priorities=priorities, groups=groups, session=session)
        return self._runner.run(self._push_many(payloads, how))

    def pop(self, timeout: Duration | None = None) -> Message[T] | None:
        """Receive a message and finish it at once.

        Delivery is at most once: the message is lost if this process dies before its work is done.

        Args:
            timeout: Seconds to wait for a message. None waits forever; 0 does not wait.

        Returns:
            The message, or None after the timeout.
        """
        received = self._runner.run(self._receive(1, timeout=timeout, pop=True))
        return received[0] if received else None

    def pop_many(
        self,
        limit: int,
        *,
        timeout: Duration | None = None,
        max_bytes: int = MAX_RECEIVED_BYTES,
    ) -> list[Message[T]]:
        """Receive up to ``limit`` messages and finish them.

        Wait for the first message only, then take the messages that are ready.

        Args:
            limit: The maximum number of messages.
            timeout: Seconds to wait for the first message. None waits forever; 0 does not wait.
            max_bytes: The maximum size of all messages together, in bytes as stored. The first
                message is returned even if it is larger. A call may claim more messages than fit;
                it puts the excess back into the queue before it returns.

        Returns:
            The messages in order, or an empty list after the timeout.
        """
        return self._runner.run(
            self._receive(limit, timeout=timeout, max_bytes=max_bytes, pop=True)
        )

    def reserve(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> Reservation[T] | None:
        """Receive a message under a lease.

        Delivery is at least once: the message comes back if it is not settled in time.

        Args:
            timeout: Seconds to wait for a message. None waits forever; 0 does not wait.
            lease: Seconds to hide the message from other consumers. None uses the queue's lease.

        Returns:
            The reservation, or None after the timeout. Settle it by commit, rollback, move, bury or
            release.
        """
        call = self._claim_at_once(timeout, lease)
        if call is None:
            received = self._runner.run(self._receive(1, timeout=timeout, lease=lease))
            return received[0] if received else None
        try:
            message = call.received(call.join())
        except BaseException:
            call.left()
            raise
        if message is not None:
            return message
        received = self._runner.run(self._receive(1, timeout=call.left_s, looked=True))
        return received[0] if received else None

    def reserve_many(
        self,
        limit: int,
        *,
        timeout: Duration | None = None,
        lease: Duration | None = None,
        max_bytes: int = MAX_RECEIVED_BYTES,
    ) -> list[Reservation[T]]:
        """Receive up to ``limit`` messages under a lease.

        Wait for the first message only, then take the messages that are ready.

        Args:
            limit: The maximum number of messages.
            timeout: As in ``pop_many``.
            lease: The lease in seconds. None uses the queue's lease.
            max_bytes: As in ``pop_many``. For a message that is put back, the try is not counted.

        Returns:
            The reservations in order, or an empty list after the timeout.
        """
        return self._runner.run(
            self._receive(limit, timeout=timeout, max_bytes=max_bytes, lease=lease)
        )

    def reserve_id(self, id: Id, *, lease: Duration | None = None) -> Reservation[T] | None:
        """Reserve the ready or scheduled message with this id, without waiting.

        Args:
            id: As in ``remove``.
            lease: As in ``reserve``.

        Returns:
            The reservation. None if the id is unknown in this queue, the message is finished or
            held, the queue is paused, or a limit or an earlier message of its group delays it.

        Raises:
            ConfigurationError: The message is in a pack, a document with many messages.
        """
        received = self._runner.run(self._reserve_id(id, lease))
        return received[0] if received else None

    @contextmanager
    def reserved(
        self,
        timeout: Duration | None = None,
        *,
        lease: Duration | None = None,
        on_lost: OnLost[T] = None,
    ) -> Iterator[Reservation[T] | None]:
        """Reserve a message for a ``with`` block.

        The lease is renewed while the block runs. The message is committed when the block ends. If
        the block raises an exception, the message is rolled back and the exception propagates. If
        the block settles the reservation itself, nothing more is done.

        Args:
            timeout: Seconds to wait for a message. None waits forever; 0 does not wait.
            lease: The lease in seconds. None uses the queue's lease.
            on_lost: A function to call with the reservation as soon as a renewal finds that the
                lease was lost or the client was closed. It runs in a thread of the client's renewer
                and should return at once, for example after setting an event. Its exceptions are
                logged and ignored.

        Returns:
            A context manager that yields the reservation, or None after the timeout.

        Raises:
            LeaseLost: The lease was lost before the block ended, so nothing was committed. If the
                block itself raises an exception, that exception propagates instead.
        """
        check_on_lost(on_lost)
        reservation = self.reserve(timeout, lease=lease)
        if reservation is None:
            yield None
            return
        with holding(self._runner, self, reservation, on_lost):
            yield reservation

    def renew(
        self, *reservations: Reservation[T], on_lost: OnLost[T] = None
    ) -> AbstractContextManager[None]:
        """Renew leases while a ``with`` block runs. Leaving the block settles nothing.

        For a message in a pack of a bucket, the lease of the whole pack is renewed.

        Args:
            reservations: Reservations of this queue. Once settled, they are no longer renewed.
            on_lost: Called for each lost lease, as in ``reserved``.

        Returns:
            A context manager.
        """
        return renewing(self._runner, self._backend, reservations, on_lost)

    def each(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> Each[Reservation[T]]:
        """Return an object to loop over the messages of this queue.

        The loop yields one reservation at a time, and renews its lease. When the body ends, the
        message is committed while the next message is claimed. If an exception, ``break`` or
        ``return`` leaves the body, the message is rolled back. But in a ``with`` block on
        this object, ``break`` and ``return`` commit the message, at the end of the block. A message
        that the body settles itself is left alone. Any number of loops may share the object.

        Args:
            timeout: Seconds to wait for the next message before the loop ends; see ``reserve``.
            lease: The lease in seconds. None uses the queue's lease.

        Raises:
            LeaseLost: The lease was lost before the body ended, so nothing was committed. The loop
                raises this when it asks for the next message.
        """
        return Each(self._runner, self._loops(timeout, lease))

    def commit(
        self,
        *reservations: Reservation[T],
        payload: Any = UNCHANGED,
        result: Any = UNCHANGED,
        session: Any = None,
    ) -> None:
        """Finish messages: move them to the history if the queue has one, or delete them.

        Args:
            reservations: Reservations of this queue.
            payload: The payload that the history keeps, instead of the payload of the message.
                Not for messages in packs of a bucket, because these messages have no history.
            result: The result of the work, a BSON value of at most 256 KB. It is kept if a history,
                or ``result=`` of the push, keeps the finished message; otherwise it is dropped.
            session: The session of a transaction.

        Raises:
            LeaseLost: Some messages were not held (see the exception's ``lost`` and ``unknown``).
                The other messages were finished.
            InvalidMessage: The payload or the result cannot be stored. Nothing was written.
            ConfigurationError: The lease of a message ends too soon for a transaction. Nothing was
                written.
        """
        call = self._commit_at_once(reservations, payload, result, session)
        if call is not None:
            try:
                outcome = call.join()
            except BaseException as error:
                call.tell(error)
                raise
            plan = call.ended(outcome)
            if plan is not None:
                call.complete(plan)
            return None
        return self._runner.run(
            self._settles(
                "commit",
                reservations,
                session,
                self._settling.commit(
                    reservations, payload=payload, result=result, session=session
                ),
            )
        )

    def rollback(
        self,
        *reservations: Reservation[T],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
        counted: bool = True,
        session: Any = None,
    ) -> None:
        """Put messages back in the queue for another try. A message without tries left is buried.

        Args:
            reservations: Reservations of this queue.
            delay: Seconds until the next try. None uses the queue's backoff; 0 means at once.
            error: The reason, kept in ``Message.error``.
            counted: Whether the try counts. If not, ``Message.tries`` returns to its former value,
                no message is buried, and ``Message.attempts`` does not record the try.
            session: The session of a transaction.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were rolled back.
        """
        how = RollbackOptions(delay=delay, error=error, counted=counted, session=session)
        return self._runner.run(self._rollback(reservations, how))

    def extend(self, *reservations: Reservation[T], lease: Duration | None = None) -> None:
        """Renew the leases of messages, starting now. This updates ``Reservation.until``.

        Args:
            reservations: Reservations of this queue.
            lease: The lease in seconds. None repeats the lease that each message was reserved with.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were extended.
        """
        return self._runner.run(self._backend.extend(reservations, lease=lease))

    def release(self, *reservations: Reservation[T]) -> None:
        """Put messages back in their places, unprocessed. The try is not counted.

        Args:
            reservations: Reservations of this queue.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were released.
        """
        return self._runner.run(
            self._settles("release", reservations, None, self._backend.release(reservations))
        )

    def move(
        self,
        *reservations: Reservation[T],
        to: Queue[Any] | str,
        payload: Any = UNCHANGED,
        update: dict[str, Any] | None = None,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        priority: int | None = None,
        group: str | None = None,
        session: Any = None,
    ) -> None:
        """Move messages to another queue. Each move is one atomic update.

        Args:
            reservations: Reservations of this queue.
            to: The target, a queue of the same namespace: a ``Queue``, or the name of a queue.
            payload: The new payload of each message, which must fit the model of the target.
            update: Instead of a new payload, an update of the stored payload with MongoDB's
                $set, $unset, $inc, $mul, $min, $max, $rename, $push, $pull and $addToSet.
            headers: Headers to merge into the headers of each message.
            delay: Seconds until the message can be received in the target; not with ``at``.
            at: The instant from which the message can be received in the target.
            key: The message key in the target; only with a single reservation.
            priority: The priority in the target, if that has priorities; None keeps the message's
                priority.
            group: The group in the target, if that is ordered; None keeps the message's group.
            session: The session of a transaction.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were moved.
            DuplicateKey: The key is taken in the target. The message is still held.
            InvalidMessage: The payload, or the result of the update, cannot be stored.
        """
        pairs = [(each, payload) for each in reservations]
        edits = MoveOptions(update=update, headers=headers, delay=delay, at=at, key=key)
        edits |= MoveOptions(priority=priority, group=group, session=session)
        return self._runner.run(self._move(pairs, to, edits))

    def move_many(
        self,
        pairs: Iterable[tuple[Reservation[T], Any]],
        *,
        to: Queue[Any] | str,
        update: dict[str, Any] | None = None,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        priority: int | None = None,
        group: str | None = None,
        session: Any = None,
    ) -> None:
        """Move messages to another queue, each with its own payload.

        Args:
            pairs: Pairs of a reservation and its new payload (or UNCHANGED).
            to: As in ``move``.
            update: As in ``move``.
            headers: As in ``move``.
            delay: As in ``move``.
            at: As in ``move``.
            key: As in ``move``.
            priority: As in ``move``.
            group: As in ``move``.
            session: As in ``move``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were moved.
            InvalidMessage: A payload cannot be stored. Nothing was moved.
        """
        edits = MoveOptions(update=update, headers=headers, delay=delay, at=at, key=key)
        edits |= MoveOptions(priority=priority, group=group, session=session)
        return self._runner.run(self._move(pairs, to, edits))

    def bury(self, *reservations: Reservation[T], error: BaseException | str | None = None) -> None:
        """Send messages to the dead-letter queue now.

        Args:
            reservations: Reservations of this queue.
            error: The reason, kept in ``Message.dead`` and ``Message.error``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were buried.
            ConfigurationError: A message is already in a dead-letter queue.
        """
        return self._runner.run(
            self._settles("bury", reservations, None, self._backend.bury(reservations, error=error))
        )

    def progress(
        self, reservation: Reservation[T], fraction: float, note: str | None = None
    ) -> None:
        """Store the progress of the work. Any process can read it in ``Message.progress``.

        Args:
            reservation: A reservation of this queue.
            fraction: How much of the work is done, from 0 to 1.
            note: A short text for people, or None.

        Raises:
            LeaseLost: The message is no longer held.
        """
        return self._runner.run(self._backend.progress(reservation, fraction, note))

    def checkpoint(self, reservation: Reservation[T], state: Any) -> None:
        """Store the state of the work. The next try finds it in ``Message.checkpoint``.

        Args:
            reservation: A reservation of this queue.
            state: Any BSON value.

        Raises:
            LeaseLost: The message is no longer held.
            InvalidMessage: The state is not BSON.
        """
        return self._runner.run(self._backend.checkpoint(reservation, state))

    def claim(
        self,
        group: str,
        *,
        limit: int,
        lease: Duration | None = None,
        max_bytes: int = MAX_BATCH_BYTES,
    ) -> AbstractContextManager[Claim]:
        """Claim many messages for a ``with`` block, for bulk work such as a Spark job.

        The messages share one lease, which is renewed while the block runs. If an earlier claim of
        the group is unfinished, for example because its process died, the block takes it over. If
        the block raises an exception, or ends without ``commit()``, the claim is rolled back.

        Args:
            group: The durable name of this consumer: 1-110 characters of A-Z a-z 0-9 _ - . : >.
                Only one process at a time may use it.
            limit: The maximum number of messages, up to 100 000. A bucket stores messages in packs
                (documents with many messages) and claims whole packs, so it may exceed the limit.
            lease: Seconds for which the messages stay held if this process dies. None uses the
                queue's lease.
            max_bytes: The maximum size of all messages together, in bytes as stored. At least one
                message is claimed, whatever its size.

        Returns:
            A context manager that yields the ``Claim``; empty if no message is ready.

        Raises:
            Fenced: Another process claimed for the group before this claim was settled.
            LeaseLost: ``commit()`` found that some messages were no longer held. The other messages
                were finished.
        """
        return claimed(self._runner, self._backend, group, ClaimSize(limit, max_bytes), lease)
