"""Facts about a message and its tries: errors, attempts, progress, burials and gathers.

Release 0.1 returned an error, a progress and a burial as the stored dict. Programs may still read
them by the stored names, as in ``message.dead["from"]``, so these classes are also mappings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, Self

from bson import ObjectId

#: The longest time for which the end of a message is kept for a client: 30 days, in seconds.
MAX_KEEP_S: Final = 30 * 86_400.0
_CENTURY_S: Final = 100 * 366 * 86_400.0


@dataclass(frozen=True, slots=True, eq=False)
class _Stored(Mapping[str, Any]):
    """A value that can also be read as the mapping of its stored fields."""

    #: The stored fields, keyed by their stored names.
    stored: Mapping[str, Any] = field(repr=False, kw_only=True)

    def __getitem__(self, name: str) -> Any:
        return self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def as_stored(fact: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the stored fields of a value."""
    return None if fact is None else dict(fact)


@dataclass(frozen=True, slots=True, eq=False)
class ErrorInfo(_Stored):
    """Why a try failed."""

    #: The name of the class of the exception, or "error" if the error was given as a str.
    type: str
    #: The text of the error, up to 2 KB.
    message: str
    at: datetime | None
    #: The place in the code, as "module:function:line", or None if it is unknown.
    where: str | None
    #: A short hash. Errors of one type and place have equal fingerprints, and so have texts that
    #: differ only in numbers. None if release 0.1 stored the error.
    fp: str | None
    #: The innermost calls of the traceback, one per line, in the form of ``where``.
    trace: str | None

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Self | None:
        """Return the error with these stored fields."""
        if stored is None:
            return None
        get = stored.get
        return cls(
            type=get("type", ""),
            message=get("message", ""),
            at=get("at"),
            where=get("where"),
            fp=get("fp"),
            trace=get("trace"),
            stored=stored,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Progress(_Stored):
    """How far the work on a message has come, as a holder stored it."""

    #: How much of the work is done, from 0 to 1.
    fraction: float
    note: str | None
    at: datetime | None

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Self | None:
        """Return the progress with these stored fields."""
        if stored is None:
            return None
        get = stored.get
        return cls(get("fraction", 0.0), get("note"), get("at"), stored=stored)


@dataclass(frozen=True, slots=True, eq=False)
class Burial(_Stored):
    """Where a message in a dead-letter queue came from, and why it was buried."""

    #: The name of the queue or stream that the message came from, stored as ``from``.
    queue: str
    at: datetime | None
    #: "tries" (no try was left), "buried" (a program asked for it) or "invalid" (unusable payload).
    reason: str
    #: How many times the message was tried in that queue.
    tries: int
    error: ErrorInfo | None
    #: For a message of a stream: the consumer group that buried it, and its position.
    group: str | None
    position: int | None

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> Self | None:
        """Return the burial with these stored fields."""
        if stored is None:
            return None
        get = stored.get
        error = get("error")
        return cls(
            queue=get("from", ""),
            at=get("at"),
            reason=get("reason", ""),
            tries=get("tries", 0),
            error=ErrorInfo.of(error if isinstance(error, Mapping) else None),
            group=get("group"),
            position=get("position"),
            stored=stored,
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """A try that failed."""

    #: The number of the try. A try whose lease ran out is not recorded, so its number is missing.
    number: int
    #: When it failed.
    at: datetime | None
    #: The label of the client that held the message.
    owner: str
    #: How long that client held the message, in seconds.
    seconds: float
    #: The type and the fingerprint of the error, and the first 200 characters of its text.
    type: str
    fp: str | None
    message: str

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Return the try with these stored fields."""
        get = stored.get
        return cls(
            number=get("number", 0),
            at=get("at"),
            owner=get("owner", ""),
            seconds=get("seconds", 0.0),
            type=get("type", ""),
            fp=get("fp"),
            message=get("message", ""),
        )


class Keep(NamedTuple):
    """How a message is kept once it has ended."""

    #: How many seconds it is kept for a client that waits for its result. None: no client waits.
    result: float | None
    #: The topic on which that client hears of the end.
    topic: str | None = None
    #: How many seconds its message key stays taken after the end. None: the key is free at once.
    unique: float | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self | None:
        """Return how a stored message is to be kept, or None if it has no valid fields for this."""
        keep = document.get("keep")
        stored: Mapping[str, Any] = keep if isinstance(keep, Mapping) else {}
        result, topic = _seconds(stored.get("result")), stored.get("topic")
        if result is None or result > MAX_KEEP_S or not isinstance(topic, str):
            result = topic = None
        unique = _seconds(document.get("unique"))
        return None if result is None and unique is None else cls(result, topic, unique)

    def stored(self) -> dict[str, Any]:
        """Return these settings as the fields of a stored message."""
        fields: dict[str, Any] = {}
        if self.result is not None:
            fields["keep"] = {"result": self.result, "topic": self.topic}
        if self.unique is not None:
            fields["unique"] = self.unique
        return fields


def _seconds(value: object) -> float | None:
    """Return a stored length of time in seconds, or None if the value is invalid."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 < value <= _CENTURY_S else None


#: Whether a dead letter stays in its gather ("hold"), or leaves it like a finished message ("end").
WhenDead = Literal["hold", "end"]


@dataclass(slots=True)
class Gather:
    """A set of messages that ends when all of them have ended; see ``Client.gather``.

    Pass it as ``gather=`` to ``Queue.push``.
    """

    #: The id of the final message, which is pushed once all messages of the gather have ended.
    id: ObjectId | str
    #: Whether a dead letter holds the gather open ("hold"), or counts as ended ("end").
    dead: WhenDead
    #: The namespace and database of the creating client, or None if it comes from a reservation.
    home: tuple[str, object] | None = field(default=None, repr=False, compare=False)
    #: Whether this object no longer accepts messages, because its block has ended.
    sealed: bool = field(default=False, repr=False, compare=False)
    #: Whether a push to it failed, so that some of its messages may be missing.
    failed: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def of(cls, stored: object) -> Self | None:
        """Return the gather in a stored field, or None if the field has another value."""
        if not isinstance(stored, Mapping):
            return None
        id, dead = stored.get("id"), stored.get("dead")
        if not isinstance(id, (ObjectId, str)) or dead not in ("hold", "end"):
            return None
        return cls(id, dead)

    def stored(self) -> dict[str, Any]:
        """Return the gather as a stored field."""
        return {"id": self.id, "dead": self.dead}

    def __reduce__(self) -> tuple[type[Gather], tuple[ObjectId | str, str]]:
        # Without its home, which may be a URL with a password.
        return Gather, (self.id, self.dead)


def kept_s(history_s: float | None, keep: Keep | None) -> float | None:
    """Return for how many seconds a finished message is kept, or None if it is deleted at once.

    Args:
        history_s: The ``history`` of its queue in seconds, or None.
        keep: How the producer asked to keep the message, or None.
    """
    if keep is None or keep.result is None:
        return history_s
    return max(history_s or 0.0, keep.result)
