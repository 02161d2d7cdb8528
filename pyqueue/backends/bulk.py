"""Looking at, and writing, many messages from many processes at once: what a distributed reader or writer is made of.

Plans only: no I/O, no client. *Glimpses* divide what is ready among readers who consume nothing. *Staging* writes messages where no consumer
sees them, until all of them are shown: a document of the collection whose queue is no queue. What a writer that died leaves there, the
TTL index takes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends.namespace import HOT
from pyqueue.backends.scan import ScanStart
from pyqueue.backends.standard import BATCH, Settlement, SettlementResult, Standard
from pyqueue.errors import ConfigurationError, InvalidMessage, QueueError
from pyqueue.messages import Id, Reservation
from pyqueue.payloads import encode
from pyqueue.requests import (
    Count,
    Delete,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateEach,
)

__all__ = ["NewMessage", "Slice", "Staging", "append", "page", "pass_on", "slices"]

#: For how long staged messages wait to be shown.
STAGED: Final = timedelta(days=7)


class NewMessage(NamedTuple):
    """A message to be written; the id is the caller's, or None."""

    id: str | None
    payload: Any
    headers: Mapping[str, Any] | None = None
    key: str | None = None


def _documents(
    backend: Standard,
    fresh: Iterable[NewMessage],
    now: datetime,
    more: Mapping[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], list[Any], list[bool]]:
    """The documents, with ``more`` in each, the same encoded, and whether each id was given.

    Raises:
        InvalidMessage, ConfigurationError: one cannot be stored.
    """
    documents: list[dict[str, Any]] = []
    packed: list[Any] = []
    given: list[bool] = []
    for each in fresh:
        id = None if each.id is None else arguments.identity(each.id)
        document = backend._document(
            now,
            now,
            backend.codec.dump(each.payload),
            arguments.headers(each.headers),
            None if each.key is None else arguments.key(each.key),
            id,
        )
        if more:
            document.update(more)
        try:
            packed.append(encode(document))
        except InvalidMessage as error:
            raise InvalidMessage(
                f"{error}; in row {len(documents)}" + (f" with id {id}" if id else "")
            ) from error
        documents.append(document)
        given.append(id is not None)
    once: set[Id] = set()
    for document in documents:
        if document["_id"] in once:
            raise ConfigurationError(
                f"id: {document['_id']!r} is that of several rows: each message needs one of its own"
            )
        once.add(document["_id"])
    return documents, packed, given


def append(backend: Standard, fresh: Iterable[NewMessage], *, session: Any = None) -> Plan[int]:
    """Write messages. One whose id is the queue's already is the same message; one whose key is taken is left out. Answers how many are there.

    Raises:
        DuplicateKey: an id belongs to a message that was never in this queue.
    """
    now = yield ServerTime()
    documents, packed, given = _documents(backend, fresh, now)
    if not documents:
        return 0
    yield from backend._enter()
    strangers: list[Id] = []
    answers, _ = yield from backend._put(documents, packed, given, strangers, session)
    backend._strangers(strangers)
    return sum(answer is not None for answer in answers)


