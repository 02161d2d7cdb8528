"""Cancelled messages: how their handlers learn of it, and how the messages end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from pyqueue import Backoff, BatchFailed, Delivery, Many, Pipeline, Reject, RetryLater, To, Worker
from pyqueue.backends import ending
from pyqueue.pipeline import cancelling
from pyqueue.pipeline.cancelling import Cancellations
from tests.pipeline.place import LONG_LEASE, Place, Running, counted, listed
from tests.plans.runner import reservation
from tests.support.eventually import LONG, async_eventually, eventually
from tests.support.recorder import Recorder


class Oops(Exception):
    """Raised by a handler."""


def fail(delivery: Any) -> Any:
    raise Oops("cancelled")


class Waits:
    """A handler of (payload, delivery), or of lists, that works until a message is cancelled.

    Args:
        awaited: Whether it is async.
        end: What it does then. An async handler that was cancelled lets that pass instead.
    """

    def __init__(self, awaited: bool, end: Callable[[Any], Any] = fail) -> None:
        self.begun: SimpleQueue[Any] = SimpleQueue()
        #: When it learned that a message was cancelled.
        self.told: SimpleQueue[float] = SimpleQueue()
        self._end = end
        self.handler: Any = self._awaited if awaited else self._plain

    def _plain(self, payload: Any, delivery: Any) -> Any:
        self.begun.put(delivery)
        eventually(lambda: is_cancelled(delivery), "a cancelled message")
        self.told.put(time.monotonic())
        return self._end(delivery)

    async def _awaited(self, payload: Any, delivery: Any) -> Any:
        self.begun.put(delivery)
        try:
            await async_eventually(lambda: is_cancelled(delivery), "a cancelled message")
            await asyncio.sleep(0.05)  # a handler of one message is cancelled here
        except asyncio.CancelledError:
            assert is_cancelled(delivery)
            assert not any(each.lost for each in listed(delivery))
            self.told.put(time.monotonic())
            raise
        self.told.put(time.monotonic())
        return self._end(delivery)


def is_cancelled(delivery: Any) -> bool:
    """Return whether one of the messages of a handler was cancelled."""
    return any(each.cancelled for each in listed(delivery))


def start(place: Place, handler: Any, **options: Any) -> Running:
    """Run a worker of the queue "in", whose failed messages are tried again at once."""
    options = {"lease": LONG_LEASE, "backoff": Backoff(base=0, jitter=0), **options}
    return place.start(lambda client: Worker(client).on("in", handler, **options))


def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs hear no events of cancelled messages."""

    async def deaf(self: Cancellations) -> None:
        self.listening.set()

    monkeypatch.setattr(Cancellations, "_listen", deaf)


# ---- one message


def test_cancelled_message_ends_with_its_handler(place: Place) -> None:
    waits, queue = Waits(place.awaited), place.queue("in", history=60)
    running = start(place, waits.handler, history=60)
    id: Any = queue.push("x")
    waits.begun.get(timeout=LONG)
    assert queue.cancel(id) == "requested"
    running.counted("in", "cancelled")
    assert counted(running.finish(), "in") == {"in": 1, "cancelled": 1}
    found = queue.get(id)
    assert found is not None
    assert (found.state, getattr(found, "outcome", None)) == ("finished", "cancelled")


