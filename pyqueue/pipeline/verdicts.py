"""Decide from what a handler returned or raised how its message is settled, and settle it.

``Verdicts`` does this for the messages of one stage. The server can refuse a settlement, for
instance because the payload is too large. Then a second verdict buries the message or has it tried
again, so no answer of a handler stops the stage.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Final

import anyio
from bson import ObjectId
from pydantic import BaseModel
from pymongo.errors import PyMongoError

from pyqueue.async_queues import AsyncQueue
from pyqueue.delivery import Drop, Many, Reject, RetryLater, To
from pyqueue.errors import InvalidMessage, LeaseLost, Unavailable
from pyqueue.messages import UNCHANGED, Backoff, Duration, Reservation
from pyqueue.payloads import Codec, traceback_text
from pyqueue.pipeline.blocking import ClientRunner
from pyqueue.pipeline.graph import Stage
from pyqueue.queues import backend_of
from pyqueue.retrying import RetryDelays
from pyqueue.server_errors import shown_cause, translated

__all__ = ["UNAVAILABLE", "Verdict", "Verdicts", "log_failure"]

log = logging.getLogger("pyqueue")

#: The seconds between two tries while the server does not answer.
UNAVAILABLE: Final = Backoff(base=0.1, maximum=5, jitter=0)

#: A message is held for at least this many seconds while a transaction settles it. The settlement
#: needs 20 s of it, and the pushes before it take some time. If the process dies and the lease ends
#: under its open transaction, claims pass over the message.
TRANSACTION_LEASE_S = 30.0

#: Dumps values of pydantic models and dataclasses by their own type.
_ANY_TYPE: Final = Codec[Any](Any)

#: An output of Many: a queue, the payloads for it, their ids in case there is no transaction, and
#: their priorities.
_Output = tuple[AsyncQueue[Any], list[Any], list[ObjectId], list[int | None]]


#: A queue, or its name; a payload for it; and its priority there.
_Target = tuple[AsyncQueue[Any] | str, Any, int | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one message is settled."""

    #: The counter that counts the message once it is settled.
    counter: str
    settle: Callable[[], Awaitable[object]]


