"""perform and drain, and the clock of a test client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import (
    BatchFailed,
    ConfigurationError,
    Delivery,
    Drop,
    InvalidMessage,
    Limit,
    Many,
    Pipeline,
    Reject,
    RetryLater,
    To,
    Worker,
)
from pyqueue.testing import (
    AsyncTestClient,
    TestClient,
    assert_enqueued,
    drain,
    perform,
    refute_enqueued,
)
from tests.contract.world import in_thread
from tests.support.eventually import LONG, eventually, waiters

DAY = timedelta(days=1)


@pytest.fixture
def client(pyqueue_client: TestClient) -> TestClient:
    return pyqueue_client


class Log:
    """A handler that notes its payloads."""

    def __init__(self, failures: int = 0) -> None:
        self.seen: list[Any] = []
        self.failures = failures

    def __call__(self, payload: Any) -> None:
        self.seen.append(payload)
        if self.failures:
            self.failures -= 1
            raise ValueError(payload)


# ---- perform


def test_perform_has_the_lifespan_and_the_middleware(client: TestClient) -> None:
    events: list[str] = []

    def lifespan() -> Iterator[str]:
        yield "state"
        events.append("closed")

    worker = Worker(client, lifespan=lifespan)

    @worker.use
    async def note(delivery: Delivery, call_next: Callable[[Delivery], Any]) -> Any:
        events.append(f"middleware with {delivery.state}")
        return await call_next(delivery)

    worker.on("in", lambda payload: events.append("handler"))
    assert perform(worker, "in", 1).outcome == "committed"
    assert events == ["middleware with state", "handler", "closed"]


def handle(payload: dict[str, Any], delivery: Delivery[Any]) -> Any:
    """Answer as the payload says."""
    delivery.progress(0.5, "half")
    answers: dict[str, Callable[[], Any]] = {
        "commit": lambda: None,
        "drop": Drop,
        "move": lambda: To("mail"),
        "many": lambda: Many([To("mail", 1), To("mail", 2)]),
        "reject": lambda: Reject("why"),
        "later": lambda: RetryLater(60, "why"),
        "fail": lambda: ValueError("why"),
        "headers": lambda: ValueError(delivery.message.headers["tenant"]),
        "tries": lambda: ValueError(str(delivery.message.tries)),
    }
    return answers[payload["do"]]()


@pytest.fixture
def worker(client: TestClient) -> Worker:
    return Worker(client).on("ship", handle, to=["mail"], max_tries=3)


@pytest.mark.parametrize(
    ("do", "tries", "outcome", "error"),
    [
        ("commit", 1, "committed", None),
        ("drop", 1, "dropped", None),
        ("move", 1, "moved", None),
        ("many", 1, "committed", None),
        ("reject", 1, "dead", "why"),
        ("later", 1, "retried", "why"),
        ("fail", 2, "retried", "why"),
        ("fail", 3, "dead", "why"),
        ("tries", 2, "retried", "2"),
        ("headers", 1, "retried", "x"),
    ],
)
def test_perform(
    client: TestClient, worker: Worker, do: str, tries: int, outcome: str, error: str | None
) -> None:
    client.queue("ship").push("another")
    found = perform(worker, "ship", {"do": do}, tries=tries, headers={"tenant": "x"})
    assert found.outcome == outcome
    assert (found.error and found.error["message"]) == error
    assert found.progress == {"fraction": 0.5, "note": "half"}
    assert client.queue("ship").counts().ready == 1  # the other message
    if outcome in ("retried", "dead"):
        name = "ship" if outcome == "retried" else "ship.dead"
        (message,) = assert_enqueued(client, name, where={"payload.do": do})
        assert message.error == found.error
    else:
        refute_enqueued(client, "ship", where={"payload.do": do})
    if do in ("move", "many"):
        assert len(assert_enqueued(client, "mail")) == (1 if do == "move" else 2)


@pytest.mark.parametrize("kind", ["priority", "ordered", "bucket"])
def test_perform_in_each_kind(client: TestClient, kind: Any) -> None:
    log = Log(failures=1)
    worker = Worker(client).on("ship", log, kind=kind)
    assert perform(worker, "ship", 1).outcome == "retried"
    assert perform(worker, "ship", 2).outcome == "committed"
    assert client.queue("ship").counts().total == 1


def test_perform_calls_a_handler_of_batches(client: TestClient) -> None:
    def fail(payloads: list[int]) -> None:
        raise BatchFailed({0: ValueError("why")})

    assert perform(Worker(client).on("ship", fail, batch=5), "ship", 1).outcome == "retried"


def test_perform_reports_a_lost_lease(client: TestClient) -> None:
    worker = Worker(client).on("ship", lambda payload: client.clear())
    assert perform(worker, "ship", 1).outcome == "lost"


def test_perform_reports_a_cancelled_message(client: TestClient) -> None:
    def ship(payload: int, delivery: Delivery[int]) -> None:
        assert client.cancel(delivery.message.id) == "requested"
        eventually(lambda: delivery.cancelled, "a cancelled message")
        raise ValueError("stopped")

    assert perform(Worker(client).on("ship", ship), "ship", 1).outcome == "cancelled"
    refute_enqueued(client, "ship")


def test_perform_checks_the_model(client: TestClient) -> None:
    worker = Worker(client).on("ship", Log(), model=int)
    with pytest.raises(InvalidMessage):
        perform(worker, "ship", "text")
    refute_enqueued(client, "ship")


def test_perform_refuses_what_it_cannot_call(client: TestClient, worker: Worker) -> None:
    with pytest.raises(ConfigurationError, match=r"'mail' has no handler.*'ship'"):
        perform(worker, "mail", 1)
    consumer = client.stream("events").consumer("all")
    worker.on(consumer, Log())
    with pytest.raises(ConfigurationError, match=r"consumer group, .*; append .* and call drain"):
        perform(worker, consumer.name, 1)
    with pytest.raises(ConfigurationError, match="tries"):
        perform(worker, "ship", 1, tries=0)


# ---- drain


def test_drain_passes_delays_and_backoffs(client: TestClient) -> None:
    log, queue = Log(failures=3), client.queue("ship")
    queue.push("later", delay=DAY)
    queue.push("fails")
    worker = Worker(client).on("ship", log, max_tries=3)
    began = time.monotonic()
    report = drain(worker)
    assert time.monotonic() - began < LONG
    assert log.seen == ["fails", "fails", "fails", "later"]
    counted = {name: number for name, number in report.stages["ship"].items() if number}
    assert counted == {"in": 4, "out": 1, "retried": 2, "dead": 1}
    assert drain(worker).stages["ship"]["in"] == 0


@pytest.mark.parametrize(
    "limit",
    [
        Limit(rate=2, period=3600),
        Limit(rate=1, period=3600, per="headers.tenant"),
        Limit(concurrency=1),
        Limit(concurrency=1, per="headers.tenant"),
    ],
    ids=str,
)
def test_drain_passes_limits(client: TestClient, limit: Limit) -> None:
    log, queue = Log(), client.queue("ship", limit=limit)
    queue.push_many(range(6), headers={"tenant": "x"})
    began = time.monotonic()
    drain(Worker(client).on(queue, log))
    assert sorted(log.seen) == list(range(6))
    assert time.monotonic() - began < LONG


def test_drain_passes_groups(client: TestClient) -> None:
    log, queue = Log(failures=2), client.queue("ship", kind="ordered")
    queue.push_many(["a1", "a2"], groups=["a", "a"])
    drain(Worker(client).on(queue, log))
    assert log.seen == ["a1", "a1", "a1", "a2"]


def test_drain_waits_for_leases_of_other_holders(client: TestClient) -> None:
    log, queue = Log(), client.queue("ship")
    queue.push(1)
    assert queue.reserve(0) is not None
    drain(Worker(client).on(queue, log))
    assert log.seen == [1]


def test_drain_runs_packs_streams_and_batches(client: TestClient) -> None:
    packed, streamed, batched = Log(), Log(failures=1), Log()
    client.queue("ship", kind="bucket").push_many(range(5))
    client.queue("mail").push_many(range(5))
    stream = client.stream("events")
    stream.append_many(range(5))
    worker = Worker(client).on("ship", packed).on(stream.consumer("all"), streamed)
    drain(worker.on("mail", batched, batch=3))
    assert sorted(packed.seen) == list(range(5))
    assert (len(streamed.seen), {*streamed.seen}) == (6, {*range(5)})  # one was tried again
    assert sorted(map(len, batched.seen)) == [2, 3]


def test_drain_follows_a_pipeline(client: TestClient) -> None:
    pipeline = Pipeline(client).link("raw", lambda number: number + 1, to="parsed")
    log = Log()
    pipeline.sink("parsed", log)
    client.queue("raw").push_many([1, 2])
    drain(pipeline)
    assert sorted(log.seen) == [2, 3]


def test_drain_leaves_paused_queues_and_later_messages(client: TestClient) -> None:
    log, queue, other = Log(), client.queue("ship"), client.queue("mail")
    queue.push(1)
    queue.pause()
    other.push(2, delay=3 * DAY)
    worker = Worker(client).on(queue, log).on(other, log)
    drain(worker, horizon=2 * DAY)
    assert log.seen == []
    drain(worker)
    assert log.seen == [2]
    assert queue.counts().ready == 1


def test_drain_raises_the_error_of_a_stage(client: TestClient) -> None:
    client.queue("ship").push_many(["x"] * 50)
    with pytest.raises(ConfigurationError, match="are not valid int payloads"):
        drain(Worker(client).on("ship", Log(), model=int))
    pipeline = client.pipeline().spark("raw", lambda frame: frame, to="parsed")
    with pytest.raises(ConfigurationError, match="Spark stage"):
        drain(pipeline)


@pytest.mark.anyio
async def test_async_worker(pyqueue_async_client: AsyncTestClient) -> None:
    async with pyqueue_async_client as client:
        seen = []

        async def handle(payload: int, delivery: Delivery[int]) -> None:
            await delivery.progress(0.5)
            seen.append(payload)

        worker = Worker(client).on("ship", handle)
        await client.queue("ship").push(1, delay=DAY)
        client.advance(DAY)
        assert (await client.queue("ship").counts()).ready == 1
        await drain(worker)
        found = await perform(worker, "ship", 2)
        assert seen == [1, 2]
        assert found.progress is not None
        assert (found.outcome, found.progress["fraction"]) == ("committed", 0.5)


# ---- the clock


def test_advance_passes_delays_and_leases(client: TestClient) -> None:
    queue = client.queue("ship")
    queue.push(1, delay=DAY)
    client.advance(DAY - timedelta(seconds=10))
    assert queue.reserve(0) is None
    client.advance(10)
    held = queue.reserve(0)
    assert held is not None
    client.advance(61)
    again = queue.reserve(0)
    assert again is not None
    assert (again.id, again.tries) == (held.id, 2)
    for wrong in (-1, timedelta(days=-1), "1"):
        with pytest.raises(ConfigurationError, match="seconds"):
            client.advance(wrong)  # type: ignore[arg-type]


def test_advance_wakes_waiting_consumers(client: TestClient) -> None:
    queue = client.queue("ship")
    queue.push(1, delay=DAY)
    waiting = in_thread(lambda: queue.reserve(30))
    eventually(lambda: waiters(client, "ship") == 1, "it waits")
    client.advance(DAY)
    assert waiting.result(5).payload == 1


def test_running_worker_pushes_at_a_tick_passed(client: TestClient) -> None:
    """The clock of a test moves past the tick of a schedule."""
    client.schedule("often", queue="in", every=3600)
    client.queue("in").push("first")
    log = Log()
    worker = Worker(client).on("in", log)
    running = threading.Thread(target=worker.run, kwargs={"handle_signals": False})
    running.start()
    try:
        eventually(lambda: log.seen)
        client.advance(3610)
        eventually(lambda: len(log.seen) == 2)
    finally:
        worker.stop()
        running.join()
    assert log.seen == ["first", {}]


def test_perform_of_many_and_of_a_batch(client: TestClient) -> None:
    log = Log()
    worker = Worker(client).on("in", lambda _: Many([To("out", 1)]), to=["out"])
    worker.on("batch", log, batch=10)
    assert perform(worker, "in", 1).outcome == "committed"
    assert perform(worker, "batch", 2).outcome == "committed"
    assert log.seen == [[2]]
