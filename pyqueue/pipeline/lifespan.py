"""The lifespan of a worker: resources that it opens before its first message and closes at the end.

It is a context manager, or a generator function with one ``yield``, blocking or async. A run enters
it before it receives a message, and leaves it after the last message is settled.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from types import TracebackType
from typing import Any, TypeVar

from pyqueue.errors import ConfigurationError
from pyqueue.runtime.thread_pool import DaemonThreadPool

S = TypeVar("S")

Manager = AbstractAsyncContextManager[S] | AbstractContextManager[S]
#: The values that ``Worker`` takes as its ``lifespan``.
LifespanOf = Manager[S] | Callable[[], Manager[S] | AsyncIterator[S] | Iterator[S]]


class Lifespan:
    """The lifespan of a worker.

    Args:
        given: As for ``Worker``, or None for a worker without a lifespan.

    Raises:
        ConfigurationError: ``given`` is neither a context manager nor a function that makes one.
    """

    def __init__(self, given: object = None) -> None:
        self._name = getattr(given, "__name__", None) or type(given).__name__
        self._make = _maker(given)
        #: The exception that the lifespan raised.
        self.failure: BaseException | None = None

    @asynccontextmanager
    async def entered(self, threads: DaemonThreadPool) -> AsyncIterator[Any]:
        """Yield the value of the lifespan during a run.

        Exceptions that the lifespan raises get a note that names it.

        Args:
            threads: The threads that run a blocking lifespan.
        """
        self.failure = None
        try:
            manager = self._awaited(threads)
            state = await manager.__aenter__()
        except Exception as error:
            self._note(error, "failed to start, so no message was received")
            raise
        try:
            yield state
        except BaseException as error:
            if not await self._leave(manager, error):
                raise
        else:
            await self._leave(manager, None)

    async def _leave(
        self, manager: AbstractAsyncContextManager[Any], error: BaseException | None
    ) -> bool:
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        try:
            return bool(await manager.__aexit__(kind, error, trace))
        except Exception as failure:
            if failure is not error:
                self._note(failure, "failed to end; all messages were settled before")
            raise

    def _note(self, error: Exception, what: str) -> None:
        error.add_note(f"lifespan: {self._name} {what}")
        self.failure = error

    def _awaited(self, threads: DaemonThreadPool) -> AbstractAsyncContextManager[Any]:
        manager = self._make()
        if hasattr(manager, "__aenter__"):
            awaited: AbstractAsyncContextManager[Any] = manager
            return awaited
        if hasattr(manager, "__enter__"):
            return _InThreads(manager, threads)
        raise ConfigurationError(
            f"lifespan: expected a context manager from {self._name}, found "
            f"{type(manager).__name__}; decorate the function with contextlib.asynccontextmanager"
        )


class _InThreads(AbstractAsyncContextManager[Any]):
    """A blocking context manager that is entered and left in threads."""

    def __init__(self, manager: AbstractContextManager[Any], threads: DaemonThreadPool) -> None:
        self._manager = manager
        self._threads = threads

    async def __aenter__(self) -> Any:
        return await self._threads.run(self._manager.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._threads.run(self._manager.__exit__, kind, error, trace)


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def _refuse_called(given: Any) -> None:
    """Refuse what a generator function or an ``async def`` returned."""
    if inspect.iscoroutine(given):
        given.close()  # otherwise Python warns that it was never awaited
    elif not (inspect.isgenerator(given) or inspect.isasyncgen(given)):
        return
    raise ConfigurationError(
        f"lifespan: expected a function, found the result of {given.__name__}(); pass the "
        "function itself, without calling it"
    )


def _maker(given: Any) -> Callable[[], Any]:
    """Return a function that makes the context manager of a run from the ``lifespan`` given."""
    if given is None:
        return _nothing
    _refuse_called(given)
    is_class = isinstance(given, type)
    if not is_class and (hasattr(given, "__aenter__") or hasattr(given, "__enter__")):
        return lambda: given
    if not callable(given) or inspect.iscoroutinefunction(given):
        found = "an async def without yield" if callable(given) else type(given).__name__
        raise ConfigurationError(
            f"lifespan: expected a context manager or a generator function, found {found}; yield "
            "the value that handlers find in delivery.state"
        )
    try:
        inspect.signature(given).bind()
    except TypeError:
        raise ConfigurationError(
            "lifespan: expected a function without arguments; bind its arguments with "
            "functools.partial"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    if inspect.isasyncgenfunction(given):
        return asynccontextmanager(given)
    if inspect.isgeneratorfunction(given):
        return contextmanager(given)
    made: Callable[[], Any] = given
    return made
