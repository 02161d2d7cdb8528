"""Decide from a handler's answer or exception how its messages are settled, and settle them.

``Verdicts`` does this for the messages of one stage. Messages of a batch that are settled in the
same way share a command. The server can refuse a settlement, for instance because the payload is
too large. Then a second verdict buries the message or retries it. If the set-up is wrong,
for instance because a privilege was withdrawn, no message is to blame: the messages are released,
and the run fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
from bson import ObjectId

from pyqueue.async_queues import AsyncQueue
from pyqueue.backends.forms import RollbackOptions
from pyqueue.backends.invalid import CHECKED_FIRST, Tally
from pyqueue.backends.outputs import Output, Then
from pyqueue.backends.queue_plans import found, found_target
from pyqueue.backends.settling import fan_out, finish_cancelled
from pyqueue.backends.taking_kind import again_in_kind
from pyqueue.delivery import BatchFailed, Drop, Many, Reject, RetryLater, To
from pyqueue.documents import hashable_id
from pyqueue.errors import (
    ConfigurationError,
    DuplicateKey,
    InvalidMessage,
    LeaseLost,
    QueueError,
    TargetRefused,
    Unavailable,
)
from pyqueue.messages import UNCHANGED, Backoff, Duration, Reservation, is_last_try
from pyqueue.payloads import error_text, log_failure
from pyqueue.pipeline.answers import Results, alike, dumped, shown_answer
from pyqueue.pipeline.blocking import ClientRunner
from pyqueue.pipeline.calls import answers_of
from pyqueue.pipeline.failure_log import FailureLog
from pyqueue.pipeline.graph import Stage
from pyqueue.queue_base import backend_of, settling
from pyqueue.requests import Plan
from pyqueue.runtime.retrying import RetryDelays

log = logging.getLogger("pyqueue")

#: The seconds between two tries while the server does not answer.
UNAVAILABLE: Final = Backoff(base=0.1, maximum=5, jitter=0)

#: The errors of settling for which the answer, or the message, is to blame.
_OF_THE_MESSAGE: Final = (InvalidMessage, TypeError, TargetRefused, DuplicateKey)
#: The shortest time between two logs of unexpected errors of one class, in seconds.
_LOG_INTERVAL_S: Final = 60.0

#: An output of Many: its new id; the queue, or its name; the payload; and the To.
_Output = tuple[ObjectId, AsyncQueue[Any] | str, Any, To[Any]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one message is settled."""

    #: The counter that counts the message once it is settled.
    counter: str
    #: Settles several messages whose verdicts have equal groups.
    settle: Callable[[Sequence[Decision]], Awaitable[object]]
    #: Verdicts with equal groups are carried out together, unless this is None.
    group: Hashable = None
    #: The payload with which the message moves on, or its result.
    payload: Any = UNCHANGED


#: A message and the verdict on it.
Decision = tuple[Reservation[Any], Verdict]


