"""Settings shared by all tests of plans.

Property tests have no deadline: a slow machine must not fail them. And in no test does a handover
find less to show than it decided on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import settings

from pyqueue import Client
from pyqueue.runtime import known_queues

settings.register_profile("pyqueue", deadline=None, derandomize=True, database=None)
settings.load_profile("pyqueue")


@pytest.fixture(autouse=True)
def handovers_show_all(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if the holder of a source could not show all that it decided on."""
    yield
    assert "cannot be published" not in caplog.text


@pytest.fixture
def same_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try slots in one order, so that each run of a plan has the same commands."""
    monkeypatch.setattr(random, "shuffle", lambda names: None)
    monkeypatch.setattr(random, "sample", lambda values, number: list(values)[:number])


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Return a client that never takes a record as known."""
    monkeypatch.setattr(known_queues, "_LIFETIME_S", 0)
    with Client("memory:") as client:
        yield client
