"""Find the ready documents for a named claim, and bury documents that it cannot take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from bson import ObjectId

from pyqueue.backends import invalid, receiving
from pyqueue.backends.claim_terms import ClaimTerms
from pyqueue.backends.contents import contents_of, refuse_packs
from pyqueue.backends.ending import CANCELLED, Ending, end_claimed
from pyqueue.backends.kind import Kind
from pyqueue.backends.namespace import CLAIMS
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.documents import ends_at_claim
from pyqueue.errors import InvalidMessage
from pyqueue.limits import Limit, check_call
from pyqueue.messages import Id
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime

#: The maximum number of messages of a claim: one command must acknowledge all of them in time.
MAX_CLAIM: Final = 100_000

#: Filters that match documents which are not valid messages.
_INVALID: Final[Sequence[dict[str, Any]]] = [
    {"payload": {"$exists": False}},
    {"processed": {"$exists": True}},
    *(
        {name: {"$exists": True, "$not": {"$type": bson_type}}}
        for bson_type, names in {
            "date": ("due", "pushed"),
            "object": ("headers", "error", "dead"),
            "string": ("key",),
            "array": ("trail", "attempts"),
        }.items()
        for name in names
    ),
]


def check_limit(queue: str, kind: Kind, limit: Limit | None) -> None:
    """Refuse a named claim if it cannot obey the limit of the queue.

    Raises:
        ConfigurationError: The claim cannot obey the limit.
    """
    check_call(queue, limit, "claim")
    if limit is not None:
        remedy = "a claim takes all messages of a document, so it cannot obey the rate; reserve "
        refuse_packs(kind, queue, "claim", f"{remedy}messages with reserve_many()")


def first_ready(
    backend: QueuePlans, limit: int, since: datetime, max_bytes: int | None
) -> Plan[list[Document]]:
    """Return the first documents that have been ready since an instant.

    Args:
        backend: Builds the plans (sequences of commands) for the queue.
        limit: The maximum number of messages. The messages of the last document may exceed it.
        since: The instant at which the documents were already ready.
        max_bytes: The maximum number of bytes, or None for no limit. The first document may exceed
            it.
    """
    kind = backend.kind
    match, most = kind.claimable(backend.queue, since, None), min(limit, MAX_CLAIM)
    find = Find(match, {"_id": 1}, sort=kind.order, limit=most, hint=kind.index)
    return contents_of(kind).first(find, max_bytes)


def valid_ids(backend: QueuePlans, found: Iterable[Document], now: datetime) -> Plan[list[Id]]:
    """Return the valid ids. Bury documents whose ids cannot be part of a range of ids."""
    ids: list[Id] = []
    for each in found:
        id = each["_id"]
        if isinstance(id, (ObjectId, str)):
            ids.append(id)
            continue
        one = {"_id": id, "q": backend.queue, "when": {"$lte": now}}
        yield from bury_unclaimable(backend, one, InvalidMessage("the id is invalid"), now)
    return ids


def bury_unclaimable(
    backend: QueuePlans, match: Mapping[str, object], fault: Exception, now: datetime
) -> Plan[None]:
    """Send a document that cannot be claimed to the dead-letter queue. ``fault``: the reason."""
    graveyard = invalid.Graveyard(backend.queue, backend.kind, backend.options.dead_letter)
    yield from invalid.bury_unclaimable(graveyard, match, fault, now)


def admit(
    backend: QueuePlans,
    claimed: Filter,
    lease_s: float,
    max_tries: int | None = None,
    *,
    new: bool = False,
) -> Plan[None]:
    """Bury messages that are invalid or were claimed too often, as every claim does.

    Args:
        backend: Builds the plans (sequences of commands) for the queue.
        claimed: A filter that matches the claimed documents.
        lease_s: The length of the lease, in seconds.
        max_tries: Bury messages that were claimed more often than this, or None for no limit.
        new: Whether the claim is new, not taken over. If so, messages that were cancelled or have
            expired are ended, too.
    """
    contents, terms = contents_of(backend.kind), ClaimTerms.of(backend.terms, lease_s)
    now = yield from ServerTime()
    filters = list(_INVALID)
    if max_tries is not None:
        # This limit does not apply to a message that was buried before.
        filters.append({"tries": {"$gt": max_tries}, "dead": {"$exists": False}})
    if new:
        filters += [dict(CANCELLED), {"best_before": {"$lte": now}, "tries": {"$lte": 1}}]
    how = receiving.Reception(terms, backend.codec, max_tries, pop=False, misfits=invalid.Misfits())
    match = {**claimed, **contents.separate, "$or": filters}
    refused = []
    for document in (yield from Find(match, hint=CLAIMS)):
        outcome = ends_at_claim(document, now, terms.counts_try) if new else None
        if outcome is None:
            refused.append(document)
        else:
            ending = Ending(outcome, terms.history_s)
            yield from end_claimed(backend.queue, backend.kind, document, ending, now)
    yield from receiving.accept_each(how, refused, now)
    yield from contents.admit(how, claimed)
