"""The requests that a plan may make of its driver.

A *plan* is a generator. It yields these requests, receives their answers and returns a result, so
the semantics of a queue are written without I/O. A database command can send itself (``send``) and
read its answer (``read``); the driver only gives it a collection. The driver answers all other
requests itself. The type of a request includes the type of its answer: in ``found = yield from
Find(...)``, ``found`` is a list of documents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from pymongo import DeleteOne, UpdateMany, UpdateOne

from pyqueue.errors import QueueError

T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer", covariant=True)
Result = TypeVar("Result")

#: A document as the database returns it.
Document = dict[str, Any]
Filter = Mapping[str, Any]
UpdateDocument = Mapping[str, Mapping[str, Any]]
Sort = Sequence[tuple[str, int]]

#: How many commands on one queue may run at once if each of them may wait for a lock.
MAX_LOCKABLE: Final = 8


class Request(Generic[Answer]):
    """A value that a plan may yield. ``yield from request`` gives its typed answer."""

    __slots__ = ()

    def __iter__(self) -> Generator[Request[Any], Any, Answer]:
        return (yield self)  # type: ignore[no-any-return]  # the driver sends the answer


#: A generator that yields requests and returns a result.
Plan = Generator[Request[Any], Any, T]


class WriteFailure(NamedTuple):
    """One operation of a batch that the server refused."""

    #: The position of the operation in its batch.
    place: int
    #: The field of the unique index that refused it, "_id" or "key", or None for other reasons.
    field: str | None
    error: QueueError


class Change(NamedTuple):
    """The answer to an ``Update``."""

    matched: int
    #: The id of the document that an upsert inserted, or None.
    upserted: Any


# ---- database commands


@dataclass(slots=True, kw_only=True)
class Command(Request[Answer]):
    """One database command.

    Args:
        session: The session of the caller's transaction, or None.
        w1: Whether the primary alone acknowledges the write. Other writes follow the client's
            durability.
        majority: Whether the command reads and writes with a majority of the members, regardless of
            the client's durability.
        max_time_s: The time limit in seconds, if it is less than the client's time limit.
        half_time: Whether the command may take only half of the client's time limit, which leaves
            time for another try.
        server_limit_s: A shorter time limit, in seconds, for the server alone. The driver does not
            repeat such a command. Only for updates with ``w1`` and without a session.
    """

    session: Any = None
    w1: bool = False
    majority: bool = False
    max_time_s: float | None = None
    half_time: bool = False
    server_limit_s: float | None = None
    #: Whether ``send`` returns a cursor, which the driver reads to its end.
    cursor: ClassVar[bool] = False

    def send(self, collection: Any) -> Any:
        """Send the command to a collection object of any supported driver."""
        raise NotImplementedError

    def read(self, raw: Any) -> Answer:
        """Return the answer that the raw result of the driver contains."""
        return raw  # type: ignore[no-any-return]  # the drivers' results are untyped


class RefusedWrite(Exception):
    """The server refused an update that was sent with a time limit."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _TimeLimited(OrderedDict[str, Any]):
    """A command whose ``maxTimeMS`` can only be lowered, even if ``pymongo.timeout`` raises it.

    The server must stop before the client stops waiting, to leave time for the network.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "maxTimeMS" and name in self:
            value = min(value, self[name])
        super().__setitem__(name, value)


def _send_limited(collection: Any, limit_s: float, command: str, **fields: Any) -> Any:
    """Send a write that the server ends at a time limit, acknowledged by the primary alone.

    PyMongo has no method for this. A collection object that changes documents on their way, for
    example by renaming fields, has a method ``limited`` that sends the command.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    given |= {"writeConcern": {"w": 1}, "maxTimeMS": round(limit_s * 1000)}
    limited = _TimeLimited({command: collection.name, **given})
    # The class is asked, because an object of PyMongo has a sub-collection under any name.
    if hasattr(type(collection), "limited"):
        return collection.limited(limited)
    return collection.database.command(limited, codec_options=collection.codec_options)


