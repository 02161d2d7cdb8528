"""Turns: messages that wait for each other, and how the next message gets its turn.

A message of an ordered group waits until the message before it is settled. The messages with one
key of a limit wait until one of them may start. Such messages would slow down every scan for free
messages, so a scan that meets them defers them: it moves their ``when`` into the future. The first
waiting message is the *heir*; it is brought forward when its wait ends.

A deferral changes only ``when``; ``due`` still says when the message became eligible. So each
step here may be repeated, lost or late.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple

from pyqueue.backends.scan import ScanState, due_of
from pyqueue.backends.transaction_locks import CLAIM_LIMIT_S
from pyqueue.concurrently import SHORT_AT_ONCE, concurrently
from pyqueue.documents import STORED_GROUP, hashable_id
from pyqueue.errors import TimeLimitReached, Unavailable
from pyqueue.requests import Command, Document, Plan, ServerTime, Signal, Sort, Update, UpdateEach

log = logging.getLogger("pyqueue")

#: How long a message that is not the heir is deferred. The scans of all processes visit every
#: group more often than that.
DEFERRED_FOR: Final = timedelta(hours=1)
#: How many groups, or messages, one step reads.
MAX_PAGE: Final = 1000

#: When the lease of the held message ends, keyed by group.
Locks = Mapping[Hashable, datetime]


class Order(NamedTuple):
    """Messages that wait until earlier messages are no longer held, and their order.

    Messages of a group wait for its held message. Messages with a key of a limit wait for a slot;
    see ``slots``. The rules are the same.
    """

    #: The field with the group, or the key of a limit, whose messages wait for each other.
    field: str
    #: The fields that order the messages of one group or key. Ties are ordered by _id.
    places: tuple[str, ...]
    #: The name of their index: ``q``, the field, the places, _id.
    by: str

    @property
    def sort(self) -> Sort:
        """The order of the messages of one group or key."""
        return (*((name, 1) for name in self.places), ("_id", 1))

    def name_in(self, document: Mapping[str, Any]) -> Hashable:
        """Return the group, or the key of a limit, under which a message waits."""
        return group_in(document) if self.field == "group" else document.get(self.field)


def group_in(document: Mapping[str, Any]) -> Hashable:
    """Return the group of a stored message, held or not, or None if it has none."""
    if type(group := document.get("group")) is str:
        return group
    for name in ("group", "lock"):
        if name in document:
            return hashable_id(document[name])
    return None


# ---- the first of each


@dataclass(slots=True)
class FirstOfEach(Command[list[Document]]):
    """Read the first waiting message of each group, in the order of the index.

    ``names`` selects the groups; None means the next ``MAX_PAGE`` groups after ``after``. Messages
    that are ready at the instant ``not_ready`` are left out.
    """

    queue: str
    order: Order
    names: Sequence[Any] | None = None
    after: str = ""
    not_ready: datetime | None = None
    cursor: ClassVar[bool] = True

    @property
    def hint(self) -> str:
        """The index that the command needs."""
        return self.order.by

    def send(self, collection: Any) -> Any:
        """Send an aggregate that reads one index entry and one document for each group."""
        group, places, index = self.order
        names = {"$gt": self.after} if self.names is None else {"$in": list(self.names)}
        fields = {name: {"$first": f"${name}"} for name in {*places, "when", "due"}}
        pipeline: list[dict[str, Any]] = [
            {"$match": {"q": self.queue, group: names}},
            {"$sort": {"q": 1, group: 1, **dict(self.order.sort)}},
            {"$group": {"_id": f"${group}", "id": {"$first": "$_id"}, **fields}},
        ]
        if self.names is None:
            pipeline.append({"$limit": MAX_PAGE})
        if self.not_ready is not None:
            pipeline.append({"$match": {"when": {"$not": {"$lte": self.not_ready}}}})
        return collection.aggregate(pipeline, hint=index, session=self.session)

    def read(self, raw: Any) -> list[Document]:
        """Return the messages, each with its group."""
        return [{**each, "_id": each["id"], self.order.field: each["_id"]} for each in raw]


# ---- documents that are not as pyqueue writes them


def _is_sound(document: Mapping[str, Any], field: str) -> bool:
    is_array = isinstance(document.get(field), list)  # it stands for several values
    return isinstance(document.get("when"), datetime) and not is_array


def set_aside(
    queue: str, documents: Sequence[Document], field: str, session: object = None
) -> Plan[list[Document]]:
    """Make sure that no message waits for an invalid document. Return the valid documents.

    No scan finds a document whose ``when`` or ``field`` is invalid, so the wait would never end.
    Such documents lose the field that makes messages wait, and stay in the queue for repair. A
    group is kept as ``last_group``.
    """
    odd = [each for each in documents if not _is_sound(each, field)]
    if not odd:
        return list(documents)
    is_group = field in STORED_GROUP
    put = {"$rename": {field: STORED_GROUP[-1]}} if is_group else {"$unset": {field: ""}}
    for each in odd:
        text = "queue %r: no message waits for message %r, which has no valid `when` or %r"
        log.warning(text, queue, each["_id"], field)
    yield from UpdateEach(
        [
            ({"_id": each["_id"], "q": queue, "when": {"$eq": each.get("when")}}, put)
            for each in odd
        ],
        w1=session is None,
        session=session,
    )
    return [each for each in documents if _is_sound(each, field)]


def write_due(queue: str, documents: Sequence[Document]) -> Plan[None]:
    """Write a valid ``due`` into messages that lack one, before they are deferred."""
    odd = [each for each in documents if due_of(each) != each.get("due")]
    if odd:  # another program wrote them
        yield from UpdateEach(
            [({"_id": each["_id"], "q": queue}, {"$set": {"due": due_of(each)}}) for each in odd]
        )


# ---- moving waiting messages


def place_firsts(
    queue: str,
    order: Order,
    firsts: Sequence[Document],
    locks: Locks,
    now: datetime,
    session: object = None,
) -> Plan[int]:
    """Bring forward the first message of each group, if it is deferred for too long.

    If a message of the group is held, the first message becomes eligible when that lease ends, or
    else now.

    Returns:
        How many messages became eligible now.
    """
    found = yield from set_aside(queue, firsts, order.field, session)
    if len(found) < len(firsts):  # the messages behind them are first now
        names = [each[order.field] for each in firsts if not _is_sound(each, order.field)]
        following = yield from FirstOfEach(queue, order, names, session=session)
        found += [each for each in following if _is_sound(each, order.field)]  # otherwise next time
    moves: dict[datetime, list[Any]] = {}  # the ids, by their new ``when``
    for each in found:
        until = max(due_of(each), locks.get(order.name_in(each), now))
        if each["when"] > until:
            moves.setdefault(until, []).append(each["_id"])
    writes = []
    for at, ids in moves.items():
        # A message that has been held since then, and waits for its next try, is left alone.
        deferred = {"when": {"$gt": at}, "due": {"$lte": at}}
        writes.append(write_when(queue, order, ids, deferred, at, session=session))
    at_once = SHORT_AT_ONCE if session is None else 1  # a transaction runs one command at a time
    done = yield from concurrently(writes, at_once)
    return sum(count for when, count in zip(moves, done, strict=True) if when <= now)


def write_when(
    queue: str,
    order: Order,
    ids: Sequence[Any],
    match: Mapping[str, Any],
    when: datetime,
    session: object = None,
) -> Plan[int]:
    """Write ``when`` into the waiting messages among ``ids``. Return how many matched.

    Messages that a transaction locks are left alone. If a fail-over undoes this, only time is lost.
    """
    waiting = {"_id": {"$in": list(ids)}, "q": queue, order.field: {"$exists": True}, **match}
    put = {"$set": {"when": when}}
    if session is not None:
        return (yield from Update(waiting, put, many=True, session=session)).matched
    with suppress(TimeLimitReached):
        change = yield from Update(
            waiting, put, many=True, w1=True, server_limit_s=CLAIM_LIMIT_S * 4
        )
        return change.matched
    return 0


def bring_forward(
    queue: str, order: Order, names: Collection[Any], session: object = None
) -> Plan[None]:
    """Release groups whose current message has been settled."""
    if not names:
        return
    try:
        now = yield from ServerTime()
        firsts = yield from FirstOfEach(queue, order, list(names), not_ready=now, session=session)
        if (yield from place_firsts(queue, order, firsts, locks={}, now=now, session=session)):
            yield from Signal(queue, now, session)
    except Unavailable:
        return  # the caller's work is done, and deferred messages come back by themselves


def tidy_up(state: ScanState, moving: Plan[bool], claimed: Sequence[Document]) -> Plan[bool]:
    """Run a plan that moves unclaimed messages after a claim. Return its result.

    If the server is unavailable, some messages may stay deferred for too long. So the next scan is
    a rescan, and the claimed messages still reach the caller.

    Raises:
        Unavailable: The plan failed, and no message was claimed.
    """
    try:
        return (yield from moving)
    except Unavailable:
        state.groups.must_walk = True
        if not claimed:
            raise
        return False
