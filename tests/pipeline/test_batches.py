"""Handlers that take batches: their arguments, their answers, and the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pyqueue import (
    AsyncClient,
    AsyncQueue,
    Backoff,
    BatchFailed,
    Client,
    Delivery,
    Drop,
    Many,
    Pipeline,
    Reject,
    RetryLater,
    To,
    Unavailable,
    Worker,
)
from pyqueue.pipeline import verdicts
from pyqueue.pipeline.running_stage import RunningStage
from tests.pipeline.place import LONG_LEASE, Gate, Place, Running, counted
from tests.support.eventually import async_eventually, eventually

NOW = Backoff(base=0)
#: A stage that tries a failed message again at once.
LINK: dict[str, Any] = {"stage": "link", "to": "a", "backoff": NOW}
#: A window that outlives any test.
FOREVER: dict[str, Any] = {"window": 3600, "lease": LONG_LEASE}


class Calls:
    """A handler of batches that keeps the arguments of its calls and answers by a function."""

    def __init__(self, place: Place, answer: Callable[..., Any] = lambda rows, tries: None) -> None:
        self.batches: list[list[Any]] = []
        self.tries: list[list[int]] = []
        self.errors: list[str] = []
        self._answer = answer
        self.handler = place.handler(self._handle)

    def _handle(self, rows: list[Any], deliveries: list[Delivery[Any]]) -> Any:
        assert rows == [each.message.payload for each in deliveries]
        self.batches.append(rows)
        self.tries.append([each.message.tries for each in deliveries])
        self.errors += [str(each.message.error) for each in deliveries if each.message.error]
        return self._answer(rows, self.tries[-1][0])

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.batches]


def watch(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, int]]:
    """Return a list that grows by the name of each call to settle, and its number of messages."""
    calls: list[tuple[str, int]] = []

    def watched(name: str) -> Any:
        real = getattr(AsyncQueue, name)

        def method(self: Any, *messages: Any, **options: Any) -> Any:
            messages = messages[0] if name == "move_many" else messages
            calls.append((name, len(messages)))
            return real(self, *([messages] if name == "move_many" else messages), **options)

        return method

    for name in ("commit", "move_many", "rollback", "bury", "release"):
        monkeypatch.setattr(AsyncQueue, name, watched(name))
    return calls


# ---- the batches of a handler


def test_batches_are_lists_in_order(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, settled = Calls(place), watch(monkeypatch)
    place.queue("in").push_many(range(7))
    counters = place.run_stage(calls.handler, stage="sink", to=(), batch=3, concurrency=1)
    assert counters == {"in": 7, "out": 7}
    assert calls.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert settled == [("commit", 3), ("commit", 3), ("commit", 1)]


def test_worker_decorates_a_handler_of_batches(memory: Place) -> None:
    seen: list[Any] = []

    def build(client: Any) -> Worker:
        worker = Worker(client)

        @worker.on("in", model=int, batch=10, window=0.5)
        def store(rows: list[int]) -> None:
            seen.extend(rows)

        return worker

    memory.queue("in").push_many([1, 2, 3])
    assert memory.run(build, until_empty=True).stages["in"]["out"] == 3
    assert sorted(seen) == [1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "max_tries", "warned"), [(9, 1, True), (9, 2, False), (1, 1, False)]
)
def test_batch_of_a_single_try_is_warned_of(
    memory: Place, caplog: pytest.LogCaptureFixture, batch: int, max_tries: int, warned: bool
) -> None:
    memory.queue("in").push_many(range(9))
    sizes: list[int] = []
    store = lambda rows: sizes.append(len(rows))  # noqa: E731
    counters = memory.run_stage(store, stage="sink", to=(), batch=batch, max_tries=max_tries)
    assert counters == {"in": 9, "out": 9}
    assert sizes == ([9] if max_tries == 2 else [1] * 9)
    texts = [each.getMessage() for each in caplog.records]
    assert [text for text in texts if "use max_tries=2 or more" in text] == (
        [texts[0]] if warned else []
    )


def test_one_delivery_stores_progress_of_one_message(place: Place) -> None:
    found: dict[Any, Any] = {}

    def plain(rows: list[Any], deliveries: list[Delivery[Any]]) -> None:
        found.update((each.message.payload, each.message.checkpoint) for each in deliveries)
        if deliveries[0].message.tries == 1:
            deliveries[1].checkpoint("half")
            raise OSError

    async def awaited(rows: list[Any], deliveries: list[Delivery[Any]]) -> None:
        found.update((each.message.payload, each.message.checkpoint) for each in deliveries)
        if deliveries[0].message.tries == 1:
            await deliveries[1].checkpoint("half")
            raise OSError

    place.queue("in").push_many(["a", "b"])
    handler = awaited if place.awaited else plain
    counters = place.run_stage(handler, stage="sink", to=(), batch=2, backoff=NOW)
    assert counters == {"in": 4, "retried": 2, "out": 2}
    assert found == {"a": None, "b": "half"}


@pytest.mark.parametrize("kind", ["standard", "priority"])
def test_batches_come_from_each_kind_of_queue(server: Place, kind: str) -> None:
    server.queue("in", kind=kind).push_many(range(230))
    calls = Calls(server)
    counters = server.run_worker(calls.handler, batch=500, kind=kind)
    assert counters == {"in": 230, "out": 230}
    assert calls.sizes == [230], "a call takes several claims"


def test_batches_come_from_a_stream(client: Client) -> None:
    log = client.stream("clicks", int)
    log.append_many(range(230))
    sizes: list[int] = []

    def handle(rows: list[int]) -> list[Any]:
        sizes.append(len(rows))
        return [Reject("odd") if row == 77 else None for row in rows]

    report = Worker(client).on(log.consumer("audit"), handle, batch=500).run(until_empty=True)
    assert report.stages["clicks~audit"]["out"] == 229
    assert (sizes, log.consumer("audit").counts().total) == ([230], 0)
    assert [each.payload for each in client.queue("clicks.audit.dead").peek()] == [77]


def test_concurrency_counts_batches(server: Place, gate: Gate) -> None:
    server.queue("in").push_many(range(20))
    running = server.start(
        lambda client: Worker(client).on("in", gate.handler, batch=4, concurrency=2)
    )
    eventually(lambda: len(gate.begun) == 2)
    assert sorted(row for rows in gate.begun for row in rows) == list(range(8))
    gate.open.set()
    running.counted("in", "out", 20)
    assert counted(running.finish(), "in") == {"in": 20, "out": 20}


# ---- the effect of its answers


def test_link_moves_each_message_with_its_payload(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = watch(monkeypatch)
    ids = place.queue("in").push_many(range(6))
    calls = Calls(place, lambda rows, tries: [row * 10 for row in rows])
    assert place.run_stage(calls.handler, stage="link", to="a", batch=6) == {"in": 6, "out": 6}
    moved = {each.id: each.payload for each in place.queue("a").peek()}
    assert moved == {id: 10 * number for number, id in enumerate(ids)}
    assert settled == [("move_many", 6)]


def test_values_in_the_list_apply_to_one_message(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = watch(monkeypatch)
    answers = {
        "keep": To("a"),
        "change": To("a", 1),
        "other": To("b"),
        "drop": Drop(),
        "many": Many([To("a", 2), To("b", 3)]),
        "reject": Reject("no such airport"),
        "later": RetryLater(3600, "closed"),
        "fail": OSError("lost"),
        "unlisted": To("c"),
    }
    place.queue("in").push_many(list(answers))
    calls = Calls(place, lambda rows, tries: [answers[row] for row in rows])
    running = place.start(
        lambda client: client.pipeline().choice(
            "in", calls.handler, to=["a", "b"], batch=9, backoff=Backoff(base=3600)
        )
    )
    running.counted("in", "out", 4)
    report = counted(running.finish(), "in")
    assert report == {"in": 9, "out": 4, "dropped": 1, "dead": 2, "retried": 2}
    assert sorted(map(str, place.payloads("a"))) == ["1", "2", "keep"]
    assert sorted(map(str, place.payloads("b"))) == ["3", "other"]
    dead = {each.payload: str(each.error) for each in place.queue("in.dead").peek()}
    assert "no such airport" in dead["reject"]
    assert "its stage leads to a, b" in dead["unlisted"]
    waiting = place.collection().find({"q": "in", "payload": {"$exists": True}})
    errors = {each["payload"]: each["error"]["message"] for each in waiting}
    assert errors == {"later": "closed", "fail": "lost"}
    assert ("move_many", 2) in settled, "those to the same queue go together"


def test_answer_of_another_length_rolls_all_back(place: Place) -> None:
    calls = Calls(place, lambda rows, tries: rows[1:] if tries == 1 else rows)
    place.queue("in").push_many(range(16))
    counters = place.run_stage(calls.handler, batch=16, concurrency=1, **LINK)
    assert counters == {"in": 32, "retried": 16, "out": 16}
    assert calls.sizes == [16, *[2] * 8]
    assert len(calls.errors) == 16
    assert "returned a list of 15 for a batch of 16 messages" in calls.errors[0]


def fail_on(bad: Any, error: BaseException) -> Callable[..., Any]:
    def answer(rows: list[Any], tries: int) -> list[Any]:
        if bad in rows:
            raise error
        return rows

    return answer


@pytest.mark.parametrize("error", [OSError("bad"), Reject("bad"), RetryLater(0, "bad")])
def test_message_that_fails_its_batch_is_buried_alone(place: Place, error: Exception) -> None:
    """All are rolled back. They come again in smaller calls, and at last one by one."""
    place.queue("in").push_many(range(32))
    calls = Calls(place, fail_on(20, error))
    counters = place.run_stage(calls.handler, batch=32, concurrency=1, max_tries=3, **LINK)
    assert counters == {"in": 32 + 32 + 4, "retried": 32 + 4, "dead": 1, "out": 31}
    assert sorted(calls.sizes) == [1, 1, 1, 1, *[4] * 8, 32]
    assert place.payloads("in.dead") == [20]
    assert sorted(place.payloads("a")) == [number for number in range(32) if number != 20]


def test_batch_failed_rolls_back_only_some(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = watch(monkeypatch)

    def answer(rows: list[Any], tries: int) -> list[Any]:
        if tries == 1:
            raise BatchFailed({1: OSError("bad"), 3: Reject("no")}, [row * 10 for row in rows])
        return rows

    place.queue("in").push_many(range(6))
    counters = place.run_stage(Calls(place, answer).handler, batch=6, **LINK)
    assert counters == {"in": 7, "out": 5, "dead": 1, "retried": 1}
    assert sorted(place.payloads("a")) == [0, 1, 20, 40, 50]
    assert place.payloads("in.dead") == [3]
    assert sorted(settled) == [("bury", 1), ("move_many", 1), ("move_many", 4), ("rollback", 1)]


def test_batch_failed_of_a_sink_commits_the_rest(memory: Place) -> None:
    def answer(rows: list[Any], tries: int) -> None:
        if tries == 1:
            raise BatchFailed({0: OSError("bad")})

    memory.queue("in").push_many(range(3))
    calls = Calls(memory, answer)
    counters = memory.run_stage(calls.handler, stage="sink", to=(), batch=3, backoff=NOW)
    assert counters == {"in": 4, "out": 3, "retried": 1}
    assert calls.batches == [[0, 1, 2], [0]]


def test_batch_failed_of_a_link_needs_results(memory: Place) -> None:
    def answer(rows: list[Any], tries: int) -> list[Any]:
        if tries == 1:
            raise BatchFailed({0: OSError("bad")})
        return rows

    memory.queue("in").push_many(range(3))
    calls = Calls(memory, answer)
    counters = memory.run_stage(calls.handler, batch=3, **LINK)
    assert counters == {"in": 6, "out": 3, "retried": 3}
    assert "raised BatchFailed with results=None" in calls.errors[0]


def test_payload_that_cannot_move_is_buried_alone(place: Place) -> None:
    place.queue("in").push_many(range(5))
    calls = Calls(place, lambda rows, tries: [object() if row == 2 else row for row in rows])
    counters = place.run_stage(calls.handler, stage="link", to="a", batch=5)
    assert counters == {"in": 5, "out": 4, "dead": 1}
    assert sorted(place.payloads("a")) == [0, 1, 3, 4]
    assert place.payloads("in.dead") == [2]


def test_messages_settled_by_the_handler_are_left_alone(server: Place) -> None:
    """It settles two and then fails. Only the third is tried again; it is not rejected."""

    def build(client: Any) -> Worker:
        def blocking(rows: list[Any], deliveries: list[Delivery[Any]]) -> None:
            if len(rows) == 3:
                client.queue("in").commit(*(each.message for each in deliveries[:2]))
                raise Reject("one of them")

        async def awaited(rows: list[Any], deliveries: list[Delivery[Any]]) -> None:
            if len(rows) == 3:
                await client.queue("in").commit(*(each.message for each in deliveries[:2]))
                raise Reject("one of them")

        handler = blocking if server.blocking else awaited
        return Worker(client).on("in", handler, batch=3, backoff=NOW)

    server.queue("in").push_many(range(3))
    report = server.run(build, until_empty=True)
    assert counted(report, "in") == {"in": 4, "out": 3, "retried": 1}


# ---- leases, and the server


def test_lost_lease_costs_the_batch_one_message(place: Place) -> None:
    """The token refuses it, and the rest is settled."""
    seen: list[Any] = []

    def steal(rows: list[Any], deliveries: list[Delivery[Any]]) -> list[Any]:
        if len(rows) == 4:
            place.steal(deliveries[1])
        seen.append(rows)
        return rows

    place.queue("in").push_many(range(4))
    counters = place.run_stage(place.handler(steal), stage="link", to="a", batch=4)
    assert counters == {"in": 5, "out": 4, "lost": 1}
    assert seen == [[0, 1, 2, 3], [1]]
    assert sorted(place.payloads("a")) == [0, 1, 2, 3]


def started(place: Place, gate: Gate, number: int, **options: Any) -> Running:
    """Start a worker, and wait until its handler has a batch of this many messages."""
    place.queue("in").push_many(range(number))
    run = options.pop("run", {})
    options["batch"] = number
    running = place.start(
        lambda client: Worker(client, concurrency=1).on("in", gate.handler, **options), **run
    )
    eventually(lambda: gate.begun, "a handler that has begun")
    assert gate.begun == [list(range(number))]
    return running


def test_batch_goes_on_when_it_lost_some(server: Place, gate: Gate, awaited: bool) -> None:
    """Each Delivery tells if it was lost. The handler is cancelled when all are lost."""
    running = started(server, gate, 3, lease=0.9)
    server.take_over(gate.deliveries[1])
    eventually(lambda: gate.deliveries[1].lost)
    assert [each.lost for each in gate.deliveries] == [False, True, False]
    assert gate.cancelled == []
    for each in (0, 2):
        server.take_over(gate.deliveries[each])
    eventually(lambda: gate.cancelled)
    running.counted("in", "lost", 3)
    assert counted(running.finish(), "in") == {"in": 3, "lost": 3}


def test_all_leases_of_a_batch_are_renewed(server: Place, gate: Gate) -> None:
    running = started(server, gate, 3, lease=0.9)
    ends = [each.message.until for each in gate.deliveries]

    def renewed() -> bool:
        now = [each.message.until for each in gate.deliveries]
        return all((b - a).total_seconds() > 0.3 for a, b in zip(ends, now, strict=True))

    eventually(renewed, "several renewals")
    gate.open.set()
    running.counted("in", "out", 3)
    assert counted(running.finish(), "in") == {"in": 3, "out": 3}


def test_settling_repeats_only_what_is_unknown(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a batch was settled before the server went silent."""
    monkeypatch.setattr(verdicts, "UNAVAILABLE", Backoff(base=0.01, maximum=0.1, jitter=0))
    real, calls = AsyncQueue.commit, []

    async def commit(self: Any, *messages: Any, **options: Any) -> None:
        calls.append([each.payload for each in messages])
        if len(calls) == 1:
            await real(self, *messages[:2], **options)
            raise Unavailable("no answer", ids=[each.id for each in messages[2:]])
        await real(self, *messages, **options)

    monkeypatch.setattr(AsyncQueue, "commit", commit)
    server.queue("in").push_many(range(3))
    counters = server.run_stage(lambda rows: None, stage="sink", to=(), batch=3)
    assert counters == {"in": 3, "out": 3}
    assert calls == [[0, 1, 2], [2]]


