"""Pipelines have a lifespan and middleware, as workers have: the same code, for every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyqueue import Client, ConfigurationError, Pipeline, To
from tests.pipeline.place import Place

Events = list[object]


def lifespan(events: Events) -> Callable[[], Iterator[str]]:
    def opened() -> Iterator[str]:
        events.append("opened")
        yield "state"
        events.append("closed")

    return opened


def test_stages_share_lifespan_and_middleware(place: Place) -> None:
    events: Events = []

    async def note(delivery: Any, call_next: Callable[[Any], Any]) -> Any:
        answer = await call_next(delivery)
        events.append((delivery.message.queue, delivery.state))
        return answer

    def build(client: Any) -> Pipeline:
        pipeline: Pipeline = client.pipeline("shop", lifespan=lifespan(events))
        assert pipeline.use(note) is note
        pipeline.link("in", place.handler(lambda payload, delivery: payload + 1), to="b")
        pipeline.choice("b", place.handler(lambda payload, delivery: To("c")), to=["c"])
        return pipeline.sink("c", place.handler(lambda payload, delivery: None))

    place.queue("in").push(1)
    place.run(build, until_empty=True)
    assert events == ["opened", ("in", "state"), ("b", "state"), ("c", "state"), "closed"]


def test_middleware_answers_for_a_stage(memory: Place) -> None:
    async def answer(delivery: Any, call_next: Callable[[Any], Any]) -> Any:
        return f"{await call_next(delivery)} and more"

    def build(client: Any) -> Pipeline:
        pipeline = Pipeline(client)
        pipeline.use(answer)
        return pipeline.link("in", memory.handler(lambda payload, delivery: payload), to="out")

    memory.queue("in").push("tea")
    memory.run(build, until_empty=True)
    assert memory.payloads("out") == ["tea and more"]


def test_pipeline_of_a_recipe_has_both(memory: Place, tmp_path: Path) -> None:
    events: Events = []
    path = tmp_path / "shop.toml"
    path.write_text('[[stages]]\nqueue = "in"\nhandler = "builtins:str"\nto = "out"\n')

    def build(client: Any) -> Pipeline:
        pipeline = Pipeline.from_recipe(client, path, lifespan=lifespan(events))

        @pipeline.use
        def note(delivery: Any, call_next: Callable[[Any], Any]) -> Any:
            events.append(delivery.state)
            return call_next(delivery)

        return pipeline

    memory.queue("in").push(7)
    memory.run(build, until_empty=True)
    assert (memory.payloads("out"), events) == (["7"], ["opened", "state", "closed"])


def test_lifespan_that_fails_starts_no_stage(memory: Place) -> None:
    def broken() -> Iterator[None]:
        if memory:
            raise ValueError("no carrier")
        yield

    memory.queue("in").push("x")
    with pytest.raises(ValueError, match="no carrier") as caught:
        memory.run(lambda client: Pipeline(client, lifespan=broken).sink("in", print))
    assert caught.value.__notes__ == [
        "lifespan: broken failed to start, so no message was received"
    ]
    assert memory.queue("in").counts().ready == 1


def test_wrong_lifespan_of_a_pipeline_is_refused(offline: Client) -> None:
    wrong: Any = 3
    for make in (offline.pipeline, lambda **options: Pipeline(offline, **options)):
        with pytest.raises(ConfigurationError, match=r"lifespan: .*found int"):
            make(lifespan=wrong)


def test_plain_middleware_of_a_pipeline_refuses_async(offline: Client) -> None:
    def plain(delivery: Any, call_next: Callable[[Any], Any]) -> Any: ...

    async def work(payload: Any) -> None: ...

    pipeline = offline.pipeline().sink("in", work)
    pipeline.use(plain)
    with pytest.raises(ConfigurationError, match="plain is synchronous and cannot call work"):
        pipeline.run(until_empty=True)
