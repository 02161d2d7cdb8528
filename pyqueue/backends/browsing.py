"""Browse: read the messages of a queue page by page, in any state. This claims and writes nothing.

A page is read in rounds. A round first reads the places of the next documents from the index
``hot``, which has them in the order of ``when``. Then it reads those of the documents that may
match. So a call examines a bounded number of messages, whatever the conditions are. The cursor of a
page is the place of the last message that was examined.
"""

from __future__ import annotations

import operator
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack, get_args

import bson
from bson import ObjectId
from bson.errors import BSONError

from pyqueue import arguments
from pyqueue.backends import kind as kinds
from pyqueue.backends import namespace
from pyqueue.backends.contents import Contents, contents_of
from pyqueue.backends.invalid import decode
from pyqueue.backends.matching import Where, conditions
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import QueueTerms
from pyqueue.backends.transitions import messages_only
from pyqueue.clock import BAND, BARE_BAND
from pyqueue.documents import mark_dead
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Id, Message, Page, State
from pyqueue.payloads import OPTIONS, Codec
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, Sort

#: How many documents one round may read: in general, and if a document may hold many messages.
_MAX_ROUND: Final = 1000
_MAX_SHARED_ROUND: Final = 100
#: The fields that give the place of a document in the queue. The index ``hot`` contains them.
_PLACE: Final = {"_id": 1, "when": 1}
#: For a state, the filter that tells its messages from other messages in the same ``when`` range.
_TELLING: Final[Mapping[str | None, Filter]] = {
    "scheduled": {"token": {"$exists": False}},
    "reserved": {"token": {"$exists": True}},
    "dead": {"dead": {"$exists": True}},
}


class Position(NamedTuple):
    """The place up to which a queue was examined."""

    when: datetime
    #: None if the walk came to this instant, but examined no message with this ``when``.
    id: Id | None
    #: The last message of a pack that was examined, or None if the whole document was examined.
    part: int | None


class _Way(NamedTuple):
    """The order of a page: oldest first or newest first."""

    direction: int
    #: The query operators for the values after a given value, excluding and including that value.
    after: str
    since: str
    precedes: Callable[[Any, Any], bool]
    #: Operators compare only ids of one type, and every ObjectId follows every str. So this order
    #: has a type whose ids come first, and the name of the type whose ids come last.
    first: type
    last: str


_OLDEST_FIRST: Final = _Way(1, "$gt", "$gte", operator.lt, first=str, last="objectId")
_NEWEST_FIRST: Final = _Way(-1, "$lt", "$lte", operator.gt, first=ObjectId, last="string")


class BrowseOptions(TypedDict):
    """The arguments of ``Queue.browse``."""

    state: State | None
    where: Mapping[str, object] | None
    after: str | None
    limit: int
    newest: bool
    budget: int


class Wanted(NamedTuple):
    """The checked arguments of ``Queue.browse``."""

    #: "live" is any state but "finished".
    state: State | Literal["live"] | None
    where: Where
    after: Position | None
    limit: int
    way: _Way
    budget: int


class Found(NamedTuple):
    """A message that a ``Walk`` has found."""

    message: Message[Any]
    #: The stored document, and the message as a document. They are the same, unless messages share
    #: the stored document.
    document: Document
    part: Document
    #: The number of the message in the stored document.
    number: int


def checked(**options: Unpack[BrowseOptions]) -> Wanted:
    """Check the arguments of ``Queue.browse``.

    Raises:
        ConfigurationError: An argument is not allowed.
    """
    state, newest = options["state"], arguments.flag("newest", options["newest"])
    if state is not None:
        arguments.one_of("state", state, get_args(State))
    return Wanted(
        state,
        conditions(options["where"]),
        None if options["after"] is None else _position(options["after"]),
        arguments.count("limit", options["limit"]),
        _NEWEST_FIRST if newest else _OLDEST_FIRST,
        budget=arguments.count("budget", options["budget"]),
    )


def all_live(state: State | None, where: Where) -> Wanted:
    """Return arguments that select the matching unfinished messages, oldest first."""
    limit, budget = _MAX_ROUND, 5 * _MAX_ROUND
    return Wanted(state or "live", where, None, limit, _OLDEST_FIRST, budget=budget)


