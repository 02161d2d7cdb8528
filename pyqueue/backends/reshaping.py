"""Reshape: change the options on which all users of a queue or of a stream agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyqueue.backends import namespace
from pyqueue.backends.indexes import indexes_of, make_indexes
from pyqueue.backends.kind import lookup, require_limit
from pyqueue.backends.limits.waiting import lift
from pyqueue.backends.naming_kind import SHAPED_VERSION
from pyqueue.backends.shared_options import SharedOptions
from pyqueue.backends.streams import log
from pyqueue.backends.transitions import record_id
from pyqueue.backends.uses import AUTO_DELETE, note, seconds_of
from pyqueue.errors import ConfigurationError, Unavailable
from pyqueue.limits import Drain, drain_of, stored_limit
from pyqueue.requests import Find, Plan, ServerTime, Signal, Update, UpdateDocument


def reshape(
    queue: str, shape: Mapping[str, object], collection: str = "pyqueue", by: str = ""
) -> Plan[None]:
    """Change options on which all users of a queue agree. Running programs follow within 5 s.

    Args:
        queue: The name of the queue.
        shape: The options to change. If ``limit`` is False, the limit is removed.
        collection: The name of the collection.
        by: The label of this process, which the record shows.

    Raises:
        ConfigurationError: The queue has no record, or its kind has no such option.
        Unavailable: Other programs keep changing the record.
    """
    deferred = False  # a try whose reply was lost may have removed the limit
    for _ in range(namespace.MAX_RACES):
        record = yield from _record(queue)
        kind = namespace.readable_kind(queue, record)
        _require_options(queue, kind, shape)
        # Before the limit is stored: consumers that follow the limit rely on the unique index.
        there = indexes_of(kind, {})
        needed = indexes_of(kind, shape).items()
        new = {name: terms for name, terms in needed if name not in there}
        yield from make_indexes(collection, new)
        if (seconds_s := seconds_of(shape)) is not None:
            yield from note(queue, seconds_s)  # before the record has the option; see ``uses``
        shared = SharedOptions(queue, record, namespace.default_shape(kind))
        before = shared.shape.get("limit")
        deferred |= "limit" in shape and isinstance(before, Mapping) and "per" in before
        update = yield from _update(record, shared, shape, by)
        unchanged = {"_id": record_id(queue), "kind": kind, **shared.as_read(shape)}
        if (yield from Update(unchanged, update)).matched:
            break
    else:
        raise Unavailable(f"queue {queue!r}: other programs keep changing its options; try again")
    if deferred:
        yield from lift(queue)
    yield from Signal(queue, None)


def _record(queue: str) -> Plan[dict[str, Any]]:
    """Return the record of a queue.

    Raises:
        ConfigurationError: The queue has no record.
    """
    match = {"_id": record_id(queue), "deleted": {"$exists": False}}
    found = yield from Find(match, limit=1)
    if not found:
        raise ConfigurationError(
            f"name: queue {queue!r} does not exist; create it with client.queue() or "
            "client.stream(), and pass the options to that method"
        )
    return found[0]


def _update(
    record: Mapping[str, Any], shared: SharedOptions, shape: Mapping[str, object], by: str
) -> Plan[UpdateDocument]:
    """Return the update that changes options in the record of a queue.

    If the update lowers a limit, it also notes which claims under the former limit still count.
    """
    now = yield from ServerTime()
    # A release that does not know shapes refuses the record from now on.
    put = {**shared.reshaping(shape, by, now), "v": SHAPED_VERSION}
    if "limit" in shape:
        stored = shared.shape.get("limit"), Drain.of(record.get("drain"))
        if drain := drain_of(*stored, shape["limit"], now):
            put["drain"] = drain._asdict()
    update: UpdateDocument = {"$set": put}
    if shape.get("limit") is False:  # the queue has no limit any more
        update = {"$set": put, "$unset": {"shape.limit": ""}}
    return update


def _require_options(queue: str, kind: str, shape: Mapping[str, object]) -> None:
    """Refuse options that a kind does not have."""
    known = _options_of(kind)
    if not shape:
        options = ", ".join(known) or "none"
        raise ConfigurationError(
            f"reshape: set at least one option; queue {queue!r} has the options {options}"
        )
    for name in shape:
        if name not in known:
            remedy = ""
            if name == AUTO_DELETE:
                remedy = "; set retention, after which a stream deletes its messages"
            raise ConfigurationError(
                f"{name}: queue {queue!r} is of kind {kind!r}, which has no such option{remedy}"
            )
    if limit := shape.get("limit"):
        if kind == namespace.STREAM:
            log.require_limit(queue, stored_limit(limit))
        else:
            require_limit(lookup(kind), queue, stored_limit(limit))


def _options_of(kind: str) -> list[str]:
    """Return the names of the options on which all users of a queue of this kind agree."""
    if kind == namespace.STREAM:
        return [*namespace.STREAM_SHAPE, "limit"]
    known = lookup(kind)
    limit = ["limit"] if "rate" in known.capabilities else []
    return [*known.shape, *limit, AUTO_DELETE]
