"""The standard kind of queue: first in, first out; with keys, dead letter, move and history."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from pyqueue.backends import transitions
from pyqueue.backends.kind import IndexTerms, ScanStart, register
from pyqueue.backends.namespace import HOT
from pyqueue.documents import stored_group
from pyqueue.requests import Filter, Sort

__all__ = ["Standard"]


@register
class Standard:
    """The kind that other kinds start from; see ``kind.Kind`` for what each member means."""

    name: str = "standard"
    capabilities: frozenset[str] = frozenset(
        {
            *("history", "dead_letter", "keys", "move", "pop", "claim"),
            *("concurrency", "rate", "per"),
        }
    )
    shape: Mapping[str, object] = MappingProxyType({})
    index: str = HOT
    order: Sort = (("when", 1), ("_id", 1))
    scans_forward: bool = True
    held_fields: tuple[str, ...] = transitions.HELD_FIELDS
    lock_fields: Mapping[str, str] = MappingProxyType({})
    stay_fields: tuple[str, ...] = transitions.STAY_FIELDS
    bare_pop: bool = True
    indexes: Mapping[str, IndexTerms] = MappingProxyType({})

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters the queue. It keeps priority and group."""
        put = transitions.entering(queue, when)
        return put if group is None else put | {"last_group": stored_group(group)}

    def claimable(self, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter of the messages that may be claimed, from ``start`` on."""
        return transitions.claimable(queue, now, start)

    def finishing(
        self, now: datetime, outcome: str, history_s: float | None, *, keyed: bool
    ) -> dict[str, dict[str, Any]] | None:
        """Return the update that finishes a message; None: it is deleted."""
        return transitions.finishing(self.held_fields, now, outcome, history_s, keyed=keyed)
