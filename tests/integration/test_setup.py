"""Opening a namespace: by many clients at once, after a drop, without permissions; passwords."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pymongo
import pytest

from pyqueue import AsyncClient, Client, ConfigurationError, DuplicateKey, QueueError
from pyqueue.backends import indexes
from pyqueue.requests import Plan, ServerTime
from signals import AsyncMemoryBus
from tests.integration.conftest import PROCESSES, Connect
from tests.signals.conftest import ROOT_PASSWORD, ROOT_USER, guarded
from tests.support.eventually import LONG, eventually
from tests.support.processes import open_and_use
from tests.support.samples import sampled

Mongo = pymongo.MongoClient[dict[str, Any]]
INDEXES = {"_id_", "hot", "key", "expires", "claims"}
KINDS = ("standard", "priority", "bucket", "ordered")
SECRET = ROOT_PASSWORD

__all__ = ["guarded"]  # a fixture


# ---- opening


def test_options_of_the_url_do_not_apply_to_queues(url: str) -> None:
    """No secondary would answer the reads, and ``w=0`` would hide a failed write."""
    with Client(f"{url}&readPreference=secondary&w=0&serverSelectionTimeoutMS=2000") as client:
        queue = client.queue("jobs")
        queue.push(1, key="a")
        with pytest.raises(DuplicateKey):
            queue.push(2, key="a", on_duplicate="error")
        assert queue.counts().ready == 1


def test_concurrent_first_openings_by_processes(
    url: str, client: Client, processes: ProcessPoolExecutor
) -> None:
    got = list(processes.map(open_and_use, [url] * PROCESSES, range(PROCESSES), timeout=120))
    assert sorted(got) == list(range(PROCESSES))
    collection = client.database["pyqueue"]
    assert set(collection.index_information()) == INDEXES
    assert [each["_id"] for each in collection.find({"record": True})] == ["~queue:jobs"]
    assert client.queue("jobs").counts().total == 0


def test_concurrent_first_openings_by_threads(connect: Connect, client: Client) -> None:
    """Each thread has its own client, and all begin at the same instant."""
    barrier = threading.Barrier(5)
    clients = [connect(namespace="shared") for _ in range(5)]

    def use(consumer: Client, n: int) -> Any:
        queue = consumer.queue("jobs")
        barrier.wait()
        queue.push(n, key="the same", on_duplicate="replace")
        queue.push(n)
        message = queue.pop(20)
        assert message is not None
        return message.payload

    with ThreadPoolExecutor(5) as pool:
        assert len(list(pool.map(use, clients, range(5)))) == 5
    collection = client.database["shared"]
    assert set(collection.index_information()) == INDEXES
    assert [each["_id"] for each in collection.find({"record": True})] == ["~queue:jobs"]


def test_second_process_opens_an_existing_namespace(
    url: str, client: Client, processes: ProcessPoolExecutor
) -> None:
    queue = client.queue("jobs")
    queue.push("from the first")
    assert processes.submit(open_and_use, url, 1).result(60) == "from the first"
    message = queue.pop(0)
    assert message is not None
    assert message.payload == 1


# ---- dropped


def test_client_recreates_a_dropped_collection(connect: Connect, client: Client) -> None:
    consumer = connect()
    queue = consumer.queue("jobs")
    queue.push("gone", key="k")
    queue.pause()
    for drop in (
        client.database.drop_collection,
        lambda _: client.database.client.drop_database(client.database.name),
    ):
        drop("pyqueue")
        assert queue.push("kept") is not None
        message = queue.pop(0)
        assert message is not None
        assert message.payload == "kept"
        assert set(client.database["pyqueue"].index_information()) == INDEXES
        queue.push("again", key="k")
        assert [each["_id"] for each in client.database["pyqueue"].find({"record": True})] == [
            "~queue:jobs"
        ]
        assert queue.push("twice", key="k") is None
        reservation = queue.reserve(0)
        assert reservation is not None
        queue.commit(reservation)


def test_waiting_consumer_survives_a_dropped_collection(connect: Connect, client: Client) -> None:
    consumer = connect()
    queue = consumer.queue("jobs", poll=0.05)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(queue.reserve, LONG)
        before = consumer.stats.get("commands", 0)
        eventually(lambda: consumer.stats["commands"] >= before + 8, "several polls")
        assert not future.done()
        client.database.drop_collection("pyqueue")
        client.queue("jobs").push("after the drop")
        reservation = future.result(LONG)
    assert reservation is not None
    queue.commit(reservation)
    assert set(client.database["pyqueue"].index_information()) == INDEXES


@pytest.mark.parametrize("kind", sampled(KINDS, few=2))
def test_any_operation_works_first_after_a_drop(client: Client, kind: Any) -> None:
    queue = client.queue("jobs", kind=kind)
    calls: list[Callable[[], Any]] = [
        lambda: queue.counts().total,
        queue.peek,
        queue.next_when,
        queue.purge,
        lambda: queue.reserve_many(5, timeout=0),
        queue.redrive,
        client.queues,
    ]
    for call in calls:
        queue.push(1)
        client.database.drop_collection("pyqueue")
        # With a document in it, the server checks the index hint.
        client.database["pyqueue"].insert_one({"_id": "made by hand"})
        assert not call()
        queue.push(2)
        message = queue.reserve(0)
        assert message is not None
        assert message.payload == 2
        queue.commit(message)
        assert set(client.database["pyqueue"].index_information()) >= INDEXES


@pytest.mark.parametrize("kind", KINDS)
def test_unused_queue_of_a_new_namespace_is_empty(client: Client, kind: Any) -> None:
    queue = client.queue("jobs", kind=kind)
    assert queue.counts().total == 0
    assert (queue.peek(), queue.next_when(), queue.paused()) == ([], None, False)
    assert client.database["pyqueue"].find_one() is None


def test_equal_keys_from_before_the_index_are_reported(connect: Connect, client: Client) -> None:
    client.queue("jobs").push(1, key="k", id="m1")
    collection = client.database["pyqueue"]
    collection.drop_index("key")
    collection.insert_one(collection.find_one({"_id": "m1"}) | {"_id": "m2"})
    with pytest.raises(ConfigurationError, match="messages with equal keys arrived"):
        connect().queue("jobs").push(2)
    collection.delete_one({"_id": "m2"})
    assert connect().queue("jobs").push(2) is not None
    assert set(collection.index_information()) == INDEXES


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_index_dropped_again_and_again_is_an_error(
    url: str, client: Client, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the index is dropped each time it is made, the client gives up with an error."""
    made: list[str] = []

    def nothing(name: str, indexes: object) -> Plan[None]:
        made.append(name)
        yield ServerTime()

    client.queue("jobs").push(1)

    def gone() -> None:
        client.database["pyqueue"].drop_index("hot")
        monkeypatch.setattr(indexes, "make_indexes", nothing)

    async def work() -> None:
        async with AsyncClient(url) as other:
            queue = other.queue("jobs")
            await queue.counts()
            gone()
            with pytest.raises(QueueError, match="hint"):
                await queue.pop(0)

    if kind == "async":
        asyncio.run(work())
    else:
        client.queue("jobs").counts()
        gone()
        with pytest.raises(QueueError, match="hint"):
            client.queue("jobs").pop(0)
    assert made == ["pyqueue"]


