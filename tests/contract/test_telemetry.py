"""Telemetry: what each operation adds to the stored figures, on each driver and kind."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import Backoff, ConfigurationError, LeaseLost, QueueStats
from pyqueue.telemetry.figures import COUNTS
from tests.contract.world import AnyClient, World, hold, refuses


@pytest.fixture
def told(world: World, client: AnyClient) -> AnyClient:
    """Return a client that counts."""
    return world.connect(telemetry=True)


def stats_of(world: World, told: AnyClient, name: str) -> QueueStats:
    """Store what was counted, and return the figures of a queue."""
    told.close()
    stats: QueueStats = world.client.queue(name).stats()
    return stats


def counted(stats: QueueStats) -> dict[str, int]:
    """Return the counts that are not 0."""
    return {name: number for name, number in stats.counts.items() if number}


@pytest.mark.needs("move", "dead_letter", "pop")
def test_stats_equal_what_was_done(world: World, told: AnyClient, name: str) -> None:
    ledger: Counter[str] = Counter()
    queue = told.queue(name, max_tries=2, backoff=Backoff(base=0))
    queue.push(0)
    queue.push_many(range(1, 24))
    ledger["pushed"] = 24
    popped = [queue.pop(0), *queue.pop_many(2, timeout=0)]
    ledger["received"] = ledger["finished"] = len(popped)
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("commit", "finished", {}),
        ("move", "moved", {"to": f"{name}.x"}),
        ("rollback", "retried", {"error": "no"}),
        ("release", "released", {}),
        ("bury", "dead", {"error": "never"}),
        ("rollback", "retried", {"delay": 0}),
    ]
    working = 0
    for verb, count, options in ways:
        held = queue.reserve_many(3, timeout=5)
        ledger["received"] += len(held)
        getattr(queue, verb)(*held, **options)
        working += len(held) * (verb != "release")
        for each in held:
            ledger["dead" if verb == "rollback" and each.tries == 2 else count] += 1
    held = queue.reserve(5)
    queue.commit(held)
    with pytest.raises(LeaseLost) as caught:
        queue.commit(held)
    ledger += Counter(received=1, finished=1, lost=len(caught.value.lost))
    stats = stats_of(world, told, name)
    assert counted(stats) == ledger
    assert set(stats.counts) == set(COUNTS)
    assert stats.moved == {f"{name}.x": ledger["moved"]}
    assert stats.waiting.count == ledger["received"]
    assert stats.working.count == working + 1
    assert stats.end_to_end.count == ledger["finished"]
    assert sum(each["pushed"] for each in stats.points.values() if "pushed" in each) == 24
    assert stats.rate("pushed") == 24 / stats.seconds
    errors = world.raw("pyqueue.errors").find({"q": name})
    assert sum(each["tries"] for each in errors) == 6


@pytest.mark.needs("standard")  # a stream does not depend on the kind of queues
def test_stats_of_a_group_equal_what_was_done(world: World, told: AnyClient, name: str) -> None:
    stream = told.stream(name)
    stream.append("a")
    stream.append_many(range(9))
    consumer = stream.consumer("g", max_tries=1)
    held = consumer.reserve_many(8, timeout=0)
    consumer.commit(*held[:3])
    consumer.rollback(held[3], error="no")
    consumer.release(held[4])
    consumer.bury(*held[5:7])
    told.close()
    stream = world.client.stream(name)
    assert counted(stream.stats()) == {"pushed": 10}
    stats = stream.consumer("g").stats()
    assert stats.queue == f"{name}~g"
    assert counted(stats) == {"received": 8, "finished": 3, "dead": 3, "released": 1}


@pytest.mark.needs("keys")
def test_refused_and_kept_out_messages_do_not_count(
    world: World, told: AnyClient, name: str
) -> None:
    queue = told.queue(name)
    queue.push(1, key="k")
    assert queue.push(2, key="k") is None
    with pytest.raises(ConfigurationError):
        queue.push(3, delay=-1)
    assert queue.reserve_many(1, timeout=0)
    assert queue.reserve(0) is None
    assert counted(stats_of(world, told, name)) == {"pushed": 1, "received": 1}


@pytest.mark.needs("claim")
def test_claim_counts_each_message(world: World, told: AnyClient, name: str) -> None:
    queue = told.queue(name)
    queue.push_many(range(5))
    with queue.claim("g", limit=10) as claim:
        claim.commit()
    stats = stats_of(world, told, name)
    assert counted(stats) == {"pushed": 5, "received": 5, "finished": 5}
    assert stats.working.count == 5


@pytest.mark.needs("server", "keys")
def test_transaction_counts_after_its_commit(world: World, told: AnyClient, name: str) -> None:
    queue = told.queue(name)
    held = hold(queue)
    with told.transaction() as session:
        queue.push(1, session=session)
        queue.commit(held, session=session)
    with pytest.raises(ValueError, match="no"), told.transaction() as session:  # noqa: PT012
        queue.push(2, session=session)
        raise ValueError("no")
    found = counted(stats_of(world, told, name))
    assert found == {"pushed": 2, "received": 1, "finished": 1}


def test_client_counts_only_if_it_is_asked_to(world: World, client: AnyClient, name: str) -> None:
    client.queue(name).push(1)
    client.queue(name).reserve(0)
    assert counted(client.queue(name).stats()) == {}
    assert client.queue(name).stats().waiting.p95 is None


def test_waiting_begins_when_a_message_is_eligible(
    world: World, told: AnyClient, name: str
) -> None:
    queue = told.queue(name)
    queue.push(1, at=datetime.now(UTC) - timedelta(days=1))
    queue.push(2, delay=0.02)
    for _ in range(2):
        assert queue.reserve(5) is not None
    stats = stats_of(world, told, name)
    assert stats.waiting.count == 2
    assert stats.waiting.mean is not None
    assert stats.waiting.mean < 5


@pytest.mark.differs_by("client")
def test_time_of_stats_is_checked(world: World, client: AnyClient, name: str) -> None:
    stats, now = client.queue(name).stats, datetime.now(UTC)
    refused: list[Any] = [0, -1, "1h", None, True, datetime.now(), now + timedelta(hours=1)]
    for since in refused:
        refuses("since: ", partial(stats, since))
    allowed: list[Any] = [1, timedelta(3), now - timedelta(days=2), now - timedelta(days=400)]
    for since in allowed:
        found = stats(since=since)
        assert found.since <= found.until
        assert found.until - found.since < timedelta(days=30, hours=1, minutes=1)


@pytest.mark.differs_by("client")
def test_longer_times_are_read_by_hours(world: World, told: AnyClient, name: str) -> None:
    told.queue(name).push(1)
    told.close()
    now = datetime.now(UTC)
    for ago, letter in ((timedelta(minutes=90), "m"), (timedelta(days=3), "h")):
        at = (now - ago).replace(second=0, microsecond=0)
        at = at if letter == "m" else at.replace(minute=0)
        id = at.strftime("m%Y%m%d%H%M " if letter == "m" else "h%Y%m%d%H ") + name
        later = now + timedelta(hours=1)
        world.raw("pyqueue.metrics").insert_one(
            {"_id": id, "q": name, "at": at, "pushed": 5, "expires": later}
        )
    queue = world.client.queue(name)
    found = {
        hours: queue.stats(since=timedelta(hours=hours)).counts["pushed"]
        for hours in (1, 2, 30, 80)
    }
    assert found == {1: 1, 2: 6, 30: 1, 80: 6}
