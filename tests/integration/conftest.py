"""Both kinds of client behind the blocking names, and other processes to run things in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import pytest
from anyio.from_thread import start_blocking_portal

from pyqueue import AsyncClient, Client
from tests.contract.portal import PortalClient
from tests.support.processes import spawn_pool


class Connect(Protocol):
    """Makes a client of the test's database, which is closed when the test ends."""

    def __call__(self, **options: Any) -> Client: ...


#: How many processes the pool has.
PROCESSES = 4


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Processes that have started, so that their calls begin at the same time."""
    with spawn_pool(PROCESSES) as pool:
        list(pool.map(time.sleep, [0.2] * PROCESSES))
        yield pool


@contextmanager
def connecting(kind: str, url: str) -> Iterator[Connect]:
    """Yield a maker of blocking clients, or of async clients behind a portal."""
    with ExitStack() as stack:
        if kind == "blocking":
            yield lambda **options: stack.enter_context(Client(url, **options))
            return
        portal = stack.enter_context(start_blocking_portal())

        def carried(**options: Any) -> Any:
            client = AsyncClient(url, **options)
            stack.callback(partial(portal.call, client.close))
            portal.call(client.__aenter__)
            return PortalClient(portal, client)

        yield carried


@pytest.fixture(params=["blocking", "async"])
def connect(request: pytest.FixtureRequest, url: str) -> Iterator[Connect]:
    """A maker of clients of one kind."""
    with connecting(request.param, url) as make:
        yield make
