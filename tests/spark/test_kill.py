"""Kill drivers with their JVMs and workers. No message is lost, and none is written twice.

A killed program never ends by itself: it holds at one message or one batch until the test kills it.
So a test cannot miss the state that it waits for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymongo
import pytest

from pyqueue import Client
from tests.spark import programs
from tests.spark.processes import spark_eventually, spark_program
from tests.spark.programs import BATCH, PARTITIONS
from tests.support.processes import kill_tree

#: These tests start a second JVM, so they run one after the other, on the worker of the session.
pytestmark = pytest.mark.xdist_group("spark")

#: The size of a half-done batch: the tasks of all partitions but the last have written their rows.
HALF = BATCH - BATCH // PARTITIONS


@pytest.fixture
def messages(url: str) -> Iterator[Any]:
    """The collection."""
    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        yield mongo.get_default_database()["pyqueue"]


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, signals="none:") as client:
        yield client


def written(messages: Any, queue: str = "clean") -> Counter[int]:
    return Counter(
        each["payload"]
        for each in messages.find({"q": queue, "record": {"$exists": False}}, {"payload": 1})
    )


def count(messages: Any, queue: str = "clean") -> int:
    number: int = messages.count_documents({"q": queue, "record": {"$exists": False}})
    return number


def empty(client: Client, queue: str) -> bool:
    return client.queue(queue).counts().total == 0


@pytest.mark.spark_long
def test_stream_continues_after_its_driver_is_killed(
    spark: Any, url: str, client: Client, messages: Any, tmp_path: Path
) -> None:
    """The kill comes in the middle of a batch. The restart need not wait for the lease of 600 s."""
    client.queue("raw").push_many(range(2 * BATCH))
    with spark_program("with_ids", url, str(tmp_path), str(BATCH - 1)) as driver:
        spark_eventually(lambda: staged(messages) == HALF, "a half-written batch", driver)
        kill_tree(driver)
    assert count(messages) == 0
    assert client.queue("raw").counts().reserved == BATCH
    programs.with_ids(spark, url, str(tmp_path)).awaitTermination()
    assert written(messages) == Counter(range(2 * BATCH))
    assert staged(messages) == 0
    spark_eventually(lambda: empty(client, "raw"), "an empty source")


@pytest.mark.spark_long
@pytest.mark.own_mongod
def test_consumed_messages_of_a_killed_batch_stay_written_once(
    spark: Any, url: str, client: Client, messages: Any, tmp_path: Path
) -> None:
    """The driver is killed while it shows a batch. A consumer finishes each message at once."""
    messages.database.client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=1800)
    client.queue("raw").push_many(range(2 * BATCH))
    clean, gate = client.queue("clean"), tmp_path / "gate"
    seen: Counter[int] = Counter()

    def consume() -> int:
        seen.update(each.payload for each in clean.pop_many(BATCH, timeout=0))
        return seen.total()

    with spark_program("with_ids", url, str(tmp_path), str(BATCH - 1), str(gate)) as driver:
        spark_eventually(lambda: staged(messages) == HALF, "a half-written batch", driver)
        with one_locked(messages, HALF // 2):
            gate.touch()
            spark_eventually(consume, "a message of the batch", driver)
            kill_tree(driver)
            assert 0 < consume() < BATCH
    programs.with_ids(spark, url, str(tmp_path)).awaitTermination()
    spark_eventually(lambda: consume() >= 2 * BATCH, "all messages")
    assert seen == Counter(range(2 * BATCH))
    assert staged(messages) == 0


@pytest.mark.spark_long
def test_stream_without_ids_writes_a_batch_twice(
    spark: Any, url: str, client: Client, messages: Any, tmp_path: Path
) -> None:
    """This shows that the test above can fail."""
    client.queue("raw2").push_many(range(BATCH))
    with spark_program("without_ids", url, str(tmp_path)) as driver:
        spark_eventually(lambda: count(messages, "clean2") == BATCH, "a written batch", driver)
        kill_tree(driver)
    programs.without_ids(spark, url, str(tmp_path)).awaitTermination()
    assert written(messages, "clean2") == Counter([*range(BATCH)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"kind": "bucket", "pack": 8}], ids=["standard", "bucket"])
def test_stream_survives_many_kills_of_its_driver(
    spark: Any, url: str, client: Client, tmp_path: Path, options: Any
) -> None:
    """A consumer finishes each message as it appears. Each driver is killed once some did."""
    rng, most = random.Random(5), 60 * BATCH
    client.queue("raw", **options).push_many(range(most))
    clean, seen = client.queue("clean", **options), Counter[int]()
    clean.reserve(0)  # its record has the kind
    held = str(most - 1)  # so the last driver does not end by itself
    for _ in range(20):
        target = seen.total() + rng.randint(1, 2 * BATCH)

        def consume(target: int = target) -> bool:
            seen.update(each.payload for each in clean.pop_many(BATCH, timeout=0))
            return seen.total() >= target

        with spark_program("with_ids", url, str(tmp_path), held) as driver:
            spark_eventually(consume, f"{target} messages", driver)
            kill_tree(driver)
    assert seen.total() < most
    programs.with_ids(spark, url, str(tmp_path)).awaitTermination()
    spark_eventually(lambda: consume(most), "all messages")
    assert seen == Counter(range(most))
    spark_eventually(lambda: empty(client, "raw"), "an empty source")


@pytest.mark.slow
def test_bad_record_is_buried_beside_three_kills(
    spark: Any, url: str, client: Client, messages: Any, tmp_path: Path
) -> None:
    """One message of 10 000 does not fit. The first kill comes after it was noted as bad."""
    payloads: list[Any] = list(range(10_000))
    payloads[137] = "one hundred and thirty-seven"
    ids = [f"m{number:05}" for number in payloads if isinstance(number, int)]
    ids.insert(137, "m00137")
    client.queue("raw").push_many(payloads, ids=ids)
    for hold in (2_400, 4_900, 7_400):  # one in each of the first three batches
        reached = tmp_path / f"reached-{hold}"
        with spark_program("typed", url, str(tmp_path), ids[hold], str(reached)) as driver:
            spark_eventually(reached.exists, f"the task of {ids[hold]}", driver)
            kill_tree(driver)
    query = programs.typed(spark, url, str(tmp_path))
    query.awaitTermination()
    assert query.exception() is None
    assert written(messages) == Counter(range(10_000)) - Counter([137])
    spark_eventually(lambda: empty(client, "raw"), "an empty source")
    (dead,) = client.queue("raw.dead").peek()
    assert (dead.id, dead.payload, dead.tries) == ("m00137", payloads[137], 0)
    assert dead.dead is not None
    assert (dead.dead["reason"], dead.dead["tries"]) == ("invalid", 1)
    assert dead.error is not None
    assert "does not match bigint" in dead.error["message"]


# ---- batch writes

ROWS = 30_000


def staged(messages: Any) -> int:
    number: int = messages.count_documents({"staged": {"$exists": True}})
    return number


@contextmanager
def one_locked(messages: Any, place: int = 500) -> Iterator[None]:
    """Lock a staged message by a transaction, so that publishing stops there.

    At the end the blocked update is killed: its client is dead, but the server would continue it.
    """
    found = messages.find({"staged": {"$exists": True}}).sort([("q", 1), ("_id", 1)])
    id = found[place]["_id"]
    mongo = messages.database.client
    running = [
        {"$currentOp": {"allUsers": True}},
        {"$match": {"ns": messages.full_name, "op": "update"}},
    ]
    with mongo.start_session() as session, session.start_transaction():
        messages.update_one({"_id": id}, {"$set": {"locked": True}}, session=session)
        yield
        while operations := list(mongo.admin.aggregate(running)):
            for each in operations:
                mongo.admin.command("killOp", op=each["opid"])
        session.abort_transaction()


def write_all(spark: Any, url: str) -> None:
    """Run the job again, to its end."""
    df = spark.range(ROWS).selectExpr("concat('id', id) AS name", "cast(id AS string) AS payload")
    options = {"uri": url, "queue": "clean", "idColumn": "name"}
    df.write.format("pyqueue").mode("append").options(**options).save()


@pytest.mark.slow
def test_write_killed_while_it_stages_completes_later(
    spark: Any, url: str, messages: Any, tmp_path: Path
) -> None:
    with spark_program("write", url, str(ROWS), "0", str(tmp_path / "gate")) as driver:
        spark_eventually(lambda: staged(messages) > 1000, "staged messages", driver)
        kill_tree(driver)
    assert count(messages) == 0
    write_all(spark, url)
    assert written(messages) == Counter(range(ROWS))
    assert staged(messages) == 0


@pytest.mark.slow
@pytest.mark.own_mongod
def test_write_killed_while_it_publishes_completes_later(
    spark: Any, url: str, messages: Any, tmp_path: Path
) -> None:
    # On a busy machine the program may take longer than the minute that a transaction may last.
    messages.database.client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=1800)
    gate = tmp_path / "gate"
    with spark_program("write", url, str(ROWS), "0", str(gate)) as driver:
        spark_eventually(lambda: staged(messages) > 1000, "staged messages", driver)
        with one_locked(messages):
            gate.touch()
            spark_eventually(lambda: count(messages) > 0, "published messages", driver)
            kill_tree(driver)
    assert 0 < count(messages) < ROWS
    write_all(spark, url)
    assert written(messages) == Counter(range(ROWS))
    assert staged(messages) == 0
