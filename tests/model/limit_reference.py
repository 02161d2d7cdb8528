"""The reference model of limits: which messages of one queue may start, and under which limit.

It knows keys, slots and a bucket of permits for each key, and has no database. A reservation says
which slot it has, so the model can count under a limit that was lowered, or has other keys now.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from pyqueue import Limit, Reservation

#: The queue that has the limit. Messages moved out or buried are elsewhere.
QUEUE = "a"
#: A message that was claimed so often is buried by the next claim.
MAX_TRIES = 3
#: How long a consumer may rely on an answer about permits, in milliseconds.
STALE_MS = 5000


@dataclass(eq=False)
class Item:
    """A live message."""

    id: str
    headers: dict[str, Any]
    #: Since when it is eligible, or until when it is held.
    when: int
    due: int
    key: str | None = None
    priority: int = 4
    group: str | None = None
    #: Its place in its group.
    place: tuple[int, int] = (0, 0)
    queue: str = QUEUE
    tries: int = 0
    #: The token of the claim that may settle it, in time or too late.
    token: str | None = None
    #: The claim counts for this: the key and the number of its slot.
    slot: tuple[str, int] | None = None
    #: The number of the limit under which it was claimed.
    under: int = 0

    def free(self) -> None:
        """End its claim."""
        self.token = self.slot = None

    def is_held(self, now: int) -> bool:
        """Return whether it is held under a live lease."""
        return self.token is not None and self.when > now


@dataclass
class Bucket:
    """The permits of a key: at most, and for sure."""

    most: Fraction
    least: Fraction
    at: int

    def fill(self, limit: Limit, now: int) -> None:
        """Count the time that has passed."""
        passed = Fraction(now - self.at) / Fraction(limit.token_s * 1000)
        self.at = now
        self.most = min(Fraction(limit.capacity), self.most + passed)
        self.least = min(Fraction(limit.capacity), self.least + passed)


def _whole(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 10**6))


def key_in(limit: Limit, headers: dict[str, Any]) -> str:
    """Return the key that a message counts for."""
    if limit.per is None:
        return ""
    value = headers.get(limit.per.removeprefix("headers."))
    if value is None:
        return "-"
    return f"={value}" if isinstance(value, str) else repr(value)


@dataclass
class Limited:
    """The messages, and the limit of the queue."""

    kind: str
    limit: Limit | None = None
    #: How often the limit was changed.
    changes: int = 0
    #: The number of the change since when the same keys are counted.
    same_keys: int = 0
    #: Whether there was a limit for each value of a header.
    had_keys: bool = False
    paused: bool = False
    live: dict[str, Item] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    #: Until when a key may wait, because a consumer died that had just ended a claim.
    left: dict[str, int] = field(default_factory=dict)
    #: Until when each client relies on its last answer about permits.
    stale: dict[int, int] = field(default_factory=dict)
    entered: int = 0

    # ---- messages

    def of(self, queue: str) -> list[Item]:
        """Return the messages of a queue."""
        return [each for each in self.live.values() if each.queue == queue]

    def ready(self, now: int) -> list[Item]:
        """Return messages that could start without a limit, in the order of the queue."""
        live = self.of(QUEUE)
        if self.kind == "ordered":
            live = self._firsts(live)
        found = [each for each in live if each.when <= now]
        return sorted(found, key=lambda each: (self._level(each), each.when, each.id))

    def _level(self, item: Item) -> int:
        return -item.priority if self.kind == "priority" else 0

    @staticmethod
    def _firsts(live: Iterable[Item]) -> list[Item]:
        """Return each group's held message, or else its first; and messages without a group."""
        found: list[Item] = []
        firsts: dict[str, Item] = {}
        for each in live:
            if each.group is None:
                found.append(each)
                continue
            known = firsts.setdefault(each.group, each)
            if (each.token is None, each.place) < (known.token is None, known.place):
                firsts[each.group] = each
        return found + list(firsts.values())

    # ---- the limit

    def reshape(self, limit: Limit | None, now: int) -> None:
        """Change the limit."""
        if limit == self.limit:
            return
        before = self.limit
        self.changes += 1
        if before is None or limit is None or _counted(before) != _counted(limit):
            self.same_keys = self.changes
        if limit is not None and limit.rate is not None:
            for bucket in self.buckets.values():  # no client knows the rest of the other rate
                bucket.most, bucket.least, bucket.at = Fraction(limit.capacity), Fraction(0), now
        self.had_keys |= limit is not None and limit.per is not None
        self.limit = limit
        self.stale.clear()

    def key(self, item: Item) -> str:
        """Return the key that a message counts for under the limit."""
        return "" if self.limit is None else key_in(self.limit, item.headers)

    def room(self, key: str, now: int) -> tuple[int, int]:
        """Return how many messages of a key may start, and how many start for sure."""
        most = least = len(self.live)
        limit = self.limit
        if limit is None:
            return most, least
        if limit.concurrency is not None:
            taken = {each.slot for each in self.of(QUEUE) if each.is_held(now)}
            usable = limit.concurrency
            # Messages in slots above the limit, held under a former one, count too.
            while usable and usable + self._above(taken, key, usable) > limit.concurrency:
                usable -= 1
            most = least = sum((key, each) not in taken for each in range(usable))
        if limit.rate is not None:
            bucket = self.bucket(limit, key, now)
            most, least = min(most, _whole(bucket.most)), min(least, _whole(bucket.least))
        return most, least

    @staticmethod
    def _above(taken: Collection[tuple[str, int] | None], key: str, number: int) -> int:
        """Return how many of the taken slots of a key have this number, or a higher one."""
        return sum(each is not None and each[0] == key and each[1] >= number for each in taken)

    def bucket(self, limit: Limit, key: str, now: int) -> Bucket:
        """Return the bucket of a key, filled until now."""
        full = Fraction(limit.capacity)
        bucket = self.buckets.setdefault(key, Bucket(full, full, now))
        bucket.fill(limit, now)
        return bucket

    def startable(self, client: int, now: int) -> tuple[list[Item], list[Item]]:
        """Return messages that may start, and those that start for sure in part if asked for."""
        if self.paused:
            return [], []
        rooms = {key: self.room(key, now) for key in map(self.key, self.ready(now))}
        may = [each for each in self.ready(now) if rooms[self.key(each)][0]]
        if now < self.stale.get(client, 0):
            return may, []
        surely = [each for each in may if rooms[self.key(each)][1]]
        return may, [each for each in surely if now >= self.left.get(self.key(each), 0)]

    def keeps_order(self, now: int) -> bool:
        """Return whether messages start in the order of the queue.

        A scan may choose a slot that turns out to be taken. Its message comes later then. So do
        messages deferred because of their key.
        """
        if self.kind == "ordered" or self.had_keys:
            return False
        counts = self.limit is not None and self.limit.concurrency is not None
        return not (counts and any(each.slot for each in self.of(QUEUE)))

    # ---- events

    def started(self, client: int, wanted: int, received: list[Item], now: int) -> None:
        """Check that these messages may start, and count them."""
        for key, number in Counter(map(self.key, received)).items():
            assert number <= self.room(key, now)[0], f"{number} messages of {key!r} started"
        self.spend(received, now, started=True)
        limit = self.limit
        if limit is not None and limit.rate is not None and len(received) < wanted:
            self.stale[client] = now + min(STALE_MS, math.ceil(limit.token_s * 1000))

    def spend(self, items: Iterable[Item], now: int, *, started: bool) -> None:
        """Take the permits of messages."""
        if self.limit is None or self.limit.rate is None:
            return
        for each in items:
            bucket = self.bucket(self.limit, self.key(each), now)
            bucket.most -= started
            bucket.least = max(Fraction(0), bucket.least - 1)

    def claim(self, item: Item, held: Reservation[Any], until: int) -> None:
        """Hold a message."""
        item.tries, item.when, item.token = item.tries + 1, until, held.token
        item.under = self.changes
        slot = None
        if held.slot is not None:
            key, _, number = held.slot.partition(":")[2].rpartition("#")
            slot = key, int(number)
        if self.limit is None or self.limit.concurrency is None:
            assert slot == item.slot, "it may keep the slot of a lapsed claim, and no other slot"
        else:
            assert slot is not None
            assert slot[0] == self.key(item), "it has a slot of another key"
            item.slot = slot

    def check(self, now: int) -> None:
        """Check that no more is held than the limit allows since it is stored."""
        limit = self.limit
        if limit is None or limit.concurrency is None:
            return
        held = [each for each in self.of(QUEUE) if each.is_held(now)]
        slots = [each.slot for each in held if each.slot is not None]
        assert len(slots) == len(set(slots)), "two messages have one slot"
        numbers = Counter(self.key(each) for each in held if each.under == self.changes)
        assert all(each <= limit.concurrency for each in numbers.values()), f"held: {numbers}"

    def enter(self, item: Item, now: int, *, delay: int = 0) -> None:
        """Let a message enter the queue of the limit."""
        self.entered += 1
        item.queue, item.when, item.due, item.tries = QUEUE, now + delay, now + delay, 0
        item.place = item.when, self.entered
        item.free()
        self.live[item.id] = item

    def leave(self, item: Item, queue: str, now: int) -> None:
        """Let a message leave for another queue."""
        item.queue, item.when, item.due, item.tries, item.key = queue, now, now, 0, None
        item.free()


def _counted(limit: Limit) -> tuple[str | None, bool]:
    return limit.per, limit.concurrency is None
