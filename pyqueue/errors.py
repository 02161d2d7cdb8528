"""The errors of pyqueue: one tree, so that ``except QueueError`` catches them all.

::

    QueueError
    ├── LeaseLost            yours to handle: somebody else may hold the message now
    ├── DuplicateKey         yours to handle: the key or id is taken
    ├── QueueClosed          yours: the client was closed
    ├── Unavailable          the server's: not reached in time, or the outcome is not known
    ├── Fenced               the claim's: another runner of the group took over
    ├── ConfigurationError   a mistake in the program or the set-up   (also a ValueError)
    ├── InvalidName          a mistake in a queue's or namespace's name  (also a ValueError)
    └── InvalidMessage       a payload that cannot be stored          (also a ValueError)

This module imports nothing of pyqueue. Errors keep what a handler needs as attributes; they never carry credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ConfigurationError",
    "DuplicateKey",
    "Fenced",
    "InvalidMessage",
    "InvalidName",
    "LeaseLost",
    "QueueClosed",
    "QueueError",
    "Unavailable",
]


class QueueError(Exception):
    """The base of every error that pyqueue raises."""


class LeaseLost(QueueError):
    """The reservation is no longer held: its lease ran out and another took the message, or it was settled already.

    Nothing was changed for the members of ``lost``. ``unknown`` names those that are gone, settled by this very call or by
    another holder: only a batch without history can leave any.
    """

    def __init__(
        self, message: str, *, lost: Sequence[Any] = (), unknown: Sequence[Any] = ()
    ) -> None:
        super().__init__(message)
        self.lost = list(lost)
        self.unknown = list(unknown)


class DuplicateKey(QueueError):
    """A message with this key lives in the queue already, or the id belongs to another message.

    ``keys`` and ``ids`` name them. In a batch all other messages were written.
    """

    def __init__(self, message: str, *, keys: Sequence[str] = (), ids: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.keys = list(keys)
        self.ids = list(ids)


class QueueClosed(QueueError):
    """The client was closed."""


class Unavailable(QueueError):
    """The server was not reached in time, or went away before it answered.

    ``ids`` names the messages whose outcome is unknown: a push with an id of your own can simply be repeated, and a settle
    can be repeated too (it raises LeaseLost if it had worked the first time).
    """

    def __init__(self, message: str, *, ids: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.ids = list(ids)


class Fenced(QueueError):
    """Another runner of the same claim group took over: this one must stop, and has written nothing."""


class ConfigurationError(QueueError, ValueError):
    """An argument, an option or the server's set-up is wrong. The text names it and says what is allowed."""


class InvalidName(QueueError, ValueError):
    """A queue's or namespace's name is not allowed. The text says which characters are."""


class InvalidMessage(QueueError, ValueError):
    """The payload cannot be stored: not BSON, too large, or not of the queue's model. Nothing was written."""


class NotPermitted(ConfigurationError):
    """Inside only: the database user lacks a permission; what needs it decides what to say."""


class MissingIndex(QueueError):
    """Inside only: a claim's index is gone, so the collection was dropped; the driver makes it again."""
