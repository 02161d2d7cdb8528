"""Handover under faults: at each command a process dies, sleeps, or meets a fail-over.

There are two kinds of sources. A message ends, and three new messages begin, with new ids. A pack
stays, and its places leave it in twos and threes, with ids that are made from the pack, so that
every attempt makes the same ids. Whatever happens, nothing is lost and nothing is shown twice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

import pytest
from bson import ObjectId

from pyqueue import DuplicateKey, LeaseLost, Unavailable
from pyqueue.backends import all_queues, handover, recovering, transitions
from pyqueue.backends.handover import Handover
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.options import Options
from pyqueue.backends.outputs import Output
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.scan import FIRST
from pyqueue.backends.settling import fan_out
from pyqueue.backends.transitions import HIDDEN
from pyqueue.requests import (
    Delete,
    Distinct,
    Document,
    FindAndModify,
    Plan,
    ServerTime,
    Update,
    UpdateEach,
)
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import each_command
from tests.plans.runner import NOW
from tests.plans.steps import Cut, Steps, cut, lost_reply, lost_request, resume, shared

some_or_every = each_command(5)
DAY = 86400
#: mongomock deletes expired documents by the real time.
HISTORY = 99 * 365.0 * DAY
INPUTS = 2
#: The places of the pack, as they leave it.
PARTS = [[0, 1], [2, 3, 4], [5]]


def outputs_of(held: Any, queues: str) -> list[Output]:
    """Return outputs of a message, with new ids, in these queues."""
    targets = [plans_of(each, Options(dead_letter="dead")).target for each in queues]
    return [Output(ObjectId(), target, [held.payload, i], None) for i, target in enumerate(targets)]


class Message:
    """A process that receives messages, and makes three of each."""

    wanted: ClassVar = Counter((n, i) for n in range(INPUTS) for i in range(3))

    def __init__(self, history: float | None = None) -> None:
        options = Options(lease=60, max_tries=None, dead_letter="in.dead", history=history)
        self.plans = plans_of("in", options, owner="me")
        self.waiting = Waiters("in")

    def split(self, held: Any) -> Plan[None]:
        """Make three messages of one."""
        return fan_out(self.plans.terms, held, outputs_of(held, "aaa"))

    @staticmethod
    def fill(steps: Steps) -> None:
        steps.run(Message().plans.push(list(range(INPUTS)), keys=["k0", "k1"]))
        for name in ("a", "b"):
            steps.run(plans_of(name, Options(dead_letter="dead")).push([]))

    def work(self) -> Plan[None]:
        for _ in range(INPUTS):
            received = yield from self.plans.receive(self.waiting, 1, timeout=0)
            for held in received:
                outputs = outputs_of(held, "aba")
                for again in (True, False):
                    try:
                        yield from fan_out(self.plans.terms, held, outputs)
                    except LeaseLost:
                        break
                    except Unavailable:
                        if again:
                            continue
                        raise
                    break

    @staticmethod
    def rest(steps: Steps) -> Counter[Any]:
        """Return the messages still to be made, as the source shows them."""
        left = steps.collection.find({"q": "in", "record": {"$exists": False}})
        live = [each for each in left if "processed" not in each]
        return Counter((each["payload"], i) for each in live for i in range(3))


class Batch(Message):
    """The same, but both messages share commands."""

    def work(self) -> Plan[None]:
        received = yield from self.plans.receive(self.waiting, INPUTS, timeout=0)
        if received:
            source = self.plans.terms
            yield from shared([fan_out(source, held, outputs_of(held, "aba")) for held in received])


class Pack:
    """A process that holds a pack, and lets its places leave it."""

    wanted: ClassVar = Counter(("P", place) for part in PARTS for place in part)

    @staticmethod
    def fill(steps: Steps) -> None:
        alive = sorted(place for part in PARTS for place in part)
        pack = {"_id": "P", "q": "in", "when": NOW, "due": NOW, "alive": alive, HANDED: []}
        steps.collection.insert_one(pack)

    def work(self) -> Plan[None]:
        now = yield from ServerTime()
        claim = transitions.claiming(now, 60, "me", count=False)
        match = {"_id": "P", "q": "in", "when": {"$lte": now}}
        pack = yield from FindAndModify(match, claim, w1=True)
        if pack is None:
            return
        yield from handover.finish(pack)
        for part in PARTS:
            places = [each for each in part if each in pack["alive"]]
            if places:
                yield from self.leave(pack["token"], places)
        done = {"_id": "P", "token": pack["token"], "alive": [], HANDED: []}
        yield from Delete(done)

    def leave(self, token: str, places: list[int]) -> Plan[None]:
        copies = [
            {
                **transitions.entering("out", NOW),
                "_id": f"P:{place}",
                "payload": ["P", place],
                "pushed": NOW,
                "by": token,  # another attempt makes another copy
            }
            for place in places
        ]
        match = {"_id": "P", "token": token, "alive": {"$all": places}}
        update = {"$pull": {"alive": {"$in": places}}}
        leaving = Handover("in", "P", token, copies)
        for again in (True, False):
            try:
                yield from handover.hand_over(leaving, match, update)
            except Unavailable:
                if not again:
                    raise
            else:
                return

    @staticmethod
    def rest(steps: Steps) -> Counter[Any]:
        found = steps.collection.find_one({"_id": "P"})
        return Counter(("P", place) for place in (found or {"alive": []})["alive"])


Process = Message | Pack
each_kind = pytest.mark.parametrize("kind", [Message, Batch, Pack])


@cache
def stored(kind: type[Process]) -> list[Document]:
    steps = Steps()
    kind.fill(steps)
    return steps.all()


def made(kind: type[Process]) -> Steps:
    return Steps(stored(kind))  # type: ignore[arg-type]  # mypy: unlike its objects, a class has a hash


def consume(steps: Steps) -> Counter[Any]:
    """Take published messages, as consumers that commit at once."""
    shown = {"q": {"$in": ["a", "b", "out"]}, "record": {"$exists": False}}
    found = list(steps.collection.find(shown))
    steps.collection.delete_many({"_id": {"$in": [each["_id"] for each in found]}})
    for each in found:
        assert not {"handover", "token", HANDED} & set(each), each
    return Counter(tuple(each["payload"]) for each in found)


def told(steps: Steps) -> list[Any]:
    """Return the ids of the new messages that were reported to hooks."""
    return [id for each in steps.told if each.event == "pushed" for id in each.items]


def audit(steps: Steps, kind: type[Process], seen: Counter[Any]) -> None:
    """Recover, and check that each is shown once, or is still to be made. Then make the rest."""
    steps.seconds += 100
    steps.run(recovering.recover_all())
    seen = seen + consume(steps)
    assert seen + kind.rest(steps) == kind.wanted
    steps.run(kind().work())
    assert seen + consume(steps) == kind.wanted
    steps.seconds += 2 * DAY
    steps.run(recovering.recover_all())
    assert not consume(steps), "shown late"
    assert len(set(told(steps))) == len(told(steps)), "told twice"
    assert [each for each in steps.all() if str(each.get("q")).startswith("~")] == []


def commands_of(kind: type[Process]) -> list[Any]:
    steps = made(kind)
    steps.run(kind().work())
    return steps.commands


def number_of_commands(kind: type[Process]) -> int:
    return len(commands_of(kind))


@each_kind
def test_handover_without_faults(kind: type[Process]) -> None:
    steps = made(kind)
    steps.run(kind().work())
    assert consume(steps) == kind.wanted
    audit(steps, kind, kind.wanted)
    assert len(told(steps)) == (0 if kind is Pack else kind.wanted.total())


def test_recovery_tells_what_it_publishes() -> None:
    """It reports new messages, but not the messages that leave a pack."""
    for kind in (Message, Pack):
        steps = made(kind)
        names = [type(each).__name__ for each in commands_of(kind)]
        decided = names.index("Update", names.index("Insert"))
        with pytest.raises(Cut):
            steps.run(kind().work(), cut(decided, after=True))
        assert told(steps) == []
        steps.seconds += 10
        for _ in range(2):
            steps.run(recovering.recover("in"))
        assert len(told(steps)) == len(consume(steps)) * (kind is Message)


@each_kind
@pytest.mark.parametrize("after", [False, True])
@some_or_every
def test_holder_dies_anywhere(kind: type[Process], after: bool, every: int) -> None:
    for at in range(0, number_of_commands(kind), every):
        steps = made(kind)
        with pytest.raises(Cut):
            steps.run(kind().work(), cut(at, after=after))
        seen = consume(steps)
        steps.seconds += 61
        steps.run(kind().work())
        audit(steps, kind, seen)


@each_kind
@pytest.mark.parametrize("lost", [lost_request, lost_reply])
@some_or_every
def test_answer_is_lost_anywhere(kind: type[Process], lost: Any, every: int) -> None:
    """The holder calls again with the same token and ids."""
    for at in range(0, number_of_commands(kind), every):
        steps = made(kind)
        try:
            steps.run(kind().work(), lost(at))
        except Unavailable:
            steps.seconds += 61
            steps.run(kind().work())
        audit(steps, kind, Counter())


def takes_over(steps: Steps, kind: type[Process]) -> None:
    steps.seconds += 61
    steps.run(kind().work())


def fails_over(steps: Steps, kind: type[Process]) -> None:
    steps.fail_over()
    steps.run(kind().work())


def recovers(seconds: int) -> Callable[[Steps, type[Process]], None]:
    def act(steps: Steps, kind: type[Process]) -> None:
        steps.seconds += seconds
        steps.run(recovering.recover("in", grace=timedelta()))

    return act


#: Each happens while a holder sleeps.
ACTS: dict[str, Callable[[Steps, type[Process]], None]] = {
    "another process takes over": takes_over,
    "the server fails over": fails_over,
    **{f"recovery after {seconds} s": recovers(seconds) for seconds in (1, 700, 3 * DAY)},
}


@each_kind
@pytest.mark.parametrize("act", ACTS)
@some_or_every
def test_holder_sleeps_anywhere(kind: type[Process], act: str, every: int) -> None:
    undone = ACTS[act] is fails_over
    for at in range(0, number_of_commands(kind), 1 if undone else every):
        steps = made(kind)
        steps.safe = stored(kind) if undone else None  # type: ignore[arg-type]
        running = stalled(steps, kind().work(), at)
        ACTS[act](steps, kind)
        seen = consume(steps)
        resume(running)
        audit(steps, kind, seen)


@each_kind
@some_or_every
def test_recovery_dies_anywhere(kind: type[Process], every: int) -> None:
    for first in range(0, number_of_commands(kind), 2 * every):
        for second in range(8):
            steps = made(kind)
            with pytest.raises(Cut):
                steps.run(kind().work(), cut(first, after=True))
            steps.seconds += 10
            seen = consume(steps)
            try:
                steps.run(recovering.recover("in"), cut(second, after=True))
            except Cut:
                seen += consume(steps)
                steps.run(recovering.recover("in"))
            audit(steps, kind, seen)


@some_or_every
def test_two_holders_meet_a_fail_over_anywhere(every: int) -> None:
    """It may undo the claim of the second one, which resumes first, or last."""
    commands = number_of_commands(Pack)
    for at, then in itertools.product(range(0, commands, every), range(0, commands, every)):
        for first in (0, 1):
            steps = made(Pack)
            steps.safe = stored(Pack)
            holders = [stalled(steps, Pack().work(), at)]
            steps.seconds += 61
            holders.append(stalled(steps, Pack().work(), then))
            steps.fail_over()
            resume(holders[first])
            seen = consume(steps)
            resume(holders[1 - first])
            audit(steps, Pack, seen)


@some_or_every
def test_first_release_leaves_hidden_documents_alone(every: int) -> None:
    """Its operations go by the name of the queue. It recovers nothing."""
    for at in range(number_of_commands(Message)):
        steps = made(Message)
        running = stalled(steps, Message().work(), at)
        hidden = [each for each in steps.all() if str(each["q"]).startswith(HIDDEN)]
        old = Message()
        for _ in range(INPUTS):
            (received,) = [steps.run(old.plans.receive(old.waiting, 1, timeout=0))]
            for held in received:
                steps.run(old.plans.release([held]))
        assert steps.run(old.plans.redrive()) == 0
        assert set(steps.run(all_queues.names())) <= {"in", "a", "b"}
        assert hidden == [each for each in steps.all() if str(each["q"]).startswith(HIDDEN)]
        resume(running)
        audit(steps, Message, Counter())


# ---- a message


def stalled(steps: Steps, plan: Plan[Any], at: int) -> Generator[Any, None, Any]:
    """Run a plan up to its command number ``at``."""
    running = steps.steps(plan)
    for _ in range(at + 1):
        next(running, None)
    return running


def stalled_before(
    steps: Steps, plan: Plan[Any], found: Callable[[Any], object]
) -> Generator[Any, None, Any]:
    """Run a plan up to the command that a function finds."""
    running = steps.steps(plan)
    for command in running:
        if found(command):
            return running
    raise AssertionError("there is no such command")


def decides(command: Any) -> bool:
    return isinstance(command, Update) and HANDED in command.update.get("$push", {})


def shows(command: Any) -> bool:
    return isinstance(command, UpdateEach) and "$max" in command.pairs[0][1]


def overwrites(command: Any) -> bool:
    return isinstance(command, UpdateEach) and "handover" in command.pairs[0][1].get("$set", {})


def pulls(command: Any) -> bool:
    return isinstance(command, UpdateEach) and HANDED in command.pairs[0][1].get("$pull", {})


def held_message(steps: Steps, process: Message) -> Any:
    (held,) = steps.run(process.plans.receive(process.waiting, 1, timeout=0))
    return held


def test_finished_message_is_in_the_history_once() -> None:
    for at in range(20):
        steps, process = made(Message), Message(history=HISTORY)
        with suppress(Cut):
            steps.run(process.work(), cut(at, after=True))
        steps.seconds += 61
        steps.run(process.work())
        steps.seconds += 10
        steps.run(recovering.recover_all())
        assert consume(steps) == Message.wanted
        finished = steps.run(process.plans.history())
        assert sorted(each.payload for each in finished) == [0, 1]
        assert {(each.outcome, each.key) for each in finished} == {
            ("committed", "k0"),
            ("committed", "k1"),
        }
        stored = [each for each in steps.all() if "processed" in each]
        assert not any({HANDED, "ended", "key"} & set(each) for each in stored)
        assert steps.run(process.plans.replay([finished[0].id])) == 1
        assert steps.run(process.plans.receive(process.waiting, 1, timeout=0))


def test_former_holder_cannot_touch_its_decision() -> None:
    """Its token does not match any more, also while the outputs are hidden."""
    steps, process = made(Message), Message(history=HISTORY)
    held = held_message(steps, process)
    running = stalled_before(steps, process.split(held), shows)
    before = steps.all()
    for plan in (process.plans.commit, process.plans.rollback, process.plans.release):
        with pytest.raises(LeaseLost):
            steps.run(plan([held]))
    with pytest.raises(LeaseLost):
        steps.run(process.plans.extend([held]))
    assert steps.all() == before
    resume(running)
    assert consume(steps).total() == 3


@pytest.mark.parametrize("taken", [False, True])
def test_call_that_repeats_a_decided_one_shows_nothing_more(taken: bool) -> None:
    """Its reply was lost, and another process showed the outputs. Consumers may have taken them."""
    steps, process = Steps(), Message()
    steps.run(process.plans.push(["n"]))
    held = held_message(steps, process)
    made_of_it = outputs_of(held, "aaa")
    stalled_before(steps, fan_out(process.plans.terms, held, made_of_it), shows).close()
    steps.seconds += 10
    steps.run(recovering.recover("in"))
    if taken:
        assert consume(steps).total() == 3
        with pytest.raises(LeaseLost):  # as a commit that is repeated
            steps.run(fan_out(process.plans.terms, held, made_of_it))
        assert consume(steps).total() == 0
    else:
        steps.run(fan_out(process.plans.terms, held, made_of_it))
        assert consume(steps).total() == 3
    assert not any(str(each["q"]).startswith(HIDDEN) for each in steps.all())


def test_call_without_the_lease_raises_and_writes_nothing() -> None:
    steps, process, thief = Steps(), Message(), Message()
    steps.run(process.plans.push(["n"]))
    held = held_message(steps, process)
    steps.seconds += 61
    assert held_message(steps, thief).id == held.id
    before = steps.all()
    with pytest.raises(LeaseLost) as lost:
        steps.run(process.split(held))
    assert lost.value.lost == (held,)
    assert before == [each for each in steps.all() if each["_id"] != "~queue:a"]


def test_id_that_ends_twice_keeps_its_second_outputs() -> None:
    """The first process sleeps before its last command, until the same id has ended again."""
    steps, process = Steps(), Message()
    steps.run(process.plans.push(["n"], ids=["again"]))
    held = held_message(steps, process)
    slow = stalled_before(steps, process.split(held), lambda each: isinstance(each, Delete))
    steps.seconds += 10
    steps.run(recovering.recover("in"))
    assert steps.run(process.plans.push(["n"], ids=["again"])) == ["again"]
    second = held_message(steps, process)
    stalled_before(steps, process.split(second), shows).close()
    resume(slow)
    steps.seconds += 10
    steps.run(recovering.recover("in"))
    assert consume(steps).total() == 6


def test_push_of_an_id_that_is_handed_over_is_the_same_push() -> None:
    steps, process = Steps(), Message()
    steps.run(process.plans.push(["n"], ids=["again"]))
    running = stalled_before(steps, process.split(held_message(steps, process)), shows)
    before = steps.all()
    assert steps.run(process.plans.push(["n"], ids=["again"])) == ["again"]
    assert steps.all() == before
    resume(running)


def test_key_of_a_message_that_is_handed_over_is_free() -> None:
    steps, process = Steps(), Message()
    for number in range(3):
        assert steps.run(process.plans.push([number], keys=["k"])) != [None]
        held = held_message(steps, process)
        stalled_before(steps, process.split(held), shows).close()
    steps.seconds += 10
    steps.run(recovering.recover("in"))
    assert consume(steps).total() == 9


# ---- copies


def hand_over_one(steps: Steps, copy: Document, source: str = "S") -> None:
    """Let a document leave a source."""
    steps.collection.insert_one({"_id": source, "q": "in", "when": NOW, "token": "t"})
    one = Handover("in", source, "t", [copy])
    match = {"_id": source, "token": "t"}
    assert steps.run(handover.hand_over(one, match, {"$set": {"less": True}})) == "done"
    stored = steps.collection.find_one({"_id": source})
    assert (stored["less"], stored[HANDED]) == (True, [])


@pytest.mark.parametrize("taken", [False, True])
def test_key_is_given_to_a_copy_if_it_is_free(taken: bool) -> None:
    steps, target = Steps(), plans_of("a", Options(dead_letter="dead"))
    if taken:
        steps.run(target.push([0], keys=["k"]))
    copy = {"_id": "C", **transitions.entering("a", NOW), "payload": 1, "key": "k"}
    hand_over_one(steps, copy)
    shown = steps.collection.find_one({"_id": "C"})
    assert shown["q"] == "a"
    assert (shown.get("key"), shown.get("last_key")) == ((None, "k") if taken else ("k", None))


def test_output_whose_id_is_taken_is_refused() -> None:
    """Outputs have new ids, so the taken one is of another message. Nothing is decided."""
    steps, process = made(Message), Message()
    held = held_message(steps, process)
    outputs = outputs_of(held, "aa")
    steps.collection.insert_one({"_id": outputs[1].id, "q": "results"})
    with pytest.raises(DuplicateKey) as clash:
        steps.run(fan_out(process.plans.terms, held, outputs))
    assert clash.value.ids == [outputs[1].id]
    steps.run(process.plans.commit([held]))
    assert consume(steps).total() == 0


def test_holder_reports_copies_that_it_cannot_show(caplog: pytest.LogCaptureFixture) -> None:
    for late, first, level in ((0, False, "ERROR"), (6, False, None), (0, True, None)):
        steps, process = made(Message), Message()
        held = held_message(steps, process)
        running = stalled_before(steps, process.split(held), shows)
        gone: Any = None
        if first:  # another process has shown them all
            steps.run(recovering.recover_queue("in", recovering.NO_GRACE))
        else:
            gone = steps.collection.find_one_and_delete({"q": HIDDEN + "in", "handover.to": "a"})
        steps.seconds += late  # then another process may have shown them
        resume(running)
        assert [each.levelname for each in caplog.records] == ([] if level is None else [level])
        assert level is None or "1 of 3 messages that left" in caplog.text
        assert level is None or str(gone["_id"]) in caplog.text
        caplog.clear()


def test_copy_that_is_scheduled_keeps_its_instant() -> None:
    steps = Steps()
    later = NOW + timedelta(hours=1)
    hand_over_one(steps, {"_id": "C", **transitions.entering("a", later), "payload": 1})
    shown = steps.collection.find_one({"_id": "C"})
    assert shown["when"].replace(tzinfo=NOW.tzinfo) == later
    assert ("a", later) in steps.signals


def test_copies_of_a_dead_holder_stay_for_a_day() -> None:
    """A majority may have another token already, and read older state."""
    steps, process = Steps(), Message()
    steps.run(process.plans.push(["n"]))
    held = held_message(steps, process)
    stalled_before(steps, process.split(held), decides).close()
    steps.seconds += 61
    assert held_message(steps, process).token != held.token
    for seconds, left in ((3600, 3), (DAY, 0)):
        steps.seconds += seconds
        steps.run(recovering.recover("in"))
        assert steps.collection.count_documents({"q": HIDDEN + "in"}) == left


def test_late_show_leaves_the_copies_of_another_holder_hidden() -> None:
    """In between, a copy of the same id came from a holder that decided nothing."""
    steps = made(Pack)
    latest = stalled(steps, Pack().work(), 1)
    steps.seconds += 61
    late = stalled_before(steps, Pack().work(), shows)
    steps.seconds += 61
    steps.run(Pack().work())
    seen = consume(steps)
    assert seen == Pack.wanted
    next(latest)  # its copies are stored, and then it decides in vain
    assert steps.collection.count_documents({"q": HIDDEN + "in"}) == len(PARTS[0])
    resume(late)
    resume(latest)
    audit(steps, Pack, seen)


def test_former_holder_overwrites_no_copy_of_a_later_one() -> None:
    """It found a copy of the same id, made sure that it held the source, and slept."""
    steps = made(Pack)
    stalled_before(steps, Pack().work(), decides).close()
    steps.seconds += 61
    former = stalled_before(steps, Pack().work(), overwrites)
    steps.seconds += 61
    later = stalled_before(steps, Pack().work(), shows)
    resume(former)
    resume(later)
    seen = consume(steps)
    assert seen == Pack.wanted
    audit(steps, Pack, seen)


def test_claim_shows_nothing_that_a_fail_over_undid() -> None:
    steps = made(Pack)
    first = stalled_before(steps, Pack().work(), decides)
    undecided = steps.all()
    next(first)
    steps.seconds += 61
    second = stalled(steps, Pack().work(), 1)  # it has claimed, and has seen the decision
    steps.safe = undecided
    steps.fail_over()
    resume(second)
    audit(steps, Pack, consume(steps))


def test_two_handovers_of_one_claim_end_apart() -> None:
    steps = made(Pack)
    steps.collection.update_one({"_id": "P"}, {"$set": {"token": "t"}})
    one = stalled_before(steps, Pack().leave("t", PARTS[0]), pulls)
    two = stalled_before(steps, Pack().leave("t", PARTS[1]), shows)
    resume(one)
    two.close()
    audit(steps, Pack, consume(steps))


# ---- recovery


def test_recovery_finds_sources_behind_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders died, and left more copies than a pass reads."""
    monkeypatch.setattr(recovering, "PAGE_SIZE", 10)
    steps, process = made(Message), Message()
    hidden = {"q": HIDDEN + "in", "when": NOW, "handover": {"to": "a", "source": 0, "token": "x"}}
    steps.collection.insert_many([{**hidden, "_id": f"old {n:02}"} for n in range(55)])
    held = held_message(steps, process)
    stalled_before(steps, process.split(held), shows).close()
    steps.seconds += 10
    start, _ = steps.run(recovering.recover("in"))
    assert start is not None
    assert consume(steps).total() == 3
    passes = 1
    while start is not None:
        start, _ = steps.run(recovering.recover("in", start))
        passes += 1
    assert passes == 5, "it continues where the last pass ended"


