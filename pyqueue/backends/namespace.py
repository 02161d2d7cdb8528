"""The record of each queue.

The record of a queue is a document in the same collection. It lists the queue and stores its pause
flag. It also has a kind and a version. So a later release can add kinds, and this release refuses
such queues instead of misreading them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from pyqueue.backends import kind as kinds
from pyqueue.backends.kind import Kind
from pyqueue.backends.naming_kind import GUESSED_KIND, SHAPED_VERSION, name_kind, put_level_records
from pyqueue.backends.options import Options, Target
from pyqueue.backends.shared_options import SharedOptions, named_options
from pyqueue.backends.transitions import record_id
from pyqueue.documents import listed_levels
from pyqueue.errors import ConfigurationError, OtherKind, TargetRefused, Unavailable
from pyqueue.payloads import Codec
from pyqueue.requests import (
    Delete,
    Document,
    EnsureQueue,
    Find,
    FindAndModify,
    ForgetQueue,
    Plan,
    ServerTime,
    Signal,
    Update,
)

log = logging.getLogger("pyqueue")

#: The index of the standard claims. Claims name it, so that its absence is noticed at once.
HOT: Final = "hot"
#: The index of named claims.
CLAIMS: Final = "claims"

#: The version of a record without a shape, and the latest version that this release reads.
VERSION: Final = 1
LATEST_VERSION: Final = 2
#: How many times a plan reads a record again because another program has changed it.
MAX_RACES: Final = 20
_MISSING: Final = object()

#: The kind in the record of a stream, and the options that are the same for all its users.
STREAM: Final = "stream"
STREAM_SHAPE: Final[Mapping[str, object]] = {"retention": 7 * 86400.0}

#: The range of the ids of records.
RECORD_IDS: Final[Mapping[str, str]] = {"$gte": record_id(""), "$lt": "~queue;"}
#: After this time, the record of a deleted queue counts as missing, so that the name can get
#: another kind: a producer may rely on the record for 30 s, and then spend 30 s on a command.
_FORGOTTEN_AFTER: Final = timedelta(minutes=2)
#: The fields of a record that a consumer reads from time to time.
_FLAGS: Final = dict.fromkeys(("paused", "deleted", "levels", "shape", "kind", "drain"), 1)
#: The fields that the deletion of a queue adds to its record.
DELETION_MARKS: Final[Mapping[str, str]] = {"deleted": "", "processed": "", "expires": ""}


class QueueRecord(NamedTuple):
    """The part of a queue's record that a client remembers."""

    kind: str
    shape: Mapping[str, object]
    #: The priority levels that are in use, if the queue has priorities.
    levels: frozenset[int] = frozenset()
    #: Whether no program has named the kind yet.
    open: bool = False
    #: Whether a client may remember the record: it exists, and the queue was not deleted.
    live: bool = True
    #: Whether the options in the record were compared with the options of the caller.
    compared: bool = True


# ---- the record of a queue


