"""Cancel, cut and stalled at each command: a message ends once, and no consumer gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import LeaseLost, QueueError, Reservation, Unavailable
from pyqueue.backends.cancelling import cancel
from pyqueue.backends.ending import CANCELLATIONS, find_cancelled
from pyqueue.backends.extending import renew
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.settling import finish_cancelled
from pyqueue.messages import KEPT
from pyqueue.requests import Delete, Find, Plan, Update
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, Runner, after, message, record, reservation, standard
from tests.plans.steps import FAULT_AT, Cut, Steps, at_each_command, lasting, resume

HELD = {"token": "t1", "when": after(60), "reserved": NOW, "owner": "me", "tries": 1}


class Consumer:
    """A process that receives from the queue "a"."""

    def __init__(self, **options: Any) -> None:
        self.plans = standard(max_tries=None, **options)
        self._waiting = Waiters("a")

    def receive(self, limit: int = 5) -> Plan[list[Reservation[Any]]]:
        return self.plans.receive(self._waiting, limit, timeout=0)


def with_message(**fields: Any) -> Steps:
    """Return a store with one message."""
    return lasting([record(), message("m", **fields)])


def ids_in(steps: Steps) -> list[Any]:
    """Return the ids of the messages that are left."""
    return sorted(each["_id"] for each in steps.all() if "record" not in each)


# ---- cancel


@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize(
    ("fields", "force", "results"),
    [({}, False, {"cancelled"}), (HELD, True, {"cancelled"}), (HELD, False, {"requested"})],
    ids=["free", "forced", "held"],
)
def test_cancel_is_repeated_after_a_fault(
    fault: str, fields: dict[str, Any], force: bool, results: set[str | None]
) -> None:
    for at in range(20):
        steps, result = with_message(**fields), None
        with suppress(Cut, QueueError):
            result = steps.run(cancel("m", force), FAULT_AT[fault](at))
        if len(steps.commands) <= at:
            assert result in results
            assert at >= 2, "fewer commands than expected"
            return
        assert steps.run(cancel("m", force)) in results | {None}
        steps.seconds += 100
        assert steps.run(Consumer().receive()) == [], at
        assert ids_in(steps) == []
    raise AssertionError("more commands than expected")


def test_message_that_is_claimed_in_between_is_requested() -> None:
    for steps, running in at_each_command(with_message, lambda: cancel("m", False), least=2):
        (held,) = steps.run(Consumer().receive())
        assert resume(running) == "requested"
        assert steps.signals[-1] == (CANCELLATIONS, None)
        assert steps.run(find_cancelled([held])) == [held]


@pytest.mark.parametrize("force", [False, True])
def test_message_that_is_committed_in_between_is_unknown(force: bool) -> None:
    def held_message() -> Steps:
        return with_message(**HELD)

    for steps, running in at_each_command(held_message, lambda: cancel("m", force), least=1):
        steps.run(standard().commit((reservation("m"),)))
        assert resume(running) is None


def test_result_of_a_pop_in_between_is_not_cancelled() -> None:
    """A pop keeps its token when it finishes a message."""

    def held_message() -> Steps:
        return with_message(**HELD)

    for steps, running in at_each_command(held_message, lambda: cancel("m", True), least=1):
        end = {"processed": NOW, "outcome": "popped", "when": NOW + KEPT}
        steps.collection.update_one({"_id": "m"}, {"$set": end})
        assert resume(running) is None
        assert [each["outcome"] for each in steps.all() if each["_id"] == "m"] == ["popped"]


@pytest.mark.parametrize("force", [False, True])
def test_message_that_comes_back_in_between_is_cancelled(force: bool) -> None:
    def held_message() -> Steps:
        return with_message(**HELD)

    for steps, running in at_each_command(held_message, lambda: cancel("m", force), least=1):
        steps.run(standard().rollback((reservation("m"),), delay=0))
        assert resume(running) == "cancelled"
        assert ids_in(steps) == []


def test_end_that_a_fail_over_undoes_is_cancelled() -> None:
    """The former primary shows an end that its holder could not make durable."""
    steps = with_message()
    steps.safe = steps.all()
    steps.run(iter(Delete({"_id": "m"}, w1=True)))
    running = steps.stalled(cancel("m", False), at=1)
    assert running is not None, "it has to be sure"
    steps.fail_over()
    assert resume(running) == "cancelled"
    assert ids_in(steps) == []


def test_message_that_changes_all_the_time_is_unavailable() -> None:
    runner = Runner([], *[[message("m")], 0] * 20)
    with pytest.raises(Unavailable, match="keep changing message m"):
        runner.run(cancel("m", False, standard(history=None).terms))


def test_cancel_takes_few_commands() -> None:
    steps = with_message(**HELD)
    assert steps.run(cancel("m", False)) == "requested"
    assert [type(each) for each in steps.commands] == [Find, Update]
    steps = with_message()
    assert steps.run(cancel("m", False, standard().terms)) == "cancelled"
    assert [type(each) for each in steps.commands] == [Find, Find, Delete]


# ---- at the claim


@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize("history", [None, 60.0])
def test_claim_ends_a_message_in_spite_of_a_fault(fault: str, history: float | None) -> None:
    for at in range(30):
        steps = with_message(cancel=NOW)
        steps.run(standard().push(["next"]))
        received: list[Any] = []
        with suppress(Cut, QueueError):
            received += steps.run(Consumer(history=history).receive(), FAULT_AT[fault](at))
        last = len(steps.commands) <= at
        steps.seconds += 100
        received += steps.run(Consumer(history=history).receive())
        assert {each.payload for each in received} == {"next"}, at
        outcomes = [each.get("outcome") for each in steps.all() if each["_id"] == "m"]
        assert outcomes == ([] if history is None else ["cancelled"]), at
        if last:
            assert at > 4, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


def test_claim_ends_a_message_once_while_another_claims() -> None:
    def stored() -> Steps:
        return with_message(cancel=NOW)

    for steps, running in at_each_command(stored, lambda: Consumer().receive(), least=3):
        steps.seconds += 100  # the lease of the claim that is stalled has ended
        assert steps.run(Consumer().receive()) == []
        assert ids_in(steps) == []
        assert resume(running) == []


@pytest.mark.parametrize("value", [None, True, "now", [NOW]])
def test_field_of_another_program_ends_no_message(value: Any) -> None:
    steps = with_message(cancel=value)
    (held,) = steps.run(Consumer().receive())
    assert held.id == "m"
    assert steps.run(find_cancelled([held])) == []


def test_claims_without_cancelled_messages_take_no_more_commands() -> None:
    steps = with_message()
    consumer = Consumer()
    steps.run(consumer.receive(1))
    assert [type(each).__name__ for each in steps.commands][-1] == "FindAndModify"
    assert all("cancel" not in str(each) for each in steps.commands)


# ---- by the holder


def finishing(plans: QueuePlans, held: Sequence[Reservation[Any]]) -> Plan[None]:
    return finish_cancelled(plans.terms, held)


@pytest.mark.parametrize("history", [None, 60.0])
def test_holder_ends_a_cancelled_message(history: float | None) -> None:
    steps = with_message(**HELD, cancel=NOW, key="k")
    plans = standard(history=history)
    steps.run(finishing(plans, [reservation("m", key="k")]))
    found = [(each["outcome"], each["last_key"]) for each in steps.all() if each["_id"] == "m"]
    assert found == ([] if history is None else [("cancelled", "k")])
    with pytest.raises(LeaseLost):
        steps.run(finishing(plans, [reservation("m", key="k")]))


def test_holder_ends_several_messages_with_one_command() -> None:
    steps = Steps([record(), *(message(f"m{each}", **HELD) for each in range(5))])
    steps.run(finishing(standard(), [reservation(f"m{each}") for each in range(5)]))
    assert [type(each) for each in steps.commands] == [Delete]


def test_holder_finds_its_cancelled_messages_with_one_read() -> None:
    steps = Steps(
        [
            record(),
            message("mine", **HELD, cancel=NOW),
            message("another's", **(HELD | {"token": "t2"}), cancel=NOW),
            message("not cancelled", **HELD),
        ]
    )
    held = [reservation(id) for id in ("mine", "another's", "not cancelled", "gone")]
    assert [each.id for each in steps.run(find_cancelled(held))] == ["mine"]
    assert len(steps.commands) == 1


# ---- renewals


def renewed(steps: Steps, held: Sequence[Reservation[Any]]) -> tuple[list[Any], list[Any]]:
    """Renew leases. Return the errors, and the ids of cancelled messages."""
    told: list[Any] = []
    results = steps.run(renew(held, lambda each: told.append(each.id)))
    return [None if each is None else type(each) for each in results], told


@pytest.mark.parametrize("number", [1, 3])
def test_renewal_finds_cancelled_messages_and_extends_them(number: int) -> None:
    fields = [HELD | ({} if each else {"cancel": NOW}) for each in range(number)]
    stored = [message(f"m{each}", **some) for each, some in enumerate(fields)]
    steps, held = Steps([record(), *stored]), [reservation(f"m{each}") for each in range(number)]
    steps.seconds = 20
    assert renewed(steps, held) == ([None] * number, ["m0"])
    assert {each["when"] for each in steps.all() if "token" in each} == {after(80)}
    assert {each.until for each in held} == {after(80)}


@pytest.mark.parametrize("number", [1, 3])
def test_renewal_of_other_messages_takes_one_command(number: int) -> None:
    steps = Steps([record(), *(message(f"m{each}", **HELD) for each in range(number))])
    held = [reservation(f"m{each}") for each in range(number)]
    assert renewed(steps, held) == ([None] * number, [])
    assert [type(each) for each in steps.commands] == [Update]


def test_renewal_tells_lost_messages_from_cancelled_ones() -> None:
    steps = Steps(
        [
            record(),
            message("cancelled", **HELD, cancel=NOW),
            message("lost", **HELD | {"token": "x"}),
        ]
    )
    held = [reservation(id) for id in ("cancelled", "lost", "gone")]
    assert renewed(steps, held) == ([None, LeaseLost, LeaseLost], ["cancelled"])
    assert renewed(steps, held[2:]) == ([LeaseLost], [])


def test_message_lost_while_its_renewal_looks_is_lost() -> None:
    steps, held = with_message(**HELD, cancel=NOW), [reservation("m")]
    running = steps.steps(renew(held, lambda each: None))
    for _ in range(3):  # the update, the read, and the update of the cancelled message
        next(running)
    steps.run(cancel("m", True))
    (error,) = resume(running)
    assert isinstance(error, LeaseLost)


# ---- moves


WITHDRAW: dict[str, Callable[[QueuePlans], Plan[Any]]] = {
    "replace": lambda plans: plans.push(["new"], keys=["k"], on_duplicate="replace"),
    "redrive": lambda plans: plans.redrive(),
    "replay": lambda plans: plans.replay(["m"]),
}
STATES: dict[str, dict[str, Any]] = {
    "replace": {**HELD, "key": "k"},
    "redrive": {"dead": {"from": "a", "at": NOW, "reason": "buried", "tries": 1, "error": None}},
    "replay": {"when": NOW.replace(year=9013), "processed": NOW, "outcome": "committed"},
}


@pytest.mark.parametrize("how", WITHDRAW)
def test_new_life_of_a_message_withdraws_a_cancel(how: str) -> None:
    steps = with_message(cancel=NOW, **STATES[how])
    steps.run(WITHDRAW[how](standard(history=60.0)))
    assert [each.get("cancel") for each in steps.all() if each["_id"] == "m"] == [None]


def test_move_and_rollback_keep_a_cancel() -> None:
    for how in ("rollback", "move", "bury", "release"):
        steps, held = with_message(**HELD, cancel=NOW), (reservation("m"),)
        plans: dict[str, Plan[Any]] = {
            "rollback": standard().rollback(held),
            "move": standard().move([(held[0], "p")], to="b"),
            "bury": standard().bury(held),
            "release": standard().release(held),
        }
        steps.run(plans[how])
        (found,) = [each for each in steps.all() if each["_id"] == "m"]
        assert (found.get("cancel"), "token" in found) == (NOW, False), how
