"""Push: how messages enter a queue.

A push without a message key or an id is a plain insert. Concurrent single pushes are coalesced into
one insert; pushes with a key or an id are not, because a transaction may hold the key or the id. A
unique index keeps out a second message with the same key. A push that is repeated with the same id
adds no second message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends import expiring, inserting, namespace, results, transitions, uniqueness
from pyqueue.backends.inserting import Entries, Written, ids_of_this_queue, live_filter
from pyqueue.backends.kind import Kind, require
from pyqueue.backends.options import Options, QueueTerms
from pyqueue.clock import BAND
from pyqueue.errors import ConfigurationError, DuplicateKey, Unavailable
from pyqueue.facts import Gather, Keep
from pyqueue.messages import Id
from pyqueue.payloads import Codec, each_of, encode
from pyqueue.requests import (
    Document,
    Filter,
    Find,
    FindAndModify,
    Plan,
    ServerTime,
    UpdateDocument,
)

V = TypeVar("V")


class PushOptions(TypedDict, total=False):
    """The options of a push; see ``Queue.push_many``."""

    delay: float | timedelta | None
    at: datetime | None
    #: The ``delay`` and the ``at`` of each message, in place of one pair for all messages.
    starts: Sequence[tuple[Any, Any]]
    headers: Mapping[str, Any] | None
    #: The headers of each message, in place of ``headers``.
    labels: Sequence[Mapping[str, Any] | None]
    keys: Sequence[str | None] | None
    on_duplicate: str
    ids: Sequence[Id | None] | None
    priorities: Sequence[int | None] | None
    groups: Sequence[str | None] | None
    #: The ``result`` and the ``unique_for`` of each message, and how it is kept after its end.
    results: Sequence[Any]
    uniques: Sequence[Any]
    keeps: Sequence[Keep | None]
    #: After how many seconds each message expires.
    expires: Sequence[Any]
    gathers: Sequence[Gather | None]
    session: object


def push(
    queue: str,
    kind: Kind,
    codec: Codec[Any],
    options: Options,
    payloads: Iterable[Any],
    **how: Unpack[PushOptions],
) -> Plan[list[Id | None]]:
    """Push messages. Return their ids, with None for each message that a taken key kept out."""
    given = checked(queue, kind, codec, payloads, how)
    if not given.values:
        return []
    now = yield from ServerTime()
    documents = given.documents(queue, kind, codec.name, now)
    encoded = each_of(encode, documents)
    options = yield from given.noted(queue, kind, options)
    yield from namespace.ensure(queue, kind, options, given.priorities)
    chosen: Collection[Id] = ()
    if how.get("ids") is not None:
        chosen = frozenset(id for id in given.ids if id is not None)
    duplicate, session = how.get("on_duplicate", "ignore"), how.get("session")
    entries = Entries(queue, documents, encoded, chosen, session)
    return (yield from enter(kind, entries, duplicate))


def push_one(terms: QueueTerms, payload: Any, *, is_known: bool = False) -> Plan[list[Id | None]]:
    """Push one message without options, as most pushes do. ``is_known``: see ``receive``."""
    queue, kind = terms.queue, terms.kind
    content = Content(terms.codec.name, terms.codec.dump(payload))
    now: datetime = yield ServerTime()
    document = new_document(queue, kind, now, now, content)
    raw = encode(document)
    if not is_known:
        yield from namespace.ensure(queue, kind, terms.options, (None,))
    return [(yield from inserting.write_new(queue, document, raw))]


class Checked(NamedTuple):
    """The checked content of a push: the stored payloads, and the options of each message."""

    values: list[Any]
    headers: list[Mapping[str, Any] | None]
    keys: list[str | None]
    ids: list[Id | None]
    priorities: list[int | None]
    groups: list[str | None]
    #: The ``delay`` and the ``at`` of each message.
    starts: list[tuple[Any, Any]]
    keeps: list[Keep | None]
    #: After how many seconds each message expires.
    expires: list[float | None]
    gathers: list[Gather | None]

    def noted(self, queue: str, kind: Kind, options: Options) -> Plan[Options]:
        """Add the options that all users of the queue must know because of these messages.

        Returns:
            The options to pass when the record of the queue is created or checked.
        """
        if self.expires.count(None) < len(self.expires):
            options = yield from expiring.noted(queue, kind, options)
        if any(keep is not None and keep.unique is not None for keep in self.keeps):
            options = uniqueness.noted(options)
        return options

    def only(self, places: Sequence[int]) -> Checked:
        """Return only the content of the messages at these places."""
        chosen: Any = ([values[place] for place in places] for values in self)
        return Checked(*chosen)

    def documents(
        self, queue: str, kind: Kind, type_name: str | None, now: datetime
    ) -> list[Document]:
        """Return the documents of the messages."""
        documents: list[Document] = []
        # This loop is cheap for one message.
        for value, labels, key, id, level, turn, start, keep, expires_s, of in zip(
            *self, strict=True
        ):
            when = arguments.starting(now, *start)
            dies = None if expires_s is None else expiring.instant(now, when, expires_s)
            content = Content(
                type_name,
                value,
                labels,
                key,
                id,
                priority=level,
                group=turn,
                keep=keep,
                dies=dies,
                gather=of,
            )
            documents.append(new_document(queue, kind, now, when, content))
        return documents


def checked(
    queue: str,
    kind: Kind,
    codec: Codec[Any],
    payloads: Iterable[Any],
    how: PushOptions,
) -> Checked:
    """Check the arguments of a push; see ``Queue.push_many``."""
    if not isinstance(payloads, list):
        payloads = arguments.payloads(payloads, "push()")
    none: Any = [None] * len(payloads)
    if not how:
        more: Any = {"groups": none, "keeps": none, "expires": none, "gathers": none}
        starts = [(None, None)] * len(payloads)
        values = each_of(codec.dump, payloads)
        return Checked(values, none, none, none, none, starts=starts, **more)
    arguments.one_of(
        "on_duplicate", how.get("on_duplicate", "ignore"), ("ignore", "replace", "error")
    )
    arguments.session(how.get("session"))
    labels = arguments.each_headers(how.get("headers"), how.get("labels"), len(payloads))
    keys = _one_each("keys", how.get("keys"), len(payloads), arguments.key)
    ids: list[Id | None] = _one_each("ids", how.get("ids"), len(payloads), arguments.identity)
    if how.get("keys") is not None and any(keys):
        require(kind, queue, "keys", "key")
    priorities = _one_each("priorities", how.get("priorities"), len(payloads), arguments.priority)
    if how.get("priorities") is not None and any(each is not None for each in priorities):
        require(kind, queue, "priority")
    groups = _one_each("groups", how.get("groups"), len(payloads), arguments.ordered_group)
    if how.get("groups") is not None and any(groups):
        require(kind, queue, "group")
    starts = _starts(how, len(payloads))
    values = each_of(codec.dump, payloads)
    keeps, gathers = list(how.get("keeps", none)), list(how.get("gathers", none))
    uniqueness.check(keeps, keys)
    expires = _one_each("expires", how.get("expires"), len(payloads), expiring.length)
    rest: dict[str, Any] = {"groups": groups, "starts": starts, "keeps": keeps}
    rest |= {"expires": expires, "gathers": gathers}
    return Checked(values, labels, keys, ids, priorities, **rest)


def _starts(how: PushOptions, number: int) -> list[tuple[Any, Any]]:
    """Return the ``delay`` and the ``at`` of each message.

    An invalid instant is refused before the first request to the server.
    """
    same: tuple[Any, Any] = (how.get("delay"), how.get("at"))
    for start in how.get("starts", (same,)):
        arguments.starting(BAND, *start)
    return list(how.get("starts", (same,) * number))


def enter(kind: Kind, entries: Entries, on_duplicate: str) -> Plan[list[Id | None]]:
    """Write documents into a queue.

    Args:
        kind: The kind of the queue.
        entries: The documents, and the queue that they enter.
        on_duplicate: The action if a key is taken: "ignore", "replace" or "error".

    Returns:
        Their ids, with None for each document that a taken key kept out.

    Raises:
        DuplicateKey: An id belongs to a message that was never in this queue, or a key is taken and
            ``on_duplicate`` is "error". All other documents are written.
    """
    if on_duplicate == "replace" and any("key" in document for document in entries.documents):
        written = yield from _replace_each(kind, entries)
    else:
        written = yield from uniqueness.write(entries)
    places = written.key_taken if on_duplicate == "error" else ()
    clashing = [str(entries.documents[place].get("key")) for place in places]
    inserting.raise_foreign_ids(entries.queue, written.foreign, clashing, written.ids)
    if clashing:
        raise inserting.key_taken(entries.queue, clashing, written.ids)
    return written.ids


def enter_by_id(kind: Kind, entries: Entries, *, replacing: bool) -> Plan[list[Id | None]]:
    """Write documents with chosen ids into a queue. A known id is not taken for a repeated push.

    Args:
        kind: The kind of the queue.
        entries: The documents, and the queue that they enter.
        replacing: Whether a document overwrites the live message with its key, or else the message
            with its id; see ``replace_by_id``. If false, a taken key or id is an error.

    Returns:
        Their ids, with None for each document whose key a finished message keeps.

    Raises:
        DuplicateKey: An id belongs to a message that was never in this queue, or an id or a key is
            taken and ``replacing`` is false. All other documents are written.
    """
    queue, documents = entries.queue, entries.documents
    if replacing:
        written = yield from _replace_each_by_id(kind, entries)
    else:
        given = frozenset(document["_id"] for document in documents)
        written = yield from uniqueness.write(entries._replace(given=given))
    keys = [str(documents[place].get("key")) for place in written.key_taken]
    known = set(written.known)
    new = [id for place, id in enumerate(written.ids) if place not in known]
    inserting.raise_foreign_ids(queue, written.foreign, keys, new)
    if written.known:
        raise inserting.id_taken(
            queue, [documents[place]["_id"] for place in written.known], keys, new
        )
    if keys:
        raise inserting.key_taken(queue, keys, new)
    return written.ids


def _one_each(
    name: str, given: Iterable[object] | None, length: int, check: Callable[[object], V]
) -> list[V | None]:
    """Return a checked value, or None, for each of ``length`` payloads."""
    if given is None:
        return [None] * length
    if isinstance(given, (str, bytes, Mapping, Set)) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"{name}: expected a list with one value (or None) per payload, found "
            f"{type(given).__name__}"
        )
    values = list(given)
    if len(values) != length:
        raise ConfigurationError(
            f"{name}: found {len(values)} values for {length} payloads; pass one value (or None) "
            "per payload"
        )
    return [None if value is None else check(value) for value in values]


class Content(NamedTuple):
    """The part of a message that its producer gives, in its stored form."""

    #: The name of the payload's model, or None if it has none.
    type: str | None
    payload: Any
    headers: Mapping[str, Any] | None = None
    key: str | None = None
    id: Id | None = None
    priority: int | None = None
    group: str | None = None
    keep: Keep | None = None
    #: When the message expires.
    dies: datetime | None = None
    gather: Gather | None = None


def new_document(
    queue: str, kind: Kind, now: datetime, when: datetime, content: Content
) -> Document:
    """Return the document of a new message."""
    document: Document = {
        "_id": ObjectId() if content.id is None else content.id,
        **kind.entering(queue, when, content.priority, content.group),
        "pushed": now,
    }
    if content.type is not None:
        document["type"] = content.type
    if content.headers:
        document["headers"] = content.headers
    if content.key is not None:
        document["key"] = content.key
    if content.keep is not None:
        document |= content.keep.stored()
    if content.dies is not None:
        document["dies"] = content.dies
    if content.gather is not None:
        document["gather"] = content.gather.stored()
    document["payload"] = content.payload
    return document


def _replace_each(kind: Kind, entries: Entries) -> Plan[Written]:
    """Overwrite the live messages that have these documents' keys, or insert the documents."""
    written = Written([])
    try:
        for place, document in enumerate(entries.documents):
            if "key" in document:
                id = yield from replace(kind, entries.only(place), written.foreign)
                written.ids.append(id)
                continue
            alone = yield from inserting.write_one(entries.only(place))
            written.ids += alone.ids
            written.foreign += alone.foreign
    except Unavailable as error:
        raise inserting.unknown_outcome(error, entries.documents) from error
    yield from inserting.signal_written(entries, written)
    return written


