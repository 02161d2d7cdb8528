"""Contents: the messages in stored documents, for plans that work on many documents at once.

Named claims, and reads and writes by Spark, work on whole documents. In most kinds, each document
is one message, and ``Contents`` describes these kinds. A kind whose messages share documents
registers a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

from bson.raw_bson import RawBSONDocument

from pyqueue.backends.byte_limit import find_fitting
from pyqueue.backends.kind import Kind
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.backends.receiving import Reception
from pyqueue.backends.scan import SCAN_ORDER
from pyqueue.documents import invalid_fields, message_of, without_fields
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Id, Reservation
from pyqueue.requests import Count, Document, Filter, Find, Plan, ServerTime

#: The field of a claimed document in which a reader notes why it could not convert a message. The
#: field is removed when the claim ends.
NOTE: Final = "claim.bad"
#: The field of a claimed document which notes, as a number, that work on a message has begun.
TRIED: Final = "claim.tried"

_ALL: Final[Filter] = {}
_ID: Final[Mapping[str, object]] = {"_id": 1}
_BARE: Final[Mapping[str, object]] = {"payload": 0}


class Spot(NamedTuple):
    """The place of a message in a document that it shares with other messages."""

    document: Id
    place: int

    def field(self, note: str) -> str:
        """Return the name of the field that stores a note on this message."""
        return f"{note}.{self.place}"


class SharedRows(NamedTuple):
    """The rows of a write that share documents."""

    documents: Sequence[RawBSONDocument]
    #: How many rows the documents contain.
    number: int
    #: All rows of the write, with None in place of each row that the documents contain.
    rest: Sequence[NewMessage | None]


class Contents:
    """Describes the messages in stored documents. In this class, each document is one message."""

    #: Whether messages may share documents.
    shared: bool = False
    #: Matches the documents that are one message each.
    separate: Filter = _ALL
    #: The projection with the fields that ``size`` needs.
    sized: Mapping[str, object] = _ID
    #: The projection with the fields that ``ids`` and ``by_id`` need.
    named: Mapping[str, object] = _ID
    #: The projection with the fields that ``reservations`` needs.
    bare: Mapping[str, object] = _BARE

    # ---- one document

    def size(self, document: Document) -> int:
        """Return how many messages a document has."""
        return 1

    def ids(self, document: Document) -> Sequence[Id]:
        """Return the ids of the messages in a document."""
        return [document["_id"]]

    def by_id(self, document: Document, notes: Any) -> Mapping[Id, Any]:
        """Return the stored notes on the messages in a document, keyed by message id."""
        return {document["_id"]: notes}

    def messages(self, document: Document) -> Sequence[Document]:
        """Return the messages in a document, each as a document."""
        return [document]

    def numbered(self, document: Document) -> Sequence[tuple[int, Document]]:
        """Return the messages in a document as documents, each with a number that never changes."""
        return [(0, document)]

    def encoded(self, found: Sequence[bytes]) -> Sequence[bytes]:
        """Return the messages in these BSON documents, each as a BSON document."""
        return found

    def reservations(
        self, document: Document, now: datetime, *, noted: bool = True
    ) -> Sequence[Reservation[Any]]:
        """Return the messages in a document as reservations without payloads.

        Args:
            document: A claimed document.
            now: The current instant.
            noted: Whether to include messages that a reader could not convert; see ``NOTE``.
        """
        if not noted and "bad" in document.get("claim", ()):
            return []
        lease_s = max(0.001, (document["when"] - now).total_seconds())
        valid = without_fields(document, invalid_fields(document))
        return [cast("Reservation[Any]", message_of(valid, None, now, lease=lease_s))]

    # ---- claims

    def first(self, find: Find, max_bytes: int | None) -> Plan[list[Document]]:
        """Return the first documents whose total size is at most ``max_bytes``, but at least one.

        Args:
            find: Finds the documents in order. Its limit counts messages; the last document may
                bring the number above the limit.
            max_bytes: The maximum total size, or None for no limit.
        """
        return (yield from (find if max_bytes is None else find_fitting(find, max_bytes)))

    def admit(self, how: Reception, claimed: Filter) -> Plan[None]:
        """Prepare shared documents that were just claimed. Bury the invalid ones."""
        yield from ()

    def find_shared(self, claimed: Filter, ids: Sequence[Id]) -> Plan[Mapping[Id, Spot]]:
        """Find the messages that share claimed documents. Return their places, keyed by id."""
        yield from ()
        return {}

    def bury_noted(
        self, terms: QueueTerms, claimed: Filter, error_of: Callable[[str], dict[str, Any]]
    ) -> Plan[list[tuple[Id, str]]]:
        """Bury messages that a reader could not convert, in shared documents; see ``NOTE``.

        Args:
            terms: The queue and its options.
            claimed: Matches the claimed documents.
            error_of: Returns the error to store in a message, given the reason in its note.

        Returns:
            The ids of the buried messages, each with the reason.
        """
        yield from ()
        return []

    def finish(self, claimed: Filter) -> Plan[int]:
        """Finish the messages in shared documents. Return how many messages were finished."""
        yield from ()
        return 0

    # ---- messages of any program

    def is_message(self, document: Document) -> bool:
        """Return whether a document is a message, or was meant to be one."""
        return True

    def end_rests(self, terms: QueueTerms) -> Plan[None]:
        """Release shared documents that processes keep although they hold no message in them."""
        yield from ()

    def hold(
        self, terms: QueueTerms, document: Document, numbers: Sequence[int]
    ) -> Plan[Sequence[Reservation[Any]]]:
        """Hold messages of a shared document for a moment, as a consumer does.

        Args:
            terms: The queue and its options.
            document: The document, as it was read.
            numbers: Which messages to hold, by their numbers; see ``numbered``.

        Returns:
            The reservations, without payloads, of the messages that are still in the document. The
            list is empty if the document has changed since it was read, or if a consumer holds it.
            When all reservations are settled, the other messages go back to the queue.
        """
        yield from ()
        return []

    def requeue(
        self, terms: QueueTerms, held: Sequence[Reservation[Any]], at: datetime | None
    ) -> Plan[None]:
        """Make messages of one shared document ready at ``at``, or now if it is None.

        Raises:
            LeaseLost: Some messages were no longer held; the other messages are requeued.
        """
        yield from ()

    # ---- writes

    def share(
        self,
        target: Target,
        rows: Sequence[NewMessage],
        now: datetime,
        more: Mapping[str, Any],
    ) -> Plan[SharedRows]:
        """Return documents that hold several rows each. ``more``: further fields of each document.

        Raises:
            InvalidMessage, ConfigurationError: A row cannot be stored.
        """
        yield from ()
        return SharedRows((), 0, rows)

    def without_derived_ids(self, rows: Sequence[NewMessage]) -> Sequence[NewMessage]:
        """Return the rows. If rows can share documents, drop ids that the writer derived."""
        return rows

    def surplus(self, match: Filter, cap: int | None = None, hint: str | None = None) -> Plan[int]:
        """Return the number of messages in the matching documents, minus the number of documents.

        Args:
            match: Matches the documents.
            cap: The maximum number of shared documents to count, or None for no limit.
            hint: The index to use, or None for the index that counts the messages of a queue.
        """
        yield from ()
        return 0

    # ---- reads

    def conditions(self, only: Sequence[Filter]) -> Sequence[Filter]:
        """Return conditions that match every document with a message that meets ``only``."""
        return only

    def fields(self, wanted: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """Return the projection for these fields of messages, or None for all fields."""
        return wanted


_SEPARATE: Final = Contents()
_contents: dict[str, Contents] = {}


def register(kind: str, contents: Contents) -> None:
    """Register the contents of a kind whose messages share documents."""
    _contents[kind] = contents


def contents_of(kind: Kind) -> Contents:
    """Return the object that describes the messages in the documents of a kind."""
    return _contents.get(kind.name, _SEPARATE)


def refuse_packs(kind: Kind, queue: str, argument: str, remedy: str) -> None:
    """Refuse an operation that is impossible for messages that share documents.

    Args:
        kind: The kind of the queue.
        queue: The name of the queue.
        argument: The operation or argument that the caller gave.
        remedy: The alternative that the error suggests.

    Raises:
        ConfigurationError: Messages of the queue may share documents.
    """
    if "packs" in kind.capabilities:
        raise ConfigurationError(
            f"{argument}: queue {queue!r} is of kind {kind.name!r}, whose messages share "
            f"documents; {remedy}"
        )


def count(kind: Kind, match: Filter, hint: str, cap: int | None = None) -> Plan[int]:
    """Count the messages in the documents that match, up to ``cap``."""
    documents = yield from Count(match, hint, cap)
    number = documents + (yield from contents_of(kind).surplus(match, cap))
    return number if cap is None else min(number, cap)


def count_of_any_kind(match: Filter, hint: str, cap: int | None = None) -> Plan[int]:
    """Count the messages in the documents that match, up to ``cap``, in queues of any kind."""
    number = yield from Count(match, hint, cap)
    for each in _contents.values():
        if cap is None or number < cap:
            number += yield from each.surplus(match, cap, hint)
    return number if cap is None else min(number, cap)


def backlog(queue: str, kind: Kind, cap: int) -> Plan[tuple[int, float | None]]:
    """Return how many messages are ready, up to ``cap``, and the first one's wait in seconds."""
    now = yield from ServerTime()
    ready = kind.claimable(queue, now, None)
    fields = {"when": 1, "due": 1}
    found = yield from Find(ready, fields, sort=SCAN_ORDER, limit=1, hint=HOT)
    if not found:
        return 0, None
    number = yield from count(kind, ready, HOT, cap)
    # The ``due`` of a deferred message says since when it has been ready.
    since = found[0].get("due", found[0]["when"])
    return number, (now - since).total_seconds() if isinstance(since, datetime) else None
