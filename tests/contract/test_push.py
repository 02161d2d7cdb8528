"""push and push_many: the documents that they store, and the pushes that store none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import ConfigurationError, DuplicateKey, InvalidMessage, LeaseLost, Push
from tests.contract.world import FINISHES, AnyClient, AnyQueue, World, expect_error, hold, near

#: Every way in which a message leaves its queue.
LEAVES: dict[str, Callable[[AnyQueue], object]] = {
    **FINISHES,
    "bury": lambda queue: queue.bury(queue.reserve(0)),
    "move": lambda queue: queue.move(queue.reserve(0), to=f"{queue.name}-other"),
    "purge": lambda queue: queue.purge(),
}


def all_payloads(queue: AnyQueue) -> list[Any]:
    return sorted(each.payload for each in queue.peek(1000))


def test_push_stores_a_ready_message(queue: AnyQueue) -> None:
    id = queue.push({"n": 1})
    assert isinstance(id, ObjectId)
    message = queue.get(id)
    assert (message.id, message.queue, message.payload) == (id, queue.name, {"n": 1})
    assert (message.state, message.tries, message.key, message.headers) == ("ready", 0, None, {})
    assert (message.error, message.progress, message.checkpoint, message.dead) == (None,) * 4
    assert message.trail == []
    assert message.when == message.pushed
    assert message.when.tzinfo is UTC
    assert near(message.when, 0)


@pytest.mark.needs("pop")
def test_push_and_receive_make_the_record_and_reads_do_not(
    world: World, client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    assert queue.get("unknown") is None
    assert queue.peek() == []
    assert queue.counts().total == 0
    assert queue.next_when() is None
    assert not queue.paused()
    assert queue.redrive() == 0
    assert queue.purge() == 0
    assert not queue.remove("unknown")
    assert world.stored(queue) == []
    queue.push(1)
    assert world.document(f"~queue:{queue.name}")["kind"] == world.place.kind.name
    assert client.queue(other.name, kind=world.place.kind.name).pop(0) is None
    assert world.document(f"~queue:{other.name}")["record"] is True


@pytest.mark.needs("pop")
@pytest.mark.parametrize("delay", [60, 60.0, timedelta(minutes=1)], ids=repr)
def test_push_with_a_delay(queue: AnyQueue, delay: Any) -> None:
    id = queue.push(1, delay=delay)
    message = queue.get(id)
    assert message.state == "scheduled"
    assert near(message.when, 60)
    assert queue.next_when() == message.when
    assert queue.reserve(0) is None
    assert queue.pop(0) is None
    assert queue.peek() == []


@pytest.mark.needs("pop")
@pytest.mark.parametrize("delay", [0, 0.0, timedelta(0)], ids=repr)
def test_push_without_a_delay(queue: AnyQueue, delay: Any) -> None:
    queue.push(1, delay=delay)
    assert queue.pop(0) is not None


def test_push_with_at(queue: AnyQueue) -> None:
    zone = timezone(timedelta(hours=5))
    at = (datetime.now(zone) + timedelta(hours=3)).replace(microsecond=123_000)
    message = queue.get(queue.push(1, at=at))
    assert message.when == at
    assert message.when.tzinfo is UTC
    assert message.state == "scheduled"


def test_at_in_the_past_is_stored_as_now(queue: AnyQueue) -> None:
    first = queue.push("first")
    second = queue.push("second", at=datetime(1999, 1, 1, tzinfo=UTC))
    messages = queue.get(first), queue.get(second)
    assert messages[1].when >= messages[0].when
    assert near(messages[1].when, 0)


def test_push_many_with_at_delay_and_headers(queue: AnyQueue) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    queue.push_many([1, 2], at=at, headers={"of": "at"})
    queue.push_many((each for each in (3, 4)), delay=60, headers={"of": "delay"})
    assert queue.counts().scheduled == 4
    assert near(queue.next_when(), 60)
    ids = queue.push_many([5, 6], headers={"a": "x", "b": 1, "c": 0.5, "d": True})
    for id in ids:
        message = queue.get(id)
        assert message.headers == {"a": "x", "b": 1, "c": 0.5, "d": True}
        assert message.headers["d"] is True


def test_each_push_has_its_own_options(queue: AnyQueue) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    later = [Push("at", at=at), Push("delay", delay=60)]
    ids = queue.push_many([Push("now", headers={"of": "a"}, id="chosen"), *later, Push("bare")])
    assert ids[0] == "chosen"
    now, of_at, of_delay, bare = (queue.get(id) for id in ids)
    assert [each.payload for each in (now, of_at, of_delay, bare)] == ["now", "at", "delay", "bare"]
    assert [now.headers, bare.headers] == [{"of": "a"}, {}]
    assert of_at.when == at
    assert near(of_delay.when, 60)
    assert near(now.when, 0)
    assert near(bare.when, 0)
    assert sorted(each.payload for each in queue.reserve_many(9, timeout=0)) == ["bare", "now"]


@pytest.mark.needs("keys")
def test_pushes_with_keys_share_the_rule_for_duplicates(queue: AnyQueue) -> None:
    queue.push(1, key="a")
    pushes = [Push(2, key="a"), Push(3, key="b"), Push(4)]
    assert queue.push_many(pushes)[0] is None
    queue.push_many([Push(5, key="b")], on_duplicate="replace")
    assert all_payloads(queue) == [1, 4, 5]
    with expect_error(DuplicateKey, keys=["a"]):
        queue.push_many([Push(6, key="a"), Push(7)], on_duplicate="error")
    assert all_payloads(queue) == [1, 4, 5, 7]


@pytest.mark.parametrize(
    ("pushes", "options", "message"),
    [
        ([Push(1), 2], {}, r"payloads: expected a Push at each place, found int at place 1"),
        ([1, Push(2)], {}, r"payloads: expected a Push at each place, found int at place 0"),
        ([Push(1)], {"delay": 5}, r"delay: expected None beside Push objects, found 5"),
        ([Push(1)], {"keys": ["a"]}, r"keys: expected None beside Push objects"),
        ([Push(1), Push(2, delay=1, at=datetime.now(UTC))], {}, "delay, at: pass one of the two"),
        ([Push(1), Push(2, delay=-1)], {}, "delay"),
        ([Push(1), Push(2, key="")], {}, "key"),
        ([Push(1), Push(2, id="~a")], {}, "id"),
        ([Push(1), Push(2, headers={"a.b": 1})], {}, "header"),
        ([Push(1), Push(2, priority=10)], {}, "priority"),
        ([Push(1), Push(2, group="")], {}, "group"),
    ],
)
def test_wrong_push_is_refused_before_anything_is_written(
    world: World, queue: AnyQueue, pushes: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        queue.push_many(pushes, **options)
    assert world.stored(queue) == []


def test_invalid_payload_of_a_push_is_named_by_its_place(world: World, queue: AnyQueue) -> None:
    with pytest.raises(InvalidMessage, match=r"\b1\b"):
        queue.push_many([Push(1), Push({"a": object()})])
    assert world.stored(queue) == []


def test_push_many_keeps_the_order_of_ids(queue: AnyQueue) -> None:
    ids = queue.push_many(range(10))
    assert [message.payload for id in ids if (message := queue.get(id))] == list(range(10))
    assert len(set(ids)) == 10


def test_pushes_of_threads_reach_their_queues(queue: AnyQueue, other: AnyQueue) -> None:
    """Concurrent pushes to several queues may share a command."""

    def push(thread: int) -> None:
        for number in range(8):
            target = queue if (thread + number) % 2 else other
            payload = [target.name, thread, number]
            assert target.get(target.push(payload)).payload == payload

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(push, range(4)))
    for each in (queue, other):
        assert {name for name, _, _ in all_payloads(each)} == {each.name}
        assert each.counts().total == 16


def test_push_many_of_nothing(world: World, queue: AnyQueue) -> None:
    assert queue.push_many([]) == []
    assert world.stored(queue) == []


# ---- keys


@pytest.mark.needs("keys")
class TestKeys:
    def test_key_ignore_writes_nothing(self, world: World, queue: AnyQueue) -> None:
        id = queue.push(1, key="k", headers={"a": 1})
        before = world.bytes(id)
        assert queue.push(2, key="k", delay=9) is None
        assert queue.push(2, key="k", on_duplicate="ignore", headers={"b": 2}) is None
        assert world.bytes(id) == before
        assert queue.counts().total == 1

    def test_key_error_raises_duplicate_key(self, world: World, queue: AnyQueue) -> None:
        id = queue.push(1, key="k")
        before = world.bytes(id)
        with expect_error(DuplicateKey, keys=["k"]):
            queue.push(2, key="k", on_duplicate="error")
        assert world.bytes(id) == before
        assert queue.counts().total == 1

    def test_replace_overwrites_payload_headers_and_when(self, queue: AnyQueue) -> None:
        id = queue.push({"old": 1}, key="k", headers={"a": 1})
        first = queue.get(id)
        assert (
            queue.push({"new": 2}, key="k", on_duplicate="replace", delay=60, headers={"b": 2})
            == id
        )
        message = queue.get(id)
        assert (message.payload, message.headers, message.key) == ({"new": 2}, {"b": 2}, "k")
        assert (message.state, message.pushed) == ("scheduled", first.pushed)
        assert near(message.when, 60)
        assert queue.push(None, key="k", on_duplicate="replace") == id
        message = queue.get(id)
        assert (message.payload, message.headers, message.state) == (None, {}, "ready")
        assert queue.counts().total == 1

    def test_replace_resets_tries_and_ends_the_lease(self, world: World, queue: AnyQueue) -> None:
        id = queue.push(1, key="k")
        first = queue.reserve(0)
        queue.rollback(first, delay=0, error="no")
        held = queue.reserve(0)
        assert held.tries == 2
        assert queue.push(2, key="k", on_duplicate="replace") == id
        before = world.bytes(id)
        with expect_error(LeaseLost, lost=(held,)):
            queue.commit(held)
        assert world.bytes(id) == before
        again = queue.reserve(0)
        assert (again.payload, again.tries, again.error) == (2, 1, None)

    def test_replace_of_nothing_is_a_push(self, queue: AnyQueue) -> None:
        id = queue.push(1, key="k", on_duplicate="replace", headers={"a": 1}, id="mine")
        assert id == "mine"
        message = queue.get("mine")
        assert (message.key, message.headers, message.tries) == ("k", {"a": 1}, 0)
        assert queue.push(2, on_duplicate="replace") is not None
        assert queue.counts().ready == 2

    def test_replace_keeps_the_id_of_the_live_message(self, queue: AnyQueue) -> None:
        assert queue.push(1, key="k", id="first") == "first"
        assert queue.push(2, key="k", id="second", on_duplicate="replace") == "first"
        assert queue.get("second") is None
        assert queue.push(3, key="k", id="first", on_duplicate="replace") == "first"
        assert [each.payload for each in queue.peek()] == [3]

    def test_key_belongs_to_its_queue(self, queue: AnyQueue, other: AnyQueue) -> None:
        assert queue.push(1, key="k") is not None
        assert other.push(1, key="k", on_duplicate="error") is not None

    def test_reserved_message_keeps_its_key(self, queue: AnyQueue) -> None:
        held = hold(queue, 1, key="k")
        assert held.key == "k"
        assert queue.push(2, key="k") is None
        queue.rollback(held, delay=60)
        assert queue.push(2, key="k") is None

    @pytest.mark.needs("pop")
    @pytest.mark.parametrize("way", LEAVES)
    def test_key_is_free_after_its_message_left(self, queue: AnyQueue, way: str) -> None:
        queue.push(1, key="k")
        LEAVES[way](queue)
        assert queue.push(2, key="k", on_duplicate="error") is not None

    def test_batch_ignore(self, queue: AnyQueue) -> None:
        queue.push(0, key="b")
        ids = queue.push_many([1, 2, 3, 4, 5], keys=["a", "b", None, "a", None])
        assert [id is None for id in ids] == [False, True, False, True, False]
        assert all_payloads(queue) == [0, 1, 3, 5]

    def test_batch_replace(self, queue: AnyQueue) -> None:
        live = queue.push(0, key="b", headers={"x": 1})
        ids = queue.push_many([1, 2, 3, 4], keys=["a", "b", None, "a"], on_duplicate="replace")
        assert ids[1] == live
        assert ids[0] == ids[3]
        assert len(set(ids)) == 3
        assert all_payloads(queue) == [2, 3, 4]

    def test_batch_error_writes_the_other_messages(self, queue: AnyQueue) -> None:
        queue.push(0, key="b")
        with expect_error(DuplicateKey, keys=["b", "a"]):
            queue.push_many([1, 2, 3, 4], keys=["a", "b", None, "a"], on_duplicate="error")
        assert all_payloads(queue) == [0, 1, 3]


# ---- ids


@pytest.mark.parametrize("id", ["mine", ObjectId()], ids=["str", "ObjectId"])
def test_push_with_an_id(world: World, queue: AnyQueue, id: Any) -> None:
    id = f"{queue.name}/{id}" if isinstance(id, str) else ObjectId()
    assert queue.push(1, id=id) == id
    before = world.bytes(id)
    assert queue.push(2, id=id) == id
    assert world.bytes(id) == before
    assert queue.reserve(0).id == id
    before = world.bytes(id)
    assert queue.push(3, id=id) == id
    assert world.bytes(id) == before
    assert queue.counts().total == 1


def test_push_many_of_a_stored_id_is_one_message(queue: AnyQueue) -> None:
    one, two = f"{queue.name}/1", f"{queue.name}/2"
    assert queue.push_many(["a", "b"], ids=[one, two]) == [one, two]
    again = queue.push_many(["c", "d", "e"], ids=[two, None, one])
    assert again[0] == two
    assert again[2] == one
    twice = queue.push_many(["x", "y"], ids=[f"{queue.name}/3"] * 2)
    assert twice == [f"{queue.name}/3"] * 2
    assert all_payloads(queue) in (["a", "b", "d", "x"], ["a", "b", "d", "y"])


def test_id_of_another_queues_message_is_refused(
    world: World, queue: AnyQueue, other: AnyQueue
) -> None:
    mine = f"{queue.name}/1"
    queue.push(1, id=mine)
    before = world.bytes(mine)
    with expect_error(DuplicateKey, ids=[mine]):
        other.push(2, id=mine)
    assert world.bytes(mine) == before
    with expect_error(DuplicateKey, ids=[mine]):
        other.push_many(["a", "b", "c"], ids=[None, mine, f"{queue.name}/2"])
    assert all_payloads(other) == ["a", "c"]
    assert world.bytes(mine) == before


@pytest.mark.needs("move")
def test_id_of_a_message_that_moved_on(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    mine = f"{queue.name}/1"
    held = hold(queue, 1, id=mine)
    queue.move(held, to=other)
    before = world.bytes(mine)
    assert queue.push(2, id=mine) == mine
    assert queue.push_many([2, 3], ids=[mine, None])[0] == mine
    assert world.bytes(mine) == before
    assert queue.counts().total == 1


@pytest.mark.needs("pop")
@pytest.mark.needs("history")
def test_id_of_a_finished_message(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    mine = f"{name}/1"
    queue.push(1, id=mine, key="k")
    assert queue.pop(0) is not None
    assert queue.push(2, id=mine) == mine
    assert queue.push(2, id=mine, key="k") == mine
    assert queue.push(2, id=mine, key="k", on_duplicate="error") == mine
    assert queue.push(2, id=mine, key="k", on_duplicate="replace") == mine
    assert (queue.counts().total, queue.counts().history) == (0, 1)


@pytest.mark.needs("pop")
def test_id_is_new_after_its_document_is_gone(queue: AnyQueue) -> None:
    mine = f"{queue.name}/1"
    queue.push(1, id=mine)
    assert queue.pop(0) is not None
    assert queue.push(2, id=mine) == mine
    assert queue.pop(0).payload == 2


@pytest.mark.needs("keys")
@pytest.mark.parametrize("rule", ["ignore", "replace", "error"])
def test_repeated_push_with_id_and_key_is_one_message(queue: AnyQueue, rule: Any) -> None:
    mine = f"{queue.name}/1"
    assert queue.push(1, id=mine, key="k", on_duplicate=rule) == mine
    assert queue.push(1, id=mine, key="k", on_duplicate=rule) == mine
    assert queue.push_many([1, 2], ids=[mine, None], keys=["k", None], on_duplicate=rule)[0] == mine
    assert queue.counts().ready == 2


@pytest.mark.needs("keys")
def test_taken_key_keeps_a_new_id_out(queue: AnyQueue) -> None:
    queue.push(1, key="k")
    mine = f"{queue.name}/1"
    assert queue.push(2, key="k", id=mine) is None
    with expect_error(DuplicateKey, keys=["k"]):
        queue.push(2, key="k", id=mine, on_duplicate="error")
    assert queue.get(mine) is None


@pytest.mark.needs("keys")
@pytest.mark.parametrize("rule", ["ignore", "replace", "error"])
def test_free_key_with_an_id_of_another_queue(queue: AnyQueue, other: AnyQueue, rule: Any) -> None:
    mine = f"{queue.name}/1"
    queue.push(1, id=mine)
    with expect_error(DuplicateKey, ids=[mine]):
        other.push(2, key="k", id=mine, on_duplicate=rule)
    assert other.counts().total == 0
