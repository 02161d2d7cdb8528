"""Pushes into several queues under faults: at each command a process dies, or meets another.

Whatever happens, each of the queues gets the message once, or none of them gets it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Final

import pytest

from pyqueue import Client, DuplicateKey, Unavailable
from pyqueue.backends import gathering, recovering
from pyqueue.backends.also import AlsoPlans
from pyqueue.backends.gathering import Known, Route
from pyqueue.backends.hidden import ENDED, HANDED, MARK, is_open
from pyqueue.backends.pushing import Content
from pyqueue.backends.transitions import HIDDEN
from pyqueue.cli.doctor import check_handovers
from pyqueue.facts import Gather
from pyqueue.requests import Delete, Document, Insert, Plan, Update, UpdateEach
from tests.plans.faults import each_command
from tests.plans.runner import standard
from tests.plans.steps import FAULT_AT, Cut, Fault, Steps, resume

some_or_every = each_command(2)
DAY: Final = 86400
#: The queue of the push, and the other queues.
QUEUES: Final = ("a", "b", "c")


def push(**how: Any) -> Plan[Any]:
    """Push a message into all queues."""
    return AlsoPlans(standard("a"), QUEUES[1:]).push(["x"], **how)


def push_again() -> Plan[Any]:
    """Push the same message each time."""
    return push(ids=["m"])


@cache
def stored() -> list[Document]:
    """Return the records of the queues."""
    steps = Steps()
    for each in QUEUES:
        steps.run(standard(each).pause(False))
    return steps.all()


def made() -> Steps:
    return Steps(stored())


def messages(steps: Steps, queue: str) -> list[Document]:
    """Return the messages of a queue, in the form of any other message."""
    found = [each for each in steps.all() if each.get("q") == queue and "record" not in each]
    assert not any({MARK, HANDED, ENDED, "token"} & set(each) for each in found)
    return found


def hidden(steps: Steps) -> list[Document]:
    return [each for each in steps.all() if str(each.get("q")).startswith(HIDDEN)]


def number_of_messages(steps: Steps) -> int:
    """Return how many messages each queue has."""
    numbers = {len(messages(steps, each)) for each in QUEUES}
    assert len(numbers) == 1, "some queues only"
    return numbers.pop()


def audit(steps: Steps) -> int:
    """Let other processes recover. Return how often each queue has got the message."""
    steps.seconds += 100
    steps.run(recovering.recover_all())
    number = number_of_messages(steps)
    for _ in range(2):
        steps.seconds += 2 * DAY
        steps.run(recovering.recover_all())
    assert number_of_messages(steps) == number, "late"
    assert hidden(steps) == []
    return number


def number_of_commands(plan: Callable[[], Plan[Any]] = push) -> int:
    steps = made()
    steps.run(plan())
    return len(steps.commands)


def stalled_before(steps: Steps, kind: type, plan: Callable[[], Plan[Any]] = push) -> Any:
    """Run a push up to its first command of a kind."""
    running = steps.steps(plan())
    for command in running:
        if type(command) is kind:
            return running
    raise AssertionError("there is no such command")


# ---- without faults


def test_each_queue_gets_an_ordinary_message() -> None:
    steps = made()
    (id,) = steps.run(push(headers={"h": 1}, delay=60))
    steps.run(standard("a").push(["x"], headers={"h": 1}, delay=60))
    first, second = messages(steps, "a")
    assert first["_id"] == id
    assert {**first, "_id": None} == {**second, "_id": None}
    copies = [*messages(steps, "b"), *messages(steps, "c")]
    assert [{**each, "_id": 0, "q": ""} for each in copies] == [{**first, "_id": 0, "q": ""}] * 2
    assert len({id, *(each["_id"] for each in copies)}) == 3
    assert [each for each, _ in steps.signals] == [*QUEUES, "a"]
    assert hidden(steps) == []


def test_push_takes_four_commands() -> None:
    """Records apart, which a client remembers."""
    steps = made()
    steps.run(push())
    writes = [each for each in steps.commands if isinstance(each, Insert | Update | UpdateEach)]
    assert [type(each) for each in writes] == [Insert, Update, UpdateEach]
    assert all(each.majority for each in writes)
    assert isinstance(steps.commands[-1], Delete)
    assert len(writes[0].documents) == 1 + len(QUEUES)  # type: ignore[union-attr]


def test_hooks_hear_of_each_copy_once() -> None:
    """The caller reports its own message, as after any push."""
    steps = made()
    steps.run(push())
    assert [(each.event, each.queue) for each in steps.told] == [("pushed", "b"), ("pushed", "c")]
    for queue, each in zip("bc", steps.told, strict=True):
        assert each.items == [message["_id"] for message in messages(steps, queue)]
    steps = made()
    stalled_before(steps, UpdateEach).close()
    assert steps.told == []
    audit(steps)
    assert sorted(each.queue for each in steps.told) == ["b", "c"]


# ---- faults


@pytest.mark.parametrize("fault", FAULT_AT.values(), ids=FAULT_AT)
def test_fault_anywhere_is_all_or_none(fault: Callable[[int], Fault]) -> None:
    numbers = []
    for at in range(number_of_commands()):
        steps = made()
        done = None
        with suppress(Cut, Unavailable):
            done = steps.run(push(), fault(at))
        numbers.append(audit(steps))
        assert done is None or numbers[-1] == 1
    assert numbers == sorted(numbers), "the decision is one command"
    assert set(numbers) == {0, 1}


@pytest.mark.parametrize("fault", FAULT_AT.values(), ids=FAULT_AT)
@pytest.mark.parametrize("pause", [0, 100, 2 * DAY])
def test_push_repeated_after_a_fault_is_one(fault: Callable[[int], Fault], pause: int) -> None:
    for at in range(number_of_commands(push_again)):
        steps = made()
        with suppress(Cut, Unavailable):
            steps.run(push_again(), fault(at))
        steps.seconds += pause
        if pause:
            steps.run(recovering.recover_all())
        assert steps.run(push_again()) == ["m"]
        assert messages(steps, "a")[0]["_id"] == "m"
        assert audit(steps) == 1


@some_or_every
def test_two_pushes_with_one_id_are_one(every: int) -> None:
    """Each sleeps before each of its commands; either resumes first."""
    places = range(0, number_of_commands(push_again) + 3, every)
    for first, second in itertools.product(places, places):
        for order in ((0, 1), (1, 0)):
            steps = made()
            running = [steps.stalled(push_again(), at) for at in (first, second)]
            for place in order:
                sleeper = running[place]
                if sleeper is not None:
                    assert resume(sleeper) == ["m"]
            assert audit(steps) == 1


@some_or_every
def test_push_and_plain_push_with_one_id_are_one(every: int) -> None:
    """The plain push may come first. Then the other queues get no copy."""
    for at in range(0, number_of_commands(push_again) + 1, every):
        steps = made()
        running = steps.stalled(push_again(), at)
        with suppress(DuplicateKey):  # the other one has decided, and has published nothing yet
            assert steps.run(standard("a").push(["x"], ids=["m"])) == ["m"]
        if running is not None:
            assert resume(running) == ["m"]
        steps.seconds += 100
        steps.run(recovering.recover_all())
        assert len(messages(steps, "a")) == 1
        assert len(messages(steps, "b")) == len(messages(steps, "c")) <= 1


def fails_over(steps: Steps) -> None:
    steps.fail_over()


def recovers(seconds: int) -> Callable[[Steps], None]:
    def act(steps: Steps) -> None:
        steps.seconds += seconds
        for _ in range(2):
            steps.run(recovering.recover("a", grace=timedelta()))

    return act


@pytest.mark.parametrize("act", [fails_over, recovers(1), recovers(700), recovers(3 * DAY)])
@pytest.mark.parametrize("plan", [push, push_again])
def test_pusher_sleeps_anywhere(act: Callable[[Steps], None], plan: Callable[[], Any]) -> None:
    for at in range(number_of_commands(plan)):
        steps = made()
        steps.safe = steps.all() if act is fails_over else None
        running = steps.stalled(plan(), at)
        assert running is not None
        act(steps)
        (id,) = resume(running)
        assert [each["_id"] for each in messages(steps, "a")] == [id]
        assert audit(steps) == 1


@some_or_every
def test_recovery_dies_anywhere(every: int) -> None:
    for first in range(0, number_of_commands(), every):
        for second in range(8):
            steps = made()
            steps.stalled(push(), first)
            steps.seconds += 2 * DAY
            running = steps.stalled(recovering.recover("a"), second)
            if running is not None:
                running.close()
            audit(steps)


def test_open_source_is_deleted_after_a_day() -> None:
    """Its copies go once that is durable, and not before. A pusher that sleeps begins again."""
    steps = made()
    running = stalled_before(steps, Update)
    assert sum(map(is_open, hidden(steps))) == 1
    for seconds, left in ((DAY - 100, 4), (200, 0)):
        steps.seconds += seconds
        for _ in range(2):
            steps.run(recovering.recover_all())
        assert len(hidden(steps)) == left
    resume(running)
    assert audit(steps) == 1


def test_open_source_goes_before_its_copies() -> None:
    steps = made()
    stalled_before(steps, Update).close()
    steps.seconds += 2 * DAY
    running = steps.steps(recovering.recover("a"))
    for command in running:
        if isinstance(command, Delete) and command.w1:
            break
    assert [is_open(each) for each in hidden(steps)] == [False] * len(QUEUES)
    resume(running)
    assert hidden(steps) == []


# ---- ids


def test_id_of_a_message_elsewhere_is_refused() -> None:
    steps = made()
    steps.run(standard("d").push(["y"], ids=["m"]))
    before = steps.all()
    with pytest.raises(DuplicateKey) as refused:
        steps.run(push_again())
    assert refused.value.ids == ["m"]
    assert steps.all() == before


def test_known_id_writes_no_copies() -> None:
    steps = made()
    steps.run(standard("a").push(["y"], ids=["m"]))
    before = steps.all()
    assert steps.run(push_again()) == ["m"]
    assert steps.all() == before


# ---- gathers


def test_source_holds_the_gather_until_it_is_published() -> None:
    """Otherwise the gather could end before a message of it enters its queue."""
    steps = made()
    steps.run(gathering.begin(Content(None, "done", id="g"), Route("report")))
    gathers = [Gather("g", "hold")]
    stalled_before(steps, UpdateEach, lambda: push(gathers=gathers)).close()
    steps.run(gathering.seal("g"))
    assert steps.run(gathering.look("g", Known())) is False
    steps.seconds += 100
    steps.run(recovering.recover_all())
    assert ["gather" in messages(steps, each)[0] for each in QUEUES] == [True, False, False]
    assert steps.run(gathering.look("g", Known())) is False
    steps.collection.delete_one({"q": "a", "gather.id": "g"})
    assert steps.run(gathering.look("g", Known())) is True


def test_doctor_cleans_up_what_a_push_left(client: Client) -> None:
    client.queue("a").push("before")
    steps = made()
    stalled_before(steps, Update).close()
    left = hidden(steps)
    client.database["pyqueue"].insert_many(left)
    assert "4 documents" in check_handovers(client).text
    assert check_handovers(client).text == "none is left over from a process that died"
