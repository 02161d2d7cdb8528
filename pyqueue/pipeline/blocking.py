"""One interface to blocking and async clients.

The engine of pipelines is async code that uses ``AsyncQueue``. With a blocking client, an adapter
runs each command in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Protocol, Self, TypeVar, Unpack, cast

from pyqueue.async_queues import AsyncQueue
from pyqueue.backends.namespace import ensure
from pyqueue.backends.queue_plans import QueuePlans, found
from pyqueue.backends.taking_kind import again_in_kind
from pyqueue.errors import ConfigurationError
from pyqueue.hooks import HookCalls
from pyqueue.messages import QueueOptions, Reservation
from pyqueue.queue_base import QueueBase, backend_of, runs_on
from pyqueue.queues import Queue
from pyqueue.requests import Plan
from pyqueue.reserved import renewal
from pyqueue.runtime.base_driver import ListensAsync
from pyqueue.runtime.blocking_adapter import BlockingAdapter, entered
from pyqueue.runtime.connecting import AsyncConnection, Connected, Connection, runner_of
from pyqueue.runtime.drivers import AsyncDriver
from pyqueue.runtime.known_queues import KnownQueues
from pyqueue.runtime.renewal import LeaseRenewer
from pyqueue.runtime.thread_pool import DaemonThreadPool
from pyqueue.runtime.waiters import Waiters
from pyqueue.specs import QueueSpec
from pyqueue.stream_base import ConsumerBase

R = TypeVar("R")


class AnyClient(Protocol):
    """The part of a ``Client`` or an ``AsyncClient`` that a pipeline uses."""

    def queue(
        self, name: str, model: Any = None, **options: Unpack[QueueOptions]
    ) -> Queue[Any] | AsyncQueue[Any]:
        """Return a queue."""


def connection_of(client: AnyClient) -> Connection | AsyncConnection:
    """Return the connection of a client.

    Raises:
        ConfigurationError: ``client`` is neither a Client nor an AsyncClient.
    """
    if not isinstance(client, Connected):
        raise ConfigurationError(
            f"client: expected a Client or an AsyncClient, found {type(client).__name__}"
        )
    connection: Connection | AsyncConnection = runner_of(client)
    return connection


def require_no_loop() -> None:
    """Refuse to block a thread in which an event loop is running.

    Raises:
        ConfigurationError: An event loop is running in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError(
        "run: an event loop is already running in this thread; use an AsyncClient and await run(), "
        "or call asyncio.to_thread(worker.run)"
    )


