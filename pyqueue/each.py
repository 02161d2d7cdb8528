"""The loops of ``Queue.each``: a message is committed when the loop asks for the next one.

``each`` returns an ``Each``, and each loop over it has its own iterator. The iterator is asked for
the next message only if the body ran to its end. If the loop is left in any other way, Python drops
the iterator, which cannot see why, so the message goes back for another try. In a ``with`` block,
the ``Each`` keeps the message until the block ends, and commits it unless the block raises.

Python drops an iterator only if nothing refers to it, so not even the ``Each`` keeps a reference.
When PyMongo repeats a command after an error, the error stays in a reference cycle with its
traceback. That keeps the frames of all callers, and their variables. So the methods of iterators
delete ``self`` when they end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import anyio

from pyqueue.backends.extending import age_s
from pyqueue.backends.next_message import to_the_end
from pyqueue.errors import ConfigurationError, LeaseLost, QueueError
from pyqueue.messages import Reservation
from pyqueue.requests import Plan
from pyqueue.reserved import log_failed_rollback, lost_in_body, renewal
from pyqueue.runtime.plan_runner import AsyncPlanRunner, PlanRunner
from pyqueue.runtime.renewal import State
from pyqueue.telling import tell_lost

H = TypeVar("H", bound=Reservation[Any])
Runs = TypeVar("Runs", PlanRunner, AsyncPlanRunner)

#: The error that a message gets if its loop was left in its body, for an unknown reason.
_LEFT = "a loop over each() was left while the message was in its body"


class LoopPlans(NamedTuple, Generic[H]):
    """The plans that the loops over a queue run."""

    #: The name of the queue.
    queue: str
    #: Commit the last message, if there is one, and receive the next one, if there is one.
    next: Callable[[H | None], Plan[list[H]]]
    #: Commit messages. If Ctrl-C interrupts the commit, it is repeated, and hooks see only the
    #: repetition.
    commit: Callable[[Sequence[H]], Plan[None]]
    rollback: Callable[[Sequence[H], BaseException | str], Plan[None]]


def _complete(runner: Runs, plans: LoopPlans[H], held: Sequence[H]) -> None:
    """Commit messages in the background for a cancelled caller.

    Messages whose commit has ended, or continues without the caller, are left out.
    """
    renewer = runner.renewer
    left = [
        each for each in held if renewer.state(each) == "renewed" and not renewer.is_settling(each)
    ]
    if left:
        runner.aside(_unless_lost(plans.commit(left)))


def _unless_lost(plan: Plan[None]) -> Plan[None]:
    """Settle messages, and ignore messages that are no longer held."""
    with suppress(LeaseLost):
        yield from plan


class EachBase(Generic[H, Runs]):
    """The part of ``Each`` that is the same for blocking and for async code."""

    def __init__(self, runner: Runs, plans: LoopPlans[H]) -> None:
        self._runner: Runs = runner
        self._plans = plans
        self._entered = False
        #: The messages whose loops in the ``with`` block were left before the body had ended.
        self._left: list[H] = []

    def _leave(self, held: H) -> None:
        """Settle a message whose loop was left in the body. The garbage collector may call this."""
        renewer = self._runner.renewer
        if self._entered:
            self._left += renewer.registered([held])  # none if the body settled it
        elif (state := renewer.abandon(held)) is not None:
            # If the rollback cannot begin, the message comes back when its lease ends.
            self._runner.aside(self._rollback_left(held, state))

    def _rollback_left(self, held: H, state: State) -> Plan[None]:
        self._runner.renewer.discard(held)
        if state == "lost":
            tell_lost(self._runner.hooks, self._plans.queue, [held])
        else:
            yield from _unless_lost(self._plans.rollback([held], _LEFT))

    def _exit(self) -> list[H]:
        """End the ``with`` block. Return the messages to settle."""
        left, self._left, self._entered = self._left, [], False
        return left

    def _settle(self, left: Sequence[H], error: BaseException | None) -> Plan[None]:
        """Settle messages at the end of the ``with`` block, unless the loop body settled them."""
        renewer = self._runner.renewer
        states = [renewer.state(each) for each in left]
        pairs = list(zip(left, states, strict=True))
        lost = [each for each, state in pairs if state == "lost"]
        tell_lost(self._runner.hooks, self._plans.queue, lost)
        if error is not None:
            held = [each for each, state in pairs if state not in (None, "lost")]
            if held:
                yield from to_the_end(self._plans.rollback(held, error))
            return
        held = [each for each, state in pairs if state == "renewed"]
        if held:
            yield from to_the_end(self._plans.commit(held))
        if lost:
            raise lost_in_body(*lost)

    def _discard(self, left: Sequence[H]) -> None:
        for each in left:
            self._runner.renewer.discard(each)

    def _hides(
        self, failure: BaseException, error: BaseException | None, left: Sequence[H]
    ) -> bool:
        """Return whether the exception of the block matters more than a failure to settle."""
        if error is None:
            if not isinstance(failure, Exception):
                _complete(self._runner, self._plans, left)
        elif isinstance(failure, QueueError):
            log_failed_rollback(f"the message of a loop over queue {self._plans.queue!r}", failure)
            return True
        return False


class LoopBase(Generic[H, Runs]):
    """The part of the iterators that is the same for blocking and for async code."""

    def __init__(self, runner: Runs, plans: LoopPlans[H], leave: Callable[[H], None]) -> None:
        #: The message in the body of the loop.
        self._held: H | None = None
        self._runner: Runs = runner
        self._plans = plans
        self._leave = leave
        self._renewal = renewal(runner)
        self._asked = self._ended = False
        self._process = os.getpid()

    def __del__(self) -> None:
        # The copy of a loop in a forked process does not hold the message. When the interpreter
        # ends, no thread can roll it back, and threads that have ended may hold locks.
        forked = os.getpid() != self._process
        if self._held is not None and not forked and not sys.is_finalizing():
            self._leave(self._held)

    def _begin(self) -> H | None:
        """Begin to ask for the next message. Return the previous message, whose body has ended."""
        if self._asked:
            raise ConfigurationError(
                "each: two tasks or threads use one iterator; give each of them a separate loop "
                "over each()"
            )
        last, self._held, self._asked = self._held, None, True
        return last

    def _next(self, last: H | None) -> Plan[H | None]:
        """Commit the last message, receive the next message, and renew its lease from now on."""
        renewer = self._runner.renewer
        state = None if last is None else renewer.state(last)
        if last is not None and state == "lost":
            tell_lost(self._runner.hooks, self._plans.queue, [last])
            raise lost_in_body(last)
        # A message that the body settled, perhaps in a transaction, is left alone.
        received = yield from self._plans.next(last if state == "renewed" else None)
        if not received:
            return None
        (message,) = received
        self._held = message  # first: a message that is renewed must belong to a loop
        so_far_s = yield from age_s(message)
        renewer.add(message, self._renewal, group=self._plans.queue, age_s=so_far_s)
        del self  # as in ``Loop.__next__``
        return message

    def _failed(self, error: BaseException, last: H | None) -> None:
        """Handle the failure of ``_next``: if the caller was cancelled, complete the commit."""
        # If nothing runs this loop any more, that is a GeneratorExit.
        if last is not None and not isinstance(error, (Exception, GeneratorExit)):
            _complete(self._runner, self._plans, [last])

    def _end(self, last: H | None) -> None:
        self._asked = False
        if last is not None:
            self._runner.renewer.discard(last)


class Loop(LoopBase[H, PlanRunner]):
    """The iterator of one loop, for blocking code."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> H:
        last = self._begin()
        try:
            message = None if self._ended else self._runner.run(self._next(last))
            self._ended = message is None
        except BaseException as error:
            self._failed(error, last)
            raise
        finally:
            self._end(last)
            del self  # the traceback of an error that the driver handled may keep this frame
        if message is None:
            raise StopIteration
        return message


