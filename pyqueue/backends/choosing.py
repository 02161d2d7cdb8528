"""Reserve a chosen message: a person or a program picks it, not the order of the queue.

The message is claimed by the kind of its queue, with a scan that finds this message only. So it
takes a slot, a permit and its group's lock, like any other message. The message may be scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.managing import find_packed
from pyqueue.backends.byte_limit import ByteLimit, Limits
from pyqueue.backends.claim_terms import ClaimTerms, Scan
from pyqueue.backends.claiming import Claimed
from pyqueue.backends.kind import Kind, Ordering, ScanStart
from pyqueue.backends.options import QueueTerms
from pyqueue.backends.receiving import CLAIMS, Reception, Waiting, accept_each
from pyqueue.backends.scan import Scanned, ScanState
from pyqueue.errors import ConfigurationError
from pyqueue.messages import MAX_RECEIVED_BYTES, NEVER, Duration, Id, Message
from pyqueue.requests import MAX_LOCKABLE, Coalesce, Filter, Find, Plan, ServerTime

_BY_ID: Final = "_id_"


class _OneMessage:
    """A ``scan.Line`` that contains only one message, which need not be ready."""

    in_ranges: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, id: Id) -> None:
        self._id = id

    def ordering(self, kind: Kind) -> Ordering:
        """Return the index on ``_id``, and an order, which does not matter for one message."""
        return Ordering(kind.order, _BY_ID)

    def start(self) -> ScanStart | None:
        """Return None, because a scan for one message needs no starting position."""
        return None

    def claimable(self, kind: Kind, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches the message unless it is held."""
        free = transitions.not_held_filter(queue, now)
        return {**free, "_id": self._id, "n": {"$exists": False}}

    def learn(self, seen: Scanned, margin: ScanStart) -> None:
        """Learn nothing about other messages."""

    def move_back(self, when: datetime) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _ChosenScan(Scan):
    """A scan that also claims scheduled messages."""

    def free(self, ids: Sequence[Any]) -> Filter:
        """Return the filter that matches messages with these ids while no consumer holds them."""
        free = transitions.not_held_filter(self.terms.queue, self.now)
        return {**free, "_id": {"$in": list(ids)}, **transitions.in_time(self.until)}


def reserve_id(
    terms: QueueTerms, waiting: Waiting, id: Id, lease: Duration | None
) -> Plan[list[Message[Any]]]:
    """Reserve a chosen message.

    Args:
        terms: The queue, with its options and its codec.
        waiting: The consumers of the queue in this client.
        id: The id of the message.
        lease: The length of the lease, in seconds, or None for the lease of the queue.

    Returns:
        A list with the reservation, or an empty list if the message is gone or cannot start now.

    Raises:
        ConfigurationError: The message shares a document with other messages.
    """
    queue, kind, options = terms.queue, terms.kind, terms.options
    spellings = arguments.spellings(id)
    lease_s = options.lease
    if lease is not None:
        lease_s = arguments.duration("lease", lease, positive=True)
    chosen = yield from _find(queue, spellings)
    if chosen is None:
        return []
    yield from namespace.ensured(namespace.ensuring(queue, kind, options, receives=True), kind)
    record = yield from namespace.followed(queue, kind, options, terms.owner())
    if record.get("paused"):
        return []
    claim_terms = ClaimTerms.of(terms, lease_s)
    misfits = waiting.misfits
    how = Reception(claim_terms, terms.codec, options.max_tries, pop=False, misfits=misfits)
    # In a separate batch: if the caller is cancelled, the message is given back.
    claimed: list[Claimed] = yield Coalesce(
        ("reserve id", queue),
        chosen,
        partial(_claim_one, how, record),
        undo=partial(CLAIMS.undo, how),
        max_in_flight=MAX_LOCKABLE,
        alone=True,
    )
    if claimed:
        lease_end = (yield from ServerTime()) + timedelta(seconds=lease_s)
        waiting.scan.wake_at(lease_end)
    return [message for _, message in claimed]


def _find(queue: str, spellings: Sequence[Id]) -> Plan[Id | None]:
    """Return the stored id of a message, or None if the queue has no such live message."""
    alone = {"n": {"$exists": False}, "processed": {"$exists": False}}
    match = {"_id": {"$in": list(spellings)}, "q": queue, **alone}
    found = {each["_id"] for each in (yield from Find(match, {"_id": 1}))}
    for each in spellings:
        if each in found:
            return each
        place = packs.place_of(each)
        if place is not None and (yield from find_packed({"q": queue}, place)):
            raise ConfigurationError(
                f"reserve_id: message {each} shares a document with other messages, which would be "
                "held with it; pass id= when you push messages that you want to reserve by id"
            )
    return None


def _claim_one(
    how: Reception, record: Mapping[str, Any], ids: Sequence[Id]
) -> Plan[list[list[Claimed]]]:
    (id,) = ids  # each call is a separate batch
    return [(yield from _claim(how, record, id))]


def _claim(how: Reception, record: Mapping[str, Any], id: Id) -> Plan[list[Claimed]]:
    """Claim one message, if it may start. ``record``: the record of the queue."""
    terms, now = how.terms, (yield from ServerTime())
    # A claim by id learns nothing about the head of the queue, and needs no knowledge of it.
    state = ScanState(rescan_at=NEVER)
    yield from terms.kind.follow(terms, state, record, now)
    state.memories.clear()  # or a scan by priorities would look for other messages
    room = ByteLimit(state, [Limits(1, MAX_RECEIVED_BYTES)])
    scan = _ChosenScan(terms, state, _OneMessage(id), room, now, wanted=1)
    documents, _ = yield from terms.kind.claim(scan)
    return (yield from accept_each(how, documents, now))
