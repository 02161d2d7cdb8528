"""The async twins behind the blocking names, so that one suite runs over both.

Each awaited operation is carried into an event loop that runs in a thread of its own. What is plain
on both sides (``queue()``, ``name``, ``url``) is passed through, so the suite sees no difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio.to_thread
from anyio.from_thread import BlockingPortal

from pyqueue import AsyncClient, AsyncQueue
from pyqueue.claim import AsyncClaim
from pyqueue.client import runner_of

__all__ = ["PortalClient", "PortalQueue"]


class _Carried:
    def __init__(self, portal: BlockingPortal, target: Any) -> None:
        self._portal = portal
        self._target = target

    def __repr__(self) -> str:
        return repr(self._target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._carried(value) if inspect.iscoroutinefunction(value) else value

    def _carried(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            options = {name: _bare(value) for name, value in options.items()}
            return self._portal.call(partial(operation, *map(_bare, args), **options))

        return call


def _bare(value: Any) -> Any:
    return value._target if isinstance(value, _Carried) else value


class PortalClaim(_Carried):
    """An AsyncClaim with the methods of a Claim."""

    _target: AsyncClaim

    def __len__(self) -> int:
        return len(self._target)


class PortalQueue(_Carried):
    """An AsyncQueue with the methods of a Queue."""

    _target: AsyncQueue[Any]

    def reserved(self, *args: Any, **options: Any) -> Any:
        """As Queue.reserved."""
        return self._portal.wrap_async_context_manager(self._target.reserved(*args, **options))

    @contextmanager
    def claim(self, *args: Any, **options: Any) -> Iterator[Any]:
        """As Queue.claim."""
        with self._portal.wrap_async_context_manager(self._target.claim(*args, **options)) as claim:
            yield PortalClaim(self._portal, claim)


class PortalClient(_Carried):
    """An AsyncClient with the methods of a Client."""

    _target: AsyncClient

    @property
    def _connection(self) -> Any:
        """Its plan runner, which ``runner_of`` gives."""
        return _Carried(self._portal, runner_of(self._target))

    def queue(self, *args: Any, **options: Any) -> Any:
        """As Client.queue."""
        return PortalQueue(self._portal, self._target.queue(*args, **options))

    def transaction(self) -> Any:
        """As Client.transaction."""
        return self._portal.wrap_async_context_manager(self._target.transaction())

    def run_transaction(self, fn: Callable[[Any], Any]) -> Any:
        """As Client.run_transaction; ``fn`` blocks, so it runs in a thread beside the loop."""

        async def awaited(session: Any) -> Any:
            return await anyio.to_thread.run_sync(fn, session)

        return self._portal.call(self._target.run_transaction, awaited)
