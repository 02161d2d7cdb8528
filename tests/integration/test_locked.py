"""Consumers get past messages that an open transaction holds, as after a kill inside of it.

The transaction stays open until the test has received its messages. A loaded machine may take a
slow moment for a lock, so the tests compare sets, and no times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pymongo
import pytest

from pyqueue import Client, LeaseLost, Queue, Unavailable
from tests.integration.conftest import Connect
from tests.integration.test_sent import WRITES, opened
from tests.support.eventually import LONG, eventually
from tests.support.samples import sampled

Mongo = pymongo.MongoClient[dict[str, Any]]

LOCKED = 2
#: More than consumers try one by one.
MESSAGES = 24
#: After this time, in seconds, messages come again that a time-out on a loaded machine left held.
LEASE = 3


@contextmanager
def transaction(mongo: Mongo, client: Client, ids: list[Any]) -> Iterator[None]:
    """An open transaction that has changed these messages. It is aborted at the end."""
    stored = mongo[client.database.name][client.namespace]
    with mongo.start_session() as session, session.start_transaction():
        for id in ids:
            stored.update_one({"_id": id}, {"$set": {"held": True}}, session=session)
        yield
        session.abort_transaction()


def receive_all(count: int, receive: Callable[[], list[Any]]) -> list[Any]:
    """Receive this number of messages. Return their payloads."""
    payloads: list[Any] = []

    def enough() -> bool:
        with suppress(Unavailable):  # every write was slow: the machine is loaded
            payloads.extend(each.payload for each in receive())
        return len(payloads) >= count

    eventually(enough, f"{count} messages")
    return payloads


def committed(queue: Queue[Any], held: list[Any]) -> list[Any]:
    """Commit reservations of the only consumer, however often the machine is too slow for that."""

    def done(each: Any) -> bool:
        with suppress(LeaseLost):  # a commit whose reply was late
            try:
                queue.commit(each)
            except Unavailable:
                return False
        return True

    for each in held:
        eventually(partial(done, each), "a commit")
    return held


@pytest.mark.parametrize(
    "how", sampled(["reserve", "reserve_many", "pop_many", "typed pop"], few=1)
)
def test_consumers_get_past_locked_messages(connect: Connect, mongo: Mongo, how: str) -> None:
    client = connect(command_timeout=5)
    queue: Queue[Any] = client.queue("jobs", int if how == "typed pop" else None, lease=LEASE)
    ids = queue.push_many(range(MESSAGES))
    ways: dict[str, Callable[[], list[Any]]] = {
        "reserve": lambda: committed(queue, [each for each in [queue.reserve(1)] if each]),
        "reserve_many": lambda: committed(queue, queue.reserve_many(7, timeout=1)),
        "pop_many": lambda: queue.pop_many(7, timeout=1),
        "typed pop": lambda: [each for each in [queue.pop(1)] if each],
    }
    receive = ways[how]
    with transaction(mongo, client, ids[:LOCKED]):
        first = receive_all(MESSAGES - LOCKED, receive)
        assert sorted(first) == list(range(LOCKED, MESSAGES))
    assert sorted(receive_all(LOCKED, receive)) == list(range(LOCKED))
    assert queue.counts().total == 0


def test_consumer_gets_messages_behind_a_lock(url: str, mongo: Mongo) -> None:
    """The only message is locked, so nothing but the queue's record shows that writes are quick."""
    with Client(url, command_timeout=5) as client:
        queue = client.queue("jobs")
        locked = queue.push("locked")
        with transaction(mongo, client, [locked]):
            receive_all(0, lambda: queue.reserve_many(1, timeout=0))
            queue.push("new")
            assert receive_all(1, lambda: queue.reserve_many(1, timeout=LONG)) == ["new"]
        assert receive_all(1, lambda: queue.reserve_many(1, timeout=LONG)) == ["locked"]


def test_only_claims_have_a_short_limit_on_the_wire(url: str) -> None:
    with opened("blocking", url, "majority") as (client, recorder):
        queue = client.queue("jobs", kind="standard")
        queue.push_many(range(10))
        queue.push("a", key="k")
        with recorder.recording():
            assert queue.reserve(0)
            assert queue.reserve_many(3, timeout=0)
            claims = [each for each in recorder.commands if each["name"] in WRITES]
            assert queue.pop(0)
    assert [each["maxTimeMS"] for each in claims] == [150, 150]
    assert [each["writeConcern"] for each in claims] == [{"w": 1}] * 2
    pops = [each for each in recorder.commands if each["name"] in WRITES][len(claims) :]
    assert [each["remove"] for each in pops] == [True]
    assert pops[0]["maxTimeMS"] > 1000