class Verdicts:
    """Decide how the messages of one stage are settled, and settle them.

    Args:
        stage: the stage.
        queue: the queue that the stage reads.
        queues: the queues that the stages read, by name. A target among them has a model and
            options. Any other target is an output.
        runner: runs the plans.
    """

    def __init__(
        self,
        stage: Stage,
        queue: AsyncQueue[Any],
        queues: Mapping[str, AsyncQueue[Any]],
        runner: ClientRunner,
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._queues = queues
        self._runner = runner
        self._max_tries: int | None = backend_of(stage.queue).options.max_tries

    # ---- deciding

    def of_answer(self, message: Reservation[Any], answer: object) -> Verdict:
        """Return the verdict on a message whose handler returned ``answer``."""
        try:
            return self._of_answer(message, answer)
        except (Reject, InvalidMessage) as error:
            return self.bury(message, error)
        except Exception as error:  # raised by the answer itself, for instance by its __repr__
            return self.retry(message, error)

    def _of_answer(self, message: Reservation[Any], answer: object) -> Verdict:
        stage = self._stage
        if isinstance(answer, Drop):
            return Verdict("dropped", partial(self._queue.commit, message))
        if isinstance(answer, Many):
            outputs = [(*self._target(each), each.priority) for each in answer.outputs]
            return Verdict("out", partial(self._fan_out, message, outputs))
        if stage.kind == "link" and not isinstance(answer, To):
            answer = To(stage.to[0], answer)
        if isinstance(answer, To):
            to, payload = self._target(answer)
            move = partial(self._queue.move, message, to=to, payload=payload)
            return Verdict("out", partial(move, priority=answer.priority))
        if stage.kind == "choice":
            raise Reject(
                f"{stage.label} returned {_shown(answer)}; a choice returns To, Drop or Many"
            )
        return Verdict("out", partial(self._queue.commit, message))

    def of_failure(self, message: Reservation[Any], failure: BaseException) -> Verdict:
        """Return the verdict on a message whose handler raised ``failure``."""
        if isinstance(failure, RetryLater):
            return self.retry(message, failure.reason, failure.delay)
        if isinstance(failure, Reject):
            return self.bury(message, failure)
        text = "message %s of queue %r failed, try %d"
        log_failure(failure, text, message.id, self._stage.name, message.tries)
        return self.retry(message, failure)

    def retry(
        self,
        message: Reservation[Any],
        error: BaseException | str | None,
        delay: Duration | None = None,
    ) -> Verdict:
        """Return the verdict to have a message tried again. The last try buries it.

        Args:
            message: the message.
            error: why.
            delay: seconds until the next try; None means the stage's backoff.
        """
        last = (
            message.dead is None
            and self._max_tries is not None
            and message.tries >= self._max_tries
        )
        return Verdict(
            "dead" if last else "retried",
            partial(self._queue.rollback, message, error=error, delay=delay),
        )

    def bury(self, message: Reservation[Any], error: BaseException) -> Verdict:
        """Return the verdict to send a message to the dead-letter queue.

        A message that is already in a dead-letter queue is not buried again; it is retried.
        """
        if message.dead is not None:
            return self.retry(message, error)
        log.warning(
            "message %s of queue %r: to the dead-letter queue: %s",
            message.id,
            self._stage.name,
            error,
        )
        return Verdict("dead", partial(self._queue.bury, message, error=error))

    def _target(self, answer: To[Any]) -> tuple[AsyncQueue[Any] | str, Any]:
        """Return the queue that an answer names, and the payload in the form that it takes."""
        if answer.queue not in self._stage.to:
            raise Reject(
                f"{self._stage.label} returned {_shown(answer)}; "
                f"its stage leads to {', '.join(self._stage.to) or 'no other queue'}"
            )
        following = self._queues.get(answer.queue)
        if following is None:
            return answer.queue, _dumped(answer.payload)
        return following, answer.payload

    # ---- settling

    async def settle(
        self, message: Reservation[Any], verdict: Verdict, hurried: Callable[[], bool]
    ) -> str:
        """Carry a verdict out, again while the server does not answer and the lease lasts.

        Args:
            message: the message.
            verdict: how it is settled.
            hurried: whether to give up instead of waiting for the server.

        Returns:
            The counter that counts the message.
        """
        delays = RetryDelays(UNAVAILABLE)
        replaced = False
        while True:
            try:
                await verdict.settle()
                return verdict.counter
            except LeaseLost:
                return "lost"
            except Unavailable as error:
                delay = next(delays)
                if hurried() or self._runner.seconds_left(message) < delay:
                    log.warning(
                        "message %s of queue %r is left to its lease: %s",
                        message.id,
                        self._stage.name,
                        error,
                    )
                    return "lost"
                await anyio.sleep(delay)
            except Exception as error:
                if replaced:
                    text = "message %s of queue %r is left to its lease"
                    log_failure(error, text, message.id, self._stage.name)
                    return "lost"
                replaced = True
                invalid = isinstance(error, (InvalidMessage, TypeError))
                verdict = (self.bury if invalid else self.retry)(message, error)

    # ---- Many

    async def _by_queue(
        self, message: Reservation[Any], outputs: Sequence[_Target]
    ) -> list[_Output]:
        """Return the outputs of a message grouped by queue. Those of one queue keep their order."""
        groups: dict[str, _Output] = {}
        for index, (to, payload, priority) in enumerate(outputs):
            queue = await self._runner.target(to) if isinstance(to, str) else to
            if payload is UNCHANGED:
                payload = backend_of(self._queue).codec.dump(message.payload)
            _, payloads, ids, levels = groups.setdefault(queue.name, (queue, [], [], []))
            payloads.append(payload)
            inherits = priority is None and "priority" in backend_of(queue).kind.capabilities
            levels.append(message.priority if inherits else priority)
            ids.append(_derived_id(message, queue.name, index))
        return list(groups.values())

    async def _fan_out(self, message: Reservation[Any], targets: Sequence[_Target]) -> None:
        """Push the outputs and commit the message, in one transaction if the server has any."""
        outputs = await self._by_queue(message, targets)

        async def push(session: Any) -> None:
            for queue, payloads, ids, levels in outputs:
                await queue.push_many(
                    payloads,
                    headers=message.headers,
                    ids=ids if session is None else None,
                    priorities=levels,
                    session=session,
                )
            await self._queue.commit(message, session=session)

        if not outputs or not self._runner.replicated:
            await push(None)
            return
        if self._runner.seconds_left(message) < TRANSACTION_LEASE_S:
            await self._queue.extend(message, lease=TRANSACTION_LEASE_S)
        try:
            await self._runner.run_transaction(push)
        except PyMongoError as error:
            meant = translated(error)
            raise meant from shown_cause(error, meant)


def _dumped(payload: Any) -> Any:
    """Return the payload for a queue whose model is not known."""
    if isinstance(payload, BaseModel) or is_dataclass(payload):
        return _ANY_TYPE.dump(payload)
    return payload


def _derived_id(message: Reservation[Any], target: str, index: int) -> ObjectId:
    """Return the id of an output where there are no transactions.

    It is the same in every try, so a repeated try writes no second copy. It is another one when the
    message arrives again, by a move or a replay: each leaves a mark in the trail. A burial and the
    redrive that follows leave two marks, which do not count.
    """
    trail = [(mark["q"], str(mark["at"])) for mark in message.trail]
    while len(trail) > 1 and trail[-2][0] == message.queue and trail[-1][0] != message.queue:
        del trail[-2:]
    source = repr((str(message.id), type(message.id).__name__, message.queue, trail[-1:], target))
    digest = hashlib.blake2b(source.encode(), digest_size=9).digest()
    return ObjectId(digest + index.to_bytes(3, "big"))


def log_failure(failure: BaseException, text: str, *values: object) -> None:
    """Log a text and a traceback. Errors of pydantic and BSON would show payloads in it."""
    trace = traceback_text(failure)
    if trace is None:
        log.warning(text, *values, exc_info=failure)
    else:
        log.warning(f"{text}\n%s", *values, trace)


def _shown(answer: object) -> str:
    """Return what an error says of an answer. A payload may hold secrets, so it is left out."""
    if isinstance(answer, To):
        return f"To({answer.queue!r})"
    return "None" if answer is None else f"a value of type {type(answer).__name__}"
