"""A former holder cannot change a single byte, by any call and in any state of the message."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import ConfigurationError, LeaseLost, Reservation
from tests.contract.world import AnyQueue, World, expect_error, hold

pytestmark = pytest.mark.needs("move", "dead_letter")

Settle = Callable[[AnyQueue, AnyQueue, list[Reservation[Any]]], Any]

#: Every batch operation: the queue, another queue, the reservations.
BATCHES: dict[str, Settle] = {
    "commit": lambda queue, _, held: queue.commit(*held),
    "commit payload": lambda queue, _, held: queue.commit(*held, payload="mine"),
    "rollback": lambda queue, _, held: queue.rollback(*held, delay=0, error="mine"),
    "rollback delay": lambda queue, _, held: queue.rollback(*held, delay=5),
    "rollback backoff": lambda queue, _, held: queue.rollback(*held),
    "extend": lambda queue, _, held: queue.extend(*held, lease=600),
    "release": lambda queue, _, held: queue.release(*held),
    "move": lambda queue, other, held: queue.move(*held, to=other),
    "move payload": lambda queue, other, held: queue.move(*held, to=other, payload="mine"),
    "move update": lambda queue, other, held: queue.move(
        *held, to=other, update={"$set": {"a": "mine"}}
    ),
    "move_many": lambda queue, other, held: queue.move_many(
        [(each, "mine") for each in held], to=other
    ),
    "bury": lambda queue, _, held: queue.bury(*held, error="mine"),
}

#: Operations that a pack refuses.
NOT_OF_PACKS = (BATCHES["commit payload"], BATCHES["move update"])

SINGLES: dict[str, Settle] = {
    **BATCHES,
    "move key": lambda queue, other, held: queue.move(held[0], to=other, key="mine"),
    "progress": lambda queue, _, held: queue.progress(held[0], 0.5),
    "checkpoint": lambda queue, _, held: queue.checkpoint(held[0], "mine"),
}

each_single = pytest.mark.parametrize("settle", SINGLES.values(), ids=SINGLES.keys())
each_batch = pytest.mark.parametrize("settle", BATCHES.values(), ids=BATCHES.keys())
each_clock = pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])


def refused(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle, former: Reservation[Any]
) -> None:
    """The former holder gets LeaseLost, and nothing has changed."""
    before = world.bytes(former.id)
    with expect_error(LeaseLost, lost=(former,), unknown=()):
        settle(queue, other, [former])
    assert world.bytes(former.id) == before


@each_single
def test_former_holder_cannot_settle(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    for known in (True, False):
        former = hold(queue, {"a": 1}, key="k", headers={"h": 1})
        world.lapse(former, known=known)
        present = queue.reserve(0)
        refused(world, queue, other, settle, former)
        queue.commit(present)


@each_single
def test_former_holder_cannot_settle_after_a_round_trip(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    former = hold(queue, {"a": 1}, key="k")
    world.lapse(former, known=False)
    second = queue.reserve(0)
    queue.move(second, to=other)
    third = other.reserve(0)
    other.move(third, to=queue)
    refused(world, queue, other, settle, former)  # ready in the first queue again
    refused(world, queue, other, settle, second)
    present = queue.reserve(0)
    assert present.id == former.id
    refused(world, queue, other, settle, former)
    refused(world, queue, other, settle, second)
    refused(world, other, queue, settle, third)
    queue.commit(present)
    assert queue.counts().total == other.counts().total == 0


@each_single
def test_holder_cannot_settle_after_giving_back(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    former = hold(queue, {"a": 1})
    queue.rollback(former, delay=0)
    refused(world, queue, other, settle, former)
    assert queue.reserve(0) is not None
    refused(world, queue, other, settle, former)


@each_single
def test_holder_cannot_settle_a_replaced_message(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    former = hold(queue, {"a": 1}, key="k")
    queue.push({"a": 2}, key="k", on_duplicate="replace")
    refused(world, queue, other, settle, former)


@each_single
def test_holder_cannot_settle_a_deleted_message(
    queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    former = hold(queue, {"a": 1})
    queue.commit(former)
    with expect_error(LeaseLost, lost=(former,)):
        settle(queue, other, [former])
    assert queue.counts().total == other.counts().total == 0


@pytest.mark.needs("history")
@each_single
def test_holder_cannot_settle_a_finished_message(
    world: World, name: str, other: AnyQueue, settle: Settle
) -> None:
    queue = world.client.queue(name, history=60)
    former = hold(queue, {"a": 1})
    queue.commit(former)
    refused(world, queue, other, settle, former)


@each_single
def test_holder_cannot_settle_a_redriven_message(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    former = hold(queue, {"a": 1})
    queue.bury(former)
    refused(world, queue, other, settle, former)
    assert world.client.queue(f"{queue.name}.dead").redrive() == 1
    refused(world, queue, other, settle, former)


@each_batch
@each_clock
def test_batch_with_a_lapsed_reservation_that_was_reclaimed(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle, known: bool
) -> None:
    """A former holder and the present holder of one message settle in the same batch.

    The former holder settles its expired reservation; the present holder settles another message. A
    filter "any of these ids and any of these tokens" would settle both messages: the id comes from
    the former holder, the token from the present holder.
    """
    former = hold(queue, {"a": 1})
    world.lapse(former, known=known)
    queue.push_many([{"a": 2}, {"a": 3}])
    held = {each.payload["a"]: each for each in queue.reserve_many(3, timeout=0)}
    assert len({each.token for each in held.values()}) == 1
    present = held[1]
    before = world.bytes(former.id)
    if "bucket" in world.place.offers and settle in NOT_OF_PACKS:
        with pytest.raises(ConfigurationError, match="shares a document"):
            settle(queue, other, [held[2], former, held[3]])
        return
    with expect_error(LeaseLost, lost=(former,), unknown=()):
        settle(queue, other, [held[2], former, held[3]])
    assert world.bytes(former.id) == before
    assert present.id == former.id
    queue.extend(present)  # the present holder still holds it
    for each in (held[2], held[3]):  # and these are settled
        message = queue.get(each.id)
        assert (
            message is None
            or message.state != "reserved"
            or message.when != each.when
            or settle is BATCHES["extend"]
        )
    queue.commit(present)


@each_batch
def test_both_reservations_of_one_message_in_one_batch(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    former = hold(queue, {"a": 1})
    world.lapse(former)
    present = queue.reserve(0)
    with expect_error(LeaseLost, lost=(former,)):
        settle(queue, other, [former, present])
    message = queue.get(present.id)
    if settle is BATCHES["extend"]:
        assert present.until - timedelta(seconds=300) > message.pushed
    else:
        assert message is None or message.state != "reserved"


@pytest.mark.needs("pop")
@each_batch
@pytest.mark.needs("documents")
def test_expired_message_finished_elsewhere_is_lost(
    world: World, queue: AnyQueue, other: AnyQueue, settle: Settle
) -> None:
    queue.push_many([{"a": 1}, {"a": 2}, {"a": 3}])
    held = queue.reserve_many(3, timeout=0)
    world.lapse(held[1])
    assert queue.pop(0) is not None
    with expect_error(LeaseLost, lost=(held[1],), unknown=()):
        settle(queue, other, held)


@pytest.mark.needs("documents")
def test_token_without_the_id_settles_nothing(world: World, queue: AnyQueue) -> None:
    queue.push_many([1, 2])
    held = queue.reserve_many(2, timeout=0)
    assert held[0].token == held[1].token
    queue.commit(held[0])
    assert queue.get(held[1].id).state == "reserved"
    before = world.bytes(held[1].id)
    with pytest.raises(LeaseLost):
        queue.commit(held[0])
    assert world.bytes(held[1].id) == before
