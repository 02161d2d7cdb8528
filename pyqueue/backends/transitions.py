"""The state machine of a message: every filter and every update. Read this module first.

A message is one document, and each transition is one atomic update of it::

    push --delay--> scheduled --when passes--> ready --claim--> reserved --finish--> gone | history
                        ^                       ^ |                | |  |
                        |                       | +--pop           | |  +--move--> another queue
                        |                       +----lease lapses--+ |
                        +-------------roll back----------------------+

A message that was claimed too often, or whose last try is rolled back, moves to the dead-letter
queue. Redrive moves it back. Replay takes a message out of the history.

* ``when`` is the instant from which a message may be claimed. A claim moves it to the end of the
  lease, so a lapsed lease needs no cleaning up.
* A claim writes a new token. Every update by the holder matches the pair (_id, token), so a former
  holder cannot change the message.
* A message that leaves a queue loses its key there. A finished message leaves the range of ``when``
  that claims scan.

The functions are pure. A kind decides how a message enters, and which fields belong to a claim.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

from pyqueue.backends.kind import Kind, ScanStart, UpdateFields
from pyqueue.clock import BAND
from pyqueue.gathers import LAST_GATHER
from pyqueue.messages import HIGHEST_PRIORITY, KEPT, MAX_ATTEMPTS, TRAIL_LENGTH, Id, Reservation
from pyqueue.requests import Filter

#: The fields that a claim writes and the end of the claim removes. A message that waits for a slot
#: has ``limited``; it is removed, too, so that no message takes it to another queue.
HELD_FIELDS: Final = ("token", "owner", "reserved", "claim", "slot", "limited")
#: The fields that belong to a message's stay in one queue.
STAY_FIELDS: Final = (
    *("error", "attempts", "progress", "checkpoint", "dead", "deliveries"),
    *("processed", "outcome", "expires", "free", "unique", "dies", "best_before"),
)
#: The fields that a message takes to the dead-letter queue and back.
_KEPT_DEAD: Final = ("error", "attempts", "checkpoint", "type")
#: The fields for which a claim ends a message; see ``ending``. Moves and burials keep them.
ENDS: Final = ("cancel",)
#: The field that a claim renames in every queue: ``dies`` shows that no first try has begun.
_BEGINS: Final = MappingProxyType({"dies": "best_before"})
#: The counters that a claim increments, unless it is a pop.
COUNTS: Final = ("tries", "deliveries")
#: The beginning of the ``q`` of documents that are in no queue yet, or no longer; see ``handover``.
HIDDEN: Final = "~handover:"


def new_token() -> str:
    """Return a token that no other claim has."""
    return secrets.token_hex(12)


def record_id(queue: str) -> str:
    """Return the _id of a queue's record. No message can have it."""
    return f"~queue:{queue}"


def hidden_queue(queue: str) -> str:
    """Return the ``q`` of documents that a queue hands over. No queue can have this name."""
    return HIDDEN + queue


def level_record_id(queue: str, level: int) -> str:
    """Return the _id of a queue's record for one priority level; see ``levels``."""
    return f"{record_id(queue)}~{level}"


def level_record_ids(queue: str) -> list[str]:
    """Return the ids of a queue's records for all priority levels."""
    return [level_record_id(queue, level) for level in range(HIGHEST_PRIORITY + 1)]


def messages_only(queue: str) -> Filter:
    """Return the filter that excludes the records of a queue of any kind."""
    return {"_id": {"$nin": [record_id(queue), *level_record_ids(queue)]}}


def unset(*names: str) -> dict[str, Any]:
    """Return the value of a ``$unset`` that removes these fields."""
    return dict.fromkeys(names, "")


def entering(queue: str, when: datetime) -> dict[str, Any]:
    """Return the fields of a message that enters a queue."""
    return {"q": queue, "when": when, "due": when, "tries": 0}


def claimable(queue: str, now: datetime, start: ScanStart | None) -> Filter:
    """Return the filter that matches messages that may be claimed at ``now``, from ``start`` on."""
    return scan_range(queue, {"$lte": now}, start)


def live(queue: str, start: ScanStart | None) -> Filter:
    """Return the filter that matches the live messages in scan order, from ``start`` on."""
    return scan_range(queue, {"$lt": BAND}, start, messages_only(queue))


def scan_range(
    queue: str,
    upto: Mapping[str, datetime],
    start: ScanStart | None,
    messages: Filter | None = None,
) -> Filter:
    """Return the filter that matches messages from ``start`` on whose ``when`` matches ``upto``.

    ``messages``: a filter that excludes records. If None, only the queue's main record is excluded.
    """
    messages = messages or {"_id": {"$ne": record_id(queue)}}
    if start is None:
        return {"q": queue, "when": upto, **messages}
    when, id = start
    if id is None:
        return {"q": queue, "when": {"$gte": when, **upto}, **messages}
    after: list[Filter] = [{"q": queue, "when": when, "_id": {"$gt": id}}]
    if isinstance(id, str):  # $gt compares within one type, and every ObjectId follows every str
        after.append({"q": queue, "when": when, "_id": {"$type": "objectId"}})
    return {"$or": [*after, {"q": queue, "when": {"$gt": when, **upto}}], **messages}


