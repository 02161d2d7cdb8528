"""Outputs of Many with a key, a time and headers: they enter once, wherever a process dies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from bson import ObjectId

from pyqueue import DuplicateKey, LeaseLost, QueueError
from pyqueue.backends import recovering
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.outputs import Output
from pyqueue.backends.settling import fan_out
from pyqueue.requests import Delete, Insert, Plan, Update
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import after, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, resume, shared


def holding(**pushed: Any) -> tuple[Steps, Any]:
    """Return a store, and the reservation of a message of queue "a"."""
    steps = Steps()
    steps.run(standard().push(["x"], headers={"trace": "t"}, **pushed))
    (held,) = steps.run(standard().receive(Waiters("a"), 1, timeout=0))
    return steps, held


def output(queue: str = "b", **more: Any) -> Output:
    """Return an output with a new id."""
    fields: dict[str, Any] = {"key": "k", **more}
    return Output(ObjectId(), standard(queue).target, "y", None, **fields)


def handing_over(held: Any, outputs: Sequence[Output]) -> Plan[None]:
    """Return the plan that replaces a message of queue "a" by outputs."""
    return fan_out(standard().terms, held, outputs)


def stored(steps: Steps, **match: Any) -> list[dict[str, Any]]:
    """Return the stored messages that match."""
    return [each for each in steps.all() if match.items() <= each.items()]


@pytest.mark.parametrize("fault", FAULT_AT)
def test_output_with_options_enters_once(fault: str) -> None:
    """After a lost request or reply, the caller tries again with the same outputs."""
    for at in range(40):
        steps, held = holding()
        outputs = [output(delay=60, headers={"h": 1}), output("c", key=None, at=after(90))]
        with suppress(Cut, QueueError):
            steps.run(handing_over(held, outputs), FAULT_AT[fault](at))
        done = len(steps.commands) <= at
        if "loses" in fault:
            with suppress(LeaseLost):
                steps.run(handing_over(held, outputs))
        steps.run(recovering.recover_queue("a", recovering.NO_GRACE))
        keyed, late = stored(steps, q="b", payload="y"), stored(steps, q="c", payload="y")
        assert len(keyed) == len(late) == 1 - len(stored(steps, q="a", payload="x")), at
        for each in keyed:
            assert (each["key"], each["when"], "last_key" in each) == ("k", after(60), False)
            assert each["headers"] == {"trace": "t", "h": 1}
        for each in late:
            assert (each["when"], each["due"], each["headers"]) == (
                after(90),
                after(90),
                {"trace": "t"},
            )
        if done:
            assert keyed
            return
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("fault", ["loses a request", "loses a reply"])
def test_output_that_was_consumed_does_not_enter_again(fault: str) -> None:
    """A consumer is quicker than the caller, which tries again with the same outputs."""
    for at in range(40):
        steps, held = holding()
        outputs, consumed = [output(key=None), output("c", key=None)], 0
        for tries in range(2):
            lost = FAULT_AT[fault](at) if tries == 0 else None
            running = steps.steps(handing_over(held, outputs), lost)
            with suppress(StopIteration, QueueError):
                while True:
                    next(running)
                    for each in stored(steps, payload="y"):
                        if not each["q"].startswith("~"):
                            consumed += steps.run(iter(Delete({"_id": each["_id"]})))
        steps.run(recovering.recover_queue("a", recovering.NO_GRACE))
        left = [each for each in stored(steps, payload="y") if not each["q"].startswith("~")]
        assert consumed + len(left) == 2, at


def test_lost_lease_of_one_call_spares_the_outputs_of_another() -> None:
    """Both calls share commands, whose replies only say how many sources were held."""
    steps = Steps()
    steps.run(standard().push(["x", "y"]))
    lost, held = steps.run(standard().receive(Waiters("a"), 2, timeout=0))
    steps.collection.update_one({"_id": lost.id}, {"$set": {"token": "other"}})
    plans = [handing_over(each, [output(key=None)]) for each in (lost, held)]
    assert steps.run(shared(plans)) == [False, True]
    assert len(stored(steps, q="b", payload="y")) == 1
    assert [each["_id"] for each in stored(steps, q="a", token="other")] == [lost.id]


def test_decision_that_the_driver_repeats_keeps_the_outputs() -> None:
    """The reply of the first attempt was lost, and the second attempt matches nothing."""
    steps, held = holding()
    ask, repeated = steps.driver.ask, []

    def repeating(request: Any) -> Any:
        answer = ask(request)
        if isinstance(request, Update) and HANDED in request.update.get("$push", {}):
            repeated.append(request)
            return ask(request)
        return answer

    steps.driver.ask = repeating  # type: ignore[method-assign]
    steps.run(handing_over(held, [output(key=None)]))
    assert len(repeated) == 1
    assert len(stored(steps, q="b", payload="y")) == 1
    assert stored(steps, payload="x") == []


@pytest.mark.parametrize("others", [["b"], ["b", "b"]], ids=["taken", "twice"])
def test_taken_key_writes_no_output(others: list[str]) -> None:
    steps, held = holding()
    outputs = [output("c", key=None), *map(output, others)]
    if len(others) == 1:
        steps.run(standard("b").push(["there"], keys=["k"]))
    before = steps.all()
    with pytest.raises(DuplicateKey, match="queue 'b' already has a message with the key 'k'"):
        steps.run(handing_over(held, outputs))
    assert steps.all() == before


def test_output_may_have_the_key_of_its_message() -> None:
    """The message loses its key when it is finished."""
    steps, held = holding(keys=["k"])
    steps.run(handing_over(held, [output("a")]))
    (new,) = stored(steps, q="a", key="k")
    assert new["payload"] == "y"
    assert stored(steps, payload="x") == []


def test_key_that_is_taken_meanwhile_is_left_out() -> None:
    """The outputs were decided on, and none of them may be lost."""
    steps, held = holding()
    running = steps.steps(handing_over(held, [output()]))
    while not isinstance(next(running), Insert):
        pass
    steps.run(standard("b").push(["there"], keys=["k"]))
    resume(running)
    (new,) = stored(steps, q="b", payload="y")
    assert ("key" in new, new["last_key"]) == (False, "k")
    assert len(stored(steps, q="b", key="k")) == 1
