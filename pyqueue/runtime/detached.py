"""Plans that continue if their callers are cancelled, for an async driver.

A loop over ``each`` runs such a plan for each message, to commit it. The plan waits for one batch
that it shares with other calls, so it needs no task: the end of the batch continues it. A task for
each message took a fifth of the processor time of such a loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pyqueue.requests import Coalesce, Plan, Request
from pyqueue.runtime.base_driver import PENDING
from pyqueue.runtime.coalescing import Coalescer

R = TypeVar("R")


class DetachedPlans:
    """Runs plans outside of tasks. A plan gets a task only for a command that it does not share.

    Args:
        coalescer: The coalescer of the driver, which knows the plans that still run.
        answer_now: Returns the answer to a request that needs no waiting, otherwise PENDING.
        answer: Returns an awaitable of the answer to any other request.
    """

    def __init__(
        self,
        coalescer: Coalescer,
        answer_now: Callable[[Request[Any]], Any],
        answer: Callable[[Request[Any]], Awaitable[Any]],
    ) -> None:
        self._coalescer = coalescer
        self._answer_now, self._answer = answer_now, answer

    def begin(self, plan: Plan[R]) -> asyncio.Future[R]:
        """Run a plan up to its first wait. Return the future of its result."""
        ended: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        running = self._coalescer.tasks
        running.add(ended)
        ended.add_done_callback(running.discard)
        self._advance(plan, ended, plan.send, None)
        return ended

    def _advance(
        self, plan: Plan[R], ended: asyncio.Future[R], resume: Callable[[Any], Any], value: Any
    ) -> None:
        """Run a plan up to its next wait.

        Args:
            plan: The plan.
            ended: The future of its result.
            resume: The method of the plan that continues it: ``send`` or ``throw``.
            value: The argument of this method.
        """
        answer: Any = None
        try:
            while answer is not PENDING:
                request = resume(value)
                try:
                    answer = self._answer_now(request)
                    resume, value = plan.send, answer
                except BaseException as error:
                    resume, value = plan.throw, error
        except StopIteration as stop:
            if not ended.done():  # the event loop is closing if it was cancelled
                ended.set_result(stop.value)
        except BaseException as error:
            if not ended.done():
                ended.set_exception(error)
        else:
            self._wait(plan, ended, request)
        finally:
            value = None  # an error would refer to itself by its traceback

    def _wait(self, plan: Plan[R], ended: asyncio.Future[R], request: Request[Any]) -> None:
        def on_answer(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                self._advance(plan, ended, plan.throw, asyncio.CancelledError())
            elif (error := future.exception()) is not None:
                self._advance(plan, ended, plan.throw, error)
            else:
                self._advance(plan, ended, plan.send, future.result())

        if isinstance(request, Coalesce):
            waiting = self._coalescer.enter(request)
        else:
            waiting = self._coalescer.spawn(self._answered(request))
        # Not the context of the caller, because it may have a shorter time limit.
        waiting.add_done_callback(on_answer, context=contextvars.Context())

    async def _answered(self, request: Request[Any]) -> Any:
        return await self._answer(request)
