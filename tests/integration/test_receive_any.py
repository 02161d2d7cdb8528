"""``Client.receive`` on a server: cancelled anywhere, and over any bus."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, Self
from uuid import uuid4

import pytest

import signals
from pyqueue import AsyncClient, Client, Counts
from tests.integration.conftest import Connect
from tests.integration.test_cancel import CANCELS, Cancel, opened, settled
from tests.support.eventually import LONG, async_eventually, eventually, waiters
from tests.support.samples import sampled

NEVER = 3600.0
STORE = 60


async def exercise(driver: str, cancel: Cancel, url: str, rounds: int) -> int:
    """Cancel receives at random points and check every message.

    The first queue and the group have one message at a time, so that each receive claims from all.
    Return how often something had to be given back.
    """
    async with opened(driver, url, f"n{uuid4().hex[:8]}") as client:
        first, last = client.queue("first", lease=600), client.queue("last", lease=600)
        log = client.stream("log")
        group = log.consumer("g", lease=600)
        await last.push_many([{"n": n} for n in range(STORE + 3 * rounds)])
        rng, pushed, cancelled = random.Random(f"{driver}{cancel.__name__}"), 0, 0
        began = time.perf_counter()
        received = await client.receive([first, group, last], 4, timeout=0)
        aim = time.perf_counter() - began
        for _ in range(rounds):
            if sum(each.queue == "first" for each in received) == pushed:
                await first.push("x")
                await log.append("y")
                pushed += 1
            got = await cancel(
                lambda: client.receive([first, group, last], 4, timeout=0), rng.uniform(0, 2 * aim)
            )
            received += got or []
            cancelled += not got
            aim *= 0.9 if got else 1 / 0.9
        await settled(client)
        ids = [str(each.id) for each in received]
        assert len(ids) == len(set(ids)), "a message was received twice"
        assert {each.tries for each in received} <= {1}
        for queue, total in ((first, pushed), (last, STORE + 3 * rounds)):
            mine = sum(each.queue == queue.name for each in received)
            assert await queue.counts() == Counts(ready=total - mine, reserved=mine)
        mine = sum(each.queue == "log" for each in received)
        counts = await group.counts()
        assert (counts.ready, counts.reserved) == (pushed - mine, mine)
        collection = client.database[client.namespace]
        left = {"q": {"$in": ["first", "last"]}, "token": {"$exists": False}}
        async for each in collection.find({**left, "record": {"$exists": False}}):
            assert (each["tries"], each.get("deliveries", 0), each["when"]) == (0, 0, each["due"])
        assert cancelled, "no receive was cancelled"
        assert received, "no receive came through"
        return client.stats.get("given back", 0)


@pytest.mark.parametrize("driver", sampled(["pymongo", "motor"], few=1))
def test_cancelled_receive_of_several_loses_nothing(url: str, driver: str) -> None:
    async def main() -> int:
        return sum([await exercise(driver, cancel, url, 12) for cancel in CANCELS])

    for _ in range(20):  # until a storm meets the critical moment
        if asyncio.run(main()) > 0:
            return
    raise AssertionError("nothing had to be given back")


@pytest.mark.slow
@pytest.mark.parametrize("cancel", CANCELS, ids=lambda cancel: cancel.__name__)
@pytest.mark.parametrize("driver", ["pymongo", "motor"])
def test_cancelled_receive_of_several_at_length(url: str, driver: str, cancel: Cancel) -> None:
    assert asyncio.run(exercise(driver, cancel, url, 500)) > 0


def test_receive_cancelled_while_woken_passes_it_on(url: str) -> None:
    """The cancel comes around the time at which the message does. Another consumer gets it."""

    async def main() -> None:
        async with AsyncClient(url) as client:
            one, two = client.queue("one", poll=NEVER), client.queue("two", poll=NEVER)
            rng, aim, first, passed = random.Random(7), 0.003, 0, 0
            rounds = 0
            while rounds < 20 or not (first and passed):
                assert rounds < 2000
                several = asyncio.create_task(client.receive([one, two], 1))
                await async_eventually(lambda: waiters(client, "two") == 1)
                alone = asyncio.create_task(two.reserve())
                await async_eventually(lambda: waiters(client, "two") == 2)
                await two.push({"n": rounds})
                await asyncio.sleep(rng.uniform(0, 2 * aim))
                several.cancel()
                got: list[Any] = []
                with suppress(asyncio.CancelledError):
                    got = await several
                if got:
                    alone.cancel()
                    await asyncio.wait([alone])
                    first += 1
                else:
                    async with asyncio.timeout(LONG):
                        got = [await alone]
                    passed += 1
                await client.commit(*got)
                aim *= 0.9 if first > passed else 1 / 0.9
                rounds += 1
                assert [waiters(client, name) for name in ("one", "two")] == [0, 0]
            await settled(client)
            assert await two.counts() == Counts()

    asyncio.run(main())


# ---- buses


class PlainListener:
    """A listener without alerts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def when(self) -> datetime | None:
        when: datetime | None = self._inner.when
        return when

    @property
    def closed(self) -> bool:
        return bool(self._inner.closed)

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._inner.wait(timeout))

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)


class PlainBus:
    """A bus as a user may write it."""

    def __init__(self) -> None:
        self._inner = signals.MemoryBus(uuid4().hex)

    def emit(self, topic: str, when: datetime | None) -> None:
        self._inner.emit(topic, when)

    def listen(self, topic: str) -> Any:
        return PlainListener(self._inner.listen(topic))

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Return threads that do not outlive the test."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_listener_without_alerts_wakes_a_receive(url: str, pool: ThreadPoolExecutor) -> None:
    bus = PlainBus()
    with Client(url, signals=bus) as client, Client(url, signals=bus) as producer:
        queues = [client.queue(name, poll=NEVER) for name in ("one", "two")]
        for name in ("two", "one"):
            future = pool.submit(client.receive, queues, 1, timeout=LONG)
            eventually(lambda: [waiters(client, each.name) for each in queues] == [1, 1])
            producer.queue(name).push(name)
            (held,) = future.result(LONG)
            assert held.payload == name
            client.commit(held)
    bus.close()


def test_idle_receive_sends_nothing(
    connect: Connect, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IDLE_RESCAN_S", "BUSY_RESCAN_S"):
        monkeypatch.setattr(f"pyqueue.backends.scan.{name}", NEVER)
    client = connect()
    queues = [client.queue(name, poll=NEVER) for name in ("a", "b", "c")]
    for each in queues:
        each.push(1)
    client.commit(*client.receive(queues, 3, timeout=0))
    future = pool.submit(client.receive, queues, 1, timeout=LONG)
    eventually(lambda: [waiters(client, each.name) for each in queues] == [1, 1, 1])
    sent = client.stats["commands"]
    time.sleep(0.3)
    assert client.stats["commands"] == sent
    queues[2].push("x")
    (held,) = future.result(LONG)
    assert held.payload == "x"
