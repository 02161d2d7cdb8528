"""The looks of a client at gathers: they are shared, off the path of callers, and may fail."""

from __future__ import annotations

import _thread
from typing import Any, Final

import pytest
from bson import ObjectId

from pyqueue import QueueClosed
from pyqueue.backends import gathering
from pyqueue.backends.gathering import Route
from pyqueue.backends.pushing import Content
from pyqueue.facts import Gather
from pyqueue.requests import Plan
from pyqueue.runtime import looking
from pyqueue.runtime.looking import Looks, ThreadLooks
from tests.plans.runner import standard
from tests.plans.steps import Steps, lost_request, resume
from tests.support.eventually import eventually

ID: Final = ObjectId()


class Begun(Looks):
    """Looks that a test makes itself."""

    begun = 0

    def _begin(self) -> None:
        self.begun += 1


@pytest.fixture
def looks() -> Begun:
    return Begun()


@pytest.fixture
def steps() -> Steps:
    """Return a store with a sealed gather that has one message."""
    steps = Steps()
    steps.run(gathering.begin(Content(None, "done", id=ID), Route("report")))
    steps.run(standard().push(["x"], gathers=[Gather(ID, "hold")]))
    steps.run(gathering.seal(ID))
    return steps


def has_come(steps: Steps) -> bool:
    return any(each["q"] == "report" for each in steps.all() if "record" not in each)


def test_ends_of_one_gather_share_a_look(looks: Begun, steps: Steps) -> None:
    for _ in range(3):
        looks.add(ID)
    assert (looks.begun, looks.pending) == (3, True)
    steps.run(looks.plan())
    assert (len(steps.commands), looks.pending) == (2, False)
    looks.add(ID)
    steps.run(looks.plan())
    assert len(steps.commands) == 1, "it knows a message that is there"
    steps.run(standard().purge())
    looks.add(ID)
    steps.run(looks.plan())
    assert has_come(steps)


def test_end_during_a_look_has_a_look_of_its_own(looks: Begun, steps: Steps) -> None:
    looks.add(ID)
    running = steps.stalled(looks.plan(), 1)
    looks.add(ID)
    assert running is not None
    resume(running)
    assert looks.pending


def test_look_that_fails_is_left_to_whoever_ticks(
    looks: Begun, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    looks.add(ID)
    steps.run(looks.plan(), lost_request(0))
    assert not looks.pending
    assert "a worker will check it later: no answer" in caplog.text


def test_process_remembers_few_gathers(
    looks: Begun, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_MAX_KNOWN", 1)
    steps.run(gathering.begin(Content(None, "open", id="open"), Route("report")))
    for id in (ID, "open", "gone", ID):
        looks.add(id)
        steps.run(looks.plan())
    assert len(looks._known) <= 2


def test_closed_client_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: Plan[None]) -> None:
        plan.close()
        raise QueueClosed("the client was closed")

    monkeypatch.setattr(looking, "_SOON_S", 0)
    looks = ThreadLooks(run)
    looks.add(ID)
    eventually(lambda: not looks.pending and not looks._working.locked(), "the end of the thread")


def test_system_without_threads_looks_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[Plan[None]] = []
    monkeypatch.setattr(looking, "_SOON_S", 0)

    def run(plan: Plan[None]) -> None:
        ran.append(plan)
        later._pending.clear()

    later = ThreadLooks(run)
    with monkeypatch.context() as without:
        without.setattr(_thread, "start_new_thread", refuse)
        later.add(ID)
    assert (later.pending, ran) == (True, [])
    later.add(ID)
    eventually(lambda: ran and not later._working.locked(), "a look")
