"""The kind of queue with ordered groups: one message of a group at a time, in their order.

``groups`` has the order and the locks of groups, and ``by_group`` the claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from pyqueue.backends import transitions
from pyqueue.backends.groups import GROUP_KEYS, GROUPED, GROUPS, LOCK_KEYS, LOCKS, place_at
from pyqueue.backends.kind import IndexTerms, register
from pyqueue.backends.standard import Standard
from pyqueue.documents import stored_group

__all__ = ["Ordered"]


@register
class Ordered(Standard):
    """First in, first out within a group; groups do not wait for each other."""

    name = "ordered"
    # A pop would end the claim before the work, and claims of many take no turns.
    capabilities = (Standard.capabilities | {"group"}) - {"pop", "claim", "per"}
    #: What a group does while a message of it waits for its next try: "block" waits for it, "skip"
    #: goes on.
    shape: Mapping[str, object] = MappingProxyType({"on_failure": "block"})
    lock_fields: Mapping[str, str] = MappingProxyType({"group": "lock"})
    stay_fields = (*transitions.STAY_FIELDS, "group", "lock", *GROUPED.places, "last_group")
    bare_pop = False
    indexes: Mapping[str, IndexTerms] = MappingProxyType(
        {
            GROUPS: (
                list(GROUP_KEYS),
                {"partialFilterExpression": {"group": {"$exists": True}}},
            ),
            LOCKS: (
                list(LOCK_KEYS),
                {"unique": True, "partialFilterExpression": {"lock": {"$exists": True}}},
            ),
        }
    )

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters the queue, at the end of its group."""
        put = transitions.entering(queue, when)
        if group is None:
            return put
        return put | {"group": stored_group(group), **place_at(when)}

    def finishing(
        self, now: datetime, outcome: str, history_s: float | None, *, keyed: bool
    ) -> dict[str, dict[str, Any]] | None:
        """Return the update that finishes a held message; None: it is deleted."""
        update = super().finishing(now, outcome, history_s, keyed=keyed)
        if update is not None:
            update["$rename"] = {**update.get("$rename", {}), "lock": "last_group"}
        return update
