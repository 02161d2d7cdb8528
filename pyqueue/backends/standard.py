"""The standard kind of queue: first in, first out; keys, dead letters, moves and history."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from pyqueue.backends import transitions
from pyqueue.backends.claim_terms import ClaimTerms, Scan
from pyqueue.backends.claiming import Take, claim
from pyqueue.backends.ending import end_at_claim
from pyqueue.backends.expiring import EXPIRES, EXPIRY_INDEXES
from pyqueue.backends.kind import IndexTerms, ScanStart, UpdateFields, register
from pyqueue.backends.limits import slots, waiting
from pyqueue.backends.limits.indexes import needed
from pyqueue.backends.limits.taking import follow, give_back_permits, take_of
from pyqueue.backends.namespace import HOT
from pyqueue.backends.scan import ScanState
from pyqueue.documents import may_end, stored_group
from pyqueue.messages import Id
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, Sort


@register
class Standard:
    """The standard kind, which all other kinds extend. ``kind.Kind`` describes each member."""

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
    place_fields: tuple[str, ...] = ()
    #: Scans and claims, after the limit has been applied.
    _scan_and_claim = staticmethod(claim)

    def needs(self, shape: Mapping[str, object] | None) -> Mapping[str, IndexTerms]:
        """Return the indexes that a limit and expiring messages need."""
        expiring = shape is None or shape.get(EXPIRES)
        return {**needed(shape), **(EXPIRY_INDEXES if expiring else {})}

    def prepare(self) -> Plan[None]:
        """Write nothing."""
        yield from ()

    def levels(self, priorities: Collection[int | None]) -> Sequence[int]:
        """Return no levels, because this kind has no priorities."""
        return ()

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of an entering message. The message keeps its priority and group."""
        put = transitions.entering(queue, when)
        return put if group is None else put | {"last_group": stored_group(group)}

    def claimable(self, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches the messages that may be claimed, from ``start`` on."""
        return transitions.claimable(queue, now, start)

    def claiming(self, update: UpdateFields) -> UpdateFields:
        """Return the update that claims a message, and that renames the lock fields."""
        return transitions.locking(self, update)

    def next_ones(self, queue: str, now: datetime) -> Plan[Sequence[Find]]:
        """Return the query that finds ready messages in the order in which they are claimed."""
        yield from ()
        return [Find(self.claimable(queue, now, None), sort=self.order, hint=self.index)]

    def follow(
        self, terms: ClaimTerms, state: ScanState, record: Mapping[str, Any], now: datetime
    ) -> Plan[None]:
        """Learn the limit of the queue from its record."""
        return follow(terms, state, record, now)

    def claim(self, scan: Scan) -> Plan[tuple[list[Document], bool]]:
        """Claim the first messages, and end those that were cancelled or have expired."""
        while True:
            found = yield from self._claim_once(scan)
            over = left = list[Document]()
            if any(map(may_end, found[0])):
                over, left = yield from end_at_claim(scan, found[0])
            if not over:
                return found
            yield from give_back_permits(scan, over)
            if left:
                return left, False
            scan = replace(scan, now=(yield from ServerTime()))

    def _claim_once(self, scan: Scan) -> Plan[tuple[list[Document], bool]]:
        """Claim the first messages, within the limit of the queue."""
        take: Take | None = None
        if scan.state.limit.limit is not None:
            take = yield from take_of(scan)
        return (yield from self._scan_and_claim(scan, take))

    def ended(
        self, queue: str, ended: Sequence[Mapping[str, Any]], session: object = None
    ) -> Plan[None]:
        """Release the messages that waited for ended claims, or behind messages that have left."""
        if held := [each["slot"] for each in ended if "slot" in each]:
            yield from slots.free(queue, held, session)
        if any("limited" in each for each in ended):
            yield from waiting.bring_next(queue, ended, session)

    def place_again(self, queue: str) -> Plan[Callable[[datetime], dict[str, Any]] | None]:
        """Return None: messages keep their places."""
        yield from ()
        return None

    def packed_ids(
        self, queue: str, ids: Sequence[Id], session: object = None
    ) -> Plan[tuple[frozenset[Id], list[Id]]]:
        """Return no ids: each message is a separate document."""
        yield from ()
        return frozenset(), []

    def finishing(
        self, now: datetime, outcome: str, history_s: float | None, *, keyed: bool
    ) -> dict[str, dict[str, Any]] | None:
        """Return the update that finishes a message, or None if the message is deleted instead."""
        return transitions.finishing(self.held_fields, now, outcome, history_s, keyed=keyed)