def in_time(until: datetime | None) -> Filter:
    """Return a filter that matches only before ``until`` by the server's clock, or always if None.

    Use this only in filters that list ids: after ``until``, a scan would read everything in vain.
    """
    return {} if until is None else {"$expr": {"$lt": ["$$NOW", until]}}


def still_claimable(
    queue: str, ids: Sequence[object], now: datetime, until: datetime | None = None
) -> Filter:
    """Return the filter that matches those messages that can still be claimed before ``until``."""
    return {"_id": {"$in": ids}, "q": queue, "when": {"$lte": now}, **in_time(until)}


def claiming(now: datetime, lease_s: float, owner: str, *, count: bool) -> UpdateFields:
    """Return the update that claims a message. If ``count`` is true, the claim counts as a try."""
    until = now + timedelta(seconds=lease_s)
    put = {"when": until, "token": new_token(), "owner": owner, "reserved": now}
    # A held message that seems to wait for a limit would be taken from its holder.
    update: UpdateFields = {"$set": put, "$unset": unset("claim", "limited")}
    if count:
        update["$inc"] = dict.fromkeys(COUNTS, 1)
    return update


def locking(kind: Kind, update: UpdateFields) -> UpdateFields:
    """Return the update of a claim, extended to rename ``dies`` and the lock fields of its kind."""
    return {**update, "$rename": {**_BEGINS, **kind.lock_fields}}


def waited_for(kind: Kind) -> dict[str, int]:
    """Return the projection of the fields that ``Kind.ended`` reads to release waiting messages."""
    return {"slot": 1} | {name: 1 for pair in kind.lock_fields.items() for name in pair}


def lock_removal(kind: Kind) -> dict[str, Any]:
    """Return the value of a ``$unset`` that removes the lock fields, as held messages name them."""
    return unset(*kind.lock_fields.values())


def _unlocking(kind: Kind, update: UpdateFields) -> UpdateFields:
    """Return an update that also restores the fields that the claim renamed."""
    names = {held: free for free, held in kind.lock_fields.items()}
    return update | {"$rename": names} if names else update


def token_filter(queue: str, claim: Mapping[str, Mapping[str, Any]]) -> Filter:
    """Return the filter that matches the messages that this claim holds."""
    put = claim["$set"]
    return {"q": queue, "when": put["when"], "token": put["token"]}


def holds_filter(reservations: Iterable[Reservation[Any]]) -> Filter:
    """Return the filter that matches the messages that these reservations still hold.

    The filter matches pairs of (_id, token). Two independent lists would match the cross product.
    """
    ids_of: dict[str, list[Id]] = {}
    for each in reservations:
        ids_of.setdefault(each.token, []).append(each.id)
    pairs: list[dict[str, object]] = [
        {"_id": ids[0] if len(ids) == 1 else {"$in": ids}, "token": token}
        for token, ids in ids_of.items()
    ]
    match = pairs[0] if len(pairs) == 1 else {"$or": pairs}
    return match | {"processed": {"$exists": False}}  # it may keep its token


def not_held_filter(queue: str, now: datetime) -> dict[str, object]:
    """Return the filter that matches the live messages that no consumer holds."""
    return {
        "q": queue,
        "when": {"$lt": BAND},
        **messages_only(queue),
        "$or": [{"token": {"$exists": False}}, {"when": {"$lte": now}}],
    }


def is_held(document: Mapping[str, Any], now: datetime) -> bool:
    """Return whether a consumer holds a live message, under a lease that has not ended."""
    when = document["when"]
    return "token" in document and not (isinstance(when, datetime) and when <= now)


def rolling_back(
    kind: Kind, delay_s: float, error: Mapping[str, Any] | None, now: datetime
) -> UpdateFields:
    """Return the update that makes a held message wait for another try."""
    when = now + timedelta(milliseconds=round(delay_s * 1000))
    put: dict[str, Any] = {"when": when, "due": when}
    if error is not None:
        put["error"] = error
    return _unlocking(kind, {"$set": put, "$unset": unset(*kind.held_fields)})


def releasing(
    kind: Kind, due: datetime, now: datetime, *, uncounted: Sequence[str] = ("tries",)
) -> UpdateFields:
    """Return the update that gives a message back at ``due``, and decrements ``uncounted``."""
    # In an ordered queue, ``seq`` is the place, and scans expect nothing far below now.
    when = max(due, now) if kind.lock_fields else due
    update: UpdateFields = {"$set": {"when": when}, "$unset": unset(*kind.held_fields)}
    if uncounted:
        update["$inc"] = dict.fromkeys(uncounted, -1)
    return _unlocking(kind, update)


