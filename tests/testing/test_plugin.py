"""The fixtures. The page about tests runs them as a plugin; see tests/docs/test_testing.py."""

from __future__ import annotations

import pytest

from pyqueue.testing import AsyncTestClient, TestClient
from pyqueue.testing.plugin import _with_database


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("mongodb://host", "mongodb://host/mine"),
        ("mongodb://host/?replicaSet=rs0", "mongodb://host/mine?replicaSet=rs0"),
        ("mongodb+srv://host/shop", "mongodb+srv://host/mine"),
        ("mongodb://u:p@a:1,b:2/shop", "mongodb://u:p@a:1,b:2/mine?authSource=shop"),
        ("mongodb://u:p@host/shop?w=1", "mongodb://u:p@host/mine?w=1&authSource=shop"),
        ("mongodb://u:p@host/x?authSource=y", "mongodb://u:p@host/mine?authSource=y"),
    ],
)
def test_each_test_has_its_database_on_the_server(url: str, own: str) -> None:
    assert _with_database(url, "mine") == own


@pytest.mark.anyio
async def test_both_clients_share_an_empty_database(
    pyqueue_client: TestClient, pyqueue_async_client: AsyncTestClient
) -> None:
    assert pyqueue_client.queues() == []
    pyqueue_client.queue("ship").push(1)
    async with pyqueue_async_client as client:
        assert (await client.queue("ship").counts()).ready == 1
        assert client.database.name == pyqueue_client.database.name
