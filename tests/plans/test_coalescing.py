"""Coalescing of concurrent calls.

The result of a batch reaches the call that caused it, and no caller starves. There is no database:
the driver is a fake.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec

import pymongo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymongo import _csot

from pyqueue import LeaseLost, Unavailable
from pyqueue.requests import Coalesce
from pyqueue.runtime.coalescing import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, Coalescer, ThreadCoalescer
from tests.support.eventually import eventually

P = ParamSpec("P")


class FakeDriver:
    """A driver whose batches end when the test says so.

    ``batches`` holds the items of each batch; ``undone`` holds the answers that were undone.
    """

    def __init__(self) -> None:
        self.stats: Counter[str] = Counter()
        self.coalescer = Coalescer(self.drive, self.stats)
        self.batches: list[list[Any]] = []
        self.undone: list[Any] = []
        self.running = 0
        self.most = 0
        #: The batches in flight, oldest first. Set a result to end one, or an exception to make it
        #: fail.
        self.open: list[asyncio.Future[Any]] = []
        #: If set, batches end by themselves after this number of turns of the loop.
        self.turns: int | None = None

    async def drive(self, plan: Generator[Any, Any, Any]) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            request = next(plan)
            if self.turns is None:
                gate = asyncio.get_running_loop().create_future()
                self.open.append(gate)
                try:
                    failure = await gate
                finally:
                    if gate in self.open:
                        self.open.remove(gate)
                if failure is not None:
                    plan.throw(failure)
            else:
                for _ in range(self.turns):
                    await asyncio.sleep(0)
            plan.send(request)
        except StopIteration as stop:
            return stop.value
        finally:
            self.running -= 1
        raise AssertionError("unreachable")

    def batch(self, items: list[Any]) -> Generator[Any, Any, list[Any]]:
        self.batches.append(items)
        yield items
        return [f"answer to {item}" for item in items]

    def undo(self, answer: Any) -> Generator[Any, Any, None]:
        yield answer
        self.undone.append(answer)

    def call(
        self,
        item: Any,
        *,
        key: Any = "a",
        undo: bool = False,
        size: int = 0,
        max_in_flight: int = 2,
        alone: bool = False,
    ) -> asyncio.Task[Any]:
        request = Coalesce(
            key,
            item,
            self.batch,
            undo=self.undo if undo else None,
            size=size,
            max_in_flight=max_in_flight,
            alone=alone,
        )
        return asyncio.create_task(self.coalescer.join(request))

    async def open_call(self, item: Any, **how: Any) -> asyncio.Task[Any]:
        """Make a call, and wait until its batch is in flight."""
        call = self.call(item, **how)
        await self.until_open(1)
        return call

    async def until_open(self, number: int) -> None:
        for _ in range(50):
            if sum(not gate.done() for gate in self.open) >= number:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.open)} of {number} batches are under way")

    async def until_over(self) -> None:
        """Wait until a batch that was ended has left the driver."""
        for _ in range(3):
            await asyncio.sleep(0)
            if not self.running:
                return

    def end(self, failure: BaseException | None = None) -> None:
        """End the oldest batch in flight."""
        next(gate for gate in self.open if not gate.done()).set_result(failure)

    async def finish(self, *tasks: asyncio.Task[Any]) -> list[Any]:
        """End all batches in flight until these tasks are done."""
        while not all(task.done() for task in tasks):
            if any(not gate.done() for gate in self.open):
                self.end()
            await asyncio.sleep(0)
        return [task.result() for task in tasks]

    async def drain(self) -> None:
        """End all batches in flight until no work for a cancelled caller is left."""
        while self.coalescer.tasks:
            if any(not gate.done() for gate in self.open):
                self.end()
            await asyncio.sleep(0)


async def finished(fake: FakeDriver, test: Coroutine[Any, Any, None]) -> None:
    """Run a test, and the work for callers that were cancelled."""
    async with asyncio.timeout(20):
        await test
        await fake.drain()
        assert not fake.coalescer._pending
        assert not fake.coalescer._batches


def on_the_loop(
    test: Callable[Concatenate[FakeDriver, P], Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Return a test that runs in an event loop."""

    @functools.wraps(test)
    def run(fake: FakeDriver, *args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(finished(fake, test(fake, *args, **kwargs)))

    return run


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@on_the_loop
async def test_lone_call_runs_at_once_without_a_task(fake: FakeDriver) -> None:
    fake.turns = 0
    assert await fake.coalescer.join(Coalesce("a", 1, fake.batch)) == "answer to 1"
    assert not fake.coalescer.tasks
    assert not fake.coalescer._pending


@on_the_loop
async def test_running_batch_admits_the_calls_that_wait(fake: FakeDriver) -> None:
    first = await fake.open_call(0, max_in_flight=1, undo=True)
    rest = [fake.call(n, max_in_flight=1, undo=True) for n in range(1, 5)]
    await asyncio.sleep(0)
    rest[0].cancel()
    fake.coalescer.admit(fake.batches[0])
    rest[1].cancel()
    await asyncio.sleep(0)
    fake.coalescer.admit(fake.batches[0])
    assert fake.batches == [[0, 2, 3, 4]]
    assert await fake.finish(first, *rest[2:]) == [f"answer to {n}" for n in (0, 3, 4)]
    await fake.until_open(1)
    fake.end()
    await fake.coalescer.settled()
    assert fake.undone == ["answer to 2"]


@on_the_loop
async def test_failed_batch_fails_the_calls_that_it_admitted(fake: FakeDriver) -> None:
    calls = [await fake.open_call(0, max_in_flight=1, undo=True)]
    calls += [fake.call(n, max_in_flight=1, undo=True) for n in range(1, 3)]
    await asyncio.sleep(0)
    fake.coalescer.admit(fake.batches[0])
    fake.end(Unavailable("gone"))
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in errors] == [Unavailable] * 3


