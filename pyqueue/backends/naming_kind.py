"""The kind of a queue that programs so far know by its name only.

A message that is moved to a queue by name, or buried, or pushed by an object without a kind, makes
the record of a new queue. Such a record is ``open``: it counts as a standard queue, and the first
program that names a kind makes it one of that kind. What is in the queue by then is an ordinary
message in every kind.

Nothing is claimed from an open queue, since a program that receives names the kind. So a claim
meets no pack that it takes for a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyqueue.backends.kind import Kind, require_limit
from pyqueue.backends.transitions import level_record_id, record_id
from pyqueue.limits import limit_or_none
from pyqueue.messages import HIGHEST_PRIORITY
from pyqueue.requests import Plan, ServerTime, Update, UpdateDocument

__all__ = ["GUESSED_KIND", "SHAPED_VERSION", "name_kind", "put_level_records", "put_lock_bounds"]

#: The kind of an open queue.
GUESSED_KIND: Final = "standard"
#: The version of a record with a shape. Releases that would ignore the shape refuse the record.
SHAPED_VERSION: Final = 2
#: The _id and ``q`` of the document that keeps walks over the index of locks short.
_LOCK_BOUNDS: Final = "~locks"


def name_kind(queue: str, record: Mapping[str, Any], kind: Kind) -> Plan[None]:
    """Make an open queue one of a kind, unless another program changes its record first.

    Args:
        queue: the name of the queue.
        record: its record, as read.
        kind: the kind that the program names.

    Raises:
        ConfigurationError: the queue has a limit that the kind does not offer.
    """
    shape = record.get("shape")
    if (limit := limit_or_none(queue, shape)) is not None:
        require_limit(kind, queue, limit)
    put: dict[str, object] = {"kind": kind.name}
    levels: Sequence[int] = ()
    if kind.shape:
        stored = shape if isinstance(shape, Mapping) else {}
        put |= {"shape": {**kind.shape, **stored}, "v": SHAPED_VERSION}
    if "priority" in kind.capabilities:
        # Messages keep the priority that they had elsewhere. Some of any may be on their way.
        levels = range(HIGHEST_PRIORITY + 1)
        put["levels"] = list(levels)
    if kind.lock_fields:
        yield from put_lock_bounds()
    unchanged = {"_id": record_id(queue), "open": True}
    unchanged["shape"] = {"$exists": False} if shape is None else {"$eq": shape}
    # At majority: packs must not outlive the kind that they need, when a fail-over undoes it.
    update: UpdateDocument = {"$set": put, "$unset": {"open": ""}}
    named = yield from Update(unchanged, update, majority=True)
    if named.matched and levels:
        yield from put_level_records(queue, levels)


def put_level_records(queue: str, levels: Sequence[int]) -> Plan[None]:
    """Put a record at the end of each level; see ``levels``."""
    now = yield from ServerTime()
    for each in levels:
        record = {"q": queue, "priority": each, "when": now, "record": True}
        match = {"_id": level_record_id(queue, each)}
        yield from Update(match, {"$setOnInsert": record}, upsert=True)


def put_lock_bounds() -> Plan[None]:
    """Put entries that stay between the locks of groups, one for each hash of a group."""
    # To insert a lock, the server walks over deleted ones, to the next entry that is there.
    locks = [*(f"{number:03x}" for number in range(4096)), "g"]
    record = {"q": _LOCK_BOUNDS, "record": True, "lock": locks}
    yield from Update({"_id": _LOCK_BOUNDS}, {"$setOnInsert": record}, upsert=True)