def test_bus_passed_to_a_client_stays_open() -> None:
    async def work() -> None:
        bus = AsyncMemoryBus()
        async with AsyncClient("memory:", signals=bus) as client:
            await client.queue("jobs").push(1)
        async with bus.listen("topic") as listener:
            bus.emit("topic", None)
            assert await listener.wait(20)
        await bus.close()

    asyncio.run(work())


# ---- records of another kind or version


@pytest.mark.parametrize("change", [{"kind": "stream"}, {"v": 3}, {"v": None}, {"kind": 7}])
def test_record_of_an_unknown_kind_or_version_is_refused(
    connect: Connect, client: Client, change: dict[str, Any]
) -> None:
    client.queue("jobs").push(1)
    client.database["pyqueue"].update_one({"_id": "~queue:jobs"}, {"$set": change})
    other = connect()
    queue, source = other.queue("jobs"), other.queue("source")
    source.push("to be moved")
    held = source.reserve(0)
    assert held is not None
    before = list(client.database["pyqueue"].find(sort=[("_id", 1)]))
    for operation in (
        lambda: queue.push(2),
        lambda: queue.pop(0),
        lambda: queue.reserve_many(2, timeout=0),
        lambda: source.move(held, to=queue),
        lambda: source.move(held, to="jobs"),
    ):
        with pytest.raises(ConfigurationError, match="jobs"):
            operation()
    assert list(client.database["pyqueue"].find(sort=[("_id", 1)])) == before


