"""The witness: what really happened to each message, in the order in which the database has it.

It reads the change stream of the namespace's collection, which tells each write once it is committed by a majority, and never tells one that
a fail-over rolled back. So what it notes does not depend on what any client believes. It writes what the audit needs of each change, as
lines of JSON:

``["in", id, queue, n, pushed]``  a message came into being, with this ``n`` in its payload, and this time of its push, in milliseconds
``["set", id, {field: value}]``   it was changed: ``q``, ``token`` (None: removed), ``owner``, ``processed``, ``dead``, ``n``, and ``by``: the token
                                  that whoever settled it put into the message by the same update
``["out", id, at]``               it was deleted, at this time of the machine's monotonic clock, to the second
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

__all__ = ["END", "note", "watch"]

#: The id of the document that the program inserts when all is done.
END = "~end"

#: What a change sets that the audit asks for.
_PLAIN = ("q", "token", "owner")


def note(event: Mapping[str, Any]) -> list[Any] | None:
    """The line of an event of the change stream, its time on the monotonic clock; None for what the audit does not ask for."""
    kind, id = event["operationType"], str(event["documentKey"]["_id"])
    if id.startswith("~"):
        return None  # a queue's record
    if kind == "insert":
        document = event["fullDocument"]
        pushed = round(document["pushed"].timestamp() * 1000)
        return ["in", id, document["q"], (document.get("payload") or {}).get("n"), pushed]
    if kind == "delete":
        ago = time.time() - event["wallTime"].timestamp()
        return ["out", id, round(time.monotonic() - ago, 3)]
    changed = event["updateDescription"]
    put, gone = changed["updatedFields"], changed["removedFields"]
    told: dict[str, Any] = {name: put[name] for name in _PLAIN if name in put}
    if "token" in gone:
        told["token"] = None
    for name in ("processed", "dead"):
        if name in put:
            told[name] = True
    for name, value in put.items() if "dead" not in put else ():
        if name == "payload":
            if "n" in value:
                told["n"] = value["n"]
            if value["trail"]:
                told["by"] = value["trail"][-1][1]
        elif name == "payload.trail":
            told["by"] = value[-1][1]
        elif name.startswith("payload.trail."):
            told["by"] = value[1]
        elif name == "error" and value["message"].startswith("by "):
            told["by"] = value["message"].removeprefix("by ")
    return ["set", id, told] if told else None


def watch(spec: dict[str, Any]) -> None:
    """Be the witness, from a time of the database on, until the end."""
    options: dict[str, Any] = {"socketTimeoutMS": 5000, "connectTimeoutMS": 2000, "tz_aware": True}
    since: dict[str, Any] = {"start_at_operation_time": Timestamp(*spec["since"])}
    with open(spec["path"], "w") as out:
        while True:
            with (
                suppress(PyMongoError),  # a fail-over: go on where the stream was
                MongoClient[dict[str, Any]](spec["url"], **options) as mongo,
                mongo[spec["database"]][spec["namespace"]].watch(
                    **since, max_await_time_ms=500
                ) as stream,
            ):
                while True:
                    event = stream.try_next()
                    if event is None:
                        out.flush()
                        continue
                    if event["operationType"] == "insert" and event["documentKey"]["_id"] == END:
                        return
                    line = note(event)
                    if line is not None:
                        out.write(json.dumps(line, separators=(",", ":")) + "\n")
                    since = {"resume_after": event["_id"]}
            time.sleep(0.2)
