"""How many bytes one receive may return, and how a claim keeps to that at little cost.

The size of a message is not at hand: the index that a claim scans does not contain it, and the
client gets documents that are decoded. To find it out costs time, so a claim does so only if its
messages may be too many bytes:

- The claim reads the sizes with its candidates if that many of the largest size that was seen
  lately do not fit, and takes only those that fit.
- It reads what it claimed as one batch of the server, which is ``BATCH_BYTES`` at most. If messages
  are missing in it, the claim reads the sizes of what it holds, and then the rest of what fits.
- If less than one such batch may be returned, it encodes what it read.

What does not fit is given back. A named claim may have thousands of messages, and reads its
candidates with their sizes, in steps that grow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

import bson

from pyqueue.backends.scan import BATCH_BYTES, ScanState
from pyqueue.documents import hashable_id
from pyqueue.payloads import OPTIONS
from pyqueue.requests import Document, Filter, Find, Latecomers, Plan

#: What a claim reads of its candidates. The index contains it.
CANDIDATES: Final[Mapping[str, object]] = {"_id": 1, "when": 1}
#: The same with the size, for which the server reads the documents.
SIZED_CANDIDATES: Final = {**CANDIDATES, "bytes": {"$bsonSize": "$$ROOT"}}
#: What is needed of a claimed message to give it back.
HELD_CLAIMS: Final[Mapping[str, object]] = {"_id": 1, "when": 1, "due": 1, "token": 1}
_SIZES: Final = {"_id": 1, "bytes": SIZED_CANDIDATES["bytes"]}
_SIZED_CLAIMS: Final = {**SIZED_CANDIDATES, **HELD_CLAIMS}
#: How many sizes a named claim reads first, and how many times as many in the next step.
FIRST_SIZES: Final = 10
SIZES_GROWTH: Final = 10


def size_of(document: Document) -> int:
    """Return the size of a stored document in bytes."""
    try:
        return len(bson.encode(document, codec_options=OPTIONS))
    except Exception:  # a validator of the user's model may have changed the payload
        return 0


class Limits(NamedTuple):
    """What one call receives at most."""

    messages: int
    #: One message is received even if it is larger.
    bytes: int


class ByteLimit:
    """How many more bytes a receive may take.

    Args:
        scan: what this process knows about the queue. It remembers the size of large messages.
        callers: the limits of the calls that receive together. Each may take one message whatever
            its size.
    """

    def __init__(self, scan: ScanState, callers: list[Limits]) -> None:
        self._scan = scan
        self._callers = callers
        self._max_bytes = sum(each.bytes for each in callers)
        #: How many messages the receive may take whatever their size.
        self._least = len(callers)
        #: The bytes that were taken, as far as they are known. The rest was read in batches of the
        #: server.
        self._bytes = 0
        self._unmeasured: list[Sequence[Document]] = []
        #: The size of what the current claim takes, if it is known.
        self._claim_bytes: int | None = None
        #: Whether a message was left because it did not fit.
        self.full = False
        #: Whether calls that come meanwhile have to wait.
        self.closed = False
        #: The claimed messages that did not fit. They have to be given back.
        self.excess: list[Document] = []

    def latecomers(self) -> Plan[int]:
        """Receive for the calls that came meanwhile, too. Return how many messages they want."""
        if self.closed:
            return 0
        before = len(self._callers)
        yield from Latecomers(self._callers)
        late = self._callers[before:]
        self._max_bytes += sum(each.bytes for each in late)
        self._least += len(late)
        return sum(each.messages for each in late)

    @property
    def taken_at_most(self) -> int:
        """An upper bound of the bytes that were taken."""
        return self._bytes + BATCH_BYTES * len(self._unmeasured)

    @property
    def left(self) -> int:
        """How many bytes are surely left."""
        if self._unmeasured and self._max_bytes - self.taken_at_most < BATCH_BYTES:
            self._bytes += sum(size_of(each) for batch in self._unmeasured for each in batch)
            self._unmeasured = []
        return self._max_bytes - self.taken_at_most

    def wants_sizes(self, wanted: int) -> bool:
        """Return whether so many messages of the queue may be too large together."""
        return wanted > self._least and wanted * self._scan.largest_seen > self.left

    @property
    def takes_any(self) -> bool:
        """Whether the next message may be taken whatever its size."""
        return self._least > 0 or self.left >= BATCH_BYTES

    def few(self, wanted: int) -> int:
        """Return how many messages fit, whatever their size; at least 1."""
        return max(1, min(wanted, self.left // BATCH_BYTES))

    def begin(self) -> None:
        """Begin a claim."""
        self.full, self._claim_bytes = False, None

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many of the first messages fit. Remember the size of the largest."""
        if sizes:
            self._scan.largest_seen = max(sizes)
        left, taken = self.left, 0
        for place, size in enumerate(sizes):
            if taken + size > left and place >= self._least:
                self.full = True
                break
            taken += size
        else:
            place = len(sizes)
        self._claim_bytes = taken
        return place

    def cut(self, documents: list[Document]) -> list[Document]:
        """Return the first messages, as many as fit. The rest has to be given back."""
        before = self._scan.largest_seen
        fits = self.fitting([size_of(each) for each in documents])
        self._scan.largest_seen = max(before, self._scan.largest_seen)  # these are only a few
        self.excess += documents[fits:]
        return documents[:fits]

    def take_excess(self) -> list[Document]:
        """Return what has to be given back, once."""
        excess, self.excess = self.excess, []
        return excess

    def add(self, documents: Sequence[Document]) -> None:
        """Count the messages of a claim that the receive keeps."""
        if not documents:
            return
        self._least -= len(documents)
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
    """Read the messages that a claim holds, as many of the first as fit.

    Args:
        limit: the limit. It gets the rest, which has to be given back.
        mine: the filter of what the claim holds.
        ids: the candidates of the claim, in order.
        expected: how many of them it holds at most.
        max_time_s: seconds that a command may take; None: the client's time limit.
    """
    place: dict[Hashable, int] = {hashable_id(id): index for index, id in enumerate(ids)}

    def in_order(documents: list[Document]) -> list[Document]:
        return sorted(documents, key=lambda each: place[hashable_id(each["_id"])])

    read = yield from Find(mine, limit=len(ids), one_batch=True, max_time_s=max_time_s)
    read = in_order(read)
    if len(read) < expected:
        # Either the batch was full, or another process took messages meanwhile.
        held = in_order((yield from Find(mine, _SIZED_CLAIMS, max_time_s=max_time_s)))
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


def find_fitting(find: Find, max_bytes: int) -> Plan[list[Document]]:
    """Return the ids of the first messages, as many as fit together; at least one.

    The server reads a message to find out its size. So this looks at few messages first, and then
    at as many as will fit if the rest is alike.
    """
    look = FIRST_SIZES
    while True:
        some = replace(find, projection=_SIZES, limit=min(look, find.limit))
        found = yield from some
        ends = list(accumulate(each.get("bytes", 0) for each in found))
        fit = max(1, bisect_right(ends, max_bytes))
        if fit < len(found) or len(found) < some.limit or some.limit == find.limit:
            return found[:fit]
        alike = fit * max_bytes // max(1, ends[-1])
        look = min(alike + 1, SIZES_GROWTH * look)
