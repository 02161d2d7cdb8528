"""Counts are of one instant, while messages change their state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo import monitoring

from pyqueue import Client, Counts
from tests.integration.test_sent import Recorder, opened


class Interferer(Recorder):
    """Calls a function after each aggregate that a client was answered."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Callable[[], object] = lambda: None
        self.calls = 0

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Call the function."""
        if event.command_name == "aggregate":
            self.calls += 1
            self.call()


@pytest.fixture
def interferer() -> Interferer:
    return Interferer()


@pytest.fixture(params=["blocking", "async", "motor"])
def counter(request: pytest.FixtureRequest, url: str, interferer: Interferer) -> Iterator[Any]:
    """Return a client whose driver calls the listener."""
    with opened(request.param, url, "majority", interferer) as place:
        yield place.client


def test_counts_are_of_one_instant(counter: Any, client: Client, interferer: Interferer) -> None:
    """Between any two reads of a count, every message changes its state."""
    queue = client.queue("jobs")
    queue.push_many(range(10))
    stored = client.database["pyqueue"]
    ready = {"q": "jobs", "record": None}

    times = itertools.cycle([timedelta(hours=1), timedelta(hours=-1)])

    def flip() -> None:
        """Make all ready messages scheduled, or all scheduled messages ready."""
        document = stored.find_one(ready)
        assert document is not None
        when = document["when"] + next(times)
        assert stored.update_many(ready, {"$set": {"when": when}}).matched_count == 10

    counted = counter.queue("jobs")
    counted.counts()
    assert interferer.calls, "the listener hears of counts"
    interferer.call = flip
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
