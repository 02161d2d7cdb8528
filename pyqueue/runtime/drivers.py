"""The drivers run plans. They are the only code that talks to a database.

``Driver`` blocks (pymongo, mongomock). ``AsyncDriver`` awaits (PyMongo's async client, motor). They
differ only in how they call and wait. ``BaseDriver`` contains the rules that they share. The rules
of a queue are in its plans, not here.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import pymongo

from pyqueue.concurrently import Concurrently, Sleep
from pyqueue.errors import ConfigurationError, MissingIndex, Unavailable
from pyqueue.requests import (
    AtOneInstant,
    Coalesce,
    Command,
    EnsureQueue,
    Listen,
    Plan,
    Request,
    ToTheEnd,
    Wait,
)
from pyqueue.runtime import aside
from pyqueue.runtime.base_driver import (
    PENDING,
    READ_ONLY,
    REFRESH_TIMEOUT_S,
    BaseDriver,
    ListensAsync,
)
from pyqueue.runtime.coalescing import Coalescer, ThreadCoalescer, callers_deadline
from pyqueue.runtime.detached import DetachedPlans
from pyqueue.runtime.looking import TaskLooks, ThreadLooks
from pyqueue.runtime.pausing import sleep, sleep_async
from pyqueue.runtime.single_flight import AsyncSingleFlight, SingleFlight
from pyqueue.runtime.waiters import Waiters, seconds_left
from pyqueue.runtime.waiting_any import Steps, wait_for_any, wait_for_any_async
from pyqueue.waiting_any import WaitForAny
from signals import AsyncBus, Bus, Listener

T = TypeVar("T")
R = TypeVar("R")


class Driver(BaseDriver[Listener]):
    """Runs plans on pymongo or mongomock."""

    bus: Bus

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock = threading.Lock()
        self._preparing = SingleFlight()
        self.coalescer = ThreadCoalescer(self.drive)
        self.looks = ThreadLooks(self.run)

    def run(self, plan: Plan[T]) -> T:
        """Run a plan and return its result."""
        self.check_usable()
        if self.clock.stale:
            self.prepare()
        return self.drive(plan)

    def prepare(self, limit_s: float = math.inf) -> None:
        """Set the clock from the primary. If the primary changed, also create missing indexes.

        One thread does this for all concurrent callers. The first time, the other callers wait for
        that thread; later, they use the current estimate.

        Args:
            limit_s: Seconds that this may take, if that is less than the time limit of a command.
        """

        deadline = callers_deadline()

        def work() -> None:
            left_s = max(0.001, deadline - time.monotonic())
            with pymongo.timeout(min(self._timeout, limit_s, left_s)):
                self.drive(self._preparation())

        end = min(deadline, time.monotonic() + limit_s)
        self._preparing.run(work, joins=not self._prepared, timeout_s=self._timeout, end=end)

    def drive(self, plan: Plan[T]) -> T:
        """Run a plan as a part of a call that ``run`` began, without preparing the driver."""
        answer_now, join = self._answer_now, self.coalescer.join
        try:
            request = next(plan)
            while True:
                try:
                    if type(request) is Coalesce:
                        answer = join(request)
                    elif (answer := answer_now(request)) is PENDING:
                        answer = self._answer(request)
                except BaseException as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a plan's result is its T

    def _answer(self, request: Request[Any]) -> Any:
        if isinstance(request, Coalesce):
            return self.coalescer.join(request)
        if isinstance(request, Command):
            return self.ask(request)
        if isinstance(request, EnsureQueue):
            return self.coalescer.join(self.known.ensuring(request))
        if isinstance(request, AtOneInstant):
            return self._at_one_instant(request)
        if isinstance(request, Concurrently):
            return self._concurrently(request)
        if isinstance(request, ToTheEnd):
            return self.drive(request.plan)
        if isinstance(request, Listen):
            return self._listen(request.waiters)
        if isinstance(request, WaitForAny):
            return wait_for_any(request.waits, self.clock, self._led, self.prepare)
        if isinstance(request, Sleep):
            return sleep(self, request.seconds)
        assert isinstance(request, Wait)
        return self._wait(request)

    def _concurrently(self, request: Concurrently[R]) -> list[R]:
        plans = request.plans
        if self.memory:
            return [self.drive(plan) for plan in plans]
        # With ``outlive``, the caller's thread runs the first plan, so that Ctrl-C interrupts it.
        own = int(request.outlive)
        with ThreadPoolExecutor(request.at_once, "pyqueue_concurrently") as threads:
            try:
                rest = threads.map(self.drive, plans[own:])
                return [*map(self.drive, plans[:own]), *rest]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def aside(self, plan: Plan[None]) -> None:
        """Run a plan in a thread; see ``Aside``."""
        aside.in_thread(self.run, plan)

    def ask(self, request: Command[R]) -> R:
        """Send a command and return its answer."""
        self.check_usable()
        for again in (True, False):
            try:
                if self.memory or request.session is not None:
                    return self._carry_out(request)
                # In a copy of the context, because Ctrl-C may arrive after the deadline is set and
                # before it can be reset. The deadline would then limit all later commands of the
                # main thread.
                return contextvars.copy_context().run(self._carry_out, request)
            except Exception as error:
                try:
                    answer: R = self._failed(request, error)
                    return answer
                except MissingIndex:
                    if not again:
                        raise
                    self.known.forget_records()
                    self.drive(self.known.make_indexes(getattr(request, "hint", None)))
        raise AssertionError("unreachable")

    def _carry_out(self, request: Command[R]) -> R:
        with self._deadline(request):
            raw = self._send(request)
            return request.read(list(raw) if request.cursor else raw)

    def _at_one_instant(self, request: AtOneInstant[R]) -> R:
        def read() -> R:
            with pymongo.timeout(self._timeout), self._start_session() as session:
                result: R = session.with_transaction(
                    lambda session: self.drive(request.plan(session)), **READ_ONLY
                )
                return result

        if self.replicated:
            try:
                return contextvars.copy_context().run(read)  # see ``ask``
            except Exception as error:
                meant = self._meaning(error)
                if not isinstance(meant, MissingIndex):
                    raise meant from error
        return self.drive(request.plan(None))

    def _listen(self, waiters: Waiters) -> bool:
        with self._lock:
            if waiters in self._listeners:
                return False
            self._listeners[waiters] = self.bus.listen(waiters.topic).__enter__()
            return True

    def _wait(self, request: Wait) -> bool:
        waiters: Waiters = request.waiters
        woken = threading.Event()
        leads = waiters.enter(woken.set, request.until)
        guards = not leads and waiters.guard(request.until)
        try:
            if leads:
                return self._lead(request)
            woken.wait(seconds_left(request, self.clock if guards else None))
            return True
        finally:
            waiters.leave(woken.set, leads, guards)

    def _led(self, request: Wait) -> tuple[Listener, Steps]:
        """Return the listener of a queue, and the steps of its leader's wait; see ``_watch``."""
        listener = self._listeners[request.waiters]
        return listener, self._watch(request, listener)

    def _lead(self, request: Wait) -> bool:
        listener, steps = self._led(request)
        try:
            seconds = next(steps)
            while True:
                if seconds is None:
                    with suppress(Unavailable):
                        self.prepare(REFRESH_TIMEOUT_S)
                    seconds = steps.send(False)
                else:
                    seconds = steps.send(listener.wait(seconds))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # whether to scan