def browse(terms: QueueTerms, wanted: Wanted) -> Plan[Page[Any]]:
    """Return the next page of the messages of a queue.

    Raises:
        ConfigurationError: The name belongs to a stream, or this release does not know the kind.
    """
    queue = terms.queue
    remedy = f"use client.stream({queue!r}).read(), or `pyqueue stream read`"
    stored = yield from kind_of_queue(queue, "browse", remedy)
    kind = terms.kind if stored is None else kinds.lookup(stored)
    now = yield from ServerTime()
    walk = Walk(queue, contents_of(kind), terms.codec, wanted, now, place=wanted.after)
    complete = yield from walk_on(walk)
    messages = [each.message for each in walk.found]
    return Page(messages, None if complete else _cursor(walk.place), walk.looked)


def kind_of_queue(queue: str, argument: str, remedy: str) -> Plan[str | None]:
    """Return the kind of a queue, or None if it has no record.

    Raises:
        ConfigurationError: The name belongs to a stream, or this release does not know the kind.
    """
    stored = yield from namespace.kind_of(queue)
    if stored == namespace.STREAM:
        raise ConfigurationError(f"{argument}: {queue!r} is a stream; {remedy}")
    return stored


def shown(codec: Codec[Any], document: Document, now: datetime) -> Message[Any]:
    """Return the message in a document. An unclaimed dead letter has the state "dead"."""
    return mark_dead(decode(codec, document, now))


@dataclass(slots=True)
class Walk:
    """The progress of a call through a queue, and the messages that it has found."""

    queue: str
    contents: Contents
    codec: Codec[Any]
    wanted: Wanted
    now: datetime
    #: The place up to which messages were examined, or None for the beginning.
    place: Position | None = None
    #: Whether the messages of a document are examined together, even beyond the limit.
    whole: bool = False
    #: Messages that entered the queue later are skipped. None skips no message.
    until: datetime | None = None
    found: list[Found] = field(default_factory=list)
    looked: int = 0

    def is_full(self) -> bool:
        """Return whether the walk has found or examined the maximum number of messages."""
        return len(self.found) >= self.wanted.limit or self.looked >= self.wanted.budget

    def examine(self, place: Document, stored: Document | None) -> bool:
        """Examine the messages of a document. Return whether all of them were examined.

        Args:
            place: The place of the document.
            stored: The document, or None if the server found that it does not match.
        """
        if self.is_full():
            return False
        when, id = place["when"], place["_id"]
        if stored is None:
            self.looked += 1
        else:
            for number, part in self._rest(id, self.contents.numbered(stored)):
                if self.is_full() and not self.whole:
                    return False
                self.looked += 1
                self.place = Position(when, id, number)
                self._add(stored, number, part)
        self.place = Position(when, id, None)
        return True

    def _add(self, document: Document, number: int, part: Document) -> None:
        """Add a message to ``found`` if it is wanted."""
        late = self.until is not None and (came := _came(part)) is not None and came > self.until
        if not late and self.wanted.where.matches(part):
            message = shown(self.codec, part, self.now)
            live = self.wanted.state == "live" and message.state != "finished"
            if live or self.wanted.state in (None, message.state):
                self.found.append(Found(message, document, part, number))

    def _rest(
        self, id: Id, parts: Sequence[tuple[int, Document]]
    ) -> Sequence[tuple[int, Document]]:
        """Return the messages of a document that have not been examined yet, in order."""
        way = self.wanted.way
        ordered = parts if way.direction > 0 else parts[::-1]
        if self.place is None or self.place.id != id or (done := self.place.part) is None:
            return ordered
        return [each for each in ordered if way.precedes(done, each[0])]


def _came(document: Document) -> datetime | None:
    """Return when a message entered its queue: when it left the last queue, or was pushed."""
    trail = document.get("trail")
    last = trail[-1] if isinstance(trail, list) and trail else None
    came = last.get("at") if isinstance(last, dict) else document.get("pushed")
    return came if isinstance(came, datetime) else None


def walk_on(walk: Walk) -> Plan[bool]:
    """Find more messages. Return whether the walk has reached the end of the queue."""
    # A shared document may have a thousand messages, so the first rounds are small.
    shared = walk.contents.shared
    size, most = (1, _MAX_SHARED_ROUND) if shared else (walk.wanted.limit, _MAX_ROUND)
    while True:
        size = min(size, most, walk.wanted.budget - walk.looked)
        places, last = yield from _next_places(walk, size)
        documents = yield from _read(walk, places)
        examined = all(walk.examine(place, stored) for place, stored in documents)
        if examined and last:
            return True
        if walk.is_full():
            return False
        size *= 2


# ---- rounds


