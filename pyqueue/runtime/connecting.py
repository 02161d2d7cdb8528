"""Connections: each opens the database, the bus and the driver of a client, from its target.

A connection runs the plans of its client. Creating a connection does no I/O: its driver is opened
by the first plan, or at the start of a ``with`` block. A database or a bus that the user passed in
is never closed here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack

import pymongo
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.database import Database
from pymongo.errors import PyMongoError

import signals as buses
from pyqueue import arguments, targets, transactions
from pyqueue.backends import managing
from pyqueue.embedded import EmbeddedServer
from pyqueue.errors import ConfigurationError, QueueClosed
from pyqueue.hooks import HookCalls, calls_of
from pyqueue.memory import is_memory
from pyqueue.memory_sessions import AsyncMemoryDatabase, MemoryDatabase, in_memory, names_memory
from pyqueue.messages import Duration, Reservation, seconds_left
from pyqueue.requests import Plan
from pyqueue.runtime import forks, opened
from pyqueue.runtime.base_driver import BaseDriver, collection_of
from pyqueue.runtime.drivers import AsyncDriver, Driver
from pyqueue.runtime.known_queues import KnownQueues
from pyqueue.runtime.opened import Finalizer, Opened
from pyqueue.runtime.renewal import AsyncRenewer, LeaseRenewer, Renewer
from pyqueue.runtime.server_errors import translated
from pyqueue.runtime.shared_memory import SharedMemory, open_memory
from pyqueue.runtime.waiters import Waiters
from signals import AsyncBus, Bus

R = TypeVar("R")
D = TypeVar("D", bound=BaseDriver[Any])

Durability = Literal["majority", "acknowledged"]


class ConnectionOptions(TypedDict, total=False):
    """The options of a connection, the same as for ``Client``."""

    namespace: str
    signals: str | Bus | AsyncBus | None
    durability: Durability
    owner: str | None
    command_timeout: Duration
    hooks: object


class BaseConnection(Generic[D]):
    """The base of ``Connection`` and ``AsyncConnection``.

    Args:
        target: As for ``Client``.
        namespace: The name of the collection.
        signals: As for ``Client``.
        durability: "majority" or "acknowledged".
        owner: The label that is stored in claimed messages. None means "host:pid".
        command_timeout: Seconds that a command may take, including its retries.
        hooks: As for ``Client``.

    Raises:
        ConfigurationError: An argument is not allowed.
        InvalidName: The namespace is not allowed.
    """

    #: The class of the driver.
    driver_type: type[Any]
    #: Makes the finalizer, which closes the resources of a connection that is dropped unclosed.
    finalizer: Callable[[object, str, Opened], Finalizer]
    #: The type of the database object that programs get for ``memory:``.
    memory_type: type[MemoryDatabase]
    renewer: LeaseRenewer

    def __init__(
        self,
        target: object,
        *,
        namespace: str = "pyqueue",
        signals: str | Bus | AsyncBus | None = None,
        durability: Durability = "majority",
        owner: str | None = None,
        command_timeout: Duration = 30,
        hooks: object = (),
    ) -> None:
        self.target = target
        #: The name of the collection.
        self.namespace = arguments.namespace_name(namespace)
        self._durability = arguments.one_of("durability", durability, ("majority", "acknowledged"))
        #: Seconds that a command may take.
        self.command_timeout = arguments.duration("command_timeout", command_timeout, positive=True)
        #: The hooks of the client, or None if it has none.
        self.hooks: HookCalls | None = calls_of(hooks)
        if signals is not None and not isinstance(signals, str) and not hasattr(signals, "emit"):
            raise ConfigurationError(
                f"signals: expected a URL or a bus, found {type(signals).__name__}"
            )
        #: Returns the label that is stored in claims and records.
        self.owner: Callable[[], str] = forks.process_label
        if arguments.owner(owner) is not None:
            self.owner = partial(str, owner)
        #: The bus topic on which this client hears that a message it waits for has ended.
        self.results = f"~done:{secrets.token_hex(8)}"
        self._signals = signals
        #: The database of ``memory:NAME``, while this connection is open.
        self.shared: SharedMemory | None = None
        #: What this client knows about its queues, or None before its first command.
        self.known: KnownQueues | None = None
        self.driver: D | None = None
        self._database: Any = None
        self._mongo: Any = None
        self._server: EmbeddedServer | None = None
        self._finalizer: Finalizer | None = None
        self._closed = False
        self._opening = threading.Lock()
        forks.connections.add(self)
        if isinstance(self.target, str):  # refuse an invalid target, without I/O
            targets.check_url(self.target)
        elif not self._accepts(self.target):
            raise targets.invalid(self.target)

    def __reduce__(self) -> str:
        # Clients, and all objects that they create, refer to their connection.
        raise ConfigurationError(
            "a client cannot be pickled, and neither can its queues; pass Client.url, and create a "
            "client in each process"
        )

    def _accepts(self, database: object) -> bool:
        raise NotImplementedError

    def _connect(self, url: str, **options: Any) -> Any:
        raise NotImplementedError

    def _open_bus(self, url: str, database: Any) -> Any:
        raise NotImplementedError

    def open(self) -> D:
        """Return the driver. The first call creates it.

        The first call may start an embedded server, but sends no command.

        Raises:
            ConfigurationError: The target or the bus cannot be used.
            QueueClosed: The connection was closed.
        """
        with self._opening:
            if self.driver is not None:
                return self.driver
            if self._closed:
                raise QueueClosed("the client was closed")
            self._database = self._open_database()
            self.driver = self.driver_type(
                self._database,
                self.namespace,
                bus=self._bus(self._database),
                durability=self._durability,
                timeout=self.command_timeout,
                topic=f"{self._database.name}/{self.namespace}",
                owner=self.owner,
                hooks=self.hooks,
            )
            self.known = self.driver.known
            if self.shared is not None:
                self.shared.join(self.driver)
            resources = self._opened()
            if resources.leaks:
                label = f"a client of {targets.shown(self.target)!r}"
                self._finalizer = self.finalizer(self, label, resources)
            return self.driver

    def begin_again(self) -> None:
        """In a forked child, prepare to connect again, unless the parent has sent a command."""
        self._opening = threading.Lock()  # a thread of the parent may have held it
        unused = self.driver is not None and not self.driver.stats["commands"]
        if unused and self._mongo is not None and self._server is None:
            forks.of_parent.append(self._opened())
            self.driver = None

    def _opened(self) -> Opened:
        """Return everything that this connection opened, so that it can be closed."""
        driver = self.driver
        ours = self._signals is None or isinstance(self._signals, str)
        bus = driver.bus if driver is not None and ours else None
        return Opened(driver, self.renewer, bus, self._mongo, self._server)

    def _take_opened(self) -> Opened:
        """Mark the connection as closed, and return everything that has to be closed."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        resources, self.driver = self._opened(), None
        self.shared = None
        return resources

    def _open_database(self) -> Any:
        target = self.target
        if targets.is_memory_url(target):
            database, self.shared = open_memory(target)
            return database
        if isinstance(target, MemoryDatabase):
            return target.raw
        if not isinstance(target, str):
            return target
        if target.startswith("embedded:"):
            self._server = EmbeddedServer(target.removeprefix("embedded:"))
            target = self._server.url
        milliseconds = max(1, math.ceil(self.command_timeout * 1000))
        # The URL takes precedence, but an argument would replace its value.
        chosen = "serverselectiontimeoutms=" in target.lower()
        limits = {} if chosen else {"serverSelectionTimeoutMS": milliseconds}
        try:
            self._mongo = self._connect(
                target, **limits, appname="pyqueue", retryWrites=True, retryReads=True
            )
            return self._mongo.get_default_database("pyqueue")
        except (PyMongoError, ValueError, OSError) as error:  # OSError: from a certificate file
            text = str(translated(error)).removeprefix("target: ")
            raise ConfigurationError(f"target: {text}") from error

    def _bus(self, database: Any) -> Any:
        """Return the bus that ``signals`` names, or the default bus."""
        if self._signals is not None and not isinstance(self._signals, str):
            return self._signals
        memory = is_memory(database)
        try:
            return self._open_bus(self._signals or ("memory:" if memory else "capped:"), database)
        except buses.BusError as error:
            remedy = '; in memory, leave signals= out or use "memory:"' if memory else ""
            raise ConfigurationError(f"signals: {error}{remedy}") from error

    def _bus_check(self, bus: Any) -> Any:
        """Check the bus if ``signals`` was given. The default bus is allowed to fail."""
        return None if self._signals is None or not hasattr(bus, "check") else bus.check()

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that are waiting in this client."""
        return (self.driver or self.open()).waiters(queue)

    def seconds_left(self, message: Reservation[Any]) -> float:
        """Return the seconds until the lease of a message ends."""
        return seconds_left(message, self.open().clock.now())

    def aside(self, plan: Plan[None]) -> None:
        """Run a plan in the background, unless the client was closed; see ``Aside``."""
        if self.driver is not None:
            self.driver.aside(plan)

    @property
    def database(self) -> Any:
        """The database object; the first use opens the driver."""
        self.open()
        return self.memory_type(self._database) if names_memory(self.target) else self._database

    @property
    def _sessions(self) -> Any:
        """The client object that starts sessions for the database."""
        return (self.memory_type(self._database) if self.open().memory else self._database).client

    @property
    def url(self) -> str | None:
        """The URL that another process can use, including credentials, or None if there is none."""
        if isinstance(self.target, str) and self.target.startswith("mongodb"):
            return self.target
        if self._server is not None:
            base, _, query = self._server.url.partition("?")
            return f"{base.rstrip('/')}/pyqueue" + (f"?{query}" if query else "")
        return None

    @property
    def store(self) -> object:
        """A value that is equal for clients of the same database."""
        if in_memory(self.target):
            self.open()
            return id(self._database)  # mongomock treats all of its databases as equal
        return self.url or self.target

    @property
    def stats(self) -> Mapping[str, int]:
        """The counters of the driver and its bus, or {} before the first command."""
        driver = self.driver
        if driver is None:
            return {}
        bus = {f"bus {name}": count for name, count in getattr(driver.bus, "stats", {}).items()}
        return {**driver.stats, **bus}


class Connection(BaseConnection[Driver]):
    """A connection for blocking code. Any number of threads may use it."""

    driver_type = Driver
    memory_type = MemoryDatabase
    finalizer = staticmethod(opened.close_if_dropped)

    def __init__(self, target: object, **options: Unpack[ConnectionOptions]) -> None:
        super().__init__(target, **options)
        self.renewer = Renewer()

    def _accepts(self, database: object) -> bool:
        if isinstance(database, (Database, MemoryDatabase)):
            return True
        return type(database).__module__ == "mongomock.database"

    def _connect(self, url: str, **options: Any) -> Any:
        return pymongo.MongoClient(url, **options)

    def _open_bus(self, url: str, database: Any) -> Any:
        return buses.open(url, database)

    def run(self, plan: Plan[R]) -> R:
        """Run a plan and return its result."""
        return self.open().run(plan)

    def enter(self) -> None:
        """Connect to the server and check the bus. If either fails, close the connection.

        Raises:
            ConfigurationError: The target or the bus cannot be used.
            Unavailable: The server did not answer in time.
        """
        try:
            driver = self.open()
            driver.run(managing.ping())
            self._bus_check(driver.bus)
        except BaseException as error:
            self.close()
            if isinstance(error, buses.BusError):
                raise ConfigurationError(f"signals: {error}") from error
            raise

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Provide the session for the block of ``Client.transaction``."""
        with transactions.transaction(self._transactional(), self._sessions) as session:
            yield session

    def run_transaction(self, fn: Callable[[Any], R]) -> R:
        """Call ``fn(session)`` in a transaction. Repeat the call when MongoDB asks for a retry."""
        checked: Callable[[Any], R] = arguments.transaction_body("fn", fn, awaited=False)
        return transactions.run_transaction(self._transactional(), self._sessions, checked)

    def _transactional(self) -> Driver:
        driver = self.open()
        driver.run(managing.ping())
        transactions.check_usable(driver)
        return driver

    def close(self) -> None:
        """Wake the waiting consumers, and close everything that this connection opened."""
        if not self._closed:
            opened.close_opened(self._take_opened())