def test_time_limit_ends_the_whole_batch(server: Place, gate: Gate) -> None:
    running = started(server, gate, 3, time_limit=0.1, backoff=Backoff(base=3600))
    running.counted("in", "retried", 3)
    assert counted(running.finish(), "in") == {"in": 3, "retried": 3}
    assert server.queue("in").counts().scheduled == 3


# ---- the window


def watch_receives(monkeypatch: pytest.MonkeyPatch, *fail: int) -> list[int]:
    """Return a list that grows by the limit of each receive. Some of them fail."""
    real = RunningStage.reserve
    limits: list[int] = []

    async def reserve(self: Any, limit: int, timeout: float | None = None) -> Any:
        limits.append(limit)
        if len(limits) in fail:
            raise Unavailable("no answer")
        return await real(self, limit, timeout)

    monkeypatch.setattr(RunningStage, "reserve", reserve)
    return limits


def start_batch(place: Place, calls: Calls, **options: Any) -> Running:
    return place.start(lambda client: Worker(client).on("in", calls.handler, **options))


def test_full_batch_does_not_wait_for_its_window(place: Place) -> None:
    """Messages that come one after the other share a call."""
    calls = Calls(place)
    running = start_batch(place, calls, batch=3, **FOREVER)

    def full(number: int) -> bool:
        return place.queue("in").counts().reserved == number or bool(calls.batches)

    for number in range(3):
        place.queue("in").push(number)
        eventually(partial(full, number + 1))
    running.counted("in", "out", 3)
    running.finish()
    assert calls.batches == [[0, 1, 2]]


