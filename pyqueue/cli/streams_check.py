"""The checks of ``pyqueue doctor`` on streams: packs, groups, and documents of queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pymongo import ASCENDING, DESCENDING
from pymongo.collection import Collection

from pyqueue import Client
from pyqueue.backends.namespace import HOT, RECORD_IDS, STREAM
from pyqueue.backends.streams.log import pack_id
from pyqueue.backends.streams.ranges import group_id
from pyqueue.backends.streams.retention import DELETED
from pyqueue.backends.transitions import record_id

#: How many of the newest packs are checked: a probe may run the doctor every minute.
MAX_PACKS: Final = 100
#: The fields of a pack that are read.
_PACK: Final = {
    **dict.fromkeys(("s", "n", "q", "pushed"), 1),
    "entries": {"$cond": [{"$isArray": "$b"}, {"$size": "$b"}, -1]},
}

Document = Mapping[str, Any]


def streams(client: Client) -> list[str]:
    """Return the names of the streams, including streams whose record is gone."""
    collection = client.database[client.namespace]
    records = collection.find({"_id": RECORD_IDS, "kind": STREAM}, {"q": 1, "deleted": 1})
    recorded = {each["q"] for each in records if "deleted" not in each}
    logs = {
        name.partition(":")[2]
        for name in collection.distinct("q")
        if isinstance(name, str) and name.startswith("~log:")
    }
    return sorted(recorded | logs)


def check_stream(client: Client, name: str) -> Iterator[str]:
    """Yield the faults of a stream, each with its remedy."""
    collection = client.database[client.namespace]
    record = collection.find_one({"_id": record_id(name)})
    if record is None or record.get("kind") != STREAM:
        kind = "no record" if record is None else f"the record of a {record.get('kind')!r} queue"
        yield (
            f"it has packs and {kind}: no program reads the packs; restore the record, or delete "
            "the packs"
        )
    packs = _packs(collection, name)
    yield from _gaps(name, packs)
    first = (record or {}).get("first", 0)
    end = max((each["s"] + each["n"] for each in packs if _is_pack(each)), default=0)
    yield from _groups(collection, name, max(first if isinstance(first, int) else 0, end))
    yield from _strangers(collection, name)


def first_ids(ids: Sequence[object]) -> str:
    """Return the first three ids as a text, which says whether there are more."""
    return ", ".join(map(str, ids[:3])) + (" and more" if len(ids) > 3 else "")


def _beginning(prefix: str) -> Document:
    """Return the filter for ids with a prefix. Every character of a name sorts before "\\x7f"."""
    return {"_id": {"$gte": prefix, "$lt": prefix + "\x7f"}}


def _packs(collection: Collection[dict[str, Any]], name: str) -> Sequence[Document]:
    """Return the newest packs, in order. Reading all of a long log would take too long."""
    match = {**_beginning(f"~log:{name}~"), "q": {"$ne": DELETED}}
    found = collection.find(match, _PACK, sort=[("_id", DESCENDING)], limit=MAX_PACKS)
    return list(found)[::-1]


def _is_pack(document: Document) -> bool:
    return all(
        isinstance(document.get(each), int) and not isinstance(document[each], bool)
        for each in ("s", "n")
    )


def _gaps(name: str, packs: Sequence[Document]) -> Iterator[str]:
    """Yield the faults of packs, and the gaps and overlaps between them."""
    before: int | None = None
    for each in packs:
        if not _is_pack(each) or each["_id"] != pack_id(name, each["s"]):
            yield f"{each['_id']!r} is not a pack: delete it"
            continue
        if each["entries"] != each["n"] or each.get("q") != f"~log:{name}":
            yield f"the pack {each['_id']!r} was changed: restore it from a backup"
        if before is not None and each["s"] != before:
            what = "are missing" if each["s"] > before else "are there twice"
            positions = f"{min(before, each['s'])} to {max(before, each['s']) - 1}"
            yield f"positions {positions} {what}: restore the packs from a backup"
        before = each["s"] + each["n"]


def _groups(collection: Collection[dict[str, Any]], name: str, end: int) -> Iterator[str]:
    """Yield the faults of consumer groups."""
    prefix = group_id(name, "")
    for document in collection.find(_beginning(prefix), sort=[("_id", ASCENDING)]):
        group, place = document["_id"].removeprefix(prefix), document.get("next")
        remedy = f"run `pyqueue stream seek {name} {group} ...`"
        if isinstance(place, bool) or not isinstance(place, int):
            yield f"group {group!r} has no position: {remedy}"
            continue
        if place > end:
            yield f"group {group!r} is at {place}, and the stream ends at {end}: {remedy}"
        ends = [each.get("e") for each in (*document.get("out", ()), *document.get("back", ()))]
        if any(not isinstance(each, int) or each > place for each in ends):
            yield f"group {group!r} is at {place} and holds messages beyond it: {remedy}"


def _strangers(collection: Collection[dict[str, Any]], name: str) -> Iterator[str]:
    """Yield a fault if there are messages where only the record of a stream belongs."""
    match = {"q": name, "_id": {"$ne": record_id(name)}}
    ids = [each["_id"] for each in collection.find(match, {"_id": 1}, limit=4, hint=HOT)]
    if ids:
        yield (
            f"there are messages of a queue under its name: {first_ids(ids)}; no consumer "
            "finds them: append their payloads to the stream, and delete the messages"
        )
