"""Packs: how messages enter.

The messages of one call share packs, and so do concurrent single pushes. What has a key, an id or a
later time, or is too large, is an ordinary message, and so is one that came alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue import arguments, packs
from pyqueue.backends import namespace
from pyqueue.backends.bucket import DEFAULT_PACK
from pyqueue.backends.handover import NOTHING
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import Options, QueueShape
from pyqueue.backends.pushing import Checked, checked, enter, new_document
from pyqueue.backends.transitions import hidden_queue
from pyqueue.clock import BAND
from pyqueue.errors import QueueError, Unavailable
from pyqueue.messages import MAX_PACK, Id
from pyqueue.payloads import Codec, encode
from pyqueue.requests import Coalesce, Find, Insert, Plan, ServerTime, Signal, Update

__all__ = ["push"]


def push(
    queue: str,
    kind: Kind,
    codec: Codec[Any],
    options: Options,
    payloads: Iterable[Any],
    *,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    headers: Mapping[str, Any] | None = None,
    keys: Sequence[str | None] | None = None,
    on_duplicate: str = "ignore",
    ids: Sequence[Id | None] | None = None,
    priorities: Sequence[int | None] | None = None,
    groups: Sequence[str | None] | None = None,
    session: object = None,
) -> Plan[list[Id | None]]:
    """Push messages. Return their ids, with None for each that a taken key kept out."""
    same = (headers, keys, on_duplicate, ids, priorities, groups)
    given = checked(queue, kind, codec, payloads, *same)
    arguments.starting(BAND, delay, at)
    if not given.values:
        return []
    now = yield from ServerTime()
    when = arguments.starting(now, delay, at)
    more = {"h": given.headers} if given.headers else {}
    entries = [encode({"p": value, **more}) for value in given.values]
    inside = [
        place
        for place, entry in enumerate(entries)
        if when == now
        and given.keys[place] is None
        and given.ids[place] is None
        and len(entry.raw) <= packs.MAX_PACK_BYTES
    ]
    yield from namespace.ensure(queue, kind, options)
    answers: list[Id | QueueError | None] = [None] * len(entries)
    if len(entries) == 1 and inside and session is None:
        batch = partial(_insert_each, queue, kind, codec.name)
        size = len(entries[0].raw)
        key = ("insert packs", queue, codec.name)
        answers = [(yield from Coalesce(key, entries[0], batch, size=size, threads=True))]
    elif inside:
        some = [entries[place] for place in inside]
        made = yield from _insert(queue, kind, codec.name, now, some, session)
        for place, answer in zip(inside, made, strict=True):
            answers[place] = answer
    if failed := [each for each in answers if isinstance(each, QueueError)]:
        unknown = [id for each in failed if isinstance(each, Unavailable) for id in each.ids]
        if unknown:
            raise Unavailable(str(failed[0]), ids=unknown) from failed[0]
        raise failed[0]
    ordinary = sorted(set(range(len(entries))) - set(inside))
    if ordinary:
        entered = yield from _enter(
            queue, kind, codec.name, given, ordinary, now, when, on_duplicate, session
        )
        for place, id in zip(ordinary, entered, strict=True):
            answers[place] = id
    return [None if isinstance(each, QueueError) else each for each in answers]


def _enter(
    queue: str,
    kind: Kind,
    type_name: str | None,
    given: Checked,
    places: Sequence[int],
    now: datetime,
    when: datetime,
    on_duplicate: str,
    session: object,
) -> Plan[list[Id | None]]:
    """Write ordinary messages. An id that belongs to a stored pack names a message of it."""
    chosen = [given.ids[place] for place in places]
    there = yield from _stored_in_packs(queue, chosen, session)
    rest = [place for place, id in zip(places, chosen, strict=True) if id not in there]
    part = Checked(
        [given.values[place] for place in rest],
        given.headers,
        [given.keys[place] for place in rest],
        [given.ids[place] for place in rest],
        [given.priorities[place] for place in rest],
        [given.groups[place] for place in rest],
    )
    documents = part.documents(queue, kind, type_name, now, when)
    own = frozenset(id for id in part.ids if id is not None)
    encoded = list(map(encode, documents))
    entered = iter(
        (yield from enter(queue, kind, documents, encoded, own, on_duplicate, session))
        if documents
        else []
    )
    return [id if id in there else next(entered) for id in chosen]


def _stored_in_packs(
    queue: str, ids: Sequence[Id | None], session: object
) -> Plan[frozenset[Id | None]]:
    """Return those ids that name messages of packs that are stored in the queue.

    A push that was not acknowledged is repeated with its ids.
    """
    named = {id: packs.place_of(id) for id in ids}
    wanted = list({place[0] for place in named.values() if place is not None})
    if not wanted:
        return frozenset()
    match = {"_id": {"$in": wanted}, "q": {"$in": [queue, hidden_queue(queue)]}}
    if session is None:  # a fail-over may undo what is found, unless a majority has it
        yield from Update(match, NOTHING, many=True, majority=True)
    found = yield from Find(match, {"_id": 1}, session=session)
    there = {each["_id"] for each in found}
    return frozenset(id for id, place in named.items() if place is not None and place[0] in there)


def _insert_each(
    queue: str, kind: Kind, type_name: str | None, entries: Sequence[RawBSONDocument]
) -> Plan[list[Id | QueueError | None]]:
    """Insert the messages of several callers."""
    now = yield from ServerTime()
    return (yield from _insert(queue, kind, type_name, now, entries, None))


def _insert(
    queue: str,
    kind: Kind,
    type_name: str | None,
    now: datetime,
    entries: Sequence[RawBSONDocument],
    session: object,
) -> Plan[list[Id | QueueError | None]]:
    """Insert messages as packs. Return the id of each, or why it was not acknowledged."""
    shape = yield from QueueShape(queue)
    size = shape.get("pack", DEFAULT_PACK)
    most = size if isinstance(size, int) and 0 < size <= MAX_PACK else DEFAULT_PACK
    documents: list[RawBSONDocument] = []
    ids: list[list[Id]] = []
    for some in _chunks(entries, most):
        id = ObjectId()
        if len(some) == 1:
            entry = some[0]
            alone = new_document(
                queue, kind, type_name, now, now, entry["p"], entry.get("h"), None, id
            )
            documents.append(encode(alone))
            ids.append([id])
            continue
        documents.append(packs.new_pack(id, kind.entering(queue, now), now, type_name, some))
        prefix = packs.message_id(id, 0)[:-1]
        ids.append([f"{prefix}{place}" for place in range(len(some))])
    try:
        failures = yield from Insert(documents, session=session)
    except Unavailable as error:
        return [Unavailable(str(error), ids=[id]) for some in ids for id in some]
    answers: list[list[Id | QueueError | None]] = [list(some) for some in ids]
    for failure in failures:
        why = failure.error
        answers[failure.place] = [
            Unavailable(str(why), ids=[id]) if isinstance(why, Unavailable) else why
            for id in ids[failure.place]
        ]
    if len(failures) < len(documents):
        yield from Signal(queue, now, session)
    return [answer for some in answers for answer in some]


def _chunks(entries: Sequence[RawBSONDocument], most: int) -> Iterator[Sequence[RawBSONDocument]]:
    first, size = 0, 0
    for place, entry in enumerate(entries):
        size += len(entry.raw)
        if place > first and (place - first == most or size > packs.MAX_PACK_BYTES):
            yield entries[first:place]
            first, size = place, len(entry.raw)
    yield entries[first:]
