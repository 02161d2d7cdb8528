"""Starvation: for how long a message could be received, and a consumer asked in vain.

The change log says from when to when each message could be received. A message starves

* while a call to receive from its queue is waiting. A call that returns nothing is no answer;
* after many later messages of its queue were received first. A few say nothing: consumers that
  compete for a backlog pass over some of it.

A message that waits because all consumers are busy with earlier messages does not starve. Time in
which a fault was in progress is left out: of any kind for the figures without faults, and of a kind
that excuses the wait for the figures with faults.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tests.chaos.checker import Asked, Ledgers, Line, UnavailableCall
from tests.chaos.group_checker import Groups, Turn
from tests.chaos.limit_checker import Limits
from tests.chaos.names import LOOPS, MISFIT, document_of
from tests.chaos.pack_log import PackLog
from tests.chaos.queues import COMMAND_TIMEOUT_S, POLL_S
from tests.chaos.stream_load import GROUPS
from tests.chaos.windows import KEYS_LOCKED, Spans, Wait, Windows

#: The figures that must be 0, besides those of the checker.
TIMELY = ("starved", "starved_in_faults", "lapsed", "unavailable_without_fault", "too_fast")
#: How long a message may starve: the ``poll`` of the workload's queues and a second, and after the
#: recovery from a fault.
LONGEST_WAIT_S = POLL_S + 1.0
LONGEST_WAIT_AFTER_FAULT_S = 5.0
#: The queue with priorities: later messages of a higher priority come first.
URGENT_QUEUE = "urgent"
#: The queues whose leases are renewed as long as their messages are held. In ``loops``, a message
#: that no body gets, or whose loop is left, comes back before its lease ends, too.
_RENEWED: Final = ("renewed", LOOPS)
#: The first of them. Its consumers do not always ask for messages, so none starves there.
RENEWED_QUEUE = "renewed"
_SHOWN = 10
#: Shorter waits are not judged.
_SHORT_S = 0.25
#: How many later messages must be received first before that counts as starvation.
OVERTAKEN = 500
#: The precision of the times in the change log, and of the clock that clients estimate.
_CLOCK_ERROR_S = 0.1
#: How long the first renewal may take from the moment that a claim is stored, or received.
_RENEWAL_S = 1.0


@dataclass(slots=True)
class _Place:
    """Where a message is: its queue, when it may be claimed, its claim, and since when."""

    queue: str
    when: float
    token: str | None
    since: float
    owner: str = ""


class _Lapse(NamedTuple):
    """A lease that ended while its message should have been held: who had it, when, and the time
    at which this was noticed.
    """

    id: str
    owner: str
    token: str
    when: float
    at: float


class Availability:
    """When each message could be received.

    Args:
        lines: The lines of the change log.
        queues: The queues that have consumers.
    """

    def __init__(self, lines: Iterable[Line], queues: Iterable[str]) -> None:
        self._queues = set(queues)
        self._places: dict[str, _Place] = {}
        #: The waits; of those that are nearly equal only one.
        self._waits: dict[tuple[str, float, float, float], Wait] = {}
        #: The received messages: the time of receipt and the ``when``, by queue.
        self.taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
        #: When the last message of each claim of renewed leases was stored, by token.
        self._stored: dict[str, float] = {}
        #: The renewed leases that lapsed.
        self.lapses: list[_Lapse] = []
        #: The queues with limits.
        self.limits = Limits()
        groups = Groups()
        at = 0.0
        for line in PackLog(lines):
            kind, id, *rest = line
            if groups.add(line) or self.limits.add(line):
                at = rest[3] if kind == "in" else rest[-1]
                continue
            if kind == "in":
                queue, _, _, at, when = rest
                self._places[id] = _Place(queue, when, None, at)
            elif id not in self._places:
                continue  # it had a group and is dead now
            elif kind == "set":
                at = rest[1]
                self._updated(id, *rest)
            else:
                at = rest[0]
                place = self._places[id]
                # A pop of several messages claims them first, and then deletes them.
                free = place.token is None or place.when < at
                self._left(id, at, received=free and place.queue == "events")
                del self._places[id]
        for id in self._places:
            self._left(id, at, received=False)
        groups.finish(at)
        self.limits.finish(at)
        self._add_turns([*groups.turns, *self.limits.turns])

    @property
    def waits(self) -> list[Wait]:
        """The waits, the longest first."""
        return sorted(self._waits.values(), key=lambda each: each.since - each.until)

    def _add_turns(self, turns: Iterable[Turn]) -> None:
        """Note for how long groups and keys waited. The rest of each waits for its first one."""
        for each in turns:
            self.taken[each.queue].append((each.until, each.due))
            if each.until - each.since > _SHORT_S:
                key = (each.queue, each.due, each.since, each.until)
                self._waits[key] = Wait(each.id, each.queue, each.due, each.since, each.until)

    def _updated(self, id: str, put: Mapping[str, Any], at: float) -> None:
        if not put.keys() & {"token", "when", "q", "processed"}:
            return
        place = self._places[id]
        token = put.get("token", place.token)
        claimed = token is not None and token != place.token and "processed" not in put
        self._left(id, at, received=claimed)
        queue = "" if "processed" in put else put.get("q", place.queue)
        owner = put.get("owner", place.owner)
        self._places[id] = _Place(queue, put.get("when", place.when), token, at, owner)
        if claimed and queue in _RENEWED:
            self._stored[token] = at

    def _left(self, id: str, at: float, *, received: bool) -> None:
        place = self._places[id]
        if place.queue not in self._queues:
            return
        since = max(place.since, place.when)
        if received:
            self.taken[place.queue].append((at, place.when))
        # A transaction may hold a malformed document.
        judged = place.queue != RENEWED_QUEUE and not id.startswith(MISFIT)
        if judged and at - since > _SHORT_S:
            key = (place.queue, round(place.when, 1), round(since, 1), round(at, 1))
            self._waits.setdefault(key, Wait(id, place.queue, place.when, since, at))
        if place.queue in _RENEWED and place.token and at > place.when + _CLOCK_ERROR_S:
            # A server without a processor for seconds takes until the end of the lease to store a
            # claim. Its holder learns of all its messages together, and can renew none before.
            known = max(place.since, self._stored.get(place.token, -math.inf))
            if known <= place.when - _RENEWAL_S:
                self.lapses.append(_Lapse(id, place.owner, place.token, place.when, at))


class _Starvation:
    """The longest starvation, and the messages that starved for too long."""

    def __init__(self, limit: float) -> None:
        self.longest, self._limit = 0.0, limit
        #: Shorter waits change nothing.
        self.enough = 0.0
        self.wrong: list[str] = []

    def add(self, wait: Wait, asked: Spans, overtaken: float, excused: Spans) -> None:
        """Judge a wait.

        Args:
            wait: The wait.
            asked: When consumers asked in vain.
            overtaken: Since when too many later messages had come first.
            excused: The faults that excuse it.
        """
        seconds = 0.0
        for begin, end in excused.without(wait.since, wait.until):
            last = min(max(begin, overtaken), end)
            seconds = max(seconds, asked.seconds(begin, last) + end - last)
        self.longest = max(self.longest, seconds)
        self.enough = min(self.longest, self._limit)
        if seconds > self._limit:
            self.wrong.append(
                f"{wait.id}: in {wait.queue} for {wait.until - wait.since:.1f} s since "
                f"{wait.since:.1f}, and consumers asked in vain for {seconds:.1f} s"
            )


def _in_vain(asked: Iterable[Asked], windows: Windows) -> Spans:
    """Return when calls to receive from a queue got nothing, or took long.

    The faults of a process excuse its calls.
    """
    return Spans(
        (call.began, call.ended)
        for call in asked
        if not (faults := windows.processes.get(call.process))
        or not faults.within(call.began, call.ended)
    )


class _Taken:
    """The messages received from a queue.

    Args:
        taken: The time and the ``when`` of each message.
    """

    def __init__(self, taken: Iterable[tuple[float, float]]) -> None:
        ordered = np.array(sorted(taken)).reshape(-1, 2)
        self._at, self._when = ordered[:, 0], ordered[:, 1]

    def overtaken(self, wait: Wait) -> float:
        """Return since when ``OVERTAKEN`` later messages had come first; infinity: never."""
        first, last = np.searchsorted(self._at, (wait.since, wait.until))
        if last - first < OVERTAKEN:
            return math.inf
        later = np.flatnonzero(self._when[first:last] > wait.when + _CLOCK_ERROR_S)
        if len(later) < OVERTAKEN:
            return math.inf
        return float(self._at[first + later[OVERTAKEN - 1]])


def _met_a_lock(call: UnavailableCall, windows: Windows) -> bool:
    """Return whether a transaction held messages or keys of a call."""
    keys = [KEYS_LOCKED] if (call.op, call.queue) == ("push", "states") else []
    if call.op in ("purge", "delete"):
        keys = [call.queue]
    return any(
        begin <= call.ended and call.began <= end
        for id in (*map(document_of, call.ids), *keys)
        for begin, end in windows.locked.get(id, ())
    )


def check_times(ledgers: Ledgers, found: Availability, windows: Windows) -> dict[str, Any]:
    """Return how long messages starved, and which calls failed without a fault.

    Args:
        ledgers: The records of the processes.
        found: When each message could be received.
        windows: When faults were in progress.
    """
    calm = _Starvation(LONGEST_WAIT_S)
    in_faults = _Starvation(LONGEST_WAIT_AFTER_FAULT_S)
    asked = {queue: _in_vain(calls, windows) for queue, calls in ledgers.asked.items()}
    taken = {queue: _Taken(each) for queue, each in found.taken.items()}
    no_calls, none_taken = Spans(), _Taken(())
    every = [*found.waits, *ledgers.streams.waits(GROUPS)]
    for wait in sorted(every, key=lambda each: each.since - each.until):
        if wait.until - wait.since <= min(calm.enough, in_faults.enough):
            break
        spans = asked.get(wait.queue, no_calls)
        overtaken = math.inf
        if wait.queue != URGENT_QUEUE:
            overtaken = taken.get(wait.queue, none_taken).overtaken(wait)
        calm.add(wait, spans, overtaken, windows.faults)
        locked = windows.locked.get(document_of(wait.id))
        excused = windows.servers.plus(locked) if locked else windows.servers
        in_faults.add(wait, spans, overtaken, excused)
    lapsed = [
        f"{each.id}: its lease lapsed {each.at - each.when:.1f} s before the next renewal"
        for each in found.lapses
        if not windows.excuses(each.owner, each.when - 5.0, each.at)
        # A holder that learns of a claim at the end of its lease cannot renew it before.
        and ledgers.received_at.get(each.token, -math.inf) <= each.when - _RENEWAL_S
    ]
    unavailable = [
        f"{call.op} in {call.queue} by {call.process}, from {call.began:.1f} to {call.ended:.1f}: "
        f"{call.text}"
        for call in ledgers.unavailable
        if not windows.excuses(call.process, call.began, call.ended)
        and not _met_a_lock(call, windows)
    ]
    fast = found.limits.too_fast(ledgers.received, windows.servers, COMMAND_TIMEOUT_S)
    figures = (calm.wrong, in_faults.wrong, lapsed, unavailable, fast)
    lines = dict(zip(TIMELY, figures, strict=True))
    return {
        "longest_starvation": {
            "without_fault": round(calm.longest, 2),
            "with_fault": round(in_faults.longest, 2),
        },
        **{name: len(wrong) for name, wrong in lines.items()},
        "wrong": {name: wrong[:_SHOWN] for name, wrong in lines.items() if wrong},
    }
