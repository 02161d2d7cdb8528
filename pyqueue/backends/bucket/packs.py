"""Packs: many messages in one document, each settled separately. This module is pure.

A pack is a document of its queue, and a claim takes it like any other message. Besides the fields
of a message, without a payload, it has::

    b        the messages: [{p: payload, h: headers}]. They change only if all of them move
    done     bits: which of them have left the pack, 62 in each number
    n        how many are left: the number of clear bits
    z        an upper bound on the size of the messages, in bytes
    c        how many times it was claimed
    orderly  the last of its claims that ended in order; level: see below
    handed   copies of messages that left it and are still hidden; see ``handover``
    at       where its messages were in their first pack; only in a pack that left another one
    w        4, the number of digits that a place has in an id; absent in packs of earlier releases

The id of a message is "<_id of its first pack>:<place>", for life. The place has four digits, so
that messages that leave a pack and share a ``when`` keep their order. In packs without ``w`` it has
no leading zeros.

The holder of a message is known by the pack, the token and the place. A settlement matches the
token and the clear bit and sets the bit, in one update. So each message is settled once, and a
former holder cannot change any message.

Messages that leave a pack together may share a new one: a *part*. The _id of a part begins with the
_id of the first pack, so that it can be found by the ids of its messages.

A claim that does not end in order has lapsed: perhaps one message crashes its consumers. The next
claims of the pack hand out only a *window* of 100 messages, then 10, then one. If the claim of a
single message lapses, that message leaves the pack as an ordinary message. After a window that ends
in order, the next window has the same size. Windows grow again past the part of the pack where a
claim lapsed. The level of a pack says which size is next: 0 is the whole pack.
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

#: The most bytes of the messages of a pack.
MAX_PACK_BYTES: Final = 4 * 2**20
#: How many digits a place has in an id. Because of ``MAX_PACK``, the first digit is always 0.
DIGITS: Final = 4
#: The id of a pack, and the number of a message in it, with or without leading zeros.
_PLACE: Final = re.compile(
    rf"([0-9A-Fa-f]{{24}}):(0|[1-9][0-9]{{,{DIGITS - 1}}}|[0-9]{{{DIGITS}}})"
)
#: The places with leading zeros. A push of a pack needs all of them.
_PADDED: Final = tuple(f"{place:0{DIGITS}}" for place in range(MAX_PACK))
#: How many bits a number holds: numbers on the server have 64, and the highest is the sign.
_WORD: Final = 62
_SIZES: Final = (100, 10, 1)
#: The fields that a message has in common with the other messages of its pack.
_COMMON: Final = (
    *("q", "when", "due", "pushed", "tries", "deliveries", "type", "error", "trail"),
    *("token", "owner", "reserved"),
)
#: The fields of a pack that ``index_in`` needs. Of the messages it needs only their number.
INDEX_FIELDS: Final = MappingProxyType({"at": 1, "w": 1, "b.h": 1})


class Place(NamedTuple):
    """The place that the id of a packed message names."""

    #: The first pack of the message.
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
    # The id names the place in the first pack. Only a part has ``at``, which lists these places.
    return lambda place: f"{first}:{written[at[place]]}"


def message_id(pack: Mapping[str, Any], place: int) -> str:
    """Return the id of a message."""
    return naming(pack)(place)


def part_id(pack: Id, token: str, at: Sequence[int]) -> str:
    """Return the _id of a part. A claim makes the same _id when it tries again.

    Two calls may settle some of the same messages at once. The checksum keeps a part of one call
    from overwriting a part of the other call, which may have more messages.

    Args:
        pack: the pack that the messages leave.
        token: the token of the claim.
        at: the places of its messages in their first pack.
    """
    every = crc32(repr(list(at)).encode())
    return f"{_first_pack(pack)}/{token}.{at[0]:0{DIGITS}}-{every:08x}"


def _first_pack(pack: Id) -> str:
    """Return the _id of the first pack of messages, given the _id of that pack or of a part."""
    return pack.partition("/")[0] if isinstance(pack, str) else str(pack)


def _is_padded(pack: Mapping[str, Any]) -> bool:
    """Return whether the ids of a pack's messages have leading zeros."""
    return pack.get("w") == DIGITS


