"""Streams: append to a log.

An append inserts a pack at the *tail*, the position after the last message. The unique ``_id``
keeps out a second pack, whose writer then reads the tail again. A tail is known only from an
acknowledged append or from a read at majority: a fail-over could undo a tail that only the primary
knew, and leave a gap. A tail is used for a minute, and a pack younger than 10 minutes is never
deleted. So an append with an old tail meets the pack that is already at that position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

import bson
from bson.raw_bson import RawBSONDocument

from pyqueue.backends.streams.log import (
    MAX_PACK,
    TAIL_AGE_S,
    Known,
    LogState,
    ensure,
    instants,
    pack_id,
    tail,
)
from pyqueue.backends.streams.retention import retain
from pyqueue.backends.transitions import new_token, record_id
from pyqueue.errors import QueueError, Unavailable
from pyqueue.payloads import OPTIONS, Codec, each_of, encode
from pyqueue.requests import (
    Coalesce,
    Delete,
    Document,
    Find,
    Insert,
    MonotonicTime,
    Plan,
    ServerTime,
    Signal,
)

#: The most bytes of a pack of several messages.
MAX_PACK_BYTES: Final = 4 * 2**20
#: An append with a tail older than this, in seconds, checks whether its position was deleted.
LATE_S: Final = 120.0

#: Even if its time is up, an append gives up only after other writers were faster this many times.
MAX_OVERTAKEN: Final = 5


class Chunk(NamedTuple):
    """Messages that go into one pack."""

    entries: list[RawBSONDocument]
    size: int


def _document(
    stream: str, first: int, now: datetime, nonce: str, type_name: str | None, chunk: Chunk
) -> RawBSONDocument:
    """Return the document of a pack; ``log`` explains its fields.

    ``nonce``: a value that only this append has.
    """
    document: Document = {"_id": pack_id(stream, first), "q": f"~log:{stream}", "s": first}
    document |= {"n": len(chunk.entries), "z": chunk.size, "pushed": now, "nonce": nonce}
    if type_name is not None:
        document["type"] = type_name
    document["b"] = chunk.entries
    return RawBSONDocument(bson.encode(document, codec_options=OPTIONS))


def append(
    stream: str,
    codec: Codec[Any],
    shape: Mapping[str, object],
    state: LogState,
    payloads: Sequence[Any],
    *,
    labels: Sequence[Mapping[str, Any] | None],
    limit_s: float,
) -> Plan[list[int]]:
    """Append messages. Return their positions.

    Args:
        stream: the name of the stream.
        codec: how payloads are stored.
        shape: the options of the record that the caller gave.
        state: the state of the log in this process.
        payloads: the payloads.
        labels: the headers of each message.
        limit_s: how long an append with an unknown outcome is tried again, in seconds.

    Raises:
        Unavailable: the outcome is unknown for some messages. The error text says how many are
            certainly stored.
    """
    chunks = _chunks(codec, payloads, labels)
    yield from ensure(stream, shape)
    positions: list[int] = []
    batch = partial(_append_chunks, stream, codec.name, state, limit_s)
    for chunk in chunks:
        answer = yield from Coalesce(
            ("append", stream, codec.name),
            chunk,
            batch,
            size=chunk.size,
            max_in_flight=1,  # concurrent appends of one process would compete for the tail
        )
        if isinstance(answer, Unavailable) and positions:
            text = f"{answer}; the first {len(positions)} messages are stored, up to position "
            raise Unavailable(f"{text}{positions[-1]}") from answer
        if isinstance(answer, QueueError):
            raise type(answer)(str(answer)) from answer  # each caller gets its own error
        positions += range(answer, answer + len(chunk.entries))
    return positions


def _chunks(
    codec: Codec[Any], payloads: Sequence[Any], labels: Sequence[Mapping[str, Any] | None]
) -> list[Chunk]:
    """Encode messages, and divide them into chunks that each fit in a pack."""
    rows = zip(each_of(codec.dump, payloads), labels, strict=True)
    bodies = [{"p": value, "h": some} if some else {"p": value} for value, some in rows]
    encoded = each_of(encode, bodies)
    chunks: list[Chunk] = []
    entries: list[RawBSONDocument] = []
    size = 0
    for entry in encoded:
        if entries and (len(entries) == MAX_PACK or size + len(entry.raw) > MAX_PACK_BYTES):
            chunks.append(Chunk(entries, size))
            entries, size = [], 0
        entries.append(entry)
        size += len(entry.raw)
    return [*chunks, Chunk(entries, size)] if entries else chunks


def _append_chunks(
    stream: str,
    type_name: str | None,
    state: LogState,
    limit_s: float,
    chunks: Sequence[Chunk],
) -> Plan[list[int | QueueError]]:
    """Append the chunks of several callers, in as few packs as possible."""
    answers: list[int | QueueError] = []
    while (done := len(answers)) < len(chunks):
        sharing = 0  # how many chunks share the next pack
        entries: list[RawBSONDocument] = []
        size = 0
        for each in chunks[done:]:
            full = len(entries) + len(each.entries) > MAX_PACK or size + each.size > MAX_PACK_BYTES
            if sharing and full:
                break
            sharing += 1
            entries += each.entries
            size += each.size
        try:
            pack = Chunk(entries, size)
            first = yield from _append_pack(stream, type_name, state, limit_s, pack)
        except QueueError as error:
            # After an unknown outcome, further packs would wait for the same server.
            failed = len(chunks) - done if isinstance(error, Unavailable) else sharing
            answers += [error] * failed
            continue
        for each in chunks[done : done + sharing]:
            answers.append(first)
            first += len(each.entries)
    if any(isinstance(answer, int) for answer in answers):
        yield from Signal(stream, (yield from ServerTime()))
        yield from retain(stream, state)
    return answers


@dataclass(slots=True)
class _Append:
    """A pack that is being appended to the log."""

    stream: str
    state: LogState
    chunk: Chunk
    #: When to give up, by the monotonic clock.
    end: float
    nonce: str = field(default_factory=new_token)
    #: The tail of the log, as this process last read it.
    known: Known | None = None
    #: The position of an insert with an unknown outcome.
    unknown: int | None = None
    failure: Unavailable | None = None
    #: How many times another process appended first.
    overtaken: int = 0

    def check_time(self, mono: float) -> None:
        """Raise Unavailable if the time to try again is over."""
        if mono < self.end:
            return
        if self.failure is not None:
            raise self.failure
        if self.overtaken >= MAX_OVERTAKEN:
            text = "other processes kept appending first, so nothing was stored; try again"
            raise Unavailable(f"stream {self.stream!r}: {text}")

    def was_stored(self) -> Plan[bool]:
        """Return whether the append is in the log. If no part of it is stored, find the tail."""
        if self.unknown is not None:
            writer = yield from _nonce_at(self.stream, self.unknown)
            if writer == self.nonce:
                return True
            if writer is not None:  # the position is taken, so our insert can no longer arrive
                self.unknown = self.state.tail = None
        if self.unknown is None:
            self.known = yield from tail(self.stream, self.state)
        return False

    def is_late(self, mono: float, now: datetime) -> bool:
        """Return whether the position of an unacknowledged insert may have been deleted by now."""
        if self.unknown is None:
            return False
        return self.known is None or self.known.age_s(mono, now) > TAIL_AGE_S

    def insert(self, first: int, document: RawBSONDocument) -> Plan[bool]:
        """Insert the pack at a position. Return whether it is part of the log."""
        try:
            # In half of the time limit, so that another try is possible.
            refused = yield from Insert([document], majority=True, half_time=True)
        except Unavailable as error:
            self.failure, self.unknown = error, first
            return False
        if not refused:
            if (yield from _is_in_place(self.stream, first, self.nonce, self.known)):
                return True
            self.state.tail = self.unknown = None  # it was too late, and is deleted again
        elif isinstance(refused[0].error, Unavailable):
            self.failure, self.unknown = refused[0].error, first
        elif refused[0].field != "_id":
            raise refused[0].error
        elif self.unknown is None:
            self.state.tail = None  # another process was faster
            self.overtaken += 1
        # Otherwise the pack at this position may be ours: the next round checks.
        return False

    def stored_at(self, first: int, mono: float, now: datetime) -> int:
        """Remember the new tail. Return the first position."""
        self.state.tail = Known(first + len(self.chunk.entries), mono, now)
        return first


def _append_pack(
    stream: str, type_name: str | None, state: LogState, limit_s: float, chunk: Chunk
) -> Plan[int]:
    """Append a pack. Return its first position.

    If the outcome of an insert is unknown, the nonce at its position says whether it was stored.
    The same pack may be inserted there again: the position takes only one pack.
    """
    append = _Append(stream, state, chunk, (yield from MonotonicTime()) + limit_s)
    first = 0
    while True:
        mono, now = yield from instants()
        append.check_time(mono)
        try:
            if (yield from append.was_stored()) and append.unknown is not None:
                return append.stored_at(append.unknown, mono, now)
        except Unavailable as error:
            if append.unknown is None:
                raise  # no part of it is stored
            append.failure = error
            continue
        if append.is_late(mono, now):  # the outcome of the insert will never be known
            append.end = mono  # so the next check of the time raises its failure
            continue
        if append.unknown is None and append.known is not None:
            first = append.known.position
        document = _document(stream, first, now, append.nonce, type_name, chunk=chunk)
        if (yield from append.insert(first, document)):
            return append.stored_at(first, *(yield from instants()))


def _nonce_at(stream: str, position: int) -> Plan[object]:
    """Return the nonce of the pack at a position, or None if there is no pack."""
    match = {"_id": pack_id(stream, position)}
    found = yield from Find(match, {"nonce": 1}, limit=1, majority=True)
    return found[0].get("nonce", "") if found else None


def _is_in_place(stream: str, first: int, nonce: str, known: Known | None) -> Plan[bool]:
    """Return whether an acknowledged pack is part of the log; delete it if it is not.

    A process that slept after it learned the tail may have appended where packs were deleted.

    Args:
        stream: the name of the stream.
        first: the position of the pack.
        nonce: the nonce of the pack.
        known: the tail at which it was appended, or None if it is unknown.
    """
    mono, now = yield from instants()
    if known is not None and known.age_s(mono, now) <= LATE_S:
        return True
    found = yield from Find({"_id": record_id(stream)}, {"first": 1}, limit=1, majority=True)
    if not found or found[0].get("first", 0) <= first:
        return True
    yield from Delete({"_id": pack_id(stream, first), "nonce": nonce})
    return False
