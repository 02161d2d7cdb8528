"""The standard backend: delay, leases, keys, dead letter, move and history, in one kind of queue. Plans only: no I/O, no client.

A message is one document, and each of its steps is one atomic update of it. What holds everywhere here:

* a claim writes a token that no other claim has, and moves ``when`` to the lease's end: a lease that runs out needs no reaper;
* whoever settles matches the pair (_id, token): a former holder changes nothing;
* what leaves the queue loses its key and its token; what is finished leaves the range of ``when`` that claims look at.

A further kind of queue overrides how a message enters, is claimed and leaves, and says in ``capabilities`` what it cannot do.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, cast

from bson import ObjectId
from bson.errors import BSONError

from pyqueue import arguments, tokens
from pyqueue.backends import namespace
from pyqueue.backends.namespace import HOT
from pyqueue.backends.scan import FIRST, ScanStart, ScanState
from pyqueue.clock import BAND
from pyqueue.errors import (
    ConfigurationError,
    DuplicateKey,
    InvalidMessage,
    InvalidName,
    LeaseLost,
    QueueError,
    Unavailable,
)
from pyqueue.messages import (
    KEPT,
    NEVER,
    UNCHANGED,
    Backoff,
    Counts,
    Finished,
    Id,
    Message,
    Reservation,
    hashable_id,
    invalid_fields,
    message_of,
    without_fields,
)
from pyqueue.payloads import Codec, encode
from pyqueue.requests import (
    Coalesce,
    Count,
    Delete,
    EnsureQueue,
    Find,
    FindAndModify,
    Insert,
    Listen,
    Plan,
    ServerTime,
    Signal,
    Sort,
    Update,
    UpdateEach,
    Wait,
    WriteFailure,
)

__all__ = ["Options", "Settlement", "Standard"]

log = logging.getLogger("pyqueue")

#: What one claim takes at most: beyond about 100, competing claims collapse.
CLAIM: Final = 100
#: What one command settles or writes at most.
BATCH: Final = 1000
#: How long a pause may go unnoticed without a bus, in seconds.
PAUSE: Final = 5.0
#: How often the next ``when`` is read at most.
DUE: Final = timedelta(seconds=1)
#: How many queues a message remembers having passed.
TRAIL: Final = 20

OPERATORS: Final = (
    "$set",
    "$unset",
    "$inc",
    "$mul",
    "$min",
    "$max",
    "$rename",
    "$push",
    "$pull",
    "$addToSet",
)

#: What a claim leaves in a message and whatever ends the claim takes away.
HELD: Final = ("token", "owner", "reserved", "claim")
#: What describes a message and does not make it one.
LABELS: Final = ("headers", "key", "last_key", "pushed", "trail", "type")
#: What belongs to a message's stay in one queue.
STAY: Final = ("error", "progress", "checkpoint", "dead", "processed", "outcome", "expires")

Taken = list[tuple[dict[str, Any], Message[Any]]]
Update_ = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What a Queue object does with the messages it handles; durations in seconds."""

    lease: float = 60
    max_tries: int | None = 20
    dead_letter: str = ""
    history: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    poll: float = 15

    def shown(self) -> dict[str, Any]:
        """What the queue's record keeps for people to read."""
        return {
            name: getattr(self, name) for name in ("lease", "max_tries", "dead_letter", "history")
        }


class Settlement(NamedTuple):
    """One reservation and what its settling does to the message."""

    held: Reservation[Any]
    #: Makes the update at the instant of settling; None as the update: the message is deleted.
    build: Callable[[datetime], Update_ | None]
    #: Acts with equal groups have equal updates, and go together; None: one of its own.
    group: Hashable = None


#: How settling went: for unknown, the message is gone, by this very command or by another's.
SettlementResult = Literal["done", "lost", "unknown"] | QueueError


def unset(*names: str) -> dict[str, str]:
    """The $unset of these fields."""
    return dict.fromkeys(names, "")


def _due(document: Mapping[str, Any]) -> datetime:
    """Since when it was eligible; before all others, if what is stored is no instant."""
    for name in ("due", "when"):
        if isinstance(document.get(name), datetime):
            return cast(datetime, document[name])
    return FIRST


def _place(document: Mapping[str, Any], now: datetime) -> ScanStart:
    """Where it stood, if it was never claimed before; else lower, which is safe. So it is if others wrote it."""
    id, due = document["_id"], _due(document)
    return due if due <= now else FIRST, id if isinstance(id, (ObjectId, str)) else None


def _unfit(document: Mapping[str, Any]) -> list[str] | None:
    """The faults of a document that was claimed; None: it is handed out as it is, since it was buried before."""
    wrong = invalid_fields(document)
    if "processed" in document:  # nobody could settle it
        return [*wrong, "processed"]
    return None if "dead" in document and "dead" not in wrong else wrong


def _told(document: Mapping[str, Any], wrong: Sequence[str]) -> InvalidMessage:
    """What is wrong with a stored document, in words."""
    values = "; ".join(f"{name} is {repr(document[name])[:100]}" for name in wrong)
    return InvalidMessage(f"the stored document is not as pyqueue writes it: {values}")


def _without(burial: Update_, wrong: Sequence[str]) -> Update_:
    """An update that buries a document, without what is wrong in there."""
    update = {operator: dict(fields) for operator, fields in burial.items()}
    if "trail" in wrong:
        update["$set"]["trail"] = update.pop("$push")["trail"]["$each"]
    kept = {"_id", *update["$set"], *update.get("$rename", {}).values()}
    update["$unset"].update(unset(*(name for name in wrong if name not in kept)))
    return update


def _insert_each(items: Sequence[tuple[str, datetime, Any]]) -> Plan[list[Any]]:
    """Insert documents of several callers: (queue, when, document). Answers each one's Fault, or None; signals once for each queue."""
    answers: list[Any] = [None] * len(items)
    try:
        invalid_fields = yield Insert([document for _, _, document in items])
    except InvalidMessage as error:
        if len(items) == 1:
            return [WriteFailure(0, None, error)]
        # The server refused the command as a whole: find out because of whom.
        half = len(items) // 2
        return [*(yield from _insert_each(items[:half])), *(yield from _insert_each(items[half:]))]
    for fault in invalid_fields:
        answers[fault.place] = fault._replace(place=0)
    earliest: dict[str, datetime] = {}
    for (queue, when, _), fault in zip(items, answers, strict=True):
        if fault is None and when < earliest.get(queue, BAND):
            earliest[queue] = when
    for queue, when in earliest.items():
        yield Signal(queue, when)
    return answers


