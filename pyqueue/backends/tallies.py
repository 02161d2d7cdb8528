"""The counts of many queues at once, and their oldest messages, in few commands.

A command adds up the documents of many queues. Records count as documents, too: their number is
subtracted from the live documents, and a scan of later documents leaves them out. The ready
messages are the live messages minus the later messages. So the result stays right if a consumer
moves a record ahead of now in between. With a cap, each queue is counted separately, up to the cap.

Further commands add the messages in packs, and find out when the oldest messages began to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, NamedTuple

from pyqueue.backends import kind as kinds
from pyqueue.backends.bucket.kind import PACKS
from pyqueue.backends.limits.indexes import LIMITED
from pyqueue.backends.namespace import HOT, RECORD_IDS, STREAM
from pyqueue.backends.options import Options
from pyqueue.backends.ordered.groups import GROUPED
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.backends.streams.log import packs_between
from pyqueue.backends.transitions import record_id
from pyqueue.backends.turns import MAX_PAGE, Order
from pyqueue.clock import BAND, BARE_BAND
from pyqueue.messages import Counts
from pyqueue.requests import Command, Document, Filter, Find, Plan, ServerTime

Pipeline = list[dict[str, Any]]

#: The fields of a record that describe its queue.
_FIELDS: Final = dict.fromkeys(("q", "when", "paused", "kind", "shape", "options", "first"), 1)


#: The sum that counts documents, the condition for a held document, and the sum of held documents.
_NUMBER: Final[Mapping[str, object]] = {"n": {"$sum": 1}}
_TOKEN: Final = {"$ne": [{"$ifNull": ["$token", ""]}, ""]}
_HELD: Final[Mapping[str, object]] = {"held": {"$sum": {"$cond": [_TOKEN, 1, 0]}}}


def dead_letter_of(queue: str, options: Mapping[str, object]) -> str:
    """Return the name of the dead-letter queue of a queue whose record shows these options."""
    return str(options.get("dead_letter") or f"{queue}.dead")


@dataclass(slots=True)
class SumByQueue(Command[Mapping[str, Mapping[str, int]]]):
    """Add up numbers over the matching documents of each queue. Return sums keyed by queue name."""

    filter: Filter
    sums: Mapping[str, object]
    hint: str = HOT
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send an aggregate."""
        pipeline = [{"$match": self.filter}, {"$group": {"_id": "$q", **self.sums}}]
        return collection.aggregate(pipeline, hint=self.hint, session=self.session)

    def read(self, raw: Any) -> Mapping[str, Mapping[str, int]]:
        """Return the sums, keyed by queue name."""
        return {each["_id"]: each for each in raw if isinstance(each["_id"], str)}


