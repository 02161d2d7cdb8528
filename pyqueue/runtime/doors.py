"""The door of a queue: whether a call has to find out anything about the queue before it begins.

Usually it does not: the client knows the record of the queue, and the queue has no options that all
its users share. While that is certain, the door is open, and push, reserve and commit run plans
that do not ask for the record.
"""

from __future__ import annotations

import math
import time
from typing import Literal, NamedTuple

from pyqueue.backends import namespace
from pyqueue.backends.queue_plans import QueuePlans, in_kind
from pyqueue.backends.taking_kind import asking_for_kind
from pyqueue.errors import ConfigurationError
from pyqueue.runtime.known_queues import KnownQueues

#: The calls that pass through a door.
Call = Literal["push", "receive", "settle"]


class _Seen(NamedTuple):
    """What the last look found."""

    known: KnownQueues
    version: object
    #: The plans in the kind of the queue, or None if its door stays shut.
    plans: QueuePlans | None = None
    #: Until when each call finds the door open, on the monotonic clock.
    push: float = math.inf
    receive: float = math.inf
    settle: float = math.inf


class Door:
    """The door of one Queue object.

    Args:
        plans: The plans of the Queue object.
    """

    __slots__ = ("_plans", "_seen")

    def __init__(self, plans: QueuePlans) -> None:
        self._plans = plans
        self._seen: _Seen | None = None

    def plans(self, known: KnownQueues | None, call: Call) -> QueuePlans | None:
        """Return the plans that a call can run at once, or None if the door is shut.

        Args:
            known: What the client knows about its queues, or None before its first command.
            call: What the plans are for.
        """
        seen = self._seen
        if known is None:
            return None
        if seen is None or seen.known is not known or seen.version is not known.version:
            seen = self._seen = self._look(known)
        return seen.plans if time.monotonic() < getattr(seen, call) else None

    def _look(self, known: KnownQueues) -> _Seen:
        plans, version = self._plans, known.version  # before the record, which may change now
        shut = _Seen(known, version)
        if type(plans) is not QueuePlans:  # the plans of a stream or a bucket
            return shut
        kind, settle = known.known_until(asking_for_kind(plans.queue))
        if not kind or known.shape_of(plans.queue):
            return shut
        if plans.kind_name is None:
            try:
                plans = in_kind(plans, kind)
            except ConfigurationError:  # the call raises it
                return shut
        if type(plans) is not QueuePlans or plans.kind_name != kind:
            return shut
        asking = [
            namespace.ensuring(plans.queue, plans.kind, plans.options, (None,), receives=receives)
            for receives in (False, True)
        ]
        push, receive = (known.known_until(each)[1] for each in asking)
        return _Seen(known, version, plans, push=push, receive=receive, settle=settle)
