"""The byte limit of one receive, and how a claim keeps to it at little cost.

Message sizes are not available: the index that a claim scans does not contain them, and the client
gets decoded documents. Measuring costs time, so a claim measures only if its messages may exceed
the limit:

- If the wanted messages would not fit at the largest size seen recently, the claim reads sizes with
  its candidates, and takes only the messages that fit.
- It reads the claimed messages as one server batch, which holds up to ``BATCH_BYTES``. If messages
  are missing from the batch, the claim reads the sizes of all messages that it holds, and then the
  missing messages that fit.
- If less than one such batch fits within the limit, the claim encodes the messages to measure them.

Messages that do not fit go back to the queue. A named claim may have thousands of messages, so it
reads its candidates with their sizes in growing steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

import bson

from pyqueue.backends.scan import BATCH_BYTES, ScanState
from pyqueue.documents import hashable_id
from pyqueue.payloads import OPTIONS
from pyqueue.requests import Document, Filter, Find, Latecomers, Plan

#: The fields that a claim reads of its candidates. The index contains them.
CANDIDATES: Final[Mapping[str, object]] = {"_id": 1, "when": 1}
#: The same fields and the size, for which the server reads the documents.
SIZED_CANDIDATES: Final = {**CANDIDATES, "bytes": {"$bsonSize": "$$ROOT"}}
#: The same fields of a claimed message, and those that are needed to give it back.
SIZED_CLAIMS: Final = {**SIZED_CANDIDATES, "due": 1, "token": 1}
_SIZES: Final = {"_id": 1, "bytes": SIZED_CANDIDATES["bytes"]}
#: How many sizes a named claim reads first, and the largest growth factor of each further step.
FIRST_SIZES: Final = 10
SIZES_GROWTH: Final = 10


def size_of(document: Document) -> int:
    """Return the size of a stored document in bytes."""
    try:
        return len(bson.encode(document, codec_options=OPTIONS))
    except Exception:  # a validator of the user's model may have changed the payload
        return 0


class Limits(NamedTuple):
    """The limits of one receiving call."""

    messages: int
    #: One message is received even if it is larger.
    bytes: int


class ByteLimit:
    """The number of bytes that a receive may still take.

    Args:
        scan: This process's knowledge of the queue, which includes the largest size seen recently.
        callers: The limits of the calls that share the receive. Each may begin with any message.
    """

    def __init__(self, scan: ScanState, callers: list[Limits]) -> None:
        self._scan = scan
        self._callers = callers
        self._max_bytes = sum(each.bytes for each in callers)
        #: How many messages of any size the receive may take.
        self._exempt = len(callers)
        #: The bytes of taken messages with known sizes, and the batches with unknown sizes.
        self._bytes = 0
        self._unmeasured: list[Sequence[Document]] = []
        #: The size of the current claim's messages, if it is known.
        self._claim_bytes: int | None = None
        #: Whether a message was left behind because it did not fit.
        self.full = False
        #: Whether calls that arrive during the receive have to wait.
        self.closed = False
        #: The claimed messages that did not fit. They must be given back.
        self.excess: list[Document] = []

    def latecomers(self) -> Plan[int]:
        """Include calls that arrived during the receive. Return how many messages they want."""
        if self.closed:
            return 0
        before = len(self._callers)
        yield from Latecomers(self._callers)  # the driver appends their limits to this list
        late = self._callers[before:]
        self._max_bytes += sum(each.bytes for each in late)
        self._exempt += len(late)
        return sum(each.messages for each in late)

    @property
    def taken_at_most(self) -> int:
        """An upper bound on the bytes taken."""
        return self._bytes + BATCH_BYTES * len(self._unmeasured)

    @property
    def left(self) -> int:
        """A lower bound on the bytes left."""
        if self._unmeasured and self._max_bytes - self.taken_at_most < BATCH_BYTES:
            # Little may be left, so measure the messages that counted as full batches so far.
            self._bytes += sum(size_of(each) for batch in self._unmeasured for each in batch)
            self._unmeasured = []
        return self._max_bytes - self.taken_at_most

    def wants_sizes(self, wanted: int) -> bool:
        """Return whether ``wanted`` messages of the queue may together exceed the limit."""
        return wanted > self._exempt and wanted * self._scan.largest_seen > self.left

    @property
    def takes_any(self) -> bool:
        """Whether the next message may have any size."""
        return self._exempt > 0 or self.left >= BATCH_BYTES

    def few(self, wanted: int) -> int:
        """Return how many of ``wanted`` messages are certain to fit, but at least 1."""
        return max(1, min(wanted, self.left // BATCH_BYTES))

    def begin(self) -> None:
        """Begin a claim: forget the sizes of the previous claim."""
        self.full, self._claim_bytes = False, None

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many messages of these sizes fit, in order. Remember the largest size."""
        if sizes:
            self._scan.largest_seen = max(sizes)
        left, taken = self.left, 0
        for place, size in enumerate(sizes):
            if taken + size > left and place >= self._exempt:
                self.full = True
                break
            taken += size
        else:
            place = len(sizes)
        self._claim_bytes = taken
        return place

    def cut(self, documents: list[Document]) -> list[Document]:
        """Return the first messages that fit. Add all following messages to ``excess``."""
        before = self._scan.largest_seen
        fits = self.fitting([size_of(each) for each in documents])
        # These messages are too few to lower the largest size that earlier claims have seen.
        self._scan.largest_seen = max(before, self._scan.largest_seen)
        self.excess += documents[fits:]
        return documents[:fits]

    def take_excess(self) -> list[Document]:
        """Return the excess messages, and clear the list."""
        excess, self.excess = self.excess, []
        return excess

    def add(self, documents: Sequence[Document]) -> None:
        """Count claimed messages that the receive keeps."""
        if not documents:
            return
        self._exempt -= len(documents)
        if self._claim_bytes is None:
            self._unmeasured.append(documents)
        else:
            self._bytes += self._claim_bytes


