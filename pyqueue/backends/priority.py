"""The kind of queue with priorities: higher ones first, and the oldest first within one.

A message has a priority from 0 to 9 and keeps it for life, in the history, in a dead-letter queue
and in queues of other kinds too. This kind, as the table has it, stands for looks by age, as every
plan but a claim makes them. ``levels`` has the looks by level.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from pyqueue.backends import transitions
from pyqueue.backends.kind import IndexTerms, ScanStart, register
from pyqueue.backends.levels import PRIOR, PRIOR_KEYS
from pyqueue.backends.standard import Standard
from pyqueue.messages import DEFAULT_PRIORITY
from pyqueue.requests import Filter

__all__ = ["Priority"]


@register
class Priority(Standard):
    """Strictly by priority among what is ready; first in, first out within one priority."""

    name = "priority"
    capabilities = Standard.capabilities | {"priority"}
    #: Whether looks by age are kept for messages without a priority.
    shape: Mapping[str, object] = MappingProxyType({"strict": False})
    indexes: Mapping[str, IndexTerms] = MappingProxyType(
        {PRIOR: (list(PRIOR_KEYS), {"partialFilterExpression": {"priority": {"$exists": True}}})}
    )

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters the queue."""
        level = DEFAULT_PRIORITY if priority is None else priority
        return super().entering(queue, when, group=group) | {"priority": level}

    def claimable(self, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter of the messages that may be claimed by age, from ``start`` on."""
        messages = transitions.messages_only(queue)
        return transitions.scan_range(queue, {"$lte": now}, start, messages)
