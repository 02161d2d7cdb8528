"""``AsyncClient``: the twin of ``Client`` for async code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from pyqueue import arguments
from pyqueue.async_queues import AsyncQueue
from pyqueue.async_streams import AsyncStream
from pyqueue.backends import all_queues, managing
from pyqueue.client import make_backend, make_stream_backend, shape_of
from pyqueue.limits import Limit
from pyqueue.messages import Backoff, Duration, OnFailure, QueueInfo, QueueOptions
from pyqueue.pipeline import Pipeline
from pyqueue.runtime.connecting import AsyncConnection, Connected, Durability
from signals import AsyncBus

R = TypeVar("R")
T = TypeVar("T")


class AsyncClient(Connected[AsyncConnection]):
    """A client for async code: the twin of ``Client``, over PyMongo's AsyncMongoClient or motor.

    It belongs to the event loop in which it is first used. The arguments are those of ``Client``; a
    database object is an AsyncDatabase or an AsyncIOMotorDatabase. ``memory:`` runs inline.
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
    ) -> None:
        super().__init__(
            AsyncConnection(
                target,
                namespace=namespace,
                signals=signals,
                durability=durability,
                owner=owner,
                command_timeout=command_timeout,
            )
        )

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
        name: str,
        model: object = None,
        *,
        lease: Duration = 60,
        max_tries: int | None = 20,
        dead_letter: str | None = None,
        history: Duration | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008  # frozen
        poll: Duration = 15,
        kind: str | None = None,
        strict: bool | None = None,
        on_failure: OnFailure | None = None,
        pack: int | None = None,
        limit: Limit | None = None,
    ) -> AsyncQueue[Any]:
        """Return a queue of this namespace. This does no I/O. See ``Client.queue``."""
        backend = make_backend(
            self._connection,
            name,
            model,
            lease=lease,
            max_tries=max_tries,
            dead_letter=dead_letter,
            history=history,
            backoff=backoff,
            poll=poll,
            kind=kind,
            strict=strict,
            on_failure=on_failure,
            pack=pack,
            limit=limit,
        )
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
        """Return a stream of this namespace. This does no I/O. See ``Client.stream``."""
        backend = make_stream_backend(self._connection, name, model, retention, limit)
        return AsyncStream(self._connection, backend)

    def pipeline(self, name: str = "pipeline") -> Pipeline:
        """Return a pipeline of queues of this namespace. See ``Client.pipeline``."""
        return Pipeline(self, name)

    async def queues(self, *, cap: int | None = None, held: bool = True) -> list[QueueInfo]:
        """List every queue that has a record or a message. See ``Client.queues``."""
        return await self._connection.run(all_queues.queues(cap, held))

    async def delete_queue(self, name: str, force: bool = False) -> int:
        """Delete a queue. See ``Client.delete_queue``."""
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
    ) -> None:
        """Change the options on which all users of a queue agree. See ``Client.reshape``."""
        arguments.queue_name(name)
        shape = shape_of(
            strict=strict, on_failure=on_failure, retention=retention, pack=pack, limit=limit
        )
        by = self._connection.owner()
        await self._connection.run(managing.reshape(name, shape, self.namespace, by))

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Start a transaction: commit when the block ends, abort when it raises.

        See ``Client.transaction``.
        """
        return self._connection.transaction()

    async def run_transaction(self, fn: Callable[[Any], Awaitable[R]]) -> R:
        """Await ``fn(session)`` in a transaction, again when MongoDB asks for a retry, and commit.

        See ``Client.run_transaction``. What ``fn`` returns must be awaitable.
        """
        checked: Callable[[Any], Awaitable[R]] = arguments.transaction_body("fn", fn, awaited=True)
        return await self._connection.run_transaction(checked)

    async def close(self) -> None:
        """Close what this client opened. See ``Client.close``."""
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
