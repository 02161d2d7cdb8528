"""What a plan may ask of its driver.

A *plan* is a generator that yields these requests, is sent their answers and returns a result: queue semantics without I/O.
A request of the database knows how its one command is spelled (``send``) and what of the raw result is the answer (``read``);
only a driver ever hands it a collection. The others (``Now``, ``Wait``, ``Join``, ``Signal``) are answered by the driver itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, TypeVar

from pymongo import UpdateOne

from pyqueue.errors import QueueError

__all__ = [
    "Change",
    "Coalesce",
    "Command",
    "Count",
    "CreateIndex",
    "Delete",
    "Distinct",
    "EnsureQueue",
    "Find",
    "FindAndModify",
    "Hello",
    "Indexes",
    "Insert",
    "Listen",
    "Plan",
    "Request",
    "ServerTime",
    "Signal",
    "Update",
    "UpdateEach",
    "Wait",
    "WriteFailure",
]

T = TypeVar("T")
Document = Mapping[str, Any]
Sort = Sequence[tuple[str, int]]


class WriteFailure(NamedTuple):
    """One operation of a batch that the server refused."""

    place: int
    #: The unique index that refused it, "_id" or "key"; None: something else did.
    field: str | None
    error: QueueError


@dataclass(slots=True, kw_only=True)
class Command:
    """One database command.

    ``session`` is None, or the caller's transaction. ``quick`` writes are answered by the primary alone; the others as the
    client's durability says.
    """

    session: Any = None
    w1: bool = False
    #: Seconds it may take at most, if that is less than the client's time-out.
    max_time_s: float | None = None

    #: Whether ``send`` answers a cursor, for the driver to read to its end.
    cursor: ClassVar[bool] = False

    def send(self, collection: Any) -> Any:
        """Give the command to a collection of any of the drivers."""
        raise NotImplementedError

    def read(self, raw: Any) -> Any:
        """Make the answer of the raw result."""
        return raw


@dataclass(slots=True)
class Find(Command):
    """Answers a list of documents."""

    filter: Document
    projection: Document | None = None
    sort: Sort | None = None
    limit: int = 0
    skip: int = 0
    hint: str | None = None
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Find."""
        return collection.find(
            self.filter,
            self.projection,
            sort=self.sort,
            limit=self.limit,
            skip=self.skip,
            hint=self.hint,
            session=self.session,
        )


@dataclass(slots=True)
class FindAndModify(Command):
    """Find the first and update it, or delete it (``update`` None). Answers the document (as updated) or None."""

    filter: Document
    update: Document | None
    sort: Sort | None = None
    hint: str | None = None
    upsert: bool = False

    def send(self, collection: Any) -> Any:
        """Find and modify."""
        if self.update is None:
            return collection.find_one_and_delete(
                self.filter, sort=self.sort, hint=self.hint, session=self.session
            )
        return collection.find_one_and_update(
            self.filter,
            self.update,
            sort=self.sort,
            hint=self.hint,
            upsert=self.upsert,
            return_document=True,
            session=self.session,
        )


@dataclass(slots=True)
class Insert(Command):
    """Answers the list of Faults: which documents were refused; all the others are written."""

    documents: Sequence[Any]

    def send(self, collection: Any) -> Any:
        """Insert."""
        if len(self.documents) == 1:
            return collection.insert_one(self.documents[0], session=self.session)
        return collection.insert_many(self.documents, ordered=False, session=self.session)

    def read(self, raw: Any) -> list[WriteFailure]:
        """All were written."""
        return []


class Change(NamedTuple):
    """The answer of an Update."""

    matched: int
    upserted: Any


@dataclass(slots=True)
class Update(Command):
    """Answers a Change."""

    filter: Document
    update: Document
    many: bool = False
    upsert: bool = False

    def send(self, collection: Any) -> Any:
        """Update one or many."""
        update = collection.update_many if self.many else collection.update_one
        return update(self.filter, self.update, upsert=self.upsert, session=self.session)

    def read(self, raw: Any) -> Change:
        """How many matched, and the id of what an upsert made."""
        return Change(raw.matched_count, raw.upserted_id)


