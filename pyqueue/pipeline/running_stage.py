"""A stage in a run: its slots and counters, and how it receives and returns messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio

from pyqueue.async_queues import AsyncQueue
from pyqueue.backends.invalid import Misfits
from pyqueue.backends.settling import check_progress
from pyqueue.delivery import BatchFailed
from pyqueue.errors import ConfigurationError, QueueError
from pyqueue.messages import PackedReservation, Reservation, StreamReservation
from pyqueue.pipeline.blocking import ClientRunner
from pyqueue.pipeline.calls import Call
from pyqueue.pipeline.graph import Stage
from pyqueue.pipeline.verdicts import Decision, Verdicts
from pyqueue.queue_base import receiving

log = logging.getLogger("pyqueue")

#: The counters of a stage. A message that came in went out, or was dropped, retried, dead (buried),
#: lost or cancelled. A released message was given back before its handler started, or because the
#: stage stops with an error.
COUNTERS: Final = ("in", "out", "dropped", "retried", "dead", "lost", "released", "cancelled")
#: The longest time for which messages gather before a batch takes them, in seconds.
_GATHER_S: Final = 0.05
#: The longest time for which a batch waits for a message before it checks whether any is expected.
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    #: The counters of each stage, keyed by the name of its queue: in, out, dropped, retried, dead,
    #: lost, released, cancelled.
    stages: Mapping[str, Mapping[str, int]]
    #: How many seconds the run took.
    seconds: float


class Notes:
    """Stores what the handlers of a stage note about their messages: progress and checkpoints.

    Args:
        queue: The queue of the stage.
    """

    def __init__(self, queue: AsyncQueue[Any]) -> None:
        self._queue = queue
        self._warned = False

    async def progress(
        self, message: Reservation[Any], fraction: float, note: str | None = None
    ) -> None:
        """Store the progress of the work, unless the message is part of a shared document."""
        if not isinstance(message, (PackedReservation, StreamReservation)):
            await self._queue.progress(message, fraction, note)
            return
        check_progress(fraction, note)
        if not self._warned:
            self._warned = True
            log.warning(
                "queue %r: progress is not stored, because messages share documents there; the "
                "handlers continue",
                self._queue.name,
            )

    async def checkpoint(self, message: Reservation[Any], state: Any) -> None:
        """Store the state of the work. The next try finds this state in ``message.checkpoint``."""
        await self._queue.checkpoint(message, state)


class RunningStage:
    """A stage in a run.

    Args:
        stage: The stage to run.
        queues: The queues of the run, in their async form, keyed by name.
        runner: Runs the plans.
        concurrency: How many handlers run at once, over all stages.
        fail: Stops the run with an error.
    """

    def __init__(
        self,
        stage: Stage,
        queues: Mapping[str, AsyncQueue[Any]],
        runner: ClientRunner,
        concurrency: int,
        fail: Callable[[QueueError], None],
    ) -> None:
        self.stage = stage
        self.queue = queues[stage.name]
        self.verdicts = Verdicts(stage, queues, runner, fail)
        self.notes = Notes(self.queue)
        if (stage.batch or 1) > 1 and self.verdicts.max_tries == 1:
            log.warning(
                "queue %r: with max_tries=1 each call has one message instead of up to %d, because "
                "a failed batch would bury all of its messages; use max_tries=2 or more",
                stage.name,
                stage.batch,
            )
        #: Each call has a slot until it is settled. The default is twice the number of handlers
        #: that run at once: the second half is for calls that are being settled.
        self.slots = anyio.Semaphore(stage.concurrency or 2 * concurrency, fast_acquire=True)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._runner = runner
        self._misfits = Misfits(self._count_misfit, stop=stage.on_invalid == "stop")

    async def reserve(self, limit: int, timeout: float | None = None) -> list[Reservation[Any]]:
        """Reserve up to ``limit`` messages; wait up to ``timeout`` seconds for the first one.

        Raises:
            ConfigurationError: Most of the first messages did not fit the model.
        """
        plan = receiving(self.queue, limit, timeout=timeout, misfits=self._misfits)
        return await self._runner.run(plan)

    def check(self) -> None:
        """Check that the stage may continue, as the next ``reserve`` does.

        Raises:
            ConfigurationError: Most of the first messages did not fit the model.
        """
        if self._misfits.verdict is not None:
            raise ConfigurationError(self._misfits.verdict)

    async def fill(
        self, batch: list[Reservation[Any]], expected: Callable[[], bool] | None
    ) -> None:
        """Add messages to a batch until it is full, its window ends, or no more are expected.

        A message never waits here longer than half of its lease.

        Args:
            batch: The messages so far.
            expected: Returns whether more messages are expected. None means that they always are.
        """
        size, window_s = self.stage.batch, self.stage.window
        if size is None or not window_s or not batch:
            return
        first = batch[0]
        window_s = min(window_s, self._runner.seconds_left(first) - first.lease / 2)
        end = time.monotonic() + window_s
        while len(batch) < size and (left_s := end - time.monotonic()) > 0:
            if expected is not None:
                if not expected():  # messages expected before are in the queue by now
                    batch += await self.reserve(size - len(batch), 0)
                    return
                left_s = min(left_s, _LOOK_S)
            # Wait for messages to gather, so that they share a claim.
            await anyio.sleep(min(left_s, window_s / 10, _GATHER_S))
            batch += await self.reserve(size - len(batch), left_s)

    def wait_left(self, message: Reservation[Any]) -> float:
        """Return how many more seconds a message may wait until its handler starts.

        The handler must start within half of the lease. A batch takes up to half of the lease to
        fill, and may wait for another quarter.
        """
        least = message.lease / (2 if self.stage.batch is None else 4)
        return self._runner.seconds_left(message) - least

    def decide(
        self,
        call: Call,
        held: Mapping[int, Reservation[Any]],
        answer: object,
        failure: BaseException | None,
    ) -> list[Decision]:
        """Return how to settle the messages of a call that are still held.

        A cancelled message is ended instead of being tried again or buried.

        Args:
            call: The call, whose handler has ended.
            held: The messages, keyed by their indexes in the call.
            answer: The return value of the handler.
            failure: The exception that the handler raised or returned instead, or None.
        """
        told = {place for place in held if call.deliveries[place].cancelled}
        if not told:
            return self._decided(call, held, answer, failure)
        rest = held
        if failure is not None and not isinstance(failure, BatchFailed):  # it is about all of them
            rest = {place: each for place, each in held.items() if place not in told}
        verdicts = dict(self._decided(call, rest, answer, failure) if rest else ())
        end = self.verdicts.end()
        for place in told:
            verdict = verdicts.get(held[place], end)
            verdicts[held[place]] = verdict if verdict.counter in ("out", "dropped") else end
        return list(verdicts.items())

    def _decided(
        self,
        call: Call,
        held: Mapping[int, Reservation[Any]],
        answer: object,
        failure: BaseException | None,
    ) -> list[Decision]:
        # A handler may end well although it was cancelled. Then its answer counts.
        if call.cancelled is None or (failure is None and not call.scope.cancelled_caught):
            return self.verdicts.of_call(held, len(call.messages), answer, failure)
        delay = 0 if call.cancelled == "stopped" else None
        reason = "the worker was stopped while the handler ran"
        if call.cancelled == "late":
            reason = f"the handler took longer than its time limit of {self.stage.time_limit:g} s"
        return [(each, self.verdicts.retry(each, reason, delay)) for each in held.values()]

    async def give_back(self, messages: Sequence[Reservation[Any]]) -> None:
        """Release messages whose handler has not started."""
        try:
            await self.queue.release(*messages)
        except QueueError as error:  # they come back when their leases end
            log.info("queue %r: %s", self.stage.name, error)
        self.count("released", len(messages))

    def _count_misfit(self) -> None:
        self.count("in")
        self.count("dead")
        self._runner.stats["dead"] += 1

    def count(self, counter: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counters[counter] += number
