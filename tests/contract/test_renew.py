"""``renew``: leases are renewed while a block runs, and leaving it settles nothing."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import AsyncClient, LeaseLost, Reservation
from pyqueue.messages import PackedReservation
from pyqueue.runtime.connecting import runner_of
from tests.contract.world import AnyClient, AnyQueue, World, expect_error, hold, refuses
from tests.support.eventually import eventually

by_client = pytest.mark.differs_by("client")


def renewed(client: AnyClient, *held: Reservation[Any]) -> list[Reservation[Any]]:
    """Return the reservations that the client renews."""
    found: list[Reservation[Any]] = runner_of(client).renewer.registered(held)
    return found


def take_away(world: World, id: Any) -> None:
    """Give a message to another holder, as a claim after the lease's end does."""
    fields = {"token": "another's", "when": datetime.now(UTC) + timedelta(minutes=5)}
    assert world.raw().update_one({"_id": id}, {"$set": fields}).matched_count == 1


@by_client
def test_renew_holds_several_short_leases(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(3))
    held = queue.reserve_many(3, timeout=0, lease=1.5)
    ends = [each.until for each in held]
    with queue.renew(*held):
        eventually(
            lambda: queue.next_when() > ends[0] + timedelta(seconds=1), "the first lease has passed"
        )
        assert world.connect().queue(queue.name).reserve(0) is None
        assert all(each.until > end for each, end in zip(held, ends, strict=True))
    assert renewed(world.client, *held) == []
    assert queue.counts().reserved == 3
    queue.commit(*held)
    assert queue.counts().total == 0


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_leaving_renew_settles_nothing(queue: AnyQueue, raises: bool) -> None:
    held = hold(queue)
    expected = pytest.raises(RuntimeError, match="failed") if raises else nullcontext()
    with expected, queue.renew(held):
        if raises:
            raise RuntimeError("failed")
    found = queue.get(held.id)
    assert (found.state, found.tries, found.error) == ("reserved", 1, None)
    queue.commit(held)


@pytest.mark.parametrize("way", ["commit", "rollback", "release", "bury"])
def test_message_settled_in_renew_is_no_longer_renewed(
    client: AnyClient, queue: AnyQueue, way: str
) -> None:
    queue.push_many(range(2))
    first, second = queue.reserve_many(2, timeout=0)
    with queue.renew(first, second):
        getattr(queue, way)(first)
        assert renewed(client, first, second) == [second]
    assert renewed(client, first, second) == []
    queue.commit(second)


@by_client
def test_renew_tells_of_a_lost_lease(world: World, queue: AnyQueue) -> None:
    """Leaving the block raises nothing. Settling the message does."""
    queue.push_many(range(2))
    first, second = queue.reserve_many(2, timeout=0, lease=0.9)
    lost: list[Reservation[Any]] = []
    with queue.renew(first, second, on_lost=lost.append):
        take_away(world, first.id)
        eventually(lambda: lost, "on_lost is called")
    assert lost == [first]
    with expect_error(LeaseLost, lost=(first,), unknown=()):
        queue.commit(first)
    queue.commit(second)
    assert world.document(first.id)["token"] == "another's"


@by_client
def test_renew_takes_a_reservation_of_another_process(world: World, queue: AnyQueue) -> None:
    """A pickled one, for example. Its lease has run for a while, so it is renewed at once."""
    held = hold(queue)
    world.ready(held.id, token=held.token)
    held.until -= timedelta(seconds=50)
    end = held.until
    with queue.renew(held):
        eventually(lambda: held.until > end + timedelta(seconds=40), "it is renewed")
    assert queue.reserve(0) is None
    queue.commit(held)


@by_client
def test_renew_refuses_its_arguments(client: AnyClient, queue: AnyQueue, other: AnyQueue) -> None:
    async def never_awaited(held: Any) -> None:
        pass

    held, foreign = hold(queue), hold(other)

    def enter(*given: Any, **options: Any) -> None:
        with queue.renew(*given, **options):
            raise AssertionError("it was entered")

    refuses("on_lost", lambda: enter(held, on_lost="a name"))
    refuses("on_lost", lambda: enter(held, on_lost=never_awaited))
    refuses("reserved from queue", lambda: enter(held, foreign))
    refuses("found NoneType", lambda: enter(held, None))
    assert renewed(client, held, foreign) == []
    with queue.renew(held):
        refuses("is already being renewed", lambda: enter(held))
        assert renewed(client, held) == [held]
    with queue.renew():
        pass
    queue.commit(held)


@pytest.mark.needs("packs")
def test_renew_of_a_message_holds_its_pack(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(3))
    first, second = queue.reserve_many(2, timeout=0, lease=1.5)
    assert isinstance(first, PackedReservation)
    end = first.until
    with queue.renew(first):
        eventually(
            lambda: queue.next_when() > end + timedelta(seconds=1), "the first lease has passed"
        )
        assert world.connect().queue(queue.name).reserve(0) is None
        queue.commit(second)
    queue.commit(first)


@pytest.mark.needs("standard")
def test_renew_of_a_consumer_group(world: World, client: AnyClient, name: str) -> None:
    log = client.stream(name)
    log.append_many(["a", "b"])
    group = log.consumer("g")
    held = group.reserve_many(2, timeout=0, lease=1.5)
    end = held[0].until
    with group.renew(*held):
        eventually(lambda: held[1].until > end + timedelta(seconds=1), "the first lease has passed")
        assert world.connect().stream(name).consumer("g").reserve(0) is None
        group.commit(held[0])
        assert renewed(client, *held) == [held[1]]
        refuses("is already being renewed", lambda: group.renew(held[1]).__enter__())
    refuses("by group", lambda: log.consumer("other").renew(held[1]).__enter__())
    assert group.counts().reserved == 1
    group.commit(held[1])


def test_cancelled_block_of_renew_renews_nothing() -> None:
    async def main() -> None:
        async with AsyncClient("memory:") as client:
            queue = client.queue("jobs")
            await queue.push("x")
            held = await queue.reserve(0)
            assert held is not None
            entered = asyncio.Event()

            async def work() -> None:
                async with queue.renew(held):
                    entered.set()
                    await asyncio.get_running_loop().create_future()

            task = asyncio.create_task(work())
            await entered.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert runner_of(client).renewer.registered([held]) == []
            found = await queue.get(held.id)
            assert found is not None
            assert (found.state, found.tries) == ("reserved", 1)
            await queue.commit(held)

    asyncio.run(main())
