"""Hooks of workers and stages: around the handler, and after its answer is carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from pyqueue import Client, Delivery, Hooks, LeaseLost, Many, Queue, To
from tests.pipeline.place import Gate, Place
from tests.pipeline.test_run import busy
from tests.support.eventually import eventually
from tests.support.recorder import Recorder

where = ContextVar("where", default="outside")


class Around(Recorder):
    """Records calls of handlers, too, and sets a context variable for them."""

    @contextmanager
    def handling(self, deliveries: Sequence[Delivery[Any]]) -> Iterator[None]:
        """Record the messages of a handler, and its error."""
        self.told.append(("handling", [each.message.id for each in deliveries]))
        before = where.set("inside")
        try:
            yield
        except ValueError as error:
            self.told.append(("failed", str(error)))
            raise
        finally:
            where.reset(before)


@pytest.fixture
def hooks(place: Place) -> Around:
    """Return the hooks of the client that runs."""
    around = Around()
    place.hooks.append(around)
    return around


def test_many_is_told_as_a_commit_and_pushes(place: Place, hooks: Around) -> None:
    seen: list[str] = []

    def work(payload: Any, delivery: Any) -> Any:
        seen.append(where.get())
        return Many([To("a", 1), To("b", 2), To("a", 3)])

    id = place.queue("in").push("x")
    assert place.run_stage(place.handler(work)) == {"in": 1, "out": 1}
    assert seen == ["inside"]
    told = hooks.take()
    assert told[:2] == [("received", "in", [id]), ("handling", [id])]
    assert sorted(told[2:4], key=str) == [
        ("pushed", "a", place.ids("a"), None),
        ("pushed", "b", place.ids("b"), None),
    ]
    assert told[4:] == [("settled", "in", "commit", [id], None, None)]


def test_failure_of_a_handler_is_told(place: Place, hooks: Around) -> None:
    def fail(payload: Any, delivery: Any) -> Any:
        raise ValueError("no")

    id = place.queue("in").push("x")
    assert place.run_worker(place.handler(fail), max_tries=1) == {"in": 1, "dead": 1}
    assert hooks.take()[1:] == [
        ("handling", [id]),
        ("failed", "no"),
        ("settled", "in", "bury", [id], None, "in.dead"),
    ]


def test_batch_is_one_call_of_the_hooks(memory: Place) -> None:
    around = Around()
    memory.hooks.append(around)
    ids = memory.queue("in").push_many(range(5))
    memory.run_stage(lambda payloads: [To("a") for _ in payloads], batch=10)
    told = around.take()
    assert told == [
        ("received", "in", ids),
        ("handling", ids),
        ("settled", "in", "move", ids, None, "a"),
    ]


def test_lease_that_a_stage_lost_is_told(server: Place, gate: Gate) -> None:
    around = Around()
    server.hooks.append(around)
    id = server.queue("in").push("x")
    running = busy(server, gate, places=1, lease=0.9)
    server.take_over(gate.deliveries[0])
    running.counted("in", "lost")
    running.finish()
    assert around.take("settled") == [("in", "lost", [id], None, None)]


@pytest.mark.parametrize("fails", [False, True])
def test_lease_that_a_block_lost_is_told(server: Place, fails: bool) -> None:
    recorder, lost = Recorder(), list[Any]()
    with Client(server.target, namespace=server.namespace, hooks=[recorder]) as client:
        queue: Queue[Any] = client.queue("in", lease=0.3)
        id = queue.push("x")
        recorder.take()
        expected = ValueError if fails else LeaseLost
        with pytest.raises(expected), queue.reserved(0, on_lost=lost.append) as held:  # noqa: PT012
            server.collection().update_one({"_id": id}, {"$set": {"token": "another's"}})
            eventually(lambda: lost == [held], "the renewal finds it")
            if fails:
                raise ValueError
    assert recorder.take("settled") == [("in", "lost", [id], None, None)]


def test_run_is_told_from_its_beginning_to_its_end(place: Place) -> None:
    class Runs(Hooks):
        def __init__(self) -> None:
            self.told: list[Any] = []

        @contextmanager
        def running(self, runner: Any) -> Iterator[None]:
            self.told.append((runner.name, runner.describe()["kind"]))
            yield
            described = runner.describe()
            self.told.append((described["counters"][0]["in"], described["in_progress"]))

    runs = Runs()
    place.hooks += [runs, Broken()]
    place.queue("in").push("x")
    place.run_worker(place.handler(lambda payload, delivery: None))
    assert runs.told == [("worker", "worker"), (1, [])]
    place.queue("in").push("x")
    place.run_stage(place.handler(lambda payload, delivery: To("a")))
    assert runs.told[2:] == [("pipeline", "pipeline"), (1, [])]


class Broken(Hooks):
    """A hook that fails before a run."""

    def running(self, runner: Any) -> Any:
        raise ValueError("no")


def test_failure_of_the_hook_of_a_run_is_logged(
    memory: Place, caplog: pytest.LogCaptureFixture
) -> None:
    memory.hooks.append(Broken())
    memory.queue("in").push("x")
    assert memory.run_worker(lambda payload: None) == {"in": 1, "out": 1}
    told = [each.getMessage() for each in caplog.records if "hook" in each.getMessage()]
    assert [each.splitlines()[0] for each in told] == ["'worker': the hook 'running' failed"]
