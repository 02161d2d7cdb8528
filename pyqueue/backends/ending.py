"""End messages that no consumer is to work on: removed, cancelled and expired messages.

A message that is not held ends at once. A held message that is cancelled stays with its holder,
and gets the field ``cancel``. The holder may still commit it or move it. A move or a rollback keeps
the field, and the next claim ends the message instead of delivering it. A message that has expired
before its first try ends in the same way; see ``expiring``. So all claims pass through
``end_at_claim``, and no separate process is needed to end messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pyqueue.backends import kind as kinds
from pyqueue.backends import namespace, reading, results, transitions
from pyqueue.backends.applying import SettlementUpdate
from pyqueue.backends.claim_terms import Scan
from pyqueue.backends.claiming import claim
from pyqueue.backends.invalid import decode
from pyqueue.backends.kind import Kind
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.documents import ends_at_claim, hashable_id, is_cancelled, may_end
from pyqueue.facts import Keep, kept_s
from pyqueue.hooks import Tell
from pyqueue.messages import Reservation
from pyqueue.payloads import Codec
from pyqueue.requests import Delete, Document, Filter, Find, Plan, ServerTime, Update

#: The topic of a namespace on which workers hear that held messages were cancelled.
CANCELLATIONS: Final = "~cancel"
#: The verb that hooks get for a message that ended without a consumer, keyed by its outcome.
_VERBS: Final = MappingProxyType({"cancelled": "cancel", "expired": "expire"})
#: Matches held messages that were cancelled.
CANCELLED: Final[Filter] = MappingProxyType({"cancel": {"$type": "date"}})


class Ending(NamedTuple):
    """How messages end: their outcome, and their time in the history."""

    #: The outcome that the history shows.
    outcome: str
    #: How long the history keeps the messages, in seconds, or None if it does not.
    history_s: float | None


def recorded(queue: str, outcome: str) -> Plan[tuple[Kind, Ending]]:
    """Return the kind of a queue and how its messages end, both according to its record."""
    kind = kinds.lookup((yield from namespace.kind_of(queue)) or GUESSED_KIND)
    stored = (yield from reading.options_of(queue)).get("history")
    history_s = float(stored) if isinstance(stored, (int, float)) and stored > 0 else None
    return kind, Ending(outcome, history_s)


def end_free(
    queue: str, kind: Kind, document: Document, ending: Ending, now: datetime
) -> Plan[bool]:
    """End a message that is not held. Return False if it is now held, or has left the queue.

    ``document``: the message as it was read, with or without its payload.
    """
    match = transitions.not_held_filter(queue, now) | {"_id": document["_id"]}
    update = ending_free(kind, document, ending, now)
    if update is not None and "group" in document:
        match = match | {"group": {"$exists": True}}  # unless a claim has renamed it since
    if "dies" in document:
        match = match | {"dies": document["dies"]}  # unless a claim or a new push has changed it
    return (yield from _end(queue, kind, document, match, update))


def ending_free(kind: Kind, document: Document, ending: Ending, now: datetime) -> SettlementUpdate:
    """Return the update that ends a message that is not held, or None to delete the message."""
    update = _finishing(kind, document, ending, now)
    if update is not None and "group" in document:
        # The message is not held, so no claim has renamed its group to its lock.
        update["$rename"] = {**update.get("$rename", {}), "group": "last_group"}
        update["$rename"].pop("lock", None)
    return update


def end_held(
    queue: str, kind: Kind, document: Document, ending: Ending, now: datetime
) -> Plan[bool]:
    """End a message that a claim holds. Return False if the claim no longer holds it."""
    # A finished pop keeps its token.
    match = {"_id": document["_id"], "q": queue, "token": document["token"]}
    match["processed"] = {"$exists": False}
    update = _finishing(kind, document, ending, now)
    return (yield from _end(queue, kind, document, match, update))


def _finishing(kind: Kind, document: Document, ending: Ending, now: datetime) -> SettlementUpdate:
    """Return the update that finishes a message, or None to delete the message."""
    # A dead letter keeps the key of its former queue as ``last_key``.
    keyed = "key" in document or "dead" in document
    stay_s = kept_s(ending.history_s, Keep.of(document))
    update = kind.finishing(now, ending.outcome, stay_s, keyed=keyed)
    if update is not None and "token" in document:  # a slow pop would match the old token
        update["$set"]["token"] = transitions.new_token()
    return update


def _end(
    queue: str, kind: Kind, document: Document, match: Filter, update: SettlementUpdate
) -> Plan[bool]:
    """Finish or delete a message, and release the messages that waited for it."""
    if update is None:
        ended = bool((yield from Delete(match)))
    else:
        ended = bool((yield from Update(match, update)).matched)
    yield from kind.ended(queue, [document])
    yield from results.announce(results.end_facts(document))
    return ended


# ---- at the claim


def claim_and_end(scan: Scan) -> Plan[tuple[list[Document], bool]]:
    """Claim the first messages, but end cancelled and expired ones; see ``claiming.claim``."""
    documents, ended = yield from claim(scan)
    if any(map(may_end, documents)):
        _, documents = yield from end_at_claim(scan, documents)
    return documents, ended


def end_at_claim(
    scan: Scan, documents: Sequence[Document]
) -> Plan[tuple[list[Document], list[Document]]]:
    """End the claimed messages that were cancelled or have expired, instead of delivering them.

    Returns:
        The messages that ended, and the messages to deliver.
    """
    terms, now = scan.terms, (yield from ServerTime())
    over: list[Document] = []
    left: list[Document] = []
    for document in documents:
        outcome = ends_at_claim(document, scan.now, terms.counts_try)
        if outcome is None:
            left.append(document)
            continue
        over.append(document)
        if scan.deletes:  # the claim has deleted it
            yield from tell_end(terms.queue, document, outcome, now)
        else:
            ending = Ending(outcome, terms.history_s)
            yield from end_claimed(terms.queue, terms.kind, document, ending, now)
    return over, left


def end_claimed(
    queue: str, kind: Kind, document: Document, ending: Ending, now: datetime
) -> Plan[None]:
    """End a message that was just claimed, instead of delivering it."""
    if (yield from end_held(queue, kind, document, ending, now)):
        yield from tell_end(queue, document, ending.outcome, now)


def tell_end(queue: str, document: Document, outcome: str, now: datetime) -> Tell:
    """Return the report to hooks that a message has ended without reaching a consumer."""
    return Tell("settled", queue, [decode(Codec(), document, now)], verb=_VERBS[outcome])


# ---- by the holder


def find_cancelled(held: Sequence[Reservation[Any]]) -> Plan[list[Reservation[Any]]]:
    """Return which held messages were cancelled. This takes one command."""
    match = {"_id": {"$in": [each.id for each in held]}, **CANCELLED}
    found = yield from Find(match, {"token": 1, "cancel": 1})
    tokens = {hashable_id(each["_id"]): each.get("token") for each in found if is_cancelled(each)}
    return [each for each in held if tokens.get(hashable_id(each.id), "") == each.token]
