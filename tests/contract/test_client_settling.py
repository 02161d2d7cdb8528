"""The verbs by which a client settles: each message by the options of its queue."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import (
    UNCHANGED,
    Backoff,
    ConfigurationError,
    ConsumerCounts,
    Counts,
    DuplicateKey,
    LeaseLost,
    Limit,
    Reservation,
    StreamReservation,
)
from pyqueue.runtime.connecting import runner_of
from tests.contract.world import AnyClient, World, expect_error, hold, near, payloads, refuses
from tests.support.recorder import Recorder

Held = Reservation[Any]


class Parcel(BaseModel):
    """A model that other processes can import."""

    n: int


class Scene:
    """Two queues with other options and a consumer group, each with a message that is held."""

    def __init__(self, client: AnyClient, name: str) -> None:
        self.client = client
        self.name = name
        self.one = client.queue(name, max_tries=1, dead_letter=f"{name}-grave")
        self.other = client.queue(f"{name}-other", backoff=Backoff(base=600, jitter=0))
        self.log = client.stream(f"{name}-log")
        self.group = self.log.consumer("g", max_tries=1)
        self.log.append("c")
        first, second, third = hold(self.one, "a"), hold(self.other, "b"), self.group.reserve(0)
        assert isinstance(third, StreamReservation)
        self.held: list[Held] = [first, second, third]

    def states(self) -> list[str | None]:
        """Return the state of each message, or None if its queue does not have it."""
        found: list[str | None] = []
        for queue, held in ((self.one, self.held[0]), (self.other, self.held[1])):
            message = queue.get(held.id)
            found.append(None if message is None else message.state)
        counts = self.group.counts()
        names = ("ready", "scheduled", "reserved")
        return [*found, next((each for each in names if getattr(counts, each)), None)]


@pytest.fixture
def scene(client: AnyClient, name: str) -> Scene:
    """Return queues and a group with held messages."""
    return Scene(client, name)


def pickled(held: Held) -> Held:
    """Return a reservation as another process gets it."""
    copy: Held = pickle.loads(pickle.dumps(held))
    return copy


def from_0_1(held: Held) -> Held:
    """Return a reservation that carries nothing, as a release before this one pickled it."""
    copy = pickled(held)
    copy.carried = None
    return copy


copies = pytest.mark.parametrize("copy", [lambda held: held, pickled], ids=["same", "pickled"])
Copy = Callable[[Held], Held]


# ---- the verbs


@copies
def test_client_commits_a_mixture(scene: Scene, copy: Copy) -> None:
    held = [copy(each) for each in scene.held]
    scene.client.commit(*held, *held[:2])
    assert scene.states() == [None, None, None]
    with pytest.raises(LeaseLost) as caught:
        scene.client.commit(*held)
    assert set(caught.value.lost) == set(held)
    scene.client.commit()


@copies
def test_client_rolls_back_by_each_queue_s_options(scene: Scene, copy: Copy) -> None:
    scene.client.rollback(*map(copy, scene.held), error="no")
    assert scene.states() == [None, "scheduled", None]
    (dead,) = scene.client.queue(f"{scene.name}-grave").peek()
    assert (dead.dead["from"], dead.dead["reason"], dead.error.message) == (
        scene.name,
        "tries",
        "no",
    )
    waits = scene.other.get(scene.held[1].id)
    assert (near(waits.when, 600), waits.error.message) == (True, "no")
    assert scene.client.queue(f"{scene.name}-log.g.dead").counts().ready == 1


def test_client_rolls_back_with_a_delay(scene: Scene) -> None:
    scene.client.rollback(scene.held[1], delay=0)
    assert scene.other.reserve(0).tries == 2


@copies
def test_client_releases_a_mixture(scene: Scene, copy: Copy) -> None:
    scene.client.release(*map(copy, scene.held))
    assert scene.states() == ["ready", "ready", "ready"]
    assert [queue.reserve(0).tries for queue in (scene.one, scene.other, scene.group)] == [1, 1, 1]


@copies
def test_client_extends_a_mixture(scene: Scene, copy: Copy) -> None:
    held = [copy(each) for each in scene.held]
    scene.client.extend(*held, lease=600)
    assert [near(each.until, 600) for each in held] == [True] * 3
    assert near(scene.one.next_when(), 600)
    scene.client.commit(*held)
    with expect_error(LeaseLost, lost=(held[0],)):
        scene.client.extend(held[0])


@copies
def test_client_buries_a_mixture(scene: Scene, copy: Copy) -> None:
    scene.client.bury(*map(copy, scene.held), error="bad")
    assert scene.states() == [None, None, None]
    for name, payload in (
        (f"{scene.name}-grave", "a"),
        (f"{scene.name}-other.dead", "b"),
        (f"{scene.name}-log.g.dead", "c"),
    ):
        (dead,) = scene.client.queue(name).peek()
        assert (dead.payload, dead.dead["reason"], dead.error.message) == (payload, "buried", "bad")


@copies
@pytest.mark.parametrize("by_name", [False, True], ids=["queue", "name"])
def test_client_moves_to_one_queue(scene: Scene, copy: Copy, by_name: bool) -> None:
    target = scene.client.queue(f"{scene.name}-target", kind=None)
    to = target.name if by_name else target
    held = [copy(each) for each in scene.held[:2]]
    scene.client.move(*held, to=to, headers={"h": 1}, delay=600)
    assert scene.states()[:2] == [None, None]
    found = target.browse("scheduled").messages
    assert sorted(payloads(found)) == ["a", "b"]
    assert [(each.headers, near(each.when, 600)) for each in found] == [({"h": 1}, True)] * 2


def test_client_moves_with_a_payload_and_a_key(scene: Scene) -> None:
    held = scene.held
    target = scene.client.queue(f"{scene.name}-target")
    scene.client.move(held[0], to=target, payload="new", key="k")
    assert (target.peek()[0].payload, target.peek()[0].key) == ("new", "k")
    with expect_error(DuplicateKey, keys=["k"]):
        scene.client.move(held[1], to=target, key="k")
    scene.client.move(held[1], to=target, payload=UNCHANGED)
    assert target.counts().ready == 2


@pytest.mark.needs("history")
@copies
def test_client_commits_into_each_history(client: AnyClient, name: str, copy: Copy) -> None:
    kept, gone = client.queue(name, history=60), client.queue(f"{name}-other")
    held = [copy(hold(kept, 1)), copy(hold(gone, 2))]
    client.commit(*held, payload="done")
    assert [(each.payload, each.outcome) for each in kept.history()] == [("done", "committed")]
    assert gone.counts() == Counts()


def test_reservations_of_one_queue_keep_their_options(client: AnyClient, name: str) -> None:
    """Two objects of a queue handle its messages in other ways."""
    strict = client.queue(name, max_tries=1)
    lax = client.queue(name, backoff=Backoff(base=600, jitter=0))
    held = [hold(strict, 1), hold(lax, 2)]
    client.rollback(*held)
    assert strict.counts() == Counts(scheduled=1)
    assert payloads(client.queue(f"{name}.dead").peek()) == [1]


@pytest.mark.needs("packs")
def test_client_settles_messages_of_packs(client: AnyClient, name: str) -> None:
    packed, plain = client.queue(name), client.queue(f"{name}-plain", kind="standard")
    packed.push_many(range(6))
    held = packed.reserve_many(5, timeout=0)
    single = hold(plain, "x")
    client.commit(held[0], single, pickled(held[1]))
    client.release(held[2])
    client.bury(held[3])
    client.move(held[4], to=plain)
    assert sorted(payloads(packed.reserve_many(9, timeout=0))) == [2, 5]
    assert payloads(plain.peek()) == [4]
    assert payloads(client.queue(f"{name}.dead").peek()) == [3]


@pytest.mark.needs("ordered")
def test_client_lets_groups_continue(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.push_many(["a", "b"], groups=["g", "g"])
    held = queue.reserve(0)
    client.commit(pickled(held))
    assert queue.reserve(0).payload == "b"


@pytest.mark.needs("concurrency")
def test_client_frees_slots(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1))
    queue.push_many([1, 2])
    held = queue.reserve(0)
    assert queue.reserve(0) is None
    client.release(pickled(held))
    assert queue.reserve(0) is not None


# ---- the options that a reservation carries


def test_pickle_carries_a_model(client: AnyClient, name: str) -> None:
    """A burial from a stream stores the payload again, and so does a commit with a payload."""
    log = client.stream(name, Parcel)
    log.append(Parcel(n=1))
    held = log.consumer("g", dead_letter=f"{name}-grave").reserve(0)
    client.bury(pickled(held))
    (dead,) = client.queue(f"{name}-grave").peek()
    assert dead.payload == {"n": 1}


def test_pickle_leaves_a_local_model_out(client: AnyClient, name: str) -> None:
    class Local(BaseModel):
        n: int

    queue = client.queue(name, dict[str, Local], max_tries=None)
    queue.push({"a": Local(n=1)})
    held = queue.reserve(0)
    held.payload = None  # a Local cannot be pickled either
    copy = pickled(held)
    assert (copy.carried.options.model, copy.carried.options.max_tries) == (None, None)
    client.commit(copy)
    assert queue.counts().total == 0


def test_pickle_of_a_pickle_carries_the_same(scene: Scene) -> None:
    for held in scene.held:
        copy = pickled(held)
        assert pickled(copy).carried.options == copy.carried.options
        assert copy.carried.plans is None
    scene.client.commit(*map(pickled, map(pickled, scene.held)))
    assert scene.states() == [None, None, None]


def test_reservation_of_0_1_is_settled_by_the_record(client: AnyClient, name: str) -> None:
    queue = client.queue(name, max_tries=1, dead_letter=f"{name}-grave")
    log = client.stream(f"{name}-log")
    log.append("x")
    group = log.consumer("g", dead_letter=f"{name}-grave")
    held = [from_0_1(hold(queue)), from_0_1(group.reserve(0))]
    client.extend(*held)
    client.rollback(*held, delay=600)
    assert client.queue(f"{name}-grave").counts().ready == 1
    assert group.counts() == ConsumerCounts(scheduled=1), "the default number of tries"


@pytest.mark.needs("history")
def test_reservation_of_0_1_goes_to_the_history_of_the_record(
    world: World, client: AnyClient, name: str
) -> None:
    queue = client.queue(name, history=60)
    client.commit(from_0_1(hold(queue)))
    assert len(queue.history()) == 1
    # Options that another program has spoilt are ignored.
    world.raw().update_one({"_id": f"~queue:{name}"}, {"$set": {"options.max_tries": "x"}})
    client.commit(from_0_1(hold(queue)))
    assert len(queue.history()) == 1


# ---- errors


def test_lost_leases_of_several_queues_are_one_error(scene: Scene) -> None:
    one, other, third = scene.held
    scene.one.commit(one)
    scene.group.commit(third)
    with expect_error(LeaseLost, lost=(one, third), unknown=()):
        scene.client.commit(one, other, third)
    assert scene.states() == [None, None, None]


def test_refused_argument_settles_nothing(scene: Scene, world: World) -> None:
    """Also if only the message of the last queue refuses it."""
    client, (one, other, third) = scene.client, scene.held
    target = client.queue(f"{scene.name}-target", kind=None)
    before = world.stored(scene.one, scene.other, f"~group:{scene.log.name}")
    for error, call in (
        ("payload", lambda: client.commit(one, other, third, payload="x")),
        ("move", lambda: client.move(one, other, third, to=target)),
        ("key", lambda: client.move(one, other, to=target, key="k")),
        ("to", lambda: client.move(one, other, to=7)),
        ("to", lambda: client.move(one, other, to=scene.group)),
        ("update", lambda: client.move(one, other, to=target, update={"$bad": {}})),
        ("payload, update", lambda: client.move(one, to=target, payload=1, update={"$set": {}})),
        ("priority", lambda: client.move(one, other, to=target, priority=10)),
        ("delay", lambda: client.rollback(one, other, third, delay=-1)),
        ("error", lambda: client.rollback(one, other, third, error=7)),
        ("error", lambda: client.bury(one, other, third, error=7)),
        ("lease", lambda: client.extend(one, other, third, lease=0)),
        ("session", lambda: client.commit(one, session="x")),
        ("reservations.*unpack", lambda: client.commit([one])),
        ("reservations.*found NoneType", lambda: client.release(one, None)),
        ("reservations.*found str", lambda: client.bury(one, "x")),
    ):
        refuses(error, call)
    assert scene.states() == ["reserved", "reserved", "reserved"]
    assert world.stored(scene.one, scene.other, f"~group:{scene.log.name}") == before
    client.commit(*scene.held)


def test_burial_of_a_dead_message_buries_nothing(client: AnyClient, name: str) -> None:
    queue = client.queue(name)
    queue.bury(hold(queue, "dead"))
    dead = client.queue(f"{name}.dead").reserve(0)
    held = hold(queue, "alive")
    refuses("already in a dead-letter queue", lambda: client.bury(held, dead))
    assert queue.get(held.id).state == "reserved"
    client.commit(held, dead)


@pytest.mark.needs("packs")
def test_argument_that_packs_refuse_settles_nothing(client: AnyClient, name: str) -> None:
    packed, plain = client.queue(name), client.queue(f"{name}-plain", kind="standard")
    packed.push_many(range(2))
    held = [hold(plain), *packed.reserve_many(1, timeout=0)]
    refuses("shares a document", lambda: client.commit(*held, payload="x"))
    refuses("shares a document", lambda: client.move(*held, to=plain, update={"$set": {"a": 1}}))
    assert plain.counts() == Counts(reserved=1)
    client.commit(*held)


@pytest.mark.needs("standard")
def test_move_into_another_namespace_is_refused(world: World, scene: Scene) -> None:
    foreign = world.connect(namespace="elsewhere").queue("foreign")
    refuses(
        "in another database or namespace", lambda: scene.client.move(scene.held[0], to=foreign)
    )
    assert scene.states()[0] == "reserved"


# ---- hooks, renewal, transactions


def test_hooks_are_told_of_each_queue(world: World, name: str) -> None:
    recorder = Recorder()
    scene = Scene(world.connect(hooks=[recorder]), name)
    recorder.take()
    one, other, third = scene.held
    scene.client.extend(one, other, third)
    assert recorder.take() == []
    scene.client.rollback(one, other, third)
    log = f"{name}-log"
    told = sorted(recorder.take("settled"))
    assert told == sorted(
        [
            (name, "bury", [one.id], None, f"{name}-grave"),
            (f"{name}-other", "rollback", [other.id], None, None),
            (f"{log}~g", "bury", [third.id], None, f"{log}.g.dead"),
        ]
    )
    with pytest.raises(LeaseLost):
        scene.client.commit(one, other)
    assert sorted(recorder.take("settled")) == [
        (name, "commit", [one.id], LeaseLost, None),
        (f"{name}-other", "commit", [other.id], LeaseLost, None),
    ]
    refuses("payload", lambda: scene.client.commit(one, third, payload="x"))
    assert recorder.take() == [], "a refused call has changed nothing"


def test_settled_message_is_no_longer_renewed(scene: Scene) -> None:
    one, other, third = scene.held
    renewer = runner_of(scene.client).renewer
    with scene.one.renew(one), scene.other.renew(other), scene.group.renew(third):
        scene.client.commit(one, third)
        assert renewer.registered(scene.held) == [other]
    scene.client.commit(other)


@pytest.mark.needs("server")
def test_transaction_settles_queues_together(client: AnyClient, name: str) -> None:
    one, other = client.queue(name), client.queue(f"{name}-other")
    held = [hold(one), hold(other)]
    with pytest.raises(RuntimeError, match="no"), client.transaction() as session:  # noqa: PT012
        client.commit(*held, session=session)
        raise RuntimeError("no")
    assert [each.counts() for each in (one, other)] == [Counts(reserved=1)] * 2
    with client.transaction() as session:
        client.commit(held[0], session=session)
        client.rollback(held[1], delay=600, session=session)
    assert (one.counts(), other.counts()) == (Counts(), Counts(scheduled=1))


@pytest.mark.needs("server")
def test_transaction_needs_time_left_in_each_lease(client: AnyClient, name: str) -> None:
    one, other = client.queue(name), client.queue(f"{name}-other")
    held = [hold(one), hold(other)]
    held[1].until = held[1].reserved
    with client.transaction() as session:
        refuses("session: the lease of message", lambda: client.commit(*held, session=session))
        refuses(
            "session: transactions are refused",
            lambda: client.commit(held[0], grouped(client, name), session=session),
        )
        one.commit(held[0], session=session)  # nothing was settled
    assert one.counts() == Counts()


def grouped(client: AnyClient, name: str) -> Any:
    """Return a held message of a consumer group."""
    log = client.stream(f"{name}-log")
    log.append("x")
    return log.consumer("g").reserve(0)


def test_unknown_kind_is_refused_when_settled(client: AnyClient, name: str) -> None:
    copy = pickled(hold(client.queue(name)))
    copy.carried = type(copy.carried)(None, copy.carried.options._replace(kind="braid"))
    with pytest.raises(ConfigurationError, match="braid"):
        client.commit(copy)
