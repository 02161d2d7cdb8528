"""Find a message by its id, in any queue or stream and in any state. This changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from pyqueue import arguments
from pyqueue.backends.browsing import shown
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.managing import find_packed
from pyqueue.backends.streams import log
from pyqueue.messages import Id, Message, StreamMessage
from pyqueue.payloads import Codec
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime

#: The id of a message of a stream: the name of the stream, and the position. Names of queues cannot
#: contain "~".
_OF_STREAM: Final = re.compile(r"([^~]+)~(0|[1-9][0-9]{0,14})")
#: Matches documents in queues. The ``q`` of hidden and staged documents begins with "~", which
#: follows all characters of a name.
IN_QUEUES: Final[Filter] = MappingProxyType({"q": {"$lt": "~"}})


def find(id: Id) -> Plan[Message[Any] | None]:
    """Return the message with this id, or None if no queue, history or stream has it."""
    spellings = arguments.spellings(id)
    now, found = yield from documents(spellings, IN_QUEUES)
    if (document := first_of(spellings, found)) is not None:
        return shown(Codec(), document, now)
    return (yield from in_stream(id))


def first_of(ids: Sequence[Id], found: Sequence[Document]) -> Document | None:
    """Return the found document whose id comes first in ``ids``. Packs do not count."""
    for id in ids:
        for document in found:
            if document["_id"] == id and not packs.is_pack(document):
                return document
    return None


def documents(
    ids: Sequence[Id], match: Filter | None = None, *, majority: bool = False
) -> Plan[tuple[datetime, list[Document]]]:
    """Return the current instant, and the messages with these ids as documents.

    Args:
        ids: The ids. A message in a pack (a shared document) is returned as its own document.
        match: A further filter for the stored documents, or None.
        majority: Whether to read documents as a majority of the replica set has stored them. This
            does not apply to messages in packs.
    """
    now = yield from ServerTime()
    more = match or {}
    found = yield from Find({"_id": {"$in": list(ids)}, **more}, majority=majority)
    for id in ids:
        named = packs.place_of(id)
        if named is not None and not any(each["_id"] == id for each in found):
            found += yield from find_packed(more, named)
    return now, found


def in_stream(id: Id) -> Plan[StreamMessage[Any] | None]:
    """Return the message of a stream with this id, or None if there is no such message."""
    named = _OF_STREAM.fullmatch(id) if isinstance(id, str) else None
    if named is None:
        return None
    return (yield from log.message(named[1], Codec(), int(named[2])))
