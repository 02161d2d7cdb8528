"""The kinds of bus that the contract runs over, and their servers."""

import inspect
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pymongo import AsyncMongoClient, MongoClient

import signals
from tests.signals.servers import PortalBus, RedisServer, free_port


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


class Kind:
    """Makes buses of one kind. Those of one test hear each other, and nobody else, unless `place` says otherwise."""

    def __init__(
        self, name: str, request: pytest.FixtureRequest, portal: BlockingPortal | None
    ) -> None:
        self.name, self._request, self._portal = name, request, portal
        self.server = name.split("-")[0]
        self.place = "t" + uuid.uuid4().hex[:12]
        self._undo: list[Callable[[], Any]] = []

    def make(
        self,
        *,
        place: str | None = None,
        down: bool = False,
        window: float = 0.05,
        url: str | None = None,
    ) -> Any:
        place = place or self.place
        cls: Any = {
            "memory": (signals.MemoryBus, signals.AsyncMemoryBus),
            "redis": (signals.RedisBus, signals.AsyncRedisBus),
            "capped": (signals.CappedBus, signals.AsyncCappedBus),
        }[self.server][self._portal is not None]

        def build() -> Any:
            if self.server == "memory":
                return cls(place, window=window)
            if self.server == "redis":
                port = free_port() if down else self._request.getfixturevalue("redis_server").port
                return cls(url or f"redis://127.0.0.1:{port}/0", prefix=place, window=window)
            return cls(self._database(place, down, url), window=window)

        return self._keep(build)

    def _keep(self, build: Callable[[], Any]) -> Any:
        bus = PortalBus(self._portal, self._portal.call(build)) if self._portal else build()
        self._undo.append(bus.close)
        return bus

    def _database(self, place: str, down: bool, url: str | None) -> Any:
        if url is None:
            url = (
                f"mongodb://127.0.0.1:{free_port()}/"
                if down
                else self._request.getfixturevalue("mongod").url
            )
        client: Any
        if self.name == "capped-motor":
            from motor.motor_asyncio import AsyncIOMotorClient

            client = AsyncIOMotorClient(url)
        else:
            client = AsyncMongoClient(url) if self._portal else MongoClient(url)
        self._undo.append(lambda: self._close_client(client))
        return client[place]

    def _close_client(self, client: Any) -> None:
        async def close() -> None:
            closed = client.close()
            if inspect.isawaitable(closed):
                await closed

        if self._portal:
            self._portal.call(close)
        else:
            client.close()

    def undo(self) -> None:
        for undo in sorted(
            self._undo, key=lambda undo: undo.__name__ == "<lambda>"
        ):  # the clients after the buses
            undo()
        self._undo.clear()


KINDS = ["memory-blocking", "memory-async", "redis-blocking", "redis-async"]
KINDS += ["capped-blocking", "capped-async", "capped-motor"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """One kind of bus; parametrize it indirectly to choose some."""
    if request.param.endswith("-blocking"):
        kind = Kind(request.param, request, None)
        yield kind
        kind.undo()
        return
    with start_blocking_portal() as portal:
        kind = Kind(request.param, request, portal)
        yield kind
        kind.undo()


served = pytest.mark.parametrize(
    "kind", [name for name in KINDS if not name.startswith("memory")], indirect=True
)
"""Only the kinds that have a server."""
