"""The drivers keep the estimate of the primary's clock, and prepare a client for all its callers.

There is no database, and the time moves only while a consumer listens to the bus.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

import mongomock
import pymongo
import pytest
from pymongo import _csot
from pymongo.errors import AutoReconnect

import pyqueue
from pyqueue import LeaseLost, QueueClosed, QueueError, Unavailable
from pyqueue.backends import indexes, managing
from pyqueue.backends.transitions import record_id
from pyqueue.requests import (
    Change,
    Command,
    CreateIndex,
    Distinct,
    Find,
    FindAndModify,
    Hello,
    Plan,
    ToTheEnd,
    Update,
)
from pyqueue.runtime.drivers import AsyncDriver, Driver
from tests.plans.runner import message, record, standard
from tests.support.eventually import LONG, async_eventually, eventually
from tests.support.servers import free_port

#: An hour.
STEP_S = 3600.0


class World:
    """A primary, the machine of one client, a message, and a schedule of events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monotonic, self.wall, self.primary = 1000.0, 1.3e9, 1.3e9 + 7
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(time, "time", lambda: self.wall)
        self.sent: Counter[str] = Counter()
        self.message: dict[str, Any] | None = None
        self.pushed_at = 0.0
        self.election = 1
        self.down: Exception | None = None
        #: At these monotonic times, these things happen.
        self.events: list[tuple[float, Callable[[], object]]] = []
        #: Whether the bus works.
        self.bus = True
        self._heard: list[datetime] = []
        #: The ``when`` of the last event.
        self.when: datetime | None = None

    @property
    def now(self) -> datetime:
        """The primary's time."""
        return datetime.fromtimestamp(int(self.primary * 1000) / 1000, UTC)

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        self.events.append((1000 + seconds, act))
        self.events.sort(key=lambda event: event[0])

    def move(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds
        self.primary += seconds

    def suspend(self, seconds: float) -> None:
        """The machine sleeps: its monotonic clock stands still."""
        self.wall += seconds
        self.primary += seconds

    def set_primary_clock(self, seconds: float) -> None:
        self.primary += seconds

    def push(self) -> None:
        """Another client, whose clock is right, pushes a message."""
        self.pushed_at = self.monotonic
        now = self.now
        self.message = message("m1", pushed=now, when=now, due=now)
        if self.bus:
            self._heard.append(now)

    def listen(self, seconds: float) -> bool:
        """Let the time pass until an event is heard or ``seconds`` have passed."""
        assert self.monotonic < 100_000, "the consumer hears nothing"
        end = self.monotonic + seconds
        while not self._heard and self.events and self.events[0][0] <= end:
            moment, act = self.events.pop(0)
            self.move(max(0.0, moment - self.monotonic))
            act()
        if not self._heard:
            self.move(end - self.monotonic)
            return False
        self.when = min(self._heard)
        self._heard.clear()
        return True

    def answer(self, request: Command[Any]) -> Any:
        """Answer a command."""
        self.sent[type(request).__name__] += 1
        self.move(0.001)
        if isinstance(request, Hello):
            if self.down is not None:
                raise Unavailable("down") from self.down
            return {"localTime": self.now, "setName": "s", "me": "m", "electionId": self.election}
        if isinstance(request, FindAndModify) and "when" in request.filter:
            found = self.message
            if found is not None and found["when"] <= request.filter["when"]["$lte"]:
                assert request.update is not None
                return found | {"tries": 1} | dict(request.update["$set"])
            return None
        if isinstance(request, Find):
            wants_record = request.filter.get("_id") == record_id("a")
            return [record()] if wants_record else []
        if isinstance(request, Distinct):  # no queue has handovers to finish
            return ["a"]
        assert isinstance(request, (CreateIndex, FindAndModify, Update)), request
        return Change(0, None) if isinstance(request, Update) else None


class Listener:
    """Hears the events of the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def when(self) -> datetime | None:
        return self._world.when

    def close(self) -> None:
        pass


class BlockingListener(Listener):
    def wait(self, timeout: float) -> bool:
        return self._world.listen(timeout)

    def __enter__(self) -> BlockingListener:
        return self


class TaskListener(Listener):
    async def wait(self, timeout: float) -> bool:
        await asyncio.sleep(0)
        return self._world.listen(timeout)

    async def __aenter__(self) -> TaskListener:
        return self


class Bus:
    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def listen(self, topic: str) -> Listener:
        return self.listener


class WorldDriver(Driver):
    world: World

    def ask(self, request: Command[Any]) -> Any:
        self.check_usable()
        try:
            return self.world.answer(request)
        except Unavailable as error:
            return self._failed(request, error)


class AsyncWorldDriver(AsyncDriver):
    world: World

    async def ask(self, request: Command[Any]) -> Any:
        self.check_usable()
        await asyncio.sleep(0)
        try:
            return self.world.answer(request)
        except Unavailable as error:
            return self._failed(request, error)


class Client:
    """Runs plans on one of the drivers."""

    def __init__(self, world: World, kind: str) -> None:
        self.runner = asyncio.Runner()
        blocks = kind == "blocking"
        listener = BlockingListener(world) if blocks else TaskListener(world)
        bus: Any = Bus(listener)
        make: Any = WorldDriver if blocks else AsyncWorldDriver
        self.driver: Any = make(
            mongomock.MongoClient()["db"],
            "pyqueue",
            bus=bus,
            durability="majority",
            timeout=30,
            topic="t",
        )
        self.driver.memory = False  # its primary can be asked for its time
        self.driver.world = world

    def run(self, plan: Plan[Any]) -> Any:
        if isinstance(self.driver, Driver):
            return self.driver.run(plan)
        return self.runner.run(self.driver.run(plan))

    def receive(self, *, poll: float = 15.0, timeout: float | None = None) -> Any:
        waiters = self.driver.waiters("a")
        return self.run(standard(poll=poll).receive(waiters, 1, timeout=timeout))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(params=["blocking", "async"])
def client(world: World, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(world, request.param)
    with client.runner:
        yield client


# ---- the clock of a client that waits


@pytest.mark.parametrize("poll", [1.0, 15.0])
@pytest.mark.parametrize("bus", [True, False], ids=["bus", "no-bus"])
@pytest.mark.parametrize("step", [STEP_S, -STEP_S, 20.0, -20.0])
def test_waiting_consumer_follows_the_primary_clock(
    world: World, client: Client, poll: float, bus: bool, step: float
) -> None:
    """The next push after the client has asked for the time arrives as ever."""
    world.bus = bus
    world.at(40, lambda: world.set_primary_clock(step))
    world.at(56, world.push)  # it asks within 15 s
    (held,) = client.receive(poll=poll)
    assert held.id == "m1"
    assert world.monotonic - world.pushed_at <= poll + 1


@pytest.mark.parametrize("poll", [1.0, 15.0])
def test_consumer_receives_at_once_after_a_suspend(
    world: World, client: Client, poll: float
) -> None:
    """Its monotonic clock is 20 s behind. The event that it hears is no message of the future."""
    world.at(40, lambda: world.suspend(20))
    world.at(40, world.push)
    client.receive(poll=poll)
    assert world.monotonic - world.pushed_at <= 1


def test_idle_consumer_asks_for_the_time_only(world: World, client: Client) -> None:
    world.at(20, world.sent.clear)
    sent = Counter[str]()
    world.at(320, lambda: sent.update(world.sent))
    world.at(320, world.push)
    client.receive(poll=STEP_S)
    assert 300 / 15.1 - 1 <= sent["Hello"] <= 300 / 10 + 1
    assert sent["CreateIndex"] == 0
    assert sent["Distinct"] <= 300 / 30


def test_samples_that_agree_cost_one_command(world: World, client: Client) -> None:
    client.run(managing.ping())
    assert world.sent == {"Hello": 5, "CreateIndex": len(indexes.INDEXES)}
    world.sent.clear()
    for _ in range(3):
        client.run(managing.ping())
    assert world.sent == {}
    for step, hellos in ((0.0, 1), (0.0, 1), (0.5, 5), (0.0, 1)):
        world.move(15.1)
        world.set_primary_clock(step)
        client.run(managing.ping())
        assert world.sent == {"Hello": hellos}
        world.sent.clear()
        assert abs((client.driver.clock.now() - world.now).total_seconds()) < 0.01


def test_new_primary_is_prepared_again(world: World, client: Client) -> None:
    client.receive(timeout=0)
    world.sent.clear()
    world.move(15.1)
    world.election = 2
    client.receive(timeout=0)
    assert world.sent["CreateIndex"] == len(indexes.INDEXES)
    world.sent.clear()
    world.move(15.1)
    client.receive(timeout=0)
    assert world.sent["CreateIndex"] == 0


def test_waiting_consumer_scans_at_once_after_a_fail_over(world: World, client: Client) -> None:
    """The new primary may not know of a claim: the message is ready again, without a signal."""
    world.bus = False

    def fail_over() -> None:
        world.election = 2
        world.push()

    world.at(200, fail_over)
    client.receive(poll=STEP_S)
    assert world.monotonic - world.pushed_at <= 16


@pytest.mark.parametrize("step", [STEP_S, -STEP_S])
def test_timeout_lasts_as_long_whatever_the_primary_clock(
    world: World, client: Client, step: float
) -> None:
    world.at(3, lambda: world.set_primary_clock(step))
    began = world.monotonic
    assert client.receive(timeout=40, poll=STEP_S) == []
    assert 40 <= world.monotonic - began < 40.1


def test_waiting_survives_a_primary_that_gives_no_time(world: World, client: Client) -> None:
    counts: list[int] = []

    def down() -> None:
        world.sent.clear()
        world.down = AutoReconnect("gone")

    def up() -> None:
        counts.append(world.sent["Hello"])
        world.down = None
        world.push()

    world.at(100, down)
    world.at(130, up)
    client.receive(poll=STEP_S)
    assert 5 <= counts[0] <= 40  # every 2 to 3 s, not all the time
    assert world.monotonic - world.pushed_at <= 1


# ---- one preparation for all callers


class Gate:
    """Holds the first ``hello`` until the test opens the gate, and may make it fail."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.reached = world, threading.Event()
        self.opened = threading.Event()
        self.error: BaseException | None = None
        self._answer = world.answer
        monkeypatch.setattr(world, "answer", self.answer)

    def answer(self, request: Command[Any]) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self._answer(request)


class HeldDriver(WorldDriver):
    gate: Gate

    def ask(self, request: Command[Any]) -> Any:
        self.gate.reached.set()
        assert self.gate.opened.wait(LONG)
        return super().ask(request)


class AsyncHeldDriver(AsyncWorldDriver):
    gate: Gate

    async def ask(self, request: Command[Any]) -> Any:
        self.gate.reached.set()
        await async_eventually(self.gate.opened.is_set)
        return await super().ask(request)


def held_driver(world: World, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    driver = Client(world, kind).driver
    driver.__class__ = HeldDriver if kind == "blocking" else AsyncHeldDriver
    driver.gate = Gate(world, monkeypatch)
    return driver


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a factory of drivers of a kind, in real time."""
    world = World(monkeypatch)
    monkeypatch.undo()
    return lambda kind: held_driver(world, kind, monkeypatch)


FAILURES = pytest.mark.parametrize(
    ("failure", "raised"), [(Unavailable("down"), Unavailable), (QueueClosed("it"), QueueClosed)]
)


def test_cancelled_caller_does_not_end_the_preparation(held: Any) -> None:
    async def main() -> None:
        driver = held("async")
        tasks = [asyncio.create_task(driver.run(managing.ping())) for _ in range(10)]
        await async_eventually(driver.gate.reached.is_set)
        for task in tasks[:5]:
            task.cancel()
        await asyncio.wait(tasks[:5])
        driver.gate.opened.set()
        await asyncio.gather(*tasks[5:])
        assert driver.gate.world.sent["Hello"] == 5

    asyncio.run(main())


def test_error_that_no_caller_waits_for_is_not_logged(held: Any) -> None:
    """A cancelled caller leaves a plan to its end. If it fails then, asyncio logs nothing."""
    logged: list[Any] = []

    def failing() -> Plan[None]:
        yield Find({})
        raise LeaseLost("another consumer has it")

    def settling() -> Plan[None]:
        yield ToTheEnd(failing())

    async def main() -> None:
        driver = held("async")
        asyncio.get_running_loop().set_exception_handler(lambda _, each: logged.append(each))
        driver.gate.opened.set()
        await driver.run(managing.ping())
        driver.gate.opened.clear()
        driver.gate.reached.clear()
        caller = asyncio.create_task(driver.run(settling()))
        await async_eventually(driver.gate.reached.is_set)
        caller.cancel()
        await asyncio.wait([caller])
        driver.gate.opened.set()
        await async_eventually(lambda: not driver.coalescer.tasks)
        gc.collect()

    asyncio.run(main())
    assert logged == []


@FAILURES
def test_async_callers_share_the_failure_of_the_preparation(
    held: Any, failure: QueueError, raised: type[QueueError]
) -> None:
    async def main() -> None:
        driver = held("async")
        driver.gate.error = failure
        tasks = [asyncio.create_task(driver.run(managing.ping())) for _ in range(3)]
        await async_eventually(driver.gate.reached.is_set)
        driver.gate.opened.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [raised] * 3
        await driver.run(managing.ping())  # nothing is remembered of the failure

    asyncio.run(main())


def test_closing_ends_the_preparation(held: Any) -> None:
    async def main() -> None:
        driver = held("async")
        tasks = [asyncio.create_task(driver.run(managing.ping())) for _ in range(3)]
        await async_eventually(driver.gate.reached.is_set)
        await driver.settled()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [QueueClosed] * 3

    asyncio.run(main())


def test_task_leaves_the_preparation_at_its_deadline(held: Any) -> None:
    async def main() -> None:
        driver = held("async")
        patient = asyncio.create_task(driver.run(managing.ping()))
        await async_eventually(driver.gate.reached.is_set)
        for _ in range(2):
            with pymongo.timeout(0.01), pytest.raises(Unavailable, match="in time"):
                await driver.run(managing.ping())
        driver.gate.opened.set()
        await patient
        assert driver.gate.world.sent["Hello"] == 5

    asyncio.run(main())


def test_thread_leaves_the_preparation_at_its_deadline(held: Any) -> None:
    driver = held("blocking")
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(driver.run, managing.ping())
        eventually(driver.gate.reached.is_set)
        with pymongo.timeout(0.01), pytest.raises(Unavailable, match="in time"):
            driver.run(managing.ping())
        driver.gate.opened.set()
        assert patient.result(LONG) is None
    assert driver.gate.world.sent["Hello"] == 5


def test_deadline_of_the_preparing_thread_is_its_own(held: Any) -> None:
    """Another thread then prepares, and gets no error."""
    driver = held("blocking")
    driver.gate.error = Unavailable("late")
    limits: list[float] = []
    ask = driver.ask

    def limited() -> None:
        with pymongo.timeout(5):
            driver.run(managing.ping())

    def noting(request: Command[Any]) -> Any:
        limits.append(_csot.remaining() or 0.0)
        return ask(request)

    driver.ask = noting
    with ThreadPoolExecutor(3) as pool:
        first, *rest = callers(driver, pool, limited)
        assert isinstance(first.exception(LONG), Unavailable)
        assert [each.result(LONG) for each in rest] == [None, None]
    assert 1 < limits[0] <= 5 < limits[1]


@pytest.mark.parametrize("cls", [pyqueue.Client, pyqueue.AsyncClient])
def test_deadline_holds_while_there_is_no_server(cls: Any) -> None:
    async def ask(client: Any) -> Any:
        result = client.queue("a").counts()
        return await result if cls is pyqueue.AsyncClient else result

    async def main() -> None:
        client = cls(f"mongodb://127.0.0.1:{free_port()}/x", signals="none:")
        began = time.monotonic()
        for _ in range(2):
            with pymongo.timeout(0.2), pytest.raises(Unavailable):
                await ask(client)
        assert time.monotonic() - began < 10  # the time limit of each command is 30 s
        closing = client.close()
        if closing is not None:
            await closing

    asyncio.run(main())


def callers(
    driver: Any, pool: ThreadPoolExecutor, begin: Callable[[], None] | None = None
) -> list[Future[None]]:
    """Begin a preparation, and let two more threads wait for it."""
    first = pool.submit(begin or partial(driver.run, managing.ping()))
    eventually(driver.gate.reached.is_set)
    rest = [pool.submit(driver.run, managing.ping()) for _ in range(2)]
    eventually(lambda: sum(each.running() for each in rest) == 2)
    time.sleep(0.02)  # so that they wait; the result is the same if they come later
    driver.gate.opened.set()
    return [first, *rest]


def test_interrupted_thread_does_not_end_the_preparation(held: Any) -> None:
    driver = held("blocking")
    driver.gate.error = KeyboardInterrupt()
    with ThreadPoolExecutor(3) as pool:
        first, *rest = callers(driver, pool)
        assert isinstance(first.exception(LONG), KeyboardInterrupt)
        for each in rest:
            assert each.result(LONG) is None
    assert driver.gate.world.sent["Hello"] == 5


@FAILURES
def test_threads_share_the_failure_of_the_preparation(
    held: Any, failure: QueueError, raised: type[QueueError]
) -> None:
    driver = held("blocking")
    driver.gate.error = failure
    with ThreadPoolExecutor(3) as pool:
        first, *rest = (each.exception(LONG) for each in callers(driver, pool))
    assert isinstance(first, raised)
    # A thread that came late has begun a preparation itself, and that one works.
    assert all(each is None or isinstance(each, raised) for each in rest)
    driver.run(managing.ping())
