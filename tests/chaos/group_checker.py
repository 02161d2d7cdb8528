"""The checks of ordered groups: one held message at a time, in order, and no group is forgotten.

A message is held from its claim until the claim ends, also if the lease has lapsed: another
message of the group must not be held before that one was claimed again. A claim that reached a
caller, or that ended in a commit, must not have passed over an earlier message that was stored. A
message that is stored later may have an earlier place, if two processes push into one group.
Messages that one process pushes for one instant have the order of the pushes, whatever place the
database shows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.chaos.names import SHIFTS, shift_of

Line = list[Any]
#: The place of a message in its group: its numbers, and its id.
Rank = tuple[list[int], str]


class Turn(NamedTuple):
    """A group that waited for a claim: its first message, since when, and until when."""

    id: str
    queue: str
    due: float
    since: float
    until: float


@dataclass(slots=True)
class _Waiting:
    rank: Rank
    due: float
    #: When it was stored.
    at: float


@dataclass(slots=True)
class _Group:
    queue: str
    #: The messages that wait, by id.
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    #: The held messages, with their token and the end of the lease.
    held: dict[str, tuple[_Waiting, str, float]] = field(default_factory=dict)
    #: Since when nothing was claimed and no claim ended.
    since: float = 0.0

    def first(self, ids: Iterable[str]) -> str:
        """Return the one of these waiting messages that is first."""
        return min(ids, key=lambda id: self.waiting[id].rank)

    def turn(self, at: float) -> Turn | None:
        """Return for which message the group has waited until this time, and since when."""
        if self.held:
            id, (message, _, due) = next(iter(self.held.items()))
        elif self.waiting:
            id = self.first(self.waiting)
            message = self.waiting[id]
            due = message.due
        else:
            return None
        return Turn(id, self.queue, message.due, max(self.since, due), at)


class Groups:
    """The groups of ordered queues, as the change log shows them.

    Args:
        lines: The lines of the change log.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        #: Messages that were held together, in words.
        self.together: list[str] = []
        #: The claims, (id, token), that passed over an earlier message, which is named.
        self.early: dict[tuple[str, str], str] = {}
        #: For how long groups waited to be claimed.
        self.turns: list[Turn] = []
        #: The claims, (id, token), that passed over messages which one process pushed earlier for
        #: the same instant.
        self.overtaking: dict[tuple[str, str], list[str]] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._group_of: dict[str, _Group] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> bool:
        """Learn from a line. Return whether it is about a message of a group."""
        kind, id, *rest = line
        if kind == "in":
            queue, _, _, at, when, *place = rest
            if not place:
                return False
            group = self._groups.setdefault((queue, place[0]), _Group(queue))
            self._group_of[id] = group
            if not group.waiting and not group.held:
                group.since = at
            group.waiting[id] = _Waiting((place[1], id), when, at)
            return True
        if id not in self._group_of:
            return False
        if kind == "set":
            self._updated(id, *rest)
        else:
            self._deleted(id, *rest)
        return True

    def _updated(self, id: str, put: Mapping[str, Any], at: float) -> None:
        group = self._group_of[id]
        token = put.get("token")
        if token is not None:
            self._claimed(group, id, token, put["when"], at)
        elif "token" in put and id in group.held:
            group.waiting[id] = group.held.pop(id)[0]
            group.since = at
        elif id in group.held and "when" in put:  # its lease was extended
            message, known, _ = group.held[id]
            group.held[id] = message, known, put["when"]
        if id in group.waiting and "due" in put:
            group.waiting[id].due = put["due"]
        if put.get("q", group.queue) != group.queue:  # buried, or moved
            group.waiting.pop(id, None)
            del self._group_of[id]

    def _claimed(self, group: _Group, id: str, token: str, until: float, at: float) -> None:
        turn = group.turn(at)
        if turn is not None:
            self.turns.append(turn)
        message = group.waiting.pop(id, None) or group.held.pop(id)[0]
        for other, (_, holder, _) in group.held.items():
            self.together.append(
                f"{id}: held by {token}, while {other} of its group is held by {holder}"
            )
        # The server reserves the places of a push in its log before it writes the messages, and
        # until then it serves claims that come later in the log.
        stored = [each for each, known in group.waiting.items() if known.at <= at]
        if stored and group.waiting[first := group.first(stored)].rank < message.rank:
            self.early[id, token] = first
        if group.queue == SHIFTS:
            shift, number = shift_of(id)
            before = [each for each in stored if shift_of(each) < (shift, number)]
            passed = [each for each in before if shift_of(each)[0] == shift]
            if passed:
                self.overtaking[id, token] = passed
        group.held[id] = message, token, until
        group.since = at

    def _deleted(self, id: str, at: float) -> None:
        group = self._group_of.pop(id)
        group.waiting.pop(id, None)
        group.held.pop(id, None)
        group.since = at

    def finish(self, at: float) -> None:
        """Note the groups that still wait at the end."""
        self.turns += [turn for each in self._groups.values() if (turn := each.turn(at))]

    def out_of_order(
        self,
        received: Mapping[str, Iterable[str]],
        ended: Callable[[str, str], str | None],
        once: Container[str] = (),
    ) -> list[str]:
        """Return which messages were handed out, or finished, before an earlier one, in words.

        Args:
            received: The ids that callers received, by the token of the claim.
            ended: Returns how the claim of a message ended, given its id and the token.
            once: The messages of one push each, which was acknowledged.
        """
        passed = dict(self.early)
        for (id, token), before in self.overtaking.items():
            sure = [each for each in before if each in once]
            if sure and id in once:
                passed.setdefault((id, token), sure[0])
        return [
            f"{id}: handed out by {token} before {first} of its group"
            for (id, token), first in passed.items()
            if id in received.get(token, ()) or ended(id, token) == "out"
        ]
