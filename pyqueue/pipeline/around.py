"""The code around the handlers of a run: a lifespan, middleware, and a pulse.

A middleware is called in place of the handler, and calls it by ``call_next``. Async middleware runs
in the event loop. Synchronous middleware runs in the thread of a synchronous handler, inside any
async middleware.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from pyqueue.delivery import Delivery
from pyqueue.errors import ConfigurationError
from pyqueue.pipeline.calls import Call
from pyqueue.pipeline.graph import Stage
from pyqueue.pipeline.lifespan import Lifespan
from pyqueue.pipeline.pulse import Pulse
from pyqueue.runtime.thread_pool import DaemonThreadPool

R = TypeVar("R")

Middleware = Callable[[Any, Callable[[Any], Any]], Any]

#: The deliveries of the handler call that runs in this context, for log lines.
current_deliveries: Final[ContextVar[Sequence[Delivery[Any]]]] = ContextVar(
    "current_deliveries", default=()
)


@dataclass(slots=True)
class Around:
    """The parts of a run that surround its handlers: lifespan, middleware and pulse."""

    lifespan: Lifespan = field(default_factory=Lifespan)
    #: Middleware that runs in the event loop, outermost first.
    awaited: list[Middleware] = field(default_factory=list)
    #: Middleware that runs in the thread of a handler, outermost first.
    plain: list[Middleware] = field(default_factory=list)
    #: Records that the event loop turns, or None if there are no health checks.
    pulse: Pulse | None = None

    def add(self, middleware: object) -> None:
        """Add a middleware, which runs inside the middleware that was added before.

        Raises:
            ConfigurationError: The middleware cannot be called with a delivery and ``call_next``,
                or it is async and an earlier middleware is synchronous.
        """
        if isinstance(middleware, type) or not callable(middleware):
            found = "a class" if isinstance(middleware, type) else type(middleware).__name__
            raise ConfigurationError(
                f"middleware: expected a function or an object with __call__(delivery, call_next), "
                f"found {found}"
            )
        try:
            inspect.signature(middleware).bind(None, None)
        except TypeError:
            raise ConfigurationError(
                f"middleware: {_label(middleware)} must take (delivery, call_next)"
            ) from None
        except ValueError:  # a builtin without a signature
            pass
        called = getattr(middleware, "__call__", None)  # noqa: B004  # its type
        if not (inspect.iscoroutinefunction(middleware) or inspect.iscoroutinefunction(called)):
            self.plain.append(middleware)
            return
        if self.plain:
            raise ConfigurationError(
                f"middleware: {_label(middleware)} is async and cannot run inside "
                f"{_label(self.plain[0])}, which is synchronous; add async middleware first"
            )
        self.awaited.append(middleware)

    def check(self, stages: Iterable[Stage]) -> None:
        """Check that the middleware can call the handlers.

        Raises:
            ConfigurationError: A middleware is a synchronous function, but a handler is async.
        """
        for stage in stages:
            if self.plain and stage.awaited:
                raise ConfigurationError(
                    f"middleware: {_label(self.plain[0])} is synchronous and cannot call "
                    f"{stage.label}, the async handler of queue {stage.name!r}; write the "
                    "middleware as an async def"
                )


async def handled(stage: Stage, call: Call, around: Around, threads: DaemonThreadPool) -> Any:
    """Call the handler of a stage through the middleware. Return its answer.

    Args:
        stage: The stage whose handler is called.
        call: The messages, and the arguments of the handler.
        around: Holds the middleware of the run.
        threads: The threads that run synchronous handlers.
    """
    if not around.awaited and not around.plain:
        return await _answer(stage, threads, stage.handler, *call.arguments)
    given: Any = call.deliveries[0] if stage.batch is None else list(call.deliveries)
    handler: Callable[[], Any] = partial(stage.handler, *call.arguments)
    for each in reversed(around.plain):
        handler = partial(each, given, _next(handler, given))
    following: Callable[[], Awaitable[Any]] = partial(_answer, stage, threads, handler)
    for each in reversed(around.awaited):
        following = partial(each, given, _next(following, given))
    return await following()


async def _answer(
    stage: Stage, threads: DaemonThreadPool, handler: Callable[..., Any], *args: Any
) -> Any:
    """Call a handler, in a thread if it is synchronous, and return its answer."""
    if stage.awaited:
        return await handler(*args)
    answer = await threads.run(handler, *args)
    return await answer if inspect.isawaitable(answer) else answer


def _next(following: Callable[[], R], given: object) -> Callable[[object], R]:
    """Return the ``call_next`` of a middleware, which may call it again to repeat the handler."""

    def call_next(delivery: object) -> R:
        if delivery is not given:
            raise ConfigurationError(
                "call_next: expected the delivery that the middleware was called with, found "
                f"{type(delivery).__name__}; pass on the same delivery"
            )
        return following()

    return call_next


def _label(middleware: object) -> str:
    return str(getattr(middleware, "__name__", None) or type(middleware).__name__)
