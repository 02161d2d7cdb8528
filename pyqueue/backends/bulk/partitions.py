"""Slices: divide the ready messages among readers in many processes, without consuming them.

A slice lies between two positions in scan order. It is read as a few *spans*, each of which is one
range of the index, so the server never reads messages of another slice. If one query combined the
spans with $or, the server would merge them message by message, which is slow if a great many
messages share a ``when``. A document that contains several messages is in one slice as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from bson import ObjectId

from pyqueue.backends.bulk.raw_documents import FindEncoded
from pyqueue.backends.contents import contents_of
from pyqueue.backends.kind import Kind
from pyqueue.backends.namespace import HOT
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.transitions import record_id
from pyqueue.messages import Id
from pyqueue.requests import Count, Document, Filter, Find, Plan, ServerTime

#: The ``when`` and the id of a message.
Position = tuple[datetime, Id]

_FIRST_OBJECT_ID: Final = ObjectId(bytes(12))


@dataclass(frozen=True, slots=True)
class Slice:
    """The messages that were ready at ``now``, between two positions; None means no bound."""

    now: datetime
    above: Position | None
    upto: Position | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The messages of a slice that a reader wants, and the fields that it needs."""

    #: Filters, all of which the messages must match.
    only: tuple[Filter, ...] = ()
    #: Whether a filter lists the ids of the messages, so that the index of ids serves it.
    by_id: bool = False
    #: The projection, or None for all fields.
    fields: Mapping[str, object] | None = None


EVERYTHING: Final = Choice()


def slices(queue: str, kind: Kind, parts: int) -> Plan[list[Slice]]:
    """Divide the ready messages into up to ``parts`` disjoint slices of nearly equal size.

    Each search for a bound begins at the previous bound, so all searches together walk over the
    index once. Sizes differ by more than one only if messages come or go during the call, or if a
    bound would be a document of another program.
    """
    now = yield from ServerTime()
    if parts == 1:
        return [Slice(now, None, None)]
    ready = kind.claimable(queue, now, None)
    # The server counts the keys of the index twice as fast if the filter excludes none of them.
    total = yield from Count({name: ready[name] for name in ready if name != "_id"}, HOT)
    total -= yield from Count({**ready, "_id": record_id(queue)}, "_id_")
    pieces = min(parts, total)
    bounds: list[Position | None] = [None]
    counted = 0  # how many messages there are up to the last bound
    for cut in (total * piece // pieces for piece in range(1, pieces)):
        bound = yield from _position(ready, bounds[-1], cut - counted)
        if bound is None:
            break  # consumers have taken the remaining messages
        if isinstance(bound[1], (ObjectId, str)):  # ids of other programs cannot be bounds
            bounds.append(bound)
            counted = cut
    return [
        Slice(now, above, upto) for above, upto in zip(bounds, [*bounds[1:], None], strict=True)
    ]


def page(
    queue: str, kind: Kind, part: Slice, limit: int, choice: Choice = EVERYTHING
) -> Plan[list[Document]]:
    """Return the first documents of a slice, up to ``limit``.

    The next page is a slice ``above`` the last document. Fewer than ``limit`` documents mean that
    there is no next page.
    """
    found: list[Document] = []
    for find in _finds(queue, kind, part, choice):
        found += yield from replace(find, limit=limit - len(found))
        if len(found) == limit:
            break
    return found


def encoded_page(
    queue: str, kind: Kind, part: Slice, limit: int, choice: Choice = EVERYTHING
) -> Plan[list[bytes]]:
    """Return the next documents of a slice in BSON: up to ``limit``, and up to 16 MB.

    The next page is a slice ``above`` the last document. An empty list means the end of the slice.
    """
    for find in _finds(queue, kind, part, choice):
        found = yield from FindEncoded(replace(find, limit=limit, one_batch=True))
        if found:
            return found
    return []


def _finds(queue: str, kind: Kind, part: Slice, choice: Choice) -> list[Find]:
    """Return the commands that find the documents of a slice, in order."""
    contents, ready = contents_of(kind), kind.claimable(queue, part.now, None)
    only, fields = contents.conditions(choice.only), contents.fields(choice.fields)
    if only:
        ready = {"$and": [ready, *only]}
    hint = "_id_" if only and choice.by_id else HOT
    spans = _spans(ready, part.above, part.upto)
    return [Find(span, fields, sort=SCAN_ORDER, hint=hint) for span in spans]


def _position(ready: Filter, above: Position | None, steps: int) -> Plan[Position | None]:
    """Return the position ``steps`` messages after ``above``, or None if there are not enough."""
    # Find the span that contains the message, and how far it is from the start of the span.
    *bounded, unbounded = _spans(ready, above, None)
    span = unbounded
    for each in bounded:
        count = yield from Count(each, HOT, cap=steps)
        if count == steps:
            span = each
            break
        steps -= count
    found = yield from Find(
        span, {"_id": 1, "when": 1}, sort=SCAN_ORDER, skip=steps - 1, limit=1, hint=HOT
    )
    return (found[0]["when"], found[0]["_id"]) if found else None


def _spans(ready: Filter, above: Position | None, upto: Position | None) -> list[Filter]:
    """Return the filters of the messages above one position and up to another, in scan order.

    Args:
        ready: Matches the ready messages of the queue.
        above: The position after which the messages begin, or None for no bound.
        upto: The position of the last message, or None for no bound.
    """
    if above is not None and upto is not None and above[0] == upto[0]:
        spans = _at(above[0], above[1], upto[1])
    else:
        between: dict[str, object] = {}
        if above is not None:
            between["$gt"] = above[0]
        if upto is not None:
            between["$lt"] = upto[0]
        spans = [
            *(_at(above[0], above[1], None) if above is not None else ()),
            {"when": between} if between else {},
            *(_at(upto[0], None, upto[1]) if upto is not None else ()),
        ]
    return [{"$and": [ready, span]} if span else ready for span in spans]


def _at(when: datetime, above: Id | None, upto: Id | None) -> list[Mapping[str, object]]:
    """Return the filters of messages with this ``when`` and ids above one id and up to another.

    A range contains only ids of one type, and every str precedes every ObjectId. So ids of both
    types need two filters. None means no bound.
    """
    ranges: list[dict[str, object]] = []
    if not isinstance(above, ObjectId):
        ranges.append({"$gte": ""} if above is None else {"$gt": above})
    if not isinstance(upto, str):
        ranges.append({"$gt": above} if isinstance(above, ObjectId) else {"$gte": _FIRST_OBJECT_ID})
    if upto is not None:
        ranges[-1]["$lte"] = upto
    return [{"when": when, "_id": each} for each in ranges]
