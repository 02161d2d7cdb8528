"""Consumer groups of streams: receive, settle, count, seek, and their refusals."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from pyqueue import (
    ConfigurationError,
    ConsumerCounts,
    LeaseLost,
    Limit,
    QueueClosed,
    StreamReservation,
)
from pyqueue.backends.streams import entries
from tests.contract.world import AnyClient, World, expect_error, in_thread, near, payloads, refuses
from tests.support.eventually import eventually

pytestmark = pytest.mark.needs("standard")  # a stream does not depend on the kind of queues

PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def log(client: AnyClient, name: str) -> Any:
    """Return a stream of three messages."""
    made = client.stream(name)
    made.append_many(["a", "b", "c"])
    return made


def lapse(world: World, name: str, group: str) -> None:
    """Let the leases of a group end without waiting."""
    past = datetime.now(UTC) - timedelta(seconds=0.1)
    past = past.replace(microsecond=past.microsecond // 1000 * 1000)
    document = world.raw().find_one({"_id": f"~group:{name}~{group}"})
    for each in document["out"]:
        each["u"] = past
    world.raw().update_one({"_id": document["_id"]}, {"$set": {"out": document["out"]}})


def test_each_group_gets_every_message(log: Any, name: str) -> None:
    first, second = log.consumer("first"), log.consumer("second")
    held = first.reserve_many(10, timeout=0)
    assert [(each.position, each.payload) for each in held] == [(0, "a"), (1, "b"), (2, "c")]
    one = held[0]
    assert isinstance(one, StreamReservation)
    assert (one.queue, one.group, one.tries, one.state) == (name, "first", 1, "reserved")
    assert near(one.until, 60)
    first.commit(*held)
    assert first.counts() == ConsumerCounts()
    assert payloads(second.reserve_many(10, timeout=0)) == ["a", "b", "c"]
    assert second.counts() == ConsumerCounts(reserved=3)
    assert [(each.name, each.position) for each in log.consumers()] == [("first", 3), ("second", 3)]


def test_consumers_of_a_group_share_its_messages(log: Any) -> None:
    one, other = log.consumer("g"), log.consumer("g")
    held = one.reserve(0), other.reserve(0), one.reserve(0), other.reserve(0)
    assert [each and each.payload for each in held] == ["a", "b", "c", None]
    other.commit(held[0])
    one.commit(held[1], held[2])
    with expect_error(LeaseLost, lost=(held[0],)):
        one.commit(held[0])


def test_lapsed_lease_is_received_again(world: World, log: Any, name: str) -> None:
    group = log.consumer("g")
    old = group.reserve_many(2, timeout=0)
    lapse(world, name, "g")
    again = log.consumer("g").reserve_many(2, timeout=0)
    assert [(each.position, each.tries) for each in again] == [(0, 2), (1, 2)]
    for call in (group.commit, group.rollback, group.release, group.extend, group.bury):
        with pytest.raises(LeaseLost):
            call(*old)
    group.commit(*again)


def test_commit_of_what_lapsed_and_was_not_claimed(world: World, log: Any, name: str) -> None:
    group = log.consumer("g")
    held = group.reserve(0)
    lapse(world, name, "g")
    group.commit(held)
    assert group.reserve(0).payload == "b"


def test_part_of_a_batch_can_be_settled(log: Any) -> None:
    group = log.consumer("g")
    a, b, c = group.reserve_many(3, timeout=0)
    group.commit(b)
    group.rollback(a, delay=60, error=ValueError("no"))
    group.release(c)
    assert group.counts() == ConsumerCounts(ready=1, scheduled=1)
    (again,) = group.reserve_many(3, timeout=0)
    assert (again.position, again.tries) == (2, 1)
    group.seek(0)
    assert group.counts() == ConsumerCounts(ready=3)


def test_single_rollbacks_are_stored_together(
    world: World, client: AnyClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "MERGE_ABOVE", 4)
    log = client.stream(name)
    log.append_many(range(20))
    group = log.consumer("g")
    held = group.reserve_many(10, timeout=0)
    group.extend(*held)
    for each in held[1:]:
        group.rollback(each, delay=60, error=f"$no {each.position}")
    document = world.raw().find_one({"_id": f"~group:{name}~g"})
    assert len(document["back"]) <= 4
    assert [each["t"] for each in document["out"]] == [held[0].token]
    assert group.counts() == ConsumerCounts(ready=10, scheduled=9, reserved=1)
    group.commit(held[0])
    past = {"$set": {f"back.{place}.u": PAST for place in range(len(document["back"]))}}
    world.raw().update_one({"_id": document["_id"]}, past)
    again = log.consumer("g").reserve_many(9, timeout=0)
    assert [each.position for each in again[:1]] == [1]
    assert {each.error["message"][:4] for each in again} == {"$no "}


def test_rollback_keeps_the_error(log: Any) -> None:
    group = log.consumer("g")
    group.rollback(group.reserve(0), delay=0, error=ValueError("no"))
    again = group.reserve(0)
    assert (again.position, again.tries) == (0, 2)
    assert (again.error["type"], again.error["message"]) == ("ValueError", "no")


def test_uncounted_rollback_takes_the_try_of_a_group_back(log: Any) -> None:
    group = log.consumer("g", max_tries=1)
    group.rollback(*group.reserve_many(3, timeout=0), delay=0, error="busy", counted=False)
    again = group.reserve_many(3, timeout=0)
    assert [(each.position, each.tries) for each in again] == [(0, 1), (1, 1), (2, 1)]
    assert {each.error.message for each in again} == {"busy"}
    group.rollback(again[1], delay=60, counted=False)
    assert group.counts() == ConsumerCounts(scheduled=1, reserved=2)
    group.rollback(again[0], again[2])
    assert group.counts() == ConsumerCounts(scheduled=1), "the counted try was the last one"
    refuses("counted: expected True or False", lambda: group.rollback(again[1], counted=0))


def test_bury_is_for_one_group(client: AnyClient, log: Any, name: str) -> None:
    group, other = log.consumer("g"), log.consumer("other")
    group.bury(group.reserve(0), error="bad")
    dead = client.queue(f"{name}.g.dead")
    held = dead.reserve(0)
    assert (held.payload, held.dead["from"], held.dead["reason"]) == ("a", name, "buried")
    assert (held.dead["group"], held.dead["position"]) == ("g", 0)
    assert held.error["message"] == "bad"
    assert other.reserve(0).payload == "a"
    dead.release(held)
    with pytest.raises(ConfigurationError, match="is a stream, and messages cannot move there"):
        dead.redrive()
    held = dead.reserve(0)
    dead.move(held, to=f"{name}-again")
    assert client.queue(f"{name}-again").pop(0).payload == "a"


def test_last_try_goes_to_the_named_queue(client: AnyClient, log: Any, name: str) -> None:
    group = log.consumer("g", max_tries=1, dead_letter=f"{name}-broken")
    group.rollback(group.reserve(0))
    assert client.queue(f"{name}-broken").pop(0).dead["reason"] == "tries"


def test_start_of_a_group(log: Any) -> None:
    last = log.consumer("last", start="last")
    assert last.reserve(0) is None
    at = log.consumer("at", start=2)
    now = log.consumer("now", start=datetime.now(UTC) + timedelta(seconds=5))
    assert now.reserve(0) is None
    assert at.reserve(0).payload == "c"
    log.append("d")
    assert last.reserve(0).payload == "d"
    assert log.consumer("last", start="first").reserve(0) is None
    old = log.consumer("old", start=datetime(2020, 1, 1, tzinfo=UTC))
    assert old.reserve(0).payload == "a"


def test_seek(log: Any) -> None:
    group = log.consumer("g")
    held = group.reserve_many(3, timeout=0)
    assert group.seek("last") == 3
    assert group.reserve(0) is None
    with pytest.raises(LeaseLost):
        group.commit(*held)
    assert group.seek(datetime(2020, 1, 1, tzinfo=UTC)) == 0
    assert group.seek(1) == 1
    assert group.reserve(0).payload == "b"


def test_pause_is_for_one_group(log: Any) -> None:
    group, other = log.consumer("g"), log.consumer("other")
    group.pause()
    assert group.paused()
    assert not other.paused()
    assert group.reserve(0) is None
    assert other.reserve(0) is not None
    assert [(each.name, each.paused) for each in log.consumers()] == [("g", True), ("other", False)]
    group.resume()
    assert group.reserve(0) is not None


def test_delete_consumer(log: Any) -> None:
    group = log.consumer("g")
    held = group.reserve(0)
    assert log.delete_consumer("g") is True
    assert log.delete_consumer("g") is False
    assert log.consumers() == []
    with pytest.raises(LeaseLost):
        group.commit(held)
    assert group.reserve(0).payload == "a", "it is made again"


def test_delete_queue_deletes_the_groups(client: AnyClient, log: Any, name: str) -> None:
    group = log.consumer("g")
    held = group.reserve(0)
    client.delete_queue(name, force=True)
    assert client.stream(name).consumers() == []
    with pytest.raises(LeaseLost):
        group.commit(held)


def test_reserved_commits_or_rolls_back(log: Any) -> None:
    group = log.consumer("g")
    with group.reserved(0) as message:
        assert message.payload == "a"
    with pytest.raises(ZeroDivisionError), group.reserved(0) as message:
        raise ZeroDivisionError
    assert group.counts() == ConsumerCounts(ready=1, scheduled=1)
    log.consumer("empty", start="last").pause()
    with log.consumer("empty").reserved(0) as message:
        assert message is None


def test_each_commits_or_rolls_back(log: Any) -> None:
    group = log.consumer("g")
    assert [(each.position, each.payload) for each in group.each(0)] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert group.counts() == ConsumerCounts()
    group.seek(0)
    for message in group.each(0):
        if message.position == 1:
            break
    eventually(lambda: group.counts() == ConsumerCounts(ready=1, scheduled=1), "it is rolled back")


def test_reserved_renews_the_lease(log: Any) -> None:
    group = log.consumer("g")
    with group.reserved(0, lease=2) as message:
        first = message.until
        eventually(lambda: message.until > first + timedelta(seconds=1), "two renewals")
        assert group.counts().reserved == 1
    assert group.counts() == ConsumerCounts(ready=2)


def test_reserved_raises_a_lost_lease(log: Any) -> None:
    group = log.consumer("g")
    lost: list[Any] = []

    def work() -> None:
        with group.reserved(0, lease=0.6, on_lost=lost.append):
            group.seek(0)
            eventually(lambda: lost, "the loss")

    with pytest.raises(LeaseLost):
        work()
    assert [each.position for each in lost] == [0]


def test_append_wakes_a_waiting_consumer(log: Any) -> None:
    group = log.consumer("g", start="last", poll=600)
    group.pause()
    group.resume()
    received = in_thread(lambda: group.reserve(60))
    log.append("d")
    assert received.result(60).payload == "d"


def test_release_wakes_a_waiting_consumer(log: Any) -> None:
    group = log.consumer("g", poll=600)
    held = group.reserve_many(3, timeout=0)
    received = in_thread(lambda: group.reserve(60))
    group.release(*held)
    assert received.result(60).payload == "a"


def test_concurrent_consumers_get_each_message_once(log: Any) -> None:
    log.append_many(range(97))
    group = log.consumer("g")
    positions: list[int] = []

    def consume() -> None:
        while (held := group.reserve(0)) is not None:
            positions.append(held.position)
            group.commit(held)

    for each in [in_thread(consume) for _ in range(4)]:
        each.result()
    assert sorted(positions) == list(range(100))


def test_reservation_pickles_and_is_settled_elsewhere(log: Any) -> None:
    held = log.consumer("g").reserve_many(2, timeout=0)
    log.consumer("g").commit(*pickle.loads(pickle.dumps(held)))
    assert log.consumer("g").counts() == ConsumerCounts(ready=1)


def test_names_with_colons_are_apart(client: AnyClient, name: str) -> None:
    for stream in (name, f"{name}:b"):
        client.stream(stream).append(stream)
        client.stream(stream).consumer("g:h").pause()
        client.stream(stream).consumer("g").resume()
    log = client.stream(name)
    assert payloads(log.read()) == [name]
    assert [each.name for each in log.consumers()] == ["g", "g:h"]
    assert log.consumer("g").reserve(0).payload == name


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": "middle"}, "start"),
        ({"start": -1}, "start"),
        ({"start": datetime(2026, 1, 1)}, "start"),
        ({"lease": 0}, "lease"),
        ({"max_tries": 0}, "max_tries"),
        ({"backoff": 3}, "backoff"),
        ({"poll": -1}, "poll"),
    ],
)
def test_consumer_refuses_wrong_options(options: Any, text: str, log: Any) -> None:
    with pytest.raises(ConfigurationError, match=text):
        log.consumer("g", **options).reserve(0)
    assert log.consumers() == []


def test_consumer_refuses_foreign_reservations(client: AnyClient, log: Any, name: str) -> None:
    group, other = log.consumer("g"), log.consumer("other")
    held = group.reserve(0)
    queue = client.queue(f"{name}-queue")
    refuses("was reserved by group 'g'", lambda: other.commit(held))
    refuses("reserved from queue", lambda: queue.commit(held))
    queue.push(1)
    refuses("reservations", lambda: group.commit(queue.reserve(0)))
    refuses("to", lambda: queue.move(queue.reserve(0), to=group))
    for wrong in ("", "a b", "a~b", 3, "x" * 111):
        refuses("name", partial(log.consumer, wrong))
    refuses("dead_letter", lambda: log.consumer("x" * 110))


def test_closed_client_ends_a_wait(world: World, name: str) -> None:
    client = world.connect()
    group = client.stream(name).consumer("g", poll=600)
    received = in_thread(lambda: group.reserve(60))
    eventually(lambda: group.counts() == ConsumerCounts(), "the group")
    client.close()
    with pytest.raises(QueueClosed):
        received.result(60)


def test_stream_with_a_rate_starts_no_more(world: World, client: AnyClient, name: str) -> None:
    """Each group has its own permits. A new consumer follows a changed limit."""
    log = client.stream(name, limit=Limit(rate=2, period=3600, burst=2))
    log.append_many(["a", "b", "c", "d"])
    group = log.consumer("g")
    assert payloads(group.reserve_many(10, timeout=0)) == ["a", "b"]
    assert group.reserve(0) is None
    assert len(log.consumer("h").reserve_many(10, timeout=0)) == 2
    with pytest.raises(ConfigurationError, match=r"limit=Limit\(rate=2.*limit=Limit\(rate=3"):
        world.connect().stream(name, limit=Limit(rate=3)).append(1)
    client.reshape(name, limit=False)
    fresh = world.connect().stream(name).consumer("g")
    assert payloads(fresh.reserve_many(10)) == ["c", "d"]