@dataclass(slots=True)
class Find(Command[list[Document]]):
    """Find documents. The answer is the list of documents."""

    filter: Filter
    projection: Mapping[str, object] | None = None
    sort: Sort | None = None
    limit: int = 0
    skip: int = 0
    hint: str | None = None
    #: Read only one batch from the server, up to 16 MB. This needs a ``limit``.
    one_batch: bool = False
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send a find."""
        return collection.find(
            self.filter,
            self.projection,
            sort=self.sort,
            limit=-self.limit if self.one_batch else self.limit,
            batch_size=self.limit,  # the default is 101
            skip=self.skip,
            hint=self.hint,
            session=self.session,
        )


@dataclass(slots=True)
class FindAndModify(Command[Document | None]):
    """Update the first match; without an update, delete it. The answer is the match or None."""

    filter: Filter
    update: UpdateDocument | None
    sort: Sort | None = None
    hint: str | None = None
    upsert: bool = False
    #: Answer with the document as it was before the update.
    before: bool = False

    def send(self, collection: Any) -> Any:
        """Send a findAndModify."""
        if self.update is None:
            return collection.find_one_and_delete(
                self.filter, sort=self.sort, hint=self.hint, session=self.session
            )
        if self.server_limit_s is not None:
            return _send_limited(
                collection,
                self.server_limit_s,
                "findAndModify",
                query=self.filter,
                update=self.update,
                sort=dict(self.sort or ()),
                hint=self.hint,
                new=True,
            )
        return collection.find_one_and_update(
            self.filter,
            self.update,
            sort=self.sort,
            hint=self.hint,
            upsert=self.upsert,
            return_document=not self.before,
            session=self.session,
        )

    def read(self, raw: Any) -> Document | None:
        """Return the document."""
        document: Document | None = raw if self.server_limit_s is None else raw["value"]
        return document


@dataclass(slots=True)
class Insert(Command[list[WriteFailure]]):
    """Insert documents. The answer lists the refused documents; all other documents are written."""

    documents: Sequence[Any]

    def send(self, collection: Any) -> Any:
        """Send an insert."""
        if len(self.documents) == 1:
            return collection.insert_one(self.documents[0], session=self.session)
        return collection.insert_many(self.documents, ordered=False, session=self.session)

    def read(self, raw: Any) -> list[WriteFailure]:
        """Return an empty list, because a refusal arrives as an exception."""
        return []


@dataclass(slots=True)
class Update(Command[Change]):
    """Update one match, or with ``many`` all matches. The answer is a ``Change``."""

    filter: Filter
    update: UpdateDocument
    many: bool = False
    upsert: bool = False

    def send(self, collection: Any) -> Any:
        """Send an update."""
        if self.server_limit_s is not None:
            one = {"q": self.filter, "u": self.update, "multi": self.many}
            return _send_limited(collection, self.server_limit_s, "update", updates=[one])
        update = collection.update_many if self.many else collection.update_one
        return update(self.filter, self.update, upsert=self.upsert, session=self.session)

    def read(self, raw: Any) -> Change:
        """Return how many documents matched, and the id of an inserted document."""
        if self.server_limit_s is not None:
            for refusal in raw.get("writeErrors", ()):
                raise RefusedWrite(refusal["code"], refusal["errmsg"])
            return Change(raw["n"], None)
        return Change(raw.matched_count, raw.upserted_id)


@dataclass(slots=True)
class UpdateEach(Command[tuple[int, list[WriteFailure]]]):
    """Apply pairs of a filter and an update. Answer with the number of matches, and failures."""

    pairs: Sequence[tuple[Filter, UpdateDocument]]  # an empty update deletes the first match
    many: bool = False  # each update changes all of its matches

    def send(self, collection: Any) -> Any:
        """Send a bulk write."""
        update: Any = UpdateMany if self.many else UpdateOne
        updates = [update(*pair) if pair[1] else DeleteOne(pair[0]) for pair in self.pairs]
        return collection.bulk_write(updates, ordered=False, session=self.session)

    def read(self, raw: Any) -> tuple[int, list[WriteFailure]]:
        """Return how many documents matched, and no failures."""
        return raw.matched_count + raw.deleted_count, []


@dataclass(slots=True)
class Delete(Command[int]):
    """Delete one match, or with ``many`` all matches. The answer is how many were deleted."""

    filter: Filter
    many: bool = False
    hint: str | None = None

    def send(self, collection: Any) -> Any:
        """Send a delete."""
        delete = collection.delete_many if self.many else collection.delete_one
        return delete(self.filter, hint=self.hint, session=self.session)

    def read(self, raw: Any) -> int:
        """Return how many documents were deleted."""
        return int(raw.deleted_count)


@dataclass(slots=True)
class Count(Command[int]):
    """Count the matches of a filter, up to ``cap``."""

    filter: Filter
    hint: str
    cap: int | None = None

    def send(self, collection: Any) -> Any:
        """Send a count."""
        more = {} if self.cap is None else {"limit": self.cap}
        return collection.count_documents(self.filter, hint=self.hint, session=self.session, **more)


@dataclass(slots=True)
class CountEach(Command[list[int]]):
    """Count the matches of several filters in one command, up to ``cap`` for each filter."""

    filters: Sequence[Filter]
    cap: int | None = None
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send an aggregate that counts one filter after the other."""
        limit = [] if self.cap is None else [{"$limit": self.cap}]
        first, *rest = (
            [{"$match": match}, *limit, {"$count": "n"}, {"$set": {"place": place}}]
            for place, match in enumerate(self.filters)
        )
        more = [{"$unionWith": {"coll": collection.name, "pipeline": each}} for each in rest]
        return collection.aggregate([*first, *more], session=self.session)

    def read(self, raw: Any) -> list[int]:
        """Return one number for each filter. The server leaves zeros out."""
        found = {document["place"]: document["n"] for document in raw}
        return [found.get(place, 0) for place in range(len(self.filters))]


