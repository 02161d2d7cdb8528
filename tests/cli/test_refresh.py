"""What one refresh of a screen costs, in commands: it hardly depends on the number of queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import pytest
from pymongo import UpdateOne

from pyqueue import AsyncClient, Client
from pyqueue.cli.board import Board
from pyqueue.telemetry import storing
from pyqueue.telemetry.figures import Figures
from pyqueue.web.sampling import Sampler
from tests.plans.runner import message

Read = Callable[[AsyncClient], Awaitable[object]]
#: The first read of each screen for all its viewers, and the number of its commands for up to 100
#: queues. Both list the queues, read their records, count the messages and find the oldest.
SCREENS: Final[Mapping[str, tuple[Read, int]]] = {
    "top": (lambda client: Board(client).read(unfolded=()), 6),
    "dashboard": (lambda client: Sampler(client).sample(), 10),
}
#: How many of these commands are sent for each further 100 queues.
PER_HUNDRED: Final = 2


def fill(client: Client, first: int, end: int) -> None:
    """Give each queue a ready message, and figures of this minute."""
    names = [f"q{number}" for number in range(first, end)]
    client.database[client.namespace].insert_many(message(each, q=each) for each in names)
    figures = {each: Figures() for each in names}
    for each in figures.values():
        each.counts["pushed"] = 1
    upserts = storing.metrics(figures, datetime.now(UTC))
    metrics = client.collection(storing.METRICS)
    metrics.bulk_write([UpdateOne(match, update, upsert=True) for match, update in upserts])


def cost(url: str, read: Read) -> int:
    """Return the number of commands that a client sends to read a screen."""

    async def counted() -> int:
        async with AsyncClient(url) as client:
            await client.queue("q0").paused()  # the first call prepares the client
            before = client.stats["commands"]
            await read(client)
            return client.stats["commands"] - before

    return asyncio.run(counted())


@pytest.mark.parametrize("screen", SCREENS)
def test_refresh_costs_no_command_per_queue(screen: str, url: str, client: Client) -> None:
    read, few = SCREENS[screen]
    found: list[int] = []
    for first, end in ((0, 1), (1, 100), (100, 1000)):
        fill(client, first, end)
        found.append(cost(url, read))
    assert found == [few, few, few + 9 * PER_HUNDRED]


def test_folded_streams_cost_one_command(url: str, client: Client) -> None:
    """Their groups are read only for the streams whose groups are shown."""
    read, few = SCREENS["top"]
    fill(client, 0, 1)
    found: list[int] = []
    for first, end in ((0, 1), (1, 20)):
        for number in range(first, end):
            client.stream(f"s{number}").append(1)
        found.append(cost(url, read))
    assert found == [few + 1] * 2
