"""Drivers that are killed, with their JVMs and workers: nothing is lost, and nothing is there twice. And what is there twice without ids."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from pyqueue import Client
from tests.spark import programs
from tests.spark.processes import killed, process, until

#: They start processes with a JVM of their own: one after the other, where the session is.
pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture
def messages(url: str, mongo: pymongo.MongoClient[dict[str, Any]]) -> Any:
    """The collection."""
    return mongo[pymongo.uri_parser.parse_uri(url)["database"]]["pyqueue"]


def written(messages: Any, queue: str = "clean") -> Counter[int]:
    return Counter(
        each["payload"]
        for each in messages.find({"q": queue, "record": {"$exists": False}}, {"payload": 1})
    )


def count(messages: Any, queue: str) -> int:
    number: int = messages.count_documents({"q": queue, "record": {"$exists": False}})
    return number


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, signals="none:") as client:
        yield client


def test_a_stream_whose_driver_is_killed(
    spark: Any, url: str, client: Client, messages: Any, tmp_path: Path
) -> None:
    """In the middle of a batch; a restart goes on at once, though the lease is of ten minutes."""
    client.queue("raw").push_many(range(40))
    client.queue("raw2").push_many(range(20))
    with process("streams", url, str(tmp_path), "naive") as driver:
        until(lambda: count(messages, "clean") % 20, driver)
        killed(driver)
    assert count(messages, "clean") % 20  # in the middle of a batch
    assert client.queue("raw").counts().reserved >= 20
    assert count(messages, "clean2") == 20
    for query in (
        programs.good(spark, url, str(tmp_path)),
        programs.naive(spark, url, str(tmp_path)),
    ):
        query.awaitTermination()
    assert written(messages) == Counter(range(40))
    assert written(messages, "clean2") == Counter([*range(20)] * 2)  # so it can fail
    until(lambda: client.queue("raw").counts().total == 0)


@pytest.mark.slow
def test_a_stream_whose_driver_is_killed_again_and_again(
    spark: Any, url: str, client: Client, messages: Any, tmp_path: Path
) -> None:
    rng = random.Random(5)
    client.queue("raw").push_many(range(600))
    for _ in range(5):
        before = count(messages, "clean")
        target = before + rng.randint(1, 60)
        with process("streams", url, str(tmp_path)) as driver:
            until(lambda target=target: count(messages, "clean") > target, driver)  # type: ignore[misc]
            killed(driver)
    assert count(messages, "clean") < 600
    programs.good(spark, url, str(tmp_path)).awaitTermination()
    assert written(messages) == Counter(range(600))
    until(lambda: client.queue("raw").counts().total == 0)


@pytest.mark.slow
def test_a_batch_write_whose_driver_is_killed_again_and_again(
    spark: Any, url: str, client: Client, messages: Any
) -> None:
    """While it stages, and while it shows: run again, it leaves each row once, and nothing out of sight."""
    rows = 30_000
    seen = []
    for shown in (False, True, True):
        client.queue("clean").purge()
        with process("write", url, str(rows)) as driver:
            if shown:
                until(lambda: count(messages, "clean") > 0, driver)
            else:
                until(lambda: messages.count_documents({"staged": True}) > 1000, driver)
            killed(driver)
        seen.append(count(messages, "clean"))
        df = spark.range(rows).selectExpr(
            "concat('id', id) AS name", "cast(id AS string) AS payload"
        )
        df.write.format("pyqueue").mode("append").options(
            uri=url, queue="clean", idColumn="name"
        ).save()
        assert written(messages) == Counter(range(rows))
        assert messages.count_documents({"staged": True}) == 0
    assert any(0 < number < rows for number in seen), seen
