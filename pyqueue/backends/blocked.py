"""The group that blocks an ordered queue: how many messages wait, and for which message."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pyqueue.backends.ordered.groups import GROUPED
from pyqueue.backends.tallies import AskEach, Pipeline
from pyqueue.backends.turns import MAX_PAGE
from pyqueue.documents import group_of
from pyqueue.requests import Document, Plan, ServerTime


class Blocked(NamedTuple):
    """The group of a queue whose first waiting message has waited longest."""

    group: str
    #: How many of its messages wait, up to the cap.
    number: int
    #: Its first waiting message: ``id``, ``when`` and ``tries``.
    first: Document
    #: The message that holds it: ``_id``, ``when`` (the end of its lease), ``owner`` and
    #: ``reserved``. {} if there is none.
    holder: Document


def blocked(queues: Sequence[str], cap: int) -> Plan[dict[str, Blocked]]:
    """Return the groups that block ordered queues, keyed by queue, in two commands.

    For each queue, they read one index entry and one document per group, for up to 1000 groups. The
    messages of the blocking group are counted in the index, up to ``cap``.
    """
    if not queues:
        return {}
    now = yield from ServerTime()
    firsts = yield from AskEach([_longest(each, now) for each in queues])
    pairs = [(queue, first) for queue, first in zip(queues, firsts, strict=True) if first]
    matches = [
        ({"q": queue, "lock": first["_id"]}, {"q": queue, "group": first["_id"]})
        for queue, first in pairs
    ]
    asked: list[Pipeline] = []
    for held, waiting in matches:
        fields = {"when": 1, "owner": 1, "reserved": 1}
        asked.append([{"$match": held}, {"$limit": 1}, {"$project": fields}])
        asked.append([{"$match": waiting}, {"$limit": cap}, {"$count": "n"}])
    answers = iter((yield from AskEach(asked)) if asked else ())
    return {
        queue: Blocked(
            str(group_of({"group": first["_id"]})),
            holder=next(answers),
            number=next(answers).get("n", 0),
            first=first,
        )
        for queue, first in pairs
    }


def _longest(queue: str, now: datetime) -> Pipeline:
    """Return the pipeline that finds the first message of the group that has waited longest.

    The other messages of a group also wait if its first message waits for another try.
    """
    fields: dict[str, Any] = {name: {"$first": f"${name}"} for name in ("due", "when", "tries")}
    return [
        {"$match": {"q": queue, "group": {"$gt": ""}}},
        {"$sort": {"q": 1, "group": 1, **dict(GROUPED.sort)}},
        {"$group": {"_id": "$group", "id": {"$first": "$_id"}, **fields}},
        {"$limit": MAX_PAGE},
        {"$match": {"when": {"$gt": now}, "$or": [{"due": {"$lte": now}}, {"tries": {"$gt": 0}}]}},
        {"$sort": {"due": 1}},
        {"$limit": 1},
    ]
