"""The kind of queue with ordered groups: one message of a group at a time, in order.

``groups`` contains the order and the locks of the groups, and ``scan`` contains the claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from pyqueue.backends import namespace, transitions
from pyqueue.backends.claim_terms import Scan
from pyqueue.backends.kind import IndexTerms, register
from pyqueue.backends.ordered.groups import (
    GROUP_KEYS,
    GROUPED,
    GROUPS,
    LOCK_KEYS,
    LOCKS,
    groups_in,
    place_at,
    put_lock_bounds,
)
from pyqueue.backends.ordered.scan import claim_next
from pyqueue.backends.standard import Standard
from pyqueue.backends.turns import bring_forward
from pyqueue.documents import stored_group
from pyqueue.requests import Document, Plan

_INDEXES: Final[Mapping[str, IndexTerms]] = {
    GROUPS: (list(GROUP_KEYS), {"partialFilterExpression": {"group": {"$exists": True}}}),
    LOCKS: (
        list(LOCK_KEYS),
        {"unique": True, "partialFilterExpression": {"lock": {"$exists": True}}},
    ),
}


@register
class Ordered(Standard):
    """A queue that is first in, first out within a group. Groups do not wait for each other."""

    name = "ordered"
    # A pop would release the group before the work is done. Named claims do not respect groups.
    capabilities = (Standard.capabilities | {"group"}) - {"pop", "claim", "per"}
    #: How a group continues when a message waits for its next try: "block" waits for the message,
    #: and "skip" continues with the next message.
    shape: Mapping[str, object] = MappingProxyType({"on_failure": "block"})
    lock_fields: Mapping[str, str] = MappingProxyType({"group": "lock"})
    stay_fields = (*transitions.STAY_FIELDS, "group", "lock", *GROUPED.places, "last_group")
    bare_pop = False
    place_fields = GROUPED.places

    def needs(self, shape: Mapping[str, object] | None) -> Mapping[str, IndexTerms]:
        """Return the indexes, including the indexes for waiting messages and for locks."""
        return {**super().needs(shape), **_INDEXES}

    def prepare(self) -> Plan[None]:
        """Insert the document that separates the locks of groups in the index."""
        return put_lock_bounds()

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters the queue as the last message of its group."""
        put = transitions.entering(queue, when)
        if group is None:
            return put
        return put | {"group": stored_group(group), **place_at(when)}

    def _claim_once(self, scan: Scan) -> Plan[tuple[list[Document], bool]]:
        """Claim the first messages of free groups."""
        return claim_next(scan)

    def ended(
        self, queue: str, ended: Sequence[Mapping[str, Any]], session: object = None
    ) -> Plan[None]:
        """Bring forward the next message of each group, and the messages that waited for a slot."""
        yield from bring_forward(queue, GROUPED, groups_in(ended), session)
        yield from super().ended(queue, ended, session)

    def place_again(self, queue: str) -> Plan[Callable[[datetime], dict[str, Any]] | None]:
        """Return a function that puts a failed message last, or None if its group waits for it."""
        shape = (yield from namespace.flags(queue)).get("shape")
        skips = isinstance(shape, Mapping) and shape.get("on_failure") == "skip"
        return place_at if skips else None

    def finishing(
        self, now: datetime, outcome: str, history_s: float | None, *, keyed: bool
    ) -> dict[str, dict[str, Any]] | None:
        """Return the update that finishes a held message, or None if the message is deleted."""
        update = super().finishing(now, outcome, history_s, keyed=keyed)
        if update is not None:
            update["$rename"] = {**update.get("$rename", {}), "lock": "last_group"}
        return update
