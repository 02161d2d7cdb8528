"""One run of a pipeline or worker: takes messages, has them handled, and settles each as its handler's answer says.

For each stage one *fetcher* reserves messages and gives each a handler's place; each message at work is a task of its own. What is in
progress is bounded twice: ``concurrency`` handlers run at once over all stages, and each stage has so many messages of its own between
reserving and settling. It is written once, on AsyncQueue; for a blocking client a ThreadDriver carries that.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup
from bson import ObjectId
from pydantic import BaseModel
from pymongo.errors import PyMongoError

from pyqueue.async_queues import AsyncQueue
from pyqueue.connecting import runner_of
from pyqueue.delivery import Delivery, Drop, Many, Reject, RetryLater, To
from pyqueue.drivers import AsyncDriver, BlockingAdapter, Driver, translated
from pyqueue.errors import (
    ConfigurationError,
    Fenced,
    InvalidMessage,
    LeaseLost,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.messages import UNCHANGED, Reservation
from pyqueue.payloads import Codec
from pyqueue.pipeline.graph import Graph, Stage
from pyqueue.queues import backend_of
from pyqueue.renewal import LeaseRenewer
from pyqueue.requests import Plan
from pyqueue.thread_pool import DaemonThreadPool
from pyqueue.waiters import Waiters

__all__ = ["COUNTERS", "Report", "Run"]

log = logging.getLogger("pyqueue")

#: What a stage counts. What came in went out, was dropped, retried, dead (buried) or lost; released is what was given back unworked.
COUNTERS: Final = ("in", "out", "dropped", "retried", "dead", "lost", "released")
#: What one look takes at most.
CLAIM: Final = 100
#: Transactions at once: each takes several round trips, and more at once only wait for each other.
TRANSACTIONS: Final = 8
#: Seconds for which a message is held while a transaction settles it. Should the process die in it, the server keeps the transaction
#: open for 60 s, and a message whose lease ran out meanwhile would block all claims of its queue.
ORPHAN = 75.0
#: Seconds for which a full stage waits for more places than one.
TOGETHER: Final = 0.003
#: Seconds between looks whether all is empty, and between tries at a server that does not answer: the first and the longest.
LOOKS: Final = (0.02, 0.5)
TRIES: Final = (0.1, 5.0)
#: Whatever a payload holds of pydantic's, dumped by its own type.
ANYTHING: Final = Codec[Any](Any)

#: How a message is settled: what it counts as, and what does it.
Verdict = tuple[str, Callable[[], Awaitable[Any]]]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did."""

    #: The counters of each stage, by its queue: in, out, dropped, retried, dead, lost, released.
    stages: Mapping[str, Mapping[str, int]]
    seconds: float


class PlanRunner:
    """What an AsyncQueue needs of a client, for either kind of client."""

    def __init__(
        self, client: Any, driver: Driver | AsyncDriver, threads: DaemonThreadPool
    ) -> None:
        self._client = client
        self._threads = threads
        self.blocking = isinstance(driver, Driver)
        self.driver = BlockingAdapter(driver, threads) if isinstance(driver, Driver) else driver
        runner = runner_of(client)
        self.namespace: str = runner.namespace
        self.url: str | None = runner.url
        self.renewer: LeaseRenewer = runner.renewer

    async def run(self, plan: Plan[Any]) -> Any:
        """Carry a plan out."""
        return await self.driver.run(plan)

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that wait in this client."""
        return self.driver.waiters(queue)

    async def run_transaction(self, fn: Callable[[Any], Awaitable[Any]]) -> Any:
        """Await ``fn(session)`` in a transaction."""
        if not self.blocking:
            return await self._client.run_transaction(fn)
        loop = asyncio.get_running_loop()

        def attempt(session: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(fn(session), loop).result()  # type: ignore[arg-type]  # it is a coroutine

        return await self._threads.run(self._client.run_transaction, attempt)

    async def close(self) -> None:
        """Give up what is not the client's."""
        if self.blocking:
            await self.driver.settled()
            self.driver.close_waiters()


class Active:
    """A stage in a run."""

    def __init__(self, stage: Stage, face: PlanRunner, concurrency: int) -> None:
        self.stage = stage
        self.queue: AsyncQueue[Any] = AsyncQueue(face, backend_of(stage.queue))
        self.options = backend_of(stage.queue).options
        # Without a bound of its own: as many as are worked on at once, and as many again that are being settled.
        self.places = anyio.Semaphore(stage.concurrency or 2 * concurrency, fast_acquire=True)
        self.counters = dict.fromkeys(COUNTERS, 0)


