"""Take over a claim group in this process, run it, and give it up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from socket import gethostname

from pyqueue import arguments
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.claims.groups import (
    MAX_MEMBERS,
    Candidate,
    ClaimProgress,
    hold,
    release,
    runner_lease_s,
    take,
)
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import ConfigurationError, Occupied, QueueError
from pyqueue.runtime.connecting import Connection
from pyqueue.runtime.renewal import NamedLease


def members_of(source: QueuePlans, group: str, members: int) -> list[NamedClaims]:
    """Return the plans (command sequences) of each member of a group.

    Raises:
        ConfigurationError: An argument is invalid.
    """
    if arguments.count("members", members) > MAX_MEMBERS:
        raise ConfigurationError(
            f"members: {members} is not allowed; use a whole number from 1 to {MAX_MEMBERS}"
        )
    if members == 1:
        return [NamedClaims(source, group)]
    return [NamedClaims(source, group, number + 1) for number in range(members)]


class GroupRunner:
    """Runs a claim group, or one of its members, once ``take`` has been called.

    Until ``drop`` or ``release`` is called, this renews the runner's lease and the leases of all
    messages that the group has claimed.

    Args:
        connection: The connection of a blocking client.
        members: The plans (command sequences) of the group, or of each of its members.
        lease_s: The length of the lease of the messages, in seconds.
        owner: A function that returns the label of this process.
    """

    #: Whether a takeover counts as a try of the messages.
    counts = True

    def __init__(
        self,
        connection: Connection,
        members: Sequence[NamedClaims],
        lease_s: float,
        owner: Callable[[], str],
    ) -> None:
        self._connection = connection
        self._members = members
        self._lease_s = lease_s
        #: The leases that this process renews.
        self._leases: Sequence[NamedLease] = ()
        self._owner = owner
        self._fenced = False
        self._looks: dict[str, datetime] = {}
        #: The plans of the member that this process runs, or ran last.
        self.claims = members[0]
        #: The token of the runner, or None while this process does not run the group.
        self.token: str | None = None

    def take(self) -> str:
        """Return the token of the runner. If this process does not run the group, take it over.

        Raises:
            Occupied: Another process runs the group.
        """
        owner = self._owner()
        return self.token or self._take(self._candidate(owner, owner))

    def _candidate(self, owner: str, known: str | None) -> Candidate:
        """Return a candidate that may take over from the owner or runner ``known`` at once.

        After it was fenced, a runner has to wait for the end of the other runner's lease.
        Otherwise two runners of one process would take the group from each other again and again.
        """
        return Candidate(owner, None if self._fenced else known, seen=self._looks)

    def _take(self, candidate: Candidate) -> str:
        run, renewer, lease_s = self._connection.run, self._connection.renewer, self._lease_s
        claims, token = run(take(self._members, lease_s, candidate, count=self.counts))
        runner = NamedLease(f"the runner of group {claims.group!r}", runner_lease_s(lease_s))
        messages = NamedLease(f"group {claims.group!r}", lease_s)
        self.claims, self.token, self._fenced = claims, token, False
        self._leases = runner, messages
        renewer.add(runner, lambda _: run(hold(claims, token, lease_s)), partial(self._lost, token))
        renewer.add(messages, lambda _: run(claims.renew(token, lease_s)))
        return token

    def _lost(self, token: str) -> None:
        """Stop running the group, because a renewal found that another runner has taken over."""
        if self.token == token:
            self.drop(fenced=True)

    def drop(self, *, fenced: bool) -> None:
        """Stop renewing the leases of the group, which this process no longer runs.

        Args:
            fenced: Whether another runner has taken the group over.
        """
        leases = self._leases
        self._fenced = self._fenced or fenced
        self.token = None
        for each in leases:
            self._connection.renewer.discard(each)

    def release(self) -> None:
        """End the runner's lease, so that another process takes over at once."""
        token = self.token
        if token is None:
            return
        self.drop(fenced=False)
        with suppress(QueueError):  # then the lease runs out
            self._connection.run(release(self.claims, token))


class StreamRunner(GroupRunner):
    """Runs a group for a streaming query, which stands by while another process runs the group.

    Args:
        connection: The connection of a blocking client.
        members: The plans (command sequences) of the group, or of each of its members.
        lease_s: The length of the lease of the messages, in seconds.
    """

    #: The messages are not to blame for a restart of their query.
    counts = False

    def __init__(
        self, connection: Connection, members: Sequence[NamedClaims], lease_s: float
    ) -> None:
        # Spark starts the process of a source from the driver, which is the same for all queries.
        super().__init__(
            connection, members, lease_s, lambda: f"spark:{gethostname()}:{os.getppid()}"
        )
        #: The lineages of this process, which its offsets carry. A lineage is the first token of a
        #: chain of runners that continue each other's work. The last lineage is the current one. A
        #: takeover that continues no runner begins a new lineage.
        self.lineages: list[str] = []
        #: The progress of the group at the takeover.
        self.progress = ClaimProgress(0, 0, "")
        self._seen: datetime | None = None
        self._look_at = 0.0

    @property
    def lineage(self) -> str | None:
        """The lineage in new offsets, or None before the first takeover.

        A lineage is the first token of a chain of runners that continue each other's work. An
        offset of another lineage acknowledges nothing.
        """
        return self.lineages[-1] if self.lineages else None

    def take_for(self, known: str | None, *, wait: bool) -> str | None:
        """Return the token of the runner, or None while this query has to stand by.

        Args:
            known: The lineage in the checkpoint, or None if the checkpoint has none.
            wait: Whether to wait once for the end of another runner's lease, and to raise an error
                if the group is still occupied then.

        Raises:
            Occupied: Another process runs the group, and ``wait`` is true.
            ConfigurationError: Another query of this application runs the group.
        """
        if self.token is not None:
            return self.token
        if not wait and time.monotonic() < self._look_at:
            return None
        candidate = self._candidate(self._owner(), known)
        waited = False
        while True:
            try:
                token = self._take(candidate)
            except Occupied as other:
                self._refuse_twice(other)
                if not wait:
                    self._look_at = time.monotonic() + other.wait_s
                    return None
                if waited:
                    raise
                waited = True
                time.sleep(other.wait_s)
            else:
                self.progress = self._connection.run(self.claims.progress(token))
                self.lineages.append(self.progress.runner)
                return token

    def _refuse_twice(self, other: Occupied) -> None:
        """Refuse a second query of this application, which would wait for the first one forever.

        A query that has ended does not renew the runner's lease. So if the lease was renewed
        between two attempts, the other query is running.
        """
        renewed = self._seen not in (None, other.until)
        self._seen = other.until
        if renewed and other.owner == self._owner():
            raise ConfigurationError(
                f"group: another query of this application already runs {self.claims.group!r} on "
                f"queue {self.claims.backend.queue!r}, and a group delivers each message to one "
                "query. For two outputs of one DataFrame, write both in one foreachBatch; to share "
                "the messages between queries, set the members option; for unrelated queries, use "
                "another group"
            )
