"""Slices: dividing what is ready among readers that consume nothing, in many processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from bson import ObjectId

from pyqueue.backends.kind import Kind, ScanStart
from pyqueue.backends.namespace import HOT
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.messages import Id
from pyqueue.requests import Count, Document, Find, Plan, ServerTime

__all__ = ["Slice", "page", "slices"]


@dataclass(frozen=True, slots=True)
class Slice:
    """What was ready at ``now``, between two positions in scan order; None: no bound."""

    now: datetime
    above: ScanStart | None
    upto: tuple[datetime, Id] | None


def slices(queue: str, kind: Kind, parts: int) -> Plan[list[Slice]]:
    """Divide what is ready now into at most ``parts`` disjoint slices."""
    now = yield from ServerTime()
    ready = kind.claimable(queue, now, None)
    total = yield from Count(ready, HOT)
    pieces = min(parts, total)
    bounds: list[tuple[datetime, Id] | None] = [None]
    for piece in range(1, pieces):
        found = yield from Find(
            ready,
            {"_id": 1, "when": 1},
            sort=SCAN_ORDER,
            skip=total * piece // pieces - 1,
            limit=1,
            hint=HOT,
        )
        if found:  # a consumer may have taken messages in the meantime
            bounds.append((found[0]["when"], found[0]["_id"]))
    return [
        Slice(now, above, upto) for above, upto in zip(bounds, [*bounds[1:], None], strict=True)
    ]


def page(queue: str, kind: Kind, part: Slice, limit: int) -> Plan[list[Document]]:
    """Return the first documents of a slice. The rest is a slice ``above`` the last of them."""
    latest = part.now if part.upto is None else min(part.now, part.upto[0])
    match = kind.claimable(queue, latest, part.above)
    if part.upto is not None:
        when, id = part.upto
        below: list[Mapping[str, object]] = [
            {"when": {"$lt": when}},
            {"when": when, "_id": {"$lte": id}},
        ]
        if isinstance(id, ObjectId):  # $lte compares within one type, and every str precedes
            below.append({"when": when, "_id": {"$type": "string"}})
        match = {"$and": [match, {"$or": below}]}
    return (yield from Find(match, sort=SCAN_ORDER, limit=limit, hint=HOT))
