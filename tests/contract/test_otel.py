"""OpenTelemetry: the context of a push, on each driver and kind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.world import AnyClient, World
from tests.support.traces import Seen


@pytest.fixture
def seen() -> Seen:
    """Return hooks that record spans and metrics."""
    return Seen()


@pytest.fixture
def told(world: World, client: AnyClient, seen: Seen) -> AnyClient:
    """Return a client with these hooks."""
    return world.connect(hooks=[seen.hooks])


def contexts(messages: list[Any]) -> set[object]:
    """Return the contexts that messages carry."""
    return {each.headers.get("traceparent") for each in messages}


@pytest.mark.needs("move", "dead_letter")
def test_context_goes_where_its_message_goes(
    world: World, told: AnyClient, seen: Seen, name: str
) -> None:
    queue, other = told.queue(name), told.queue(f"{name}-other")
    queue.push_many(["a", "b"], headers={"mine": 1})
    (push,) = seen.take("push")
    held = queue.reserve_many(2, timeout=5)
    (context,) = contexts(held)
    assert isinstance(context, str)
    assert context.split("-")[1] == f"{push.context.trace_id:032x}"
    queue.bury(*held, error="no")
    assert world.client.queue(f"{name}.dead").redrive() == 2
    held = queue.reserve_many(2, timeout=5)
    assert (len(held), contexts(held)) == (2, {context})
    queue.move(*held, to=f"{name}-other", headers={"more": 2})
    held = other.reserve_many(2, timeout=5)
    assert (len(held), contexts(held)) == (2, {context})
    assert all({"mine", "more"} < each.headers.keys() for each in held)
    other.commit(*held)
    spans = seen.take()
    assert [each.name for each in spans] == [
        *(f"bury {name}", f"move {name}", f"commit {name}-other")
    ]
    assert {link.context.span_id for each in spans for link in each.links} == {push.context.span_id}


@pytest.mark.needs("standard")  # a stream does not depend on the kind of queues
def test_context_of_a_stream_reaches_its_groups(told: AnyClient, seen: Seen, name: str) -> None:
    stream = told.stream(name)
    stream.append_many(["a", "b"])
    consumer = stream.consumer("g", dead_letter=f"{name}.dead")
    held = consumer.reserve_many(2, timeout=5)
    (context,) = contexts(held)
    assert isinstance(context, str)
    consumer.commit(held[0])
    consumer.bury(held[1])
    dead = told.queue(f"{name}.dead").reserve(timeout=5)
    assert contexts([dead]) == {context}
    commit, bury = seen.take("commit", "bury")
    assert commit.name == f"commit {name}"
    for span in (commit, bury):
        assert span.attributes is not None
        assert span.attributes["messaging.consumer.group.name"] == "g"


def test_message_of_a_program_without_a_tracer_has_no_context(
    world: World, client: AnyClient, told: AnyClient, seen: Seen, name: str
) -> None:
    client.queue(name).push(1)
    held = told.queue(name).reserve(timeout=5)
    assert held.headers == {}
    told.queue(name).commit(held)
    (commit,) = seen.take()
    assert (commit.parent, list(commit.links)) == (None, [])
