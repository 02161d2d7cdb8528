"""The shared part of the peers' programs. Only the standard library: another Python may run it.

``python -m tests.bench.peers.NAME ADDRESS [MORE]`` reads one command per line, as JSON, and prints
one result per line. It begins with ``{"ready": true}`` or ``{"skipped": reason}``. Commands:

- fill: push COUNT messages to QUEUE by CALLERS tasks, or in batches of BATCH by one task
- drain: receive and acknowledge COUNT messages, by CALLERS tasks or in batches of BATCH; its time
  is at the pace after the first message or batch of each caller
- listen: receive COUNT messages, and note the time since each push began
- send: push COUNT messages, with a pause after each of them
- echo: for each message of QUEUE push one to REPLY
- exchange: push to QUEUE and wait for the message in REPLY, COUNT times, without a pause
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol

TEXT = "x" * 167
#: Messages that do not come within this time are lost.
LOST_AFTER_S = 20.0
PAUSE_S = (0.02, 0.08)

Body = dict[str, Any]
#: Called with the body of a received message, before it is acknowledged.
Handle = Callable[[Body], Coroutine[Any, Any, None]]


class Queue(Protocol):
    """One queue of a peer."""

    async def push(self, body: Body) -> None:
        """Push one message; return when it is stored."""

    async def push_many(self, bodies: Sequence[Body]) -> None:
        """Push a batch. A peer without batches raises NotImplementedError."""

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        """Receive, handle and acknowledge messages until the exit, which ends calls in progress."""

    async def delete(self) -> None:
        """Delete the queue, which is empty."""


#: Opens a queue by name.
Open = Callable[[str], Awaitable[Queue]]


def skip(reason: str) -> None:
    """Say why this peer cannot run, and exit."""
    print(json.dumps({"skipped": reason}), flush=True)
    sys.exit()


def body(number: int) -> Body:
    return {"n": number, "text": TEXT, "pushed": time.monotonic()}


@asynccontextmanager
async def looping(
    callers: int,
    receive: Callable[[], Awaitable[Any]],
    work: Callable[[Any], Awaitable[None]],
) -> AsyncIterator[None]:
    """Run tasks that receive and work. ``receive`` may return None or an empty list.

    At the exit a task that waits for messages is cancelled, and one that works on some finishes.
    """
    over = False
    waiting: set[asyncio.Task[None]] = set()

    async def caller() -> None:
        task = asyncio.current_task()
        assert task is not None
        while not over:
            waiting.add(task)
            try:
                received = await receive()
            finally:
                waiting.discard(task)
            if received:
                await work(received)

    tasks = [asyncio.create_task(caller()) for _ in range(callers)]
    try:
        yield
    finally:
        over = True
        for task in waiting:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


class Inbox:
    """The messages that came: their numbers, when they came, and the time since their pushes."""

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        self.times: list[float] = []
        self._came: list[float] = []
        self._missing = set(range(count))
        self._complete = asyncio.Event()

    async def handle(self, message: Body) -> None:
        self._came.append(time.perf_counter())
        self.times.append(time.monotonic() - message["pushed"])
        self.numbers.append(message["n"])
        self._missing.discard(message["n"])
        if not self._missing:
            self._complete.set()

    async def wait(self) -> None:
        """Wait for all messages, as long as some come."""
        before = -1
        while len(self.numbers) > before and not self._complete.is_set():
            before = len(self.numbers)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._complete.wait(), LOST_AFTER_S)

    def seconds(self, warm: int) -> float:
        """Return the time for all messages, at the pace after the first ``warm`` messages.

        These came while the consumers started.
        """
        first = self._came[min(warm, len(self._came) - 1) - 1]
        measured = len(self._came) - min(warm, len(self._came) - 1)
        return (self._came[-1] - first) * len(self._came) / measured

    def result(self) -> Body:
        twice = len(self.numbers) - len(set(self.numbers))
        return {"times": self.times, "lost": len(self._missing), "twice": twice}


async def fill(queue: Queue, given: Body) -> Body:
    numbers = iter(range(given.get("first", 0), given["count"]))

    async def push() -> None:
        for number in numbers:
            await queue.push(body(number))

    start, cpu = time.perf_counter(), time.process_time()
    if given["batch"] > 1:
        bodies = [body(number) for number in numbers]
        for first in range(0, len(bodies), given["batch"]):
            await queue.push_many(bodies[first : first + given["batch"]])
    else:
        await asyncio.gather(*(push() for _ in range(given["callers"])))
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


async def drain(queue: Queue, given: Body) -> Body:
    inbox = Inbox(given["count"])
    cpu = time.process_time()
    async with queue.consume(given["callers"], given["batch"], inbox.handle):
        await inbox.wait()
    seconds = inbox.seconds(given["callers"] * given["batch"])
    result = {"seconds": seconds, "cpu": time.process_time() - cpu}
    await queue.delete()
    return result | inbox.result() | {"times": []}


async def listen(queue: Queue, given: Body) -> Body:
    inbox = Inbox(given["count"])
    async with queue.consume(1, 1, inbox.handle):
        print(json.dumps({"listening": True}), flush=True)
        await inbox.wait()
    return inbox.result()


async def send(queue: Queue, given: Body) -> Body:
    for number in range(given["count"]):
        await queue.push(body(number))
        await asyncio.sleep(random.uniform(*PAUSE_S))
    return {}


async def echo(queue: Queue, reply: Queue, given: Body) -> Body:
    inbox = Inbox(given["count"])

    async def handle(message: Body) -> None:
        await inbox.handle(message)
        await reply.push(body(message["n"]))

    async with queue.consume(1, 1, handle):
        print(json.dumps({"listening": True}), flush=True)
        await inbox.wait()
    return inbox.result()


async def exchange(queue: Queue, reply: Queue, given: Body) -> Body:
    inbox = Inbox(given["count"])
    came = asyncio.Event()

    async def handle(message: Body) -> None:
        await inbox.handle(message)
        came.set()

    async with reply.consume(1, 1, handle):
        await asyncio.sleep(given["settle"])  # the first wait of a consumer is not measured
        for number in range(given["count"]):
            came.clear()
            await queue.push(body(number))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(came.wait(), LOST_AFTER_S)
    return inbox.result()


async def _serve(opened: AbstractAsyncContextManager[Open]) -> None:
    loop = asyncio.get_running_loop()
    async with opened as open_queue:
        print(json.dumps({"ready": True}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            given = json.loads(line)
            queue = await open_queue(given["queue"])
            if given["do"] in ("echo", "exchange"):
                both = {"echo": echo, "exchange": exchange}[given["do"]]
                result = await both(queue, await open_queue(given["reply"]), given)
            else:
                one = {"fill": fill, "drain": drain, "listen": listen, "send": send}[given["do"]]
                result = await one(queue, given)
            print(json.dumps(result), flush=True)


def serve(opened: Callable[..., AbstractAsyncContextManager[Open]]) -> None:
    """Open the peer at the address that the command line gives, and obey commands."""
    asyncio.run(_serve(opened(*sys.argv[1:])))