def test_cancel_takes_one_read_and_less_than_100_ms(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = ending.find_cancelled

    def counting(held: Any) -> Any:
        reads.append(len(held))
        return real(held)

    monkeypatch.setattr(cancelling, "find_cancelled", counting)
    waits, queue = Waits(server.awaited), server.queue("in")
    running = start(server, waits.handler)
    took: list[float] = []
    for number in range(5):
        id: Any = queue.push(number)
        waits.begun.get(timeout=LONG)
        began = time.monotonic()
        assert queue.cancel(id) == "requested"
        took.append(waits.told.get(timeout=LONG) - began)
        running.counted("in", "cancelled", number + 1)
    running.finish()
    assert min(took) < 0.1
    assert reads == [1] * 5


def test_worker_that_holds_nothing_reads_nothing(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: SimpleQueue[int] = SimpleQueue()
    look = Cancellations._look

    async def looked(self: Cancellations) -> None:
        commands = self._runner.stats["commands"]
        await look(self)
        heard.put(self._runner.stats["commands"] - commands)

    monkeypatch.setattr(Cancellations, "_look", looked)
    held_queue = server.queue("other")
    id: Any = held_queue.push(1)
    held = held_queue.reserve(0)
    running = start(server, lambda payload: None)
    server.queue("in").push(1)
    running.counted("in", "out")  # a run that ends while it connects would leave a socket
    assert server.client.cancel(id) == "requested"
    assert heard.get(timeout=LONG) == 0
    running.finish()
    held_queue.commit(held)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [Reject("no"), RetryLater(60), Oops("no")], ids=repr)
def test_any_exception_after_a_cancel_ends_the_message(memory: Place, error: Exception) -> None:
    def end(delivery: Any) -> Any:
        raise error

    waits, queue = Waits(False, end), memory.queue("in")
    running = start(memory, waits.handler)
    id: Any = queue.push("x")
    waits.begun.get(timeout=LONG)
    queue.cancel(id)
    running.counted("in", "cancelled")
    running.finish()
    assert (queue.counts().total, memory.queue("in.dead").counts().total) == (0, 0)


@pytest.mark.parametrize("answer", ["commit", "returned error"])
def test_answer_of_a_handler_counts_after_a_cancel(memory: Place, answer: str) -> None:
    value = None if answer == "commit" else Oops("returned")
    waits, queue = Waits(False, lambda delivery: value), memory.queue("in", history=60)
    running = start(memory, waits.handler, history=60)
    id: Any = queue.push("x")
    waits.begun.get(timeout=LONG)
    queue.cancel(id)
    counter, outcome = ("out", "committed") if value is None else ("cancelled", "cancelled")
    running.counted("in", counter)
    running.finish()
    assert [each.outcome for each in queue.history()] == [outcome]


def test_cancelled_message_that_moves_on_ends_in_the_next_queue(place: Place) -> None:
    seen: list[Any] = []
    waits = Waits(False, lambda delivery: To("next"))

    def build(client: Any) -> Pipeline:
        pipeline: Pipeline = client.pipeline()
        pipeline.choice("in", waits.handler, to=["next"], lease=LONG_LEASE)
        pipeline.sink("next", seen.append)
        return pipeline

    running = place.start(build)
    id: Any = place.queue("in").push("x")
    waits.begun.get(timeout=LONG)
    place.queue("in").cancel(id)
    running.counted("in", "out")
    eventually(lambda: not place.queue("next").counts().total, "the end of the message")
    assert counted(running.finish(), "next") == {}
    assert seen == []


def test_outputs_of_a_cancelled_message_are_not_cancelled(memory: Place) -> None:
    waits = Waits(False, lambda delivery: Many([To("a", 1), To("a", 2)]))
    running = start(memory, waits.handler, to=["a"])
    id: Any = memory.queue("in").push("x")
    waits.begun.get(timeout=LONG)
    memory.queue("in").cancel(id)
    running.counted("in", "out")
    running.finish()
    assert sorted(each.payload for each in memory.queue("a").reserve_many(5, timeout=0)) == [1, 2]


def test_forced_cancel_makes_the_handler_lose_its_message(server: Place) -> None:
    begun: SimpleQueue[Delivery[Any]] = SimpleQueue()

    def handle(payload: Any, delivery: Delivery[Any]) -> None:
        begun.put(delivery)
        eventually(lambda: delivery.lost, "a lost message")

    running = start(server, handle, lease=0.3)
    id: Any = server.queue("in").push("x")
    begun.get(timeout=LONG)
    assert server.queue("in").cancel(id, force=True) == "cancelled"
    running.counted("in", "lost")
    running.finish()
    assert server.queue("in").counts().total == 0


# ---- without events


def test_renewal_finds_a_cancelled_message(server: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    no_events(monkeypatch)
    waits, queue = Waits(server.awaited), server.queue("in")
    running = start(server, waits.handler, lease=0.5)
    id: Any = queue.push("x")
    waits.begun.get(timeout=LONG)
    queue.cancel(id)
    running.counted("in", "cancelled")
    running.finish()
    assert queue.counts().total == 0


def test_next_claim_ends_a_message_whose_handler_was_not_told(
    memory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_events(monkeypatch)
    queue = memory.queue("in")
    calls: list[Any] = []

    def handle(payload: Any, delivery: Delivery[Any]) -> None:
        calls.append(queue.cancel(delivery.message.id))
        raise Oops("not told")

    running = start(memory, handle)
    queue.push("x")
    running.counted("in", "retried")
    eventually(lambda: not queue.counts().total, "the end of the message")
    running.finish()
    assert calls == ["requested"]


def test_bus_that_cannot_be_heard_does_not_stop_a_run(
    memory: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, name: str) -> Any:
        raise OSError("no listener")

    monkeypatch.setattr("pyqueue.pipeline.blocking.ClientRunner.hearing", broken)
    memory.queue("in").push(1)
    with caplog.at_level("INFO", "pyqueue"):
        assert memory.run_worker(lambda payload: None) == {"in": 1, "out": 1}
    assert "when their leases are renewed: no listener" in caplog.text


def test_event_before_a_handler_starts_is_not_missed() -> None:
    """The message was claimed, and its handler waited for a place."""

    class Idle:
        def renewal(self, told: Any) -> Any:
            return told

    async def main() -> list[bool]:
        runner: Any = Idle()
        watching = Cancellations(runner, asyncio.get_running_loop())
        asked: list[bool] = []
        for heard_s, age_s in ((None, 5.0), (-3.0, 5.0), (-3.0, 1.0)):
            watching._asked.clear()
            watching._heard = None if heard_s is None else time.monotonic() + heard_s
            watching.add(reservation("m"), lambda: None, age_s)
            asked.append(watching._asked.is_set())
        return asked

    assert asyncio.run(main()) == [False, True, False]


# ---- the end of a handler for another reason


@pytest.mark.parametrize("why", ["late", "stopped"])
def test_late_or_stopped_handler_ends_a_cancelled_message(memory: Place, why: str) -> None:
    begun: SimpleQueue[Delivery[Any]] = SimpleQueue()

    def handle(payload: Any, delivery: Delivery[Any]) -> None:
        begun.put(delivery)
        eventually(lambda: delivery.lost, "the time limit, or the end")

    limit = 2 if why == "late" else None
    queue = memory.queue("in")
    running = start(memory, handle, time_limit=limit)
    id: Any = queue.push("x")
    delivery = begun.get(timeout=LONG)
    queue.cancel(id)
    eventually(lambda: delivery.cancelled, "a cancelled message")
    if why == "stopped":
        running.stop()
        running.stop()
    else:
        running.counted("in", "cancelled")
        running.stop()
    assert counted(running.join(), "in") == {"in": 1, "cancelled": 1}
    assert queue.counts().total == 0


# ---- batches


def test_only_the_cancelled_delivery_of_a_batch_is_told(place: Place) -> None:
    told: list[Any] = []

    def end(deliveries: Any) -> None:
        told.extend(each.message.payload for each in deliveries if each.cancelled)
        raise Oops("the batch failed")

    waits, queue = Waits(place.awaited, end), place.queue("in")
    ids = queue.push_many([1, 2, 3], ids=["a", "b", "c"])
    running = start(place, waits.handler, batch=3, backoff=Backoff(base=3600))
    (first, *_) = waits.begun.get(timeout=LONG)
    assert len(ids) == 3
    assert queue.cancel("b") == "requested"
    running.counted("in", "cancelled")
    running.finish()
    assert told == [2]
    assert queue.get("b") is None
    left = {each.payload: each.tries for each in queue.browse().messages}
    assert left == {1: 1, 3: 1}
    assert first.message.id == "a"


@pytest.mark.parametrize("answer", ["list", "raise"])
def test_failed_item_of_a_batch_ends_if_it_was_cancelled(memory: Place, answer: str) -> None:
    errors: dict[int, BaseException] = {0: Oops("a"), 1: Oops("b")}

    def end(deliveries: Any) -> Any:
        if answer == "raise":
            raise BatchFailed(errors)
        return [*errors.values(), None]

    waits, queue = Waits(False, end), memory.queue("in")
    queue.push_many([1, 2, 3], ids=["a", "b", "c"])
    running = start(memory, waits.handler, batch=3, backoff=Backoff(base=3600))
    waits.begun.get(timeout=LONG)
    queue.cancel("b")
    running.counted("in", "cancelled")
    running.counted("in", "out")
    assert counted(running.finish(), "in") == {"in": 3, "out": 1, "retried": 1, "cancelled": 1}
    assert [each.id for each in queue.browse().messages] == ["a"]


def test_async_batch_is_cancelled_when_no_message_is_left(memory: Place) -> None:
    cancelled: list[Any] = []

    async def handle(payloads: list[Any], deliveries: list[Delivery[Any]]) -> None:
        begun.put(deliveries)
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            cancelled.append([each.cancelled for each in deliveries])
            raise

    begun: SimpleQueue[Any] = SimpleQueue()
    queue = memory.queue("in")
    queue.push_many([1, 2], ids=["one", "two"])
    running = start(memory, handle, batch=2)
    begun.get(timeout=LONG)
    for id in ("one", "two"):
        assert queue.cancel(id) == "requested"
    running.counted("in", "cancelled", 2)
    running.finish()
    assert cancelled == [[True, True]]


# ---- hooks


def test_hooks_hear_that_a_worker_ended_a_cancelled_message(memory: Place) -> None:
    recorder, waits, queue = Recorder(), Waits(False), memory.queue("in")
    memory.hooks.append(recorder)
    running = start(memory, waits.handler)
    id: Any = queue.push("x")
    waits.begun.get(timeout=LONG)
    queue.cancel(id)
    running.counted("in", "cancelled")
    running.finish()
    assert recorder.take("settled") == [("in", "cancel", [id], None, None)]
