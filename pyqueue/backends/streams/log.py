"""Streams: the packs of a log, and how they are read.

A log is a sequence of *packs*. A pack is one document, which never changes in a live stream::

    _id     "~log:NAME~%016d": the position of its first message
    q       "~log:NAME"; there is no ``when``, so no claim and no count of a queue finds the pack
    s, n    the position of its first message, and how many messages it has
    z       the total size of its messages, in bytes
    pushed  when it was appended;  type: the name of the model
    nonce   distinguishes the writer of this pack from a writer that aimed at the same position
    b       the messages: {p: payload, h: headers}; missing once the stream was deleted

Positions are contiguous, and a pack is read only once a majority of the members has stored it. So
once a reader has seen a position, no message appears below it later.

``first`` in the record of the stream is the first position that is still read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyqueue import arguments
from pyqueue.backends.namespace import STREAM, kind_of
from pyqueue.backends.transitions import record_id
from pyqueue.error_records import error_record
from pyqueue.errors import ConfigurationError
from pyqueue.facts import ErrorInfo
from pyqueue.limits import Limit, shown
from pyqueue.messages import MAX_RECEIVED_BYTES, StreamMessage
from pyqueue.payloads import Codec
from pyqueue.requests import Document, EnsureQueue, Filter, Find, MonotonicTime, Plan, ServerTime

#: The maximum number of messages in a pack.
MAX_PACK: Final = 1000
#: How long a process uses a tail that it knows, in seconds.
TAIL_AGE_S: Final = 60.0
#: The maximum number of packs, and of bytes, to read at once. If a page has fewer of both, it
#: reaches the end of the log.
_PAGE: Final = 100
_PAGE_BYTES: Final = 8 * 2**20
#: A number that is larger than every position.
END: Final = 10**16 - 1

ASCENDING: Final = (("_id", 1),)
DESCENDING: Final = (("_id", -1),)
#: The fields that determine the positions of a pack.
PLACE: Final = {"s": 1, "n": 1}


class Known(NamedTuple):
    """A tail, and the time when it was read, by the monotonic clock and by the primary's clock."""

    position: int
    mono: float
    at: datetime

    def age_s(self, mono: float, now: datetime) -> float:
        """Return the seconds since the tail was read, by the clock that shows more.

        The monotonic clock may stop while a machine sleeps, and the primary's clock may be set.
        """
        return max(mono - self.mono, abs((now - self.at).total_seconds()))


class LogState:
    """What a process remembers about a log between calls."""

    def __init__(self) -> None:
        self.tail: Known | None = None
        #: Whether the name is known to belong to a stream.
        self.checked = False
        #: When to check for packs to delete, by the monotonic clock.
        self.retain_at = float("-inf")


class Pack(NamedTuple):
    """A pack of messages as it was read from the log."""

    first: int
    entries: Sequence[Mapping[str, Any]]
    pushed: datetime
    size: int

    @property
    def end(self) -> int:
        """The position after its last message."""
        return self.first + len(self.entries)

    def entry(self, position: int) -> Mapping[str, Any]:
        """Return the stored message at a position."""
        return self.entries[position - self.first]


# ---- documents


def pack_id(stream: str, position: int) -> str:
    """Return the _id of the pack that begins at a position."""
    return f"~log:{stream}~{position:016d}"


def packs_between(stream: str, low: int = 0, high: int = END) -> Filter:
    """Return the filter that matches the packs that begin at ``low`` or later, before ``high``."""
    return {"_id": {"$gte": pack_id(stream, low), "$lt": pack_id(stream, high)}}


def _readable(stream: str, low: int, high: int) -> Filter:
    """Return the same filter, but only for packs that still have their messages."""
    return {**packs_between(stream, low, high), "b": {"$exists": True}}


def _pack(document: Document) -> Pack:
    """Return the pack that a document stores."""
    return Pack(int(document["s"]), document["b"], document["pushed"], document["z"])


