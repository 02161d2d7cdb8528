"""Moves of packed messages between buckets: whole packs, parts, and parts of parts.

``test_faults`` disturbs them at each command.
Whatever happens, each message is in one queue, or is finished, and it keeps its id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import islice, product
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import DuplicateKey, LeaseLost
from pyqueue.backends.bucket import packs
from pyqueue.backends.moving import moves
from pyqueue.backends.options import NewMessage, Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.errors import NotPermitted
from pyqueue.messages import UNCHANGED
from pyqueue.requests import Document, Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import Faults, Settler, check_ends, some_or_all
from tests.plans.steps import Steps

MESSAGES = 20
MOST_COMMANDS = 150


def plans(queue: str) -> QueuePlans:
    """Return the plans of a bucket with packs of 5 messages."""
    options = Options(shape={"pack": 5}, max_tries=None, dead_letter="dead")
    return plans_of(queue, options, kind="bucket", owner="me")


class Mover(Settler):
    """A process that takes messages from "a" to "c", some of them to "d", and finishes some."""

    def __init__(self) -> None:
        super().__init__()
        self.plans = {name: plans(name) for name in "acd"}
        self.waiting = {name: Waiters(name) for name in "acd"}
        self.committed: set[int] = set()

    def number(self, held: Any) -> int:
        number: int = held.payload["n"]
        return number

    def receive(self, queue: str, limit: int) -> Plan[list[Any]]:
        return self.plans[queue].receive(self.waiting[queue], limit, timeout=0)

    def move(
        self, queue: str, held: list[Any], to: str, hops: int | None = None, **options: Any
    ) -> Plan[None]:
        """Move messages. With ``hops``, they get a new payload."""
        pairs = [
            (each, UNCHANGED if hops is None else each.payload | {"hops": hops}) for each in held
        ]
        with suppress(LeaseLost):
            yield from self.plans[queue].move(pairs, to=self.plans[to], **options)

    def commit(self, queue: str, held: list[Any]) -> Plan[None]:
        return self.settle(self.plans[queue].commit(held), held, self.committed)

    def work(self) -> Plan[None]:
        held = yield from self.receive("a", 5)
        yield from self.move("a", held, "c")
        held = yield from self.receive("a", 8)
        yield from self.move("a", held, "c", hops=1)  # a pack, and a part of the next one
        held = yield from self.receive("a", 2)
        yield from self.commit("a", held[:1])
        yield from self.move("a", held[1:], "c", headers={"h": 1})
        held = yield from self.receive("c", 7)
        yield from self.move("c", held[1:4], "d", hops=2)
        yield from self.commit("c", held[:1])
        yield from self.move("c", held[4:], "a")
        held = yield from self.receive("d", 5)
        yield from self.commit("d", held[:1])
        yield from self.move("d", held[1:], "c", headers={"h": 2})


@cache
def stored() -> list[Document]:
    """Return the documents of a bucket of four packs, and the records of two more."""
    steps = Steps()
    steps.run(plans("a").push([{"n": number} for number in range(MESSAGES)]))
    for name in "cd":
        steps.run(plans(name).push([{"n": 0}]))
        steps.run(plans(name).purge())
    return steps.all()


@cache
def ids() -> dict[int, str]:
    """Return the ids of the messages by their numbers, as they were pushed."""
    found = [each for each in stored() if packs.is_pack(each)]
    return {
        entry["p"]["n"]: packs.message_id(each, place)
        for each in found
        for place, entry in enumerate(each["b"])
    }


def holding(number: int) -> tuple[Steps, Mover, list[Any]]:
    """Return a store, and a process with the messages of "a" that it holds."""
    steps, mover = Steps(stored()), Mover()
    return steps, mover, steps.run(mover.receive("a", number))


def check(steps: Steps) -> None:
    """Check the invariant: ``n`` is the number of clear bits."""
    for pack in steps.collection.find({"b": {"$exists": True}}):
        assert pack["n"] == packs.alive_of(pack).bit_count()


def drain(steps: Steps, queues: Sequence[QueuePlans]) -> list[Any]:
    """Consume the rest, as consumers that begin after all leases have ended."""
    steps.seconds += 1000
    waiting = [Waiters(each.queue) for each in queues]
    steps.listeners += waiting
    delivered: list[Any] = []
    for _ in range(3):  # handed-over messages appear after a while
        for queue, waiters in zip(queues, waiting, strict=True):
            while held := steps.run(queue.receive(waiters, 100, timeout=0)):
                delivered += held
                steps.run(queue.commit(held))
        steps.seconds += 30
    left = {"q": {"$in": [each.queue for each in queues]}, "record": {"$exists": False}}
    assert list(steps.collection.find(left)) == []
    return delivered


def audit(steps: Steps, *movers: Mover) -> None:
    """Check where each message is."""
    check(steps)
    known = [number for each in movers for number in each.committed]
    delivered = drain(steps, [plans(each) for each in "acd"])
    check_ends([each.payload["n"] for each in delivered], known, movers, MESSAGES)
    assert {each.payload["n"]: each.id for each in delivered}.items() <= ids().items()


FAULTS = Faults(stored, Mover, audit, MOST_COMMANDS, check, stride=61)


def commands(steps: Steps) -> list[str]:
    """Return the commands of the last plan, without reads of records."""
    every = [each for each in steps.commands if "~queue" not in str(getattr(each, "filter", ""))]
    return [type(each).__name__ for each in every]


def documents(steps: Steps, queue: str) -> list[Document]:
    """Return the messages and packs of a queue."""
    return [each for each in steps.all() if each.get("q") == queue and "record" not in each]


def test_moves_without_faults() -> None:
    steps, mover = Steps(stored()), Mover()
    steps.run(mover.work())
    assert len(mover.committed) == 3
    audit(steps, mover)


# ---- documents stored by a move


def test_whole_pack_moves_by_one_update() -> None:
    steps, mover, held = holding(5)
    steps.run(mover.move("a", held, "c", hops=1, delay=30, headers={"h": 1}))
    assert commands(steps) == ["Update"]
    (pack,) = documents(steps, "c")
    assert (pack["_id"], pack["n"], pack["tries"]) == (held[0].pack, 5, 0)
    assert [stop["q"] for stop in pack["trail"]] == ["a"]
    assert not {"token", "owner", "orderly", "level", "last_key"} & set(pack)
    assert steps.run(mover.receive("c", 9)) == []
    steps.seconds += 30
    again = steps.run(mover.receive("c", 9))
    assert [each.id for each in again] == [each.id for each in held]
    assert [each.payload for each in again] == [{"n": number, "hops": 1} for number in range(5)]
    assert {(each.tries, each.headers["h"]) for each in again} == {(1, 1)}


def test_messages_that_leave_a_pack_together_share_one() -> None:
    """Parts of parts, too. Each message is found by its id wherever it is."""
    steps, mover, held = holding(5)
    steps.run(mover.move("a", held[1:5], "c", hops=1))
    (part,) = documents(steps, "c")
    assert (part["at"], part["n"]) == ([1, 2, 3, 4], 4)
    again = steps.run(mover.receive("c", 4))
    steps.run(mover.move("c", again[1:3], "d"))
    (part,) = documents(steps, "d")
    assert part["at"] == [2, 3]
    for queue, number in (("a", 0), ("c", 1), ("d", 2), ("d", 3), ("c", 4)):
        found = steps.run(plans(queue).get(ids()[number]))
        assert found is not None
        assert (found.id, found.payload["n"]) == (ids()[number], number)
    assert steps.run(plans("a").get(ids()[3])) is None
    assert steps.run(plans("d").remove(ids()[3]))
    assert not steps.run(plans("d").remove(ids()[3]))
    assert [each.id for each in steps.run(mover.receive("d", 9))] == [ids()[2]]


@pytest.mark.parametrize("to", ["c", "standard", "dead"])
def test_messages_that_leave_a_pack_keep_their_order(
    to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they need several packs, or come back from the dead-letter queue."""
    steps, mover = Steps(), Mover()
    wide = mover.plans["a"] = plans_of(
        "a", Options(shape={"pack": 99}, max_tries=None, dead_letter="dead"), kind="bucket"
    )
    numbers = list(range(15))
    steps.run(wide.push([{"n": number} for number in numbers]))
    held = steps.run(mover.receive("a", 15))
    monkeypatch.setattr(packs, "MAX_PACK_BYTES", 130)
    if to == "dead":
        steps.run(wide.bury(held[:14]))
        steps.run(plans_of("dead", Options(dead_letter="x")).redrive())
        steps.run(wide.rollback(held[14:], delay=1))
        steps.seconds += 2
        queue = wide
    else:
        queue = plans("c") if to == "c" else plans_of("d", Options(dead_letter="dead"))
        steps.run(wide.move([(each, UNCHANGED) for each in held], to=queue, headers={"h": 1}))
    found = steps.run(queue.receive(Waiters(queue.queue), 99, timeout=0))
    assert [each.payload["n"] for each in found] == numbers
    assert [each.id for each in found] == [each.id for each in held]


