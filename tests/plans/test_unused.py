"""Queues that are deleted when unused: cut at each command, and with uses in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import pytest

from pyqueue import QueueError
from pyqueue.backends import namespace, reshaping, unused
from pyqueue.backends.all_queues import delete_queue
from pyqueue.backends.kind import lookup
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.recovering import recover_all
from pyqueue.backends.unused import delete_unused, listed
from pyqueue.backends.uses import USES, note
from pyqueue.clock import BAND
from pyqueue.requests import Distinct, Find, Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, after, message, record, record_of
from tests.plans.steps import FAULT_AT, Cut, Steps, at_each_command, lasting, resume

SHAPE: Final = {"auto_delete": 60.0}
#: When a queue that was last used at NOW is certainly unused: a use is noted once in 15 s.
UNUSED_S: Final = 75.0
KINDS: Final = ("standard", "priority", "ordered", "bucket")
each_kind = pytest.mark.parametrize("kind", KINDS)


def plans_in(kind: str | None, **shape: object) -> QueuePlans:
    """Return the plans of queue "a" in a kind."""
    options = Options(dead_letter="a.dead", shape=shape)
    return plans_of("a", options, kind=kind, owner="me")


def receive(kind: str | None) -> Plan[list[Any]]:
    """Receive once, as another program that does not give the option."""
    return plans_in(kind).receive(Waiters("a"), 5, timeout=0)


def made(kind: str = "standard", seconds: float = 200) -> Steps:
    """Return a store with a queue that is empty, and that was last used so long ago."""
    steps, plans = lasting(), plans_in(kind, **SHAPE)
    steps.run(plans.push(["first"]))
    steps.run(plans.commit(steps.run(receive(kind))))
    steps.seconds = seconds
    return steps


def note_of(steps: Steps, queue: str = "a") -> dict[str, Any]:
    """Return the document that notes the use of a queue; {} if there is none."""
    return next((each for each in steps.all() if each["_id"] == f"~used:{queue}"), {})


def is_live(steps: Steps) -> bool:
    return record_of(steps).get("q") == "a"


def is_gone(steps: Steps) -> bool:
    """Return whether nothing is left of the queue but a record of its deletion."""
    left = [each for each in steps.all() if each.get("q") in ("a", USES)]
    return not left and record_of(steps).get("q") in (None, "~deleted")


# ---- notes


@pytest.mark.parametrize("fault", FAULT_AT)
def test_record_never_has_the_option_without_a_note(fault: str) -> None:
    for at in range(20):
        steps = lasting()
        with suppress(Cut, QueueError):
            steps.run(plans_in("standard", **SHAPE).push(["x"]), FAULT_AT[fault](at))
        if record_of(steps).get("shape"):
            assert (note_of(steps)["used"], note_of(steps)["when"]) == (NOW, after(UNUSED_S)), at
        if len(steps.commands) <= at:
            assert at > 3, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


@pytest.mark.parametrize("fault", FAULT_AT)
def test_reshape_notes_a_use_before_the_option(fault: str) -> None:
    for at in range(20):
        steps = lasting([record()])
        with suppress(Cut, QueueError):
            steps.run(reshaping.reshape("a", SHAPE, by="bob"), FAULT_AT[fault](at))
        if record_of(steps).get("shape"):
            assert note_of(steps)["used"] == NOW, at
        if len(steps.commands) <= at:
            assert at > 2, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


def test_shorter_time_holds_from_the_reshape() -> None:
    steps = made(seconds=1)
    steps.run(reshaping.reshape("a", {"auto_delete": 10.0}, by="bob"))
    steps.seconds = 1 + 12.4
    assert steps.run(delete_unused()) == []
    steps.seconds = 1 + 12.5
    assert steps.run(delete_unused()) == ["a"]


def test_late_note_does_not_undo_a_later_one() -> None:
    steps = made(seconds=0)
    late = steps.stalled(note("a", 60), 0)
    steps.seconds = 50
    steps.run(note("a", 60))
    assert late is not None
    resume(late)
    steps.seconds = UNUSED_S + 1
    assert steps.run(delete_unused()) == []
    assert note_of(steps)["when"] == after(50 + UNUSED_S)
    steps.seconds = 50 + UNUSED_S
    assert steps.run(delete_unused()) == ["a"]


USES_OF: Final[dict[str, Callable[[QueuePlans], Plan[Any]]]] = {
    "push": lambda plans: plans.push(["x"]),
    "receive": lambda plans: plans.receive(Waiters("a"), 1, timeout=0),
}


@each_kind
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("use", USES_OF)
def test_other_program_keeps_the_queue(use: str, named: bool, kind: str) -> None:
    """It does not give the option, and perhaps not the kind."""
    steps = made(kind, seconds=70)
    steps.run(USES_OF[use](plans_in(kind if named else None)))
    assert note_of(steps)["used"] == after(70)
    steps.seconds = 70 + UNUSED_S - 0.1
    assert steps.run(delete_unused()) == []
    assert is_live(steps)


def test_move_into_a_queue_is_a_use() -> None:
    steps = made(seconds=70)
    source = plans_of("b", Options(dead_letter="b.dead"), owner="me")
    steps.run(source.push(["x"]))
    (held,) = steps.run(source.receive(Waiters("b"), 1, timeout=0))
    steps.run(source.move([(held, "x")], to="a"))
    assert note_of(steps)["used"] == after(70)


READS: Final[dict[str, Callable[[QueuePlans], Plan[Any]]]] = {
    "peek": lambda plans: plans.peek(),
    "get": lambda plans: plans.get("m"),
    "counts": lambda plans: plans.counts(),
    "history": lambda plans: plans.history(),
    "next_when": lambda plans: plans.next_when(),
    "paused": lambda plans: plans.paused(),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("read", READS)
def test_read_is_no_use(read: str, named: bool) -> None:
    steps = made(seconds=70)
    steps.run(READS[read](plans_in("standard" if named else None)))
    assert note_of(steps)["used"] == NOW


# ---- the deletion


@each_kind
def test_unused_queue_is_deleted_with_its_record(kind: str) -> None:
    steps = made(kind)
    assert steps.run(delete_unused()) == ["a"]
    assert is_gone(steps)
    assert steps.signals[-1] == ("a", None), "consumers read the record again"
    assert steps.run(delete_unused()) == []


@pytest.mark.parametrize(("seconds", "deleted"), [(UNUSED_S - 0.001, []), (UNUSED_S, ["a"])])
def test_queue_is_deleted_after_its_time_only(seconds: float, deleted: list[str]) -> None:
    assert made(seconds=seconds).run(delete_unused()) == deleted


#: The fields of messages that can be received, now or later.
LIVE: Final[dict[str, dict[str, Any]]] = {
    "ready": {},
    "scheduled": {"when": after(1e6)},
    "held": {"when": after(1e6), "token": "t", "reserved": NOW, "owner": "me", "tries": 1},
    "lapsed": {"token": "t", "reserved": NOW, "owner": "me", "tries": 1},
    "dead": {"dead": {"from": "b", "at": NOW, "reason": "x", "tries": 1, "error": None}},
}


@pytest.mark.parametrize("state", LIVE)
def test_message_keeps_its_queue(state: str) -> None:
    """The queue is checked again after its time, and no sooner."""
    steps = made()
    steps.collection.insert_one(message("m", **LIVE[state]))
    assert steps.run(delete_unused()) == []
    assert is_live(steps)
    steps.collection.delete_one({"_id": "m"})
    steps.seconds = 259
    assert steps.run(delete_unused()) == []
    assert [type(each) for each in steps.commands] == [Find]
    steps.seconds = 260
    assert steps.run(delete_unused()) == ["a"]


def test_pack_keeps_its_bucket() -> None:
    steps = made("bucket", seconds=0)
    steps.run(plans_in("bucket").push(["x", "y"]))
    steps.seconds = 200
    assert steps.run(delete_unused()) == []
    assert [each.payload for each in steps.run(receive("bucket"))] == ["x", "y"]


def test_dead_letters_and_history_do_not_keep_a_queue() -> None:
    steps = made()
    finished = message("h", when=BAND + timedelta(days=1), processed=NOW, outcome="committed")
    steps.collection.insert_many([finished, message("d") | {"q": "a.dead"}])
    assert steps.run(delete_unused()) == ["a"]
    assert is_gone(steps)
    assert "d" in {each["_id"] for each in steps.all()}


def push_unseen(kind: str, steps: Steps) -> None:
    """Push as a producer that knows the queue: it neither reads the record nor notes its use."""
    fields = lookup(kind).entering("a", steps.now)
    steps.collection.insert_one({"_id": "late", **fields, "pushed": NOW, "payload": "late"})


def push(kind: str, steps: Steps) -> None:
    """Push as a producer that uses the queue again."""
    steps.run(plans_in(kind).push(["late"]))


def wait_for_some(kind: str, steps: Steps) -> None:
    """Receive, and find nothing. The message comes later."""
    assert steps.run(receive(kind)) == []


@each_kind
@pytest.mark.parametrize("use", [push_unseen, push, wait_for_some])
def test_use_during_a_deletion_loses_nothing(use: Callable[[str, Steps], None], kind: str) -> None:
    """The message is received, and the queue lives until it is unused again."""
    for steps, running in at_each_command(partial(made, kind), delete_unused, least=8):
        use(kind, steps)
        resume(running)
        if use is wait_for_some:
            steps.run(plans_in(kind).push(["late"]))
        (held,) = steps.run(receive(kind))
        assert held.payload == "late"
        assert is_live(steps)
        assert note_of(steps)["used"] == steps.now
        steps.run(plans_in(kind).commit((held,)))
        steps.seconds += 10_000
        assert steps.run(delete_unused()) == ["a"]
        assert is_gone(steps)


def test_use_before_the_decision_keeps_the_queue() -> None:
    kept: list[bool] = []
    for steps, running in at_each_command(made, delete_unused, least=8):
        steps.run(note("a", 60))
        resume(running)
        assert note_of(steps)["used"] == steps.now
        kept.append(is_live(steps))
    assert kept == sorted(kept, reverse=True), "the decision is made at one instant"
    assert 5 < sum(kept) < len(kept)


@pytest.mark.parametrize("fault", FAULT_AT)
@pytest.mark.parametrize("kind", ["standard", "priority"])
def test_deletion_that_breaks_off_is_completed(kind: str, fault: str) -> None:
    for at in range(60):
        steps = made(kind)
        with suppress(Cut, QueueError):
            steps.run(delete_unused(), FAULT_AT[fault](at))
        last = len(steps.commands) <= at
        steps.seconds += 1000
        steps.run(delete_unused())
        assert is_gone(steps), at
        if last:
            assert at > 8, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


def test_two_passes_delete_a_queue_once() -> None:
    for steps, running in at_each_command(made, delete_unused, least=8):
        assert steps.run(delete_unused()) + resume(running) == ["a"]
        assert is_gone(steps)


def test_note_of_a_queue_that_was_deleted_goes() -> None:
    """The deletion by hand leaves the note, so that a queue that is made again has one."""
    steps = made(seconds=0)
    steps.run(delete_queue("a", False))
    assert note_of(steps)
    steps.seconds = 200
    steps.run(delete_unused())
    assert is_gone(steps)


RECORDS: Final[dict[str, dict[str, Any]]] = {
    "never had it": record(),
    "lost it": record(v=2, shape={"auto_delete": False}),
    "of another type": record(v=2, shape={"auto_delete": "soon"}),
    "too short": record(v=2, shape={"auto_delete": 0.1}),
    "a stream": record("stream", v=2, shape={"retention": 600.0, **SHAPE}),
}


@pytest.mark.parametrize("stored", RECORDS)
def test_queue_without_the_option_stays(stored: str) -> None:
    steps = lasting([RECORDS[stored]])
    steps.run(note("a", 60))
    steps.seconds = 200
    assert steps.run(delete_unused()) == []
    assert is_live(steps)
    assert note_of(steps) == {}


def test_queue_of_a_newer_kind_stays() -> None:
    steps = lasting([record("quantum", v=2, shape=SHAPE)])
    steps.run(note("a", 60))
    steps.seconds = 200
    assert steps.run(delete_unused()) == []
    assert is_live(steps)
    assert note_of(steps)["when"] == after(260), "a newer release deletes it"


def test_note_by_another_program_is_passed_over() -> None:
    odd = {"_id": "~used:no name!", "q": USES, "when": NOW, "used": "yesterday"}
    steps = lasting([odd])
    steps.seconds = 200
    assert steps.run(delete_unused()) == []
    assert steps.run(listed(5)) == ["no name!"]


def test_pass_takes_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused, "PAGE_SIZE", 2)
    names = [f"q{n}" for n in range(5)]
    shaped = record(v=2, shape=SHAPE)
    steps = lasting([shaped | {"_id": f"~queue:{name}", "q": name} for name in names])
    for name in names:
        steps.run(note(name, 60))
    assert steps.run(listed(3)) == names[:3]
    steps.seconds = 200
    assert steps.run(delete_unused()) == names
    assert steps.run(listed(3)) == []


def test_pass_over_all_queues_deletes_unused_queues() -> None:
    steps = made()
    assert steps.run(recover_all()) == 0, "it counts handovers"
    assert is_gone(steps)


def test_pass_sends_one_read_for_queues_in_use() -> None:
    steps = made(seconds=1)
    steps.run(recover_all())
    assert [type(each) for each in steps.commands] == [Distinct, Find]
    steps = lasting([record()])
    steps.run(recover_all())
    assert [type(each) for each in steps.commands] == [Distinct]


def test_queue_is_made_again_with_its_kind() -> None:
    steps = made("priority")
    steps.run(delete_unused())
    assert steps.run(namespace.kind_of("a")) == "priority"
    steps.run(plans_in("priority", **SHAPE).push(["x"]))
    assert (is_live(steps), note_of(steps)["used"]) == (True, steps.now)
    assert record_of(steps)["shape"] == {"strict": False, **SHAPE}
