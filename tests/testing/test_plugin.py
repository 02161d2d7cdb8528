"""The fixtures. The page about tests runs them as a plugin; see tests/docs/test_testing.py."""

from __future__ import annotations

import pytest

from pyqueue import Client
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


def test_database_stays_until_the_test_ends(pyqueue_target: str) -> None:
    """A program may close its client, and make another one."""
    with Client(pyqueue_target) as client:
        client.queue("ship").push(1)
    with Client(pyqueue_target) as client:
        assert client.queue("ship").counts().ready == 1


@pytest.mark.parametrize("pyqueue_url", ["memory:shop"])
def test_url_may_have_a_name(pyqueue_target: str, pyqueue_client: TestClient) -> None:
    assert pyqueue_target == "memory:shop"
    with Client("memory:shop") as client:
        client.queue("ship").push(1)
    assert pyqueue_client.queue("ship").counts().ready == 1
