# Generated from client.py by `make faces`. Edit client.py, and run `make faces`.
"""``AsyncClient``: the public form of one ``AsyncConnection``. It creates queues and pipelines."""

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

    Creating a client does no I/O. It connects to the server at the first operation, or when it is
    entered.

    Args:
        target: "mongodb://host/db", "mongodb+srv://...",
            "memory:" (mongomock, this process only, run inline),
            "memory:NAME" (the same database for all clients of the process with this name),
            "embedded:PATH" (starts a private mongod with its data in PATH, and stops it on close),
            or a database of AsyncMongoClient or motor, which the client never closes. If a URL
            names no database, the database is "pyqueue".
        namespace: The collection that holds the queues.
        signals: The bus that wakes blocked consumers: a URL ("memory:", "capped:",
            "redis://host:port/0", "none:") or a bus object.
        durability: "majority" (a write returns when it is in the journals of a majority of the
            members), or "acknowledged" (when the primary has confirmed it; this is faster, but a
            fail-over may lose writes or deliver a message again).
        owner: A label, written into the messages that this client holds; "host:pid" by default.
        command_timeout: Seconds that a command may take, retries included, before ``Unavailable``
            is raised.
        hooks: Objects whose methods are called when something happens to messages; see ``Hooks``.
        telemetry: Whether to count messages, and to store the figures for all processes; see
            ``AsyncQueue.stats``.
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
        telemetry: bool = False,
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

        All users of a queue must agree on ``strict`` and on the options after it.

        Args:
            name: 1-110 of A-Z a-z 0-9 _ - . : > (a trailing ".dead" not counted), or a QueueSpec.
            model: The type of the payloads, for pydantic's TypeAdapter, or None for any BSON value.
            lease: Seconds for which a reserved message is held.
            max_tries: How many times a message is tried before it is buried, or None for no limit.
            dead_letter: The name of the queue for buried messages; default "<name>.dead".
            history: Seconds for which finished messages are kept, or None to delete them.
            backoff: How long a message waits after a rollback.
            poll: Seconds after which a waiting consumer checks the queue even without a signal.
            kind: "standard", "priority", "ordered" or "bucket", or None for the queue's own kind.
            strict: For a queue with priorities: whether high priorities may starve low priorities.
            on_failure: For an ordered queue: a failed message blocks its group, or not ("skip").
            pack: For a bucket: the maximum number of messages in one document, up to 1000.
            limit: A cap on reserved messages, or on starts per period, across all processes.
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
            name: 1-110 of A-Z a-z 0-9 _ - . : >. No queue of the namespace may have it.
            model: Anything that pydantic's TypeAdapter accepts, as for ``queue``.
            retention: Seconds, at least 600, for which messages are kept. All users of the stream
                must agree. None means the stored value, or 7 days for a new stream.
            limit: A Limit with a rate: how many messages each consumer group starts per period.

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

        Messages of the first queue come before messages of the second queue, and so on. While a
        queue has enough messages, the queues after it have to wait. The call waits in all queues at
        once, and for the first message only; then it takes the messages that are ready.

        Args:
            queues: Queues and consumer groups of this client, of any kinds, each of them once.
            limit: The maximum number of messages.
            timeout: Seconds to wait for a message. None waits for ever; 0 does not wait.

        Returns:
            The reservations in the order of ``queues``, or an empty list after the timeout. Each
            has the lease of its queue. Settle them with ``commit`` and the like of this client.

        Raises:
            ConfigurationError: ``queues`` has something else, or the same queue twice.
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

        This and the other verbs that settle use the options of the queue that received a message,
        which its reservation carries, also if it was pickled. Nothing is settled if an argument is
        not allowed for one of the messages.

        Args:
            reservations: Reservations of this namespace, in any mixture.
            payload: The payload that the history keeps, instead of the payload of the message.
            result: As in ``AsyncQueue.commit``.
            session: The session of a transaction; not for messages of streams.

        Raises:
            LeaseLost: Some were no longer held (``lost``, ``unknown``). The rest were finished.
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
        """Give messages back for another try, as ``AsyncQueue.rollback`` does.

        Args:
            reservations: As in ``commit``.
            delay: Seconds until the next try. None uses each queue's backoff; 0 means at once.
            error: The reason, kept in ``Message.error``.
            counted: As in ``AsyncQueue.rollback``.
            session: As in ``commit``.

        Raises:
            LeaseLost: Some were no longer held. The rest were rolled back.
        """
        how = RollbackOptions(delay=delay, error=error, counted=counted, session=session)
        plan = client_settling.rollback(self._connection, reservations, how)
        return await self._connection.run(plan)

    async def release(self, *reservations: Reservation[Any]) -> None:
        """Give messages back unprocessed, as ``AsyncQueue.release`` does. The try is not counted.

        Args:
            reservations: As in ``commit``.

        Raises:
            LeaseLost: Some were no longer held. The rest were released.
        """
        return await self._connection.run(client_settling.release(self._connection, reservations))

    async def extend(self, *reservations: Reservation[Any], lease: Duration | None = None) -> None:
        """Hold messages for another lease, counted from now. This updates ``until``.

        Args:
            reservations: As in ``commit``.
            lease: Seconds. None uses the lease with which each message was reserved.

        Raises:
            LeaseLost: Some were no longer held. The rest were extended.
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
            LeaseLost: Some were no longer held. The rest were buried.
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
            reservations: As in ``commit``. Messages of streams are refused: they stay there.
            to: As in ``AsyncQueue.move``, like the following arguments.
            payload: The new payload of each message.
            update: Instead of a payload, an update of the payload.
            headers: Merged into the headers.
            delay: Seconds until the message can be received in that queue; not with ``at``.
            at: The instant from which the message can be received in that queue.
            key: The message key in that queue; for one reservation only.
            priority: The priority in that queue; None keeps the message's priority.
            group: The group in that queue; None keeps the message's group.
            session: As in ``commit``.

        Raises:
            LeaseLost: Some were no longer held. The rest were moved.
            DuplicateKey: The key is taken in that queue. The reservation is still held.
            InvalidMessage: The payload, or the result of the update, cannot be stored.
        """
        edits = MoveOptions(update=update, headers=headers, delay=delay, at=at, key=key)
        edits |= MoveOptions(priority=priority, group=group, session=session)
        plan = client_settling.move(self._connection, reservations, to, payload, edits)
        return await self._connection.run(plan)

    async def queues(self, *, cap: int | None = None, held: bool = True) -> list[QueueInfo]:
        """List every queue that has a record or a message, with its counts and options.

        The numbers of a queue may not describe the same instant; ``AsyncQueue.counts`` is exact.

        Args:
            cap: Stop counting a state at this number. Then ``cap`` means "``cap`` or more".
            held: False counts reserved messages as scheduled. This is faster if many messages are
                reserved or scheduled, because telling them apart requires reading each message.

        Returns:
            One QueueInfo for each queue, sorted by name.
        """
        return await self._connection.run(all_queues.queues(cap, held))

    async def find(self, id: Id) -> Message[Any] | None:
        """Return a message, wherever it is in the namespace.

        This includes dead-letter queues, histories and streams. A message that waits in a
        dead-letter queue has the state "dead". The payload is as stored, without a model.

        Args:
            id: The id of the message; you may pass an ObjectId as text. The id of a message in a
                pack of a bucket is "<pack>:<place>", and the id of a message of a stream is
                "<stream>~<position>".

        Returns:
            The message: a Finished if it is in a history, a StreamMessage if it is in a stream.
            None if it was never stored, or if it is finished and no history keeps it.
        """
        return await self._connection.run(finding.find(id))

    async def wait(self, id: Id, timeout: Duration | None = None) -> Finished[Any]:
        """Wait until a message has finished, in whichever queue. Push it with ``result=``.

        If this client pushed it, it hears of the end at once, given a bus; otherwise within a
        second.

        Args:
            id: As in ``find``. Messages of streams and of packs keep no end.
            timeout: Seconds to wait. None waits for ever; 0 does not wait.

        Returns:
            The finished message, with its ``result``.

        Raises:
            JobFailed: The message was buried, removed or cancelled, it has expired, or it is gone
                and its end was not kept.
            TimeoutError: It has not finished within the timeout. It stays where it is.
        """
        waiters = self._connection.waiters(self._connection.results)
        return await self._connection.run(awaiting.wait(waiters, id, timeout))

    async def request(
        self,
        queue: str | AsyncQueue[Any],
        payload: Any,
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
            timeout: Seconds to wait. Then the message is cancelled, and no worker begins to work on
                it; see ``expires`` of ``AsyncQueue.push``.
            headers: As in ``AsyncQueue.push``.
            priority: As in ``AsyncQueue.push``.
            group: As in ``AsyncQueue.push``.

        Returns:
            The result that the handler returned, or None.

        Raises:
            JobFailed: As in ``wait``.
            TimeoutError: As in ``wait``.
        """
        target = self.queue(queue) if isinstance(queue, str) else queue
        own = {"headers": headers, "priority": priority, "group": group}
        return await self._connection.run(requesting(target, payload, timeout, own))

    def gather(
        self, then: To[Any], *, dead: WhenDead = "hold"
    ) -> AbstractAsyncContextManager[Gather]:
        """Push a message once all messages that a block pushes with ``gather=`` have ended.

        A message has ended when it is finished, removed or cancelled. One that moves to another
        queue, or is tried again, has not. The message is pushed once, by whichever process finds
        that all have ended, also after this process has ended. If the block raises an exception, or
        a push in it fails, no message is pushed; the messages of the block stay.

        Args:
            then: The message: its queue, its payload and the other options of a ``To``.
            dead: Whether a message in a dead-letter queue is waited for ("hold"), until it is sent
                back and finished, or removed; or counts as ended ("end").

        Returns:
            An async context manager that gives the gather, to be passed as ``gather=``.
            Its ``id`` will be the id of the message.

        Raises:
            ConfigurationError: The queue of the message is a stream or does not offer an option, or
                the payload is missing.
            Unavailable: A push in the block failed, or the server did not answer.
        """
        return gathered_async(self._connection, then, dead)

    async def cancel(self, id: Id, force: bool = False) -> Cancelled | None:
        """Cancel a message in any queue, as ``AsyncQueue.cancel`` does.

        Args:
            id: As in ``find``.
            force: End a held message at once. Its holder gets ``LeaseLost``.

        Returns:
            "cancelled" if the message has ended, "requested" if its holder was asked to end it.
            None if no queue has the message, or it is finished.

        Raises:
            ConfigurationError: The message is in a pack of a bucket and held, or in a stream.
        """
        return await self._connection.run(cancelling.cancel(id, force))

    async def force_release(self, id: Id) -> bool:
        """Take a message from its holder: it becomes ready again, and the try still counts.

        The holder gets ``LeaseLost`` when it settles the message or renews the lease. It may still
        be working while another consumer receives the message.

        Args:
            id: As in ``find``.

        Returns:
            False if no queue has the message, or it is not held.

        Raises:
            ConfigurationError: The message is in a pack of a bucket and held, or in a stream.
        """
        return await self._connection.run(freeing.force_release(id))

    async def delete_queue(self, name: str, force: bool = False) -> int:
        """Delete a queue with its record and its history. With ``force``, delete all its messages.

        Without ``force``, it never deletes a message that can still be received, even if the
        message is pushed at the same time. Processes that still use the queue create it again: a
        consumer within seconds, a producer within a minute.

        Args:
            name: The name of the queue. Its dead-letter queue is a separate queue and stays.
            force: Also delete live messages. Their holders get ``LeaseLost``.

        Returns:
            The number of deleted messages, history included.

        Raises:
            ConfigurationError: The queue has live messages, and ``force`` is False.
            Unavailable: The server did not answer; call it again.
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
            pack: As in ``queue``; None leaves it unchanged. It applies to new messages only.
            limit: As in ``queue``; None leaves it unchanged, False removes it. If you lower it,
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
            fn: A function that passes the session on as ``session=``; it may be called more than
                once.

        Returns:
            The result of ``fn``.

        Raises:
            ConfigurationError: The server is not a replica set, or ``fn`` is not async. Nothing is
                stored.
        """
        return await self._connection.run_transaction(fn)

    async def close(self) -> None:
        """Close everything that this client opened. May be called again.

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