def replace(kind: Kind, entry: Entries, foreign: list[Id]) -> Plan[Id | None]:
    """Overwrite the live message that has the key of one document, or insert the document.

    Args:
        kind: The kind of the queue.
        entry: The document, and the queue that it enters.
        foreign: Gets the document's id if a message that was never in this queue has the id.

    Returns:
        The id of the message, or None if it was not written, because ``foreign`` got its id, or
        because a finished message keeps its key.
    """
    (document,) = entry.documents
    queue, session = entry.queue, entry.session
    match = live_filter(queue, document)
    if session is not None and (yield from uniqueness.would_abort(queue, document, session)):
        return None
    id: Id = document["_id"]
    if id in entry.given and not (yield from Find(match, {"_id": 1}, limit=1, session=session)):
        stored = yield from ids_of_this_queue(queue, [id], session)
        if stored.get(id):
            return id  # the same push again; its message has finished or moved on
        if id in stored:
            foreign.append(id)
            return None
    overwrite = FindAndModify(
        match, _overwriting(kind, document, match), upsert=True, before=True, session=session
    )
    while True:  # another round only if another writer came first
        try:
            former = yield from overwrite
        except DuplicateKey:
            if session is not None:
                raise
            stored = yield from ids_of_this_queue(queue, [id])
            if stored.get(id):
                return id  # the message that had the key is finished, and this id is known
            if id in stored:
                foreign.append(id)
                return None
            if (yield from uniqueness.keeps_out(queue, document)):
                return None
        else:
            return id if former is None else (yield from _let_go(queue, kind, former, session))


