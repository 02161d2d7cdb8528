"""A transaction of another program, which holds messages and keys of the workload.

The process opens it, prints the ids of its messages, and aborts it when a line arrives. If the
process is killed, the server aborts the transaction some seconds later.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

_TRY_S = 10.0
#: A fault may swallow a reply. Without a limit, the process would wait for it for ever.
_LIMITS: dict[str, Any] = {
    "socketTimeoutMS": 5000,
    "connectTimeoutMS": 2000,
    "serverSelectionTimeoutMS": 2000,
}


def hold(spec: dict[str, Any]) -> None:
    """Hold messages of a queue, and keys, until a line arrives.

    Args:
        spec: ``url``, ``database``, ``namespace``; ``queue``, and how many of its ``messages``;
            ``keys`` of the queue ``states``.
    """
    with MongoClient[dict[str, Any]](spec["url"], appname="faults", **_LIMITS) as mongo:
        collection = mongo[spec["database"]][spec["namespace"]]
        with mongo.start_session() as session:
            deadline = time.monotonic() + _TRY_S
            held: list[str] = []
            while not held and time.monotonic() < deadline:
                with suppress(PyMongoError):  # the workload has changed a message, or has a key
                    held = _lock(collection, session, spec)
            print(json.dumps(held), flush=True)
            sys.stdin.readline()
            if session.in_transaction:
                with suppress(PyMongoError):
                    session.abort_transaction()


def _lock(
    collection: Collection[dict[str, Any]],
    session: ClientSession,
    spec: dict[str, Any],
) -> list[str]:
    """Lock messages and keys in a new transaction, and return the ids of the messages."""
    if session.in_transaction:
        session.abort_transaction()
    taken = collection.distinct("key", {"q": "states", "key": {"$in": spec["keys"]}})
    messages = {"q": spec["queue"], "processed": {"$exists": False}, "record": {"$exists": False}}
    found = collection.find(messages, {"_id": 1}).sort("when").limit(spec["messages"])
    ids = [each["_id"] for each in found]
    if not ids:
        time.sleep(0.01)
        return []
    session.start_transaction()
    for id in ids:
        collection.update_one({"_id": id}, {"$set": {"locked": True}}, session=session)
    for key in spec["keys"]:
        if key not in taken:
            lock = {"_id": f"~{key}", "q": "states", "key": key, "record": True}
            collection.insert_one(lock, session=session)
    return [str(id) for id in ids]
