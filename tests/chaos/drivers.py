"""Drivers: run the generators of a process, in threads with a blocking client or in tasks."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from typing import Any

import pymongo

from pyqueue import AsyncClient, Client, Delivery, QueueError, To
from tests.chaos import clock_skew, mutants
from tests.chaos.flushes import record_flushes
from tests.chaos.ledger import Call, ids_by_token
from tests.chaos.limit_checker import KEYED_QUEUE
from tests.chaos.names import BUCKETS, CHORES_DEAD, PACKED_QUEUE, POPPED
from tests.chaos.queues import BATCH, COMMAND_TIMEOUT_S, LONG_WAIT_S, NEXT, OF_GROUPS, QUEUES
from tests.chaos.steps import Plan, Step, push_many_step
from tests.chaos.stream_load import endpoints
from tests.chaos.workload import Workload

STORM_TASKS = 24
#: In how many seconds the tasks that hold messages end.
ENDS_S = 4.0


def _recorded(workload: Workload, step: Step) -> AbstractContextManager[Call]:
    hurried = step.deadline_s is not None
    return workload.ledger.recorded(step.op, step.queue, step.items, hurried=hurried)


def _queues(client: Client | AsyncClient) -> dict[str, Any]:
    """Return the queues, streams and groups of the workload, by their names in the ledger."""
    found = endpoints(client, **OF_GROUPS)
    found |= {name: client.queue(name, **options) for name, options in QUEUES.items()}
    found[CHORES_DEAD] = client.queue(CHORES_DEAD)
    return found


def _options(step: Step, queues: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call. A bucket is an object: its name alone makes another kind."""
    to = step.options.get("to")
    return {**step.options, "to": queues[to]} if to in BUCKETS else step.options


def _in_time(step: Step) -> AbstractContextManager[Any]:
    """Return the deadline of a caller, which no other caller must notice."""
    return nullcontext() if step.deadline_s is None else pymongo.timeout(step.deadline_s)


def run_blocking(workload: Workload, client: Client) -> None:
    """Run the generators of a process in threads until it stops, and raise the first error."""
    queues = workload.queues = _queues(client)
    workload.client = client
    failed: list[BaseException] = []

    def run(plan: Plan) -> None:
        answer: Call | None = None
        try:
            with suppress(StopIteration):
                while not failed:
                    step = plan.send(answer)
                    answer = None
                    if isinstance(step, Step):
                        with _recorded(workload, step) as answer, _in_time(step):
                            called = client if step.on_client else queues[step.queue]
                            options = _options(step, queues)
                            # No variable may keep the iterator of a loop that is left.
                            result = step.called_on(called)(*step.args, **options)
                            answer.result = step.as_list(result)
                    elif step:
                        workload.stopping.wait(step)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=(workload.plan(*each),)) for each in workload.role.plans
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