def test_different_options_warn_once(
    url: str, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pyqueue")
    client.queue("jobs").push(0)  # it sets nothing, so nothing can differ from it
    with Client(url) as first:
        first.queue("jobs", lease=45, max_tries=3).push(1)
    assert caplog.records == []
    with Client(url) as other:
        for _ in range(3):
            other.queue("jobs", lease=30, max_tries=5).push(2)
    [record] = caplog.records
    values = "lease=30.0 (before: 45.0), max_tries=5 (before: 3)"
    assert record.getMessage().endswith(f"different options than before: {values}")
    with Client(url) as third:
        third.queue("jobs", lease=30, max_tries=5).push(3)  # the record has the options seen last
    assert len(caplog.records) == 1
    stored = client.database["pyqueue"].find_one({"_id": "~queue:jobs"})
    assert stored is not None
    assert (stored["options"]["lease"], stored["options"]["max_tries"]) == (30, 5)


# ---- permissions


@pytest.fixture(scope="module")
def port(guarded: int) -> int:
    """The port of a server with users who may read and write, but not make an index."""
    with admin(guarded) as mongo:
        actions = ["find", "insert", "update", "remove"]
        everywhere = {"db": "", "collection": ""}
        for user, allowed in (("limited", actions), ("lister", [*actions, "listIndexes"])):
            privileges = [{"resource": everywhere, "actions": allowed}]
            mongo.admin.command("createRole", f"{user}_role", privileges=privileges, roles=[])
            mongo.admin.command("createUser", user, pwd=SECRET, roles=[f"{user}_role"])
    return guarded


def admin(port: int) -> Mongo:
    return Mongo("127.0.0.1", port, username=ROOT_USER, password=SECRET)


def as_user(port: int, name: str, database: str) -> str:
    return f"mongodb://{name}:{SECRET}@127.0.0.1:{port}/{database}?authSource=admin"


def test_user_without_create_index_works_when_they_exist(port: int) -> None:
    with Client(as_user(port, ROOT_USER, "ready")) as client:
        client.queue("jobs").push("by the administrator")
    with Client(as_user(port, "lister", "ready")) as client:
        queue = client.queue("jobs")
        queue.push("by the user")
        held = queue.reserve_many(2, timeout=0)
        assert [each.payload for each in held] == ["by the administrator", "by the user"]
        queue.commit(*held)


@pytest.mark.parametrize("user", ["limited", "lister"])
def test_user_without_create_index_learns_what_to_run(port: int, user: str) -> None:
    database = f"missing-{user}"
    with pytest.raises(ConfigurationError) as refused, Client(as_user(port, user, database)):
        pass
    text = str(refused.value)
    commands = re.findall(r"db\.getCollection\('pyqueue'\)\.createIndex\(.*\)", text)
    assert len(commands) == 4
    assert "'expireAfterSeconds'" in text or "expireAfterSeconds: 0" in text
    assert "unique: true" in text
    assert SECRET not in text
    # An administrator who runs exactly these commands lets the user work.
    with admin(port) as mongo:
        for command in commands:
            found = re.fullmatch(r".*createIndex\((\{.*?\}), (\{.*\})\)", command)
            assert found is not None
            keys, options = found.groups()
            mongo[database]["pyqueue"].create_index(list(shell(keys).items()), **shell(options))
    with Client(as_user(port, "lister", database)) as client:
        client.queue("jobs").push(1)
        assert client.queue("jobs").pop(0) is not None


def shell(text: str) -> dict[str, Any]:
    """Read an object in the shell's notation."""
    quoted = re.sub(r"([{,] ?)'?([\w$]+)'?:", r"\1'\2':", text)
    value = eval(quoted, {"__builtins__": {}}, {"true": True, "false": False})  # our own text
    assert isinstance(value, dict)
    return value


def test_standalone_server_does_all_but_transactions(port: int) -> None:
    with Client(as_user(port, ROOT_USER, "standalone")) as client:
        queue = client.queue("jobs", history=60)
        queue.push_many([1, 2], keys=["a", "b"])
        held = queue.reserve_many(2, timeout=0)
        queue.commit(held[0])
        queue.move(held[1], to="other")
        assert client.queue("other").pop(0) is not None
        with pytest.raises(ConfigurationError, match="replica set"), client.transaction():
            pass
        with pytest.raises(ConfigurationError, match="replica set"):
            client.run_transaction(lambda session: None)
