"""The errors of pyqueue: one tree, so that ``except QueueError`` catches them all.

::

    QueueError
    ├── LeaseLost            another consumer may hold the message now
    ├── JobFailed            a message for which the program waited has failed
    ├── DuplicateKey         the key or the id is taken
    ├── QueueClosed          the client was closed
    ├── Unavailable          the server did not answer in time, or the outcome is unknown
    │   ├── Disconnected     a connection failed, or no member is primary
    │   └── TimedOut         a command took longer than its time limit
    ├── Fenced               another process took over the claim group
    ├── ConfigurationError   an argument, an option or the set-up is wrong    (also a ValueError)
    ├── InvalidName          the name of a queue or namespace is not allowed  (also a ValueError)
    └── InvalidMessage       the payload cannot be stored                     (also a ValueError)

Errors have the details that a handler needs as attributes. They never contain credentials.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any

__all__ = [
    "ConfigurationError",
    "Disconnected",
    "DuplicateKey",
    "Fenced",
    "InvalidMessage",
    "InvalidName",
    "JobFailed",
    "LeaseLost",
    "QueueClosed",
    "QueueError",
    "TimedOut",
    "Unavailable",
]


def first_ten(values: Sequence[object]) -> str:
    """Return a list for the text of an error: the first ten values, and "..." if there are more."""
    more = ["..."] if len(values) > 10 else []
    return f"[{', '.join([*map(repr, values[:10]), *more])}]"


class QueueError(Exception):
    """The base of every error that pyqueue raises."""


class LeaseLost(QueueError):
    """The reservation is no longer held: its lease ended, or it was already settled.

    ``lost`` and ``unknown`` are tuples of reservations. The call did not change the messages in
    ``lost``. The messages in ``unknown`` are gone or were moved, by this call or by another holder.
    This can happen if the call had several reservations, or if the connection failed.
    """

    def __init__(
        self, message: str, *, lost: Sequence[Any] = (), unknown: Sequence[Any] = ()
    ) -> None:
        super().__init__(message)
        self.lost = tuple(lost)
        self.unknown = tuple(unknown)


class JobFailed(QueueError):
    """A message for which a client waited has ended without success.

    ``reason`` is "dead" (the message was buried), "removed", "cancelled", "expired", or "gone" (no
    queue has the message, and its end was not kept). ``job`` is the message, or None if it is gone.
    """

    def __init__(self, message: str, *, reason: str, job: Any = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.job = job


class DuplicateKey(QueueError):
    """A live message of the queue has this key, or another message has this id.

    ``keys`` and ``ids`` list the keys and ids that are taken. In a batch, all other messages were
    written, and ``written`` lists their ids.
    """

    def __init__(
        self,
        message: str,
        *,
        keys: Sequence[str] = (),
        ids: Sequence[Any] = (),
        written: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.keys = list(keys)
        self.ids = list(ids)
        self.written = [id for id in written if id is not None]


class QueueClosed(QueueError):
    """The client was closed."""


class Unavailable(QueueError):
    """The server did not answer in time, so the outcome is unknown.

    ``ids`` lists the messages whose outcome is unknown. A push can be repeated with the same id: it
    never stores a second message. A settlement can be repeated, too: it raises LeaseLost if the
    first call worked.
    """

    def __init__(self, message: str, *, ids: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.ids = list(ids)


class Fenced(QueueError):
    """Another run of the claim group took over. This run wrote nothing, and must stop."""


class ConfigurationError(QueueError, ValueError):
    """An argument, an option or the set-up of the server is wrong. The text names the remedy."""


class InvalidName(QueueError, ValueError):
    """The name of a queue or namespace is not allowed. The text lists the allowed characters."""


class InvalidMessage(QueueError, ValueError):
    """The payload is not BSON, is too large or does not fit the model. Nothing was written."""


class TimedOut(Unavailable):
    """A command took longer than its time limit. It may have waited for an open transaction."""


class Disconnected(Unavailable):
    """A connection failed, or no member is primary. Another try may succeed."""


class Occupied(Fenced):
    """Another process runs the claim group or writes the stage. Internal: this process stands by.

    ``owner`` is the label of that process. If it does not renew its lease, it counts as dead after
    ``until``, which is ``wait_s`` seconds from now.
    """

    def __init__(
        self, message: str, *, owner: str = "", until: datetime | None = None, wait_s: float = 0
    ) -> None:
        super().__init__(message)
        self.owner = owner
        self.until = until
        self.wait_s = wait_s


class NotPermitted(ConfigurationError):
    """The database user lacks a permission. Internal: the caller decides how to report it."""


class TargetRefused(ConfigurationError):
    """The target queue refuses a message or a move option. Internal: the message is buried."""


class OtherKind(ConfigurationError):
    """A queue is not of the expected kind. Internal: a caller that named no kind tries again."""

    def __init__(self, message: str, queue: str = "") -> None:
        super().__init__(message)
        self.queue = queue


class TimeLimitReached(TimedOut):
    """The server ended a command at its time limit. Internal: a claim tries other messages."""


class MissingIndex(QueueError):
    """The index of claims is missing. Internal: the driver creates it again."""


def suggestion(name: str, known: Collection[str], otherwise: str | None = None) -> str:
    """Return the remedy for an unknown name: the most similar known name.

    Args:
        name: The unknown name.
        known: The known names.
        otherwise: The remedy if no name is similar, or None to list the known names.
    """
    if near := get_close_matches(name, known, 1):
        return f"did you mean {near[0]!r}?"
    return f"use one of {', '.join(known)}" if otherwise is None else otherwise
