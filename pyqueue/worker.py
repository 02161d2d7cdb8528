"""Worker: functions that consume queues. It is a pipeline whose stages are all sinks; how they run is said there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar, overload

from pyqueue.pipeline import Runner

__all__ = ["Worker"]

H = TypeVar("H", bound=Callable[..., Any])


class Worker(Runner):
    """Consumes queues: each message is committed when its handler ends, and tried again later when it raises.

    Args:
        client: a Client or an AsyncClient; handlers may be ``def`` or ``async def`` on either.
        concurrency: how many handlers run at once, over all queues.
        name: a label for reports.
    """

    def __init__(self, client: Any, *, concurrency: int = 16, name: str = "worker") -> None:
        super().__init__(client, name, concurrency=concurrency)

    @overload
    def on(self, queue: str, *, to: Iterable[str] = (), **options: Any) -> Callable[[H], H]: ...
    @overload
    def on(
        self, queue: str, handler: Callable[..., Any], *, to: Iterable[str] = (), **options: Any
    ) -> Self: ...
    def on(self, queue: str, handler: Any = None, *, to: Iterable[str] = (), **options: Any) -> Any:
        """Have a queue consumed by the decorated function.

        Args:
            queue: the queue.
            handler: takes (payload) or (payload, delivery); without it this is a decorator.
            to: queues to which it may send messages on, by To or Many.
            options: model, concurrency (of this queue), time_limit (of the handler, in seconds), lease, max_tries, backoff, history and
                the other options of ``Client.queue``.
        """
        return self._add("sink", queue, handler, to, **options)
