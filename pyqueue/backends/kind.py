"""The protocol of a kind of queue, and the table of the kinds.

A kind decides how messages enter a queue, which of them a claim may take and in which order, and
how they leave. A kind has no state: the plans pass the name of the queue. A new kind extends
``standard.Standard``.

This module imports no other module of this package, so that every plan can look up a kind here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from pyqueue.errors import ConfigurationError, TargetRefused
from pyqueue.limits import Limit
from pyqueue.messages import Id
from pyqueue.requests import Filter, Find, Plan, Sort

#: Where a scan begins: after this (when, _id), or at this ``when`` if the id is None.
ScanStart = tuple[datetime, Id | None]
#: The operators of an update, each with its fields.
UpdateFields = dict[str, dict[str, Any]]
#: The keys of an index, and its options.
IndexTerms = tuple[list[tuple[str, int]], dict[str, Any]]


class Ordering(NamedTuple):
    """An order of messages, and the index that provides it."""

    sort: Sort
    hint: str


class Kind(Protocol):
    """The members that a kind may override. Plans use no other members."""

    @property
    def name(self) -> str:
        """The name of the kind, as the record of a queue stores it."""

    @property
    def capabilities(self) -> frozenset[str]:
        """The features that the kind supports, from "history", "dead_letter", "keys", "move",
        "pop", "claim", "priority", "group" and "packs", and for limits "concurrency", "rate" and
        "per". Plans refuse every other feature.
        """

    @property
    def shape(self) -> Mapping[str, object]:
        """The options on which all users of a queue must agree, with their defaults.

        The record of a queue stores them. A release that does not know them refuses the queue.
        """

    @property
    def index(self) -> str:
        """The index that claims and scans use."""

    @property
    def order(self) -> Sort:
        """The sort order of a scan."""

    @property
    def scans_forward(self) -> bool:
        """Whether claims follow ``order``, so that a scan may start where the last one ended."""

    @property
    def held_fields(self) -> tuple[str, ...]:
        """The fields that are removed when a claim ends."""

    @property
    def lock_fields(self) -> Mapping[str, str]:
        """The fields that a claim renames, with their names while the message is held."""

    @property
    def stay_fields(self) -> tuple[str, ...]:
        """The fields that a message has only while it is in one queue. A move removes them."""

    @property
    def bare_pop(self) -> bool:
        """Whether a pop may delete a message without claiming it first."""

    @property
    def place_fields(self) -> tuple[str, ...]:
        """The fields that hold a message's place in its ordered group. A move may keep them."""

    def needs(self, shape: Mapping[str, object] | None) -> Mapping[str, IndexTerms]:
        """Return the indexes that this kind needs in addition to the common ones, keyed by name.

        Args:
            shape: The stored options of the queue, or None to return the indexes for all options.
        """

    def prepare(self) -> Plan[None]:
        """Write the documents that a namespace needs before its first queue of this kind."""

    def levels(self, priorities: Collection[int | None]) -> Sequence[int]:
        """Return the priority levels that the queue's record must list before these messages enter.

        Args:
            priorities: The priorities of these messages; None means the default priority. Without
                messages, the result is empty.
        """

    def entering(
        self, queue: str, when: datetime, priority: int | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """Return the fields of a message that enters a queue, by a push or from another queue.

        Args:
            queue: The name of the queue.
            when: The time from which the message may be claimed.
            priority: The priority that the message has or gets, or None. A kind without priorities
                leaves it unchanged.
            group: The ordered group that the message has or gets, or None.
        """

    def claimable(self, queue: str, now: datetime, start: ScanStart | None) -> Filter:
        """Return the filter that matches the messages that may be claimed, from ``start`` on.

        A claim of several messages reads its candidates with this filter. The update that claims
        them checks only that they are still in the queue, and that ``when`` is not in the future.
        """

    def next_ones(self, queue: str, now: datetime) -> Plan[Sequence[Find]]:
        """Return the queries that find ready messages in the order in which they are claimed."""

    def claiming(self, update: UpdateFields) -> UpdateFields:
        """Return the update that claims a message, with the additions of this kind."""

    def ended(
        self, queue: str, ended: Sequence[Mapping[str, Any]], session: object = None
    ) -> Plan[None]:
        """Release the messages that waited for these messages, whose claims have ended.

        The plan may run late, twice, or never. If it never runs, messages wait until a lease ends.

        Args:
            queue: The name of the queue.
            ended: The stored ``group``, ``lock``, ``slot`` and ``limited`` of each ended message.
            session: The session of the caller's transaction, or None.
        """

    def place_again(self, queue: str) -> Plan[Callable[[datetime], dict[str, Any]] | None]:
        """Return the function that gives a message a new place when it waits for another try.

        The function takes the instant at which the message comes back. Return None if messages
        keep their places.
        """

    def packed_ids(
        self, queue: str, ids: Sequence[Id], session: object = None
    ) -> Plan[tuple[frozenset[Id], list[Id]]]:
        """Find the ids that messages inside packs have. No unique index rejects such ids.

        Args:
            queue: The name of the queue that the messages enter.
            ids: The ids that the producer chose for the messages.
            session: The session of the caller's transaction, or None.

        Returns:
            The ids that messages of this queue have or had, and all other ids.
        """

    def finishing(
        self, now: datetime, outcome: str, history_s: float | None, *, keyed: bool
    ) -> dict[str, dict[str, Any]] | None:
        """Return the update that finishes a message.

        Args:
            now: The current instant.
            outcome: The outcome that the history shows, such as "popped" or "committed".
            history_s: How long the history keeps the message, in seconds, or None if it does not.
            keyed: Whether the message has a message key.

        Returns:
            The update, or None if the message is deleted instead.
        """


K = TypeVar("K", bound=Callable[[], Kind])

_kinds: dict[str, Kind] = {}

#: The remedy in the error text, keyed by the capability that a kind does not support.
_REMEDIES: Final = {
    "pop": "; reserve messages and commit them",
    "claim": "; reserve messages with reserve_many()",
    "priority": "; leave it out, or use a queue of kind 'priority'",
    "group": "; leave it out, or use a queue of kind 'ordered'",
    "concurrency": "; set only rate, or use a queue of kind 'standard'",
    "rate": "; use a queue of kind 'standard'",
    "per": "; leave it out, or use a queue of kind 'standard'",
}


def register(kind: K) -> K:
    """Add a kind to the table. This class decorator calls the class without arguments."""
    one = kind()
    _kinds[one.name] = one
    return kind


def known() -> Mapping[str, Kind]:
    """Return the kinds registered in this process, keyed by name."""
    return _kinds


def lookup(name: object) -> Kind:
    """Return the kind with this name.

    Raises:
        ConfigurationError: No kind has this name.
    """
    kind = _kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        names = ", ".join(repr(each) for each in sorted(_kinds))
        raise ConfigurationError(
            f"kind: invalid kind {name!r}; use one of {names}, or client.stream() for a stream"
        )
    return kind


def require(kind: Kind, queue: str, capability: str, argument: str | None = None) -> None:
    """Refuse a capability that a kind does not support.

    Args:
        kind: The kind of the queue.
        queue: The name of the queue.
        capability: The capability that the caller needs.
        argument: The name that the error text uses for the capability, if that differs.

    Raises:
        ConfigurationError: The kind does not support the capability.
    """
    if capability not in kind.capabilities:
        name = argument or capability
        remedy = _REMEDIES.get(capability, "")
        raise ConfigurationError(
            f"{name}: queue {queue!r} is of kind {kind.name!r}, which does not support it{remedy}"
        )


def require_target(kind: Kind, queue: str, priority: int | None, group: str | None) -> None:
    """Refuse an entering message's priority or group if the queue does not support it.

    Raises:
        TargetRefused: The kind does not support the priority or the group.
    """
    try:
        if priority is not None:
            require(kind, queue, "priority")
        if group is not None:
            require(kind, queue, "group")
    except ConfigurationError as error:
        raise TargetRefused(str(error)) from None


def require_limit(kind: Kind, queue: str, limit: Limit) -> None:
    """Refuse a limit that a kind does not support.

    Raises:
        ConfigurationError: The kind does not support a part of the limit.
    """
    for name in ("concurrency", "rate", "per"):
        if getattr(limit, name) is not None:
            require(kind, queue, name, f"limit.{name}")