def _replace_each_by_id(kind: Kind, entries: Entries) -> Plan[Written]:
    """Overwrite the live messages with these keys or ids, or insert the documents."""
    queue, documents = entries.queue, entries.documents
    written = Written([])
    stored = yield from ids_of_this_queue(queue, [each["_id"] for each in documents])
    try:
        for document in documents:  # one by one: the messages of a group keep their order
            if stored.get(document["_id"]) is False:
                written.foreign.append(document["_id"])
                continue
            written.ids.append((yield from replace_by_id(queue, kind, document, written.foreign)))
    except Unavailable as error:
        raise inserting.unknown_outcome(error, documents) from error
    yield from inserting.signal_written(entries, written)
    return written


def replace_by_id(queue: str, kind: Kind, document: Document, foreign: list[Id]) -> Plan[Id | None]:
    """Overwrite the live message that has this key, or else this id, or insert the document.

    A message that has left the queue, or is in its history, stays unchanged.

    Args:
        queue: The name of the queue.
        kind: The kind of the queue.
        document: The new message.
        foreign: Gets the document's id if a document of another queue has the id.

    Returns:
        The id of the message; None if ``foreign`` got the id of the document, or if a finished
        message keeps the key.
    """
    id: Id = document["_id"]
    with_id: Filter = {"_id": id, "q": queue, "processed": {"$exists": False}}
    while True:  # another round only if another writer came first
        try:
            former = yield from _overwrite_live(queue, kind, document, with_id)
        except DuplicateKey:
            stored = yield from ids_of_this_queue(queue, [id])
            if id in stored and not stored[id]:
                foreign.append(id)
                return None
            if id in stored and not (yield from Find(with_id, {"_id": 1}, limit=1)):
                return id  # its message has finished or moved on
            if (yield from uniqueness.keeps_out(queue, document)):
                return None
        else:
            return id if former is None else (yield from _let_go(queue, kind, former, None))


