"""Invented runs for the checker: the lines of ledgers and of the change log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.checker import MUST_BE_ZERO, ChangeLog, Ledgers, check
from tests.chaos.pop_checker import Disturbances
from tests.chaos.starvation import Availability, check_times
from tests.chaos.windows import Windows

Line = list[Any]


def expect_only(found: dict[str, Any], *wrong: str) -> None:
    """Assert that each of these went wrong once, and nothing else."""
    names = (*MUST_BE_ZERO, "refused_though_done")
    expected = {name: int(name in wrong) for name in names}
    assert {name: found[name] for name in names} == expected, found["wrong"]


class Scenario:
    """An invented run. What clients record and what the database shows need not agree."""

    def __init__(self) -> None:
        self._changes: list[Line] = []
        self._ledgers: dict[str, list[Line]] = {}
        self._number = 0

    # ---- the change log

    def inserted(
        self,
        id: str,
        queue: str = "orders",
        *,
        pushed: int = 1,
        at: float = 0.0,
        place: Sequence[Any] = (),
    ) -> None:
        """A message was stored. One that is given back has the same time of its push.

        ``place``: the group and the number of a message that has one.
        """
        self._changes.append(["in", id, queue, id, pushed, at, at, *place])

    def packed(self, id: str, contents: list[str], queue: str = "parcels") -> None:
        """A pack of a bucket was stored."""
        self._changes.append(["pack", id, queue, contents, 1, 0.0, 0.0])

    def hidden(self, id: str, target: str, token: str) -> None:
        """A copy of a message of the bucket was stored."""
        line = ["copy", id, "~handover:parcels", {id: id}, 1, 0.0, 0.0, target, token, False]
        self._changes.append(line)

    def updated(self, id: str, *, at: float = 0.0, **put: Any) -> None:
        """A message was updated."""
        self._changes.append(["set", id, put, at])

    def claimed(self, id: str, token: str, *, at: float = 0.0, when: float = 0.0) -> None:
        """A message was reserved, under a lease until ``when``."""
        self.updated(id, token=token, at=at, when=when)

    def moved(self, id: str, by: str, to: str = "parsed") -> None:
        """A message was moved by the holder of this token."""
        self.updated(id, token=None, q=to, by=by)

    def limited(self, queue: str, most: int, *, at: float) -> None:
        """The record of a queue got another limit."""
        self._changes.append(["limit", f"~queue:{queue}", queue, most, at])

    def deleted(self, id: str, at: float | None = None) -> None:
        """A message was deleted, now or at a given time."""
        self._changes.append(["out", id, float(self._number) if at is None else at])

    # ---- the ledgers

    def called(
        self,
        op: str,
        queue: str,
        items: Any,
        outcome: str | None = "ok",
        result: Any = None,
        *,
        process: str = "consumer-1.1",
        at: float | None = None,
        seconds: float = 0.5,
    ) -> None:
        """A call and its result. An outcome of None means that the process was killed before.

        Without a time, the call began long before and ends now.
        """
        ledger = self._ledgers.setdefault(process, [])
        self._number += 1
        began, ended = (
            (self._number - 10.0, self._number + 0.5) if at is None else (at, at + seconds)
        )
        ledger.append(["call", self._number, began, op, queue, items])
        if outcome is not None:
            ledger.append(["result", self._number, ended, outcome, result])

    def logged(self, text: str, trace: str) -> None:
        """A process logged an error."""
        self._ledgers.setdefault("consumer-1.1", []).append(["error", 0, 1.0, text, trace])

    def pushed(self, id: str, queue: str = "orders", outcome: str | None = "ok") -> None:
        """A push."""
        self.called("push", queue, [id], outcome, [id], process="producer-1.1")

    def received(self, id: str, token: str, queue: str = "orders", tries: int = 1) -> None:
        """A reserve."""
        self.called("reserve", queue, None, "ok", {token: {id: tries}})

    def settled(
        self, op: str, id: str, token: str, queue: str = "orders", outcome: str | None = "ok"
    ) -> None:
        """A settle. A refused one reports the message as lost."""
        result = [{token: [id]}, {}] if outcome == "refused" else None
        self.called(op, queue, {token: [id]}, outcome, result)

    # ---- both

    def stored(self, id: str, queue: str = "orders", *, place: Sequence[Any] = ()) -> None:
        """An acknowledged push and its message."""
        self.pushed(id, queue)
        self.inserted(id, queue, place=place)

    def held(
        self, id: str, token: str, queue: str = "orders", tries: int = 1, *, pack: str | None = None
    ) -> None:
        """A successful reserve and its claim, of the pack that has the message if there is one."""
        self.received(id, token, queue, tries)
        self.claimed(pack or id, token)

    def check(
        self, *stored: str, contents: dict[int, str] | None = None, **known: Any
    ) -> dict[str, Any]:
        """Return what the checker finds.

        Args:
            stored: The ids of the messages that are stored at the end.
            contents: What is stored in the stream at the end.
            known: The fields of ``Disturbances``.
        """
        changes = ChangeLog(iter(self._changes))
        return check(self._read_ledgers(), changes, stored, Disturbances(**known), contents)

    def check_times(self, windows: Windows | None = None) -> dict[str, Any]:
        """Return what the checker finds about waits and about Unavailable."""
        queues = {line[2] for line in self._changes if line[0] in ("in", "pack")}
        found = Availability(iter(self._changes), queues)
        return check_times(self._read_ledgers(), found, windows or Windows())

    def _read_ledgers(self) -> Ledgers:
        return Ledgers({name: iter(lines) for name, lines in self._ledgers.items()})
