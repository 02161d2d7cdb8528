"""The kind of queue with priorities: highest priority first, oldest first within a priority.

A message has a priority from 0 to 9, and keeps it in the history, in a dead-letter queue and in
queues of other kinds. The class in this module scans by age, as all operations except claims
do. ``levels`` contains the scans by level.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from pyqueue.backends import transitions
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.kind import IndexTerms, ScanStart, register
from pyqueue.backends.namespace import flags
from pyqueue.backends.priority.levels import (
    LEVEL_ORDER,
    PRIOR,
    PRIOR_KEYS,
    LevelStarts,
    ready_by_level,
)
from pyqueue.backends.priority.scan import claim_next as claim_by_level
from pyqueue.backends.scan import ScanState
from pyqueue.backends.standard import Standard
from pyqueue.documents import listed_levels
from pyqueue.messages import DEFAULT_PRIORITY
from pyqueue.requests import Filter, Find, Plan

_INDEXES: Final[Mapping[str, IndexTerms]] = {
    PRIOR: (list(PRIOR_KEYS), {"partialFilterExpression": {"priority": {"$exists": True}}})
}


@register
class Priority(Standard):
    """A queue that hands out messages strictly by priority, and oldest first within a priority."""

    name = "priority"
    capabilities = Standard.capabilities | {"priority"}
    #: If ``strict`` is true, no claim scans by age. Instead, a claim gives each message that other
    #: programs wrote without a priority the default priority, and lists all levels in use.
    shape: Mapping[str, object] = MappingProxyType({"strict": False})
    _scan_and_claim = staticmethod(claim_by_level)

    def needs(self, shape: Mapping[str, object] | None) -> Mapping[str, IndexTerms]:
        """Return the indexes that the queue needs, including the index for claims by level."""
        return {**super().needs(shape), **_INDEXES}

    def levels(self, priorities: Collection[int | None]) -> Sequence[int]:
        """Return the levels of messages with these priorities, in ascending order."""
        return sorted({DEFAULT_PRIORITY if each is None else each for each in priorities})

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters the queue, including its priority."""
        level = DEFAULT_PRIORITY if priority is None else priority
        return super().entering(queue, when, group=group) | {"priority": level}

    def follow(
        self, terms: ClaimTerms, state: ScanState, record: Mapping[str, Any], now: datetime
    ) -> Plan[None]:
        """Learn the limit and the levels of the queue from its record."""
        yield from super().follow(terms, state, record, now)
        state.of(LevelStarts).follow(record)

    def claimable(self, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches messages that may be claimed by age, from ``start`` on."""
        messages = transitions.messages_only(queue)
        return transitions.scan_range(queue, {"$lte": now}, start, messages)

    def next_ones(self, queue: str, now: datetime) -> Plan[Sequence[Find]]:
        """Return queries for ready messages: first by level, then in levels that are not listed."""
        (rest,) = yield from super().next_ones(queue, now)
        levels = listed_levels((yield from flags(queue)).get("levels"))
        if not levels:
            return [rest]
        by_level = Find(ready_by_level(queue, levels, now), sort=LEVEL_ORDER, hint=PRIOR)
        return [by_level, replace(rest, filter={**rest.filter, "priority": {"$nin": levels}})]
