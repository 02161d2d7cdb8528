# Generated from client.py by `make faces`. Edit client.py, and run `make faces`.
"""``AsyncClient``: opens queues, streams and pipelines over one ``AsyncConnection``.

The module is long because users look up all operations of a client in one class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from pyqueue import arguments, client_receiving, client_settling
from pyqueue.async_queues import AsyncQueue
from pyqueue.async_scheduling import AsyncScheduling
from pyqueue.async_streams import AsyncConsumer, AsyncStream
from pyqueue.backends import all_queues, awaiting, cancelling, finding, freeing, reshaping
from pyqueue.backends.forms import RollbackOptions
from pyqueue.backends.moving import MoveOptions
from pyqueue.client_base import make_backend, make_stream_backend, shape_of
from pyqueue.delivery import To
from pyqueue.facts import Gather, WhenDead
from pyqueue.gather_blocks import gathered_async
from pyqueue.limits import Limit
from pyqueue.messages import (
    UNCHANGED,
    Backoff,
    Cancelled,
    Duration,
    Finished,
    Headers,
    Id,
    KindName,
    Message,
    OnFailure,
    QueueInfo,
    QueueOptions,
    Reservation,
)
from pyqueue.pipeline import AwaitedReport, Pipeline
from pyqueue.pipeline.lifespan import LifespanOf
from pyqueue.queue_base import requesting
from pyqueue.runtime.connecting import AsyncConnection, Durability
from pyqueue.specs import QueueSpec
from pyqueue.telemetry.flushing import attach
from signals import AsyncBus

R = TypeVar("R")
T = TypeVar("T")


class AsyncClient(AsyncScheduling):
    """A client for async code. It belongs to the event loop in which it is first used.

    Creating a client does no I/O. The client connects to the server at its first operation, or at
    the start of an ``async with`` block.

    Args:
        target: "mongodb://host/db", "mongodb+srv://...",
            "memory:" (mongomock, this process only, run inline),
            "memory:NAME" (the same database for all clients of the process with this name),
            "embedded:PATH" (starts a private mongod with its data in PATH, and stops it on close),
            or a database of AsyncMongoClient or motor, which the client never closes. If a URL
            names no database, the database is "pyqueue".
        namespace: The name of the collection that holds the queues.
        signals: The bus that wakes waiting consumers: a URL ("memory:", "capped:",
            "redis://host:port/0", "none:") or a bus object.
        durability: "majority" (a write returns when it is in the journals of a majority of the
            members), or "acknowledged" (a write returns when the primary has confirmed it; this is
            faster, but a fail-over may lose writes or deliver a message again).
        owner: A label that is stored in the messages that this client holds; default "host:pid".
        command_timeout: Seconds that a command may take, retries included, before ``Unavailable``
            is raised.
        hooks: Objects whose methods are called, for example, when messages are pushed, received or
            settled; see ``Hooks``.
        telemetry: Whether to store rates and latencies of messages; see ``AsyncQueue.stats``. None
            stores them on a server, and not in memory.
    """

    def __init__(
        self,
        target: object,
        *,
        namespace: str = "pyqueue",
        signals: str | AsyncBus | None = None,
        durability: Durability = "majority",
        owner: str | None = None,
        command_timeout: Duration = 30,
        hooks: Iterable[object] = (),
        telemetry: bool | None = None,
    ) -> None:
        super().__init__(
            AsyncConnection(
                target,
                namespace=namespace,
                signals=signals,
                durability=durability,
                owner=owner,
                command_timeout=command_timeout,
                hooks=hooks,
            )
        )
        self._telemetry = attach(self._connection, telemetry)

    @overload
    def queue(self, name: QueueSpec[T]) -> AsyncQueue[T]: ...
    @overload
    def queue(
        self, name: str, model: type[T], **options: Unpack[QueueOptions]
    ) -> AsyncQueue[T]: ...
    @overload
    def queue(
        self, name: str, model: object = None, **options: Unpack[QueueOptions]
    ) -> AsyncQueue[Any]: ...
    def queue(
        self,
        name: str | QueueSpec[Any],
        model: object = None,
        *,
        lease: Duration = 60,
        max_tries: int | None = 20,
        dead_letter: str | None = None,
        history: Duration | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008  # frozen
        poll: Duration = 15,
        kind: KindName | None = None,
        strict: bool | None = None,
        on_failure: OnFailure | None = None,
        pack: int | None = None,
        limit: Limit | None = None,
        auto_delete: Duration | None = None,
    ) -> AsyncQueue[Any]:
        """Return a queue of this namespace. This does no I/O.

        All users of a queue must agree on ``strict`` and on the options listed after ``strict``.

        Args:
            name: 1-110 characters of A-Z a-z 0-9 _ - . : > (not counting a final ".dead"), or a
                QueueSpec.
            model: The type of the payloads, for pydantic to validate, or None for any BSON value.
            lease: Seconds for which a reserved message is held.
            max_tries: How many times a message is tried before it is buried, or None for no limit.
            dead_letter: The name of the queue for buried messages; default "<name>.dead".
            history: Seconds for which finished messages are kept, or None to delete them at once.
            backoff: How long a message waits after a rollback.
            poll: Seconds within which a waiting consumer checks the queue even without a signal.
            kind: "standard", "priority", "ordered" or "bucket". None accepts the existing kind.
            strict: For a queue with priorities: whether high priorities may starve low priorities.
            on_failure: For an ordered queue: "block" (a failed message blocks its group) or "skip".
            pack: For a bucket: the maximum number of messages in one document, up to 1000.
            limit: A limit on reserved messages, or on starts per period, across all processes.
            auto_delete: Seconds after which the queue is deleted if it is unused and empty.

        Returns:
            The queue.

        Raises:
            InvalidName: The name is not allowed.
            ConfigurationError: An option is not allowed.
        """
        options = QueueOptions(lease=lease, max_tries=max_tries, dead_letter=dead_letter)
        options |= QueueOptions(history=history, backoff=backoff, poll=poll, kind=kind)
        options |= QueueOptions(strict=strict, on_failure=on_failure, pack=pack, limit=limit)
        options |= QueueOptions(auto_delete=auto_delete)
        backend = make_backend(self._connection, name, model, **options)
        return AsyncQueue(self._connection, backend)

    @overload
    def stream(
        self,
        name: str,
        model: type[T],
        *,
        retention: Duration | None = None,
        limit: Limit | None = None,
    ) -> AsyncStream[T]: ...
    @overload
    def stream(
        self,
        name: str,
        model: object = None,
        *,
        retention: Duration | None = None,
        limit: Limit | None = None,
    ) -> AsyncStream[Any]: ...
    def stream(
        self,
        name: str,
        model: object = None,
        *,
        retention: Duration | None = None,
        limit: Limit | None = None,
    ) -> AsyncStream[Any]:
        """Return a stream of this namespace. This does no I/O.

        Args:
            name: 1-110 characters of A-Z a-z 0-9 _ - . : >. No queue may have the same name.
            model: Anything that pydantic's TypeAdapter accepts, as for ``queue``.
            retention: Seconds, at least 600, for which messages are kept. All users of the stream
                must give the same value. None means the stored value, or 7 days for a new stream.
            limit: A Limit with a rate: how many messages each consumer group may start per period.

        Returns:
            The stream.

        Raises:
            InvalidName: The name is not allowed.
            ConfigurationError: An option is not allowed.
        """
        backend = make_stream_backend(self._connection, name, model, retention, limit)
        return AsyncStream(self._connection, backend)

    def pipeline(
        self, name: str = "pipeline", *, lifespan: LifespanOf[Any] | None = None
    ) -> Pipeline[AwaitedReport]:
        """Return a pipeline of queues of this namespace. This does no I/O.

        Args:
            name: A label for reports. It does not become part of queue names.
            lifespan: The resources that the handlers share, as for ``Worker``.

        Returns:
            A pipeline without stages.
        """
        return Pipeline(self, name, lifespan=lifespan)

    async def receive(
        self,
        queues: Sequence[AsyncQueue[Any] | AsyncConsumer[Any]],
        limit: int,
        *,
        timeout: Duration | None = None,
    ) -> list[Reservation[Any]]:
        """Receive up to ``limit`` messages under a lease, from several queues in a strict order.

        Messages of the first queue come before messages of the second queue, and so on. As long as
        a queue has enough messages, later queues have to wait. The call waits for all queues at
        once, until one of them has a message; then it takes the messages that are ready.

        Args:
            queues: Queues and consumer groups of this client, of any kinds, each listed once.
            limit: The maximum number of messages.
            timeout: Seconds to wait for a message. None waits forever; 0 does not wait.

        Returns:
            The reservations in the order of ``queues``, or an empty list after the timeout. Each
            has the lease of its queue. Settle them with this client, for example by ``commit``.

        Raises:
            ConfigurationError: ``queues`` is empty, or contains an object of another kind or of
                another client, or a queue twice.
        """
        plan = client_receiving.receive(self._connection, queues, limit, timeout)
        return await self._connection.run(plan)

    async def commit(
        self,
        *reservations: Reservation[Any],
        payload: Any = UNCHANGED,
        result: Any = UNCHANGED,
        session: Any = None,
    ) -> None:
        """Finish messages of any queues and consumer groups, as ``AsyncQueue.commit`` does.

        Like all methods of a client that settle messages, this uses the options with which each
        message was received. A reservation carries these options, even when it is pickled. If an
        argument is not allowed for one of the messages, nothing is settled.

        Args:
            reservations: Reservations from any queues and consumer groups of this namespace.
            payload: The payload that the history keeps, instead of the payload of the message.
            result: As in ``AsyncQueue.commit``.
            session: The session of a transaction; not for messages of streams.

        Raises:
            LeaseLost: Some messages were not held (see the exception's ``lost`` and ``unknown``).
                The other messages were finished.
        """
        plan = client_settling.commit(self._connection, reservations, payload, result, session)
        return await self._connection.run(plan)

    async def rollback(
        self,
        *reservations: Reservation[Any],
        delay: Duration | None = None,
        error: BaseException | str | None = None,
        counted: bool = True,
        session: Any = None,
    ) -> None:
        """Put messages back in their queues for another try, as ``AsyncQueue.rollback`` does.

        Args:
            reservations: As in ``commit``.
            delay: Seconds until the next try. None uses each queue's backoff; 0 means at once.
            error: The reason, kept in ``Message.error``.
            counted: As in ``AsyncQueue.rollback``.
            session: As in ``commit``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were rolled back.
        """
        how = RollbackOptions(delay=delay, error=error, counted=counted, session=session)
        plan = client_settling.rollback(self._connection, reservations, how)
        return await self._connection.run(plan)

    async def release(self, *reservations: Reservation[Any]) -> None:
        """Put messages back unprocessed, as ``AsyncQueue.release`` does. The try is not counted.

        Args:
            reservations: As in ``commit``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were released.
        """
        return await self._connection.run(client_settling.release(self._connection, reservations))

    async def extend(self, *reservations: Reservation[Any], lease: Duration | None = None) -> None:
        """Renew the leases of messages, starting now. This updates ``Reservation.until``.

        Args:
            reservations: As in ``commit``.
            lease: The lease in seconds. None repeats the lease that each message was reserved with.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were extended.
        """
        return await self._connection.run(
            client_settling.extend(self._connection, reservations, lease)
        )

    async def bury(
        self, *reservations: Reservation[Any], error: BaseException | str | None = None
    ) -> None:
        """Send messages to the dead-letter queues of their queues and consumer groups now.

        Args:
            reservations: As in ``commit``.
            error: The reason, kept in ``Message.dead`` and ``Message.error``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were buried.
            ConfigurationError: A message is already in a dead-letter queue. Nothing was buried.
        """
        return await self._connection.run(
            client_settling.bury(self._connection, reservations, error)
        )

    async def move(
        self,
        *reservations: Reservation[Any],
        to: AsyncQueue[Any] | str,
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
        """Move messages of any queues to another queue, as ``AsyncQueue.move`` does.

        Args:
            reservations: As in ``commit``, except that messages of a stream cannot be moved.
            to: The target queue, or its name, as in ``AsyncQueue.move``.
            payload: The new payload of each message.
            update: An update of the stored payload, instead of a new payload.
            headers: Headers to merge into the headers of each message.
            delay: Seconds until the message can be received in the target; not with ``at``.
            at: The instant from which the message can be received in the target.
            key: The message key in the target; only with a single reservation.
            priority: The priority in the target; None keeps the message's priority.
            group: The group in the target; None keeps the message's group.
            session: As in ``commit``.

        Raises:
            LeaseLost: Some messages were no longer held. The other messages were moved.
            DuplicateKey: The key is taken in the target. The message is still held.
            InvalidMessage: The payload, or the result of the update, cannot be stored.
        """
        edits = MoveOptions(update=update, headers=headers, delay=delay, at=at, key=key)
        edits |= MoveOptions(priority=priority, group=group, session=session)
        plan = client_settling.move(self._connection, reservations, to, payload, edits)
        return await self._connection.run(plan)

    async def queues(self, *, cap: int | None = None, held: bool = True) -> list[QueueInfo]:
        """List every queue that has a record or a message, with its counts and options.

        The counts of one queue may be from different instants; ``AsyncQueue.counts`` is exact.

        Args:
            cap: Count up to this number in each state. A count of ``cap`` means "``cap`` or more".
            held: False counts reserved messages as scheduled. This is faster if many messages are
                reserved or scheduled, because telling them apart requires reading each message.

        Returns:
            One QueueInfo for each queue, sorted by name.
        """
        return await self._connection.run(all_queues.queues(cap, held))

    async def find(self, id: Id) -> Message[Any] | None:
        """Return a message, wherever it is in the namespace.

        This includes dead-letter queues, histories and streams. A message that waits in a
        dead-letter queue has the state "dead". The payload is returned as stored, without a model.

        Args:
            id: The id of the message; an ObjectId may be given as text. A message in a pack of a
                bucket has the id "<pack>:<place>", and a message of a stream has the id
                "<stream>~<position>".

        Returns:
            The message: a Finished if it is in a history, a StreamMessage if it is in a stream.
            None if it was never stored, or is finished and not kept in a history.
        """
        return await self._connection.run(finding.find(id))

    async def wait(self, id: Id, timeout: Duration | None = None) -> Finished[Any]:
        """Wait until a message that was pushed with ``result=`` has finished, in any queue.

        If this client pushed the message and has a bus, the call returns at once when the message
        has finished; otherwise, within a second.

        Args:
            id: As in ``find``; not for messages in streams or packs, whose results are not kept.
            timeout: Seconds to wait. None waits forever; 0 does not wait.

        Returns:
            The finished message, with its ``result``.

        Raises:
            JobFailed: The message was buried, removed or cancelled, it has expired, or it is gone
                and its outcome was not kept.
            TimeoutError: The message did not finish within the timeout. It stays in its queue.
        """
        waiters = self._connection.waiters(self._connection.results)
        return await self._connection.run(awaiting.wait(waiters, id, timeout))

    async def request(
        self,
        queue: str | AsyncQueue[T],
        payload: T,
        *,
        timeout: Duration = 30,
        headers: Headers | None = None,
        priority: int | None = None,
        group: str | None = None,
    ) -> Any:
        """Push a message, wait until it has finished, and return its result.

        Args:
            queue: The queue, or its name.
            payload: As in ``AsyncQueue.push``.
            timeout: Seconds to wait. After that, or if the call is interrupted, the message is
                cancelled, and no worker starts to work on it; see ``expires`` of
                ``AsyncQueue.push``.
            headers: As in ``AsyncQueue.push``.
            priority: As in ``AsyncQueue.push``.
            group: As in ``AsyncQueue.push``.

        Returns:
            The result that the handler returned, or None if the message has no result.

        Raises:
            JobFailed: As in ``wait``.
            TimeoutError: The message did not finish within the timeout.
        """
        target = self.queue(queue) if isinstance(queue, str) else queue
        own = {"headers": headers, "priority": priority, "group": group}
        return await self._connection.run(requesting(target, payload, timeout, own))

    def gather(
        self, then: To[Any], *, dead: WhenDead = "hold"
    ) -> AbstractAsyncContextManager[Gather]:
        """Push a final message once all messages pushed with ``gather=`` in a block have ended.

        A message has ended when it is finished, removed or cancelled, but not when it moves to
        another queue or is tried again. The final message is pushed once, by the process that finds
        that all messages have ended; this process may have exited by then. If the block raises an
        exception, or a push in it fails, the final message is not pushed; the pushed messages stay.

        Args:
            then: The final message: its queue, its payload and the other options of a ``To``.
            dead: How to treat a buried message: "hold" waits until the message is sent back and
                finished, or is removed; "end" counts the message as ended.

        Returns:
            An async context manager that yields the gather, to be passed as ``gather=``.
            The ``id`` of the gather will be the id of the final message.

        Raises:
            ConfigurationError: ``then`` has no payload, its queue is a stream, or its queue does
                not support an option of ``then``.
            Unavailable: A push in the block failed, or the server did not answer.
        """
        return gathered_async(self._connection, then, dead)

    async def cancel(self, id: Id, force: bool = False) -> Cancelled | None:
        """Cancel a message in any queue, as ``AsyncQueue.cancel`` does.

        Args:
            id: As in ``find``.
            force: Whether to end even a held message at once. Its holder gets ``LeaseLost``.

        Returns:
            "cancelled" if the message has ended, "requested" if its holder was asked to end it.
            None if no queue has the message, or it is already finished.

        Raises:
            ConfigurationError: The message is held in a pack of a bucket, or is in a stream.
        """
        return await self._connection.run(cancelling.cancel(id, force))

    async def force_release(self, id: Id) -> bool:
        """Take a message away from its holder. It becomes ready again, and the try still counts.

        The holder gets ``LeaseLost`` when it settles the message or renews the lease. The holder
        may still work on the message while another consumer receives it.

        Args:
            id: As in ``find``.

        Returns:
            False if no queue has the message, or if the message is not held.

        Raises:
            ConfigurationError: The message is held in a pack of a bucket, or is in a stream.
        """
        return await self._connection.run(freeing.force_release(id))

    async def delete_queue(self, name: str, force: bool = False) -> int:
        """Delete a queue and its history. With ``force``, also delete its unfinished messages.

        Without ``force``, a message that can still be received is never deleted, even if it is
        pushed at the same time. Processes that still use the queue create it again: a consumer
        within seconds, a producer within a minute.

        Args:
            name: The name of the queue. Its dead-letter queue is a separate queue and stays.
            force: Whether to delete live messages, too. Their holders get ``LeaseLost``.

        Returns:
            The number of deleted messages, history included.

        Raises:
            ConfigurationError: The queue has live messages, and ``force`` is False.
            Unavailable: The server did not answer. Repeat the call.
        """
        return await self._connection.run(all_queues.delete_queue(name, force))

    async def reshape(
        self,
        name: str,
        *,
        strict: bool | None = None,
        on_failure: OnFailure | None = None,
        retention: Duration | None = None,
        pack: int | None = None,
        limit: Limit | Literal[False] | None = None,
        auto_delete: Duration | Literal[False] | None = None,
    ) -> None:
        """Change the options that all users of a queue or a stream must agree on.

        Running processes adopt the change within 5 s, or at once with a bus. A new retention takes
        effect within a minute.

        Args:
            name: The name of the queue, or of the stream.
            strict: As in ``queue``; None leaves it unchanged.
            on_failure: As in ``queue``; None leaves it unchanged.
            retention: As in ``stream``; None leaves it unchanged.
            pack: As in ``queue``; None leaves it unchanged. A change affects new messages only.
            limit: As in ``queue``; None leaves it unchanged, False removes it. After a decrease,
                messages that are already reserved stay reserved.
            auto_delete: As in ``queue``; None leaves it unchanged, False removes it.

        Raises:
            ConfigurationError: There is no such queue, or its kind has no such option.
        """
        arguments.queue_name(name)
        shape = shape_of(
            strict=strict,
            on_failure=on_failure,
            retention=retention,
            pack=pack,
            limit=limit,
            auto_delete=auto_delete,
        )
        by = self._connection.owner()
        await self._connection.run(reshaping.reshape(name, shape, self.namespace, by))

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Start a transaction: commit when the block ends, abort when it raises an exception.

        The block runs only once. To retry it on transient errors, use ``run_transaction``.

        Returns:
            An async context manager that yields the session. Pass it as ``session=``.

        Raises:
            ConfigurationError: The server is not a replica set.
        """
        return self._connection.transaction()

    async def run_transaction(self, fn: Callable[[Any], Awaitable[R]]) -> R:
        """Await ``fn(session)`` in a transaction, then commit. Repeat if MongoDB asks for a retry.

        Args:
            fn: A function that passes its argument on as ``session=``; it may be called more than
                once.

        Returns:
            The return value of ``fn``.

        Raises:
            ConfigurationError: The server is not a replica set, or ``fn`` is not async. Nothing is
                stored.
        """
        return await self._connection.run_transaction(fn)

    async def close(self) -> None:
        """Close everything that this client opened. Repeated calls are allowed.

        Waiting consumers wake up and raise ``QueueClosed``.
        """
        if self._telemetry is not None:
            await self._telemetry.close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        await self._connection.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
