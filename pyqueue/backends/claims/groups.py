"""The state of a group of named claims: its progress, its runner, and who takes over.

One process at a time runs a group, the *runner*. Its *runner's lease* ends at ``until`` in the
state, a few seconds ahead. The runner renews it even if it has no work. A process that continues
the work of the last runner takes over the group at once. It identifies itself by the owner label of
that runner, or by the checkpoint of a query. Every other process stands by until the lease has
ended, so replicas do not take a group from each other while it is served. After an outage of the
servers, the lease has ended, and all processes come back at once. So if a lease ended a short time
ago, a process that stands by checks it twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, TypeVar

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.contents import NOTE, Contents, contents_of, count_of_any_kind
from pyqueue.backends.kind import require
from pyqueue.backends.namespace import CLAIMS
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import Fenced, Occupied
from pyqueue.requests import Document, Filter, Find, Insert, Plan, ServerTime, Update

#: The beginning of the _id of the state of a group.
GROUP_RECORD: Final = "~claim:"
#: How many times a takeover is tried while other processes take over the same group.
TAKEOVER_TRIES: Final = 20
#: The runner's lease is a quarter of the lease of its messages, or of this number of seconds if
#: that is less.
MAX_LEASE_S: Final = 20.0
#: If a lease ended less than this time ago, its runner may still come back after an outage.
OUTAGE: Final = timedelta(seconds=30)
#: How long a process then waits for the runner to come back, in seconds.
COMEBACK_S: Final = 1.0
#: The maximum number of members of a group.
MAX_MEMBERS: Final = 100


def runner_lease_s(lease_s: float) -> float:
    """Return the length of the runner's lease, given the lease of its messages."""
    return min(lease_s, MAX_LEASE_S) / 4


@dataclass(frozen=True, slots=True)
class ClaimProgress:
    """The progress of a claim group."""

    #: The number of the last acknowledged claim. All earlier claims are acknowledged, too.
    acknowledged: int
    #: The number of the last claim. Claims after ``acknowledged`` are outstanding.
    claimed: int
    #: The token of the runner of the group.
    token: str
    #: The ``runner`` of the process whose work this runner continued, or else its own token.
    runner: str = ""
    #: The number of the last claim in which a reader noted a bad record.
    bad: int = 0
    #: The last claim on which a stage of a streaming query has begun work. The stage settles it.
    begun: int = 0
    #: The last claim whose work is done. It may still have to be acknowledged.
    done: int = 0
    #: How many takeovers since the last claim counted as a try of the outstanding messages.
    adopted: int = 0
    #: How many bad records were buried, over all claims.
    buried: int = 0
    #: How many messages were no longer held when their claim was acknowledged, over all claims.
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that wants to run a group."""

    #: Its label. A later process can name this label in ``follows`` to continue its work.
    owner: str
    #: The owner label or the ``runner`` whose work it continues at once, or None to wait.
    follows: str | None = None
    #: Whether it takes over the group even if another process runs it.
    force: bool = False
    #: When the lease of each group ended when last checked, or None to check a lease only once.
    seen: dict[str, datetime] | None = None

    def comes_at_once(self, state: Document) -> bool:
        """Return whether this process may take over before the runner's lease ends."""
        known = (_runner(state), state.get("owner"))
        return self.force or (self.follows is not None and self.follows in known)

    def fields(
        self, state: Document | None, token: str, now: datetime, lease_s: float
    ) -> dict[str, Any]:
        """Return the fields with which the state of a group names this process as the runner.

        Args:
            state: The state that is replaced, or None if the group has none yet.
            token: The new token.
            now: The current instant.
            lease_s: The length of the lease of the messages, in seconds.
        """
        continues = state is not None and self.follows == _runner(state)
        return {
            "token": token,
            "runner": self.follows if continues else token,
            "owner": self.owner,
            "until": now + timedelta(seconds=runner_lease_s(lease_s)),
        }


def _runner(state: Document) -> str:
    """Return the first token of the runner, or its last token in a state that release 0.1 wrote."""
    return str(state.get("runner", state["token"]))


class GroupInfo(NamedTuple):
    """A group that reads a queue by named claims, or a member of such a group."""

    queue: str
    group: str
    #: The label of the process that runs it, or ran it last.
    holder: str
    #: When its runner's lease ends or ended, or None if the runner has released the group.
    until: datetime | None
    #: How many messages it has claimed and not yet settled.
    outstanding: int


