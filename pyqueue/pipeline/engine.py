"""One run of a pipeline or a worker: fetch messages, have them handled, stop and drain.

Each stage has one *fetcher*, which reserves messages and waits until a handler may start. Each
message in flight is a task. Two limits bound the work: ``concurrency`` handlers run at once over
all stages, and each stage has a limit for its messages between reserving and settling.

``verdicts`` decides what a handler's answer means for its message.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from pyqueue.async_queues import AsyncQueue
from pyqueue.backends.invalid import Misfits
from pyqueue.delivery import Delivery
from pyqueue.errors import ConfigurationError, LeaseLost, QueueClosed, QueueError, Unavailable
from pyqueue.messages import Backoff, Reservation
from pyqueue.pipeline.blocking import AnyClient, ClientRunner
from pyqueue.pipeline.graph import Graph, Stage
from pyqueue.pipeline.spark_stage import batches_of, run_batches
from pyqueue.pipeline.verdicts import UNAVAILABLE, Verdict, Verdicts, log_failure
from pyqueue.queues import backend_of
from pyqueue.retrying import RetryDelays
from pyqueue.thread_pool import DaemonThreadPool

__all__ = ["COUNTERS", "Report", "Run"]

log = logging.getLogger("pyqueue")

#: What a stage counts. A message that came in went out, or was dropped, retried, dead (buried) or
#: lost. A released message was given back before its handler started.
COUNTERS: Final = ("in", "out", "dropped", "retried", "dead", "lost", "released")
#: The most messages that one fetch reserves.
_MAX_FETCH: Final = 100
#: The seconds for which the fetcher of a full stage waits, to fetch several messages at once.
_GATHER_S: Final = 0.003
#: The seconds between two checks whether all queues are empty.
_EMPTY_CHECKS: Final = Backoff(base=0.02, maximum=0.5, jitter=0)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    #: The counters of each stage, by the name of its queue: in, out, dropped, retried, dead, lost,
    #: released.
    stages: Mapping[str, Mapping[str, int]]
    seconds: float


class RunningStage:
    """A stage in a run.

    Args:
        stage: the stage.
        queue: its queue, in the async form.
        queues: the queues of all stages of the run, by name.
        runner: runs the plans.
        concurrency: how many handlers the run has at once.
    """

    def __init__(
        self,
        stage: Stage,
        queue: AsyncQueue[Any],
        queues: Mapping[str, AsyncQueue[Any]],
        runner: ClientRunner,
        concurrency: int,
    ) -> None:
        self.stage = stage
        self.queue = queue
        self.verdicts = Verdicts(stage, queue, queues, runner)
        #: One slot for each message between reserving and settling. By default there are as many as
        #: handlers run at once, and as many again for messages that are being settled.
        self.slots = anyio.Semaphore(stage.concurrency or 2 * concurrency, fast_acquire=True)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._runner = runner
        self._misfits = Misfits(self._count_misfit, stop=stage.on_invalid == "stop")

    async def reserve(self, limit: int) -> list[Reservation[Any]]:
        """Reserve up to ``limit`` messages; wait for the first one without limit.

        Raises:
            ConfigurationError: Most of the first messages did not fit the model.
        """
        waiters, misfits = self._runner.waiters(self.stage.name), self._misfits
        plan = backend_of(self.queue).receive(waiters, limit, timeout=None, misfits=misfits)
        return await self._runner.run(plan)

    def _count_misfit(self) -> None:
        self.count("in")
        self.count("dead")
        self._runner.stats["dead"] += 1

    def count(self, counter: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counters[counter] += number


class InFlight:
    """A message whose handler has started."""

    __slots__ = ("cancelled", "delivery", "message", "scope")

    def __init__(self, message: Reservation[Any], delivery: Delivery[Any]) -> None:
        self.message = message
        self.delivery = delivery
        self.scope = anyio.CancelScope()
        #: Why the handler was cancelled: "lost" (its lease), "late" (its time limit) or "stopped".
        self.cancelled: str | None = None

    def cancel(self, reason: str) -> None:
        """Cancel the handler. A handler in a thread is abandoned instead: its thread goes on."""
        self.cancelled = self.cancelled or reason
        self.delivery.lost = True
        self.scope.cancel()


class Run:
    """One run, from the first message fetched to the last one settled.

    Args:
        client: the client.
        graph: the stages.
        concurrency: how many handlers run at once.
        until_empty: end when no stage has a message left.
        grace: the seconds that handlers get to finish when the run is stopped.
        handle_signals: stop at SIGTERM and SIGINT. Only a run in the main thread can.
    """

    def __init__(
        self,
        client: AnyClient,
        graph: Graph,
        *,
        concurrency: int,
        until_empty: bool,
        grace: float,
        handle_signals: bool,
    ) -> None:
        self._client = client
        self._graph = graph
        self._concurrency = concurrency
        self._until_empty = until_empty
        self._grace = grace
        self._handle_signals = (
            handle_signals and threading.current_thread() is threading.main_thread()
        )
        self._threads = DaemonThreadPool()
        self._loop = asyncio.get_running_loop()
        self._fetching, self._drained = anyio.CancelScope(), anyio.Event()
        self._handler_slots = anyio.Semaphore(concurrency, fast_acquire=True)
        self._in_flight: set[InFlight] = set()
        self._error: BaseException | None = None
        self._stages: dict[str, RunningStage] = {}
        self._stopping = self._forced = False

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """The counters of each stage so far."""
        return {name: dict(running.counters) for name, running in self._stages.items()}

    def stop(self) -> None:
        """Fetch no more, and end when the handlers have ended. Any thread may call it.

        The second call does not wait for the handlers.
        """
        with suppress(RuntimeError):  # the run has ended, and its event loop is closed
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping:
            self._forced = True
            self._drained.set()
        self._stopping = True
        self._fetching.cancel()

    def _fail(self, error: QueueError) -> None:
        """Stop the run, which then raises ``error``."""
        self._error = error
        self._stop()

    async def run(self) -> Report:
        """Run until the end, and return the report.

        Raises:
            QueueError: A stage cannot go on, for instance because the client was closed.
        """
        began = time.monotonic()
        self._runner = runner = await ClientRunner.open(self._client, self._threads)
        stages = self._graph.stages
        queues = {name: runner.adapt(stage.queue) for name, stage in stages.items()}
        for name, stage in stages.items():
            self._stages[name] = RunningStage(
                stage, queues[name], queues, runner, self._concurrency
            )
        try:
            async with anyio.create_task_group() as watching:
                if self._handle_signals:
                    watching.start_soon(self._watch_signals)
                await self._serve()
                watching.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await runner.close()
            self._threads.close()
        if self._error is not None:
            raise self._error
        return Report(self.counters, time.monotonic() - began)

    async def _serve(self) -> None:
        """Fetch and handle messages until the run is stopped, then drain."""
        async with anyio.create_task_group() as handling:
            with self._fetching:
                async with anyio.create_task_group() as fetchers:
                    checked = []
                    for running in self._stages.values():
                        if running.stage.batches is None:
                            fetchers.start_soon(self._fetch, running, handling)
                        else:
                            checked.append(anyio.Event())
                            fetchers.start_soon(self._run_spark_stage, running, checked[-1])
                    if self._until_empty:
                        for each in checked:  # an empty queue must not hide a wrong option
                            await each.wait()
                        fetchers.start_soon(self._stop_when_empty)
            if self._in_flight:
                with anyio.move_on_after(self._grace):
                    await self._drained.wait()
            for work in self._in_flight:
                work.cancel("stopped")

    async def _watch_signals(self) -> None:
        with (
            _signal_handlers_restored(),
            anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received,
        ):
            async for number in received:
                log.info(
                    "%s: %s",
                    signal.Signals(number).name,
                    "ending at once" if self._stopping else "ending",
                )
                self._stop()

    async def _stop_when_empty(self) -> None:
        """Stop when a pass over all queues, in the order of the flow, finds every one empty.

        A message that moves on during the pass is found in a later queue. In a graph with a cycle
        it may move to a queue that was checked already, so there it takes two passes.
        """
        order = [name for name in self._graph.depths() if name in self._stages]
        passes = 1 if self._graph.cycle() is None else 2
        delays, seen = RetryDelays(_EMPTY_CHECKS), -1
        while True:
            if not self._in_flight and await self._all_empty(order * passes):
                self._stop()
                return
            arrived = sum(running.counters["in"] for running in self._stages.values())
            if arrived != seen:
                delays.reset()
            seen = arrived
            await anyio.sleep(next(delays))

    async def _all_empty(self, names: list[str]) -> bool:
        try:
            for name in names:
                if await self._stages[name].queue.next_when() is not None:
                    return False
        except Unavailable:
            return False  # the server did not say, so check again later
        except QueueError as error:
            self._fail(error)
            return False
        return not self._in_flight

    # ---- fetching

    async def _fetch(self, running: RunningStage, handling: TaskGroup) -> None:
        """Reserve messages of a stage and have them handled, until cancelled."""
        delays = RetryDelays(UNAVAILABLE)
        while True:
            full = not running.slots.value
            await running.slots.acquire()
            if full and running.stage.concurrency is None:
                # The slots wait for settling, not for handlers. More of them come free right now.
                await anyio.sleep(_GATHER_S)
            async with self._handler_slots:
                pass  # a handler may start now, so it makes sense to fetch
            # Reserve no more than can start now. Another process could start the rest.
            wanted = max(1, min(self._handler_slots.value, running.slots.value + 1, _MAX_FETCH))
            for _ in range(wanted - 1):
                running.slots.acquire_nowait()
            fetched: deque[Reservation[Any]] = deque()
            try:
                fetched.extend(await running.reserve(wanted))
                delays.reset()
            except (ConfigurationError, QueueClosed) as error:
                self._fail(error)
                return
            except QueueError as error:
                delay = next(delays)
                log.warning(
                    "queue %r: could not receive, trying again in %g s: %s",
                    running.stage.name,
                    delay,
                    error,
                )
                await anyio.sleep(delay)
            finally:
                for _ in range(wanted - len(fetched)):
                    running.slots.release()
            await self._start_handlers(running, fetched, handling)

    async def _start_handlers(
        self, running: RunningStage, fetched: deque[Reservation[Any]], handling: TaskGroup
    ) -> None:
        """Start a handler for each message as slots come free.

        A message that would start with less than half of its lease left is given back.
        """
        try:
            while fetched:
                try:
                    self._handler_slots.acquire_nowait()
                except anyio.WouldBlock:
                    with anyio.move_on_after(self._wait_left(fetched[0])):
                        await self._handler_slots.acquire()
                        handling.start_soon(self._handle, running, fetched.popleft())
                        continue
                    return
                if self._wait_left(fetched[0]) < 0:
                    self._handler_slots.release()
                    return
                handling.start_soon(self._handle, running, fetched.popleft())
        finally:
            if fetched:
                with anyio.CancelScope(shield=True):
                    try:
                        await running.queue.release(*fetched)
                    except QueueError as error:  # they come back when their leases end
                        log.info("queue %r: %s", running.stage.name, error)
                running.count("released", len(fetched))
                for _ in fetched:
                    running.slots.release()

    def _wait_left(self, message: Reservation[Any]) -> float:
        """Return the seconds until half of a message's lease is over."""
        return self._runner.seconds_left(message) - message.lease / 2

    async def _run_spark_stage(self, running: RunningStage, checked: anyio.Event) -> None:
        try:
            with self._runner.blocking_connection() as connection:
                targets = [backend_of(await self._runner.target(name)) for name in running.stage.to]
                batches = batches_of(running.stage, targets, connection)
                checked.set()
                await run_batches(running.stage, batches, self._threads, running.count)
        except QueueError as error:
            self._fail(error)

    # ---- handling

    async def _handle(self, running: RunningStage, message: Reservation[Any]) -> None:
        """Have a message handled, and settle it. The caller took a handler slot for it."""
        stage = running.stage
        delivery: Delivery[Any] = Delivery(
            message, running.queue, None if stage.awaited else self._loop
        )
        work = InFlight(message, delivery)
        self._in_flight.add(work)
        running.count("in")
        renewer = self._runner.renewer
        on_lost = partial(self._on_lost_lease, stage, work)
        renewer.add(message, self._runner.renewal, on_lost, stage.name)
        answer, failure = await self._call_handler(stage, work)
        lease = renewer.discard(message)
        try:
            with anyio.CancelScope(shield=True):
                if work.cancelled == "lost" or lease == "lost":
                    counter = "lost"
                elif lease is None or (lease == "suspended" and failure is None):
                    counter = _settled_by_handler(failure)
                else:
                    verdict = _verdict(running, work, answer, failure)
                    counter = await running.verdicts.settle(message, verdict, lambda: self._forced)
            running.count(counter)
            if counter == "lost":
                log.warning(
                    "message %s of queue %r: its lease was lost, its result was not applied",
                    message.id,
                    stage.name,
                )
        finally:
            delivery.lost = True
            running.slots.release()
            self._in_flight.discard(work)
            if self._stopping and not self._in_flight:
                self._drained.set()

    async def _call_handler(
        self, stage: Stage, work: InFlight
    ) -> tuple[object, BaseException | None]:
        """Call the handler. Return its answer, and the exception if it raised one."""
        answer: object = None
        failure: BaseException | None = None
        limit = (
            None
            if stage.time_limit is None
            else self._loop.call_later(stage.time_limit, work.cancel, "late")
        )
        payload = work.message.payload
        arguments = (payload, work.delivery) if stage.delivery else (payload,)
        try:
            with work.scope:
                if stage.awaited:
                    answer = await stage.handler(*arguments)
                else:
                    answer = await self._threads.run(stage.handler, *arguments)
                    if inspect.isawaitable(answer):
                        answer = await answer
        except asyncio.CancelledError as error:
            failure = error
            # A handler may raise CancelledError itself. Only a cancelled scope means a stop.
            if anyio.current_effective_deadline() == -math.inf:
                work.cancel("stopped")
        except BaseException as error:
            failure = error
        finally:
            self._handler_slots.release()
            if limit is not None:
                limit.cancel()
        return answer, failure

    def _on_lost_lease(self, stage: Stage, work: InFlight) -> None:
        """Note that the lease was lost. The renewer of a blocking client calls it in a thread."""
        work.delivery.lost = True
        if stage.awaited:
            self._loop.call_soon_threadsafe(work.cancel, "lost")
        else:
            work.cancelled = "lost"


def _verdict(
    running: RunningStage, work: InFlight, answer: object, failure: BaseException | None
) -> Verdict:
    """Return how to settle a message whose handler ended."""
    verdicts, message = running.verdicts, work.message
    # A handler may end well although it was cancelled. Then its answer counts.
    if work.cancelled is not None and (failure is not None or work.scope.cancelled_caught):
        if work.cancelled == "stopped":
            return verdicts.retry(message, "the worker was stopped while the handler ran", delay=0)
        return verdicts.retry(
            message,
            f"the handler took longer than its time limit of {running.stage.time_limit:g} s",
        )
    if failure is not None:
        return verdicts.of_failure(message, failure)
    return verdicts.of_answer(message, answer)


def _settled_by_handler(failure: BaseException | None) -> str:
    """Return the counter of a message that its handler settled."""
    if isinstance(failure, LeaseLost):
        return "lost"
    if failure is not None:
        log_failure(failure, "a handler failed after it had settled its message")
    return "out"


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers at the end of the block."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
