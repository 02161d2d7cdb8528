"""The change log: the story of each message, in the order of the database.

A process reads the change stream of the namespace's collection. The stream has every write that a
majority has, and no write that a fail-over rolled back. So the log does not depend on the view of
any client. Each change that the checker needs is a line of JSON:

``["in", id, queue, n, pushed, at, when]``
    A message was stored. ``n`` is in its payload, ``pushed`` is the time of its push in
    milliseconds. If it has a group, that and its place, ``[seq, no]``, follow.
``["pack", id, queue, [n], pushed, at, when]``
    A pack was stored. The places of its messages are those in the list.
``["copy", id, queue, {name: n}, pushed, at, when, target, token, dead]``
    Messages that leave their pack were stored, still hidden. ``target`` is the queue that they
    enter, ``token`` the token of the claim that hands them over.
``["limit", id, queue, concurrency, at]``
    The record of a queue has a new limit.
``["set", id, {field: value}, at]``
    It was updated: ``q``, ``token`` (None: removed), ``owner``, ``when``, ``processed``, ``dead``,
    ``n``, and ``by``, the token that the settling client wrote into the message with the same
    update; ``due``; ``outcome``, if no holder chose it; ``tries``, if the end of a claim
    lowered them. A pack: ``left``, how many messages it still has, ``done``, the numbers with
    its bits, and ``handed``, the token and the ids of messages that it hands over. A hidden copy:
    ``target``, ``with``, the token of the claim, and ``dead``.
``["tick", id, {field: value}, at]``
    A schedule was stored or changed: ``when``, its next tick in milliseconds, or None if it is
    paused; ``last``, the id of the last message that it has pushed. ``gone``: it was deleted.
``["out", id, at]``
    It was deleted.

``at`` is the time of the change, ``when`` is the time from which the message may be claimed, and
``due`` that from which it is eligible, all in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from pyqueue.backends.bucket.packs import is_pack
from pyqueue.clock import BAND
from tests.chaos.names import document_of, name_of

#: The id of the document that ends the log. The program inserts it when the workload has ended.
END = "~end"

#: How the ids of schedules begin.
_SCHEDULES = "~cron:"
#: Fields that go into the log with their values.
_COPIED = ("q", "token", "owner")


def line_of(event: Mapping[str, Any]) -> list[Any] | None:
    """Return the line of an event of the change stream, or None if the checker does not need it."""
    kind, id = event["operationType"], str(event["documentKey"]["_id"])
    at = _monotonic(event["wallTime"])
    if id.startswith(_SCHEDULES):
        return _of_schedule(event, id, at)
    if id.startswith("~"):  # the record of a queue
        put = event.get("updateDescription", {}).get("updatedFields", {})
        limit = put.get("shape.limit") or put.get("shape", {}).get("limit") or {}
        most = put.get("shape.limit.concurrency", limit.get("concurrency"))
        return ["limit", id, id.partition(":")[2], most, at] if most else None
    if kind == "insert":
        document = event["fullDocument"]
        if "processed" in document:
            return None  # no message: it keeps a pack out whose insert may still arrive
        pushed = round(document["pushed"].timestamp() * 1000)
        content = (document.get("payload") or {}).get("n")
        times = [pushed, at, _monotonic(document["when"])]
        if "handover" in document:
            return ["copy", id, document["q"], _contents(document), *times, *_mark(document)]
        if is_pack(document):
            return ["pack", id, document["q"], [each["p"]["n"] for each in document["b"]], *times]
        line = ["in", id, document["q"], content, *times]
        place = [document.get(name, 0) for name in ("seq", "no")]
        return [*line, document["group"], place] if "group" in document else line
    if kind == "delete":
        return ["out", id, at]
    update = event["updateDescription"]
    put, removed = update["updatedFields"], update["removedFields"]
    logged: dict[str, Any] = {name: put[name] for name in _COPIED if name in put}
    if "token" in removed:
        logged["token"] = None
    for name in ("when", "due"):
        if name in put:
            logged[name] = _monotonic(put[name])
    if "token" in removed and "tries" in put and "q" not in put:
        logged["tries"] = put["tries"]
    if put.get("outcome") in ("cancelled", "removed", "expired"):
        logged["outcome"] = put["outcome"]
    logged |= _of_packs(put)
    for name in ("processed", "dead"):
        if name in put:
            logged[name] = True
    if "dead" in removed:
        logged["dead"] = False
    if "dead" not in put:
        for name, value in put.items():
            logged |= _evidence(name, value)
    return ["set", id, logged, at] if logged else None


def _of_schedule(event: Mapping[str, Any], id: str, at: float) -> list[Any] | None:
    """Return the line of a change of a schedule."""
    if event["operationType"] == "delete":
        return ["tick", id, {"gone": True}, at]
    put = event.get("fullDocument") or event["updateDescription"]["updatedFields"]
    logged: dict[str, Any] = {"last": put["last"]} if "last" in put else {}
    if "when" in put:
        when: datetime = put["when"]
        logged["when"] = round(when.timestamp() * 1000) if when < BAND else None
    return ["tick", id, logged, at] if logged else None


def _contents(copy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of each message of a copy, by its name."""
    if not is_pack(copy):
        return {name_of(copy["_id"]): copy["payload"].get("n")}
    first = document_of(copy["_id"])
    return {
        f"{first}:{place}": each["p"]["n"]
        for place, each in zip(copy["at"], copy["b"], strict=True)
    }


