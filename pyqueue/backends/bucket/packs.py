"""Packs: many messages in one document, each settled separately. This module is pure.

A pack is a document of its queue, and a claim takes it as it takes a message. A pack has the fields
of a message except for the payload, and these fields::

    b        the messages: [{p: payload, h: headers}]. They change only if all of them move
    done     a bit for each message, 62 in each number: whether the message has left the pack
    n        how many messages are left: the number of clear bits
    z        an upper bound on the size of the messages, in bytes
    c        how many times the pack was claimed
    orderly  the number of its last claim that ended in order; level: see below
    handed   copies of messages that left it and are still hidden; see ``handover``
    at       the places of its messages in their first pack; only in a part (see below)
    w        4, the number of digits that a place has in an id; absent in packs of earlier releases

The id of a message is "<_id of its first pack>:<place>", and never changes. The place has four
digits, so that messages that leave a pack with the same ``when`` keep their order. In packs without
``w``, the place has no leading zeros.

The pack, the token and the place identify the claim of a message. One update settles the message:
it matches the token and the clear bit, and sets the bit. So each message is settled once, and a
former holder cannot change any message.

Messages that leave a pack together may share a new one: a *part*. The _id of a part begins with the
_id of the first pack, so that it can be found by the ids of its messages.

A claim that does not end in order has lapsed, perhaps because a message crashes its consumers. The
next claims of the pack hand out only a *window* of 100 messages, then 10, then one. If the claim of
a single message lapses, it leaves the pack and becomes an ordinary message. After a window ends in
order, the next window has the same size. Past the part of the pack where a claim lapsed, windows
grow again. The level of a pack determines its next window, and level 0 is the whole pack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

import bson
from bson import Int64, ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue.messages import MAX_PACK, Id
from pyqueue.payloads import OPTIONS, encode
from pyqueue.requests import Document

T = TypeVar("T")

#: The maximum total size of the messages in a pack, in bytes.
MAX_PACK_BYTES: Final = 4 * 2**20
#: How many digits a place has in an id. Because of ``MAX_PACK``, the first digit is always 0.
DIGITS: Final = 4
#: The id of a packed message: the _id of a pack, and a place with or without leading zeros.
_PLACE: Final = re.compile(
    rf"([0-9A-Fa-f]{{24}}):(0|[1-9][0-9]{{,{DIGITS - 1}}}|[0-9]{{{DIGITS}}})"
)
#: The places of a full pack, with leading zeros.
_PADDED: Final = tuple(f"{place:0{DIGITS}}" for place in range(MAX_PACK))
#: How many bits of ``done`` one number contains. A number in BSON has 64 bits, one for the sign.
_WORD: Final = 62
_SIZES: Final = (100, 10, 1)
#: The fields that are stored once for all messages of a pack.
_COMMON: Final = (
    *("q", "when", "due", "pushed", "tries", "deliveries", "type", "error", "trail"),
    *("token", "owner", "reserved"),
)
#: The projection for ``index_in``. It includes headers, because the number of messages is needed.
INDEX_FIELDS: Final = MappingProxyType({"at": 1, "w": 1, "b.h": 1})


class Place(NamedTuple):
    """The place of a message in its first pack, as the id of the message names it."""

    #: The _id of the first pack of the message.
    pack: ObjectId
    number: int
    #: How the number is written: with ``DIGITS`` digits, or without leading zeros.
    padded: bool


def naming(pack: Mapping[str, Any]) -> Callable[[int], str]:
    """Return the function that makes the id of a message from its place in this pack."""
    first, at = _first_pack(pack["_id"]), pack.get("at")
    written: Sequence[str | int] = _PADDED if _is_padded(pack) else range(MAX_PACK)
    if at is None:
        return lambda place: f"{first}:{written[place]}"
    # An id names the place in the first pack. In a part, ``at`` lists these places.
    return lambda place: f"{first}:{written[at[place]]}"


def message_id(pack: Mapping[str, Any], place: int) -> str:
    """Return the id of the message at a place in a pack."""
    return naming(pack)(place)


def part_id(pack: Id, token: str, at: Sequence[int]) -> str:
    """Return the _id of a part: a new pack for messages that leave their pack together.

    In a repeated call, the same messages get the same _id. Two concurrent calls may settle some of
    the same messages. Because of the checksum, neither call overwrites a part of the other.

    Args:
        pack: The _id of the pack that the messages leave.
        token: The token of the claim that holds them.
        at: The places of the messages in their first pack.
    """
    every = crc32(repr(list(at)).encode())
    return f"{_first_pack(pack)}/{token}.{at[0]:0{DIGITS}}-{every:08x}"


def _first_pack(pack: Id) -> str:
    """Return the _id of the pack that the messages of this pack were pushed in."""
    return pack.partition("/")[0] if isinstance(pack, str) else str(pack)


def _is_padded(pack: Mapping[str, Any]) -> bool:
    """Return whether the ids of a pack's messages have leading zeros."""
    return pack.get("w") == DIGITS


