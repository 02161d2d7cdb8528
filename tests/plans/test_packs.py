"""Packs: their claims, settlements and pushes. ``test_faults`` disturbs them at each command.

Whatever happens, each message is finished once, or is delivered again, or is in another queue;
never in two of these places, and never in none.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cache
from itertools import combinations, islice
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import ConfigurationError, DuplicateKey, LeaseLost, QueueError, Unavailable
from pyqueue.backends import all_queues, inserting, namespace, recovering
from pyqueue.backends.bucket import packs
from pyqueue.backends.options import Options
from pyqueue.backends.outputs import Output
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.settling import fan_out
from pyqueue.errors import TimeLimitReached
from pyqueue.messages import UNCHANGED, Backoff
from pyqueue.payloads import Codec
from pyqueue.requests import Coalesce, FindAndModify, Insert, Plan, ServerTime, Update, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import Faults, Settler, each_command
from tests.plans.runner import NOW
from tests.plans.steps import FAULT_AT, WRITES, Cut, Steps, lost_reply, lost_request, resume, shared

MESSAGES = 19
MOST_COMMANDS = 250


def plans(codec: Codec[Any] | None = None, **options: Any) -> QueuePlans:
    """Return the plans of the queue under test, with packs of 5 messages."""
    given = {"max_tries": 5, "dead_letter": "a.dead", "backoff": Backoff(jitter=0), **options}
    return plans_of("a", Options(shape={"pack": 5}, **given), codec, kind="bucket", owner="me")


def pushed_late(steps: Steps, plan: Plan[Any]) -> tuple[Insert, list[Any]]:
    """Begin a push whose insert does not arrive yet. Return the insert, and the unknown ids."""
    running = steps.steps(plan)
    for request in running:
        if isinstance(request, Insert):
            with pytest.raises(Unavailable) as caught:
                running.throw(Unavailable("no answer"))
            return request, list(caught.value.ids)
    raise AssertionError("there was no insert")


class Consumer(Settler):
    """A consuming process, and its knowledge of the ends of its messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.plans = plans(**options)
        self.waiting = Waiters("a")
        self.committed: set[int] = set()
        self.buried: set[int] = set()
        self.moved: set[int] = set()

    def receive(self, limit: int, **options: Any) -> Plan[list[Any]]:
        return self.plans.receive(self.waiting, limit, timeout=0, **options)

    def work(self) -> Plan[None]:
        """Receive several times, and end each message in another way."""
        for limit in (6, 7, 1):
            held = yield from self.receive(limit)
            yield from self.settle(self.plans.commit(held[:2]), held[:2], self.committed)
            yield from self.settle(self.plans.rollback(held[2:3], delay=0), held[2:3])
            yield from self.settle(self.plans.bury(held[3:4]), held[3:4], self.buried)
            move = self.plans.move([(each, each.payload) for each in held[4:5]], to="b")
            yield from self.settle(move, held[4:5], self.moved)
            yield from self.settle(self.plans.release(held[5:6]), held[5:6])
            yield from self.settle(self.plans.commit(held[6:]), held[6:], self.committed)
        held = yield from self.receive(5)
        yield from self.settle(self.plans.rollback(held, delay=0), held)


@cache
def stored() -> list[Any]:
    """Return the documents of a queue of packs of 5 messages, and one ordinary message."""
    steps = Steps()
    steps.run(plans().push(list(range(MESSAGES - 1))))
    steps.run(plans().push([MESSAGES - 1], keys=["key"]))
    for name in ("a.dead", "b"):
        steps.run(namespace.target(name))  # makes its record
    return steps.all()


def holding(number: int, **options: Any) -> tuple[Steps, Consumer, list[Any]]:
    """Return a store, and a process with the messages that it holds."""
    steps, consumer = Steps(stored()), Consumer(**options)
    return steps, consumer, steps.run(consumer.receive(number))


def drain(steps: Steps) -> list[int]:
    """Consume the rest, as a process that begins after all leases have ended."""
    steps.seconds += 1000
    last = Consumer(max_tries=None)
    steps.listeners.append(last.waiting)
    delivered: list[int] = []
    for _ in range(3):  # handed-over messages appear after a while
        while held := steps.run(last.receive(100)):
            delivered += [each.payload for each in held]
            steps.run(last.plans.commit(held))
        steps.seconds += 30
    assert list(steps.collection.find({"q": "a", "record": {"$exists": False}})) == []
    return delivered


def check(steps: Steps) -> None:
    """Check the invariant: ``n`` is the number of clear bits."""
    for pack in steps.collection.find({"n": {"$exists": True}}):
        assert pack["n"] == packs.alive_of(pack).bit_count()


def numbers_in(steps: Steps, queue: str) -> list[int]:
    """Return the payloads of a queue."""
    found = steps.collection.find({"q": queue, "payload": {"$exists": True}})
    return [each["payload"] for each in found]


