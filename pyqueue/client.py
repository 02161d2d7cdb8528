"""Client and AsyncClient: from a target to a database, a bus and a clock; the things that the queues of a namespace share.

Making a client does no I/O: the server is reached at the first operation, or on entering the client. What was passed in (a database, a bus)
is never closed here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypedDict, TypeVar, Unpack, cast, overload

import pymongo
from pymongo import WriteConcern
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

import signals as buses
from pyqueue import arguments
from pyqueue.backends import namespace as namespaces
from pyqueue.backends.standard import Options, Standard
from pyqueue.drivers import AsyncDriver, BaseDriver, Driver, translated
from pyqueue.embedded import EmbeddedServer
from pyqueue.errors import ConfigurationError, QueueClosed
from pyqueue.memory import memory_database
from pyqueue.messages import Backoff, QueueInfo
from pyqueue.payloads import Codec
from pyqueue.pipeline import Pipeline
from pyqueue.queues import AsyncQueue, Duration, Queue
from pyqueue.renewal import AsyncRenewer, Renewer
from pyqueue.requests import Plan
from pyqueue.waiters import Waiters

__all__ = ["AsyncClient", "Client"]

R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D", bound=BaseDriver)

log = logging.getLogger("pyqueue")

_TARGETS = (
    'give "mongodb://host/db", "mongodb+srv://...", "memory:", "embedded:PATH", or a database object of pymongo or mongomock '
    "(Client), of PyMongo's AsyncMongoClient or of motor (AsyncClient)"
)


class QueueOptions(TypedDict, total=False):
    """The options of ``Client.queue``."""

    lease: Duration
    max_tries: int | None
    dead_letter: str | None
    history: Duration | None
    backoff: Backoff
    poll: Duration


class _Common(Generic[D]):
    """What both kinds of client share: their arguments, and how a target becomes a driver."""

    #: The backend that queues are made of.
    backend: ClassVar[type[Standard]] = Standard
    _driver_type: ClassVar[type[Any]]

    def __init__(
        self,
        target: Any,
        *,
        namespace: str = "pyqueue",
        signals: Any = None,
        durability: str = "majority",
        owner: str | None = None,
        command_timeout: Duration = 30,
    ) -> None:
        self._target = target
        #: The name of the collection.
        self.namespace = arguments.namespace_name(namespace)
        self._durability = arguments.one_of("durability", durability, ("majority", "acknowledged"))
        self._timeout = arguments.duration("command_timeout", command_timeout, positive=True)
        if owner is not None and (
            not isinstance(owner, str) or len(owner) > 256 or not arguments.is_unicode(owner)
        ):
            raise ConfigurationError("owner: give a str of at most 256 characters of Unicode")
        if signals is not None and not isinstance(signals, str) and not hasattr(signals, "emit"):
            raise ConfigurationError(f"signals: give a URL or a bus, not {type(signals).__name__}")
        self.owner = f"{socket.gethostname()}:{os.getpid()}" if owner is None else owner
        self._signals = signals
        self._driver: D | None = None
        self._database: Any = None
        self._mongo: Any = None
        self._server: EmbeddedServer | None = None
        self._closed = False
        self._opening = threading.Lock()
        self._check_target()

    def _check_target(self) -> None:
        """Refuse what is no target, without I/O."""
        target = self._target
        if isinstance(target, str):
            known = target == "memory:" or target.startswith(("mongodb://", "mongodb+srv://"))
            if not known and not (target.startswith("embedded:") and target != "embedded:"):
                raise ConfigurationError(f"target: {_redacted(target)!r} is no target: {_TARGETS}")
        elif not self._accepts(target):
            raise ConfigurationError(
                f"target: {type(target).__module__}.{type(target).__name__} is no target: {_TARGETS}"
            )

    def _accepts(self, database: Any) -> bool:
        raise NotImplementedError

    def _connect(self, url: str, **options: Any) -> Any:
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        milliseconds = max(1, math.ceil(self._timeout * 1000))
        return {
            "serverSelectionTimeoutMS": milliseconds,
            "appname": "pyqueue",
            "retryWrites": True,
            "retryReads": True,
        }

    def _open(self) -> D:
        """The driver; made at first use. May start a server, but asks nothing of one."""
        with self._opening:
            if self._driver is not None:
                return self._driver
            if self._closed:
                raise QueueClosed("the client was closed")
            target = self._target
            if target == "memory:":
                self._database = memory_database("pyqueue")
            elif isinstance(target, str):
                if target.startswith("embedded:"):
                    self._server = EmbeddedServer(target.removeprefix("embedded:"))
                    target = self._server.url
                try:
                    self._mongo = self._connect(target, **self._options())
                    self._database = self._mongo.get_default_database("pyqueue")
                except PyMongoError as error:
                    raise ConfigurationError(f"target: {translated(error)}") from error
                except (ValueError, OSError) as error:  # OSError: files of certificates
                    raise ConfigurationError(f"target: {error}") from error
            else:
                self._database = target
            self._driver = self._driver_type(
                self._database,
                self.namespace,
                bus=self._bus(self._database),
                durability=self._durability,
                timeout=self._timeout,
                topic=f"{self._database.name}/{self.namespace}",
            )
            return self._driver

    def _bus(self, database: Any) -> Any:
        """The bus that ``signals`` names, or the default one."""
        if self._signals is not None and not isinstance(self._signals, str):
            return self._signals
        default = "memory:" if type(database).__module__.startswith("mongomock") else "capped:"
        try:
            return self._open_bus(self._signals or default, database)
        except buses.BusError as error:
            raise ConfigurationError(f"signals: {error}") from error

    def _open_bus(self, url: str, database: Any) -> Any:
        raise NotImplementedError

    def _bus_check(self, bus: Any) -> Any:
        """Have a bus that was named say whether it can be used; the default one may do without."""
        return None if self._signals is None or not hasattr(bus, "check") else bus.check()

    def _bus_is_ours(self) -> bool:
        return self._signals is None or isinstance(self._signals, str)

    def line(self, queue: str) -> Waiters:
        """The line of the consumers of a queue; for the queues of this client."""
        return self._open().line(queue)

    def _backend(
        self,
        name: str,
        model: Any,
        lease: Any,
        max_tries: Any,
        dead_letter: Any,
        history: Any,
        backoff: Any,
        poll: Any,
    ) -> Standard:
        arguments.queue_name(name)
        arguments.backoff(backoff)
        options = Options(
            lease=arguments.duration("lease", lease, positive=True),
            max_tries=None if max_tries is None else arguments.count("max_tries", max_tries),
            dead_letter=f"{name}.dead"
            if dead_letter is None
            else arguments.queue_name(dead_letter),
            history=None
            if history is None
            else arguments.duration("history", history, positive=True),
            backoff=backoff,
            poll=arguments.duration("poll", poll, positive=True),
        )
        return self.backend(
            name, options, Codec(model), owner=self.owner, command_timeout=self._timeout
        )

    def _infos(self, names: list[str], counts: list[Any], paused: list[bool]) -> list[QueueInfo]:
        return [QueueInfo(*line) for line in zip(names, counts, paused, strict=True)]

    def _of(self, name: str) -> Standard:
        return self.backend(name, Options())

    @property
    def database(self) -> Any:
        """The underlying database object; starts the server of an ``embedded:`` target."""
        self._open()
        return self._database

    @property
    def url(self) -> str | None:
        """The URL that another process can use, credentials included; None if there is none."""
        if isinstance(self._target, str) and self._target.startswith("mongodb"):
            return self._target
        if self._server is not None:
            base, _, query = self._server.url.partition("?")
            return f"{base.rstrip('/')}/pyqueue" + (f"?{query}" if query else "")
        return None

    @property
    def stats(self) -> Mapping[str, int]:
        """What this client has counted so far: commands, errors, signals and more, by name."""
        driver = self._driver
        if driver is None:
            return {}
        bus = {f"bus {name}": count for name, count in getattr(driver.bus, "stats", {}).items()}
        return {**driver.stats, **bus}

    def __repr__(self) -> str:
        target = (
            _redacted(self._target)
            if isinstance(self._target, str)
            else type(self._target).__name__
        )
        return f"{type(self).__name__}({target!r}, namespace={self.namespace!r})"

    def _transactional(self) -> None:
        if self._driver is None or not self._driver.replicated:
            raise ConfigurationError(
                "transaction: needs a MongoDB replica set (a one-node set will do)"
            )


_TRANSACTION: dict[str, Any] = {
    # Not "snapshot": that may be older than a claim at w:1 that was just acknowledged, which would then seem lost.
    "read_concern": ReadConcern("majority"),
    "write_concern": WriteConcern(w="majority", j=True),
}


def _redacted(url: str) -> str:
    """A URL without what may be secret: nothing from its scheme to its last "@", and no options."""
    before, at, rest = url.rpartition("@")
    scheme = before.partition("://")[0]
    shown = scheme if scheme.replace("+", "").isalnum() else "***"
    return ((f"{shown}://***@" if at else "") + rest.partition("?")[0])[:200]


class Client(_Common[Driver]):
    """A client for blocking code; usable by any number of threads, in the process that made it.

    Args:
        target: "mongodb://host/db", "mongodb+srv://...", "memory:" (mongomock, this process only), "embedded:PATH" (starts a private
            mongod with its data in PATH, stopped on close), or a pymongo or mongomock database, which stays yours to close.
            A URL without a database means "pyqueue".
        namespace: the collection that holds the queues.
        signals: the bus that wakes blocked consumers: a URL ("memory:", "capped:", "redis://host:port/0", "none:") or a bus object.
        durability: "majority" (journaled, on a majority of the members), or "acknowledged" (by the primary: faster, and what a
            fail-over rolls back may be lost or delivered again).
        owner: a label written into claims; default "host:pid".
        command_timeout: seconds that a command may take, its retries included, before ``Unavailable``.
    """

    _driver_type = Driver

    def __init__(self, target: Any, **options: Any) -> None:
        super().__init__(target, **options)
        self.renewer = Renewer()

    def _accepts(self, database: Any) -> bool:
        return isinstance(database, Database) or type(database).__module__.startswith("mongomock")

    def _connect(self, url: str, **options: Any) -> Any:
        return pymongo.MongoClient(url, **options)

    def _open_bus(self, url: str, database: Any) -> Any:
        return buses.open(url, database)

    def run(self, plan: Plan[R]) -> R:
        """Carry a plan out."""
        return self._open().run(plan)

    @overload
    def queue(self, name: str, model: type[T], **options: Unpack[QueueOptions]) -> Queue[T]: ...
    @overload
    def queue(
        self, name: str, model: Any = None, **options: Unpack[QueueOptions]
    ) -> Queue[Any]: ...
    def queue(
        self,
        name: str,
        model: Any = None,
        *,
        lease: Duration = 60,
        max_tries: int | None = 20,
        dead_letter: str | None = None,
        history: Duration | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008  # frozen
        poll: Duration = 15,
    ) -> Queue[Any]:
        """A queue of this namespace. Does no I/O.

        Args:
            name: 1-110 of A-Z a-z 0-9 _ - . : > (a trailing ".dead" not counted).
            model: what pydantic's TypeAdapter takes: payloads go in as it and come out as it.
            lease: seconds for which a reserved message is held.
            max_tries: how often a message is tried before it is buried; None: never.
            dead_letter: where it is buried; default "<name>.dead".
            history: seconds for which finished messages are kept; None: not at all.
            backoff: how long a rolled back message waits.
            poll: seconds after which a waiting consumer looks again even if it hears nothing.

        Returns:
            The queue.

        Raises:
            InvalidName: the name is not allowed.
            ConfigurationError: an option is not.
        """
        return Queue(
            self, self._backend(name, model, lease, max_tries, dead_letter, history, backoff, poll)
        )

    def pipeline(self, name: str = "pipeline") -> Pipeline:
        """A pipeline of queues of this namespace. Does no I/O.

        Args:
            name: a label for reports; queue names are used as given.

        Returns:
            The pipeline, to which stages are added.
        """
        return Pipeline(self, name)

    def queues(self) -> list[QueueInfo]:
        """List every queue that has a record or a message, with its counts.

        Returns:
            One QueueInfo for each, by name.
        """
        names = self.run(namespaces.names())
        plans = [self._of(name) for name in names]
        return self._infos(
            names,
            [self.run(each.counts()) for each in plans],
            [self.run(each.paused()) for each in plans],
        )

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A transaction: committed when the block ends, aborted when it raises. It cannot retry: see ``run_transaction``.

        Returns:
            A context manager giving the session, to be passed as ``session=``.

        Raises:
            ConfigurationError: the server is no replica set.
        """
        driver = self._ready()
        with self.database.client.start_session() as session:
            driver.sessions[id(session)] = []
            try:
                with session.start_transaction(**_TRANSACTION):
                    yield session
                driver.committed(session)
            finally:
                del driver.sessions[id(session)]

    def run_transaction(self, fn: Callable[[Any], R]) -> R:
        """Call ``fn(session)`` in a transaction, again when MongoDB asks for a retry, and commit.

        Args:
            fn: passes the session as ``session=``; may be called more than once.

        Returns:
            What ``fn`` returned.

        Raises:
            ConfigurationError: the server is no replica set.
        """
        driver = self._ready()
        with self.database.client.start_session() as session:

            def attempt(session: Any) -> R:
                driver.sessions[id(session)] = []
                return fn(session)

            try:
                result: R = session.with_transaction(attempt, **_TRANSACTION)
                driver.committed(session)
            finally:
                driver.sessions.pop(id(session), None)
            return result

    def _ready(self) -> Driver:
        driver = self._open()
        driver.run(namespaces.nothing())
        self._transactional()
        return driver

    def close(self) -> None:
        """Wake every waiting consumer with ``QueueClosed``, and close what this client opened. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        self.renewer.close()
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close_lines()
            if self._bus_is_ours():
                driver.bus.close()
        if self._mongo is not None:
            with pymongo.timeout(1):  # it says goodbye to the server, which may be gone
                self._mongo.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        try:
            driver = self._open()
            driver.run(namespaces.nothing())
            self._bus_check(driver.bus)
        except BaseException as error:
            self.close()
            if isinstance(error, buses.BusError):
                raise ConfigurationError(f"signals: {error}") from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient(_Common[AsyncDriver]):
    """A client for async code: ``Client``'s twin, over PyMongo's AsyncMongoClient, or motor if you pass a motor database.

    It belongs to the event loop in which it is first used. The arguments are ``Client``'s; the database object is an AsyncDatabase or an
    AsyncIOMotorDatabase. ``memory:`` runs inline.
    """

    _driver_type = AsyncDriver
    #: The blocking kind of client, for work that blocks.
    _twin = Client

    def __init__(self, target: Any, **options: Any) -> None:
        super().__init__(target, **options)
        self.renewer = AsyncRenewer()

    def _accepts(self, database: Any) -> bool:
        kind = type(database)
        return isinstance(database, AsyncDatabase) or kind.__module__.startswith(
            ("mongomock", "motor.motor_asyncio")
        )

    def _connect(self, url: str, **options: Any) -> Any:
        return pymongo.AsyncMongoClient(url, **options)

    def _open_bus(self, url: str, database: Any) -> Any:
        return buses.open_async(url, database)

    async def _opened(self) -> AsyncDriver:
        if self._driver is not None:
            return self._driver
        if isinstance(self._target, str) and self._target.startswith("embedded:"):
            return await asyncio.to_thread(self._open)  # starting a server takes a second
        return self._open()

    async def run(self, plan: Plan[R]) -> R:
        """Carry a plan out."""
        driver = self._driver
        if driver is None:
            driver = await self._opened()
        return await driver.run(plan)

    @overload
    def queue(
        self, name: str, model: type[T], **options: Unpack[QueueOptions]
    ) -> AsyncQueue[T]: ...
    @overload
    def queue(
        self, name: str, model: Any = None, **options: Unpack[QueueOptions]
    ) -> AsyncQueue[Any]: ...
    def queue(
        self,
        name: str,
        model: Any = None,
        *,
        lease: Duration = 60,
        max_tries: int | None = 20,
        dead_letter: str | None = None,
        history: Duration | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008  # frozen
        poll: Duration = 15,
    ) -> AsyncQueue[Any]:
        """A queue of this namespace. Does no I/O. See ``Client.queue``."""
        return AsyncQueue(
            self, self._backend(name, model, lease, max_tries, dead_letter, history, backoff, poll)
        )

    def pipeline(self, name: str = "pipeline") -> Pipeline:
        """A pipeline of queues of this namespace. Does no I/O. See ``Client.pipeline``."""
        return Pipeline(self, name)

    async def queues(self) -> list[QueueInfo]:
        """List every queue that has a record or a message, with its counts. See ``Client.queues``."""
        names = await self.run(namespaces.names())
        plans = [self._of(name) for name in names]
        counts = [await self.run(each.counts()) for each in plans]
        return self._infos(names, counts, [await self.run(each.paused()) for each in plans])

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A transaction: committed when the block ends, aborted when it raises. See ``Client.transaction``."""
        driver = await self._ready()
        async with await self._session() as session:
            driver.sessions[id(session)] = []
            try:
                async with await _maybe(session.start_transaction(**_TRANSACTION)):
                    yield session
                driver.committed(session)
            finally:
                del driver.sessions[id(session)]

    async def run_transaction(self, fn: Callable[[Any], Awaitable[R]]) -> R:
        """Await ``fn(session)`` in a transaction, again when MongoDB asks for a retry, and commit. See ``Client.run_transaction``."""
        driver = await self._ready()
        async with await self._session() as session:

            async def attempt(session: Any) -> R:
                driver.sessions[id(session)] = []
                return await fn(session)

            try:
                result = await session.with_transaction(attempt, **_TRANSACTION)
                driver.committed(session)
            finally:
                driver.sessions.pop(id(session), None)
            return cast(R, result)

    async def _session(self) -> Any:
        return await _maybe(self._database.client.start_session())

    async def _ready(self) -> AsyncDriver:
        await self.run(namespaces.nothing())
        self._transactional()
        return cast(AsyncDriver, self._driver)

    async def close(self) -> None:
        """Wake every waiting consumer with ``QueueClosed``, and close what this client opened. More than once is fine."""
        if self._closed:
            return
        self._closed = True
        await self.renewer.close()
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.settled()
            driver.close_lines()
            if self._bus_is_ours():
                await driver.bus.close()
        if self._mongo is not None:
            with pymongo.timeout(1):  # it says goodbye to the server, which may be gone
                await self._mongo.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    async def __aenter__(self) -> Self:
        try:
            driver = await self._opened()
            await driver.run(namespaces.nothing())
            await _maybe(self._bus_check(driver.bus))
        except BaseException as error:
            await self.close()
            if isinstance(error, buses.BusError):
                raise ConfigurationError(f"signals: {error}") from error
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _maybe(value: Any) -> Any:
    """What PyMongo gives at once and motor gives awaited, or the other way round."""
    if hasattr(value, "__await__"):
        return await value
    return value
