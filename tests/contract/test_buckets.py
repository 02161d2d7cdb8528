"""Buckets: callers see messages of packs like any other messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import (
    ConfigurationError,
    Counts,
    DuplicateKey,
    InvalidMessage,
    LeaseLost,
    Push,
)
from tests.contract.world import AnyClient, AnyQueue, World, expect_error, refuses
from tests.support.eventually import eventually

pytestmark = pytest.mark.needs("packs")


@pytest.fixture
def queue(client: AnyClient, name: str) -> AnyQueue:
    """Return an empty bucket with packs of five."""
    return client.queue(name, pack=5)


def test_messages_of_a_push_share_packs(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(11), headers={"h": 1})
    (single,) = ids[10:]
    assert isinstance(single, ObjectId)
    packs = {str(id).partition(":")[0] for id in ids[:10]}
    assert len(packs) == 2
    for pack in packs:
        assert world.document(ObjectId(pack))["n"] == 5
    held = queue.reserve_many(20, timeout=0)
    assert [each.id for each in held] == ids
    assert [each.payload for each in held] == list(range(11))
    assert all(each.headers == {"h": 1} for each in held)
    queue.commit(*held)
    assert queue.counts() == Counts()
    assert queue.next_when() is None


def test_counts_add_up_the_packs(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(range(10))
    queue.push("later", delay=60)
    assert queue.counts() == Counts(ready=10, scheduled=1)
    held = queue.reserve_many(2, timeout=0)
    assert queue.counts() == Counts(ready=5, scheduled=1, reserved=5), "the rest of the pack"
    assert queue.counts(cap=3) == Counts(ready=3, scheduled=1, reserved=3)
    queue.commit(held[0])

    def shown(**options: Any) -> Counts:
        listed = {each.name: each for each in client.queues(**options)}[queue.name]
        assert (listed.kind, listed.paused) == ("bucket", False)
        return listed.counts  # type: ignore[no-any-return]  # of any place

    assert shown() == Counts(ready=5, scheduled=1, reserved=4)
    assert shown(cap=3) == Counts(ready=3, scheduled=1, reserved=3)
    assert shown(held=False) == Counts(ready=5, scheduled=5)
    assert shown(cap=3, held=False) == Counts(ready=3, scheduled=3)
    queue.release(held[1])
    assert queue.counts() == Counts(ready=9, scheduled=1)


def test_pushes_that_fit_share_packs(world: World, queue: AnyQueue) -> None:
    """Those with a key, an id or a later time are ordinary messages."""
    alone = [Push("key", key="k"), Push("id", id=f"{queue.name}-id"), Push("later", delay=60)]
    queue.push_many([Push("a", headers={"h": 1}), *alone, Push("b"), Push("c", delay=0)])
    assert queue.counts() == Counts(ready=5, scheduled=1)
    messages = {"q": queue.name, "record": {"$exists": False}}
    assert world.raw().count_documents(messages) == 4
    found = {each.payload: each.headers for each in queue.pop_many(9, timeout=0)}
    assert found == {"a": {"h": 1}, "b": {}, "c": {}, "key": {}, "id": {}}


def test_message_of_a_pack_is_read_and_removed_alone(queue: AnyQueue) -> None:
    ids = queue.push_many(["a", "b", "c"])
    found = queue.get(ids[1])
    assert (found.payload, found.state, found.tries) == ("b", "ready", 0)
    assert [each.id for each in queue.peek(2)] == ids[:2]
    assert queue.remove(ids[1])
    assert not queue.remove(ids[1])
    assert queue.get(ids[1]) is None
    assert [each.id for each in queue.peek()] == [ids[0], ids[2]]
    held = queue.reserve(0)
    assert queue.get(ids[2]).state == "reserved"
    assert not queue.remove(ids[2]), "the process holds the pack"
    queue.commit(held)
    assert queue.get(f"{ObjectId()}:0001") is None
    assert not queue.remove(f"{ids[0]}0")


def test_id_of_a_pack_names_no_message(client: AnyClient, queue: AnyQueue) -> None:
    pack = str(queue.push_many(range(3))[0]).partition(":")[0]
    for id in (pack, ObjectId(pack)):
        assert not queue.remove(id)
        assert not queue.requeue(id)
        assert not client.force_release(id)
        assert queue.cancel(id) is None
        assert queue.reserve_id(id) is None
        assert queue.get(id) is None
        assert client.find(id) is None
    assert queue.counts() == Counts(ready=3)


def test_removed_message_is_not_delivered(world: World, queue: AnyQueue) -> None:
    ids = queue.push_many(range(3))
    queue.commit(queue.reserve(0))
    past = datetime.now(UTC) - timedelta(seconds=1)
    world.raw().update_one({"q": queue.name, "n": 2}, {"$set": {"when": past}})
    assert world.connect().queue(queue.name).remove(ids[1]), "nothing of the pack is held"
    again = queue.reserve_many(3, timeout=0)
    assert [each.payload for each in again] in ([2], [])
    queue.commit(*again)


def test_purge_counts_messages(queue: AnyQueue) -> None:
    ids = queue.push_many(range(12), keys=["k", *[None] * 11])
    held = queue.reserve_many(2, timeout=0)
    reserved = queue.counts().reserved
    assert queue.purge() == 12 - reserved
    assert queue.counts() == Counts(reserved=reserved)
    queue.commit(*held)
    assert len(ids) == 12


def test_settled_once_and_fenced_by_place(queue: AnyQueue) -> None:
    queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    queue.commit(*held[1:3])
    with expect_error(LeaseLost, lost=tuple(held[1:3]), unknown=()):
        queue.commit(*held)
    assert queue.counts() == Counts()


def test_former_holder_changes_nothing(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    queue.commit(held[0])
    world.lapse(held[1])
    second = world.connect().queue(queue.name)
    again = second.reserve_many(5, timeout=0)
    assert [each.payload for each in again] == [1], "what lapsed comes one by one"
    before = world.document(held[0].pack)
    calls: list[Callable[[], Any]] = [
        lambda: queue.commit(*held[1:]),
        lambda: queue.rollback(*held[1:]),
        lambda: queue.release(*held[1:]),
        lambda: queue.bury(*held[1:]),
        lambda: queue.extend(*held[1:]),
        lambda: queue.move(*held[1:], to=f"{queue.name}-x"),
    ]
    for call in calls:
        with expect_error(LeaseLost, lost=tuple(held[1:])):
            call()
    assert world.document(held[0].pack) == before
    second.commit(*again)


def test_parts_of_a_pack_go_their_ways(client: AnyClient, queue: AnyQueue, name: str) -> None:
    ids = queue.push_many(range(5), headers={"h": 1})
    held = queue.reserve_many(5, timeout=0)
    queue.bury(held[0], error="why")
    queue.move(held[1], to=f"{name}-x", payload="new", headers={"g": 2}, delay=60)
    queue.rollback(held[2], delay=timedelta(minutes=5), error=ValueError("no"))
    queue.commit(held[3], held[4])
    dead = client.queue(f"{name}.dead", kind="standard").get(ids[0])
    assert (dead.payload, dead.headers, dead.dead["from"]) == (0, {"h": 1}, name)
    assert dead.dead["error"]["message"] == "why"
    moved = client.queue(f"{name}-x", kind="standard").get(ids[1])
    assert (moved.payload, moved.headers, moved.state) == ("new", {"h": 1, "g": 2}, "scheduled")
    assert [stop["q"] for stop in moved.trail] == [name]
    waits = queue.get(ids[2])
    assert (waits.payload, waits.tries, waits.state) == (2, 1, "scheduled")
    assert waits.error["type"] == "ValueError"
    assert queue.counts() == Counts(scheduled=1)
    assert client.queue(f"{name}.dead", kind="standard").redrive() == 1
    again = queue.reserve(0)
    assert (again.id, again.payload) == (ids[0], 0)


def test_uncounted_rollback_takes_the_tries_of_packs_back(client: AnyClient, name: str) -> None:
    """A whole pack waits as a pack; otherwise its messages leave it."""
    queue = client.queue(name, pack=5, max_tries=1)
    queue.push_many(range(5))
    queue.rollback(*queue.reserve_many(5, timeout=0), delay=0, error="busy", counted=False)
    held = queue.reserve_many(5, timeout=0)
    assert {(each.tries, each.deliveries, each.error.message) for each in held} == {(1, 2, "busy")}
    queue.rollback(*held[:2], delay=60, counted=False)
    found = [queue.get(each.id) for each in held[:2]]
    assert {(each.tries, each.deliveries, each.state) for each in found} == {(0, 2, "scheduled")}
    queue.rollback(*held[2:])
    assert queue.counts() == Counts(scheduled=2), "the counted try was the last one"


def test_pack_moves_to_another_bucket(
    world: World, client: AnyClient, queue: AnyQueue, name: str
) -> None:
    """A whole pack moves by one update, parts of it in shared documents. The ids stay."""
    other = client.queue(f"{name}-x", kind="bucket", pack=5)
    ids = queue.push_many([{"n": number} for number in range(10)], headers={"h": 1})
    held = queue.reserve_many(10, timeout=0)
    queue.move(*held[:5], to=other, headers={"g": 2})
    queue.move_many([(each, {"new": each.payload["n"]}) for each in held[5:8]], to=other)
    queue.commit(*held[8:])
    assert queue.counts() == Counts()
    assert other.counts() == Counts(ready=8)
    assert len(world.stored(other)) == 3, "two packs and the record"
    moved = other.get(ids[6])
    assert (moved.id, moved.payload, moved.headers) == (ids[6], {"new": 6}, {"h": 1})
    again = sorted(other.reserve_many(10, timeout=0), key=lambda each: ids.index(each.id))
    assert [each.id for each in again] == ids[:8]
    assert [each.headers for each in again] == [{"h": 1, "g": 2}] * 5 + [{"h": 1}] * 3
    assert {(each.tries, each.trail[0]["q"]) for each in again} == {(1, name)}
    other.move(*again[1:6], to=queue)
    other.rollback(again[0], delay=0)
    other.bury(again[6])
    other.commit(again[7])
    back = queue.reserve_many(10, timeout=0)
    assert sorted(each.id for each in back) == sorted(ids[1:6])
    queue.commit(*back)
    with pytest.raises(LeaseLost):
        other.commit(again[1])


@pytest.mark.parametrize("number", [2, 5], ids=["some", "all"])
def test_messages_of_a_pack_move_at_an_instant(
    client: AnyClient, queue: AnyQueue, name: str, number: int
) -> None:
    other = client.queue(f"{name}-x", kind="bucket", pack=5)
    queue.push_many(range(5))
    later = datetime.now(UTC) + timedelta(minutes=5)
    queue.move(*queue.reserve_many(5, timeout=0)[:number], to=other, at=later)
    assert other.counts() == Counts(scheduled=number)
    assert abs(other.next_when() - later) < timedelta(milliseconds=2)


def test_packed_messages_move_into_ordered_groups(
    client: AnyClient, queue: AnyQueue, name: str
) -> None:
    """They follow the messages of the group, in the order of the moves."""
    ordered = client.queue(f"{name}-o", kind="ordered")
    ordered.push("first", group="g")
    queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    queue.move(held[2], held[1], to=ordered, group="g")
    queue.move(held[0], to=ordered, group="g", key="k")
    queue.move(held[3], to=ordered, group="g", delay=60)
    queue.move(held[4], to=ordered)
    assert ordered.counts() == Counts(ready=5, scheduled=1)
    [free] = [each for each in ordered.peek(9) if each.payload == 4]
    assert free.group is None
    assert client.queue(f"{name}-o", kind="ordered").push("k", key="k", group="g") is None
    got = []
    while some := ordered.reserve_many(9, timeout=0):
        assert sum(each.group == "g" for each in some) <= 1
        got += [each.payload for each in some if each.group == "g"]
        ordered.commit(*some)
    assert got == ["first", 2, 1, 0]
    assert ordered.get(held[3].id).group == "g"


def test_packed_messages_move_into_priorities(
    client: AnyClient, queue: AnyQueue, name: str
) -> None:
    levels = client.queue(f"{name}-p", kind="priority")
    levels.push_many(["low", "high"], priorities=[1, 8])
    queue.push_many(range(4))
    held = queue.reserve_many(4, timeout=0)
    queue.move(held[0], to=levels, priority=9)
    queue.move(held[1], to=levels, priority=0)
    queue.move(held[2], to=levels)
    queue.move(held[3], to=levels, priority=9, delay=60)
    assert levels.counts() == Counts(ready=5, scheduled=1)
    got = [each.payload for each in levels.pop_many(9, timeout=0)]
    assert got == [0, "high", 2, "low", 1]
    assert levels.get(held[2].id) is None
    with pytest.raises(ConfigurationError, match="priority"):
        queue.move(held[1], to=f"{name}-x", priority=3)


def test_key_of_a_move_is_checked(client: AnyClient, queue: AnyQueue, name: str) -> None:
    client.queue(f"{name}-x", kind="standard").push("there", key="k")
    queue.push_many(range(2))
    held = queue.reserve_many(2, timeout=0)
    with pytest.raises(DuplicateKey):
        queue.move(held[0], to=f"{name}-x", key="k")
    queue.move(held[0], to=f"{name}-x", key="free")
    queue.commit(held[1])


def test_pop_takes_messages_of_a_pack(queue: AnyQueue) -> None:
    queue.push_many(range(7))
    assert queue.pop(0).payload == 0
    assert [each.payload for each in queue.pop_many(3, timeout=0)] == [1, 2, 3]
    held = queue.reserve(0)
    assert (held.payload, held.tries) == (4, 1)
    queue.commit(held)
    left = [each.payload for each in queue.pop_many(9, timeout=0)]
    assert sorted(left) == [5, 6]
    assert queue.counts() == Counts()


def test_push_repeated_with_ids_of_a_pack_is_one_push(queue: AnyQueue) -> None:
    """It does not matter whether the pack is stored."""
    ids = queue.push_many(range(3))
    unknown = [f"{ObjectId()}:{place:04}" for place in range(3)]
    assert queue.push_many(range(3), ids=ids) == ids
    assert queue.push_many(range(3), ids=unknown) == unknown
    assert queue.push_many(range(3), ids=unknown) == unknown
    assert queue.counts() == Counts(ready=6)


def test_shape_is_agreed_and_changed(client: AnyClient, world: World, queue: AnyQueue) -> None:
    queue.push_many(range(5))
    record = world.document(f"~queue:{queue.name}")
    assert (record["v"], record["shape"]) == (2, {"pack": 5})
    with pytest.raises(ConfigurationError, match=r"pack=5.*pack=7"):
        world.connect().queue(queue.name, pack=7).push(1)
    client.reshape(queue.name, pack=3)
    other = world.connect().queue(queue.name)
    assert [str(id).partition(":")[2] for id in other.push_many(range(3))] == [
        "0000",
        "0001",
        "0002",
    ]
    for wrong in (0, 1, 1001, 2.0, True, "5"):
        with pytest.raises(ConfigurationError, match="pack"):
            client.queue("x", pack=wrong)


def test_refused_on_a_bucket(world: World, client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(range(3))
    held = queue.reserve_many(3, timeout=0)
    before = world.stored(queue)
    refuses(
        None,
        lambda: client.queue(queue.name, history=60),
        lambda: queue.history(),
        lambda: queue.replay(held[0].id),
        lambda: queue.commit(held[0], payload=1),
        lambda: queue.progress(held[0], 0.5),
        lambda: queue.checkpoint(held[0], 1),
        lambda: queue.move(held[0], to="x", update={"$set": {"a": 1}}),
        lambda: queue.push(1, priority=3),
    )
    with pytest.raises(InvalidMessage):
        queue.push_many([1, object()])
    assert world.stored(queue) == before
    queue.commit(*held)


def test_claim_takes_whole_packs(queue: AnyQueue) -> None:
    ids = queue.push_many(range(12))
    with queue.claim("g", limit=6) as claim:
        assert sorted(claim.ids) == sorted(ids[:10])
        assert queue.counts() == Counts(ready=2, reserved=10)
        assert not queue.remove(ids[9])
        claim.rollback("why")
    assert queue.counts() == Counts(ready=2, scheduled=10)
    waiting = queue.get(ids[9])
    assert (waiting.tries, waiting.error["message"]) == (1, "why")
    with queue.claim("g", limit=1) as claim:
        assert sorted(claim.ids) == sorted(ids[10:])
        claim.commit()
    assert queue.counts() == Counts(scheduled=10)


def test_bytes_of_a_receive_are_limited(queue: AnyQueue) -> None:
    queue.push_many(["x" * 1000] * 5)
    held = queue.reserve_many(5, timeout=0, max_bytes=2500)
    assert len(held) == 2
    more = queue.reserve_many(5, timeout=0, max_bytes=1)
    assert len(more) == 1
    queue.commit(*held, *more)
    assert queue.counts().total == 2


def test_waiting_consumer_gets_a_pack(queue: AnyQueue) -> None:
    assert queue.reserve_many(3, timeout=0) == []
    queue.push_many(range(3))
    held = queue.reserve_many(3, timeout=10)
    assert [each.payload for each in held] == [0, 1, 2]
    queue.commit(*held)


def test_rest_of_a_pack_goes_to_another_process(world: World, queue: AnyQueue) -> None:
    """A process gives a pack back within a second after it has settled its messages of it."""
    queue.push_many(range(5))
    held = queue.reserve(0)
    queue.commit(held)
    other = world.connect().queue(queue.name)
    got: list[Any] = []

    def receives() -> bool:
        got.extend(other.reserve_many(5, timeout=0))
        return bool(got)

    eventually(receives, "the pack comes back")
    assert [(each.payload, each.tries) for each in got] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    other.commit(*got)


def test_push_is_repeated_in_a_transaction(client: AnyClient, queue: AnyQueue) -> None:
    ids = queue.push_many(range(3))
    unknown = [f"{ObjectId()}:{place:04}" for place in range(3)]
    every = [*ids, *unknown]

    def push(session: Any) -> None:
        assert queue.push_many(range(6), ids=every, session=session) == every

    for _ in range(2):
        client.run_transaction(push)
    assert queue.counts() == Counts(ready=6)


def test_packed_messages_leave_in_transactions(
    world: World, client: AnyClient, queue: AnyQueue, name: str
) -> None:
    """The moves happen when the transaction commits, and none of them if it aborts."""
    others = [client.queue(f"{name}-{kind}", kind=kind) for kind in ("standard", "bucket")]
    for each in others:
        each.push(1)
        each.pop(0)
    ids = queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    mark = {"to": others[0].name, "source": held[0].pack, "token": "of one who died"}
    copy = {"_id": ids[0], "q": f"~handover:{name}", "when": held[0].when, "handover": mark}
    world.raw().insert_one(copy)

    def work(session: Any, *, fails: bool) -> None:
        queue.move(held[0], to=others[0], headers={"h": 1}, session=session)
        queue.move(*held[1:3], to=others[1], delay=30, session=session)
        queue.rollback(held[3], delay=60, error="why", session=session)
        with pytest.raises(LeaseLost):
            queue.commit(*held[2:], session=session)
        if fails:
            raise ValueError("no")

    before = [world.stored(each) for each in (queue, *others)]
    with pytest.raises(ValueError, match="no"):
        client.run_transaction(lambda session: work(session, fails=True))
    assert [world.stored(each) for each in (queue, *others)] == before
    client.run_transaction(lambda session: work(session, fails=False))
    moved = others[0].reserve(0)
    assert (moved.id, moved.headers) == (ids[0], {"h": 1})
    assert others[1].counts() == Counts(scheduled=2)
    assert queue.counts() == Counts(scheduled=1)
    waits = queue.get(ids[3])
    assert (waits.tries, waits.error["message"]) == (1, "why")
    with pytest.raises(LeaseLost):
        queue.commit(*held)


def test_packs_take_part_in_transactions(client: AnyClient, queue: AnyQueue) -> None:
    queue.push_many(["x", "y", "z"])
    held = queue.reserve_many(3, timeout=0)

    def work(session: Any) -> None:
        queue.push_many([1, 2, 3], session=session)
        queue.commit(held[0], session=session)

    client.run_transaction(work)
    with pytest.raises(LeaseLost):
        queue.commit(held[0])
    queue.commit(*held[1:])
    short = queue.reserve_many(5, timeout=0)
    assert [each.payload for each in short] == [1, 2, 3]
    for each in short:
        each.until -= timedelta(seconds=50)
    with pytest.raises(ConfigurationError, match="lease"):
        client.run_transaction(lambda session: queue.commit(*short, session=session))
    queue.commit(*short)
    assert queue.counts() == Counts()
