"""Gathers under faults: at each command a process dies, sleeps, or meets another process.

Whatever happens, the message of a gather enters its queue once, and never while a message of the
gather is there. It never does if the process that pushes dies before the seal.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest
from bson import ObjectId
from bson.datetime_ms import DatetimeMS

from pyqueue import LeaseLost, QueueError, Unavailable
from pyqueue.backends import freeing, gathering, managing, recovering, requeueing
from pyqueue.backends.expiring import end_expired
from pyqueue.backends.gathering import Known, Route
from pyqueue.backends.hidden import GATHERS
from pyqueue.backends.kind import lookup
from pyqueue.backends.outputs import Output, Then
from pyqueue.backends.pushing import Content
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules.ticking import find_due, tick_each
from pyqueue.backends.settling import fan_out, finish_cancelled
from pyqueue.facts import Gather, Keep
from pyqueue.requests import Document, Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import each_command
from tests.plans.runner import Runner, after, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, lasting, resume

ID: Final = ObjectId()
HOLD, END = Gather(ID, "hold"), Gather(ID, "end")
STANDARD = lookup("standard")
DAY = 86400


# ---- processes


def begin(**more: Any) -> Plan[None]:
    """Begin the gather whose message goes to the queue "report"."""
    return gathering.begin(Content(None, "done", id=ID, **more), Route("report"))


def push(payload: Any, gather: Gather = HOLD, queue: str = "a", **how: Any) -> Plan[Any]:
    return standard(queue).push([payload], gathers=[gather], **how)


def gathers(number: int = 2, gather: Gather = HOLD) -> Plan[None]:
    """Push messages as a block of ``Client.gather`` does, and look at the end."""
    yield from begin()
    for payload in range(number):
        yield from push(payload, gather)
    yield from gathering.seal(ID)
    yield from look()


def look(id: Any = ID) -> Plan[None]:
    yield from gathering.look(id, Known())


def receive(queue: str = "a", limit: int = 1) -> Plan[list[Any]]:
    return standard(queue, max_tries=3).receive(Waiters(queue), limit, timeout=0)


def commit(held: Any) -> Plan[None]:
    return standard(held.queue).commit([held])


def bury(held: Any) -> Plan[None]:
    return standard(held.queue).bury([held], error="bad")


def works(act: Callable[[Any], Plan[None]] = commit, queue: str = "a") -> Plan[None]:
    """Receive a message, act on it, and look, as a worker does."""
    for held in (yield from receive(queue)):
        with suppress(LeaseLost):
            yield from act(held)
    yield from look()


def ticks() -> Plan[None]:
    """Do what a process does that ticks schedules."""
    waiting = Waiters(SCHEDULES)
    ids, _ = yield from find_due(waiting, set())
    yield from tick_each(waiting, ids)


# ---- judgement


def stored(steps: Steps, **match: Any) -> list[Document]:
    found = [each for each in steps.all() if "record" not in each]
    return [each for each in found if match.items() <= each.items()]


def reports(steps: Steps) -> list[Document]:
    return stored(steps, q="report")


def members(steps: Steps, id: Any = ID) -> list[Document]:
    return [each for each in steps.all() if each.get("gather", {}).get("id") == id]


def is_sealed(steps: Steps) -> bool:
    """Return whether the message of the gather waits to enter, or has entered."""
    return bool(reports(steps)) or any("sealed" in each for each in stored(steps, _id=ID))


def check(steps: Steps) -> None:
    """Check that the message has not entered too early or twice."""
    found = list(steps.collection.find({"q": "report", "record": {"$exists": False}}))
    assert len(found) <= 1
    if found:
        assert members(steps) == [], "too early"
        assert found[0]["_id"] == ID
        assert not {"then", "sealed", "pause", "gather"} & set(found[0])


def consume(*queues: str) -> Plan[None]:
    """Finish the messages of some queues."""
    for queue in queues:
        for held in (yield from receive(queue, 100)):
            yield from commit(held)


def audit(steps: Steps, sealed: bool, *queues: str) -> None:
    """Let other processes finish everything. Check whether the message enters."""
    check(steps)
    for _ in range(3):
        steps.seconds += 100
        steps.run(recovering.recover_all())
        check(steps)
        steps.run(consume("a", "b", "c", "a.dead", *queues))
        check(steps)
        steps.run(ticks())
        check(steps)
    assert len(reports(steps)) == int(sealed)
    steps.seconds += 2 * DAY
    steps.run(ticks())
    steps.run(ticks())
    assert stored(steps, q=GATHERS) == [], "an abandoned gather is left"
    assert len(reports(steps)) == int(sealed), "late"


def open_gather(number: int = 2, gather: Gather = HOLD, sealed: bool = True) -> Steps:
    """Return a store with a gather and its messages in the queue "a"."""
    steps = lasting()
    steps.run(begin())
    for payload in range(number):
        steps.run(push(payload, gather))
    if sealed:
        steps.run(gathering.seal(ID))
    return steps


# ---- faults


@pytest.mark.parametrize("fault", FAULT_AT)
def test_pusher_has_a_fault_anywhere(fault: str) -> None:
    """Without the seal, the message never enters, even if all messages have ended."""
    outcomes = set()
    for at in itertools.count():
        steps = Steps()
        with suppress(Cut, Unavailable):
            steps.run(gathers(), FAULT_AT[fault](at))
        done = len(steps.commands) <= at
        outcomes.add(is_sealed(steps))
        audit(steps, is_sealed(steps))
        if done:
            assert is_sealed(steps)
            break
    assert outcomes == {True, False}


@pytest.mark.parametrize("act", [commit, bury], ids=["commits", "buries"])
@pytest.mark.parametrize("fault", FAULT_AT)
def test_last_worker_has_a_fault_anywhere(fault: str, act: Callable[[Any], Plan[None]]) -> None:
    for at in itertools.count():
        steps = open_gather(1, END)
        with suppress(Cut, QueueError):
            steps.run(works(act), FAULT_AT[fault](at))
        done = len(steps.commands) <= at
        audit(steps, True)
        if done:
            return


@each_command(3)
def test_two_workers_end_the_last_two_messages(every: int) -> None:
    """Each sleeps before each of its commands; either resumes first."""
    steps = open_gather()
    steps.run(works())
    places = range(0, len(steps.commands) + 1, every)
    for number, (first, second) in enumerate(itertools.product(places, places)):
        steps = open_gather()
        running = [steps.stalled(works(), at) for at in (first, second)]
        for sleeper in running if number % 2 else reversed(running):
            if sleeper is not None:
                resume(sleeper)
                check(steps)
        assert len(reports(steps)) == 1, "neither saw that both had ended"


@each_command(2)
def test_worker_ends_messages_while_the_pusher_sleeps(every: int) -> None:
    """Messages end before the seal, at each command of the pusher."""
    for at in range(0, 99, every):
        steps = Steps()
        pusher = steps.stalled(gathers(), at)
        for _ in range(2):
            steps.run(works())
            check(steps)
        if pusher is None:
            assert at > 8
            return
        assert reports(steps) == [] or is_sealed(steps)
        resume(pusher)
        check(steps)
        audit(steps, True)


@each_command(3)
def test_slow_look_is_overtaken_anywhere(every: int) -> None:
    """One process has found that all ended; another lets the message enter, and it is finished."""
    for at in range(0, 99, every):
        steps = open_gather(1)
        steps.run(standard().purge())
        slow = steps.stalled(look(), at)
        steps.run(look())
        steps.run(consume("report"))
        if slow is None:
            assert at >= 3
            return
        resume(slow)
        assert reports(steps) == [], "it entered twice"
        assert stored(steps, q=GATHERS) == []


def acts(choose: random.Random) -> Callable[[Any], Plan[None]]:
    """Return one of the things that a worker does with a message."""

    def moves(held: Any) -> Plan[None]:
        to = choose.choice(["b", "c"])
        return standard(held.queue).move([(held, held.payload)], to=to)

    def retries(held: Any) -> Plan[None]:
        return standard(held.queue, max_tries=3).rollback([held], delay=0, error="no")

    def releases(held: Any) -> Plan[None]:
        return standard(held.queue).release([held])

    def adds(held: Any) -> Plan[None]:
        yield from push("more", held.gather, "b")
        yield from commit(held)

    def splits(held: Any) -> Plan[None]:
        outputs = [Output(ObjectId(), standard(each).target, each, None) for each in ("b", "c")]
        yield from fan_out(standard(held.queue).terms, held, outputs)

    def sends_back(held: Any) -> Plan[None]:
        yield from bury(held)
        yield from managing.redrive(f"{held.queue}.dead", STANDARD, None)

    return choose.choice([commit, moves, retries, releases, adds, splits, sends_back])


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(4), id="some"), pytest.param(range(4, 200), marks=pytest.mark.slow)],
)
def test_processes_interleave_and_die_anywhere(seeds: range) -> None:
    """A pusher, workers and schedulers take turns at each command, and some of them die."""
    outcomes = set()
    for seed in seeds:
        choose = random.Random(seed)
        steps = Steps()
        queues = [choose.choice(["a", "a", "b", "c"]) for _ in range(8)]
        plans: list[Plan[Any]] = [gathers(3), *(works(acts(choose), each) for each in queues)]
        plans += [ticks(), ticks(), recovering.recover_queue("a", recovering.NO_GRACE)]
        running = [steps.steps(each) for each in plans]
        deadly = choose.choice([0, 0, 0.02])
        while running:
            process = choose.choice(running)
            steps.seconds += choose.choice([*[0] * 9, 1])  # no lease ends in between
            try:
                if choose.random() < deadly:
                    running.remove(process)
                    process.close()
                else:
                    next(process)
            except (StopIteration, QueueError):
                running.remove(process)
            check(steps)
        outcomes.add(is_sealed(steps))
        audit(steps, is_sealed(steps), "b.dead", "c.dead")
    assert True in outcomes


# ---- what ends a message for its gather


def replace(gather: Gather | None = None) -> Plan[Any]:
    return standard().push(["y"], keys=["k"], on_duplicate="replace", gathers=[gather])


def held_of(steps: Steps, queue: str = "a") -> Any:
    (held,) = steps.run(receive(queue))
    return held


def entered(steps: Steps) -> bool:
    """Look, and return whether the message has entered."""
    steps.run(look())
    check(steps)
    return bool(reports(steps))


STAYS: Final[dict[str, Callable[[Any], Plan[Any]]]] = {
    "rollback": lambda held: standard().rollback([held], delay=0),
    "release": lambda held: standard().release([held]),
    "move": lambda held: standard().move([(held, held.payload)], to="b"),
    "burial": bury,
    "last try": lambda held: standard(max_tries=1).rollback([held], error="no"),
    "force_release": lambda held: freeing.force_release(held.id),
    "replace": lambda held: replace(HOLD),
}


@pytest.mark.parametrize("act", STAYS)
def test_message_stays_in_its_gather(act: str) -> None:
    steps = open_gather(0)
    steps.run(push("x", keys=["k"]))
    steps.run(STAYS[act](held_of(steps)))
    assert not entered(steps)
    assert len(members(steps)) == 1
    audit(steps, True)


def test_dead_letter_that_is_sent_back_stays() -> None:
    steps = open_gather(1)
    steps.run(bury(held_of(steps)))
    steps.run(managing.redrive("a.dead", STANDARD, None))
    assert not entered(steps)
    steps.run(commit(held_of(steps)))
    assert entered(steps)


HISTORY: Final = standard(history=60)
ENDS: Final[dict[str, tuple[Gather, Callable[[Any], Plan[Any]], bool]]] = {
    "commit": (HOLD, commit, True),
    "commit with history": (HOLD, lambda held: HISTORY.commit([held]), True),
    "commit in a dead-letter queue": (HOLD, lambda held: buried_then(held, commit), True),
    "burial": (END, bury, True),
    "last try": (END, lambda held: standard(max_tries=1).rollback([held], error="no"), True),
    "claimed too often": (END, lambda held: lapsing(held), False),
    "cancelled": (HOLD, lambda held: finish_cancelled(HISTORY.terms, [held]), True),
    "remove": (HOLD, lambda held: freed_then(held, standard().remove(held.id)), True),
    "remove with history": (HOLD, lambda held: freed_then(held, HISTORY.remove(held.id)), True),
    "replace": (HOLD, lambda held: replace(), True),
    "replace by another gather": (HOLD, lambda held: replace(Gather("g", "hold")), True),
    "pop": (HOLD, lambda held: freed_then(held, pop(standard())), False),
    "pop with history": (HOLD, lambda held: freed_then(held, pop(HISTORY)), False),
    "purge": (HOLD, lambda held: freed_then(held, standard().purge()), False),
}


def pop(plans: QueuePlans) -> Plan[Any]:
    return plans.receive(Waiters("a"), 1, timeout=0, pop=True)


def buried_then(held: Any, act: Callable[[Any], Plan[None]]) -> Plan[None]:
    yield from bury(held)
    (dead,) = yield from receive("a.dead")
    yield from act(dead)


def freed_then(held: Any, plan: Plan[Any]) -> Plan[None]:
    yield from standard().release([held])
    yield from plan


def lapsing(held: Any) -> Plan[None]:
    """Let another consumer find that a message was claimed too often."""
    yield from freeing.force_release(held.id)
    yield from standard(max_tries=1).receive(Waiters("a"), 1, timeout=0)


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_message_ends_its_gather(end: str) -> None:
    gather, act, looks = ENDS[end]
    steps = open_gather(0)
    steps.run(push("x", gather, keys=["k"]))
    held = held_of(steps)
    steps.looked.clear()
    steps.run(act(held))
    assert steps.looked[-1:] == [ID] * looks, "who ends a message looks, with few exceptions"
    assert members(steps) == []
    for each in stored(steps, _id=held.id):
        assert each.get("last_gather", gather.stored()) == gather.stored()
    assert entered(steps)


@pytest.mark.parametrize("end", [end_expired, receive])
def test_expired_message_ends_its_gather(end: Callable[[], Plan[Any]]) -> None:
    """In a pass over expired messages, and at a claim."""
    steps = open_gather(0)
    steps.run(push("x", expires=[5]))
    steps.looked.clear()
    steps.seconds += 6
    steps.run(end())
    assert steps.looked == [ID]
    assert entered(steps)


def test_end_that_keeps_its_key_ends_its_gather() -> None:
    steps = open_gather(0)
    steps.run(push("x", keys=["k"], keeps=[Keep(None, unique=60)]))
    held = held_of(steps)
    steps.looked.clear()
    steps.run(commit(held))
    assert steps.looked == [ID]
    (end,) = stored(steps, _id=held.id)
    assert (end["key"], end["last_gather"]) == ("k", HOLD.stored())
    assert entered(steps)


def test_finished_message_is_not_in_its_gather_again() -> None:
    """After a replay, and after a redrive of a dead letter that has ended."""
    steps = open_gather(2, END)
    first, second = held_of(steps), held_of(steps)
    steps.run(HISTORY.commit([first]))
    steps.run(bury(second))
    assert entered(steps)
    assert steps.run(HISTORY.replay([first.id])) == 1
    assert steps.run(requeueing.requeue(standard("a.dead").terms, second.id))
    check(steps)


def test_end_before_the_seal_is_not_enough() -> None:
    steps = open_gather(1, sealed=False)
    steps.run(works())
    assert not entered(steps)
    steps.run(gathering.seal(ID))
    assert steps.looked[-1] == ID
    assert entered(steps)


def test_gather_without_messages_ends_at_its_seal() -> None:
    steps = open_gather(0)
    assert entered(steps)


def test_holder_of_a_message_adds_another() -> None:
    steps = open_gather(1)
    held = held_of(steps)
    steps.run(push("more", held.gather))
    steps.run(commit(held))
    assert not entered(steps)
    steps.run(commit(held_of(steps)))
    assert entered(steps)


def test_seal_of_a_deleted_gather_fails() -> None:
    steps = open_gather(1, sealed=False)
    steps.seconds = DAY + 1
    steps.run(ticks())
    with pytest.raises(Unavailable, match="because its gather was not sealed within a day"):
        steps.run(gathering.seal(ID))
    audit(steps, False)


# ---- the message


def test_message_has_the_options_of_its_answer() -> None:
    steps = Steps()
    content = Content(None, {"n": 1}, {"h": 1}, "k", ID)
    steps.run(gathering.begin(content, Route("report", 60)))
    steps.run(gathering.seal(ID))
    steps.seconds = 5
    assert entered(steps)
    (found,) = [each for each in reports(steps) if each["_id"] == ID]
    assert (found["payload"], found["headers"], found["key"]) == ({"n": 1}, {"h": 1}, "k")
    assert (found["when"], found["due"], found["tries"]) == (after(65), after(65), 0)
    assert [(each.event, each.queue, each.items) for each in steps.told] == [
        ("pushed", "report", [ID])
    ]
    assert steps.signals[-1] == ("report", after(65))


def test_message_enters_without_a_taken_key() -> None:
    steps = Steps()
    steps.run(begin(key="k"))
    steps.run(gathering.seal(ID))
    steps.run(standard("report").push(["there"], keys=["k"]))
    steps.run(look())
    (found,) = [each for each in reports(steps) if each["_id"] == ID]
    assert "key" not in found


# ---- looks of a process that ticks


def test_looks_become_rare_while_a_message_is_there() -> None:
    steps = open_gather(1)
    (record,) = stored(steps, q=GATHERS)
    pauses = []
    for _ in range(8):
        before = record["when"]
        steps.seconds = (before - after(0)).total_seconds() - 0.001
        steps.run(ticks())
        assert stored(steps, q=GATHERS) == [record], "it was looked at too early"
        steps.seconds += 0.001
        steps.run(ticks())
        (record,) = stored(steps, q=GATHERS)
        pauses.append((record["when"] - before).total_seconds())
    assert pauses == [20, 40, 80, 160, 300, 300, 300, 300]


def test_one_process_looks_when_a_look_is_due() -> None:
    steps = open_gather(1)
    steps.seconds = 11
    sleepers = [steps.stalled(ticks(), at) for at in (2, 2)]
    numbers = []
    for each in sleepers:
        assert each is not None
        numbers.append(sum(1 for _ in each))
    assert numbers[0] > numbers[1]


@pytest.mark.parametrize("then", [None, {}, {"to": 1}, {"to": "a b"}], ids=repr)
def test_record_of_another_program_is_left_alone(then: Any) -> None:
    steps = open_gather(0)
    steps.collection.update_one({"_id": ID}, {"$set": {"then": then, "pause": "x"}})
    for _ in range(2):
        steps.seconds += 400
        steps.run(ticks())
    assert [each["_id"] for each in stored(steps, q=GATHERS)] == [ID]


def test_doctor_looks_at_what_is_due() -> None:
    steps = open_gather(1)
    steps.run(standard().purge())
    assert steps.run(gathering.look_at_due(10)) == (1, 0), "it is not due"
    steps.seconds = 11
    assert steps.run(gathering.look_at_due(10)) == (0, 1)
    assert len(reports(steps)) == 1


def test_date_before_year_1_holds_up_no_look() -> None:
    runner = Runner([{"_id": ID, "q": GATHERS, "when": DatetimeMS(-(1 << 62))}], 1)
    assert runner.run(gathering.look_at_due(10)) == (1, 0)


# ---- outputs of Many


def output(queue: str, payload: Any = "y", id: Any = None) -> Output:
    return Output(id or ObjectId(), standard(queue).target, payload, None)


def splits(gather: Gather | None = None) -> tuple[Steps, Any]:
    """Return a store, and the reservation of a message that is to become several."""
    steps = lasting()
    if gather is None:
        steps.run(standard().push(["x"]))
    else:
        steps.run(begin())
        steps.run(push("x", gather))
        steps.run(gathering.seal(ID))
    return steps, held_of(steps)


def many(
    held: Any, outputs: list[Output], then: Output, history: float | None = None
) -> Plan[None]:
    return fan_out(standard(history=history).terms, held, outputs, Then(then))


@pytest.mark.parametrize("history", [pytest.param(None, marks=pytest.mark.slow), 600])
@pytest.mark.parametrize("fault", FAULT_AT)
def test_holder_has_a_fault_anywhere_in_many(fault: str, history: float | None) -> None:
    """Either the message is there, or its outputs and their gather are."""
    outcomes = set()
    for at in itertools.count():
        steps, held = splits()
        outputs, then = [output("b"), output("c")], output("report", "done", ID)
        with suppress(Cut, QueueError):
            steps.run(many(held, outputs, then, history), FAULT_AT[fault](at))
        done = len(steps.commands) <= at
        if "loses" in fault:
            with suppress(LeaseLost):
                steps.run(many(held, outputs, then, history))
        check(steps)
        steps.run(recovering.recover_queue("a", recovering.NO_GRACE))
        check(steps)
        decided = not stored(steps, q="a", payload="x", when=held.until)
        outcomes.add(decided)
        assert len(members(steps)) == 2 * decided
        assert len(stored(steps, q=GATHERS, _id=ID)) == int(decided)
        audit(steps, decided)
        if done:
            assert decided
            break
    assert True in outcomes


@each_command(3)
def test_outputs_end_while_their_holder_sleeps(every: int) -> None:
    """They may end before the record of their gather is published."""
    for at in range(0, 99, every):
        steps, held = splits()
        outputs, then = [output("b"), output("c")], output("report", "done", ID)
        holder = steps.stalled(many(held, outputs, then), at)
        steps.run(works(queue="b"))
        steps.run(works(queue="c"))
        check(steps)
        if holder is None:
            assert at > 6
            return
        resume(holder)
        steps.run(look())
        audit(steps, True)


def test_outputs_inherit_the_gather_of_their_message() -> None:
    steps, held = splits(HOLD)
    steps.run(fan_out(standard().terms, held, [output("b"), output("c")]))
    assert not entered(steps)
    assert sorted(each["q"] for each in members(steps)) == ["b", "c"]
    steps.run(consume("b", "c"))
    assert entered(steps)


def test_gather_inside_a_gather_holds_it_open() -> None:
    """The inner message is one of the outer gather, also while it is hidden."""
    steps, held = splits(HOLD)
    inner = ObjectId()
    steps.run(many(held, [output("b")], output("c", "inner", inner)))
    assert [each["q"] for each in members(steps)] == [GATHERS]
    assert [each["q"] for each in members(steps, inner)] == ["b"]
    assert not entered(steps)
    steps.run(consume("b"))
    steps.run(look(inner))
    assert [each["q"] for each in members(steps)] == ["c"]
    assert not entered(steps)
    steps.run(consume("c"))
    assert entered(steps)


def test_undecided_copies_are_in_no_gather() -> None:
    """Their holder died. They stay for a day, and must not hold the gather open."""
    steps, held = splits(HOLD)
    with suppress(Cut):
        steps.run(fan_out(standard().terms, held, [output("b")]), FAULT_AT["dies after"](2))
    copies = [each for each in steps.all() if str(each["q"]).startswith("~handover")]
    assert len(copies) == 1
    steps.seconds = 61
    steps.run(commit(held_of(steps)))
    assert entered(steps)


def test_history_of_a_split_message_has_left_its_gather() -> None:
    steps = lasting()
    steps.run(begin())
    steps.run(push("x"))
    steps.run(gathering.seal(ID))
    held = held_of(steps)
    steps.run(fan_out(HISTORY.terms, held, [output("b")]))
    (found,) = stored(steps, _id=held.id)
    assert ("gather" in found, found["last_gather"]) == (False, HOLD.stored())


def test_who_shows_a_record_looks() -> None:
    steps, held = splits()
    steps.run(many(held, [], output("report", "done", ID)))
    assert steps.looked == [ID]
    assert entered(steps)


# ---- fail-overs


def test_message_that_a_majority_still_has_holds_the_gather() -> None:
    """A fail-over could bring the message back, and its gather must not have ended by then."""
    steps = lasting()
    steps.run(gathers(1))
    before = steps.all()
    (held,) = steps.run(receive())
    steps.run(commit(held))
    steps.safe = before
    steps.run(look())
    assert steps.run(receive("report")) == []
    steps.safe = steps.all()
    steps.run(look())
    assert [each.id for each in steps.run(receive("report"))] == [ID]
