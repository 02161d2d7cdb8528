"""What a message tells about its deliveries and its failures."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.contract.world import AnyClient, AnyQueue, World, hold, near


def test_release_lowers_tries_but_not_deliveries(queue: AnyQueue) -> None:
    held = hold(queue)
    assert (held.tries, held.deliveries) == (1, 1)
    queue.release(held)
    shown = queue.get(held.id)
    assert (shown.tries, shown.deliveries) == (0, 1)
    [held] = queue.reserve_many(5, timeout=0)
    assert (held.tries, held.deliveries) == (1, 2)
    queue.rollback(held, delay=0)
    held = queue.reserve(0)
    assert (held.tries, held.deliveries) == (2, 3)


@pytest.mark.needs("move")
def test_deliveries_begin_again_in_another_queue(queue: AnyQueue, other: AnyQueue) -> None:
    held = hold(queue)
    queue.release(held)
    queue.move(queue.reserve(0), to=other)
    assert other.get(held.id).deliveries == 0
    assert other.reserve(0).deliveries == 1


@pytest.mark.needs("keys")
def test_deliveries_begin_again_for_a_new_payload(world: World, queue: AnyQueue) -> None:
    id = queue.push(1, key="k")
    queue.reserve(0)
    queue.push(2, key="k", on_duplicate="replace")
    assert "deliveries" not in world.document(id)
    assert queue.reserve(0).deliveries == 1


def test_deliveries_of_an_older_release_count_as_tries(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    queue.rollback(held, delay=0)
    world.raw().update_one({"_id": held.id}, {"$unset": {"deliveries": ""}, "$set": {"tries": 3}})
    assert queue.get(held.id).deliveries == 3
    assert queue.reserve(0).deliveries == 4


def test_reservation_tells_when_it_was_claimed(world: World, queue: AnyQueue) -> None:
    held = hold(queue)
    assert near(held.reserved, 0)
    assert held.reserved == world.document(held.id)["reserved"]
    assert held.reserved == held.until - timedelta(seconds=held.lease)
    claimed = held.reserved
    queue.extend(held, lease=600)
    assert held.reserved == claimed


@pytest.mark.needs("packs")
def test_messages_of_a_pack_share_their_deliveries(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.push_many(["a", "b", "c"])
    held = queue.reserve_many(3, timeout=0)
    assert {(each.tries, each.deliveries) for each in held} == {(1, 1)}
    assert all(near(each.reserved, 0) for each in held)
    queue.release(*held)
    held = queue.reserve_many(3, timeout=0)
    assert {(each.tries, each.deliveries) for each in held} == {(1, 2)}
    queue.rollback(held[0], delay=0)  # it leaves the pack
    assert queue.get(held[0].id).deliveries == 2
    queue.commit(*held[1:])
    assert queue.reserve(0).deliveries == 3
