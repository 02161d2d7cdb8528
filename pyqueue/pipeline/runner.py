"""``Runner``: the base of pipelines and workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, Unpack, cast

import anyio

from pyqueue import arguments
from pyqueue.async_queues import AsyncQueue
from pyqueue.backends.schedules.definitions import Definition
from pyqueue.errors import ConfigurationError, QueueError, suggestion
from pyqueue.messages import BatchOptions, Counts, QueueOptions
from pyqueue.pipeline.around import Around
from pyqueue.pipeline.blocking import AnyClient, connection_of, made_queue, require_no_loop
from pyqueue.pipeline.describing import described
from pyqueue.pipeline.engine import Run
from pyqueue.pipeline.graph import (
    Graph,
    HandlerOptions,
    HandlerTerms,
    Kind,
    QueueName,
    make_stage,
    source_name,
)
from pyqueue.pipeline.handler_types import AsyncMiddleware, H, M, PlainMiddleware
from pyqueue.pipeline.lifespan import Lifespan, LifespanOf
from pyqueue.pipeline.running_stage import COUNTERS, Report
from pyqueue.pipeline.show import draw
from pyqueue.queue_base import QueueBase
from pyqueue.queues import Queue
from pyqueue.runtime.connecting import Connection
from pyqueue.specs import QueueSpec

log = logging.getLogger("pyqueue")

#: The result of a run with an AsyncClient.
AwaitedReport = Coroutine[Any, Any, Report]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:  # Python 3.11 knows no defaults
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

W = TypeVar("W", bound=AsyncMiddleware | PlainMiddleware)


class BatchQueueOptions(QueueOptions, total=False):
    """The options of the queue that a Spark stage reads."""

    #: The model of the payloads: any type that pydantic's TypeAdapter takes.
    model: Any


class StageTerms(QueueOptions, HandlerTerms, total=False):
    """The options of a stage, except its model and ``batch``."""


class BatchTerms(StageTerms):
    """The options of a stage whose handler takes batches, except its model."""

    batch: int


class ModelTerms(StageTerms, Generic[M]):
    """The options of a stage that has a model, except ``batch``."""

    model: type[M]


class ModelBatchTerms(BatchTerms, Generic[M]):
    """The options of a stage that has a model, and whose handler takes batches."""

    model: type[M]


class UnmodelledOptions(QueueOptions, HandlerOptions, total=False):
    """The options of a stage, except its model."""


class StageOptions(BatchQueueOptions, HandlerOptions, total=False):
    """The options of a stage: the options of its queue and of its handler."""


def refuse_unknown(method: str, options: Mapping[str, object]) -> None:
    """Refuse an unknown option of the method that adds a stage.

    Raises:
        TypeError: There is no such option.
    """
    own = BatchOptions if method == "spark" else HandlerOptions
    known = [*own.__annotations__, *BatchQueueOptions.__annotations__]
    if unknown := [each for each in options if each not in known]:
        raise TypeError(
            f"{method}() got an unexpected keyword argument {unknown[0]!r}; "
            f"{suggestion(unknown[0], known)}"
        )


def _divided(options: Mapping[str, object]) -> tuple[HandlerOptions, BatchQueueOptions]:
    """Divide the options of a stage: options of its handler, and options of its queue."""
    of_handler = {name: options[name] for name in HandlerOptions.__annotations__ if name in options}
    of_queue = {name: options[name] for name in options if name not in of_handler}
    return cast("HandlerOptions", of_handler), cast("BatchQueueOptions", of_queue)


class Runner(Generic[R_co]):
    """The base of pipelines and workers: stages, and how they run.

    Args:
        client: A Client or an AsyncClient. With either, handlers may be ``def`` or ``async def``.
        name: A label for reports.
        concurrency: How many handlers run at once, over all stages.
        lifespan: The resources that the handlers share; see ``Worker``.
    """

    _kind: ClassVar = "pipeline"

    def __init__(
        self,
        client: AnyClient,
        name: str,
        *,
        concurrency: int = 16,
        lifespan: LifespanOf[Any] | None = None,
    ) -> None:
        self.name = name
        self.graph = Graph()
        #: The schedules that a run stores, keyed by name.
        self._schedules: dict[str, Definition] = {}
        self._around = Around(Lifespan(lifespan))
        connection_of(client)  # refuses anything but a client
        self._client = client
        self._has_client = True
        self._concurrency = arguments.count("concurrency", concurrency)
        #: Whether an error that ends a run is logged.
        self._logs_errors = True
        self._run: Run | None = None

    def _add(
        self,
        stage_kind: Kind,
        queue: QueueName | QueueBase[Any, Any],
        handler: Callable[..., Any] | None,
        to: Iterable[QueueName],
        **options: Unpack[StageOptions],
    ) -> Self | Callable[[H], H]:
        """Add a stage and return the runner. Without a handler, return a decorator that adds it."""
        refuse_unknown("on" if self._kind == "worker" else stage_kind, options)
        of_handler, of_queue = _divided(options)
        names = self.graph.named(to)
        if isinstance(queue, QueueSpec):
            queue.refuse_more(of_queue)
            of_queue = {"model": queue.model, **queue.options}
            queue = queue.name
        source: Queue[Any] | AsyncQueue[Any]
        if isinstance(queue, QueueBase):
            configured = of_queue.get("model") is not None or bool(of_queue.keys() - {"model"})
            source = made_queue(self._client, queue, names, configured)
        else:
            source = self._source(source_name(queue), of_queue)

        def add(function: Callable[..., Any]) -> None:
            self.graph.add(make_stage(stage_kind, source, function, names, of_handler))

        return self._add_or_decorate(handler, add)

    def _source(self, name: str, options: BatchQueueOptions) -> Queue[Any] | AsyncQueue[Any]:
        return self._client.queue(name, **options)

    def use(self, middleware: W) -> W:
        """Add a middleware, which is called in place of each handler and calls it by ``call_next``.

        A middleware is ``async def middleware(delivery, call_next)``, or an object with such a
        ``__call__``. It returns ``await call_next(delivery)`` or another answer. For a handler of
        batches, ``delivery`` is the list of all deliveries of the call. The first middleware is
        outermost. A synchronous middleware runs in the thread of the handler, and is allowed only
        if no handler is async. ``use`` is also a decorator. Spark stages have no middleware.

        Args:
            middleware: A function or a callable object, as described above.

        Returns:
            The same middleware.

        Raises:
            ConfigurationError: The middleware does not take these arguments, or it is async and an
                earlier middleware is synchronous.
        """
        self._around.add(middleware)
        return middleware

    def _add_schedule(self, given: Definition) -> None:
        if given.name in self._schedules:
            raise ConfigurationError(f"name: two schedules are named {given.name!r}; rename one")
        self._schedules[given.name] = given

    def _add_or_decorate(
        self, handler: Callable[..., Any] | None, add: Callable[[Callable[..., Any]], None]
    ) -> Self | Callable[[H], H]:
        if handler is not None:
            add(handler)
            return self

        def decorate(function: H) -> H:
            add(function)
            return function

        return decorate

    def run(
        self,
        *,
        until_empty: bool = False,
        concurrency: int | None = None,
        grace: float = 30,
        allow_cycles: bool = False,
        handle_signals: bool = True,
    ) -> R_co:
        """Run until ``stop()``, SIGTERM or SIGINT. With an AsyncClient, await it.

        A run that is stopped fetches no more messages and lets its handlers end. Handlers that have
        not ended after ``grace`` seconds, or when a second signal arrives, are cancelled: their
        messages are rolled back and can be received at once. Messages whose handler had not started
        are released.

        Args:
            until_empty: Whether to end when no stage has a ready, reserved or scheduled message
                left.
            concurrency: How many handlers run at once, or None for the value of the constructor.
            grace: How many seconds handlers may take to end after a stop.
            allow_cycles: Whether the queues may form a cycle.
            handle_signals: Whether to stop at SIGTERM and SIGINT. Only a run in the main thread
                can.

        Returns:
            A Report with the counters of each stage, and the seconds that the run took.

        Raises:
            ConfigurationError: The graph is invalid, so nothing has run. Or most of the first
                messages of a stage do not fit its model, or most of its handler's first answers are
                invalid; see ``StageOptions.on_invalid``.
        """

        async def work() -> Report:
            self.graph.check(allow_cycles=allow_cycles)
            if self._run is not None:
                raise ConfigurationError(
                    f"{self.name!r} is already running; wait until it ends, or stop it"
                )
            handlers = self._concurrency
            if concurrency is not None:
                handlers = arguments.count("concurrency", concurrency)
            async with self._prepared():
                self._run = Run(
                    self._client,
                    self.graph,
                    concurrency=handlers,
                    until_empty=until_empty,
                    grace=arguments.duration("grace", grace),
                    handle_signals=handle_signals,
                    schedules=[*self._schedules.values()],
                    around=self._around,
                )
                try:
                    return await self._run_told(self._run)
                finally:
                    self._run = None

        return self._result(lambda: self._telling(work))

    async def _telling(self, work: Callable[[], AwaitedReport]) -> Report:
        """Do the work of a run. If it fails, log this: the task of the run may end unnoticed."""
        try:
            return await work()
        except Exception as error:
            blocking = isinstance(connection_of(self._client), Connection)
            in_main = threading.current_thread() is threading.main_thread()
            if self._logs_errors and not (blocking and in_main):
                text = "%s %r has ended: %s: %s"
                about = self._kind, self.name, type(error).__name__, error
                log.error(text, *about, exc_info=not isinstance(error, QueueError))
            raise

    def _result(self, work: Callable[[], AwaitedReport]) -> R_co:
        """Do the work of a run. With an AsyncClient, return a coroutine for the caller to await."""
        if not isinstance(connection_of(self._client), Connection):
            return cast("R_co", work())
        require_no_loop()
        return cast("R_co", anyio.run(work))

    @asynccontextmanager
    async def _prepared(self) -> AsyncIterator[None]:
        """Prepare a run, and clean up after it."""
        yield

    async def _run_told(self, run: Run) -> Report:
        """Run, inside the context managers of the hooks."""
        hooks = connection_of(self._client).hooks
        with nullcontext() if hooks is None else hooks.running(self):
            return await run.run()

    def stop(self) -> None:
        """Stop the current run, if there is one. Any thread may call it.

        A second call ends the run without waiting for the handlers.
        """
        run = self._run
        if run is not None:
            run.stop()

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """The counters of each stage in the current run."""
        run = self._run
        if run is None:
            return {name: dict.fromkeys(COUNTERS, 0) for name in self.graph.stages}
        return run.counters

    def describe(self) -> dict[str, Any]:
        """Return the kind, name, concurrency, stages and current run, as BSON values."""
        about = {"kind": self._kind, "name": self.name, "concurrency": self._concurrency}
        return {**about, **described(self.graph, self._run)}

    def show(
        self,
        format: Literal["text", "mermaid", "svg"] = "text",
        counts: Mapping[str, Counts] | None = None,
    ) -> str:
        """Draw the graph.

        Args:
            format: "text", "mermaid" or "svg".
            counts: The Counts to draw with the queues, keyed by queue name.

        Returns:
            The drawing.

        Raises:
            ConfigurationError: The format is not one of the three.
        """
        return draw(self.graph, self.name, format, counts or {})


def concurrency_of(runner: Runner[Any]) -> int:
    """Return how many handlers a runner runs at once, for the command line."""
    return runner._concurrency


def client_of(runner: Runner[Any]) -> AnyClient:
    """Return the client of a pipeline or a worker, for the other modules of pyqueue.

    Raises:
        ConfigurationError: The worker has no client yet.
    """
    if not runner._has_client:
        raise ConfigurationError(
            f"worker: {runner.name!r} was created without a client; call bind(client) first"
        )
    return runner._client


def has_client(runner: Runner[Any]) -> bool:
    """Return whether a pipeline or a worker has a client, for the command line."""
    return runner._has_client


def around_of(runner: Runner[Any]) -> Around:
    """Return the lifespan and the middleware of a pipeline or a worker, as an ``Around``."""
    return runner._around


def leave_errors(runner: Runner[Any]) -> None:
    """Log no error that ends a run, because the command line shows it."""
    runner._logs_errors = False
