"""Requests for long work on many documents: several plans at once, and pauses.

Several plans at once are faster than one after the other: the server runs each command on only one
processor, and each command waits for the journal separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from pyqueue.requests import Plan, Request

T = TypeVar("T")

#: How many plans run at once by default. While the server works, the driver encodes the commands of
#: the next plan.
AT_ONCE: Final = 4
#: How many plans of one or two short commands run at once. Most of their time goes into waiting for
#: the network, a busy server, a lock, or a majority, which stores many writes together.
SHORT_AT_ONCE: Final = 16


@dataclass(slots=True)
class Concurrently(Request[list[T]], Generic[T]):
    """Run plans that do not depend on each other. The answer is the list of their results.

    If some plans fail, one of their errors is raised, after all plans that have begun have ended.
    Further plans may never begin. On mongomock, drivers run one plan at a time.
    """

    plans: Sequence[Plan[T]]
    #: How many plans run at once.
    at_once: int = AT_ONCE
    #: Whether the caller's task or thread runs the first of two plans, and the other plan continues
    #: if the caller is cancelled. A cancelled task does not wait for that plan. In another thread,
    #: it always runs to its end, and the caller waits for it.
    outlive: bool = False


@dataclass(slots=True)
class Sleep(Request[None]):
    """Pause for this number of seconds."""

    seconds: float


def concurrently(plans: Sequence[Plan[T]], at_once: int = AT_ONCE) -> Plan[list[T]]:
    """Run plans, concurrently if there are several, and return the list of their results."""
    if len(plans) == 1:
        return [(yield from plans[0])]
    return (yield from Concurrently(plans, at_once=at_once)) if plans else []
