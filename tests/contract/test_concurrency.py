"""Limits on concurrency, in every place whose kind of queue offers them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pyqueue import ConfigurationError, LeaseLost, Limit
from tests.contract.world import AnyClient, AnyQueue

pytestmark = pytest.mark.needs("concurrency")

PER = Limit(concurrency=1, per="headers.customer")


def limited(client: AnyClient, queue: AnyQueue, limit: Limit, **options: Any) -> AnyQueue:
    """Return the queue of a test, with a limit."""
    queue.push("first")
    client.reshape(queue.name, limit=limit)
    queue.commit(queue.reserve(0))
    return client.queue(queue.name, **options)


def test_messages_up_to_the_limit_are_held(client: AnyClient, queue: AnyQueue) -> None:
    queue = limited(client, queue, Limit(concurrency=2))
    queue.push_many(range(4))
    held = queue.reserve_many(10, timeout=0)
    assert len(held) == 2
    assert queue.reserve(0) is None
    queue.rollback(held[0], delay=60)
    assert len(queue.reserve_many(10, timeout=0)) == 1
    queue.commit(held[1])
    assert len(queue.reserve_many(10, timeout=0)) == 1


@pytest.mark.needs("group")
def test_groups_obey_the_limit(client: AnyClient, queue: AnyQueue) -> None:
    """Each group has one message reserved at a time, and all groups together obey the limit."""
    queue = limited(client, queue, Limit(concurrency=2))
    queue.push_many(["a1", "a2", "b1", "c1"], groups=["a", "a", "b", "c"])
    held = queue.reserve_many(10, timeout=0)
    assert sorted(each.payload for each in held) == ["a1", "b1"]
    assert queue.reserve(0) is None
    order = []
    while held:
        queue.commit(*held)
        order += [each.payload for each in held]
        held = queue.reserve_many(10, timeout=0)
    assert sorted(order) == ["a1", "a2", "b1", "c1"]
    assert order.index("a1") < order.index("a2")


@pytest.mark.needs("per")
def test_each_key_has_a_limit(client: AnyClient, queue: AnyQueue) -> None:
    queue = limited(client, queue, PER)
    for customer in (7, 7, 7, "7", None):
        queue.push(customer, headers=None if customer is None else {"customer": customer})
    held = queue.reserve_many(10, timeout=0)
    assert Counter(str(each.payload) for each in held) == Counter(["7", "7", "None"])
    left = []
    while held:
        queue.commit(*held)
        held = queue.reserve_many(10, timeout=0)
        left += [each.payload for each in held]
    assert left == [7, 7]


@pytest.mark.needs("per")
def test_removed_limit_lets_everything_go_on(client: AnyClient, queue: AnyQueue) -> None:
    queue = limited(client, queue, PER)
    queue.push_many(range(4))
    assert len(queue.reserve_many(10, timeout=0)) == 1
    client.reshape(queue.name, limit=False)
    assert len(queue.reserve_many(10, timeout=0)) == 3


def test_lapsed_lease_gives_up_its_slot(client: AnyClient, queue: AnyQueue) -> None:
    queue = limited(client, queue, Limit(concurrency=1), lease=0.001)
    queue.push_many([1, 2])
    former = queue.reserve(0)
    assert queue.reserve(30) is not None
    with pytest.raises(LeaseLost):
        queue.commit(former)


@pytest.mark.needs("per")
def test_replaced_message_gives_up_its_slot(client: AnyClient, queue: AnyQueue) -> None:
    queue = limited(client, queue, PER)
    queue.push("first", key="k", headers={"customer": "seven"})
    assert queue.reserve(0).payload == "first"
    queue.push("second", headers={"customer": "seven"})
    assert queue.reserve(0) is None
    queue.push("other", key="k", headers={"customer": "eight"}, on_duplicate="replace")
    found = {each.payload for each in queue.reserve_many(10, timeout=0)}
    assert found == {"other", "second"}


@pytest.mark.needs("pop", "claim")
def test_pops_and_claims_are_refused(client: AnyClient, queue: AnyQueue) -> None:
    queue = limited(client, queue, Limit(concurrency=1))
    queue.push(1)
    with pytest.raises(ConfigurationError, match="reserve messages"):
        queue.pop(0)
    with pytest.raises(ConfigurationError, match="reserve messages"), queue.claim("g", limit=1):
        raise AssertionError
    client.reshape(queue.name, limit=False)
    assert queue.pop(0).payload == 1
