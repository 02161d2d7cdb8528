"""Packs: how messages enter.

The messages of one call share packs, and so do concurrent single pushes. What has a key, an id or a
later time, or is too large, is an ordinary message, and so is one that came alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, Unpack

from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue import arguments, packs
from pyqueue.backends import namespace
from pyqueue.backends.bucket import DEFAULT_PACK
from pyqueue.backends.handover import NOTHING
from pyqueue.backends.inserting import raise_foreign_ids, was_in
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import Options, QueueShape
from pyqueue.backends.pushing import Checked, PushOptions, checked, enter, new_document
from pyqueue.errors import QueueError, Unavailable
from pyqueue.messages import MAX_PACK, Id
from pyqueue.payloads import Codec, encode
from pyqueue.requests import Coalesce, Document, Find, Insert, Plan, ServerTime, Signal, Update

__all__ = ["push"]

#: The ``q`` of what keeps a pack out, and for how long: no insert arrives so late.
_KEPT_OUT: Final = "~kept-out"
_KEPT_OUT_FOR: Final = timedelta(days=1)


def push(
    queue: str,
    kind: Kind,
    codec: Codec[Any],
    options: Options,
    payloads: Iterable[Any],
    **how: Unpack[PushOptions],
) -> Plan[list[Id | None]]:
    """Push messages. Return their ids, with None for each that a taken key kept out."""
    given = checked(queue, kind, codec, payloads, how)
    if not given.values:
        return []
    now = yield from ServerTime()
    when = arguments.starting(now, how.get("delay"), how.get("at"))
    session, on_duplicate = how.get("session"), how.get("on_duplicate", "ignore")
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
    there, foreign = yield from _in_stored_packs(queue, chosen, now, session)
    kept_out = {*there, *foreign}
    rest = [place for place, id in zip(places, chosen, strict=True) if id not in kept_out]
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
    raise_foreign_ids(queue, foreign)
    return [id if id in there else next(entered) for id in chosen]


def _in_stored_packs(
    queue: str, ids: Sequence[Id | None], now: datetime, session: object
) -> Plan[tuple[frozenset[Id], list[Id]]]:
    """Find those ids that name messages of stored packs, and keep all other packs out.

    A push that was not acknowledged is repeated with its ids, and its insert may still arrive. So
    for a pack that is not stored, a document with its _id is. Ids without padding need none: only
    earlier releases made them, and callers make them from ids of their own messages.

    Returns:
        The ids of messages of packs that are or were in this queue, and those of other packs.
    """
    named: dict[ObjectId, list[tuple[Id, packs.Place]]] = {}
    for id in ids:
        if id is not None and (place := packs.place_of(id)):
            named.setdefault(place.pack, []).append((id, place))
    there: set[Id] = set()
    foreign: set[Id] = set()
    for pack, members in named.items():
        if any(place.padded for _, place in members):
            instead = {"q": _KEPT_OUT, "processed": now, "expires": now + _KEPT_OUT_FOR}
            put = {"$setOnInsert": instead}
            durable = session is None
            yield from Update({"_id": pack}, put, upsert=True, majority=durable, session=session)
        fields = {"q": 1, "trail": 1, **packs.INDEX_FIELDS}
        for each in (yield from Find(packs.packs_of(pack), fields, session=session)):
            found = {id for id, place in members if packs.index_in(each, place) is not None}
            if found and (yield from _is_durable(each, session)):
                (there if was_in(queue, each) else foreign).update(found)
    return frozenset(there), [id for id in ids if id in foreign - there]


def _is_durable(document: Document, session: object) -> Plan[bool]:
    """Wait until no fail-over can undo what was read. Return False if one just did."""
    if session is not None:
        return True
    return bool((yield from Update({"_id": document["_id"]}, NOTHING, majority=True)).matched)


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
    for some in packs.chunks(entries, [len(each.raw) for each in entries], most):
        id = ObjectId()
        if len(some) == 1:
            entry = some[0]
            alone = new_document(
                queue, kind, type_name, now, now, entry["p"], entry.get("h"), None, id
            )
            documents.append(encode(alone))
            ids.append([id])
            continue
        pack = packs.new_pack(id, kind.entering(queue, now), now, type_name, some)
        documents.append(pack)
        ids.append(list(map(packs.naming(pack), range(len(some)))))
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
