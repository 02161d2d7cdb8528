"""Rates ``per`` header on a server: processes, threads, large keys and long values."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest
from pymongo import MongoClient

from pyqueue import Client, Limit
from tests.integration.conftest import PROCESSES, Connect
from tests.integration.test_rates import DRIFT
from tests.integration.test_sent import Recorder

RATE, BURST = 20, 4
LIMIT = Limit(rate=RATE, burst=BURST, per="headers.customer")
BOTH = Limit(concurrency=2, rate=RATE, burst=BURST, per="headers.customer")
MESSAGES = 36

#: When a call began and ended, and which customers it started.
Call = tuple[float, float, Sequence[str]]


def consume(url: str, worker: int, kind: Any) -> list[Call]:
    """Receive until the queue is empty."""
    calls: list[Call] = []
    with Client(url) as client:
        queue = client.queue("a", kind=kind)
        while True:
            began = time.monotonic()
            held = queue.reserve_many(1 + worker * 3, timeout=0.05)
            customers = [str(each.headers["customer"]) for each in held]
            calls.append((began, time.monotonic(), customers))
            queue.commit(*held)
            if not held and not queue.counts().total:
                return calls


@pytest.mark.parametrize(
    ("kind", "limit"), [("standard", LIMIT), ("priority", LIMIT), ("standard", BOTH)]
)
def test_starts_of_each_key_fit_every_window(
    url: str, processes: ProcessPoolExecutor, kind: Any, limit: Limit
) -> None:
    """A message surely started within a window if its call began and ended within it."""
    with Client(url) as client:
        queue = client.queue("a", kind=kind, limit=limit)
        for customer in "aab":
            queue.push_many(range(MESSAGES // 3), headers={"customer": customer})
        queue.push_many(range(5), headers={"customer": "c"})
    began = time.monotonic()
    each = processes.map(consume, repeat(url, PROCESSES), range(PROCESSES), repeat(kind))
    calls = [call for some in each for call in some if call[2]]
    took_s = time.monotonic() - began
    assert Counter(key for call in calls for key in call[2]) == {"a": 24, "b": 12, "c": 5}
    assert took_s < 60, "messages wait for longer than the rate says"
    for key in "abc":
        some = [(call[0], call[1], call[2].count(key)) for call in calls if key in call[2]]
        for begin, _, _ in some:
            for _, end, _ in some:
                within = sum(n for began, ended, n in some if began >= begin and ended <= end)
                assert within <= BURST + RATE * max(0.0, end - begin) * DRIFT


def test_waiting_threads_start_messages_when_permits_come(connect: Connect) -> None:
    """No push and no commit wakes them."""
    limit = Limit(rate=10, burst=1, per="headers.customer")
    clients = [connect() for _ in range(2)]
    queues = [each.queue("a", limit=limit) for each in clients]
    for customer in "ab":
        queues[0].push_many(range(5), headers={"customer": customer})
    began = time.monotonic()
    done: Counter[Any] = Counter()
    guard = threading.Lock()

    def work(number: int) -> None:
        while done.total() < 10:
            held = queues[number % 2].reserve(0.5)
            if held is not None:
                with guard:
                    done[held.headers["customer"]] += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    took_s = time.monotonic() - began
    assert done == {"a": 5, "b": 5}
    assert 4 * 0.1 / DRIFT <= took_s < 20


def test_key_with_many_messages_holds_up_no_other(url: str) -> None:
    """A message of another key is received by the next scan, however many wait."""
    limit = Limit(rate=1, period=3600, per="headers.customer")
    with Client(url) as client:
        queue = client.queue("a", limit=limit)
        for _ in range(5):
            queue.push_many([0] * 1000, headers={"customer": "large"})
        queue.push(1, headers={"customer": "small"})
        found = queue.reserve_many(2, timeout=60)
        if len(found) == 1:
            found += queue.reserve_many(2, timeout=60)
        assert {each.headers["customer"] for each in found} == {"large", "small"}
        for number in range(3):
            queue.push(number, headers={"customer": number})
            (held,) = queue.reserve_many(2, timeout=60)
            assert held.headers["customer"] == number


def test_values_of_any_length_have_buckets(url: str) -> None:
    """Other programs may have written headers that are longer than pushes allow."""
    limit = Limit(rate=1, period=3600, per="headers.customer")
    with Client(url) as client:
        queue = client.queue("a", limit=limit)
        long = ["x" * 1023 + end for end in "ab"]
        for customer in long * 2:
            queue.push(customer, headers={"customer": customer})
        queue.push_many([1, 2])
        longer = "y" * 100_000
        client.database[client.namespace].update_many(
            {"headers.customer": {"$exists": False}}, {"$set": {"headers.customer": longer}}
        )
        held = queue.reserve_many(9, timeout=60)
        assert sorted(each.headers["customer"] for each in held) == sorted([*long, longer])
        assert queue.reserve(0) is None
        stored = client.database[client.namespace].find({}, {"_id": 1, "limited": 1})
        assert max(len(str(each)) for each in stored) < 400
        client.reshape("a", limit=Limit(concurrency=1, per="headers.customer"))
        assert len(queue.reserve_many(9, timeout=60)) == 3


def test_blocked_consumers_send_few_commands(url: str) -> None:
    """They wait for the next permit, and do not ask again and again."""
    recorder = Recorder()
    with MongoClient[Any](url, event_listeners=[recorder]) as connection:
        name = url.rpartition("/")[2].partition("?")[0]
        with Client(connection[name]) as client:
            limit = Limit(rate=1, period=3600, per="headers.customer")
            queue = client.queue("a", limit=limit)
            for customer in "abc":
                queue.push_many(range(20), headers={"customer": customer})
            assert len(queue.reserve_many(9, timeout=60)) == 3
            with recorder.recording():
                assert queue.reserve_many(9, timeout=1.5) == []
    assert len(recorder.commands) < 40
