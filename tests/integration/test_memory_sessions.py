"""Transactions in memory: the sessions and the databases of ``memory:``.

The contract suite runs the operations of queues in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import mongomock
import pymongo
import pytest
from pymongo import DeleteMany, IndexModel, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError, InvalidOperation, OperationFailure

from pyqueue import AsyncClient, Client, ConfigurationError, Pipeline
from pyqueue.memory_sessions import MemoryDatabase


@pytest.fixture
def client() -> Iterator[Client]:
    """A client in memory."""
    with Client("memory:") as client:
        yield client


@pytest.fixture
def things(client: Client) -> Any:
    """A collection of the user, beside the queues."""
    collection = client.database["things"]
    collection.insert_many([{"_id": number, "n": 0} for number in range(3)])
    return collection


def stored(things: Any) -> dict[Any, Any]:
    return {each["_id"]: each["n"] for each in things.find().sort("_id", 1)}


def test_transaction_sees_its_writes_and_commits_them(client: Client, things: Any) -> None:
    with client.transaction() as session:
        things.insert_one({"_id": 3, "n": 0}, session=session)
        things.update_many({"_id": {"$lt": 2}}, {"$inc": {"n": 1}}, session=session)
        things.delete_one({"_id": 2}, session=session)
        client.database.more.insert_one({}, session=session)
        assert [each["_id"] for each in things.find(session=session)] == [0, 1, 3]
        (found,) = things.aggregate([{"$match": {"_id": 3}}], session=session)
        assert found["_id"] == 3
        assert "more" in client.database.list_collection_names(session=session)
        assert stored(things) == {0: 0, 1: 0, 2: 0}
        assert "more" not in client.database.list_collection_names()
    assert stored(things) == {0: 1, 1: 1, 3: 0}
    assert client.database.more.count_documents({}) == 1


def test_exception_undoes_the_transaction(client: Client, things: Any) -> None:
    with pytest.raises(ZeroDivisionError), client.transaction() as session:  # noqa: PT012
        things.delete_many({}, session=session)
        client.queue("jobs").push(1, session=session)
        raise ZeroDivisionError
    assert stored(things) == {0: 0, 1: 0, 2: 0}
    assert client.queue("jobs").counts().total == 0


CHANGES: dict[str, Any] = {
    "update": lambda things: things.update_one({"_id": 0}, {"$set": {"n": 9}}),
    "delete": lambda things: things.delete_one({"_id": 0}),
    "insert": lambda things: things.insert_one({"_id": 7, "n": 9}),
    "type": lambda things: things.update_one({"_id": 0}, {"$set": {"n": False}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_write_conflict_repeats_the_transaction(client: Client, things: Any, change: str) -> None:
    calls = 0

    def work(session: Any, repeats: bool = True) -> None:
        nonlocal calls
        calls += 1
        things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        if calls == 1:
            CHANGES[change](things)
        things.update_one({"_id": 0}, {"$set": {"n": 5}}, session=session)
        things.update_one({"_id": 7}, {"$set": {"n": 5}}, upsert=True, session=session)

    client.run_transaction(work)
    assert calls == 2
    assert stored(things) == {1: 1, 2: 0, 7: 5} | ({} if change == "delete" else {0: 5})


def test_write_conflict_without_a_repetition(client: Client, things: Any) -> None:
    def work(session: Any) -> None:
        things.update_many({}, {"$inc": {"n": 1}}, session=session)
        things.update_one({"_id": 2}, {"$inc": {"n": 1}})

    with pytest.raises(OperationFailure, match="changed 2 in 'things'") as conflict:  # noqa: SIM117
        with client.transaction() as session:
            work(session)
    assert conflict.value.has_error_label("TransientTransactionError")
    assert (conflict.value.code, stored(things)) == (112, {0: 0, 1: 0, 2: 1})
    with pytest.raises(OperationFailure, match="WriteConflict"):
        client.run_transaction(work)


def test_taken_unique_value_is_a_write_conflict(client: Client, things: Any) -> None:
    queue, answers = client.queue("jobs"), []

    def work(session: Any) -> None:
        things.update_one({"_id": 0}, {"$inc": {"n": 1}}, session=session)
        answers.append(queue.push("mine", key="k", session=session))
        queue.push("theirs", key="k")

    client.run_transaction(work)
    assert answers[0] is not None
    assert answers[1:] == [None]
    assert [each.payload for each in queue.peek()] == ["theirs"]
    assert stored(things)[0] == 1


def test_own_session(client: Client, things: Any) -> None:
    with client.database.client.start_session() as session:
        things.update_one({"_id": 0}, {"$inc": {"n": 1}}, session=session)  # no transaction
        assert stored(things)[0] == 1
        session.start_transaction()
        with pytest.raises(InvalidOperation):
            session.start_transaction()
        client.queue("jobs").push(1, session=session)
        session.abort_transaction()
        with session.start_transaction():
            client.queue("jobs").push(2, session=session)
            session.commit_transaction()
        with pytest.raises(InvalidOperation):
            session.commit_transaction()
    assert [each.payload for each in client.queue("jobs").peek()] == [2]
    with pytest.raises(ConfigurationError, match="the session has ended"):
        client.queue("jobs").push(3, session=session)


def test_transaction_spans_databases(client: Client, things: Any) -> None:
    other = client.database.client["other"].things
    with client.transaction() as session:
        other.insert_one({"_id": "a"}, session=session)
        things.delete_one({"_id": 0}, session=session)
        assert other.count_documents({}) == 0
    assert other.count_documents({}) == client.database.client["other"].things.count_documents({})
    assert (other.count_documents({}), len(stored(things))) == (1, 2)


def test_session_of_a_server_is_refused(client: Client, things: Any) -> None:
    with pymongo.MongoClient[Any]("mongodb://localhost:1", connect=False) as mongo:
        session = mongo.start_session()
        for use in (
            lambda: client.queue("jobs").push(1, session=session),
            lambda: things.insert_one({}, session=session),
        ):
            with pytest.raises(ConfigurationError, match=r"of .memory:.; .*transaction\(\)"):
                use()


class Counted:
    """A lock that counts how often it is taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *error: object) -> None:
        pass


