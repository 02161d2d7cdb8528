"""How a process claims messages of a queue, and one scan for messages to claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from pyqueue.backends import invalid, transitions
from pyqueue.backends.byte_limit import ByteLimit
from pyqueue.backends.kind import Kind, Ordering, UpdateFields
from pyqueue.backends.options import QueueTerms
from pyqueue.backends.scan import Line, ScanState
from pyqueue.backends.transaction_locks import OneByOne
from pyqueue.requests import Document, Filter, Plan, UpdateDocument


class ClaimingKind(Kind, Protocol):
    """The parts of a claim that a kind may override, besides the members of ``Kind``."""

    def follow(
        self, terms: ClaimTerms, state: ScanState, record: Mapping[str, Any], now: datetime
    ) -> Plan[None]:
        """Apply the settings for claims that the queue's record stores.

        Args:
            terms: How this process claims.
            state: This process's knowledge of the queue.
            record: The record, or {} if there is none.
            now: The current instant.

        Raises:
            ConfigurationError: This release cannot apply the settings in the record.
        """

    def claim(self, scan: Scan) -> Plan[tuple[list[Document], bool]]:
        """Claim the next messages, perhaps with several scans; see ``claiming.claim``.

        Cancelled and expired messages are ended, not returned; see ``ending.end_at_claim``.

        Returns:
            The claimed documents, and whether no more messages were ready.
        """


class ClaimTerms(NamedTuple):
    """The queue from which a process claims messages, and how it claims them."""

    queue: str
    kind: ClaimingKind
    #: The queue for documents that cannot be claimed.
    dead_letter: str
    owner: str
    lease_s: float
    counts_try: bool
    #: The time limit of one command, in seconds.
    command_timeout_s: float
    #: The longest time between rescans of an idle queue, in seconds.
    poll_s: float
    #: How long finished messages are kept, in seconds, or None if they are not kept.
    history_s: float | None

    @classmethod
    def of(cls, terms: QueueTerms, lease_s: float, *, counts_try: bool = True) -> ClaimTerms:
        """Return the terms on which a Queue object claims messages."""
        return cls(
            queue=terms.queue,
            kind=cast(ClaimingKind, terms.kind),
            dead_letter=terms.options.dead_letter,
            owner=terms.owner(),
            lease_s=lease_s,
            counts_try=counts_try,
            command_timeout_s=terms.command_timeout_s,
            poll_s=terms.options.poll,
            history_s=terms.options.history,
        )

    @property
    def graveyard(self) -> invalid.Graveyard:
        """The destination of documents that cannot be claimed or delivered."""
        return invalid.Graveyard(self.queue, self.kind, self.dead_letter)

    @property
    def claim_timeout_s(self) -> float:
        """The time limit of the claim. It leaves time to find out whether the claim succeeded."""
        return max(self.command_timeout_s / 2, self.command_timeout_s - 1)

    @property
    def recovery_timeout_s(self) -> float:
        """The minimum time for finding out whether a claim succeeded."""
        return self.command_timeout_s - self.claim_timeout_s

    def left_s(self, began: datetime, now: datetime, reserve_s: float = 0) -> float:
        """Return the seconds left for a command; ``reserve_s`` is kept for later commands."""
        left_s = self.command_timeout_s - (now - began).total_seconds() - reserve_s
        return max(left_s, self.recovery_timeout_s)


#: Claims several messages, each with its own update. It takes the scan, the ids, the common part of
#: the update, and the seconds left. It returns how many messages it claimed.
ClaimEach = Callable[["Scan", Sequence[Any], UpdateDocument, float], Plan[int]]


class Choice(NamedTuple):
    """The messages that a scan is to claim, and the fields that the claim adds or removes."""

    documents: Sequence[Document]
    puts: Mapping[str, Any] = {}
    removes: Sequence[str] = ()
    #: How to claim several of the messages if they need different updates, or else None.
    claim_each: ClaimEach | None = None


@dataclass(slots=True)
class Scan:
    """One scan for messages to claim."""

    terms: ClaimTerms
    #: This process's knowledge of the queue.
    state: ScanState
    #: The order of the scan.
    line: Line
    #: The byte limit of the claim. It collects claimed messages that do not fit.
    room: ByteLimit
    #: The current instant.
    now: datetime
    #: The maximum number of messages to claim, apart from messages for callers that arrive later.
    wanted: int
    #: Whether the scan deletes the first message instead of claiming it.
    deletes: bool = False
    #: The filter of the messages that may be claimed.
    match: Filter = field(default_factory=dict)
    #: When the permits to start messages expire, by the server's clock, or None without permits.
    until: datetime | None = None
    #: The messages that were chosen from the matching ones, once they are known.
    choice: Choice | None = None

    @property
    def one_update(self) -> bool:
        """Whether one update can claim every message of the scan."""
        return self.choice is None or self.choice.claim_each is None

    @property
    def ordering(self) -> Ordering:
        """The sort order of the claim, and the index that serves it."""
        ordering = self.line.ordering(self.terms.kind)
        return ordering if self.choice is None else Ordering(ordering.sort, "_id_")

    def choose(self, choice: Choice) -> Scan:
        """Return a scan that claims the chosen messages."""
        free = self.free([each["_id"] for each in choice.documents])
        return replace(self, match=free, choice=choice, wanted=len(choice.documents))

    def update(self) -> UpdateFields:
        """Return the update that claims a message under a new token."""
        terms, choice = self.terms, self.choice
        update = transitions.claiming(self.now, terms.lease_s, terms.owner, count=terms.counts_try)
        if choice is not None:
            update["$set"] |= choice.puts
            update["$unset"] |= transitions.unset(*choice.removes)
        return terms.kind.claiming(update)

    def free(self, ids: Sequence[Any]) -> Filter:
        """Return the filter that matches the messages with these ids while they can be claimed."""
        return transitions.still_claimable(self.terms.queue, ids, self.now, self.until)

    def one_by_one(self, update: UpdateDocument) -> OneByOne:
        """Return the object that claims messages one by one with this update."""
        terms = self.terms
        bury = partial(invalid.bury_refused, terms.graveyard)
        return OneByOne(terms.queue, update, self.now, self.until, bury)