def audit(steps: Steps, *consumers: Consumer) -> None:
    """Check where each message is."""
    check(steps)
    ends = ("committed", "buried", "moved")
    known = [number for each in consumers for end in ends for number in getattr(each, end)]
    assert len(known) == len(set(known)), "settled twice"
    begun = set().union(*(each.begun for each in consumers))
    committed, buried, moved = (
        set().union(*(getattr(each, end) for each in consumers)) for end in ends
    )
    delivered, dead, there = drain(steps), numbers_in(steps, "a.dead"), numbers_in(steps, "b")
    everywhere = [*delivered, *dead, *there]
    assert len(everywhere) == len(set(everywhere)), "in two places"
    assert not committed & set(everywhere), "committed, and there all the same"
    assert buried <= set(dead)
    assert moved <= set(there)
    assert set(range(MESSAGES)) - set(everywhere) - committed <= begun, "lost"


FAULTS = Faults(stored, Consumer, audit, MOST_COMMANDS, check, stride=97)


def test_work_without_faults() -> None:
    steps, consumer = Steps(stored()), Consumer()
    steps.run(consumer.work())
    assert (len(consumer.committed), len(consumer.buried), len(consumer.moved)) == (6, 2, 2)
    audit(steps, consumer)


@each_command(FAULTS.stride)
def test_queue_is_purged_anywhere_while_a_consumer_works(every: int) -> None:
    """Purged messages count as ended and never come back, and nothing else is lost."""

    def purge(steps: Steps, quick: Consumer) -> None:
        before = set(numbers_alive(steps))
        purged = steps.run(quick.plans.purge())
        elsewhere = [*numbers_in(steps, "a.dead"), *numbers_in(steps, "b")]
        gone = before - set(numbers_alive(steps)) - set(elsewhere)
        assert len(gone) == purged
        quick.begun |= dict.fromkeys(gone, 0)

    FAULTS.sleeps(every, purge)


def numbers_alive(steps: Steps) -> list[int]:
    """Return the payloads of all messages of the queue, and of those that are being handed over."""
    found: list[int] = []
    listed = [
        id
        for pack in steps.collection.find({"handed.0": {"$exists": True}})
        for entry in pack["handed"]
        for id in entry["ids"]
    ]
    for document in steps.collection.find({"q": {"$in": ["a", "~handover:a"]}}):
        if packs.is_pack(document):
            alive = packs.alive_of(document)
            found += [document["b"][place]["p"] for place in packs.places(alive)]
        elif "payload" in document and (document["q"] == "a" or document["_id"] in listed):
            found.append(document["payload"])
    return found


# ---- two calls of one process


def interleaved(steps: Steps, first: Plan[Any], second: Plan[Any], turns: Sequence[int]) -> None:
    """Run two plans; ``turns`` are the steps at which the second one runs."""
    running = [steps.steps(first), steps.steps(second)]
    step = 0
    while running:
        which = running[-1] if step in turns or len(running) == 1 else running[0]
        try:
            next(which)
        except StopIteration:
            running.remove(which)
        step += 1


def finished(running: Generator[Any, None, list[Any]], most: int) -> list[Any]:
    """Run a plan to its end. ``most`` caps its number of commands."""
    for _ in range(most):
        try:
            next(running)
        except StopIteration as stop:
            return list(stop.value)
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("verb", ["commit", "bury", "rollback", "release", "receive"])
def test_two_calls_of_a_process_share_a_pack(verb: str) -> None:
    """In any order of their commands, each message ends as its call says, and the claim ends."""
    for turns in combinations(range(5), 2):
        steps, consumer, held = holding(4)
        first = consumer.settle(consumer.plans.commit(held[:2]), held[:2], consumer.committed)
        if verb == "receive":
            interleaved(steps, first, consumer.receive(2), turns)
        else:
            into = {"commit": consumer.committed, "bury": consumer.buried}.get(verb)
            plan = consumer.settle(getattr(consumer.plans, verb)(held[2:]), held[2:], into)
            interleaved(steps, first, plan, turns)
            (pack,) = [each for each in steps.all() if each["_id"] == held[0].pack]
            assert (pack["when"] - steps.now).total_seconds() <= 1, "it waits for its lease"
        audit(steps, consumer)


@pytest.mark.parametrize("pop", [False, True])
def test_receive_goes_past_a_pack_whose_claim_ends(pop: bool) -> None:
    """The command that ends it waits, for example for a transaction. The next pack is claimed."""
    steps, consumer = Steps(stored()), Consumer()
    held = [] if pop else steps.run(consumer.receive(1))
    plan: Plan[Any] = consumer.receive(1, pop=True) if pop else consumer.plans.commit(held)
    ending = steps.steps(plan)
    next(each for each in ending if isinstance(each, Update))
    others = [steps.steps(consumer.receive(1)) for _ in range(2)]
    found = [each for other in others for each in finished(other, 20)]
    assert [each.payload for each in found] == [5, 6]
    resume(ending)
    assert [each.payload for each in steps.run(consumer.receive(1))] == [1]
    steps.run(consumer.plans.commit(found))
    assert sorted(drain(steps)) == [1, 2, 3, 4, *range(7, MESSAGES)]


