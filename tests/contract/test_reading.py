"""Reads and administration: get, peek, counts, next_when, remove, purge, history, replay, queues,
stats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import (
    Client,
    ConfigurationError,
    Counts,
    Finished,
    InvalidName,
    LeaseLost,
    Limit,
    Message,
    QueueInfo,
    Reservation,
)
from tests.contract.world import AnyClient, AnyQueue, Began, World, hold, near

# ---- get, peek, counts, next_when


def test_get_in_every_state(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    ready, scheduled = queue.push("ready"), queue.push("scheduled", delay=60)
    held = queue.reserve(0)
    fresh = queue.push("fresh")
    states = {id: message.state for id in (ready, scheduled, fresh) if (message := queue.get(id))}
    assert states == {ready: "reserved", scheduled: "scheduled", fresh: "ready"}
    assert type(queue.get(ready)) is Message
    world.lapse(held)
    lapsed = queue.get(ready)
    assert (lapsed.state, lapsed.tries) == ("ready", 1)
    assert queue.get("unknown") is None
    assert other.get(ready) is None


@pytest.mark.needs("pop")
def test_get_never_returns_a_record(queue: AnyQueue) -> None:
    queue.push(1)
    assert [each.payload for each in queue.peek(100)] == [1]
    with pytest.raises(ValueError, match="id"):
        queue.get(f"~queue:{queue.name}")
    assert queue.remove("x") is False
    assert queue.purge() == 1
    assert queue.pop(0) is None


def test_peek_takes_nothing(world: World, queue: AnyQueue) -> None:
    queue.push_many(range(15))
    queue.push("later", delay=60)
    before = world.stored(queue)
    assert len(queue.peek()) == 10
    assert len(queue.peek(3)) == 3
    seen = queue.peek(limit=100)
    assert len(seen) == 15
    assert world.stored(queue) == before
    assert [each.payload for each in queue.reserve_many(15, timeout=0)] == [
        each.payload for each in seen
    ]
    assert queue.peek() == []


@pytest.mark.needs("documents")
def test_counts(world: World, queue: AnyQueue) -> None:
    assert queue.counts() == Counts()
    queue.push_many(range(6))
    queue.push_many(range(2), delay=60)
    held = queue.reserve_many(3, timeout=0)
    assert queue.counts() == Counts(ready=3, scheduled=2, reserved=3)
    assert queue.counts().total == 8
    world.lapse(held[0])
    queue.rollback(held[1], delay=60)
    queue.commit(held[2])
    assert queue.counts() == Counts(ready=4, scheduled=3, reserved=0, history=0)
    assert queue.counts().total == 7


@pytest.mark.needs("documents")
def test_counts_stop_at_a_cap(queue: AnyQueue) -> None:
    queue.push_many(range(6))
    queue.push_many(range(2), delay=60)
    queue.reserve_many(4, timeout=0)
    assert queue.counts(cap=3) == Counts(ready=2, scheduled=2, reserved=3)
    assert queue.counts(1) == Counts(ready=1, scheduled=1, reserved=1)
    for cap in (0, -1, 1.5, True, "3"):
        with pytest.raises(ConfigurationError, match="cap"):
            queue.counts(cap)


def test_next_when(queue: AnyQueue) -> None:
    assert queue.next_when() is None
    queue.push(1, delay=60)
    assert near(queue.next_when(), 60)
    queue.push(2, delay=30)
    assert near(queue.next_when(), 30)
    message = queue.get(queue.push(3))
    assert queue.next_when() == message.when
    held = queue.reserve(0, lease=10)
    assert queue.next_when() == held.until
    queue.commit(held)
    assert near(queue.next_when(), 30)


# ---- remove, purge


def test_remove(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    ready, scheduled = queue.push(1), queue.push(2, delay=60, id=f"{queue.name}/1")
    assert not other.remove(ready)
    assert queue.remove(ready)
    assert queue.remove(scheduled)
    assert not queue.remove(ready)
    assert not queue.remove("unknown")
    held = hold(queue)
    assert not queue.remove(held.id)
    world.lapse(held)
    assert queue.remove(held.id)
    assert queue.counts().total == 0


@pytest.mark.needs("documents")
def test_purge(world: World, queue: AnyQueue, other: AnyQueue) -> None:
    assert queue.purge() == 0
    queue.push_many(range(5), keys=["a", None, None, None, None])
    queue.push_many(range(3), delay=60)
    other.push("stays")
    held = queue.reserve_many(2, timeout=0)
    world.lapse(held[1])
    assert queue.purge() == 7
    assert queue.counts() == Counts(reserved=1)
    queue.commit(held[0])
    assert other.counts().ready == 1
    assert world.document(f"~queue:{queue.name}")["record"] is True


# ---- history


@pytest.mark.needs("history")
class TestHistory:
    @pytest.fixture
    def queue(self, client: AnyClient, name: str) -> AnyQueue:
        return client.queue(name, history=timedelta(days=30))

    @pytest.mark.needs("pop")
    def test_history_has_every_outcome(self, world: World, queue: AnyQueue) -> None:
        popped = queue.push("p")
        assert queue.pop(0) is not None
        batch = queue.push_many(["p1", "p2"])
        assert len(queue.pop_many(2, timeout=0)) == 2
        held = hold(queue, "c")
        queue.commit(held)
        removed = queue.push("r")
        assert queue.remove(removed)
        outcomes = {}
        for id in (popped, *batch, held.id, removed):
            message = queue.get(id)
            assert isinstance(message, Finished)
            assert message.state == "finished"
            assert near(message.processed, 0)
            assert near(message.when, 0)
            assert near(world.document(id)["expires"], 30 * 86400)
            outcomes[id] = message.outcome
        assert list(outcomes.values()) == ["popped", "popped", "popped", "committed", "removed"]
        assert queue.counts() == Counts(history=5)
        assert queue.next_when() is None
        assert not queue.remove(removed)
        assert queue.purge() == 0
        assert queue.counts().history == 5

    @pytest.mark.needs("pop")
    def test_history_is_newest_first_with_limit_and_since(self, queue: AnyQueue) -> None:
        for n in range(6):
            queue.push(n)
            assert queue.pop(0) is not None
            time.sleep(0.002)  # each finishes in a separate millisecond
        history = queue.history()
        assert [each.payload for each in history] == [5, 4, 3, 2, 1, 0]
        assert [each.payload for each in queue.history(2)] == [5, 4]
        assert [each.payload for each in queue.history(since=history[2].processed)] == [5, 4, 3]
        assert queue.history(since=datetime.now(UTC) + timedelta(hours=1)) == []
        assert len(queue.history(since=datetime(1999, 1, 1, tzinfo=UTC))) == 6

    def test_history_sorts_by_time_of_finish(self, queue: AnyQueue) -> None:
        ids = [queue.push(n, id=f"{queue.name}/{n}") for n in range(3)]
        for n in (1, 2, 0):
            assert queue.remove(ids[n])
            time.sleep(0.002)  # each finishes in a separate millisecond
        assert [each.payload for each in queue.history()] == [0, 2, 1]

    @pytest.mark.needs("pop")
    def test_finished_messages_are_not_counted_as_live(self, queue: AnyQueue) -> None:
        queue.push_many(range(20))
        assert len(queue.pop_many(20, timeout=0)) == 20
        queue.push("live")
        assert [each.payload for each in queue.peek()] == ["live"]
        assert [each.payload for each in queue.reserve_many(5, timeout=0)] == ["live"]

    def test_replay(self, queue: AnyQueue) -> None:
        id = queue.push("x", key="k", headers={"a": 1})
        held = queue.reserve(0)
        queue.commit(held)
        live = queue.push("live")
        assert queue.replay(id, live, "unknown") == 1
        message = queue.get(id)
        assert not isinstance(message, Finished)
        assert (message.state, message.tries, message.key, message.payload) == (
            "ready",
            0,
            "k",
            "x",
        )
        assert message.headers == {"a": 1}
        assert near(message.when, 0)
        assert queue.counts() == Counts(ready=2)
        assert queue.replay(id) == 0
        assert queue.replay() == 0
        assert queue.push("again", key="k") is None

    def test_replay_extends_a_trail_of_twenty_queues(self, world: World, queue: AnyQueue) -> None:
        id = queue.push("x")
        held = queue.reserve(0)
        queue.commit(held)
        trail = [{"q": f"q{n}", "at": held.pushed} for n in range(20)]
        world.raw().update_one({"_id": id}, {"$set": {"trail": trail}})
        assert queue.replay(id) == 1
        message = queue.get(id)
        assert [each["q"] for each in message.trail] == [
            *(f"q{n}" for n in range(1, 20)),
            queue.name,
        ]

    @pytest.mark.needs("pop")
    def test_replay_restores_a_key_only_if_it_is_free(self, queue: AnyQueue) -> None:
        id = queue.push("old", key="k")
        assert queue.pop(0) is not None
        queue.push("new", key="k")
        assert queue.replay(id) == 1
        assert queue.get(id).key is None
        assert queue.counts().ready == 2

    def test_history_lacks_moved_and_buried_messages(
        self, queue: AnyQueue, other: AnyQueue
    ) -> None:
        queue.move(hold(queue, 1), to=other)
        queue.bury(hold(queue, 2))
        assert queue.history() == []

    @pytest.mark.needs("pop")
    def test_finished_message_has_no_key_of_an_earlier_queue(
        self, queue: AnyQueue, other: AnyQueue
    ) -> None:
        held = hold(other, 1, key="theirs")
        other.move(held, to=queue)
        assert queue.pop(0) is not None
        assert queue.history()[0].key is None

    @pytest.mark.needs("pop")
    def test_history_option_belongs_to_the_queue_object(
        self, client: AnyClient, queue: AnyQueue
    ) -> None:
        """The option belongs to the Queue object that finishes the message."""
        plain = client.queue(queue.name)
        queue.push_many([1, 2])
        assert plain.pop(0) is not None
        assert queue.pop(0) is not None
        assert len(plain.history()) == 1


# ---- the namespace


@pytest.fixture
def apart(world: World, name: str) -> Iterator[AnyClient]:
    """Return a client of a namespace that only this test uses."""
    yield world.connect(namespace=f"ns_{name}")
    world.raw(f"ns_{name}").drop()


def brief(infos: list[QueueInfo]) -> list[tuple[str, Counts, bool, str]]:
    """Return the names, the counts, the pauses and the kinds of queues."""
    return [(each.name, each.counts, each.paused, each.kind) for each in infos]


def test_queues(world: World, apart: AnyClient) -> None:
    assert apart.queues() == []
    apart.queue("b").push_many([1, 2])
    apart.queue("a").pause()
    buried = apart.queue("b").reserve(0)
    apart.queue("b").bury(buried)
    held = apart.queue("b").reserve(0)
    assert isinstance(held, Reservation)
    apart.queue("never-used")
    kind = world.place.kind.name
    assert brief(apart.queues()) == [
        ("a", Counts(), True, kind),
        ("b", Counts(reserved=1), False, kind),
        ("b.dead", Counts(ready=1), False, "standard"),
    ]


def test_queues_without_a_record_are_listed(world: World, apart: AnyClient, name: str) -> None:
    id = apart.queue("a").push(1)
    world.raw(f"ns_{name}").delete_one({"_id": "~queue:a"})
    [info] = apart.queues()
    oldest = apart.queue("a").get(id).when
    assert info == QueueInfo("a", Counts(ready=1), False, dead=0, oldest=oldest)


@pytest.mark.needs("documents")
def test_queues_stop_counting_at_a_cap(world: World, apart: AnyClient) -> None:
    queue = apart.queue("a")
    queue.push_many(range(6))
    queue.push(1, delay=60)
    queue.reserve_many(2, timeout=0)
    apart.queue("b").pause()
    kind = world.place.kind.name
    assert brief(apart.queues(cap=3)) == [
        ("a", Counts(ready=3, scheduled=1, reserved=2), False, kind),
        ("b", Counts(), True, kind),
    ]
    assert apart.queues(cap=1)[0].counts == Counts(ready=1, scheduled=1, reserved=1)
    assert apart.queues(held=False)[0].counts == Counts(ready=4, scheduled=3)
    assert apart.queues(cap=2, held=False)[0].counts == Counts(ready=2, scheduled=2)
    with pytest.raises(ConfigurationError, match="cap"):
        apart.queues(cap=0)


@pytest.mark.needs("dead_letter")
def test_queues_tell_of_their_dead_letters(apart: AnyClient) -> None:
    for name, options in {
        "own": {},
        "named": {"dead_letter": "lost"},
        "one": {"dead_letter": "shared"},
        "two": {"dead_letter": "shared"},
        "none": {},
    }.items():
        queue = apart.queue(name, **options)
        queue.push_many([1, 2, 3])
        if name != "none":
            queue.bury(*queue.reserve_many(3, timeout=0))
    apart.queue("lost").push("scheduled", delay=60)
    dead = {each.name: each.dead for each in apart.queues()}
    assert dead == {
        "own": 3,
        "own.dead": None,
        "named": 4,
        "lost": None,
        "none": 0,
        "one": None,
        "two": None,
        "shared": None,
    }
    assert {each.name: each.dead for each in apart.queues(cap=2)} == {
        name: number and min(number, 2) for name, number in dead.items()
    }


def test_queues_tell_since_when_the_oldest_waits(world: World, apart: AnyClient) -> None:
    def oldest() -> Any:
        [info] = apart.queues()
        return info.oldest

    queue = apart.queue("a")
    queue.pause()
    queue.resume()
    assert oldest() is None
    queue.push("later", delay=60)
    assert oldest() is None
    ids = [queue.push("first"), queue.push("second")]
    waiting = [queue.get(each).when for each in ids]
    assert oldest() == min(waiting)
    held = queue.reserve_many(2, timeout=0)
    assert oldest() is None
    queue.release(*held)
    assert oldest() is not None
    assert near(oldest(), 0)
    held = queue.reserve_many(2, timeout=0)
    queue.rollback(*held, delay=60)
    assert oldest() is None


@pytest.mark.needs("ordered")
def test_oldest_message_may_wait_for_its_group(apart: AnyClient) -> None:
    queue = apart.queue("a")
    queue.push_many(["x", "y"], groups=["g", "h"], delay=60)
    ids = queue.push_many(["one", "two", "three"], groups=["g", "g", "h"])
    held = queue.reserve_many(3, timeout=0)
    assert queue.reserve(0) is None
    waits = queue.get(ids[1])
    assert waits.deferred == "group"
    [info] = apart.queues()
    assert (info.oldest, info.counts.ready) == (waits.when, 0)
    queue.commit(*held)
    assert [each.payload for each in queue.reserve_many(3, timeout=0)] == ["two"]
    assert apart.queues()[0].oldest is None


@pytest.mark.needs("ordered")
def test_oldest_message_may_wait_behind_a_retry(apart: AnyClient) -> None:
    queue = apart.queue("a")
    ids = queue.push_many(["one", "two", "three"], groups=["g", "g", "g"])
    queue.push("later", group="h", delay=60)
    queue.rollback(queue.reserve(0), delay=3600)
    assert queue.reserve(0) is None
    waits = queue.get(ids[1])
    assert waits.deferred == "group"
    for cap in (None, 2):
        [info] = apart.queues(cap=cap)
        assert (info.oldest, info.counts.ready) == (waits.when, 0)


@pytest.mark.needs("per")
def test_oldest_message_may_wait_for_its_limit(apart: AnyClient) -> None:
    queue = apart.queue("a", limit=Limit(concurrency=1, per="headers.tenant"))
    ids = [queue.push(number, headers={"tenant": "t"}) for number in range(3)]
    assert queue.reserve(0) is not None
    assert queue.reserve(0) is None
    [info] = apart.queues()
    waits = [queue.get(each) for each in ids]
    assert info.oldest == min(each.when for each in waits if each.state == "scheduled")


def test_queues_tell_of_their_options(world: World, apart: AnyClient) -> None:
    apart.queue("a", lease=30, max_tries=3).push(1)
    apart.queue("b").push(1)
    apart.stream("log").append(1)
    shape = dict(world.place.kind.shape)
    usual = {"max_tries": 20, "lease": 60, "history": None}
    assert {each.name: each.options for each in apart.queues()} == {
        "a": {"lease": 30, "max_tries": 3, "history": None, "dead_letter": "a.dead", **shape},
        "b": {**usual, "dead_letter": "b.dead", **shape},
        "log": {"retention": 7 * 86400},
    }
    apart.queue("c", limit=Limit(rate=5)).push(1)
    [info] = [each for each in apart.queues() if each.name == "c"]
    assert "limit" not in info.options
    assert info.limit == Limit(rate=5)
    assert hash(info) == hash(replace(info, options={}))


@pytest.mark.differs_by("client")
def test_queues_of_any_number_and_kind_take_few_commands(world: World, apart: AnyClient) -> None:
    """Of each kind there is one queue, then two, then three, with messages in each state."""
    for number in range(3):
        for kind in ("standard", "ordered", "priority", "bucket"):
            queue = apart.queue(f"{kind}{number}", kind=kind)
            queue.push_many(range(5))
            queue.push("later", delay=60)
            assert queue.reserve(0) is not None
        apart.stream(f"log{number}").append_many(range(4))
        apart.stream(f"none{number}").consumer("g").pause()
        before = apart.stats["commands"]
        infos = apart.queues()
        # The names, the records, one for the streams, five for the queues.
        assert apart.stats["commands"] - before == 8
    counts = {
        "standard": Counts(ready=4, scheduled=1, reserved=1),
        "ordered": Counts(ready=4, scheduled=1, reserved=1),
        "priority": Counts(ready=4, scheduled=1, reserved=1),
        "bucket": Counts(scheduled=1, reserved=5),
        "log": Counts(ready=4),
        "none": Counts(),
    }
    assert {each.name: each.counts for each in infos} == {
        f"{name}{number}": count for name, count in counts.items() for number in range(3)
    }


def test_more_queues_than_one_command_counts(
    world: World, apart: AnyClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts then take four commands for each portion of queues, and one more for packs."""
    monkeypatch.setattr("pyqueue.backends.all_queues._QUEUES_PER_COMMAND", 5)
    raw = world.raw(f"ns_{name}")
    apart.queue("q000").push(1)
    raw.insert_many({"q": f"q{n:03}", "when": Began.at, "n": n} for n in range(1, 12))
    before = apart.stats["commands"]
    infos = apart.queues()
    packs = "packs" in world.place.kind.capabilities
    assert apart.stats["commands"] - before == 2 + 3 * 4 + packs
    assert [each.name for each in infos] == [f"q{n:03}" for n in range(12)]
    assert {each.counts for each in infos} == {Counts(ready=1)}
    raw.drop()


