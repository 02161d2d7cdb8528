"""The check of pops: which process got each message that was popped.

A pop deletes its messages before it returns, so a lost reply leaves messages that no ledger shows.
Every message that the change log shows as popped must have been returned to a caller, or there
must be a call that may have taken it:

* a call whose process was killed before it recorded the result, or whose outcome is unknown;
* a call that was cancelled. pyqueue gives its messages back, unless its process was killed, or the
  servers or the network failed, at that time. So such a call is blamed only for messages that no
  call of the first sort can have taken.

A pop of several messages claims them first, so the change log shows which process popped them.
Callers of one process share a claim: if one of them got an answer, all of them did. A message that
is popped after such a call says nothing about it: a power cut may undo the deletion of a part, and
single pops take the rest when the lease has lapsed. The message then still shows the lapsed claim,
although such a single pop, of another process or later, shared nothing with its callers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: The difference between the times that servers and processes record, all on this machine.
_CLOCK_ERROR_S = 0.05
#: How long after its caller gave up a command may still run, in a stalled network or server.
_LATE_COMMAND_S = 20.0
#: How long a pop may take: several commands with a timeout each, in a process that is suspended.
_LONGEST_POP_S = 60.0
#: How long after a fault its effects may appear.
_AFTER_FAULT_S = 2.0
#: How long giving messages back may take on a busy machine.
_GIVE_BACK_S = 3.0


class Popped(NamedTuple):
    """A message that was popped, from the change log.

    ``token`` and ``owner`` belong to its last claim. A single pop makes no claim: its message has
    none, or one that lapsed, of any process.
    """

    at: float
    token: str | None
    owner: str | None

    def may_be_of(self, process: str, *, single: bool) -> bool:
        """Return whether a pop in this process can have taken it."""
        return single or self.owner in (None, process)


class Returned(NamedTuple):
    """A message that a pop returned, from a ledger. ``single``: the pop asked for one message."""

    at: float
    process: str
    single: bool


class Answered(NamedTuple):
    """When the first message of a claim was popped that a caller in the claim's process got."""

    popped: float = math.inf
    #: When that caller got it.
    returned: float = math.inf


@dataclass
class Disturbances:
    """The faults that excuse a lost pop, on the machine's monotonic clock."""

    #: When each process was killed, by its name.
    killed: Mapping[str, float] = field(default_factory=dict)
    #: When faults of the servers or the network began and ended.
    broken: Sequence[tuple[float, float]] = ()


@dataclass(slots=True)
class UnknownPop:
    """A pop whose result no ledger shows."""

    process: str
    began: float
    #: The most messages that it may have taken.
    limit: int
    #: "killed", "unknown" or "cancelled".
    reason: str
    #: When it gave up; infinite if its process was killed first.
    ended: float
    #: Whether it asked for one message.
    single: bool

    def may_have_taken(self, popped: Popped, answered: Answered, known: Disturbances) -> bool:
        """Return whether it may have taken this message.

        Args:
            popped: The message.
            answered: When another caller got a message of the same claim.
            known: The faults of the run.
        """
        killed = known.killed.get(self.process, float("inf"))
        late = popped.at > min(self.ended, killed) + _LATE_COMMAND_S
        if (
            late
            or not self.is_excused(known)
            or not self.limit
            or not popped.may_be_of(self.process, single=self.single)
        ):
            return False
        if self.reason == "cancelled":
            return any(start <= popped.at <= end for start, end in self._excuses(known))
        # A single pop that did not share the claim may take messages that it left.
        apart = self.single and (self.process != popped.owner or self.began >= answered.returned)
        return self.reason == "killed" or apart or answered.popped > self.ended + _CLOCK_ERROR_S

    def _excuses(self, known: Disturbances) -> list[tuple[float, float]]:
        """Return when a cancelled pop may have lost its messages."""
        killed = known.killed.get(self.process, float("inf"))
        times = [(killed, killed), *known.broken]
        return [(start - _GIVE_BACK_S, end + _AFTER_FAULT_S) for start, end in times]

    def is_excused(self, known: Disturbances) -> bool:
        """Return whether it may have lost anything at all."""
        return self.reason != "cancelled" or any(
            start <= self.ended and self.began <= end for start, end in self._excuses(known)
        )


