"""One run of a pipeline or a worker: fetch messages, call handlers, stop and drain.

Each stage has one *fetcher*, which reserves messages and waits until a handler may start. Each call
of a handler is a task, with one message or, in a stage with ``batch``, with many. Two limits bound
the work: ``concurrency`` handlers run at once over all stages, and each stage has a limit for the
calls that have begun but are not settled yet.

``calls`` groups the messages into calls. ``verdicts`` decides from the handler's answer how the
messages are settled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from pyqueue.backends.queue_plans import found, found_target
from pyqueue.backends.recovering import pending
from pyqueue.backends.schedules.definitions import Definition
from pyqueue.delivery import Delivery
from pyqueue.errors import ConfigurationError, LeaseLost, QueueClosed, QueueError, Unavailable
from pyqueue.messages import Backoff, Reservation
from pyqueue.payloads import log_failure
from pyqueue.pipeline.around import Around, current_deliveries, handled
from pyqueue.pipeline.blocking import AnyClient, ClientRunner
from pyqueue.pipeline.calls import Call, grouped
from pyqueue.pipeline.cancelling import Cancellations
from pyqueue.pipeline.graph import Graph, Stage
from pyqueue.pipeline.running_stage import Report, RunningStage
from pyqueue.pipeline.schedules import keep_ticking
from pyqueue.pipeline.spark_stage import batches_of, run_batches
from pyqueue.pipeline.stopping import watch_signals
from pyqueue.pipeline.verdicts import UNAVAILABLE
from pyqueue.queue_base import backend_of
from pyqueue.runtime.renewal import State
from pyqueue.runtime.retrying import RetryDelays
from pyqueue.runtime.thread_pool import DaemonThreadPool
from pyqueue.telling import tell_lost

log = logging.getLogger("pyqueue")

#: The maximum number of messages that one fetch reserves for a stage without ``batch``.
_MAX_FETCH: Final = 100
#: The seconds for which the fetcher of a full stage waits, to fetch several messages at once.
_GATHER_S: Final = 0.003
#: How long a run waits at its start until it can hear of cancelled messages, in seconds. If it
#: cannot, the renewals of leases find the cancelled messages.
_HEAR_S: Final = 1.0
#: The seconds between two checks whether all queues are empty.
_EMPTY_CHECKS: Final = Backoff(base=0.02, maximum=0.5, jitter=0)


class Run:
    """One run, from the first message fetched to the last one settled.

    Args:
        client: The client of the queues.
        graph: The stages to run.
        concurrency: How many handlers run at once.
        until_empty: Whether to end when no stage has a message left.
        grace: The seconds that handlers get to finish when the run is stopped.
        handle_signals: Whether to stop at SIGTERM and SIGINT. Only a run in the main thread can.
        schedules: The schedules to store. A run with ``until_empty`` does not store them.
        around: The lifespan and the middleware.

    Raises:
        ConfigurationError: The middleware cannot call a handler.
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
        schedules: Sequence[Definition] = (),
        around: Around | None = None,
    ) -> None:
        self._client = client
        self._graph = graph
        self._concurrency = concurrency
        self._until_empty = until_empty
        self._grace = grace
        self._schedules = schedules
        self._around = around or Around()
        self._around.check(graph.stages.values())
        #: The value of the lifespan.
        self._state: Any = None
        self._handle_signals = (
            handle_signals and threading.current_thread() is threading.main_thread()
        )
        self._threads = DaemonThreadPool()
        self._loop = asyncio.get_running_loop()
        self._living, self._fetching = anyio.CancelScope(), anyio.CancelScope()
        self._drained = anyio.Event()
        self._handler_slots = anyio.Semaphore(concurrency, fast_acquire=True)
        self._in_flight: set[Call] = set()
        self._error: BaseException | None = None
        self._stages: dict[str, RunningStage] = {}
        self._stopping = self._forced = self._serving = False

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """The counters of each stage so far."""
        return {name: dict(running.counters) for name, running in self._stages.items()}

    @property
    def in_flight(self) -> list[Call]:
        """The handler calls whose messages are not settled yet. Any thread may read this."""
        return list(self._in_flight)

    def stop(self) -> None:
        """Fetch no more messages, and end when the handlers have ended. Any thread may call this.

        A second call ends the run without waiting for the handlers.
        """
        with suppress(RuntimeError):  # the run has ended, and its event loop is closed
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping:
            self._forced = True
            self._drained.set()
        self._stopping = True
        self._fetching.cancel()
        if not self._serving:  # the lifespan is beginning or ending
            self._living.cancel()

    def _fail(self, error: QueueError) -> None:
        """Stop the run because of an error. The run raises the first error that it was given."""
        self._error = self._error or error
        if not self._stopping:  # a second stop would not wait for the handlers
            self._stop()

    async def run(self) -> Report:
        """Run until the end, and return the report.

        Raises:
            QueueError: A stage cannot continue, for instance because the client was closed.
            Exception: The lifespan failed.
        """
        began = time.monotonic()
        self._runner = runner = await ClientRunner.open(self._client, self._threads)
        stages = self._graph.stages
        queues = {
            name: runner.adapt(runner.output(name, spec))
            for name, spec in self._graph.specs.items()
        }
        queues |= {name: runner.adapt(stage.queue) for name, stage in stages.items()}
        self._cancellations = Cancellations(runner, self._loop)
        for name, stage in stages.items():
            self._stages[name] = RunningStage(stage, queues, runner, self._concurrency, self._fail)
        try:
            async with anyio.create_task_group() as watching:
                if self._handle_signals:
                    watching.start_soon(watch_signals, self._stop, lambda: self._stopping)
                if (pulse := self._around.pulse) is not None:
                    pulse.receiving = lambda: self._serving and not self._stopping
                    watching.start_soon(pulse.turn)
                    watching.start_soon(pulse.reach, runner)
                watching.start_soon(self._cancellations.watch)
                await self._live()
                watching.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await runner.close()
            self._threads.close()
        if self._error is not None:
            raise self._error
        return Report(self.counters, time.monotonic() - began)

    async def _live(self) -> None:
        """Enter the lifespan, serve until the run is stopped, and leave the lifespan."""
        with self._living:
            with anyio.move_on_after(_HEAR_S):
                await self._cancellations.listening.wait()
            try:
                async with self._around.lifespan.entered(self._threads) as self._state:
                    self._serving = True
                    try:
                        await self._serve()
                    finally:
                        self._serving = False
            except Exception as error:  # not in the task group, which would wrap it
                self._error = self._error or error

    async def _serve(self) -> None:
        """Fetch and handle messages until the run is stopped, then drain."""
        async with anyio.create_task_group() as handling:
            with self._fetching:
                if await self._check_queues():
                    await self._fetch_all(handling)
            if self._in_flight:
                with anyio.move_on_after(self._grace):
                    await self._drained.wait()
            for call in self._in_flight:
                call.cancel("stopped")

    async def _check_queues(self) -> bool:
        """Determine the kind of each queue that a stage reads. Return whether the run may begin.

        The run fails if an output is a stream.
        """
        try:
            for stage in self._graph.stages.values():
                await self._runner.name_kind(stage.queue)
            graph = self._graph
            for name in graph.outputs:
                output = self._runner.output(name, graph.specs.get(name))
                await self._runner.run(found_target(backend_of(output)))
        except (ConfigurationError, QueueClosed) as error:
            self._fail(error)
            return False
        except QueueError:
            log.info("the queues were not checked, because the server did not answer")
        return True

    async def _fetch_all(self, handling: TaskGroup) -> None:
        async with anyio.create_task_group() as fetchers:
            checked = []
            for running in self._stages.values():
                if running.stage.spark is None:
                    fetchers.start_soon(self._fetch, running, handling)
                else:
                    checked.append(anyio.Event())
                    fetchers.start_soon(self._run_spark_stage, running, checked[-1])
            if self._until_empty:
                for each in checked:  # an empty queue must not hide a wrong option
                    await each.wait()
                fetchers.start_soon(self._stop_when_empty)
            else:
                fetchers.start_soon(keep_ticking, self._runner, self._schedules, self._fail)

    async def _stop_when_empty(self) -> None:
        """Stop when a pass over all queues, from the first to the last, finds all of them empty.

        A message that moves on during the pass is found in a later queue. In a graph with a cycle,
        it may move to a queue that was already checked, so two passes are needed.
        """
        order = [name for name in self._graph.depths() if name in self._stages]
        passes = 1 if self._graph.cycle() is None else 2
        delays, seen = RetryDelays(_EMPTY_CHECKS), -1
        while True:
            before = self._arrived
            empty = not self._in_flight and await self._all_empty(order * passes)
            if empty and self._arrived == before:
                self._stop()
                return
            if self._arrived != seen:
                delays.reset()
            seen = self._arrived
            await anyio.sleep(next(delays))

    @property
    def _arrived(self) -> int:
        """How many messages the stages have received."""
        return sum(running.counters["in"] for running in self._stages.values())

    async def _all_empty(self, names: list[str]) -> bool:
        try:
            await self._runner.look()  # a message of a gather may enter one of the queues
            for name in names:
                if await self._stages[name].queue.next_when() is not None:
                    return False
                if await self._runner.run(pending(name)):  # outputs are on their way
                    return False
        except Unavailable:
            return False  # the server did not say, so check again later
        except QueueError as error:
            self._fail(error)
            return False
        return not self._in_flight

    # ---- fetching

    async def _fetch(self, running: RunningStage, handling: TaskGroup) -> None:
        """Reserve messages of a stage and start their handlers, until cancelled."""
        stage, delays = running.stage, RetryDelays(UNAVAILABLE)
        # In a run that ends, a batch waits only for messages that this run may send.
        expected = (lambda: bool(self._in_flight)) if self._until_empty else None
        while True:
            full = not running.slots.value
            async with running.slots:
                pass  # only this task takes slots
            if full and stage.concurrency is None:
                # The slots wait for settling, not for handlers. More of them become free soon.
                await anyio.sleep(_GATHER_S)
            async with self._handler_slots:
                pass  # a handler may start now, so it makes sense to fetch
            # Reserve no more than can start now. Another process could start the other messages.
            startable = max(1, min(self._handler_slots.value, running.slots.value, _MAX_FETCH))
            fetched: list[Reservation[Any]] = []
            try:
                try:
                    fetched = await running.reserve(stage.batch or startable)
                    await running.fill(fetched, expected)
                    delays.reset()
                except (ConfigurationError, QueueClosed) as error:
                    self._fail(error)
                    return
                except QueueError as error:
                    delay = next(delays)
                    log.warning(
                        "queue %r: could not receive, trying again in %g s: %s",
                        stage.name,
                        delay,
                        error,
                    )
                    if not fetched:
                        await anyio.sleep(delay)
                await self._start_handlers(running, fetched, handling)
            finally:
                if fetched:
                    with anyio.CancelScope(shield=True):
                        await running.give_back(fetched)

    async def _start_handlers(
        self, running: RunningStage, fetched: list[Reservation[Any]], handling: TaskGroup
    ) -> None:
        """Start handlers when slots become free, and remove their messages from ``fetched``.

        A message whose lease would end too soon after the start of its handler stays in the list.
        """
        calls = grouped(running.stage, running.verdicts.max_tries, fetched)
        fetched[:] = [message for messages in calls for message in messages]
        for messages in calls:
            if not await self._take_slots(running, running.wait_left(messages[0])):
                return
            handling.start_soon(self._handle, running, messages)
            del fetched[: len(messages)]

    async def _take_slots(self, running: RunningStage, limit_s: float) -> bool:
        """Take a slot of the stage and one of the run. Return whether they became free in time."""
        if limit_s < 0:
            return False
        if running.slots.value and self._handler_slots.value:
            running.slots.acquire_nowait()
            self._handler_slots.acquire_nowait()
            return True
        with anyio.move_on_after(limit_s):
            await running.slots.acquire()
            try:
                await self._handler_slots.acquire()
            except BaseException:
                running.slots.release()
                raise
            return True
        return False

    async def _run_spark_stage(self, running: RunningStage, checked: anyio.Event) -> None:
        try:
            with self._runner.blocking_connection() as connection:
                queues = [running.stage.queue, *map(self._runner.output, running.stage.to)]
                source, *targets = [
                    await self._runner.run(found(backend_of(each), names=True)) for each in queues
                ]
                batches = batches_of(running.stage, source, targets, connection)
                checked.set()
                await run_batches(running.stage, batches, self._threads, running.count)
        except QueueError as error:
            self._fail(error)

    # ---- handling

    async def _handle(self, running: RunningStage, messages: Sequence[Reservation[Any]]) -> None:
        """Call the handler with messages, and settle them. The caller has taken the slots."""
        stage, renewer, watching = running.stage, self._runner.renewer, self._cancellations
        loop = None if stage.awaited else self._loop
        call = Call(messages, stage, running.notes, loop, self._state)
        current_deliveries.set(call.deliveries)
        self._in_flight.add(call)
        running.count("in", len(messages))
        for message, delivery in zip(messages, call.deliveries, strict=True):
            on_lost = partial(self._on_lost_lease, stage, call, delivery)
            age_s = message.lease - self._runner.seconds_left(message)
            renewer.add(message, watching.renewal, on_lost, (stage.name, self), age_s)
            watching.add(message, partial(call.cancel_one, delivery), age_s)
        answer, failure = await self._call_handler(stage, call)
        for each in messages:
            watching.discard(each)
        states = [renewer.discard(each) for each in messages]
        try:
            with anyio.CancelScope(shield=True):
                await self._settle(running, call, states, answer, failure)
        finally:
            for delivery in call.deliveries:
                delivery.lost = True
            running.slots.release()
            self._in_flight.discard(call)
            if self._stopping and not self._in_flight:
                self._drained.set()

    async def _settle(
        self,
        running: RunningStage,
        call: Call,
        states: Sequence[State | None],
        answer: object,
        failure: BaseException | None,
    ) -> None:
        """Settle and count the messages of a call whose handler has ended."""
        held: dict[int, Reservation[Any]] = {}
        counted: list[tuple[Reservation[Any], str]] = []
        for place, (message, state) in enumerate(zip(call.messages, states, strict=True)):
            if state == "lost":
                counted.append((message, "lost"))
            elif state is None or (state == "suspended" and failure is None):
                counted.append((message, _settled_by_handler(message, failure)))
            else:
                held[place] = message
        lapsed = [
            each for each, state in zip(call.messages, states, strict=True) if state == "lost"
        ]
        tell_lost(self._runner.hooks, running.stage.name, lapsed)
        if held:
            decisions = running.decide(call, held, answer, failure)
            counted += await running.verdicts.settle(decisions, lambda: self._forced)
        elif None in states and failure is not None and not isinstance(failure, LeaseLost):
            log_failure(failure, "a handler failed after it had settled its message")
        for _, counter in counted:
            running.count(counter)
        if lost := [message.id for message, counter in counted if counter == "lost"]:
            log.warning(
                "message %s%s of queue %r: the lease was lost, so the result was not applied",
                lost[0],
                f" and {len(lost) - 1} more" if len(lost) > 1 else "",
                running.stage.name,
            )

    async def _call_handler(self, stage: Stage, call: Call) -> tuple[object, BaseException | None]:
        """Call the handler. Return its answer, and the exception if it raised or returned one."""
        answer: object = None
        failure: BaseException | None = None
        limit = (
            None
            if stage.time_limit is None
            else self._loop.call_later(stage.time_limit, call.cancel, "late")
        )
        try:
            with call.scope, self._handling(call):
                answer = await handled(stage, call, self._around, self._threads)
            if isinstance(answer, BaseException):
                answer, failure = None, answer
        except asyncio.CancelledError as error:
            failure = error
            # A handler may raise CancelledError itself. Only a cancelled scope means a stop.
            if anyio.current_effective_deadline() == -math.inf:
                call.cancel("stopped")
        except BaseException as error:
            failure = error
        finally:
            self._handler_slots.release()
            if limit is not None:
                limit.cancel()
        return answer, failure

    def _handling(self, call: Call) -> AbstractContextManager[object]:
        """Return the context manager of the hooks, which is entered around the handler."""
        hooks = self._runner.hooks
        return nullcontext() if hooks is None else hooks.handling(call.deliveries)

    def _on_lost_lease(self, stage: Stage, call: Call, delivery: Delivery[Any]) -> None:
        """Record that a lease was lost. The renewer of a blocking client calls this in a thread."""
        delivery.lost = True
        if stage.awaited:
            self._loop.call_soon_threadsafe(call.lose_one, delivery)


def _settled_by_handler(message: Reservation[Any], failure: BaseException | None) -> str:
    """Return the name of the counter for a message that the handler settled itself."""
    if not isinstance(failure, LeaseLost):
        return "out"
    gone = (*failure.lost, *failure.unknown)
    return "lost" if not gone or any(each is message for each in gone) else "out"
