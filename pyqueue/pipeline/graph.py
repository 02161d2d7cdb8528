"""The graph of a pipeline: its stages, and the checks that need no I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from pyqueue import arguments
from pyqueue.async_queues import AsyncQueue
from pyqueue.delivery import To
from pyqueue.errors import ConfigurationError
from pyqueue.messages import BatchOptions, Duration
from pyqueue.pipeline.failures import ErrorTypes, FailureRules, OnInvalid, failure_rules
from pyqueue.queues import Queue
from pyqueue.specs import QueueSpec
from pyqueue.stream_base import StreamBase

Kind = Literal["link", "choice", "sink", "spark"]

#: How a stage names a queue: by its name, or by a QueueSpec.
QueueName = str | QueueSpec[Any]


class HandlerTerms(TypedDict, total=False):
    """The options for the calls of a stage's handler, except ``batch``."""

    #: How many messages of the stage, or batches of them, may be in progress at once.
    concurrency: int | None
    #: The time that a handler may take.
    time_limit: Duration | None
    #: The reaction if most of the first messages do not fit the model, or if the handler returns
    #: invalid values for most of them. "stop", the default, ends the run with an error; "bury"
    #: buries these messages and continues.
    on_invalid: OnInvalid
    #: How long a batch waits for more messages, once it has one: up to half of the lease.
    window: Duration | None
    #: The exceptions after which a message is tried again. If they are given, any other exception
    #: sends the message to the dead-letter queue at once, unless it is an error of the server.
    retry_on: ErrorTypes | None
    #: The exceptions after which a message goes to the dead-letter queue at once.
    reject_on: ErrorTypes | None


class HandlerOptions(HandlerTerms, total=False):
    """The options for the calls of a stage's handler."""

    #: The maximum number of messages that the handler takes at once. It then takes a list of
    #: payloads, and a list of Deliveries if it has a second argument. A link and a choice return a
    #: list.
    batch: int | None


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """The options of a Spark stage other than its queues and its transform."""

    #: The durable name of this consumer.
    group: str
    batches: BatchOptions
    #: Whether the column ``queue`` chooses among the targets.
    by_column: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """A queue and the handler of its messages."""

    kind: Kind
    #: The queue that the stage reads, with the stage's options.
    queue: Queue[Any] | AsyncQueue[Any]
    handler: Callable[..., Any]
    #: The queues to which its messages may move.
    to: tuple[str, ...]
    #: How many of its messages or batches may be in progress at once, or None for the run's limit.
    concurrency: int | None
    #: The seconds that a handler may take, or None for no limit.
    time_limit: float | None
    #: Whether the handler takes a Delivery as well; for batches, a list of them.
    delivery: bool
    #: Whether the handler is an async function.
    awaited: bool
    rules: FailureRules = FailureRules()  # noqa: RUF009  # frozen
    #: The maximum number of messages in the handler's list, or None if it takes one payload.
    batch: int | None = None
    #: The seconds for which a batch waits for more messages, once it has one.
    window: float = 0.0
    #: Set for a Spark stage only.
    spark: SparkOptions | None = None

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self.queue.name

    @property
    def on_invalid(self) -> OnInvalid:
        """How the stage reacts if most of its first messages do not fit its model."""
        return self.rules.on_invalid

    @property
    def is_sink(self) -> bool:
        """Whether messages leave the pipeline after this stage."""
        return self.kind == "sink" or not self.to

    @property
    def label(self) -> str:
        """The name of the handler."""
        name = getattr(self.handler, "__name__", None) or type(self.handler).__name__
        return "handler" if name == "<lambda>" else str(name)


def source_name(queue: object) -> str:
    """Check and return the name of the queue that a stage reads.

    Raises:
        ConfigurationError: ``queue`` is not a str.
    """
    if isinstance(queue, str):
        return queue
    text = f"queue: expected the name of a queue, found {type(queue).__name__}"
    if isinstance(queue, StreamBase):
        text += "; get a consumer group of the stream from Stream.consumer()"
    elif callable(queue):
        text += '; name the queue in the decorator, as in @worker.on("NAME")'
    raise ConfigurationError(text)


def make_stage(
    kind: Kind,
    queue: Queue[Any] | AsyncQueue[Any],
    handler: Callable[..., Any],
    to: Iterable[str],
    options: HandlerOptions,
) -> Stage:
    """Make a stage, and check everything that does not depend on other stages.

    Raises:
        ConfigurationError: An argument is not allowed, or the handler does not fit the stage.
        InvalidName: A target is not a queue name.
    """
    name = queue.name
    if not callable(handler):
        raise ConfigurationError(
            f"handler of queue {name!r}: expected a function, found {type(handler).__name__}"
        )
    targets = arguments.targets(name, to, least=0 if kind == "sink" else 1)
    if unlisted := [each for each in _annotated_targets(handler) if each not in targets]:
        raise ConfigurationError(
            f"to: the handler of queue {name!r} is annotated to return To({unlisted[0]!r}), "
            f"which is not in to={list(targets)}; add it to that list"
        )
    concurrency, time_limit = options.get("concurrency"), options.get("time_limit")
    batch, window = options.get("batch"), options.get("window")
    if batch is None and window is not None:
        raise ConfigurationError(
            f"window: has no effect, because the handler of queue {name!r} takes one message at a "
            "time; set batch=, too"
        )
    first, second = ("payload", "delivery") if batch is None else ("payloads", "deliveries")
    return Stage(
        kind=kind,
        queue=queue,
        handler=handler,
        to=targets,
        concurrency=None if concurrency is None else arguments.count("concurrency", concurrency),
        time_limit=None
        if time_limit is None
        else arguments.duration("time_limit", time_limit, positive=True),
        delivery=arguments.takes_second(f"handler of queue {name!r}", handler, (first, second)),
        awaited=inspect.iscoroutinefunction(handler)
        or inspect.iscoroutinefunction(getattr(handler, "__call__", None)),  # noqa: B004  # its type
        rules=failure_rules(
            options.get("on_invalid", "stop"), options.get("retry_on"), options.get("reject_on")
        ),
        batch=None if batch is None else arguments.count("batch", batch),
        window=0.0 if window is None else arguments.duration("window", window),
    )


