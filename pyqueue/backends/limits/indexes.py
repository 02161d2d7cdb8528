"""The indexes of limits on concurrency, and of limits ``per`` key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyqueue.backends.kind import IndexTerms
from pyqueue.backends.turns import Order

#: The unique index of the messages with slots.
SLOTS: Final = "slot"
#: The order of messages that a limit ``per`` key defers until a message of their key may start.
LIMITED: Final = Order("limited", ("due",), "limited")
#: The indexes that a namespace needs once one of its queues has a limit on concurrency, or a limit
#: ``per`` key.
LIMIT_INDEXES: Final[Mapping[str, IndexTerms]] = {
    SLOTS: (
        [("slot", 1), ("q", 1)],
        {"unique": True, "partialFilterExpression": {"slot": {"$exists": True}}},
    ),
    LIMITED.by: (
        [("q", 1), (LIMITED.field, 1), *LIMITED.sort],
        {"partialFilterExpression": {LIMITED.field: {"$exists": True}}},
    ),
}


def needed(shape: Mapping[str, object] | None) -> Mapping[str, IndexTerms]:
    """Return the indexes that a queue with these options needs, or all if ``shape`` is None."""
    if shape is None:
        return LIMIT_INDEXES
    limit = shape.get("limit")
    limited = isinstance(limit, Mapping) and ("concurrency" in limit or "per" in limit)
    return LIMIT_INDEXES if limited else {}
