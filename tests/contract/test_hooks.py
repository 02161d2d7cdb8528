"""Hooks: which events they get for each call, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import (
    Backoff,
    ConfigurationError,
    DuplicateKey,
    Hooks,
    InvalidMessage,
    LeaseLost,
    Push,
    Reservation,
)
from tests.contract.world import AnyClient, AnyQueue, World, hold
from tests.support.recorder import Books, Recorder


class Oops(Exception):
    """Raised by a block."""


@pytest.fixture
def recorder() -> Recorder:
    """Return hooks that record what they are told."""
    return Recorder()


@pytest.fixture
def told(world: World, client: AnyClient, recorder: Recorder) -> AnyClient:
    """Return a client with these hooks."""
    return world.connect(hooks=[recorder])


def in_order(ids: list[Any]) -> list[Any]:
    return sorted(ids, key=str)


# ---- pushes


def test_pushes_are_told_before_and_after(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name)
    id = queue.push("x")
    assert recorder.take() == [("pushing", name, ["x"]), ("pushed", name, [id], None)]
    ids = queue.push_many(each for each in (1, 2))
    assert recorder.take() == [("pushing", name, [1, 2]), ("pushed", name, ids, None)]
    assert queue.push_many([]) == []
    assert recorder.take() == []


def test_hook_gives_each_message_its_headers(world: World, client: AnyClient, name: str) -> None:
    class Numbers(Hooks):
        def pushing(self, queue: str, items: Any) -> None:
            for number, each in enumerate(items):
                each.headers["n"] = number

    told = world.connect(hooks=[Numbers(), Recorder()])
    queue = told.queue(name)
    queue.push("a", headers={"mine": True})
    queue.push_many(["b", "c"], headers={"mine": True})
    queue.push_many([Push("d", headers={"mine": False}), Push("e")])
    received = queue.reserve_many(5, timeout=0)
    found = {each.payload: each.headers for each in received}
    assert found == {"a": {"mine": True, "n": 0}, "b": {"mine": True, "n": 0}} | {
        "c": {"mine": True, "n": 1},
        "d": {"mine": False, "n": 0},
        "e": {"n": 1},
    }


def test_headers_of_a_hook_are_checked(world: World, client: AnyClient, name: str) -> None:
    class Large(Recorder):
        def pushing(self, queue: str, items: Any) -> None:
            items[0].headers["large"] = "x" * 9000

    large = Large()
    queue = world.connect(hooks=[large]).queue(name)
    with pytest.raises(ConfigurationError, match="headers"):
        queue.push(1)
    assert large.take() == [("pushed", name, [], ConfigurationError)]
    assert queue.counts().total == 0


def test_failed_push_is_told_with_its_error(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name)
    for payloads in ([object()], [1, object()]):
        with pytest.raises(InvalidMessage):
            queue.push_many(payloads)
        assert recorder.take("pushed") == [(name, [], InvalidMessage)]
    with pytest.raises(ConfigurationError, match="payloads"):
        queue.push_many("text")
    assert recorder.take() == []


@pytest.mark.needs("keys")
def test_push_of_taken_keys_tells_what_was_written(
    told: Any, recorder: Recorder, name: str
) -> None:
    queue = told.queue(name)
    queue.push(0, key="k")
    assert queue.push(1, key="k") is None
    assert recorder.take("pushed")[1] == (name, [None], None)
    with pytest.raises(DuplicateKey) as caught:
        queue.push_many([1, 2, 3], keys=[None, "k", "l"], on_duplicate="error")
    assert recorder.take("pushed") == [(name, caught.value.written, DuplicateKey)]
    queue.push("far", id=f"{name}-far")
    other = told.queue(f"{name}-other")
    recorder.take()
    with pytest.raises(DuplicateKey):
        other.push_many([1, 2], ids=[None, f"{name}-far"])
    [(_, written, _)] = recorder.take("pushed")
    assert [each.id for each in other.peek()] == written
    assert {each.payload for each in queue.peek()} == {0, 1, 3, "far"}


@pytest.mark.needs("keys")
def test_push_of_a_stored_message_tells_its_id(told: Any, recorder: Recorder, name: str) -> None:
    queue, chosen = told.queue(name), f"{name}-chosen"
    first = queue.push(0, key="k")
    assert queue.push(1, key="k", on_duplicate="replace") == first
    for _ in range(2):
        queue.push(2, id=chosen)
    ids = [first, first, chosen, chosen]
    assert recorder.take("pushed") == [(name, [id], None) for id in ids]


# ---- receives


@pytest.mark.needs("pop")
def test_receives_are_told_with_their_messages(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name)
    ids = queue.push_many(range(5))
    recorder.take()
    assert queue.reserve(0) is not None
    assert queue.pop(0) is not None
    assert len(queue.reserve_many(2, timeout=0)) == 2
    assert len(queue.pop_many(2, timeout=0)) == 1
    assert queue.pop(0) is None
    assert queue.reserve_many(2, timeout=0.01) == []
    found = recorder.take("received")
    assert [(each, len(some)) for each, some in found] == [
        *((name, 1), (name, 1), (name, 2), (name, 1))
    ]
    assert in_order([id for _, some in found for id in some]) == in_order(ids)


@pytest.mark.needs("dead_letter")
@pytest.mark.parametrize("together", [False, True])
def test_burial_of_unreceived_messages_is_told(
    world: World, told: Any, recorder: Recorder, name: str, together: bool
) -> None:
    raw = world.client.queue(name)
    ids = raw.push_many(["a", "b"]) if together else [raw.push("a"), raw.push("b")]
    typed = told.queue(name, model=int)
    assert typed.reserve_many(5, timeout=0) == []
    found = recorder.take("settled")
    assert {(queue, verb, error, to) for queue, verb, _, error, to in found} == {
        (name, "bury", None, f"{name}.dead")
    }
    assert in_order([id for _, _, some, *_ in found for id in some]) == in_order(ids)


@pytest.mark.needs("dead_letter")
def test_burial_of_an_exhausted_message_is_told(
    world: World, told: Any, recorder: Recorder, name: str
) -> None:
    queue = told.queue(name, max_tries=1)
    held = hold(queue)
    world.lapse(held)
    recorder.take()
    assert queue.reserve(0) is None
    assert recorder.take() == [("settled", name, "bury", [held.id], None, f"{name}.dead")]


@pytest.mark.needs("claim")
def test_claim_is_one_call(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name, max_tries=2, backoff=Backoff(base=0))
    ids = in_order(queue.push_many([1, 2]))
    for end in ("commit", "rollback", "rollback"):
        recorder.take()
        with queue.claim("g", limit=5) as claim:
            received = recorder.take()
            getattr(claim, end)()
        settled = recorder.take()
        if end == "commit":
            assert [each[:2] for each in received] == [("received", name)]
            assert in_order(received[0][2]) == ids
            ids = in_order(queue.push_many([3, 4]))
        verb = "bury" if settled[0][-1] else end
        assert [(each[0], each[2], each[4]) for each in settled] == [("settled", verb, None)]
    assert verb == "bury"
    with queue.claim("g", limit=5) as claim:
        assert not len(claim)
    assert recorder.take() == []


@pytest.mark.needs("claim", "documents")
def test_rollback_of_a_claim_tells_what_was_lost(
    world: World, client: AnyClient, name: str
) -> None:
    told: list[Any] = []

    class Losses(Hooks):
        def settled(self, queue: str, verb: str, reservations: Any, error: Any, to: Any) -> None:
            told.append((verb, len(reservations), [each.id for each in error.lost]))

    queue = world.connect(hooks=[Losses()]).queue(name)
    ids = queue.push_many([1, 2])
    with queue.claim("g", limit=5) as claim:
        world.raw().update_one({"_id": ids[0]}, {"$set": {"token": "another's"}})
        claim.rollback()
    assert told == [("rollback", 2, ids[:1])]


# ---- settlements


@pytest.mark.needs("move", "dead_letter")
@pytest.mark.parametrize("verb", ["commit", "rollback", "release", "bury", "move", "move_many"])
def test_settlements_are_told(
    told: Any, recorder: Recorder, name: str, other: AnyQueue, verb: str
) -> None:
    queue = told.queue(name)
    queue.push_many([1, 2])
    one, two = queue.reserve_many(2, timeout=0)
    recorder.take()
    if verb == "move_many":
        queue.move_many([(one, 3), (two, 4)], to=other.name)
    else:
        options = {"move": {"to": told.queue(other.name)}}.get(verb, {})
        getattr(queue, verb)(one, two, two, **options)
    to = {"bury": f"{name}.dead", "move": other.name, "move_many": other.name}.get(verb)
    expected = ("settled", name, verb.removesuffix("_many"), [one.id, two.id], None, to)
    assert recorder.take() == [expected]


@pytest.mark.needs("dead_letter")
def test_last_rollback_is_told_as_a_burial(
    world: World, told: Any, recorder: Recorder, name: str
) -> None:
    queue = told.queue(name, max_tries=2, backoff=Backoff(base=0))
    old = hold(queue)
    queue.rollback(old)
    old = queue.reserve(5)
    new = hold(queue)
    recorder.take()
    queue.rollback(old, new, delay=0)
    assert sorted(recorder.take("settled"), key=str) == [
        (name, "bury", [old.id], None, f"{name}.dead"),
        (name, "rollback", [new.id], None, None),
    ]


@pytest.mark.needs("dead_letter")
@pytest.mark.parametrize("by", ["queue", "client"])
def test_uncounted_rollback_is_told_as_a_rollback(
    told: Any, recorder: Recorder, name: str, by: str
) -> None:
    queue = told.queue(name, max_tries=1)
    held = hold(queue)
    recorder.take()
    (queue if by == "queue" else told).rollback(held, delay=60, counted=False)
    assert recorder.take("settled") == [(name, "rollback", [held.id], None, None)]


def test_lost_lease_is_told_as_an_error(
    world: World, told: Any, recorder: Recorder, name: str
) -> None:
    queue = told.queue(name)
    held = hold(queue)
    world.lapse(held)
    again = queue.reserve(5)
    recorder.take()
    with pytest.raises(LeaseLost):
        queue.commit(held)
    queue.commit(again)
    assert recorder.take("settled") == [
        (name, "commit", [held.id], LeaseLost, None),
        (name, "commit", [held.id], None, None),
    ]


def test_refused_settlement_is_not_told(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name)
    elsewhere = hold(told.queue(f"{name}-other"))
    recorder.take()
    for given in ((), (elsewhere,), (None,)):
        with suppress(ConfigurationError):
            queue.commit(*given)
    assert recorder.take() == []


def test_reserved_block_is_told_as_its_calls(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name)
    ids = queue.push_many([1, 2])
    recorder.take()
    with queue.reserved(0) as held:
        assert isinstance(held, Reservation)
    with pytest.raises(Oops), queue.reserved(0):
        raise Oops
    told_of = [(each[0], each[2]) for each in recorder.take() if each[0] == "settled"]
    assert told_of == [("settled", "commit"), ("settled", "rollback")]
    assert held.id in ids


def test_loop_is_told_as_its_calls(told: Any, recorder: Recorder, name: str) -> None:
    queue = told.queue(name)
    ids = queue.push_many([1, 2, 3])
    recorder.take()
    seen = []

    def loop() -> None:
        with queue.each(0) as messages:
            for held in messages:
                seen.append(held.id)
                if len(seen) == 3:
                    raise Oops

    with pytest.raises(Oops):
        loop()
    assert sorted(seen) == sorted(ids)
    first, second, third = seen
    expected = {
        *(("received", name, (id,)) for id in seen),
        *(("settled", name, "commit", (id,), None, None) for id in (first, second)),
        ("settled", name, "rollback", (third,), None, None),
    }
    found = [
        tuple(tuple(x) if isinstance(x, list) else x for x in each) for each in recorder.take()
    ]
    assert len(found) == len(expected)
    assert {*found} == expected


# ---- transactions


@pytest.mark.needs("server", "keys")
def test_calls_of_a_transaction_are_told_after_its_commit(
    told: Any, recorder: Recorder, name: str
) -> None:
    queue = told.queue(name)
    held = hold(queue)
    recorder.take()
    with told.transaction() as session:
        id = queue.push(1, session=session)
        queue.commit(held, session=session)
        assert recorder.take() == [("pushing", name, [1])]
    assert recorder.take() == [
        ("pushed", name, [id], None),
        ("settled", name, "commit", [held.id], None, None),
    ]


@pytest.mark.needs("server", "keys")
def test_calls_of_an_aborted_transaction_are_not_told(
    told: Any, recorder: Recorder, name: str
) -> None:
    queue = told.queue(name)
    queue.push(0)
    recorder.take()
    with pytest.raises(Oops), told.transaction() as session:  # noqa: PT012
        queue.push(1, session=session)
        raise Oops
    told.run_transaction(lambda session: None)
    assert recorder.take() == [("pushing", name, [1])]


# ---- hooks that fail


def test_failing_hooks_are_logged_and_ignored(
    world: World, client: AnyClient, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise Oops("of the hook")

    broken = Hooks()
    for event in ("pushing", "pushed", "received", "settled"):
        setattr(broken, event, fail)
    queue = world.connect(hooks=[broken, Recorder()]).queue(name)
    with caplog.at_level(logging.WARNING, "pyqueue"):
        queue.push(1)
        queue.commit(queue.reserve(0))
    found = [each.getMessage() for each in caplog.records]
    assert found == [
        f"queue {name!r}: the hook {event!r} failed"
        for event in ("pushing", "pushed", "received", "settled")
    ]
    assert queue.counts().total == 0


# ---- the books


@pytest.mark.needs("move", "dead_letter", "pop")
def test_hooks_count_what_the_queue_counts(world: World, client: AnyClient, name: str) -> None:
    books = Books()
    told = world.connect(hooks=[books])
    queue = told.queue(name, max_tries=2, backoff=Backoff(base=0))
    other, dead = told.queue(f"{name}-other"), told.queue(f"{name}.dead")
    for n in range(6):
        queue.push(n)
    queue.push_many(range(6, 30))
    if "keys" in world.place.offers:
        queue.push_many([30, 31], keys=["k", None])
        queue.push(32, key="k")
        with pytest.raises(DuplicateKey):
            queue.push_many([33, 34], keys=["k", "l"], on_duplicate="error")
    queue.pop(0)
    queue.pop_many(3, timeout=0)
    settle: dict[str, Callable[..., object]] = {
        verb: getattr(queue, verb) for verb in ("commit", "rollback", "release", "bury")
    }
    settle["move"] = lambda *held: queue.move(*held, to=other)
    for verb, call in settle.items():
        for number in (1, 3):
            call(*queue.reserve_many(number, timeout=5))
            assert books.total(name) == queue.counts().total, verb
    held = queue.reserve(5)
    queue.commit(held)
    with pytest.raises(LeaseLost):
        queue.commit(held)
    while queue.counts().total:
        queue.rollback(*queue.reserve_many(4, timeout=5), delay=0)
    assert books.total(name) == 0
    assert books.total(other.name) == other.counts().total == 4
    assert books.total(dead.name) == dead.counts().total > 4


@pytest.mark.needs("standard")  # a stream does not depend on the kind of queues
def test_hooks_count_what_a_group_counts(world: World, client: AnyClient, name: str) -> None:
    books, recorder = Books(), Recorder()
    told = world.connect(hooks=[books, recorder])
    stream, group = told.stream(name), f"{name}~g"
    stream.append("a", headers={"mine": 1})
    stream.append_many(range(9))
    ids = [f"{name}~{position}" for position in range(10)]
    assert recorder.take("pushed") == [(name, ids[:1], None), (name, ids[1:], None)]
    assert books.total(name) == 10
    consumer = told.stream(name, model=int).consumer("g", max_tries=2, backoff=Backoff(base=0))
    held = consumer.reserve_many(20, timeout=0)
    settled, received = ("settled", group, "bury", ids[:1], None, f"{name}.g.dead"), ids[1:]
    assert sorted(recorder.take()) == [("received", group, received), settled]
    consumer.commit(*held[:2])
    consumer.rollback(*held[2:4])
    consumer.release(held[4])
    consumer.bury(held[5])
    assert consumer.counts().total == 10 + books.total(group) == 6
    with pytest.raises(LeaseLost):
        consumer.commit(*held[:3])
    while again := consumer.reserve_many(2, timeout=0):
        consumer.rollback(*again, delay=0)
    consumer.commit(*held[6:])
    assert consumer.counts().total == 10 + books.total(group) == 0
    assert books.total(f"{name}.g.dead") == told.queue(f"{name}.g.dead").counts().total == 5


@pytest.mark.needs("standard")
def test_failed_append_is_told_with_its_error(told: Any, recorder: Recorder, name: str) -> None:
    stream = told.stream(name)
    with pytest.raises(InvalidMessage):
        stream.append(object())
    assert recorder.take("pushed") == [(name, [], InvalidMessage)]
    with pytest.raises(ConfigurationError, match=r"append\(\) takes"):
        stream.append_many("text")
    assert stream.append_many([]) == []
    assert recorder.take() == []


@pytest.mark.needs("dead_letter")
def test_error_of_the_holder_is_told_with_its_messages(
    world: World, client: AnyClient, name: str
) -> None:
    told: list[Any] = []

    class Errors(Hooks):
        def settled(self, queue: str, verb: str, reservations: Any, error: Any, to: Any) -> None:
            told.append((verb, [each.error and each.error.message for each in reservations]))

    queue = world.connect(hooks=[Errors()]).queue(name, max_tries=2, backoff=Backoff(base=0))
    queue.push_many([1, 2])
    queue.rollback(*queue.reserve_many(2, timeout=0), error=ValueError("first"))
    one, two = queue.reserve_many(2, timeout=5)
    assert one.error.message == "first"
    queue.bury(one, error="second")
    queue.rollback(two, error="third")
    assert told == [
        ("rollback", ["first", "first"]),
        ("bury", ["second"]),
        ("bury", ["third"]),
    ]
    found = {each.error.message for each in world.client.queue(f"{name}.dead").peek()}
    assert found == {"second", "third"}
