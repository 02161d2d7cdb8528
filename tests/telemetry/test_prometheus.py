"""The text for Prometheus: its lines, its limits, and what it does without permissions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import AsyncClient, Client
from pyqueue.backends import tallies
from pyqueue.errors import NotPermitted
from pyqueue.requests import Find
from pyqueue.telemetry import metrics_text, prometheus
from pyqueue.telemetry.figures import COUNTS

LINE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*\}) (\S+)')


@pytest.fixture
def memory() -> Iterator[Client]:
    with Client("memory:", telemetry=True) as client:
        yield client


def flush(client: Client) -> None:
    telemetry: Any = client._telemetry
    telemetry.flush()


def values(client: Client) -> dict[str, float]:
    """Return the values of the text by name and labels. Each line must be valid."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in metrics_text(client).splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, "a metric comes twice"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            base = re.sub("_(bucket|sum|count)$", "", match[1])
            assert base in kinds or match[1] in kinds, line
            found[match[1] + match[2]] = float(match[3])
    return found


def test_messages_are_counted_by_state(memory: Client) -> None:
    memory.queue("a").push_many(range(3))
    memory.queue("a").push(1, delay=60)
    assert memory.queue("a").reserve(0) is not None
    memory.queue("p", kind="bucket").push_many(range(10))
    memory.stream("s").append_many(range(5))
    consumer = memory.stream("s").consumer("g")
    consumer.reserve_many(2, timeout=0)
    found = values(memory)
    assert {key: value for key, value in found.items() if key.startswith("pyqueue_messages")} == {
        'pyqueue_messages{queue="a",kind="standard",state="ready"}': 2,
        'pyqueue_messages{queue="a",kind="standard",state="scheduled"}': 1,
        'pyqueue_messages{queue="a",kind="standard",state="reserved"}': 1,
        'pyqueue_messages{queue="p",kind="bucket",state="ready"}': 10,
        'pyqueue_messages{queue="p",kind="bucket",state="scheduled"}': 0,
        'pyqueue_messages{queue="p",kind="bucket",state="reserved"}': 0,
        'pyqueue_messages{queue="s",kind="stream",state="kept"}': 5,
        'pyqueue_messages{stream="s",group="g",state="ready"}': 3,
        'pyqueue_messages{stream="s",group="g",state="scheduled"}': 0,
        'pyqueue_messages{stream="s",group="g",state="reserved"}': 2,
        'pyqueue_messages{stream="s",group="g",state="skipped"}': 0,
    }
    assert found['pyqueue_queues{counted="yes"}'] == 3


def test_age_of_the_oldest_message_is_shown(memory: Client) -> None:
    for name in ("a", "b"):
        memory.queue(name).push(1)
    assert memory.queue("b").pop(0) is not None
    memory.stream("s").append(1)
    past = datetime.now(UTC) - timedelta(seconds=60)
    collection = memory.collection("x").database[memory.namespace]
    collection.update_one({"q": "a", "payload": 1}, {"$set": {"when": past, "due": past}})
    found = {key: value for key, value in values(memory).items() if "oldest" in key}
    assert found.keys() == {f'pyqueue_oldest_seconds{{queue="{name}"}}' for name in "ab"}
    assert 60 <= found['pyqueue_oldest_seconds{queue="a"}'] < 120
    assert found['pyqueue_oldest_seconds{queue="b"}'] == 0


def test_stored_sums_are_counters_and_histograms(memory: Client) -> None:
    queue = memory.queue("a")
    for _ in range(2):
        queue.push_many(range(4))
        queue.commit(*queue.reserve_many(2, timeout=0))
        queue.move(*queue.reserve_many(1, timeout=0), to="b.c")
        flush(memory)
    memory.stream("s").append(1)
    consumer = memory.stream("s").consumer("g")
    consumer.commit(*consumer.reserve_many(1, timeout=0))
    flush(memory)
    found = values(memory)
    counters = {f"pyqueue_{name}_total" for name in COUNTS} | {"pyqueue_moves_total"}
    assert {key: found[key] for key in found if key.partition("{")[0] in counters} == {
        'pyqueue_pushed_total{queue="a"}': 8,
        'pyqueue_pushed_total{queue="s"}': 1,
        'pyqueue_received_total{queue="a"}': 6,
        'pyqueue_received_total{stream="s",group="g"}': 1,
        'pyqueue_finished_total{queue="a"}': 4,
        'pyqueue_finished_total{stream="s",group="g"}': 1,
        'pyqueue_moved_total{queue="a"}': 2,
        'pyqueue_moves_total{queue="a",to="b.c"}': 2,
    }
    assert found['pyqueue_waiting_seconds_bucket{queue="a",le="+Inf"}'] == 6
    assert found['pyqueue_waiting_seconds_count{queue="a"}'] == 6
    buckets = [value for key, value in found.items() if "end_to_end_seconds_bucket{queue" in key]
    assert len(buckets) == 17
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4


