"""Deleting a queue: cut at any command, and beside a producer that still knows the queue."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pyqueue import ConfigurationError, Unavailable
from pyqueue.backends import all_queues, namespace
from pyqueue.clock import BAND
from pyqueue.requests import Delete, EnsureQueue
from tests.plans.meddler import Meddler
from tests.plans.runner import NOW, message, record
from tests.plans.store import Store, World

RECORD = "~queue:a"


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pages small, so that there are several."""
    monkeypatch.setattr(all_queues, "MAX_BATCH", 5)


def stored(*, ready: int = 0, finished: int = 0) -> Store:
    """Return a store with queue "a" and its record."""
    store = World(0).store
    messages = [message(f"m{n}") for n in range(ready)]
    for n in range(finished):
        when = BAND + timedelta(days=1, milliseconds=n)
        messages.append(message(f"h{n}", when=when, processed=NOW))
    store.documents |= {each["_id"]: each for each in (record(paused=True), *messages)}
    return store


def test_delete_never_loses_a_message_pushed_during_it() -> None:
    """Whatever the instant of a push: it is refused, or the message is there and receivable."""
    whole = Meddler(stored(finished=12))
    assert whole.run(all_queues.delete_queue("a", False)) == 12
    for place in range(len(whole.commands)):
        store = stored(finished=12)

        def push(store: Store = store) -> None:
            """Push as a producer that knows the queue: it does not read the record."""
            store.documents["late"] = message("late")

        try:
            Meddler(store, place, push).run(all_queues.delete_queue("a", False))
        except ConfigurationError:
            assert store.documents[RECORD]["q"] == "a"
            assert "expires" not in store.documents[RECORD]
        assert store.documents["late"]["q"] == "a"
        # The next user of the queue makes its record live again.
        runner = Meddler(store)
        used = runner.run(namespace.read_or_create_record(EnsureQueue("a", "standard")))
        assert used.kind == "standard"
        assert store.documents[RECORD]["q"] == "a"
        assert not {"deleted", "expires", "processed"} & set(store.documents[RECORD])


@pytest.mark.parametrize("force", [False, True])
def test_delete_cut_at_any_command_can_be_repeated(force: bool) -> None:
    def fresh() -> Store:
        return stored(ready=3 if force else 0, finished=12)

    whole = Meddler(fresh())
    total = whole.run(all_queues.delete_queue("a", force))
    assert sum(isinstance(each, Delete) for each in whole.commands) >= 2
    for place in range(len(whole.commands)):
        store = fresh()
        with pytest.raises(Unavailable):
            Meddler(store, place).run(all_queues.delete_queue("a", force))
        left = len(store.documents) - 1
        assert Meddler(store).run(all_queues.delete_queue("a", force)) == left <= total
        assert set(store.documents) == {RECORD}
        assert store.documents[RECORD]["q"] == "~deleted"


def test_names_leave_out_deleted_queues() -> None:
    store = stored()
    assert Meddler(store).run(all_queues.names()) == ["a"]
    Meddler(store).run(all_queues.delete_queue("a", False))
    assert Meddler(store).run(all_queues.names()) == []
    store.documents["m"] = message("m")
    assert Meddler(store).run(all_queues.names()) == ["a"]


def test_delete_of_an_unknown_queue_writes_nothing() -> None:
    store = World(0).store
    assert Meddler(store).run(all_queues.delete_queue("a", True)) == 0
    assert store.documents == {}
