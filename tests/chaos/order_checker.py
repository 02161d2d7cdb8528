"""The check of the order of one producer: messages that leave a bucket for a standard queue.

Messages of one pack that enter the queue for the same instant have the order of their push. The
check compares the messages of one receive. It cannot compare two receives under faults: a claim
passes over messages that a transaction holds, and the next one gets them. A message whose first
delivery failed has another place, so only first tries count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from tests.chaos.names import ROWS, document_of

Line = list[Any]


class Entrances:
    """How messages entered the queue, as the change log shows it."""

    def __init__(self) -> None:
        #: The number of each message in the order of its producer, as its content says.
        self._numbers: dict[str, int] = {}
        #: The pack and the instant by which a message entered the queue.
        self._entered: dict[str, tuple[str, float | None]] = {}

    def add(self, line: Line) -> None:
        """Learn from a line."""
        kind, id, *rest = line
        if kind == "in":
            number = str(rest[1]).rpartition(".")[2]
            if number.isdecimal():
                self._numbers[id] = int(number)
        elif kind == "set" and rest[0].get("q") == ROWS:
            self._entered[id] = (document_of(id), rest[0].get("when"))

    def out_of_order(self, receives: Iterable[Mapping[str, Mapping[str, int]]]) -> list[str]:
        """Return which messages came before earlier messages of their push, in words.

        Args:
            receives: The result of each receive: the tries of each message, by token, in order.
        """
        found = []
        for received in receives:
            lines: dict[tuple[str, float | None], list[str]] = {}
            for ids in received.values():
                for id, tries in ids.items():
                    if tries == 1 and id in self._entered:
                        lines.setdefault(self._entered[id], []).append(id)
            found += [
                f"{later}: received before {id}, which the same push stored first"
                for ids in lines.values()
                for later, id in pairwise(ids)
                if self._numbers[id] < self._numbers[later]
            ]
        return found
