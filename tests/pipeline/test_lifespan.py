"""The lifespan of a worker: when it begins and ends, and what becomes of its errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, Worker
from tests.pipeline.place import Place
from tests.support.eventually import async_eventually, eventually

Events = list[object]


def generator(events: Events) -> Callable[[], Iterator[str]]:
    def lifespan() -> Iterator[str]:
        events.append("opened")
        yield "state"
        events.append("closed")

    return lifespan


def async_generator(events: Events) -> Callable[[], AsyncIterator[str]]:
    async def lifespan() -> AsyncIterator[str]:
        events.append("opened")
        yield "state"
        events.append("closed")

    return lifespan


#: The forms of a lifespan.
FORMS: dict[str, Callable[[Events], Any]] = {
    "generator": generator,
    "async generator": async_generator,
    "function": lambda events: contextmanager(generator(events)),
    "async function": lambda events: asynccontextmanager(async_generator(events)),
    "object": lambda events: contextmanager(generator(events))(),
    "async object": lambda events: asynccontextmanager(async_generator(events))(),
}


def consuming(handler: Any, lifespan: Any, **options: Any) -> Callable[[Any], Worker]:
    return lambda client: Worker(client, lifespan=lifespan).on("in", handler, **options)


@pytest.mark.parametrize("form", FORMS)
def test_handlers_find_the_value_of_the_lifespan(memory: Place, form: str) -> None:
    events: Events = []
    memory.queue("in").push_many([1, 2])
    handler = memory.handler(lambda payload, delivery: events.append(delivery.state))
    memory.run(consuming(handler, FORMS[form](events)), until_empty=True)
    assert events == ["opened", "state", "state", "closed"]


def test_delivery_without_a_lifespan_has_no_state(memory: Place) -> None:
    states: Events = []
    memory.queue("in").push(1)
    memory.run_worker(memory.handler(lambda payload, delivery: states.append(delivery.state)))
    assert states == [None]


def test_each_run_has_its_lifespan(offline: Client) -> None:
    events: Events = []
    worker = Worker(offline, lifespan=generator(events)).on("in", print)
    for _ in range(2):
        worker.run(until_empty=True)
    assert events == ["opened", "closed"] * 2


def test_lifespan_ends_after_the_last_message(place: Place) -> None:
    left: list[int] = []

    def lifespan() -> Iterator[None]:
        yield
        left.append(place.queue("in").counts().total)

    place.queue("in").push_many([1, 2, 3])
    handler = place.handler(lambda payload, delivery: None)
    place.run(consuming(handler, lifespan), until_empty=True)
    assert left == [0]


@pytest.mark.parametrize("awaited", [False, True])
def test_lifespan_that_fails_receives_nothing(place: Place, awaited: bool) -> None:
    def broken() -> Iterator[None]:
        if place:
            raise ValueError("no carrier")
        yield

    async def broken_async() -> AsyncIterator[None]:
        if place:
            raise ValueError("no carrier")
        yield

    place.queue("in").push("x")
    lifespan = broken_async if awaited else broken
    with pytest.raises(ValueError, match="no carrier") as caught:
        place.run(consuming(print, lifespan))
    note = f"lifespan: {lifespan.__name__} failed to start, so no message was received"
    assert caught.value.__notes__ == [note]
    (message,) = place.queue("in").peek()
    assert (message.state, message.deliveries) == ("ready", 0)


def test_lifespan_that_fails_at_its_end(memory: Place) -> None:
    def broken() -> Iterator[None]:
        yield
        raise ValueError("still open")

    memory.queue("in").push("x")
    handler = memory.handler(lambda payload, delivery: None)
    with pytest.raises(ValueError, match="still open") as caught:
        memory.run(consuming(handler, broken), until_empty=True)
    assert caught.value.__notes__ == [
        "lifespan: broken failed to end; all messages were settled before"
    ]
    assert memory.queue("in").counts().total == 0


def test_stop_cancels_a_lifespan_that_starts(place: Place) -> None:
    events: Events = []

    async def lifespan() -> AsyncIterator[None]:
        try:
            events.append("begun")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        yield

    place.queue("in").push("x")
    running = place.start(consuming(print, lifespan))
    eventually(lambda: events, "a lifespan that has begun")
    report = running.finish()
    assert events == ["begun", "cancelled"]
    assert report.stages["in"]["in"] == 0
    assert place.queue("in").counts().ready == 1


def test_stop_abandons_a_plain_lifespan_that_starts(memory: Place) -> None:
    begun, free = threading.Event(), threading.Event()

    def lifespan() -> Iterator[None]:
        begun.set()
        free.wait()
        yield

    running = memory.start(consuming(print, lifespan))
    eventually(begun.is_set, "a lifespan that has begun")
    running.finish()
    free.set()


def test_second_stop_cancels_a_lifespan_that_ends(memory: Place) -> None:
    events: Events = []

    async def lifespan() -> AsyncIterator[None]:
        events.append("opened")
        yield
        events.append("ending")
        await asyncio.Event().wait()

    running = memory.start(consuming(print, lifespan))
    eventually(lambda: events, "a lifespan that has begun")
    running.stop()
    eventually(lambda: "ending" in events, "a lifespan that ends")
    running.finish()


def test_cancelled_run_leaves_its_lifespan() -> None:
    events: Events = []

    async def lifespan() -> AsyncIterator[None]:
        events.append("opened")
        try:
            yield
        finally:
            events.append("closed")

    async def work() -> None:
        async with AsyncClient("memory:") as client:
            worker = Worker(client, lifespan=lifespan).on("in", print)
            task = asyncio.ensure_future(worker.run(handle_signals=False))
            await async_eventually(lambda: events, "a lifespan that has begun")
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(work())
    assert events == ["opened", "closed"]


async def without_yield() -> None: ...


def takes_one(app: object) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("lifespan", "said"),
    [
        (3, "found int"),
        (without_yield, "found an async def without yield"),
        (takes_one, "expected a function without arguments"),
    ],
)
def test_lifespan_of_another_form_is_refused(offline: Client, lifespan: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"lifespan: .*{said}"):
        Worker(offline, lifespan=lifespan)


@pytest.mark.parametrize("make", [generator([]), async_generator([]), without_yield])
def test_called_lifespan_is_refused(offline: Client, make: Any) -> None:
    said = rf"{make.__name__}\(\); pass the function itself, without calling it"
    with pytest.raises(ConfigurationError, match=f"lifespan: .*{said}"):
        Worker(offline, lifespan=make())


def test_function_that_makes_no_lifespan_is_refused(offline: Client) -> None:
    lifespan: Any = lambda: 3  # noqa: E731  # a lifespan in one line
    worker = Worker(offline, lifespan=lifespan).on("in", print)
    with pytest.raises(ConfigurationError, match="expected a context manager from <lambda>"):
        worker.run(until_empty=True)
