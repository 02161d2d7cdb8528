"""Pipelines: stages connected by queues, between which messages move atomically.

A stage reads one queue, and its handler decides where each message goes. The step to the next queue
is one update of one document: a message is never lost between two stages, and never in both.

``graph`` holds the stages, ``runner`` and ``engine`` run them, ``recipes`` reads them from a file,
and ``show`` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

from pyqueue.backends.schedules.definitions import definition
from pyqueue.errors import ConfigurationError
from pyqueue.messages import BatchOptions
from pyqueue.pipeline.blocking import AnyClient
from pyqueue.pipeline.graph import QueueName, make_spark_stage
from pyqueue.pipeline.handler_types import Adds, AddsBatch, AnyHandler, H, M, OtherModel
from pyqueue.pipeline.lifespan import LifespanOf
from pyqueue.pipeline.recipes import SparkPart, imported, read
from pyqueue.pipeline.runner import (
    AwaitedReport,
    BatchQueueOptions,
    BatchTerms,
    ModelBatchTerms,
    ModelTerms,
    R_co,
    Runner,
    StageOptions,
    StageTerms,
    UnmodelledOptions,
    around_of,
    client_of,
    concurrency_of,
    has_client,
    leave_errors,
    refuse_unknown,
)
from pyqueue.pipeline.running_stage import Report
from pyqueue.runtime.connecting import AsyncConnection, Connected, Connection
from pyqueue.specs import QueueSpec

__all__ = [
    "AnyClient",
    "AwaitedReport",
    "Pipeline",
    "R_co",
    "Report",
    "Runner",
    "StageOptions",
    "StageTerms",
    "around_of",
    "client_of",
    "concurrency_of",
    "has_client",
    "leave_errors",
]


class Pipeline(Runner[R_co]):
    """Stages that are connected by queues.

    Each stage reads one queue. The handler of a ``link`` returns the next payload. The handler of a
    ``choice`` returns ``To(queue, payload)``. A ``sink`` finishes the message. Any handler may
    return ``Drop()`` or ``Many([To(...), ...])``, and raise or return ``Reject`` or ``RetryLater``.
    After any other exception the message is tried again later.

    Without a handler, each of these methods is a decorator. With a handler, each method returns
    the pipeline, so that calls can be chained.

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
        lifespan: The resources that the handlers share; see ``Worker``.

    Raises:
        ConfigurationError: An argument is not allowed.
    """

    @overload
    def __init__(
        self: Pipeline[Report],
        client: Connected[Connection],
        name: str = "pipeline",
        *,
        concurrency: int = 16,
        lifespan: LifespanOf[Any] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Pipeline[AwaitedReport],
        client: Connected[AsyncConnection],
        name: str = "pipeline",
        *,
        concurrency: int = 16,
        lifespan: LifespanOf[Any] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        client: AnyClient,
        name: str = "pipeline",
        *,
        concurrency: int = 16,
        lifespan: LifespanOf[Any] | None = None,
    ) -> None: ...
    def __init__(
        self,
        client: Any,
        name: str = "pipeline",
        *,
        concurrency: int = 16,
        lifespan: LifespanOf[Any] | None = None,
    ) -> None:
        super().__init__(client, name, concurrency=concurrency, lifespan=lifespan)

    @overload
    def link(
        self, queue: QueueSpec[M], *, to: QueueName, **options: Unpack[StageTerms]
    ) -> Adds[M]: ...
    @overload
    def link(
        self, queue: QueueSpec[M], *, to: QueueName, **options: Unpack[BatchTerms]
    ) -> AddsBatch[M]: ...
    @overload
    def link(self, queue: str, *, to: QueueName, **options: Unpack[ModelTerms[M]]) -> Adds[M]: ...
    @overload
    def link(
        self, queue: str, *, to: QueueName, **options: Unpack[ModelBatchTerms[M]]
    ) -> AddsBatch[M]: ...
    @overload
    def link(
        self, queue: str, *, to: QueueName, **options: Unpack[StageOptions]
    ) -> Callable[[H], H]: ...
    @overload
    def link(
        self,
        queue: QueueSpec[M] | str,
        handler: AnyHandler[M],
        *,
        to: QueueName,
        model: type[M] | OtherModel = None,
        **options: Unpack[UnmodelledOptions],
    ) -> Self: ...
    def link(
        self,
        queue: QueueName,
        handler: Callable[..., Any] | None = None,
        *,
        to: QueueName,
        **options: Unpack[StageOptions],
    ) -> Any:
        """Add a stage whose handler returns the payload with which the message moves on.

        Args:
            queue: The queue that the stage reads.
            handler: A function of (payload) or (payload, delivery); with ``batch``, of lists.
            to: The next queue.
            options: The options of the stage (model, concurrency, time_limit, batch, window,
                on_invalid) and of the queue (lease, max_tries, backoff, history and so on).
        """
        if not isinstance(to, (str, QueueSpec)):
            raise ConfigurationError(
                f"to: the link of queue {queue!r} leads to one queue; for several, use choice()"
            )
        return self._add("link", queue, handler, (to,), **options)

    @overload
    def choice(
        self, queue: QueueSpec[M], *, to: Iterable[QueueName], **options: Unpack[StageTerms]
    ) -> Adds[M]: ...
    @overload
    def choice(
        self, queue: QueueSpec[M], *, to: Iterable[QueueName], **options: Unpack[BatchTerms]
    ) -> AddsBatch[M]: ...
    @overload
    def choice(
        self, queue: str, *, to: Iterable[QueueName], **options: Unpack[ModelTerms[M]]
    ) -> Adds[M]: ...
    @overload
    def choice(
        self, queue: str, *, to: Iterable[QueueName], **options: Unpack[ModelBatchTerms[M]]
    ) -> AddsBatch[M]: ...
    @overload
    def choice(
        self, queue: str, *, to: Iterable[QueueName], **options: Unpack[StageOptions]
    ) -> Callable[[H], H]: ...
    @overload
    def choice(
        self,
        queue: QueueSpec[M] | str,
        handler: AnyHandler[M],
        *,
        to: Iterable[QueueName],
        model: type[M] | OtherModel = None,
        **options: Unpack[UnmodelledOptions],
    ) -> Self: ...
    def choice(
        self,
        queue: QueueName,
        handler: Callable[..., Any] | None = None,
        *,
        to: Iterable[QueueName],
        **options: Unpack[StageOptions],
    ) -> Any:
        """Add a stage whose handler decides to which queue the message moves.

        The handler returns ``To("late", payload)``, or ``To("late")`` to keep the payload.

        Args:
            queue: The queue that the stage reads.
            handler: A function of (payload) or (payload, delivery); with ``batch``, of lists.
            to: The queues to choose from.
            options: As for ``link``.
        """
        return self._add("choice", queue, handler, to, **options)

    @overload
    def sink(
        self, queue: QueueSpec[M], *, to: Iterable[QueueName] = (), **options: Unpack[StageTerms]
    ) -> Adds[M]: ...
    @overload
    def sink(
        self, queue: QueueSpec[M], *, to: Iterable[QueueName] = (), **options: Unpack[BatchTerms]
    ) -> AddsBatch[M]: ...
    @overload
    def sink(
        self, queue: str, *, to: Iterable[QueueName] = (), **options: Unpack[ModelTerms[M]]
    ) -> Adds[M]: ...
    @overload
    def sink(
        self, queue: str, *, to: Iterable[QueueName] = (), **options: Unpack[ModelBatchTerms[M]]
    ) -> AddsBatch[M]: ...
    @overload
    def sink(
        self, queue: str, *, to: Iterable[QueueName] = (), **options: Unpack[StageOptions]
    ) -> Callable[[H], H]: ...
    @overload
    def sink(
        self,
        queue: QueueSpec[M] | str,
        handler: AnyHandler[M],
        *,
        to: Iterable[QueueName] = (),
        model: type[M] | OtherModel = None,
        **options: Unpack[UnmodelledOptions],
    ) -> Self: ...
    def sink(
        self,
        queue: QueueName,
        handler: Callable[..., Any] | None = None,
        *,
        to: Iterable[QueueName] = (),
        **options: Unpack[StageOptions],
    ) -> Any:
        """Add a stage that finishes the message when its handler returns.

        Args:
            queue: The queue that the stage reads.
            handler: A function of (payload) or (payload, delivery). It may return To, Many or Drop.
                Any other value is the message's result, if the producer asked for a result.
            to: Queues to which the handler may still send messages, with To or Many.
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
        over when a process ends or dies. A stage that is stopped finishes its current batch.
        Spark stages need ``pip install "pyqueue-mongo[spark]"``.

        Args:
            queue: The queue that the stage reads.
            transform: A function that takes a DataFrame of messages and returns a DataFrame with
                the columns ``id`` and ``payload``. See ``SparkStage``.
            to: The next queue. With a list of queues, the column ``queue`` of the result chooses
                one of them for each row. If None, the transform itself writes the messages to a
                table, and returns nothing.
            group: The durable name of this consumer. By default it is "QUEUE>TO" with one target,
                and "QUEUE" otherwise.
            output: "move" moves each message to its target. "transaction" finishes the batch and
                writes the rows as new messages, in one transaction.
            max_messages: The maximum number of messages in a batch.
            members: How many processes share the work. Each of them runs one member.
            options: Model, lease, max_tries, backoff and the other options of a queue.
        """
        refuse_unknown("spark", options)
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
    def from_recipe(
        cls, client: AnyClient, path: str | Path, *, lifespan: LifespanOf[Any] | None = None
    ) -> Self:
        """Return the pipeline that a TOML or YAML file describes.

        Args:
            client: A Client or an AsyncClient.
            path: The path of the file.
            lifespan: As for ``Pipeline``.

        Returns:
            The pipeline.

        Raises:
            ConfigurationError: The file cannot be read, or is not a valid recipe. The error
                text names the place of the mistake.
        """
        recipe = read(Path(path))
        pipeline = cls(client, recipe.name, concurrency=recipe.concurrency, lifespan=lifespan)
        for part in recipe.stages:
            user = f"of queue {part.queue!r}"
            if isinstance(part, SparkPart):
                transform = imported(part.spark, f"spark {user}")
                pipeline.spark(part.queue, transform, to=part.to, **part.options())
                continue
            handler = imported(part.handler, f"handler {user}")
            if not part.to:
                pipeline.sink(part.queue, handler, **part.options())
            elif isinstance(part.to, str):
                pipeline.link(part.queue, handler, to=part.to, **part.options())
            else:
                pipeline.choice(part.queue, handler, to=part.to, **part.options())
        for each in recipe.cron:
            pipeline._add_schedule(definition(each.name, each.queue, each.cron, each.options()))
        return pipeline