def place_of(id: object) -> Place | None:
    """Return the place that an id names, or None if no message of a pack has such an id."""
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
    """Return the document of a pack. ``entering``: the fields of a message entering its queue."""
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
    """Return the documents of the parts for messages that leave a pack.

    A single message becomes an ordinary message, unless its id is taken: then a part keeps its id.

    Args:
        pack: the pack.
        token: the token of the claim.
        documents: the messages. Only their ids, headers and payloads differ.
        taken: the ids that other documents have.
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
    """Divide items into packs of up to ``most`` messages. ``sizes`` are in bytes."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        total += size
        if index > first and (index - first == most or total > MAX_PACK_BYTES):
            yield items[first:index]
            first, total = index, size
    yield items[first:]


def packs_of(pack: ObjectId) -> Document:
    """Return the filter that matches a pack and its parts."""
    parts = {"_id": {"$gte": f"{pack}/", "$lt": f"{pack}0"}}  # "0" follows "/"
    return {"$or": [{"_id": pack}, parts]}


def index_in(document: Mapping[str, Any], place: Place) -> int | None:
    """Return the index of the message with this id in a pack, or None if it was never there."""
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
    """Return the ids that name places in packs, by the first packs of the messages."""
    named: dict[ObjectId, list[tuple[Id, Place]]] = {}
    for id in ids:
        if place := place_of(id):
            named.setdefault(place.pack, []).append((id, place))
    return named


def common_fields(pack: Mapping[str, Any]) -> Document:
    """Return the fields that each message of a pack has, as a document of its queue."""
    return {name: pack[name] for name in _COMMON if name in pack}


def own_fields(pack: Mapping[str, Any], bits: int) -> Iterator[Document]:
    """Yield the other fields of messages: the id, the headers and the payload."""
    name, entries = naming(pack), pack["b"]
    for place in places(bits):
        entry = entries[place]
        document: Document = {"_id": name(place)}
        if "h" in entry:
            document["headers"] = entry["h"]
        document["payload"] = entry.get("p")  # a read may leave it out
        yield document


def document_in(pack: Mapping[str, Any], place: int) -> Document:
    """Return a message of a pack as a document of its queue."""
    (own,) = own_fields(pack, 1 << place)
    return own | common_fields(pack)


# ---- bits


def full(size: int) -> int:
    """Return the bits of all messages of a pack."""
    return (1 << size) - 1


def done_of(document: Mapping[str, Any]) -> int:
    """Return the bits of the messages that have left a pack."""
    done = 0
    for index, word in enumerate(document["done"]):
        done |= int(word) << (index * _WORD)
    return done


def alive_of(document: Mapping[str, Any]) -> int:
    """Return the bits of the messages that a pack still has."""
    return full(len(document["b"])) & ~done_of(document)


def bits_set(numbers: Iterable[int]) -> int:
    """Return the bits of these places."""
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
    """Yield the numbers of ``done`` that have some of these bits: the field and its bits."""
    index = 0
    while bits:
        word = bits & ((1 << _WORD) - 1)
        if word:
            yield f"done.{index}", Int64(word)
        bits >>= _WORD
        index += 1


def having(bits: int) -> dict[str, Any]:
    """Return the filter that matches a pack that still has these messages."""
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
    """Return the sizes of the windows of a pack with ``size`` messages, by level from 1 on."""
    return [each for each in _SIZES if each < size or each == 1]


def level_of(document: Mapping[str, Any]) -> int:
    """Return the level of a pack that was just claimed. Each claim that lapsed adds one."""
    # ``c`` is the number of this claim, ``orderly`` of the last claim that ended in order.
    lapses = int(document["c"]) - 1 - int(document.get("orderly", 0))
    return int(document.get("level", 0)) + max(0, lapses)


def window(size: int, alive: int, level: int) -> int | None:
    """Return the bits of the messages that a claim hands out.

    Args:
        size: how many messages the pack had.
        alive: the bits of the messages that it has now.
        level: the level of the claim; see the head of this module.

    Returns:
        The bits, or None if a claim of the first message alone has lapsed: it must leave the pack.
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
    """Return the level of a pack after a claim of this level ended in order.

    It falls by one for each larger window that the claim has finished: the pack is past the part
    where a claim lapsed.

    Args:
        size: how many messages the pack had.
        first: the first place of the window.
        alive: the bits of the messages that the pack has now.
        level: the level of the claim.
    """
    ladder = _ladder(size)
    level = min(level, len(ladder))
    if not alive:
        return level
    next_first = first_place(alive)
    while level > 1 and first // ladder[level - 2] != next_first // ladder[level - 2]:
        level -= 1
    return level
