"""Who got what was popped. A pop finishes its messages before anybody hears of it, so there are some of which nobody can know.

Every message that the witness saw popped must have been got by a caller, or else there must be a call that may have taken it:

* one whose process was killed before it noted what it got, or which heard that the outcome is unknown;
* one that was cancelled. What it took is given back; but not if the process was killed meanwhile, nor if its reply was lost for good or the servers
  could not be reached, which can be while faults of the servers or of the network go on.

Pops of several messages claim them first, so of these it is known in which process they were popped; and callers of one process share a
claim, so if one of them was answered, all were.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Circumstances", "Got", "Popped", "Unheard", "judge"]

#: By how much, in seconds, the clocks of servers and processes are apart: all are this machine's.
_COARSE = 0.05
#: How long, in seconds, after its caller gave up a command may still be carried out: a stalled network, a suspended primary.
_LATE = 20.0
#: How long a pop may take: some commands, each with its time-out, in a process that is suspended meanwhile.
_LONGEST = 60.0
#: How long after a fault is over what it did may show.
_AFTER = 2.0
#: How long giving back may take, if the machine is busy.
_BACK = 3.0


class Popped(NamedTuple):
    """A message that was popped: when, and which claim it had last, of whom.

    A single pop claims nothing: what it takes has no claim, or one of anybody's that lapsed.
    """

    at: float
    token: str | None
    owner: str | None

    def may_be(self, who: str, *, single: bool) -> bool:
        """Whether a pop in this process can have taken it."""
        return single or self.owner in (None, who)


class Got(NamedTuple):
    """An answer that a caller got: when, in which process, and whether it had asked for one message."""

    at: float
    who: str
    single: bool


@dataclass
class Circumstances:
    """What the program did, on the machine's monotonic clock."""

    #: The processes that were killed, and when.
    killed: Mapping[str, float] = field(default_factory=dict)
    #: When servers or the network were made to fail: from, to.
    broken: Sequence[tuple[float, float]] = ()


@dataclass(slots=True)
class Unheard:
    """A pop of which nobody heard what it took."""

    who: str
    began: float
    #: How many it may have taken at most.
    limit: int
    #: "killed", "unknown" or "cancelled".
    why: str
    #: When it gave up; infinite if its process died first.
    ended: float
    #: Whether it asked for one message.
    single: bool

    def may_have(self, popped: Popped, answered: bool, known: Circumstances) -> bool:
        """Whether it may have taken this message, as far as its process says; ``answered``: a caller got messages of the same claim."""
        death = known.killed.get(self.who, float("inf"))
        late = popped.at > min(self.ended, death) + _LATE
        if late or not self.limit or not popped.may_be(self.who, single=self.single):
            return False
        if self.why == "cancelled":
            times = [(death, death), *known.broken]
            return any(start - _BACK <= popped.at <= end + _AFTER for start, end in times)
        return self.why == "killed" or not answered


def judge(
    popped: Mapping[str, Sequence[Popped]],
    got: Mapping[str, Sequence[Got]],
    unheard: Sequence[Unheard],
    known: Circumstances,
) -> tuple[list[str], list[str]]:
    """The messages that were popped and that nobody can have got; and those that were got more often than they were popped.

    Args:
        popped: what the witness saw, by the ids.
        got: who got each.
        unheard: the pops of which nobody heard; each ``limit`` becomes what is left of it.
        known: what the program did.
    """
    twice = []
    missing: list[tuple[Popped, str]] = []
    answered: set[str | None] = set()
    for id in popped.keys() | got.keys():
        left = list(popped.get(id, ()))
        for answer in sorted(got.get(id, ())):
            # A message that is pushed again may be popped again within a moment: the last one before is the one.
            before = (each for each in reversed(left) if each.at <= answer.at + _COARSE)
            if each := next(
                (each for each in before if each.may_be(answer.who, single=answer.single)), None
            ):
                left.remove(each)
                answered |= {each.token} if each.owner == answer.who else set()
            else:
                twice.append(id)
        missing += [(each, id) for each in left]
    calls = sorted(unheard, key=lambda call: call.began)
    beginnings = [call.began for call in calls]
    lost = []
    # The single ones first, and of the calls first those that can have taken few: what fits many must not take the place of what fits one.
    for each, id in sorted(
        missing, key=lambda pair: (pair[0].token is not None, pair[0].at, pair[1])
    ):
        near = calls[
            bisect_left(beginnings, each.at - _LONGEST) : bisect_right(
                beginnings, each.at + _COARSE
            )
        ]
        fitting = [call for call in near if call.may_have(each, each.token in answered, known)]
        if fitting:
            min(fitting, key=lambda call: call.limit).limit -= 1
        else:
            lost.append(id)
    return lost, sorted(twice)
