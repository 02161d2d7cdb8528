"""The checks of cancelled messages, and of changes in bulk.

A message that was cancelled has ended, or was held then and is never delivered again, unless it was
made ready by hand. Nothing else ends messages so. A change in bulk counts the messages that it
changed; see ``removal_checker``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from tests.chaos.names import ASKS, CHORES, CHORES_DEAD
from tests.chaos.removal_checker import Removal, miscounted

Line = list[Any]
#: The precision of the times in the change log.
_CLOCK_ERROR_S = 0.1
#: How long the commands of a call with an unknown outcome may still arrive.
_LATE_S = 60.0
#: The queues to which messages are pushed that may be cancelled.
_QUEUES: Final = (CHORES, ASKS)
#: Where a message is that has ended: how it ended.
_ENDS: Final = ("cancelled", "removed", "finished", "deleted")


class Cancel(NamedTuple):
    """A call that cancels a message, from a ledger.

    ``answer``: "cancelled", "requested" or None, as it returned; "unknown": it may have done
    anything, or nothing.
    """

    began: float
    ended: float
    answer: str | None


@dataclass(slots=True)
class _Story:
    """What happened to a message: where it was, since when, and how it was claimed."""

    content: str
    #: Times and places. A place is a queue, or the end of the message.
    places: list[tuple[float, str]]
    claims: list[tuple[float, str]] = field(default_factory=list)
    #: When it was last made ready by hand. This takes the request to cancel it back.
    lifted: float = 0.0

    def ended(self) -> tuple[float, str] | None:
        """Return when and how it ended."""
        return next((each for each in self.places if each[1] in _ENDS), None)

    def stayed(self, begin: float, end: float) -> bool:
        """Return whether it was live in its first queue from one time to the other."""
        spans = pairwise([*self.places, (math.inf, "")])
        return any(
            place in _QUEUES and since <= begin and end <= until
            for (since, place), (until, _) in spans
        )


class Cancels:
    """The calls that cancel messages or change them in bulk, and their effects."""

    def __init__(self) -> None:
        #: The calls, by the id of the message. A request names the content of its message.
        self._calls: dict[str, list[Cancel]] = defaultdict(list)
        self._bulk: dict[str, list[Removal]] = defaultdict(list)

    def add(self, call: Any) -> bool:
        """Learn from a call in a ledger. Return whether it is such a call."""
        until = call.ended if call.outcome in ("ok", "timeout", "failed") else _late(call)
        if call.op == "cancel":
            answer = call.result if call.outcome == "ok" else "unknown"
            self._calls[call.items[0]].append(Cancel(call.began, until, answer))
        elif call.op == "request":
            # It cancels its message if it gets no result in time.
            if call.outcome not in ("ok", "failed"):
                answer = "requested" if call.outcome == "timeout" else "unknown"
                self._calls[call.items[0]].append(Cancel(call.began, until, answer))
            return False
        elif call.op.startswith("bulk "):
            counted = call.result[0] if call.outcome == "ok" else None
            verb = call.op.removeprefix("bulk ")
            self._bulk[verb].append(Removal(call.began, until, counted))
        else:
            return False
        return True

    def asked(self, id: str) -> bool:
        """Return whether a message may have been cancelled, given its id and content."""
        return any(each.answer is not None for each in self._calls.get(id, ()))

    def check(
        self,
        effects: Effects,
        received: Mapping[str, Iterable[str]],
        broken: Iterable[tuple[float, float]],
    ) -> dict[str, list[str]]:
        """Return the mistakes, in words, by the figure that counts them.

        Args:
            effects: What the change log shows.
            received: The ids that callers received, by the token of the claim.
            broken: When faults of the servers or the network began and ended.
        """
        wrong: dict[str, list[str]] = defaultdict(list)
        for id, story in effects.stories.items():
            calls = self._calls.get(story.content, [])
            wrong["lost"] += self._unasked(id, story, calls)
            for call in calls:
                wrong["undone"] += _judged(id, story, call, received)
        broken = list(broken)
        for verb, changes in self._bulk.items():
            wrong["undone"] += [
                f"{verb}: {line}" for line in miscounted(changes, effects.changed[verb], (), broken)
            ]
        return wrong

    def _unasked(self, id: str, story: _Story, calls: Iterable[Cancel]) -> list[str]:
        """Return, in words, that a message was cancelled or removed although no process asked."""
        at, how = story.ended() or (0.0, "")
        if how == "removed":
            spans = [(each.began, each.until) for each in self._bulk["remove"]]
        elif how == "cancelled":
            # A request that was not granted at once may be granted at any time.
            spans = [(each.began, math.inf) for each in calls if each.answer is not None]
        else:
            return []
        if any(a - _CLOCK_ERROR_S <= at <= b + _CLOCK_ERROR_S for a, b in spans):
            return []
        return [f"{id}: {how}, although nobody asked for that"]


def _late(call: Any) -> float:
    return float(call.began) + _LATE_S


def _judged(
    id: str, story: _Story, call: Cancel, received: Mapping[str, Iterable[str]]
) -> list[str]:
    """Return, in words, that the answer to a call was wrong."""
    began, ended = call.began - _CLOCK_ERROR_S, call.ended + _CLOCK_ERROR_S
    if call.answer == "cancelled":
        at, how = story.ended() or (math.inf, story.places[-1][1])
        if how not in ("cancelled", "deleted") or at > ended:  # billed messages are deleted
            return [f"{id}: cancelled, but afterwards it was in state {how}"]
    elif call.answer == "requested" and story.lifted <= call.began:
        return [
            f"{id}: cancelled while it was held, but delivered again by {token}"
            for at, token in story.claims
            if at > ended and id in received.get(token, ())
        ]
    elif call.answer is None and story.stayed(began, ended):
        return [f"{id}: not found to be cancelled, although it was there"]
    return []


class Effects:
    """The messages that may be cancelled, as the change log shows them."""

    def __init__(self) -> None:
        self.stories: dict[str, _Story] = {}
        #: When messages were changed in bulk, by the method.
        self.changed: dict[str, list[float]] = defaultdict(list)

    def add(self, line: Line) -> None:
        """Learn from a line."""
        kind, id, *rest = line
        if kind == "in":
            queue, content, _, at = rest[:4]
            if queue in _QUEUES:
                self.stories[id] = _Story(content, [(at, queue)])
            return
        story = self.stories.get(id)
        if story is None:
            return
        if kind == "set":
            self._updated(story, *rest)
        elif story.places[-1][1] not in _ENDS:  # else its end is not kept any longer
            story.places.append((rest[0], "deleted"))

    def _updated(self, story: _Story, put: Mapping[str, Any], at: float) -> None:
        place = story.places[-1][1]
        if "processed" in put:
            outcome = put.get("outcome", "finished")
            story.places.append((at, outcome))
            if outcome == "removed":
                self.changed["remove"].append(at)
        elif put.get("token") is not None:
            story.claims.append((at, put["token"]))
        elif place == CHORES_DEAD and put.get("q") == CHORES:
            self.changed["redrive"].append(at)
            story.lifted = at
        elif place == CHORES and put.get("q") == "billed":
            self.changed["move"].append(at)
        elif "due" in put and "token" not in put and place == CHORES:
            self.changed["requeue"].append(at)
            story.lifted = at
        if "q" in put and "processed" not in put:
            story.places.append((at, put["q"]))
