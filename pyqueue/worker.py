"""Worker: functions that consume queues. It is a pipeline in which every stage is a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar, Unpack, cast, overload

from pyqueue.async_queues import AsyncQueue
from pyqueue.async_streams import AsyncConsumer
from pyqueue.backends.schedules.definitions import definition
from pyqueue.messages import ScheduleOptions
from pyqueue.pipeline import AnyClient, Runner, StageOptions
from pyqueue.pipeline.schedules import default_name, taking_payload
from pyqueue.queues import Queue
from pyqueue.streams import Consumer

H = TypeVar("H", bound=Callable[..., Any])

AnyQueue = str | Queue[Any] | AsyncQueue[Any] | Consumer[Any] | AsyncConsumer[Any]


class CronOptions(StageOptions, ScheduleOptions, total=False):
    """The options of ``Worker.cron``."""


class Worker(Runner):
    """Consumes queues with functions.

    A message is committed when its handler returns, and tried again later when the handler raises
    an exception. With ``batch`` a handler takes many messages at once, and may raise
    ``BatchFailed`` if some of them failed.

    Args:
        client: A Client or an AsyncClient. With either, handlers may be ``def`` or ``async def``.
        concurrency: How many handlers run at once, for all queues together.
        name: A label for reports.
    """

    _kind = "worker"

    def __init__(self, client: AnyClient, *, concurrency: int = 16, name: str = "worker") -> None:
        super().__init__(client, name, concurrency=concurrency)

    @overload
    def on(
        self,
        queue: AnyQueue,
        *,
        to: Iterable[str] = (),
        **options: Unpack[StageOptions],
    ) -> Callable[[H], H]: ...
    @overload
    def on(
        self,
        queue: AnyQueue,
        handler: Callable[..., Any],
        *,
        to: Iterable[str] = (),
        **options: Unpack[StageOptions],
    ) -> Self: ...
    def on(
        self,
        queue: AnyQueue,
        handler: Callable[..., Any] | None = None,
        *,
        to: Iterable[str] = (),
        **options: Unpack[StageOptions],
    ) -> Self | Callable[[H], H]:
        """Have a function consume a queue. Without a handler this is a decorator.

        Args:
            queue: The name of a queue; or a queue of this client or a consumer group of a stream,
                which already have their model and options.
            handler: Takes (payload) or (payload, delivery); with ``batch``, a list of payloads, or
                this list and a list of deliveries.
            to: Queues to which the handler may send messages, by To or Many.
            options: Model, concurrency (for this queue), time_limit (for the handler, in seconds),
                batch (the maximum number of messages that the handler takes at once), window (how
                many seconds a batch waits for more messages), on_invalid ("stop" or "bury": the
                action if most of the first messages do not fit the model), lease, max_tries,
                backoff, history and the other options of ``Client.queue``.
        """
        return self._add("sink", queue, handler, to, **options)

    def cron(
        self,
        cron: str | None = None,
        *,
        name: str | None = None,
        queue: str | None = None,
        **options: Unpack[CronOptions],
    ) -> Callable[[H], H]:
        """Have a function run at certain times, in one of the workers that run. A decorator.

        A run stores the schedule, which pushes a message at each tick, and consumes its queue with
        the function. A run with ``until_empty`` only consumes.

        Args:
            cron: Five fields, such as "0 3 * * *", as for ``Client.schedule``.
            name: The name of the schedule; by default "module:function".
            queue: The queue for its messages; by default the name of the schedule.
            options: The options of ``Client.schedule`` and of ``on``. The function takes no
                argument, or the same arguments as in ``on``.

        Raises:
            ConfigurationError: An option is not allowed.
        """
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
