"""Packs: how messages enter a queue.

The messages of one call share packs, and so do concurrent single pushes. A message with a key, a
chosen id, a later time, an expiry, a result or a gather becomes an ordinary message. So does a
message that is too large, was pushed alone, or enters other queues, too; see ``also``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import datetime
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Unpack

from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.kind import DEFAULT_PACK
from pyqueue.backends.bucket.packed_ids import in_stored_packs
from pyqueue.backends.inserting import Entries, raise_foreign_ids
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import Options, QueueShape
from pyqueue.backends.pushing import Checked, Content, PushOptions, checked, enter, new_document
from pyqueue.errors import DuplicateKey, QueueError, Unavailable
from pyqueue.messages import MAX_PACK, Id
from pyqueue.payloads import Codec, each_of, encode
from pyqueue.requests import Coalesce, Document, Insert, Plan, ServerTime, Signal

#: The key, id, result, expiry and gather of a message that may share a pack: it has none.
_NO_OPTIONS: Final = (None,) * 5


def push(
    queue: str,
    kind: Kind,
    codec: Codec[Any],
    options: Options,
    payloads: Iterable[Any],
    **how: Unpack[PushOptions],
) -> Plan[list[Id | None]]:
    """Push messages. Return their ids, with None for each message whose key was already taken."""
    given = checked(queue, kind, codec, payloads, how)
    if not given.values:
        return []
    now = yield from ServerTime()
    rows = zip(given.values, given.headers, strict=True)
    bodies = [{"p": value, "h": labels} if labels else {"p": value} for value, labels in rows]
    entries = each_of(encode, bodies)
    packable = _packable(given, entries, now)
    ordinary = sorted(set(range(len(entries))) - set(packable))
    documents = given.only(ordinary).documents(queue, kind, codec.name, now) if ordinary else []
    options = yield from given.noted(queue, kind, options)
    yield from namespace.ensure(queue, kind, options)
    if len(entries) == 1 and packable and how.get("session") is None:
        return [(yield from _push_one(queue, kind, codec.name, entries[0]))]
    some = [entries[place] for place in packable]
    packed = yield from new_packs(Entering(queue, kind, codec.name, now), some)
    id_at: dict[int, Id | None] = dict(zip(packable, chain(*packed.ids), strict=True))
    id_at.update(zip(ordinary, [each["_id"] for each in documents], strict=True))
    try:
        errors = yield from _insert(queue, packed, now, how.get("session"))
        _raise_first(errors)
        chosen = {id for id in given.ids if id is not None}
        entered = yield from _enter_ordinary(queue, kind, documents, chosen, how)
    except Unavailable as error:
        unknown = [id for _, id in sorted(id_at.items()) if id is not None]
        raise Unavailable(str(error), ids=unknown) from error
    except DuplicateKey as clash:
        clash.written += [id_at[place] for place in packable]
        raise
    id_at.update(zip(ordinary, entered, strict=True))
    return [id_at[place] for place in range(len(entries))]


def _packable(given: Checked, entries: Sequence[RawBSONDocument], now: datetime) -> list[int]:
    """Return the places of the messages that may share packs; see the module docstring."""
    later = {each for each in set(given.starts) if arguments.starting(now, *each) > now}
    own = (given.keys, given.ids, given.keeps, given.expires, given.gathers)
    options = list(zip(*own, strict=True))
    return [
        place
        for place, entry in enumerate(entries)
        if options[place] == _NO_OPTIONS
        and not (later and given.starts[place] in later)
        and len(entry.raw) <= packs.MAX_PACK_BYTES
    ]


def _push_one(queue: str, kind: Kind, type_name: str | None, entry: RawBSONDocument) -> Plan[Id]:
    """Push one message, in a pack shared with concurrent callers."""
    batch = partial(_insert_each, queue, kind, type_name)
    key = ("insert packs", queue, type_name)
    id_or_error = yield from Coalesce(key, entry, batch, size=len(entry.raw), threads=True)
    if isinstance(id_or_error, QueueError):
        raise id_or_error
    return id_or_error


def _raise_first(errors: Iterable[QueueError | None]) -> None:
    """Raise one of the errors, if any. An error that leaves the outcome unknown comes first."""
    failed = [each for each in errors if each is not None]
    for error in sorted(failed, key=lambda each: not isinstance(each, Unavailable)):
        raise error


def _enter_ordinary(
    queue: str,
    kind: Kind,
    documents: Sequence[Document],
    chosen: Set[Id],
    how: PushOptions,
) -> Plan[list[Id | None]]:
    """Write ordinary messages, except those whose ids already belong to messages in packs.

    Args:
        queue: The name of the queue.
        kind: The kind of the queue.
        documents: The documents of the messages.
        chosen: The ids that the caller chose.
        how: The options of the push.

    Returns:
        The id of each message, or None for a message whose key was already taken.
    """
    if not documents:
        return []
    session = how.get("session")
    ids: list[Id] = [each["_id"] for each in documents]
    known, foreign = yield from in_stored_packs(queue, [id for id in ids if id in chosen], session)
    kept_out = {*known, *foreign}
    rest = [each for each in documents if each["_id"] not in kept_out]
    entered: list[Id | None] = []
    if rest:
        duplicate = how.get("on_duplicate", "ignore")
        encoded = list(map(encode, rest))
        entries = Entries(queue, rest, encoded, chosen, session)
        entered = yield from enter(kind, entries, duplicate)
    raise_foreign_ids(queue, foreign, (), entered)
    remaining = iter(entered)
    # A message that is already in a pack was pushed before, with the same id.
    return [id if id in known else next(remaining) for id in ids]


class Entering(NamedTuple):
    """The properties shared by messages that enter a bucket together."""

    queue: str
    kind: Kind
    #: The name of the payload's model, or None if it has none.
    type_name: str | None
    now: datetime
    #: Further fields to store in each of their documents.
    more: Mapping[str, Any] = MappingProxyType({})


class NewPacks(NamedTuple):
    """Documents to insert, and the ids of the messages in each."""

    documents: list[RawBSONDocument]
    ids: list[list[Id]]


def new_packs(entering: Entering, entries: Sequence[RawBSONDocument]) -> Plan[NewPacks]:
    """Divide messages into packs. A message that is alone becomes an ordinary message."""
    packed = NewPacks([], [])
    if not entries:
        return packed
    queue, kind, type_name, now, more = entering
    shape = yield from QueueShape(queue)
    size = shape.get("pack", DEFAULT_PACK)  # other programs may have stored any value
    most = size if isinstance(size, int) and 0 < size <= MAX_PACK else DEFAULT_PACK
    for some in packs.chunks(entries, [len(each.raw) for each in entries], most):
        id = ObjectId()
        if len(some) == 1:
            entry = some[0]
            content = Content(type_name, entry["p"], entry.get("h"), id=id)
            alone = new_document(queue, kind, now, now, content)
            packed.documents.append(encode({**alone, **more}))
            packed.ids.append([id])
            continue
        fields = {**kind.entering(queue, now), **more}
        packed.documents.append(packs.new_pack(id, fields, now, type_name, some))
        name = packs.naming({"_id": id, "w": packs.DIGITS})  # reading the document would decode it
        packed.ids.append(list(map(name, range(len(some)))))
    return packed


def _insert_each(
    queue: str, kind: Kind, type_name: str | None, entries: Sequence[RawBSONDocument]
) -> Plan[list[Id | QueueError]]:
    """Insert the messages of several callers. Return for each message its id or its error."""
    now = yield from ServerTime()
    packed = yield from new_packs(Entering(queue, kind, type_name, now), entries)
    errors = yield from _insert(queue, packed, now, None)
    answers: list[Id | QueueError] = []
    for error, ids in zip(errors, packed.ids, strict=True):
        for id in ids:
            is_unknown = isinstance(error, Unavailable)
            answers.append(Unavailable(str(error), ids=[id]) if is_unknown else error or id)
    return answers


def _insert(
    queue: str, packed: NewPacks, now: datetime, session: object
) -> Plan[list[QueueError | None]]:
    """Insert documents. Return, for each document, None if it was inserted, else the error."""
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