class Standard:
    """The plans of one queue. Plain data: it pickles."""

    kind: ClassVar[str] = "standard"
    capabilities: ClassVar[frozenset[str]] = frozenset({"history", "dead_letter", "keys", "move"})
    #: The order in which messages are claimed; ``when`` leads it, as the index does.
    order: ClassVar[Sort] = (("when", 1), ("_id", 1))
    #: Whether looks may start from a floor: so if claims go up that order.
    floored: ClassVar[bool] = True

    __slots__ = ("codec", "command_timeout", "options", "owner", "queue")

    def __init__(
        self,
        queue: str,
        options: Options,
        codec: Codec[Any] | None = None,
        *,
        owner: str = "",
        command_timeout: float = 30,
    ) -> None:
        self.queue = queue
        self.options = options
        self.codec: Codec[Any] = Codec() if codec is None else codec
        self.owner = owner
        #: The client's time for a command, in seconds; a pop that must look at its messages first claims them for so long.
        self.command_timeout = command_timeout
        if options.history is not None and "history" not in self.capabilities:
            self._refuse("history")

    def _enter(self) -> Plan[None]:
        """See to the queue's record."""
        self._is_mine((yield EnsureQueue(self.queue, self.kind, self.options.shown)))

    def _known(self) -> Plan[None]:
        """See to it that messages of another kind of queue, or of a later release, are not touched; makes no record."""
        self._is_mine((yield from namespace.kind_of(self.queue)) or self.kind)

    def _is_mine(self, kind: str) -> None:
        if kind != self.kind:
            raise ConfigurationError(
                f"queue {self.queue!r} is of kind {kind!r}; here it is used as {self.kind!r}"
            )

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigurationError(
            f"{what}: queue {self.queue!r} is of kind {self.kind!r}, which does not offer it"
        )

    # ---- how a message enters, is claimed, and leaves

    def entering(self, when: datetime) -> dict[str, Any]:
        """The fields of a message that comes in, from whom or where it may."""
        return {"q": self.queue, "when": when, "due": when, "tries": 0}

    def claimable(self, now: datetime, floor: ScanStart | None = None) -> dict[str, Any]:
        """The filter of what may be claimed, from a floor on that is part of the order."""
        mine = {"_id": {"$ne": namespace.record_id(self.queue)}}
        if floor is None:
            return {"q": self.queue, "when": {"$lte": now}, **mine}
        when, id = floor
        if id is None:
            return {"q": self.queue, "when": {"$gte": when, "$lte": now}, **mine}
        rest: list[dict[str, Any]] = [{"q": self.queue, "when": when, "_id": {"$gt": id}}]
        if isinstance(id, str):  # $gt compares within one type, and ObjectIds come after all strs
            rest.append({"q": self.queue, "when": when, "_id": {"$type": "objectId"}})
        return {"$or": [*rest, {"q": self.queue, "when": {"$gt": when, "$lte": now}}], **mine}

    def finishing(self, now: datetime, outcome: str, *, keyed: bool) -> Update_ | None:
        """The update that finishes a message: into the history, or None: it is deleted."""
        if self.options.history is None:
            return None
        update: dict[str, Any] = {
            "$set": {
                "when": now + KEPT,
                "processed": now,
                "outcome": outcome,
                "expires": now + timedelta(seconds=self.options.history),
            },
            "$unset": unset("owner", "reserved", "claim"),
        }
        return self._ending(update, keyed)

    def _ending(self, update: dict[str, Any], keyed: bool) -> dict[str, Any]:
        """Have an update that ends a message's life in this queue remember the key it had here, and no earlier one."""
        if keyed:
            update["$rename"] = {"key": "last_key"}
        else:
            update["$unset"]["last_key"] = ""
        return update

    def leaving(
        self, now: datetime, target: Standard, when: datetime, *, key: str | None = None
    ) -> dict[str, Any]:
        """The update that takes a message from this queue to another; the payload is the caller's to add."""
        put = target.entering(when)
        drop = unset(*HELD, *STAY)
        update: dict[str, Any] = {
            "$set": put,
            "$unset": drop,
            "$push": {"trail": {"$each": [{"q": self.queue, "at": now}], "$slice": -TRAIL}},
        }
        if target.codec.name is None:
            drop["type"] = ""
        else:
            put["type"] = target.codec.name
        if key is None:
            update["$rename"] = {"key": "last_key"}
        else:
            put["key"] = key
        return update

    # ---- in

    def push(
        self,
        payloads: Iterable[Any],
        *,
        delay: Any = None,
        at: Any = None,
        headers: Any = None,
        keys: Sequence[str | None] | None = None,
        on_duplicate: str = "ignore",
        ids: Sequence[Id | None] | None = None,
        session: Any = None,
    ) -> Plan[list[Id | None]]:
        """Push messages; answers their ids, None for those that a key kept out."""
        if not isinstance(payloads, Iterable):
            raise ConfigurationError(
                f"payloads: give a list of them, not {type(payloads).__name__}"
            )
        payloads = list(payloads)
        arguments.one_of("on_duplicate", on_duplicate, ("ignore", "replace", "error"))
        labels = arguments.headers(headers)
        names = self._each("keys", keys, len(payloads), arguments.key)
        chosen = self._each("ids", ids, len(payloads), arguments.identity)
        if any(names) and "keys" not in self.capabilities:
            self._refuse("key")
        values = [self.codec.dump(payload) for payload in payloads]
        arguments.starting(BAND, delay, at)  # refused before anything is asked of the server
        if not payloads:
            return []
        now = yield ServerTime()
        when = arguments.starting(now, delay, at)
        documents = [
            self._document(now, when, value, labels, key, id)
            for value, key, id in zip(values, names, chosen, strict=True)
        ]
        packed = [encode(document) for document in documents]
        yield from self._enter()
        given = [id is not None for id in chosen]
        answers: list[Id | None]
        refused: list[int] = []
        strangers: list[Id] = []
        if on_duplicate == "replace" and any(names):
            answers = []
            try:
                for document, mine in zip(documents, given, strict=True):
                    answers.append((yield from self._replace(document, mine, strangers, session)))
            except Unavailable as error:
                raise Unavailable(
                    str(error), ids=[document["_id"] for document in documents]
                ) from error
            if any(answer is not None for answer in answers):
                yield Signal(self.queue, when, session)
        else:
            answers, refused = yield from self._put(documents, packed, given, strangers, session)
        clashing = [cast(str, names[index]) for index in refused] if on_duplicate == "error" else []
        if strangers:
            self._strangers(strangers, clashing)
        if clashing:
            raise DuplicateKey(
                f"queue {self.queue!r} has messages with these keys: {clashing[:10]}", keys=clashing
            )
        return answers

    def _each(self, name: str, given: Any, length: int, check: Callable[[Any], Any]) -> list[Any]:
        if given is None:
            return [None] * length
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise ConfigurationError(f"{name}: give a sequence, one for each payload")
        values = list(given)
        if len(values) != length:
            raise ConfigurationError(
                f"{name}: {len(values)} were given for {length} payloads; give one for each (None for none)"
            )
        return [None if value is None else check(value) for value in values]

    def _document(
        self,
        now: datetime,
        when: datetime,
        value: Any,
        headers: Any,
        key: str | None,
        id: Id | None,
    ) -> dict[str, Any]:
        document: dict[str, Any] = {
            "_id": ObjectId() if id is None else id,
            **self.entering(when),
            "pushed": now,
        }
        if self.codec.name is not None:
            document["type"] = self.codec.name
        if headers:
            document["headers"] = headers
        if key is not None:
            document["key"] = key
        document["payload"] = value
        return document

    def _put(
        self,
        documents: list[dict[str, Any]],
        packed: Sequence[Any],
        given: list[bool],
        strangers: list[Id],
        session: Any,
    ) -> Plan[tuple[list[Id | None], list[int]]]:
        """Write what unique indexes let in, and signal; answers the ids, and the indexes of those that a key kept out.

        The ids that are other messages' are added to ``strangers``.
        """
        if session is None and len(packed) == 1:
            return (
                yield from self._insert(documents, packed, given, strangers, session)
            )  # the batch that it joins signals
        if session is not None and (any(given) or any("key" in document for document in documents)):
            answers, refused = yield from self._upsert(documents, given, strangers, session)
        else:
            answers, refused = yield from self._insert(documents, packed, given, strangers, session)
        if any(answer is not None for answer in answers):
            yield Signal(self.queue, documents[0]["when"], session)
        return answers, refused

    def _insert(
        self,
        documents: list[dict[str, Any]],
        packed: Sequence[Any],
        given: list[bool],
        strangers: list[Id],
        session: Any,
    ) -> Plan[tuple[list[Id | None], list[int]]]:
        """Insert what unique indexes let in; answers the ids, and the indexes of those that a key kept out."""
        answers: list[Id | None] = [document["_id"] for document in documents]
        refused = []
        try:
            if session is None and len(packed) == 1:
                item = (self.queue, documents[0]["when"], packed[0])
                fault = yield Coalesce("insert", item, _insert_each, size=len(packed[0].raw))
                invalid_fields = [] if fault is None else [fault]
            else:
                invalid_fields = yield Insert(packed, session=session)
        except Unavailable as error:
            raise Unavailable(
                str(error), ids=[document["_id"] for document in documents]
            ) from error
        for fault in invalid_fields:
            if isinstance(fault.error, Unavailable):
                raise Unavailable(
                    str(fault.error), ids=[document["_id"] for document in documents]
                ) from fault.error
            if fault.field is None:
                raise fault.error
        # The server names one index of two: a repeated push with an id and a key is the same message all the same.
        clashing = [documents[fault.place]["_id"] for fault in invalid_fields if given[fault.place]]
        there = (yield from self._whose(clashing, session)) if clashing else {}
        for fault in invalid_fields:
            id = documents[fault.place]["_id"]
            known = there.get(id)
            if known:
                continue
            answers[fault.place] = None
            if known is False and fault.field == "_id":
                strangers.append(id)
            else:
                refused.append(fault.place)
        return answers, refused

    def _whose(self, ids: Sequence[Id], session: Any) -> Plan[dict[Id, bool]]:
        """Of the messages with these ids that there are: whether each is, or was, this queue's."""
        found = yield Find({"_id": {"$in": list(ids)}}, {"q": 1, "trail": 1}, session=session)
        return {
            each["_id"]: each.get("q") == self.queue
            or any(
                stay["q"] == self.queue
                for stay in without_fields(each, invalid_fields(each)).get("trail", ())
            )
            for each in found
        }

    def _strangers(self, ids: list[Id], keys: Sequence[str] = ()) -> None:
        if ids:
            raise DuplicateKey(
                f"these ids belong to messages that were never in queue {self.queue!r}: {ids[:10]}",
                ids=ids,
                keys=keys,
            )

    def _upsert(
        self, documents: list[dict[str, Any]], given: list[bool], strangers: list[Id], session: Any
    ) -> Plan[tuple[list[Id | None], list[int]]]:
        """As _insert, inside the caller's transaction, which a duplicate-key error would abort."""
        answers: list[Id | None] = []
        refused = []
        for index, (document, mine) in enumerate(zip(documents, given, strict=True)):
            id = document["_id"]
            known = (yield from self._whose([id], session)).get(id) if mine else None
            if known is None:
                match = (
                    {"q": self.queue, "key": document["key"]} if "key" in document else {"_id": id}
                )
                rest = {name: value for name, value in document.items() if name not in match}
                change = yield Update(match, {"$setOnInsert": rest}, upsert=True, session=session)
                if change.upserted is None:
                    refused.append(index)
            elif not known:
                strangers.append(id)
            answers.append(None if refused[-1:] == [index] or strangers[-1:] == [id] else id)
        return answers, refused

    def _replace(
        self, document: dict[str, Any], given: bool, strangers: list[Id], session: Any
    ) -> Plan[Id | None]:
        """Put the payload, headers and time of this document into the live message with its key, or make that message."""
        if "key" not in document:
            answers, _ = yield from (
                self._insert([document], [encode(document)], [given], strangers, session)
                if session is None
                else self._upsert([document], [given], strangers, session)
            )
            return answers[0]
        match = {"q": self.queue, "key": document["key"]}
        if given and not (yield Find(match, {"_id": 1}, limit=1, session=session)):
            known = (yield from self._whose([document["_id"]], session)).get(document["_id"])
            if known:
                return cast(
                    Id, document["_id"]
                )  # the same push again, of a message that finished or went on meanwhile
            if known is False:
                strangers.append(document["_id"])
                return None
        fresh = {
            name: document[name]
            for name in ("payload", "headers", "type", "when", "due", "tries")
            if name in document
        }
        gone = [*HELD, *STAY, *(name for name in ("headers", "type") if name not in document)]
        once = {
            name: value
            for name, value in document.items()
            if name not in fresh and name not in match
        }
        update = {"$set": fresh, "$unset": unset(*gone), "$setOnInsert": once}
        for last in (False, True):
            try:
                stored = yield FindAndModify(match, update, upsert=True, session=session)
            except (
                DuplicateKey
            ):  # two upserts at once: the second finds the first's; or the id is another message's
                if session is not None:
                    raise
                if last:
                    strangers.append(document["_id"])
                    return None
            else:
                return cast(Id, stored["_id"])
        raise AssertionError("unreachable")

    # ---- out

    def receive(
        self,
        line: Any,
        limit: int,
        *,
        timeout: Any,
        pop: bool = False,
        lease: Any = None,
    ) -> Plan[list[Any]]:
        """Claim up to ``limit``; while there is nothing, wait: for a signal, the next ``when``, the poll or the time-out."""
        arguments.count("limit", limit)
        max_time_s = None if timeout is None else arguments.duration("timeout", timeout)
        length = self.command_timeout if pop else self._lease(lease)
        head: ScanState = line.head
        yield from self._enter()
        now = yield ServerTime()
        deadline = None if max_time_s is None else now + timedelta(seconds=max_time_s)
        found = False
        try:
            while True:
                if not (yield from self._paused(head, now)):
                    taken: Taken = yield Coalesce(
                        (self, pop, length),
                        limit,
                        lambda limits: self._look_for(head, limits, pop, length),
                        undo=self.undo_pop if pop else self.undo_reserve,
                        max_in_flight=1,  # claims at once would only chase each other
                    )
                    if taken:
                        found = True
                        return [message for _, message in taken]
                    now = yield ServerTime()
                if deadline is not None and now >= deadline:
                    return []
                if (yield Listen(line)):
                    now = yield ServerTime()
                    continue  # it hears only from here on: look once more, so that nothing falls in between
                look = False
                while not look:
                    look = yield Wait(line, (yield from self._until(head, now)), deadline)
                    now = yield ServerTime()
        finally:
            line.pass_on(found)

    def _lease(self, lease: Any) -> float:
        return (
            self.options.lease
            if lease is None
            else arguments.duration("lease", lease, positive=True)
        )

    def _paused(self, head: ScanState, now: datetime) -> Plan[bool]:
        if head.flag_read is None or (now - head.flag_read).total_seconds() >= PAUSE:
            head.flag_read = now
            head.paused = yield from namespace.paused(self.queue)
        return head.paused

    def _until(self, head: ScanState, now: datetime) -> Plan[datetime]:
        """When to look again if nothing is heard."""
        until = now + timedelta(seconds=self.options.poll)
        if head.paused:
            return min(until, now + timedelta(seconds=PAUSE))
        if head.sweep_at is not None:
            until = min(until, head.sweep_at)
        if not head.due_known and head.due_read is not None and head.due_read + DUE > now:
            until = min(until, head.due_read + DUE)
        elif not head.due_known:
            head.due_known, head.due_read = True, now
            when = yield from self.next_when(head.floor)
            if isinstance(when, datetime):  # in what others wrote it may be anything
                head.wake_at(when)
        if head.due is not None:
            until = min(until, head.due)
        return max(until, now + timedelta(milliseconds=1))

    def _look_for(
        self, head: ScanState, limits: list[int], pop: bool, lease: float
    ) -> Plan[list[Taken]]:
        """Look once for several callers; the first ones get first."""
        taken = yield from self._look(head, sum(limits), pop, lease)
        shares: list[Taken] = []
        for limit in limits:
            shares.append(taken[:limit])
            taken = taken[limit:]
        return shares

    def _look(self, head: ScanState, limit: int, pop: bool, lease: float) -> Plan[Taken]:
        """Claim what is there, up to ``limit``. What was claimed too often, or does not fit the model, is buried on the way."""
        taken: Taken = []
        bare = pop and limit == 1 and self.codec.model is None and self.options.history is None
        while len(taken) < limit:
            now = yield ServerTime()
            wanted = min(limit - len(taken), CLAIM)
            documents, ended = yield from self._claim(
                head, now, wanted, None if bare else lease, count=not pop
            )
            if bare and not any(
                _unfit(document) or "payload" not in document for document in documents
            ):
                return [(document, self._message(document, now)) for document in documents]
            for document in documents:
                if bare:
                    document = yield from self._put_back(document, now)
                message = yield from self._accept(
                    document, now, None if pop else lease, worn=not pop
                )
                if message is not None:
                    taken.append((document, message))
            if not pop and taken:
                head.wake_at(now + timedelta(seconds=lease))
            if ended:
                break
        if pop and taken:
            taken = yield from self._finish(taken, now)
        return taken

    def _claim(
        self, head: ScanState, now: datetime, wanted: int, lease: float | None, *, count: bool
    ) -> Plan[tuple[list[dict[str, Any]], bool]]:
        """Put a lease with a new token on the first ones (None: delete the first one), and learn from it about the head.

        Answers the documents as claimed, and whether that was all there is.
        """
        start = head.start(now) if self.floored else None
        match = self.claimable(now, start)
        update = None if lease is None else self._claiming(now, lease, count)
        last: ScanStart | None = None
        try:
            if update is None or wanted == 1:
                document = yield from self._claim_first(match, update)
                documents = [] if document is None else [document]
                if document is not None:
                    last = _place(document, now)
                ended = document is None
            else:
                documents, last, ended = yield from self._claim_many(
                    head, match, now, wanted, update
                )
        except (InvalidMessage, BSONError) as error:
            if update is None:
                raise InvalidMessage(
                    f"payload: what was popped cannot be read, and is gone: {error}"
                ) from error
            documents, ended = (yield from self._claim_each(match, now, wanted, update)), False
        after = yield ServerTime()
        if self.floored:
            head.looked(start, now, after, last, self.options.poll, ended=ended)
            if not documents and head.wants_sentinel(after):
                head.sentinel = after + timedelta(seconds=2)
                behind = {
                    "_id": namespace.record_id(self.queue),
                    "when": {"$lt": after + timedelta(seconds=1)},
                }
                yield Update(behind, {"$set": {"when": head.sentinel}}, w1=True)
        if not documents and start is not None and head.start(after) is None:
            return (
                yield from self._claim(head, after, wanted, lease, count=count)
            )  # a sweep is due
        return documents, ended

    @property
    def _patience(self) -> float:
        """Seconds for a claim, so that within the time of one command it can be found out what became of it."""
        return max(self.command_timeout / 2, self.command_timeout - 1)

    def _claiming(self, now: datetime, lease: float, count: bool) -> dict[str, Any]:
        update: dict[str, Any] = {
            "$set": {
                "when": now + timedelta(seconds=lease),
                "token": tokens.new(),
                "owner": self.owner,
                "reserved": now,
            },
            "$unset": {"claim": ""},
        }
        if count:
            update["$inc"] = {"tries": 1}
        return update

    def _claim_first(
        self, match: Mapping[str, Any], update: Update_ | None
    ) -> Plan[dict[str, Any] | None]:
        if update is None:
            return cast(
                "dict[str, Any] | None",
                (yield FindAndModify(match, None, sort=self.order, hint=HOT)),
            )
        try:
            document = yield FindAndModify(
                match, update, sort=self.order, hint=HOT, w1=True, max_time_s=self._patience
            )
        except Unavailable:
            # It may have been claimed all the same. If so the token finds it; if not, nothing is held.
            found = yield Find(
                self._stamped(update),
                limit=1,
                hint=HOT,
                max_time_s=self.command_timeout - self._patience,
            )
            if not found:
                raise
            document = found[0]
        return cast("dict[str, Any] | None", document)

    def _stamped(self, update: Update_) -> dict[str, Any]:
        """The filter of what a claim of this queue was put on."""
        return {"q": self.queue, "when": update["$set"]["when"], "token": update["$set"]["token"]}

    def _claim_many(
        self, head: ScanState, match: Mapping[str, Any], now: datetime, wanted: int, update: Update_
    ) -> Plan[tuple[list[dict[str, Any]], ScanStart | None, bool]]:
        """Answers the documents; the last one seen, with all before it claimed by somebody; and whether the end was seen."""
        skip = random.randrange(2 * wanted) if head.contested else 0
        repeated = False
        while True:
            seen = yield Find(
                match, {"_id": 1, "when": 1}, sort=self.order, limit=wanted, skip=skip, hint=HOT
            )
            ids = [each["_id"] for each in seen]
            if not ids and not skip:
                head.contested = False
                return [], None, True
            matched = 0
            lost: Unavailable | None = None
            if ids:
                still = {"_id": {"$in": ids}, "q": self.queue, "when": {"$lte": now}}
                try:
                    matched = (
                        yield Update(still, update, many=True, w1=True, max_time_s=self._patience)
                    ).matched
                except Unavailable as error:
                    lost = error  # the driver does not repeat it; the token tells
            head.contested = matched < len(ids)
            if matched or lost:
                # Always read by the token: what was read before the update may have been replaced in between.
                mine = {"_id": {"$in": ids}, "token": update["$set"]["token"]}
                found = yield Find(
                    mine, max_time_s=self.command_timeout - self._patience if lost else None
                )
                if lost and not found:
                    if repeated:
                        raise lost
                    repeated = True  # it never arrived, and the server is back
                    continue
                place = {hashable_id(id): index for index, id in enumerate(ids)}
                found.sort(key=lambda each: place[hashable_id(each["_id"])])
                # What was seen further on says nothing of what lies before it.
                last = None if skip else _place(seen[-1], now)
                return found, last, not skip and len(ids) < wanted
            # Others were faster on all of them, or there is nothing that far on.
            skip = random.randrange(2 * wanted) if ids else 0

    def _claim_each(
        self, match: Mapping[str, Any], now: datetime, wanted: int, update: Update_
    ) -> Plan[list[dict[str, Any]]]:
        """Claim one by one what the server did not claim, or we cannot read, and put away what is to blame.

        The server counts up no ``tries`` that are no number, and makes no document too large.
        """
        held = yield Find(self._stamped(update), {"_id": 1}, hint=HOT)  # before it came upon that
        if len(held) < wanted:
            free = yield Find(
                match, {"_id": 1}, sort=self.order, limit=wanted - len(held), hint=HOT
            )
            for each in free:
                one = {"_id": each["_id"], "q": self.queue, "when": {"$lte": now}}
                try:
                    yield Update(one, update, w1=True)
                except InvalidMessage as refusal:
                    fault = yield from self._fault(one)
                    if fault is not None:
                        yield from self._put_away(one, fault, now)
                    elif (yield Find(one, {"_id": 1}, limit=1)):
                        raise refusal  # else another was faster
            held = yield Find(self._stamped(update), {"_id": 1}, hint=HOT)
        taken: list[dict[str, Any]] = []
        for each in held:
            one = {"_id": each["_id"], "token": update["$set"]["token"]}
            try:
                taken += yield Find(one, limit=1)
            except (InvalidMessage, BSONError) as fault:
                yield from self._put_away(one, fault, now)
        return taken

    def _fault(self, match: Mapping[str, Any]) -> Plan[Exception | None]:
        """What is wrong with a document that the server did not claim; None: nothing, so it had another reason."""
        try:
            for document in (yield Find(match, limit=1)):
                if wrong := invalid_fields(document):
                    return _told(document, wrong)
                encode(document)
        except (InvalidMessage, BSONError) as error:  # too large, or not to be read
            return error
        return None

    def _put_away(self, match: Mapping[str, Any], fault: Exception, now: datetime) -> Plan[None]:
        """Bury what cannot be claimed, whatever it is; or, if it takes no burial either, let no look find it."""
        grave = yield from self._grave()
        update = self._burying(now, grave, "invalid", 0, self._failure(fault, now), keyed=False)
        try:
            yield Update(match, _without(update, LABELS))
        except InvalidMessage as refusal:
            log.error(
                "queue %r: message %r cannot be buried, it is hidden: %s",
                self.queue,
                match["_id"],
                refusal,
            )
            yield Update(match, {"$unset": unset("when", *HELD)})
        else:
            yield Signal(grave.queue, now)

    def _put_back(self, document: Mapping[str, Any], now: datetime) -> Plan[dict[str, Any]]:
        """Hold what was taken out and should not be handed out."""
        held: dict[str, Any] = {
            **document,
            **self._claiming(now, self.command_timeout, count=False)["$set"],
        }
        yield from self._insert_again([held])
        return held

    def _insert_again(self, documents: list[dict[str, Any]]) -> Plan[None]:
        """Insert what was taken out; without their keys, if those were taken meanwhile."""
        clashing = [
            documents[fault.place] for fault in (yield Insert(documents)) if fault.field == "key"
        ]
        if clashing:
            for document in clashing:
                document["last_key"] = document.pop("key")
            yield Insert(clashing)

    def _message(
        self, document: Mapping[str, Any], now: datetime, lease: float | None = None
    ) -> Message[Any]:
        """The message of a document. If that is no message, or does not fit the model, it shows what there is, and ``error`` says so."""
        wrong = invalid_fields(document)
        try:
            if wrong:
                raise _told(document, wrong)
            payload = self.codec.load(document.get("payload"))
        except Exception as misfit:  # a model's validators are anybody's code
            whole = without_fields(document, wrong) | {"q": self.queue}
            message = message_of(whole, document.get("payload"), now, lease=lease)
            message.error = self._failure(misfit, now)
            return message
        return message_of(document, payload, now, lease=lease)

    def _accept(
        self, document: dict[str, Any], now: datetime, lease: float | None, *, worn: bool
    ) -> Plan[Message[Any] | None]:
        """The message of a claimed document; or None, and it is buried: claimed too often, or no message for this queue."""
        wrong = _unfit(document)
        if wrong is None:
            return self._message(document, now, lease)
        tries, limit = (
            0 if "tries" in wrong else int(document.get("tries", 0)),
            self.options.max_tries,
        )
        if not wrong and worn and limit is not None and tries > limit:
            reason, error = "tries", document.get("error")
        else:
            try:
                if wrong:
                    raise _told(document, wrong)
                if "payload" not in document:
                    raise InvalidMessage("the stored document has no payload")
                return message_of(document, self.codec.load(document["payload"]), now, lease=lease)
            except Exception as misfit:  # a model's validators are anybody's code
                reason, error = "invalid", self._failure(misfit, now)
        grave = yield from self._grave()
        keyed = "key" in document and "key" not in wrong
        update = self._burying(now, grave, reason, tries - (reason == "tries"), error, keyed=keyed)
        yield Update({"_id": document["_id"], "token": document["token"]}, _without(update, wrong))
        yield Signal(grave.queue, now)
        return None

    def _finish(self, taken: Taken, now: datetime) -> Plan[Taken]:
        """Finish what a pop claimed, before anything of it is handed out."""
        lost: set[Hashable] = set()
        groups: dict[tuple[str, bool], Taken] = {}
        for pair in taken:
            groups.setdefault((pair[0]["token"], "key" in pair[0] or "dead" in pair[0]), []).append(
                pair
            )
        for (token, keyed), pairs in groups.items():
            ids = [document["_id"] for document, _ in pairs]
            match = {"_id": {"$in": ids}, "token": token}
            update = self.finishing(now, "popped", keyed=keyed)
            done = (
                (yield Delete(match, many=True))
                if update is None
                else (yield Update(match, update, many=True)).matched
            )
            if done < len(
                pairs
            ):  # replaced or taken over while it was held: no longer ours to hand out
                there = {
                    hashable_id(each["_id"]): each
                    for each in (yield Find({"_id": {"$in": ids}}, {"token": 1}))
                }
                if update is not None:
                    lost |= {
                        id
                        for id in map(hashable_id, ids)
                        if there.get(id, {}).get("token") != token
                    }
                    continue
                gone = [id for id in ids if hashable_id(id) not in there]
                if 0 < done < len(gone):
                    # Others have finished some of them, and nobody can tell which: handing them out might be the second time.
                    raise Unavailable(
                        "some of what was popped is gone, by this call or by another's", ids=gone
                    )
                lost |= set(there) if done else set(map(hashable_id, ids))
        return [pair for pair in taken if hashable_id(pair[0]["_id"]) not in lost]

    def undo_reserve(self, taken: Taken) -> Plan[None]:
        """Give back what was reserved for a caller that is gone: the same place, the try not counted."""
        now = yield ServerTime()
        yield UpdateEach(
            [
                (
                    {"_id": document["_id"], "token": document["token"]},
                    self._releasing(_due(document), now),
                )
                for document, _ in taken
            ]
        )
        yield Signal(self.queue, min(_due(document) for document, _ in taken))

    def undo_pop(self, taken: Taken) -> Plan[None]:
        """Give back what was popped for a caller that is gone: the same id, place and tries; its key if that is free."""
        if self.options.history is None:
            again = [
                {name: value for name, value in document.items() if name not in HELD}
                | {"when": _due(document)}
                for document, _ in taken
            ]
            yield from self._insert_again(again)
        else:
            for document, _ in taken:
                match = {
                    "_id": document["_id"],
                    "token": document["token"],
                    "processed": {"$exists": True},
                }
                back = {
                    "$set": {"when": _due(document)},
                    "$unset": unset(*HELD, "processed", "outcome", "expires"),
                }
                yield from self._with_key(match, back, document.get("key"))
        yield Signal(self.queue, min(_due(document) for document, _ in taken))

    def _with_key(
        self, match: Mapping[str, Any], update: dict[str, Any], key: str | None
    ) -> Plan[bool]:
        """Update one message and give it its key back, if that is free; whether it matched."""
        if key is not None:
            keyed = update | {
                "$set": {**update["$set"], "key": key},
                "$unset": {**update["$unset"], "last_key": ""},
            }
            keyed.pop("$rename", None)
            try:
                return bool((yield Update(match, keyed)).matched)
            except DuplicateKey:
                pass
        return bool((yield Update(match, update)).matched)

    # ---- settled by the holder

    def commit(
        self, given: tuple[Any, ...], *, payload: Any = UNCHANGED, session: Any = None
    ) -> Plan[None]:
        """Finish them."""
        held = arguments.reservations(self.queue, given)
        value = UNCHANGED if payload is UNCHANGED else self._value(self.codec, payload)

        def finish(keyed: bool, now: datetime) -> Update_ | None:
            update = self.finishing(now, "committed", keyed=keyed)
            if update is not None:
                update["$set"]["token"] = (
                    tokens.new()
                )  # tells this commit from an earlier one of the same holder
                if value is not UNCHANGED:
                    update["$set"]["payload"] = value
            return update

        kind = ("commit", self.options.history, None if value is UNCHANGED else id(finish))
        yield from self._settle(
            [
                Settlement(
                    each, partial(finish, each.key is not None), (*kind, each.key is not None)
                )
                for each in held
            ],
            session,
        )

    def _value(self, codec: Codec[Any], payload: Any) -> Any:
        value = codec.dump(payload)
        encode({"payload": value})
        return value

    def rollback(
        self, given: tuple[Any, ...], *, delay: Any = None, error: Any = None, session: Any = None
    ) -> Plan[None]:
        """Give them back for another try; bury those that had their last."""
        held = arguments.reservations(self.queue, given)
        wait = None if delay is None else arguments.duration("delay", delay)
        failure = None if error is None else self._failure(error, (yield ServerTime()))
        limit = self.options.max_tries
        grave = None
        acts = []
        for each in held:
            if limit is not None and each.tries >= limit and each.dead is None:
                grave = grave or (yield from self._grave())
                acts.append(self._burial(each, grave, "tries", failure))
            else:
                pause = self.options.backoff.delay(each.tries) if wait is None else wait
                same = ("rollback", pause, None if failure is None else id(failure))
                acts.append(Settlement(each, partial(self._back, pause, failure), same))
        yield from self._settle(acts, session)

    def _back(self, pause: float, failure: Mapping[str, Any] | None, now: datetime) -> Update_:
        when = now + timedelta(milliseconds=round(pause * 1000))
        put: dict[str, Any] = {"when": when, "due": when}
        if failure is not None:
            put["error"] = failure
        return {"$set": put, "$unset": unset(*HELD)}

    def _failure(self, error: Any, now: datetime) -> dict[str, Any]:
        """How an error is kept: its type, what it says (2 KB at most), and when."""
        if not isinstance(error, (BaseException, str)):
            raise ConfigurationError(
                f"error: give an exception or a str, not {type(error).__name__}"
            )
        name = type(error).__name__ if isinstance(error, BaseException) else "error"
        text = str(error).encode("utf-8", "replace")[:2048].decode("utf-8", "ignore")
        return {"type": name, "message": text, "at": now}

    def extend(self, given: tuple[Any, ...], *, lease: Any = None) -> Plan[None]:
        """Hold them for another lease, from now."""
        held = arguments.reservations(self.queue, given)
        length = None if lease is None else arguments.duration("lease", lease, positive=True)
        ends: dict[float, datetime] = {}

        def command_timeout(span: float, now: datetime) -> Update_:
            ends[span] = now + timedelta(seconds=span)
            return {"$set": {"when": ends[span]}}

        spans = [each.lease if length is None else length for each in held]
        lost: list[Reservation[Any]] = []
        try:
            yield from self._settle(
                [
                    Settlement(each, partial(command_timeout, span), ("extend", span))
                    for each, span in zip(held, spans, strict=True)
                ],
                None,
            )
        except LeaseLost as error:
            lost = [*error.lost, *error.unknown]
            raise
        except Unavailable as error:
            lost = [each for each in held if each.id in error.ids]  # nobody knows: the server does
            raise
        finally:
            for each, span in zip(held, spans, strict=True):
                if each not in lost and span in ends:
                    each.until, each.lease = ends[span], span

    def release(self, given: tuple[Any, ...]) -> Plan[None]:
        """Give them back unworked: their old places, the tries not counted."""
        held = arguments.reservations(self.queue, given)
        yield from self._settle(
            [
                Settlement(each, partial(self._releasing, each.when), ("release", each.when))
                for each in held
            ],
            None,
        )

    def _releasing(self, due: datetime, now: datetime) -> Update_:
        return {"$set": {"when": due}, "$unset": unset(*HELD), "$inc": {"tries": -1}}

    def move(
        self,
        pairs: Sequence[tuple[Any, Any]],
        *,
        to: Standard | str,
        update: Any = None,
        headers: Any = None,
        delay: Any = None,
        key: str | None = None,
        session: Any = None,
    ) -> Plan[None]:
        """Pass them on to another queue, each in one atomic update; pairs of (reservation, payload or UNCHANGED)."""
        if "move" not in self.capabilities:
            self._refuse("move")
        held = arguments.reservations(self.queue, tuple(each for each, _ in pairs))
        if key is not None and len(held) > 1:
            raise ConfigurationError(
                "key: belongs to one message; move one reservation at a time with it"
            )
        if key is not None:
            arguments.key(key)
        edits = self._edits(update)
        if edits and any(payload is not UNCHANGED for _, payload in pairs):
            raise ConfigurationError("payload, update: give one of the two, not both")
        labels = arguments.headers(headers) or {}
        arguments.starting(BAND, delay, None)
        codec: Codec[Any] = Codec() if isinstance(to, str) else to.codec
        name = arguments.queue_name(to) if isinstance(to, str) else to.queue
        values = {
            id(each): payload if payload is UNCHANGED else self._value(codec, payload)
            for each, payload in pairs
        }
        target = (yield from self._at(name)) if isinstance(to, str) else to  # makes its record
        if not isinstance(to, str):
            yield from target._enter()

        pass_on = partial(self._passing, target, labels, edits, delay, key)
        acts = []
        for each in held:
            value = values[id(each)]
            same = ("move", id(target), id(pass_on)) if value is UNCHANGED and key is None else None
            acts.append(Settlement(each, partial(pass_on, value, each.key), same))
        try:
            yield from self._settle(acts, session)
        except DuplicateKey as clash:
            raise DuplicateKey(
                f"key: queue {target.queue!r} has a message with the key {key!r}", keys=[str(key)]
            ) from clash

    def _passing(
        self,
        target: Standard,
        labels: Mapping[str, Any],
        edits: Mapping[str, Mapping[str, Any]],
        delay: Any,
        key: str | None,
        value: Any,
        old: str | None,
        now: datetime,
    ) -> Update_:
        """The update of one move; ``old``: the key it has here."""
        move = self.leaving(now, target, arguments.starting(now, delay, None), key=key)
        put = move["$set"]
        put.update({f"headers.{name}": label for name, label in labels.items()})
        if value is not UNCHANGED:
            put["payload"] = value
        if key is not None and old is not None:
            put["last_key"] = old
        for operator, fields in edits.items():
            move[operator] = {**move.get(operator, {}), **fields}
        return move

    def _edits(self, update: Any) -> dict[str, dict[str, Any]]:
        """The caller's update operators, on the payload."""
        if update is None:
            return {}
        if not isinstance(update, Mapping) or not all(
            isinstance(fields, Mapping) for fields in update.values()
        ):
            raise ConfigurationError(
                f"update: give a mapping of {' '.join(OPERATORS)} to mappings of payload fields"
            )
        edits: dict[str, dict[str, Any]] = {}
        for operator, fields in update.items():
            arguments.one_of("update", operator, OPERATORS)
            names = [*fields, *(fields.values() if operator == "$rename" else ())]
            if not all(isinstance(name, str) and name for name in names):
                raise ConfigurationError(
                    f"update: {operator}: the names of payload fields are non-empty strs"
                )
            edits[operator] = {
                f"payload.{name}": f"payload.{value}" if operator == "$rename" else value
                for name, value in fields.items()
            }
        encode(edits)
        return edits

    def _at(self, name: str) -> Plan[Standard]:
        """The backend of a queue known by its name alone."""
        kind = yield EnsureQueue(name, self.kind, None)
        if kind != self.kind:
            raise ConfigurationError(
                f"to: queue {name!r} is of kind {kind!r}; give its Queue object instead of its name"
            )
        return type(self)(
            name,
            Options(dead_letter=f"{name}.dead"),
            owner=self.owner,
            command_timeout=self.command_timeout,
        )

    def _grave(self) -> Plan[Standard]:
        if "dead_letter" not in self.capabilities:
            self._refuse("dead_letter")
        return (yield from self._at(self.options.dead_letter))

    def _burying(
        self,
        now: datetime,
        grave: Standard,
        reason: str,
        tries: int,
        error: Mapping[str, Any] | None,
        *,
        keyed: bool,
    ) -> Update_:
        update = self.leaving(now, grave, now)
        del update["$rename"]
        update["$unset"] = {
            name: ""
            for name in update["$unset"]
            if name not in ("dead", "error", "checkpoint", "type")
        }
        update["$set"]["dead"] = {
            "from": self.queue,
            "at": now,
            "reason": reason,
            "tries": tries,
            "error": error,
        }
        if error is not None:
            update["$set"]["error"] = error
        return self._ending(update, keyed)

    def _burial(
        self,
        each: Reservation[Any],
        grave: Standard,
        reason: str,
        failure: Mapping[str, Any] | None,
    ) -> Settlement:
        def build(now: datetime) -> Update_:
            return self._burying(
                now, grave, reason, each.tries, failure or each.error, keyed=each.key is not None
            )

        return Settlement(each, build)

    def bury(self, given: tuple[Any, ...], *, error: Any = None) -> Plan[None]:
        """To the dead-letter queue, now."""
        held = arguments.reservations(self.queue, given)
        for each in held:
            if each.dead is not None:
                raise ConfigurationError(
                    f"reservations: message {each.id} is in a dead-letter queue already; commit it, or redrive() the queue"
                )
        failure = None if error is None else self._failure(error, (yield ServerTime()))
        grave = yield from self._grave()
        yield from self._settle(
            [self._burial(each, grave, "buried", failure) for each in held], None
        )

    def progress(self, reservation: Any, fraction: Any, note: str | None = None) -> Plan[None]:
        """Say how far the work is."""
        if (
            isinstance(fraction, bool)
            or not isinstance(fraction, (int, float))
            or not 0 <= fraction <= 1
        ):
            raise ConfigurationError(
                f"fraction: {fraction!r} is not allowed: give a number from 0 to 1"
            )
        if note is not None and (
            not isinstance(note, str) or len(note) > 2048 or not arguments.is_unicode(note)
        ):
            raise ConfigurationError("note: give a str of at most 2048 characters of Unicode")
        yield from self._write(
            reservation,
            lambda now: {"$set": {"progress": {"fraction": fraction, "note": note, "at": now}}},
        )

    def checkpoint(self, reservation: Any, state: Any) -> Plan[None]:
        """Keep a state for the next try."""
        encode({"checkpoint": state})
        yield from self._write(reservation, lambda now: {"$set": {"checkpoint": state}})

    def _write(self, reservation: Any, build: Callable[[datetime], Update_]) -> Plan[None]:
        (held,) = arguments.reservations(self.queue, (reservation,))
        yield from self._settle([Settlement(held, build)], None)

    def _settle(self, acts: Sequence[Settlement], session: Any) -> Plan[None]:
        """Apply each act to its message, if the reservation still holds it.

        Raises:
            LeaseLost: some were held no longer; all the others are settled.
        """
        outcomes: list[SettlementResult]
        if session is None and len(acts) == 1:
            outcomes = [(yield Coalesce(("settle", self.queue), acts[0], self._apply))]
        else:
            outcomes = yield from self._apply(acts, session)
        of: dict[str, list[Reservation[Any]]] = {"lost": [], "unknown": []}
        failed: list[tuple[Reservation[Any], QueueError]] = []
        for act, outcome in zip(acts, outcomes, strict=True):
            if isinstance(outcome, QueueError):
                failed.append((act.held, outcome))
            elif outcome != "done":
                of[outcome].append(act.held)
        if failed:
            error = failed[0][1]
            if isinstance(error, Unavailable):
                raise Unavailable(str(error), ids=[held.id for held, _ in failed]) from error
            raise error
        if gone := [held.id for held in (*of["lost"], *of["unknown"])]:
            raise LeaseLost(
                f"{len(gone)} of {len(acts)} reservations of queue {self.queue!r} are no longer held: {gone[:10]}",
                lost=of["lost"],
                unknown=of["unknown"],
            )

    def _apply(
        self, acts: Sequence[Settlement], session: Any = None
    ) -> Plan[list[SettlementResult]]:
        """Apply acts in as few commands as there are different updates. Answers how each went.

        What has lapsed by our clock goes alone, so that the answer about it is exact.
        """
        now = yield ServerTime()
        if session is not None:
            for act in acts:
                self._lasting(act.held, now)
        groups: dict[Hashable, list[int]] = {}
        of = Counter(hashable_id(act.held.id) for act in acts)
        for place, act in enumerate(acts):
            alone = act.group is None or act.held.until <= now or of[hashable_id(act.held.id)] > 1
            groups.setdefault(("alone", place) if alone else act.group, []).append(place)
        parts: list[list[int]] = []
        single: list[int] = []
        updates: list[Update_ | None] = [None] * len(acts)
        for places in groups.values():
            update = acts[places[0]].build(now)
            if len(acts) > 1 and update is not None and "token" in update.get("$unset", ()):
                update["$set"]["left"] = (
                    tokens.new()
                )  # by it this settling is known from any other, whoever comes next
            for place in places:
                updates[place] = update
            first = acts[places[0]].held
            if (
                len(places) == 1
                and update is not None
                and first.until > now
                and of[hashable_id(first.id)] == 1
            ):
                single += places
            else:
                parts += [places[start : start + BATCH] for start in range(0, len(places), BATCH)]
        parts += [single[start : start + BATCH] for start in range(0, len(single), BATCH)]
        outcomes: list[SettlementResult] = ["done"] * len(acts)
        for index, part in enumerate(parts):
            try:
                yield from self._apply_part(
                    [acts[place] for place in part], part, updates, outcomes, session
                )
            except Unavailable as error:
                for place in (place for rest in parts[index:] for place in rest):
                    outcomes[place] = error
                break
        return outcomes

    def _apply_part(
        self,
        acts: list[Settlement],
        places: list[int],
        updates: Sequence[Update_ | None],
        outcomes: list[SettlementResult],
        session: Any,
    ) -> Plan[None]:
        """Apply acts by one command."""
        members = [act.held for act in acts]
        update = updates[places[0]]
        many = len(places) > 1
        try:
            if update is None:
                done = yield Delete(self._held(members), many=many, session=session)
            elif not many or all(updates[place] is update for place in places):
                done = (
                    yield Update(self._held(members), update, many=many, session=session)
                ).matched
            else:
                each = [
                    (self._held([act.held]), updates[place] or {})
                    for act, place in zip(acts, places, strict=True)
                ]
                done, invalid_fields = yield UpdateEach(each, session=session)
                for fault in invalid_fields:
                    outcomes[places[fault.place]] = fault.error
                    done += 1  # accounted for
        except (DuplicateKey, InvalidMessage) as error:
            if not many:  # its key is taken there, or its update does not fit
                outcomes[places[0]] = error
                return
            # The server refused the command as a whole: find out because of whom.
            half = len(places) // 2
            yield from self._apply_part(acts[:half], places[:half], updates, outcomes, session)
            yield from self._apply_part(acts[half:], places[half:], updates, outcomes, session)
            return
        if done < len(places):
            yield from self._audit(acts, places, updates, outcomes, len(places) - done, session)
        told = set()
        for place in places:
            put = (updates[place] or {}).get("$set", {})
            if outcomes[place] == "done" and "token" in (updates[place] or {}).get("$unset", {}):
                told.add((put.get("q", self.queue), put["when"]))
        for queue, when in told:
            yield Signal(queue, when, session)

    def _held(self, members: Sequence[Reservation[Any]]) -> dict[str, Any]:
        """The filter of what these reservations still hold: pairs of (_id, token), never their cross product."""
        tokens: dict[str, list[Id]] = {}
        for each in members:
            tokens.setdefault(each.token, []).append(each.id)
        pairs = [
            {"_id": ids[0] if len(ids) == 1 else {"$in": ids}, "token": token}
            for token, ids in tokens.items()
        ]
        match: dict[str, Any] = pairs[0] if len(pairs) == 1 else {"$or": pairs}
        return match | {"processed": {"$exists": False}}

    def _lasting(self, each: Reservation[Any], now: datetime) -> None:
        left = (each.until - now).total_seconds()
        if left < min(20.0, each.lease / 3):
            raise ConfigurationError(
                f"session: the lease of message {each.id} has {left:.1f} s left, too little for a transaction (a lapsed lease under an "
                "open transaction blocks the queue): call extend() before it, or reserve with a longer lease="
            )

    def _audit(
        self,
        acts: list[Settlement],
        places: list[int],
        updates: Sequence[Update_ | None],
        outcomes: list[SettlementResult],
        short: int,
        session: Any,
    ) -> Plan[None]:
        """Find out which ones were not settled: a batch says only how many."""
        if short == len(places):
            documents: dict[Id, Mapping[str, Any]] = {}
            gone: SettlementResult = "lost"
        else:
            found = yield Find({"_id": {"$in": [act.held.id for act in acts]}}, session=session)
            documents = {each["_id"]: each for each in found}
            present = sum(act.held.id in documents for act in acts)
            # If all that is missing is still there, in other hands, then what is gone was deleted by us.
            gone = "unknown" if updates[places[0]] is None else "lost"
            if gone == "unknown" and present >= short:
                gone = "done"
        for act, place in zip(acts, places, strict=True):
            if outcomes[place] != "done":
                continue
            document = documents.get(act.held.id)
            if document is None:
                outcomes[place] = gone
            elif not self._ours(document, act.held, updates[place]):
                outcomes[place] = "lost"

    def _ours(
        self, document: Mapping[str, Any], each: Reservation[Any], update: Update_ | None
    ) -> bool:
        """Whether a stored document shows that this very update was applied to it."""
        if update is None:
            return False
        if "left" in update["$set"]:
            return bool(document.get("left") == update["$set"]["left"])
        shown = {"token": each.token} | update["$set"]
        names = ("q", "when", "due", "processed", "token")
        return all(document.get(name) == shown[name] for name in names if name in shown)

    # ---- by anyone

    def redrive(self, limit: int | None = None) -> Plan[int]:
        """Send buried messages back to where each came from."""
        if limit is not None:
            arguments.count("limit", limit)
        if "dead_letter" not in self.capabilities:
            self._refuse("dead_letter")
        yield from self._known()
        moved = 0
        now = yield ServerTime()
        while limit is None or moved < limit:
            wanted = BATCH if limit is None else min(BATCH, limit - moved)
            match = self._free(now) | {"dead": {"$exists": True}}
            shown = {"dead": 1, "key": 1, "last_key": 1, "token": 1, "trail": 1}
            found = yield Find(match, shown, sort=self.order, limit=wanted, hint=HOT)
            batch = 0
            for document in found:
                try:
                    if invalid_fields(document):
                        continue  # others wrote it, and it has no way home
                    name = arguments.queue_name(document["dead"]["from"])
                except InvalidName:
                    continue
                home = yield from self._at(name)
                update = self.leaving(now, home, now)
                update["$unset"] = {
                    name: ""
                    for name in update["$unset"]
                    if name not in ("error", "checkpoint", "type")
                }
                one = {
                    "_id": document["_id"],
                    "q": self.queue,
                    "token": {"$eq": document.get("token")},
                    "dead": {"$exists": True},
                }
                batch += yield from self._with_key(
                    one, update, document.get("key") or document.get("last_key")
                )
                yield Signal(home.queue, now)
            moved += batch
            if len(found) < wanted or not batch:
                break
        return moved

    def _free(self, now: datetime) -> dict[str, Any]:
        """The filter of live messages that nobody holds under a live lease."""
        return {
            "q": self.queue,
            "when": {"$lt": BAND},
            "_id": {"$ne": namespace.record_id(self.queue)},
            "$or": [{"token": {"$exists": False}}, {"when": {"$lte": now}}],
        }

    def remove(self, id: Any) -> Plan[bool]:
        """Take a message out, unless it is held."""
        arguments.identity(id)
        yield from self._known()
        now = yield ServerTime()
        match = self._free(now) | {"_id": id}
        found = yield Find(match, {"key": 1, "dead": 1}, limit=1)
        if not found:
            return False
        update = self.finishing(now, "removed", keyed="key" in found[0] or "dead" in found[0])
        if update is None:
            return bool((yield Delete(match)))
        return bool((yield Update(match, update)).matched)

    def get(self, id: Any) -> Plan[Message[Any] | None]:
        """Look a message up."""
        arguments.identity(id)
        now = yield ServerTime()
        found = yield Find({"_id": id, "q": self.queue}, limit=1)
        return self._message(found[0], now) if found else None

    def peek(self, limit: int = 10) -> Plan[list[Message[Any]]]:
        """What a receive would get next."""
        arguments.count("limit", limit)
        now = yield ServerTime()
        found = yield Find(self.claimable(now), sort=self.order, limit=limit, hint=HOT)
        return [self._message(document, now) for document in found]

    def counts(self) -> Plan[Counts]:
        """How many there are, by state."""
        now = yield ServerTime()
        mine = {"q": self.queue, "_id": {"$ne": namespace.record_id(self.queue)}}
        later = {"$gt": now, "$lt": BAND}
        return Counts(
            ready=(yield Count(mine | {"when": {"$lte": now}}, HOT)),
            scheduled=(yield Count(mine | {"when": later, "token": {"$exists": False}}, HOT)),
            reserved=(yield Count(mine | {"when": later, "token": {"$exists": True}}, HOT)),
            history=(yield Count(mine | {"when": {"$gte": BAND}}, HOT)),
        )

    def next_when(self, floor: ScanStart | None = None) -> Plan[datetime | None]:
        """The earliest ``when`` of all live messages (from a floor on), the ends of leases included."""
        span = {"$lt": BAND} if floor is None else {"$gte": floor[0], "$lt": BAND}
        match = {"q": self.queue, "when": span, "_id": {"$ne": namespace.record_id(self.queue)}}
        found = yield Find(
            match, {"_id": 1, "when": 1}, sort=(("when", 1), ("_id", 1)), limit=1, hint=HOT
        )
        when = found[0]["when"] if found else None
        return (
            when if isinstance(when, datetime) else None
        )  # in what others wrote it may be an array

    def pause(self, value: bool) -> Plan[None]:
        """Stop the consumers of every process, or let them go on."""
        yield from self._known()
        yield from namespace.set_paused(self.queue, self.kind, value)
        yield Signal(self.queue, None)

    def paused(self) -> Plan[bool]:
        """Whether it is paused."""
        return (yield from namespace.paused(self.queue))

    def notify(self) -> Plan[None]:
        """Wake waiting consumers. What they are to find may be as old as a transaction was long."""
        yield Signal(self.queue, None)

    def purge(self) -> Plan[int]:
        """Delete what is ready or scheduled."""
        yield from self._known()
        now = yield ServerTime()
        return cast(int, (yield Delete(self._free(now), many=True)))

    def history(self, limit: int = 100, *, since: Any = None) -> Plan[list[Finished[Any]]]:
        """Finished messages, newest first."""
        arguments.count("limit", limit)
        if "history" not in self.capabilities:
            self._refuse("history")
        last = NEVER - KEPT
        least = (
            BAND
            if since is None
            else max(BAND, min(last, arguments.instant("since", since)) + KEPT)
        )
        now = yield ServerTime()
        match = {"q": self.queue, "when": {"$gte": least}, "processed": {"$type": "date"}}
        found = yield Find(match, sort=(("when", -1), ("_id", -1)), limit=limit, hint=HOT)
        return cast("list[Finished[Any]]", [self._message(document, now) for document in found])

    def replay(self, ids: tuple[Any, ...]) -> Plan[int]:
        """Make finished messages ready again; how many there were."""
        if "history" not in self.capabilities:
            self._refuse("history")
        for id in ids:
            arguments.identity(id)
        yield from self._known()
        now = yield ServerTime()
        back = {
            "$set": self.entering(now),
            "$unset": unset(*HELD, *(name for name in STAY if name != "dead")),
            "$push": {"trail": {"$each": [{"q": self.queue, "at": now}], "$slice": -TRAIL}},
        }
        found = yield Find(
            {"_id": {"$in": list(ids)}, "q": self.queue, "processed": {"$exists": True}},
            {"last_key": 1},
        )
        done = 0
        for document in found:
            match = {"_id": document["_id"], "q": self.queue, "processed": {"$exists": True}}
            done += yield from self._with_key(match, back, document.get("last_key"))
        if done:
            yield Signal(self.queue, now)
        return done
