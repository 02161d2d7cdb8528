"""One interface to a blocking client and to an async one.

The engine is async code, written once, on ``AsyncQueue``. A blocking client serves it through an
adapter that runs each command in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

import anyio

from pyqueue.async_queues import AsyncQueue
from pyqueue.connecting import AsyncConnection, Connection, runner_of
from pyqueue.drivers import AsyncDriver, BlockingAdapter, Driver
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Reservation
from pyqueue.queues import Queue, backend_of
from pyqueue.renewal import LeaseRenewer
from pyqueue.requests import Plan
from pyqueue.thread_pool import DaemonThreadPool
from pyqueue.waiters import Waiters

__all__ = ["ClientRunner"]

R = TypeVar("R")

#: How many transactions run at once. Each takes several round trips, and more of them at once only
#: wait for each other.
_MAX_TRANSACTIONS: Final = 8


class ClientRunner:
    """The plan runner of a pipeline, on either kind of client.

    Args:
        client: a Client or an AsyncClient.
        driver: the driver of that client.
        threads: run the commands of a blocking driver.
    """

    def __init__(
        self, client: Any, driver: Driver | AsyncDriver, threads: DaemonThreadPool
    ) -> None:
        self._client = client
        self._threads = threads
        self._transactions = anyio.Semaphore(_MAX_TRANSACTIONS)
        self._blocking = isinstance(driver, Driver)
        self._driver = BlockingAdapter(driver, threads) if isinstance(driver, Driver) else driver
        runner = runner_of(client)
        self.namespace: str = runner.namespace
        self.url: str | None = runner.url
        self.renewer: LeaseRenewer = runner.renewer

    @classmethod
    async def open(cls, client: Any, threads: DaemonThreadPool) -> Self:
        """Open the client, if it is not open yet, and return its runner."""
        runner: Connection | AsyncConnection = runner_of(client)
        driver = runner.open() if isinstance(runner, Connection) else await runner.opened()
        return cls(client, driver, threads)

    @property
    def replicated(self) -> bool:
        """Whether the server has transactions. Known once the first command was answered."""
        return self._driver.replicated

    async def run(self, plan: Plan[R]) -> R:
        """Run a plan and return its result."""
        return await self._driver.run(plan)

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that wait in this run."""
        return self._driver.waiters(queue)

    def queue(self, name: str) -> AsyncQueue[Any]:
        """Return a queue with default options."""
        return self.adapt(self._client.queue(name))

    def adapt(self, queue: Queue[Any] | AsyncQueue[Any]) -> AsyncQueue[Any]:
        """Return the async form of a queue of the client, with the same options."""
        return AsyncQueue(self, backend_of(queue))

    def seconds_left(self, message: Reservation[Any]) -> float:
        """Return the seconds until the lease of a message ends."""
        return (message.until - self._driver.clock.now()).total_seconds()

    async def run_transaction(self, fn: Callable[[Any], Awaitable[object]]) -> None:
        """Await ``fn(session)`` in a transaction, and again when MongoDB asks for a retry."""
        async with self._transactions:
            if not self._blocking:
                await self._client.run_transaction(fn)
                return
            loop = asyncio.get_running_loop()

            async def attempt(session: Any) -> None:
                await fn(session)

            def attempt_in_thread(session: Any) -> None:
                asyncio.run_coroutine_threadsafe(attempt(session), loop).result()

            await self._threads.run(self._client.run_transaction, attempt_in_thread)

    @contextmanager
    def blocking_client(self) -> Iterator[Any]:
        """Give a blocking client: the client itself, or a second one for the time of the block."""
        if self._blocking:
            yield self._client
        elif self.url is None:
            raise ConfigurationError(
                "spark: a Spark stage needs a client that was given a URL, or a blocking client"
            )
        else:
            with type(self._client)._twin(self.url, namespace=self.namespace) as client:
                yield client

    async def close(self) -> None:
        """Close what this runner added to a blocking client. The client stays open."""
        if self._blocking:
            await self._driver.settled()
            self._driver.close_waiters()