def make_spark_stage(
    queue: Queue[Any] | AsyncQueue[Any],
    transform: Callable[..., Any],
    to: str | Iterable[str] | None,
    group: str | None,
    batches: BatchOptions,
) -> Stage:
    """Make a Spark stage, and check everything that does not depend on other stages.

    Raises:
        ConfigurationError: An argument is not allowed.
        InvalidName: A target is not a queue name.
    """
    if not callable(transform):
        raise ConfigurationError(
            f"transform: the stage of queue {queue.name!r} needs a function that takes a "
            f"DataFrame, not {type(transform).__name__}"
        )
    by_column, targets = arguments.choices(queue.name, to)
    # If a list of targets gets longer, the stage keeps its group, and so its claims.
    default = f"{queue.name}>{to}" if isinstance(to, str) else queue.name
    options = SparkOptions(arguments.group(group or default), batches, by_column)
    return Stage(
        "spark",
        queue,
        transform,
        targets,
        concurrency=None,
        time_limit=None,
        delivery=False,
        awaited=False,
        spark=options,
    )


def _annotated_targets(handler: Callable[..., Any]) -> Iterator[str]:
    """Yield the queues that the return annotation of a handler names.

    The annotation is ``To[Literal["late", "on-time"]]``, alone, in a union or in a list.
    """
    try:
        annotation = get_type_hints(handler).get("return")
    except Exception:  # a name that exists for type checkers only
        return
    yield from _named_targets(annotation)


def _named_targets(annotation: object) -> Iterator[str]:
    for each in get_args(annotation):
        if get_origin(annotation) is To:
            yield from (name for name in get_args(each) if isinstance(name, str))
        else:
            yield from _named_targets(each)


class Graph:
    """The stages, keyed by the queue that they read, in the order in which they were added."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        #: The targets that were given as a QueueSpec, keyed by name.
        self.specs: dict[str, QueueSpec[Any]] = {}

    def named(self, to: Iterable[QueueName]) -> Iterable[str]:
        """Return the names of targets, and remember the specs among them.

        Raises:
            ConfigurationError: Two specs of one queue differ.
        """
        if isinstance(to, str) or not isinstance(to, Iterable):
            return to  # it is refused later
        given = list(to)
        for each in given:
            if isinstance(each, QueueSpec):
                known = self.specs.setdefault(each.name, each)
                if (known.model, known.options) != (each.model, each.options):
                    raise ConfigurationError(
                        f"to: two different specs of queue {each.name!r}; use one of them"
                    )
        return [each.name if isinstance(each, QueueSpec) else each for each in given]

    def add(self, stage: Stage) -> None:
        """Add a stage.

        Raises:
            ConfigurationError: The graph already has a stage that reads the same queue.
        """
        if stage.name in self.stages:
            raise ConfigurationError(
                f"queue: {stage.name!r} has two stages, {self.stages[stage.name].label!r} and "
                f"{stage.label!r}; add one stage for each queue"
            )
        self.stages[stage.name] = stage

    @property
    def outputs(self) -> list[str]:
        """The targets that no stage reads, in order."""
        targets = (name for stage in self.stages.values() for name in stage.to)
        return list(dict.fromkeys(name for name in targets if name not in self.stages))

    def cycle(self) -> list[str] | None:
        """Return the queues of a cycle, or None. The first queue is repeated at the end."""
        done: set[str] = set()

        def visit(name: str, path: list[str]) -> list[str] | None:
            if name in path:
                return [*path[path.index(name) :], name]
            if name in done or name not in self.stages:
                return None
            for target in self.stages[name].to:
                if found := visit(target, [*path, name]):
                    return found
            done.add(name)
            return None

        return next((found for name in self.stages if (found := visit(name, []))), None)

    def depths(self) -> Mapping[str, int]:
        """Return the distance of each queue from the point where messages enter, nearest first.

        The depth of a queue is the length of the longest path to it that visits no queue twice.
        """
        depths: dict[str, int] = {}

        def visit(name: str, depth: int, path: tuple[str, ...]) -> None:
            if name in path or depths.get(name, -1) >= depth:
                return
            depths[name] = depth
            for target in self.stages[name].to if name in self.stages else ():
                visit(target, depth + 1, (*path, name))

        reached = {name for stage in self.stages.values() for name in stage.to}
        for name in sorted(self.stages, key=lambda each: each in reached):
            if name not in reached or name not in depths:
                visit(name, depths.get(name, 0), ())
        return dict(sorted(depths.items(), key=lambda item: item[1]))

    def check(self, *, allow_cycles: bool) -> None:
        """Check the graph as a whole, before it runs.

        Raises:
            ConfigurationError: There are no stages, or there is a cycle that is not allowed.
        """
        if not self.stages:
            raise ConfigurationError(
                "pipeline: has no stages; add one with link, choice, sink or Worker.on()"
            )
        if not allow_cycles and (cycle := self.cycle()):
            raise ConfigurationError(
                f"pipeline: {' -> '.join(cycle)} is a cycle; "
                "if the messages leave it at some point, run with allow_cycles=True"
            )