def message_at(stream: str, codec: Codec[Any], pack: Pack, position: int) -> StreamMessage[Any]:
    """Return the message at a position of a pack."""
    entry = pack.entry(position)
    payload = codec.load(entry["p"])
    headers = dict(entry.get("h") or {})
    id, pushed = f"{stream}~{position}", pack.pushed
    return StreamMessage(
        id=id,
        queue=stream,
        payload=payload,
        headers=headers,
        key=None,
        when=pushed,
        pushed=pushed,
        tries=0,
        error=None,
        progress=None,
        checkpoint=None,
        trail=[],
        state="ready",
        dead=None,
        position=position,
    )


def ensure(stream: str, shape: Mapping[str, object]) -> Plan[None]:
    """Create the record of a stream if it is missing.

    Raises:
        ConfigurationError: A queue has this name, or the stream has other options than ``shape``.
    """
    stored_kind = yield from EnsureQueue(stream, STREAM, None, shape)
    _refuse_queue(stream, stored_kind)


def require_limit(stream: str, limit: Limit) -> None:
    """Refuse a limit that a stream does not support.

    Raises:
        ConfigurationError: The limit has ``concurrency`` or ``per``.
    """
    for name in ("concurrency", "per"):
        if getattr(limit, name) is not None:
            raise ConfigurationError(
                f"limit.{name}: stream {stream!r} does not support {name}; set only rate"
            )


def check(stream: str, state: LogState) -> Plan[None]:
    """Check that the name does not belong to a queue. Create no record.

    Raises:
        ConfigurationError: A queue has this name.
    """
    if not state.checked:
        stored_kind = yield from kind_of(stream)  # None if there is no record yet
        _refuse_queue(stream, stored_kind or STREAM)
        state.checked = True


def _refuse_queue(stream: str, stored_kind: str) -> None:
    """Raise ConfigurationError if the record with this name belongs to a queue."""
    if stored_kind != STREAM:
        raise ConfigurationError(
            f"name: {stream!r} is a queue of kind {stored_kind!r}; open it with client.queue(), "
            "delete it with client.delete_queue(), or use another name for the stream"
        )


# ---- the ends of a log


def bounds(stream: str) -> Plan[tuple[int, int]]:
    """Return the first position that can be read, and the tail. In an empty log they are equal."""
    either = [{"_id": record_id(stream)}, packs_between(stream)]
    fields = {"first": 1, **PLACE}
    # In descending order, the record, "~queue:...", precedes the packs, "~log:...".
    found = yield from Find({"$or": either}, fields, sort=DESCENDING, limit=2, majority=True)
    # Only a pack has ``n``. In the record, a missing ``first`` means 0.
    first = next((each.get("first", 0) for each in found if "n" not in each), 0)
    end = next((each["s"] + each["n"] for each in found if "n" in each), 0)
    return first, max(first, end)


def first_position(stream: str) -> Plan[int]:
    """Return the position of the first message that can be read, or the tail of an empty log."""
    first, end = yield from bounds(stream)
    found = yield from Find(
        packs_between(stream, first), PLACE, sort=ASCENDING, limit=1, majority=True
    )
    return found[0]["s"] if found else end


def tail(stream: str, state: LogState) -> Plan[Known]:
    """Return the position after the last message. Read it if the known one is missing or old."""
    mono, now = yield from instants()
    known = state.tail
    if known is None or known.age_s(mono, now) > TAIL_AGE_S:
        _, position = yield from bounds(stream)
        known = state.tail = Known(position, mono, now)
    return known


def instants() -> Plan[tuple[float, datetime]]:
    """Return the time by the monotonic clock and by the primary's clock."""
    return (yield from MonotonicTime()), (yield from ServerTime())


def position_at(stream: str, start: object) -> Plan[int]:
    """Return the position that "first", "last", an instant or a position stands for.

    An instant stands for the beginning of the first pack that was appended then or later.
    """
    instant = check_start(start)
    if instant is None:
        if isinstance(start, int):
            return start
        if start == "first":
            return (yield from first_position(stream))
        return (yield from bounds(stream))[1]
    # Bisect: packs below ``low`` are older than the instant, and packs from ``high`` on are not.
    low = yield from first_position(stream)
    _, high = yield from bounds(stream)
    while low < high:
        middle = (low + high) // 2
        found = yield from Find(
            packs_between(stream, 0, middle + 1),
            {**PLACE, "pushed": 1},
            sort=DESCENDING,
            limit=1,
            majority=True,
        )
        if found and found[0]["pushed"] >= instant:
            high = max(low, found[0]["s"])
        else:
            low = max(middle + 1, found[0]["s"] + found[0]["n"] if found else 0)
    return low