class Work:
    """A message that a handler works on."""

    __slots__ = ("cancelled", "delivery", "message", "scope")

    def __init__(self, message: Reservation[Any], delivery: Delivery[Any]) -> None:
        self.message = message
        self.delivery = delivery
        self.scope = anyio.CancelScope()
        #: Why the handler was cancelled: "lost" (its lease), "late" (its time limit) or "stopped".
        self.cancelled: str | None = None

    def cancel(self, why: str) -> None:
        """Stop the handler: one that is awaited is cancelled, one in a thread is abandoned."""
        self.cancelled = self.cancelled or why
        self.delivery.lost = True
        self.scope.cancel()


class Run:
    """One run, from the first message taken to the last one settled.

    Args:
        client: a Client or an AsyncClient.
        graph: the stages.
        concurrency: how many handlers run at once.
        until_empty: end when no stage has anything left.
        grace: seconds that handlers are given when it is stopped.
        signals: stop at SIGTERM and SIGINT.
    """

    def __init__(
        self,
        client: Any,
        graph: Graph,
        *,
        concurrency: int,
        until_empty: bool,
        grace: float,
        signals: bool,
    ) -> None:
        self._client = client
        self._graph = graph
        self._concurrency = concurrency
        self._until_empty = until_empty
        self._grace = grace
        self._signals = signals and threading.current_thread() is threading.main_thread()
        self._threads = DaemonThreadPool()
        self._loop = asyncio.get_running_loop()
        self._taking, self._calm = anyio.CancelScope(), anyio.Event()
        self._places = anyio.Semaphore(concurrency, fast_acquire=True)
        self._transactions = anyio.Semaphore(TRANSACTIONS)
        self._works: set[Work] = set()
        self._error: BaseException | None = None
        self._stages: dict[str, Active] = {}
        self._stopping = self._forced = False

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """The counters of each stage by now."""
        return {name: dict(active.counters) for name, active in self._stages.items()}

    def stop(self) -> None:
        """Take nothing more, and end when the handlers have ended; the second time: at once. From any thread."""
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping:
            self._forced = True
            self._calm.set()
        self._stopping = True
        self._taking.cancel()

    async def run(self) -> Report:
        """Run."""
        began = time.monotonic()
        runner: Any = runner_of(self._client)
        opened = await runner.opened() if hasattr(runner, "opened") else runner.open()
        self._face = face = PlanRunner(self._client, opened, self._threads)
        for stage in self._graph.stages.values():
            self._stages[stage.name] = Active(stage, face, self._concurrency)
        try:
            async with anyio.create_task_group() as watching:
                if self._signals:
                    watching.start_soon(self._watch_signals)
                await self._serve()
                watching.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await face.close()
            self._threads.close()
        if self._error is not None:
            raise self._error
        return Report(self.counters, time.monotonic() - began)

    async def _serve(self) -> None:
        async with anyio.create_task_group() as works:
            with self._taking:
                async with anyio.create_task_group() as fetchers:
                    for active in self._stages.values():
                        if active.stage.batches is None:
                            fetchers.start_soon(self._fetch, active, works)
                        else:
                            fetchers.start_soon(self._fetch_batches, active)
                    if self._until_empty:
                        fetchers.start_soon(self._watch_for_the_end)
            if self._works:
                with anyio.move_on_after(self._grace):
                    await self._calm.wait()
            for work in self._works:
                work.cancel("stopped")

    async def _watch_signals(self) -> None:
        with (
            _handlers_kept(),
            anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received,
        ):
            async for number in received:
                log.info(
                    "%s: %s",
                    signal.Signals(number).name,
                    "ending at once" if self._stopping else "ending",
                )
                self._stop()

    async def _watch_for_the_end(self) -> None:
        """End when a pass over all queues, in the order of the flow, finds none with anything left.

        What moves on meanwhile is met further down; around a cycle it might slip by, so there it takes two passes.
        """
        order = [name for name in self._graph.depths() if name in self._stages]
        passes = 1 if self._graph.cycle() is None else 2
        pause, seen = LOOKS[0], -1
        while True:
            if not self._works and await self._all_empty(order * passes):
                self._stop()
                return
            came = sum(active.counters["in"] for active in self._stages.values())
            pause, seen = (LOOKS[0] if came != seen else min(pause * 2, LOOKS[1])), came
            await anyio.sleep(pause)

    async def _all_empty(self, names: list[str]) -> bool:
        try:
            for name in names:
                if await self._stages[name].queue.next_when() is not None:
                    return False
        except QueueError:
            return False  # nobody knows
        return not self._works

    # ---- taking

    async def _fetch(self, active: Active, works: TaskGroup) -> None:
        pause = TRIES[0]
        while True:
            full = not active.places.value
            await active.places.acquire()
            if full and active.stage.concurrency is None:
                await anyio.sleep(
                    TOGETHER
                )  # it waits for settling, not for handlers: more places come with this one
            async with self._places:
                pass
            # No more than can begin now: what others could work on does not wait here.
            wanted = max(1, min(self._places.value, active.places.value + 1, CLAIM))
            for _ in range(wanted - 1):
                active.places.acquire_nowait()
            taken: deque[Reservation[Any]] = deque()
            try:
                taken.extend(await active.queue.reserve_many(wanted))
                pause = TRIES[0]
            except (ConfigurationError, QueueClosed) as error:
                self._error = error
                self._stop()
                return
            except QueueError as error:
                log.warning(
                    "queue %r: could not receive, trying again in %g s: %s",
                    active.stage.name,
                    pause,
                    error,
                )
                await anyio.sleep(pause)
                pause = min(pause * 2, TRIES[1])
            finally:
                for _ in range(wanted - len(taken)):
                    active.places.release()
            await self._begin(active, taken, works)

    async def _fetch_batches(self, active: Active) -> None:
        """Work on the batches of a stage of Spark's, one after the other, in a thread."""
        pause = LOOKS[0]
        try:
            with self._blocking() as client:
                batches = _batches(client, active.stage)
                while True:
                    try:
                        with anyio.CancelScope(
                            shield=True
                        ):  # what is under way is brought to its end
                            report = await self._threads.run(batches.run_once, _session)
                        _count(active.counters, report)
                        pause = LOOKS[0] if report.claimed else min(pause * 2, LOOKS[1])
                    except (ConfigurationError, QueueClosed, Fenced):
                        raise
                    except Exception as error:
                        log.warning(
                            "queue %r: a batch failed, trying again in %g s: %s",
                            active.stage.name,
                            TRIES[1],
                            error,
                        )
                        pause = TRIES[1]
                    await anyio.sleep(pause)
        except QueueError as error:
            self._error = error
            self._stop()

    @contextmanager
    def _blocking(self) -> Iterator[Any]:
        """A blocking client: the one there is, or one beside the async one."""
        if self._face.blocking:
            yield self._client
        elif self._face.url is None:
            raise ConfigurationError(
                "spark: a stage of Spark's needs a client that was given a URL, or a blocking one"
            )
        else:
            with type(self._client)._twin(self._face.url, namespace=self._face.namespace) as client:
                yield client

    async def _begin(
        self, active: Active, taken: deque[Reservation[Any]], works: TaskGroup
    ) -> None:
        """Give each message a handler's place. Those that would begin with less than half of their lease left are given back."""
        try:
            while taken:
                try:
                    self._places.acquire_nowait()
                except anyio.WouldBlock:
                    with anyio.move_on_after(self._left(taken[0]) - taken[0].lease / 2):
                        await self._places.acquire()
                        works.start_soon(self._work, active, taken.popleft())
                        continue
                    return
                if self._left(taken[0]) < taken[0].lease / 2:
                    self._places.release()
                    return
                works.start_soon(self._work, active, taken.popleft())
        finally:
            if taken:
                with anyio.CancelScope(shield=True):
                    try:
                        await active.queue.release(*taken)
                    except QueueError as error:
                        log.info(
                            "queue %r: %s", active.stage.name, error
                        )  # then the lease gives them back
                active.counters["released"] += len(taken)
                for _ in taken:
                    active.places.release()

    def _left(self, message: Reservation[Any]) -> float:
        """Seconds until its lease ends."""
        return (message.until - self._face.driver.clock.now()).total_seconds()

    # ---- working

    async def _work(self, active: Active, message: Reservation[Any]) -> None:
        stage = active.stage
        delivery: Delivery[Any] = Delivery(
            message, active.queue, None if stage.awaited else self._loop
        )
        work = Work(message, delivery)
        limit = (
            None
            if stage.time_limit is None
            else self._loop.call_later(stage.time_limit, work.cancel, "late")
        )
        self._works.add(work)
        active.counters["in"] += 1
        result: Any = None
        failure: BaseException | None = None
        self._face.renewer.add(message, stage.queue.extend, partial(self._lost, stage, work))
        try:
            with work.scope:
                given = (message.payload, delivery) if stage.delivery else (message.payload,)
                if stage.awaited:
                    result = await stage.handler(*given)
                else:
                    result = await self._threads.run(stage.handler, *given)
                    if inspect.isawaitable(result):
                        result = await result
        except asyncio.CancelledError as error:
            failure = error
            if (
                anyio.current_effective_deadline() == -math.inf
            ):  # else it is one of the handler's own
                work.cancel("stopped")
        except BaseException as error:
            failure = error
        finally:
            self._places.release()
            if limit is not None:
                limit.cancel()
        held = self._face.renewer.discard(message)
        try:
            with anyio.CancelScope(shield=True):
                if work.cancelled == "lost" or held == "lost":
                    counter = "lost"
                elif held is None or (held == "suspended" and failure is None):
                    counter = _settled_by_the_handler(failure)
                else:
                    counter = await self._settle(
                        active, work, self._verdict(active, work, result, failure)
                    )
            active.counters[counter] += 1
            if counter == "lost":
                log.warning(
                    "message %s of queue %r: its lease was lost, its result was not applied",
                    message.id,
                    stage.name,
                )
        finally:
            delivery.lost = True
            active.places.release()
            self._works.discard(work)
            if self._stopping and not self._works:
                self._calm.set()

    def _lost(self, stage: Stage, work: Work) -> None:
        """A lease was lost; the renewer says so, of a blocking client in its own thread."""
        work.delivery.lost = True
        if stage.awaited:
            self._loop.call_soon_threadsafe(work.cancel, "lost")
        else:
            work.cancelled = "lost"

    def _verdict(
        self, active: Active, work: Work, result: Any, failure: BaseException | None
    ) -> Verdict:
        """What is to be done with a message whose handler ended."""
        queue, message, stage = active.queue, work.message, active.stage
        if work.cancelled is not None and (failure is not None or work.scope.cancelled_caught):
            if work.cancelled == "stopped":
                return self._again(
                    active, message, error="the worker was stopped while it was worked on", delay=0
                )
            return self._again(
                active,
                message,
                error=f"the handler took longer than its time limit of {stage.time_limit:g} s",
            )
        if isinstance(failure, RetryLater):
            return self._again(active, message, error=failure.reason, delay=failure.delay)
        try:
            if isinstance(failure, Reject):
                raise failure
            if failure is not None:
                log.warning(
                    "message %s of queue %r failed, try %d",
                    message.id,
                    stage.name,
                    message.tries,
                    exc_info=failure,
                )
                return self._again(active, message, error=failure)
            if isinstance(result, Drop):
                return "dropped", partial(queue.commit, message)
            if isinstance(result, Many):
                return "out", self._fan_out(
                    active, message, [self._target(stage, each) for each in result.outputs]
                )
            if isinstance(result, To):
                to, payload = self._target(stage, result)
            elif stage.kind == "choice":
                raise Reject(
                    f"{stage.label} answered {_short(result)}; a choice answers To, Drop or Many"
                )
            elif stage.kind == "link":
                to, payload = self._target(stage, To(stage.to[0], result))
            else:
                return "out", partial(queue.commit, message)
            return "out", partial(queue.move, message, to=to, payload=payload)
        except (Reject, InvalidMessage) as error:
            return self._bury(active, message, error)
        except Exception as error:  # of the answer's own making, such as a repr that fails
            return self._again(active, message, error=error)

    def _again(self, active: Active, message: Reservation[Any], **options: Any) -> Verdict:
        last = (
            message.dead is None
            and active.options.max_tries is not None
            and message.tries >= active.options.max_tries
        )
        return "dead" if last else "retried", partial(active.queue.rollback, message, **options)

    def _bury(self, active: Active, message: Reservation[Any], error: BaseException) -> Verdict:
        log.warning(
            "message %s of queue %r: to the dead-letter queue: %s",
            message.id,
            active.stage.name,
            error,
        )
        if message.dead is not None:  # it is in one
            return self._again(active, message, error=error)
        return "dead", partial(active.queue.bury, message, error=error)

    def _target(self, stage: Stage, answer: To[Any]) -> tuple[Any, Any]:
        """Where an answer goes, and the payload as it is given to the queue."""
        if answer.queue not in stage.to:
            raise Reject(
                f"{stage.label} answered {_short(answer)}; its stage leads to {', '.join(stage.to) or 'no other queue'}"
            )
        following = self._stages.get(answer.queue)
        if following is not None:
            return following.queue, answer.payload
        return answer.queue, plain(answer.payload)

    # ---- settling

    async def _settle(self, active: Active, work: Work, verdict: Verdict) -> str:
        """Carry a verdict out, again while the server cannot be reached and the lease lasts. Answers what it came to."""
        message, pause = work.message, TRIES[0]
        counter, settle = verdict
        mended = False
        while True:
            try:
                await settle()
                return counter
            except LeaseLost:
                return "lost"
            except Unavailable as error:
                if self._forced or self._left(message) < pause:
                    log.warning(
                        "message %s of queue %r is left to its lease: %s",
                        message.id,
                        active.stage.name,
                        error,
                    )
                    return "lost"
                await anyio.sleep(pause)
                pause = min(pause * 2, TRIES[1])
            except Exception as error:
                if mended:
                    log.exception(
                        "message %s of queue %r is left to its lease", message.id, active.stage.name
                    )
                    return "lost"
                mended = True
                fault = isinstance(error, (InvalidMessage, TypeError))
                counter, settle = (
                    self._bury(active, message, error)
                    if fault
                    else self._again(active, message, error=error)
                )

    def _fan_out(
        self, active: Active, message: Reservation[Any], outputs: list[tuple[Any, Any]]
    ) -> Callable[[], Awaitable[None]]:
        """Push the outputs and commit the input."""
        batches: dict[str, tuple[AsyncQueue[Any], list[Any], list[ObjectId]]] = {}
        for index, (to, payload) in enumerate(outputs):
            queue = (
                to
                if isinstance(to, AsyncQueue)
                else AsyncQueue(self._face, backend_of(self._client.queue(to)))
            )
            if payload is UNCHANGED:
                payload = backend_of(active.queue).codec.dump(message.payload)
            _, payloads, ids = batches.setdefault(queue.name, (queue, [], []))
            payloads.append(payload)
            ids.append(_derived_id(message, queue.name, index))

        async def push(session: Any) -> None:
            for queue, payloads, ids in batches.values():
                await queue.push_many(
                    payloads,
                    headers=message.headers,
                    ids=None if session is not None else ids,
                    session=session,
                )
            await active.queue.commit(message, session=session)

        async def settle() -> None:
            if not batches or not self._face.driver.replicated:
                return await push(None)
            if self._left(message) < ORPHAN:
                await active.queue.extend(message, lease=ORPHAN)
            try:
                async with self._transactions:
                    await self._face.run_transaction(push)
            except PyMongoError as error:
                raise translated(error) from error

        return settle