@dataclass(slots=True)
class UpdateEach(Command):
    """Pairs of a filter and its update, each for one document. Answers how many matched, and the list of Faults."""

    pairs: Sequence[tuple[Document, Document]]

    def send(self, collection: Any) -> Any:
        """Update them."""
        return collection.bulk_write(
            [UpdateOne(*pair) for pair in self.pairs], ordered=False, session=self.session
        )

    def read(self, raw: Any) -> tuple[int, list[WriteFailure]]:
        """How many matched."""
        return raw.matched_count, []


@dataclass(slots=True)
class Delete(Command):
    """Answers how many were deleted."""

    filter: Document
    many: bool = False

    def send(self, collection: Any) -> Any:
        """Delete one or many."""
        delete = collection.delete_many if self.many else collection.delete_one
        return delete(self.filter, session=self.session)

    def read(self, raw: Any) -> int:
        """How many went."""
        return int(raw.deleted_count)


@dataclass(slots=True)
class Count(Command):
    """Answers how many match."""

    filter: Document
    hint: str

    def send(self, collection: Any) -> Any:
        """Count."""
        return collection.count_documents(self.filter, hint=self.hint, session=self.session)


@dataclass(slots=True)
class Distinct(Command):
    """Answers the distinct values of a field."""

    field: str

    def send(self, collection: Any) -> Any:
        """Ask for the values."""
        return collection.distinct(self.field, session=self.session)


@dataclass(slots=True)
class CreateIndex(Command):
    """Makes an index, or finds it there. Needs the permission to."""

    name: str
    keys: Sort
    options: Document

    def send(self, collection: Any) -> Any:
        """Create it."""
        return collection.create_index(self.keys, name=self.name, **self.options)


@dataclass(slots=True)
class Indexes(Command):
    """Answers the descriptions of the indexes there are, by name."""

    def send(self, collection: Any) -> Any:
        """List them."""
        return collection.index_information()


@dataclass(slots=True)
class Hello(Command):
    """Answers the primary's greeting: what it is, and its clock."""

    def send(self, collection: Any) -> Any:
        """Greet the primary."""
        return collection.database.command("hello", codec_options=collection.codec_options)


@dataclass(slots=True)
class ServerTime:
    """Answers the instant at the primary."""


@dataclass(slots=True)
class EnsureQueue:
    """Make sure that a queue has its record. The answer is its kind; a driver remembers it and asks once."""

    queue: str
    kind: str
    #: What the record is to show of how the queue is used; None: nothing.
    options: Callable[[], Mapping[str, Any]] | None = None


@dataclass(slots=True)
class Listen:
    """Listen to what the bus says of a queue. Answers whether that began only now."""

    line: Any


@dataclass(slots=True)
class Wait:
    """Wait in the line of a queue's consumers, until something is heard or an instant comes.

    Only the first in the line keeps the time ``until``; the others wait for their turn or their ``deadline`` (None: for ever).
    Answers whether to look: no, if all that was heard is of later.
    """

    line: Any
    until: datetime
    deadline: datetime | None


@dataclass(slots=True)
class Coalesce:
    """Have ``item`` done together with those of other callers that give the same key. Answers what the batch's plan answers for it.

    ``batch`` makes the plan for a list of items; it answers a list, one for each, in order. It runs to its end even if a caller is
    cancelled; then ``undo`` makes the plan that gives back what was answered to that caller.
    """

    key: Hashable
    item: Any
    batch: Callable[[list[Any]], Generator[Any, Any, Sequence[Any]]]
    undo: Callable[[Any], Generator[Any, Any, Any]] | None = None
    #: The item's size in bytes; a batch has a bound.
    size: int = 0
    #: How many batches of this key may be under way at once.
    max_in_flight: int = 2


@dataclass(slots=True)
class Signal:
    """Tell the bus: the queue has something from ``when`` on; None: its record changed."""

    queue: str
    when: datetime | None
    session: Any = None


Request = Command | ServerTime | EnsureQueue | Listen | Wait | Coalesce | Signal

Plan = Generator[Request, Any, T]
