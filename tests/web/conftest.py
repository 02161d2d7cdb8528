"""A namespace in memory for the tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from anyio.from_thread import start_blocking_portal

from tests.web.world import Pages, World


@pytest.fixture
def world() -> Iterator[World]:
    with start_blocking_portal() as portal:
        found = World(portal)
        yield found
        found.run(found.client.close)


@pytest.fixture
def pages(world: World) -> Pages:
    """A dashboard on which anyone may do anything."""
    return world.pages(allow=lambda request, action, queue: True)


@pytest.fixture
def shop(world: World) -> World:
    """A namespace with queues of all kinds, a stream, dead letters, errors and a worker."""

    async def fill() -> None:
        client = world.client
        orders = client.queue("orders", history=3600)
        await orders.push_many([{"n": n, "book": "Emma"} for n in range(4)], headers={"a": "b"})
        await orders.push({"n": 9}, delay=3600, key="k")
        held = await orders.reserve(0)
        assert held is not None
        await orders.progress(held, 0.5, "half")
        held = await orders.reserve(0)
        assert held is not None
        await orders.commit(held)
        groups = client.queue("groups", kind="ordered")
        await groups.push_many(range(3), groups=["g", "g", "h"])
        assert await groups.reserve(0) is not None
        await client.queue("levels", kind="priority").push(1, priority=7)
        await client.queue("packs", kind="bucket").push_many(range(5))
        clicks = client.stream("clicks")
        await clicks.append_many(range(7))
        audit = clicks.consumer("audit")
        await audit.commit(*await audit.reserve_many(2, timeout=0))
        await client.schedule("nightly", queue="orders", every=3600, payload={"n": 1})

    world.run(fill)
    world.bury("orders", {"n": 5, "why": "late"}, ValueError("no such book"))
    world.report("shipper", "orders")
    world.flush()
    return world