def test_window_ends_for_a_batch_that_is_not_full(place: Place) -> None:
    calls = Calls(place)
    running = start_batch(place, calls, batch=3, window=0.1, lease=LONG_LEASE)
    place.queue("in").push(1)
    running.counted("in", "out")
    running.finish()
    assert calls.batches == [[1]]


def test_window_is_half_of_the_lease_at_most(server: Place) -> None:
    calls = Calls(server)
    running = start_batch(server, calls, batch=3, window=3600, lease=1)
    server.queue("in").push(1)
    running.counted("in", "out")
    counters = counted(running.finish(), "in")
    counters.pop("released", None)  # on a machine that slept before the handler could start
    assert counters == {"in": 1, "out": 1}
    assert calls.tries == [[1]]


def test_stop_gives_back_a_batch_that_fills(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, calls, limits = watch(monkeypatch), Calls(place), watch_receives(monkeypatch)
    running = start_batch(place, calls, batch=5, **FOREVER)
    place.queue("in").push_many([1, 2])
    eventually(lambda: limits[-1:] == [3])
    assert counted(running.finish(), "in") == {"released": 2}
    assert (settled, calls.batches) == ([("release", 2)], [])
    assert [(each.payload, each.tries) for each in place.queue("in").peek()] == [(1, 0), (2, 0)]


def test_cancelled_run_gives_back_a_batch_that_fills(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            queue = client.queue("in")
            await queue.push_many(["a", "b"])
            worker = Worker(client).on("in", print, batch=5, **FOREVER)
            limits = watch_receives(monkeypatch)
            run = asyncio.ensure_future(worker.run(handle_signals=False))
            await async_eventually(lambda: limits == [5, 3])
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run

    asyncio.run(main())
    # A claim that was on its way may have taken them again. It is undone before the client closes.
    with Client(url) as client:
        found = [(each.payload, each.tries) for each in client.queue("in").peek()]
    assert found == [("a", 0), ("b", 0)]


def test_until_empty_does_not_wait_for_the_window(place: Place) -> None:
    calls = Calls(place)
    place.queue("in").push_many([1, 2])
    assert place.run_worker(calls.handler, batch=5, **FOREVER) == {"in": 2, "out": 2}
    assert calls.batches == [[1, 2]]


def test_until_empty_fills_while_handlers_work(server: Place) -> None:
    """The first stage ends once the second holds a message. Both messages share a call."""
    calls = Calls(server)

    def slow(row: Any) -> Any:
        eventually(lambda: server.queue("in").counts().reserved == 1)
        return row

    def build(client: Any) -> Pipeline:
        pipeline: Pipeline = client.pipeline().link("raw", slow, to="in")
        return pipeline.sink("in", calls.handler, batch=5, **FOREVER)

    server.queue("raw").push("moved")
    running = server.start(build, until_empty=True)
    eventually(lambda: server.queue("raw").counts().reserved == 1)
    server.queue("in").push("direct")
    running.join()
    assert [sorted(each) for each in calls.batches] == [["direct", "moved"]]


def test_batch_is_handled_although_the_server_went_silent(
    server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that cannot ask for more messages is handled."""
    calls, limits = Calls(server), watch_receives(monkeypatch, 2)
    server.queue("in").push(1)
    running = start_batch(server, calls, batch=5, **FOREVER)
    running.counted("in", "out")
    running.finish()
    assert (calls.batches, limits[:2]) == ([[1]], [5, 4])


# ---- stopping


def test_stop_lets_a_batch_end(place: Place, gate: Gate) -> None:
    running = started(place, gate, 3)
    running.stop()
    gate.open.set()
    assert counted(running.join(), "in") == {"in": 3, "out": 3}


def test_stop_without_grace_rolls_a_batch_back(
    place: Place, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = watch(monkeypatch)
    running = started(place, gate, 3, run={"grace": 0})
    assert counted(running.finish(), "in") == {"in": 3, "retried": 3}
    assert settled == [("rollback", 3)]
    found = [(each.payload, each.tries, each.state) for each in place.queue("in").peek()]
    assert found == [(number, 1, "ready") for number in range(3)]
