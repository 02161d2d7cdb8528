"""``Stream``: a log that any number of consumer groups read, each at its own pace.

``Consumer``: one of these groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import TypeVar

from pyqueue.backends.forms import RollbackOptions
from pyqueue.each import Each
from pyqueue.messages import (
    MAX_RECEIVED_BYTES,
    Backoff,
    ConsumerCounts,
    ConsumerInfo,
    Duration,
    Headers,
    StreamMessage,
    StreamReservation,
)
from pyqueue.reserved import OnLost, check_on_lost, holding, renewing
from pyqueue.runtime.plan_runner import PlanRunner
from pyqueue.stream_base import ConsumerBase, Start, StreamBase
from pyqueue.telemetry.reading import stats
from pyqueue.telemetry.values import QueueStats

T = TypeVar("T")


class Stream(StreamBase[T, PlanRunner]):
    """A stream, for blocking code. ``Client.stream`` creates it, without I/O.

    Each message has a position: 0, 1, 2, ... without gaps. Once a reader has seen a position, no
    message can appear at a lower position. A call may raise ``Unavailable`` or ``QueueClosed``.
    """

    def append(self, payload: T, *, headers: Headers | None = None) -> int:
        """Append a message.

        Args:
            payload: A BSON value, or a value of the model of the stream.
            headers: Small labels, as a mapping {str: str | int | float | bool}.

        Returns:
            The position of the message.

        Raises:
            InvalidMessage: The payload is not BSON, is too large or does not fit the model.
            Unavailable: The message may or may not be stored. A repeated append may store it
                twice.
        """
        positions = self._runner.run(self._append([payload], headers))
        return positions[0]

    def append_many(self, payloads: Iterable[T], *, headers: Headers | None = None) -> list[int]:
        """Append many messages. If one is invalid, none is appended.

        The messages are stored in packs, documents of up to 1000 messages. Messages of other
        callers may come between two packs.

        Args:
            payloads: The payloads of the messages, in order.
            headers: The headers that every message gets.

        Returns:
            The positions of the messages.

        Raises:
            InvalidMessage: A payload cannot be stored. Nothing was written.
            Unavailable: Some messages may be stored. The text says how many are certainly stored.
        """
        return self._runner.run(self._append(payloads, headers))

    def read(self, *, after: int | None = None, limit: int = 1000) -> list[StreamMessage[T]]:
        """Return messages in order of position. This needs no consumer group, and changes nothing.

        Args:
            after: Return the messages after this position. None begins with the first message.
            limit: The maximum number of messages. If messages are large, there may be fewer.

        Returns:
            The messages in order; an empty list at the end of the stream. If messages after
            ``after`` were deleted, the list begins with the first message that is left. A message
            that does not fit the model has its raw payload, and ``error`` says why.
        """
        return self._runner.run(self._backend.read(after, limit))

    def trim(self, *, before: int | datetime) -> int:
        """Delete old messages.

        Messages are stored in packs, documents of up to 1000 messages, and only whole packs are
        deleted. The last pack stays, and so do packs that are younger than 10 minutes.

        Args:
            before: A position or an instant. The packs that lie entirely before this position, or
                that were appended before this instant, are deleted.

        Returns:
            The position of the first message that is left.
        """
        return self._runner.run(self._backend.trim(before))

    def consumer(
        self,
        name: str,
        *,
        start: Start = "first",
        lease: Duration = 60,
        max_tries: int | None = 20,
        dead_letter: str | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008  # frozen
        poll: Duration = 15,
    ) -> Consumer[T]:
        """Return a consumer group of this stream. This does no I/O.

        The first call that receives creates the group, which exists until ``delete_consumer``. Any
        number of processes may receive for the group; together they get every message.

        Args:
            name: The durable name of the group: 1-110 characters of A-Z a-z 0-9 _ - . : >
            start: Where a new group begins: "first", "last" (messages appended from now on), an
                instant, or a position. It has no effect on an existing group; use
                ``Consumer.seek`` instead.
            lease: Seconds for which a reserved message is held.
            max_tries: How many times a message is tried before it is buried, or None for no limit.
            dead_letter: The name of the queue for buried messages; "<stream>.<group>.dead" by
                default.
            backoff: How long a message waits after a rollback.
            poll: Seconds within which a waiting consumer checks the stream even without a signal.

        Returns:
            The consumer group.

        Raises:
            ConfigurationError: An option is not allowed.
        """
        plans = self._group(name, start, lease, max_tries, dead_letter, backoff=backoff, poll=poll)
        return Consumer(self._runner, plans)

    def consumers(self) -> list[ConsumerInfo]:
        """Return the consumer groups of this stream, with their positions and counts.

        Returns:
            One ConsumerInfo for each group, sorted by name.
        """
        return self._runner.run(self._backend.groups())

    def delete_consumer(self, name: str) -> bool:
        """Delete a consumer group. The holders of its messages get ``LeaseLost``.

        A process that still receives for the group creates it again, at the ``start`` that it gave.

        Args:
            name: The name of the group.

        Returns:
            False if there was no such group.
        """
        return self._runner.run(self._backend.delete_group(name))

    def stats(self, since: Duration | datetime = 3600) -> QueueStats:
        """Return how many messages were appended. See ``Queue.stats``."""
        return self._runner.run(stats(self.name, since))


class Consumer(ConsumerBase[T, PlanRunner]):
    """A consumer group of a stream, for blocking code. ``Stream.consumer`` makes it, without I/O.

    Its ``name`` is "<stream>~<group>". Messages that one call reserves share leases: each range of
    up to 1000 messages has one lease.
    """

    def reserve(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> StreamReservation[T] | None:
        """Receive a message under a lease.

        Args:
            timeout: Seconds to wait for a message. None waits forever; 0 does not wait.
            lease: Seconds to hide the message from other consumers of the group. None uses the
                group's lease.

        Returns:
            The reservation, or None after the timeout. Settle it by commit, rollback, bury or
            release.
        """
        return next(iter(self._runner.run(self._receive(1, timeout=timeout, lease=lease))), None)

    def reserve_many(
        self,
        limit: int,
        *,
        timeout: Duration | None = None,
        lease: Duration | None = None,
        max_bytes: int = MAX_RECEIVED_BYTES,
    ) -> list[StreamReservation[T]]:
        """Receive up to ``limit`` messages under a lease.

        Wait for the first message only, then take the messages that are ready.

        Args:
            limit: The maximum number of messages.
            timeout: Seconds to wait for the first message. None waits forever; 0 does not wait.
            lease: The lease in seconds. None uses the group's lease.
            max_bytes: The maximum size of all messages together, in bytes as stored. The first
                message is returned even if it is larger.

        Returns:
            The reservations in the order of their positions, or an empty list after the timeout.
        """
        return self._runner.run(
            self._receive(limit, timeout=timeout, max_bytes=max_bytes, lease=lease)
        )

    @contextmanager
    def reserved(
        self,
        timeout: Duration | None = None,
        *,
        lease: Duration | None = None,
        on_lost: OnLost[T] = None,
    ) -> Iterator[StreamReservation[T] | None]:
        """Reserve a message for a ``with`` block, as ``Queue.reserved`` does.

        The lease is renewed while the block runs. The message is committed when the block ends, and
        rolled back if the block raises an exception.

        Args:
            timeout: Seconds to wait for a message. None waits forever; 0 does not wait.
            lease: The lease in seconds. None uses the group's lease.
            on_lost: Called with the reservation as soon as a renewal finds that its lease was lost.

        Returns:
            A context manager that yields the reservation, or None after the timeout.

        Raises:
            LeaseLost: The lease was lost before the block ended, so nothing was committed.
        """
        check_on_lost(on_lost)
        reservation = self.reserve(timeout, lease=lease)
        if reservation is None:
            yield None
            return
        with holding(self._runner, self, reservation, on_lost):
            yield reservation

    def renew(
        self, *reservations: StreamReservation[T], on_lost: OnLost[T] = None
    ) -> AbstractContextManager[None]:
        """Renew leases while a ``with`` block runs. Leaving the block settles nothing.

        Messages that were reserved together share a lease, so all of them stay held.

        Args:
            reservations: Reservations of this group. Once settled, they are no longer renewed.
            on_lost: Called for each lost lease, as in ``reserved``.

        Returns:
            A context manager.
        """
        return renewing(self._runner, self._plans, reservations, on_lost)

    def each(
        self, timeout: Duration | None = None, *, lease: Duration | None = None
    ) -> Each[StreamReservation[T]]:
        """Return an object to loop over the messages of this group, as ``Queue.each`` does.

        Args:
            timeout: Seconds to wait for the next message before the loop ends. None waits forever;
                0 does not wait.
            lease: The lease in seconds. None uses the group's lease.
        """
        return Each(self._runner, self._loops(timeout, lease))

    def commit(self, *reservations: StreamReservation[T]) -> None:
        """Finish messages for this group. The stream and other groups keep them.

        Args:
            reservations: Reservations of this group.

        Raises:
            LeaseLost: Some messages were no longer held (see the exception's ``lost``). The other
                messages were finished.
        """
        return self._runner.run(
            self._settles("commit", reservations, None, self._plans.commit(reservations))
        )

    def rollback(
        self,
        *reservations: StreamReservation[T],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
        counted: bool = True,
    ) -> None:
        """Put messages back for another try. A message without tries left is buried.

        Args:
            reservations: Reservations of this group.
            delay: Seconds until the next try. None uses the group's backoff; 0 means at once.
            error: The reason, kept in ``Message.error``.
            counted: Whether the try counts. If not, ``Message.tries`` returns to its former value,
                and no message is buried.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were rolled back.
        """
        how = RollbackOptions(delay=delay, error=error, counted=counted)
        return self._runner.run(self._rollback(reservations, how))

    def extend(self, *reservations: StreamReservation[T], lease: Duration | None = None) -> None:
        """Renew the leases of messages, starting now. This updates ``Reservation.until``.

        Messages that were reserved together share a lease. If the leases differ, the longest lease
        applies to all of them.

        Args:
            reservations: Reservations of this group.
            lease: The lease in seconds. None repeats the lease that each message was reserved with.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were extended.
        """
        return self._runner.run(self._plans.extend(reservations, lease=lease))

    def release(self, *reservations: StreamReservation[T]) -> None:
        """Put messages back unprocessed. The try is not counted.

        Args:
            reservations: Reservations of this group.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were released.
        """
        return self._runner.run(
            self._settles("release", reservations, None, self._plans.release(reservations))
        )

    def bury(
        self, *reservations: StreamReservation[T], error: BaseException | str | None = None
    ) -> None:
        """Send messages to the dead-letter queue of this group now. Other groups still get them.

        Args:
            reservations: Reservations of this group.
            error: The reason, kept in ``Message.dead`` and ``Message.error``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were buried.
        """
        plan = self._plans.bury(reservations, error=error)
        return self._runner.run(self._settles("bury", reservations, None, plan))

    def counts(self) -> ConsumerCounts:
        """Count the messages that the group has not finished yet, by state.

        Returns:
            The numbers of ready, scheduled and reserved messages, their total, and the number of
            skipped messages.
        """
        return self._runner.run(self._plans.counts())

    def stats(self, since: Duration | datetime = 3600) -> QueueStats:
        """Return the rates and latencies of this group. See ``Queue.stats``."""
        return self._runner.run(stats(self.name, since))

    def pause(self) -> None:
        """Stop the consumers of this group, in every process, from receiving."""
        return self._runner.run(self._plans.pause(True))

    def resume(self) -> None:
        """Let the consumers of this group receive again."""
        return self._runner.run(self._plans.pause(False))

    def paused(self) -> bool:
        """Return whether the group is paused.

        Returns:
            True if it is paused.
        """
        return self._runner.run(self._plans.paused())

    def seek(self, position: Start) -> int:
        """Make the group continue at another position. This ends every lease of the group.

        Args:
            position: "first", "last", an instant, or the position of the next message to receive.

        Returns:
            The position at which the group continues.
        """
        return self._runner.run(self._plans.seek(position))
