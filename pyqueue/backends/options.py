"""The values that plans pass around: the options of a queue, a target of moves, a new message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pyqueue.backends.kind import Kind, lookup
from pyqueue.messages import Backoff
from pyqueue.payloads import Codec
from pyqueue.requests import Request


@dataclass(frozen=True, slots=True)
class Options:
    """How one Queue object handles its messages. Durations are in seconds."""

    lease: float = 60
    max_tries: int | None = 20
    dead_letter: str = ""
    history: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    poll: float = 15
    #: The caller's values of the options that all users of the queue must agree on.
    shape: Mapping[str, object] = field(default_factory=dict)
    #: Whether the caller named the kind of the queue.
    names_kind: bool = True

    def listed(self) -> dict[str, object]:
        """Return the options that are shown to people."""
        names = ("lease", "max_tries", "dead_letter", "history")
        return {name: getattr(self, name) for name in names}

    def shown(self, queue: str) -> dict[str, object]:
        """Return the options that the queue's record shows to people: the non-default options."""
        default = Options(dead_letter=f"{queue}.dead").listed()
        return {name: value for name, value in self.listed().items() if value != default[name]}


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """The queue of a Queue object, with its options and codec, in a form that can be pickled."""

    queue: str
    #: The name of the kind.
    kind_name: str
    codec: Codec[Any]
    options: Options
    #: Returns the label that claims of this process carry. It changes after a fork.
    owner: Callable[[], str]
    #: The time limit of one command, in seconds.
    command_timeout_s: float

    @property
    def kind(self) -> Kind:
        """The kind of the queue."""
        return lookup(self.kind_name)


class Target(NamedTuple):
    """A queue that messages move to."""

    queue: str
    kind: Kind
    codec: Codec[Any]
    #: The options of the Queue object, or None if the queue is known by its name only.
    options: Options | None


class NewMessage(NamedTuple):
    """A message to be written. ``id`` is the id that the caller chose, or None."""

    id: str | None
    payload: Any
    headers: Mapping[str, Any] | None = None
    key: str | None = None
    #: When the message becomes ready, as in ``Queue.push``; at most one of the two is set.
    delay: float | timedelta | None = None
    at: datetime | None = None
    #: The queue that the message is for, if a write covers several queues.
    queue: str | None = None
    priority: int | None = None
    group: str | None = None
    #: Why ``queue`` cannot store the message. The dead-letter queue of ``queue`` then gets it.
    fault: str | None = None


@dataclass(slots=True)
class QueueShape(Request[Mapping[str, object]]):
    """A request for the options on which all users of a queue agree, as last read, or {}."""

    queue: str
