"""The permits of one look at a queue with a rate ``per`` key; see ``rates``.

Each key has a bucket. A look chooses messages and asks for permits of their keys, all at once. In
place of messages whose key has none it chooses other ones. A refusal makes it likely that further
keys have none either. So it then reads the buckets of the rest first, which costs less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from pyqueue.backends import rates
from pyqueue.limits import FollowedLimit, Limit
from pyqueue.requests import MonotonicTime, Plan

__all__ = ["LookPermits"]

#: How often a look asks for permits at most.
ROUNDS: Final = 3

#: Chooses messages, so many of each key at most. Return how many of each key it chose.
Choose = Callable[[Mapping[str, int]], Mapping[str, int]]


@dataclass(slots=True)
class LookPermits:
    """The permits that one look has got, by key."""

    _queue: str
    _limit: Limit
    _followed: FollowedLimit
    _granted: Counter[str] = field(default_factory=Counter)
    #: When it began to ask, by the monotonic clock; None: it did not ask.
    _asked: float | None = None

    def ask(self, choose: Choose, most: Mapping[str, int], now: datetime) -> Plan[Counter[str]]:
        """Ask for permits of what ``choose`` chooses.

        Args:
            choose: chooses messages.
            most: how many of each key may start, but for the rate.
            now: the instant.

        Returns:
            How many messages of each key may start.
        """
        limit = self._limit
        able = {
            key: 0 if self._followed.waits(now, key) else min(number, limit.capacity)
            for key, number in most.items()
        }
        granted = Counter[str]()
        for place in range(ROUNDS):
            if not (missing := Counter(choose(able)) - granted):
                break
            if self._asked is None:
                self._asked = yield from MonotonicTime()
            answers = yield from rates.take(self._queue, limit, missing)
            refused = {key for key, each in answers.items() if each.permits < missing[key]}
            for key, each in answers.items():
                granted[key] += each.permits
                self._followed.expect(key, each.next_at if key in refused else None, now)
            able |= {key: granted[key] for key in refused}
            if refused and place == 0:
                rest = [key for key, number in able.items() if number and key not in granted]
                found = yield from rates.may_start(self._queue, limit, self._followed, rest, now)
                able |= {key: min(able[key], each.number) for key, each in found.items()}
        self._granted += granted
        return granted

    def late(self) -> Plan[bool]:
        """Return whether it is too late to use the permits."""
        if self._asked is None:
            return False
        return (yield from MonotonicTime()) - self._asked > rates.VALID_S

    def give_back(self, used: Mapping[str, int]) -> Plan[set[str]]:
        """Give back what was not used. Return the keys of that."""
        unused = self._granted - Counter(used)
        self._granted = Counter()
        for key in unused:
            self._followed.forget(key)
        yield from rates.give_back(self._queue, self._limit, unused)
        return set(unused)
