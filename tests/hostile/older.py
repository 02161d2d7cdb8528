"""A consumer of the release before results, expiry, gathers, attempts and deliveries.

It sends the filters and updates of that release, copied from its module ``transitions`` for the
standard kind. So it neither knows nor removes the fields that came later.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.collection import Collection

from pyqueue.messages import KEPT

Document = dict[str, Any]

#: The fields of a claim, and the fields of a stay in one queue, as that release knew them.
HELD: Final = ("token", "owner", "reserved", "claim", "slot", "limited")
STAY: Final = ("error", "progress", "checkpoint", "dead", "processed", "outcome", "expires")
#: The fields that a dead letter keeps.
DEAD: Final = ("dead", "error", "checkpoint", "type")
#: The clock of the server may be this much ahead of the clock of this process.
SLACK: Final = timedelta(seconds=1)


def _now() -> datetime:
    return datetime.now(UTC)


def _unset(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


class Older:
    """Sends the commands of that release.

    Args:
        collection: The collection of the queues.
    """

    def __init__(self, collection: Collection[Document]) -> None:
        self.collection = collection

    def push(self, queue: str, payload: object, **fields: object) -> ObjectId:
        """Push a message."""
        now, id = _now(), ObjectId()
        put = {"q": queue, "when": now, "due": now, "pushed": now, "tries": 0, "payload": payload}
        self.collection.insert_one({"_id": id, **put, **fields})
        return id

    def claim(self, queue: str, lease: float = 60.0) -> Document:
        """Reserve the first message for ``lease`` seconds, and return its document."""
        now = _now()
        match = {"q": queue, "when": {"$lte": now + SLACK}, "_id": {"$ne": f"~queue:{queue}"}}
        until = now + timedelta(seconds=lease)
        put = {"when": until, "token": secrets.token_hex(12), "owner": "older", "reserved": now}
        held = self.collection.find_one_and_update(
            match,
            {"$set": put, "$unset": _unset("claim"), "$inc": {"tries": 1}},
            sort=[("when", 1), ("_id", 1)],
            return_document=ReturnDocument.AFTER,
        )
        assert held is not None, "no message is ready"
        return held

    def commit(self, held: Document, history_s: float | None = None) -> bool:
        """Finish a message. Return whether the lease was still held, as all methods below do."""
        if history_s is None:
            return self.collection.delete_one(self._held(held)).deleted_count == 1
        now = _now()
        put = {"when": now + KEPT, "processed": now, "outcome": "committed"}
        put |= {"expires": now + timedelta(seconds=history_s), "token": secrets.token_hex(12)}
        update = {"$set": put, "$unset": _unset(*(name for name in HELD if name != "token"))}
        return self._settle(held, _remembering_key(held, update))

    def rollback(self, held: Document) -> bool:
        """Put a message back for another try, now."""
        now = _now()
        return self._settle(held, {"$set": {"when": now, "due": now}, "$unset": _unset(*HELD)})

    def release(self, held: Document) -> bool:
        """Put a message back in its place. The try does not count."""
        put, less = {"when": held["due"]}, {"tries": -1}
        return self._settle(held, {"$set": put, "$unset": _unset(*HELD), "$inc": less})

    def move(self, held: Document, to: str) -> bool:
        """Move a message to another queue, without its key."""
        update = _leaving(held["q"], _entering(to))
        return self._settle(held, update | {"$rename": {"key": "last_key"}})

    def bury(self, held: Document) -> bool:
        """Send a message to the dead-letter queue."""
        dead = {"from": held["q"], "at": _now(), "reason": "buried", "tries": held["tries"]}
        put = _entering(f"{held['q']}.dead") | {"dead": dead | {"error": None}}
        return self._settle(held, _remembering_key(held, _leaving(held["q"], put, DEAD)))

    def redrive(self, queue: str) -> bool:
        """Send a dead letter back to its queue."""
        found = self.collection.find_one({"q": queue, "dead": {"$exists": True}})
        assert found is not None, "there is no dead letter"
        update = _leaving(queue, _entering(found["dead"]["from"]), DEAD[1:])
        return (
            self.collection.update_one({"_id": found["_id"], "q": queue}, update).matched_count == 1
        )

    def _held(self, held: Document) -> Document:
        return {"_id": held["_id"], "token": held["token"], "processed": {"$exists": False}}

    def _settle(self, held: Document, update: Document) -> bool:
        return self.collection.update_one(self._held(held), update).matched_count == 1


def _entering(queue: str) -> Document:
    now = _now()
    return {"q": queue, "when": now, "due": now, "tries": 0}


def _leaving(queue: str, put: Document, keep: tuple[str, ...] = ()) -> Document:
    removed = [*HELD, *STAY, "type"]
    stop = {"q": queue, "at": _now()}
    return {
        "$set": put,
        "$unset": _unset(*(name for name in removed if name not in keep and name not in put)),
        "$push": {"trail": {"$each": [stop], "$slice": -20}},
    }


def _remembering_key(held: Document, update: Document) -> Document:
    if "key" in held:
        return update | {"$rename": {"key": "last_key"}}
    return update | {"$unset": update["$unset"] | _unset("last_key")}
