"""The groups of an ordered queue: which message is first, and how a group goes on.

While a message is held, its field ``lock`` stands in place of ``group``. So a unique index keeps a
second message of the group from being held, and the index ``group`` lists those that wait, in their
order. A lock lives and dies with the held message: nothing else has to be cleaned up.

Messages of a group that wait for another one would slow down every look for messages that are
free. A look that meets them defers them: it moves their ``when`` into the future. The first that
waits is the *heir*. It is deferred until the lease of the held message ends at the latest, so it
comes back even if the holder is killed. The holder brings it forward when it ends its claim. The
rest is deferred for ``DEFERRED_FOR``, and each one becomes the heir in its turn.

A deferral only changes ``when``, and ``due`` says since when the message is eligible. So each step
here may be repeated, may be lost, and may come late: ``restore`` then corrects it, and without it a
message waits as long as it was deferred.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple

from bson import ObjectId

from pyqueue.backends.kind import Kind
from pyqueue.backends.locked import CLAIM_LIMIT_S
from pyqueue.backends.scan import FIRST, due_of
from pyqueue.clock import next_number
from pyqueue.documents import hashable_id
from pyqueue.errors import TimeLimitReached, Unavailable
from pyqueue.requests import Command, Document, Find, Plan, ServerTime, Signal, Sort, Update

__all__ = [
    "DEFERRED_FOR",
    "GROUPED",
    "GROUPS",
    "GROUP_KEYS",
    "LOCKS",
    "LOCK_KEYS",
    "MAX_PAGE",
    "FirstOfEach",
    "Locks",
    "Order",
    "bring_forward",
    "group_in",
    "groups_in",
    "is_first",
    "locks_of",
    "ordered_groups",
    "place_at",
    "place_firsts",
    "rank",
    "restore",
    "write_when",
]

#: The index of the messages that wait.
GROUPS: Final = "turns"
#: The unique index of the held messages, and its keys.
LOCKS: Final = "lock"
LOCK_KEYS: Final = (("lock", 1), ("q", 1))
#: For how long a message that is not the heir is deferred. The scans of all processes look at every
#: group more often than that.
DEFERRED_FOR: Final = timedelta(hours=1)
_MILLISECOND: Final = timedelta(milliseconds=1)
#: How many groups, or messages, one step looks at.
MAX_PAGE: Final = 1000

#: When the lease of the held message ends, by group.
Locks = Mapping[Hashable, datetime]


class Order(NamedTuple):
    """Messages that wait until others are no longer held, and their order.

    Those of a group wait for its held message. Those of a key of a limit wait for a slot; see
    ``slots``. The rules are the same.
    """

    #: The field that says what a message waits for.
    field: str
    #: The fields by which those that wait for the same are ordered, and then by _id.
    places: tuple[str, ...]
    #: The name of the index of them: ``q``, the field, the places, _id.
    by: str

    @property
    def sort(self) -> Sort:
        """The order of those that wait for the same."""
        return (*((name, 1) for name in self.places), ("_id", 1))

    def name_in(self, document: Mapping[str, Any]) -> Hashable:
        """Return what a message waits for."""
        return group_in(document) if self.field == "group" else document.get(self.field)


GROUPED: Final = Order("group", ("seq", "no"), GROUPS)
GROUP_KEYS: Final = (("q", 1), ("group", 1), *GROUPED.sort)


# ---- the order of a group


def place_at(when: datetime) -> dict[str, int]:
    """Return the place in its group of a message that enters it with this ``when``.

    ``seq`` has room for 1000 messages of a millisecond, which 0.1 numbers. The last one is for all
    messages of this release, so they come behind those, and ``no`` orders them.
    """
    return {"seq": 1000 * ((when - FIRST) // _MILLISECOND) + 999, "no": next_number()}


def rank(document: Mapping[str, Any]) -> tuple[int, int, bool, Any]:
    """Return the place of a message in its group, as the index orders it."""
    seq, no = (_number(document.get(name)) for name in GROUPED.places)
    id = document["_id"]
    return seq, no, isinstance(id, ObjectId), id if isinstance(id, (ObjectId, str)) else repr(id)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def is_first(document: Mapping[str, Any], rest: Mapping[str, Any] | None) -> bool:
    """Return whether a message comes before the first of those that wait."""
    return rest is None or rank(document) < rank(rest)


def group_in(document: Mapping[str, Any]) -> Hashable:
    """Return the group of a stored message, held or not; None if it has none."""
    if type(group := document.get("group")) is str:
        return group
    for name in ("group", "lock"):
        if name in document:
            return hashable_id(document[name])
    return None


def groups_in(documents: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the stored values of the groups of messages, without repetitions."""
    found: dict[Hashable, Any] = {}
    for each in documents:
        if (name := group_in(each)) is not None:
            found[name] = each.get("group", each.get("lock"))
    return list(found.values())


