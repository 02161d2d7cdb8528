"""Middleware: what it is called with, in which order and thread, and what it may change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Delivery, Drop, Reject, Worker
from tests.pipeline.place import Place, counted

Call = Callable[[Any], Any]


def run(place: Place, handler: Any, *middleware: Any, **options: Any) -> dict[str, int]:
    """Have a worker with this middleware empty the queue "in". Return its counters but zeros."""

    def build(client: Any) -> Worker:
        worker = Worker(client).on("in", handler, **options)
        for each in middleware:
            assert worker.use(each) is each
        return worker

    return counted(place.run(build, until_empty=True), "in")


class Layer:
    """A middleware that notes its name before and after the handler."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    async def __call__(self, delivery: Any, call_next: Call) -> Any:
        self.events.append(f"{self.name} begins")
        answer = await call_next(delivery)
        self.events.append(f"{self.name} ends")
        return answer


class PlainLayer(Layer):
    """A plain one."""

    def __call__(self, delivery: Any, call_next: Call) -> Any:
        self.events.append(f"{self.name} begins")
        answer = call_next(delivery)
        self.events.append(f"{self.name} ends")
        return answer


def test_first_middleware_is_outermost(place: Place) -> None:
    events: list[str] = []
    place.queue("in").push("x")
    handler = place.handler(lambda payload, delivery: events.append("handler"))
    layers = [Layer("one", events), Layer("two", events)]
    assert run(place, handler, *layers) == {"in": 1, "out": 1}
    assert events == ["one begins", "two begins", "handler", "two ends", "one ends"]


def test_plain_middleware_runs_inside_async_middleware(memory: Place) -> None:
    events: list[str] = []
    memory.queue("in").push("x")
    layers = [Layer("one", events), PlainLayer("two", events), PlainLayer("three", events)]
    assert run(memory, lambda payload: events.append("handler"), *layers) == {"in": 1, "out": 1}
    begins = ["one begins", "two begins", "three begins"]
    assert events == [*begins, "handler", "three ends", "two ends", "one ends"]


def test_plain_middleware_has_the_thread_of_its_handler(memory: Place) -> None:
    threads: dict[str, int] = {}

    async def outer(delivery: Any, call_next: Call) -> Any:
        threads["outer"] = threading.get_ident()
        return await call_next(delivery)

    def inner(delivery: Any, call_next: Call) -> Any:
        threads["inner"] = threading.get_ident()
        return call_next(delivery)

    memory.queue("in").push("x")
    run(memory, lambda p: threads.update(handler=threading.get_ident()), outer, inner)
    assert threads["inner"] == threads["handler"] != threads["outer"]


def test_middleware_is_called_once_for_a_batch(memory: Place, awaited: bool) -> None:
    seen: list[Any] = []

    async def note(deliveries: Any, call_next: Call) -> Any:
        seen.append([each.message.payload for each in deliveries])
        return await call_next(deliveries)

    def plain(payloads: Any) -> None:
        seen.append(payloads)

    async def asynchronous(payloads: Any) -> None:
        seen.append(payloads)

    memory.queue("in").push_many([1, 2, 3])
    handler = asynchronous if awaited else plain
    assert run(memory, handler, note, batch=10) == {"in": 3, "out": 3}
    assert seen == [[1, 2, 3], [1, 2, 3]]


def test_middleware_gets_and_replaces_exceptions(memory: Place) -> None:
    async def reject(delivery: Any, call_next: Call) -> Any:
        try:
            return await call_next(delivery)
        except ValueError as error:
            raise Reject(f"not valid: {error}") from error

    def fail(payload: Any, delivery: Any) -> None:
        raise ValueError("no")

    memory.queue("in").push("x")
    assert run(memory, memory.handler(fail), reject) == {"in": 1, "dead": 1}
    dead = memory.queue("in.dead").pop(0)
    assert dead is not None
    assert dead.error is not None
    assert dead.error.message == "not valid: no"


