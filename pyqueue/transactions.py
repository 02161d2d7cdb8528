"""Transactions: a session for the caller's operations, and signals after the commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar, cast

from pymongo import WriteConcern
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from pyqueue.errors import ConfigurationError
from pyqueue.runtime.base_driver import BaseDriver
from pyqueue.runtime.drivers import AsyncDriver, Driver
from pyqueue.runtime.server_errors import lacks_sessions, transient

R = TypeVar("R")

#: The options of a transaction.
_OPTIONS: Final[dict[str, Any]] = {
    # A "snapshot" would not do: it may be older than a claim at w:1 that was just acknowledged. The
    # transaction would not see that claim, and its lease would seem lost.
    "read_concern": ReadConcern("majority"),
    "write_concern": WriteConcern(w="majority", j=True),
}


def check_usable(driver: BaseDriver[Any]) -> None:
    """Refuse a server without transactions.

    Raises:
        ConfigurationError: The server has no transactions.
    """
    if not driver.replicated and not driver.memory:
        raise ConfigurationError(
            "transaction: needs a MongoDB replica set; a set with one member is enough"
        )


@contextmanager
def _repeatable() -> Iterator[None]:
    """Turn the error of a connection without sessions into an error after which loops retry.

    The user's own command, or the commit, may also get such a connection. The command was then not
    sent, so it can be repeated.
    """
    try:
        yield
    except PyMongoError as error:
        if not lacks_sessions(error):
            raise
        raise transient(error) from error


@contextmanager
def transaction(driver: Driver, client: Any) -> Iterator[Any]:
    """Yield a session for a block. Commit at its end, or abort if it raises an exception."""
    with _repeatable(), client.start_session() as session:
        driver.sessions[id(session)] = []
        try:
            with session.start_transaction(**_OPTIONS):
                yield session
            driver.committed(session)
        finally:
            del driver.sessions[id(session)]


def run_transaction(driver: Driver, client: Any, fn: Callable[[Any], R]) -> R:
    """Call ``fn(session)`` in a transaction, and again when MongoDB asks for a retry."""
    with _repeatable(), client.start_session() as session:

        def attempt(session: Any) -> R:
            driver.sessions[id(session)] = []
            with _repeatable():
                return fn(session)

        try:
            result: R = session.with_transaction(attempt, **_OPTIONS)
            driver.committed(session)
        finally:
            driver.sessions.pop(id(session), None)
        return result


@asynccontextmanager
async def async_transaction(driver: AsyncDriver, client: Any) -> AsyncIterator[Any]:
    """Yield a session for a block. See ``transaction``."""
    with _repeatable():
        async with await maybe_awaited(client.start_session()) as session:
            driver.sessions[id(session)] = []
            try:
                async with await maybe_awaited(session.start_transaction(**_OPTIONS)):
                    yield session
                driver.committed(session)
            finally:
                del driver.sessions[id(session)]


async def run_async_transaction(
    driver: AsyncDriver, client: Any, fn: Callable[[Any], Awaitable[R]]
) -> R:
    """Await ``fn(session)`` in a transaction. See ``run_transaction``."""
    with _repeatable():
        async with await maybe_awaited(client.start_session()) as session:

            async def attempt(session: Any) -> R:
                driver.sessions[id(session)] = []
                with _repeatable():
                    return await fn(session)

            try:
                result = await session.with_transaction(attempt, **_OPTIONS)
                driver.committed(session)
            finally:
                driver.sessions.pop(id(session), None)
            return cast(R, result)


async def maybe_awaited(value: Any) -> Any:
    """Return a value, awaited first if it is awaitable. PyMongo and motor differ in this."""
    if hasattr(value, "__await__"):
        return await value
    return value
