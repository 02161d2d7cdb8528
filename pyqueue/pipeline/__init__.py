"""Pipelines: stages connected by queues, between which messages move atomically.

A stage reads one queue, and its handler decides where each message goes. The step to the next queue
is one update of one document: a message is never lost between two stages, and never in both.

``graph`` holds the stages, ``engine`` runs them, ``recipes`` reads them from a file, and ``show``
draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

import anyio

from pyqueue import arguments
from pyqueue.async_queues import AsyncQueue
from pyqueue.backends.schedules.definitions import Definition, definition
from pyqueue.errors import ConfigurationError
from pyqueue.messages import BatchOptions, Counts, QueueOptions
from pyqueue.pipeline.blocking import AnyClient, connection_of, require_no_loop
from pyqueue.pipeline.engine import Report, Run
from pyqueue.pipeline.graph import (
    Graph,
    HandlerOptions,
    Kind,
    make_spark_stage,
    make_stage,
    source_name,
)
from pyqueue.pipeline.recipes import SparkPart, imported, read
from pyqueue.pipeline.running_stage import COUNTERS
from pyqueue.pipeline.show import draw
from pyqueue.queue_base import QueueBase, runs_on
from pyqueue.queues import Queue
from pyqueue.runtime.connecting import Connection
from pyqueue.stream_base import ConsumerBase

__all__ = [
    "AnyClient",
    "Pipeline",
    "Report",
    "Runner",
    "StageOptions",
    "client_of",
    "concurrency_of",
]

H = TypeVar("H", bound=Callable[..., Any])


class BatchQueueOptions(QueueOptions, total=False):
    """The options of the queue that a Spark stage reads."""

    #: The model of the payloads: any type that pydantic's TypeAdapter takes.
    model: Any


class StageOptions(BatchQueueOptions, HandlerOptions, total=False):
    """The options of a stage: the options of its queue and of its handler."""


def _divided(options: Mapping[str, object]) -> tuple[HandlerOptions, BatchQueueOptions]:
    """Return the options of the handler and the options of the queue."""
    of_handler = {name: options[name] for name in HandlerOptions.__annotations__ if name in options}
    of_queue = {name: options[name] for name in options if name not in of_handler}
    return cast("HandlerOptions", of_handler), cast("BatchQueueOptions", of_queue)


class Runner:
    """The base of pipelines and workers: stages, and how they run.

    Args:
        client: A Client or an AsyncClient. With either, handlers may be ``def`` or ``async def``.
        name: A label for reports.
        concurrency: How many handlers run at once, over all stages.
    """

    def __init__(self, client: AnyClient, name: str, *, concurrency: int = 16) -> None:
        self.name = name
        self.graph = Graph()
        #: The schedules that a run stores, by name.
        self._schedules: dict[str, Definition] = {}
        connection_of(client)  # refuses anything but a client
        self._client = client
        self._concurrency = arguments.count("concurrency", concurrency)
        self._run: Run | None = None

    def _add(
        self,
        stage_kind: Kind,
        queue: str | QueueBase[Any, Any],
        handler: Callable[..., Any] | None,
        to: Iterable[str],
        **options: Unpack[StageOptions],
    ) -> Self | Callable[[H], H]:
        """Add a stage and return the runner. Without a handler, return a decorator that adds it."""
        of_handler, of_queue = _divided(options)
        source: Queue[Any] | AsyncQueue[Any]
        if isinstance(queue, QueueBase):
            configured = of_queue.get("model") is not None or bool(of_queue.keys() - {"model"})
            source = self._made(queue, to, configured)
        else:
            source = self._client.queue(source_name(queue), **of_queue)

        def add(function: Callable[..., Any]) -> None:
            self.graph.add(make_stage(stage_kind, source, function, to, of_handler))

        return self._add_or_decorate(handler, add)

    def _add_schedule(self, given: Definition) -> None:
        if given.name in self._schedules:
            raise ConfigurationError(f"name: two schedules are named {given.name!r}; rename one")
        self._schedules[given.name] = given

    def _made(self, queue: QueueBase[Any, Any], to: Iterable[str], configured: bool) -> Queue[Any]:
        """Return a queue or a consumer group that the caller has created."""
        is_group = isinstance(queue, ConsumerBase)
        what, makers = (
            ("a consumer group", "Client.stream and Stream.consumer")
            if is_group
            else ("a queue", "Client.queue")
        )
        if not runs_on(queue, connection_of(self._client)):
            raise ConfigurationError(
                f"queue: {queue.name!r} is {what} of another client; create it with this client"
            )
        if configured:
            raise ConfigurationError(
                f"queue: {queue.name!r} is {what}; pass model and options to {makers}"
            )
        if is_group and list(to):
            raise ConfigurationError(
                f"to: a message of {queue.name!r} stays in its stream; in the handler, push a new "
                "message to the queue instead"
            )
        return cast("Queue[Any]", queue)

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
    ) -> Any:
        """Run until ``stop()``, SIGTERM or SIGINT. With an AsyncClient this is awaited.

        A run that is stopped fetches no more messages and lets its handlers end. Handlers that have
        not ended after ``grace`` seconds, or when a second signal arrives, are cancelled: their
        messages are rolled back and can be received at once. Messages whose handler had not started
        are released.

        Args:
            until_empty: Whether to end when no stage has a ready, reserved or scheduled message
                left.
            concurrency: How many handlers run at once. None: the value given to the constructor.
            grace: How many seconds handlers have to end after a stop.
            allow_cycles: Whether the queues may form a cycle.
            handle_signals: Whether to stop at SIGTERM and SIGINT. Only a run in the main thread
                can.

        Returns:
            A Report with the counters of each stage, and the seconds that the run took.

        Raises:
            ConfigurationError: The graph is invalid, and nothing has run. Or most of the first
                messages of a stage do not fit its model, or its handler returned invalid values for
                most of them; see ``StageOptions.on_invalid``.
        """

        async def work() -> Report:
            self.graph.check(allow_cycles=allow_cycles)
            if self._run is not None:
                raise ConfigurationError(
                    f"{self.name!r} is running already; wait until it ends, or stop it"
                )
            self._run = Run(
                self._client,
                self.graph,
                concurrency=self._concurrency
                if concurrency is None
                else arguments.count("concurrency", concurrency),
                until_empty=until_empty,
                grace=arguments.duration("grace", grace),
                handle_signals=handle_signals,
                schedules=[*self._schedules.values()],
            )
            try:
                return await self._run.run()
            finally:
                self._run = None

        if not isinstance(connection_of(self._client), Connection):
            return work()
        require_no_loop()
        return anyio.run(work)

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

    def show(
        self,
        format: Literal["text", "mermaid", "svg"] = "text",
        counts: Mapping[str, Counts] | None = None,
    ) -> str:
        """Draw the graph.

        Args:
            format: "text", "mermaid" or "svg".
            counts: The Counts of queues by name, to show in the drawing.

        Returns:
            The drawing.

        Raises:
            ConfigurationError: The format is not one of the three.
        """
        return draw(self.graph, self.name, format, counts or {})


def concurrency_of(runner: Runner) -> int:
    """Return how many handlers a runner runs at once, for the command line."""
    return runner._concurrency


def client_of(runner: Runner) -> AnyClient:
    """Return the client of a pipeline or a worker, for the other modules of pyqueue."""
    return runner._client


class Pipeline(Runner):
    """Stages that are connected by queues.

    Each stage reads one queue. The handler of a ``link`` returns the next payload. The handler of a
    ``choice`` returns ``To(queue, payload)``. A ``sink`` finishes the message. Any handler may
    return ``Drop()`` or ``Many([To(...), ...])``, and raise or return ``Reject`` or ``RetryLater``.
    After any other exception the message is tried again later.

    Without a handler, each of these methods is a decorator. With a handler, it returns the
    pipeline, so that calls can be chained.

    Each method takes ``model``, the options of ``Client.queue`` (lease, max_tries, backoff, history
    and so on), and these options: ``concurrency``, how many messages of the stage may be in
    progress at once; ``time_limit``, how many seconds a handler may take; ``batch``, the maximum
    number of messages that the handler takes at once, as a list; ``window``, how many seconds a
    batch waits for more messages; and ``on_invalid``, whether the run stops if most of the first
    messages of the stage do not fit its model ("stop" or "bury"). A handler of batches returns a
    list with one result for each message, or raises ``BatchFailed`` if some of them failed.

    Args:
        client: A Client or an AsyncClient.
        name: A label for reports.
        concurrency: How many handlers run at once, over all stages.
    """

    def __init__(self, client: AnyClient, name: str = "pipeline", *, concurrency: int = 16) -> None:
        super().__init__(client, name, concurrency=concurrency)

    @overload
    def link(self, queue: str, *, to: str, **options: Unpack[StageOptions]) -> Callable[[H], H]: ...
    @overload
    def link(
        self, queue: str, handler: Callable[..., Any], *, to: str, **options: Unpack[StageOptions]
    ) -> Self: ...
    def link(
        self,
        queue: str,
        handler: Callable[..., Any] | None = None,
        *,
        to: str,
        **options: Unpack[StageOptions],
    ) -> Self | Callable[[H], H]:
        """Add a stage whose handler returns the payload with which the message moves on.

        Args:
            queue: The queue that it reads.
            handler: Takes (payload) or (payload, delivery), or lists of them with ``batch``.
            to: The next queue.
            options: Of the stage: model, concurrency, time_limit, batch, window, on_invalid. Of the
                queue: lease, max_tries, backoff, history and the others.
        """
        if not isinstance(to, str):
            raise ConfigurationError(
                f"to: the link of queue {queue!r} leads to one queue; for several, use choice()"
            )
        return self._add("link", queue, handler, (to,), **options)

    @overload
    def choice(
        self, queue: str, *, to: Iterable[str], **options: Unpack[StageOptions]
    ) -> Callable[[H], H]: ...
    @overload
    def choice(
        self,
        queue: str,
        handler: Callable[..., Any],
        *,
        to: Iterable[str],
        **options: Unpack[StageOptions],
    ) -> Self: ...
    def choice(
        self,
        queue: str,
        handler: Callable[..., Any] | None = None,
        *,
        to: Iterable[str],
        **options: Unpack[StageOptions],
    ) -> Self | Callable[[H], H]:
        """Add a stage whose handler decides to which queue the message moves.

        The handler returns ``To("late", payload)``, or ``To("late")`` to keep the payload.

        Args:
            queue: The queue that it reads.
            handler: Takes (payload) or (payload, delivery), or lists of them with ``batch``.
            to: The queues to choose from.
            options: As for ``link``.
        """
        return self._add("choice", queue, handler, to, **options)

    @overload
    def sink(
        self, queue: str, *, to: Iterable[str] = (), **options: Unpack[StageOptions]
    ) -> Callable[[H], H]: ...
    @overload
    def sink(
        self,
        queue: str,
        handler: Callable[..., Any],
        *,
        to: Iterable[str] = (),
        **options: Unpack[StageOptions],
    ) -> Self: ...
    def sink(
        self,
        queue: str,
        handler: Callable[..., Any] | None = None,
        *,
        to: Iterable[str] = (),
        **options: Unpack[StageOptions],
    ) -> Self | Callable[[H], H]:
        """Add a stage that finishes the message when its handler returns.

        Args:
            queue: The queue that it reads.
            handler: Takes (payload) or (payload, delivery). It may return To, Many or Drop; any
                other value is ignored.
            to: Queues to which the handler may send messages all the same, by To or Many.
            options: As for ``link``.
        """
        return self._add("sink", queue, handler, to, **options)

    @overload
    def spark(
        self,
        queue: str,
        *,
        to: str | Iterable[str] | None = None,
        group: str | None = None,
        output: Literal["move", "transaction"] = "move",
        max_messages: int = 5000,
        members: int = 1,
        **options: Unpack[BatchQueueOptions],
    ) -> Callable[[H], H]: ...
    @overload
    def spark(
        self,
        queue: str,
        transform: Callable[..., Any],
        *,
        to: str | Iterable[str] | None = None,
        group: str | None = None,
        output: Literal["move", "transaction"] = "move",
        max_messages: int = 5000,
        members: int = 1,
        **options: Unpack[BatchQueueOptions],
    ) -> Self: ...
    def spark(
        self,
        queue: str,
        transform: Callable[..., Any] | None = None,
        *,
        to: str | Iterable[str] | None = None,
        group: str | None = None,
        output: Literal["move", "transaction"] = "move",
        max_messages: int = 5000,
        members: int = 1,
        **options: Unpack[BatchQueueOptions],
    ) -> Self | Callable[[H], H]:
        """Add a stage in which Spark transforms batches of messages. See ``SparkStage``.

        The stage uses the active Spark session, or starts one for its first batch. Each member of
        the stage runs in one process at a time. Further processes stand by, and one of them takes
        over when that process ends or dies. A stage that is stopped finishes its current batch.
        Spark stages need ``pip install "pyqueue-mongo[spark]"``.

        Args:
            queue: The queue that it reads.
            transform: A function that takes a DataFrame of messages and returns a DataFrame with
                the columns ``id`` and ``payload``. See ``SparkStage``.
            to: The next queue. With a list of queues, the column ``queue`` of the result chooses
                one of them for each row. None: the transform writes the messages to a table itself,
                and returns nothing.
            group: The durable name of this consumer. By default it is "QUEUE>TO" with one target,
                and "QUEUE" otherwise.
            output: "move" moves each message to its target. "transaction" finishes the batch and
                writes the rows as new messages, in one transaction.
            max_messages: The maximum number of messages in a batch.
            members: How many processes share the work. Each of them runs one member.
            options: Model, lease, max_tries, backoff and the other options of a queue.
        """
        source = self._client.queue(queue, **options)
        batches: BatchOptions = {
            "output": output,
            "max_messages": max_messages,
            "members": members,
        }

        def add(function: Callable[..., Any]) -> None:
            self.graph.add(make_spark_stage(source, function, to, group, batches))

        return self._add_or_decorate(transform, add)

    @classmethod
    def from_recipe(cls, client: AnyClient, path: str | Path) -> Self:
        """Return the pipeline that a TOML or YAML file describes.

        Args:
            client: A Client or an AsyncClient.
            path: The file.

        Returns:
            The pipeline.

        Raises:
            ConfigurationError: The file cannot be read, or is not a valid recipe. The text names
                the place of the mistake.
        """
        recipe = read(Path(path))
        pipeline = cls(client, recipe.name, concurrency=recipe.concurrency)
        for part in recipe.stages:
            if isinstance(part, SparkPart):
                pipeline.spark(part.queue, imported(part.spark), to=part.to, **part.options())
            elif not part.to:
                pipeline.sink(part.queue, imported(part.handler), **part.options())
            elif isinstance(part.to, str):
                pipeline.link(part.queue, imported(part.handler), to=part.to, **part.options())
            else:
                pipeline.choice(part.queue, imported(part.handler), to=part.to, **part.options())
        for each in recipe.cron:
            pipeline._add_schedule(definition(each.name, each.queue, each.cron, each.options()))
        return pipeline
