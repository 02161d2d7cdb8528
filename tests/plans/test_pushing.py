"""Pushes: the handling of rare server answers, and of other writers that come between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyqueue import ConfigurationError, DuplicateKey, Unavailable
from pyqueue.backends import kind
from pyqueue.backends.giving_back import give_back
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.standard import Standard
from pyqueue.requests import (
    Coalesce,
    Document,
    Find,
    FindAndModify,
    Insert,
    Plan,
    ServerTime,
    WriteFailure,
)
from tests.plans.runner import NOW, Runner, after, giving, reservation, standard
from tests.plans.steps import Steps


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("by", ["raised", "reported"])
def test_unknown_push_names_all_possible_ids(count: int, by: str) -> None:
    """Either the command failed, or the server reported it for one of the documents."""
    gone = Unavailable("gone")
    runner = Runner(gone if by == "raised" else [WriteFailure(count - 1, None, gone)])
    ids = [f"m{n}" for n in range(count)]
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().push(range(count), ids=ids))
    assert caught.value.ids == ids
    assert isinstance(runner.commands[0], Insert)
    assert runner.signals == []


@pytest.mark.parametrize(
    ("options", "alone"), [({}, False), ({"keys": ["k"]}, True), ({"ids": ["m"]}, True)]
)
def test_push_that_may_meet_a_lock_shares_no_command(options: dict[str, Any], alone: bool) -> None:
    """An open transaction may hold the key or the id."""
    requests = [coalesced(standard(queue).push([1], **options)) for queue in "ab"]
    assert [each.alone for each in requests] == [alone] * 2
    assert (requests[0].key == requests[1].key) is not alone  # a limit for each queue
    assert requests[0].max_in_flight == (8 if alone else 2)


#: Stands in for the session of a transaction.
SESSION = SimpleNamespace(in_transaction=True)


def coalesced(plan: Plan[Any]) -> Coalesce[Any, Any]:
    """Return the first request of a plan that is shared with concurrent calls."""
    request: Any = next(plan)
    while not isinstance(request, Coalesce):
        request = plan.send(NOW if isinstance(request, ServerTime) else "standard")
    return request


def test_unknown_second_try_names_all_ids_of_the_call() -> None:
    """The first try met an id that was free when it was read."""
    taken = WriteFailure(1, "_id", DuplicateKey("taken"))
    runner = Runner([taken], [], Unavailable("no answer"))
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().push(["a", "b"], ids=["1", "2"]))
    assert caught.value.ids == ["1", "2"]


def test_unknown_replacement_names_all_possible_ids() -> None:
    runner = Runner([], [], {"_id": "m0"}, [], [], Unavailable("gone"))
    with pytest.raises(Unavailable) as caught:
        runner.run(
            standard().push([1, 2], keys=["k0", "k1"], ids=["m0", "m1"], on_duplicate="replace")
        )
    assert caught.value.ids == ["m0", "m1"]


@pytest.mark.parametrize("races", [1, 3])
def test_replacement_is_retried_after_a_concurrent_upsert(races: int) -> None:
    """Two upserts run at once; the second finds the document of the first, unless that ended."""
    nothing: list[Document] = []
    runner = Runner(*[DuplicateKey("taken"), nothing, nothing] * races, {"_id": "theirs"})
    assert runner.run(standard().push([1], keys=["k"], on_duplicate="replace")) == ["theirs"]
    kinds = [*[FindAndModify, Find, Find] * races, FindAndModify]
    assert [type(each) for each in runner.commands] == kinds
    assert runner.signals == [("a", NOW)]


@pytest.mark.parametrize("stored", ["its queue", "another queue"])
def test_replacement_meets_its_id_as_the_key_becomes_free(stored: str) -> None:
    """The message with the key is finished between the read and the upsert."""
    steps, queue = Steps(), standard("q")
    first = queue if stored == "its queue" else standard("other")
    steps.run(first.push(["x1"], ids=["x"]))
    steps.run(queue.push(["y1"], ids=["y"], keys=["k"]))

    def finish(number: int, done: bool) -> None:
        if isinstance(steps.commands[number], FindAndModify) and not done:
            steps.collection.delete_one({"_id": "y"})

    plan = queue.push(["x2"], ids=["x"], keys=["k"], on_duplicate="replace")
    if first is queue:
        assert steps.run(plan, finish) == ["x"]  # this push has been done before
    else:
        with pytest.raises(DuplicateKey, match="were never in queue 'q'") as caught:
            steps.run(plan, finish)
        assert caught.value.ids == ["x"]
    assert [each["payload"] for each in steps.all() if "payload" in each] == ["x1"]


def test_replacement_with_a_taken_id_raises() -> None:
    """Another queue inserted it between the read and the upsert."""
    runner = Runner([], [], DuplicateKey("taken"), [{"_id": "m", "q": "other"}])
    with pytest.raises(DuplicateKey) as caught:
        runner.run(standard().push([1], keys=["k"], ids=["m"], on_duplicate="replace"))
    assert caught.value.ids == ["m"]
    assert runner.signals == []


def test_replacement_in_a_transaction_is_tried_once() -> None:
    """The first failure ends the transaction, and its caller repeats it."""
    taken = DuplicateKey("taken")
    runner = Runner(taken)
    with pytest.raises(DuplicateKey) as caught:
        runner.run(standard().push([1], keys=["k"], on_duplicate="replace", session=SESSION))
    assert caught.value is taken


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("session", [None, SESSION])
def test_push_signals_once_if_it_stored_a_message(count: int, session: Any) -> None:
    runner = Runner([])
    runner.run(standard().push(range(count), delay=5, session=session))
    assert runner.signals == [("a", after(5))]
    runner = Runner([WriteFailure(place, "key", DuplicateKey("taken")) for place in range(count)])
    runner.run(standard().push(range(count), keys=[f"k{place}" for place in range(count)]))
    assert runner.signals == []


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kind._kinds, "bare", Bare())


class Bare(Standard):
    """A kind of queue that offers only push, claim and settle."""

    name = "bare"
    capabilities = frozenset()


def bare(**options: Any) -> QueuePlans:
    return plans_of("a", Options(dead_letter="a.dead", **options), kind="bare", owner="me")


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        ("key", lambda: bare().push([1], keys=["k"])),
        ("move", lambda: bare().move([(reservation("m1"), 2)], to="b")),
        ("dead_letter", lambda: bare().bury((reservation("m1"),), error="odd")),
        ("dead_letter", lambda: bare().redrive()),
        ("history", lambda: bare().replay(("m1",))),
        ("history", lambda: bare(history=60)),
    ],
)
def test_missing_capability_is_refused_before_any_command(what: str, plan: Any) -> None:
    runner = Runner()
    with pytest.raises(
        ConfigurationError, match=f"^{what}: queue 'a' is of kind 'bare', which does not support it"
    ):
        runner.run(plan())
    assert runner.commands == []


def test_document_without_a_date_sorts_first() -> None:
    """It is buried when it is claimed.

    Its position is needed only to give back the messages that were claimed with it.
    """
    runner = Runner(lambda command: command.pairs)
    runner.run(give_back(*giving(standard())[:2], [{"_id": "m", "token": "t", "when": "soon"}]))
    ((_, update),) = runner.commands[0].pairs
    assert update["$set"]["when"] < after(-1e9)
