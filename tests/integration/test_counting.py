"""Counts are of one instant, while messages change their state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pymongo
import pytest
from anyio.from_thread import start_blocking_portal
from pymongo import monitoring

from pyqueue import AsyncClient, Client, Counts
from tests.contract.portal import PortalClient

Mongo = pymongo.MongoClient[dict[str, Any]]


class Meanwhile(monitoring.CommandListener):
    """Calls a function after each aggregate that a client was answered."""

    def __init__(self) -> None:
        self.call: Callable[[], object] = lambda: None
        self.calls = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Do nothing."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Do nothing."""

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Call the function."""
        if event.command_name == "aggregate":
            self.calls += 1
            self.call()


@pytest.fixture
def meanwhile() -> Meanwhile:
    return Meanwhile()


@pytest.fixture(params=["pymongo", "asyncmongo", "motor"])
def counter(
    request: pytest.FixtureRequest, url: str, mongo: Mongo, client: Client, meanwhile: Meanwhile
) -> Iterator[Any]:
    """Return a client whose driver calls the listener."""
    name = client.database.name
    if request.param == "pymongo":
        with (
            pymongo.MongoClient[dict[str, Any]](url, event_listeners=[meanwhile]) as own,
            Client(own[name]) as blocking,
        ):
            yield blocking
        return
    with start_blocking_portal() as portal:

        async def connect() -> Any:
            if request.param == "asyncmongo":
                return pymongo.AsyncMongoClient[dict[str, Any]](url, event_listeners=[meanwhile])
            from motor.motor_asyncio import AsyncIOMotorClient

            return AsyncIOMotorClient(url, event_listeners=[meanwhile])

        async def close() -> None:
            closed = driver.close()
            if closed is not None:
                await closed

        driver = portal.call(connect)
        carried = PortalClient(portal, AsyncClient(driver[name]))
        try:
            yield carried
        finally:
            carried.close()
            portal.call(close)


def test_counts_are_of_one_instant(counter: Any, client: Client, meanwhile: Meanwhile) -> None:
    """Between any two reads of a count, every message changes its state."""
    queue = client.queue("jobs")
    queue.push_many(range(10))
    stored = client.database["pyqueue"]
    ready = {"q": "jobs", "record": None}

    times = itertools.cycle([timedelta(hours=1), timedelta(hours=-1)])

    def flip() -> None:
        """Make ready messages scheduled, and scheduled ones ready."""
        document = stored.find_one(ready)
        assert document is not None
        when = document["when"] + next(times)
        assert stored.update_many(ready, {"$set": {"when": when}}).matched_count == 10

    counted = counter.queue("jobs")
    counted.counts()
    assert meanwhile.calls, "the listener hears of counts"
    meanwhile.call = flip
    for _ in range(3):
        assert counted.counts().total == 10


def test_counts_see_what_was_just_claimed(client: Client) -> None:
    """A claim is acknowledged by the primary alone, and an older snapshot would not show it."""
    queue = client.queue("jobs")
    queue.push_many(range(20))
    for held in range(1, 21):
        assert queue.reserve(0) is not None
        assert queue.counts() == Counts(ready=20 - held, reserved=held)


def test_counts_of_a_dropped_collection(client: Client) -> None:
    """A transaction makes no index, so the counts then do without one."""
    queue = client.queue("jobs")
    queue.push(1)
    stored = client.database["pyqueue"]
    stored.drop_index("hot")
    assert queue.counts() == Counts(ready=1)
    assert "hot" in stored.index_information()
    stored.drop()
    assert queue.counts() == Counts()