@some_or_all
def test_two_moves_of_the_same_messages_lose_none(some: bool) -> None:
    """The decision of a call that timed out arrives late, while the caller moves fewer of them."""
    stops: Any = ((4, 6), (4, 7, 9)) if some else (range(4, 7), range(4, 10))
    for at, then in product(*stops):
        steps, mover, held = holding(4)
        first = steps.steps(mover.move("a", held, "c"))
        second = steps.steps(mover.move("a", held[:2], "d"))
        for part in (islice(first, at), islice(second, then), first, second):
            deque(part)
        audit(steps)


#: Where two calls move the same messages.
TARGETS = {
    "buckets": (plans("c"), plans("d")),
    "queues": tuple(plans_of(each, Options(dead_letter="dead")) for each in "ef"),
    "one bucket": (plans("c"), plans("c")),
}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(((4, 5, 6), (5, 7, 8, 10), (2, 20)), id="some"),
        pytest.param((range(14), range(14), range(14)), id="all", marks=pytest.mark.slow),
    ],
)
def test_of_two_moves_of_the_same_messages_one_is_done(stops: Any, to: str) -> None:
    """They are where and as this call moved them, and the other call learns that it lost them."""

    def move(held: list[Any], number: int, done: list[Any]) -> Plan[None]:
        target = TARGETS[to][number]
        with suppress(LeaseLost):
            yield from plans("a").move([(each, number) for each in held], to=target)
            done.append((target.queue, number))

    for first_at, second_at, first_again in product(*stops):
        steps, done = Steps(stored()), list[Any]()
        held = steps.run(Mover().receive("a", 4))[:2]
        one, two = (steps.steps(move(held, number, done)) for number in (0, 1))
        for some in (islice(one, first_at), islice(two, second_at), islice(one, first_again), two):
            deque(some)
        deque(one)
        found = [each for queue in "cdef" for each in documents(steps, queue)]
        payloads = [(each["q"], one) for each in found for one in payloads_of(each)]
        assert payloads == done * 2


