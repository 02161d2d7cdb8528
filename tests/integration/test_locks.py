"""An open transaction holds keys and messages. Only the calls that need them wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pymongo
import pytest

from pyqueue import AsyncClient, AsyncQueue, Client, Queue, Unavailable
from tests.integration.test_joining import drivers, run, together
from tests.support.eventually import async_eventually, eventually

CALLERS = 100
#: Longer than the server lets a transaction live, so no locked call fails by itself.
PATIENT_S = 120.0

Raw = pymongo.collection.Collection[dict[str, Any]]


@contextmanager
def transaction(url: str) -> Iterator[tuple[Raw, Any]]:
    """Open a transaction behind the client's back, and abort it at the end."""
    with pymongo.MongoClient[dict[str, Any]](url) as mongo, mongo.start_session() as session:
        collection = mongo.get_default_database()["pyqueue"]
        session.start_transaction()
        yield collection, session
        session.abort_transaction()


def insert_keyed(raw: Raw, session: Any, queue: str, *keys: str) -> None:
    """Insert messages with these keys, uncommitted."""
    now = datetime.now(UTC)
    fields = {"q": queue, "when": now, "due": now, "pushed": now, "tries": 0, "payload": 0}
    raw.insert_many([fields | {"_id": f"raw {key}", "key": key} for key in keys], session=session)


async def begun(client: AsyncClient, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call, and return once it has sent its command."""
    before = client.stats["commands"]
    task = asyncio.create_task(call)
    await async_eventually(lambda: client.stats["commands"] > before, "a command")
    return task


@drivers
def test_locked_keys_and_ids_stop_no_other_push(driver: str, url: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue, other = client.queue("jobs"), client.queue("other")
        await together(queue.push("first"), other.push("first"))
        with transaction(url) as (raw, session):
            insert_keyed(raw, session, "jobs", "k1", "k2")
            calls = [queue.push(1, key="k1"), queue.push(2, key="k2"), queue.push(3, id="raw k1")]
            locked = [await begun(client, call) for call in calls]
            innocent: list[Awaitable[Any]] = []
            for n in range(CALLERS):
                innocent += [other.push(n), queue.push(n)]
            innocent += [queue.push(n, key=f"free {n}") for n in range(10)]
            assert all(isinstance(id, object) for id in await asyncio.gather(*innocent))
            assert not any(task.done() for task in locked)
        await asyncio.gather(*locked)
        assert (await other.counts()).total == CALLERS + 1
        assert (await queue.counts()).total == CALLERS + 14

    run(driver, url, test, command_timeout=PATIENT_S)


async def reserve_all(queue: AsyncQueue[Any], count: int) -> list[Any]:
    await queue.push_many(range(count))
    return await queue.reserve_many(count, timeout=0)


@drivers
def test_locked_messages_stop_no_other_settle(driver: str, url: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("jobs", lease=600)
        *held, first, second = await reserve_all(queue, CALLERS)
        with transaction(url) as (raw, session):
            ids = [first.id, second.id]
            raw.update_many({"_id": {"$in": ids}}, {"$set": {"x": 1}}, session=session)
            locked = [
                await begun(client, queue.commit(first)),
                await begun(client, queue.rollback(second)),
            ]
            await asyncio.gather(*(queue.commit(each) for each in held))
            assert not any(task.done() for task in locked)
        await asyncio.gather(*locked)
        assert (await queue.counts()).total == 1

    run(driver, url, test, command_timeout=PATIENT_S)


@pytest.mark.slow  # it waits for time limits: the case itself
@drivers
@pytest.mark.parametrize("settle", ["commit", "rollback"])
def test_locked_message_fails_no_settle_of_its_batch(driver: str, url: str, settle: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("jobs", lease=600)
        held = await reserve_all(queue, CALLERS)
        call: Callable[[Any], Awaitable[None]] = (
            queue.commit if settle == "commit" else lambda each: queue.rollback(each, delay=600)
        )
        with transaction(url) as (raw, session):
            raw.update_one({"_id": held[50].id}, {"$set": {"x": 1}}, session=session)
            answers = await together(*(call(each) for each in held))
        assert [n for n, answer in enumerate(answers) if answer is not None] == [50]
        assert isinstance(answers[50], Unavailable)
        assert answers[50].ids == [held[50].id]
        counts = await queue.counts()
        assert (counts.reserved, counts.scheduled) == (1, 0 if settle == "commit" else CALLERS - 1)

    run(driver, url, test, command_timeout=10)


def test_transaction_on_a_packed_message_holds_its_pack(url: str) -> None:
    """This is the exception to the tests above. The error of a neighbour says so."""
    with Client(url) as client, Client(url, command_timeout=0.3) as impatient:
        queue = client.queue("clicks", kind="bucket")
        client.queue("other").push(0)
        queue.push_many(range(6))
        held = queue.reserve_many(6, timeout=0)

        def calls(queue: Queue[Any]) -> list[Callable[[], None]]:
            return [
                lambda: queue.commit(held[1]),
                lambda: queue.rollback(held[2]),
                lambda: queue.extend(held[3]),
            ]

        hasty = impatient.queue("clicks", kind="bucket")
        hasty.counts()  # it knows the queue before the lock
        with client.transaction() as session:
            queue.commit(held[0], session=session)
            for place, call in enumerate(calls(hasty), 1):
                with pytest.raises(Unavailable, match="a transaction has settled") as caught:
                    call()
                assert caught.value.ids == [held[place].id]
            queue.move(*held[4:], to="other", session=session)
        for call in calls(queue):
            call()
        assert (queue.counts().total, client.queue("other").counts().total) == (2, 3)


def test_locked_key_stops_no_other_blocking_push(url: str) -> None:
    """Each call of a blocking client sends a separate command."""
    with Client(url, command_timeout=PATIENT_S) as client:
        queue = client.queue("jobs")
        queue.push("first")
        with transaction(url) as (raw, session):
            insert_keyed(raw, session, "jobs", "k1")
            before = client.stats["commands"]
            locked = threading.Thread(target=queue.push, args=(1,), kwargs={"key": "k1"})
            locked.start()
            eventually(lambda: client.stats["commands"] > before, "a command")
            for n in range(20):
                queue.push(n)
                queue.push(n, key=f"free {n}")
            assert locked.is_alive()
        locked.join()
        assert queue.counts().total == 42