class AsyncDriver(BaseDriver[ListensAsync]):
    """Runs plans on PyMongo's async client or motor, and inline on mongomock."""

    bus: AsyncBus

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: The event loop of this driver, once it has been used.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._preparing = AsyncSingleFlight()
        self.coalescer = Coalescer(self.drive, self.stats)
        self._detached = DetachedPlans(self.coalescer, self._answer_now, self._answer)
        self.looks = TaskLooks(self.run, self.coalescer.spawn)
        self._admit = self.coalescer.admit

    async def run(self, plan: Plan[T]) -> T:
        """Run a plan and return its result."""
        self.check_usable()
        if self.clock.stale:
            await self.prepare()
        return await self.drive(plan)

    def check_usable(self) -> None:
        """Refuse a call if the client is closed, or belongs to another process or event loop."""
        super().check_usable()
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            if self.loop is not None:
                raise ConfigurationError(
                    "this client was first used in another event loop; "
                    "create one client for each loop (for each asyncio.run)"
                )
            self.loop = loop

    async def prepare(self, limit_s: float = math.inf) -> None:
        """Set the clock from the primary. See ``Driver.prepare``."""

        async def work() -> None:
            with pymongo.timeout(min(self._timeout, limit_s)):
                await self.drive(self._preparation())

        await self._preparing.run(work, joins=not self._prepared, end=callers_deadline())

    async def drive(self, plan: Plan[T]) -> T:
        """Run a plan as a part of a call that ``run`` began. See ``Driver.drive``."""
        answer_now, join = self._answer_now, self.coalescer.join
        try:
            request = next(plan)
            while True:
                try:
                    if type(request) is Coalesce:
                        answer = await join(request)
                    elif (answer := answer_now(request)) is PENDING:
                        answer = await self._answer(request)
                except BaseException as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a plan's result is its T

    def _answer(self, request: Request[Any]) -> Awaitable[Any]:
        if isinstance(request, Coalesce):
            return self.coalescer.join(request)
        if isinstance(request, Command):
            return self.ask(request)
        if isinstance(request, EnsureQueue):
            return self.coalescer.join(self.known.ensuring(request))
        if isinstance(request, AtOneInstant):
            return self._at_one_instant(request)
        if isinstance(request, Concurrently):
            return self._concurrently(request)
        if isinstance(request, ToTheEnd):
            task = self.coalescer.spawn(self.drive(request.plan))
            # If the caller is cancelled, nothing reads this error, and asyncio would log it.
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return asyncio.shield(task)
        if isinstance(request, Listen):
            return self._listen(request.waiters)
        if isinstance(request, WaitForAny):
            return wait_for_any_async(request.waits, self.clock, self._lead)
        if isinstance(request, Sleep):
            return sleep_async(self, request.seconds)
        assert isinstance(request, Wait)
        return self._wait(request)

    async def _concurrently(self, request: Concurrently[R]) -> list[R]:
        plans = request.plans
        if request.outlive:
            with_caller, detached = plans
            ended = self._detached.begin(detached)
            return [await self.drive(with_caller), await asyncio.shield(ended)]
        if self.memory:
            return [await self.drive(plan) for plan in plans]
        results: dict[int, R] = {}
        upcoming = enumerate(plans)
        failed = False

        async def work(own: Sequence[tuple[int, Plan[R]]]) -> None:
            nonlocal failed
            try:
                for place, plan in chain(own, upcoming):
                    if failed:
                        return
                    results[place] = await self.drive(plan)
            except BaseException:
                failed = True
                raise

        # The caller's task runs plans, too: this saves a task, and many callers run two plans. Its
        # plan is taken before the other tasks begin, because an eager task begins at once.
        first = next(upcoming)
        tasks = min(request.at_once, len(plans)) - 1
        others = [asyncio.ensure_future(work(())) for _ in range(tasks)]
        try:
            await work([first])
            if pending := [each for each in others if not each.done()]:
                await asyncio.wait(pending)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                for each in others:
                    each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            raise
        if errors := [failure for each in others if (failure := each.exception())]:
            raise errors[0]
        return [results[place] for place in range(len(plans))]

    def aside(self, plan: Plan[None]) -> None:
        """Run a plan in a task; see ``Aside``. Any thread may call this."""
        aside.in_task(self.run, plan, self.coalescer.spawn, self.loop)

    async def ask(self, request: Command[R]) -> R:
        """Send a command and return its answer."""
        self.check_usable()
        for again in (True, False):
            try:
                with self._deadline(request):
                    return request.read(await self._answered(request))
            except Exception as error:
                try:
                    answer: R = self._failed(request, error)
                    return answer
                except MissingIndex:
                    if not again:
                        raise
                    self.known.forget_records()
                    await self.drive(self.known.make_indexes(getattr(request, "hint", None)))
        raise AssertionError("unreachable")

    async def _answered(self, request: Command[Any]) -> Any:
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        raw = self._send(request)
        if inspect.isawaitable(raw):
            raw = await raw
        if request.cursor and not self.memory:
            raw = await raw.to_list(None)
        if task and task.cancelling() > cancelled:
            # PyMongo waits with ``asyncio.wait_for``, which loses a cancellation in Python 3.11 if
            # it comes with the answer. The caller would continue, and might wait forever.
            raise asyncio.CancelledError
        return raw

    async def _at_one_instant(self, request: AtOneInstant[R]) -> R:
        if self.replicated:

            async def read(session: Any) -> R:
                return await self.drive(request.plan(session))

            try:
                with pymongo.timeout(self._timeout):
                    session = self._start_session()
                    if inspect.isawaitable(session):  # of motor
                        session = await session
                    async with session:
                        result: R = await session.with_transaction(read, **READ_ONLY)
                        return result
            except Exception as error:
                meant = self._meaning(error)
                if not isinstance(meant, MissingIndex):
                    raise meant from error
        return await self.drive(request.plan(None))

    async def settled(self) -> None:
        """Cancel a running ``prepare``, and wait for the tasks that outlive their callers."""
        await self._preparing.close()
        await self.coalescer.settled()

    async def _listen(self, waiters: Waiters) -> bool:
        async with self._lock:
            if waiters in self._listeners:
                return False
            self._listeners[waiters] = await self.bus.listen(waiters.topic).__aenter__()
            return True

    async def _wait(self, request: Wait) -> bool:
        waiters: Waiters = request.waiters
        woken = asyncio.Event()
        leads = waiters.enter(woken.set, request.until)
        guards = not leads and waiters.guard(request.until)
        try:
            if leads:
                return await self._lead(request)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left(request, self.clock if guards else None)):
                    await woken.wait()
            return True
        finally:
            waiters.leave(woken.set, leads, guards)

    async def _lead(self, request: Wait) -> bool:
        listener = self._listeners[request.waiters]
        steps = self._watch(request, listener)
        try:
            seconds = next(steps)
            while True:
                if seconds is None:
                    with suppress(Unavailable):
                        await self.prepare(REFRESH_TIMEOUT_S)
                    seconds = steps.send(False)
                else:
                    seconds = steps.send(await listener.wait(seconds))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # whether to scan


# ---- for plans that are not about messages


def run_aside(driver: Driver, plan: Plan[T], limit_s: float) -> T:
    """Run a plan that is not about messages, in at most ``limit_s`` seconds.

    This neither prepares the driver nor waits for calls that prepare it.
    """
    driver.check_usable()

    def work() -> T:
        with pymongo.timeout(limit_s):
            return driver.drive(plan)

    return contextvars.copy_context().run(work)  # see ``Driver.ask``


async def run_aside_async(driver: AsyncDriver, plan: Plan[T], limit_s: float) -> T:
    """Run a plan that is not about messages. See ``run_aside``."""
    driver.check_usable()
    with pymongo.timeout(limit_s):
        return await driver.drive(plan)