def ordered_groups(kind: Kind, documents: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the groups of messages of a queue, of which a kind without groups has none."""
    return groups_in(documents) if "group" in kind.capabilities else []


# ---- what is first


@dataclass(slots=True)
class FirstOfEach(Command[list[Document]]):
    """Read the first waiting message of each group, as the index has it.

    Of the groups in ``names``; None: of the next ``MAX_PAGE`` groups behind ``after``.
    ``not_ready`` leaves out those that are ready at this instant.
    """

    queue: str
    names: Sequence[Any] | None = None
    after: str = ""
    not_ready: datetime | None = None
    order: Order = GROUPED
    cursor: ClassVar[bool] = True

    @property
    def hint(self) -> str:
        """The index that it needs."""
        return self.order.by

    def send(self, collection: Any) -> Any:
        """Send an aggregate that reads one index entry, and one document, of each group."""
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
            pipeline.append({"$match": {"when": {"$gt": self.not_ready}}})
        return collection.aggregate(pipeline, hint=index, session=self.session)

    def read(self, raw: Any) -> list[Document]:
        """Return the messages, each with its group."""
        return [
            {
                **each,
                "_id": each["id"],
                self.order.field: each["_id"],
                "when": each["when"] or FIRST,
            }
            for each in raw
        ]


def locks_of(queue: str, names: Collection[Any]) -> Plan[dict[Hashable, datetime]]:
    """Return when the leases of the held messages of these groups end."""
    if not names:
        return {}
    match = {"q": queue, "lock": {"$in": list(names)}}
    found = yield from Find(match, {"lock": 1, "when": 1}, hint=LOCKS)
    return {hashable_id(each["lock"]): each["when"] for each in found}


# ---- moving what waits


class _Move(NamedTuple):
    """What moves to one ``when``."""

    when: datetime
    ids: list[Any]


def place_firsts(
    queue: str,
    firsts: Sequence[Document],
    locks: Locks,
    now: datetime,
    session: object = None,
    order: Order = GROUPED,
) -> Plan[int]:
    """Bring forward the first messages of groups that are deferred for too long.

    That of a group without a lock becomes eligible now, the heir when the lease ends.

    Returns:
        How many became eligible now.
    """
    moves: dict[datetime, _Move] = {}
    for each in firsts:
        until = max(due_of(each), locks.get(order.name_in(each), now))
        if each["when"] > until:
            moves.setdefault(until, _Move(until, [])).ids.append(each["_id"])
    ready = 0
    for when, ids in moves.values():
        # One that was held meanwhile, and that waits for its next try, is left alone.
        deferred = {"when": {"$gt": when}, "due": {"$lte": when}}
        done = yield from write_when(queue, ids, deferred, when, session, order)
        ready += done if when <= now else 0
    return ready


def write_when(
    queue: str,
    ids: Sequence[Any],
    match: Mapping[str, Any],
    when: datetime,
    session: object = None,
    order: Order = GROUPED,
) -> Plan[int]:
    """Write ``when`` into those of the messages that wait. Return how many matched.

    What a transaction locks is left alone. A fail-over that undoes this costs time only.
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
    queue: str, names: Collection[Any], session: object = None, order: Order = GROUPED
) -> Plan[None]:
    """Let groups go on whose held message is no longer held."""
    if not names:
        return
    try:
        now = yield from ServerTime()
        firsts = yield from FirstOfEach(
            queue, list(names), not_ready=now, order=order, session=session
        )
        if (yield from place_firsts(queue, firsts, {}, now, session, order)):
            yield from Signal(queue, now, session)
    except Unavailable:
        return  # the caller's work is done, and the heirs come back by themselves


def restore(queue: str, names: Collection[Any] | None, after: str = "") -> Plan[list[Document]]:
    """Correct what is deferred in these groups; None: in the next groups behind ``after``.

    Returns:
        The first waiting message of each group. Those of locked groups have ``locked``.
    """
    firsts = yield from FirstOfEach(queue, names if names is None else list(names), after)
    locks = yield from locks_of(queue, groups_in(firsts))
    now = yield from ServerTime()
    if (yield from place_firsts(queue, firsts, locks, now)):
        yield from Signal(queue, now)
    return [{**each, "locked": True} if group_in(each) in locks else each for each in firsts]
