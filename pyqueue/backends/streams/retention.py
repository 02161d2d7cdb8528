"""Streams: delete the oldest packs of a log.

Before packs are deleted, ``first`` in the record of the stream is raised. The last pack is kept,
because it shows where the log ends, and so is every pack that is younger than 10 minutes. If the
whole stream is deleted, these packs stay for 10 minutes without their messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from pyqueue import arguments
from pyqueue.backends.streams.log import (
    ASCENDING,
    PLACE,
    LogState,
    bounds,
    check,
    first_position,
    instants,
    packs_between,
    position_argument,
)
from pyqueue.backends.transitions import record_id
from pyqueue.errors import QueueError
from pyqueue.requests import Delete, Find, Plan, ServerTime, Update

#: The ``q`` of what a deleted queue leaves for a while: its record, and the packs of a stream.
DELETED: Final = "~deleted"
#: A pack that is younger than this is never deleted, so that its position stays taken.
LEAST_AGE: Final = timedelta(minutes=10)
#: The time between two checks for packs to delete, in seconds, and how many packs one check
#: deletes at most.
RETENTION_INTERVAL_S: Final = 60.0
_MAX_DELETED: Final = 200


def retain(stream: str, state: LogState) -> Plan[None]:
    """Delete packs that are older than the retention of the stream, if a check is due.

    A check is due once a minute, or at once if the last one left packs over. Failures are ignored.
    """
    mono, now = yield from instants()
    if mono < state.retain_at:
        return
    state.retain_at = mono + RETENTION_INTERVAL_S
    try:
        found = yield from Find({"_id": record_id(stream)}, {"shape": 1}, limit=1)
        shape = found[0].get("shape") if found else None
        kept_s = shape.get("retention") if isinstance(shape, Mapping) else None
        if isinstance(kept_s, (int, float)):
            _, more = yield from _delete_portion(stream, None, now - timedelta(seconds=kept_s))
            if more:
                state.retain_at = mono
    except QueueError:
        pass


def trim(stream: str, state: LogState, before: object) -> Plan[int]:
    """Delete packs that lie entirely before a position or instant. Return the first position left.

    Raises:
        ConfigurationError: ``before`` is not allowed, or a queue has this name.
    """
    instant = arguments.instant("before", before) if isinstance(before, datetime) else None
    position = position_argument("before", before) if instant is None else None
    yield from check(stream, state)
    more = True
    while more:
        _, more = yield from _delete_portion(stream, position, instant)
    return (yield from first_position(stream))


def _delete_portion(
    stream: str, position: int | None, instant: datetime | None
) -> Plan[tuple[int, bool]]:
    """Delete the first packs, up to ``_MAX_DELETED``, as long as they are old enough.

    Args:
        stream: The name of the stream.
        position: Delete only packs that end at or before this position, or None.
        instant: Delete only packs that were appended before this instant, or None.

    Returns:
        The position after the last deleted pack, and whether there may be more to delete.
    """
    now = yield from ServerTime()
    page = yield from Find(
        packs_between(stream),
        {**PLACE, "pushed": 1},
        sort=ASCENDING,
        limit=_MAX_DELETED + 1,
        majority=True,
    )
    end = 0
    for each in page[:-1]:  # never the last pack, which shows where the log ends
        too_new = instant is not None and each["pushed"] >= instant
        if too_new or each["pushed"] >= now - LEAST_AGE:
            break
        if position is not None and each["s"] + each["n"] > position:
            break
        end = each["s"] + each["n"]
    if end == 0:
        return 0, False
    change = yield from Update({"_id": record_id(stream)}, {"$max": {"first": end}}, majority=True)
    if change.matched:
        yield from Delete(packs_between(stream, 0, end), many=True)
    return end, bool(change.matched) and len(page) > _MAX_DELETED and end == page[-1]["s"]


def drop(stream: str, end: int | None = None) -> Plan[int]:
    """Delete all packs, or those below ``end``. Return how many messages they contained.

    This first raises ``first``, so that later appends continue with the next position. Young packs
    only lose their messages: an append with an old tail must still find that its position is taken.
    """
    first = yield from first_position(stream)
    if end is None:
        _, end = yield from bounds(stream)
    yield from Update({"_id": record_id(stream)}, {"$max": {"first": end}}, majority=True)
    now = yield from ServerTime()
    packs = packs_between(stream, 0, end)
    emptied = {"q": DELETED, "processed": now, "expires": now + LEAST_AGE}
    yield from Update(
        {**packs, "pushed": {"$gte": now - LEAST_AGE}},
        {"$set": emptied, "$unset": {"b": ""}},
        many=True,
        majority=True,
    )
    yield from Delete({**packs, "b": {"$exists": True}}, many=True)
    return end - first