def payloads_of(document: Document) -> list[Any]:
    """Return the payloads of a message or of a pack."""
    return [each["p"] for each in document["b"]] if "b" in document else [document["payload"]]


def test_message_that_leaves_alone_is_an_ordinary_one() -> None:
    steps, mover, held = holding(5)
    steps.run(mover.move("a", held[2:3], "c"))
    (alone,) = documents(steps, "c")
    assert (alone["_id"], alone["payload"]) == (held[2].id, {"n": 2})


@pytest.mark.parametrize(
    ("share", "sizes"), [(2, [1, 2, 2]), (1, [1] * 5)], ids=["10 MB in all", "20 MB in all"]
)
def test_pack_that_grew_too_large_moves_in_parts(share: int, sizes: list[int]) -> None:
    """A pack keeps below 4 MB, also if its messages get new payloads."""
    steps, mover, held = holding(5)
    big = "x" * (packs.MAX_PACK_BYTES // share - 1000)
    pairs = [(each, each.payload | {"big": big}) for each in held]
    steps.run(mover.plans["a"].move(pairs, to=mover.plans["c"]))
    assert sorted(len(each.get("b", [1])) for each in documents(steps, "c")) == sizes
    found = steps.run(mover.receive("c", 5))
    assert sorted(each.id for each in found) == [ids()[number] for number in range(5)]


def test_bulk_move_reports_what_a_message_may_cause() -> None:
    """A key that is taken is the fault of a message. A missing permission is not."""
    steps, mover, held = holding(5)
    source, target = mover.plans["a"].terms, mover.plans["c"].target
    steps.run(mover.plans["c"].push([{"n": 0}], keys=["k"]))
    rows = [(held[0], NewMessage(None, UNCHANGED, key="k"))]
    rows += [(each, NewMessage(None, UNCHANGED)) for each in held[1:]]
    (plan,) = moves(source, target, rows)
    (taken, error), *rest = steps.run(plan)
    assert (taken, type(error)) == (held[0], DuplicateKey)
    assert rest == [(each, "done") for each in held[1:]]

    def refused(number: int, done: bool) -> None:
        if number == 1:
            raise NotPermitted("not authorized")

    again = steps.run(mover.receive("a", 1))
    (plan,) = moves(source, target, [(again[0], NewMessage(None, UNCHANGED))])
    with pytest.raises(NotPermitted):
        steps.run(plan, refused)


def test_push_is_not_repeated_after_its_messages_moved_on() -> None:
    """Not even when the pack is gone, as long as a part of it is stored."""
    steps, mover, held = holding(5)
    steps.run(mover.move("a", held[:3], "c"))
    steps.run(mover.commit("a", held[3:]))
    known = [each.id for each in held[:3]]
    before = len(documents(steps, "a"))
    for wanted in (known, known[1:2]):
        assert steps.run(plans("a").push([1] * len(wanted), ids=wanted)) == wanted
    assert len(documents(steps, "a")) == before
    with pytest.raises(DuplicateKey) as caught:
        steps.run(plans("d").push([1] * 3, ids=known))
    assert caught.value.ids == known


def test_invalid_part_is_no_pack() -> None:
    """A document of another program goes to the dead-letter queue."""
    steps, mover = Steps(stored()), Mover()
    good = next(each for each in stored() if packs.is_pack(each))
    wrong: list[Document] = [{"at": [1]}, {"at": "01234"}, {"at": 5}]
    for each in wrong:
        steps.collection.insert_one({**good, "_id": ObjectId(), "q": "d", **each})
    assert steps.run(mover.receive("d", 9)) == []
    assert len(documents(steps, "dead")) == len(wrong)
