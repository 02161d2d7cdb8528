"""Bulk writes from many processes: append messages, or stage them and show all of them at once.

A staged message is a document whose ``q`` is not the name of a queue, so no consumer sees it. If
its writer dies, the TTL index removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from bson.raw_bson import RawBSONDocument

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.applying import MAX_BATCH
from pyqueue.backends.inserting import ids_of_this_queue, raise_foreign_ids, write
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import NewMessage, Target
from pyqueue.backends.pushing import new_document
from pyqueue.errors import ConfigurationError, InvalidMessage, QueueError
from pyqueue.messages import Id
from pyqueue.payloads import encode
from pyqueue.requests import (
    Count,
    Delete,
    Document,
    Filter,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateDocument,
    UpdateEach,
)

__all__ = ["Staging", "append", "documents_of", "insert_hidden", "raise_foreign", "show"]

#: How long staged messages wait to be published.
STAGED_LIFETIME: Final = timedelta(days=7)


def documents_of(
    target: Target,
    messages: Iterable[NewMessage],
    now: datetime,
    more: Mapping[str, Any] | None = None,
) -> tuple[list[Document], list[RawBSONDocument], frozenset[Id]]:
    """Return the documents with ``more`` in each, their encoded forms, and the given ids.

    Raises:
        InvalidMessage, ConfigurationError: a message cannot be stored.
    """
    documents: list[Document] = []
    encoded: list[RawBSONDocument] = []
    given: set[Id] = set()
    for row, message in enumerate(messages):
        id = None if message.id is None else arguments.identity(message.id)
        document = new_document(
            target.queue,
            target.kind,
            target.codec.name,
            now,
            now,
            target.codec.dump(message.payload),
            arguments.headers(message.headers),
            None if message.key is None else arguments.key(message.key),
            id,
        )
        document |= more or {}
        try:
            encoded.append(encode(document))
        except InvalidMessage as error:
            where = f"in row {row}" + (f" with id {id}" if id else "")
            raise InvalidMessage(f"{error}; {where}") from error
        documents.append(document)
        if id is not None:
            if id in given:
                raise ConfigurationError(
                    f"id: {id!r} is that of several rows: each message needs a different id"
                )
            given.add(id)
    return documents, encoded, frozenset(given)


def append(target: Target, messages: Iterable[NewMessage], *, session: object = None) -> Plan[int]:
    """Write messages to a queue.

    A message whose id the queue has already is the same message. One whose key is taken is left
    out.

    Returns:
        How many of the messages are stored.

    Raises:
        DuplicateKey: an id belongs to a message that was never in this queue.
    """
    now = yield from ServerTime()
    documents, encoded, given = documents_of(target, messages, now)
    if not documents:
        return 0
    yield from namespace.ensure(target.queue, target.kind, target.options)
    written = yield from write(target.queue, documents, encoded, given, session)
    raise_foreign_ids(target.queue, written.foreign)
    return sum(id is not None for id in written.ids)


def insert_hidden(rows: Sequence[RawBSONDocument]) -> Plan[tuple[int, list[RawBSONDocument]]]:
    """Insert hidden rows. Return how many were written, and those whose id is taken.

    A row whose key another row of its place has is left out, as a push would.
    """
    failures = yield from Insert(rows)
    for failure in failures:
        if failure.field is None:
            raise failure.error
    taken = [rows[failure.place] for failure in failures if failure.field == "_id"]
    return len(rows) - len(failures), taken


def raise_foreign(queue: str, refused: Sequence[Document | RawBSONDocument]) -> Plan[None]:
    """Raise DuplicateKey if the id of a refused document belongs to a message of another queue."""
    if refused:
        ids = [each["_id"] for each in refused]
        stored = yield from ids_of_this_queue(queue, ids)
        raise_foreign_ids(queue, [id for id in ids if not stored.get(id)])


def show(target: Target, hidden: str, now: datetime) -> Plan[int]:
    """Show the messages that are hidden under a name. Return how many.

    A message whose key is taken stays hidden.
    """
    entering: UpdateDocument = {
        "$set": target.kind.entering(target.queue, now),
        "$unset": {"staged": "", "attempt": "", "processed": "", "expires": ""},
    }
    here: dict[str, object] = {"q": hidden}
    without_key = here | {"key": {"$exists": False}}
    done = (yield from Update(without_key, entering, many=True)).matched
    keyed = yield from Find(here, {"_id": 1}, hint=HOT)
    for start in range(0, len(keyed), MAX_BATCH):
        pairs: list[tuple[Filter, UpdateDocument]] = [
            ({"_id": each["_id"], **here}, entering) for each in keyed[start : start + MAX_BATCH]
        ]
        matched, _ = yield from UpdateEach(pairs)
        done += matched
    return done


class Staging:
    """The plans of one job that writes messages in many processes and shows all of them, or none.

    Plain data: it pickles.

    Args:
        target: the queue that the messages are for.
        job: a name that no other job has.
    """

    __slots__ = ("_prefix", "target")

    def __init__(self, target: Target, job: str) -> None:
        self.target = target
        #: No name of a queue begins like this.
        self._prefix = f"~staged:{target.queue}:{job}:"

    def write(self, place: str, messages: Iterable[NewMessage]) -> Plan[int]:
        """Write messages where no consumer sees them.

        What another attempt staged with the same id is replaced. What is in the queue already is
        the same message.

        Args:
            place: a name that only this attempt uses.
            messages: the messages.

        Returns:
            How many were written.

        Raises:
            DuplicateKey: an id belongs to a message that was never in this queue.
        """
        now = yield from ServerTime()
        hidden = {
            "q": self._prefix + place,
            "staged": True,
            "processed": now,
            "expires": now + STAGED_LIFETIME,
        }
        _, missing, _ = documents_of(self.target, messages, now, hidden)
        written = 0
        for again in (True, False):
            if not missing:
                break
            inserted, missing = yield from insert_hidden(missing)
            written += inserted
            if missing and again:
                ids = [each["_id"] for each in missing]
                yield from Delete({"_id": {"$in": ids}, "staged": True}, many=True)
        yield from raise_foreign(self.target.queue, missing)
        return written

    def publish(self, places: Mapping[str, int]) -> Plan[int]:
        """Show what was written, and delete what other attempts of this job left behind.

        Args:
            places: the places to show, and how many messages each must have.

        Returns:
            How many messages are shown.

        Raises:
            QueueError: some are missing; nothing is shown.
        """
        target = self.target
        yield from namespace.ensure(target.queue, target.kind, target.options)
        for place, expected in places.items():
            present = yield from Count({"q": self._prefix + place}, HOT)
            if present != expected:
                raise QueueError(
                    f"queue {target.queue!r}: {expected} messages were staged at {place}, and "
                    f"{present} are there: an id is that of several rows, or another job with the "
                    "same ids ran at the same time, or it took more than a week. Nothing was shown"
                )
        now = yield from ServerTime()
        done = 0
        for place in places:
            done += yield from show(target, self._prefix + place, now)
        yield from self.discard()
        if done:
            yield from Signal(target.queue, now)
        return done

    def discard(self) -> Plan[None]:
        """Delete everything that this job has staged."""
        end = self._prefix[:-1] + ";"  # ";" follows ":" in the order of characters
        yield from Delete({"q": {"$gte": self._prefix, "$lt": end}}, many=True)