class ClientRunner:
    """Runs the plans (sequences of commands) of a pipeline, on a blocking or an async client.

    Args:
        client: The client that the pipeline uses.
        connection: The connection of the client.
        driver: The driver of the connection, adapted to async code if it blocks.
        threads: The threads for blocking calls.
    """

    def __init__(
        self,
        client: AnyClient,
        connection: Connection | AsyncConnection,
        driver: AsyncDriver,
        threads: DaemonThreadPool,
    ) -> None:
        self._client = client
        self._connection = connection
        self.driver = driver
        self._threads = threads

    @classmethod
    async def open(cls, client: AnyClient, threads: DaemonThreadPool) -> Self:
        """Open the connection of the client, if it is not open yet, and return the runner."""
        connection = connection_of(client)
        if isinstance(connection, Connection):
            driver: AsyncDriver = BlockingAdapter(connection.open(), threads)
        else:
            driver = await connection.opened()
        return cls(client, connection, driver, threads)

    @property
    def namespace(self) -> str:
        """The name of the collection that holds the queues."""
        return self._connection.namespace

    @property
    def store(self) -> object:
        """A key that is equal for runners of the same database."""
        return self._connection.store

    @property
    def renewer(self) -> LeaseRenewer:
        """The renewer of the client."""
        return self._connection.renewer

    @property
    def known(self) -> KnownQueues | None:
        """What the client knows about its queues."""
        return self.driver.known

    @property
    def hooks(self) -> HookCalls | None:
        """The hooks of the client, or None if it has none."""
        return self._connection.hooks

    @property
    def results(self) -> str:
        """The bus topic on which the client hears that a message it waits for has ended."""
        return self._connection.results

    @property
    def stats(self) -> Counter[str]:
        """The counters of the client."""
        return self.driver.stats

    def renewal(
        self, told: Callable[[Reservation[Any]], object]
    ) -> Callable[[Sequence[Reservation[Any]]], Any]:
        """Return the function that extends leases, for the renewer of the client.

        This function calls ``told`` with each cancelled message that it finds, in any thread.
        """
        return renewal(self._connection, told)

    @asynccontextmanager
    async def hearing(self, name: str) -> AsyncIterator[ListensAsync]:
        """Listen to a bus topic of the namespace until the block ends."""
        listener: Any = self.driver.bus.listen(f"{self.driver.topic}/{name}")
        try:
            if isinstance(self.driver, BlockingAdapter):
                yield await entered(listener, self._threads, self.driver.check_usable)
            else:
                yield await listener.__aenter__()
        finally:
            listener.close()

    async def run(self, plan: Plan[R]) -> R:
        """Run a plan and return its result."""
        return await self.driver.run(plan)

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that are waiting in this run."""
        return self.driver.waiters(queue)

    async def look(self) -> None:
        """Check at once each gather in which this client has ended a message."""
        looks = self.driver.looks
        if looks.pending:
            await self.driver.run(looks.plan())

    def aside(self, plan: Plan[None]) -> None:
        """Run a plan in the background; see ``Aside``."""
        self.driver.aside(plan)

    def output(self, name: str, spec: QueueSpec[Any] | None = None) -> Queue[Any] | AsyncQueue[Any]:
        """Return a queue that stages only write to."""
        if spec is not None:
            return self._client.queue(name, spec.model, **spec.options)
        return self._client.queue(name)

    async def name_kind(self, queue: Queue[Any] | AsyncQueue[Any]) -> None:
        """Determine the kind of a queue that a stage reads: the recorded kind, or else "standard".

        Raises:
            ConfigurationError: The queue is a stream, or an option does not suit its kind.
        """
        plans = backend_of(queue)
        if plans.kind_name is None:
            await self.run(again_in_kind([queue.name], partial(_named, plans)))

    def adapt(self, queue: Queue[Any] | AsyncQueue[Any]) -> AsyncQueue[Any]:
        """Return the async form of a queue of the client, with the same options."""
        return AsyncQueue(self, backend_of(queue))

    def seconds_left(self, message: Reservation[Any]) -> float:
        """Return the seconds until the lease of a message ends."""
        return self._connection.seconds_left(message)

    @contextmanager
    def blocking_connection(self) -> Iterator[Connection]:
        """Yield a blocking connection: the client's own, or a second one that closes at the end.

        Raises:
            ConfigurationError: The client is async, and has no URL for a second connection.
        """
        if isinstance(self._connection, Connection):
            yield self._connection
            return
        url = self._connection.url
        if url is None:
            raise ConfigurationError(
                "spark: a Spark stage needs a client that was created from a URL, or a blocking "
                "client"
            )
        second = Connection(url, namespace=self.namespace)
        second.hooks = self._connection.hooks
        second.enter()
        try:
            yield second
        finally:
            second.close()

    async def close(self) -> None:
        """Close the parts that this runner added to a blocking client. The client stays open."""
        if isinstance(self.driver, BlockingAdapter):
            await self.driver.settled()
            self.driver.close_waiters()


def _named(plans: QueuePlans) -> Plan[None]:
    named = yield from found(plans, names=True)
    yield from ensure(named.queue, named.kind, named.options)


def made_queue(
    client: AnyClient, queue: QueueBase[Any, Any], to: Iterable[str], configured: bool
) -> Queue[Any]:
    """Check a queue or a consumer group that the caller has created, and return it for a stage.

    Args:
        client: The client of the stage.
        queue: The queue, or the consumer group.
        to: The targets of the stage.
        configured: Whether the stage was given a model or options of a queue.

    Raises:
        ConfigurationError: The stage cannot read this queue.
    """
    is_group = isinstance(queue, ConsumerBase)
    what, makers = (
        ("a consumer group", "Client.stream and Stream.consumer")
        if is_group
        else ("a queue", "Client.queue")
    )
    if not runs_on(queue, connection_of(client)):
        raise ConfigurationError(
            f"queue: {queue.name!r} is {what} of another client; create it with this client"
        )
    if configured:
        raise ConfigurationError(
            f"queue: {queue.name!r} already is {what}; pass model and options to {makers}"
        )
    if is_group and list(to):
        raise ConfigurationError(
            f"to: a message of {queue.name!r} stays in its stream; in the handler, push a new "
            "message to the queue instead"
        )
    return cast("Queue[Any]", queue)
