"""What a client knows about the records of its queues and the indexes of its namespace.

So an operation need not always read the record of its queue. A record is read again after some
time, because the queue may have been deleted. This module does no I/O; the drivers run its plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pyqueue.backends import indexes, namespace
from pyqueue.backends.kind import IndexTerms
from pyqueue.requests import Aside, Coalesce, EnsureQueue, Plan
from pyqueue.runtime.using import Uses

#: How long a client relies on the record of a queue, in seconds.
_LIFETIME_S: Final = 30.0
#: The same for a record with options that ``reshape`` may change, or with a kind that no program
#: has named yet.
_SHAPED_LIFETIME_S: Final = 5.0


class KnownQueues:
    """The records and the indexes that one client knows.

    Args:
        collection: The name of the collection.
        owner: A function that returns the label of this process, for the records of queues.
        uses: Notes the uses of queues that are deleted when unused, or None to note no uses.
    """

    def __init__(
        self, collection: str, owner: Callable[[], str] = str, uses: Uses | None = None
    ) -> None:
        self._collection = collection
        self._owner = owner
        self._uses = uses
        #: The records, keyed by queue name, and when they were read, by the monotonic clock.
        self._records: dict[str, tuple[namespace.QueueRecord, float]] = {}
        #: The options that this client stored in each record, for its Queue objects. If the record
        #: differs later, another program has changed it, and it is left alone.
        self._options: dict[str, list[Mapping[str, Any]]] = {}
        #: The shared options that this client's Queue objects gave and that agreed with the record.
        #: If the record changes later, these objects adopt the change.
        self._agreed: dict[str, list[Mapping[str, object]]] = {}
        #: Replaced whenever a record was read or forgotten. Two threads at once could count one
        #: change instead of two, so this is not a number.
        self.version = object()
        #: The indexes that this client needs.
        self._indexes: dict[str, IndexTerms] = dict(indexes.INDEXES)

    def kind_of(self, request: EnsureQueue) -> str | None:
        """Return the kind of a queue, or None if its record has to be read."""
        kind, until = self.known_until(request)
        return kind if time.monotonic() < until else None

    def known_until(self, request: EnsureQueue) -> tuple[str, float]:
        """Return the kind of a queue, and until when it answers a request, on the monotonic clock.

        If the record has to be read, return "" and an instant in the past.
        """
        unknown = "", -math.inf
        record, read = self._records.get(request.queue, (None, 0.0))
        if record is None:
            return unknown
        if record.open and not request.guessed and request.kind is not None:
            return unknown  # the request names the kind
        if request.options is not None and not record.compared:
            return unknown
        changes = record.shape or record.open
        if changes and request.kind is not None and self._notes(request.queue):
            return unknown  # its use is noted when the record is read
        if request.shape and request.shape not in self._agreed.get(request.queue, ()):
            return unknown  # reading the record raises the error, if there is one
        if not record.levels.issuperset(request.levels):
            return unknown
        lifetime_s = min(_LIFETIME_S, _SHAPED_LIFETIME_S) if changes else _LIFETIME_S
        return record.kind, read + lifetime_s

    def _notes(self, queue: str) -> bool:
        """Return whether a use of a queue would be noted now."""
        return self._uses is not None and self._uses.left_s(queue) == 0

    def shape_of(self, queue: str) -> Mapping[str, object]:
        """Return the options that all users of a queue share, or {} if they are not known."""
        record, _ = self._records.get(queue, (None, 0.0))
        return {} if record is None else record.shape

    def ensuring(self, request: EnsureQueue) -> Coalesce[EnsureQueue, str]:
        """Return the request that reads or creates a queue's record. Concurrent calls share it."""
        shape = repr(sorted(request.shape.items()))
        how = (request.kind, request.guessed, shape, tuple(request.levels))
        key = ("ensure", request.queue, *how)
        return Coalesce(key, request, self._ensure_each, max_in_flight=1, threads=True)

    def _ensure_each(self, requests: Sequence[EnsureQueue]) -> Plan[list[str]]:
        kinds: list[str] = []
        for request in requests:
            kind = self.kind_of(request)
            if kind is None and kinds and request.kind is None:
                kind = kinds[0]  # a missing record is not remembered, but was read for all
            elif kind is None:
                kind = yield from self._ensure(request)
            kinds.append(kind)
        return kinds

    def _ensure(self, request: EnsureQueue) -> Plan[str]:
        """Read or create the record of a queue, and remember it."""
        queue, shown = request.queue, request.options and request.options()
        stored = self._options.setdefault(queue, [])
        agreed = self._agreed.setdefault(queue, [])
        if self._uses is not None:
            yield from self._uses.naming(queue, request.shape)
        # Before a limit is stored, because a consumer that obeys it relies on the unique index.
        yield from self._make_missing(indexes.indexes_of(request.kind, request.shape))
        record = yield from namespace.read_or_create_record(
            request,
            shown,
            compare=shown not in stored,
            agreed=request.shape in agreed,
            by=self._owner(),
        )
        yield from self._make_missing(indexes.indexes_of(record.kind, record.shape))
        if shown and shown not in stored:
            stored.append(shown)
        if request.shape and request.shape not in agreed and record.kind == request.kind:
            agreed.append(request.shape)
        if self._uses is not None:
            self._uses.follow(queue, record.shape)
            note = self._uses.due(queue) if request.kind is not None else None
            if note is not None:
                yield from Aside(note)
        if record.live:
            self._records[queue] = record, time.monotonic()
            self.version = object()
        return record.kind

    def _make_missing(self, needed: Mapping[str, IndexTerms]) -> Plan[None]:
        """Create the indexes of a queue, unless this client knows that they exist."""
        if not needed.keys() <= self._indexes.keys():
            yield from indexes.make_indexes(self._collection, needed)
            self._indexes |= needed

    def make_indexes(self, hint: str | None = None) -> Plan[None]:
        """Create the indexes that this client needs, and ``hint``, which a command did not find."""
        every = indexes.all_indexes()
        if hint is not None and hint in every:
            self._indexes[hint] = every[hint]
        # A copy: another call may add an index at the same time.
        yield from indexes.make_indexes(self._collection, dict(self._indexes))

    def forget_records(self) -> None:
        """Forget all records, so that they are read again: the collection may have been dropped."""
        self._records.clear()
        self.version = object()

    def forget_all(self) -> None:
        """Forget every queue, because all queues were deleted."""
        for table in (self._records, self._options, self._agreed):
            table.clear()
        self.version = object()
        if self._uses is not None:
            self._uses.queues.clear()

    def forget(self, queue: str) -> None:
        """Forget a queue that was deleted."""
        self._forget_record(queue)
        if self._uses is not None:
            self._uses.queues.pop(queue, None)  # its next use is noted again

    def forget_idle(self, idle_s: float) -> None:
        """Forget the queues that were not used for this many seconds."""
        now = time.monotonic()
        for queue, (_, read) in list(self._records.items()):
            if now - read > idle_s:
                self._forget_record(queue)
        if self._uses is not None:
            self._uses.forget_idle(idle_s)

    def _forget_record(self, queue: str) -> None:
        for table in (self._records, self._options, self._agreed):
            table.pop(queue, None)
        self.version = object()
