"""The terms of a claim: from which queue it takes messages, and what it does with them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from pyqueue.backends import invalid, transitions
from pyqueue.backends.byte_limit import ByteLimit
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import QueueTerms
from pyqueue.backends.priority.levels import LEVEL_ORDER, PRIOR
from pyqueue.backends.scan import ScanState
from pyqueue.backends.transaction_locks import Alone, Scan
from pyqueue.requests import Document, Filter, Plan, UpdateDocument


class ClaimingKind(Kind, Protocol):
    """What a kind may override of claims, besides the members of ``Kind``."""

    def follow(
        self, terms: ClaimTerms, scan: ScanState, record: Mapping[str, Any], now: datetime
    ) -> Plan[None]:
        """Learn what the record of the queue says about claims.

        Args:
            terms: how this process claims.
            scan: what it knows about the queue.
            record: the record; empty if there is none.
            now: the instant.

        Raises:
            ConfigurationError: this release cannot obey the record.
        """

    def claim(
        self,
        terms: ClaimTerms,
        scan: ScanState,
        now: datetime,
        wanted: int,
        room: ByteLimit,
        *,
        delete: bool,
    ) -> Plan[tuple[list[Document], bool]]:
        """Claim the next messages; see ``claiming.claim``. It may take several scans.

        Returns:
            The claimed documents, and whether the queue had no more.
        """


class ClaimTerms(NamedTuple):
    """From which queue a claim takes messages, and what it does with them."""

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
    #: Whether it claims by level. Only a queue with priorities has levels.
    by_level: bool = False
    #: The messages to claim, if they are chosen already.
    chosen: Sequence[Document] | None = None
    #: The slot of each of them, if the queue has a limit; empty if they need none; see ``slots``.
    slots: Mapping[Hashable, str] | None = None
    #: The end of the permits to start them, by the clock of the server; None: they need none.
    until: datetime | None = None

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
    def scan(self) -> Scan:
        """The order in which it claims, and the index of that order."""
        if self.by_level:
            return Scan(LEVEL_ORDER, PRIOR)
        return Scan(self.kind.order, self.kind.index if self.chosen is None else "_id_")

    @property
    def claim_timeout_s(self) -> float:
        """The time limit of the claim. It leaves time to find out what became of it."""
        return max(self.command_timeout_s / 2, self.command_timeout_s - 1)

    @property
    def recovery_timeout_s(self) -> float:
        """The least time for finding out what became of a claim."""
        return self.command_timeout_s - self.claim_timeout_s

    @property
    def alike(self) -> bool:
        """Whether one update claims any of the messages. Else each of them gets a slot."""
        return self.slots is None or len(self.slots) < 2

    def alone(self, update: UpdateDocument, now: datetime) -> Alone:
        """Return how to claim messages one by one."""
        bury = partial(invalid.bury_refused, self.queue, self.kind, self.dead_letter)
        return Alone(self.queue, update, now, self.until, bury)

    def left_s(self, began: datetime, now: datetime, reserve_s: float = 0) -> float:
        """Return how much of the time limit is left, without what is reserved for later."""
        left_s = self.command_timeout_s - (now - began).total_seconds() - reserve_s
        return max(left_s, self.recovery_timeout_s)

    def free(self, ids: Sequence[Any], now: datetime) -> Filter:
        """Return the filter of messages that are free and may start."""
        return transitions.still_claimable(self.queue, ids, now, self.until)

    def update(self, now: datetime) -> dict[str, dict[str, Any]]:
        """Return the update of a claim at this instant, with a new token."""
        count = self.counts_try
        update = transitions.claiming(now, self.lease_s, self.owner, count=count)
        if self.slots is not None:
            update["$unset"]["limited"] = ""
            if len(self.slots) == 1:
                update["$set"]["slot"], *_ = self.slots.values()
        return self.kind.claiming(update)
