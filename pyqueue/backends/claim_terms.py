"""The terms of a claim, and one scan for the messages that it takes."""

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
from pyqueue.backends.transaction_locks import Alone
from pyqueue.requests import Document, Filter, Plan, UpdateDocument


class ClaimingKind(Kind, Protocol):
    """What a kind may override of claims, besides the members of ``Kind``."""

    def follow(
        self, terms: ClaimTerms, state: ScanState, record: Mapping[str, Any], now: datetime
    ) -> Plan[None]:
        """Learn what the record of the queue says about claims.

        Args:
            terms: how this process claims.
            state: what it knows about the queue.
            record: the record; empty if there is none.
            now: the instant.

        Raises:
            ConfigurationError: this release cannot obey the record.
        """

    def claim(self, scan: Scan) -> Plan[tuple[list[Document], bool]]:
        """Claim the next messages; see ``claiming.claim``. It may take several scans.

        Returns:
            The claimed documents, and whether the queue had no more.
        """


class ClaimTerms(NamedTuple):
    """From which queue claims take messages, and what they do with them."""

    queue: str
    kind: ClaimingKind
    #: The queue that takes documents that cannot be claimed.
    dead_letter: str
    owner: str
    lease_s: float
    counts_try: bool
    #: The time limit of one command, in seconds.
    command_timeout_s: float
    #: The longest time between rescans of an idle queue, in seconds.
    poll_s: float

    @classmethod
    def of(cls, terms: QueueTerms, lease_s: float, *, counts_try: bool = True) -> ClaimTerms:
        """Return the terms of the claims of a Queue object."""
        return cls(
            terms.queue,
            cast(ClaimingKind, terms.kind),
            terms.options.dead_letter,
            terms.owner(),
            lease_s,
            counts_try,
            terms.command_timeout_s,
            terms.options.poll,
        )

    @property
    def graveyard(self) -> invalid.Graveyard:
        """Where documents go that cannot be claimed or delivered."""
        return invalid.Graveyard(self.queue, self.kind, self.dead_letter)

    @property
    def claim_timeout_s(self) -> float:
        """The time limit of the claim. It leaves time to find out what became of it."""
        return max(self.command_timeout_s / 2, self.command_timeout_s - 1)

    @property
    def recovery_timeout_s(self) -> float:
        """The least time for finding out what became of a claim."""
        return self.command_timeout_s - self.claim_timeout_s

    def left_s(self, began: datetime, now: datetime, reserve_s: float = 0) -> float:
        """Return how much of the time limit is left, without what is reserved for later."""
        left_s = self.command_timeout_s - (now - began).total_seconds() - reserve_s
        return max(left_s, self.recovery_timeout_s)


#: Claims several messages, each by an update made for it. It takes the scan, the ids, the common
#: part of the update, and how many seconds there are. It returns how many messages it claimed.
ClaimEach = Callable[["Scan", Sequence[Any], UpdateDocument, float], Plan[int]]


class Choice(NamedTuple):
    """The messages that a scan is to claim, and what the update of the claim adds."""

    documents: Sequence[Document]
    puts: Mapping[str, Any] = {}
    removes: Sequence[str] = ()
    #: How to claim several of them, if one update cannot; None: one can.
    claim_each: ClaimEach | None = None


@dataclass(slots=True)
class Scan:
    """One scan for messages to claim."""

    terms: ClaimTerms
    #: What this process knows about the queue.
    state: ScanState
    #: In which order it scans.
    line: Line
    #: How many bytes it may claim. It gets what was claimed and does not fit.
    room: ByteLimit
    #: The instant.
    now: datetime
    #: How many messages it claims at most, but for callers that come meanwhile.
    wanted: int
    #: Whether it deletes the first message instead of claiming it.
    deletes: bool = False
    #: The messages that may be claimed.
    match: Filter = field(default_factory=dict)
    #: The end of the permits to start them, by the clock of the server; None: they need none.
    until: datetime | None = None
    #: What it is to claim of them, once that is known.
    choice: Choice | None = None

    @property
    def one_update(self) -> bool:
        """Whether one update can claim any of the messages."""
        return self.choice is None or self.choice.claim_each is None

    @property
    def ordering(self) -> Ordering:
        """The order in which it claims, and the index that finds the messages."""
        ordering = self.line.ordering(self.terms.kind)
        return ordering if self.choice is None else Ordering(ordering.sort, "_id_")

    def choose(self, choice: Choice) -> Scan:
        """Return a scan that claims these messages."""
        free = self.free([each["_id"] for each in choice.documents])
        return replace(self, match=free, choice=choice, wanted=len(choice.documents))

    def update(self) -> UpdateFields:
        """Return the update of a claim, with a new token."""
        terms, choice = self.terms, self.choice
        update = transitions.claiming(self.now, terms.lease_s, terms.owner, count=terms.counts_try)
        if choice is not None:
            update["$set"] |= choice.puts
            update["$unset"] |= transitions.unset(*choice.removes)
        return terms.kind.claiming(update)

    def free(self, ids: Sequence[Any]) -> Filter:
        """Return the filter of messages that are free and may start."""
        return transitions.still_claimable(self.terms.queue, ids, self.now, self.until)

    def alone(self, update: UpdateDocument) -> Alone:
        """Return how to claim messages one by one."""
        terms = self.terms
        bury = partial(invalid.bury_refused, terms.graveyard)
        return Alone(terms.queue, update, self.now, self.until, bury)
