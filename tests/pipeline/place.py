"""The places where tests run pipelines, runs in the background, and handlers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from pyqueue import AsyncClient, Client, Delivery, Pipeline, Queue, Worker
from pyqueue.pipeline import Report
from tests.support.eventually import LONG, async_eventually, eventually

Runner = Pipeline | Worker
Build = Callable[[Any], Runner]

#: A lease that outlives any test.
LONG_LEASE = timedelta(hours=1)


class Place:
    """A store and a kind of client. The test reads the store by a blocking client.

    Args:
        target: The target of both clients.
        blocking: Whether the pipeline runs on a blocking client.
        server: Whether the store is a server.
        awaited: Whether handlers of this place are async functions.
    """

    def __init__(self, target: Any, *, blocking: bool, server: bool, awaited: bool) -> None:
        self.target = target
        self.blocking = blocking
        self.server = server
        self.awaited = awaited
        self.namespace = f"n{uuid4().hex[:12]}"
        #: The hooks of the client that runs.
        self.hooks: list[object] = []
        self.client = Client(target, namespace=self.namespace)

    def queue(self, name: str, **options: Any) -> Queue[Any]:
        return self.client.queue(name, **options)

    def collection(self) -> Any:
        """The raw collection."""
        return self.client.database[self.namespace]

    def handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler of this place's kind, made of a function of (payload, delivery)."""
        if not self.awaited:
            return lambda payload, delivery: function(payload, delivery)

        async def awaited(payload: Any, delivery: Any) -> Any:
            return function(payload, delivery)

        return awaited

    def steal(self, delivery: Delivery[Any]) -> None:
        """Let another consumer claim the message, and lose its lease at once."""
        # Clients do not expect messages far below the start of their scans.
        self._claim(delivery, {"when": datetime.now(UTC) - timedelta(seconds=0.1)})

    def take_over(self, delivery: Delivery[Any]) -> None:
        """Let another consumer claim the message, as after a lapse, and keep it."""
        self._claim(delivery, {"when": delivery.message.until + LONG_LEASE})

    def _claim(self, delivery: Delivery[Any], fields: dict[str, Any]) -> None:
        fields = {"token": "another's", **fields}
        self.collection().update_one({"_id": delivery.message.id}, {"$set": fields})

    def run(self, build: Build, **options: Any) -> Report:
        """Build a pipeline or worker on a client of this place, and run it."""
        options.setdefault("handle_signals", False)
        if self.blocking:
            with Client(self.target, namespace=self.namespace, hooks=self.hooks) as client:
                report: Report = build(client).run(**options)
                return report

        async def work() -> Report:
            client = AsyncClient(self.target, namespace=self.namespace, hooks=self.hooks)
            async with client:
                report: Report = await build(client).run(**options)
                return report

        return asyncio.run(work())

    def run_stage(
        self, function: Any, *, stage: str = "choice", to: Any = ("a", "b"), **options: Any
    ) -> dict[str, int]:
        """Have one stage empty the queue "in". Return its counters that are not 0."""

        def build(client: Any) -> Pipeline:
            built: Pipeline = getattr(client.pipeline(), stage)("in", function, to=to, **options)
            return built

        return counted(self.run(build, until_empty=True), "in")

    def run_worker(self, handler: Any, queue: str = "in", **options: Any) -> dict[str, int]:
        """Have a worker empty a queue. Return its counters that are not 0."""
        report = self.run(
            lambda client: Worker(client).on(queue, handler, **options), until_empty=True
        )
        return counted(report, queue)

    def start(self, build: Build, **options: Any) -> Running:
        """Build a pipeline or worker and run it in the background."""
        return Running(self, build, options)

    def payloads(self, name: str) -> list[Any]:
        """The payloads that are ready in a queue."""
        return [each.payload for each in self.queue(name).peek(1000)]

    def ids(self, *names: str) -> list[Any]:
        """The ids of the messages that are ready in these queues."""
        return [each.id for name in names for each in self.queue(name).peek(1000)]


class Running:
    """A run in the background."""

    def __init__(self, place: Place, build: Build, options: dict[str, Any]) -> None:
        self.report: Report | None = None
        self.error: BaseException | None = None
        self.runner: Any = None
        self._arguments = (place, build, options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self._begun() or not self._thread.is_alive(), "a run that has begun")

    def _begun(self) -> bool:
        run = None if self.runner is None else self.runner._run
        return run is not None and bool(run.counters)

    def _run(self) -> None:
        place, build, options = self._arguments

        def keep(client: Any) -> Any:
            self.runner = build(client)
            return self.runner

        try:
            self.report = place.run(keep, **options)
        except BaseException as error:
            self.error = error

    def counters(self, queue: str) -> dict[str, int]:
        counters: dict[str, int] = self.runner.counters[queue]
        return counters

    def counted(self, queue: str, counter: str, number: int = 1) -> None:
        """Wait until a counter has reached a number."""
        eventually(lambda: self.counters(queue)[counter] >= number, f"{number} {counter}")

    def stop(self) -> None:
        self.runner.stop()

    def join(self) -> Report:
        """Wait for the end of the run."""
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "the run did not end"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report

    def finish(self) -> Report:
        """Stop the run and wait for its end."""
        self.stop()
        return self.join()


class Gate:
    """A handler of (payload, delivery), or of lists of them, that waits for an open gate."""

    def __init__(self, awaited: bool) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.cancelled: list[Any] = []
        self.deliveries: list[Delivery[Any]] = []
        self.open = threading.Event()
        self.handler: Any = self._awaited if awaited else self._plain

    def _begin(self, payload: Any, delivery: Any) -> None:
        self.deliveries += listed(delivery)
        self.begun.append(payload)

    def _plain(self, payload: Any, delivery: Any) -> None:
        self._begin(payload, delivery)
        eventually(lambda: self.open.is_set() or lost(delivery), "an open gate")
        (self.ended if self.open.is_set() else self.cancelled).append(payload)

    async def _awaited(self, payload: Any, delivery: Any) -> None:
        self._begin(payload, delivery)
        try:
            await async_eventually(self.open.is_set, "an open gate")
        except asyncio.CancelledError:
            assert lost(delivery)
            self.cancelled.append(payload)
            raise
        self.ended.append(payload)


def listed(delivery: Any) -> list[Delivery[Any]]:
    """Return the delivery or the deliveries of a handler as a list."""
    return delivery if isinstance(delivery, list) else [delivery]


def lost(delivery: Any) -> bool:
    """Return whether a handler has lost every message that it held."""
    return all(each.lost for each in listed(delivery))


def counted(report: Report, queue: str) -> dict[str, int]:
    """Return the counters of a stage that are not 0. They must add up."""
    for stage in report.stages.values():
        ends = ("out", "dropped", "retried", "dead", "lost", "cancelled")
        assert stage["in"] == sum(stage[name] for name in ends), report
    return {name: count for name, count in report.stages[queue].items() if count}


def fail_first(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException, times: int = 1
) -> list[tuple[Any, ...]]:
    """Have the first calls of a method fail. Return a list that grows by the arguments of each."""
    real = getattr(owner, name)
    failed: list[tuple[Any, ...]] = []

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        if len(failed) < times:
            failed.append(arguments)
            raise error
        return real(self, *arguments, **options)

    monkeypatch.setattr(owner, name, method)
    return failed
