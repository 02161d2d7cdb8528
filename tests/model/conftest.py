"""The real server of the state machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pymongo
import pytest

from tests.model.places import Place, server_place


@pytest.fixture
def server(url: str) -> Iterator[Place]:
    """A database of a real mongod."""
    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        yield server_place(mongo.get_default_database())
