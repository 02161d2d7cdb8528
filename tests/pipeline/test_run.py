"""Runs: messages in flight, leases, stopping and ending."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import (
    AsyncClient,
    AsyncQueue,
    Backoff,
    Client,
    ConfigurationError,
    Delivery,
    Drop,
    LeaseLost,
    QueueClosed,
    Reject,
    RetryLater,
    To,
    Unavailable,
    Worker,
)
from pyqueue.backends.managing import ping
from pyqueue.pipeline import verdicts
from pyqueue.pipeline.blocking import ClientRunner
from pyqueue.pipeline.running_stage import RunningStage
from pyqueue.pipeline.stopping import watch_signals
from pyqueue.queue_base import backend_of
from pyqueue.runtime.thread_pool import DaemonThreadPool
from tests.pipeline.place import Gate, Place, Running, counted, fail_first
from tests.support.eventually import LONG, async_eventually, eventually

NO_ANSWER = Unavailable("no answer")


def busy(
    place: Place, gate: Gate, *, run: dict[str, Any] | None = None, places: int = 2, **stage: Any
) -> Running:
    """Start a worker on the queue "in", and wait until a handler has begun."""
    running = place.start(
        lambda client: Worker(client, concurrency=places).on("in", gate.handler, **stage),
        **(run or {}),
    )
    eventually(lambda: gate.begun, "a handler that has begun")
    return running


def ignore(payload: Any) -> None:
    """Do nothing with a message."""


# ---- until_empty


def test_until_empty_ends_when_there_is_nothing(place: Place) -> None:
    report = place.run(lambda client: Worker(client).on("in", print), until_empty=True)
    assert counted(report, "in") == {}
    assert report.seconds < LONG


def test_until_empty_waits_for_retried_and_scheduled(place: Place) -> None:
    tries: list[Any] = []

    def work(payload: Any, delivery: Delivery[Any]) -> None:
        tries.append(payload)
        if payload == "again" and tries.count("again") < 3:
            raise OSError

    place.queue("in").push("again")
    place.queue("in").push("later", delay=0.3)
    counters = place.run_worker(work, backoff=Backoff(base=0.1))
    assert sorted(tries) == ["again", "again", "again", "later"]
    assert counters == {"in": 4, "retried": 2, "out": 2}


def test_until_empty_waits_for_another_holder(server: Place) -> None:
    """The lease of another process ends, and its message is handled here."""
    server.queue("in").push("x")
    assert server.queue("in").reserve(5, lease=0.3)
    seen: list[Any] = []
    server.run_worker(seen.append)
    assert seen == ["x"]


def test_until_empty_goes_on_while_the_server_is_silent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_first(monkeypatch, AsyncQueue, "next_when", NO_ANSWER, times=2)
    place.queue("in").push("x", delay=0.2)
    assert place.run_worker(ignore) == {"in": 1, "out": 1}
    assert len(failed) == 2


def test_refused_check_for_the_end_ends_the_run(
    memory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ConfigurationError("the database user may not read this")
    fail_first(monkeypatch, AsyncQueue, "next_when", refused)
    with pytest.raises(ConfigurationError, match="may not read"):
        memory.run_worker(ignore)


def test_cycle_runs_when_allowed(place: Place) -> None:
    place.queue("in").push_many([0, 5])
    report = place.run(
        lambda client: (
            client.pipeline()
            .link("in", lambda x: x + 1, to="check")
            .choice("check", lambda x: To("in") if x < 10 else Drop(), to=["in"])
        ),
        until_empty=True,
        allow_cycles=True,
    )
    assert counted(report, "check") == {"in": 15, "out": 13, "dropped": 2}


def test_cycle_runs_on_while_each_read_misses_its_message(
    memory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message moves on just before each read of a queue, to a queue that was read before."""
    real, moved = AsyncQueue.next_when, threading.Event()

    async def next_when(queue: AsyncQueue[Any]) -> Any:
        moved.clear()
        with suppress(AssertionError):
            await async_eventually(moved.is_set, "a move", seconds=0.5)
        return None if moved.is_set() else await real(queue)

    def check(number: int) -> Any:
        moved.set()
        return To("in", number + 1) if number < 10 else Drop()

    monkeypatch.setattr(AsyncQueue, "next_when", next_when)
    memory.queue("in").push(0)
    report = memory.run(
        lambda client: (
            client.pipeline().link("in", lambda x: x, to="check").choice("check", check, to=["in"])
        ),
        until_empty=True,
        allow_cycles=True,
    )
    assert counted(report, "check") == {"in": 11, "out": 10, "dropped": 1}


