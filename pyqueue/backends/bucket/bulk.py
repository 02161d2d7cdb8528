"""Packs in bulk work: named claims, and the reads and writes of Spark, handle whole packs.

A named claim takes a pack with all its messages, even if earlier claims of the pack have lapsed. A
note about a message is stored under its place. If only one message fails, it leaves the pack, and
the claim keeps the other messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.bucket import holding, leaving, packs, pushing
from pyqueue.backends.bucket.kind import PACKS, Bucket
from pyqueue.backends.bucket.managing import CountPacked, end_rests, publish_handed
from pyqueue.backends.bucket.receiving import is_valid_pack
from pyqueue.backends.bucket.settling import emptied
from pyqueue.backends.bucket.stock import Drawn, HeldPack, maker
from pyqueue.backends.byte_limit import find_fitting
from pyqueue.backends.contents import NOTE, Contents, SharedRows, Spot, register
from pyqueue.backends.forms import Failure
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.namespace import CLAIMS
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.backends.receiving import Reception, accept_each
from pyqueue.errors import InvalidMessage, LeaseLost
from pyqueue.facts import ErrorInfo
from pyqueue.messages import Id, PackedReservation, Reservation
from pyqueue.payloads import OPTIONS, RAW, encode
from pyqueue.requests import Delete, Document, Filter, Find, Plan, ServerTime, Update

#: Matches packs, and documents of other programs that resemble them.
_SHARED: Final[Filter] = {"b": {"$exists": True}}
#: Matches ordinary messages.
_ORDINARY: Final[Filter] = {"b": {"$exists": False}}
#: The projections of ``Contents``.
_SIZED: Final[Mapping[str, object]] = {"n": 1}
_NAMED: Final[Mapping[str, object]] = {**packs.INDEX_FIELDS, "done": 1}
_BARE: Final[Mapping[str, object]] = {"payload": 0, "b.p": 0}
#: The fields of a pack that determine its messages and their ids, besides their common fields.
_PLACES: Final[Mapping[str, object]] = {"at": 1, "w": 1, "done": 1}


class PackContents(Contents):
    """The messages in the documents of a bucket: packs and ordinary messages."""

    shared = True
    separate = _ORDINARY
    sized = _SIZED
    named = _NAMED
    bare = _BARE

    # ---- one document

    def size(self, document: Document) -> int:
        """Return how many messages a document contains."""
        number = document.get("n")
        return number if isinstance(number, int) else 1

    def ids(self, document: Document) -> Sequence[Id]:
        """Return the ids of the messages in a document."""
        if not packs.is_pack(document):
            return super().ids(document)
        return list(map(packs.naming(document), packs.places(packs.alive_of(document))))

    def by_id(self, document: Document, notes: Any) -> Mapping[Id, Any]:
        """Return the stored notes on the messages in a document, keyed by message id."""
        if not packs.is_pack(document):
            return super().by_id(document, notes)
        name = packs.naming(document)
        return {name(int(place)): value for place, value in notes.items()}

    def messages(self, document: Document) -> Sequence[Document]:
        """Return the messages in a document, each as a document."""
        if not packs.is_pack(document):
            return [document]
        common = packs.common_fields(document)
        return [{**common, **own} for own in _own_fields(document)]

    def numbered(self, document: Document) -> Sequence[tuple[int, Document]]:
        """Return the messages in a document as documents, each with its place in the pack."""
        if not is_valid_pack(document):
            return super().numbered(document)
        places = packs.places(packs.alive_of(document))
        return list(zip(places, self.messages(document), strict=True))

    def encoded(self, found: Sequence[bytes]) -> Sequence[bytes]:
        """Return the messages in these BSON documents, each as a BSON document."""
        return list(chain.from_iterable(map(_encoded, found)))

    def reservations(
        self, document: Document, now: datetime, *, noted: bool = True
    ) -> Sequence[Reservation[Any]]:
        """Return the messages in a document as reservations without payloads."""
        if not packs.is_pack(document):
            return super().reservations(document, now, noted=noted)
        reservations = _reservations(document, now)
        notes = _notes(document)
        return [each for each in reservations if noted or str(each.place) not in notes]

    # ---- claims

    def first(self, find: Find, max_bytes: int | None) -> Plan[list[Document]]:
        """Return the first documents that fit, at least one. An empty pack counts as a message."""
        sized = replace(find, projection=self.sized)
        most = sys.maxsize if max_bytes is None else max_bytes
        return (yield from find_fitting(sized, most, lambda each: max(1, self.size(each))))

    def admit(self, how: Reception, claimed: Filter) -> Plan[None]:
        """Publish messages that left claimed packs. Delete empty packs, and bury invalid packs."""
        match = {**claimed, **_SHARED}
        yield from publish_handed(match, CLAIMS)
        now = yield from ServerTime()
        for document in (yield from Find(match, self.bare, hint=CLAIMS)):
            if not is_valid_pack(document):
                yield from accept_each(how, [document], now)
            elif not document["n"]:
                yield from Delete(emptied(document["_id"], document["token"]))

    def find_shared(self, claimed: Filter, ids: Sequence[Id]) -> Plan[Mapping[Id, Spot]]:
        """Return where the messages with these ids are in claimed packs, keyed by message id."""
        spots: dict[Id, Spot] = {}
        for pack, members in packs.by_first_pack(ids).items():
            match = {**packs.packs_of(pack), **claimed}
            for document in (yield from Find(match, self.named)):
                alive = packs.alive_of(document) if packs.is_pack(document) else 0
                for id, place in members:
                    index = packs.index_in(document, place)
                    if index is not None and alive >> index & 1:
                        spots[id] = Spot(document["_id"], index)
        return spots

    def bury_noted(
        self, terms: QueueTerms, claimed: Filter, error_of: Callable[[str], dict[str, Any]]
    ) -> Plan[list[tuple[Id, str]]]:
        """Bury packed messages that are noted as bad. Return their ids, each with the reason."""
        found = yield from Find({**claimed, **_SHARED}, self.bare, hint=CLAIMS)
        now = yield from ServerTime()
        buried: list[tuple[Id, str]] = []
        for document in found:
            notes = _notes(document)
            bad = [each for each in _reservations(document, now) if str(each.place) in notes]
            for each in bad:
                each.error = ErrorInfo.of(error_of(notes[str(each.place)]))
            with suppress(LeaseLost):  # another process took the pack just now
                yield from leaving.bury(terms, bad, Failure(None), "invalid")
                buried += [(each.id, notes[str(each.place)]) for each in bad]
            mine = {"_id": document["_id"], "token": document["token"]}
            yield from Update(mine, {"$unset": {NOTE: ""}})
        return buried

    def finish(self, claimed: Filter) -> Plan[int]:
        """Finish the messages of claimed packs. Return how many were finished."""
        match = {**claimed, **_SHARED}
        yield from publish_handed(match, CLAIMS)
        found = yield from Find(match, self.sized, hint=CLAIMS)
        if not found:
            return 0
        gone = yield from Delete({**match, HANDED: []}, many=True)
        if gone < len(found):  # another process took some of them just now
            ids = {"_id": {"$in": [each["_id"] for each in found]}}
            left = {each["_id"] for each in (yield from Find(ids, {"_id": 1}))}
            found = [each for each in found if each["_id"] not in left]
        return sum(map(self.size, found))

    # ---- messages of any program

    def is_message(self, document: Document) -> bool:
        """Return whether a document is a message, and not a pack."""
        return not packs.is_pack(document)

    def end_rests(self, terms: QueueTerms) -> Plan[None]:
        """Free the packs that processes keep without holding any of their messages."""
        yield from end_rests(terms.queue, (yield from ServerTime()))

    def hold(
        self, terms: QueueTerms, document: Document, numbers: Sequence[int]
    ) -> Plan[Sequence[Reservation[Any]]]:
        """Claim messages of a pack for a moment, to change them."""
        return holding.hold(terms, document, numbers)

    def requeue(
        self, terms: QueueTerms, held: Sequence[Reservation[Any]], at: datetime | None
    ) -> Plan[None]:
        """Take messages out of one pack. They become ready at ``at``, or now if ``at`` is None."""
        packed = [each for each in held if isinstance(each, PackedReservation)]
        return holding.requeue(terms, packed, at)

    # ---- writes

    def share(
        self,
        target: Target,
        rows: Sequence[NewMessage],
        now: datetime,
        more: Mapping[str, Any],
    ) -> Plan[SharedRows]:
        """Return packs with the rows that are ready now and have neither an id nor a key."""
        entries: list[RawBSONDocument] = []
        rest: list[NewMessage | None] = []
        for place, row in enumerate(rows):
            entry = _entry(target, place, row, now)
            if entry is None:
                rest.append(row)
            else:
                entries.append(entry)
                rest.append(None)
        if entries:
            yield from namespace.ensure(target.queue, target.kind, target.options)
        entering = pushing.Entering(target.queue, target.kind, target.codec.name, now, more)
        packed = yield from pushing.new_packs(entering, entries)
        return SharedRows(packed.documents, len(entries), rest)

    def without_derived_ids(self, rows: Sequence[NewMessage]) -> Sequence[NewMessage]:
        """Return rows without ids derived from their source, except keyed and buried rows."""
        return [
            each._replace(id=None) if each.fault is None and each.key is None else each
            for each in rows
        ]

    def surplus(self, match: Filter, cap: int | None = None, hint: str | None = None) -> Plan[int]:
        """Count the messages in the matching documents, minus the number of these documents."""
        # A condition on ``_id`` excludes only records, which are not packs. It is not in the index.
        packed = {name: match[name] for name in match if name != "_id"}
        return (yield from CountPacked(packed, cap, hint or PACKS))

    # ---- reads

    def conditions(self, only: Sequence[Filter]) -> Sequence[Filter]:
        """Return no conditions, because the server cannot apply them to the messages of a pack."""
        return ()

    def fields(self, wanted: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """Return the projection of a pack that includes these fields of its messages."""
        if wanted is None:
            return None
        return {**wanted, **_PLACES, "b" if "payload" in wanted else "b.h": 1}


register(Bucket.name, PackContents())


def _notes(pack: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the notes on the bad messages of a pack, keyed by place in the pack."""
    notes: Mapping[str, str] = (pack.get("claim") or {}).get("bad") or {}
    return notes


