"""What users hold: messages, reservations, finished messages, counts and the options of a queue.

The envelope is a plain slots dataclass (a model would cost as much as a round trip); only payloads are validated.
This module knows how a stored document becomes a message, and does no I/O.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar

from bson import ObjectId

__all__ = [
    "KEPT",
    "NEVER",
    "UNCHANGED",
    "Backoff",
    "Counts",
    "Duration",
    "Finished",
    "Message",
    "QueueInfo",
    "QueueOptions",
    "Reservation",
    "State",
    "Unchanged",
    "hashable_id",
    "invalid_fields",
    "message_of",
    "state_of",
    "without_fields",
]

T = TypeVar("T")

#: A message's id: an ObjectId made by the client, or one of the caller's.
Id = ObjectId | str

#: Seconds, or a timedelta.
Duration = float | timedelta

State = Literal["scheduled", "ready", "reserved", "finished"]

#: How far a finished message is put behind the others: out of the range that claims look at, in order of finishing.
KEPT: Final = timedelta(days=2_556_698)  # 7000 years


#: The year from which on instants are pyqueue's own.
_BAND: Final = 8000

#: Up to here a number in floating point is exact.
_EXACT: Final = 1 << 53

#: What a message shows as its ``when`` if none is stored that could ever come.
NEVER: Final = datetime.max.replace(tzinfo=UTC)


class Unchanged:
    """The type of UNCHANGED: "leave the payload as it is" (None is a payload like any other)."""

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __reduce__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()


@dataclass(slots=True, eq=False)
class Message(Generic[T]):
    """A message as it was when it was read."""

    id: Id
    #: The name of the queue it is in.
    queue: str
    payload: T
    #: The caller's own labels; empty when there are none.
    headers: dict[str, str | int | float | bool]
    #: The message key; on a finished or dead message the key that it had.
    key: str | None
    #: Eligible since (or from): as pushed, rolled back or moved.
    when: datetime
    #: When it was first pushed.
    pushed: datetime
    #: How many times it was reserved from this queue, this one included.
    tries: int
    #: Why the last try failed: ``{type, message, at}``.
    error: dict[str, Any] | None
    #: What the holder last said of its work: ``{fraction, note, at}``.
    progress: dict[str, Any] | None
    #: What an earlier try left for this one.
    checkpoint: Any
    #: The last 20 queues it passed: ``{q, at}``.
    trail: list[dict[str, Any]]
    #: scheduled, ready, reserved or finished.
    state: State
    #: Where and why it was buried: ``{from, at, reason, tries, error}``; in a dead-letter queue only.
    dead: dict[str, Any] | None


@dataclass(slots=True, eq=False)
class Reservation(Message[T]):
    """A message held under a lease. It pickles, and can be settled in another process."""

    #: What makes this claim unlike any other: settling matches it.
    token: str
    #: The end of the lease; ``extend`` moves it.
    until: datetime
    #: Who holds it: the client's ``owner``.
    owner: str
    #: The length of the lease, in seconds.
    lease: float


@dataclass(slots=True, eq=False)
class Finished(Message[T]):
    """A finished message, from a queue with history."""

    #: popped, committed or removed.
    outcome: str
    #: When it was finished.
    processed: datetime


@dataclass(frozen=True, slots=True)
class Counts:
    """How many messages a queue has, by state. ``history`` is not part of ``total``."""

    ready: int = 0
    scheduled: int = 0
    reserved: int = 0
    history: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.ready + self.scheduled + self.reserved)


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One line of ``Client.queues()``."""

    name: str
    counts: Counts
    paused: bool


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before try n+1: ``base * factor ** (n - 1)``, at most ``maximum``, spread by ``jitter`` (a fraction).

    The spread keeps messages that failed together from coming back together.
    """

    base: float = 1
    factor: float = 2
    maximum: float = 3600
    jitter: float = 0.1

    def delay(self, tries: int) -> float:
        """Seconds to wait after the failure of try number ``tries``."""
        try:
            wait = min(self.maximum, self.base * self.factor ** max(0, tries - 1))
        except OverflowError:
            wait = self.maximum
        return wait * (1 + self.jitter * random.uniform(-1, 1))


#: What the fields of a stored message are. The others say nothing that anybody relies on, or may be anything.
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "_id": (ObjectId, str),
    "q": str,
    "when": datetime,
    "due": datetime,
    "pushed": datetime,
    "tries": (int, float),
    "headers": dict,
    "key": str,
    "last_key": str,
    "token": str,
    "owner": str,
    "error": dict,
    "progress": dict,
    "trail": list,
    "dead": dict,
    "processed": datetime,
    "outcome": str,
}


def invalid_fields(document: Mapping[str, Any]) -> list[str]:
    """The fields of a stored message that are not what pyqueue writes there, so that somebody else wrote them."""
    fields = _FIELDS
    wrong = [
        name
        for name, value in document.items()
        if name in fields and not isinstance(value, fields[name])
    ]
    tries = document.get("tries", 0)
    if "tries" not in wrong and (
        isinstance(tries, bool) or not -_EXACT < tries < _EXACT
    ):  # nor is NaN
        wrong.append("tries")
    if "due" in document and "due" not in wrong and document["due"].year >= _BAND:
        wrong.append("due")
    if "headers" in document and "headers" not in wrong:
        headers = document["headers"]
        if not all(isinstance(value, (str, int, float)) for value in headers.values()):
            wrong.append("headers")
    if "trail" in document and "trail" not in wrong and not all(map(_is_stop, document["trail"])):
        wrong.append("trail")
    if "dead" in document and "dead" not in wrong and not _is_death(document["dead"]):
        wrong.append("dead")
    return wrong


def hashable_id(id: Any) -> Hashable:
    """An id as a key: those that others wrote may be anything."""
    return id if isinstance(id, (ObjectId, str)) else repr(id)


def without_fields(document: Mapping[str, Any], wrong: Sequence[str]) -> dict[str, Any]:
    """A stored message without its faults."""
    return {name: value for name, value in document.items() if name == "_id" or name not in wrong}


def _is_stop(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("q"), str)
        and isinstance(value.get("at"), datetime)
    )


def _is_death(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("from"), str) and isinstance(value.get("at"), datetime)


def state_of(document: Mapping[str, Any], now: datetime) -> State:
    """The state of a stored message at an instant."""
    if "processed" in document:
        return "finished"
    if document.get("when", NEVER) <= now:
        return "ready"
    return "reserved" if "token" in document else "scheduled"


def message_of(
    document: Mapping[str, Any], payload: Any, now: datetime, *, lease: float | None = None
) -> Message[Any]:
    """The message that a stored document tells of: a Reservation if ``lease`` is given, else a Message or a Finished.

    What is not as it should be (``faults``) is for the caller to leave out; then this shows what stands for nothing there.
    """
    get = document.get
    when = get("when", NEVER)
    common = (
        document["_id"],
        get("q", ""),
        payload,
        get("headers") or {},
        get("key") or get("last_key")
        if "processed" in document or "dead" in document
        else get("key"),
        get("due", when),
        get("pushed", when),
        int(get("tries", 0)),
        get("error"),
        get("progress"),
        get("checkpoint"),
        get("trail") or [],
        state_of(document, now),
        get("dead"),
    )
    if lease is not None:
        return Reservation(*common, document["token"], when, get("owner", ""), lease)
    if "processed" in document:
        return Finished(*common, get("outcome", ""), document["processed"])
    return Message(*common)


class QueueOptions(TypedDict, total=False):
    """The options of ``Client.queue``."""

    lease: Duration
    max_tries: int | None
    dead_letter: str | None
    history: Duration | None
    backoff: Backoff
    poll: Duration
    kind: str