# ---- how many at once


def test_concurrency_limits_handlers_at_work(server: Place, awaited: bool) -> None:
    """Each handler waits until its stage, or for "a" the worker, has reached its limit."""
    at_work: Counter[str] = Counter()
    most: Counter[str] = Counter()
    lock = threading.Lock()
    full: dict[str, Callable[[], bool]] = {
        "a": lambda: most["all"] >= 5,
        "b": lambda: most["b"] >= 2,
    }

    def enter(name: str) -> None:
        with lock:
            at_work.update([name, "all"])
            for each in (name, "all"):
                most[each] = max(most[each], at_work[each])

    def leave(name: str) -> None:
        with lock:
            at_work.subtract([name, "all"])

    def make(name: str) -> Any:
        def plain(payload: Any) -> None:
            enter(name)
            eventually(full[name])
            leave(name)

        async def carried(payload: Any) -> None:
            enter(name)
            await async_eventually(full[name])
            leave(name)

        return carried if awaited else plain

    def build(client: Any) -> Worker:
        return Worker(client, concurrency=5).on("a", make("a")).on("b", make("b"), concurrency=2)

    server.queue("a").push_many(range(40))
    server.queue("b").push_many(range(40))
    report = server.run(build, until_empty=True)
    assert [each["out"] for each in report.stages.values()] == [40, 40]
    assert most["all"] == 5
    assert 2 <= most["a"] <= 5
    assert most["b"] == 2


def full_worker(server: Place, gate: Gate) -> Running:
    """Start a worker with one place, which "a" takes while "b" waits for it."""
    server.queue("a").push("first")
    running = server.start(
        lambda client: (
            Worker(client, concurrency=1)
            .on("a", gate.handler, lease=1)
            .on("b", gate.handler, lease=1)
        )
    )
    eventually(lambda: gate.begun)
    server.queue("b").push("second")
    return running


def test_message_that_waits_for_half_its_lease_is_released(server: Place, gate: Gate) -> None:
    """No handler starts under a lease that is about to lapse, and no message waits for long.

    A worker that is idle could handle the message instead.
    """
    running = full_worker(server, gate)
    running.counted("b", "released")
    (waiting,) = server.queue("b").peek()
    assert (waiting.payload, waiting.tries) == ("second", 0)
    assert gate.begun == ["first"]
    gate.open.set()
    running.counted("b", "out")
    assert running.finish().stages["b"]["in"] == 1


