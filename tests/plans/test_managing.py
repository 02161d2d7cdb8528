"""Managing many messages: purge and redrive work in pages, and tell how far they came."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import Unavailable
from pyqueue.backends.applying import MAX_BATCH
from pyqueue.backends.cancelling import cancel
from pyqueue.requests import Command, Delete, Find, Update
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, Runner, after, message, record, standard
from tests.plans.steps import Steps, at_each_command, lasting, resume
from tests.plans.store import Store, World


def stored(number: int, **fields: Any) -> Store:
    """Return a store with this number of messages in queue "a"."""
    store = World(0).store
    for n in range(number):
        when = NOW - timedelta(milliseconds=number // 3 - n // 3)  # three of each instant
        store.documents[f"m{n:05}"] = message(f"m{n:05}", when=when, **fields)
    return store


def on(store: Store, fault: Callable[[int, Any], bool] = lambda place, request: False) -> Runner:
    """Return a runner over a store.

    Before each command it asks ``fault``, with the number of commands before it, whether the
    command gets no answer.
    """
    runner = Runner()

    def answer(request: Command[Any]) -> Any:
        if fault(len(runner.commands) - 1, request):
            raise Unavailable("no answer")
        return store.answer(None, request)  # type: ignore[arg-type]  # no process asks

    runner.answers = [answer] * 20_000
    return runner


def cut_at(cut: int) -> Callable[[int, Any], bool]:
    """Return a fault: the server is gone from this command on."""
    return lambda place, request: place >= cut


def number_in(error: Unavailable) -> int:
    """Return the number of messages that an error names."""
    found = re.search(r"; (\d+) messages", str(error))
    assert found is not None, error
    return int(found[1])


# ---- purge


def test_purge_deletes_page_by_page() -> None:
    """Each page begins where the last one ended, so it does not walk over deleted entries."""
    number = 3 * MAX_BATCH + 7
    store = stored(number)
    store.documents["m00001"] |= {"token": "t", "when": after(60)}
    store.documents["m00002"] |= {"token": "lapsed"}
    store.documents["scheduled"] = message("scheduled", when=after(3600))
    store.documents["other"] = message("other", q="b")
    runner = on(store)
    assert runner.run(standard().purge()) == number
    assert set(store.documents) == {"m00001", "other"}
    deletes = [each for each in runner.commands if isinstance(each, Delete)]
    assert len(deletes) == 4
    assert all(len(each.filter["_id"]["$in"]) <= MAX_BATCH for each in deletes)
    starts = [str(each.filter) for each in runner.commands if isinstance(each, Find)]
    assert len(set(starts)) == len(starts)


def test_purge_cut_at_any_command_tells_how_far_it_came() -> None:
    whole = on(stored(2 * MAX_BATCH + 1))
    whole.run(standard().purge())
    for cut in range(1, len(whole.commands)):  # the first one reads the record
        store = stored(2 * MAX_BATCH + 1)
        runner = on(store, cut_at(cut))
        with pytest.raises(Unavailable, match=r"call purge\(\) again") as caught:
            runner.run(standard().purge())
        assert number_in(caught.value) == 2 * MAX_BATCH + 1 - len(store.documents)
        assert on(store).run(standard().purge()) == len(store.documents) or not store.documents
        assert not store.documents


@pytest.mark.parametrize("locked", [{0}, {700}, {1999}, {3, 4, 5, 1000}, set(range(100, 300))])
def test_purge_gets_past_locked_messages(locked: set[int]) -> None:
    """A delete that meets a locked message deletes those before it, and then gets no answer."""
    store = stored(2 * MAX_BATCH)
    ids = {f"m{n:05}" for n in locked}

    def blocked(place: int, request: Any) -> bool:
        if not isinstance(request, Delete) or not ids.intersection(request.filter["_id"]["$in"]):
            return False
        for id in sorted(request.filter["_id"]["$in"]):
            if id in ids:
                break
            store.documents.pop(id, None)
        return True

    runner = on(store, blocked)
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().purge())
    assert number_in(caught.value) == 2 * MAX_BATCH - len(store.documents)
    assert set(store.documents) == ids
    assert len(runner.commands) < 15 + 6 * len(ids)
    limits = [each.max_time_s for each in runner.commands if isinstance(each, Delete)]
    assert limits[-1] is None, "the last attempt has the whole time"
    assert all(each is None or 0.05 <= each <= 1.0 for each in limits)
    assert sum(each or 0 for each in limits) < 8 + len(ids) / 10


def test_purge_counts_passed_messages_that_became_free() -> None:
    store = stored(10)
    waits = 2

    def blocked(place: int, request: Any) -> bool:
        nonlocal waits
        waits -= isinstance(request, Delete)
        return isinstance(request, Delete) and waits >= 0

    assert on(store, blocked).run(standard().purge()) == 10
    assert not store.documents


def test_purge_confirms_a_delete_that_was_not_durable_in_time() -> None:
    """A late write concern is no lock: a delete of nothing waits for it."""
    store = stored(5)

    def late(place: int, request: Any) -> bool:
        if isinstance(request, Delete) and request.filter["_id"]["$in"]:
            store.documents.clear()
            return True
        return False

    runner = on(store, late)
    assert runner.run(standard().purge()) == 5
    assert runner.commands[-1].filter["_id"]["$in"] == []
    assert runner.commands[-1].max_time_s is None


# ---- redrive


def dead(origin: Any) -> dict[str, Any]:
    """Return the field of a dead message."""
    return {"from": origin, "at": NOW, "reason": "r", "tries": 1, "error": None}


@pytest.mark.parametrize("limit", [None, 2])
def test_redrive_passes_messages_without_a_way_home(limit: int | None) -> None:
    """More than a page of foreign documents must not hide the dead messages behind them."""
    store = stored(MAX_BATCH + 300, dead=dead("no queue name"))
    for n in range(5):
        store.documents[f"x{n}"] = message(f"x{n}", dead=dead("home"))
    moved = 5 if limit is None else limit
    assert on(store).run(standard().redrive(limit)) == moved
    assert sum(each["q"] == "home" for each in store.documents.values()) == moved


def test_redrive_leaves_a_held_message() -> None:
    store = stored(2, dead=dead("home"))
    store.documents["m00000"] |= {"token": "t", "when": after(60)}
    store.documents["m00001"] |= {"token": "lapsed"}
    assert on(store).run(standard().redrive()) == 1
    assert store.documents["m00000"]["q"] == "a"


def test_redrive_cut_at_any_command_tells_how_far_it_came() -> None:
    whole = on(stored(4, dead=dead("home")))
    assert whole.run(standard().redrive()) == 4
    assert sum(isinstance(each, Update) for each in whole.commands) == 4
    for cut in range(1, len(whole.commands)):
        store = stored(4, dead=dead("home"))
        runner = on(store, cut_at(cut))
        with pytest.raises(Unavailable, match=r"call redrive\(\) again") as caught:
            runner.run(standard().redrive())
        home = sum(each["q"] == "home" for each in store.documents.values())
        assert number_in(caught.value) == home
        assert on(store).run(standard().redrive()) == 4 - home


def test_redrive_leaves_a_dead_letter_that_was_cancelled() -> None:
    """The end has no token, and the message was read before."""

    def made() -> Steps:
        keep = {"result": 60.0, "topic": "t"}
        return lasting([record(), message("m", dead=dead("home"), keep=keep)])

    for steps, running in at_each_command(made, lambda: standard().redrive(), least=1):
        if steps.run(cancel("m", False)) == "cancelled":
            resume(running)
            (end,) = [each for each in steps.all() if each["_id"] == "m"]
            assert end["outcome"] == "cancelled"


def test_pop_does_not_undo_the_removal_of_its_message() -> None:
    """Its lease has lapsed, so the message may be removed."""

    def made() -> Steps:
        return lasting([record(history=600), message("m")])

    pops = standard(history=600)
    for steps, running in at_each_command(
        made, lambda: pops.receive(Waiters("a"), 1, timeout=0, pop=True), least=1
    ):
        steps.seconds += 100
        if steps.run(pops.remove("m")):
            assert resume(running) == []
            (end,) = [each for each in steps.all() if each["_id"] == "m"]
            assert end["outcome"] == "removed"
