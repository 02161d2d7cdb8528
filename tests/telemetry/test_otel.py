"""OpenTelemetry: spans, their parents and links, and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import ProxyTracerProvider, SpanKind, StatusCode

from pyqueue import (
    AsyncClient,
    Client,
    ConfigurationError,
    DuplicateKey,
    LeaseLost,
    Many,
    Queue,
    To,
    Worker,
)
from pyqueue.telemetry import otel
from pyqueue.telemetry.otel import OpenTelemetry
from tests.support.traces import Seen


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def client(seen: Seen) -> Iterator[Client]:
    with Client("memory:", hooks=[seen.hooks]) as client:
        yield client


@pytest.fixture
def orders(client: Client) -> Queue[Any]:
    return client.queue("orders")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def linked(span: ReadableSpan) -> set[int]:
    return {each.context.span_id for each in span.links}


def work(worker: Worker[Any]) -> None:
    worker.run(until_empty=True, handle_signals=False)


# ---- spans


def test_push_is_the_parent_of_process_and_commit(
    client: Client, orders: Queue[Any], seen: Seen
) -> None:
    inside: list[int] = []
    worker = Worker(client)
    worker.on(
        "orders",
        lambda payload: inside.append(trace.get_current_span().get_span_context().span_id),
    )
    id = orders.push("tea")
    work(worker)
    push, process, commit = seen.take()
    assert [(each.name, each.kind) for each in (push, process, commit)] == [
        ("push orders", SpanKind.PRODUCER),
        ("process orders", SpanKind.CONSUMER),
        ("commit orders", SpanKind.CLIENT),
    ]
    assert parent(push) is None
    assert parent(process) == parent(commit) == push.context.span_id
    assert inside == [process.context.span_id]
    for span, operation, kind in (
        *((push, "push", "send"), (process, "process", "process"), (commit, "commit", "settle")),
    ):
        assert attributes(span) == {
            "messaging.system": "pyqueue",
            "messaging.destination.name": "orders",
            "messaging.operation.name": operation,
            "messaging.operation.type": kind,
            "messaging.message.id": str(id),
        }


def test_push_in_a_handler_continues_the_trace(client: Client, seen: Seen) -> None:
    worker = Worker(client)
    worker.on("a", lambda payload: client.queue("b").push(payload))
    client.queue("a").push(1)
    work(worker)
    outer, inner, process, _ = seen.take()
    assert [outer.name, inner.name, process.name] == ["push a", "push b", "process a"]
    assert (parent(inner), parent(process)) == (process.context.span_id, outer.context.span_id)


def test_all_hops_of_a_message_are_in_one_trace(client: Client, seen: Seen) -> None:
    worker = Worker(client)

    @worker.on("a", to=["b", "c"])
    def divide(number: int) -> Many:
        return Many([To("b", number), To("c", number)])

    @worker.on("b", to=["c"])
    def move(number: int) -> To[str]:
        return To("c")

    worker.on("c", lambda number: None)
    client.queue("a").push(1)
    work(worker)
    spans = seen.take()
    assert sorted(each.name for each in spans) == [
        *("commit a", "commit c", "commit c", "move b"),
        *("process a", "process b", "process c", "process c", "push a"),
    ]
    assert len({each.context.trace_id for each in spans}) == 1
    (push,) = (each for each in spans if each.name == "push a")
    assert {parent(each) for each in spans if each is not push} == {push.context.span_id}
    move_span = next(each for each in spans if each.name == "move b")
    assert attributes(move_span)["messaging.pyqueue.target"] == "c"


def test_batch_links_its_pushes(client: Client, orders: Queue[Any], seen: Seen) -> None:
    worker = Worker(client)
    worker.on("orders", lambda payloads: None, batch=5)
    orders.push_many([1, 2])
    orders.push(3)
    work(worker)
    many, one, process, commit = seen.take()
    assert attributes(many)["messaging.batch.message_count"] == 2
    for span in (process, commit):
        assert parent(span) is None
        assert linked(span) == {many.context.span_id, one.context.span_id}
        assert attributes(span)["messaging.batch.message_count"] == 3
        assert "messaging.message.id" not in attributes(span)


def test_span_has_a_bounded_number_of_links() -> None:
    headers = [{"traceparent": f"00-{n:032x}-{n:016x}-01"} for n in range(1, 200)]
    assert len(otel._links(headers + headers)) == 128


def test_context_of_the_program_is_kept_and_linked(orders: Queue[Any], seen: Seen) -> None:
    with seen.tracers.get_tracer("shop").start_as_current_span("buy") as buy:
        orders.push("tea")
        first, second = seen.take(), orders.reserve(0)
    assert parent(first[0]) == buy.get_span_context().span_id
    assert second is not None
    seen.take()
    orders.push("milk", headers=second.headers)
    (push,) = seen.take()
    assert linked(push) == {first[0].context.span_id}
    again = orders.reserve(0)
    assert again is not None
    assert again.headers == second.headers


def test_state_of_a_trace_is_carried(orders: Queue[Any], seen: Seen) -> None:
    state = trace.TraceState([("shop", "7")])
    context = trace.SpanContext(1, 2, True, trace.TraceFlags(1), state)
    with trace.use_span(trace.NonRecordingSpan(context)):
        orders.push("tea")
    held = orders.reserve(0)
    assert held is not None
    assert held.headers["tracestate"] == "shop=7"
    orders.commit(held)
    push, commit = seen.take()
    assert push.context.trace_id == commit.context.trace_id == 1
    assert commit.context.trace_state == state


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": 5},
        {"traceparent": "x" * 600},
        {"traceparent": f"00-{'0' * 32}-{'1' * 16}-01"},
        {"traceparent": "1", "tracestate": True},
    ],
)
def test_invalid_context_is_ignored(
    orders: Queue[Any], seen: Seen, headers: dict[str, Any]
) -> None:
    orders.push("tea", headers=headers)
    held = orders.reserve(0)
    assert held is not None
    assert held.headers == headers
    orders.commit(held)
    push, commit = seen.take()
    assert (parent(commit), linked(commit), linked(push)) == (None, set(), set())


@pytest.mark.parametrize("headers", [{f"h{n}": n for n in range(63)}, {"large": "x" * 8150}])
def test_full_headers_stay_as_they_are(
    orders: Queue[Any], seen: Seen, headers: dict[str, Any]
) -> None:
    if len(headers) > 1:
        headers = {**headers, "last": 1}
    orders.push("tea", headers=headers)
    held = orders.reserve(0)
    assert held is not None
    assert held.headers == headers
    assert len(seen.take("push")) == 1


def test_failures_are_errors_of_spans(client: Client, orders: Queue[Any], seen: Seen) -> None:
    worker = Worker(client)

    @worker.on("orders", max_tries=1)
    def fail(payload: Any) -> None:
        raise LookupError("no tea")

    orders.push("tea", key="k")
    with pytest.raises(DuplicateKey):
        orders.push("tea", key="k", on_duplicate="error")
    work(worker)
    first, refused, process, bury = seen.take()
    assert [each.status.status_code for each in (first, refused, process, bury)] == [
        *(StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET)
    ]
    assert attributes(refused)["error.type"] == "DuplicateKey"
    assert attributes(process)["error.type"] == "LookupError"
    assert [each.name for each in process.events] == ["exception"]
    assert (bury.name, attributes(bury)["messaging.pyqueue.target"]) == (
        *("bury orders", "orders.dead"),
    )


def test_lost_lease_is_an_error_of_its_settlement(orders: Queue[Any], seen: Seen) -> None:
    orders.push_many([1, 2])
    held = orders.reserve_many(2, timeout=0)
    orders.release(held[0])
    with pytest.raises(LeaseLost):
        orders.commit(*held)
    (commit,) = seen.take("commit")
    assert attributes(commit)["error.type"] == "LeaseLost"
    (ends,) = seen.points()["pyqueue.message.end_to_end"]
    assert ends.count == 1


def test_pushes_of_a_transaction_end_with_it(
    client: Client, orders: Queue[Any], seen: Seen
) -> None:
    with client.transaction() as session:
        orders.push(1, session=session)
        orders.push(2, session=session)
        assert len(seen.take("push")) == 1  # the second one waits for the commit
    assert len(seen.take("push")) == 1
    with pytest.raises(ZeroDivisionError), client.transaction() as session:  # noqa: PT012
        orders.push(3, session=session)
        raise ZeroDivisionError
    orders.push(4)
    assert len(seen.take("push")) == 2
    (sent,) = seen.points()["messaging.client.sent.messages"]
    assert sent.value == 3


def test_async_client_traces_each_task(url: str, seen: Seen) -> None:
    async def main() -> None:
        async with AsyncClient(url, hooks=[seen.hooks]) as client:
            queues = [client.queue(name) for name in "abc"]
            await asyncio.gather(*(each.push(1) for each in queues for _ in range(3)))
            worker = Worker(client)
            for each in "abc":
                worker.on(each, lambda payload: None)
            await worker.run(until_empty=True, handle_signals=False)

    asyncio.run(main())
    spans = seen.take()
    assert len(spans) == 27
    pushes = {each.context.span_id: each.name for each in spans if each.name.startswith("push")}
    for each in spans:
        operation, name = each.name.split()
        if operation != "push" and not each.links:
            assert pushes[parent(each) or 0] == f"push {name}"


# ---- without a provider


def test_without_a_provider_no_tracer_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(ProxyTracerProvider, "get_tracer", None)
    with Client("memory:", hooks=[OpenTelemetry()]) as client:
        worker = Worker(client)
        worker.on("orders", lambda payload: None)
        client.queue("orders").push("tea")
        (stored,) = client.queue("orders").peek()
        work(worker)
    assert stored.headers == {}
    assert caplog.records == []


def test_provider_may_come_later(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    with Client("memory:", hooks=[OpenTelemetry()]) as client:
        client.queue("orders").push("tea")
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: seen.tracers)
        client.queue("orders").push("milk")
    assert [each.name for each in seen.take()] == ["push orders"]


# ---- metrics


def test_metrics_count_messages_and_measure_times(
    client: Client, orders: Queue[Any], seen: Seen
) -> None:
    worker = Worker(client)

    @worker.on("orders", max_tries=1)
    def handle(payload: str) -> None:
        if payload == "bad":
            raise LookupError

    orders.push_many(["tea", "milk", "bad"])
    with pytest.raises(ConfigurationError):
        orders.push(1, delay=-1)
    work(worker)
    orders.push("bread")
    assert orders.pop(0) is not None
    points = seen.points()
    place = {"messaging.system": "pyqueue", "messaging.destination.name": "orders"}
    push = {"messaging.operation.name": "push", "messaging.operation.type": "send"}
    receive = {"messaging.operation.name": "receive", "messaging.operation.type": "receive"}
    (sent,) = points["messaging.client.sent.messages"]
    assert (sent.value, dict(sent.attributes)) == (4, {**place, **push})
    (consumed,) = points["messaging.client.consumed.messages"]
    assert (consumed.value, dict(consumed.attributes)) == (4, {**place, **receive})
    operations = {
        (each.attributes["messaging.operation.name"], each.attributes.get("error.type")): each
        for each in points["messaging.client.operation.duration"]
    }
    assert operations["push", None].count == 2
    assert operations["push", "ConfigurationError"].count == 1
    assert operations["receive", None].count >= 2
    assert operations["push", None].explicit_bounds[0] == 0.005
    processed = {
        each.attributes.get("error.type"): each.count
        for each in points["messaging.process.duration"]
    }
    assert processed == {None: 2, "LookupError": 1}
    (waits,), (ends,) = points["pyqueue.message.wait"], points["pyqueue.message.end_to_end"]
    assert (waits.count, dict(waits.attributes)) == (4, place)
    assert (ends.count, dict(ends.attributes)) == (3, place)
    assert waits.explicit_bounds[0] == 0.001


def test_outputs_of_many_are_sent_messages(client: Client, seen: Seen) -> None:
    worker = Worker(client)
    worker.on("a", lambda number: Many([To("b", 1), To("b", 2)]), to=["b"])
    client.queue("a").push(1)
    work(worker)
    sent = {
        each.attributes["messaging.destination.name"]: each.value
        for each in seen.points()["messaging.client.sent.messages"]
    }
    assert sent == {"a": 1, "b": 2}


def shown(seen: Seen) -> dict[tuple[str, ...], float]:
    """Return the numbers of messages by queue, group and state."""
    found = {}
    for each in seen.points()["pyqueue.queue.messages"]:
        names = ("messaging.destination.name", "messaging.consumer.group.name", "state")
        found[tuple(each.attributes[name] for name in names if name in each.attributes)] = each
    return {key: point.value for key, point in found.items()}


def test_queues_are_recorded_by_state(client: Client, orders: Queue[Any], seen: Seen) -> None:
    orders.push_many(range(3))
    orders.push(1, delay=60)
    assert orders.reserve(0) is not None
    client.stream("clicks").append_many(range(5))
    client.stream("clicks").consumer("audit").reserve_many(2, timeout=0)
    seen.hooks.record_queues(client)
    expected: dict[tuple[str, ...], float] = {
        ("orders", "ready"): 2,
        ("orders", "scheduled"): 1,
        ("orders", "reserved"): 1,
        ("clicks", "kept"): 5,
        ("clicks", "audit", "ready"): 3,
        ("clicks", "audit", "reserved"): 2,
        ("clicks", "audit", "scheduled"): 0,
        ("clicks", "audit", "skipped"): 0,
    }
    assert shown(seen) == expected
    seen.hooks.record_queues(client)
    (age,) = seen.points()["pyqueue.queue.oldest_age"]
    assert 0 <= age.value < 60
    orders.purge()
    seen.hooks.record_queues(client)
    (age,) = seen.points()["pyqueue.queue.oldest_age"]
    assert age.value == 0


def test_async_client_records_queues(url: str, seen: Seen) -> None:
    async def main() -> None:
        async with AsyncClient(url, hooks=[seen.hooks]) as client:
            await client.queue("orders").push(1)
            await seen.hooks.record_queues(client)

    asyncio.run(main())
    assert shown(seen)["orders", "ready"] == 1


def test_recording_queues_is_bounded(
    client: Client, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        client.queue(f"q{number}").push(1)
    monkeypatch.setattr(otel, "_PORTION", 1)
    monkeypatch.setattr(otel, "MAX_QUEUES", 3)
    seen.hooks.record_queues(client)
    assert {key[0] for key in shown(seen)} == {"q0", "q1", "q2"}
    monkeypatch.setattr(otel, "COUNTING_S", -1.0)
    client.queue("q0").push(2)
    seen.hooks.record_queues(client)
    assert shown(seen)["q0", "ready"] == 1


def test_deleted_queue_is_recorded_as_empty(client: Client, orders: Queue[Any], seen: Seen) -> None:
    orders.push(1)
    client.stream("clicks").append(1)
    client.stream("clicks").consumer("audit").reserve(0)
    for _ in range(2):
        seen.hooks.record_queues(client)
        client.delete_queue("orders", force=True)
        client.delete_queue("clicks", force=True)
    assert {*shown(seen).values()} == {0}
    (age,) = seen.points()["pyqueue.queue.oldest_age"]
    assert age.value == 0
