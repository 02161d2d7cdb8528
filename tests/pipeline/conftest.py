"""One suite, run on mongomock and on a server, from blocking code and from async code.

A ``Place`` runs what a test builds, in either way, and has a blocking client to look behind it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest

from pyqueue import AsyncClient, Client, Pipeline, Queue, Worker
from pyqueue.memory import memory_database
from pyqueue.pipeline import Report
from tests.integration.eventually import until

Runner = Pipeline | Worker
Build = Callable[[Any], Any]


class Running:
    """A run in a thread of its own."""

    def __init__(self, place: Place, build: Build, options: dict[str, Any]) -> None:
        self.report: Report | None = None
        self.error: BaseException | None = None
        self.runner: Any = None
        self._arguments = (place, build, options)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self._begun() or not self._thread.is_alive())

    def _begun(self) -> bool:
        run = None if self.runner is None else self.runner._run
        return run is not None and bool(run._stages)

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

    def stop(self) -> None:
        self.runner.stop()

    def join(self) -> Report:
        """Wait for its end."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "it did not end"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


class Place:
    """A database, and a kind of client."""

    def __init__(self, target: Any, *, blocking: bool, server: bool) -> None:
        self.target = target
        self.blocking = blocking
        self.server = server
        self.namespace = f"n{uuid4().hex[:12]}"
        self.client = Client(target, namespace=self.namespace)

    def queue(self, name: str, **options: Any) -> Queue[Any]:
        return self.client.queue(name, **options)

    def raw(self) -> Any:
        return self.client.database[self.namespace]

    def run(self, build: Build, **options: Any) -> Report:
        """Build a pipeline or worker on a client of this kind, and run it."""
        options.setdefault("handle_signals", False)
        if self.blocking:
            with Client(self.target, namespace=self.namespace) as client:
                report: Report = build(client).run(**options)
                return report

        async def work() -> Report:
            async with AsyncClient(self._awaited(), namespace=self.namespace) as client:
                report: Report = await build(client).run(**options)
                return report

        return asyncio.run(work())

    def _awaited(self) -> Any:
        return self.target

    def start(self, build: Build, **options: Any) -> Running:
        """The same in the background."""
        return Running(self, build, options)

    def payloads(self, name: str) -> list[Any]:
        """What is ready in a queue."""
        return [each.payload for each in self.queue(name).peek(1000)]


KINDS = [(server, blocking) for server in (False, True) for blocking in (True, False)]
NAMES = [
    f"{'mongod' if server else 'memory'}-{'blocking' if blocking else 'async'}"
    for server, blocking in KINDS
]


def _place(request: pytest.FixtureRequest, server: bool, blocking: bool) -> Iterator[Place]:
    with ExitStack() as stack:
        target = request.getfixturevalue("url") if server else memory_database("pyqueue")
        place = Place(target, blocking=blocking, server=server)
        stack.callback(place.client.close)
        yield place


@pytest.fixture(params=KINDS, ids=NAMES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each of the four."""
    yield from _place(request, *request.param)


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def server(request: pytest.FixtureRequest) -> Iterator[Place]:
    """On a server, both kinds of client."""
    yield from _place(request, True, request.param)


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def memory(request: pytest.FixtureRequest) -> Iterator[Place]:
    """On mongomock, both kinds of client."""
    yield from _place(request, False, request.param)


@pytest.fixture(params=["def", "async def"])
def awaited(request: pytest.FixtureRequest) -> bool:
    """Both kinds of handler."""
    return bool(request.param == "async def")


def handler(function: Callable[..., Any], awaited: bool) -> Callable[..., Any]:
    """The function, as a handler of that kind; it takes (payload, delivery)."""
    if not awaited:
        return lambda payload, delivery: function(payload, delivery)

    async def carried(payload: Any, delivery: Any) -> Any:
        return function(payload, delivery)

    return carried


def adds_up(report: Report) -> bool:
    """Whether what came in is what went, by the counters."""
    return all(
        stage["in"] == sum(stage[name] for name in ("out", "dropped", "retried", "dead", "lost"))
        for stage in report.stages.values()
    )