# ---- looking


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of what was ready at an instant: above one place in the order and up to another; None: no bound."""

    now: datetime
    above: ScanStart | None
    upto: tuple[datetime, Id] | None


def slices(backend: Standard, parts: int) -> Plan[list[Slice]]:
    """Divide what is ready now into up to so many parts that have nothing in common."""
    now = yield ServerTime()
    ready = backend.claimable(now)
    total: int = yield Count(ready, HOT)
    pieces = min(parts, total)
    bounds: list[tuple[datetime, Id] | None] = [None]
    for piece in range(1, pieces):
        found = yield Find(
            ready,
            {"_id": 1, "when": 1},
            sort=backend.order,
            skip=total * piece // pieces - 1,
            limit=1,
            hint=HOT,
        )
        if found:  # there may be fewer by now
            bounds.append((found[0]["when"], found[0]["_id"]))
    return [
        Slice(now, above, upto) for above, upto in zip(bounds, [*bounds[1:], None], strict=True)
    ]


def page(backend: Standard, part: Slice, limit: int) -> Plan[list[dict[str, Any]]]:
    """The first stored documents of a part; those that follow are a part ``above`` the last."""
    latest = part.now if part.upto is None else min(part.now, part.upto[0])
    match = backend.claimable(latest, part.above)
    if part.upto is not None:
        when, id = part.upto
        below: list[dict[str, Any]] = [{"when": {"$lt": when}}, {"when": when, "_id": {"$lte": id}}]
        if isinstance(
            id, ObjectId
        ):  # $lte compares within one type, and all strs come before ObjectIds
            below.append({"when": when, "_id": {"$type": "string"}})
        match = {"$and": [match, {"$or": below}]}
    found: list[dict[str, Any]] = yield Find(match, sort=backend.order, limit=limit, hint=HOT)
    return found


# ---- staging


class Staging:
    """The plans of one job that writes messages in many processes, and shows all of them or none. Plain data: it pickles."""

    __slots__ = ("_prefix", "backend")

    def __init__(self, backend: Standard, job: str) -> None:
        self.backend = backend
        #: No queue's name begins so.
        self._prefix = f"~staged:{backend.queue}:{job}:"

    def write(self, place: str, fresh: Iterable[NewMessage]) -> Plan[int]:
        """Write messages out of sight, at a place of one attempt's own. Answers how many.

        What another attempt staged with the same id is replaced; what is in the queue already is the same message.

        Raises:
            DuplicateKey: an id belongs to a message that was never in this queue.
        """
        now = yield ServerTime()
        hidden = {
            "q": self._prefix + place,
            "staged": True,
            "processed": now,
            "expires": now + STAGED,
        }
        _, missing, _ = _documents(self.backend, fresh, now, hidden)
        written = 0
        for again in (True, False):
            if not missing:
                break
            faults = yield Insert(missing)
            written += len(missing) - len(faults)
            for fault in faults:
                if fault.field is None:
                    raise fault.error
            # One whose key another row here has is left out, as by any push.
            missing = [missing[fault.place] for fault in faults if fault.field == "_id"]
            if missing and again:
                yield Delete(
                    {"_id": {"$in": [each["_id"] for each in missing]}, "staged": True}, many=True
                )
        if missing:
            ids = [each["_id"] for each in missing]
            there = yield from self.backend._whose(ids, None)
            self.backend._strangers([id for id in ids if not there.get(id)])
        return written

    def publish(self, places: Mapping[str, int]) -> Plan[int]:
        """Show what was written at these places, if it is as many as is said; what others left of this job is deleted.

        Raises:
            QueueError: some is missing; nothing is shown.
        """
        yield from self.backend._enter()
        for place, expected in places.items():
            there: int = yield Count({"q": self._prefix + place}, HOT)
            if there != expected:
                raise QueueError(
                    f"queue {self.backend.queue!r}: {expected} messages were staged at {place}, and {there} are there: an id is that of "
                    "several rows, or another job with the same ids ran at the same time, or it took more than a week. Nothing was shown"
                )
        now = yield ServerTime()
        show = {
            "$set": self.backend.entering(now),
            "$unset": {"staged": "", "processed": "", "expires": ""},
        }
        done = 0
        for place in places:
            here = {"q": self._prefix + place}
            done += (yield Update(here | {"key": {"$exists": False}}, show, many=True)).matched
            keyed: Sequence[Mapping[str, Any]] = yield Find(here, {"_id": 1}, hint=HOT)
            for start in range(0, len(keyed), BATCH):
                some = [
                    ({"_id": each["_id"], **here}, show) for each in keyed[start : start + BATCH]
                ]
                matched, _ = yield UpdateEach(some)  # whose key is taken stays behind
                done += matched
        yield from self.discard()
        if done:
            yield Signal(self.backend.queue, now)
        return done

    def discard(self) -> Plan[None]:
        """Delete all that this job has staged."""
        yield Delete({"q": {"$gte": self._prefix, "$lt": self._prefix[:-1] + ";"}}, many=True)


# ---- passing on


def pass_on(
    backend: Standard, target: Standard, pairs: Sequence[tuple[Reservation[Any], NewMessage]]
) -> Plan[list[tuple[Reservation[Any], SettlementResult]]]:
    """Move held messages, each with a payload, headers and key of its own, in one atomic update each. Answers how each went.

    Headers are added to those that the message has; without a key it leaves its key behind, as by ``Queue.move``.
    """
    yield from target._enter()
    acts = []
    for held, fresh in pairs:
        labels = arguments.headers(fresh.headers) or {}
        key = None if fresh.key is None else arguments.key(fresh.key)
        value = backend._value(target.codec, fresh.payload)
        acts.append(
            Settlement(
                held, partial(backend._passing, target, labels, {}, None, key, value, held.key)
            )
        )
    outcomes = yield from backend._apply(acts)
    return [(held, outcome) for (held, _), outcome in zip(pairs, outcomes, strict=True)]
