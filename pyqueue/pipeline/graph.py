"""The graph of a pipeline: its stages, and what is wrong with it before anything runs. It does no I/O."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pyqueue import arguments
from pyqueue.delivery import To
from pyqueue.errors import ConfigurationError

__all__ = ["Graph", "Kind", "Stage", "spark_stage", "stage"]

Kind = Literal["link", "choice", "sink", "spark"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A queue, and what is done with its messages."""

    kind: Kind
    #: The Queue or AsyncQueue that is read, with the stage's options.
    queue: Any
    handler: Callable[..., Any]
    #: Where its messages may go.
    to: tuple[str, ...]
    #: How many messages of it may be in progress at once; None: as many as the whole run.
    concurrency: int | None
    #: Seconds that a handler may take; None: as long as it likes.
    time_limit: float | None
    #: Whether the handler wants a Delivery too, and whether it is awaited.
    delivery: bool
    awaited: bool
    #: Of a stage whose batches Spark transforms: its group, its output, and how many messages a batch takes.
    batches: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The name of its queue."""
        return str(self.queue.name)

    @property
    def label(self) -> str:
        """The name of its handler."""
        name = getattr(self.handler, "__name__", None) or type(self.handler).__name__
        return "handler" if name == "<lambda>" else str(name)


def stage(
    kind: Kind,
    queue: Any,
    handler: Callable[..., Any],
    to: Iterable[str],
    concurrency: int | None,
    time_limit: Any,
) -> Stage:
    """A stage, if all that can be known of it alone is right."""
    name = queue.name
    if not callable(handler):
        raise ConfigurationError(
            f"handler: of queue {name!r}: give a function, not {type(handler).__name__}"
        )
    if isinstance(to, str) or not isinstance(to, Iterable):
        raise ConfigurationError(f"to: of queue {name!r}: give a list of queue names")
    targets = tuple(map(arguments.queue_name, to))
    if kind != "sink" and not targets:
        raise ConfigurationError(
            f"to: the {kind} of queue {name!r} leads nowhere: name the next queue (or make it a sink)"
        )
    if twice := sorted({each for each in targets if targets.count(each) > 1}):
        raise ConfigurationError(f"to: of queue {name!r}: {twice[0]!r} is listed twice")
    if unlisted := [each for each in _shown(handler) if each not in targets]:
        raise ConfigurationError(
            f"to: the handler of queue {name!r} is annotated to answer To({unlisted[0]!r}), which is not in its to={list(targets)}"
        )
    return Stage(
        kind,
        queue,
        handler,
        targets,
        None if concurrency is None else arguments.count("concurrency", concurrency),
        None if time_limit is None else arguments.duration("time_limit", time_limit, positive=True),
        _takes_delivery(name, handler),
        inspect.iscoroutinefunction(handler)
        or inspect.iscoroutinefunction(getattr(handler, "__call__", None)),  # noqa: B004
    )


def spark_stage(
    queue: Any, transform: Callable[..., Any], to: str, batches: Mapping[str, Any]
) -> Stage:
    """A stage whose batches Spark transforms."""
    if not callable(transform):
        raise ConfigurationError(
            f"transform: of queue {queue.name!r}: give a function from DataFrame to DataFrame, not {type(transform).__name__}"
        )
    group = arguments.group(batches["group"] or f"{queue.name}>{to}")
    return Stage(
        "spark",
        queue,
        transform,
        (arguments.queue_name(to),),
        None,
        None,
        False,
        False,
        {**batches, "group": group},
    )


def _takes_delivery(queue: str, handler: Callable[..., Any]) -> bool:
    """Whether the handler takes (payload, delivery) rather than (payload)."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False  # of a builtin, which says nothing of its parameters
    given = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    needed = [each for each in given if each.default is each.empty]
    named = [
        each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]
    anything = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if len(needed) > 2 or named or not (given or anything):
        raise ConfigurationError(
            f"handler: of queue {queue!r}: it takes (payload) or (payload, delivery)"
        )
    return len(needed) == 2 or (len(given) > 1 and given[1].name == "delivery")


def _shown(handler: Callable[..., Any]) -> Iterator[str]:
    """The queues that the return annotation of a handler names: ``To[Literal["late", "on-time"]]``, alone or in a union."""
    try:
        answer = get_type_hints(handler).get("return")
    except Exception:  # names that only a type checker knows
        return
    for each in (answer, *get_args(answer)):
        if get_origin(each) is To:
            yield from (name for name in get_args(get_args(each)[0]) if isinstance(name, str))


class Graph:
    """The stages by the queues they read, in the order they were added."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}

    def add(self, stage: Stage) -> None:
        """Add a stage."""
        if stage.name in self.stages:
            raise ConfigurationError(
                f"queue: {stage.name!r} has two stages, {self.stages[stage.name].label!r} and {stage.label!r}: one stage reads a queue"
            )
        self.stages[stage.name] = stage

    @property
    def outputs(self) -> list[str]:
        """Targets that no stage reads, in order."""
        return list(
            dict.fromkeys(
                name
                for stage in self.stages.values()
                for name in stage.to
                if name not in self.stages
            )
        )

    def cycle(self) -> list[str] | None:
        """The queues of a cycle, the first one again at the end; None if there is none."""
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
        """How far each queue lies from where messages come in: the length of the longest way there that is no cycle; sorted by it."""
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
        """Refuse what should not run."""
        if not self.stages:
            raise ConfigurationError("pipeline: it has no stages")
        if not allow_cycles and (cycle := self.cycle()):
            raise ConfigurationError(
                f"pipeline: {' -> '.join(cycle)} is a cycle; if that is meant, and ends, run it with allow_cycles=True"
            )