class AsyncConnection(BaseConnection[AsyncDriver]):
    """A connection for async code. It belongs to the event loop that first uses it."""

    driver_type = AsyncDriver
    memory_type = AsyncMemoryDatabase
    finalizer = staticmethod(opened.close_if_dropped_async)

    def __init__(self, target: object, **options: Unpack[ConnectionOptions]) -> None:
        super().__init__(target, **options)
        self.renewer = AsyncRenewer()

    def _accepts(self, database: object) -> bool:
        form = f"{type(database).__module__}.{type(database).__name__}"
        return isinstance(database, (AsyncDatabase, MemoryDatabase)) or form in (
            "mongomock.database.Database",
            "motor.motor_asyncio.AsyncIOMotorDatabase",
        )

    def _connect(self, url: str, **options: Any) -> Any:
        return pymongo.AsyncMongoClient(url, **options)

    def _open_bus(self, url: str, database: Any) -> Any:
        return buses.open_async(url, database)

    async def opened(self) -> AsyncDriver:
        """Return the driver as ``open`` does, but never block the event loop."""
        if self.driver is not None:
            return self.driver
        if isinstance(self.target, str) and self.target.startswith("embedded:"):
            return await asyncio.to_thread(self.open)  # starting a server takes a second
        return self.open()

    def run(self, plan: Plan[R]) -> Coroutine[Any, Any, R]:
        """Run a plan and return its result."""
        driver = self.driver
        return self._open_and_run(plan) if driver is None else driver.run(plan)

    async def _open_and_run(self, plan: Plan[R]) -> R:
        return await (await self.opened()).run(plan)

    async def enter(self) -> None:
        """Connect to the server and check the bus. See ``Connection.enter``."""
        try:
            driver = await self.opened()
            await driver.run(managing.ping())
            await transactions.maybe_awaited(self._bus_check(driver.bus))
        except BaseException as error:
            await self.close()
            if isinstance(error, buses.BusError):
                raise ConfigurationError(f"signals: {error}") from error
            raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """Provide the session for the block of ``AsyncClient.transaction``."""
        driver = await self._transactional()
        async with transactions.async_transaction(driver, self._sessions) as session:
            yield session

    async def run_transaction(self, fn: Callable[[Any], Awaitable[R]]) -> R:
        """Await ``fn(session)`` in a transaction. Repeat the call when MongoDB asks for a retry."""
        checked: Callable[[Any], Awaitable[R]] = arguments.transaction_body("fn", fn, awaited=True)
        driver = await self._transactional()
        return await transactions.run_async_transaction(driver, self._sessions, checked)

    async def _transactional(self) -> AsyncDriver:
        driver = await self.opened()
        await driver.run(managing.ping())
        transactions.check_usable(driver)
        return driver

    async def close(self) -> None:
        """Wake the waiting consumers, and close everything that this connection opened."""
        if not self._closed:
            await opened.close_opened_async(self._take_opened())


