"""procrastinate on PostgreSQL: defer, and a worker that hears NOTIFY."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.bench.peers.program import Handle, Open, serve, skip

try:
    import procrastinate  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    skip("pip install procrastinate")


class Tasks:
    def __init__(self, app: Any, handles: dict[str, Handle], name: str) -> None:
        self._app = app
        self._handles = handles
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        await self._task.defer_async(name=self._name, body=body)

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        await self._task.batch_defer_async(*({"name": self._name, "body": body} for body in bodies))

    @property
    def _task(self) -> Any:
        return self._app.configure_task("work", queue=self._name)

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        return self._consuming(callers, handle)

    @asynccontextmanager
    async def _consuming(self, callers: int, handle: Handle) -> AsyncIterator[None]:
        self._handles[self._name] = handle
        worker = self._app.run_worker_async(
            queues=[self._name],
            concurrency=callers,
            install_signal_handlers=False,
            shutdown_graceful_timeout=5,
        )
        task = asyncio.create_task(worker)
        yield
        await asyncio.sleep(0.05)  # the last jobs finish
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def delete(self) -> None:
        del self._handles[self._name]


@asynccontextmanager
async def peer(dsn: str) -> AsyncIterator[Open]:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    handles: dict[str, Handle] = {}

    @app.task(name="work")  # type: ignore[untyped-decorator, misc, unused-ignore]
    async def work(name: str, body: dict[str, Any]) -> None:
        await handles[name](body)

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()

        async def opened(name: str) -> Tasks:
            return Tasks(app, handles, name)

        yield opened


if __name__ == "__main__":
    serve(peer)
