"""mongomock in place of a server: unknown operations are refused, and none is half done."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from pyqueue import Client, ConfigurationError, DuplicateKey, InvalidMessage, QueueError
from pyqueue.backends.moving import move_each
from pyqueue.backends.options import NewMessage
from pyqueue.memory import MemoryCollection, memory_database
from pyqueue.queue_base import backend_of
from pyqueue.runtime import base_driver
from pyqueue.runtime.connecting import runner_of
from tests.support.eventually import LONG, eventually, waiters


@pytest.fixture
def client() -> Iterator[Client]:
    """A client in memory."""
    with Client("memory:") as client:
        yield client


def test_unique_index_comes_after_messages_that_it_has_not(client: Client) -> None:
    """mongomock takes documents that a partial index leaves out for equal documents."""
    client.queue("plain").push_many([1, 2])
    ordered = client.queue("ordered", kind="ordered")
    ordered.push("first", group="g")
    assert ordered.reserve(0) is not None


def test_unique_index_is_refused_if_messages_are_equal_there() -> None:
    collection = MemoryCollection(memory_database("pyqueue"), "messages")
    collection.insert_many([{"key": "k", "q": "a"}, {"key": "k", "q": "b"}, {"q": "a"}, {"q": "a"}])
    partial = {"key": {"$exists": True}}
    options = {"unique": True, "partialFilterExpression": partial}
    collection.create_index([("q", 1), ("key", 1)], name="both", **options)
    with pytest.raises(DuplicateKeyError):
        collection.create_index([("key", 1)], name="one", **options)
    with pytest.raises(DuplicateKeyError):
        collection.insert_one({"key": "k", "q": "a"})


def test_memory_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mongomock", None)
    with (
        pytest.raises(ConfigurationError, match=r"^target: .*pip install mongomock"),
        Client("memory:") as client,
    ):
        client.queue("a").push(1)


#: Updates that a server refuses for the payload {"number": 1, "text": "x", "list": [1]}. Only
#: mongomock refuses the last one.
REFUSED: list[tuple[dict[str, Any], type[QueueError]]] = [
    ({"$inc": {"text": 1}}, InvalidMessage),
    ({"$mul": {"text": 2}}, InvalidMessage),
    ({"$rename": {"number": "new", "text": "list.x"}}, InvalidMessage),
    ({"$push": {"number": 1}}, InvalidMessage),
    ({"$addToSet": {"number": 1}}, InvalidMessage),
    ({"$set": {"number": 2}, "$push": {"text": 1}}, InvalidMessage),
    ({"$push": {"list": {"$each": 5}}}, InvalidMessage),
    ({"$pull": {"list": {"$jsonSchema": {}}}}, ConfigurationError),
]


@pytest.mark.parametrize(("update", "error"), REFUSED, ids=[str(update) for update, _ in REFUSED])
def test_refused_update_leaves_the_message_unchanged(
    client: Client, update: dict[str, Any], error: type[QueueError]
) -> None:
    """The message is not half moved, and a server raises the same errors."""
    queue = client.queue("a")
    payload = {"number": 1, "text": "x", "list": [1]}
    id = queue.push(payload, key="k", headers={"a": 1})
    held = queue.reserve(0)
    assert held is not None
    before = copy.deepcopy(client.database["pyqueue"].find_one({"_id": id}))
    with pytest.raises(error):
        queue.move(held, to="b", key="other", headers={"b": 2}, update=update)
    assert client.database["pyqueue"].find_one({"_id": id}) == before
    assert client.queue("b").counts().total == 0
    queue.move(held, to="b", update={"$inc": {"number": 1}})
    (message,) = client.queue("b").peek()
    assert (message.payload, message.headers) == (payload | {"number": 2}, {"a": 1})


def test_moves_to_taken_keys_are_refused_alone(client: Client) -> None:
    """The other moves are done, and the refused message is held as before."""
    queue, target = client.queue("a"), client.queue("b")
    target.push("there", key="k2")
    queue.push_many(range(4))
    held = queue.reserve_many(4, timeout=0)
    pairs = [(each, NewMessage(None, each.payload, None, f"k{each.payload}")) for each in held]
    outcomes = runner_of(client).run(
        move_each(backend_of(queue).terms, backend_of(target).target, pairs)
    )
    refused = [each.payload for each, outcome in outcomes if isinstance(outcome, DuplicateKey)]
    assert (refused, [each.payload for each, outcome in outcomes if outcome == "done"]) == (
        [2],
        [0, 1, 3],
    )
    assert sorted(str(each.payload) for each in target.peek()) == ["0", "1", "3", "there"]
    queue.commit(next(each for each in held if each.payload == 2))
    assert queue.counts().total == 0


def test_bulk_write_names_the_failed_operations() -> None:
    collection: Any = MemoryCollection(memory_database("t"), "c")
    collection.create_index([("key", 1)], name="key", unique=True, sparse=True)
    for number in range(4):
        collection.insert_one({"_id": number})
    operations = [
        UpdateOne({"_id": number}, {"$set": {"key": key}})
        for number, key in enumerate(["a", "b", "a", "c"])
    ]
    with pytest.raises(BulkWriteError) as caught:
        collection.bulk_write(operations, ordered=False)
    assert caught.value.details["nMatched"] == 3
    assert [(each["index"], each["code"]) for each in caught.value.details["writeErrors"]] == [
        (2, 11000)
    ]
    assert [each.get("key") for each in collection.find({})] == ["a", "b", None, "c"]


def test_memory_client_leaves_mongomock_unpatched() -> None:
    """However many clients have opened and closed."""
    with Client("memory:") as client:
        client.queue("jobs").push("text", id="m1")
        for _ in range(3):
            with Client(client.database) as other:
                other.queue("jobs").peek()
        for each in (
            client.database["pyqueue"],
            client.database.get_collection("pyqueue", CodecOptions(tz_aware=True)),
        ):
            assert "_apply_update_document" not in vars(each)
        assert client.database["pyqueue"].find_one({"_id": "m1"})["payload"] == "text"


# ---- the queues that a client knows


def test_client_forgets_idle_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that pushes to ever new names does not grow for ever."""
    with Client("memory:") as client:
        driver = runner_of(client).open()
        for n in range(50):
            client.queue(f"q{n}").push(n)
        assert len(driver._waiters) == len(driver.known._records) == 50
        monkeypatch.setattr(base_driver, "_IDLE_S", -1)
        client.queue("now").push(1)
        assert len(driver._waiters) >= 50  # it checks once a minute
        monkeypatch.setattr(driver, "_drop_at", 0)
        client.queue("next").push(1)
        assert set(driver._waiters) == {"next"}
        assert set(driver.known._records) <= {"next"}
        assert set(driver.known._options) <= {"next"}
        assert [each.payload for each in client.queue("q7").pop_many(2, timeout=0)] == [7]


def test_client_keeps_queues_with_waiting_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_driver, "_IDLE_S", -1)
    monkeypatch.setattr(base_driver, "_DROP_INTERVAL_S", 0)
    with Client("memory:") as client, ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.queue("kept", poll=3600).pop, LONG)
        eventually(lambda: waiters(client, "kept") == 1, "it waits")
        for n in range(20):
            client.queue(f"q{n}").push(n)
        client.queue("kept").push("heard")
        message = future.result(LONG)
        assert message is not None
        assert message.payload == "heard"


@pytest.mark.parametrize(("filter", "matches"), [({"n": 1}, True), ({"n": 2}, False)])
def test_pipeline_update_respects_the_whole_filter(filter: dict[str, int], matches: bool) -> None:
    collection = MemoryCollection(memory_database("one"), "things")
    collection.insert_one({"_id": "a", "n": 1})
    found = collection.find_one_and_update(
        {"_id": "a", **filter}, [{"$set": {"n": {"$add": [1, 1]}}}]
    )
    assert (found is not None) == matches
    assert collection.find_one({})["n"] == (2 if matches else 1)