def _next_places(walk: Walk, size: int) -> Plan[tuple[list[Document], bool]]:
    """Read the places of the next documents.

    Documents of other programs are left out if a cursor cannot express their places. If no document
    remains although more follow, the result has at most one place: an instant without an id.

    Returns:
        Up to ``size`` places, and whether they are the last places.
    """
    places = yield from Find(
        _ahead(walk), _PLACE, sort=_order(walk.wanted.way), limit=size + 1, hint=HOT
    )
    last = len(places) <= size
    known = [each for each in places if _has_place(each)]
    if known or last:
        return known[:size], last
    instants = _instants(places)
    return [{"_id": None, "when": each} for each in instants[:1]], not instants


def _read(walk: Walk, places: Sequence[Document]) -> Plan[list[tuple[Document, Document | None]]]:
    """Return the places, each with its document, or with None if no message in it can match."""
    ids = [each["_id"] for each in places if each["_id"] is not None]
    stored: list[Document] = []
    if ids:
        match: Filter = {"_id": {"$in": ids}, "q": walk.queue}
        if filters := walk.contents.conditions(_filters(walk.wanted)):
            match = {**match, "$and": filters}
        stored = yield from Find(match, hint="_id_")
    documents = {each["_id"]: each for each in stored}
    return [(each, documents.get(each["_id"])) for each in places]


def _has_place(document: Document) -> bool:
    return isinstance(document["_id"], (ObjectId, str)) and bool(_instants([document]))


def _instants(documents: Sequence[Document]) -> list[datetime]:
    return [each["when"] for each in documents if isinstance(each["when"], datetime)]


def _filters(wanted: Wanted) -> list[Filter]:
    """Return filters that match all wanted messages, and perhaps other messages."""
    telling = _TELLING.get(wanted.state)
    return [*([] if telling is None else [telling]), *wanted.where.filter()]


def _range(state: State | Literal["live"] | None, now: datetime) -> dict[str, datetime]:
    """Return the range of ``when`` in which all messages of a state lie."""
    if state == "ready":
        return {"$lte": now}
    if state in ("scheduled", "reserved"):
        return {"$gt": now, "$lt": BAND}
    if state in ("dead", "live"):
        return {"$lt": BAND}
    return {"$gte": BAND, "$lt": BARE_BAND} if state == "finished" else {"$lt": BARE_BAND}


def _ahead(walk: Walk) -> Filter:
    """Return the filter that matches the documents with messages that are still to be examined."""
    queue, way, start = walk.queue, walk.wanted.way, walk.place
    span = _range(walk.wanted.state, walk.now)
    begin = span.get(way.after) or span.get(way.since)
    # The range of a state moves with the time, so a place may lie before it now.
    if start is None or (begin is not None and way.precedes(start.when, begin)):
        return {"q": queue, "when": span, **messages_only(queue)}
    some: list[Filter] = [
        {"q": queue, "when": start.when, "_id": each} for each in _ids_ahead(start, way)
    ]
    rest = {name: span[name] for name in span if name not in (way.after, way.since)}
    some.append({"q": queue, "when": {way.after: start.when, **rest}})
    return {"$or": some, **messages_only(queue)}


def _ids_ahead(start: Position, way: _Way) -> list[Filter]:
    """Return conditions on the ids of documents with the same ``when`` that are still ahead."""
    if start.id is None:
        return [{"$type": "string"}, {"$type": "objectId"}]
    bound = way.after if start.part is None else way.since
    types = [{"$type": way.last}] if isinstance(start.id, way.first) else []
    return [{bound: start.id}, *types]


def _order(way: _Way) -> Sort:
    return (("when", way.direction), ("_id", way.direction))


# ---- cursors


def _cursor(place: Position | None) -> str | None:
    """Return the text that stands for a place."""
    if place is None:
        return None
    data = bson.encode({"w": place.when, "i": place.id, "p": place.part}, codec_options=OPTIONS)
    return urlsafe_b64encode(data).decode().rstrip("=")


def _position(cursor: object) -> Position:
    """Return the place that a cursor stands for.

    Raises:
        ConfigurationError: The value is not the cursor of a page.
    """
    found: dict[str, Any] = {}
    if isinstance(cursor, str):
        with suppress(BSONError, ValueError):
            padding = "=" * (-len(cursor) % 4)
            found = bson.decode(urlsafe_b64decode(cursor + padding), OPTIONS)
    when, id, part = (found.get(name) for name in ("w", "i", "p"))
    if (
        isinstance(when, datetime)
        and isinstance(id, (ObjectId, str, NoneType))
        and isinstance(part, (int, NoneType))
    ):
        return Position(when, id, part)
    raise ConfigurationError("after: this is not a cursor; pass the `after` of a Page, unchanged")
