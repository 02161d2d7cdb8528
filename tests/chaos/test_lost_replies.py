"""Commands whose reply is lost: pyqueue finds the outcome, or says that it is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, LeaseLost, Queue, Reservation, Unavailable
from tests.chaos.conftest import TIMEOUT_S, Server, through
from tests.support.proxy import Proxy

# PyMongo's async monitor drops its socket when its client is closed while it connects.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture
def jobs(server: Server, database: str) -> Iterator[Queue[Any]]:
    """A queue whose client is connected to the server."""
    with Client(server.url(database)) as client:
        yield client.queue("jobs")


@pytest.fixture
def behind_proxy(proxy: Proxy, database: str) -> Iterator[Queue[Any]]:
    """A queue whose client is connected to the proxy, and has a short timeout."""
    with Client(through(proxy, database), command_timeout=TIMEOUT_S) as client:
        yield client.queue("jobs")


# ---- claims with an unknown outcome


def expect_one_claim(
    queue: Queue[Any], reservation: Reservation[Any] | None, payload: object
) -> None:
    """Assert that one message was claimed, once, and that the claim can be settled."""
    assert reservation is not None
    assert (reservation.payload, reservation.tries) == (payload, 1)
    assert queue.counts().reserved == 1
    queue.commit(reservation)


CLOSED: dict[str, Any] = {"closeConnection": True}
RETRYABLE: dict[str, Any] = {"errorLabels": ["RetryableWriteError"]}
TIMED_OUT: dict[str, Any] = {"code": 64, "errmsg": "timed out", "errInfo": {"wtimeout": True}}


@pytest.mark.parametrize(
    ("times", "failure"),
    [
        pytest.param(1, CLOSED, id="closed connection"),
        pytest.param(2, CLOSED, id="closed connection, twice"),
        pytest.param(1, {"errorCode": 10107, **RETRYABLE}, id="NotWritablePrimary"),
        pytest.param(1, {"errorCode": 189, **RETRYABLE}, id="PrimarySteppedDown"),
        pytest.param(1, {"writeConcernError": TIMED_OUT}, id="write concern"),
    ],
)
def test_claim_after_a_failure_of_the_server(
    server: Server, jobs: Queue[Any], times: int, failure: dict[str, Any]
) -> None:
    """The driver repeats the claim. With a write concern error, the first claim has its effect."""
    jobs.push_many(["one", "two"])
    server.fail(times, "findAndModify", **failure)
    reservation = jobs.reserve(0)
    assert server.has_failed()
    expect_one_claim(jobs, reservation, "one")


def test_claim_without_any_reply_is_found(proxy: Proxy, behind_proxy: Queue[Any]) -> None:
    """The driver does not repeat a claim. A read finds the message by the token."""
    behind_proxy.push_many(["one", "two"])
    proxy.swallow("findAndModify")
    reservation = behind_proxy.reserve(0)
    assert proxy.swallowed("findAndModify") == 1
    expect_one_claim(behind_proxy, reservation, "one")


def test_async_claim_without_any_reply_is_found(proxy: Proxy, database: str) -> None:
    async def main() -> None:
        async with AsyncClient(through(proxy, database), command_timeout=TIMEOUT_S) as client:
            queue = client.queue("jobs")
            await queue.push_many(["one", "two"])
            proxy.swallow("findAndModify")
            reservation = await queue.reserve(0)
            assert reservation is not None
            assert (reservation.payload, reservation.tries) == ("one", 1)
            assert (await queue.counts()).reserved == 1
            await queue.commit(reservation)

    asyncio.run(main())


@pytest.mark.parametrize("settle", ["commit", "release"])
def test_single_settles_after_a_closed_connection(
    server: Server, database: str, settle: str
) -> None:
    """They shared a command, which the driver does not repeat."""

    async def main() -> None:
        async with AsyncClient(server.url(database)) as client:
            queue = client.queue("jobs")
            await queue.push_many(range(100))
            held = await queue.reserve_many(100, timeout=0)
            command = "delete" if settle == "commit" else "update"
            server.fail(1, command, closeConnection=True)
            await asyncio.gather(*(getattr(queue, settle)(each) for each in held))
            assert server.has_failed()
            left = await queue.counts()
            assert (left.ready, left.reserved) == (0 if settle == "commit" else 100, 0)

    asyncio.run(main())


def test_batch_claim_after_a_closed_connection(server: Server, jobs: Queue[Any]) -> None:
    jobs.push_many(range(10))
    server.fail(1, "update", closeConnection=True)
    held = jobs.reserve_many(8, timeout=0)
    assert server.has_failed()
    assert [(each.payload, each.tries) for each in held] == [(n, 1) for n in range(8)]
    assert jobs.counts().reserved == 8
    jobs.commit(*held)


@pytest.mark.parametrize("receive", ["reserve_many", "pop_many"])
def test_batch_claim_after_a_lost_reply(proxy: Proxy, database: str, receive: str) -> None:
    """The driver does not retry an update of many, so pyqueue finds the claim by its token."""
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push_many(range(10))
        proxy.swallow("update", 1)
        got = getattr(queue, receive)(8, timeout=0)
        assert proxy.swallowed("update") == 1
        reserves = receive == "reserve_many"
        tries = int(reserves)
        assert [(each.payload, each.tries) for each in got] == [(n, tries) for n in range(8)]
        counts = queue.counts()
        assert (counts.ready, counts.reserved) == (2, 8 if reserves else 0)
        if reserves:
            queue.commit(*got)


def test_pop_after_lost_replies(proxy: Proxy, behind_proxy: Queue[Any]) -> None:
    behind_proxy.push_many(["one", "two", "three"])
    proxy.swallow("findAndModify", 1)
    message = behind_proxy.pop(0)
    assert message is not None
    assert message.payload == "one"
    # At most once: without any reply the message may be gone, and the pop raises.
    proxy.swallow("findAndModify")
    with pytest.raises(Unavailable):
        behind_proxy.pop(0)
    assert behind_proxy.counts().total == 1


# ---- writes with an unknown outcome


@pytest.mark.parametrize("arrives", [True, False])
def test_push_repeated_with_its_id_is_one_message(
    server: Server, proxy: Proxy, behind_proxy: Queue[Any], arrives: bool
) -> None:
    behind_proxy.push("first")
    if arrives:
        proxy.swallow("insert")
    else:
        server.fail(1_000_000, "insert", closeConnection=True)
    with pytest.raises(Unavailable) as unknown:
        behind_proxy.push("second")
    assert arrives or server.has_failed()
    proxy.swallow("insert", 0)
    assert behind_proxy.counts().total == 1 + arrives
    [id] = unknown.value.ids
    assert behind_proxy.push("second", id=id) == id
    assert [each.payload for each in behind_proxy.pop_many(10, timeout=0)] == ["first", "second"]


def test_push_after_a_lost_reply(proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push("first")
        proxy.swallow("insert", 2)
        queue.push("second")
        queue.push_many(["third", "fourth"], keys=["a", "b"])
        assert proxy.swallowed("insert") == 2
        payloads = [each.payload for each in queue.pop_many(10, timeout=0)]
        assert payloads == ["first", "second", "third", "fourth"]


def test_push_many_repeated_with_its_ids(proxy: Proxy, behind_proxy: Queue[Any]) -> None:
    behind_proxy.push("first", id="a")
    proxy.swallow("insert")
    with pytest.raises(Unavailable) as unknown:
        behind_proxy.push_many(range(5))
    proxy.swallow("insert", 0)
    ids = unknown.value.ids
    assert len(ids) == 5
    assert behind_proxy.push_many(range(5), ids=ids) == ids
    assert behind_proxy.counts().total == 6


def test_settle_without_a_reply_can_be_repeated(proxy: Proxy, behind_proxy: Queue[Any]) -> None:
    behind_proxy.push_many(range(4))
    one, *rest = behind_proxy.reserve_many(4, timeout=0)
    proxy.swallow("delete", 1)
    behind_proxy.commit(one)  # the driver retries a delete of one document
    assert proxy.swallowed("delete") == 1
    proxy.swallow("delete", 1)
    with pytest.raises(Unavailable) as unknown:
        behind_proxy.commit(*rest)  # but not a delete of many
    assert unknown.value.ids == [each.id for each in rest]
    with pytest.raises(LeaseLost):
        behind_proxy.commit(*rest)
    assert behind_proxy.counts().total == 0