def failing_at(plan: Plan[Any], at: int) -> Generator[Any, Any, Any]:
    """Run a plan whose question number ``at`` for the time is not answered."""
    questions = 0
    try:
        request = next(plan)
        while True:
            if isinstance(request, ServerTime):
                questions += 1
                if questions > at:
                    request = plan.throw(Unavailable("no answer"))
                    continue
            request = plan.send((yield request))
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("verb", ["rollback", "move"])
def test_pack_stays_held_if_the_time_is_unknown(verb: str) -> None:
    """The call fails before its first command. A later call of the process ends the pack."""
    for at in range(10):
        steps, consumer, held = holding(5)
        plans = consumer.plans
        target = plans_of("further", Options(shape={"pack": 5}), kind="bucket", owner="me")
        pairs = [(each, UNCHANGED) for each in held]
        plan = plans.move(pairs, to=target) if verb == "move" else getattr(plans, verb)(held)
        try:
            steps.run(failing_at(plan, at))
        except Unavailable:
            assert {each.hold.state for each in held} == {"held"}  # else no renewal extends it
            steps.run(plans.commit(held))
            assert held[0].pack not in {each["_id"] for each in steps.all()}
        else:
            assert at > 0
            break


@pytest.mark.parametrize("fails", ["commit", "bury"])
def test_pack_that_was_lost_while_extended_stays_claimed(fails: str) -> None:
    """Another call of the process has failed. Messages drawn before are still held."""
    steps, consumer, held = holding(2, lease=60)
    steps.seconds += 30
    ending = steps.steps(getattr(consumer.plans, fails)(held[:1]))
    next(each for each in ending if isinstance(each, Update))
    receiving = steps.steps(consumer.receive(2))
    next(each for each in receiving if isinstance(each, Update) and "$max" in each.update)
    with pytest.raises(Unavailable):
        ending.throw(Unavailable("no answer"))
    found = finished(receiving, 5)
    assert [each.payload for each in found] == [2, 3]
    assert {each.until for each in found} == {steps.now + timedelta(seconds=60)}
    steps.run(consumer.plans.commit(found[:1]))
    steps.seconds += 30
    assert not {0, 3} & {each.payload for each in steps.run(Consumer().receive(100))}
    steps.run(consumer.plans.commit(found[1:]))


@pytest.mark.parametrize("ends", ["one commit", "two commits", "purge"])
def test_pack_stays_until_what_it_handed_over_is_shown(ends: str) -> None:
    """A process got one of its messages by pickle. It decides to move it, and dies."""
    steps, consumer, held = holding(5)
    sent = pickle.loads(pickle.dumps(held[0]))
    moving = steps.steps(consumer.plans.move([(sent, -1)], to="b"))
    decided = next(each for each in moving if isinstance(each, Update) and each.majority)
    assert "$push" in decided.update
    if ends == "purge":
        steps.seconds += 61
        purging = steps.steps(consumer.plans.purge())
        next(each for each in purging if isinstance(each, FindAndModify) and each.update is None)
        next(moving)
        assert sum(1 for _ in purging)
    else:
        next(moving)
        for some in [held] if ends == "one commit" else [held[1:], held[:1]]:
            with suppress(LeaseLost):
                steps.run(consumer.plans.commit(some))
    steps.seconds += 61
    steps.run(recovering.recover_all())
    assert numbers_in(steps, "b") == [-1]


@pytest.mark.parametrize("force", [False, True])
def test_message_that_comes_back_counts_for_a_deletion(force: bool) -> None:
    steps, consumer, held = holding(MESSAGES)
    back = steps.steps(consumer.plans.rollback(held[:1], delay=0))
    next(each for each in back if isinstance(each, UpdateEach) and each.many)
    steps.run(consumer.plans.commit(held[1:]))
    with nullcontext() if force else pytest.raises(ConfigurationError, match="1 ready"):
        steps.run(all_queues.delete_queue("a", force))
    assert numbers_in(steps, "a") == ([] if force else [held[0].payload])


def test_same_message_is_committed_once() -> None:
    for turns in combinations(range(4), 2):
        steps, one, two = Steps(stored()), Consumer(), Consumer()
        held = steps.run(one.receive(3))
        first = one.settle(one.plans.commit(held), held, one.committed)
        second = two.settle(two.plans.commit(held[1:]), held[1:], two.committed)
        interleaved(steps, first, second, turns)
        audit(steps, one, two)


