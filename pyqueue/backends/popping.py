"""Pop: receive messages and finish them before the call returns.

A pop of one message without a model and without history is a bare delete. Every other pop claims
the messages, checks them and finishes them, so that it never loses a message that it could not
deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from bson import ObjectId

from pyqueue.backends import invalid, results, transitions
from pyqueue.backends.applying import update_with_key
from pyqueue.backends.byte_limit import ByteLimit, Limits
from pyqueue.backends.claim_terms import ClaimTerms, Scan
from pyqueue.backends.claiming import Claimed
from pyqueue.backends.handover import overwrite
from pyqueue.backends.keeping import Finish, finish_of, finishing
from pyqueue.backends.kind import Kind
from pyqueue.backends.receiving import (
    Claims,
    Reception,
    accept_each,
    claim_for_callers,
    is_stopped,
    wanted_by,
)
from pyqueue.backends.scan import ByAge, ScanState, due_of
from pyqueue.documents import hashable_id
from pyqueue.errors import DuplicateKey, Unavailable
from pyqueue.facts import Keep
from pyqueue.messages import TRAIL_LENGTH, Id
from pyqueue.requests import (
    Delete,
    Document,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
)


def _pop_for_callers(
    how: Reception, state: ScanState, limits: list[Limits]
) -> Plan[list[list[Claimed]]]:
    """Pop once for several callers, including callers that join late. Split the result."""
    shares: list[list[Claimed]] = [[]]
    if how.bare and wanted_by(limits) == 1 and not is_stopped(how, ()):
        now = yield from ServerTime()
        if state.limit.limit is None and not state.transaction_locks.expected(now):
            room = ByteLimit(state, limits)
            scan = Scan(how.terms, state, ByAge(state), room, now, wanted=1, deletes=True)
            documents, ended = yield from how.terms.kind.claim(scan)
            if documents and _is_deliverable(documents[0]):
                return [[(documents[0], invalid.decode(how.codec, documents[0], now))]]
            if documents:  # it is not deleted after all, but claimed
                shares = [(yield from _put_back(how, scan, documents[0]))]
            elif ended:
                return shares
    if not shares[0]:
        shares = yield from claim_for_callers(how, state, limits)
    if not any(shares):
        return shares
    now = yield from ServerTime()
    taken = [document for share in shares for document, _ in share]
    lost = yield from finish_popped(how.terms, taken, now)
    return [
        [each for each in share if (hashable_id(each[0]["_id"]), each[0]["token"]) not in lost]
        for share in shares
    ]


def _is_deliverable(document: Document) -> bool:
    """Return whether a document that was deleted can be delivered."""
    is_kept = _is_kept(document)  # which a deletion cannot do
    return "payload" in document and not is_kept and not invalid.invalid_claimed_fields(document)


def _put_back(how: Reception, scan: Scan, document: Document) -> Plan[list[Claimed]]:
    """Insert a deleted document again, held by this claim, and return its message.

    The document must not be delivered unchecked: if it is invalid, it is buried.
    """
    held = document | scan.update()["$set"]
    yield from insert_again([held], partial(_renamed, now=scan.now))
    return (yield from accept_each(how, [held], scan.now))


# ---- finished


def finish_popped(
    terms: ClaimTerms, claimed: list[Document], now: datetime
) -> Plan[set[tuple[Hashable, str]]]:
    """Finish popped messages before they are returned to a caller.

    Return the id and token of each message that this call did not finish.
    """
    groups: dict[tuple[str, Finish], list[Document]] = {}
    for document in claimed:
        finish = _finish(document, terms.history_s)
        groups.setdefault((document["token"], finish), []).append(document)
    lost: set[tuple[Hashable, str]] = set()
    for (token, finish), documents in groups.items():
        ids = [document["_id"] for document in documents]
        update = finishing(terms.kind, finish, now)
        if update is None:
            until = documents[0]["when"] - timedelta(seconds=terms.lease_s / 2)
            missing = yield from _delete_alike(ids, token, until)
        else:
            missing = yield from _keep_alike(ids, token, update)
        lost |= {(id, token) for id in missing}
    yield from results.announce(Keep.of(each) for each in claimed if _is_kept(each))
    return lost


def _is_kept(document: Document) -> bool:
    """Return whether a producer asked to keep the finished message, for its result or its key."""
    return "keep" in document or "unique" in document


def _finish(document: Document, history_s: float | None) -> Finish:
    """Return how a popped message finishes."""
    # A dead letter keeps the key of its former queue as ``last_key``.
    keyed = "key" in document or "dead" in document
    keep = Keep.of(document) if _is_kept(document) else None
    return finish_of("popped", history_s, keep, keyed=keyed)


def _delete_alike(ids: Sequence[Id], token: str, until: datetime) -> Plan[set[Hashable]]:
    """Delete the messages of one claim. Return the ids of messages that the claim no longer holds.

    The filter has the token, because a pop may claim a message again after its first claim lapsed.
    One command deletes all messages, but only in the first half of the lease. After the lease,
    another process may delete some messages, and the number of deletions does not tell which.

    Args:
        ids: The ids of the messages.
        token: The token of the claim.
        until: When half of the lease is over. The server compares it with its clock.
    """
    if len(ids) > 1:
        every = {"_id": {"$in": ids}, "token": token, **transitions.in_time(until)}
        done = yield from Delete(every, many=True)
        if done == len(ids):
            return set()
        if done:
            return (yield from _replaced(ids, done))
    # The lease may have ended, or this claim lost all of them. One by one, each result is certain.
    lost: set[Hashable] = set()
    for id in ids:
        if not (yield from Delete({"_id": id, "token": token})):
            lost.add(hashable_id(id))
    return lost


def _replaced(ids: Sequence[Id], done: int) -> Plan[set[Hashable]]:
    """Return the ids of the messages that were not deleted, because another writer replaced them.

    Args:
        ids: The ids of the messages that were to be deleted.
        done: How many of these were deleted. The claim no longer held the other messages.

    Raises:
        Unavailable: Another process deleted some of them, and it is unknown which.
    """
    present = yield from Find({"_id": {"$in": ids}}, {"_id": 1})
    there = {hashable_id(each["_id"]) for each in present}
    gone = [id for id in ids if hashable_id(id) not in there]
    if done < len(gone):
        # Another call may have delivered some of them.
        text = "some popped messages are gone; this call or another call has deleted them"
        raise Unavailable(text, ids=gone)
    return there


def _keep_alike(ids: Sequence[Id], token: str, update: Mapping[str, Any]) -> Plan[set[Hashable]]:
    """Move the messages of one claim to the history. Return the ids that it no longer holds."""
    change = yield from Update({"_id": {"$in": ids}, "token": token}, update, many=True)
    if change.matched == len(ids):
        return set()
    present = yield from Find({"_id": {"$in": ids}, "token": token}, {"_id": 1})
    return {*map(hashable_id, ids)} - {hashable_id(each["_id"]) for each in present}


# ---- given back


def insert_again(
    documents: Sequence[Document], elsewhere: Callable[[Document], Document]
) -> Plan[None]:
    """Insert deleted documents again, without keys that were taken in the meantime.

    Args:
        documents: The documents, deleted by this process, so that no other process can settle them.
        elsewhere: Makes the document to store instead if the id belongs to a message of another
            queue.
    """
    while documents:
        again: list[Document] = []
        for failure in (yield from Insert(documents)):
            document = documents[failure.place]
            if failure.field == "_id":
                again += yield from _insert_over(document, elsewhere)
            elif failure.field == "key":
                again.append(_without_key(document))
            else:
                raise failure.error
        documents = again


def _insert_over(
    document: Document, elsewhere: Callable[[Document], Document]
) -> Plan[list[Document]]:
    """Insert a document in place of a hidden copy with its id. Return what is left to insert."""
    try:
        yield from overwrite([document], None)
    except DuplicateKey as clash:
        if document["_id"] in clash.ids:
            same = {"_id": document["_id"], "q": document["q"], "processed": {"$exists": False}}
            # The producer has pushed the same message again.
            there = yield from Find(same, {"_id": 1}, limit=1)
            return [] if there else [elsewhere(document)]
        if "key" not in document:
            raise
        return [_without_key(document)]
    return []


def _without_key(document: Document) -> Document:
    return {"last_key" if name == "key" else name: value for name, value in document.items()}


def _renamed(document: Document, now: datetime) -> Document:
    """Return a message with a new id. Its trail keeps the old id."""
    stop = {"q": document["q"], "at": now, "id": document["_id"]}
    trail = [*document.get("trail", ()), stop][-TRAIL_LENGTH:]
    return document | {"_id": ObjectId(), "trail": trail}


def undo_pop(
    queue: str, kind: Kind, history_s: float | None, claimed: Sequence[Claimed]
) -> Plan[None]:
    """Give back the messages of a cancelled pop, with the same id, place and tries.

    A message loses its key if the key was taken in the meantime. It gets a new id if a message of
    another queue has taken its id.
    """
    again = []
    for document, _ in claimed:
        finish = _finish(document, history_s)
        if finish.kept_s is None:
            free = {name: document[name] for name in document if name not in kind.held_fields}
            again.append(free | {"when": due_of(document)})
            continue
        match = {
            "_id": document["_id"],
            "token": document["token"],
            "processed": {"$exists": True},
        }
        update = transitions.unfinishing(kind, due_of(document))
        if finish.bare:
            update["$set"]["payload"] = document["payload"]
        yield from update_with_key(match, update, document.get("key"))
    if again:
        now = yield from ServerTime()
        yield from insert_again(again, partial(_renamed, now=now))
    yield from Signal(queue, min(due_of(document) for document, _ in claimed))


def undo(how: Reception, claimed: Sequence[Claimed]) -> Plan[None]:
    """Give back the messages of a cancelled pop."""
    return undo_pop(how.terms.queue, how.terms.kind, how.terms.history_s, claimed)


POPS: Final = Claims(_pop_for_callers, undo)
