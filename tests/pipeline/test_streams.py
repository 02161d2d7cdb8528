"""A worker consumes a group of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pyqueue import (
    AsyncClient,
    Backoff,
    Client,
    ConfigurationError,
    Delivery,
    Reject,
    RetryLater,
    Worker,
)

BAD, FAILING = 3, 5
NOW = Backoff(base=0)


def check(client: Client, seen: list[Any]) -> None:
    """Each message was seen once, and the failing one twice."""
    assert sorted(seen) == sorted([*range(10), FAILING])
    group = client.stream("clicks").consumer("audit")
    assert group.counts().total == 0
    (dead,) = client.queue("clicks.audit.dead").peek()
    assert dead.payload == BAD


def handle(seen: list[Any], payload: int, tries: int) -> None:
    seen.append(payload)
    if payload == BAD:
        raise Reject("bad")
    if payload == FAILING and tries == 1:
        raise ValueError("once")


def test_worker_consumes_a_group(client: Client) -> None:
    log = client.stream("clicks", int)
    log.append_many(range(10))
    seen: list[Any] = []
    worker = Worker(client)

    @worker.on(log.consumer("audit", lease=60, backoff=NOW))
    def audit(payload: int, delivery: Delivery[int]) -> None:
        delivery.progress(0.5)
        handle(seen, payload, delivery.message.tries)

    report = worker.run(until_empty=True)
    assert report.stages["clicks~audit"]["out"] == 9
    check(client, seen)


def test_worker_of_an_async_client_consumes_a_group(url: str, client: Client) -> None:
    seen: list[Any] = []

    async def main() -> None:
        async with AsyncClient(url) as twin:
            log = twin.stream("clicks", int)
            await log.append_many(range(10))
            worker = Worker(twin)

            @worker.on(log.consumer("audit", backoff=NOW))
            async def audit(payload: int, delivery: Delivery[int]) -> None:
                await delivery.progress(0.5, "half")
                handle(seen, payload, delivery.message.tries)

            await worker.run(until_empty=True)

    asyncio.run(main())
    check(client, seen)


def test_worker_of_a_group_leaves_a_try_uncounted(client: Client) -> None:
    client.stream("clicks", int).append_many(range(3))
    seen: list[tuple[int, int]] = []

    def later(payload: int, delivery: Delivery[int]) -> None:
        seen.append((payload, delivery.message.tries))
        if seen.count((payload, 1)) < 3:
            raise RetryLater(0, counted=False)

    group = client.stream("clicks", int).consumer("audit", max_tries=1)
    report = Worker(client).on(group, later).run(until_empty=True)
    assert report.stages["clicks~audit"]["retried"] == 6
    assert sorted(seen) == sorted([(number, 1) for number in range(3)] * 3)
    assert client.queue("clicks.audit.dead").counts().total == 0


def test_worker_refuses_what_a_group_cannot_do(client: Client) -> None:
    group = client.stream("clicks").consumer("audit")
    worker = Worker(client)
    with pytest.raises(ConfigurationError, match="stays in its stream"):
        worker.on(group, print, to=["next"])
    with pytest.raises(ConfigurationError, match=r"pass model and options to Client.stream"):
        worker.on(group, print, lease=3)
    with Client("memory:") as other, pytest.raises(ConfigurationError, match="another client"):
        worker.on(other.stream("clicks").consumer("audit"), print)