class AsyncRunner:
    """Runs the generators of a process in tasks.

    Args:
        workload: The process.
        client: Its client.
    """

    def __init__(self, workload: Workload, client: AsyncClient) -> None:
        self._workload, self._client = workload, client
        self._stopped = asyncio.Event()
        self._queues = workload.queues = _queues(client)
        workload.client = client

    async def run(self) -> None:
        """Run until the process stops."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_for_stop())
                tasks.create_task(self._storms())
                tasks.create_task(self._hold_when_asked())
                for name, *args in self._workload.role.plans:
                    if name == "pipeline":
                        tasks.create_task(self._pipeline())
                        continue
                    # Several tasks push one by one at once, so that their calls share commands.
                    for _ in range(8 if name.endswith("_one_by_one") else 1):
                        tasks.create_task(self._run(self._workload.plan(name, *args)))
        finally:
            self._workload.stopping.set()  # ends the thread of _watch_for_stop

    async def _watch_for_stop(self) -> None:
        await asyncio.to_thread(self._workload.stopping.wait)
        self._stopped.set()

    async def _run(self, plan: Plan) -> None:
        answer: Call | None = None
        with suppress(StopIteration):
            while True:
                step = plan.send(answer)
                answer = None
                if isinstance(step, Step):
                    answer = await self._call_or_cancel(step)
                else:
                    await self._pause(step)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    async def _call_or_cancel(self, step: Step) -> Call:
        """Make a call, and cancel it if its caller gives up before it ends."""
        if step.cancel_s is None:
            return await self._call(step)
        calling = asyncio.ensure_future(self._call(step))
        await asyncio.wait([calling], timeout=step.cancel_s)
        calling.cancel()
        with suppress(asyncio.CancelledError):
            return await calling
        cancelled = Call()
        cancelled.outcome = "cancelled"
        return cancelled

    async def _call(self, step: Step) -> Call:
        with _recorded(self._workload, step) as call, _in_time(step):
            called = self._client if step.on_client else self._queues[step.queue]
            method = step.called_on(called)
            call.result = step.as_list(await method(*step.args, **_options(step, self._queues)))
        return call

    async def _storms(self) -> None:
        """During a storm, run callers that receive and are cancelled at random points."""
        while not self._stopped.is_set():
            if time.monotonic() < self._workload.storm_until:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed_storm())
                    for _ in range(STORM_TASKS):
                        tasks.create_task(self._receive_and_cancel())
            await self._pause(0.05)

    async def _feed_storm(self) -> None:
        """Push messages for the callers of the storm to pop."""
        while time.monotonic() < self._workload.storm_until and not self._stopped.is_set():
            ids = self._workload.new_ids(BATCH // 2)
            await self._call(push_many_step("events", ids, ids=ids))

    async def _receive_and_cancel(self) -> None:
        dice, workload = self._workload.dice, self._workload
        while time.monotonic() < workload.storm_until and not workload.stopping.is_set():
            queues = [*POPPED, "billed", "packed", "turns", KEYED_QUEUE, PACKED_QUEUE]
            queue, limit = dice.choice(queues), dice.choice([1, 10])
            if queue in POPPED:
                step = Step("pop", queue, "pop_many", (limit,), {"timeout": 0.2}, limit)
            else:
                step = Step("reserve", queue, "reserve_many", (limit,), {"timeout": 0.2})
            step.cancel_s = dice.uniform(0, 0.03)
            call = await self._call_or_cancel(step)
            if queue not in POPPED:
                await self._run(workload.complete(queue, call.result or []))

    async def _hold_when_asked(self) -> None:
        """Hold many messages at once, each in a task, under leases that are renewed."""
        while not self._stopped.is_set():
            count, seconds = self._workload.to_hold
            if count:
                self._workload.to_hold = (0, 0.0)
                ids = self._workload.new_ids(count)
                push = push_many_step("renewed", ids, ids=ids)
                await self._run(self._workload.until_ok(push))
                end = asyncio.get_running_loop().time() + seconds
                async with asyncio.TaskGroup() as tasks:
                    for _ in ids:  # no program commits thousands of messages at one instant
                        early = self._workload.dice.uniform(0, ENDS_S)
                        tasks.create_task(self._hold(end - early))
            await self._pause(0.05)

    async def _hold(self, end: float) -> None:
        ledger = self._workload.ledger
        with suppress(QueueError):  # the ledger has the outcome, and the lease lapses
            async with AsyncExitStack() as stack:
                reserved = self._queues["renewed"].reserved(timeout=LONG_WAIT_S)
                held = await stack.enter_async_context(reserved)
                if held is None:
                    return
                with ledger.recorded("reserve", "renewed", None) as call:
                    call.result = [held]
                await self._pause(end - asyncio.get_running_loop().time())
                with ledger.recorded("commit", "renewed", ids_by_token([held])):
                    await stack.aclose()

    async def _pipeline(self) -> None:
        """Run a pipeline over the queues that are moved from.

        The pipeline reserves, renews and settles by itself, so the handlers record its calls.
        """
        pipeline = self._client.pipeline("load")
        ledger, dice = self._workload.ledger, self._workload.dice

        def marked(payload: dict[str, Any], delivery: Delivery[Any]) -> dict[str, Any]:
            held = delivery.message
            with ledger.recorded("reserve", held.queue, None) as call:
                call.result = [held]
            # Only the pipeline learns the outcome, so the ledger has no result for the move.
            ledger.about_to("move", held.queue, ids_by_token([held]))
            return {**payload, "trail": [*payload["trail"], [held.queue, held.token]]}

        async def parse(payload: dict[str, Any], delivery: Delivery[Any]) -> dict[str, Any]:
            return marked(payload, delivery)

        async def route(payload: dict[str, Any], delivery: Delivery[Any]) -> To[Any]:
            return To(dice.choice(NEXT["parsed"]), marked(payload, delivery))

        pipeline.link("orders", parse, to="parsed", **QUEUES["orders"])
        pipeline.choice("parsed", route, to=list(NEXT["parsed"]), **QUEUES["parsed"])

        async def stop() -> None:
            await self._stopped.wait()
            pipeline.stop()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stop())
            await pipeline.run(concurrency=32)


def work(spec: dict[str, Any]) -> None:
    """Run a process of the workload until it is stopped.

    Args:
        spec: As of ``Workload``; also ``url``, ``namespace``, ``redis`` (the URL of that bus) and
            ``mutant`` (its name, or None).
    """
    clock_skew.install()
    if spec["mutant"] is not None:
        mutants.apply(spec["mutant"])
    workload = Workload(spec)
    workload.ledger.record_logged_errors()
    threading.Thread(target=workload.follow_orders, daemon=True).start()
    options: dict[str, Any] = {
        "namespace": spec["namespace"],
        "owner": workload.name,
        "command_timeout": COMMAND_TIMEOUT_S,
        "telemetry": True,
        "signals": random.Random(f"{spec['seed']}/{workload.name}/bus").choice(
            ["capped:", spec["redis"], "none:"]
        ),
    }

    async def main() -> None:
        client = AsyncClient(spec["url"], **options)
        record_flushes(workload.ledger, client)
        try:
            await AsyncRunner(workload, client).run()
        finally:
            await client.close()

    if workload.role.asynchronous:
        asyncio.run(main())
    else:
        client = Client(spec["url"], **options)
        record_flushes(workload.ledger, client)
        try:
            run_blocking(workload, client)
        finally:
            client.close()