def check_start(start: object) -> datetime | None:
    """Check a value that stands for a position. Return it if it is an instant, and None if not.

    Raises:
        ConfigurationError: The value is not "first", "last", an instant or a position.
    """
    if isinstance(start, datetime):
        return arguments.instant("start", start)
    if not isinstance(start, str) or start not in ("first", "last"):
        position_argument("start", start)
    return None


def position_argument(name: str, value: object) -> int:
    """Check a position, and return it.

    Raises:
        ConfigurationError: The value is not a position.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < END:
        remedy = f"a position from 0 to {END - 1}"
        if name == "start":
            remedy = f'"first", "last", an aware datetime, or {remedy}'
        text = f"{name}: {shown(value)} is not allowed; use {remedy}"
        raise ConfigurationError(text)
    return value


# ---- read


def fetch(
    stream: str, low: int, high: int, *, limit: int = END, max_bytes: int = MAX_RECEIVED_BYTES
) -> Plan[list[Pack]]:
    """Return the packs with messages from ``low`` up to, but not including, ``high``.

    Return only packs that a majority has stored. Stop after ``limit`` messages or ``max_bytes``,
    but not before the first pack.
    """
    packs: list[Pack] = []
    size = number = 0
    while low < high and number < limit and size < max_bytes:
        page = yield from Find(
            _readable(stream, low, high),
            sort=ASCENDING,
            limit=_PAGE,
            one_batch=True,
            majority=True,
        )
        if not packs and low > 0 and not (page and page[0]["s"] == low):
            # A pack that begins before ``low`` may contain it.
            page = [*(yield from _pack_over(stream, low)), *page]
        if not page:
            break
        for document in page:
            if packs and (number >= limit or size >= max_bytes):
                return packs
            pack = _pack(document)
            packs.append(pack)
            size += pack.size
            number += pack.end - max(low, pack.first)
            low = pack.end
        if len(page) < _PAGE and sum(each["z"] for each in page) < _PAGE_BYTES:
            break  # the page was not cut short, so the log ends here
    return packs


def _pack_over(stream: str, position: int) -> Plan[list[Document]]:
    """Return a list of the pack that begins before a position and contains it, or an empty list."""
    before = _readable(stream, max(0, position - MAX_PACK + 1), position)
    found = yield from Find(before, sort=DESCENDING, limit=1, majority=True)
    return [each for each in found if each["s"] + each["n"] > position]


def read(
    stream: str, codec: Codec[Any], state: LogState, after: object, limit: int
) -> Plan[list[StreamMessage[Any]]]:
    """Return messages in the order of positions, after ``after`` or from the first one on."""
    arguments.count("limit", limit)
    start = 0 if after is None else position_argument("after", after) + 1
    yield from check(stream, state)
    packs = yield from fetch(stream, start, END, limit=limit)
    now = yield from ServerTime()
    found: list[StreamMessage[Any]] = []
    for pack in packs:
        for position in range(max(start, pack.first), pack.end):
            if len(found) == limit:
                return found
            found.append(_message_or_misfit(stream, codec, pack, position, now))
    return found


def message(stream: str, codec: Codec[Any], position: int) -> Plan[StreamMessage[Any] | None]:
    """Return the message at a position, or None if the stream has no message there."""
    packs = yield from fetch(stream, position, position + 1, limit=1)
    now = yield from ServerTime()
    for pack in packs:
        if pack.first <= position < pack.end:
            return _message_or_misfit(stream, codec, pack, position, now)
    return None


def _message_or_misfit(
    stream: str, codec: Codec[Any], pack: Pack, position: int, now: datetime
) -> StreamMessage[Any]:
    """Return a message. If it does not fit the model, it has the raw payload and the error."""
    try:
        return message_at(stream, codec, pack, position)
    except Exception as misfit:  # the validators of a model are user code
        message = message_at(stream, Codec(), pack, position)
        message.error = ErrorInfo.of(error_record(misfit, now))
        return message
