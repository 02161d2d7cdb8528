"""Build the documents that a Spark write stores: messages, packs, and buried rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

from bson.raw_bson import RawBSONDocument

from pyqueue import arguments
from pyqueue.backends.contents import contents_of
from pyqueue.backends.inserting import id_taken, raise_foreign_ids
from pyqueue.backends.options import NewMessage, Target
from pyqueue.backends.pushing import Content, new_document
from pyqueue.error_records import error_record
from pyqueue.errors import ConfigurationError, InvalidMessage
from pyqueue.messages import Id
from pyqueue.payloads import encode
from pyqueue.requests import Document, Plan


def documents_of(
    target: Target,
    messages: Iterable[NewMessage | None],
    now: datetime,
    more: Mapping[str, Any] | None = None,
) -> tuple[list[Document], list[RawBSONDocument], frozenset[Id]]:
    """Return the documents of rows, their encoded forms, and the ids that the caller chose.

    Each document also gets the fields in ``more``. A row that is None needs no document.

    Raises:
        InvalidMessage, ConfigurationError: A message cannot be stored.
    """
    documents: list[Document] = []
    encoded: list[RawBSONDocument] = []
    given: set[Id] = set()
    for row, message in enumerate(messages):
        if message is None:
            continue
        id = None if message.id is None else arguments.identity(message.id)
        if id is not None and message.fault is not None:
            id = _buried_id(id, message)
        when = now if message.fault else arguments.starting(now, message.delay, message.at)
        content = Content(
            target.codec.name,
            target.codec.dump(message.payload),
            arguments.headers(message.headers),
            None if message.key is None else arguments.key(message.key),
            id,
            priority=message.priority,
            group=message.group,
        )
        document = new_document(target.queue, target.kind, now, when, content)
        if message.fault is not None:
            _bury(document, message, now)
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
                    f"id: several rows have the id {id!r}; use a different id for each message"
                )
            given.add(id)
    return documents, encoded, frozenset(given)


def hidden_rows(
    target: Target,
    messages: Iterable[NewMessage],
    hidden: Mapping[str, Any],
    on_duplicate: str = "ignore",
) -> Plan[tuple[list[RawBSONDocument], int]]:
    """Encode messages as documents with the fields ``hidden``. Skip messages already in packs.

    Returns:
        The documents, and the number of messages in them minus the number of documents.
    """
    rest, _ = yield from without_packed(target, messages, on_duplicate)
    now = hidden["processed"]
    shared = yield from contents_of(target.kind).share(target, rest, now, hidden)
    alone = documents_of(target, shared.rest, now, hidden)[1]
    return [*shared.documents, *alone], shared.number - len(shared.documents)


def without_packed(
    target: Target, messages: Iterable[NewMessage], on_duplicate: str
) -> Plan[tuple[list[NewMessage], int]]:
    """Leave out the messages whose ids already belong to messages in packs of the queue.

    Args:
        target: The queue that the messages are to enter.
        messages: The messages, with or without ids.
        on_duplicate: The action if an id is taken.

    Returns:
        The other messages, and how many were left out.

    Raises:
        DuplicateKey: An id belongs to a message that was never in this queue. Or ``on_duplicate``
            is not "ignore", and an id belongs to a message in a pack, which cannot be replaced.
    """
    given = list(messages)
    # A row that is buried gets a different id; see ``_buried_id``.
    ids = [each.id for each in given if each.id is not None and each.fault is None]
    there, foreign = yield from target.kind.packed_ids(target.queue, ids)
    raise_foreign_ids(target.queue, foreign)
    if there and on_duplicate != "ignore":
        raise id_taken(target.queue, [id for id in ids if id in there])
    rest = [each for each in given if each.id not in there]
    return rest, len(given) - len(rest)


def _buried_id(id: Id, row: NewMessage) -> str:
    """Return the id of the dead letter for a row that its queue cannot store.

    It differs from the id of the row, so that the row can be written again with correct values. A
    repeated write gets the same id, so that it writes no second dead letter.
    """
    end = f"~bad~{row.queue}"
    text = str(id)
    if len(text) + len(end) > arguments.MAX_ID:
        text = sha256(text.encode()).hexdigest()
    return text + end


def _bury(document: Document, row: NewMessage, now: datetime) -> None:
    """Turn the document of a row that its queue cannot store into a dead letter, in place."""
    error = error_record(InvalidMessage(row.fault), now)
    death = {"reason": "invalid", "tries": 0, "error": error}
    document |= {"error": error, "dead": {"from": row.queue, "at": now, **death}}
    # A redrive restores the key and the priority. A key is unique only within a queue.
    if "key" in document:
        document["last_key"] = document.pop("key")
    if row.priority is not None:
        document["priority"] = row.priority
