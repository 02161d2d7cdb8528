"""Blocking wrappers around the async classes, so that one suite tests both.

Each coroutine runs in an event loop in a separate thread. Attributes that do not block on either
side (``queue()``, ``name``, ``url``) are passed through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import anyio.to_thread
from anyio.from_thread import BlockingPortal

from pyqueue import AsyncClient, AsyncConsumer, AsyncQueue, AsyncStream
from pyqueue.claim import AsyncClaim
from pyqueue.each import AsyncEach, AsyncLoop
from pyqueue.runtime.connecting import runner_of


class _Wrapped:
    def __init__(self, portal: BlockingPortal, target: Any) -> None:
        self._portal = portal
        self._target = target

    def __repr__(self) -> str:
        return repr(self._target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._wrapped(value) if inspect.iscoroutinefunction(value) else value

    def _wrapped(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            options = {name: _unwrapped(value) for name, value in options.items()}
            return self._portal.call(partial(operation, *map(_unwrapped, args), **options))

        return call


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(each, _Wrapped) for each in value):
        return [*map(_unwrapped, value)]
    return value._target if isinstance(value, _Wrapped) else value


class PortalClaim(_Wrapped):
    """An AsyncClaim with the methods of a Claim."""

    _target: AsyncClaim

    def __len__(self) -> int:
        return len(self._target)


class PortalLoop(_Wrapped):
    """An AsyncLoop with the methods of a Loop."""

    _target: AsyncLoop[Any]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        # The portal keeps the arguments for a moment, but a loop is left when nothing refers to it.
        found = self._portal.call(_next, [self._target])
        if not found:
            raise StopIteration
        return found[0]


async def _next(loops: list[AsyncLoop[Any]]) -> list[Any]:
    try:
        return [await anext(loops.pop())]
    except StopAsyncIteration:
        return []


class PortalEach(_Wrapped):
    """An AsyncEach with the methods of an Each."""

    _target: AsyncEach[Any]

    def __iter__(self) -> PortalLoop:
        return PortalLoop(self._portal, aiter(self._target))

    def __enter__(self) -> Self:
        self._block = self._portal.wrap_async_context_manager(self._target)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._block.__exit__(*error)


class _Received(_Wrapped):
    """The part of a queue and of a consumer group that is not awaited."""

    _target: AsyncQueue[Any] | AsyncConsumer[Any]

    def reserved(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Queue.reserved``."""
        return self._portal.wrap_async_context_manager(self._target.reserved(*args, **options))

    def renew(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Queue.renew``."""
        return self._portal.wrap_async_context_manager(self._target.renew(*args, **options))

    def each(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Queue.each``."""
        return PortalEach(self._portal, self._target.each(*args, **options))


class PortalQueue(_Received):
    """An AsyncQueue with the methods of a Queue."""

    _target: AsyncQueue[Any]

    def select(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Queue.select``."""
        return PortalSelection(self._portal, self._target.select(*args, **options))

    def within(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call an async function with the queue, in its event loop."""
        return self._portal.call(partial(work, self._target, *args, **options))

    @contextmanager
    def claim(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Wrap ``Queue.claim``."""
        with self._portal.wrap_async_context_manager(self._target.claim(*args, **options)) as claim:
            yield PortalClaim(self._portal, claim)


class PortalSelection(_Wrapped):
    """An AsyncSelection with the methods of a Selection."""


class PortalStream(_Wrapped):
    """An AsyncStream with the methods of a Stream."""

    _target: AsyncStream[Any]

    def consumer(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Stream.consumer``."""
        return PortalConsumer(self._portal, self._target.consumer(*args, **options))


class PortalConsumer(_Received):
    """An AsyncConsumer with the methods of a Consumer."""

    _target: AsyncConsumer[Any]


class PortalClient(_Wrapped):
    """An AsyncClient with the methods of a Client."""

    _target: AsyncClient

    @property
    def _connection(self) -> Any:
        """Return the plan runner that ``runner_of`` reads."""
        return _Wrapped(self._portal, runner_of(self._target))

    def queue(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Client.queue``."""
        return PortalQueue(self._portal, self._target.queue(*args, **options))

    def stream(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Client.stream``."""
        return PortalStream(self._portal, self._target.stream(*args, **options))

    def receive(self, queues: Any, *args: Any, **options: Any) -> Any:
        """Wrap ``Client.receive``."""
        receive = partial(self._target.receive, _unwrapped(queues), *args, **options)
        return self._portal.call(receive)

    def gather(self, *args: Any, **options: Any) -> Any:
        """Wrap ``Client.gather``."""
        return self._portal.wrap_async_context_manager(self._target.gather(*args, **options))

    def transaction(self) -> Any:
        """Wrap ``Client.transaction``."""
        return self._portal.wrap_async_context_manager(self._target.transaction())

    def run_transaction(self, fn: Callable[[Any], Any]) -> Any:
        """Wrap ``Client.run_transaction``; ``fn`` blocks, so it runs in a worker thread."""

        async def awaited(session: Any) -> Any:
            return await anyio.to_thread.run_sync(fn, session)

        return self._portal.call(self._target.run_transaction, awaited)