def _overwrite_live(
    queue: str, kind: Kind, document: Document, with_id: Filter
) -> Plan[Document | None]:
    """Overwrite the live message with the key or the id of a document, or insert the document.

    Returns:
        The former message, or None if the document was inserted.
    """
    former = None
    if "key" in document:
        match = live_filter(queue, document)
        update = _overwriting(kind, document, match)
        former = yield from FindAndModify(match, update, before=True)
    if former is None:
        update = _overwriting(kind, document, with_id)
        former = yield from FindAndModify(with_id, update, upsert=True, before=True)
    return former


def _overwriting(kind: Kind, document: Document, match: Filter) -> UpdateDocument:
    """Return the update that overwrites the message that ``match`` finds, or inserts a message."""
    # An overwritten message keeps these fields.
    once = {name: document[name] for name in ("_id", "pushed") if name not in match}
    fresh = {name: document[name] for name in document if name not in once and name not in match}
    # Fields of an earlier queue with priorities or groups are removed, too.
    stale = (
        *kind.held_fields,
        *kind.stay_fields,
        *transitions.ENDS,
        "headers",
        "type",
        "key",
        "priority",
        "last_group",
        "limited",
        "keep",
        "gather",
    )
    removed = (name for name in stale if name not in fresh and name not in match)
    return {"$set": fresh, "$unset": transitions.unset(*removed), "$setOnInsert": once}


def _let_go(queue: str, kind: Kind, former: Document, session: object) -> Plan[Id]:
    """Release what waited for an overwritten message. Return the id of that message."""
    yield from kind.ended(queue, [former], session)
    yield from results.announce([Gather.of(former.get("gather"))], session)
    replaced: Id = former["_id"]
    return replaced
