"""Writing new documents, and finding out why the unique indexes reject some of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from bson.raw_bson import RawBSONDocument

from pyqueue.backends.hidden import ENDED, HANDED, MARK, copy_filter, is_copy, is_open, open_filter
from pyqueue.backends.transitions import hidden_queue
from pyqueue.clock import BAND
from pyqueue.documents import invalid_fields, without_fields
from pyqueue.errors import DuplicateKey, InvalidMessage, Unavailable, first_ten
from pyqueue.messages import Id
from pyqueue.requests import (
    MAX_LOCKABLE,
    Coalesce,
    Delete,
    Document,
    Filter,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
    WriteFailure,
)

#: The ``q`` of a placeholder that keeps a document out, and how long it stays: until no insert of
#: the document can still arrive.
_KEPT_OUT: Final = "~kept-out"
_KEPT_OUT_FOR: Final = timedelta(days=1)

#: The push of one of several callers: the queue, the ``when``, the encoded document.
Pushed = tuple[str, datetime, RawBSONDocument]


@dataclass(slots=True)
class Written:
    """The outcome of writing pushed documents."""

    #: The id of each document, or None if it was kept out.
    ids: list[Id | None]
    #: The positions of documents whose chosen id belongs to a message that is or was in the queue.
    known: list[int] = field(default_factory=list)
    #: The positions of documents that were kept out because their key was taken.
    key_taken: list[int] = field(default_factory=list)
    #: The ids that belong to messages that were never in this queue.
    foreign: list[Id] = field(default_factory=list)
    #: The positions of documents whose chosen id was taken at first and has become free since.
    free: list[int] = field(default_factory=list)


class Entries(NamedTuple):
    """Documents that enter a queue together."""

    queue: str
    documents: Sequence[Document]
    #: Their encoded forms.
    encoded: Sequence[RawBSONDocument]
    #: The ids that the caller chose.
    given: Collection[Id] = ()
    #: The session of the caller's transaction, or None.
    session: object = None

    def only(self, place: int) -> Entries:
        """Return these entries with only the document at this place."""
        one = slice(place, place + 1)
        return self._replace(documents=self.documents[one], encoded=self.encoded[one])


def write(entries: Entries) -> Plan[Written]:
    """Write the documents that the unique indexes accept."""
    if entries.session is None and len(entries.encoded) == 1:
        return _insert(entries)  # its batch sends the signal
    return _write_several(entries)


def write_new(queue: str, document: Document, encoded: RawBSONDocument) -> Plan[Id | None]:
    """Insert a document with a new id and no key. Concurrent callers share the command.

    Returns:
        The id, or None if the document was not written because another document has the id.
    """
    try:
        failure = yield from _with_callers(queue, document, encoded)
    except Unavailable as error:
        raise unknown_outcome(error, [document]) from error
    if failure is None:
        id: Id = document["_id"]
        return id
    _raise_unless_taken(failure, [document])
    return None


def _write_several(entries: Entries) -> Plan[Written]:
    chosen = entries.given or any("key" in document for document in entries.documents)
    if entries.session is not None and chosen:
        written = yield from _upsert_each(entries)
    else:
        written = yield from _insert(entries)
    yield from signal_written(entries, written)
    return written


def signal_written(entries: Entries, written: Written) -> Plan[None]:
    """Wake consumers if at least one document was written."""
    if any(id is not None for id in written.ids):
        earliest = min(each["when"] for each in entries.documents)
        yield from Signal(entries.queue, earliest, entries.session)


def write_one(entry: Entries) -> Plan[Written]:
    """Write one document without a key. Inside a transaction, wake no consumers."""
    return (yield from (_insert if entry.session is None else _upsert_each)(entry))


def _insert(entries: Entries) -> Plan[Written]:
    # Only an id that the caller chose may have become free in between.
    return (_insert_or_repeat if entries.given else _insert_once)(entries)


def _insert_or_repeat(entries: Entries) -> Plan[Written]:
    """Insert documents. Retry each document whose id was taken and has become free since."""
    written = yield from _insert_once(entries)
    try:
        for place in written.free:
            alone = yield from _insert_once(entries.only(place))
            written.ids[place] = alone.ids[0]
            written.known += [place] if alone.known else []
            written.foreign += alone.foreign
            if not alone.key_taken:  # only the id was taken, not the key
                written.key_taken.remove(place)
    except Unavailable as error:  # the caller repeats the whole push
        raise unknown_outcome(error, entries.documents) from error
    return written


def _insert_once(entries: Entries) -> Plan[Written]:
    documents = entries.documents
    written = Written([document["_id"] for document in documents])
    try:
        if entries.session is None and len(documents) == 1:
            failure = yield from _insert_with_callers(entries)
            failures = [] if failure is None else [failure]
        else:
            failures = yield from Insert(entries.encoded, session=entries.session)
    except Unavailable as error:
        raise unknown_outcome(error, documents) from error
    for failure in failures:
        _raise_unless_taken(failure, documents)
    if failures:
        yield from _judge(entries, failures, written)
    return written


def _raise_unless_taken(failure: WriteFailure, documents: Sequence[Document]) -> None:
    """Raise the error of a failure, unless a unique index kept the document out."""
    if isinstance(failure.error, Unavailable):
        raise unknown_outcome(failure.error, documents) from failure.error
    if failure.field is None:
        raise failure.error


def _insert_with_callers(entry: Entries) -> Coalesce[Pushed, WriteFailure | None]:
    """Return the request to insert a document along with the documents of other callers."""
    (document,), (raw,) = entry.documents, entry.encoded
    call = _with_callers(entry.queue, document, raw)
    if entry.given or "key" in document:
        # An open transaction may hold the key or the id. Then only this call waits for it.
        call.key, call.alone = ("insert", entry.queue), True
        call.max_in_flight, call.threads = MAX_LOCKABLE, False
    return call


def _with_callers(
    queue: str, document: Document, encoded: RawBSONDocument
) -> Coalesce[Pushed, WriteFailure | None]:
    item = (queue, document["when"], encoded)
    return Coalesce("insert", item, _insert_each, size=len(encoded.raw), threads=True)


def _judge(entries: Entries, failures: Sequence[WriteFailure], written: Written) -> Plan[None]:
    """Record in ``written`` why each of these documents was kept out.

    If a document violates two indexes, the server names only one. So a document whose id the queue
    knows counts as a repeated push, even if the server names the index on keys.
    """
    refused: list[Id] = [entries.documents[failure.place]["_id"] for failure in failures]
    clashing = [id for id in refused if id in entries.given]
    stored: dict[Id, bool] = {}  # False: in another queue
    if clashing:
        stored = yield from ids_of_this_queue(entries.queue, clashing, entries.session)
    for failure, id in zip(failures, refused, strict=True):
        place, by_id = failure.place, failure.field == "_id"
        if stored.get(id):
            written.known.append(place)
            continue
        written.ids[place] = None
        if by_id and id in stored:
            written.foreign.append(id)
            continue
        written.key_taken.append(place)
        if by_id and id in entries.given:  # no document has the id any more
            written.free.append(place)


def unknown_outcome(error: Unavailable, documents: Iterable[Document]) -> Unavailable:
    """Return an error with this text and the ids of documents that may or may not be stored."""
    return Unavailable(str(error), ids=[document["_id"] for document in documents])


def _insert_each(items: Sequence[Pushed]) -> Plan[list[WriteFailure | None]]:
    """Insert the documents of several callers. Wake the consumers of each queue once."""
    answers: list[WriteFailure | None] = [None] * len(items)
    try:
        failures = yield from Insert([document for _, _, document in items])
    except InvalidMessage as error:
        if len(items) == 1:
            return [WriteFailure(0, None, error)]
        # The server refused the whole command. Halve it to find the document that is at fault.
        half = len(items) // 2
        first = yield from _insert_each(items[:half])
        return [*first, *(yield from _insert_each(items[half:]))]
    for failure in failures:
        answers[failure.place] = failure._replace(place=0)
    earliest: dict[str, datetime] = {}
    for (queue, when, _), answer in zip(items, answers, strict=True):
        if answer is None and when < earliest.get(queue, BAND):
            earliest[queue] = when
    for queue, when in earliest.items():
        yield from Signal(queue, when)
    return answers


def ids_of_this_queue(
    queue: str, ids: Sequence[Id], session: object = None
) -> Plan[dict[Id, bool]]:
    """Return, for each id that is stored, whether its message is or was in this queue."""
    found = yield from find_usable({"_id": {"$in": list(ids)}}, {"q": 1, "trail": 1}, session)
    return {each["_id"]: was_in(queue, each) for each in found}


def was_in(queue: str, document: Document) -> bool:
    """Return whether a stored document is or was in this queue."""
    if MARK in document:
        return False  # a hidden copy, which becomes a message only if its handover completes
    trail = without_fields(document, invalid_fields(document)).get("trail", ())
    passed = {document.get("q"), *(stop["q"] for stop in trail)}
    # A message that is being handed over is as good as finished.
    return not passed.isdisjoint((queue, hidden_queue(queue)))


def find_usable(match: Filter, fields: Document, session: object) -> Plan[list[Document]]:
    """Find documents. First delete hidden copies that an interrupted handover left behind."""
    fields = {**fields, "q": 1, "when": 1, MARK: 1}
    found = yield from Find(match, fields, session=session)
    copies = [each for each in found if is_copy(each)]
    for each in copies:
        yield from _delete_abandoned(each, session)
    return (yield from Find(match, fields, session=session)) if copies else found


def _delete_abandoned(copy: Document, session: object) -> Plan[None]:
    """Delete a hidden copy if its handover is not complete, and no holder can complete it any more.

    An open source has no holder, so it is deleted; the push that inserted the source tries again.
    Otherwise, an update at majority makes sure that no holder can act: the update finds the source
    under another token, or stores a placeholder if the source is missing. After that, no fail-over
    can bring the token back.
    """
    token, source, listed = copy[MARK]["token"], copy[MARK].get("source"), f"{HANDED}.h"
    held = {"_id": source, "$or": [{"token": token}, {listed: token}]}
    if source is None:
        return
    fields = dict.fromkeys(("q", "token", HANDED, ENDED, MARK), 1)
    for each in (yield from Find(held, fields, limit=1, session=session)):
        if not is_open(each):
            return
        yield from Delete(open_filter(each), majority=session is None, session=session)
    lost = {"_id": source, "token": {"$ne": token}, listed: {"$ne": token}}
    try:
        yield from store_placeholder(lost, session)
    except DuplicateKey:
        if session is not None:
            raise
        return
    yield from Delete(copy_filter(copy), session=session)


def store_placeholder(match: Filter, session: object) -> Plan[None]:
    """Store a placeholder that blocks an _id, unless a stored document matches the filter.

    Args:
        match: A filter with the _id, and conditions on the stored document that has the _id.
        session: The session of the caller's transaction, or None.

    Raises:
        DuplicateKey: A stored document has this _id, but does not match.
    """
    now = yield from ServerTime()
    placeholder = {"q": _KEPT_OUT, "processed": now, "expires": now + _KEPT_OUT_FOR}
    put = {"$setOnInsert": placeholder}
    yield from Update(match, put, upsert=True, majority=session is None, session=session)


def key_taken(queue: str, keys: list[str], written: Sequence[Id | None] = ()) -> DuplicateKey:
    """Return the error for messages whose keys are taken."""
    text = f"queue {queue!r} has messages with the keys {first_ten(keys)}"
    return DuplicateKey(text, keys=keys, written=written)


def id_taken(
    queue: str, ids: list[Id], keys: Sequence[str] = (), written: Sequence[Id | None] = ()
) -> DuplicateKey:
    """Return the error for messages whose ids are or were in the queue."""
    text = f"queue {queue!r} has, or had, messages with the ids {first_ten(ids)}"
    return DuplicateKey(text, ids=ids, keys=keys, written=written)


def raise_foreign_ids(
    queue: str, ids: list[Id], keys: Sequence[str] = (), written: Sequence[Id | None] = ()
) -> None:
    """Raise DuplicateKey if there are ids of messages that were never in this queue."""
    if ids:
        raise DuplicateKey(
            f"ids: {first_ten(ids)} belong to messages that were never in queue {queue!r}",
            ids=ids,
            keys=keys,
            written=written,
        )


def _upsert_each(entries: Entries) -> Plan[Written]:
    """Write documents by upserts, because a duplicate key error would abort the transaction."""
    queue, given, session = entries.queue, entries.given, entries.session
    written = Written([])
    for place, document in enumerate(entries.documents):
        id = document["_id"]
        stored = (yield from ids_of_this_queue(queue, [id], session)) if id in given else {}
        kept_out = id in stored and not stored[id]
        if kept_out:
            written.foreign.append(id)
        elif id not in stored:
            match = key_filter(queue, document) if "key" in document else {"_id": id}
            rest = {name: value for name, value in document.items() if name not in match}
            change = yield from Update(match, {"$setOnInsert": rest}, upsert=True, session=session)
            kept_out = change.upserted is None
            written.key_taken += [place] if kept_out else []
        written.ids.append(None if kept_out else id)
    return written


def key_filter(queue: str, document: Document) -> dict[str, object]:
    """Return the filter that matches the message, live or finished, with this document's key."""
    return {"q": queue, "key": document["key"]}


def live_filter(queue: str, document: Document) -> dict[str, object]:
    """Return the filter that matches the live message with the key of this document."""
    return {**key_filter(queue, document), "processed": {"$exists": False}}