def check_pops(
    popped: Mapping[str, Sequence[Popped]],
    returned: Mapping[str, Sequence[Returned]],
    unknown: Sequence[UnknownPop],
    known: Disturbances,
) -> tuple[list[str], list[str], dict[str, dict[str, int]]]:
    """Match the popped messages with the calls that returned or may have taken them.

    Args:
        popped: Every pop in the change log, by the id of the message.
        returned: The callers that got each message.
        unknown: The calls without a result.
        known: The faults of the run.

    Returns:
        The ids of messages that were popped and that no call can have taken, the ids of messages
        that were returned more often than popped, and the excuses: how many messages calls without
        a result may have taken ("allowed") and are taken to have taken ("used"), by reason.
    """
    excuses = {name: {"used": 0, "allowed": 0} for name in ("killed", "unknown", "cancelled")}
    for call in unknown:
        if call.is_excused(known):
            excuses[call.reason]["allowed"] += call.limit
    twice = []
    unmatched: list[tuple[Popped, str]] = []
    answered: dict[str | None, Answered] = {}
    for id in popped.keys() | returned.keys():
        left = list(popped.get(id, ()))
        for answer in sorted(returned.get(id, ())):
            # A message may be pushed and popped again within a moment: take the last pop before.
            before = (each for each in reversed(left) if each.at <= answer.at + _CLOCK_ERROR_S)
            fitting = (
                each for each in before if each.may_be_of(answer.process, single=answer.single)
            )
            if each := next(fitting, None):
                left.remove(each)
                if each.owner == answer.process:
                    got = Answered(each.at, answer.at)
                    answered[each.token] = min(got, answered.get(each.token, got))
            else:
                twice.append(id)
        unmatched += [(each, id) for each in left]
    calls = sorted(unknown, key=lambda call: call.began)
    lost, used = _match(unmatched, calls, answered, known)
    for reason, times in used.items():
        excuses[reason]["used"] = times
    return lost, sorted(twice), excuses


def _match(
    unmatched: list[tuple[Popped, str]],
    calls: Sequence[UnknownPop],
    answered: Mapping[str | None, Answered],
    known: Disturbances,
) -> tuple[list[str], Counter[str]]:
    """Assign messages to calls. Return the ids of those that fit no call, and the excuses used.

    A message that finds all fitting calls taken moves another one to another call, and so on. This
    assigns the most messages: these are augmenting paths of a bipartite matching.
    """
    starts = [call.began for call in calls]
    fitting: list[list[int]] = []
    unmatched = sorted(unmatched, key=lambda pair: (pair[0].at, pair[1]))
    for each, _ in unmatched:
        first = bisect_left(starts, each.at - _LONGEST_POP_S)
        last = bisect_right(starts, each.at + _CLOCK_ERROR_S)
        since = answered.get(each.token, Answered())
        fitting.append(
            [
                number
                for number in range(first, last)
                if calls[number].may_have_taken(each, since, known)
            ]
        )
    taken: dict[int, list[int]] = defaultdict(list)
    limits = [call.limit for call in calls]
    left = list(range(len(unmatched)))
    cancelled = {number for number, call in enumerate(calls) if call.reason == "cancelled"}
    # A matching that is extended stays as large for the calls that it had before.
    for excluded in (cancelled, set[int]()):
        allowed = [[call for call in each if call not in excluded] for each in fitting]
        left = [each for each in left if not _assign(each, allowed, limits, taken)]
    lost = [unmatched[each][1] for each in left]
    used = Counter[str]()
    for number, messages in taken.items():
        used[calls[number].reason] += len(messages)
    return sorted(lost), used


def _assign(
    message: int,
    fitting: Sequence[Sequence[int]],
    limits: Sequence[int],
    taken: dict[int, list[int]],
) -> bool:
    """Assign a message to a call, moving other messages if need be. Return whether it worked."""
    #: For each call that was reached, the message that would move there, and from which call.
    came: dict[int, tuple[int, int | None]] = {}
    waiting: deque[tuple[int, int | None]] = deque([(message, None)])
    while waiting:
        moving, origin = waiting.popleft()
        for call in fitting[moving]:
            if call in came:
                continue
            came[call] = (moving, origin)
            if len(taken[call]) < limits[call]:
                place: int | None = call
                while place is not None:
                    moved, before = came[place]
                    taken[place].append(moved)
                    if before is not None:
                        taken[before].remove(moved)
                    place = before
                return True
            waiting += [(other, call) for other in taken[call]]
    return False