def test_cursor_reads_its_documents_under_the_lock(
    things: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, another thread could see a document deleted that an update replaces."""
    lock = Counted()
    monkeypatch.setattr("pyqueue.memory_sessions.lock_of", lambda database: lock)
    cursor = things.find({"n": 0}).sort("_id", 1)
    before = lock.taken
    assert [each["_id"] for each in cursor] == [0, 1, 2]
    assert lock.taken > before


def test_missing_methods_name_the_remedy(client: Client) -> None:
    uses: list[Callable[[], object]] = [
        lambda: client.database.command("collStats"),
        lambda: client.database["things"].find_raw_batches(),
        lambda: client.database["things"].bulk_write([IndexModel("a")]),
        lambda: client.collection("things").bulk_write(
            [UpdateOne({}, {"$set": {"a": 1}}, collation={"locale": "en"})]
        ),
        lambda: client.database["things"].watch(),
    ]
    for use in uses:
        with pytest.raises(ConfigurationError, match="run the test on a MongoDB server"):
            use()
    for bus in (Client("memory:", signals="capped:"), Client(client.database, signals="capped:")):
        with pytest.raises(ConfigurationError, match="leave signals= out"):
            bus.queue("jobs").push(1)
    with pytest.raises(AttributeError):
        client.database._things  # noqa: B018
    assert client.database.a.b.name == client.database["a"]["b"].name == "a.b"
    assert repr(client.database.a) == "MemoryTable('pyqueue', 'a')"


BULK = [
    InsertOne({"_id": "new", "n": 1}),
    ReplaceOne({"_id": 0}, {"n": 5}),
    ReplaceOne({"_id": "up"}, {"n": 6}, upsert=True),
    UpdateOne({"_id": 1}, {"$inc": {"n": 7}}),
    UpdateMany({"n": 0}, {"$set": {"n": 8}}),
    DeleteMany({"n": 1}),
]


def test_bulk_writes_work_as_on_a_server(client: Client, things: Any) -> None:
    with client.transaction() as session:
        done = things.bulk_write(BULK, session=session)
        assert stored(things) == {0: 0, 1: 0, 2: 0}
    assert (done.inserted_count, done.matched_count, done.modified_count) == (1, 3, 3)
    assert (done.upserted_ids, done.deleted_count) == ({2: "up"}, 1)
    assert {each["_id"]: each["n"] for each in things.find()} == {0: 5, 1: 7, 2: 8, "up": 6}
    twice = [InsertOne({"_id": 0}), InsertOne({"_id": "x", "n": 0})]
    for ordered in (True, False):
        with pytest.raises(BulkWriteError) as caught:
            things.bulk_write(twice, ordered=ordered)
        assert [each["code"] for each in caught.value.details["writeErrors"]] == [11000]
        assert caught.value.details["nInserted"] == (not ordered)
    with pytest.raises(InvalidOperation):
        things.bulk_write([])


def test_collection_works_as_on_a_server(client: Client) -> None:
    notes = client.collection("notes")
    assert notes.create_index("a") == "a_1"
    assert notes.create_index((("c", 1),)) == "c_1"
    assert notes.create_index([("a", -1), "b"], unique=True) == "a_-1_b_1"
    notes.bulk_write([InsertOne({"_id": n, "a": n}) for n in (2, 0, 1)])
    done = notes.bulk_write([ReplaceOne({"_id": n}, {"a": 9 - n}, upsert=True) for n in (2, 3)])
    assert (done.matched_count, done.upserted_count) == (1, 1)
    assert [each["a"] for each in notes.find()] == [7, 0, 1, 6]
    assert [each["a"] for each in notes.find().sort("a", -1).limit(2)] == [7, 6]
    assert [each["a"] for each in notes.find({"a": {"$lt": 7}}).sort([("a", 1)]).skip(1)] == [1, 6]
    assert notes.find().sort("a").to_list(1) == [{"_id": 0, "a": 0}]
    with pytest.raises(BulkWriteError):
        notes.bulk_write([InsertOne({"_id": 5, "a": 0})])
    with client.transaction() as session:
        notes.bulk_write([DeleteMany({})], session=session)
        assert (notes.find(session=session), len(notes.find())) == ([], 4)
    assert notes.find() == []


def test_batch_stage_writes_in_bulk() -> None:
    async def main() -> None:
        async with AsyncClient("memory:") as client:
            rows = client.database["rows"]

            async def store(batch: list[int]) -> None:
                await rows.bulk_write([ReplaceOne({"_id": n}, {}, upsert=True) for n in batch])

            await client.queue("in").push_many(range(5))
            pipeline = Pipeline(client, "bulk")
            pipeline.sink("in", store, batch=10, max_tries=1)
            await pipeline.run(until_empty=True)
            assert await rows.count_documents({}) == 5

    asyncio.run(main())


def test_clients_share_a_database() -> None:
    database = MemoryDatabase.new("mine")

    async def move() -> int:
        async with AsyncClient(database) as client, AsyncClient(client.database) as second:
            jobs = client.queue("jobs")
            held = await jobs.reserve(0)
            assert held is not None
            await jobs.move(held, to=second.queue("done"))
            return int(await client.database["things"].count_documents({}))

    with Client(database) as client, Client(client.database) as second:
        client.queue("jobs").push(1)
        second.database["things"].insert_one({})
        assert asyncio.run(move()) == 1
        assert second.queue("done").counts().ready == 1
        assert repr(client.database) == "MemoryDatabase('mine')"


def test_transaction_on_a_mongomock_database() -> None:
    database: Any = mongomock.MongoClient()["mine"]
    with Client(database) as client:
        assert client.database is database
        client.run_transaction(lambda session: client.queue("jobs").push(1, session=session))
        assert client.queue("jobs").counts().ready == 1


def test_awaitable_database() -> None:
    async def main() -> None:
        async with AsyncClient("memory:") as client:
            things = client.database.things
            await things.insert_many([{"_id": number, "n": 0} for number in range(4)])

            async def work(session: Any) -> None:
                await things.delete_one({"_id": 0}, session=session)
                await client.queue("jobs").push(1, session=session)
                assert await things.count_documents({}) == 4

            await client.run_transaction(work)
            with pytest.raises(ZeroDivisionError):
                async with client.transaction() as session:
                    await work_and_fail(things, session)
            async with client.database.client.start_session() as session:
                async with await session.start_transaction():
                    await things.delete_one({"_id": 1}, session=session)
                await session.start_transaction()
                await things.delete_many({}, session=session)
                await session.abort_transaction()
            assert session.has_ended
            cursor = things.find().sort("_id", -1).limit(2)
            assert [each["_id"] async for each in cursor] == [3, 2]
            cursor = things.find()
            assert [len(await cursor.to_list(1)), len(await cursor.to_list())] == [1, 1]
            await cursor.close()
            found = await things.aggregate([{"$match": {"_id": 3}}])
            assert [each["_id"] for each in await found.to_list()] == [3]
            more = await client.database.create_collection("more")
            assert await more.find_one({}) is None
            assert set(await client.database.list_collection_names()) >= {"more", "things"}
            with pytest.raises(AttributeError):
                cursor.collection  # noqa: B018

    async def work_and_fail(things: Any, session: Any) -> None:
        await things.delete_many({}, session=session)
        raise ZeroDivisionError

    asyncio.run(main())


def test_async_write_conflict_repeats_the_transaction() -> None:
    async def main() -> None:
        async with AsyncClient("memory:") as client:
            things, calls = client.database.things, 0
            await things.insert_one({"_id": 0, "n": 0})

            async def work(session: Any) -> None:
                nonlocal calls
                calls += 1
                await things.update_one({"_id": 0}, {"$inc": {"n": 1}}, session=session)
                if calls == 1:
                    await things.update_one({"_id": 0}, {"$inc": {"n": 1}})

            await client.run_transaction(work)
            assert (calls, (await things.find_one({}))["n"]) == (2, 2)

    asyncio.run(main())
