"""Rows that replace the messages with their ids, in an ordered queue, disturbed at each command.

Whatever happens, the job that is run again leaves each row once, and the rows of a group in order.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from pyqueue.backends.bulk.staging import append
from pyqueue.backends.options import NewMessage, Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.errors import DuplicateKey, LeaseLost, Unavailable
from pyqueue.messages import Reservation
from pyqueue.requests import Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.steps import FAULT_AT, Cut, Steps, at_each_command, resume
from tests.support.samples import at_each, some_or_all

#: The first two rows have the ids of messages, the next one has the key of a third.
ROWS = [
    NewMessage("a", "a2", group="g"),
    NewMessage("b", "b2", group="g"),
    NewMessage("c", "c2", key="k", group="g"),
    NewMessage("d", "d2", group="g"),
]
NEW = [each.payload for each in ROWS]


class Queue:
    """An ordered queue with three old messages of a group, of which the first one is held."""

    def __init__(self, history: float | None = None) -> None:
        self.steps = Steps()
        self.plans = plans_of(
            "q", Options(dead_letter="dead", history=history), kind="ordered", owner="me"
        )
        old = self.plans.push(
            ["a1", "b1", "c1"], ids=["a", "b", "x"], keys=[None, None, "k"], groups=["g"] * 3
        )
        self.steps.run(old)
        (self.held,) = self.receive()

    def write(self) -> Plan[int]:
        """Return the plan of the job."""
        return append(self.plans.target, ROWS, "replace", by_id=True)

    def receive(self) -> list[Reservation[Any]]:
        return self.steps.run(self.plans.receive(Waiters("q"), 1, timeout=0))

    def drain(self) -> list[Any]:
        """Consume everything by new processes. Return the payloads in their order."""
        seen = []
        while self.live():
            self.steps.seconds += 120  # of those that wait, too
            assert self.steps.seconds < 1200
            for each in self.receive():
                self.steps.run(self.plans.commit([each]))
                seen.append(each.payload)
        return seen

    def live(self) -> list[Any]:
        """Return the payloads of the live messages."""
        stored = (each for each in self.steps.all() if "processed" not in each)
        return [each["payload"] for each in stored if each["q"] == "q" and "payload" in each]


@some_or_all
@pytest.mark.parametrize("fault", FAULT_AT)
def test_job_that_is_run_again_replaces_each_message_once(fault: str, few: int | None) -> None:
    def run(at: int) -> int:
        queue = Queue()
        if at == 0:
            queue.steps.run(queue.write())
            return len(queue.steps.commands)
        try:
            queue.steps.run(queue.write(), FAULT_AT[fault](at - 1))
        except (Cut, Unavailable):
            queue.steps.run(queue.write())
        assert sorted(queue.live()) == NEW
        with pytest.raises(LeaseLost):
            queue.steps.run(queue.plans.commit([queue.held]))
        assert queue.drain() == NEW
        return at

    assert at_each(run, few) > 6


@some_or_all
@pytest.mark.parametrize(
    ("what", "history"), [("consumes", None), ("consumes", 1e9), ("writes", None), ("both", 1e9)]
)
def test_row_competes_with_other_processes(
    what: str, history: float | None, few: int | None
) -> None:
    """A message that finishes first stays finished, or its row is a new message."""

    def run(at: int) -> int:
        queue, seen = Queue(history), []
        if at == 0:
            queue.steps.run(queue.write())
            return len(queue.steps.commands)
        running = queue.steps.stalled(queue.write(), at - 1)
        assert running is not None
        if what != "writes":
            try:
                queue.steps.run(queue.plans.commit([queue.held]))
                seen.append("a1")
            except LeaseLost:
                pass
            for each in queue.receive():
                queue.steps.run(queue.plans.commit([each]))
                seen.append(each.payload)
        if what != "consumes":
            queue.steps.run(queue.write())
        resume(running)
        left = queue.drain()
        assert len(left) == len(set(left))
        seen += left
        finished = {f"{each[0]}2" for each in seen if history and each in ("a1", "b1")}
        new = [each for each in seen if each in NEW]
        if what != "consumes":  # two jobs agree on no order, and may rewrite a consumed row
            new = sorted(set(new))
        assert new == [each for each in NEW if each not in finished], (at, seen)
        return at

    assert at_each(run, few) > 6


@pytest.mark.parametrize("stored", [True, False])
def test_row_meets_a_message_that_takes_its_key(stored: bool) -> None:
    """It overwrites that message, or keeps it out."""
    plans = plans_of("q", Options(dead_letter="dead"), owner="me")

    def made() -> Steps:
        steps = Steps()
        steps.run(plans.push(["old"], ids=["a" if stored else "b"]))
        return steps

    row = NewMessage("a", "new", key="k")
    write = partial(append, plans.target, [row], "replace", by_id=True)
    for steps, running in at_each_command(made, write, least=3):
        steps.run(plans.push(["other"], keys=["k"]))
        resume(running)
        found = [each for each in steps.all() if "payload" in each]
        assert [each["payload"] for each in found if each.get("key") == "k"] == ["new"]
        assert "other" not in [each["payload"] for each in found]


def test_row_meets_its_id_in_another_queue() -> None:
    """Whichever comes second fails."""
    options = Options(dead_letter="dead")
    plans, other = (plans_of(name, options, owner="me") for name in ("q", "other"))
    write = partial(append, plans.target, [NewMessage("a", "new")], "replace", by_id=True)
    for steps, running in at_each_command(Steps, write, least=2):
        with pytest.raises(DuplicateKey) as caught:
            run_both(steps, other.push(["theirs"], ids=["a"]), running)
        assert caught.value.ids == ["a"]


def run_both(steps: Steps, plan: Plan[Any], running: Generator[Any, None, Any]) -> None:
    """Run a plan, and then a stalled plan to its end."""
    steps.run(plan)
    resume(running)
