"""The queues of a namespace: list them, count their messages, and delete a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Final

from pyqueue import arguments
from pyqueue.backends import namespace, reading, recovering, tallies, transitions
from pyqueue.backends.applying import MAX_BATCH
from pyqueue.backends.bucket import managing
from pyqueue.backends.bucket.kind import Bucket
from pyqueue.backends.bulk import stages
from pyqueue.backends.handover import finish
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.kind import ScanStart
from pyqueue.backends.namespace import HOT
from pyqueue.backends.pages import page_end
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.streams import consumers, log, retention
from pyqueue.backends.tallies import AskEach, Listed, Pipeline, Tally
from pyqueue.clock import BAND
from pyqueue.concurrently import concurrently
from pyqueue.errors import ConfigurationError, Unavailable
from pyqueue.limits import Limit, limit_or_none
from pyqueue.messages import NEVER, ConsumerInfo, QueueInfo
from pyqueue.requests import (
    Delete,
    Distinct,
    Document,
    Find,
    ForgetQueue,
    Plan,
    ServerTime,
    Signal,
    Update,
)

#: How long the record of a deleted queue stays: every process that still uses the queue can find
#: it, and make it live again with the same kind.
_DELETED_FOR: Final = timedelta(hours=1)
#: How many queues one command counts, and of how many streams it reads the ends.
_QUEUES_PER_COMMAND: Final = 100
#: How often a deletion passes over a queue, at most, if holders keep handing its messages over.
_MAX_ROUNDS: Final = 20
#: Matches documents that list no handed-over copies, which may still have to be published.
_NOT_LISTING: Final = MappingProxyType({f"{HANDED}.h": {"$exists": False}})


def names() -> Plan[list[str]]:
    """Return the names of the queues that have a record or a message."""
    found = yield from Distinct("q")
    return sorted(name for name in found if isinstance(name, str) and not name.startswith("~"))


def queues(cap: int | None, held: bool, only: Sequence[str] | None = None) -> Plan[list[QueueInfo]]:
    """Return the queues with their message counts: up to ``cap`` per state, or all if it is None.

    If ``held`` is true, reserved and scheduled messages are counted separately, and the server must
    read all of these messages. ``only`` names the queues to return, or is None for all queues.
    """
    if cap is not None:
        arguments.count("cap", cap)
    listed = yield from tallies.listed(only if only is not None else (yield from names()))
    portions = [
        tallies.tally(listed[first : first + _QUEUES_PER_COMMAND], cap, held)
        for first in range(0, len(listed), _QUEUES_PER_COMMAND)
    ]
    tallied = [each for some in (yield from concurrently(portions)) for each in some]
    dead = _dead_letters(listed, tallied, cap)
    infos: list[QueueInfo] = []
    for each, tally in zip(listed, tallied, strict=True):
        limit: Limit | None = None
        with suppress(ConfigurationError):  # a newer release wrote it
            limit = limit_or_none(each.name, each.record.get("shape"))
        infos.append(
            QueueInfo(
                each.name,
                tally.counts,
                bool(each.record.get("paused")),
                each.kind,
                limit,
                dead=dead[each.name],
                oldest=tally.oldest,
                options=each.options(),
            )
        )
    return infos


def _dead_letters(
    listed: Sequence[Listed], tallied: Sequence[Tally], cap: int | None
) -> dict[str, int | None]:
    """Return the number of messages in each queue's dead-letter queue, keyed by queue name.

    The number is at most ``cap``. It is None for streams, for dead-letter queues, and for queues
    that share their dead-letter queue.
    """
    totals = {each.name: tally.counts.total for each, tally in zip(listed, tallied, strict=True)}
    named = {each.name: each.dead_letter() for each in listed if not each.name.endswith(".dead")}
    uses = Counter(named.values())
    found: dict[str, int | None] = {each.name: None for each in listed}
    for name, dead_letter in named.items():
        if dead_letter is not None and name not in uses and uses[dead_letter] == 1:
            total = totals.get(dead_letter, 0)
            found[name] = total if cap is None else min(cap, total)
    return found


def groups_of(streams: Sequence[str], most: int) -> Plan[dict[str, list[ConsumerInfo]]]:
    """Return the consumer groups of many streams in few commands, keyed by stream.

    Args:
        streams: The names of the streams.
        most: The maximum number of groups to read, over all streams.
    """
    every = {"_id": {"$gte": "~group:", "$lt": "~group;"}}
    found = (yield from Find(every, sort=(("_id", 1),), limit=most)) if streams else []
    documents: dict[str, list[Document]] = {}
    for each in found:
        stream = str(each.get("q")).removeprefix("~group:")
        documents.setdefault(stream, []).append(each)
    names = [each for each in streams if each in documents]
    bounds = yield from _bounds_of(names)
    now = yield from ServerTime()
    return {each: consumers.group_infos(each, documents[each], bounds[each], now) for each in names}


def _bounds_of(streams: Sequence[str]) -> Plan[dict[str, tuple[int, int]]]:
    """Return the first position and the tail of each stream, by stream; see ``log.bounds``."""
    if not streams:
        return {}
    last: list[Document] = []
    for begin in range(0, len(streams), _QUEUES_PER_COMMAND):
        some = streams[begin : begin + _QUEUES_PER_COMMAND]
        last += yield from AskEach([_last_pack(each) for each in some], majority=True)
    ids = {"_id": {"$in": [transitions.record_id(each) for each in streams]}}
    records = yield from Find(ids, {"q": 1, "first": 1}, majority=True)
    firsts = {str(each.get("q")): int(each.get("first", 0)) for each in records}
    found: dict[str, tuple[int, int]] = {}
    for name, pack in zip(streams, last, strict=True):
        first = firsts.get(name, 0)
        found[name] = first, max(first, pack["s"] + pack["n"] if pack else 0)
    return found


def _last_pack(stream: str) -> Pipeline:
    order = {"$sort": dict(log.DESCENDING)}
    return [{"$match": log.packs_between(stream)}, order, {"$limit": 1}, {"$project": log.PLACE}]


def delete_queue(queue: str, force: bool, decision: Plan[bool] | None = None) -> Plan[int]:
    """Delete a queue. Return how many messages were deleted, including the history.

    The queue's record is deleted first. A process that still uses the queue recreates that record.
    Without ``force``, no live message is ever deleted, even if it arrives during the deletion.
    ``decision`` runs right before the record is deleted. If it returns False, nothing is deleted.

    Raises:
        ConfigurationError: The queue has live messages, and ``force`` is False.
        Unavailable: The server did not answer. The error text says how many messages were deleted.
    """
    arguments.queue_name(queue)
    kind = yield from namespace.kind_of(queue)
    if kind == namespace.STREAM:
        return (yield from _delete_stream(queue, force))
    # Consumers would do this later, if at all.
    yield from recovering.recover_queue(queue, recovering.NO_GRACE)
    yield from stages.show_decided(queue)
    packs = kind == Bucket.name
    if not force:
        yield from _refuse_live(queue, packs)
    if decision is not None and not (yield from decision):
        return 0
    yield from bury_record(queue)
    yield from ForgetQueue(queue)
    deleted = 0
    try:
        if not force:
            try:
                yield from _refuse_live(queue, packs)  # messages that arrived before the deletion
            except ConfigurationError:
                yield from namespace.revive_record(queue, {})
                raise
        start: ScanStart | None = None
        for _ in range(_MAX_ROUNDS):
            passed_over = 0
            while True:
                number, passed, start = yield from _delete_page(queue, start, force, packs)
                deleted += number
                passed_over += passed
                if start is None:
                    break
            if not force or not passed_over:
                break
        if force:  # foreign documents, whose ``when`` is not a date
            rest = {"q": queue, **transitions.messages_only(queue), **_NOT_LISTING}
            deleted += yield from Delete(rest, many=True)
        levels = {"_id": {"$in": transitions.level_record_ids(queue)}}
        yield from Delete(levels, many=True)
        yield from stages.delete(queue)
        yield from recovering.recover_queue(queue, recovering.NO_GRACE)  # decisions made since
    except Unavailable as error:
        raise Unavailable(
            f"{error}; {deleted} messages were deleted; call delete_queue() again for the rest"
        ) from error
    yield from Signal(queue, None)
    return deleted


def _delete_page(
    queue: str, start: ScanStart | None, force: bool, packs: bool
) -> Plan[tuple[int, int, ScanStart | None]]:
    """Delete one page of messages, after publishing the documents that they have handed over.

    Returns:
        How many messages were deleted, how many documents were skipped, and where the next page
        starts, or None after the last page.
    """
    upto = {"$lte": NEVER} if force else {"$gte": BAND}
    match = transitions.scan_range(queue, upto, start, transitions.messages_only(queue))
    fields = {"_id": 1, "when": 1, HANDED: 1, **({"n": 1} if packs else {})}
    page = yield from Find(match, fields, sort=SCAN_ORDER, limit=MAX_BATCH, hint=HOT)
    if not page:
        return 0, 0, None
    for each in page:
        yield from finish(each)
    ids = {"_id": {"$in": [each["_id"] for each in page]}, "q": queue}
    only_finished = {} if force else {"processed": {"$exists": True}}
    number = yield from Delete({**ids, **only_finished, **_NOT_LISTING}, many=True, hint="_id_")
    passed_over = len(page) - number
    there: list[object] = []
    if passed_over:
        there = [each["_id"] for each in (yield from Find(ids, {"_id": 1}))]
    if packs:  # a deleted pack counts as the messages in it
        number += sum(each["n"] - 1 for each in page if "n" in each and each["_id"] not in there)
    return number, passed_over, page_end(page) if len(page) == MAX_BATCH else None


def bury_record(queue: str) -> Plan[None]:
    """Mark the record of a queue as deleted. The server removes it later."""
    now = yield from ServerTime()
    deleted = {"q": retention.DELETED, "deleted": now}
    deleted |= {"processed": now, "expires": now + _DELETED_FOR}
    match = {"_id": transitions.record_id(queue), "deleted": {"$exists": False}}
    yield from Update(match, {"$set": deleted, "$unset": {"paused": ""}})


def _delete_stream(stream: str, force: bool) -> Plan[int]:
    """Delete a stream. If it is used again within an hour, its positions are not reused."""
    first = yield from log.first_position(stream)
    _, end = yield from log.bounds(stream)
    if end > first and not force:
        raise ConfigurationError(
            f"force: stream {stream!r} has {end - first} messages; pass force=True to delete "
            "them, too"
        )
    yield from bury_record(stream)
    yield from ForgetQueue(stream)
    for group in (yield from consumers.groups(stream)):
        yield from consumers.delete_group(stream, group.name)
    # Without ``force``, messages that were appended since the check stay.
    deleted = yield from retention.drop(stream, None if force else end)
    yield from Signal(stream, None)
    return deleted


def _refuse_live(queue: str, packs: bool) -> Plan[None]:
    if (yield from Find(transitions.live(queue, None), {"_id": 1}, limit=1, hint=HOT)):
        counts = yield from (managing if packs else reading).counts(queue, None)
        raise ConfigurationError(
            f"force: queue {queue!r} has {counts.ready} ready, {counts.scheduled} scheduled and "
            f"{counts.reserved} reserved messages; finish or move them, or pass force=True to "
            "delete them, too"
        )
