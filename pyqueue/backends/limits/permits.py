"""The permits of one claim of a queue with a rate: how it gets them, and how long they are valid.

Every operation that starts messages at a rate gets its permits here: claims, pops, named claims,
packs and the groups of streams. A process may stall after it got permits, while other processes use
the permits that accrue in that time. So permits expire after a second, or later on a slow network.
The filter of the claim's update contains this deadline, so the server claims nothing after it; see
``in_time`` in ``transitions``. The claim then gives its permits back, less the number that accrued
since, and scans again.

With ``per``, each key has a token bucket. For half a second, a claim chooses messages and asks for
permits for their keys. Then it uses the permits that it has, before the first of them expire. If a
key has no permit, the claim chooses other messages instead. A refusal makes further refusals
likely. So the claim then reads the buckets of the remaining keys, which is cheaper than asking.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, NamedTuple

from pyqueue.backends.limits import rates
from pyqueue.backends.limits.rates import VALID_S, Granted
from pyqueue.limits import WHOLE_QUEUE, FollowedLimit, LastGrants
from pyqueue.requests import MonotonicTime, Plan

log = logging.getLogger("pyqueue")

#: How many commands a claim may send from its request for permits to its end. Permits are valid for
#: the time that these commands take, but at least for ``VALID_S``.
TRIPS: Final = 6
#: For how long a claim asks for permits, in seconds.
ASK_S: Final = 0.5
#: How many times a claim asks for permits at most.
ROUNDS: Final = 3

#: Chooses messages, up to the given number for each key. Returns how many it chose for each key.
Choose = Callable[[Mapping[str, int]], Mapping[str, int]]


class _Held(NamedTuple):
    """Permits for one key that a claim holds."""

    key: str
    granted: Granted

    def is_late(self, now: float) -> bool:
        """Return whether the permits may have expired by the clock of the server."""
        return now - self.granted.sent >= self.granted.valid_s

    def of(self, number: int) -> _Held:
        """Return ``number`` of these permits."""
        return self._replace(granted=self.granted._replace(permits=number))


class Permits:
    """The permits that one claim holds for each limit key.

    Args:
        queue: The name of the queue.
        followed: The limit of the queue. It remembers when the next message of a key may start.
        bucket: The key of the only token bucket, if the limit is not ``per`` key.
    """

    __slots__ = ("_asking_since", "_bucket", "_followed", "_held", "_queue", "cut", "limit")

    def __init__(self, queue: str, followed: FollowedLimit, bucket: str = "") -> None:
        self._queue, self._followed, self._bucket = queue, followed, bucket
        followed.grants = LastGrants(followed.grants.trip_s)
        #: The limit at the beginning of the claim. Another thread may change ``followed`` later.
        self.limit = followed.limit
        self._held: list[_Held] = []
        #: When the claim first asked, by the monotonic clock, or None if it has not asked yet.
        self._asking_since: float | None = None
        #: Whether the claim ran out of time to ask for some keys.
        self.cut = False

    @property
    def until(self) -> datetime | None:
        """When the first permits expire, by the clock of the primary, or None if none are held."""
        return min((each.granted.until for each in self._held), default=None)

    def number(self, wanted: int, now: datetime) -> Plan[int]:
        """Take permits for a limit without ``per``. Return how many messages may start now."""
        limit = self.limit
        if limit is None or limit.rate is None:  # another thread has read that the rate is gone
            return wanted
        if self._followed.waits(now):
            return 0
        return (yield from self._take({WHOLE_QUEUE: wanted}, now))[WHOLE_QUEUE].permits

    def ask(self, choose: Choose, most: Mapping[str, int], now: datetime) -> Plan[Counter[str]]:
        """Ask for permits for the messages that ``choose`` chooses.

        Args:
            choose: Chooses messages, up to a given number for each key, and counts them by key.
            most: How many messages of each key may start if the rate allows it.
            now: The current instant.

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
        for attempt in range(ROUNDS):
            missing = Counter(choose(ceiling)) - granted
            if not missing or (yield from self.spent()):
                self.cut |= bool(missing)
                break
            answers = yield from self._take(missing, now)
            for key, each in answers.items():
                granted[key] += each.permits
            refused = {key for key, each in answers.items() if each.permits < missing[key]}
            ceiling |= {key: granted[key] for key in refused}  # these keys get no more permits
            if refused and attempt == 0 and not (yield from self.spent()):
                # Other keys may have no permits either: read their buckets before asking.
                rest = [key for key, left in ceiling.items() if left and key not in granted]
                found = yield from rates.may_start(self._queue, limit, followed, rest, now)
                ceiling |= {key: min(ceiling[key], each.number) for key, each in found.items()}
        return granted

    def _take(self, wanted: Mapping[str, int], now: datetime) -> Plan[dict[str, Granted]]:
        """Ask for permits. Return the grants of those keys that there was time to ask for."""
        limit, followed = self.limit, self._followed
        assert limit is not None
        if self._asking_since is None:
            self._asking_since = yield from MonotonicTime()
        # The bucket of each key has the same name. WHOLE_QUEUE has the bucket ``_bucket``, which
        # differs for each group of a stream.
        buckets = {key or self._bucket: number for key, number in wanted.items()}
        found = yield from rates.take(self._queue, limit, buckets, self._asking_since + ASK_S)
        pairs = zip(wanted, buckets, strict=True)
        answers = {key: found[bucket] for key, bucket in pairs if bucket in found}
        quickest_s = min((each.trip_s for each in answers.values()), default=0)
        for key, each in answers.items():
            too_few = each.permits < wanted[key]
            followed.expect(key, each.next_at if too_few else None, now)
            # On a slow network, permits are valid for longer. A single slow answer may be due to a
            # pause of this process, so the previous request must have been slow, too.
            valid_s = max(VALID_S, TRIPS * min(each.trip_s, followed.grants.trip_s))
            if each.permits:
                followed.grants.at.setdefault(key, each.asked)
                self._held.append(_Held(key, each._replace(valid_s=valid_s)))
        followed.grants.trip_s = quickest_s
        if len(answers) < len(wanted):
            self._note_slow(len(answers), len(wanted))
        return answers

    def _note_slow(self, asked: int, keys: int) -> None:
        self.cut = True
        if not self._followed.noted_slow:
            self._followed.noted_slow = True
            log.warning(
                "queue %r: permits for %d of %d keys came within %.1f s, so a receive returns only "
                "the messages that may start by then; the network or the server is slow",
                self._queue,
                asked,
                keys,
                ASK_S,
            )

    def spent(self) -> Plan[bool]:
        """Return whether the claim has no time left to ask, and must now use its permits."""
        since = self._asking_since
        return since is not None and (yield from MonotonicTime()) - since >= ASK_S

    @property
    def held(self) -> Counter[str]:
        """The number of permits held, keyed by limit key."""
        found = Counter[str]()
        for each in self._held:
            found[each.key] += each.granted.permits
        return found

    def late(self) -> Plan[bool]:
        """Return whether some of the held permits may have expired."""
        now = yield from MonotonicTime()
        return any(each.is_late(now) for each in self._held)

    def drop_late(self) -> Plan[bool]:
        """Give back permits that may have expired. Return whether there were any."""
        now = yield from MonotonicTime()
        valid = Counter[str]()
        for each in self._held:
            valid[each.key] += 0 if each.is_late(now) else each.granted.permits
        return bool((yield from self.give_back_unused(valid)))

    def give_back_unused(self, used: Mapping[str, int]) -> Plan[set[str]]:
        """Give back the permits that were not used, starting with late permits.

        Args:
            used: How many permits of each key were used. A missing key stands for 0.

        Returns:
            The keys of the permits that were given back.
        """
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
        if unused:
            for each in unused:
                self._followed.forget(each.key)
            buckets = [(each.key or self._bucket, each.granted) for each in unused]
            yield from rates.give_back(self._queue, limit, buckets)
        return {each.key for each in unused}