def read_claimed(
    limit: ByteLimit,
    mine: Filter,
    ids: Sequence[Any],
    expected: int,
    max_time_s: float | None,
) -> Plan[list[Document]]:
    """Read the messages of a claim in order, and return those that fit within the byte limit.

    Args:
        limit: The byte limit. Its ``excess`` gets the messages that do not fit.
        mine: Matches the messages that the claim holds.
        ids: The ids of the candidates of the claim, in order.
        expected: An upper bound on how many candidates the claim holds.
        max_time_s: Seconds that a command may take, or None for the client's time limit.
    """
    place: dict[Hashable, int] = {hashable_id(id): index for index, id in enumerate(ids)}

    def in_order(documents: list[Document]) -> list[Document]:
        return sorted(documents, key=lambda each: place[hashable_id(each["_id"])])

    read = yield from Find(mine, limit=len(ids), one_batch=True, max_time_s=max_time_s)
    read = in_order(read)
    if len(read) < expected:
        # Either the batch was full, or another process has taken messages since.
        held = in_order((yield from Find(mine, SIZED_CLAIMS, max_time_s=max_time_s)))
        known = {hashable_id(each["_id"]) for each in read}
        if any(hashable_id(each["_id"]) not in known for each in held):
            fits = limit.fitting([each.get("bytes", 0) for each in held])
            kept = {hashable_id(each["_id"]) for each in held[:fits]}
            absent = [each["_id"] for each in held[:fits] if hashable_id(each["_id"]) not in known]
            if absent:
                rest = {**mine, "_id": {"$in": absent}}
                read += yield from Find(rest, max_time_s=max_time_s)
            limit.excess += held[fits:]
            return in_order([each for each in read if hashable_id(each["_id"]) in kept])
    return limit.cut(read) if limit.left < BATCH_BYTES else read


def find_fitting(
    find: Find, max_bytes: int, number_of: Callable[[Document], int] = lambda document: 1
) -> Plan[list[Document]]:
    """Return the first documents whose total size is at most ``max_bytes``, but at least one.

    The server must read a document to measure it. So this measures a few documents first, and then
    as many as would fit if all documents had the same average size.

    Args:
        find: Finds the documents in order. Its limit counts messages; the last document may bring
            the number above the limit.
        max_bytes: The maximum total size of the documents.
        number_of: Returns how many messages a document has, at least 1. The projection of ``find``
            must include the fields that this function reads.

    Returns:
        The documents with the fields of the projection, and their sizes as ``bytes``.
    """
    fields = {**(find.projection or {}), **_SIZES}
    limit = FIRST_SIZES
    while True:
        some = replace(find, projection=fields, limit=min(limit, find.limit))
        found = yield from some
        sizes = list(accumulate(each.get("bytes", 0) for each in found))
        numbers = list(accumulate(map(number_of, found)))
        enough = bisect_left(numbers, find.limit) + 1
        fit = max(1, min(bisect_right(sizes, max_bytes), enough))
        if fit < len(found) or len(found) < some.limit or enough <= len(found):
            return found[:fit]
        alike = fit * max_bytes // max(1, sizes[-1])
        alike = min(alike, fit * find.limit // max(1, numbers[-1]))
        limit = min(alike + 1, SIZES_GROWTH * limit)