def read_or_create_record(
    request: EnsureQueue,
    shown: Mapping[str, Any] | None = None,
    *,
    compare: bool = True,
    agreed: bool = False,
    by: str = "",
) -> Plan[QueueRecord]:
    """Return the content of a queue's record; create the record if it is missing.

    If the request names a kind or shape options that no program has named, the record gets them.

    Args:
        request: The queue, its kind and shared options, and the levels to list in the record.
        shown: The options that the record shows to people, or None to keep the stored options.
        compare: Whether to warn if the record shows other options, and to replace them.
        agreed: Whether the record agreed with the request before. If so, its changes are accepted.
        by: The label of this process.

    Raises:
        ConfigurationError: This release does not know the kind, or a shared option differs.
        Unavailable: Other programs keep changing the record.
    """
    queue, match = request.queue, {"_id": record_id(request.queue)}
    for _ in range(MAX_RACES):
        record = yield from _find_or_create(request, shown, compare, by)
        if record is None:
            return QueueRecord("", {}, live=False)
        kind = readable_kind(queue, record)
        is_open = record.get("open") is True
        if is_open and not request.guessed and request.kind in kinds.known():
            yield from name_kind(queue, record, kinds.lookup(request.kind))
            continue
        shared = SharedOptions(queue, record, default_shape(kind))
        known = listed_levels(record.get("levels"))
        if kind != request.kind:  # the caller refuses it, or only asked for the kind
            live, compared = "deleted" not in record, request.kind is not None
            return QueueRecord(
                kind, shared.shape, frozenset(known), is_open, live, compared=compared
            )
        named = {} if agreed else shared.unnamed(request.shape)
        if not named:
            break
        # Name all of them or none, and only if the compared options have not changed.
        unchanged = {**match, "kind": kind, **shared.as_read(request.shape)}
        now = yield from ServerTime()
        put = {"v": SHAPED_VERSION, **shared.naming(named, by, now)}
        if (yield from Update(unchanged, {"$set": put})).matched:
            yield from Signal(queue, None)  # consumers read the record again
            break
    else:
        raise Unavailable(f"queue {queue!r}: other programs keep changing its options; try again")
    if new := [each for each in request.levels if each not in known]:
        yield from Update(match, {"$addToSet": {"levels": {"$each": new}}})
        yield from put_level_records(queue, new)
        yield from Signal(queue, None)
    return QueueRecord(kind, {**shared.shape, **named}, frozenset((*known, *new)), is_open)


def _find_or_create(
    request: EnsureQueue, shown: Mapping[str, Any] | None, compare: bool, by: str
) -> Plan[Mapping[str, Any] | None]:
    """Return the record of a queue; create it if it is missing and the request names a kind.

    See ``read_or_create_record`` for the arguments.
    """
    queue, kind, match = request.queue, request.kind, {"_id": record_id(request.queue)}
    found = yield from Find(match, limit=1)
    if found and (yield from _counts_as_missing(queue, found[0])):
        if kind is not None:
            yield from Delete({**match, "deleted": found[0]["deleted"]})
    elif found:
        record = found[0]
        stored_kind = readable_kind(queue, record)
        if "deleted" in record and (stored_kind == kind or request.guessed):
            yield from revive_record(queue, record, by)
        if shown and compare and stored_kind == kind:
            yield from _store_options(queue, record.get("options"), shown)
        return record
    if kind is None:
        return None
    if kind in kinds.known():
        yield from kinds.known()[kind].prepare()
    now = yield from ServerTime()
    new = new_record(queue, now, kind, request.shape, by)
    if shown is not None:
        new["options"] = shown
    if request.guessed:
        new["open"] = True  # the first program that names a kind decides it; see ``naming_kind``
    stored = yield from FindAndModify(match, {"$setOnInsert": new}, upsert=True)
    return stored or new  # another program may have created it before


def _store_options(queue: str, stored: object, given: Mapping[str, Any]) -> Plan[None]:
    """Store the options that the caller gave, and warn if other values were stored."""
    if not isinstance(stored, Mapping):
        yield from Update({"_id": record_id(queue)}, {"$set": {"options": dict(given)}})
        return
    new = {name: value for name, value in given.items() if stored.get(name, _MISSING) != value}
    if differ := sorted(name for name in new if name in stored):
        text = ", ".join(f"{name}={new[name]!r} (before: {stored[name]!r})" for name in differ)
        log.warning("queue %r is used with different options than before: %s", queue, text)
    if new:
        put = {f"options.{name}": value for name, value in new.items()}
        yield from Update({"_id": record_id(queue)}, {"$set": put})


def default_shape(kind: str) -> Mapping[str, object]:
    """Return the options on which all users of a queue of this kind agree, with their defaults."""
    if kind == STREAM:
        return STREAM_SHAPE
    return kinds.known()[kind].shape if kind in kinds.known() else {}


def new_record(
    queue: str, now: datetime, kind: str, shape: Mapping[str, object], by: str = ""
) -> dict[str, Any]:
    """Return a new record of a queue. ``by``: the label of the process that creates it."""
    record = {"q": queue, "when": now, "record": True, "kind": kind, "v": VERSION}
    record["made"] = {"by": by, "at": now}
    merged = {**default_shape(kind), **shape}
    if merged:
        record |= {"v": SHAPED_VERSION, "shape": merged}
    if shape:
        record["named"] = named_options(shape, by, now)
    return record


