"""Streams: append to a log.

An append inserts a pack at the *tail*, the position after the last message. The unique ``_id``
prevents a second pack there, and the second writer reads the tail again. A process learns a
tail only from an acknowledged append or from a read at majority. A fail-over could undo a tail that
only the primary knew, and leave a gap. A tail is used for a minute, and packs younger than 10
minutes are never deleted. So an append with an old tail fails, as its position is still taken.
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

#: The maximum size of a pack with several messages, in bytes.
MAX_PACK_BYTES: Final = 4 * 2**20
#: If the tail of an append is older than this, in seconds, its position may have been deleted.
LATE_S: Final = 120.0

#: An append fails only after other writers were faster this many times, even if its time is up.
MAX_OVERTAKEN: Final = 5


class Chunk(NamedTuple):
    """Messages that go into one pack, and their total size in bytes."""

    entries: list[RawBSONDocument]
    size: int


def _document(
    stream: str, first: int, now: datetime, nonce: str, type_name: str | None, chunk: Chunk
) -> RawBSONDocument:
    """Return the document of a pack; the module ``log`` explains its fields.

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
        stream: The name of the stream.
        codec: How payloads are stored.
        shape: The stream options that the caller gave. All users of the stream must agree on them.
        state: What this process remembers about the log.
        payloads: The payloads of the messages, in order.
        labels: The headers of each message, or None if it has none.
        limit_s: How long an append with an unknown outcome is tried again, in seconds.

    Raises:
        Unavailable: The outcome is unknown for some messages. The error text says how many are
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
            max_in_flight=1,  # concurrent appends would compete for the tail
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
            # If the outcome is unknown, further packs would have to wait for the same server.
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
    """The state of one append of a pack."""

    stream: str
    state: LogState
    chunk: Chunk
    #: When to give up, by the monotonic clock.
    end: float
    nonce: str = field(default_factory=new_token)
    #: The tail at which this appends, or None before it is known.
    known: Known | None = None
    #: The position of an insert with an unknown outcome, or None if there is none.
    unknown: int | None = None
    failure: Unavailable | None = None
    #: How many times another process appended first.
    overtaken: int = 0

    def check_time(self, mono: float) -> None:
        """Raise Unavailable if there is no time left to try again."""
        if mono < self.end:
            return
        if self.failure is not None:
            raise self.failure
        if self.overtaken >= MAX_OVERTAKEN:
            text = "other processes kept appending first, so nothing was stored; try again"
            raise Unavailable(f"stream {self.stream!r}: {text}")

    def was_stored(self) -> Plan[bool]:
        """Return whether an earlier insert of the pack has succeeded. If not, find the tail."""
        if self.unknown is not None:
            writer = yield from _nonce_at(self.stream, self.unknown)
            if writer == self.nonce:
                return True
            if writer is not None:  # this position is taken, so our insert can no longer succeed
                self.unknown = self.state.tail = None
        if self.unknown is None:
            self.known = yield from tail(self.stream, self.state)
        return False

    def is_late(self, mono: float, now: datetime) -> bool:
        """Return whether the pack of an unacknowledged insert may have been deleted by now."""
        if self.unknown is None:
            return False
        return self.known is None or self.known.age_s(mono, now) > TAIL_AGE_S

    def insert(self, first: int, document: RawBSONDocument) -> Plan[bool]:
        """Insert the pack at a position. Return whether it is now part of the log."""
        try:
            # The insert gets half of the time limit, so that another try is possible.
            refused = yield from Insert([document], majority=True, half_time=True)
        except Unavailable as error:
            self.failure, self.unknown = error, first
            return False
        if not refused:
            if (yield from _is_in_place(self.stream, first, self.nonce, self.known)):
                return True
            self.state.tail = self.unknown = None  # it came too late, and was deleted again
        elif isinstance(refused[0].error, Unavailable):
            self.failure, self.unknown = refused[0].error, first
        elif refused[0].field != "_id":
            raise refused[0].error
        elif self.unknown is None:
            self.state.tail = None  # another process was faster
            self.overtaken += 1
        # Otherwise the pack at this position may be ours. The next round checks that.
        return False

    def stored_at(self, first: int, mono: float, now: datetime) -> int:
        """Remember the new tail. Return the first position of the pack."""
        self.state.tail = Known(first + len(self.chunk.entries), mono, now)
        return first


def _append_pack(
    stream: str, type_name: str | None, state: LogState, limit_s: float, chunk: Chunk
) -> Plan[int]:
    """Append a pack. Return its first position.

    If the outcome of an insert is unknown, the nonce at its position shows whether it was stored.
    The insert can be repeated at the same position, because only one pack can be there.
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
                raise  # nothing was inserted yet
            append.failure = error
            continue
        if append.is_late(mono, now):  # the outcome of the insert will never be known
            append.end = mono  # so that the next check of the time raises the failure
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
    """Return whether an acknowledged pack is part of the log. If it is not, delete it.

    If a process sleeps after it has read the tail, packs may be deleted, and the process then
    appends below the first position of the log.

    Args:
        stream: The name of the stream.
        first: The position of the pack.
        nonce: The nonce of the pack.
        known: The tail at which it was appended, or None if it is unknown.
    """
    mono, now = yield from instants()
    if known is not None and known.age_s(mono, now) <= LATE_S:
        return True
    found = yield from Find({"_id": record_id(stream)}, {"first": 1}, limit=1, majority=True)
    if not found or found[0].get("first", 0) <= first:
        return True
    yield from Delete({"_id": pack_id(stream, first), "nonce": nonce})
    return False