# ---- delete_queue


@pytest.mark.parametrize("state", ["ready", "scheduled", "reserved"])
def test_delete_is_refused_for_live_messages(
    world: World, client: AnyClient, queue: AnyQueue, state: str
) -> None:
    queue.push(1, delay=60 if state == "scheduled" else None)
    if state == "reserved":
        assert queue.reserve(0) is not None
    before = world.stored(queue)
    with pytest.raises(ConfigurationError, match=rf"1 {state}.*pass force=True"):
        client.delete_queue(queue.name)
    assert world.stored(queue) == before


def test_delete_of_an_empty_queue_lasts(
    world: World, client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    """The record stays for an hour with its kind, and the server then removes it."""
    queue.push(1)
    queue.pause()
    assert queue.purge() == 1
    kind = world.document(f"~queue:{queue.name}")["kind"]
    other.push("stays")
    assert client.delete_queue(queue.name) == 0
    assert queue.name not in [each.name for each in client.queues()]
    record = world.document(f"~queue:{queue.name}")
    version = 2 if world.place.kind.shape else 1
    assert (record["kind"], record["v"]) == (kind, version)
    assert near(record["expires"], 3600)
    assert near(record["processed"], 0)
    assert not queue.paused()
    assert client.delete_queue(queue.name) == 0
    assert other.counts().ready == 1
    with pytest.raises(ValueError, match="name"):
        client.delete_queue("no name")


@pytest.mark.needs("pop")
@pytest.mark.parametrize("pause", [True, False], ids=["pause", "push"])
def test_deleted_queue_is_made_again(
    world: World, client: AnyClient, queue: AnyQueue, pause: bool
) -> None:
    queue.push(1)
    assert queue.pop(0) is not None
    client.delete_queue(queue.name)
    queue.pause() if pause else queue.push(2)
    counts = Counts(ready=0 if pause else 1)
    assert (queue.name, counts, pause, world.place.kind.name) in brief(client.queues())
    assert not {"expires", "processed", "deleted"} & set(world.document(f"~queue:{queue.name}"))
    assert pause or queue.pop(0).payload == 2


def test_delete_with_force_takes_everything(
    world: World, client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many(range(world.many))
    queue.push(1, delay=60)
    held = queue.reserve(0)
    other.push("stays")
    if world.place.server:  # a foreign document
        world.raw().insert_one({"q": queue.name, "when": "never", "_id": f"{queue.name}/odd"})
    odd = int(world.place.server)
    assert client.delete_queue(queue.name, force=True) == world.many + 1 + odd
    assert world.stored(queue) == []
    with pytest.raises(LeaseLost):
        queue.commit(held)
    assert other.counts().ready == 1
    assert queue.name not in [each.name for each in client.queues()]


@pytest.mark.needs("history")
def test_delete_takes_the_history(world: World, client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=3600)
    queue.push_many(range(3))
    queue.commit(*queue.reserve_many(3, timeout=0))
    assert client.delete_queue(name) == 3
    assert world.stored(queue) == []


@pytest.mark.needs("pop")
def test_namespaces_do_not_see_each_other(world: World, queue: AnyQueue) -> None:
    elsewhere = world.connect(namespace=f"ns_{queue.name}").queue(queue.name)
    queue.push("here", key="k", id=f"{queue.name}/1")
    assert elsewhere.pop(0) is None
    assert elsewhere.push("there", key="k", id=f"{queue.name}/1") is not None
    assert queue.pop(0).payload == "here"
    world.raw(f"ns_{queue.name}").drop()


def test_stats_count_commands_and_signals(world: World, name: str) -> None:
    client = world.connect()
    assert dict(client.stats).get("commands", 0) == 0
    queue = client.queue(name)
    queue.push(1)
    before = client.stats["commands"]
    signals = client.stats["signals"]
    queue.push(2)
    assert client.stats["commands"] == before + 1
    assert client.stats["signals"] == signals + 1
    assert world.client.stats is not client.stats


def test_queue_names_that_are_allowed(world: World, name: str) -> None:
    for each in ("a", "A-z_0.9:b>c", "x" * 110, "x" * 110 + ".dead", f"{name}.dead"):
        assert world.client.queue(each).name == each


@pytest.mark.needs("pop")
def test_dropped_collection_is_created_again(world: World, apart: AnyClient, name: str) -> None:
    queue = apart.queue("a")
    queue.push(1, key="k")
    if world.place.server:  # mongomock does not notice a missing index
        world.raw(f"ns_{name}").drop()
        queue.push(2, key="k")
        # The first scan notices the missing index.
        assert [each.payload for each in queue.pop_many(5, timeout=0)] == [2]
        assert {"hot", "key", "expires"} <= set(world.raw(f"ns_{name}").index_information())
        queue.push(3, key="k")
        assert queue.push(4, key="k") is None
        assert world.raw(f"ns_{name}").find_one({"_id": "~queue:a"}) is not None
    else:
        assert queue.pop(0) is not None


# ---- collections beside the queues


def test_collection_reads_and_writes_as_queues_do(blocking_client: Client) -> None:
    notes, now = blocking_client.collection("notes"), datetime(2026, 1, 1, tzinfo=UTC)
    notes.insert_one({"_id": 1, "at": now})
    assert list(notes.find({})) == [{"_id": 1, "at": now}]
    assert blocking_client.database["pyqueue.notes"].count_documents({}) == 1
    assert blocking_client.queues() == []
    notes.delete_many({})


def test_collection_of_any_client_has_the_namespace_in_its_name(client: AnyClient) -> None:
    assert client.collection("notes.of-mine").name == "pyqueue.notes.of-mine"
    for suffix in ("", "a b", "a..b", "$a", "x" * 93, 5, None):
        with pytest.raises(InvalidName, match="suffix"):
            client.collection(suffix)