def test_middleware_may_answer_without_the_handler(memory: Place) -> None:
    async def drop(delivery: Any, call_next: Call) -> Any:
        return Drop()

    called: list[Any] = []
    memory.queue("in").push("x")
    handler = memory.handler(lambda payload, delivery: called.append(payload))
    assert run(memory, handler, drop) == {"in": 1, "dropped": 1}
    assert called == []


def test_middleware_may_call_the_handler_again(memory: Place) -> None:
    async def again(delivery: Any, call_next: Call) -> Any:
        try:
            return await call_next(delivery)
        except ValueError:
            return await call_next(delivery)

    tries: list[int] = []

    def fail_once(payload: Any, delivery: Any) -> None:
        tries.append(delivery.message.tries)
        if len(tries) == 1:
            raise ValueError

    memory.queue("in").push("x")
    assert run(memory, memory.handler(fail_once), again) == {"in": 1, "out": 1}
    assert tries == [1, 1]


def test_call_next_refuses_another_delivery(memory: Place) -> None:
    async def wrong(delivery: Any, call_next: Call) -> Any:
        return await call_next(delivery.message.payload)

    memory.queue("in").push("x")
    handler = memory.handler(lambda payload, delivery: None)
    assert run(memory, handler, wrong, max_tries=1) == {"in": 1, "dead": 1}
    dead = memory.queue("in.dead").pop(0)
    assert dead is not None
    assert dead.error is not None
    assert "call_next: expected the delivery" in dead.error.message


def test_async_middleware_stores_progress(place: Place) -> None:
    """The handler may be plain; then its own calls of ``progress`` block."""

    async def note(delivery: Delivery, call_next: Call) -> Any:
        await delivery.progress(0.5, "before")
        await delivery.checkpoint({"n": 1})
        stored = place.queue("in").get(delivery.message.id)
        assert stored is not None
        assert stored.progress is not None
        noted.append((stored.progress.note, stored.checkpoint))
        return await call_next(delivery)

    noted: list[Any] = []
    place.queue("in").push("x")
    assert run(place, lambda payload: None, note) == {"in": 1, "out": 1}
    assert noted == [("before", {"n": 1})]


def test_time_limit_includes_the_middleware(memory: Place) -> None:
    async def slow(delivery: Any, call_next: Call) -> Any:
        await asyncio.Event().wait()

    memory.queue("in").push("x")
    options = {"time_limit": 0.05, "max_tries": 1}
    assert run(memory, lambda payload: None, slow, **options) == {"in": 1, "dead": 1}


def iterate() -> Iterator[str]:
    yield "state"


def test_middleware_finds_the_value_of_the_lifespan(memory: Place) -> None:
    states: list[Any] = []

    async def note(delivery: Any, call_next: Call) -> Any:
        states.append(delivery.state)
        return await call_next(delivery)

    def build(client: Any) -> Worker:
        worker = Worker(client, lifespan=iterate).on("in", lambda payload: None)
        worker.use(note)
        return worker

    memory.queue("in").push("x")
    memory.run(build, until_empty=True)
    assert states == ["state"]


async def asynchronous(delivery: Any, call_next: Call) -> Any: ...


def plain(delivery: Any, call_next: Call) -> Any: ...


@pytest.mark.parametrize(
    ("middleware", "said"),
    [
        ([3], "expected a function or an object with __call__"),
        ([Layer], "found a class"),
        ([lambda delivery: None], "must take"),
        ([plain, asynchronous], "asynchronous is async and cannot run inside plain"),
    ],
)
def test_other_middleware_is_refused(offline: Client, middleware: list[Any], said: str) -> None:
    worker = Worker(offline)
    *earlier, last = middleware
    for each in earlier:
        worker.use(each)
    with pytest.raises(ConfigurationError, match=f"middleware: .*{said}"):
        worker.use(last)


def test_plain_middleware_refuses_async_handlers(memory: Place) -> None:
    async def work(payload: Any) -> None: ...

    memory.queue("in").push("x")
    with pytest.raises(ConfigurationError, match="plain is synchronous and cannot call work"):
        run(memory, work, plain)
    assert memory.queue("in").counts().ready == 1
