"""Pipelines: stages chained by queues, through which each message passes by atomic moves.

A stage reads one queue and says what becomes of each message; where it goes is one update of one document, so it is never lost between
two stages and never in both. ``graph`` knows the stages, ``engine`` runs them, ``recipes`` reads them from a file, ``show`` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, overload

import anyio

from pyqueue import arguments
from pyqueue.errors import ConfigurationError
from pyqueue.pipeline.engine import COUNTERS, Report, Run
from pyqueue.pipeline.graph import Graph, Kind, spark_stage, stage
from pyqueue.pipeline.recipes import Recipe, read
from pyqueue.pipeline.show import draw

__all__ = ["Pipeline", "Report", "Runner"]

H = TypeVar("H", bound=Callable[..., Any])


class Runner:
    """What pipelines and workers share: stages, and how they run.

    Args:
        client: a Client or an AsyncClient; handlers may be ``def`` or ``async def`` on either.
        name: a label for reports.
        concurrency: how many handlers run at once, over all stages.
    """

    def __init__(self, client: Any, name: str, *, concurrency: int = 16) -> None:
        self.name = name
        self.graph = Graph()
        self._client = client
        self._concurrency = arguments.count("concurrency", concurrency)
        self._run: Run | None = None

    def _add(
        self,
        kind: Kind,
        queue: str,
        handler: Callable[..., Any] | None,
        to: Iterable[str],
        *,
        model: Any = None,
        concurrency: int | None = None,
        time_limit: Any = None,
        **options: Any,
    ) -> Any:
        """Add a stage and answer the runner; or, without a handler, answer the decorator that does so."""
        source = self._client.queue(queue, model, **options)
        if handler is not None:
            self.graph.add(stage(kind, source, handler, to, concurrency, time_limit))
            return self

        def decorate(function: H) -> H:
            self.graph.add(stage(kind, source, function, to, concurrency, time_limit))
            return function

        return decorate

    def run(
        self,
        *,
        until_empty: bool = False,
        concurrency: int | None = None,
        grace: float = 30,
        allow_cycles: bool = False,
        signals: bool = True,
    ) -> Any:
        """Run until it is stopped: by ``stop()``, SIGTERM or SIGINT. On an AsyncClient it is awaited.

        Stopped, it takes nothing more and lets the handlers end. Those that have not after ``grace`` seconds, or at a second signal,
        are cancelled: their messages are rolled back and can be received at once. Messages that no handler had begun are released.

        Args:
            until_empty: end when no stage has a message left, be it ready, reserved or scheduled.
            concurrency: how many handlers run at once; None: as the constructor was told.
            grace: seconds.
            allow_cycles: let messages go in circles.
            signals: take SIGTERM and SIGINT while it runs; only the main thread can.

        Returns:
            A Report: the counters of each stage, and the seconds it took.

        Raises:
            ConfigurationError: the graph is wrong; nothing has run.
        """

        async def work() -> Report:
            self.graph.check(allow_cycles=allow_cycles)
            if self._run is not None:
                raise ConfigurationError(f"{self.name!r} is running already")
            self._run = Run(
                self._client,
                self.graph,
                concurrency=self._concurrency
                if concurrency is None
                else arguments.count("concurrency", concurrency),
                until_empty=until_empty,
                grace=arguments.duration("grace", grace),
                signals=signals,
            )
            try:
                return await self._run.run()
            finally:
                self._run = None

        return work() if hasattr(self._client, "__aenter__") else anyio.run(work)

    def stop(self) -> None:
        """Stop the run there is, if any; the second time without waiting for the handlers. From any thread."""
        run = self._run
        if run is not None:
            run.stop()

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each stage has counted in the run there is."""
        run = self._run
        return (
            {name: dict.fromkeys(COUNTERS, 0) for name in self.graph.stages}
            if run is None
            else run.counters
        )

    def show(
        self,
        format: Literal["text", "mermaid", "svg"] = "text",
        counts: Mapping[str, Any] | None = None,
    ) -> str:
        """Draw the graph.

        Args:
            format: "text", "mermaid" or "svg".
            counts: the Counts of queues by name, to be shown with them.

        Returns:
            The drawing.
        """
        return draw(self.graph, self.name, format, counts or {})


