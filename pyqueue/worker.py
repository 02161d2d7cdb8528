"""``Worker``: consume queues with functions. It is a pipeline in which every stage is a sink."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self, Unpack, cast, overload

from pyqueue.async_client import AsyncClient
from pyqueue.async_queues import AsyncQueue
from pyqueue.async_streams import AsyncConsumer
from pyqueue.backends.schedules.definitions import definition
from pyqueue.client import Client
from pyqueue.errors import ConfigurationError
from pyqueue.messages import ScheduleOptions
from pyqueue.pipeline import (
    AnyClient,
    AwaitedReport,
    R_co,
    Report,
    Runner,
    StageOptions,
    StageTerms,
)
from pyqueue.pipeline.blocking import connection_of
from pyqueue.pipeline.graph import QueueName
from pyqueue.pipeline.handler_types import (
    Adds,
    AddsBatch,
    AnyHandler,
    BatchHandler,
    H,
    Handler,
    M,
    OtherModel,
)
from pyqueue.pipeline.lifespan import LifespanOf
from pyqueue.pipeline.runner import BatchQueueOptions, UnmodelledOptions
from pyqueue.pipeline.schedules import default_name, taking_payload
from pyqueue.queue_base import QueueBase
from pyqueue.queues import Queue
from pyqueue.runtime.connecting import AsyncConnection, Connected, Connection
from pyqueue.specs import QueueSpec
from pyqueue.streams import Consumer

#: A queue that names the model of its payloads.
Modelled = QueueSpec[M] | Queue[M] | AsyncQueue[M] | Consumer[M] | AsyncConsumer[M]


class CronOptions(StageOptions, ScheduleOptions, total=False):
    """The options of ``Worker.cron``."""


class Worker(Runner[R_co]):
    """A program, or a part of one, that consumes queues with functions.

    A message is committed when its handler returns, and tried again later when the handler raises
    an exception. With ``batch`` a handler takes many messages at once, and may raise
    ``BatchFailed`` if some of them failed.

    Args:
        client: A Client or an AsyncClient. With either, handlers may be ``def`` or ``async def``.
            If None, and ``bind`` is not called, each run creates a client from the environment
            variables PYQUEUE_URL, PYQUEUE_NAMESPACE and PYQUEUE_SIGNALS, and closes it at the end.
        concurrency: The maximum number of handlers that run at once, for all queues together.
        name: A label for reports.
        lifespan: A context manager, a function without arguments that returns a context manager,
            or a generator function with one ``yield``. It may be async. A run enters it before the
            first message is received, and leaves it after the last message. Handlers find its value
            in ``delivery.state``.

    Raises:
        ConfigurationError: An argument is not allowed.
    """

    _kind = "worker"

    @overload
    def __init__(
        self: Worker[Report],
        client: Connected[Connection] | None = None,
        *,
        concurrency: int = 16,
        name: str = "worker",
        lifespan: LifespanOf[Any] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: Worker[AwaitedReport],
        client: Connected[AsyncConnection],
        *,
        concurrency: int = 16,
        name: str = "worker",
        lifespan: LifespanOf[Any] | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        client: AnyClient,
        *,
        concurrency: int = 16,
        name: str = "worker",
        lifespan: LifespanOf[Any] | None = None,
    ) -> None: ...
    def __init__(
        self,
        client: Any = None,
        *,
        concurrency: int = 16,
        name: str = "worker",
        lifespan: LifespanOf[Any] | None = None,
    ) -> None:
        # Without a client, the options of queues are checked by a client that is never opened.
        self._placeholder = Client("memory:") if client is None else None
        super().__init__(
            self._placeholder or client, name, concurrency=concurrency, lifespan=lifespan
        )
        self._has_client = client is not None
        self._sources: dict[str, BatchQueueOptions] = {}

    @overload
    def bind(self, client: Connected[Connection]) -> Worker[Report]: ...
    @overload
    def bind(self, client: Connected[AsyncConnection]) -> Worker[AwaitedReport]: ...
    def bind(self, client: Any) -> Worker[Any]:
        """Give a client to a worker that was created without one. A later call replaces it.

        Args:
            client: A Client or an AsyncClient. The worker does not close it.

        Returns:
            The worker.

        Raises:
            ConfigurationError: The worker was created with a client, or it is running.
        """
        if self._placeholder is None:
            raise ConfigurationError(
                f"client: {self.name!r} was created with a client; to bind another client, create "
                "the worker without one"
            )
        if self._run is not None:
            raise ConfigurationError(f"client: {self.name!r} is running; stop it first")
        connection_of(client)  # refuses anything but a client
        self._use(client, has_client=True)
        return self

    def _use(self, client: AnyClient, *, has_client: bool) -> None:
        """Create the queues of the stages again, with another client."""
        self._client, self._has_client = client, has_client
        for name, stage in self.graph.stages.items():
            source = client.queue(name, **self._sources[name])
            self.graph.stages[name] = replace(stage, queue=source)

    def _source(self, name: str, options: BatchQueueOptions) -> Queue[Any] | AsyncQueue[Any]:
        self._sources[name] = options
        return super()._source(name, options)

    @asynccontextmanager
    async def _prepared(self) -> AsyncIterator[None]:
        if self._has_client or self._placeholder is None:
            yield
            return
        url = os.environ.get("PYQUEUE_URL")
        if not url:
            raise ConfigurationError(
                f"PYQUEUE_URL: expected the URL of a server, found nothing, and {self.name!r} was "
                "created without a client; set PYQUEUE_URL, or call bind(client)"
            )
        namespace = os.environ.get("PYQUEUE_NAMESPACE") or "pyqueue"
        signals = os.environ.get("PYQUEUE_SIGNALS") or None
        async with AsyncClient(url, namespace=namespace, signals=signals) as client:
            self._use(client, has_client=False)
            try:
                yield
            finally:
                self._use(self._placeholder, has_client=False)

    @overload
    def on(
        self, queue: Modelled[M], *, to: Iterable[QueueName] = (), **options: Unpack[StageTerms]
    ) -> Adds[M]: ...
    @overload
    def on(
        self,
        queue: Modelled[M],
        *,
        batch: int,
        to: Iterable[QueueName] = (),
        **options: Unpack[StageTerms],
    ) -> AddsBatch[M]: ...
    @overload
    def on(
        self,
        queue: str,
        *,
        model: type[M],
        to: Iterable[QueueName] = (),
        **options: Unpack[StageTerms],
    ) -> Adds[M]: ...
    @overload
    def on(
        self,
        queue: str,
        *,
        model: type[M],
        batch: int,
        to: Iterable[QueueName] = (),
        **options: Unpack[StageTerms],
    ) -> AddsBatch[M]: ...
    @overload
    def on(
        self, queue: str, *, to: Iterable[QueueName] = (), **options: Unpack[StageOptions]
    ) -> Callable[[H], H]: ...
    @overload
    def on(
        self,
        queue: Modelled[M],
        handler: Handler[M],
        *,
        to: Iterable[QueueName] = (),
        **options: Unpack[StageTerms],
    ) -> Self: ...
    @overload
    def on(
        self,
        queue: Modelled[M],
        handler: BatchHandler[M],
        *,
        batch: int,
        to: Iterable[QueueName] = (),
        **options: Unpack[StageTerms],
    ) -> Self: ...
    @overload
    def on(
        self,
        queue: str,
        handler: AnyHandler[M],
        *,
        to: Iterable[QueueName] = (),
        model: type[M] | OtherModel = None,
        **options: Unpack[UnmodelledOptions],
    ) -> Self: ...
    def on(
        self,
        queue: Any,
        handler: Callable[..., Any] | None = None,
        *,
        to: Iterable[QueueName] = (),
        **options: Unpack[StageOptions],
    ) -> Any:
        """Have a function consume a queue. Without a handler this is a decorator.

        Args:
            queue: The name of a queue, or a QueueSpec; or a Queue or a Consumer of this client,
                which already have their model and options.
            handler: A function that takes (payload) or (payload, delivery); with ``batch``, a list
                of payloads, or this list and a list of deliveries.
            to: The names or QueueSpecs of the queues to which the handler may send messages.
            options: Model, concurrency (for this queue), time_limit (for the handler, in seconds),
                batch (the maximum number of messages that the handler takes at once), window (how
                many seconds a batch waits for more messages), retry_on (exceptions after which the
                message is tried again; after any other exception it goes to the dead-letter queue),
                reject_on (exceptions after which it goes there at once), on_invalid ("stop" or
                "bury": the action if most of the first messages do not fit the model), lease,
                max_tries, backoff, history and the other options of ``Client.queue``.
        """
        if isinstance(queue, QueueBase) and self._placeholder is not None:
            raise ConfigurationError(
                f"queue: {queue.name!r} belongs to a client, but {self.name!r} was created without "
                "a client; give the name of the queue, or a QueueSpec"
            )
        return self._add("sink", queue, handler, to, **options)

    def cron(
        self,
        cron: str | None = None,
        *,
        name: str | None = None,
        queue: str | None = None,
        **options: Unpack[CronOptions],
    ) -> Callable[[H], H]:
        """Run a function at certain times, in one of the running workers. This is a decorator.

        A run of the worker stores a schedule, which pushes a message at each tick, and calls the
        function for each message. A run with ``until_empty`` does not store the schedule.

        Args:
            cron: Five fields, such as "0 3 * * *", as for ``Client.schedule``.
            name: The name of the schedule; by default "module:function".
            queue: The name of the queue for its messages; by default the name of the schedule.
            options: The options of ``Client.schedule`` and of ``on``. The function takes no
                argument, or the same arguments as in ``on``.

        Raises:
            ConfigurationError: An option is not allowed.
        """
        if callable(cron):
            raise ConfigurationError(
                "cron: expected five fields as a str, found a function; give the times in "
                'parentheses, as in @worker.cron("0 3 * * *")'
            )
        known = ScheduleOptions.__annotations__
        of_schedule = {each: value for each, value in options.items() if each in known}
        of_stage = {each: value for each, value in options.items() if each not in known}

        def decorate(function: H) -> H:
            title = default_name(function) if name is None else name
            target = title if queue is None else queue
            given = definition(title, target, cron, cast("ScheduleOptions", of_schedule))
            self.on(target, taking_payload(function), **cast("StageOptions", of_stage))
            self._add_schedule(given)
            return function

        return decorate