@pytest.mark.parametrize(
    ("pop", "taker"),
    [
        (False, {}),
        (True, {}),
        (True, {"q": "results"}),
        (True, {"q": "~handover:a", "when": NOW, "handover": {"to": "b", "token": "dead"}}),
    ],
)
@pytest.mark.parametrize("number", [1, 3, 5, 7, MESSAGES])
def test_cancelled_receive_consumes_nothing(pop: bool, taker: dict[str, Any], number: int) -> None:
    """Messages claimed for a caller that has gone come back, and no try is counted.

    Another document, or a copy of a dead holder, may have the id of a popped message.
    """
    steps, consumer = Steps(stored()), Consumer()
    steps.listeners.append(consumer.waiting)
    running = consumer.receive(number, pop=pop)
    request = next(running)
    while not isinstance(request, Coalesce):
        answer = steps.now if isinstance(request, ServerTime) else steps.run(iter_of(request))
        request = running.send(answer)
    (claimed,) = steps.run(request.batch([request.item]))
    assert len(claimed) == number
    assert request.undo is not None
    if taker:
        steps.collection.insert_many([{"_id": message.id, **taker} for _, message in claimed])
    steps.run(request.undo(claimed))
    steps.seconds += 1.1
    found = steps.run(Consumer().receive(100))
    assert sorted(each.payload for each in found) == list(range(MESSAGES))
    ids = {each.payload: each.id for each in found}
    for _, message in claimed:
        if message.key is None or taker.get("q") != "results":
            assert ids[message.payload] == message.id
        else:  # an ordinary message
            (again,) = [each for each in found if each.payload == message.payload]
            assert (again.trail[-1]["id"], again.key) == (message.id, "key")
    assert {each.tries for each in found} == {1}
    check(steps)


def iter_of(request: Any) -> Plan[Any]:
    return (yield from request)


def split(consumer: Consumer, held: list[Any]) -> Plan[list[bool]]:
    """Make two messages of each, by calls that share a batch. Return of each whether it did."""
    to = plans_of("b", Options(dead_letter="b.dead")).target
    outputs = [[Output(ObjectId(), to, each.payload, None) for _ in range(2)] for each in held]
    return shared(
        [fan_out(consumer.plans.terms, *each) for each in zip(held, outputs, strict=True)]
    )


def test_messages_of_a_pack_are_split_together() -> None:
    """It takes no more commands than one message."""
    counts = []
    for number in (1, 5):
        steps, consumer, held = holding(number)
        assert steps.run(split(consumer, held)) == [True] * number
        assert sorted(numbers_in(steps, "b")) == sorted([*range(number)] * 2)
        counts.append(len([each for each in commands(steps) if each not in ("Find", "Delete")]))
        audit_split(steps)
    assert counts[1] <= counts[0]


def audit_split(steps: Steps) -> None:
    """Check that each message is there once, or that its two outputs are."""
    check(steps)
    delivered = drain(steps)
    assert sorted([*delivered * 2, *numbers_in(steps, "b")]) == sorted([*range(MESSAGES)] * 2)


@pytest.mark.parametrize("given", [(0, 1), (1, 2, 2, 4), (2, 2), (0, 1, 1)])
def test_message_is_split_once(given: tuple[int, ...]) -> None:
    """Calls share a batch that have the same message, or one that is not held any more."""
    steps, consumer, held = holding(5)
    steps.run(consumer.plans.release(held[:1]))
    done = steps.run(split(consumer, [held[number] for number in given]))
    first = [given.index(number) == place for place, number in enumerate(given)]
    assert done == [new and number != 0 for new, number in zip(first, given, strict=True)]
    audit_split(steps)


@pytest.mark.parametrize("fault", ["dies after", "loses a request", "loses a reply"])
def test_batch_that_splits_a_pack_survives_a_fault(fault: str) -> None:
    """If a message is lost, each of its calls tries again alone."""
    for at in range(MOST_COMMANDS):
        steps, consumer, held = holding(5)
        with suppress(Cut, QueueError):
            steps.run(split(consumer, held[:4]), FAULT_AT[fault](at))
        ended = len(steps.commands) <= at
        audit_split(steps)
        if ended:
            return
    raise AssertionError("more commands than expected")


# ---- claims, leases, tries


def commands(steps: Steps) -> list[str]:
    """Return the commands of the last plan, without reads of the record of the queue."""
    record = {"_id": "~queue:a"}
    every = [each for each in steps.commands if getattr(each, "filter", None) != record]
    return [type(each).__name__ for each in every]


def test_batch_of_a_pack_is_claimed_and_settled_by_two_commands() -> None:
    steps, consumer = Steps(stored()), Consumer()
    steps.run(consumer.receive(5))
    assert commands(steps)[-1] == "FindAndModify"
    held = steps.run(consumer.receive(5))
    assert commands(steps) == ["FindAndModify"]
    steps.run(consumer.plans.commit(held))
    assert commands(steps) == ["Delete"]


def test_next_single_receive_needs_no_claim() -> None:
    steps, consumer = Steps(stored()), Consumer()
    held = [*steps.run(consumer.receive(1)), *steps.run(consumer.receive(1))]
    assert commands(steps) == []
    steps.run(consumer.plans.commit(held[:1]))
    assert commands(steps) == ["Update"]
    assert [each.tries for each in held] == [1, 1]


