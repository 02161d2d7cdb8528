"""Pushes: what is made of the server's answers that are rare. No database."""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue import ConfigurationError, DuplicateKey, Unavailable
from pyqueue.backends import kind
from pyqueue.backends.giving_back import undo_reserve
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.standard import Standard
from pyqueue.requests import FindAndModify, Insert, Plan, WriteFailure
from tests.plans.runner import NOW, Runner, after, giving, reservation, standard


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("by", ["raised", "told"])
def test_an_unknown_outcome_names_all_that_may_be_stored(count: int, by: str) -> None:
    """Whether the command failed, or the server said so of one of its documents."""
    gone = Unavailable("gone")
    runner = Runner(gone if by == "raised" else [WriteFailure(count - 1, None, gone)])
    ids = [f"m{n}" for n in range(count)]
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().push(range(count), ids=ids))
    assert caught.value.ids == ids
    assert isinstance(runner.commands[0], Insert)
    assert runner.signals == []


def test_unknown_replacement_names_all_possible_ids() -> None:
    runner = Runner([], [], {"_id": "m0"}, [], [], Unavailable("gone"))
    with pytest.raises(Unavailable) as caught:
        runner.run(
            standard().push([1, 2], keys=["k0", "k1"], ids=["m0", "m1"], on_duplicate="replace")
        )
    assert caught.value.ids == ["m0", "m1"]


def test_a_replacement_that_meets_another_is_tried_once_more() -> None:
    """Two upserts at once: the second then finds what the first made."""
    runner = Runner(DuplicateKey("taken"), {"_id": "theirs"})
    assert runner.run(standard().push([1], keys=["k"], on_duplicate="replace")) == ["theirs"]
    assert [type(each) for each in runner.commands] == [FindAndModify, FindAndModify]
    assert runner.signals == [("a", NOW)]


def test_a_replacement_whose_id_is_anothers_says_so() -> None:
    """It came in between the look and the upsert."""
    runner = Runner([], [], DuplicateKey("taken"), DuplicateKey("taken"))
    with pytest.raises(DuplicateKey) as caught:
        runner.run(standard().push([1], keys=["k"], ids=["m"], on_duplicate="replace"))
    assert caught.value.ids == ["m"]
    assert runner.signals == []


def test_in_a_transaction_a_replacement_is_tried_once() -> None:
    """The transaction is gone with the first failure: who runs it repeats it."""
    taken = DuplicateKey("taken")
    runner = Runner(taken)
    with pytest.raises(DuplicateKey) as caught:
        runner.run(standard().push([1], keys=["k"], on_duplicate="replace", session=object()))
    assert caught.value is taken


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("session", [None, object()])
def test_a_push_signals_once_if_anything_came_in(count: int, session: Any) -> None:
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
    """A kind of queue that offers nothing beyond push, claim and settle."""

    name = "bare"
    capabilities = frozenset()


def bare(**options: Any) -> QueuePlans:
    return QueuePlans("a", Options(dead_letter="a.dead", **options), kind="bare", owner="me")


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
def test_what_a_kind_lacks_is_refused_before_any_command(what: str, plan: Any) -> None:
    runner = Runner()
    with pytest.raises(
        ConfigurationError, match=f"^{what}: queue 'a' is of kind 'bare', which does not offer it"
    ):
        runner.run(plan())
    assert runner.commands == []


def test_document_without_a_date_sorts_first() -> None:
    """It is buried when it is claimed; its place is only asked for to give back what was claimed
    with it.
    """
    runner = Runner(lambda command: command.pairs)
    plan: Plan[None] = undo_reserve(
        *giving(standard()), [({"_id": "m", "token": "t", "when": "soon"}, reservation("m"))]
    )
    runner.run(plan)
    ((_, update),) = runner.commands[0].pairs
    assert update["$set"]["when"] < after(-1e9)