def _mark(copy: Mapping[str, Any]) -> list[Any]:
    mark = copy["handover"]
    return [mark["to"], mark["token"], "dead" in copy]


def _of_packs(put: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that the updated fields of a pack, or of a hidden copy, show."""
    found: dict[str, Any] = {"left": put["n"]} if "n" in put else {}
    for name, value in put.items():
        field, _, place = name.partition(".")
        if field == "done":
            words = [(place, value)] if place else enumerate(value)
            found.setdefault("done", {}).update({str(at): word for at, word in words})
        elif field == "handed" and value != []:  # else all of it is shown
            entries = [value] if place else value
            found.setdefault("handed", []).extend([each["h"], each["ids"]] for each in entries)
        elif field == "handover":
            mark = {place: value} if place else value
            names = {"to": "target", "token": "with"}
            found |= {names[each]: mark[each] for each in names if each in mark}
    return found


def _monotonic(instant: datetime) -> float:
    """Return an instant of the machine's wall clock as seconds of its monotonic clock."""
    return round(time.monotonic() - (time.time() - instant.timestamp()), 3)


def _evidence(name: str, value: Any) -> dict[str, Any]:
    """Return the content and the token that an updated field shows; see ``workload``."""
    if name == "payload":
        content = {"n": value["n"]} if "n" in value else {}
        return content | ({"by": value["trail"][-1][1]} if value["trail"] else {})
    if name == "result" and isinstance(value, dict):
        return {"by": value["by"]}
    if name == "payload.trail":
        return {"by": value[-1][1]}
    if name.startswith("payload.trail."):
        return {"by": value[1]}
    if name == "error" and value["message"].startswith("by "):
        return {"by": value["message"].removeprefix("by ")}
    return {}


def watch(spec: dict[str, Any]) -> None:
    """Write the log until the document ``END`` arrives.

    Args:
        spec: ``url``, ``database`` and ``namespace`` of the collection; ``since``, the operation
            time to start at; ``path`` of the log.
    """
    options: dict[str, Any] = {"socketTimeoutMS": 5000, "connectTimeoutMS": 2000, "tz_aware": True}
    since: dict[str, Any] = {"start_at_operation_time": Timestamp(*spec["since"])}
    with open(spec["path"], "w") as out:
        while True:
            with (
                suppress(PyMongoError),  # a fail-over: open the stream again where it ended
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
                    line = line_of(event)
                    if line is not None:
                        out.write(json.dumps(line, separators=(",", ":")) + "\n")
                    since = {"resume_after": event["_id"]}
            time.sleep(0.2)