def test_receive_returns_early_while_its_leases_are_fresh() -> None:
    """Small packs take many commands, and here each of them takes long."""
    steps, waiting, held = Steps(), Waiters("a"), set[Any]()
    for number in range(12):
        steps.run(plans().push([number] * (1 + 4 * (number % 2))))

    def received() -> Generator[Any, None, None]:
        held.update(
            each.id
            for each in (yield from steps.steps(plans(lease=3).receive(waiting, 100, timeout=0)))
        )

    while len(held) < 36:
        began = steps.seconds
        for _ in received():
            steps.seconds += 0.25
        assert steps.seconds - began < 3


def test_rest_of_a_pack_comes_back_without_a_try() -> None:
    """The process takes it again for a second. Then any other process gets it."""
    steps, consumer, other = Steps(stored()), Consumer(), Consumer()
    (held,) = steps.run(consumer.receive(1))
    steps.run(consumer.plans.commit([held]))
    (again,) = steps.run(consumer.receive(1))
    assert commands(steps) == ["Update"]
    assert (again.payload, again.tries) == (1, 1)
    steps.run(consumer.plans.commit([again]))
    steps.seconds += 1.1
    taken = {each.payload: each.tries for each in steps.run(other.receive(100))}
    assert taken == dict.fromkeys(range(2, MESSAGES), 1)


@pytest.mark.parametrize("other", [False, True])
def test_released_part_of_a_pack_has_its_old_place(other: bool) -> None:
    """A process whose scans are past this place finds it there, too."""
    steps, consumer = Steps(), Consumer()
    receiver = Consumer() if other else consumer
    steps.listeners += {consumer.waiting, receiver.waiting}
    for some in (["a", "b"], ["c"], ["d"]):
        steps.run(plans().push(some))
        steps.seconds += 1
    first, second = steps.run(consumer.receive(2))
    (third,) = steps.run(receiver.receive(1))
    steps.seconds += 1
    steps.run(consumer.plans.release([first]))
    steps.seconds += 1
    steps.run(consumer.plans.commit([second]))
    steps.run(receiver.plans.commit([third]))
    steps.seconds += 1
    found = steps.run(receiver.receive(1)) + steps.run(receiver.receive(1))
    assert [each.payload for each in (third, *found)] == ["c", "a", "d"]
    assert (found[0].id, found[0].when, found[0].tries) == (first.id, first.when, 1)


@pytest.mark.parametrize("fault", ["dies after", "loses a request", "loses a reply"])
def test_released_part_has_its_old_place_after_a_fault(fault: str) -> None:
    """The holder or recovery publishes it. Before the decision, the lease of the pack lapses."""
    for at in range(MOST_COMMANDS):
        steps, consumer, held = holding(5)
        steps.seconds += 1
        with suppress(Cut, QueueError):
            steps.run(consumer.plans.release(held[:1]), FAULT_AT[fault](at))
        ended = len(steps.commands) <= at
        steps.seconds += 10
        steps.run(recovering.recover_all())
        for each in steps.all():
            if (each["_id"], each.get("q")) == (held[0].id, "a"):
                assert each["when"] == each["due"] == NOW
        audit(steps, consumer)
        if ended:
            return
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("verb", ["purge", "remove"])
def test_resting_pack_is_held_by_no_caller(verb: str) -> None:
    """A process keeps it for a second. While it holds a message, the lease protects the pack."""
    steps, consumer = Steps(), Consumer()
    ids: list[Any] = steps.run(plans().push(list(range(5))))

    def end() -> object:
        return steps.run(plans().purge() if verb == "purge" else plans().remove(ids[3]))

    for number in range(2):  # it rests, and is taken up again
        held = steps.run(consumer.receive(1, lease=1.5))
        assert held[0].payload == number
        assert not end()
        steps.run(consumer.plans.commit(held))
    assert end() == (3 if verb == "purge" else True)
    assert not end()
    found = steps.run(consumer.receive(9))
    left = [] if verb == "purge" else [2, 4]
    assert [(each.payload, each.tries) for each in found] == [(each, 1) for each in left]
    steps.run(consumer.plans.commit(found))
    check(steps)


def test_messages_that_were_pushed_together_share_a_pack() -> None:
    steps = Steps()
    ids = steps.run(plans().push(list(range(12))))
    places = [f"000{place}" for place in range(5)]
    assert [str(id).partition(":")[2] for id in ids] == [*places, *places, *places[:2]]
    (single,) = steps.run(plans().push([1]))
    assert steps.collection.find_one({"_id": single})["payload"] == 1