class AsyncLoop(LoopBase[H, AsyncPlanRunner]):
    """The iterator of one loop, for async code."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> H:
        last = self._begin()
        try:
            message = None if self._ended else await self._runner.run(self._next(last))
            self._ended = message is None
        except BaseException as error:
            self._failed(error, last)
            raise
        finally:
            self._end(last)
            del self  # the traceback of an error that the driver handled may keep this frame
        if message is None:
            raise StopAsyncIteration
        return message


class Each(EachBase[H, PlanRunner]):
    """The messages of a queue, for ``for`` loops and ``with`` blocks. See ``Queue.each``."""

    def __iter__(self) -> Loop[H]:
        return Loop(self._runner, self._plans, self._leave)

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._exit()
        try:
            if left:
                self._runner.run(self._settle(left, error))
        except BaseException as failure:
            if not self._hides(failure, error, left):
                raise
        finally:
            self._discard(left)


class AsyncEach(EachBase[H, AsyncPlanRunner]):
    """The twin of ``Each`` for async code."""

    def __aiter__(self) -> AsyncLoop[H]:
        return AsyncLoop(self._runner, self._plans, self._leave)

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._exit()
        try:
            if left:
                with anyio.CancelScope(shield=error is not None):
                    await self._runner.run(self._settle(left, error))
        except BaseException as failure:
            if not self._hides(failure, error, left):
                raise
        finally:
            self._discard(left)
