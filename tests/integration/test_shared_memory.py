"""``memory:NAME``: the clients of a process with this URL share a database and the time."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from pymongo.errors import OperationFailure

from pyqueue import AsyncClient, Client, ConfigurationError, QueueClosed, To
from pyqueue.memory_sessions import MemoryDatabase
from pyqueue.runtime.connecting import runner_of
from pyqueue.testing import AsyncTestClient, TestClient
from tests.contract.world import in_thread
from tests.integration.test_misuse import in_fork
from tests.support.eventually import LONG, async_eventually, eventually, waiters

DAY = timedelta(days=1)


@pytest.fixture
def url() -> str:
    """The URL of a database that no other test uses."""
    return f"memory:{uuid4().hex}"


def payloads(client: Client, name: str) -> list[Any]:
    return [each.payload for each in client.queue(name).peek(1000)]


# ---- one database


def test_clients_of_one_url_share_a_database(url: str) -> None:
    async def move() -> None:
        async with AsyncClient(url) as client:
            held = await client.queue("ship").reserve(0)
            assert held is not None
            await client.queue("ship").move(held, to="mail")
            await client.database["things"].insert_one({"_id": 1})
            assert repr(client.database) == f"AsyncMemoryDatabase({url[7:]!r})"

    with Client(url) as client, Client(url) as other:
        client.queue("ship").push("book")
        asyncio.run(move())
        assert payloads(other, "mail") == ["book"]
        assert other.database["things"].count_documents({}) == 1
        assert (other.database.name, other.url) == (url[7:], None)
        with Client("memory:") as private, Client(f"{url}-2") as elsewhere:
            assert (payloads(private, "mail"), payloads(elsewhere, "mail")) == ([], [])


def test_push_wakes_consumers_of_other_clients(url: str) -> None:
    """A thread and a task wait; their clients poll too seldom for the test."""

    async def receive(client: AsyncClient) -> Any:
        async with client:
            return await client.queue("mail", poll=3600).reserve(LONG)

    with Client(url) as client, Client(url) as other:
        blocked = in_thread(lambda: other.queue("ship", poll=3600).reserve(LONG))
        awaiting = AsyncClient(url)
        task = in_thread(lambda: asyncio.run(receive(awaiting)))
        eventually(lambda: waiters(other, "ship") == 1, "a thread that waits")
        eventually(lambda: waiters(awaiting, "mail") == 1, "a task that waits")
        client.queue("ship").push("book")
        client.queue("mail").push("letter")
        assert (blocked.result(LONG).payload, task.result(LONG).payload) == ("book", "letter")


def test_each_message_goes_to_one_client(url: str) -> None:
    """Blocking clients in threads, and an async client, push and take at the same time."""

    def work(number: int) -> list[Any]:
        with Client(url) as client:
            queue = client.queue("ship")
            queue.push_many([(number, each) for each in range(20)])
            return [message.payload for message in iter(lambda: queue.pop(0), None)]

    async def push_and_pop() -> list[Any]:
        async with AsyncClient(url) as client:
            queue = client.queue("ship")
            await asyncio.gather(*(queue.push([9, each]) for each in range(20)))
            found = await asyncio.gather(*(queue.pop(0) for _ in range(30)))
            return [message.payload for message in found if message is not None]

    with Client(url) as client, ThreadPoolExecutor(5) as pool:
        parts = [pool.submit(work, number) for number in range(4)]
        parts.append(pool.submit(asyncio.run, push_and_pop()))
        taken = [tuple(each) for part in parts for each in part.result(LONG)]
        left = [tuple(each) for each in payloads(client, "ship")]
        expected = {(number, each) for number in (0, 1, 2, 3, 9) for each in range(20)}
        assert len(taken) + len(left) == len(expected)
        assert {*taken, *left} == expected


def test_each_namespace_has_its_indexes(url: str) -> None:
    """Also if the clock of the second client is fresh, because it joined later."""
    with Client(url) as client, Client(url, namespace="other") as other:
        for each in (client, other):
            queue = each.queue("ship")
            assert queue.push("book", key="k") is not None
            assert queue.push("book", key="k") is None
            names = each.database[each.namespace].index_information()
            assert {"hot"} < {*names}
        assert client.queue("ship").counts().ready == 1


def test_gather_spans_clients(url: str) -> None:
    """A client takes the gather of another one only if both have one database."""
    with Client(url) as client, Client(url) as other, Client("memory:") as private:
        with client.gather(To("report", "done")) as g:
            other.queue("ship").push(1, gather=g)
            with pytest.raises(ConfigurationError, match="of this database"):
                private.queue("ship").push(1, gather=g)
        held = client.queue("ship").reserve(0)
        assert held is not None
        other.commit(held)
        found = client.queue("report").reserve(LONG)
        assert found is not None
        assert found.payload == "done"


# ---- transactions


def test_transactions_of_two_clients_conflict(url: str) -> None:
    with Client(url) as client, Client(url) as other:
        things = client.database["things"]
        things.insert_one({"_id": 1, "n": 0})
        calls: list[int] = []

        def work(session: Any) -> None:
            calls.append(1)
            things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
            client.queue("ship").push("book", session=session)
            assert payloads(other, "ship") == []
            if len(calls) == 1:
                other.database["things"].update_one({"_id": 1}, {"$inc": {"n": 10}})

        client.run_transaction(work)
        assert (len(calls), things.find_one({})["n"], payloads(other, "ship")) == (2, 11, ["book"])

        def conflict() -> None:
            with other.transaction() as session:
                other.database["things"].delete_one({"_id": 1}, session=session)
                things.update_one({"_id": 1}, {"$inc": {"n": 1}})

        with pytest.raises(OperationFailure, match="WriteConflict"):
            conflict()
        assert things.find_one({})["n"] == 12


def test_async_transaction_wakes_a_blocking_client(url: str) -> None:
    async def store() -> None:
        async with AsyncClient(url) as client:

            async def work(session: Any) -> None:
                await client.database["orders"].insert_one({"_id": 7}, session=session)
                await client.queue("ship").push(7, session=session)

            await client.run_transaction(work)

    with Client(url) as client:
        waiting = in_thread(lambda: client.queue("ship", poll=3600).reserve(LONG))
        eventually(lambda: waiters(client, "ship") == 1, "it waits")
        asyncio.run(store())
        assert waiting.result(LONG).payload == 7
        assert client.database["orders"].find_one({}) == {"_id": 7}


def test_transactions_in_threads_lose_no_update(url: str) -> None:
    def count(number: int) -> None:
        with Client(url) as client:
            counters = client.database["counters"]

            def work(session: Any) -> None:
                counters.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
                client.queue("ship").push(number, session=session)

            for _ in range(3):
                client.run_transaction(work)

    with Client(url) as client, ThreadPoolExecutor(3) as pool:
        client.database["counters"].insert_one({"_id": 1, "n": 0})
        for each in [pool.submit(count, number) for number in range(3)]:
            each.result(LONG)
        assert client.database["counters"].find_one({})["n"] == 9
        assert client.queue("ship").counts().ready == 9


# ---- how long it lasts


def test_database_lasts_until_its_last_client_is_closed(url: str) -> None:
    first = Client(url)
    first.queue("ship").push("book")
    second = Client(url)
    assert payloads(second, "ship") == ["book"]
    database = first.database
    first.close()
    assert payloads(second, "ship") == ["book"]
    second.close()
    with pytest.raises(QueueClosed):
        second.queue("ship").push("book")
    with Client(url) as third:
        assert third.queues() == []
        assert database["pyqueue"].count_documents({}) > 0  # a program still has the old one


def test_unused_client_keeps_no_database(url: str) -> None:
    unused = Client(url)
    with Client(url) as client:
        client.queue("ship").push("book")
    assert payloads(unused, "ship") == []
    unused.close()


def test_dropped_client_keeps_no_database(url: str) -> None:
    Client(url).queue("ship").push("book")
    gc.collect()
    with Client(url) as client:
        assert client.queues() == []


def test_closed_async_client_keeps_no_database(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            await client.queue("ship").push("book")
        async with AsyncClient(url) as client:
            assert await client.queues() == []

    asyncio.run(main())


def test_clear_empties_the_queues_of_all_clients(url: str) -> None:
    """The other client forgets what it knew of them, so they may get another kind."""
    with TestClient(url) as client, Client(url) as other, Client(url, namespace="far") as far:
        far.queue("ship").push("far")
        other.database["things"].insert_one({})
        for kind in ("bucket", "ordered", "standard"):
            queue = other.queue("ship", kind=kind)
            queue.push_many([1, 2])
            assert queue.reserve(0) is not None
            client.clear()
            assert other.queues() == []
            assert queue.reserve(0) is None
            client.clear()
        assert payloads(far, "ship") == ["far"]
        assert other.database["things"].count_documents({}) == 1


def test_other_client_waits_on_after_clear(url: str) -> None:
    with TestClient(url) as client, Client(url) as other:
        waiting = in_thread(lambda: other.queue("ship", poll=3600).reserve(LONG))
        eventually(lambda: waiters(other, "ship") == 1, "it waits")
        client.clear()
        client.queue("ship").push("book")
        assert waiting.result(LONG).payload == "book"


# ---- the time


def test_clients_share_the_time(url: str) -> None:
    with TestClient(url) as client, Client(url) as other, Client("memory:") as private:
        for each in (client, private):
            each.queue("ship").push("book", delay=DAY)
        assert other.queue("ship").pop(0) is None
        client.advance(DAY)
        held = other.queue("ship").reserve(0)
        assert held is not None
        assert private.queue("ship").pop(0) is None
        with Client(url) as later:  # it joins the moved time
            assert later.queue("ship").reserve(0) is None
            client.advance(held.lease + 1)
            again = later.queue("ship").reserve(0)
            assert again is not None
            assert (again.id, again.tries) == (held.id, 2)


def test_time_stays_while_a_client_is_open(url: str) -> None:
    with Client(url) as client:
        client.queue("ship").push("book", delay=DAY)
        with TestClient(url) as other:
            other.advance(DAY)
        assert client.queue("ship").pop(0) is not None


@pytest.mark.parametrize("awaited", [False, True])
def test_advance_wakes_consumers_of_other_clients(url: str, awaited: bool) -> None:
    async def receive(client: AsyncClient) -> Any:
        async with client:
            return await client.queue("ship", poll=3600).reserve(LONG)

    async def advance() -> None:
        async with AsyncTestClient(url) as client:
            client.advance(DAY)

    with ExitStack() as stack:
        client = stack.enter_context(TestClient(url))
        client.queue("ship").push("book", delay=DAY)
        other: Any = AsyncClient(url) if awaited else stack.enter_context(Client(url))
        work: Callable[[], Any] = lambda: other.queue("ship", poll=3600).reserve(LONG)  # noqa: E731
        waiting = in_thread((lambda: asyncio.run(receive(other))) if awaited else work)
        eventually(lambda: waiters(other, "ship") == 1, "it waits")
        if awaited:
            client.advance(DAY)
        else:
            asyncio.run(advance())
        assert waiting.result(LONG).payload == "book"


def test_two_loops_share_a_database(url: str) -> None:
    """An async client belongs to one loop; a second one with the URL finds its messages."""

    async def serve(stop: list[bool]) -> None:
        async with AsyncClient(url) as client:
            await client.queue("ship").push("book")
            await async_eventually(lambda: stop, "the end")

    async def take() -> Any:
        async with AsyncClient(url) as client:
            return await client.queue("ship").reserve(LONG)

    stop: list[bool] = []
    served = in_thread(lambda: asyncio.run(serve(stop)))
    try:
        assert asyncio.run(take()).payload == "book"
    finally:
        stop.append(True)
    served.result(LONG)


# ---- a fork, other processes, names


def test_forked_child_begins_with_an_empty_database(url: str) -> None:
    def use() -> object:
        with Client(url) as own:
            found = payloads(own, "ship")
            own.queue("ship").push("child")
            with Client(url) as second:
                return found, payloads(second, "ship"), os.getpid() != parent

    parent = os.getpid()
    with Client(url) as client:
        client.queue("ship").push("book")
        assert in_fork(use) == "returned ([], ['child'], True)"
        assert payloads(client, "ship") == ["book"]
        refused = in_fork(lambda: client.queue("ship").push("child"))
        assert refused.startswith("ConfigurationError: this client was created before the process")


def test_forked_child_waits_for_no_thread_of_its_parent(url: str) -> None:
    """Even if a thread opens clients at the moment of the fork."""
    done: list[bool] = []

    def open_clients() -> None:
        while not done:
            with Client(url) as client:
                client.queue("ship").push("book")

    opening = in_thread(open_clients)
    try:
        for _ in range(20):
            assert in_fork(lambda: payloads(Client(url), "ship")) == "returned []"
    finally:
        done.append(True)
    opening.result(LONG)


@pytest.mark.parametrize("name", ["a b", "//shop", "a/b", "a.b", "ü", "x" * 64, "shop?w=1"])
def test_wrong_names_are_refused(name: str) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(ConfigurationError, match=r'^target: .*use "memory:NAME" with up to 63'):
            make(f"memory:{name}")


def test_target_of_a_database_stays_private_to_its_holders(url: str) -> None:
    """A MemoryDatabase of the same name is another database."""
    database = MemoryDatabase.new(url[7:])
    with Client(url) as client, Client(database) as other:
        other.queue("ship").push("book")
        assert client.queues() == []
        assert runner_of(client).store != runner_of(other).store