def readable_kind(queue: str, record: Document | Mapping[str, object]) -> str:
    """Return the kind of a queue, from its record.

    Raises:
        ConfigurationError: This release does not know the kind, or the version of the record.
    """
    kind, version = record.get("kind"), record.get("v")
    if not isinstance(kind, str) or not isinstance(version, int) or version > LATEST_VERSION:
        raise ConfigurationError(
            f"queue {queue!r} is of kind {kind!r}, version {version!r}, which the installed "
            "pyqueue-mongo does not support; upgrade pyqueue-mongo"
        )
    return kind


def _counts_as_missing(queue: str, record: Mapping[str, Any]) -> Plan[bool]:
    """Return whether a record counts as missing, because its queue was deleted a while ago.

    The record of a stream counts as present until the server removes it, since positions continue.
    """
    deleted = record.get("deleted")
    if not isinstance(deleted, datetime) or record.get("kind") == STREAM:
        return False
    if (yield from ServerTime()) - deleted < _FORGOTTEN_AFTER:
        return False
    # An interrupted deletion leaves messages, which another kind might misread.
    messages = {"q": queue, "record": {"$exists": False}}
    return not (yield from Find(messages, {"_id": 1}, limit=1))


def revive_record(queue: str, record: Mapping[str, Any], by: str | None = None) -> Plan[None]:
    """Make the record of a deleted queue live again.

    Args:
        queue: The name of the queue.
        record: Its record, including its levels.
        by: The label of the process that uses the queue, or None if the deletion was called off.
    """
    match = {"_id": record_id(queue), "deleted": {"$exists": True}}
    put: dict[str, object] = {"q": queue}  # the deletion changed it
    if by is not None:
        put["made"] = {"by": by, "at": (yield from ServerTime())}
    yield from Update(match, {"$set": put, "$unset": DELETION_MARKS})
    yield from put_level_records(queue, listed_levels(record.get("levels")))


def ensure(
    queue: str,
    kind: Kind,
    options: Options | None,
    priorities: Collection[int | None] = (),
) -> Plan[None]:
    """Create the record of a queue if it is missing; see ``ensuring`` for the arguments.

    Raises:
        ConfigurationError: The queue is of another kind.
    """
    return ensured(ensuring(queue, kind, options, priorities), kind)


def ensured(request: EnsureQueue, kind: Kind) -> Plan[None]:
    """Carry out a request that ``ensuring`` has returned.

    Raises:
        ConfigurationError: The queue is not of this kind.
    """
    stored: str = yield request
    if stored != kind.name:
        raise (yield from wrong_kind(request.queue, kind, stored))


def ensuring(
    queue: str,
    kind: Kind,
    options: Options | None,
    priorities: Collection[int | None] = (),
    *,
    receives: bool = False,
) -> EnsureQueue:
    """Return the request to create the record of a queue if it is missing.

    Args:
        queue: The name of the queue.
        kind: Its kind.
        options: The options of the Queue object, or None if there is no object.
        priorities: The priorities of the messages that enter, for a kind with priorities; None
            means the default priority.
        receives: Whether the caller receives messages, which counts as naming the kind.
    """
    name = kind.name
    levels = kind.levels(priorities)
    # Without a named kind, "standard" may be only a guess; see ``naming_kind``.
    guessed = name == GUESSED_KIND and not (receives or (options and options.names_kind))
    shown = None if options is None else partial(options.shown, queue)
    shape = {} if options is None else options.shape
    return EnsureQueue(queue, name, shown, shape, levels, guessed=guessed)


def check_kind(queue: str, kind: Kind) -> Plan[None]:
    """Refuse a queue of another kind. This creates no record.

    Raises:
        ConfigurationError: The queue is of another kind.
    """
    stored = yield from kind_of(queue)
    if stored is not None and stored != kind.name:
        if stored == GUESSED_KIND:
            yield from ensure(queue, kind, None)  # perhaps no program has named the kind
        else:
            raise (yield from wrong_kind(queue, kind, stored))