C_co = TypeVar("C_co", bound=BaseConnection[Any], covariant=True)


class Connected(Generic[C_co]):
    """The base of ``Client`` and ``AsyncClient``, which use a connection."""

    def __init__(self, connection: C_co) -> None:
        self._connection = connection

    @property
    def namespace(self) -> str:
        """The name of the collection that holds the queues."""
        return self._connection.namespace

    @property
    def database(self) -> Any:
        """The underlying database object. The first use starts an embedded server."""
        return self._connection.database

    def collection(self, suffix: str) -> Any:
        """Return a collection for data that belong to the queues, named "<namespace>.<suffix>".

        This does no I/O, except that the first use of a client starts an embedded server. The
        collection reads from the primary, and its datetimes are aware and in UTC. On "memory:", its
        methods are not awaitable, even in async code.

        Args:
            suffix: The rest of the name: A-Z a-z 0-9 _ - and single dots.

        Returns:
            A collection object of the database library in use.

        Raises:
            InvalidName: The suffix is not allowed.
        """
        name = arguments.collection_name(self.namespace, suffix)
        database = self.database
        raw = database.raw if isinstance(database, MemoryDatabase) else database
        return collection_of(raw, name)

    @property
    def url(self) -> str | None:
        """The URL that another process can use, including credentials, or None if there is none."""
        return self._connection.url

    @property
    def stats(self) -> Mapping[str, int]:
        """The counters of this client, keyed by name: commands, errors, signals and more."""
        return self._connection.stats

    def __repr__(self) -> str:
        shown = targets.shown(self._connection.target)
        return f"{type(self).__name__}({shown!r}, namespace={self._connection.namespace!r})"


def runner_of(client: Connected[C_co]) -> C_co:
    """Return the connection of a client, which runs its plans, for the modules of pyqueue."""
    return client._connection
