"""The check of loops: each claim reaches one body.

The loops of an async client are often cancelled while they ask for the next message. The change log
shows what became of a message that was claimed then; see ``starvation`` for the leases of loops.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Bodies:
    """The messages that the bodies of loops got, from the ledgers."""

    def __init__(self) -> None:
        #: How many bodies got the message of a claim: (token, id).
        self._got: Counter[tuple[str, str]] = Counter()

    def add(self, call: Any) -> None:
        """Learn from a call by which a loop asked for its next message."""
        if call.outcome == "ok":
            self._got.update((token, id) for token, ids in call.result.items() for id in ids)

    def twice(self) -> list[str]:
        """Return the claims that reached several bodies, in words."""
        return [
            f"{id}: {number} bodies of loops got it by {token}"
            for (token, id), number in self._got.items()
            if number > 1
        ]
