"""The permits of one claim of a queue with a rate: how it gets them, and how long they are valid.

All that start messages at a rate ask here: claims, pops, named claims, packs and the groups of
streams. A process may be stopped after it has asked, and another one uses the permits that come
then. So permits are valid for a second, or for longer on a slow network. The update of the claim
carries this limit, by the clock of the server, and what comes later claims nothing; see ``in_time``
in ``transitions``. The claim then gives its permits back, less what came since, and scans again.

With ``per``, each key has a bucket. A claim chooses messages and asks for permits of their keys, as
many as it can in half a second; then it uses what it has, before the first permits become too old.
In place of messages whose key has none it chooses other messages. A refusal makes it likely that
further keys have none either. So it then reads the buckets of the rest first, which costs less.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, NamedTuple

from pyqueue.backends.limits import rates
from pyqueue.backends.limits.rates import VALID_S, Granted
from pyqueue.limits import FollowedLimit
from pyqueue.requests import MonotonicTime, Plan

log = logging.getLogger("pyqueue")

#: How many commands a claim may send from its question to its end. Permits are valid for as long
#: as these take, if that is longer than ``VALID_S``.
TRIPS: Final = 6
#: How long a claim asks for permits, in seconds.
ASK_S: Final = 0.5
#: The most times that a claim asks for permits.
ROUNDS: Final = 3

#: Chooses messages, so many of each key at most. Return how many of each key it chose.
Choose = Callable[[Mapping[str, int]], Mapping[str, int]]


class _Held(NamedTuple):
    """Permits of one key that a claim holds."""

    key: str
    granted: Granted

    def is_late(self, now: float) -> bool:
        """Return whether it may be too late to use them: it is if the server finds them late."""
        return now - self.granted.sent >= self.granted.valid_s

    def of(self, number: int) -> _Held:
        """Return so many of them."""
        return self._replace(granted=self.granted._replace(permits=number))


class Permits:
    """The permits that one claim has got, by key.

    Args:
        queue: the name of the queue.
        followed: its limit. It remembers when the next message of a key may start.
        bucket: the key of the bucket, if the limit is not ``per`` key.
    """

    __slots__ = ("_asked", "_bucket", "_followed", "_held", "_queue", "cut", "limit")

    def __init__(self, queue: str, followed: FollowedLimit, bucket: str = "") -> None:
        self._queue, self._followed, self._bucket = queue, followed, bucket
        #: The limit at the beginning of the claim. Another thread may read a change.
        self.limit = followed.limit
        self._held: list[_Held] = []
        #: When it began to ask, by the monotonic clock; None: it did not ask.
        self._asked: float | None = None
        #: Whether some keys were not asked, because it took too long.
        self.cut = False

    @property
    def until(self) -> datetime | None:
        """The end of the permits, by the clock of the primary; None: it needs none."""
        return min((each.granted.until for each in self._held), default=None)

    def number(self, wanted: int, now: datetime) -> Plan[int]:
        """Return how many messages may start of a queue without ``per``."""
        limit = self.limit
        if limit is None or limit.rate is None:  # another thread has read that it is gone
            return wanted
        if self._followed.waits(now):
            return 0
        return (yield from self._take({"": wanted}, now))[""].permits

    def ask(self, choose: Choose, most: Mapping[str, int], now: datetime) -> Plan[Counter[str]]:
        """Ask for permits of what ``choose`` chooses.

        Args:
            choose: chooses messages.
            most: how many of each key may start, but for the rate.
            now: the instant.

        Returns:
            How many messages of each key may start.
        """
        limit, followed = self.limit, self._followed
        assert limit is not None
        ceiling = {
            key: 0 if followed.waits(now, key) else min(number, limit.capacity)
            for key, number in most.items()
        }
        granted = Counter[str]()
        for number in range(ROUNDS):
            missing = Counter(choose(ceiling)) - granted
            if not missing or (yield from self.spent()):
                self.cut |= bool(missing)
                break
            answers = yield from self._take(missing, now)
            for key, each in answers.items():
                granted[key] += each.permits
            refused = {key for key, each in answers.items() if each.permits < missing[key]}
            ceiling |= {key: granted[key] for key in refused}  # they get no more
            if refused and number == 0 and not (yield from self.spent()):
                # Further keys may have none either: read the buckets of those that were not asked.
                rest = [key for key, left in ceiling.items() if left and key not in granted]
                found = yield from rates.may_start(self._queue, limit, followed, rest, now)
                ceiling |= {key: min(ceiling[key], each.number) for key, each in found.items()}
        return granted

    def _take(self, wanted: Mapping[str, int], now: datetime) -> Plan[dict[str, Granted]]:
        """Ask for permits of keys. Keys that are not asked in time are left out."""
        limit, followed = self.limit, self._followed
        assert limit is not None
        if self._asked is None:
            self._asked = yield from MonotonicTime()
        buckets = {key or self._bucket: number for key, number in wanted.items()}
        found = yield from rates.take(self._queue, limit, buckets, self._asked + ASK_S)
        pairs = zip(wanted, buckets, strict=True)
        answers = {key: found[bucket] for key, bucket in pairs if bucket in found}
        quickest_s = min((each.trip_s for each in answers.values()), default=0)
        for key, each in answers.items():
            few = each.permits < wanted[key]
            followed.expect(key, each.next_at if few else None, now)
            # A process that was stopped takes its pause for a slow network. So the question before
            # has to have taken as long.
            valid_s = max(VALID_S, TRIPS * min(each.trip_s, followed.trip_s))
            if each.permits:
                self._held.append(_Held(key, each._replace(valid_s=valid_s)))
        followed.trip_s = quickest_s
        if len(answers) < len(wanted):
            self._note_slow(len(answers), len(wanted))
        return answers

    def _note_slow(self, asked: int, keys: int) -> None:
        self.cut = True
        if not self._followed.noted_slow:
            self._followed.noted_slow = True
            log.warning(
                "queue %r: permits of %d of %d keys came within %.1f s: a receive returns what may "
                "start by then; the network or the server is slow",
                self._queue,
                asked,
                keys,
                ASK_S,
            )

    def spent(self) -> Plan[bool]:
        """Return whether it has asked for long enough, and is to use what it got."""
        return self._asked is not None and (yield from MonotonicTime()) - self._asked >= ASK_S

    @property
    def held(self) -> Counter[str]:
        """How many permits it holds, by key."""
        found = Counter[str]()
        for each in self._held:
            found[each.key] += each.granted.permits
        return found

    def late(self) -> Plan[bool]:
        """Return whether some permits are too old to be used."""
        now = yield from MonotonicTime()
        return any(each.is_late(now) for each in self._held)

    def drop_late(self) -> Plan[bool]:
        """Give back the permits that are too old to be used. Return whether there were any."""
        now = yield from MonotonicTime()
        young = Counter[str]()
        for each in self._held:
            young[each.key] += 0 if each.is_late(now) else each.granted.permits
        return bool((yield from self.give_back(young)))

    def give_back(self, used: Mapping[str, int]) -> Plan[set[str]]:
        """Give back what was not used, and hold the rest. Return the keys of what was not used."""
        limit = self.limit
        if limit is None or not self._held:
            return set()
        now = yield from MonotonicTime()
        left, kept, unused = Counter(used), list[_Held](), list[_Held]()
        for each in sorted(self._held, key=lambda each: each.is_late(now)):
            number = min(each.granted.permits, left[each.key])
            left[each.key] -= number
            kept.append(each.of(number))
            unused.append(each.of(each.granted.permits - number))
        self._held = [each for each in kept if each.granted.permits]
        unused = [each for each in unused if each.granted.permits]
        for key, granted in unused:
            self._followed.forget(key)
            yield from rates.give_back(self._queue, limit, key or self._bucket, granted)
        return {each.key for each in unused}
