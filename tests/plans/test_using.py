"""The uses that a client notes: few writes, off the path of callers, and none without need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue import Client, Queue, QueueError, Worker
from pyqueue.backends.uses import interval_s
from pyqueue.requests import EnsureQueue, Find, FindAndModify, ServerTime, Update, Wait
from pyqueue.runtime import base_driver
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.known_queues import KnownQueues
from pyqueue.runtime.using import Uses
from pyqueue.testing import TestClient
from tests.contract.world import in_thread
from tests.plans.runner import after, record_of
from tests.plans.steps import FAULT_AT, Cut, Steps, lasting, lost_request
from tests.support.eventually import LONG, eventually, waiters

SHAPE = {"auto_delete": 60.0}


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> Any:
        return after(self.seconds)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def uses(time: Time) -> Uses:
    return Uses(time.now)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient("memory:") as client:
        yield client


def used(client: Client, queue: str = "a") -> Any:
    """Return the use of a queue that was noted last, or None."""
    return (client.database["pyqueue"].find_one({"_id": f"~used:{queue}"}) or {}).get("used")


# ---- when a use is noted


@pytest.mark.parametrize(("seconds", "interval"), [(60, 15), (4, 1), (1, 1), (86400, 21600)])
def test_one_use_is_noted_in_each_quarter(
    uses: Uses, time: Time, seconds: float, interval: float
) -> None:
    assert interval_s(seconds) == interval
    uses.follow("a", {"auto_delete": seconds})
    for _ in range(3):
        assert uses.due("a") is not None
        assert (uses.due("a"), uses.left_s("a")) == (None, interval)
        time.seconds += interval - 0.001
        assert uses.due("a") is None
        time.seconds += 0.001
        assert uses.left_s("a") == 0


def test_queue_without_the_option_is_not_noted(uses: Uses) -> None:
    shapes: list[Any] = [{}, {"limit": {}}, {"auto_delete": False}, {"auto_delete": "soon"}, None]
    for shape in shapes:
        uses.follow("a", shape)
        assert (uses.due("a"), uses.left_s("a")) == (None, float("inf"))
    assert list(uses.naming("a", {"limit": {}})) == []


def test_first_note_does_not_wait_for_a_later_task(uses: Uses, time: Time) -> None:
    """Even if the client has read the record before, to learn the kind of the queue."""
    uses.follow("a", SHAPE)
    steps = lasting()
    steps.run(uses.naming("a", SHAPE))
    assert [each["_id"] for each in steps.all()] == ["~used:a"]
    assert uses.due("a") is None
    assert list(uses.naming("a", SHAPE)) == []
    time.seconds = 15
    steps.run(uses.naming("a", SHAPE))
    assert [type(each) for each in steps.commands] == [Update]


def test_option_that_changes_is_followed(uses: Uses) -> None:
    uses.follow("a", SHAPE)
    assert uses.due("a") is not None
    uses.follow("a", SHAPE)
    assert uses.due("a") is None
    uses.follow("a", {"auto_delete": 20})
    assert uses.due("a") is not None
    assert uses.left_s("a") == 5
    uses.follow("a", {})
    assert uses.queues == {}


def test_clock_that_is_set_back_stops_no_notes(uses: Uses, time: Time) -> None:
    uses.follow("a", SHAPE)
    assert uses.due("a") is not None
    time.seconds = -3600
    assert uses.left_s("a") == 0
    assert uses.due("a") is not None
    assert uses.due("a") is None


def test_idle_queues_are_forgotten(uses: Uses, time: Time) -> None:
    for queue in "ab":
        uses.follow(queue, SHAPE)
        assert uses.due(queue) is not None
    time.seconds = 610
    assert uses.due("a") is not None
    uses.forget_idle(600)
    assert set(uses.queues) == {"a", "b"}
    time.seconds = 616
    uses.forget_idle(600)
    assert set(uses.queues) == {"a"}


def test_note_that_fails_is_logged(uses: Uses, caplog: pytest.LogCaptureFixture) -> None:
    uses.follow("a", SHAPE)
    noting = uses.due("a")
    assert noting is not None
    with caplog.at_level(logging.WARNING, "pyqueue"):
        Steps().run(noting, lost_request(0))
    assert "queue 'a': cannot note that it is used: no answer" in caplog.text


@pytest.mark.parametrize("fault", FAULT_AT)
def test_first_use_is_noted_before_the_record_has_the_option(fault: str) -> None:
    for at in range(20):
        steps = lasting()
        uses = Uses(lambda steps=steps: steps.now)  # type: ignore[misc]
        known = KnownQueues("pyqueue", uses=uses)
        request = EnsureQueue("a", "standard", None, SHAPE)
        with suppress(Cut, QueueError):
            steps.run(known._ensure_each([request]), FAULT_AT[fault](at))
        noted = [each for each in steps.all() if each["_id"] == "~used:a"]
        assert noted or not record_of(steps), at
        if len(steps.commands) <= at:
            assert [type(each) for each in steps.commands] == [Update, Find, FindAndModify]
            return
    raise AssertionError("more commands than expected")


# ---- by a client


def commands(client: Client, call: Callable[[], object]) -> int:
    """Return how many commands a call sends."""
    before = client.stats["commands"]
    call()
    return client.stats["commands"] - before


def test_client_notes_one_use_in_each_quarter(client: TestClient) -> None:
    queue = client.queue("a", auto_delete=60)
    queue.push(1)
    for _ in range(3):
        first = used(client)
        client.advance(14)
        assert commands(client, lambda: queue.push(1)) <= 2, "the record is read each 5 s"
        assert used(client) == first
        client.advance(1.1)
        queue.push(1)
        assert used(client) - first >= timedelta(seconds=15)
        assert commands(client, lambda: queue.push(1)) == 1


@pytest.mark.parametrize("shared", [{}, {"kind": "priority", "strict": True}])
def test_client_notes_nothing_without_the_option(client: TestClient, shared: Any) -> None:
    queue = client.queue("a", **shared)
    for _ in range(2):
        queue.push(1)
        assert commands(client, lambda: queue.push(1)) == 1
        assert queue.reserve(0) is not None
        client.advance(3600)
    assert used(client) is None
    assert runner_of(client).open().uses.queues == {}


def test_object_without_the_option_notes_its_uses(client: TestClient) -> None:
    client.queue("a", auto_delete=60).push(1)
    first = used(client)
    with TestClient(client.database) as other:
        other.advance(5)
        other.queue("a").push(1)
        assert used(client) > first
        assert set(runner_of(other).open().uses.queues) == {"a"}
        other.queue("b").push(1)
    assert used(client, "b") is None


def test_question_for_the_kind_is_no_use(client: TestClient) -> None:
    client.queue("a", auto_delete=60).push(1)
    first = used(client)
    client.advance(30)
    other = client.queue("a")
    assert (other.peek()[0].payload, other.counts().ready) == (1, 1)
    assert used(client) == first
    other.push(2)
    assert used(client) > first


def test_deleted_queue_is_noted_again_at_once(client: TestClient) -> None:
    queue = client.queue("a", auto_delete=60)
    queue.push(1)
    assert queue.pop(0) is not None
    client.delete_queue("a")
    client.database["pyqueue"].delete_one({"_id": "~used:a"})
    queue.push(2)
    assert used(client) is not None


def test_cleared_namespace_is_noted_again_at_once(client: TestClient) -> None:
    client.queue("a", auto_delete=60).push(1)
    client.clear()
    assert used(client) is None
    client.queue("a", auto_delete=60).push(1)
    assert used(client) is not None


def test_removed_option_ends_the_notes(client: TestClient) -> None:
    queue = client.queue("a", auto_delete=60)
    queue.push(1)
    client.reshape("a", auto_delete=False)
    assert queue.reserve(0) is not None
    assert runner_of(client).open().uses.queues == {}


# ---- while consumers wait


def waits(client: Client, queue: Queue[Any]) -> Any:
    """Receive in another thread. Return its future once it waits."""
    waiting = in_thread(lambda: queue.reserve(LONG))
    eventually(lambda: waiters(client, queue.name) == 1, "a consumer waits")
    return waiting


def wait_for_use_after(client: Client, first: Any) -> None:
    def later() -> bool:
        noted = used(client)  # None if the clock moved during a pass, which then deleted the queue
        return noted is not None and noted > first

    eventually(later, "another use is noted")


def test_waiting_consumer_keeps_its_queue(client: TestClient) -> None:
    """As the clock moves, it wakes. The queue would be deleted by the pass that it makes."""
    queue = client.queue("a", auto_delete=60)
    waiting = waits(client, queue)
    for _ in range(3):
        first = used(client)
        client.advance(300)
        wait_for_use_after(client, first)
        eventually(lambda: waiters(client, "a") == 1, "its pass has ended")
        assert [each.name for each in client.queues()] == ["a"]
    queue.push("x")
    assert waiting.result(LONG).payload == "x"


def test_worker_deletes_unused_queues(client: TestClient) -> None:
    worker, done = Worker(client), list[Any]()

    @worker.on("work")
    def work(payload: object) -> None:
        done.append(payload)

    running = in_thread(lambda: worker.run(handle_signals=False))
    client.queue("work").push("x")
    eventually(lambda: done, "the worker works")
    gone = client.queue("gone", auto_delete=60)
    gone.push(1)
    assert gone.pop(0) is not None
    client.advance(3600)
    eventually(lambda: [each.name for each in client.queues()] == ["work"], "it is deleted")
    worker.stop()
    running.result(LONG)


def test_waiting_consumer_learns_of_the_option(client: TestClient) -> None:
    queue = client.queue("a", kind="standard")
    waiting = waits(client, queue)
    client.reshape("a", auto_delete=60)
    driver = runner_of(client).open()
    eventually(lambda: "a" in driver.uses.queues, "the consumer reads the record")
    queue.push("x")
    assert waiting.result(LONG).payload == "x"


def test_leader_notes_a_use_in_each_quarter(
    client: TestClient, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait goes on: it neither ends nor sends anything else."""
    driver = runner_of(client).open()
    monkeypatch.setattr(base_driver, "time", SimpleNamespace(monotonic=lambda: time.seconds))
    monkeypatch.setattr(driver, "uses", Uses(time.now))
    driver.uses.follow("a", {"auto_delete": 8})
    until = driver.run(iter(ServerTime())) + timedelta(hours=1)
    watching = driver._watch(Wait(driver.waiters("a"), until, None), None)  # type: ignore[arg-type]
    before, pause = client.stats["commands"], next(watching) or 0
    for number in range(1, 4):
        assert client.stats["commands"] == before + number
        assert pause == pytest.approx(2.01)
        time.seconds += pause
        pause = watching.send(False) or 0
    others = driver._watch(Wait(driver.waiters("b"), until, None), None)  # type: ignore[arg-type]
    assert (next(others) or 0) > 2.01
    assert used(client, "b") is None