@pytest.mark.parametrize("kind", ["standard", "bucket"])
def test_ids_of_the_caller_decide_within_a_millisecond(kind: str) -> None:
    queue = plans_of("a", Options(dead_letter="a.dead"), kind=kind)
    for ids, expected in ((["i-2", "i-10"], [1, 0]), (None, [0, 1]), (["i-02", "i-10"], [0, 1])):
        steps = Steps()
        steps.run(queue.push([0, 1], ids=ids))
        found = steps.run(queue.receive(Waiters("a"), 9, timeout=0))
        assert [each.payload for each in found] == expected


def test_keys_ids_and_delays_make_ordinary_messages() -> None:
    steps = Steps()
    many = list(range(3))
    steps.run(plans().push(many, keys=["a", "b", "c"]))
    steps.run(plans().push(many, ids=["x", "y", "z"]))
    steps.run(plans().push(many, delay=60))
    steps.run(plans().push(["x" * packs.MAX_PACK_BYTES] * 2))
    assert steps.collection.count_documents({"n": {"$exists": True}}) == 0
    mixed = steps.run(plans().push(many, keys=[None, "d", None]))
    assert [":" in str(id) for id in mixed] == [True, False, True]


def test_push_repeated_with_the_ids_of_a_pack_is_one_push() -> None:
    steps = Steps()
    ids = steps.run(plans().push([1, 2, 3]))
    assert steps.run(plans().push([1, 2, 3], ids=ids)) == ids
    consumer = Consumer()
    assert [each.payload for each in steps.run(consumer.receive(9))] == [1, 2, 3]


@pytest.mark.parametrize(
    "form",
    [
        *("{single}:3", "{single}:0003", "{old}:03", "{old}:0003", "{old}:5", "{old}:500"),
        *("{pack}:3", "{pack}:03", "{pack}:0005", "{pack}:500"),
    ],
)
def test_id_like_a_place_is_another_message(form: str) -> None:
    """For example, an id that a program makes from the id of a message that it handles."""
    steps = Steps()
    (single,) = steps.run(plans().push([0]))
    before = steps.run(plans().push(list(range(1, 11))))
    pack, old = (str(id).partition(":")[0] for id in (before[0], before[5]))
    steps.collection.update_one({"_id": ObjectId(old)}, {"$unset": {"w": ""}})
    id = form.format(single=single, pack=pack, old=old)
    steps.seconds = 1
    for _ in range(2):
        assert steps.run(plans().push(["mine"], ids=[id])) == [id]
    found = steps.run(Consumer().receive(99))
    assert sorted(each.payload for each in found[:-1]) == list(range(11))
    assert (found[-1].payload, found[-1].id) == ("mine", id)


def test_old_pack_takes_no_message_twice() -> None:
    """Its ids are not padded. They are the ids of its messages, also after it was divided."""
    steps, consumer = Steps(), Consumer()
    ids = [str(id).replace(":000", ":") for id in steps.run(plans().push([1, 2, 3, 4, 5]))]
    steps.collection.update_one({"n": 5}, {"$unset": {"w": ""}})
    held = steps.run(consumer.receive(5))
    assert [each.id for each in held] == ids
    other = plans_of("b", Options(dead_letter="b.dead"), kind="bucket")
    steps.run(consumer.plans.move([(each, each.payload) for each in held[:3]], to=other))
    steps.run(consumer.plans.rollback(held[3:4], delay=0))
    assert steps.run(plans().push([0] * 5, ids=ids)) == ids
    with pytest.raises(DuplicateKey):
        steps.run(other.push([0], ids=ids[4:]))
    for id, plan in zip(ids, [other] * 3 + [plans()] * 2, strict=True):
        found = steps.run(plan.get(id))
        assert found is not None
        assert found.id == id
    assert sorted(drain(steps)) == [4, 5]


