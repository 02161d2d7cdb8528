"""The check of tries: a settlement takes its try back if it does not count, and only then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tests.chaos.names import CHORES, MIXED

Line = list[Any]
#: The queues whose tries are checked, as the ledgers name them.
TRIED: Final = (CHORES, MIXED, "states", "urgent", "turns")
#: The settlements that take the try back, and the settlement that does not.
_UNCOUNTED, _COUNTED = ("release", "postpone"), "rollback"


class Tries:
    """How the ends of claims changed the tries of messages, as the change log shows it.

    There are too many messages to check them all, and those of a pack share their tries.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        #: The tries after the end of a claim, (id, token), or None if the end did not change them.
        self._after: dict[tuple[str, str], int | None] = {}

    def add(self, line: Line) -> None:
        """Learn from a line."""
        kind, id, *rest = line
        if kind == "in" and rest[0] in TRIED:
            self._tokens[id] = ""
        elif kind == "out":
            self._tokens.pop(id, None)
        elif kind == "set" and id in self._tokens and "token" in rest[0]:
            put: Mapping[str, Any] = rest[0]
            if put["token"] is None and "q" not in put:
                self._after[id, self._tokens[id]] = put.get("tries")
            self._tokens[id] = put["token"] or ""

    def check(
        self,
        settled: Iterable[tuple[str, str, str, str]],
        tries: Mapping[tuple[str, str], int],
    ) -> list[str]:
        """Return the settlements that counted a try wrongly, in words.

        Args:
            settled: The acknowledged settlements: the operation, the queue, the id and the token.
            tries: The tries with which callers received messages: by id and token.
        """
        found = []
        for op, queue, id, token in settled:
            before = tries.get((id, token))
            if before is None or (id, token) not in self._after:
                continue
            after, expected = self._after[id, token], None
            if op in _UNCOUNTED:
                expected = before - 1
            elif op != _COUNTED:
                continue
            if after != expected:
                found.append(
                    f"{id}: {op} in {queue} by {token} left {after} tries after try {before}"
                )
        return found
