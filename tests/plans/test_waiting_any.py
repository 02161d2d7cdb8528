"""How drivers wait for several queues at once: as a leader of some, as a follower of the rest."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from datetime import timedelta
from typing import Any

import pytest

from pyqueue.clock import Clock
from pyqueue.errors import Unavailable
from pyqueue.requests import Wait
from pyqueue.runtime.waiters import Waiters
from pyqueue.runtime.waiting_any import wait_for_any, wait_for_any_async
from tests.support.eventually import LONG, async_eventually, eventually

FAR = timedelta(hours=1)


class Listens:
    """A listener that a test makes hear."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.closed = False

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 0, "it does not wait in one queue alone"
        heard = self.heard.is_set()
        self.heard.clear()
        return heard


class Alerts(Listens):
    """A listener that gives alerts, as the listeners of our buses do."""

    alert: Callable[[], object] | None = None

    def hear(self) -> None:
        """Hear an event."""
        self.heard.set()
        if self.alert is not None:
            self.alert()


class Scene:
    """Two queues, and how their leaders wait."""

    def __init__(self, *listeners: Listens, answers: bool = True) -> None:
        self.clock = Clock()
        self.queues = [Waiters("a"), Waiters("b")]
        self.listeners = dict(zip(self.queues, listeners, strict=False))
        self.answers = answers
        self.refreshed: list[float] = []
        #: The values that the steps of a leader yield: seconds, or None to refresh the clock.
        self.steps: list[float | None] = [3600.0]

    def waits(self, seconds: float = 3600, deadline: float | None = None) -> list[Wait]:
        """Return a wait in each queue."""
        until = self.clock.now() + timedelta(seconds=seconds)
        return [Wait(each, until, deadline) for each in self.queues]

    def follow(self) -> Waiters:
        """Let another consumer lead in the second queue."""
        assert self.queues[1].enter(print, self.clock.now() + FAR)
        return self.queues[1]

    def led(self, wait: Wait) -> tuple[Any, Generator[float | None, bool, bool]]:
        """Return the listener and the steps of a leader."""

        def steps() -> Generator[float | None, bool, bool]:
            for each in self.steps:
                if (yield each):
                    return self.answers
            return True

        return self.listeners[wait.waiters], steps()

    def refresh(self, seconds: float) -> None:
        """Fail to refresh the clock."""
        self.refreshed.append(seconds)
        raise Unavailable("no answer")

    def run(self, **how: Any) -> bool:
        """Wait in both queues."""
        return wait_for_any(self.waits(**how), self.clock, self.led, self.refresh)

    def count(self) -> list[int]:
        """Return how many consumers wait in each queue."""
        return [each.count for each in self.queues]


def begun(scene: Scene, **how: Any) -> tuple[threading.Thread, list[bool]]:
    """Wait in another thread. Return it once it waits, and the list that gets its answer."""
    answers: list[bool] = []
    before = sum(scene.count())
    thread = threading.Thread(target=lambda: answers.append(scene.run(**how)), daemon=True)
    thread.start()
    eventually(lambda: sum(scene.count()) == before + 2)
    return thread, answers


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("answer", [True, False])
def test_event_of_any_queue_ends_the_wait(at: int, answer: bool) -> None:
    alerts = [Alerts(), Alerts()]
    scene = Scene(*alerts, answers=answer)
    thread, answers = begun(scene)
    eventually(lambda: alerts[at].alert is not None)
    alerts[at].hear()
    thread.join(LONG)
    assert answers == [answer]
    assert scene.count() == [0, 0]
    assert [each.alert for each in alerts] == [None, None]


def test_event_before_the_wait_ends_it() -> None:
    alerts = [Alerts(), Alerts()]
    alerts[1].hear()
    assert Scene(*alerts).run()


def test_listener_without_alerts_is_checked() -> None:
    plain = Listens()
    scene = Scene(Alerts(), plain)
    thread, answers = begun(scene)
    plain.heard.set()
    thread.join(LONG)
    assert answers == [True]