@dataclass(slots=True)
class AskEach(Command[list[Document]]):
    """Run several pipelines in one command. Return a document for each, or {} if it finds none."""

    pipelines: Sequence[Pipeline]
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send an aggregate that runs one pipeline after the other."""
        first, *rest = (
            [*each, {"$set": {"place": place}}] for place, each in enumerate(self.pipelines)
        )
        more = [{"$unionWith": {"coll": collection.name, "pipeline": each}} for each in rest]
        return collection.aggregate([*first, *more], session=self.session)

    def read(self, raw: Any) -> list[Document]:
        """Return one document for each pipeline."""
        found = {document["place"]: document for document in raw}
        return [found.get(place, {}) for place in range(len(self.pipelines))]


class Listed(NamedTuple):
    """A queue or a stream, and the content of its records."""

    name: str
    #: The record, or {} if there is none.
    record: Mapping[str, Any]
    #: The ids of all its records, each with its ``when``.
    records: Mapping[str, object]

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return str(self.record.get("kind", "standard"))

    @property
    def shape(self) -> Mapping[str, Any]:
        """The options on which all users of the queue agree."""
        shape = self.record.get("shape")
        return shape if isinstance(shape, Mapping) else {}

    @property
    def live_records(self) -> int:
        """How many of its records lie among the live documents."""
        return sum(isinstance(when, datetime) for when in self.records.values())

    def messages(self, match: Filter, most: int, *, sort: bool = False) -> Pipeline:
        """Return the pipeline that finds messages, up to ``most`` of them.

        Args:
            match: A condition that the messages must meet, in addition to being in the queue.
            most: The maximum number of messages to find.
            sort: Whether to find the first messages in scan order.
        """
        # A condition on _id before the limit would have the server try the index of _id, too.
        order = [{"$sort": {"q": 1, **dict(SCAN_ORDER)}}] if sort else []
        found: Pipeline = [{"$match": {"q": self.name, **match}}, *order]
        found.append({"$limit": most + len(self.records)})
        return [*found, {"$match": {"_id": {"$nin": [*self.records]}}}, {"$limit": most}]

    def offers(self, capability: str) -> bool:
        """Return whether its kind has a capability."""
        kind = kinds.known().get(self.kind)
        return kind is not None and capability in kind.capabilities

    def options(self) -> Mapping[str, Any]:
        """Return the options with which programs use the queue or stream."""
        shared = {name: value for name, value in self.shape.items() if name != "limit"}
        given = self.record.get("options")
        if self.kind == STREAM or not isinstance(given, Mapping):
            return shared
        return {**Options(dead_letter=f"{self.name}.dead").listed(), **given, **shared}

    def dead_letter(self) -> str | None:
        """Return the name of its dead-letter queue, or None if it is a stream."""
        if self.kind == STREAM:
            return None
        return dead_letter_of(self.name, self.options())

    def orders(self) -> Iterable[Order]:
        """Return the orders in which its messages may wait for each other."""
        if self.offers("group"):
            yield GROUPED
        limit = self.shape.get("limit")
        if isinstance(limit, Mapping) and "per" in limit:
            yield LIMITED


class Tally(NamedTuple):
    """The message counts of a queue, and its oldest waiting message."""

    counts: Counts
    #: When the oldest waiting message began to wait, or None if none waits, or for a stream.
    oldest: datetime | None = None


def listed(names: Iterable[str]) -> Plan[list[Listed]]:
    """Return these queues with their records."""
    main: dict[str, Document] = {}
    every: dict[str, dict[str, object]] = {}
    for each in (yield from Find({"_id": RECORD_IDS}, _FIELDS)):
        queue = str(each.get("q"))  # any program may have written it
        every.setdefault(queue, {})[each["_id"]] = each.get("when")
        if each["_id"] == record_id(queue):
            main[queue] = each
    return [Listed(name, main.get(name, {}), every.get(name, {})) for name in names]


def tally(some: Sequence[Listed], cap: int | None, held: bool) -> Plan[list[Tally]]:
    """Count the messages of queues and streams.

    Args:
        some: The queues and streams.
        cap: The maximum number of messages to count in each state, or None to count all.
        held: Whether to tell reserved messages from scheduled messages. If not, both count as
            scheduled.
    """
    found = yield from _tally_logs([each for each in some if each.kind == STREAM])
    queues = [each for each in some if each.kind != STREAM]
    if queues:
        found |= yield from _tally_queues(queues, cap, held)
    return [found[each.name] for each in some]


# ---- queues


def _tally_queues(queues: Sequence[Listed], cap: int | None, held: bool) -> Plan[dict[str, Tally]]:
    now = yield from ServerTime()
    if cap is None:
        numbers = yield from _all_numbers(queues, now, held)
    else:
        numbers = yield from _capped_numbers(queues, now, cap, held)
    pairs = [*zip(queues, numbers, strict=True)]
    packed = yield from _packed([each for each, number in pairs if any(number.values())], now)
    oldest = yield from _oldest(pairs, now)
    found: dict[str, Tally] = {}
    for each, number in pairs:
        more = packed.get(each.name, {})
        counts = {
            "ready": number["ready"] + more.get("ready", 0),
            "scheduled": number["scheduled"] + more.get("later", 0),
            "reserved": number["reserved"],
            "history": number["history"],
        }
        if held:
            counts["scheduled"] -= more.get("held", 0)
            counts["reserved"] += more.get("held", 0)
        if cap is not None:
            counts = {state: min(cap, number) for state, number in counts.items()}
        found[each.name] = Tally(Counts(**counts), oldest[each.name])
    return found


def _all_numbers(queues: Sequence[Listed], now: datetime, held: bool) -> Plan[list[dict[str, int]]]:
    """Count the documents of queues by state."""
    mine = {"q": {"$in": [each.name for each in queues]}}
    records = [id for each in queues for id in each.records]
    later = {**mine, "when": {"$gt": now, "$lt": BAND}, "_id": {"$nin": records}}
    live = yield from SumByQueue({**mine, "when": {"$lt": BAND}}, _NUMBER)
    waiting = yield from SumByQueue(later, {**_NUMBER, **(_HELD if held else {})})
    ended = {**mine, "when": {"$gte": BAND, "$lt": BARE_BAND}}
    finished = yield from SumByQueue(ended, _NUMBER)
    numbers: list[dict[str, int]] = []
    for each in queues:
        some = waiting.get(each.name, {})
        number, reserved = some.get("n", 0), some.get("held", 0)
        messages = live.get(each.name, {}).get("n", 0) - each.live_records
        numbers.append(
            {
                "ready": max(0, messages - number),
                "scheduled": number - reserved,
                "reserved": reserved,
                "history": finished.get(each.name, {}).get("n", 0),
            }
        )
    return numbers


def _capped_numbers(
    queues: Sequence[Listed], now: datetime, cap: int, held: bool
) -> Plan[list[dict[str, int]]]:
    """Count the documents of queues by state, up to ``cap`` of each."""
    later = {"when": {"$gt": now, "$lt": BAND}}
    filters: dict[str, Filter] = {"ready": {"when": {"$lte": now}}, "scheduled": later}
    filters["history"] = {"when": {"$gte": BAND, "$lt": BARE_BAND}}
    if held:
        filters["scheduled"] = {**later, "token": {"$exists": False}}
        filters["reserved"] = {**later, "token": {"$exists": True}}
    pipelines = [
        [*each.messages(match, cap), {"$count": "n"}]
        for each in queues
        for match in filters.values()
    ]
    found = iter((yield from AskEach(pipelines)))
    return [
        {"reserved": 0, **{state: next(found).get("n", 0) for state in filters}} for _ in queues
    ]


def _packed(queues: Sequence[Listed], now: datetime) -> Plan[Mapping[str, Mapping[str, int]]]:
    """Count how many more messages than documents each queue has, keyed by queue name.

    The numbers are ``ready``, ``later`` and ``held``, which is a part of ``later``.
    """
    buckets = [each.name for each in queues if each.offers("packs")]
    if not buckets:
        return {}
    match = {"q": {"$in": buckets}, "when": {"$lt": BAND}, "n": {"$gte": 0}}
    later = {"$gt": ["$when", now]}
    states = {
        "ready": {"$lte": ["$when", now]},
        "later": later,
        "held": {"$and": [later, _TOKEN]},
    }
    more = {"$subtract": ["$n", 1]}  # each pack was counted as a document
    sums = {name: {"$sum": {"$cond": [state, more, 0]}} for name, state in states.items()}
    return (yield from SumByQueue(match, sums, PACKS))  # the index covers it


def _oldest(
    pairs: Sequence[tuple[Listed, Mapping[str, int]]], now: datetime
) -> Plan[dict[str, datetime | None]]:
    """Return when the oldest waiting message of each queue began to wait, or None if none waits."""
    asked = [
        (each.name, pipeline) for each, number in pairs for pipeline in _waiting(each, number, now)
    ]
    answers = (yield from AskEach([pipeline for _, pipeline in asked])) if asked else []
    named = [(name, answer) for (name, _), answer in zip(asked, answers, strict=True)]
    named += yield from _behind_retries(named, now)
    found: dict[str, datetime | None] = {each.name: None for each, _ in pairs}
    for name, answer in named:
        found[name] = _earlier(found[name], _since(answer), now)
    return found


def _earlier(known: datetime | None, since: datetime | None, now: datetime) -> datetime | None:
    """Return the earlier of two instants, of which ``since`` counts only if it is past."""
    if since is None or since > now:
        return known
    return since if known is None else min(since, known)


def _waiting(each: Listed, number: Mapping[str, int], now: datetime) -> Iterable[Pipeline]:
    """Yield the pipelines that find the messages of a queue that may have waited longest."""
    if number["ready"]:
        first = each.messages({"when": {"$lte": now}}, 1, sort=True)
        yield [*first, {"$project": {"due": 1, "when": 1}}]
    if number["scheduled"]:  # deferred messages are among these
        for order in each.orders():
            yield _firsts(each.name, order, now)


def _firsts(queue: str, order: Order, now: datetime) -> Pipeline:
    """Return the pipeline that finds the earliest ``due`` of the first messages of groups or keys.

    It reads one index entry and one document of each group or key. The messages behind the first
    wait for it. Their ``when`` does not show how long they have waited, since deferrals change it.
    ``blocked`` lists the groups whose first message waits for its next try, and a None for each
    other group.
    """
    bounds: dict[str, Any] = {"due": {"$min": "$due"}}
    if order is GROUPED:
        bounds["blocked"] = {"$push": {"$cond": [{"$gt": ["$due", now]}, "$_id", None]}}
    return [
        {"$match": {"q": queue, order.field: {"$gt": ""}}},
        {"$sort": {"q": 1, order.field: 1, **dict(order.sort)}},
        {"$group": {"_id": f"${order.field}", "due": {"$first": "$due"}}},
        {"$limit": MAX_PAGE},
        {"$group": {"_id": None, **bounds}},
    ]


def _behind_retries(
    answers: Sequence[tuple[str, Document]], now: datetime
) -> Plan[list[tuple[str, Document]]]:
    """Find the earliest ``due`` of the messages in groups whose first message is not due.

    A message that waits for its next try keeps its place, so messages behind it may have waited for
    longer. Up to ``MAX_PAGE`` messages of each queue are read.
    """
    blocked = {
        queue: groups
        for queue, answer in answers
        if (groups := [each for each in answer.get("blocked", ()) if each is not None])
    }
    if not blocked:
        return []
    pipelines: list[Pipeline] = [
        [
            {"$match": {"q": queue, "group": {"$in": groups}}},
            {"$sort": {"q": 1, "group": 1, **dict(GROUPED.sort)}},
            {"$limit": MAX_PAGE},
            {"$match": {"due": {"$lte": now}}},
            {"$group": {"_id": None, "due": {"$min": "$due"}}},
        ]
        for queue, groups in blocked.items()
    ]
    return [*zip(blocked, (yield from AskEach(pipelines)), strict=True)]


def _since(document: Mapping[str, Any]) -> datetime | None:
    """Return the instant from which a message is eligible, or None if no stored value is a date."""
    for value in (document.get("due"), document.get("when")):
        if isinstance(value, datetime):
            return value
    return None


# ---- streams


def _tally_logs(streams: Sequence[Listed]) -> Plan[dict[str, Tally]]:
    """Count the messages of streams: the positions from the first pack to the last."""
    if not streams:
        return {}
    ends: list[Pipeline] = [
        [
            {"$match": packs_between(each.name, int(each.record.get("first", 0)))},
            {"$sort": {"_id": direction}},
            {"$limit": 1},
            {"$project": {"s": 1, "n": 1}},
        ]
        for each in streams
        for direction in (1, -1)
    ]
    found = iter((yield from AskEach(ends, majority=True)))
    tallies: dict[str, Tally] = {}
    for each in streams:
        low, high = next(found), next(found)
        number = high["s"] + high["n"] - low["s"] if low and high else 0
        tallies[each.name] = Tally(Counts(ready=number))
    return tallies
