"""Regression tests for the failures that the machine and the small model found.

Each is as small as possible, and tests a promise of the API page or the design.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pyqueue import Client, DuplicateKey, LeaseLost, Queue, Reservation


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("memory:") as client:
        yield client


def hold(queue: Queue[Any]) -> Reservation[Any]:
    held = queue.reserve(0)
    assert held is not None
    return held


def test_replacing_batch_writes_all_but_taken_ids(
    client: Client,
) -> None:
    client.queue("other").push(0, id="taken")
    queue = client.queue("a")
    with pytest.raises(DuplicateKey) as caught:
        queue.push_many(
            [1, 2, 3], keys=[None, "k", None], ids=["taken", None, "mine"], on_duplicate="replace"
        )
    assert caught.value.ids == ["taken"]
    assert sorted(each.payload for each in queue.peek()) == [2, 3]


def test_key_clash_names_the_keys_and_the_ids(client: Client) -> None:
    client.queue("other").push(0, id="taken")
    queue = client.queue("a")
    queue.push(1, key="k")
    with pytest.raises(DuplicateKey) as caught:
        queue.push_many(
            [2, 3, 4], keys=["k", None, None], ids=[None, "taken", None], on_duplicate="error"
        )
    assert (caught.value.keys, caught.value.ids) == (["k"], ["taken"])


def test_batch_with_a_taken_id_signals_the_rest(client: Client) -> None:
    client.queue("other").push(0, id="taken")
    before = client.stats["signals"]
    with pytest.raises(DuplicateKey):
        client.queue("a").push_many([1, 2], ids=["taken", None])
    assert client.stats["signals"] == before + 1


@pytest.mark.parametrize("history", [None, 60])
def test_pop_many_keeps_order_with_and_without_keys(client: Client, history: float | None) -> None:
    queue = client.queue("a", history=history)
    queue.push_many([1, 2, 3], keys=["k1", None, "k2"])
    assert [each.payload for each in queue.pop_many(3, timeout=0)] == [1, 2, 3]


def test_batch_reports_a_former_release_as_lost(client: Client) -> None:
    queue = client.queue("a")
    queue.push_many([1, 2])
    first, second = queue.reserve_many(2, timeout=0)
    queue.release(first)
    with pytest.raises(LeaseLost) as caught:
        queue.release(first, second)
    assert caught.value.lost == (first,)


def test_batch_with_two_reservations_of_a_message_loses_one(client: Client) -> None:
    queue = client.queue("a")
    queue.push(1)
    former = hold(queue)
    queue.release(former)
    present = hold(queue)
    with pytest.raises(LeaseLost) as caught:
        queue.release(former, present)
    assert caught.value.lost == (former,)


def test_popped_dead_message_shows_its_key(client: Client) -> None:
    queue, grave = client.queue("a"), client.queue("a.dead", history=60)
    queue.push(1, key="k")
    queue.bury(hold(queue))
    assert grave.pop(0) is not None
    (finished,) = grave.history()
    assert finished.key == "k"


def test_removed_message_has_no_key_of_an_earlier_queue(client: Client) -> None:
    queue, other = client.queue("a"), client.queue("b", history=60)
    id = queue.push(1, key="k")
    assert id is not None
    queue.move(hold(queue), to=other)
    assert other.remove(id)
    (finished,) = other.history()
    assert finished.key is None
    assert other.replay(id) == 1
    assert other.push(2, key="k") is not None


def test_redrive_never_fails_on_a_key_that_a_replay_restored(client: Client) -> None:
    queue, grave = client.queue("a"), client.queue("a.dead", history=60)
    queue.push(1, key="k")
    queue.bury(hold(queue))
    dead = hold(grave)
    grave.commit(dead)
    assert grave.replay(dead.id) == 1
    queue.push(2, key="k")
    assert grave.redrive() == 1
    assert sorted((each.payload, each.key) for each in queue.peek()) == [(1, None), (2, "k")]
