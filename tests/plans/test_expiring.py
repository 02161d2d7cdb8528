"""Expiring messages, cut and stalled at each command: a message ends once, or is delivered."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import QueueError, Reservation
from pyqueue.backends import expiring
from pyqueue.backends.expiring import EXPIRING, end_expired
from pyqueue.backends.limits.rates import TakePermits
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.recovering import recover_all
from pyqueue.requests import Delete, Distinct, Find, FindAndModify, Insert, Plan, Update
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, after, message, record, reservation, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, at_each_command, lasting, resume

#: A message whose first try has not begun, and that has expired.
DEAD = {"dies": after(-1)}
HELD = {"token": "t1", "when": after(60), "reserved": NOW, "owner": "me", "tries": 1}
BEGUN = {**HELD, "best_before": after(-1)}


class Consumer:
    """A process that receives from the queue "a"."""

    def __init__(self, **options: Any) -> None:
        self.plans = standard(max_tries=None, **options)
        self._waiting = Waiters("a")

    def receive(self, limit: int = 5) -> Plan[list[Reservation[Any]]]:
        return self.plans.receive(self._waiting, limit, timeout=0)

    def pop(self) -> Plan[list[Any]]:
        return self.plans.receive(self._waiting, 1, timeout=0, pop=True)


def with_message(**fields: Any) -> Steps:
    """Return a store with one message."""
    return lasting([record(options={"history": 60.0}), message("m", **fields)])


def stored(steps: Steps, id: str = "m") -> dict[str, Any]:
    """Return a message of the store; {} if it is gone."""
    return next((each for each in steps.all() if each["_id"] == id), {})


def told(steps: Steps) -> list[tuple[str, list[Any]]]:
    """Return the ends that hooks heard of."""
    return [(each.verb, [one.id for one in each.items]) for each in steps.told]


# ---- pushes


def test_push_stores_the_instant_and_notes_the_use() -> None:
    steps = lasting()
    steps.run(standard().push(["x"], expires=[1.5]))
    sent = [type(each) for each in steps.commands]
    assert sent == [Find, Update, Find, FindAndModify, Insert]
    (found,) = [each for each in steps.all() if "payload" in each]
    assert (found["dies"], found["when"]) == (after(1.5), NOW)
    assert stored(steps, "~queue:a")["shape"] == {"expires": True}
    assert stored(steps, EXPIRING) == {"_id": EXPIRING, "q": EXPIRING}
    steps.run(standard().push(["y"], expires=[1.5]))
    assert [type(each) for each in steps.commands] == [Find, Insert], "the record is known"


@pytest.mark.parametrize("fault", FAULT_AT)
def test_message_has_its_notes_whatever_fails(fault: str) -> None:
    for at in range(20):
        steps = lasting()
        with suppress(Cut, QueueError):
            steps.run(standard().push(["x"], expires=[1]), FAULT_AT[fault](at))
        if any("payload" in each for each in steps.all()):
            assert stored(steps, EXPIRING), at
            assert stored(steps, "~queue:a")["shape"], at
        if len(steps.commands) <= at:
            assert at > 3, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


def test_other_pushes_and_claims_take_no_more_commands() -> None:
    steps, consumer = lasting([record()]), Consumer()
    steps.run(consumer.plans.push(["x"], headers={"h": 1}))
    assert [type(each) for each in steps.commands] == [Find, Insert]
    steps.run(consumer.receive(1))
    assert type(steps.commands[-1]) is FindAndModify
    steps.run(recover_all())
    assert [type(each) for each in steps.commands] == [Distinct]


# ---- at the claim


@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize("history", [None, 60.0])
def test_claim_ends_an_expired_message_whatever_fails(fault: str, history: float | None) -> None:
    """If the claim is cut before it ends the message, this was its first try."""
    for at in range(30):
        steps = with_message(**DEAD)
        steps.run(standard().push(["next"]))
        received: list[Any] = []
        with suppress(Cut, QueueError):
            received += steps.run(Consumer(history=history).receive(), FAULT_AT[fault](at))
        last = len(steps.commands) <= at
        steps.seconds += 100
        received += steps.run(Consumer(history=history).receive())
        assert "next" in {each.payload for each in received}, at
        tries = {each.tries for each in received if each.payload == "m"}
        assert tries <= {2}, at
        if last:
            assert not tries
            assert at > 4, "fewer commands than expected"
            assert stored(steps).get("outcome") == (None if history is None else "expired")
            return
    raise AssertionError("more commands than expected")


def test_claim_ends_an_expired_message_once() -> None:
    def expired() -> Steps:
        return with_message(**DEAD)

    for steps, running in at_each_command(expired, lambda: Consumer().receive(), least=3):
        assert steps.run(Consumer().receive()) == []
        assert resume(running) == []
        assert stored(steps) == {}
        assert told(steps) == [("expire", ["m"])]


def test_bare_pop_drops_an_expired_message() -> None:
    steps = with_message(**DEAD)
    steps.run(standard().push(["next"]))
    (popped,) = steps.run(Consumer().pop())
    assert popped.payload == "next"
    assert sum(type(each) is FindAndModify for each in steps.commands) == 2
    assert told(steps) == [("expire", ["m"])]
    assert stored(steps) == {}


TRIED: dict[str, dict[str, Any]] = {
    "rolled back": {"best_before": after(-1), "tries": 1},
    "lapsed": {**BEGUN, "when": after(-2)},
    "by an older release": {**DEAD, "tries": 1},
    "not yet": {"dies": after(1)},
    "of another type": {"dies": "yesterday"},
}


@pytest.mark.parametrize("state", TRIED)
@pytest.mark.parametrize("pop", [False, True])
def test_message_that_has_not_expired_is_delivered(state: str, pop: bool) -> None:
    steps, consumer = with_message(**TRIED[state]), Consumer()
    (found,) = steps.run(consumer.pop() if pop else consumer.receive())
    assert found.id == "m"
    assert told(steps) == []


def test_tried_pop_leaves_the_first_try() -> None:
    """A pop counts no try. If its process dies, the message may still expire."""
    lapsed = {**HELD, "tries": 0, "best_before": after(-1), "when": after(-2)}
    for receive in (Consumer().receive, Consumer().pop):
        assert with_message(**lapsed).run(receive()) == []


#: The ways in which a held message comes back, and whether its first try is taken back.
BACK: dict[str, tuple[Callable[[QueuePlans, Any], Plan[Any]], bool]] = {
    "release": (lambda plans, held: plans.release((held,)), True),
    "uncounted": (lambda plans, held: plans.rollback((held,), delay=5, counted=False), True),
    "rollback": (lambda plans, held: plans.rollback((held,), delay=5), False),
}


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("tries", [1, 2])
def test_first_try_that_is_taken_back_begins_again(back: str, tries: int) -> None:
    steps = with_message(**BEGUN | {"tries": tries})
    plan, again = BACK[back]
    steps.run(plan(standard(), reservation("m", tries=tries)))
    found = stored(steps)
    first = again and tries == 1
    assert ("dies" in found, "best_before" in found) == (first, not first)
    assert steps.run(end_expired()) == first


def test_batch_takes_back_only_first_tries() -> None:
    steps = lasting([record(), message("one", **BEGUN), message("two", **BEGUN | {"tries": 2})])
    held = (reservation("one"), reservation("two", tries=2))
    steps.run(standard().release(held))
    assert ["dies" in stored(steps, id) for id in ("one", "two")] == [True, False]


LEAVES: dict[str, Callable[[QueuePlans, Any], Plan[Any]]] = {
    "move": lambda plans, held: plans.move([(held, "p")], to="b"),
    "bury": lambda plans, held: plans.bury((held,)),
    "replace": lambda plans, held: plans.push(["n"], keys=["k"], on_duplicate="replace"),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_expiry_belongs_to_the_stay(leave: str) -> None:
    steps = with_message(**BEGUN, key="k")
    steps.run(LEAVES[leave](standard(), reservation("m", key="k")))
    assert not {"dies", "best_before"} & stored(steps).keys()


def test_replace_takes_the_new_expiry() -> None:
    steps = with_message(**BEGUN, key="k")
    steps.run(standard().push(["n"], keys=["k"], on_duplicate="replace", expires=[5]))
    found = stored(steps)
    assert (found["dies"], "best_before" in found) == (after(5), False)


# ---- the pass over all queues


@pytest.mark.parametrize("fault", FAULT_AT)
def test_pass_ends_expired_messages_whatever_fails(fault: str) -> None:
    for at in range(30):
        steps = with_message(**DEAD, key="k")
        with suppress(Cut, QueueError):
            steps.run(end_expired(), FAULT_AT[fault](at))
        last = len(steps.commands) <= at
        assert last or steps.run(end_expired()) in (0, 1)
        found = stored(steps)
        assert (found["outcome"], found["last_key"], "dies" in found) == ("expired", "k", False)
        assert steps.run(Consumer().receive()) == []
        if last:
            assert at > 3, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


def test_pass_leaves_a_message_that_was_claimed_in_between() -> None:
    """The claim that comes in between ends it, and both count it once."""

    def expired() -> Steps:
        return with_message(**DEAD)

    for steps, running in at_each_command(expired, end_expired, least=3):
        steps.run(Consumer(history=60.0).receive())
        assert resume(running) == 0
        assert stored(steps)["outcome"] == "expired"
        assert told(steps) == [("expire", ["m"])]


@pytest.mark.parametrize("expires", [None, [60]])
def test_pass_leaves_a_message_that_was_replaced(expires: list[float] | None) -> None:
    def expired() -> Steps:
        return with_message(**DEAD, key="k")

    for steps, running in at_each_command(expired, end_expired, least=3):
        plans = standard()
        options: dict[str, Any] = {} if expires is None else {"expires": expires}
        steps.run(plans.push(["new"], keys=["k"], on_duplicate="replace", **options))
        assert resume(running) == 0
        assert stored(steps)["payload"] == "new"


def test_pass_takes_pages_and_passes_over_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiring, "PAGE_SIZE", 2)
    foreign: list[dict[str, Any]] = [
        message("held", **DEAD, token="t", when=after(60)),
        message("hidden", **DEAD) | {"q": "~handover:a"},
        message("no queue", **DEAD) | {"q": 5},
        message("newer kind", **DEAD) | {"q": "b"},
    ]
    newer = record("quantum") | {"_id": "~queue:b", "q": "b"}
    expired = [message(f"m{each}", **DEAD) for each in range(5)]
    left = [message("tried", **DEAD, tries=1), message("later", dies=after(1))]
    steps = lasting([record(), newer, *foreign, *expired, *left])
    assert steps.run(end_expired()) == 5
    ids = {each["_id"] for each in steps.all() if "record" not in each}
    assert ids == {each["_id"] for each in (*foreign, *left)}
    assert sum(type(each) is Delete for each in steps.commands) == 6, "one of them matched nothing"


def test_pass_is_made_once_a_message_may_expire() -> None:
    steps = lasting()
    steps.run(standard().push(["x"], expires=[1]))
    steps.seconds = 2
    assert steps.run(recover_all()) == 0, "it counts handovers"
    assert [each for each in steps.all() if "payload" in each] == []


def test_permit_of_an_expired_message_comes_back_whole() -> None:
    """The claim asked half a second after its scan began. The bucket gained nothing in between."""
    shape = {"limit": {"rate": 1.0, "period": 3600.0, "burst": 1}}
    steps = lasting([record(shape=shape), message("m", **DEAD), message("z")])

    def slow(number: int, done: bool) -> None:
        if isinstance(steps.commands[-1], TakePermits) and not done and not steps.seconds:
            steps.seconds = 0.5

    (received,) = steps.run(Consumer(shape=shape).receive(1), slow)
    assert (received.id, steps.seconds) == ("z", 0.5)


@pytest.fixture
def shallow() -> Iterator[None]:
    """Allow so few nested calls that one for each of 250 messages is too many."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 240)
    yield
    sys.setrecursionlimit(usual)


@pytest.mark.parametrize("pop", [False, True])
def test_many_expired_messages_hold_up_no_receive(shallow: None, pop: bool) -> None:
    """Each claim finds one of them, ends it, and claims again, without a call inside a call."""
    documents = [message(f"m{number:04}", **DEAD) for number in range(250)]
    steps = lasting([record(), *documents, message("z")])
    consumer = Consumer()
    steps.collection.create_index([("q", 1), ("when", 1), ("_id", 1)], name="hot")
    (received,) = steps.run(consumer.pop() if pop else consumer.receive(1))
    assert received.id == "z"
    assert [each["_id"] for each in steps.all() if str(each["_id"]).startswith("m")] == []
