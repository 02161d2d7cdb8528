"""The collection to which the stages of the demo write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo.collection import Collection

from pyqueue import Client
from pyqueue.demo import flights


@pytest.fixture
def results(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Collection[dict[str, Any]]]:
    """The collection that the environment names for ``store``."""
    monkeypatch.setenv("PYQUEUE_URL", url)
    monkeypatch.setenv("PYQUEUE_NAMESPACE", client.namespace)
    flights.results.cache_clear()
    collection = flights.results()
    yield collection
    collection.database.client.close()
    flights.results.cache_clear()