def test_queues_and_groups_beyond_the_limit_are_summed(
    memory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MAX_QUEUES", 3)
    monkeypatch.setattr(prometheus, "MAX_GROUPS", 2)
    for number in range(6):
        memory.queue(f"a{number}").push_many(range(number + 1))
    for number in range(4):
        memory.stream("a0s").append(1)
        group = memory.stream("a0s").consumer(f"g{number}")
        group.commit(*group.reserve_many(1, timeout=0))
    flush(memory)
    found = values(memory)
    assert found['pyqueue_messages{queue="a1",kind="standard",state="ready"}'] == 2
    assert found['pyqueue_messages{queue="_other",kind="standard",state="ready"}'] == 3 + 4 + 5 + 6
    assert found['pyqueue_pushed_total{queue="_other"}'] == 3 + 4 + 5 + 6
    assert found['pyqueue_messages{stream="_other",group="_other",state="ready"}'] > 0
    assert found['pyqueue_finished_total{stream="_other",group="_other"}'] == 2
    shown = {match[1] for key in found if (match := re.search('queue="([^"]*)"', key))}
    assert shown == {"a0", "a0s", "a1", "_other"}
    groups = {match[1] for key in found if (match := re.search('group="([^"]*)"', key))}
    assert groups == {"g0", "g1", "_other"}


def test_counting_ends_when_its_time_is_used_up(
    memory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "_PORTION", 1)
    for number in range(3):
        memory.queue(f"a{number}").push(1)
    monkeypatch.setattr(prometheus, "COUNTING_S", 0.0)
    found = values(memory)
    assert found['pyqueue_queues{counted="no"}'] == 3
    assert not [key for key in found if key.startswith("pyqueue_messages")]


def test_counts_stop_at_the_cap(memory: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.queue("a").push_many(range(20))
    monkeypatch.setattr(prometheus, "CAP", 5)
    caps: list[int | None] = []
    tally = tallies.tally

    def noting(some: Any, cap: int | None, held: bool) -> Any:
        caps.append(cap)
        return tally(some, cap, held)

    monkeypatch.setattr(tallies, "tally", noting)
    assert values(memory)['pyqueue_messages{queue="a",kind="standard",state="ready"}'] == 5
    assert set(caps) == {5}


def test_workers_are_running_or_silent(memory: Client) -> None:
    now = datetime.now(UTC)
    for number, (kind, age_s) in enumerate([("worker", 1), ("worker", 16), ("pipeline", 14)]):
        beat = now - timedelta(seconds=age_s)
        expires = now + timedelta(hours=1)
        worker = {"_id": number, "kind": kind, "beat": beat, "every": 5.0, "messages": 2}
        worker["lag"] = float(age_s)
        memory.collection("workers").insert_one({**worker, "expires": expires})
    memory.collection("workers").insert_one({"_id": "graph", "kind": "graph"})
    found = values(memory)
    assert {key: value for key, value in found.items() if "worker" in key} == {
        'pyqueue_workers{kind="worker",state="running"}': 1,
        'pyqueue_workers{kind="worker",state="silent"}': 1,
        'pyqueue_workers{kind="pipeline",state="running"}': 1,
        'pyqueue_worker_messages{kind="worker"}': 4,
        'pyqueue_worker_messages{kind="pipeline"}': 2,
        'pyqueue_worker_lag_seconds{kind="worker"}': 1,
        'pyqueue_worker_lag_seconds{kind="pipeline"}': 14,
    }


def test_names_of_foreign_queues_are_escaped(memory: Client) -> None:
    collection = memory.collection("x").database[memory.namespace]
    then = datetime.now(UTC)
    collection.insert_one({"_id": 1, "q": 'a"b\\c\nd', "when": then, "payload": 1})
    key = r'pyqueue_messages{queue="a\"b\\c\nd",kind="standard",state="ready"}'
    assert values(memory)[key] == 1


def test_namespace_without_queues_has_few_lines(memory: Client) -> None:
    assert values(memory) == {
        'pyqueue_queues{counted="yes"}': 0,
        'pyqueue_queues{counted="no"}': 0,
    }


def test_without_permissions_messages_are_shown(
    memory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.queue("a").push(1)
    send = Find.send

    def guarded(self: Find, collection: Any) -> Any:
        if collection.name != memory.namespace:
            raise NotPermitted("no")
        return send(self, collection)

    monkeypatch.setattr(Find, "send", guarded)
    found = values(memory)
    assert found['pyqueue_messages{queue="a",kind="standard",state="ready"}'] == 1


def test_async_client_awaits_the_text(url: str, client: Client) -> None:
    client.queue("a").push(1, delay=60)  # an age would grow between the two calls

    async def read() -> str:
        async with AsyncClient(url) as reading:
            return await metrics_text(reading)

    assert asyncio.run(read()) == metrics_text(client)


def test_deleted_queues_displace_no_queue(memory: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their totals stay for a month."""
    monkeypatch.setattr(prometheus, "MAX_QUEUES", 2)
    for number in range(3):
        memory.queue(f"a{number}").push(number)
    flush(memory)
    for number in range(3):
        memory.delete_queue(f"a{number}", force=True)
    memory.queue("z").push_many(range(5))
    flush(memory)
    found = values(memory)
    assert found['pyqueue_messages{queue="z",kind="standard",state="ready"}'] == 5
    assert found['pyqueue_pushed_total{queue="z"}'] == 5
    assert found['pyqueue_pushed_total{queue="_other"}'] == 2