def plain(payload: Any) -> Any:
    """A payload for a queue whose model is not known: what is pydantic's or a dataclass's is dumped by its own type."""
    return (
        ANYTHING.dump(payload)
        if isinstance(payload, BaseModel) or is_dataclass(payload)
        else payload
    )


def _derived_id(message: Reservation[Any], target: str, index: int) -> ObjectId:
    """The id of an output where there are no transactions: the same over all tries, another when the message comes anew.

    It comes anew by a move or a replay, each of which leaves a mark in the trail; a burial and the redrive after it leave two, which
    do not count.
    """
    trail = [(mark["q"], str(mark["at"])) for mark in message.trail]
    while len(trail) > 1 and trail[-2][0] == message.queue and trail[-1][0] != message.queue:
        del trail[-2:]
    arrival = trail[-1:]
    told = repr((str(message.id), type(message.id).__name__, message.queue, arrival, target))
    return ObjectId(
        hashlib.blake2b(told.encode(), digest_size=9).digest() + index.to_bytes(3, "big")
    )


def _batches(client: Any, stage: Stage) -> Any:
    try:
        from pyqueue.spark.batches import Batches
    except ImportError as error:
        raise ConfigurationError(
            f'spark: the stage of queue {stage.name!r} needs PySpark: pip install "pyqueue-mongo[spark]"'
        ) from error
    return Batches(
        client,
        backend_of(stage.queue),
        stage.to[0],
        transform=stage.handler,
        **(stage.batches or {}),
    )


def _session() -> Any:
    from pyqueue.spark.session import session

    return session("pyqueue")


def _count(counters: dict[str, int], report: Any) -> None:
    counters["in"] += report.claimed
    counters["dropped"] += report.dropped
    counters["retried"] += report.failed
    counters["lost"] += report.lost
    counters["out"] += report.claimed - report.dropped - report.failed - report.lost


def _settled_by_the_handler(failure: BaseException | None) -> str:
    if isinstance(failure, LeaseLost):
        return "lost"
    if failure is not None:
        log.warning("a handler failed after it had settled its message", exc_info=failure)
    return "out"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put back the signal handlers of before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