@dataclass(slots=True)
class Distinct(Command[list[object]]):
    """List the distinct values of a field in the collection."""

    field: str

    def send(self, collection: Any) -> Any:
        """Send a distinct."""
        return collection.distinct(self.field, session=self.session)


@dataclass(slots=True)
class CreateIndex(Command[str]):
    """Create an index, unless it exists. The database user needs permission to do so."""

    name: str
    keys: Sort
    options: Mapping[str, Any]

    def send(self, collection: Any) -> Any:
        """Send a createIndexes."""
        return collection.create_index(self.keys, name=self.name, **self.options)


@dataclass(slots=True)
class Indexes(Command[Mapping[str, object]]):
    """Describe the existing indexes. The answer is keyed by index name."""

    def send(self, collection: Any) -> Any:
        """Send a listIndexes."""
        return collection.index_information()


@dataclass(slots=True)
class Hello(Command[Document]):
    """Ask the primary for its description and its clock."""

    def send(self, collection: Any) -> Any:
        """Send a hello."""
        return collection.database.command("hello", codec_options=collection.codec_options)


# ---- requests that the driver answers itself


@dataclass(slots=True)
class ServerTime(Request[datetime]):
    """The current instant, by the primary's clock."""


@dataclass(slots=True)
class MonotonicTime(Request[float]):
    """Seconds on this machine's monotonic clock, which timeouts use because it never jumps."""


@dataclass(slots=True)
class EnsureQueue(Request[str]):
    """Create the record of a queue if it is missing. The answer is the kind of the queue."""

    queue: str
    kind: str | None  # None: any kind; no record is created. The answer is "" if there is none.
    #: Returns the options that the record shows to people. None leaves these options unchanged.
    options: Callable[[], Mapping[str, Any]] | None = None
    #: The shared options that the caller gave. If the record has other values, the request fails.
    shape: Mapping[str, object] = field(default_factory=dict)
    #: The priorities that the caller uses. The record then lists them.
    levels: Sequence[int] = ()
    #: Whether the kind is a guess, and the caller accepts any kind. See ``naming_kind``.
    guessed: bool = False


@dataclass(slots=True)
class ForgetQueue(Request[None]):
    """Remove the record of a deleted queue from the driver's memory."""

    queue: str


@dataclass(slots=True)
class Listen(Request[bool]):
    """Subscribe to the bus events of a queue. The answer is whether the subscription is new."""

    waiters: Any


@dataclass(slots=True)
class Wait(Request[bool]):
    """Wait for an event or an instant, as one of the waiting consumers of a queue.

    One of these consumers is the leader. Only the leader waits for ``until``, and keeps the
    estimate of the primary's clock fresh. All consumers wait at most until ``deadline`` on the
    monotonic clock (None: no limit). The answer is whether to scan for messages: False if every
    event was about a later instant.
    """

    waiters: Any
    until: datetime
    deadline: float | None


@dataclass(slots=True)
class Coalesce(Request[Result], Generic[Item, Result]):
    """Process ``item`` together with the items of concurrent callers that give the same key.

    The answer is the result for this item. A batch runs to its end even if a caller is cancelled.
    """

    key: Hashable
    item: Item
    #: Returns the plan for a list of items. Its result has one entry for each item, in this order.
    batch: Callable[[list[Item]], Plan[Sequence[Result]]]
    #: Returns the plan that undoes a result whose caller was cancelled.
    undo: Callable[[Result], Plan[None]] | None = None
    #: The size of the item in bytes. The total size of a batch is limited.
    size: int = 0
    #: How many batches with this key may run at once.
    max_in_flight: int = 2
    alone: bool = False  # each item gets a separate batch
    threads: bool = False  # callers in different threads share batches


@dataclass(slots=True)
class Latecomers(Request[None]):
    """Let later calls join a running batch of ``Coalesce``: append their items to ``items``."""

    items: list[Any]


@dataclass(slots=True)
class AtOneInstant(Request[Result]):
    """Run a plan whose reads all see the data of one instant, including writes at w:1.

    The plan gets the session for its commands. It may run again, so it must not write. On a server
    without transactions, and on mongomock, each command reads at its own instant, and the session
    is None.
    """

    plan: Callable[[Any], Plan[Result]]


@dataclass(slots=True)
class ToTheEnd(Request[Result]):
    """Run a plan to its end, even if the caller is cancelled. The answer is its result."""

    plan: Plan[Result]


@dataclass(slots=True)
class Aside(Request[None]):
    """Run a plan in the background. The answer comes at once, so a cancelled caller gets it, too.

    A failure of the plan is logged. Closing an async client waits for the plan.
    """

    plan: Plan[None]


@dataclass(slots=True)
class Signal(Request[None]):
    """Publish that a queue has a message due at ``when``; with None, that its record changed."""

    queue: str
    when: datetime | None
    session: Any = None
