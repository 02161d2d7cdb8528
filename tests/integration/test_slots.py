"""Limits on concurrency over threads and clients. ``test_kills`` kills processes, too."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pyqueue import Client, LeaseLost, Limit
from tests.integration.conftest import Connect

LIMIT = 3

each_kind = pytest.mark.parametrize("kind", ["standard", "ordered"])


def groups_of(kind: str, count: int) -> list[str | None] | None:
    """Return the groups of these messages."""
    return [f"g{number % 7}" for number in range(count)] if kind == "ordered" else None


@each_kind
def test_threads_of_several_clients_hold_up_to_the_limit(kind: Any, connect: Connect) -> None:
    """A commit makes room for a consumer of another client. Each group keeps its order."""
    clients = [connect() for _ in range(2)]
    limit = Limit(concurrency=LIMIT)
    queues = [each.queue("limited", kind=kind, limit=limit) for each in clients]
    queues[0].push_many(range(30), groups=groups_of(kind, 30))
    guard = threading.Lock()
    held_now, most, done = [0], [0], Counter[Any]()
    orders: dict[str | None, list[Any]] = {}

    def work(number: int) -> None:
        queue = queues[number % 2]
        while len(done) < 30:
            held = queue.reserve_many(1 + number % 3, timeout=0.2)
            with guard:
                held_now[0] += len(held)
                most[0] = max(most[0], held_now[0])
                for each in held:
                    orders.setdefault(each.group, []).append(each.payload)
            threading.Event().wait(0.002)
            with guard:
                held_now[0] -= len(held)
            queue.commit(*held)
            with guard:
                done.update(each.payload for each in held)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert done == Counter(range(30))
    assert most[0] <= LIMIT
    for group, order in orders.items():
        assert group is None or order == sorted(order)


def test_index_of_slots_is_there_before_the_limit(url: str) -> None:
    """Consumers that run may follow the limit before they look for indexes again."""
    with Client(url) as client:
        client.queue("limited").push_many([1, 2])
        collection = client.database[client.namespace]
        assert "slot" not in collection.index_information()
        client.reshape("limited", limit=Limit(concurrency=1))
        assert collection.index_information()["slot"]["unique"]


@each_kind
def test_lapsed_lease_gives_up_its_slot_for_good(kind: Any, url: str) -> None:
    with Client(url) as dead, Client(url) as live:
        first = dead.queue("limited", kind=kind, limit=Limit(concurrency=1), lease=0.2)
        first.push_many([1, 2], groups=groups_of(kind, 2))
        former = first.reserve(0)
        assert former is not None
        second = live.queue("limited", kind=kind)
        held = second.reserve(30)
        assert held is not None
        assert second.reserve(0) is None
        if held.id != former.id:
            with pytest.raises(LeaseLost):
                first.extend(former)
        with pytest.raises(LeaseLost):
            first.commit(former)
        second.commit(held)
        assert second.reserve(0) is not None


@each_kind
def test_lowered_limit_drains_and_a_raised_one_is_used(kind: Any, url: str) -> None:
    with Client(url) as client:
        queue = client.queue("limited", kind=kind, limit=Limit(concurrency=4))
        queue.push_many(range(14), groups=groups_of(kind, 14))
        queue = client.queue("limited", kind=kind)
        held = queue.reserve_many(10, timeout=0)
        assert len(held) == 4
        client.reshape("limited", limit=Limit(concurrency=1))
        queue.commit(*held[:3])
        queue.commit(held[3])
        assert len(queue.reserve_many(10, timeout=0)) == 1
        client.reshape("limited", limit=Limit(concurrency=6))
        assert len(queue.reserve_many(10, timeout=0)) == 5


def test_customers_do_not_hold_up_each_other(connect: Connect) -> None:
    """Threads of two clients work, one message of each customer at a time."""
    clients = [connect() for _ in range(2)]
    limit = Limit(concurrency=1, per="headers.customer")
    queues = [each.queue("limited", limit=limit) for each in clients]
    queues[0].push_many(range(30), headers={"customer": "large"})
    for number in range(30, 40):
        queues[0].push(number, headers={"customer": number % 5})
    guard, wrong = threading.Lock(), threading.Event()
    busy, done, early = set[Any](), Counter[Any](), list[Any]()

    def work(number: int) -> None:
        queue = queues[number % 2]
        while len(done) < 40 and not wrong.is_set():
            held = queue.reserve_many(1 + number % 3, timeout=0.2)
            names = [each.headers["customer"] for each in held]
            with guard:
                if busy.intersection(names) or len(names) != len(set(names)):
                    wrong.set()
                busy.update(names)
                early.extend(names if len(early) < 20 else ())
            threading.Event().wait(0.001)
            with guard:
                busy.difference_update(names)
                done.update(each.payload for each in held)
            queue.commit(*held)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong.is_set(), "two messages of one customer"
    assert done == Counter(range(40))
    assert {0, 1, 2, 3, 4} <= set(early)
