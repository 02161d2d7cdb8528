"""Workers and pipelines that tick: the schedules of functions and of recipes."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from pyqueue import (
    Client,
    ConfigurationError,
    Delivery,
    Pipeline,
    QueueClosed,
    QueueError,
    Unavailable,
    Worker,
)
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules.definitions import definition
from pyqueue.messages import Backoff
from pyqueue.pipeline import schedules
from pyqueue.pipeline.schedules import keep_ticking
from pyqueue.requests import Find
from pyqueue.runtime.waiters import Waiters
from tests.pipeline.place import Place
from tests.plans.runner import Runner as PlanRunner
from tests.plans.runner import after
from tests.support.eventually import eventually

RECIPE = """
[[stages]]
queue = "in"
handler = "tests.pipeline.stages:store"

[[cron]]
name = "nightly"
queue = "in"
cron = "0 3 * * *"
timezone = "Europe/Berlin"
payload = {kind = "report"}
missed = "skip"
"""


def test_function_runs_at_each_tick(place: Place) -> None:
    ran: Counter[str] = Counter()

    def build(client: Any) -> Worker:
        worker = Worker(client)

        @worker.cron(every=1, name="bare")
        async def bare() -> None:
            ran["bare"] += 1

        @worker.cron(every=1, name="full", queue="work", payload={"n": 1}, lease=30)
        def full(payload: Any, delivery: Delivery[Any]) -> None:
            assert (payload, delivery.message.queue) == ({"n": 1}, "work")
            ran["full"] += 1

        return worker

    running = place.start(build)
    eventually(lambda: ran["bare"] >= 2 and ran["full"] >= 2, "two ticks of each")
    running.finish()
    assert [each.name for each in place.client.schedules()] == ["bare", "full"]


def test_workers_push_one_message_for_each_tick(server: Place) -> None:
    """They hear of a new schedule at once, while they wait."""
    running = [server.start(lambda client: Worker(client).on("other", print)) for _ in range(3)]
    assert server.client.schedule("n", queue="ticks", every=1, overlap=True)
    eventually(lambda: server.queue("ticks").counts().total >= 2, "two ticks", seconds=30)
    for each in running:
        each.finish()
    ticks = [str(id).split(":")[2] for id in server.ids("ticks")]
    assert len(set(ticks)) == len(ticks)
    assert list(server.collection().find({"q": {"$regex": "^~handover"}})) == []


def test_run_until_empty_neither_ticks_nor_stores(place: Place) -> None:
    place.client.schedule("n", queue="ticks", every=60)
    due = {"$set": {"when": datetime.now(UTC)}}
    place.collection().update_one({"_id": "~cron:n"}, due)

    def build(client: Any) -> Worker:
        worker = Worker(client)
        worker.cron("0 3 * * *", name="nightly")(print)
        return worker

    place.run(build, until_empty=True)
    assert [each.name for each in place.client.schedules()] == ["n"]
    assert place.ids("ticks") == []


def test_recipe_stores_its_schedules(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "numbers.toml"
    path.write_text(RECIPE)
    running = place.start(lambda client: Pipeline.from_recipe(client, path))
    eventually(place.client.schedules, "a schedule")
    running.finish()
    (stored,) = place.client.schedules()
    assert (stored.name, stored.queue) == ("nightly", "in")
    assert stored.options == {
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
        "payload": {"kind": "report"},
        "missed": "skip",
        "overlap": False,
        "grace": 60.0,
    }
    path.write_text(RECIPE.replace('missed = "skip"', 'mised = "skip"'))
    with pytest.raises(ConfigurationError, match=r"cron\[0\].mised"):
        Pipeline.from_recipe(place.client, path)


def test_refused_schedule_ends_the_run(memory: Place, tmp_path: Path) -> None:
    path = tmp_path / "numbers.toml"
    path.write_text(RECIPE.replace('"in"\ncron', '"log"\ncron'))
    memory.client.stream("log").append(1)
    with pytest.raises(ConfigurationError, match="queue: 'log' is a stream"):
        memory.run(lambda client: Pipeline.from_recipe(client, path))


def test_schedule_of_a_function_has_its_name(offline: Client) -> None:
    worker = Worker(offline)
    worker.cron("0 3 * * *")(report)
    assert list(worker.graph.stages) == [f"{__name__}:report"]
    with pytest.raises(ConfigurationError, match="cannot be the name of a schedule; set name="):
        worker.cron("0 3 * * *")(lambda: None)
    with pytest.raises(ConfigurationError, match="two schedules are named"):
        worker.cron("0 4 * * *", name=f"{__name__}:report", queue="b")(report)
    with pytest.raises(ConfigurationError, match="cron, every"):
        worker.cron(name="none")(report)


def report() -> None:
    """Do nothing."""


class Server:
    """A runner whose plans end as the test says."""

    def __init__(self, *errors: QueueError) -> None:
        self.errors = list(errors)
        self.began, self.ended = anyio.Event(), False

    def waiters(self, name: str) -> Waiters:
        assert name == SCHEDULES
        return Waiters(name)

    async def run(self, plan: Any) -> Any:
        name = plan.__name__
        plan.close()
        if self.errors:
            raise self.errors.pop(0)
        if name == "tick_each":
            self.began.set()
            await anyio.sleep(0.02)
            self.ended = True
            return set()
        return ["~cron:n"], None


def test_stopped_run_finishes_its_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues after the server did not answer."""
    monkeypatch.setattr(schedules, "_DELAYS", Backoff(base=0.001))

    async def work() -> bool:
        server, failed = (
            Server(Unavailable("no answer"), ConfigurationError("refused")),
            list[Any](),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(keep_ticking, cast("Any", server), [], failed.append))
            await server.began.wait()
            tasks.cancel_scope.cancel()
        assert failed == []
        return server.ended

    assert anyio.run(work)