def test_consumers_recover_from_time_to_time() -> None:
    """Also while the queue is paused."""
    steps, dead, consumer = made(Message), Message(), Message()
    held = held_message(steps, dead)
    stalled_before(steps, dead.split(held), shows).close()
    steps.run(dead.plans.pause(True))
    steps.run(consumer.plans.receive(consumer.waiting, 1, timeout=0))
    assert consume(steps).total() == 0
    steps.seconds += 11
    steps.run(consumer.plans.receive(consumer.waiting, 1, timeout=0))
    assert consume(steps).total() == 3
    steps.run(consumer.plans.receive(consumer.waiting, 1, timeout=0))
    asked = [each for each in steps.commands if HIDDEN in str(getattr(each, "filter", ""))]
    assert asked == [], "once in ten seconds"


@pytest.mark.parametrize("kind", [Message, Pack])
def test_deleted_queue_hides_nothing_that_was_decided(kind: type[Process]) -> None:
    """A holder decides just before or while its queue is deleted, and dies."""
    at, more = 0, True
    while more:
        steps = made(kind)
        holder = stalled_before(steps, kind().work(), decides)
        deleting = steps.steps(all_queues.delete_queue("in", True))
        for _ in range(at):
            more = next(deleting, None) is not None
        decided = False
        with suppress(LeaseLost):
            decided = shows(next(holder))
        holder.close()
        resume(deleting)
        assert consume(steps).total() == decided * (3 if kind is Message else len(PARTS[0]))
        assert not any(each["q"] == "in" for each in steps.all())
        at += 1
    assert at > 8