def _own_fields(pack: Mapping[str, Any]) -> Iterator[Document]:
    """Yield the separate fields of each message left in a pack, with its note if there is one."""
    notes, alive = _notes(pack), packs.alive_of(pack)
    if not notes:
        yield from packs.own_fields(pack, alive)
        return
    for place, own in zip(packs.places(alive), packs.own_fields(pack, alive), strict=True):
        reason = notes.get(str(place))
        yield own if reason is None else {**own, "claim": {"bad": reason}}


def _encoded(found: bytes) -> Iterator[bytes]:
    """Yield the messages of a document in BSON. Encode their common fields only once."""
    document = RawBSONDocument(found, RAW)
    if not packs.is_pack(document):
        yield found
        return
    common = _inside(packs.common_fields(document))
    for own in _own_fields(document):
        fields = _inside(own)
        size = len(fields) + len(common) + 5  # the size takes 4 bytes, and the end 1 byte
        yield b"".join((size.to_bytes(4, "little"), fields, common, b"\0"))


def _inside(document: Document) -> bytes:
    """Return the fields of a document in BSON, without its leading size and its final zero."""
    return bson.encode(document, codec_options=OPTIONS)[4:-1]


def _reservations(pack: Document, now: datetime) -> list[PackedReservation[Any]]:
    """Return the messages left in a claimed pack as reservations without payloads."""
    hold = HeldPack(pack, counted=True, only=packs.full(len(pack["b"])))
    drawn = hold.draw(hold.size)  # all of them
    if drawn is None:
        return []
    lease_s = max(0.001, (hold.until - now).total_seconds())
    lease = (pack.get("reserved", now), hold.until, lease_s)
    make = maker(Drawn(hold, *drawn), int(pack["tries"]), lease)
    made = (make(place, None) for place in packs.places(drawn[0]))
    return [each for each in made if isinstance(each, PackedReservation)]


def _entry(target: Target, place: int, row: NewMessage, now: datetime) -> RawBSONDocument | None:
    """Return a row as an entry of a pack, or None if the row needs a separate document.

    Raises:
        InvalidMessage, ConfigurationError: The row cannot be stored.
    """
    alone = row.id is not None or row.key is not None or row.fault is not None
    if alone or arguments.starting(now, row.delay, row.at) > now:
        return None
    headers = arguments.headers(row.headers)
    more = {"h": headers} if headers else {}
    try:
        entry = encode({"p": target.codec.dump(row.payload), **more})
    except InvalidMessage as error:
        raise InvalidMessage(f"{error}; in row {place}") from error
    return entry if len(entry.raw) <= packs.MAX_PACK_BYTES else None