@on_the_loop
async def test_admitted_calls_keep_to_the_limits_of_a_batch(fake: FakeDriver) -> None:
    calls = [await fake.open_call(0, max_in_flight=1, undo=True)]
    calls += [fake.call(n, max_in_flight=1, undo=True) for n in range(1, MAX_BATCH_ITEMS + 2)]
    await asyncio.sleep(0)
    fake.coalescer.admit(fake.batches[0])
    assert len(fake.batches[0]) == MAX_BATCH_ITEMS
    fake.coalescer.admit(fake.batches[0])
    fake.coalescer.admit(["of no batch"])
    assert len(fake.batches[0]) == MAX_BATCH_ITEMS
    await fake.finish(*calls)
    assert [len(each) for each in fake.batches] == [MAX_BATCH_ITEMS, 2]


@on_the_loop
async def test_calls_go_together_while_another_batch_runs(fake: FakeDriver) -> None:
    """Callers that were answered together make their next calls in one turn of the loop."""
    other = await fake.open_call("other", key="b")
    calls = [fake.call(n) for n in range(3)]
    await fake.until_open(2)
    assert fake.batches == [["other"], [0, 1, 2]]
    await fake.finish(other, *calls)


@on_the_loop
async def test_calls_during_a_batch_form_the_next_batch(fake: FakeDriver) -> None:
    first = await fake.open_call(0, max_in_flight=1)
    rest = [fake.call(n, max_in_flight=1) for n in range(1, 6)]
    await asyncio.sleep(0)
    fake.end()
    await fake.until_open(1)
    assert fake.batches == [[0], [1, 2, 3, 4, 5]]
    assert await fake.finish(first, *rest) == [f"answer to {n}" for n in range(6)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@on_the_loop
async def test_batches_in_flight_are_limited(fake: FakeDriver, max_in_flight: int) -> None:
    fake.turns = 3
    calls = []
    for n in range(40):
        calls.append(fake.call(n, max_in_flight=max_in_flight))
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    assert fake.most == max_in_flight
    assert len(fake.batches) < 40


@pytest.mark.parametrize("crowd", [2, 8])
@on_the_loop
async def test_callers_woken_together_form_one_batch(fake: FakeDriver, crowd: int) -> None:
    """Callers that wake in one turn of the loop form one batch, not a first call and a rest.

    A single call runs alone again after that batch.
    """
    fake.turns = 1
    await asyncio.gather(*(fake.call(n) for n in range(1 + crowd)))
    fake.batches.clear()
    await asyncio.gather(*(fake.call(n) for n in range(crowd)))
    assert fake.batches == [list(range(crowd))]
    await fake.call(1)
    assert not fake.coalescer._pending  # the last batch held one call: it is not crowded any more
    assert not fake.coalescer.tasks


@on_the_loop
async def test_batches_are_bounded_by_count(fake: FakeDriver) -> None:
    calls = [fake.call(n, max_in_flight=1) for n in range(2 * MAX_BATCH_ITEMS + 10)]
    await fake.finish(*calls)
    assert max(map(len, fake.batches)) == MAX_BATCH_ITEMS
    assert [item for batch in fake.batches for item in batch] == list(
        range(2 * MAX_BATCH_ITEMS + 10)
    )


@on_the_loop
async def test_calls_that_share_nothing_run_alone_up_to_a_limit(fake: FakeDriver) -> None:
    stuck = [fake.call(n, alone=True, max_in_flight=3) for n in range(2)]
    await fake.until_open(2)
    rest = [fake.call(n, alone=True, max_in_flight=3) for n in range(2, 9)]
    await fake.until_open(3)
    while not all(call.done() for call in rest):  # the two oldest stay in flight
        gates = [gate for gate in fake.open if not gate.done()]
        if len(gates) > 2:
            gates[2].set_result(None)
        await asyncio.sleep(0)
    assert not any(call.done() for call in stuck)
    assert fake.batches == [[n] for n in range(9)]
    assert fake.most == 3
    await fake.finish(*stuck)


@on_the_loop
async def test_batches_are_bounded_by_bytes_and_a_large_one_goes_alone(fake: FakeDriver) -> None:
    half = MAX_BATCH_BYTES // 2
    sizes = [1, half, half, 1, 2 * half, 4 * half, 5, 5]
    calls = [fake.call((n, size), size=size, max_in_flight=1) for n, size in enumerate(sizes)]
    await fake.finish(*calls)
    numbers = [[n for n, _ in batch] for batch in fake.batches]
    assert numbers == [[0], [1, 2], [3], [4], [5], [6, 7]]


@on_the_loop
async def test_keys_do_not_mix(fake: FakeDriver) -> None:
    calls = [fake.call((key, n), key=key, max_in_flight=1) for n in range(10) for key in "ab"]
    await fake.finish(*calls)
    assert all(len({key for key, _ in batch}) == 1 for batch in fake.batches)


@on_the_loop
async def test_error_answer_reaches_only_its_call(fake: FakeDriver) -> None:
    """Plans of pushes and settles answer with errors; each error reaches one caller."""
    lost = LeaseLost("gone", lost=[], unknown=[])

    def batch(items: list[Any]) -> Generator[Any, Any, list[Any]]:
        yield items
        return [lost if item == 3 else "done" for item in items]

    requests = [Coalesce("a", n, batch) for n in range(6)]
    calls = [asyncio.create_task(fake.coalescer.join(request)) for request in requests]
    answers = await fake.finish(*calls)
    assert [answer is lost for answer in answers] == [n == 3 for n in range(6)]


@on_the_loop
async def test_failed_batch_gives_each_caller_a_separate_error(fake: FakeDriver) -> None:
    first = await fake.open_call(0, max_in_flight=1)
    failing = [fake.call(n, max_in_flight=1) for n in (1, 2)]
    await asyncio.sleep(0)
    fake.end()
    await fake.until_open(1)
    spared = [fake.call(n, max_in_flight=1) for n in (3, 4)]
    await asyncio.sleep(0)
    fake.end(Unavailable("gone", ids=["m1"]))
    assert await fake.finish(first, *spared) == ["answer to 0", "answer to 3", "answer to 4"]
    errors = [task.exception() for task in failing]
    assert [type(error) for error in errors] == [Unavailable] * 2
    assert errors[0] is not errors[1]
    assert [error.ids for error in errors if isinstance(error, Unavailable)] == [["m1"]] * 2


@on_the_loop
async def test_error_that_cannot_be_copied_is_shared_by_callers(fake: FakeDriver) -> None:
    class Odd(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(one + two)

    for failure in (Odd("a", "b"), Unavailable("gone")):
        failing = [fake.call(n, undo=True, max_in_flight=1) for n in (1, 2)]
        await fake.until_open(1)
        fake.end(failure)
        await asyncio.wait(failing)
        errors = [task.exception() for task in failing]
        if isinstance(failure, Odd):
            assert errors == [failure, failure]
        else:
            assert [error and error.__cause__ for error in errors] == [failure, failure]


@on_the_loop
async def test_cancelled_caller_does_not_see_the_batch_fail(fake: FakeDriver) -> None:
    gone, stays = (fake.call(n, undo=True, max_in_flight=1) for n in (1, 2))
    await fake.until_open(1)
    gone.cancel()
    await asyncio.wait([gone])
    fake.end(Unavailable("gone"))
    await asyncio.wait([stays])
    assert gone.cancelled()
    assert isinstance(stays.exception(), Unavailable)


@on_the_loop
async def test_base_exception_reaches_the_callers_and_ends_the_task(fake: FakeDriver) -> None:
    """An interrupt does so."""

    class Interrupt(BaseException):
        pass

    calls = [fake.call(n, undo=True, max_in_flight=1) for n in (1, 2)]
    await fake.until_open(1)
    (task,) = fake.coalescer.tasks
    fake.end(Interrupt())
    await asyncio.wait([*calls, task])
    assert [type(each.exception()) for each in (*calls, task)] == [Interrupt] * 3
    assert await fake.finish(fake.call(3)) == ["answer to 3"]


@on_the_loop
async def test_failed_lone_call_does_not_block_the_next(fake: FakeDriver) -> None:
    lone = await fake.open_call(0)
    fake.end(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await lone
    assert await fake.finish(fake.call(1)) == ["answer to 1"]


@on_the_loop
async def test_call_cancelled_before_its_batch_is_not_run(fake: FakeDriver) -> None:
    first = await fake.open_call(0, max_in_flight=1)
    gone, stays = fake.call(1, max_in_flight=1), fake.call(2, max_in_flight=1)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert await fake.finish(first, stays) == ["answer to 0", "answer to 2"]
    assert gone.cancelled()
    assert fake.batches == [[0], [2]]


@pytest.mark.parametrize("undo", [True, False])
@on_the_loop
async def test_batch_of_a_cancelled_caller_ends_and_is_undone(fake: FakeDriver, undo: bool) -> None:
    first = await fake.open_call(0, undo=True, max_in_flight=1)
    gone, stays = (
        fake.call(1, undo=undo, max_in_flight=1),
        fake.call(2, undo=undo, max_in_flight=1),
    )
    await asyncio.sleep(0)
    fake.end()
    await fake.until_open(1)
    assert fake.batches[-1] == [1, 2]
    gone.cancel()
    await asyncio.sleep(0)
    assert gone.cancelled()
    assert await fake.finish(first, stays) == ["answer to 0", "answer to 2"]
    await fake.drain()
    assert fake.undone == (["answer to 1"] if undo else [])
    assert fake.stats["given back"] == undo


@on_the_loop
async def test_call_cancelled_with_its_answer_ready_is_undone(fake: FakeDriver) -> None:
    gone = await fake.open_call(1, undo=True, max_in_flight=1)
    fake.end()
    await fake.until_over()  # the answer is ready, and the caller has not run yet
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await fake.drain()
    got = [] if gone.cancelled() else [gone.result()]
    assert got + fake.undone == ["answer to 1"]
    assert gone.cancelled()


def test_failed_undo_is_logged(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """It has no caller, who could be told, and asyncio would only complain about a lost error."""
    complaints: list[Any] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: complaints.append(each))
        gone = await fake.open_call(1, undo=True, max_in_flight=1)
        gone.cancel()
        fake.end()
        await fake.until_open(1)  # its undo
        fake.end(Unavailable("no answer"))
        await asyncio.wait(fake.coalescer.tasks)
        gc.collect()

    asyncio.run(finished(fake, test()))
    assert complaints == []
    assert "a cancelled call" in caplog.text
    assert "no answer" in caplog.text


@on_the_loop
async def test_call_cancelled_with_its_error_ready_is_cancelled(fake: FakeDriver) -> None:
    gone = await fake.open_call(1, undo=True, max_in_flight=1)
    fake.end(Unavailable("gone"))
    await fake.until_over()  # the error is ready, and the caller has not run yet
    gone.cancel()
    await asyncio.wait([gone])
    assert gone.cancelled()


@on_the_loop
async def test_cancelled_lone_call_does_not_stop_later_calls(fake: FakeDriver) -> None:
    lone = await fake.open_call(0)
    rest = [fake.call(n, max_in_flight=1) for n in (1, 2)]
    await asyncio.sleep(0)
    lone.cancel()
    await asyncio.gather(lone, return_exceptions=True)
    assert await fake.finish(*rest) == ["answer to 1", "answer to 2"]


@on_the_loop
async def test_settled_waits_for_work_of_cancelled_callers(fake: FakeDriver) -> None:
    fake.turns = 5
    gone = fake.call(1, undo=True, max_in_flight=1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gone.cancel()
    await fake.coalescer.settled()
    assert fake.undone == ["answer to 1"]


@on_the_loop
async def test_settled_waits_for_every_batch_after_a_failure(fake: FakeDriver) -> None:
    fake.turns = 5

    def failing(answer: Any) -> Generator[Any, Any, None]:
        yield answer
        raise Unavailable("gone")

    for key, undo in (("a", failing), ("b", fake.undo)):
        gone = asyncio.create_task(fake.coalescer.join(Coalesce(key, key, fake.batch, undo=undo)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
    await fake.coalescer.settled()
    assert fake.undone == ["answer to b"]


@on_the_loop
async def test_no_caller_starves(fake: FakeDriver) -> None:
    """Sixty-four callers call repeatedly and are served in turn.

    Between two calls of one caller, no other caller is served more than twice.
    """
    fake.turns = 2
    served: list[int] = []

    async def caller(number: int) -> None:
        for _ in range(50):
            await fake.coalescer.join(Coalesce("a", number, fake.batch))
            served.append(number)

    await asyncio.gather(*(caller(number) for number in range(64)))
    counts: Counter[int] = Counter()
    for number in served:
        counts[number] += 1
        assert counts[number] - min(counts[each] for each in range(64)) <= 3


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 6)), min_size=1, max_size=40
    ),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
)
@settings(max_examples=150)
def test_every_call_gets_its_answer_or_is_undone(
    calls: list[tuple[int, bool, int]], turns: int, max_in_flight: int
) -> None:
    """Calls come at any time, and some are cancelled at any time.

    Whatever was done for a call is returned to it, or undone.
    """
    fake = FakeDriver()

    async def test() -> None:
        fake.turns = turns
        tasks: list[asyncio.Task[Any]] = []

        async def cancel(task: asyncio.Task[Any], after: int) -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()

        waits: list[Awaitable[Any]] = []
        for number, (pause, cancelled, after) in enumerate(calls):
            for _ in range(pause):
                await asyncio.sleep(0)
            task = fake.call(number, undo=True, max_in_flight=max_in_flight)
            tasks.append(task)
            if cancelled:
                waits.append(asyncio.create_task(cancel(task, after)))
        await asyncio.gather(*tasks, *waits, return_exceptions=True)
        await fake.coalescer.settled()
        answered = [task.result() for task in tasks if not task.cancelled()]
        done = [f"answer to {item}" for batch in fake.batches for item in batch]
        assert sorted(answered + fake.undone) == sorted(done)
        assert all(
            not task.cancelled()
            for task, (_, cancelled, _) in zip(tasks, calls, strict=True)
            if not cancelled
        )

    asyncio.run(finished(fake, test()))


# ---- the deadline of one caller


def deadline_now() -> float:
    """Return when PyMongo's commands end here. It has no public name."""
    return _csot.get_deadline()


def test_deadline_of_pymongo_is_known() -> None:
    assert deadline_now() == math.inf
    with pymongo.timeout(100), pymongo.timeout(None):
        assert 99 < deadline_now() - time.monotonic() <= 100


@on_the_loop
async def test_deadline_of_one_caller_ends_only_its_call(fake: FakeDriver) -> None:
    seen: list[float] = []
    drive = fake.coalescer._drive

    async def driven(plan: Any) -> Any:
        seen.append(deadline_now())
        return await drive(plan)

    fake.coalescer._drive = driven
    with pymongo.timeout(0.001):
        late = fake.call(0, max_in_flight=1, undo=True)
    rest = [fake.call(n, max_in_flight=1, undo=True) for n in range(1, 8)]
    with pytest.raises(Unavailable):
        await late
    assert await fake.finish(*rest) == [f"answer to {n}" for n in range(1, 8)]
    await fake.until_open(1)
    fake.end()
    await fake.coalescer.settled()
    assert fake.undone == ["answer to 0"]
    assert seen == [math.inf] * 2


@on_the_loop
async def test_call_whose_deadline_is_over_joins_no_batch(fake: FakeDriver) -> None:
    first = await fake.open_call(0, max_in_flight=1, undo=True)
    with pymongo.timeout(0.001):
        late = fake.call(1, max_in_flight=1, undo=True)
    with pytest.raises(Unavailable):
        await late
    assert await fake.finish(first) == ["answer to 0"]
    await fake.coalescer.settled()
    assert fake.batches == [[0]]


# ---- threads


class ThreadsDriver:
    """A blocking driver whose batches wait at a gate."""

    def __init__(self, *, open: bool = False) -> None:
        self.coalescer = ThreadCoalescer(self.drive)
        self.batches: list[list[Any]] = []
        self.gate = threading.Event()
        self.failure: BaseException | None = None
        if open:
            self.gate.set()

    def drive(self, plan: Generator[Any, Any, Any]) -> Any:
        try:
            next(plan)
            assert self.gate.wait(20)
            if self.failure is not None:
                plan.throw(self.failure)
            next(plan)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("unreachable")

    def batch(self, items: list[Any]) -> Generator[Any, Any, list[Any]]:
        self.batches.append(items)
        yield items
        return [f"answer to {item}" for item in items]

    def join(self, item: Any, **how: Any) -> Any:
        return self.coalescer.join(Coalesce("a", item, self.batch, threads=True, **how))

    def gather(self, pool: ThreadPoolExecutor, items: Sequence[Any]) -> list[Future[Any]]:
        """Start a call that waits at the gate, and then more calls, which wait for it."""
        first = pool.submit(self.join, items[0], max_in_flight=1)
        eventually(lambda: self.batches)
        rest = [pool.submit(self.join, item, max_in_flight=1) for item in items[1:]]
        calls = self.coalescer._pending["a"]
        eventually(lambda: len(calls.waiting) == len(rest))
        return [first, *rest]


def test_threads_that_call_during_a_batch_share_the_next_one() -> None:
    driver = ThreadsDriver()
    with ThreadPoolExecutor(6) as pool:
        calls = driver.gather(pool, range(6))
        driver.gate.set()
        assert [each.result(20) for each in calls] == [f"answer to {n}" for n in range(6)]
    assert [sorted(batch) for batch in driver.batches] == [[0], [1, 2, 3, 4, 5]]
    assert driver.coalescer._pending == {}


def test_failed_batch_gives_each_thread_a_separate_error() -> None:
    driver = ThreadsDriver()
    driver.failure = Unavailable("gone", ids=["m1"])
    with ThreadPoolExecutor(4) as pool:
        calls = driver.gather(pool, range(4))
        driver.gate.set()
        errors = [each.exception(20) for each in calls]
    assert [getattr(error, "ids", None) for error in errors] == [["m1"]] * 4
    assert len({id(error) for error in errors}) == 4
    assert driver.coalescer._pending == {}


def test_main_thread_shares_no_batch() -> None:
    """Ctrl-C would end the calls of other threads."""
    driver = ThreadsDriver()
    with ThreadPoolExecutor(3) as pool:
        calls = driver.gather(pool, range(3))
        driver.gate.set()
        assert driver.join("main", max_in_flight=1) == "answer to main"
        assert [each.result(20) for each in calls] == [f"answer to {n}" for n in range(3)]
    assert ["main"] in driver.batches


def test_thread_with_a_deadline_shares_no_batch() -> None:
    """It ends its call in time, and no other one."""
    driver = ThreadsDriver(open=True)
    seen = []
    drive = driver.coalescer._drive

    def driven(plan: Any) -> Any:
        seen.append(deadline_now() < math.inf)
        assert not driver.coalescer._pending, "it is in no batch"
        return drive(plan)

    def call() -> Any:
        with pymongo.timeout(100):
            return driver.join("late")

    driver.coalescer._drive = driven
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call).result(20) == "answer to late"
    assert seen == [True]


@pytest.mark.parametrize("how", [{}, {"max_in_flight": 1}, {"max_in_flight": 3, "alone": True}])
def test_each_thread_gets_its_answer(how: dict[str, Any]) -> None:
    driver = ThreadsDriver(open=True)

    def calls(thread: int) -> bool:
        return all(
            driver.join((thread, n), **how) == f"answer to {(thread, n)}" for n in range(200)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(calls, range(8)))
    assert sum(map(len, driver.batches)) == 1600
    assert driver.coalescer._pending == {}
