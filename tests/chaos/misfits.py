"""Malformed documents, which another program inserts beside the messages of a queue.

For a moment its transaction holds the first of them, so that a claim meets a locked document and
malformed documents at once, and has to try each alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from pyqueue import Unavailable
from tests.chaos.clock_skew import true_now

#: Each makes another step of a receive fail. None: without the field.
_FAULTS: tuple[dict[str, Any], ...] = (
    {"payload": None},
    {"tries": "three"},
    {"headers": 5},
    {"tries": "three", "payload": None},
)
#: When they become ready, and for how long the first one is locked.
_READY_S, _LOCKED_S = 0.5, 1.0


def misfits(queue: str, ids: Sequence[str], dice: random.Random) -> list[dict[str, Any]]:
    """Return documents that resemble messages of a queue, and are none.

    A claim can change the first one, so it waits while that is locked.
    """
    now = true_now()
    found = []
    for place, id in enumerate(ids):
        when = now + timedelta(seconds=_READY_S, milliseconds=place)
        whole = {"_id": id, "q": queue, "when": when, "due": when, "pushed": now, "tries": 0}
        whole["payload"] = {"n": id, "trail": []}
        whole |= dice.choice(_FAULTS) if place else _FAULTS[0]
        found.append({name: value for name, value in whole.items() if value is not None})
    return found


def insert(spec: dict[str, Any], documents: Sequence[dict[str, Any]]) -> None:
    """Insert documents without pyqueue, and lock the first one for a second.

    Raises:
        Unavailable: The servers did not answer.
    """
    try:
        with MongoClient[dict[str, Any]](spec["url"], appname="faults", timeoutMS=8000) as mongo:
            messages = mongo.get_default_database().get_collection(
                spec["namespace"], write_concern=WriteConcern("majority")
            )
            messages.insert_many(documents)
            first = {"_id": documents[0]["_id"]}

            def lock(session: ClientSession) -> None:
                messages.update_one(first, {"$set": {"locked": True}}, session=session)
                time.sleep(_LOCKED_S)
                session.abort_transaction()

            with mongo.start_session() as session:
                session.with_transaction(lock)  # again if a consumer changes it at this moment
    except PyMongoError as error:
        raise Unavailable(str(error)) from error