class Pipeline(Runner):
    """Stages chained by queues.

    Each stage reads a queue: a ``link`` answers the next payload, a ``choice`` answers ``To(queue, payload)``, a ``sink`` finishes the
    message. Any of them may answer ``Drop()`` or ``Many([To(...), ...])``, and raise ``Reject`` or ``RetryLater``; any other exception
    is another try later. Without a handler each is a decorator; with one it answers the pipeline, so that they can be chained.

    All take, beside the options of ``Client.queue`` (model, lease, max_tries, backoff, history and so on), ``concurrency``: how many
    messages of the stage may be in progress at once; and ``time_limit``: seconds that a handler may take.

    Args:
        client: a Client or an AsyncClient.
        name: a label for reports.
        concurrency: how many handlers run at once, over all stages.
    """

    def __init__(self, client: Any, name: str = "pipeline", *, concurrency: int = 16) -> None:
        super().__init__(client, name, concurrency=concurrency)

    @overload
    def link(self, queue: str, *, to: str, **options: Any) -> Callable[[H], H]: ...
    @overload
    def link(self, queue: str, handler: Callable[..., Any], *, to: str, **options: Any) -> Self: ...
    def link(self, queue: str, handler: Any = None, *, to: str, **options: Any) -> Any:
        """What the handler answers is the payload with which the message goes on.

        Args:
            queue: the queue it reads.
            handler: takes (payload) or (payload, delivery).
            to: the queue that follows.
            options: model, concurrency, time_limit, lease, max_tries, backoff, history and the other options of a queue.
        """
        if not isinstance(to, str):
            raise ConfigurationError(
                f"to: the link of queue {queue!r} leads to one queue; for several use choice()"
            )
        return self._add("link", queue, handler, (to,), **options)

    @overload
    def choice(self, queue: str, *, to: Iterable[str], **options: Any) -> Callable[[H], H]: ...
    @overload
    def choice(
        self, queue: str, handler: Callable[..., Any], *, to: Iterable[str], **options: Any
    ) -> Self: ...
    def choice(self, queue: str, handler: Any = None, *, to: Iterable[str], **options: Any) -> Any:
        """The handler answers where the message goes: ``To("late", payload)``, or ``To("late")`` with the payload it has.

        Args:
            queue: the queue it reads.
            handler: takes (payload) or (payload, delivery).
            to: the queues to choose from.
            options: as of ``link``.
        """
        return self._add("choice", queue, handler, to, **options)

    @overload
    def sink(self, queue: str, *, to: Iterable[str] = (), **options: Any) -> Callable[[H], H]: ...
    @overload
    def sink(
        self, queue: str, handler: Callable[..., Any], *, to: Iterable[str] = (), **options: Any
    ) -> Self: ...
    def sink(
        self, queue: str, handler: Any = None, *, to: Iterable[str] = (), **options: Any
    ) -> Any:
        """The message leaves the pipeline when the handler ends, whatever it answers.

        Args:
            queue: the queue it reads.
            handler: takes (payload) or (payload, delivery).
            to: queues to which it may send messages on all the same, by To or Many.
            options: as of ``link``.
        """
        return self._add("sink", queue, handler, to, **options)

    @overload
    def spark(self, queue: str, *, to: str, **options: Any) -> Callable[[H], H]: ...
    @overload
    def spark(
        self, queue: str, transform: Callable[..., Any], *, to: str, **options: Any
    ) -> Self: ...
    def spark(
        self,
        queue: str,
        transform: Any = None,
        *,
        to: str,
        group: str | None = None,
        output: Literal["move", "transaction"] = "move",
        max_messages: int = 5000,
        **options: Any,
    ) -> Any:
        """Messages go on in batches, as Spark transforms them: the work of a ``SparkStage`` as a stage of this pipeline.

        The Spark session is the one there is, or one is started with the first batch. One process at a time runs such a stage: another
        that starts takes it over. Stopped, it ends the batch that is under way. Needs ``pip install "pyqueue-mongo[spark]"``.

        Args:
            queue: the queue it reads.
            transform: takes a DataFrame with the columns id, queue, payload, headers, key, when, pushed and tries, and answers one
                with id and payload.
            to: the queue that follows.
            group: the durable name of this consumer; None: "QUEUE>TO".
            output: "move", or "transaction", whose rows are new messages.
            max_messages: how many messages one batch takes at most.
            options: model, lease, max_tries, backoff and the other options of a queue.
        """
        source = self._client.queue(queue, **options)
        batches = {"group": group, "output": output, "max_messages": max_messages}
        if transform is not None:
            self.graph.add(spark_stage(source, transform, to, batches))
            return self

        def decorate(function: H) -> H:
            self.graph.add(spark_stage(source, function, to, batches))
            return function

        return decorate

    @classmethod
    def from_recipe(cls, client: Any, path: str | Path) -> Self:
        """The pipeline that a TOML or YAML file describes.

        Args:
            client: a Client or an AsyncClient.
            path: the file.

        Returns:
            The pipeline.

        Raises:
            ConfigurationError: the file, or something in it, is wrong; the text names the place.
        """
        recipe: Recipe = read(Path(path))
        pipeline = cls(client, recipe.name, concurrency=recipe.concurrency)
        for each in recipe.stages:
            each.add_to(pipeline)
        return pipeline
