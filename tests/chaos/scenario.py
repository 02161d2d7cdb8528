"""Invented runs for the checker: the lines of ledgers and of the change log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from tests.chaos.checker import MUST_BE_ZERO, ChangeLog, Ledgers, check
from tests.chaos.pop_checker import Disturbances
from tests.chaos.starvation import Availability, check_times
from tests.chaos.telemetry_checker import check_telemetry
from tests.chaos.windows import Windows

Line = list[Any]


def expect_only(found: dict[str, Any], *wrong: str) -> None:
    """Assert that each of these went wrong once, and nothing else."""
    names = (*MUST_BE_ZERO, "refused_though_done")
    expected = {name: int(name in wrong) for name in names}
    assert {name: found[name] for name in names} == expected, found["wrong"]


class Scenario:
    """An invented run. The records of clients and of the database need not agree.

    Each method that adds to the run returns it, so that calls can be chained.
    """

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
        content: str | None = None,
    ) -> Self:
        """A message was stored. One that is given back has the same time of its push.

        ``place``: the group and the number of a message that has one. ``content``: if it is not
        the id.
        """
        return self._changed("in", id, queue, content or id, pushed, at, at, *place)

    def packed(self, id: str, contents: list[str], queue: str = "parcels") -> Self:
        """A pack of a bucket was stored."""
        return self._changed("pack", id, queue, contents, 1, 0.0, 0.0)

    def hidden(self, id: str, target: str, token: str) -> Self:
        """A copy of a message of the bucket was stored."""
        mark = (target, token, False)
        return self._changed("copy", id, "~handover:parcels", {id: id}, 1, 0.0, 0.0, *mark)

    def updated(self, id: str, *, at: float = 0.0, **put: Any) -> Self:
        """A message was updated."""
        return self._changed("set", id, put, at)

    def claimed(self, id: str, token: str, *, at: float = 0.0, when: float = 0.0) -> Self:
        """A message was reserved, under a lease until ``when``."""
        return self.updated(id, token=token, at=at, when=when)

    def moved(self, id: str, by: str, to: str = "parsed") -> Self:
        """A message was moved by the holder of this token."""
        return self.updated(id, token=None, q=to, by=by)

    def limited(self, queue: str, most: int, *, at: float) -> Self:
        """The record of a queue got another limit."""
        return self._changed("limit", f"~queue:{queue}", queue, most, at)

    def ticked(self, name: str, at: float = 0.0, **put: Any) -> Self:
        """A schedule was stored, decided on a tick, or was deleted."""
        return self._changed("tick", f"~cron:{name}", put, at)

    def deleted(self, id: str, at: float | None = None) -> Self:
        """A message was deleted, now or at a given time."""
        return self._changed("out", id, float(self._number) if at is None else at)

    def _changed(self, *line: Any) -> Self:
        self._changes.append([*line])
        return self

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
    ) -> Self:
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
        return self

    def logged(self, text: str, trace: str) -> Self:
        """A process logged an error."""
        self._ledgers.setdefault("consumer-1.1", []).append(["error", 0, 1.0, text, trace])
        return self

    def pushed(self, id: str, queue: str = "orders", outcome: str | None = "ok") -> Self:
        """A push."""
        return self.called("push", queue, [id], outcome, [id], process="producer-1.1")

    def received(self, id: str, token: str, queue: str = "orders", tries: int = 1) -> Self:
        """A reserve."""
        return self.called("reserve", queue, None, "ok", {token: {id: tries}})

    def settled(
        self, op: str, id: str, token: str, queue: str = "orders", outcome: str | None = "ok"
    ) -> Self:
        """A settle. A refused one reports the message as lost."""
        result = [{token: [id]}, {}] if outcome == "refused" else None
        return self.called(op, queue, {token: [id]}, outcome, result)

    # ---- both

    def stored(self, id: str, queue: str = "orders", *, place: Sequence[Any] = ()) -> Self:
        """An acknowledged push and its message."""
        return self.pushed(id, queue).inserted(id, queue, place=place)

    def held(
        self, id: str, token: str, queue: str = "orders", tries: int = 1, *, pack: str | None = None
    ) -> Self:
        """A successful reserve and its claim, of the pack that has the message if there is one."""
        return self.received(id, token, queue, tries).claimed(pack or id, token)

    def committed(self, id: str, token: str, queue: str = "orders") -> Self:
        """A successful reserve, its claim, an acknowledged commit and its effect."""
        return self.held(id, token, queue).settled("commit", id, token, queue).deleted(id)

    def popped(
        self,
        id: str,
        token: str | None = None,
        owner: str = "consumer-1.1",
        *,
        at: float | None = None,
    ) -> Self:
        """An acknowledged push to ``events``, and a pop, which claims first if it has a token."""
        self.stored(id, "events")
        if token is not None:
            self.updated(id, token=token, owner=owner)
        return self.deleted(id, at)

    def check(
        self, *stored: str, contents: dict[int, str] | None = None, **known: Any
    ) -> dict[str, Any]:
        """Return the findings of the checker.

        Args:
            stored: The ids of the messages that are stored at the end.
            contents: The contents of the stream at the end.
            known: The fields of ``Disturbances``.
        """
        changes = ChangeLog(iter(self._changes))
        return check(self._read_ledgers(), changes, stored, Disturbances(**known), contents)

    def check_times(self, windows: Windows | None = None) -> dict[str, Any]:
        """Return the findings of the checker about waits and about Unavailable."""
        queues = {line[2] for line in self._changes if line[0] in ("in", "pack")}
        found = Availability(iter(self._changes), queues)
        return check_times(self._read_ledgers(), found, windows or Windows())

    def check_telemetry(
        self, stored: dict[str, dict[str, int]], *broken: tuple[float, float]
    ) -> list[str]:
        """Return the stored counts that do not agree with the ledgers.

        Args:
            stored: The counts by queue.
            broken: When faults of the servers began and ended.
        """
        documents = [{"q": queue, **counts} for queue, counts in stored.items()]
        return check_telemetry(self._read_ledgers().processes, documents, broken)

    def _read_ledgers(self) -> Ledgers:
        return Ledgers({name: iter(lines) for name, lines in self._ledgers.items()})
