"""Hooks for tests: one records the events, the other counts messages as metrics do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pyqueue import Hooks, LeaseLost, Message, Reservation
from pyqueue.hooks import Pushing
from pyqueue.messages import Id


def kind_of(error: BaseException | None) -> type[BaseException] | None:
    """Return the class of an error."""
    return None if error is None else type(error)


class Recorder(Hooks):
    """Records the calls of hooks, with the ids of messages and the classes of errors."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def pushing(self, queue: str, items: Sequence[Pushing]) -> None:
        """Record it."""
        self.told.append(("pushing", queue, [each.payload for each in items]))

    def pushed(self, queue: str, ids: Sequence[Id | None], error: BaseException | None) -> None:
        """Record it."""
        self.told.append(("pushed", queue, list(ids), kind_of(error)))

    def received(self, queue: str, messages: Sequence[Message[Any]], waited: float) -> None:
        """Record it."""
        assert waited >= 0
        self.told.append(("received", queue, [each.id for each in messages]))

    def settled(
        self,
        queue: str,
        verb: str,
        reservations: Sequence[Message[Any]],
        error: BaseException | None,
        to: str | None,
    ) -> None:
        """Record it."""
        ids = [each.id for each in reservations]
        self.told.append(("settled", queue, verb, ids, kind_of(error), to))

    def take(self, event: str | None = None) -> list[tuple[Any, ...]]:
        """Return the records of an event, without its name, and forget everything."""
        told, self.told = self.told, []
        return told if event is None else [each[1:] for each in told if each[0] == event]


class Books(Hooks):
    """Counts the messages that hooks tell of, by queue."""

    def __init__(self) -> None:
        self.pushes: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.entered: Counter[str] = Counter()

    def pushed(self, queue: str, ids: Sequence[Id | None], error: BaseException | None) -> None:
        """Count the messages that were written."""
        self.pushes[queue] += sum(id is not None for id in ids)

    def received(self, queue: str, messages: Sequence[Message[Any]], waited: float) -> None:
        """Count the popped messages."""
        self.left[queue, "pop"] += sum(not isinstance(each, Reservation) for each in messages)

    def settled(
        self,
        queue: str,
        verb: str,
        reservations: Sequence[Message[Any]],
        error: BaseException | None,
        to: str | None,
    ) -> None:
        """Count the messages that were settled."""
        if error is not None and not isinstance(error, LeaseLost):
            return
        gone = set() if error is None else {each.id for each in (*error.lost, *error.unknown)}
        number = sum(each.id not in gone for each in reservations)
        if verb in ("commit", "move", "bury", "cancel"):
            self.left[queue, verb] += number
        if to is not None:
            self.entered[to] += number

    def total(self, queue: str) -> int:
        """Return how many messages a queue has, as far as hooks were told."""
        left = sum(count for (name, _), count in self.left.items() if name == queue)
        return self.pushes[queue] + self.entered[queue] - left
