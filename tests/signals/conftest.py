"""The kinds of bus that the contract runs over, and their servers."""

import inspect
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pymongo
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pymongo import AsyncMongoClient, MongoClient

import signals
from signals import Window, hub
from tests.signals.portal import PortalBus
from tests.support.servers import RedisServer, free_port, mongod_process

ROOT_USER = "root"
ROOT_PASSWORD = "hunter2-correct-horse"


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all tests that do not stop it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one mongod that asks for passwords. Each test uses its own databases."""
    with mongod_process(tmp_path_factory.mktemp("guarded"), "--auth") as port:
        with MongoClient[dict[str, Any]]("127.0.0.1", port) as mongo:
            mongo.admin.command("createUser", ROOT_USER, pwd=ROOT_PASSWORD, roles=["root"])
        yield port


class Kind:
    """Makes buses of one kind. The buses of a test hear each other, and no bus of another test.

    Each bus that has a server behaves as in a separate process: it hears the buses of the test
    through the server only, and itself directly.

    Args:
        name: One of KINDS.
        request: Finds the fixtures of the servers.
        portal: Runs the asyncio buses; None for blocking buses.
    """

    def __init__(
        self, name: str, request: pytest.FixtureRequest, portal: BlockingPortal | None
    ) -> None:
        self.name, self._request, self._portal = name, request, portal
        self.server = name.split("-")[0]
        self.place = "t" + uuid.uuid4().hex[:12]
        self._buses: list[Any] = []
        self._clients: list[Any] = []

    def make(
        self,
        *,
        place: str | None = None,
        down: bool = False,
        window: float | None = None,
        url: str | None = None,
        together: bool = False,
    ) -> Any:
        """Return a new bus, closed at the end of the test.

        Args:
            place: The prefix or database. Buses of different places do not hear each other.
            down: Whether no server listens at the address.
            window: Seconds in which events of a topic are merged, from the second event on. None:
                the default, with a burst.
            url: The address of a server that the test started.
            together: Whether the bus is in one process with all other buses made so.
        """
        place = place or self.place
        cls: Any = {
            "memory": (signals.MemoryBus, signals.AsyncMemoryBus),
            "redis": (signals.RedisBus, signals.AsyncRedisBus),
            "capped": (signals.CappedBus, signals.AsyncCappedBus),
        }[self.server][self._portal is not None]

        options = {} if window is None else {"window": window}

        def build() -> Any:
            if self.server == "memory":
                return cls(place)
            if self.server == "redis":
                port = free_port() if down else self._request.getfixturevalue("redis_server").port
                return cls(url or f"redis://127.0.0.1:{port}/0", prefix=place, **options)
            return cls(self._database(place, down, url), **options)

        with ExitStack() as stack:
            if self.server != "memory" and not together:
                stack.enter_context(patch.object(hub, "_places", {}))
            if window is not None:
                stack.enter_context(patch("signals.runner.Window", partial(Window, burst=1)))
            bus = PortalBus(self._portal, self._portal.call(build)) if self._portal else build()
        self._buses.append(bus)
        return bus

    def _database(self, place: str, down: bool, url: str | None) -> Any:
        if down:
            url = f"mongodb://127.0.0.1:{free_port()}/"
        url = url or self._request.getfixturevalue("mongod").url
        client: Any
        if self.name == "capped-motor":
            from motor.motor_asyncio import AsyncIOMotorClient

            client = AsyncIOMotorClient(url)
        else:
            client = AsyncMongoClient(url) if self._portal else MongoClient(url)
        self._clients.append(client)
        return client[place]

    def close(self) -> None:
        """Close the buses, then their clients."""
        for bus in self._buses:
            bus.close()
        for client in self._clients:
            if self._portal:
                self._portal.call(_close, client)
            else:
                with pymongo.timeout(1):  # it looks for its server, which may be gone
                    client.close()


async def _close(client: Any) -> None:
    with pymongo.timeout(1):
        closed = client.close()
        if inspect.isawaitable(closed):
            await closed


@contextmanager
def open_kind(name: str, request: pytest.FixtureRequest) -> Iterator[Kind]:
    """Open one kind of bus; close its buses at the end."""
    blocking = name.endswith("-blocking")
    with nullcontext() if blocking else start_blocking_portal() as portal:
        kind = Kind(name, request, portal)
        with closing(kind):
            yield kind


KINDS = ["memory-blocking", "memory-async", "redis-blocking", "redis-async"]
KINDS += ["capped-blocking", "capped-async", "capped-motor"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    """One kind of bus; parametrize it indirectly to choose some."""
    with open_kind(request.param, request) as kind:
        yield kind


OpenKind = Callable[[str], AbstractContextManager[Kind]]


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> OpenKind:
    """Opens several kinds in one test, to share expensive parts."""
    return lambda name: open_kind(name, request)


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let ``make test`` run one of four tests on Motor, which is the third kind of capped bus."""
    motor = [each for each in items if "signals/" in each.nodeid and "capped-motor" in each.name]
    for number, item in enumerate(motor):
        if number % 4:
            item.add_marker(pytest.mark.slow)


served = pytest.mark.parametrize(
    "kind", [name for name in KINDS if not name.startswith("memory")], indirect=True
)
"""Only the kinds that have a server."""
