"""A runner on a store, which fails or lets something else happen before one of its commands."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from typing import Any

from pyqueue.backends import namespace
from pyqueue.errors import Unavailable
from pyqueue.requests import Command, EnsureQueue
from tests.plans.runner import NOW, Runner
from tests.plans.steps import WRITES
from tests.plans.store import Store


def snapshot(store: Store) -> dict[Any, Any]:
    """Return a copy of the documents. The store replaces nested values, and changes none."""
    return {id: dict(document) for id, document in store.documents.items()}


class Meddler(Runner):
    """Runs plans on a store; before one of its commands it fails, or something else happens."""

    def __init__(
        self,
        store: Store,
        place: int = -1,
        meddle: Callable[[], object] | None = None,
        *,
        now: datetime = NOW,
    ) -> None:
        super().__init__(now=now)
        self.store, self.place, self.meddle = store, place, meddle
        self.answers = [self.carried] * 1000
        self.listening = False
        #: State after a fail-over: writes at w:1 count once a write at majority follows them.
        self.safe = snapshot(store)

    def carried(self, request: Command[Any]) -> Any:
        """Carry a command out."""
        if len(self.commands) - 1 == self.place:
            if self.meddle is None:
                self.place += 1  # the next commands fail too
                raise Unavailable("no answer")
            self.meddle()
        answer = self.store.answer(None, request)  # type: ignore[arg-type]  # no process asks
        if isinstance(request, WRITES) and not request.w1:
            self.safe = snapshot(self.store)
        return answer

    def fail_over(self) -> None:
        """Undo the writes at w:1."""
        self.store.documents = deepcopy(self.safe)

    def _answer(self, request: Any) -> Any:
        if isinstance(request, EnsureQueue):
            return self._drive(namespace.read_or_create_record(request)).kind
        return super()._answer(request)
