"""How a run goes: what is in progress, leases, stopping, ending."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
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
    RetryLater,
    Unavailable,
    Worker,
)
from tests.integration.eventually import async_until, until
from tests.pipeline.conftest import Place, Running, adds_up

LONG = 20.0


class Gate:
    """Handlers that wait to be let through, of both kinds."""

    def __init__(self, awaited: bool) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.cancelled: list[Any] = []
        self.open = threading.Event()
        self.handler: Any = self._awaited if awaited else self._plain

    def _plain(self, payload: Any, delivery: Delivery[Any]) -> None:
        self.begun.append(payload)
        deadline = time.monotonic() + LONG
        while not self.open.wait(0.002):
            assert time.monotonic() < deadline
            if delivery.lost:
                self.cancelled.append(payload)
                return
        self.ended.append(payload)

    async def _awaited(self, payload: Any, delivery: Delivery[Any]) -> None:
        self.begun.append(payload)
        deadline = time.monotonic() + LONG
        try:
            while not self.open.is_set():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            assert delivery.lost
            self.cancelled.append(payload)
            raise
        self.ended.append(payload)


@pytest.fixture
def gate(awaited: bool) -> Gate:
    return Gate(awaited)


def busy(place: Place, gate: Gate, **options: Any) -> Running:
    """A worker on the queue "in", with a handler at work."""
    settings = {
        name: options.pop(name)
        for name in ("lease", "time_limit", "backoff", "concurrency")
        if name in options
    }
    running = place.start(
        lambda client: Worker(client, concurrency=settings.pop("concurrency", 2)).on(
            "in", gate.handler, **settings
        ),
        **options,
    )
    until(lambda: gate.begun)
    return running


# ---- until_empty


def test_a_run_until_empty_ends_at_once_when_there_is_nothing(place: Place) -> None:
    report = place.run(lambda client: Worker(client).on("in", print), until_empty=True)
    assert report.stages["in"]["in"] == 0
    assert report.seconds < LONG / 2


def test_until_empty_waits_for_what_is_retried_and_what_is_scheduled(place: Place) -> None:
    tries: list[Any] = []

    def work(payload: Any, delivery: Delivery[Any]) -> None:
        tries.append(payload)
        if payload == "again" and tries.count("again") < 3:
            raise OSError

    place.queue("in").push("again")
    place.queue("in").push("later", delay=0.3)
    report = place.run(
        lambda client: Worker(client).on("in", work, backoff=Backoff(base=0.1)), until_empty=True
    )
    assert sorted(tries) == ["again", "again", "again", "later"]
    assert (report.stages["in"]["retried"], report.stages["in"]["out"]) == (2, 2)


def test_until_empty_waits_for_what_another_holds(server: Place) -> None:
    """A lease of another process that runs out brings its message here."""
    server.queue("in").push("x")
    assert server.queue("in").reserve(5, lease=0.3)
    seen: list[Any] = []
    server.run(lambda client: Worker(client).on("in", seen.append), until_empty=True)
    assert seen == ["x"]


def test_cycles_run_when_asked_to(place: Place) -> None:
    from pyqueue import To

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
    assert report.stages["check"] == dict.fromkeys(report.stages["check"], 0) | {
        "in": 15,
        "out": 13,
        "dropped": 2,
    }


def test_until_empty_goes_on_while_nobody_knows_whether_anything_is_left(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AsyncQueue.next_when
    failed: list[int] = []

    async def fail(self: Any) -> Any:
        if len(failed) < 2:
            failed.append(1)
            raise Unavailable("no answer")
        return await real(self)

    monkeypatch.setattr(AsyncQueue, "next_when", fail)
    place.queue("in").push("x", delay=0.2)
    report = place.run(
        lambda client: Worker(client).on("in", lambda payload: None), until_empty=True
    )
    assert report.stages["in"]["out"] == 1
    assert len(failed) == 2


# ---- how many at once


def test_no_more_handlers_than_places_at_once(server: Place, awaited: bool) -> None:
    """Each waits until its stage, or for "a" the worker, has had as many at work as may be."""
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
            until(full[name])
            leave(name)

        async def carried(payload: Any) -> None:
            enter(name)
            await async_until(full[name])
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


def test_what_cannot_begin_with_half_of_its_lease_is_given_back_unworked(
    server: Place, gate: Gate
) -> None:
    """So that nothing is worked on under a lease that lapsed, nor waits for a slow handler while others are idle."""
    server.queue("a").push("first")
    options: dict[str, Any] = {"lease": 0.6}
    running = server.start(
        lambda client: (
            Worker(client, concurrency=1)
            .on("a", gate.handler, **options)
            .on("b", gate.handler, **options)
        )
    )
    until(lambda: gate.begun)
    queue = server.queue("b")
    queue.push("second")  # "b" asked when the place was free
    until(lambda: running.counters("b")["released"] == 1)
    (waiting,) = queue.peek()
    assert (waiting.payload, waiting.tries) == ("second", 0)
    assert gate.begun == ["first"]
    gate.open.set()
    until(lambda: running.counters("b")["out"] == 1)
    running.stop()
    assert running.join().stages["b"]["in"] == 1


def test_what_cannot_be_given_back_comes_again_when_its_lease_ends(
    server: Place, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AsyncQueue.release
    failed: list[Any] = []

    async def fail(self: Any, *reservations: Any) -> None:
        if not failed:
            failed.extend(each.payload for each in reservations)
            raise Unavailable("no answer")
        await real(self, *reservations)

    monkeypatch.setattr(AsyncQueue, "release", fail)
    server.queue("a").push("first")
    options: dict[str, Any] = {"lease": 0.6}
    running = server.start(
        lambda client: (
            Worker(client, concurrency=1)
            .on("a", gate.handler, **options)
            .on("b", gate.handler, **options)
        )
    )
    until(lambda: gate.begun)
    server.queue("b").push("second")
    until(lambda: failed)
    assert (failed, gate.begun) == (["second"], ["first"])
    gate.open.set()
    until(lambda: running.counters("b")["out"] == 1)
    running.stop()
    running.join()
    assert gate.ended == ["first", "second"]


def test_no_more_is_taken_than_can_begin(server: Place, gate: Gate) -> None:
    server.queue("in").push_many(range(20))
    running = busy(server, gate, concurrency=3)
    until(lambda: len(gate.begun) == 3)
    other = server.queue("in")
    assert other.counts().ready == 17
    assert len(other.reserve_many(20, timeout=5)) == 17
    gate.open.set()
    until(lambda: running.counters("in")["out"] == 3)
    running.stop()
    running.join()


def test_a_paused_stage_holds_only_itself(place: Place) -> None:
    seen: list[Any] = []
    place.queue("held").push("held")
    place.queue("held").pause()
    running = place.start(
        lambda client: Worker(client).on("held", seen.append).on("free", seen.append)
    )
    place.queue("free").push_many([1, 2, 3])
    until(lambda: sorted(map(str, seen)) == ["1", "2", "3"])
    place.queue("held").resume()
    until(lambda: "held" in seen)
    running.stop()
    running.join()


# ---- leases


def test_leases_are_renewed_while_handlers_work(server: Place, gate: Gate) -> None:
    server.queue("in").push("x")
    running = busy(server, gate, lease=0.3)
    begun = server.queue("in").next_when()
    assert begun is not None
    until(lambda: (server.queue("in").next_when() or begun) > begun + timedelta(seconds=0.6))
    gate.open.set()
    until(lambda: running.counters("in")["out"] == 1)
    running.stop()
    assert running.join().stages["in"]["lost"] == 0


def test_a_handler_whose_lease_is_lost_is_cancelled_or_told_and_its_result_is_not_applied(
    server: Place, gate: Gate
) -> None:
    server.queue("in").push("x")
    running = busy(server, gate, lease=0.3)
    # Another claim, as after a lapse, by a consumer that keeps it.
    server.raw().update_one({"payload": "x"}, {"$set": {"token": "another's"}})
    until(lambda: gate.cancelled)
    until(lambda: running.counters("in")["lost"] == 1)
    running.stop()
    report = running.join()
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {"in": 1, "lost": 1}
    assert server.raw().find_one({"payload": "x"})["token"] == "another's"
    assert gate.ended == []


def test_a_result_is_not_applied_once_another_holds_the_message(place: Place) -> None:
    """Nobody noticed before: the move is refused, and counted as lost."""

    def steal(payload: Any, delivery: Delivery[Any]) -> Any:
        if delivery.message.tries == 1:
            place.raw().update_one(
                {"payload": "x"}, {"$set": {"token": "another's", "when": delivery.message.pushed}}
            )
        return "moved"

    place.queue("in").push("x")
    report = place.run(
        lambda client: client.pipeline().link("in", steal, to="out"), until_empty=True
    )
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {
        "in": 2,
        "lost": 1,
        "out": 1,
    }
    assert place.payloads("out") == ["moved"]


@pytest.mark.parametrize("failures", [2, 1000])
def test_settling_is_tried_again_while_the_lease_lasts(
    server: Place, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    real = AsyncQueue.commit
    failed: list[Any] = []

    async def fail(self: Any, *reservations: Any, **options: Any) -> None:
        if len(failed) < failures:
            failed.append(reservations[0].tries)
            raise Unavailable("no answer")
        await real(self, *reservations, **options)

    monkeypatch.setattr(AsyncQueue, "commit", fail)
    server.queue("in").push("x")
    running = server.start(lambda client: Worker(client).on("in", lambda payload: None, lease=0.5))
    expected = "out" if failures == 2 else "lost"
    until(lambda: running.counters("in")[expected])
    if failures == 2:
        assert failed == [1, 1]
    else:
        assert failed.count(1) > 1
    running.stop()
    assert adds_up(running.join())


def test_a_server_that_does_not_answer_is_asked_again(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AsyncQueue.reserve_many
    failed: list[Any] = []

    async def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        if len(failed) < 2:
            failed.append(1)
            raise Unavailable("no answer")
        return await real(self, *arguments, **options)

    monkeypatch.setattr(AsyncQueue, "reserve_many", fail)
    server.queue("in").push("x")
    report = server.run(
        lambda client: Worker(client).on("in", lambda payload: None), until_empty=True
    )
    assert report.stages["in"]["out"] == 1
    assert len(failed) == 2


# ---- time limit


def test_a_handler_that_takes_too_long_is_cancelled_or_abandoned(server: Place, gate: Gate) -> None:
    server.queue("in").push("x")
    running = busy(server, gate, time_limit=0.1, backoff=Backoff(base=LONG))
    until(lambda: gate.cancelled)
    until(lambda: running.counters("in")["retried"] == 1)
    (message,) = list(server.raw().find({"payload": "x"}))
    assert message["error"]["message"] == "the handler took longer than its time limit of 0.1 s"
    gate.open.set()
    running.stop()
    assert running.join().stages["in"]["out"] == 0
    assert gate.ended == []


def test_what_an_abandoned_handler_answers_is_ignored(server: Place) -> None:
    go, gone = threading.Event(), threading.Event()

    def slow(payload: Any, delivery: Delivery[Any]) -> str:
        if delivery.message.tries == 1:
            assert go.wait(LONG)
            with pytest.raises(LeaseLost):
                delivery.checkpoint("late")
            gone.set()
            return "late"
        go.set()
        assert gone.wait(LONG)
        return "in time"

    server.queue("in").push("x")
    options = {"time_limit": 0.3, "backoff": Backoff(base=0)}
    report = server.run(
        lambda client: client.pipeline().link("in", slow, to="out", **options), until_empty=True
    )
    assert server.payloads("out") == ["in time"]
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {
        "in": 2,
        "retried": 1,
        "out": 1,
    }


# ---- stopping


def test_stop_lets_handlers_end_and_takes_nothing_more(place: Place, gate: Gate) -> None:
    place.queue("in").push("first")
    running = busy(place, gate)
    running.stop()
    until(lambda: running.runner._run._stopping)
    place.queue("in").push("second")
    gate.open.set()
    report = running.join()
    assert (gate.begun, gate.ended) == (["first"], ["first"])
    assert report.stages["in"] == dict.fromkeys(report.stages["in"], 0) | {"in": 1, "out": 1}
    assert [(each.payload, each.tries) for each in place.queue("in").peek()] == [("second", 0)]


@pytest.mark.parametrize("how", ["no grace", "a second stop"])
def test_stop_without_grace_gives_everything_back_at_once(
    place: Place, gate: Gate, how: str
) -> None:
    """What a handler had begun is rolled back, its try counted; what none had begun is released, as if never taken."""
    place.queue("in").push_many(["a", "b", "c", "d"])
    running = busy(place, gate, **({"grace": 0} if how == "no grace" else {}))
    until(lambda: len(gate.begun) == 2)
    running.stop()
    if how == "a second stop":
        running.stop()
    report = running.join()
    until(lambda: len(gate.cancelled) == 2)
    assert gate.ended == []
    stage = report.stages["in"]
    assert (stage["in"], stage["retried"]) == (2, 2)
    assert adds_up(report)
    found = {each.payload: (each.tries, each.state) for each in place.queue("in").peek()}
    assert found == {"a": (1, "ready"), "b": (1, "ready"), "c": (0, "ready"), "d": (0, "ready")}


def test_grace_has_an_end(server: Place, gate: Gate) -> None:
    server.queue("in").push("x")
    running = busy(server, gate, grace=0.1)
    running.stop()
    assert running.join().stages["in"]["retried"] == 1
    until(lambda: gate.cancelled)


def test_stop_from_a_handler(place: Place) -> None:
    runners: list[Any] = []

    def build(client: Any) -> Worker:
        worker = Worker(client, concurrency=1).on("in", lambda payload: runners[0].stop())
        runners.append(worker)
        return worker

    place.queue("in").push("x")
    assert place.run(build).stages["in"]["out"] == 1
    runners[0].stop()  # nothing runs: nothing happens


def test_an_idle_run_stops_soon(place: Place) -> None:
    running = place.start(lambda client: Worker(client).on("in", print))
    place.queue("in").push("x")
    until(lambda: running.counters("in")["out"] == 1)
    began = time.monotonic()
    running.stop()
    running.join()
    assert time.monotonic() - began < LONG / 4


def test_cancelling_an_awaited_run_gives_everything_back(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            queue = client.queue("in")
            await queue.push_many(["a", "b"])
            begun = asyncio.Event()

            async def work(payload: Any) -> None:
                begun.set()
                await asyncio.sleep(LONG)

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


def test_a_client_that_is_closed_ends_the_run(url: str) -> None:
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
    until(lambda: worker._run is not None and client.stats.get("commands", 0) > 8)
    client.close()
    thread.join(LONG)
    assert not thread.is_alive()
    assert errors


def test_one_run_at_a_time_and_another_after_it(server: Place) -> None:
    running = server.start(lambda client: Worker(client).on("in", lambda payload: None))

    async def again() -> None:
        await running.runner.run(handle_signals=False)

    with pytest.raises(ConfigurationError, match="is running already"):
        running.runner.run(handle_signals=False) if server.blocking else asyncio.run(again())
    running.stop()
    running.join()

    def build(client: Any) -> Any:
        worker = Worker(client).on("in", lambda payload: None)
        if server.blocking:
            worker.run(until_empty=True, handle_signals=False)
        server.queue("in").push("x")
        return worker

    assert server.run(build, until_empty=True).stages["in"]["out"] == 1


def test_many_messages_and_every_ending(place: Place) -> None:
    """The counters add up, and nothing is lost."""
    from pyqueue import Reject, To

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

    count = 160 if place.server else 80
    place.queue("in").push_many(range(count))
    report = place.run(
        lambda client: (
            client.pipeline()
            .choice("in", route, to=["a", "b"], backoff=Backoff(base=0))
            .sink("a", lambda x: None)
        ),
        until_empty=True,
    )
    assert adds_up(report)
    eighth = count // 8
    expected = {
        "in": count + 2 * eighth,
        "out": 5 * eighth,
        "dropped": eighth,
        "retried": 2 * eighth,
        "dead": 2 * eighth,
    }
    assert report.stages["in"] == {"lost": 0, "released": 0} | expected
    assert place.queue("in.dead").counts().total == 2 * eighth
    assert sorted(place.payloads("b")) == sorted(n for n in range(count) if n % 8 in (0, 6))
    assert report.stages["a"]["out"] == 3 * eighth
