"""Rows of a bulk write whose ids are taken when they are written, and free a moment later.

A consumer finishes the messages in between. In a queue without history, nothing remembers them.
Then the rows are messages again, as after a push.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from pyqueue.backends.bulk.epochs import EpochWrites
from pyqueue.backends.bulk.staging import Staging
from pyqueue.backends.options import NewMessage, Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.errors import DuplicateKey, Unavailable
from pyqueue.requests import Insert, Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW
from tests.plans.steps import Fault, Steps

ROWS = [NewMessage("a", "a2"), NewMessage("b", "b2"), NewMessage("c", "c2")]


def stage(steps: Steps, queue: QueuePlans) -> Plan[int]:
    return Staging(queue.target, "job").write("place", ROWS)


def stage_strictly(steps: Steps, queue: QueuePlans) -> Plan[int]:
    return Staging(queue.target, "job", "error").write("place", ROWS)


def write_epoch(steps: Steps, queue: QueuePlans) -> Plan[int]:
    writes = EpochWrites(queue.target, "s", "query")
    steps.run(writes.join("job", 0))
    return writes.write(0, 1, 0, "place", ROWS)


Write = Callable[[Steps, QueuePlans], Plan[int]]
WRITES: list[Write] = [stage, stage_strictly, write_epoch]


class Scene:
    """A queue that has messages with the ids of two rows."""

    def __init__(self) -> None:
        self.steps = Steps()
        # The store deletes expired documents by the clock of this machine.
        self.steps.seconds = (datetime.now(UTC) - NOW).total_seconds()
        self.queue = plans_of("q", Options(), owner="me")
        self.push(["a", "b"])

    def push(self, ids: list[str]) -> None:
        self.aside(self.queue.push(ids, ids=ids))

    def finish(self) -> None:
        """Receive and commit all messages of the queue."""
        held = self.aside(self.queue.receive(Waiters("q"), 10, timeout=0))
        if held:
            self.aside(self.queue.commit(held))

    def aside(self, plan: Plan[Any]) -> Any:
        """Run a plan of another process while one runs."""
        commands = self.steps.commands
        try:
            return self.steps.run(plan)
        finally:
            self.steps.commands = commands

    def staged(self) -> list[Any]:
        """Return the payloads of the rows that wait to be shown."""
        return sorted(each["payload"] for each in self.steps.all() if "staged" in each)

    def around_inserts(
        self, before: Callable[[int], object], after: Callable[[int], object]
    ) -> Fault:
        """Return a fault: these are called around each insert, with its number."""
        inserts = 0

        def fault(number: int, done: bool) -> None:
            nonlocal inserts
            if isinstance(self.steps.commands[number], Insert):
                (after if done else before)(inserts)
                inserts += done

        return fault


@pytest.mark.parametrize("write", WRITES)
def test_row_is_written_if_what_had_its_id_is_finished(write: Write) -> None:
    scene = Scene()
    plan = write(scene.steps, scene.queue)
    fault = scene.around_inserts(
        before=lambda number: None,
        after=lambda number: scene.finish() if number == 0 else None,
    )
    assert scene.steps.run(plan, fault) == 3
    assert scene.staged() == ["a2", "b2", "c2"]


@pytest.mark.parametrize("write", WRITES)
def test_write_gives_up_if_its_ids_are_never_free(write: Write) -> None:
    scene = Scene()
    plan = write(scene.steps, scene.queue)
    fault = scene.around_inserts(
        before=lambda number: scene.push(["a"]), after=lambda number: scene.finish()
    )
    with pytest.raises(Unavailable, match=r"writing and finishing messages \['a'\]") as caught:
        scene.steps.run(plan, fault)
    assert caught.value.ids == ["a"]


@pytest.mark.parametrize("write", [stage, write_epoch])
def test_row_of_a_known_message_is_not_written(write: Write) -> None:
    scene = Scene()
    assert scene.steps.run(write(scene.steps, scene.queue)) == 1
    assert scene.staged() == ["c2"]


@pytest.mark.parametrize("write", WRITES)
def test_row_with_an_id_of_another_queue_is_refused(write: Write) -> None:
    scene = Scene()
    scene.steps.collection.update_one({"_id": "b"}, {"$set": {"q": "other"}})
    plan = write(scene.steps, scene.queue)
    with pytest.raises(DuplicateKey) as caught:
        scene.steps.run(plan)
    assert caught.value.ids == ["b"]
