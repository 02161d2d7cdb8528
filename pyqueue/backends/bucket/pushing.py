"""Packs: how messages enter.

The messages of one call share packs, and so do concurrent single pushes. What has a key, an id or a
later time, or is too large, is an ordinary message, and so is one that came alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Unpack

from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.kind import DEFAULT_PACK
from pyqueue.backends.handover import NOTHING
from pyqueue.backends.hidden import MARK
from pyqueue.backends.inserting import find_usable, keep_out, raise_foreign_ids, was_in
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import Options, QueueShape
from pyqueue.backends.pushing import PushOptions, checked, enter, new_document
from pyqueue.errors import QueueError, Unavailable
from pyqueue.messages import MAX_PACK, Id
from pyqueue.payloads import Codec, each_of, encode
from pyqueue.requests import Coalesce, Document, Insert, Plan, ServerTime, Signal, Update


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
    session = how.get("session")
    more = {"h": given.headers} if given.headers else {}
    entries = each_of(encode, [{"p": value, **more} for value in given.values])
    inside = [
        place
        for place, entry in enumerate(entries)
        if when == now
        and given.keys[place] is None
        and given.ids[place] is None
        and len(entry.raw) <= packs.MAX_PACK_BYTES
    ]
    yield from namespace.ensure(queue, kind, options)
    if len(entries) == 1 and inside and session is None:
        batch = partial(_insert_each, queue, kind, codec.name)
        size = len(entries[0].raw)
        key = ("insert packs", queue, codec.name)
        answer = yield from Coalesce(key, entries[0], batch, size=size, threads=True)
        if isinstance(answer, QueueError):
            raise answer
        return [answer]
    ordinary = sorted(set(range(len(entries))) - set(inside))
    packed = yield from _packed(queue, kind, codec.name, now, [entries[place] for place in inside])
    documents = given.only(ordinary).documents(queue, kind, codec.name, now, when)
    ids: dict[int, Id | None] = dict(zip(inside, chain(*packed.ids), strict=True))
    ids |= {place: each["_id"] for place, each in zip(ordinary, documents, strict=True)}
    unknown = [id for _, id in sorted(ids.items()) if id is not None]
    try:
        failed = [each for each in (yield from _insert(queue, packed, now, session)) if each]
        for error in sorted(failed, key=lambda each: not isinstance(each, Unavailable)):
            raise error
        own = {id for id in given.ids if id is not None}
        entered = yield from _enter(queue, kind, documents, own, how)
    except Unavailable as error:
        raise Unavailable(str(error), ids=unknown) from error
    ids |= zip(ordinary, entered, strict=True)
    return [id for _, id in sorted(ids.items())]


def _enter(
    queue: str,
    kind: Kind,
    documents: Sequence[Document],
    own: Set[Id],
    how: PushOptions,
) -> Plan[list[Id | None]]:
    """Write ordinary messages. An id that belongs to a stored pack names a message of it.

    ``own``: the ids that the caller chose.
    """
    if not documents:
        return []
    session = how.get("session")
    ids: list[Id] = [each["_id"] for each in documents]
    chosen = [id for id in ids if id in own]
    there, foreign = yield from _in_stored_packs(queue, chosen, session)
    kept_out = {*there, *foreign}
    rest = [each for each in documents if each["_id"] not in kept_out]
    entered: list[Id | None] = []
    if rest:
        duplicate = how.get("on_duplicate", "ignore")
        encoded = list(map(encode, rest))
        entered = yield from enter(queue, kind, rest, encoded, own, duplicate, session)
    raise_foreign_ids(queue, foreign)
    remaining = iter(entered)
    return [id if id in there else next(remaining) for id in ids]


def _in_stored_packs(
    queue: str, ids: Sequence[Id | None], session: object
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
            yield from keep_out({"_id": pack}, session)
        fields = {"q": 1, "trail": 1, **packs.INDEX_FIELDS}
        for each in (yield from find_usable(packs.packs_of(pack), fields, session)):
            found = {id for id, place in members if packs.index_in(each, place) is not None}
            if found and (MARK in each or (yield from _is_durable(each, session))):
                (there if was_in(queue, each) else foreign).update(found)
    return frozenset(there), [id for id in ids if id in foreign - there]


def _is_durable(document: Document, session: object) -> Plan[bool]:
    """Wait until no fail-over can undo what was read. Return False if one just did."""
    if session is not None:
        return True
    return bool((yield from Update({"_id": document["_id"]}, NOTHING, majority=True)).matched)


class _Packed(NamedTuple):
    """Documents to insert, and the ids of the messages in each."""

    documents: list[RawBSONDocument]
    ids: list[list[Id]]


def _packed(
    queue: str,
    kind: Kind,
    type_name: str | None,
    now: datetime,
    entries: Sequence[RawBSONDocument],
) -> Plan[_Packed]:
    """Return messages as packs. One alone is an ordinary document."""
    packed = _Packed([], [])
    if not entries:
        return packed
    shape = yield from QueueShape(queue)
    size = shape.get("pack", DEFAULT_PACK)
    most = size if isinstance(size, int) and 0 < size <= MAX_PACK else DEFAULT_PACK
    for some in packs.chunks(entries, [len(each.raw) for each in entries], most):
        id = ObjectId()
        if len(some) == 1:
            entry = some[0]
            alone = new_document(
                queue, kind, type_name, now, now, entry["p"], entry.get("h"), None, id
            )
            packed.documents.append(encode(alone))
            packed.ids.append([id])
            continue
        entering = kind.entering(queue, now)
        packed.documents.append(packs.new_pack(id, entering, now, type_name, some))
        name = packs.naming({"_id": id, "w": packs.DIGITS})  # to read it would decode its messages
        packed.ids.append(list(map(name, range(len(some)))))
    return packed


def _insert_each(
    queue: str, kind: Kind, type_name: str | None, entries: Sequence[RawBSONDocument]
) -> Plan[list[Id | QueueError]]:
    """Insert the messages of several callers. Return each id, or why it is not acknowledged."""
    now = yield from ServerTime()
    packed = yield from _packed(queue, kind, type_name, now, entries)
    errors = yield from _insert(queue, packed, now, None)
    answers: list[Id | QueueError] = []
    for error, ids in zip(errors, packed.ids, strict=True):
        for id in ids:
            lost = isinstance(error, Unavailable)
            answers.append(Unavailable(str(error), ids=[id]) if lost else error or id)
    return answers


def _insert(
    queue: str, packed: _Packed, now: datetime, session: object
) -> Plan[list[QueueError | None]]:
    """Insert documents. Return for each why it is not acknowledged, or None."""
    if not packed.documents:
        return []
    try:
        failures = yield from Insert(packed.documents, session=session)
    except Unavailable as error:
        return [error] * len(packed.documents)
    errors: list[QueueError | None] = [None] * len(packed.documents)
    for failure in failures:
        errors[failure.place] = failure.error
    if len(failures) < len(errors):
        yield from Signal(queue, now, session)
    return errors