@pytest.fixture
def keeps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep packs out for longer: mongomock deletes expired documents by the real time."""
    monkeypatch.setattr(inserting, "_KEPT_OUT_FOR", timedelta(days=99 * 365))


@pytest.mark.usefixtures("keeps_out")
@pytest.mark.parametrize("lost", [lost_request, lost_reply])
@pytest.mark.parametrize("kind", ["bucket", "standard"])
def test_push_without_a_reply_names_all_ids_in_order(kind: str, lost: Any) -> None:
    """Whichever command fails. Repeated with these ids and its keys, it is one push."""
    keys = [None, "a", None, None, "b", None, None]
    shape = {"pack": 2} if kind == "bucket" else {}
    queue = plans_of("a", Options(shape=shape, dead_letter="a.dead"), kind=kind)
    for at in range(20):
        steps = Steps()
        steps.run(queue.push([0]))
        try:
            ids = steps.run(queue.push([*range(1, 8)], keys=keys), lost(at))
        except Unavailable as error:
            known = list(error.ids) or None  # None: nothing was sent
            ids = steps.run(queue.push([*range(1, 8)], keys=keys, ids=known))
            assert known in (None, ids)
        else:
            assert at == len(steps.commands)
            break
        found = steps.run(queue.receive(Waiters("a"), 99, timeout=0))
        assert (
            dict(zip(ids, range(1, 8), strict=True)).items()
            <= {each.id: each.payload for each in found}.items()
        )
        assert len(found) == 8
    else:
        raise AssertionError("more commands than expected")


@pytest.mark.usefixtures("keeps_out")
@pytest.mark.parametrize("arrives", ["between", "after", "twice"])
def test_late_insert_of_a_pack_doubles_nothing(arrives: str) -> None:
    """The insert of a push is on its way while the push is repeated with its ids, by two calls."""
    steps = Steps()
    late, ids = pushed_late(steps, plans().push([1, 2, 3]))
    assert len(ids) == 3
    assert steps.run(plans().push([1], ids=ids[:1])) == ids[:1]
    if arrives != "after":
        steps.driver.ask(late)
    assert steps.run(plans().push([1, 2, 3], ids=ids)) == ids
    if arrives != "between":
        steps.driver.ask(late)
    assert sorted(drain(steps)) == [1, 2, 3]


@pytest.mark.usefixtures("keeps_out")
def test_late_insert_meets_a_repeated_push_anywhere() -> None:
    for at in range(10):
        steps = Steps()
        late, ids = pushed_late(steps, plans().push([1, 2, 3]))
        running = steps.steps(plans().push([1, 2, 3], ids=ids))
        before = sum(1 for _ in islice(running, at))
        steps.driver.ask(late)
        resume(running)
        assert sorted(drain(steps)) == [1, 2, 3]
        if before < at:
            return
    raise AssertionError("more commands than expected")


def test_repeated_push_refuses_the_ids_of_another_queue() -> None:
    steps = Steps()
    ids = steps.run(plans().push([1, 2, 3]))
    other = plans_of("b", Options(dead_letter="b.dead"), kind="bucket")
    with pytest.raises(DuplicateKey) as caught:
        steps.run(other.push([0, 1, 2, 3], ids=[None, *ids]))
    assert caught.value.ids == ids
    assert numbers_in(steps, "b") == [0]


def test_repeated_push_leaves_a_move_alone() -> None:
    """The messages leave as a part, which is hidden while the push is repeated."""
    steps, consumer = Steps(), Consumer()
    ids = steps.run(plans().push([0, 1, 2, 3, 4]))
    held = steps.run(consumer.receive(4))
    other = plans_of("b", Options(dead_letter="b.dead"), kind="bucket")
    moving = steps.steps(consumer.plans.move([(each, each.payload) for each in held], to=other))
    next(each for each in moving if isinstance(each, UpdateEach) and each.many)
    assert steps.run(plans().push([0] * 5, ids=ids)) == ids
    assert sum(1 for _ in moving)
    assert [each.payload for each in steps.run(other.receive(Waiters("b"), 9, timeout=0))] == [
        *(0, 1, 2, 3)
    ]


@pytest.mark.parametrize("old", [False, True])
def test_repeated_push_of_a_pack_survives_a_fail_over(old: bool) -> None:
    """The first push was not acknowledged: its pack is there, and a fail-over may undo it."""
    steps = Steps()
    steps.run(plans().push([0]))
    steps.safe = steps.all()
    first = Steps()
    ids = first.run(plans().push([1, 2, 3]))
    steps.collection.insert_many([each for each in first.all() if "b" in each])
    if old:
        steps.collection.update_one({"n": 3}, {"$unset": {"w": ""}})
        ids = [str(id).replace(":000", ":") for id in ids]
    assert steps.run(plans().push([1, 2, 3], ids=ids)) == ids
    steps.fail_over()
    assert sorted(drain(steps)) == [0, 1, 2, 3]


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("guilty", [0, 7, 38, 39])
def test_message_that_ends_its_consumers_is_buried_alone(guilty: int, taken: bool) -> None:
    """Each consumer that gets it dies. Every other message is finished, with few crashes."""
    steps = Steps()
    options = Options(shape={"pack": 40}, max_tries=2, dead_letter="a.dead")
    wide = plans_of("a", options, kind="bucket", owner="me")
    ids = steps.run(wide.push(list(range(40))))
    if taken:
        steps.collection.insert_one({"_id": ids[guilty], "q": "results"})
    finished: list[int] = []
    crashes = 0
    for _ in range(60):
        consumer = Consumer()
        consumer.plans = wide
        steps.listeners = [consumer.waiting]
        while held := steps.run(consumer.receive(30)):
            numbers = [each.payload for each in held]
            if guilty in numbers:
                crashes += 1
                break
            steps.run(consumer.plans.commit(held))
            finished += numbers
        steps.seconds += 61
        if not held:
            break
    assert sorted(finished) == [each for each in range(40) if each != guilty]
    (dead,) = steps.collection.find({"q": "a.dead", "dead": {"$exists": True}})
    assert (dead["payload"], dead["dead"]["reason"]) == (guilty, "tries")
    assert crashes <= 5


@pytest.mark.parametrize("size", [2, 9, 10, 11, 100, 101, 500, 1000])
def test_windows_cover_every_message_once_in_order(size: int) -> None:
    """A pack whose first claim lapsed is worked off in windows that are all fine."""
    done, level, seen = 0, 1, []
    while alive := packs.full(size) & ~done:
        window = packs.window(size, alive, level)
        assert window
        first = packs.first_place(window)
        seen += list(packs.places(window))
        done |= window
        level = packs.next_level(size, first, packs.full(size) & ~done, level)
        assert level == 1
    assert seen == list(range(size))


def test_last_try_that_is_rolled_back_is_buried() -> None:
    steps, consumer = Steps(stored()), Consumer(max_tries=2)
    for tries in (1, 2):
        held = steps.run(consumer.receive(20))
        (one,) = [each for each in held if each.payload == 3]
        assert one.tries == tries
        steps.run(consumer.plans.rollback([one], error=ValueError("no"), delay=0))
        steps.run(consumer.plans.release([each for each in held if each is not one]))
    (dead,) = steps.collection.find({"q": "a.dead", "dead": {"$exists": True}})
    assert (dead["dead"]["reason"], dead["error"]["message"]) == ("tries", "no")


def test_backoff_delays_only_failed_messages() -> None:
    steps, consumer, held = holding(3)
    steps.run(consumer.plans.rollback(held[:2], delay=30))
    rest = steps.run(consumer.receive(100))
    assert sorted(each.payload for each in rest) == list(range(3, MESSAGES))
    steps.seconds += 30
    again = steps.run(consumer.receive(100))
    assert sorted((each.payload, each.tries) for each in again) == [(0, 2), (1, 2)]


def test_whole_pack_waits_in_place() -> None:
    steps, consumer, held = holding(5)
    steps.run(consumer.plans.rollback(held, delay=30, error="why"))
    assert commands(steps) == ["Update"]
    steps.seconds += 30
    again = [each for each in steps.run(Consumer().receive(100)) if each.payload < 5]
    assert [(each.payload, each.tries, each.error["message"]) for each in again] == [
        (number, 2, "why") for number in range(5)
    ]


def test_extension_is_one_command_for_a_pack() -> None:
    steps, consumer, held = holding(5)
    steps.run(consumer.plans.commit(held[:1]))
    steps.seconds += 30
    with pytest.raises(LeaseLost) as caught:
        steps.run(consumer.plans.extend(held, lease=600))
    assert caught.value.lost == (held[0],)
    steps.run(consumer.plans.extend(held[1:], lease=600))
    assert commands(steps) == ["Update"]
    steps.run(consumer.plans.extend(held[2:], lease=60))  # the rest keeps its lease
    steps.seconds += 500
    assert 1 not in [each.payload for each in steps.run(Consumer().receive(100))]


@pytest.mark.parametrize("verb", ["commit", "rollback", "release", "bury", "move", "extend"])
def test_unknown_outcome_names_all_messages(verb: str) -> None:
    """The server does not answer. The call has messages of several packs, and an ordinary one."""
    steps, consumer, held = holding(MESSAGES, max_tries=None)

    def fails(number: int, done: bool) -> None:
        if isinstance(steps.commands[-1], WRITES):
            raise TimeLimitReached("no answer")

    pairs = [(each, UNCHANGED) for each in held]
    call = consumer.plans.move(pairs, to="b") if verb == "move" else None
    with pytest.raises(Unavailable, match="if a transaction has settled another message") as caught:
        steps.run(call or getattr(consumer.plans, verb)(held), fails)
    assert sorted(map(str, caught.value.ids)) == sorted(str(each.id) for each in held)


def test_invalid_payload_goes_to_the_dead_letter_queue() -> None:
    steps = Steps()
    steps.run(plans().push([1, "two", 3]))
    consumer = Consumer()
    consumer.plans = plans(Codec(int))
    held = steps.run(consumer.receive(10))
    assert [each.payload for each in held] == [1, 3]
    (dead,) = steps.collection.find({"q": "a.dead", "dead": {"$exists": True}})
    assert (dead["payload"], dead["dead"]["reason"]) == ("two", "invalid")


def test_unsupported_settlements_are_refused_before_any_write() -> None:
    steps, consumer, held = holding(3)
    before = steps.all()
    refused: list[Callable[[], Plan[Any]]] = [
        lambda: consumer.plans.commit(held, payload=1),
        lambda: consumer.plans.move([(held[0], 1)], to="b", update={"$set": {"x": 1}}),
        lambda: consumer.plans.progress(held[0], 0.5),
        lambda: consumer.plans.checkpoint(held[0], 1),
        lambda: consumer.plans.replay([held[0].id]),
        lambda: consumer.plans.history(),
    ]
    for plan in refused:
        with pytest.raises(ConfigurationError):
            steps.run(plan())
    assert steps.all() == before
    with pytest.raises(ConfigurationError, match="history"):
        plans(history=60)
