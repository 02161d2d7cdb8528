"""The check of results: a caller that waits for a message gets the result of its claim.

A result names the content of its message and the token of the claim that finished it. A call that
fails, or gets no result in time, names no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.chaos.names import ASKS

Line = list[Any]


class Asked:
    """The messages whose producers wait for results, as the change log shows them."""

    def __init__(self) -> None:
        #: The id of each message, by its content.
        self.ids: dict[str, str] = {}
        self._contents: dict[str, str] = {}
        #: The contents of the messages that were buried.
        self.buried: set[str] = set()

    def add(self, line: Line) -> None:
        """Learn from a line."""
        kind, id, *rest = line
        if kind == "in" and rest[0] == ASKS:
            self.ids[rest[1]] = id
            self._contents[id] = rest[1]
        elif kind == "set" and id in self._contents and rest[0].get("dead"):
            self.buried.add(self._contents[id])


class Results:
    """The calls that wait for results, from the ledgers."""

    def __init__(self) -> None:
        self._calls: list[Any] = []

    def add(self, call: Any) -> bool:
        """Learn from a call. Return whether it is such a call."""
        if call.op not in ("wait", "request"):
            return False
        if call.outcome in ("ok", "failed"):
            self._calls.append(call)
        return True

    def check(self, asked: Asked, ended: Callable[[str, str], str | None]) -> dict[str, list[str]]:
        """Return the wrong answers, in words, by the figure that counts them.

        Args:
            asked: The messages.
            ended: Returns how the claim of a message ended, given its id and the token.
        """
        wrong: dict[str, list[str]] = {"lost": [], "undone": []}
        for call in self._calls:
            [content] = call.items
            id = asked.ids.get(content)
            about = f"{content}: {call.op} in {call.queue}"
            if id is None:
                wrong["lost"].append(f"{about} ended, but the message was never stored")
            elif call.outcome == "failed":
                if call.result != "dead" or content not in asked.buried:
                    wrong["lost"].append(f"{about} failed: {call.result}")
            elif not _fits(call.result, content):
                wrong["lost"].append(f"{about} returned {call.result}")
            elif (end := ended(id, call.result["by"])) != "out":
                token, found = call.result["by"], end or "missing"
                wrong["undone"].append(
                    f"{about} returned the result of {token}, but the claim is {found}"
                )
        return wrong


def _fits(result: object, content: str) -> bool:
    """Return whether a result is of the message with this content."""
    return isinstance(result, Mapping) and result.get("n") == content and "by" in result