@pytest.mark.parametrize("number", [0, 1])
def test_only_a_program_with_schedules_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr(schedules, "_DELAYS", Backoff(base=0.001))
    given = [definition("n", "in", "0 3 * * *", {})] * number

    async def work() -> None:
        server = Server(Unavailable("no answer"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(keep_ticking, cast("Any", server), given, print))
            await server.began.wait()
            tasks.cancel_scope.cancel()

    anyio.run(work)
    assert len([each for each in caplog.messages if "no tick" in each]) == number


class Idle:
    """A runner on which time passes at once. The only schedule ticks in a day."""

    def __init__(self, hours: float) -> None:
        self.until = after(3600 * hours)
        self.plans = PlanRunner(*[self.read] * 1000)
        self.plans.on_wait = self.plans.pass_time
        self.waiting = Waiters(SCHEDULES)
        #: When the schedules were read.
        self.reads: list[datetime] = []

    def read(self, request: Find) -> list[dict[str, Any]]:
        self.reads.append(self.plans.now)
        return [{"_id": "~cron:n", "when": after(86_400)}]

    def waiters(self, name: str) -> Waiters:
        assert name == SCHEDULES
        return self.waiting

    async def run(self, plan: Any) -> Any:
        if self.plans.now >= self.until:
            plan.close()
            raise QueueClosed("the time is over")
        return self.plans.run(plan)


def test_idle_worker_reads_schedules_once_in_a_minute() -> None:
    """It sends no other command for them."""
    idle, failed = Idle(hours=3), list[Any]()
    anyio.run(keep_ticking, cast("Any", idle), [], failed.append)
    gaps = [(later - read).total_seconds() for read, later in pairwise(idle.reads)]
    assert min(gaps) >= 60
    assert max(gaps) <= 90
    assert 3 * 40 <= len(idle.reads) <= 3 * 60 + 1
    assert len(idle.plans.commands) == len(idle.reads)
    assert failed == []
