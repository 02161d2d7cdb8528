"""kombu on MongoDB, with its SimpleQueue in threads. A get deletes the message."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, serve, skip

try:
    from kombu import Connection  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    skip("pip install kombu pymongo")


class Simple:
    """One queue. Pushes run in the only thread of ``pushing``, where the queue was made."""

    def __init__(self, url: str, pushing: ThreadPoolExecutor, made: Any, name: str) -> None:
        self._url = url
        self._pushing = pushing
        self._made = made
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pushing, self._made.put, body)

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        raise NotImplementedError

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        return self._consuming(callers, handle)

    @asynccontextmanager
    async def _consuming(self, callers: int, handle: Handle) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        over = threading.Event()

        def caller() -> None:
            with Connection(self._url) as connection:
                messages = connection.SimpleQueue(self._name)
                while not over.is_set():
                    try:
                        message = messages.get(timeout=1)
                    except queue.Empty:
                        continue
                    asyncio.run_coroutine_threadsafe(handle(message.payload), loop).result()
                    message.ack()

        threads = [loop.run_in_executor(None, caller) for _ in range(callers)]
        yield
        over.set()
        await asyncio.gather(*threads)

    async def delete(self) -> None:
        pass


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Open]:
    sure = f"{url}{'&' if '?' in url else '?'}w=majority&journal=true"
    loop = asyncio.get_running_loop()
    queues: dict[str, Simple] = {}
    with ThreadPoolExecutor(1) as pushing, Connection(sure) as connection:

        async def opened(name: str) -> Simple:
            if name not in queues:
                made = await loop.run_in_executor(pushing, connection.SimpleQueue, name)
                queues[name] = Simple(sure, pushing, made, name)
            return queues[name]

        yield opened


if __name__ == "__main__":
    serve(peer)
