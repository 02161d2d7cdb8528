"""Run the handlers of a worker or a pipeline in a test: all of them, or one handler once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeVar, cast, overload

import anyio
from anyio.abc import TaskGroup
from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends import transitions
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.queue_plans import found
from pyqueue.documents import message_of
from pyqueue.errors import ConfigurationError, QueueError
from pyqueue.messages import Duration, Reservation
from pyqueue.pipeline import (
    AwaitedReport,
    Report,
    Runner,
    around_of,
    client_of,
    concurrency_of,
)
from pyqueue.pipeline.blocking import connection_of, require_no_loop
from pyqueue.pipeline.engine import Run
from pyqueue.pipeline.running_stage import Notes, RunningStage
from pyqueue.queue_base import backend_of
from pyqueue.requests import Document, Find, FindAndModify, Plan, ServerTime
from pyqueue.runtime.connecting import Connection
from pyqueue.stream_base import ConsumerBase
from pyqueue.testing.ahead import move_clock

R = TypeVar("R")

#: The maximum time by which a drain moves the clock.
_HORIZON: Final = timedelta(days=30)
#: The longest step of the clock while a message is ready but may not start.
_MAX_STEP: Final = timedelta(hours=1)
#: How many messages a drain reserves at once for a stage without ``batch``.
_FETCHED: Final = 100


@overload
def drain(worker: Runner[Report], *, horizon: Duration = _HORIZON) -> Report: ...
@overload
def drain(worker: Runner[AwaitedReport], *, horizon: Duration = _HORIZON) -> AwaitedReport: ...
def drain(worker: Runner[Any], *, horizon: Duration = _HORIZON) -> Any:
    """Handle messages until the queues of a worker or a pipeline are empty.

    If no message may start now, the clock of the client moves to the time at which the next message
    may start. So delays, backoffs, rates and the leases of other holders take no time. Messages of
    paused queues stay.

    Args:
        worker: A Worker or a Pipeline. If its client is async, await the result.
        horizon: The longest time, in seconds, by which the clock moves. Messages that
            become ready later stay in their queues.

    Returns:
        The Report of the run, as ``Worker.run`` returns it.

    Raises:
        ConfigurationError: A stage cannot run, or is a Spark stage.
    """
    _check_worker(worker)
    length = timedelta(seconds=arguments.duration("horizon", horizon))

    async def work() -> Report:
        return await _Drain(worker, length).run()

    return _run(worker, work)


def _check_worker(worker: object) -> None:
    if not isinstance(worker, Runner):
        raise ConfigurationError(
            f"worker: expected a Worker or a Pipeline, found {type(worker).__name__}; pass the "
            "object that has the handlers"
        )


def _run(worker: Runner[Any], work: Callable[[], Awaitable[R]]) -> Any:
    """Run async work if the client of the worker is blocking; if not, return it to be awaited."""
    if not isinstance(connection_of(client_of(worker)), Connection):
        return work()
    require_no_loop()
    return anyio.run(work)


class _TestRun(Run):
    """A run that a test controls."""

    def __init__(self, worker: Runner[Any]) -> None:
        worker.graph.check(allow_cycles=True)
        for stage in worker.graph.stages.values():
            if stage.spark is not None:
                raise ConfigurationError(
                    f"worker: the stage of queue {stage.name!r} is a Spark stage; run the pipeline "
                    "with until_empty=True instead"
                )
        super().__init__(
            client_of(worker),
            worker.graph,
            concurrency=concurrency_of(worker),
            until_empty=True,
            grace=30,
            handle_signals=False,
            around=around_of(worker),
        )

    async def _fetch_all(self, handling: TaskGroup) -> None:
        try:
            await self._work()
        except QueueError as error:
            self._fail(error)
        self._stop()

    async def _work(self) -> None:
        raise NotImplementedError


class _Drain(_TestRun):
    """Handles messages in rounds. The clock moves between two rounds, while nothing is held."""

    def __init__(self, worker: Runner[Any], horizon: timedelta) -> None:
        super().__init__(worker)
        self._left = horizon
        self._step = timedelta()

    async def _work(self) -> None:
        while True:
            async with anyio.create_task_group() as handling:
                started = [await self._start(each, handling) for each in self._stages.values()]
            if any(started):
                self._step = timedelta()
            elif not await self._pass_time():
                return

    async def _start(self, running: RunningStage, handling: TaskGroup) -> bool:
        """Start the handlers of messages that may start now. Return whether there were messages."""
        try:
            messages = await running.reserve(running.stage.batch or _FETCHED, 0)
            running.check()
        except QueueError as error:  # not in a task group, which would wrap it
            self._fail(error)
            return False
        started = bool(messages)
        try:
            await self._start_handlers(running, messages, handling)
        finally:
            if messages:
                await running.give_back(messages)
        return started

    async def _pass_time(self) -> bool:
        """Move the clock to when the next message may start. Return False if that is too late."""
        connection = connection_of(self._client)
        now = connection.open().clock.now()
        times = [await self._next_start(each, now) for each in self._stages.values()]
        known = [each for each in times if each is not None]
        if not known:
            return False
        length = max(min(known) - now, timedelta(milliseconds=1))
        self._left -= length
        if self._left < timedelta():
            return False
        move_clock(connection, length)
        return True

    async def _next_start(self, running: RunningStage, now: datetime) -> datetime | None:
        """Return when the next message of a stage may start, or None if no message will."""
        when = await running.queue.next_when()
        if when is None or when > now:
            return when
        # A message is ready, but it may not start.
        state = self._runner.waiters(running.stage.name).scan
        if state.paused or await running.queue.paused():
            return None
        limit = state.limit
        starts = [limit.next_start, limit.first_start(now), limit.blocked_until]
        known = [each for each in starts if each is not None and each > now]
        # A consumer never expects to wait for more than a few seconds. So the steps get longer.
        step, self._step = self._step, min(max(timedelta(seconds=1), 2 * self._step), _MAX_STEP)
        return max(now + step, min(known, default=now))


# ---- one handler once


@dataclass(frozen=True, slots=True)
class Performed:
    """The outcome of ``perform`` for the message that it handled."""

    #: "committed", "moved" (to another queue), "dropped", "retried", "dead" (in the dead-letter
    #: queue), "lost" (the handler lost the lease), or "cancelled".
    outcome: Literal["committed", "moved", "dropped", "retried", "dead", "lost", "cancelled"]
    #: Why the message was retried or buried, as in ``Message.error``: ``{type, message, at}``.
    error: Mapping[str, Any] | None
    #: The last progress that the handler stored: ``{fraction, note}``.
    progress: Mapping[str, Any] | None


@overload
def perform(
    worker: Runner[Report],
    queue: str,
    payload: Any,
    *,
    tries: int = 1,
    headers: Mapping[str, Any] | None = None,
) -> Performed: ...
@overload
def perform(
    worker: Runner[AwaitedReport],
    queue: str,
    payload: Any,
    *,
    tries: int = 1,
    headers: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, Performed]: ...
def perform(
    worker: Runner[Any],
    queue: str,
    payload: Any,
    *,
    tries: int = 1,
    headers: Mapping[str, Any] | None = None,
) -> Any:
    """Handle one message with the handler of a queue, as a worker would.

    The message is stored and settled in the queue, but no other message is handled. After a
    failure, the message waits there for its next try, or is in the dead-letter queue. Limits and
    groups do not delay the message.

    Args:
        worker: A Worker or a Pipeline. If its client is async, await the result.
        queue: The queue whose handler is called.
        payload: The payload of the message.
        tries: The number of this try. If it equals the stage's ``max_tries``, this is the last try.
        headers: The headers of the message.

    Returns:
        A Performed: the outcome, the error and the progress.

    Raises:
        ConfigurationError: The worker has no handler for this queue.
        InvalidMessage: The payload does not fit the model of the stage.
    """
    _check_worker(worker)
    stage = worker.graph.stages.get(queue) if isinstance(queue, str) else None
    if stage is None:
        names = ", ".join(map(repr, worker.graph.stages)) or "none"
        raise ConfigurationError(
            f"queue: {queue!r} has no handler; the queues with handlers are: {names}"
        )
    if isinstance(stage.queue, ConsumerBase):
        raise ConfigurationError(
            f"queue: {queue!r} is a consumer group, which perform does not support; append to the "
            "stream, and call drain"
        )
    arguments.count("tries", tries)

    async def work() -> Performed:
        run = _Perform(worker, queue, (payload, tries, headers))
        await run.run()
        return run.performed()

    return _run(worker, work)


class _Perform(_TestRun):
    """Handles one message."""

    def __init__(self, worker: Runner[Any], name: str, given: tuple[Any, int, Any]) -> None:
        super().__init__(worker)
        self._name, self._given = name, given
        self._after: Document | None = None
        self._notes: _Recorder | None = None

    async def _work(self) -> None:
        running = self._stages[self._name]
        self._notes = running.notes = _Recorder(running.queue)
        message = await self._runner.run(self._reserved(running))
        async with anyio.create_task_group() as handling:
            await self._start_handlers(running, [message], handling)
        documents = await self._runner.run(iter(Find({"_id": message.id}, limit=1)))
        self._after = documents[0] if documents else None

    def _reserved(self, running: RunningStage) -> Plan[Reservation[Any]]:
        """Push the message with a delay, so that no consumer receives it first, and reserve it."""
        payload, tries, headers = self._given
        plans = yield from found(backend_of(running.queue), names=True)
        lease_s, id = plans.options.lease, ObjectId()
        yield from plans.push([payload], ids=[id], headers=headers, delay=lease_s)
        now = yield from ServerTime()
        terms = ClaimTerms.of(plans.terms, lease_s)
        update = transitions.claiming(now, lease_s, terms.owner, count=False)
        update["$set"] |= {"tries": tries, "due": now}
        claim = terms.kind.claiming(update)
        document = yield from FindAndModify({"_id": id, "q": plans.queue}, claim)
        assert document is not None
        loaded = plans.codec.load(document["payload"])
        message = message_of(document, loaded, now, lease=lease_s)
        return cast("Reservation[Any]", message)  # it has a lease

    def performed(self) -> Performed:
        """Return the outcome for the message."""
        counters = self._stages[self._name].counters
        counted = [name for name, number in counters.items() if number and name != "in"]
        outcome: Any = counted[0] if counted else "lost"
        after = self._after or {}
        if outcome == "out":
            moved = after.get("q", self._name) != self._name
            outcome = "moved" if moved else "committed"
        failed = outcome in ("retried", "dead")
        progress = None if self._notes is None else self._notes.last
        return Performed(outcome, after.get("error") if failed else None, progress)


class _Recorder(Notes):
    """Stores the notes of a handler, and remembers the last progress."""

    last: Mapping[str, Any] | None = None

    async def progress(
        self, message: Reservation[Any], fraction: float, note: str | None = None
    ) -> None:
        """Store the progress, and remember it."""
        await super().progress(message, fraction, note)
        self.last = {"fraction": fraction, "note": note}