def test_closed_listener_ends_the_wait() -> None:
    scene = Scene(Alerts(), Alerts())
    scene.listeners[scene.queues[0]].closed = True
    scene.steps = [3600.0]
    assert scene.run()


def test_turn_of_a_follower_ends_the_wait() -> None:
    scene = Scene(Alerts())
    other = scene.follow()
    thread, answers = begun(scene)
    other.leave(print, led=True)
    other.wake_next(found=True)
    thread.join(LONG)
    assert answers == [True]
    assert scene.count() == [0, 0]


def test_wait_ends_at_the_time_of_a_leader() -> None:
    scene = Scene(Alerts(), Alerts())
    scene.steps = [0.02]
    assert scene.run()


def test_wait_ends_at_the_deadline_of_a_follower() -> None:
    scene = Scene(Alerts())
    scene.follow()
    began = time.monotonic()
    assert scene.run(deadline=began + 0.05)
    assert time.monotonic() >= began + 0.05


def test_follower_guards_an_earlier_time() -> None:
    scene = Scene(Alerts())
    scene.follow()
    assert scene.run(seconds=0.05)


def test_leader_refreshes_the_clock() -> None:
    """An error of the refresh does not end the wait."""
    scene = Scene(Alerts(), Alerts())
    scene.steps = [0.0, None, 0.0]
    assert scene.run()
    assert scene.refreshed == [5.0, 5.0]


def test_failed_start_leaves_no_consumer_behind() -> None:
    scene = Scene()  # without listeners
    with pytest.raises(KeyError):
        scene.run()
    assert scene.count() == [0, 0]


# ---- in async code


class Leads:
    """Waits as the leader of queues, until a test lets it end."""

    def __init__(self) -> None:
        self.ends: dict[Any, asyncio.Future[bool]] = {}

    def __call__(self, wait: Wait) -> Awaitable[bool]:
        self.ends[wait.waiters] = asyncio.get_running_loop().create_future()
        return self.ends[wait.waiters]


async def begin(scene: Scene, lead: Leads, **how: Any) -> asyncio.Task[bool]:
    """Wait in a task. Return it once it waits."""
    before = sum(scene.count())
    task = asyncio.create_task(wait_for_any_async(scene.waits(**how), scene.clock, lead))
    await async_eventually(lambda: sum(scene.count()) == before + 2)
    return task


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("answer", [True, False])
def test_leader_of_any_queue_ends_the_async_wait(at: int, answer: bool) -> None:
    async def main() -> None:
        scene, lead = Scene(), Leads()
        task = await begin(scene, lead)
        lead.ends[scene.queues[at]].set_result(answer)
        assert await task is answer
        assert scene.count() == [0, 0]
        await async_eventually(lead.ends[scene.queues[1 - at]].cancelled)

    asyncio.run(main())


def test_turn_of_a_follower_ends_the_async_wait() -> None:
    async def main() -> None:
        scene = Scene()
        other = scene.follow()
        task = await begin(scene, Leads())
        other.leave(print, led=True)
        other.wake_next(found=False)
        assert await task
        assert scene.count() == [0, 0]
        scene.follow()
        assert await (await begin(scene, Leads(), deadline=time.monotonic() + 0.05))

    asyncio.run(main())


def test_cancelled_async_wait_leaves_every_queue() -> None:
    """At once, so that another consumer may lead."""

    async def main() -> None:
        scene, lead = Scene(), Leads()
        task = await begin(scene, lead)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scene.count() == [0, 0]
        await async_eventually(lambda: all(each.cancelled() for each in lead.ends.values()))

    asyncio.run(main())


def test_errors_of_leaders_are_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scene, lead = Scene(), Leads()
        task = await begin(scene, lead)
        for each in lead.ends.values():
            each.set_exception(Unavailable("gone"))
        with pytest.raises(Unavailable, match="gone"):
            await task
        assert scene.count() == [0, 0]

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(main())
    assert caplog.text == ""
