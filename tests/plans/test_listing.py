"""Deleting a queue: cut at any command, and beside a producer that still knows the queue."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pyqueue import ConfigurationError, Unavailable
from pyqueue.backends import all_queues, namespace
from pyqueue.clock import BAND
from pyqueue.requests import Command, Delete, EnsureQueue
from tests.plans.runner import NOW, Runner
from tests.plans.store import Store, World

RECORD = "~queue:a"


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pages small, so that there are several."""
    monkeypatch.setattr(all_queues, "MAX_BATCH", 5)


def stored(*, ready: int = 0, finished: int = 0) -> Store:
    """Return a store with queue "a" and its record."""
    store = World(0).store
    record = {"q": "a", "when": NOW, "record": True, "kind": "standard", "v": 1, "paused": True}
    store.documents[RECORD] = {"_id": RECORD, **record}
    for n in range(ready):
        store.documents[f"m{n}"] = {"_id": f"m{n}", "q": "a", "when": NOW}
    for n in range(finished):
        when = BAND + timedelta(days=1, milliseconds=n)
        store.documents[f"h{n}"] = {"_id": f"h{n}", "q": "a", "when": when, "processed": NOW}
    return store


class Meddler(Runner):
    """Runs plans on a store, and does something before one of the commands."""

    def __init__(self, store: Store, place: int = -1, error: bool = False) -> None:
        super().__init__()
        self.store, self.place, self.error = store, place, error
        self.answers = [self.carried] * 1000

    def carried(self, request: Command[Any]) -> Any:
        """Carry a command out."""
        place = len(self.commands) - 1
        if self.error and place >= self.place:
            raise Unavailable("no answer")
        if place == self.place:
            # A producer that knows the queue does not read the record.
            self.store.documents["late"] = {"_id": "late", "q": "a", "when": NOW}
        return self.store.answer(None, request)  # type: ignore[arg-type]  # no process asks


def test_delete_never_loses_a_message_pushed_during_it() -> None:
    """Whatever the instant of a push: it is refused, or the message is there and receivable."""
    whole = Meddler(stored(finished=12))
    assert whole.run(all_queues.delete_queue("a", False)) == 12
    for place in range(len(whole.commands)):
        store = stored(finished=12)
        try:
            Meddler(store, place).run(all_queues.delete_queue("a", False))
        except ConfigurationError:
            assert store.documents[RECORD]["q"] == "a"
            assert "expires" not in store.documents[RECORD]
        assert store.documents["late"]["q"] == "a"
        # The next user of the queue makes its record live again.
        runner = Meddler(store)
        record = runner.run(namespace.read_or_create_record(EnsureQueue("a", "standard")))
        assert record.kind == "standard"
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
            Meddler(store, place, error=True).run(all_queues.delete_queue("a", force))
        left = len(store.documents) - 1
        assert Meddler(store).run(all_queues.delete_queue("a", force)) == left <= total
        assert set(store.documents) == {RECORD}
        assert store.documents[RECORD]["q"] == "~deleted"


def test_names_leave_out_deleted_queues() -> None:
    store = stored()
    assert Meddler(store).run(all_queues.names()) == ["a"]
    Meddler(store).run(all_queues.delete_queue("a", False))
    assert Meddler(store).run(all_queues.names()) == []
    store.documents["m"] = {"_id": "m", "q": "a", "when": NOW}
    assert Meddler(store).run(all_queues.names()) == ["a"]


def test_delete_of_an_unknown_queue_writes_nothing() -> None:
    store = World(0).store
    assert Meddler(store).run(all_queues.delete_queue("a", True)) == 0
    assert store.documents == {}
