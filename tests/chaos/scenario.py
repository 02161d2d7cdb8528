"""Made-up runs for the audit of the fault suite: what clients say in their ledgers, and what the witness saw, line by line."""

from __future__ import annotations

from typing import Any

from tests.chaos.checker import Ledgers, Witnessed, audit
from tests.chaos.pop_checker import Circumstances

__all__ = ["Story"]

Line = list[Any]


class Story:
    """A run that did not happen. What is said and what is seen are told apart: they need not agree."""

    def __init__(self) -> None:
        self.seen: list[Line] = []
        self.said: dict[str, list[Line]] = {}
        self._number = 0

    # ---- what the witness saw

    def came(self, id: str, queue: str = "orders", *, pushed: int = 1) -> None:
        """A message was stored; what is given back is as it was pushed."""
        self.seen.append(["in", id, queue, id, pushed])

    def changed(self, id: str, **put: Any) -> None:
        """It was changed."""
        self.seen.append(["set", id, put])

    def claimed(self, id: str, token: str) -> None:
        """It was reserved."""
        self.changed(id, token=token)

    def moved(self, id: str, by: str, to: str = "parsed") -> None:
        """It was moved, by the holder of this token."""
        self.changed(id, token=None, q=to, by=by)

    def went(self, id: str, at: float | None = None) -> None:
        """It was deleted: now, or at a time of its own."""
        self.seen.append(["out", id, float(self._number) if at is None else at])

    # ---- what a client said

    def called(
        self,
        op: str,
        queue: str,
        items: Any,
        outcome: str | None = "ok",
        heard: Any = None,
        *,
        who: str = "consumer-1.1",
        at: float | None = None,
    ) -> None:
        """A call, and what was heard of it; None: nothing, since the process was killed. Unless it says when, it took its time."""
        ledger = self.said.setdefault(who, [])
        self._number += 1
        began, ended = (self._number - 10.0, self._number + 0.5) if at is None else (at, at + 0.5)
        ledger.append(["call", self._number, began, op, queue, items])
        if outcome is not None:
            ledger.append(["heard", self._number, ended, outcome, heard])

    def pushed(self, id: str, queue: str = "orders", outcome: str | None = "ok") -> None:
        """A push."""
        self.called("push", queue, [id], outcome, [id], who="producer-1.1")

    def received(self, id: str, token: str, queue: str = "orders", tries: int = 1) -> None:
        """A reserve."""
        self.called("reserve", queue, None, "ok", {token: {id: tries}})

    def settled(
        self, op: str, id: str, token: str, queue: str = "orders", outcome: str | None = "ok"
    ) -> None:
        """A settle; refused: as lost."""
        self.called(
            op, queue, {token: [id]}, outcome, [{token: [id]}, {}] if outcome == "refused" else None
        )

    # ---- both

    def stored(self, id: str, queue: str = "orders") -> None:
        """A push that was acknowledged, and its message."""
        self.pushed(id, queue)
        self.came(id, queue)

    def held(self, id: str, token: str, queue: str = "orders", tries: int = 1) -> None:
        """A reserve that was answered, and its claim."""
        self.received(id, token, queue, tries)
        self.claimed(id, token)

    def verdict(self, *stored: str, **known: Any) -> dict[str, Any]:
        """What the audit finds, if these are stored in the end, and the program did what is known."""
        ledgers = Ledgers({name: iter(lines) for name, lines in self.said.items()})
        return audit(ledgers, Witnessed(iter(self.seen)), stored, Circumstances(**known))
