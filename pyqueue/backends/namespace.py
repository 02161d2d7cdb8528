"""What all queues of a namespace share: its indexes, and the record of each queue. Plans only: no I/O, no client.

A record is one more document of the collection. It lists the queue and carries its pause flag; its kind and version let later
releases add backends that older ones refuse instead of misreading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pyqueue.errors import ConfigurationError, DuplicateKey, NotPermitted
from pyqueue.messages import Id
from pyqueue.requests import (
    CreateIndex,
    Distinct,
    Find,
    FindAndModify,
    Indexes,
    Plan,
    ServerTime,
    Update,
)

__all__ = [
    "CLAIMS",
    "HOT",
    "INDEXES",
    "anywhere",
    "enter",
    "kind_of",
    "make_indexes",
    "names",
    "nothing",
    "options_of",
    "paused",
    "record_id",
    "set_paused",
]

log = logging.getLogger("pyqueue")

#: The index that claims run on; they name it, so that its absence is noticed at once.
HOT: Final = "hot"
#: The index of named claims.
CLAIMS: Final = "claims"

INDEXES: Final[Mapping[str, tuple[list[tuple[str, int]], dict[str, Any]]]] = {
    HOT: ([("q", 1), ("when", 1), ("_id", 1)], {}),
    "key": (
        [("q", 1), ("key", 1)],
        {"unique": True, "partialFilterExpression": {"key": {"$exists": True}}},
    ),
    # The length of a history is each queue's own, so a document says itself when it expires.
    "expires": (
        [("expires", 1)],
        {"expireAfterSeconds": 0, "partialFilterExpression": {"processed": {"$exists": True}}},
    ),
    CLAIMS: (
        [("claim.g", 1), ("claim.n", 1), ("_id", 1)],
        {"partialFilterExpression": {"claim.g": {"$exists": True}}},
    ),
}

VERSION: Final = 1


def record_id(queue: str) -> str:
    """The _id of a queue's record; no message can have it."""
    return f"~queue:{queue}"


def make_indexes(namespace: str) -> Plan[None]:
    """Make the indexes that are missing.

    Raises:
        ConfigurationError: they are missing and may not be made; the text has the commands for an administrator.
    """
    try:
        for name, (keys, options) in INDEXES.items():
            yield CreateIndex(name, keys, options)
    except DuplicateKey as error:
        raise ConfigurationError(
            f"the unique index on message keys of namespace {namespace!r} cannot be made: while it was missing (the collection was dropped?) "
            "messages with equal keys came in. Remove or finish one of each pair, e.g. with Queue.remove"
        ) from error
    except NotPermitted as error:
        try:
            present = yield Indexes()
        except NotPermitted:
            present = {}
        missing = [name for name in INDEXES if name not in present]
        if missing:
            commands = "\n".join(_command(namespace, name) for name in missing)
            raise ConfigurationError(
                f"this database user may not create the indexes of namespace {namespace!r}, and {', '.join(missing)} could not be "
                f"found. Grant it createIndex and listIndexes on the collection, or have an administrator run:\n{commands}"
            ) from error


def _command(namespace: str, name: str) -> str:
    keys, options = INDEXES[name]
    described = {"name": name, **options}
    return (
        f"  db.getCollection({namespace!r}).createIndex({_shell(dict(keys))}, {_shell(described)})"
    )


def _shell(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{_shell(key) if '.' in key else key}: {_shell(item)}"
                for key, item in value.items()
            )
            + "}"
        )
    return str(value).lower() if isinstance(value, bool) else repr(value)


def enter(queue: str, kind: str, shown: Callable[[], Mapping[str, Any]] | None) -> Plan[str]:
    """Read the record of a queue, or make it; answer its kind. ``shown`` tells what it shows of the queue's use to people."""
    options = None if shown is None else shown()
    found = yield Find({"_id": record_id(queue)}, limit=1)
    if found:
        record = found[0]
        _known(queue, record)
        seen = record.get("options")
        if options is not None and seen != options and record["kind"] == kind:
            if isinstance(seen, Mapping):
                differ = sorted(
                    name for name in {*seen, *options} if seen.get(name) != options.get(name)
                )
                log.warning(
                    "queue %r is used with different options than before: %s",
                    queue,
                    ", ".join(differ),
                )
            yield Update({"_id": record["_id"]}, {"$set": {"options": options}})
        return str(record["kind"])
    now = yield ServerTime()
    fresh = _fresh(queue, now, kind) | ({} if options is None else {"options": options})
    record = yield FindAndModify({"_id": record_id(queue)}, {"$setOnInsert": fresh}, upsert=True)
    _known(queue, record)
    return str(record["kind"])


def _fresh(queue: str, now: datetime, kind: str) -> dict[str, Any]:
    return {"q": queue, "when": now, "record": True, "kind": kind, "v": VERSION}


def _known(queue: str, record: Mapping[str, Any]) -> None:
    if (
        not isinstance(record.get("kind"), str)
        or not isinstance(record.get("v"), int)
        or record["v"] > VERSION
    ):
        raise ConfigurationError(
            f"queue {queue!r} is of kind {record.get('kind')!r}, version {record.get('v')!r}, which this release does not know: "
            "update pyqueue-mongo here"
        )


def kind_of(queue: str) -> Plan[str | None]:
    """The kind of a queue, of which no record is made; None: it has none.

    Raises:
        ConfigurationError: this release does not know it.
    """
    found = yield Find({"_id": record_id(queue)}, {"kind": 1, "v": 1}, limit=1)
    if not found:
        return None
    _known(queue, found[0])
    return str(found[0]["kind"])


def paused(queue: str) -> Plan[bool]:
    """Whether a queue is paused; one without a record is not."""
    found = yield Find({"_id": record_id(queue)}, {"paused": 1}, limit=1)
    return bool(found and found[0].get("paused"))


def set_paused(queue: str, kind: str, value: bool) -> Plan[None]:
    """Pause a queue or let it go on."""
    now = yield ServerTime()
    fresh = _fresh(queue, now, kind)
    yield Update(
        {"_id": record_id(queue)}, {"$set": {"paused": value}, "$setOnInsert": fresh}, upsert=True
    )


def options_of(queue: str) -> Plan[Mapping[str, Any]]:
    """The options that were last used with a queue; none if it has no record."""
    found = yield Find({"_id": record_id(queue)}, {"options": 1}, limit=1)
    options = found[0].get("options") if found else None
    return options if isinstance(options, Mapping) else {}


def anywhere(ids: Sequence[Id]) -> Plan[tuple[datetime, list[Mapping[str, Any]]]]:
    """The instant, and the messages with one of these ids, whatever queue they are in."""
    now = yield ServerTime()
    return now, (yield Find({"_id": {"$in": list(ids)}}))


def nothing() -> Plan[None]:
    """Ask for nothing; running it reaches the server, and sees to the clock and the indexes."""
    yield ServerTime()


def names() -> Plan[list[str]]:
    """The queues that have a record or a message."""
    found = yield Distinct("q")
    return sorted(name for name in found if isinstance(name, str) and not name.startswith("~"))