def all_groups() -> Plan[list[GroupInfo]]:
    """Return the groups of named claims, in the order of their names."""
    infos = []
    end = GROUP_RECORD[:-1] + ";"  # ";" follows ":" in the order of characters
    for state in (yield from Find({"_id": {"$gte": GROUP_RECORD, "$lt": end}})):
        tag = str(state["_id"]).removeprefix(GROUP_RECORD)
        queue, _, group = tag.partition("~")
        outstanding = yield from count_of_any_kind({"claim.g": tag}, CLAIMS)
        infos.append(
            GroupInfo(queue, group, state.get("owner", ""), state.get("until"), outstanding)
        )
    return sorted(infos, key=lambda info: info[:2])


class ClaimGroup:
    """The operations on the state of a claim group of a queue, or of one member of the group.

    Args:
        backend: Builds the plans (sequences of commands) for the queue.
        group: The name of the group.
        member: The number of the member, or None if the group has no members.
    """

    __slots__ = ("backend", "group", "id", "member", "tag")

    def __init__(self, backend: QueuePlans, group: str, member: int | None = None) -> None:
        require(backend.kind, backend.queue, "claim")
        self.backend = backend
        self.member = member
        #: No name of a group has a "#".
        self.group = arguments.group(group) + ("" if member is None else f"#{member}")
        #: The tag of its messages. Neither name has a "~", so no other group of any queue has it.
        self.tag = f"{backend.queue}~{self.group}"
        #: The _id of the document with its progress.
        self.id = GROUP_RECORD + self.tag

    @property
    def contents(self) -> Contents:
        """The messages in the documents of the queue."""
        return contents_of(self.backend.kind)

    def progress(self, token: str | None = None) -> Plan[ClaimProgress]:
        """Return the progress of the group.

        Args:
            token: The token of the runner, or None for any runner.

        Raises:
            Fenced: Another process runs the group now.
        """
        found = yield from Find({"_id": self.id}, limit=1)
        state: Document = found[0] if found else {"n": 0, "claimed": 0, "token": ""}
        if token is not None and state["token"] != token:
            raise fenced(self)
        names = ("bad", "begun", "done", "adopted", "buried")
        counts = {name: state.get(name, 0) for name in names}
        # Both grow when a claim is acknowledged, so messages still being worked on do not count.
        counts["lost"] = max(0, state.get("taken", 0) - state.get("settled", 0))
        return ClaimProgress(
            acknowledged=state["n"],
            claimed=state["claimed"],
            token=state["token"],
            runner=_runner(state),
            **counts,
        )

    def adopt(
        self, lease_s: float, candidate: Candidate | None = None, *, count: bool = True
    ) -> Plan[str]:
        """Take over the group and its outstanding messages. Return the new token.

        Args:
            lease_s: How long the messages are held from now, in seconds.
            candidate: The process that takes over. None means this process, by force.
            count: Whether the takeover counts as a try. If so, notes of bad records are removed. A
                query that resumes passes False, because it may have committed the batch already.

        Raises:
            Occupied: Another process runs the group, and its lease has not ended.
        """
        backend = self.backend
        yield from namespace.ensure(backend.queue, backend.kind, backend.options)
        token = transitions.new_token()
        candidate = candidate or Candidate(backend.terms.owner(), force=True)
        for _ in range(TAKEOVER_TRIES):
            found = yield from Find({"_id": self.id}, limit=1)
            now = yield from ServerTime()
            if not found:
                state = {"_id": self.id, "record": True, "n": 0, "claimed": 0, "former": []}
                fields = candidate.fields(None, token, now, lease_s)
                if not (yield from Insert([state | fields])):
                    return token
                continue
            # The former tokens stay here until their messages have the new token. If this takeover
            # is cut short, the next one finishes it.
            former = [*found[0].get("former", ()), found[0]["token"]]
            fields = candidate.fields(found[0], token, now, lease_s) | {"former": former}
            take = {"$set": fields, "$inc": {"adopted": int(count)}}
            if (yield from Update(_available(self, found[0], candidate, now), take)).matched:
                now = yield from ServerTime()
                outstanding = {"claim.g": self.tag, "token": {"$in": former}}
                held = holding(backend.terms.owner(), token, now, lease_s, count=count)
                if count:
                    held["$unset"] = {NOTE: ""}
                yield from Update(outstanding, held, many=True)
                yield from self._advance(token, {"$set": {"former": []}})
                return token
        raise fenced(self)

    def _advance(
        self, token: str, update: Mapping[str, Mapping[str, object]], **known: int
    ) -> Plan[None]:
        """Update the state if the runner still has the group and these fields are unchanged.

        Raises:
            Fenced: Another process runs the group now, or the values have changed.
        """
        match = {"_id": self.id, "token": token, **known}
        if not (yield from Update(match, update)).matched:
            raise fenced(self)


