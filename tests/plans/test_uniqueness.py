"""Keys that outlive their messages, cut and stalled at each command: one live message at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import QueueError
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.settling import finish_cancelled
from pyqueue.backends.uniqueness import UNIQUE
from pyqueue.facts import Keep
from pyqueue.messages import KEPT, KEPT_BARE
from pyqueue.requests import Find, Insert, Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, after, message, record, reservation, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, at_each_command, lasting, resume

UNTIL = Keep(None, unique=60.0)
HELD = {"token": "t1", "when": after(60), "reserved": NOW, "owner": "me", "tries": 1}
#: An end that keeps its key.
END = {"when": NOW + KEPT_BARE, "processed": NOW, "outcome": "committed", "unique": 60.0}


def with_message(**fields: Any) -> Steps:
    """Return a store with one message with a key."""
    used = record(v=2, shape={UNIQUE: True})
    return lasting([used, message("m", key="k", **fields)])


def with_end(free: float) -> Steps:
    """Return a store with the end of a message, whose key is free after some seconds."""
    return with_message(**END, free=after(free))


def push(how: str = "ignore", **options: Any) -> Plan[list[Any]]:
    return standard().push(["new"], keys=["k"], on_duplicate=how, **options)


def stored(steps: Steps) -> dict[str, Any]:
    """Return the message of the store; {} if it is gone."""
    return next((each for each in steps.all() if each["_id"] == "m"), {})


def live(steps: Steps) -> list[Any]:
    """Return the payloads of the live messages."""
    each_one = [each for each in steps.all() if "record" not in each]
    return [each.get("payload") for each in each_one if "processed" not in each]


# ---- the end


def test_cancelled_message_that_was_held_frees_its_key() -> None:
    """Its worker has stopped working on it. Only a success keeps the key."""
    steps = with_message(**UNTIL.stored())
    held = steps.run(standard().receive(Waiters("a"), 1, timeout=0))
    steps.run(finish_cancelled(standard().terms, held))
    assert steps.run(push()) != [None]
    assert live(steps) == ["new"]


def finished(history: float | None = None, **keep: Any) -> dict[str, Any]:
    """Return the end of a message that was committed."""
    wish = Keep(**{"result": None, "unique": 60.0, **keep})
    steps = with_message(**HELD, **wish.stored())
    plans = standard(history=history)
    steps.run(plans.commit((reservation("m", key="k", keep=wish),), payload="p", result=5))
    return stored(steps)


def test_end_keeps_the_key_and_drops_the_payload() -> None:
    end = finished()
    assert (end["key"], end["free"], end["expires"]) == ("k", after(60), after(60))
    assert end["when"] == NOW + KEPT_BARE
    assert not {"payload", "result", "last_key"} & end.keys()


@pytest.mark.parametrize(
    ("history", "result", "kept"), [(600.0, None, 600), (10.0, None, 60), (None, 30.0, 60)]
)
def test_end_for_something_else_keeps_its_payload(
    history: float | None, result: float | None, kept: float
) -> None:
    end = finished(history, result=result, topic="~done:x" if result else None)
    assert (end["key"], end["free"], end["expires"]) == ("k", after(60), after(kept))
    assert (end["payload"], end["result"], end["when"]) == ("p", 5, NOW + KEPT)


def test_message_without_its_key_leaves_no_end() -> None:
    steps = with_message(**HELD, unique=60.0)
    steps.run(standard().commit((reservation("m", keep=UNTIL),)))
    assert stored(steps) == {}


FREEING: dict[str, Callable[[QueuePlans, Any], Plan[Any]]] = {
    "bury": lambda plans, held: plans.bury((held,)),
    "move": lambda plans, held: plans.move([(held, "p")], to="b"),
}


@pytest.mark.parametrize("way", FREEING)
def test_message_that_leaves_its_queue_frees_its_key(way: str) -> None:
    steps = with_message(**HELD, unique=60.0)
    steps.run(FREEING[way](standard(), reservation("m", key="k", keep=UNTIL)))
    found = stored(steps)
    assert (found["last_key"], "unique" in found, "key" in found) == ("k", False, False)


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("fault", FAULT_AT)
def test_pop_keeps_the_key_unless_it_is_cut(fault: str, limit: int) -> None:
    for at in range(30):
        steps = with_message(unique=60.0)
        popped: list[Any] = []
        receive = standard().receive(Waiters("a"), limit, timeout=0, pop=True)
        with suppress(Cut, QueueError):
            popped = steps.run(receive, FAULT_AT[fault](at))
        if popped:
            assert (stored(steps)["key"], stored(steps)["free"]) == ("k", after(60)), at
        if len(steps.commands) <= at:
            assert popped
            assert at > 2, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


# ---- pushes that meet an end


@pytest.mark.parametrize("how", ["ignore", "replace"])
def test_push_meets_the_end_of_a_message(how: str) -> None:
    steps = with_end(60)
    before = stored(steps)
    assert steps.run(push(how)) == [None]
    assert (stored(steps), live(steps)) == (before, [])


@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize("how", ["ignore", "replace", "error"])
def test_push_frees_a_key_whose_time_is_over(how: str, fault: str) -> None:
    for at in range(30):
        steps = with_end(-1)
        with suppress(Cut, QueueError):
            steps.run(push(how), FAULT_AT[fault](at))
        last = len(steps.commands) <= at
        assert last or live(steps) in ([], ["new"])
        with suppress(QueueError):  # the cut push may have written it
            steps.run(push(how))
        assert live(steps) == ["new"], at
        assert (stored(steps)["last_key"], "free" in stored(steps)) == ("k", False)
        if last:
            assert at > 4, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("how", ["ignore", "replace"])
def test_two_pushes_free_a_key_once(how: str) -> None:
    for steps, running in at_each_command(lambda: with_end(-1), lambda: push(how), least=4):
        steps.run(standard().push(["other"], keys=["k"]))
        resume(running)
        assert len(live(steps)) == 1


def test_batch_frees_the_keys_that_it_meets() -> None:
    ends = [
        message(f"e{n}", key=f"k{n}", **END, free=after(free))
        for n, free in enumerate((-1, 60, -1))
    ]
    steps = lasting([record(v=2, shape={UNIQUE: True}), *ends, message("live", key="k3")])
    keys = ["k0", "k1", "k2", "k3", "k4", None]
    ids = steps.run(standard().push(list(range(6)), keys=keys))
    assert [id is not None for id in ids] == [True, False, True, False, True, True]
    assert sorted(map(str, live(steps))) == ["0", "2", "4", "5", "live"]


def test_push_finds_ends_only_where_they_may_be() -> None:
    steps = lasting([record(), message("m", key="k")])
    assert steps.run(push()) == [None]
    assert [type(each) for each in steps.commands] == [Find, Insert]


def test_push_notes_the_use_in_the_record() -> None:
    steps = lasting()
    steps.run(push(keeps=[UNTIL]))
    (record_,) = [each for each in steps.all() if "record" in each]
    assert record_["shape"] == {UNIQUE: True}
    (found,) = [each for each in steps.all() if "payload" in each]
    assert (found["unique"], "keep" in found) == (60.0, False)


def test_replace_takes_the_new_wish() -> None:
    steps = with_message(unique=60.0)
    steps.run(push("replace"))
    assert "unique" not in stored(steps)
    steps.run(push("replace", keeps=[UNTIL]))
    assert stored(steps)["unique"] == 60.0


@pytest.mark.parametrize("value", [True, "60", -1, 1e30])
def test_value_of_another_program_keeps_no_key(value: Any) -> None:
    assert Keep.of({"unique": value}) is None
    assert Keep.of({"keep": {"result": value, "topic": "t"}}) is None
