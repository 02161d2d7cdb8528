"""The kind of a queue that programs have referred to only by name so far.

A message that is moved to a queue by name, or buried, or pushed by an object without a kind,
creates the record of a new queue. Such a record is ``open``: it counts as a standard queue, and the
first program that names a kind gives it that kind. The messages that are already in the queue are
valid in every kind.

Nothing is claimed from an open queue, since a program that receives names the kind. So no claim can
mistake a pack, which stores several messages, for a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyqueue.backends.kind import Kind, require_limit
from pyqueue.backends.transitions import level_record_id, record_id
from pyqueue.limits import limit_or_none
from pyqueue.messages import HIGHEST_PRIORITY
from pyqueue.requests import Plan, ServerTime, Update, UpdateDocument

#: The kind of an open queue.
GUESSED_KIND: Final = "standard"
#: The version of a record with a shape. Releases that would ignore the shape refuse the record.
SHAPED_VERSION: Final = 2


def name_kind(queue: str, record: Mapping[str, Any], kind: Kind) -> Plan[None]:
    """Give an open queue its kind, unless another program changes its record first.

    Args:
        queue: The name of the queue.
        record: Its record, as read.
        kind: The kind that the program names.

    Raises:
        ConfigurationError: The queue has a limit that the kind does not support.
    """
    shape = record.get("shape")
    if (limit := limit_or_none(queue, shape)) is not None:
        require_limit(kind, queue, limit)
    put: dict[str, object] = {"kind": kind.name}
    if kind.shape:
        stored = shape if isinstance(shape, Mapping) else {}
        put |= {"shape": {**kind.shape, **stored}, "v": SHAPED_VERSION}
    # Messages keep the priority that they had in another queue, so any priority may arrive.
    if levels := kind.levels(range(HIGHEST_PRIORITY + 1)):
        put["levels"] = list(levels)
    yield from kind.prepare()
    unchanged = {"_id": record_id(queue), "open": True}
    unchanged["shape"] = {"$exists": False} if shape is None else {"$eq": shape}
    # At majority: if a fail-over undid the kind, packs that need it would be left behind.
    update: UpdateDocument = {"$set": put, "$unset": {"open": ""}}
    named = yield from Update(unchanged, update, majority=True)
    if named.matched and levels:
        yield from put_level_records(queue, levels)


def put_level_records(queue: str, levels: Sequence[int]) -> Plan[None]:
    """Create the records of these priority levels, if they are missing; see ``levels``."""
    now = yield from ServerTime()
    for each in levels:
        record = {"q": queue, "priority": each, "when": now, "record": True}
        match = {"_id": level_record_id(queue, each)}
        yield from Update(match, {"$setOnInsert": record}, upsert=True)