def fenced(group: ClaimGroup) -> Fenced:
    """Return the error for a runner whose group was taken over by another runner."""
    return Fenced(
        f"group {group.group!r} of queue {group.backend.queue!r} was taken over by another "
        "runner, so this runner has stopped. One runner at a time serves a group; use another "
        "group for a second runner"
    )


def holding(
    owner: str, token: str, now: datetime, lease_s: float, *, count: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the update that holds messages for a runner. ``count``: whether to count a try."""
    update = transitions.claiming(now, lease_s, owner, count=count)
    del update["$unset"]  # the messages keep the number of their claim
    update["$set"]["token"] = token
    return update


def _available(group: ClaimGroup, state: Document, candidate: Candidate, now: datetime) -> Filter:
    """Return the filter that matches the state only while the candidate may replace it.

    Raises:
        Occupied: The candidate may not replace this state.
    """
    same = {"_id": group.id, "token": state["token"]}
    if candidate.comes_at_once(state):
        return same
    until = state.get("until")
    if isinstance(until, datetime):
        wait_s = (until - now).total_seconds()
        if candidate.seen is not None:
            is_first_check = candidate.seen.get(group.id) != until
            if wait_s <= 0 and is_first_check and until > now - OUTAGE:
                wait_s = COMEBACK_S  # the servers may just be back, and the runner, too
            candidate.seen[group.id] = until
        if wait_s > 0:
            owner = str(state.get("owner"))
            raise Occupied(
                f"group {group.group!r} of queue {group.backend.queue!r} is run by another runner, "
                f"{owner}; this runner stands by. One runner at a time serves a group; to share "
                "its work among several runners, set the members option",
                owner=owner,
                until=until,
                wait_s=wait_s,
            )
    # A runner that has renewed its lease since then keeps the group. None matches a missing field.
    return same | {"until": until}


def hold(group: ClaimGroup, token: str, lease_s: float) -> Plan[None]:
    """Renew the runner's lease.

    Args:
        group: The claim group of the runner.
        token: The token of the runner.
        lease_s: The length of the lease of the messages, in seconds.

    Raises:
        Fenced: Another process runs the group now.
    """
    now = yield from ServerTime()
    until = now + timedelta(seconds=runner_lease_s(lease_s))
    mine = {"_id": group.id, "token": token}
    if not (yield from Update(mine, {"$set": {"until": until}})).matched:
        raise fenced(group)


def release(group: ClaimGroup, token: str) -> Plan[None]:
    """End the runner's lease, so that the next process takes over at once."""
    yield from Update({"_id": group.id, "token": token}, {"$unset": {"until": ""}})


G = TypeVar("G", bound=ClaimGroup)


def take(
    members: Sequence[G], lease_s: float, candidate: Candidate, *, count: bool = True
) -> Plan[tuple[G, str]]:
    """Take over one member of a group. Return the member and the new token.

    First try the member whose work the candidate continues, and then members with outstanding
    messages, which would otherwise wait until their leases end.

    Raises:
        Occupied: Other processes run all members.
    """
    order = members
    if len(members) > 1:
        found = yield from Find({"_id": {"$in": [each.id for each in members]}})
        states = {each["_id"]: each for each in found}

        def rank(member: G) -> int:
            state = states.get(member.id)
            if state is None:
                return 2
            if candidate.comes_at_once(state):
                return 0
            return 1 if state["claimed"] > state["n"] else 2

        order = sorted(members, key=rank)
    occupied: list[Occupied] = []
    for member in order:
        try:
            return member, (yield from member.adopt(lease_s, candidate, count=count))
        except Occupied as error:
            occupied.append(error)
    raise min(occupied, key=lambda error: error.wait_s)