class Verdicts:
    """Decide how the messages of one stage are settled, and settle them.

    Args:
        stage: The stage that received the messages.
        queues: The queues whose model and options are known, keyed by name. Any other target of the
            stage is known only by its name.
        runner: Runs the plans.
        fail: Stops the run with an error.
    """

    def __init__(
        self,
        stage: Stage,
        queues: Mapping[str, AsyncQueue[Any]],
        runner: ClientRunner,
        fail: Callable[[QueueError], None],
    ) -> None:
        self._stage = stage
        self._queue = queues[stage.name]
        self._queues = queues
        self._runner = runner
        self._fail = fail
        #: How many answers were right or wrong so far. At least a whole batch is checked.
        self._answers = Tally(max(CHECKED_FIRST, stage.batch or 0))
        #: Whether the stage has stopped because most of its answers are wrong.
        self._stopped = False
        #: Until when errors of a class are not logged again, by the monotonic clock.
        self._silent_until: dict[type[Exception], float] = {}
        self._failures = FailureLog()
        self._results = Results(stage.name)
        #: The maximum number of tries of a message, or None for no limit.
        self.max_tries: int | None = backend_of(stage.queue).options.max_tries

    # ---- deciding

    def of_call(
        self,
        held: Mapping[int, Reservation[Any]],
        number: int,
        answer: object,
        failure: BaseException | None,
    ) -> list[Decision]:
        """Return the decision on each message after a call of the handler.

        Args:
            held: The messages that this process still holds, keyed by their indexes in the call.
            number: How many messages the handler was called with.
            answer: The return value of the handler.
            failure: The exception that the handler raised or returned instead, or None.
        """
        answers = [answer]
        if self._stage.batch is not None:
            failed = failure if isinstance(failure, BatchFailed) else None
            try:
                if failure is failed:
                    answers, failure = answers_of(self._stage, number, answer, failed), None
            except ValueError as error:
                failure = error
        if failure is not None:
            return self._of_failure(list(held.values()), failure, alone=number == 1)
        return [(each, self._of_item(each, answers[place])) for place, each in held.items()]

    def _of_item(self, message: Reservation[Any], item: object) -> Verdict:
        """Return the verdict on one message. An exception as its answer counts as raised."""
        if self._stage.batch is not None and isinstance(item, BaseException):
            [(_, verdict)] = self._of_failure([message], item, alone=True)
            return verdict
        return self._of_answer(message, item)

    def _of_answer(self, message: Reservation[Any], answer: object) -> Verdict:
        """Return the verdict on a message whose handler returned ``answer``."""
        try:
            verdict = self._settlement(message, answer)
        except (Reject, InvalidMessage) as error:
            return self._of_wrong_answer(message, error)
        except Exception as error:  # raised by the answer itself, for instance by its __repr__
            return self.retry(message, error)
        self._answers.right += 1
        return verdict

    def _of_wrong_answer(self, message: Reservation[Any], error: Exception) -> Verdict:
        """Return the verdict on a message whose answer is unusable.

        Such messages are buried. With ``on_invalid="stop"``, the stage stops once most of its first
        answers are wrong. It then releases the message of each further wrong answer.
        """
        if self._stopped:
            return self.release()
        tally = self._answers
        tally.wrong += 1
        if tally.stops and self._stage.on_invalid == "stop":
            self._stopped = True
            dead_letter = backend_of(self._stage.queue).options.dead_letter
            self._fail(
                ConfigurationError(
                    f"the stage of queue {self._stage.name!r} stops: {tally.wrong} of its first "
                    f"{tally.seen} answers are wrong, and their messages went to {dead_letter!r}; "
                    f"the last one, {message.id}: {error_text(error)}. Correct the handler, and "
                    f'send the messages back with "pyqueue redrive {dead_letter}"; or set '
                    'on_invalid="bury" for the stage, so that it buries such messages and continues'
                )
            )
        return self.bury(message, error)

    def _settlement(self, message: Reservation[Any], answer: object) -> Verdict:
        stage = self._stage
        if isinstance(answer, Drop):
            return Verdict("dropped", self._commit, "commit")
        if isinstance(answer, Many):
            # The ids are the same if the settlement is repeated.
            every = answer.outputs if answer.then is None else [*answer.outputs, answer.then]
            outputs = [(ObjectId(), *self._target(each), each) for each in every]
            return Verdict("out", partial(self._fan_out, answer, outputs))
        if stage.kind == "link" and answer is None:
            raise Reject(
                f"{stage.label} returned None, but a link returns a payload; to finish the "
                f"message, return Drop(), and to send None on, return To({stage.to[0]!r}, None)"
            )
        if stage.kind == "link" and not isinstance(answer, To):
            answer = To(stage.to[0], answer)
        if isinstance(answer, To):
            to, payload = self._target(answer)
            move = partial(self._move, to, answer)
            return Verdict("out", move, alike(answer), payload)
        if stage.kind == "choice":
            raise Reject(
                f"{stage.label} returned {shown_answer(answer)}, but a choice returns To, Drop or "
                "Many"
            )
        if message.keep is not None and message.keep.result is not None:
            return Verdict("out", self._finish, payload=self._results.of(message, answer))
        return Verdict("out", self._commit, "commit")

    def _of_failure(
        self, messages: Sequence[Reservation[Any]], failure: BaseException, *, alone: bool
    ) -> list[Decision]:
        """Return the decisions on messages whose handler raised ``failure``.

        A Reject does not tell which message of a batch it is about. If the batch has several
        messages, they are tried again in smaller batches until this is clear.
        """
        reason: BaseException | str | None = failure
        delay: Duration | None = None
        counted = True
        if isinstance(failure, RetryLater):
            reason, delay, counted = failure.reason, failure.delay, failure.counted
        elif isinstance(failure, Reject) or self._stage.rules.rejects(failure):
            if alone:
                return [(each, self.bury(each, failure)) for each in messages]
            log.warning("%d messages of queue %r: %s", len(messages), self._stage.name, failure)
        elif alone:
            text = "message %s of queue %r failed, try %d"
            self._failures.log(failure, text, messages[0].id, self._stage.name, messages[0].tries)
        else:
            text = "a batch of %d messages of queue %r failed, the first is %s"
            self._failures.log(failure, text, len(messages), self._stage.name, messages[0].id)
        return [(each, self.retry(each, reason, delay, counted=counted)) for each in messages]

    def retry(
        self,
        message: Reservation[Any],
        error: BaseException | str | None,
        delay: Duration | None = None,
        *,
        counted: bool = True,
    ) -> Verdict:
        """Return the verdict to try a message again, or to bury it after its last try.

        Args:
            message: The message whose try failed.
            error: The reason for the retry.
            delay: Seconds until the next try; None means the stage's backoff.
            counted: Whether the failed try counts.
        """
        counter = "dead" if counted and is_last_try(message, self.max_tries) else "retried"
        how = RollbackOptions(error=error, delay=delay, counted=counted)
        group = ("retry", _identity(error), delay, counted)
        return Verdict(counter, partial(self._roll_back, how), group)

    def bury(self, message: Reservation[Any], error: BaseException) -> Verdict:
        """Return the verdict to send a message to the dead-letter queue.

        A message that is already in a dead-letter queue is not buried again; it is retried.
        """
        if message.dead is not None:
            return self.retry(message, error)
        log.warning(
            "message %s of queue %r goes to the dead-letter queue: %s",
            message.id,
            self._stage.name,
            error,
        )
        return Verdict("dead", partial(self._bury, error), ("bury", _identity(error)))

    def end(self) -> Verdict:
        """Return the verdict to end a cancelled message."""
        return Verdict("cancelled", self._end, "end")

    def release(self) -> Verdict:
        """Return the verdict to return a message to its place, without counting the try."""
        return Verdict("released", self._release, "release")

    def _target(self, answer: To[Any]) -> tuple[AsyncQueue[Any] | str, Any]:
        """Return the queue that an answer names, and the payload in the form for this queue."""
        if answer.queue not in self._stage.to:
            raise Reject(
                f"{self._stage.label} returned {shown_answer(answer)}, but "
                f"its stage leads to {', '.join(self._stage.to) or 'no other queue'}"
            )
        following = self._queues.get(answer.queue)
        if following is None:
            return answer.queue, dumped(answer.payload)
        return following, answer.payload

    # ---- settling

    async def settle(
        self, decisions: Iterable[Decision], hurried: Callable[[], bool]
    ) -> Sequence[tuple[Reservation[Any], str]]:
        """Carry out decisions. Decisions whose verdicts have the same group share a command.

        While the server does not answer, the commands are repeated until the leases end.

        Args:
            decisions: The messages, and the verdicts on them.
            hurried: Returns whether to give up instead of waiting for the server.

        Returns:
            Each message, with the name of the counter that counts it.
        """
        groups: dict[Hashable, list[Decision]] = {}
        for place, decision in enumerate(decisions):
            group = decision[1].group
            groups.setdefault(place if group is None else group, []).append(decision)
        return await self._settle_groups(list(groups.values()), hurried)

    async def _settle_groups(
        self, groups: Sequence[list[Decision]], hurried: Callable[[], bool]
    ) -> list[tuple[Reservation[Any], str]]:
        counted: list[tuple[Reservation[Any], str]] = []

        async def settle(group: list[Decision]) -> None:
            counted.extend(await self._settle_group(group, hurried))

        if len(groups) == 1:
            await settle(groups[0])
        else:
            async with anyio.create_task_group() as tasks:
                for group in groups:
                    tasks.start_soon(settle, group)
        return counted

    async def _settle_group(
        self, group: list[Decision], hurried: Callable[[], bool]
    ) -> list[tuple[Reservation[Any], str]]:
        """Settle messages with one command, or each message separately if the command fails."""
        counters = {id(each): verdict.counter for each, verdict in group}
        messages = [each for each, _ in group]
        lost: Sequence[Reservation[Any]] = ()
        delays = RetryDelays(UNAVAILABLE)
        replaced = False
        while True:
            try:
                await group[0][1].settle(group)
                break
            except LeaseLost as error:
                lost = (*error.lost, *error.unknown)
                break
            except Unavailable as error:
                # The other messages of the group are settled.
                open_ids = {hashable_id(each) for each in error.ids}
                group = [each for each in group if hashable_id(each[0].id) in open_ids] or group
                delay = next(delays)
                left_s = max(self._runner.seconds_left(each) for each, _ in group)
                if hurried() or left_s < delay:
                    lost = [each for each, _ in group]
                    log.warning("%s: %s", self._described(lost), error)
                    break
                await anyio.sleep(delay)
            except Exception as error:
                setup = _setup_error(error, group[0][1])
                if setup is not None:
                    self._fail(setup)
                elif len(group) > 1:
                    return await self._settle_groups([[each] for each in group], hurried)
                self._log_unexpected(error, group[0][0])
                if group[0][1].counter == "released" or (replaced and setup is None):
                    lost = [each for each, _ in group]
                    log_failure(error, "%s", self._described(lost))
                    break
                replaced = True
                group = [
                    (each, self._instead(each, verdict, error) if setup is None else self.release())
                    for each, verdict in group
                ]
                counters.update((id(each), verdict.counter) for each, verdict in group)
        counters.update((id(each), "lost") for each in lost)
        return [(each, counters[id(each)]) for each in messages]

    def _instead(self, message: Reservation[Any], verdict: Verdict, error: Exception) -> Verdict:
        """Return the second verdict on a message whose first verdict could not be carried out."""
        if not isinstance(error, _OF_THE_MESSAGE):
            return self.retry(message, error)
        if verdict.counter != "out" or isinstance(error, DuplicateKey):
            return self.bury(message, error)
        self._answers.right -= 1
        # The name of an internal error would mean nothing to the reader of the message.
        reason = Reject(str(error)) if isinstance(error, TargetRefused) else error
        return self._of_wrong_answer(message, reason)

    def _log_unexpected(self, error: Exception, message: Reservation[Any]) -> None:
        """Log that a message was not settled, once a minute for each kind of error."""
        now, kind = time.monotonic(), type(error)
        if isinstance(error, _OF_THE_MESSAGE) or now < self._silent_until.get(kind, now):
            return
        self._silent_until[kind] = now + _LOG_INTERVAL_S
        text = "message %s of queue %r could not be settled"
        log_failure(error, text, message.id, self._stage.name)

    def _described(self, left: Sequence[Reservation[Any]]) -> str:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        stays = "stay held until their leases end" if more else "stays held until its lease ends"
        return f"message {left[0].id}{more} of queue {self._stage.name!r} {stays}"

    async def _commit(self, group: Sequence[Decision]) -> None:
        await self._queue.commit(*(each for each, _ in group))

    async def _finish(self, group: Sequence[Decision]) -> None:
        """Commit a message with its result."""
        [(message, verdict)] = group
        await self._queue.commit(message, result=verdict.payload)

    async def _move(
        self, to: AsyncQueue[Any] | str, answer: To[Any], group: Sequence[Decision]
    ) -> None:
        await self._queue.move_many(
            [(each, verdict.payload) for each, verdict in group],
            to=to,
            headers=answer.headers,
            delay=answer.delay,
            at=answer.at,
            key=answer.key,
            priority=answer.priority,
            group=answer.group,
        )

    async def _roll_back(self, how: RollbackOptions, group: Sequence[Decision]) -> None:
        await self._queue.rollback(*(each for each, _ in group), **how)

    async def _release(self, group: Sequence[Decision]) -> None:
        await self._queue.release(*(each for each, _ in group))

    async def _end(self, group: Sequence[Decision]) -> None:
        held = [each for each, _ in group]
        await self._runner.run(settling(self._queue, held, self._ended(held), "cancel"))

    def _ended(self, held: Sequence[Reservation[Any]]) -> Plan[None]:
        source = yield from found(backend_of(self._queue))
        yield from finish_cancelled(source.terms, held)

    async def _bury(self, error: BaseException, group: Sequence[Decision]) -> None:
        await self._queue.bury(*(each for each, _ in group), error=error)

    # ---- Many

    async def _fan_out(
        self, answer: Many, outputs: Sequence[_Output], group: Sequence[Decision]
    ) -> None:
        """Commit the message and create all of its outputs (``then`` last), or do neither."""
        [(message, _)] = group
        if not outputs:
            await self._queue.commit(message)
            return
        queues = [
            self._queue.name,
            *(to if isinstance(to, str) else to.name for _, to, *_ in outputs),
        ]
        plan = again_in_kind(queues, partial(self._fanned_out, answer, outputs, message))
        await self._runner.run(settling(self._queue, [message], plan, "commit"))

    def _fanned_out(
        self, many: Many, outputs: Sequence[_Output], message: Reservation[Any]
    ) -> Plan[None]:
        source = yield from found(backend_of(self._queue))
        made = []
        for id, to, payload, answer in outputs:
            queue = self._runner.output(to) if isinstance(to, str) else to
            target = yield from found_target(backend_of(queue))
            if payload is UNCHANGED:
                payload = backend_of(self._queue).codec.dump(message.payload)
            priority, turn = answer.priority, answer.group
            if priority is None and "priority" in target.kind.capabilities:
                priority = message.priority
            if turn is None and "group" in target.kind.capabilities:
                turn = message.group
            output = Output(id, target, payload, priority, turn, headers=answer.headers)
            made.append(output._replace(key=answer.key, delay=answer.delay, at=answer.at))
        then = None if many.then is None else Then(made.pop(), many.dead)
        yield from fan_out(source.terms, message, made, then)


def _setup_error(error: Exception, verdict: Verdict) -> ConfigurationError | None:
    """Return ``error`` if the set-up of the stage is to blame for it, and not a message."""
    if not isinstance(error, ConfigurationError):
        return None
    return None if isinstance(error, TargetRefused) and verdict.counter == "out" else error


def _identity(error: BaseException | str | None) -> Hashable:
    """Return a key. One command can store all errors that have the same key."""
    return id(error) if isinstance(error, BaseException) else error
