"""assert_enqueued and refute_enqueued, and clear()."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pyqueue import ConfigurationError
from pyqueue.testing import AsyncTestClient, TestClient, assert_enqueued, refute_enqueued
from pyqueue.where import exists, gt, le, one_of


@pytest.fixture
def client(pyqueue_client: TestClient) -> TestClient:
    return pyqueue_client


def payloads(messages: Any) -> list[Any]:
    return [each.payload for each in messages]


def test_all_live_messages_are_found(client: TestClient) -> None:
    queue = client.queue("ship", history=60)
    queue.push_many(["done", "held", "ready"])
    queue.push("later", delay=600)
    done, held = queue.reserve_many(2, timeout=0)
    queue.commit(done)
    assert payloads(assert_enqueued(client, "ship")) == ["ready", "held", "later"]
    refute_enqueued(client, "ship", where={"payload": "done"})
    queue.bury(held)
    assert payloads(assert_enqueued(client, "ship.dead")) == ["held"]


@pytest.mark.parametrize("kind", ["standard", "priority", "ordered", "bucket"])
def test_messages_of_each_kind_are_found(client: TestClient, kind: Any) -> None:
    queue = client.queue("ship", kind=kind)
    groups = ["a"] * 3 if kind == "ordered" else None
    queue.push_many([{"order": number} for number in range(3)], groups=groups)
    taken = queue.reserve_many(1, timeout=0)
    queue.commit(*taken)
    found = assert_enqueued(client, "ship", where={"payload.order": 2})
    assert payloads(found) == [{"order": 2}]
    refute_enqueued(client, "ship", where={"payload.order": 0})
    assert len(assert_enqueued(client, "ship")) == 2


def test_messages_of_a_stream_are_found(client: TestClient, monkeypatch: Any) -> None:
    monkeypatch.setattr("pyqueue.testing.enqueued._PAGE", 3)
    stream = client.stream("events")
    refute_enqueued(client, "events")
    stream.append_many([{"order": number} for number in range(7)])
    assert len(assert_enqueued(client, "events")) == 7
    (found,) = assert_enqueued(client, "events", where={"payload.order": 6})
    assert found.position == 6
    assert len(assert_enqueued(client, "events", where={"payload.order": gt(4), "tries": 0})) == 2


FUTURE = datetime(2900, 1, 1, tzinfo=UTC)
PAYLOAD = {"lines": [{"item": "a"}, {"item": "b"}], "none": None, "paid": True, "total": 3}
WHERE: list[tuple[Any, bool]] = [
    ({"payload.lines.1.item": "b", "headers.tenant": "x", "key": "k"}, True),
    ({"payload": {**PAYLOAD}}, True),
    ({"payload.none": None}, True),
    ({"payload.missing": None}, False),
    ({"payload.lines.2": None}, False),
    ({"payload.lines.item": "b"}, False),
    ({"headers.tenant": "y"}, False),
    ({"payload.total": gt(2), "payload.lines": exists(), "state": "ready"}, True),
    ({"payload.total": gt(3)}, False),
    ({"payload.total": 3.0, "payload.paid": True, "when": le(FUTURE)}, True),
    ({"payload.paid": 1}, False),
    ({"state": one_of("scheduled", "reserved")}, False),
    ({"error": exists(False), "tries": 0, "group": None}, True),
    (lambda message: message.headers["tenant"] == "x", True),
    (lambda message: message.tries > 0, False),
]


@pytest.mark.parametrize(("where", "matches"), WHERE)
def test_conditions(client: TestClient, where: Any, matches: bool) -> None:
    queue = client.queue("ship")
    queue.push(PAYLOAD, headers={"tenant": "x"}, key="k")
    if isinstance(where, dict) and "state" not in where:
        assert bool(queue.browse(where=where).messages) is matches  # one rule for both
    if matches:
        assert len(assert_enqueued(client, "ship", where=where)) == 1
        with pytest.raises(AssertionError):
            refute_enqueued(client, "ship", where=where)
    else:
        refute_enqueued(client, "ship", where=where)
        with pytest.raises(AssertionError):
            assert_enqueued(client, "ship", where=where)


def test_failure_shows_the_messages(client: TestClient) -> None:
    with pytest.raises(AssertionError, match=r"^queue 'ship': expected a message; there are none$"):
        assert_enqueued(client, "ship")
    client.queue("ship").push_many(range(7))
    text = r"expected a message where \{'payload': 9\}; there are 7: 0 \(ready\), .* and 2 more$"
    with pytest.raises(AssertionError, match=text):
        assert_enqueued(client, "ship", where={"payload": 9})
    with pytest.raises(AssertionError, match=r"no message where .*; there are 1: 3 \(ready\)$"):
        refute_enqueued(client, "ship", where={"payload": 3})


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"order": 7}, r"unknown path 'order'.*use payload.NAME.*, state"),
        ({"stat": "ready"}, "unknown path 'stat'.*did you mean 'state'"),
        ({7: 7}, "expected each path as a str"),
        ({"": 7}, "unknown path"),
        (["payload"], "expected a mapping"),
        ({"payload.at": datetime(2026, 1, 1)}, "has no time zone"),
    ],
)
def test_wrong_conditions_are_refused(client: TestClient, where: Any, said: str) -> None:
    for check in (assert_enqueued, refute_enqueued):
        with pytest.raises(ConfigurationError, match=f"where: .*{said}"):
            check(client, "ship", where=where)


@pytest.mark.anyio
async def test_async_client(pyqueue_async_client: AsyncTestClient) -> None:
    async with pyqueue_async_client as client:
        await client.queue("ship").push(1)
        assert payloads(await assert_enqueued(client, "ship")) == [1]
        await client.clear()
        await refute_enqueued(client, "ship")


def test_cleared_queues_can_have_another_kind(client: TestClient) -> None:
    for kind in ("bucket", "standard", "ordered"):
        queue = client.queue("ship", kind=kind)
        queue.push_many([1, 2])
        assert queue.reserve(0) is not None
        client.stream("events").append(kind)
        client.clear()
        assert client.queues() == []
        assert queue.reserve(0) is None
        client.clear()
