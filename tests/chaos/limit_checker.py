"""The checks of limits: how many messages are held at once and start in a time, and which wait.

A message is held from its claim until the claim ends, also if the lease has lapsed: a scan has to
end that claim before it uses the slot. A message has started if a caller received it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pyqueue import Limit
from tests.chaos.group_checker import Turn
from tests.chaos.windows import Spans

Line = list[Any]
#: The queue whose tenants have a limit each, and the one with a rate.
KEYED_QUEUE, PACED_QUEUE = "calls", "paced"
#: The queue whose tenants have a rate each, and the one whose limit changes.
METERED_QUEUE, NARROW_QUEUE = "metered", "narrow"
LIMITS: Final = {
    KEYED_QUEUE: Limit(concurrency=2, per="headers.tenant"),
    PACED_QUEUE: Limit(rate=20, burst=10, concurrency=30),
    METERED_QUEUE: Limit(rate=2, burst=2, per="headers.tenant"),
    NARROW_QUEUE: Limit(concurrency=10),
}
#: How long a scan may use its permits, in seconds; see docs/how-to/rates.md.
_PERMITS_VALID_S = 1.0
#: How long after a limit was lowered a claim may not know it: 5 s, and the time of a command.
_FOLLOWED_S = 13.0
#: The precision of the times in the change log.
_CLOCK_ERROR_S = 0.01
#: The most starts of one window. A longer window would take too long to check.
_LONGEST_WINDOW = 2000


def tenant_of(id: str) -> str:
    """Return the tenant of a message, which its id shows."""
    return id.partition("@")[2]


class Start(NamedTuple):
    """A claim: its time, its message and its token."""

    at: float
    id: str
    token: str


@dataclass(slots=True)
class _Key:
    queue: str
    #: The limit on messages held at once.
    most: float
    #: The former limit, and until when it may still be used.
    former: tuple[float, float] = (0.0, -math.inf)
    #: Since when each message that waits is eligible.
    waiting: dict[str, float] = field(default_factory=dict)
    #: The held messages: since when each is eligible, and the end of its lease.
    held: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: Since when nothing was claimed and no claim ended.
    since: float = 0.0

    def turn(self, at: float) -> Turn | None:
        """Return the message that could start, and since when; None if no message can."""
        ends = sorted(until for _, until in self.held.values())
        free = self.since if len(ends) < self.most else ends[len(ends) - int(self.most)]
        could = self.waiting | {id: until for id, (_, until) in self.held.items()}
        if not could:
            return None
        id = min(could, key=lambda each: could[each])
        since = max(self.since, free, could[id])
        return Turn(id, self.queue, could[id], since, at) if since < at else None


class Limits:
    """The queues with limits, as the change log shows them."""

    def __init__(self) -> None:
        #: Messages that were held beside too many, in words.
        self.exceeded: list[str] = []
        #: For how long messages that could start waited to be claimed.
        self.turns: list[Turn] = []
        #: The claims of each key.
        self.starts: dict[tuple[str, str], list[Start]] = defaultdict(list)
        self._keys: dict[tuple[str, str], _Key] = {}
        self._key_of: dict[str, _Key] = {}
        #: The limits that change, by queue.
        self._changed: dict[str, float] = {NARROW_QUEUE: math.inf}

    def add(self, line: Line) -> bool:
        """Learn from a line. Return whether it is about a message of a queue with a limit."""
        kind, id, *rest = line
        if kind == "in":
            queue, _, _, at, due = rest[:5]
            if queue not in LIMITS:
                return False
            key = (queue, tenant_of(id))
            most = self._changed.get(queue, LIMITS[queue].concurrency) or math.inf
            self._key_of[id] = self._keys.setdefault(key, _Key(queue, most, since=at))
            self._key_of[id].waiting[id] = due
            return True
        if kind == "limit":
            self._reshaped(*rest)
            return True
        if id not in self._key_of:
            return False
        key_of_id = self._key_of[id]
        if kind == "set":
            self._updated(key_of_id, id, *rest)
        else:
            self._left(key_of_id, id, rest[0])
        return True

    def _updated(self, key: _Key, id: str, put: Mapping[str, Any], at: float) -> None:
        token = put.get("token")
        if token is not None:
            self._claimed(key, id, Start(at, id, token), put["when"])
        elif "token" in put and id in key.held:
            key.waiting[id] = key.held.pop(id)[0]
            key.since = at
        elif id in key.held and "when" in put:  # its lease was extended
            key.held[id] = key.held[id][0], put["when"]
        if id in key.waiting and "due" in put:
            key.waiting[id] = put["due"]
        if put.get("q", key.queue) != key.queue:
            self._left(key, id, at)

    def _reshaped(self, queue: str, most: int, at: float) -> None:
        self._changed[queue] = most
        for (name, _), key in self._keys.items():
            if name == queue:
                if most < key.most:
                    key.former = key.most, at + _FOLLOWED_S
                key.most, key.since = most, at

    def _claimed(self, key: _Key, id: str, start: Start, until: float) -> None:
        if (turn := key.turn(start.at)) is not None:
            self.turns.append(turn)
        due = key.waiting.pop(id) if id in key.waiting else key.held[id][0]
        key.held[id] = due, until
        key.since = start.at
        self.starts[key.queue, tenant_of(id)].append(start)
        most = max(key.most, key.former[0] if start.at < key.former[1] else 0)
        if len(key.held) > most:
            beside = ", ".join(sorted(key.held.keys() - {id}))
            self.exceeded.append(f"{id}: held by {start.token} beside {beside}")

    def _left(self, key: _Key, id: str, at: float) -> None:
        del self._key_of[id]
        key.waiting.pop(id, None)
        key.held.pop(id, None)
        key.since = at

    def finish(self, at: float) -> None:
        """Note the messages that still wait at the end."""
        self.turns += [turn for each in self._keys.values() if (turn := each.turn(at))]

    def too_fast(
        self, received: Mapping[str, Iterable[str]], faults: Spans, command_timeout_s: float
    ) -> list[str]:
        """Return the windows in which too many messages started, in words: one for each key.

        Args:
            received: The ids that callers received, by the token of the claim.
            faults: When faults of the servers or the network were in progress. The claim of a scan
                may then arrive late.
            command_timeout_s: The longest such delay.
        """
        found = []
        for (queue, tenant), starts in self.starts.items():
            if LIMITS[queue].rate is None:
                continue
            each = [start.at for start in starts if start.id in received.get(start.token, ())]
            late = [_PERMITS_VALID_S + _CLOCK_ERROR_S] * len(each)
            for place, at in enumerate(each):
                if faults.within(at - command_timeout_s - _PERMITS_VALID_S, at):
                    late[place] += command_timeout_s
            if line := _crowded(LIMITS[queue], each, late):
                found.append(f"{queue} {tenant}: {line}")
        return found


def _crowded(limit: Limit, starts: Sequence[float], late: Sequence[float]) -> str:
    """Return the window with most starts above the limit. Each had its permit ``late`` before."""
    import numpy as np  # here, since the processes of the workload do not need it

    at: Any = np.array(starts)
    asked: Any = at - np.array(late)
    order = np.argsort(asked)
    asked, at = asked[order], at[order]
    worst, line = 0.0, ""
    for place, begin in enumerate(asked):
        ends = np.sort(at[place : place + _LONGEST_WINDOW])
        allowed = limit.capacity + (ends - begin) / limit.token_s
        excess = np.arange(1, len(ends) + 1) - allowed
        if excess.max() > worst:
            number = int(excess.argmax())
            worst = float(excess.max())
            line = (
                f"{number + 1} messages started from {begin:.2f} to {ends[number]:.2f}, "
                f"and {allowed[number]:.1f} may"
            )
    return line