def wrong_kind(queue: str, kind: Kind, stored: str) -> Plan[ConfigurationError]:
    """Return the error for using a queue as another kind than the one in its record."""
    if stored == STREAM:
        return ConfigurationError(
            f"name: {queue!r} is a stream; open it with client.stream(), or use another name for "
            "the queue"
        )
    found = yield from Find({"_id": record_id(queue)}, {"made": 1, "deleted": 1}, limit=1)
    made = found[0].get("made") if found else None
    origin = ""
    if isinstance(made, Mapping) and isinstance(made.get("at"), datetime):
        origin = f", made by {made.get('by') or '?'} at {made['at']:%Y-%m-%d %H:%M:%S} UTC"
    if found and "deleted" in found[0]:
        origin += ", deleted less than two minutes ago"
    return OtherKind(
        f"kind: queue {queue!r} is of kind {stored!r}{origin}, and not {kind.name!r}; set "
        f"kind={stored!r}, or use another name",
        queue,
    )


def kind_of(queue: str) -> Plan[str | None]:
    """Return the kind of a queue, or None if it has no record.

    Raises:
        ConfigurationError: This release does not know the kind.
    """
    found = yield from Find({"_id": record_id(queue)}, {"kind": 1, "v": 1, "deleted": 1}, limit=1)
    if not found or (yield from _counts_as_missing(queue, found[0])):
        return None
    return readable_kind(queue, found[0])


def target(queue: str, priorities: Collection[int | None] = ()) -> Plan[Target]:
    """Return a queue that is known only by its name, as a target for messages.

    A new queue counts as a standard queue until a program names its kind. ``priorities``: the
    priorities of the messages that enter it.

    Raises:
        ConfigurationError: This release does not know its kind.
        TargetRefused: The queue is a stream.
    """
    kind = target_kind(queue, (yield from EnsureQueue(queue, GUESSED_KIND, guessed=True)))
    if kind.levels(priorities):
        yield from ensure(queue, kind, None, priorities)
    return Target(queue, kind, Codec[Any](), None)


def target_kind(queue: str, name: str, argument: str = "to") -> Kind:
    """Return the kind with this name, for a queue to which messages move.

    Raises:
        ConfigurationError: This release does not know the kind.
        TargetRefused: The queue is a stream.
    """
    if name == STREAM:
        raise TargetRefused(
            f"{argument}: {queue!r} is a stream, and messages cannot move there; append the "
            "payload to the stream, or name a queue"
        )
    if name not in kinds.known():
        raise ConfigurationError(
            f"{argument}: queue {queue!r} is of kind {name!r}, which the installed pyqueue-mongo "
            "does not support; upgrade pyqueue-mongo"
        )
    return kinds.lookup(name)


def dead_letter_target(
    queue: str, kind: Kind, dead_letter: str, priorities: Collection[int | None] = ()
) -> Plan[Target]:
    """Return the dead-letter queue of a queue.

    ``priorities``: the priorities of the messages to bury.

    Raises:
        ConfigurationError: The kind of the queue offers no dead-letter queue.
    """
    kinds.require(kind, queue, "dead_letter")
    return (yield from target(dead_letter, priorities))


def flags(queue: str) -> Plan[Document]:
    """Return the fields of a queue's record that consumers follow, or {} if there is no record."""
    found = yield from Find({"_id": record_id(queue)}, _FLAGS, limit=1)
    return found[0] if found else {}


def followed(queue: str, kind: Kind, options: Options, by: str) -> Plan[Document]:
    """Return the flags of a queue for a consumer. If the queue was deleted, make it live again.

    Raises:
        ConfigurationError: The queue was deleted, and created again with another kind.
    """
    record = yield from flags(queue)
    if not record:
        # A fail-over undid the record, or the collection was dropped. Its limit must still hold.
        yield from ForgetQueue(queue)
        yield from ensure(queue, kind, options)
        record = yield from flags(queue)
    if (stored := record.get("kind", kind.name)) != kind.name:
        raise (yield from wrong_kind(queue, kind, str(stored)))
    if "deleted" in record:
        yield from revive_record(queue, record, by)
    return record
