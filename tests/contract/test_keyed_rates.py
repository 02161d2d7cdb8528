"""Rates ``per`` header, in every place whose kind of queue offers them."""

from __future__ import annotations

from collections import Counter

import pytest

from pyqueue import ConfigurationError, Limit
from tests.contract.world import AnyClient, AnyQueue

pytestmark = pytest.mark.needs("per")

#: After its burst, no message starts while a test runs.
SLOW = Limit(rate=1, period=3600, burst=2, per="headers.customer")


def limited(client: AnyClient, queue: AnyQueue, limit: Limit) -> None:
    """Give the queue of a test a limit, and messages of several keys."""
    for customer in (7, 7, 7, "7", None):
        queue.push(customer, headers=None if customer is None else {"customer": customer})
    client.reshape(queue.name, limit=limit)


def test_each_key_starts_at_its_own_rate(client: AnyClient, queue: AnyQueue) -> None:
    limited(client, queue, SLOW)
    held = queue.reserve_many(10, timeout=60)
    assert Counter(repr(each.payload) for each in held) == {"7": 2, "'7'": 1, "None": 1}
    queue.rollback(next(each for each in held if each.payload == 7), delay=0)
    assert queue.reserve(0) is None
    assert queue.counts().scheduled == 2
    client.reshape(queue.name, limit=False)
    assert len(queue.reserve_many(10, timeout=60)) == 2


def test_pops_count_as_starts(client: AnyClient, queue: AnyQueue) -> None:
    limited(client, queue, SLOW)
    popped = [queue.pop(60), *queue.pop_many(9, timeout=60)]
    assert Counter(repr(each.payload) for each in popped) == {"7": 2, "'7'": 1, "None": 1}
    assert queue.pop(0) is None


def test_next_of_a_key_starts_when_it_may(client: AnyClient, queue: AnyQueue) -> None:
    """No other event is needed."""
    limited(client, queue, Limit(rate=20, per="headers.customer"))
    left = 5
    while left:
        held = queue.reserve_many(10, timeout=60)
        assert held
        left -= len(held)


def test_both_limits_of_a_key_hold(client: AnyClient, queue: AnyQueue) -> None:
    limit = Limit(concurrency=1, rate=1, period=3600, burst=2, per="headers.customer")
    limited(client, queue, limit)
    held = queue.reserve_many(10, timeout=60)
    assert len(held) == 3
    queue.commit(*held)
    held = queue.reserve_many(10, timeout=60)
    assert [each.payload for each in held] == [7]
    queue.commit(*held)
    assert queue.reserve_many(10, timeout=0) == []


def test_named_claims_are_refused(client: AnyClient, queue: AnyQueue) -> None:
    limited(client, queue, SLOW)
    with pytest.raises(ConfigurationError, match="limit per key"), queue.claim("g", limit=1):
        raise AssertionError