def untried(update: UpdateFields) -> UpdateFields:
    """Return the update, extended to undo a first try, so that the message may expire again."""
    names = {later: first for first, later in _BEGINS.items()}
    return update | {"$rename": {**update.get("$rename", {}), **names}}


def lapsing(kind: Kind) -> UpdateFields:
    """Return the update that ends a claim whose lease has ended. The message keeps its place."""
    return _unlocking(kind, {"$unset": unset(*kind.held_fields)})


def finishing(
    held_fields: Sequence[str], now: datetime, outcome: str, history_s: float | None, *, keyed: bool
) -> UpdateFields | None:
    """Return the update that moves a message into the history, or None without a history."""
    if history_s is None:
        return None
    expires = now + timedelta(seconds=history_s)
    put = {"when": now + KEPT, "processed": now, "outcome": outcome, "expires": expires}
    removed = unset("dies", *(name for name in held_fields if name != "token"))
    update: UpdateFields = {"$set": put, "$unset": removed, "$rename": dict(LAST_GATHER)}
    return _remembering_key(update, keyed=keyed)


def _remembering_key(update: UpdateFields, *, keyed: bool) -> UpdateFields:
    """Keep the key that the message had in this queue as ``last_key``, and no earlier key."""
    if keyed:
        update.setdefault("$rename", {})["key"] = "last_key"
    else:
        update["$unset"]["last_key"] = ""
    return update


def unfinishing(kind: Kind, due: datetime) -> UpdateFields:
    """Return the update that returns a popped message from the history to its queue."""
    removed = unset(*kind.held_fields, "processed", "outcome", "expires", "free")
    return {"$set": {"when": due}, "$unset": removed}


def replaying(kind: Kind, queue: str, put: dict[str, Any], now: datetime) -> UpdateFields:
    """Return the update that makes a finished message ready again, with the fields ``put``."""
    # A dead letter stays one, so that it can be redriven.
    left = (name for name in kind.stay_fields if name != "dead")
    removed = (*kind.held_fields, *ENDS, *left, "result")
    return {
        "$set": put,
        "$unset": unset(*(name for name in removed if name not in put)),
        "$push": _trail(queue, now),
    }


def _trail(queue: str, now: datetime) -> dict[str, Any]:
    return {"trail": {"$each": [{"q": queue, "at": now}], "$slice": -TRAIL_LENGTH}}


def noting(
    update: UpdateFields, attempt: Mapping[str, Any] | None, stay: Mapping[str, Any] | None = None
) -> UpdateFields:
    """Return the update, extended to note a failed try and facts about the stay in the queue."""
    if attempt is not None:
        update.setdefault("$push", {})["attempts"] = {"$each": [attempt], "$slice": -MAX_ATTEMPTS}
    if stay is not None:
        update["$push"]["trail"]["$each"][0] |= stay
    return update


def leaving(
    kind: Kind, queue: str, put: dict[str, Any], now: datetime, *, keep: Sequence[str] = ()
) -> UpdateFields:
    """Return the update that moves a message to another queue, with the new fields ``put``.

    The message keeps the fields ``keep``. It leaves its key behind, unless ``put`` has one.
    """
    removed = [*kind.held_fields, *kind.stay_fields, "type"]
    if "group" in put:
        removed.append("last_group")
    update = {
        "$set": put,
        "$unset": unset(*(name for name in removed if name not in keep and name not in put)),
        "$push": _trail(queue, now),
    }
    if "key" not in put:
        update["$rename"] = {"key": "last_key"}
    return update


def burying(
    kind: Kind,
    queue: str,
    put: dict[str, Any],
    now: datetime,
    death: Mapping[str, Any],
    *,
    keyed: bool,
) -> UpdateFields:
    """Return the update that buries a message. ``death``: the reason, the tries and the error."""
    put = {**put, "dead": {"from": queue, "at": now, **death}}
    if death["error"] is not None:
        put["error"] = death["error"]
    update = leaving(kind, queue, put, now, keep=("dead", *_KEPT_DEAD))
    # If the message has no key, "$rename" would leave the ``last_key`` of an earlier queue.
    del update["$rename"]
    return _remembering_key(update, keyed=keyed)


def redriving(kind: Kind, queue: str, put: dict[str, Any], now: datetime) -> UpdateFields:
    """Return the update that takes a dead message back to the queue that it came from."""
    update = leaving(kind, queue, put, now, keep=_KEPT_DEAD)
    update["$unset"] |= unset(*ENDS)
    return update
