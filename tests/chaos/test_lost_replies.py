"""Commands whose reply is lost: pyqueue finds out what happened, or says that it is unknown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pyqueue import AsyncClient, Client, LeaseLost, Reservation, Unavailable
from tests.chaos.conftest import TIMEOUT_S, Server, through
from tests.support.proxy import Proxy

# PyMongo's async monitor drops its socket when its client is closed while it connects.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

# ---- claims with an unknown outcome


def expect_one_claim(client: Client, reservation: Reservation[Any] | None, payload: object) -> None:
    """Assert that one message was claimed, once, and that the claim can be settled."""
    assert reservation is not None
    assert (reservation.payload, reservation.tries) == (payload, 1)
    queue = client.queue(reservation.queue)
    assert queue.counts().reserved == 1
    queue.commit(reservation)


@pytest.mark.parametrize("times", [1, 2])
def test_claim_after_a_closed_connection(server: Server, database: str, times: int) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        server.fail(times, "findAndModify", closeConnection=True)
        reservation = queue.reserve(0)
        assert server.has_failed()
        expect_one_claim(client, reservation, "one")


@pytest.mark.parametrize("code", [10107, 189], ids=["NotWritablePrimary", "PrimarySteppedDown"])
def test_claim_during_a_fail_over(server: Server, database: str, code: int) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        server.fail(1, "findAndModify", errorCode=code, errorLabels=["RetryableWriteError"])
        reservation = queue.reserve(0)
        assert server.has_failed()
        expect_one_claim(client, reservation, "one")


def test_claim_without_any_reply_is_found(server: Server, proxy: Proxy, database: str) -> None:
    """The driver does not repeat a claim. A read finds the message by the token."""
    with Client(through(proxy, database), command_timeout=TIMEOUT_S) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        proxy.swallow("findAndModify")
        reservation = queue.reserve(0)
        assert proxy.swallowed("findAndModify") == 1
        expect_one_claim(client, reservation, "one")


def test_async_claim_without_any_reply_is_found(
    server: Server, proxy: Proxy, database: str
) -> None:
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


def test_claim_with_a_write_concern_error(server: Server, database: str) -> None:
    """The message is claimed in spite of the error."""
    failure = {
        "code": 64,
        "errmsg": "waiting for replication timed out",
        "errInfo": {"wtimeout": True},
    }
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two"])
        server.fail(1, "findAndModify", writeConcernError=failure)
        reservation = queue.reserve(0)
        assert server.has_failed()
        expect_one_claim(client, reservation, "one")


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


def test_batch_claim_after_a_closed_connection(server: Server, database: str) -> None:
    with Client(server.url(database)) as client:
        queue = client.queue("jobs")
        queue.push_many(range(10))
        server.fail(1, "update", closeConnection=True)
        held = queue.reserve_many(8, timeout=0)
        assert server.has_failed()
        assert [(each.payload, each.tries) for each in held] == [(n, 1) for n in range(8)]
        assert queue.counts().reserved == 8
        queue.commit(*held)


@pytest.mark.parametrize("receive", ["reserve_many", "pop_many"])
def test_batch_claim_after_a_lost_reply(
    server: Server, proxy: Proxy, database: str, receive: str
) -> None:
    """The driver does not retry an update of many, so pyqueue finds the claim by its token."""
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push_many(range(10))
        proxy.swallow("update", 1)
        got = getattr(queue, receive)(8, timeout=0)
        assert proxy.swallowed("update") == 1
        reserves = receive == "reserve_many"
        assert [(each.payload, each.tries) for each in got] == [
            (n, int(reserves)) for n in range(8)
        ]
        counts = queue.counts()
        assert (counts.ready, counts.reserved) == (2, 8 if reserves else 0)
        if reserves:
            queue.commit(*got)


def test_pop_after_lost_replies(server: Server, proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database), command_timeout=TIMEOUT_S) as client:
        queue = client.queue("jobs")
        queue.push_many(["one", "two", "three"])
        proxy.swallow("findAndModify", 1)
        message = queue.pop(0)
        assert message is not None
        assert message.payload == "one"
        # At most once: without any reply the message may be gone, and the pop raises.
        proxy.swallow("findAndModify")
        with pytest.raises(Unavailable):
            queue.pop(0)
        assert queue.counts().total == 1


# ---- writes with an unknown outcome


@pytest.mark.parametrize("arrives", [True, False])
def test_push_repeated_with_its_id_is_one_message(
    server: Server, proxy: Proxy, database: str, arrives: bool
) -> None:
    with Client(through(proxy, database), command_timeout=TIMEOUT_S) as client:
        queue = client.queue("jobs")
        queue.push("first")
        if arrives:
            proxy.swallow("insert")
        else:
            server.fail(1_000_000, "insert", closeConnection=True)
        with pytest.raises(Unavailable) as unknown:
            queue.push("second")
        assert arrives or server.has_failed()
        proxy.swallow("insert", 0)
        assert queue.counts().total == 1 + arrives
        [id] = unknown.value.ids
        assert queue.push("second", id=id) == id
        assert [message.payload for message in queue.pop_many(10, timeout=0)] == ["first", "second"]


def test_push_after_a_lost_reply(server: Server, proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database)) as client:
        queue = client.queue("jobs")
        queue.push("first")
        proxy.swallow("insert", 2)
        queue.push("second")
        queue.push_many(["third", "fourth"], keys=["a", "b"])
        assert proxy.swallowed("insert") == 2
        assert [each.payload for each in queue.pop_many(10, timeout=0)] == [
            "first",
            "second",
            "third",
            "fourth",
        ]


def test_push_many_repeated_with_its_ids(server: Server, proxy: Proxy, database: str) -> None:
    with Client(through(proxy, database), command_timeout=TIMEOUT_S) as client:
        queue = client.queue("jobs")
        queue.push("first", id="a")
        proxy.swallow("insert")
        with pytest.raises(Unavailable) as unknown:
            queue.push_many(range(5))
        proxy.swallow("insert", 0)
        ids = unknown.value.ids
        assert len(ids) == 5
        assert queue.push_many(range(5), ids=ids) == ids
        assert queue.counts().total == 6


def test_settle_without_a_reply_can_be_repeated(
    server: Server, proxy: Proxy, database: str
) -> None:
    with Client(through(proxy, database), command_timeout=TIMEOUT_S) as client:
        queue = client.queue("jobs")
        queue.push_many(range(4))
        one, *rest = queue.reserve_many(4, timeout=0)
        proxy.swallow("delete", 1)
        queue.commit(one)  # the driver retries a delete of one document
        assert proxy.swallowed("delete") == 1
        proxy.swallow("delete", 1)
        with pytest.raises(Unavailable) as unknown:
            queue.commit(*rest)  # but not a delete of many
        assert unknown.value.ids == [each.id for each in rest]
        with pytest.raises(LeaseLost):
            queue.commit(*rest)
        assert queue.counts().total == 0