def test_client_recovers_all_queues_once_a_minute() -> None:
    """Also those that have no consumer: here the queue was deleted by an older release."""
    steps, dead = made(Message), Message()
    stalled_before(steps, dead.split(held_message(steps, dead)), shows).close()
    steps.collection.delete_many({"q": "in"})
    sweep, other = recovering.Sweep(), plans_of("other", Options(dead_letter="dead"))
    passes = 0
    for _ in range(100):
        for number in range(2):  # two queues of one client
            waiting = Waiters(f"other {number}", sweep=sweep)
            steps.run(other.receive(waiting, 1, timeout=0))
            passes += any(isinstance(each, Distinct) for each in steps.commands)
        steps.seconds += 6
    assert 600 / 90 <= passes <= 600 / 30
    assert consume(steps).total() == 3


def test_ended_sources_lie_before_all_copies() -> None:
    steps, process = made(Message), Message()
    held = held_message(steps, process)
    assert not steps.run(recovering.pending("in"))
    stalled_before(steps, process.split(held), shows).close()
    assert steps.run(recovering.pending("in"))
    (source,) = [each for each in steps.all() if "ended" in each]
    assert source["when"] == FIRST


ODD: list[Document] = [
    {"ended": 1},
    {"ended": {"at": NOW}, HANDED: [{"h": "t", "ids": ["x"]}]},
    {"ended": {"at": NOW, "token": "t", "put": 1}, HANDED: [{"h": "t", "ids": ["x"]}]},
    {"ended": {"at": NOW, "token": "t"}, HANDED: 1},
    {"ended": {"at": NOW, "token": "t"}, HANDED: [1]},
    {"ended": {"at": NOW, "token": "t"}, HANDED: [{"h": "t", "ids": 1}]},
    {"ended": {"at": NOW, "token": "t"}, HANDED: [{"h": "t", "ids": []}]},
    {"handover": 1},
    {"handover": {"to": 1, "token": "t", "source": "x"}},
    {"handover": {"to": "a", "token": 1, "source": "x"}},
    {"payload": 1},
]


def test_odd_documents_stop_no_recovery() -> None:
    """Any program may write to the collection."""
    steps, process = made(Message), Message()
    odd = [
        {"_id": f"odd {n}", "q": HIDDEN + "in", "when": FIRST, **each} for n, each in enumerate(ODD)
    ]
    odd.append({"_id": 5, "q": HIDDEN + "in", "when": FIRST, "handover": {"to": "a", "token": "t"}})
    steps.collection.insert_many(odd)
    held = held_message(steps, process)
    stalled_before(steps, process.split(held), shows).close()
    steps.collection.update_one({"_id": "odd 0"}, {"$set": {"token": [1]}})
    steps.seconds += 10
    steps.run(recovering.recover("in"))
    assert consume(steps).total() == 3
    stored = {each["_id"] for each in steps.all()}
    assert {each["_id"] for each in odd} - stored == {5}, "deleted, as no source has its token"