def test_message_that_cannot_be_released_comes_again(
    server: Place, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_first(monkeypatch, AsyncQueue, "release", NO_ANSWER)
    running = full_worker(server, gate)
    eventually(lambda: failed)
    assert ([each.payload for each in failed[0]], gate.begun) == (["second"], ["first"])
    gate.open.set()
    running.counted("b", "out")
    running.finish()
    assert gate.ended == ["first", "second"]


def test_worker_reserves_no_more_than_can_start(server: Place, gate: Gate) -> None:
    server.queue("in").push_many(range(20))
    running = busy(server, gate, places=3)
    eventually(lambda: len(gate.begun) == 3)
    other = server.queue("in")
    assert other.counts().ready == 17
    assert len(other.reserve_many(20, timeout=5)) == 17
    gate.open.set()
    running.counted("in", "out", 3)
    running.finish()


def test_paused_stage_holds_only_itself(place: Place) -> None:
    seen: list[Any] = []
    place.queue("held").push("held")
    place.queue("held").pause()
    running = place.start(
        lambda client: Worker(client).on("held", seen.append).on("free", seen.append)
    )
    place.queue("free").push_many([1, 2, 3])
    eventually(lambda: sorted(map(str, seen)) == ["1", "2", "3"])
    place.queue("held").resume()
    eventually(lambda: "held" in seen)
    running.finish()


# ---- leases


def test_lease_is_renewed_while_the_handler_works(server: Place, awaited: bool, gate: Gate) -> None:
    """With a second place, the worker would claim the message if this machine slept."""
    server.queue("in").push("x")
    running = busy(server, gate, places=1, lease=0.9)
    begun = server.queue("in").next_when()
    assert begun is not None
    after = begun + timedelta(seconds=0.6)
    eventually(lambda: (server.queue("in").next_when() or begun) > after, "two renewals")
    gate.open.set()
    running.counted("in", "out")
    assert counted(running.finish(), "in") == {"in": 1, "out": 1}


def test_lost_lease_cancels_the_handler(server: Place, awaited: bool, gate: Gate) -> None:
    """A handler in a thread sees it in its delivery. The result is not applied."""
    server.queue("in").push("x")
    running = busy(server, gate, places=1, lease=0.9)
    server.take_over(gate.deliveries[0])
    eventually(lambda: gate.cancelled)
    running.counted("in", "lost")
    assert counted(running.finish(), "in") == {"in": 1, "lost": 1}
    assert server.collection().find_one({"payload": "x"})["token"] == "another's"
    assert gate.ended == []


def test_result_is_not_applied_after_the_lease_was_lost(place: Place) -> None:
    """The loss is noticed by the move, which the token refuses."""

    def steal(payload: Any, delivery: Delivery[Any]) -> Any:
        if delivery.message.tries == 1:
            place.steal(delivery)
        return "moved"

    place.queue("in").push("x")
    counters = place.run_stage(steal, stage="link", to="out")
    assert counters == {"in": 2, "lost": 1, "out": 1}
    assert place.payloads("out") == ["moved"]


@pytest.mark.parametrize(("failures", "end"), [(2, "out"), (100_000, "lost")])
def test_settling_is_retried_while_the_lease_lasts(
    server: Place, monkeypatch: pytest.MonkeyPatch, failures: int, end: str
) -> None:
    monkeypatch.setattr(verdicts, "UNAVAILABLE", Backoff(base=0.01, maximum=0.1, jitter=0))
    failed = fail_first(monkeypatch, AsyncQueue, "commit", NO_ANSWER, times=failures)
    server.queue("in").push("x")
    lease = 60 if end == "out" else 1
    running = server.start(lambda client: Worker(client).on("in", ignore, lease=lease))
    running.counted("in", end)
    tries = [message.tries for (message,) in list(failed)]
    if end == "out":
        assert tries == [1, 1]
    else:
        assert tries.count(1) > 1
    counted(running.finish(), "in")


def test_receiving_is_retried_while_the_server_is_silent(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_first(monkeypatch, RunningStage, "reserve", NO_ANSWER, times=2)
    server.queue("in").push("x")
    assert server.run_worker(ignore) == {"in": 1, "out": 1}
    assert len(failed) == 2


# ---- time limit


def test_time_limit_cancels_the_handler(server: Place, awaited: bool, gate: Gate) -> None:
    """A handler in a thread is abandoned."""
    server.queue("in").push("x")
    running = busy(server, gate, time_limit=0.1, backoff=Backoff(base=3600))
    eventually(lambda: gate.cancelled)
    running.counted("in", "retried")
    (message,) = list(server.collection().find({"payload": "x"}))
    assert message["error"]["message"] == "the handler took longer than its time limit of 0.1 s"
    gate.open.set()
    assert counted(running.finish(), "in") == {"in": 1, "retried": 1}
    assert gate.ended == []


def test_answer_of_an_abandoned_handler_is_ignored(server: Place) -> None:
    """The first try ends late. A gate keeps the run open until then."""
    late = threading.Event()

    def slow(payload: Any, delivery: Delivery[Any]) -> str:
        if payload == "gate":
            assert late.wait(LONG)
        elif delivery.message.tries == 1:
            eventually(lambda: delivery.lost)
            with pytest.raises(LeaseLost):
                delivery.checkpoint("late")
            late.set()
            return "late"
        return "in time"

    server.queue("in").push("x")
    server.queue("gate").push("gate")
    options: dict[str, Any] = {"time_limit": 0.5, "backoff": Backoff(base=0)}
    report = server.run(
        lambda client: client.pipeline().link("in", slow, to="out", **options).sink("gate", slow),
        until_empty=True,
    )
    assert server.payloads("out") == ["in time"]
    assert counted(report, "in") == {"in": 2, "retried": 1, "out": 1}


# ---- stopping


def test_stop_lets_handlers_end_and_reserves_nothing(place: Place, gate: Gate) -> None:
    place.queue("in").push("first")
    running = busy(place, gate)
    running.stop()
    eventually(lambda: running.runner._run._stopping)
    place.queue("in").push("second")
    gate.open.set()
    assert counted(running.join(), "in") == {"in": 1, "out": 1}
    assert (gate.begun, gate.ended) == (["first"], ["first"])
    assert [(each.payload, each.tries) for each in place.queue("in").peek()] == [("second", 0)]


@pytest.mark.parametrize("how", ["no grace", "a second stop"])
def test_stop_without_grace_gives_everything_back(place: Place, gate: Gate, how: str) -> None:
    """A message that a handler had begun is rolled back, and its try counts.

    A message that no handler had begun is released, as if it had never been reserved.
    """
    place.queue("in").push_many(["a", "b", "c", "d"])
    running = busy(place, gate, run={"grace": 0} if how == "no grace" else {})
    eventually(lambda: len(gate.begun) == 2)
    running.stop()
    if how == "a second stop":
        running.stop()
    report = running.join()
    eventually(lambda: len(gate.cancelled) == 2)
    assert gate.ended == []
    assert counted(report, "in").items() >= {"in": 2, "retried": 2}.items()
    found = {each.payload: (each.tries, each.state) for each in place.queue("in").peek()}
    assert found == {"a": (1, "ready"), "b": (1, "ready"), "c": (0, "ready"), "d": (0, "ready")}


def test_stop_waits_for_the_grace_only(server: Place, awaited: bool, gate: Gate) -> None:
    server.queue("in").push("x")
    running = busy(server, gate, run={"grace": 0.1})
    assert counted(running.finish(), "in") == {"in": 1, "retried": 1}
    eventually(lambda: gate.cancelled)


def test_stop_from_a_handler(place: Place) -> None:
    runners: list[Any] = []

    def build(client: Any) -> Worker:
        worker = Worker(client, concurrency=1).on("in", lambda payload: runners[0].stop())
        runners.append(worker)
        return worker

    place.queue("in").push("x")
    assert place.run(build).stages["in"]["out"] == 1
    runners[0].stop()  # there is no run now, so nothing happens


def test_stop_ends_an_idle_run_at_once(place: Place) -> None:
    """It does not wait for the poll."""
    running = place.start(lambda client: Worker(client).on("in", print, poll=3600))
    place.queue("in").push("x")
    running.counted("in", "out")
    running.finish()


def test_cancelled_run_gives_everything_back(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            queue = client.queue("in")
            await queue.push_many(["a", "b"])
            begun = asyncio.Event()

            async def work(payload: Any) -> None:
                begun.set()
                await asyncio.sleep(3600)

            run = asyncio.create_task(
                Worker(client, concurrency=1).on("in", work).run(handle_signals=False)
            )
            await begun.wait()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            found = {each.payload: each.tries for each in await queue.peek()}
            assert found == {"a": 1, "b": 0}

    asyncio.run(main())


def test_closed_client_ends_the_run(url: str) -> None:
    client = Client(url)
    worker = Worker(client).on("in", print)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except QueueClosed as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    client.queue("in").push("x")
    eventually(lambda: worker.counters["in"]["out"], "a message handled")
    client.close()
    thread.join(LONG)
    assert not thread.is_alive()
    assert errors


def test_signals_work_after_a_run() -> None:
    """A handler of the event loop is lost, but the process does not ignore the signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
        interrupted = signal.getsignal(signal.SIGINT)
        watching = asyncio.create_task(watch_signals(print, bool))
        await async_eventually(lambda: signal.getsignal(signal.SIGINT) is not interrupted)
        watching.cancel()
        await asyncio.wait([watching])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is interrupted

    try:
        asyncio.run(main())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_second_run_at_a_time_is_refused(server: Place) -> None:
    running = server.start(lambda client: Worker(client).on("in", ignore))

    async def again() -> None:
        await running.runner.run(handle_signals=False)

    with pytest.raises(ConfigurationError, match="is already running"):
        running.runner.run(handle_signals=False) if server.blocking else asyncio.run(again())
    running.finish()


def test_worker_can_run_again(server: Place) -> None:
    def build(client: Any) -> Any:
        worker = Worker(client).on("in", ignore)
        if server.blocking:
            worker.run(until_empty=True, handle_signals=False)
        server.queue("in").push("x")
        return worker

    assert server.run(build, until_empty=True).stages["in"]["out"] == 1


def test_every_ending_of_many_messages_is_counted(place: Place) -> None:
    """The counters add up, and no message is lost."""

    def route(number: int, delivery: Delivery[int]) -> Any:
        first = delivery.message.tries == 1
        match number % 8:
            case 0 if first:
                raise OSError
            case 1 if first:
                raise RetryLater(0)
            case 2:
                raise Reject("no")
            case 3:
                return Drop()
            case 4:
                return "wrong"
        return To("a" if number % 2 else "b", number)

    count = 80 if place.server else 40
    place.queue("in").push_many(range(count))
    report = place.run(
        lambda client: (
            client.pipeline()
            .choice("in", route, to=["a", "b"], backoff=Backoff(base=0))
            .sink("a", ignore)
        ),
        until_empty=True,
    )
    eighth = count // 8
    assert counted(report, "in") == {
        "in": count + 2 * eighth,
        "out": 5 * eighth,
        "dropped": eighth,
        "retried": 2 * eighth,
        "dead": 2 * eighth,
    }
    assert place.queue("in.dead").counts().total == 2 * eighth
    assert sorted(place.payloads("b")) == sorted(n for n in range(count) if n % 8 in (0, 6))
    assert report.stages["a"]["out"] == 3 * eighth


def test_run_waits_for_plans_that_run_aside() -> None:
    async def main(client: Client) -> None:
        threads = DaemonThreadPool()
        runner = await ClientRunner.open(client, threads)
        await runner.run(ping())
        runner.aside(backend_of(client.queue("in", kind="standard")).pause(True))
        await runner.close()
        threads.close()

    with Client("memory:") as client:
        asyncio.run(main(client))
        assert client.queue("in").paused()


@pytest.mark.parametrize("blocking", [True, False])
def test_run_that_fails_unnoticed_is_logged(
    caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    """A run in a task or in another thread may have no caller that sees its exception."""

    async def main() -> None:
        if blocking:
            with Client("memory:") as client:
                worker = Worker(client, name="mailer").on("in", ignore)
                client.close()
                await asyncio.to_thread(worker.run)
        async with AsyncClient("memory:") as other:
            awaited = Worker(other, name="mailer").on("in", ignore)
            await other.close()
            await awaited.run(handle_signals=False)

    with pytest.raises(QueueClosed):
        asyncio.run(main())
    [record] = [each for each in caplog.records if "has ended" in each.message]
    text = "worker 'mailer' has ended: QueueClosed: the client was closed"
    assert (record.levelname, record.name, record.message) == ("ERROR", "pyqueue", text)


def test_error_of_a_run_in_the_main_thread_is_only_raised(
    caplog: pytest.LogCaptureFixture, offline: Client
) -> None:
    with pytest.raises(ConfigurationError):
        Worker(offline).run()
    assert caplog.records == []