def place_of(id: object) -> Place | None:
    """Return the place that an id names, or None if it cannot be the id of a packed message."""
    match = _PLACE.fullmatch(id) if isinstance(id, str) else None
    if match is None:
        return None
    pack, digits = match.groups()
    number = int(digits)
    return Place(ObjectId(pack), number, len(digits) == DIGITS) if number < MAX_PACK else None


def new_pack(
    id: ObjectId,
    entering: Mapping[str, Any],
    pushed: datetime,
    type_name: str | None,
    entries: Sequence[RawBSONDocument],
) -> RawBSONDocument:
    """Return the document of a pack. ``entering``: the fields of a message entering the queue."""
    document: Document = {"_id": id, **entering, "pushed": pushed}
    if type_name is not None:
        document["type"] = type_name
    document |= {"w": DIGITS, **_filled(entries)}
    return RawBSONDocument(bson.encode(document, codec_options=OPTIONS))


def _filled(entries: Sequence[RawBSONDocument]) -> Document:
    """Return the fields of a new pack that depend on its messages."""
    document: Document = {"n": len(entries), "c": 0, "z": sum(len(each.raw) for each in entries)}
    return document | {
        "done": [Int64(0)] * -(-len(entries) // _WORD),
        "handed": [],
        "b": entries,
    }


def parts(
    pack: Id, token: str, documents: Sequence[Document], taken: Collection[Id] = ()
) -> list[Document]:
    """Return new documents for messages that leave a pack: new packs, called parts.

    A message that would be alone in a part gets an ordinary document, unless its id is taken.

    Args:
        pack: The _id of the pack.
        token: The token of the claim.
        documents: The messages. They differ only in their ids, headers and payloads.
        taken: The ids that belong to other documents.
    """
    found: list[Document] = []
    entries: list[RawBSONDocument] = []
    for each in documents:
        more = {"h": each["headers"]} if "headers" in each else {}
        entries.append(encode({"p": each["payload"], **more}))
    for some in chunks(range(len(documents)), [len(each.raw) for each in entries], MAX_PACK):
        first = documents[some[0]]
        if len(some) == 1 and first["_id"] not in taken:
            found.append(first)
            continue
        common = {name: first[name] for name in first if name not in ("headers", "payload")}
        digits = [documents[index]["_id"].partition(":")[2] for index in some]
        at = list(map(int, digits))
        common |= {"_id": part_id(pack, token, at), "at": at}
        if len(digits[0]) == DIGITS:
            common["w"] = DIGITS
        found.append(common | _filled([entries[index] for index in some]))
    return found


def chunks(items: Sequence[T], sizes: Sequence[int], most: int) -> Iterator[Sequence[T]]:
    """Divide items into chunks that each fit in a pack. ``sizes``: the bytes of each item."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        total += size
        if index > first and (index - first == most or total > MAX_PACK_BYTES):
            yield items[first:index]
            first, total = index, size
    yield items[first:]


def packs_of(pack: ObjectId) -> Document:
    """Return the filter that matches a pack and its parts, the packs made from its messages."""
    parts = {"_id": {"$gte": f"{pack}/", "$lt": f"{pack}0"}}  # "0" follows "/"
    return {"$or": [{"_id": pack}, parts]}


def index_in(document: Mapping[str, Any], place: Place) -> int | None:
    """Return the index of a message in a pack, or None if the message was never in this pack."""
    if not is_pack(document) or _is_padded(document) != place.padded:
        return None
    at = document.get("at")
    if document["_id"] == place.pack and at is None:
        return place.number if place.number < len(document["b"]) else None
    return at.index(place.number) if isinstance(at, list) and place.number in at else None


def is_pack(document: Mapping[str, Any]) -> bool:
    """Return whether a stored document is a pack."""
    return "payload" not in document and isinstance(document.get("b"), list)


def by_first_pack(ids: Iterable[Id]) -> dict[ObjectId, list[tuple[Id, Place]]]:
    """Return the ids that may belong to packed messages, with their places, by first pack."""
    named: dict[ObjectId, list[tuple[Id, Place]]] = {}
    for id in ids:
        if place := place_of(id):
            named.setdefault(place.pack, []).append((id, place))
    return named


def common_fields(pack: Mapping[str, Any]) -> Document:
    """Return the fields that are the same for all messages of a pack."""
    return {name: pack[name] for name in _COMMON if name in pack}


def own_fields(pack: Mapping[str, Any], bits: int) -> Iterator[Document]:
    """Yield the separate fields of each message in ``bits``: its id, headers and payload."""
    name, entries = naming(pack), pack["b"]
    for place in places(bits):
        entry = entries[place]
        document: Document = {"_id": name(place)}
        if "h" in entry:
            document["headers"] = entry["h"]
        document["payload"] = entry.get("p")  # a read may leave it out
        yield document


def document_in(pack: Mapping[str, Any], place: int) -> Document:
    """Return a message of a pack as a document, as if it were an ordinary message."""
    (own,) = own_fields(pack, 1 << place)
    return own | common_fields(pack)


# ---- bits


def full(size: int) -> int:
    """Return the bit mask of all messages of a pack with ``size`` messages."""
    return (1 << size) - 1


def done_of(document: Mapping[str, Any]) -> int:
    """Return a bit mask of the messages that have left a pack."""
    done = 0
    for index, word in enumerate(document["done"]):
        done |= int(word) << (index * _WORD)
    return done


def alive_of(document: Mapping[str, Any]) -> int:
    """Return a bit mask of the messages that are still in a pack."""
    return full(len(document["b"])) & ~done_of(document)


def bits_set(numbers: Iterable[int]) -> int:
    """Return the bit mask in which the bits of these places are set."""
    bits = 0
    for each in numbers:
        bits |= 1 << each
    return bits


def places(bits: int) -> Iterator[int]:
    """Yield the places whose bits are set, in order."""
    base = 0
    while bits:
        word = bits & 0xFFFFFFFFFFFFFFFF  # each operation on ``bits`` itself copies a long number
        while word:
            lowest = word & -word
            yield base + lowest.bit_length() - 1
            word ^= lowest
        bits >>= 64
        base += 64


def first_place(bits: int) -> int:
    """Return the first place whose bit is set."""
    return (bits & -bits).bit_length() - 1


def _words(bits: int) -> Iterator[tuple[str, Int64]]:
    """Yield the fields of ``done`` that contain these bits, each with its part of the mask."""
    index = 0
    while bits:
        word = bits & ((1 << _WORD) - 1)
        if word:
            yield f"done.{index}", Int64(word)
        bits >>= _WORD
        index += 1


def having(bits: int) -> dict[str, Any]:
    """Return the filter that matches a pack if all these messages are still in it."""
    return {name: {"$bitsAllClear": word} for name, word in _words(bits)}


def setting(bits: int) -> dict[str, dict[str, Any]]:
    """Return the update that removes these messages from a pack."""
    if not bits:
        return {}
    change: dict[str, dict[str, Any]] = {"$inc": {"n": -bits.bit_count()}}
    change["$bit"] = {name: {"or": word} for name, word in _words(bits)}
    return change


# ---- windows


def _ladder(size: int) -> list[int]:
    """Return how many messages one claim of a pack hands out, for each level from 1 on."""
    return [each for each in _SIZES if each < size or each == 1]


def level_of(document: Mapping[str, Any]) -> int:
    """Return the level of a pack that was just claimed. Each lapsed claim adds one."""
    # ``c`` is the number of this claim, ``orderly`` the number of the last that ended in order.
    lapses = int(document["c"]) - 1 - int(document.get("orderly", 0))
    return int(document.get("level", 0)) + max(0, lapses)


def window(size: int, alive: int, level: int) -> int | None:
    """Return a bit mask of the messages that a claim hands out.

    Args:
        size: How many messages the pack had when it was created.
        alive: A bit mask of the messages that are still in the pack.
        level: The level of the claim; see the module docstring.

    Returns:
        The mask, or None if the first message must leave the pack, because a claim of this message
        alone has lapsed.
    """
    if not level or not alive:
        return alive
    ladder = _ladder(size)
    if level > len(ladder):
        return None
    window_size = ladder[level - 1]
    start = first_place(alive) // window_size * window_size
    return alive & (full(window_size) << start)


def next_level(size: int, first: int, alive: int, level: int) -> int:
    """Return the level of a pack after a claim of this level has ended without a lapse.

    The level falls by one for each larger window whose messages are finished, because the pack is
    then past the part where a claim lapsed.

    Args:
        size: How many messages the pack had when it was created.
        first: The first place of the window of the claim.
        alive: A bit mask of the messages that are still in the pack.
        level: The level of the claim.
    """
    ladder = _ladder(size)
    level = min(level, len(ladder))
    if not alive:
        return level
    next_first = first_place(alive)
    while level > 1 and first // ladder[level - 2] != next_first // ladder[level - 2]:
        level -= 1
    return level
