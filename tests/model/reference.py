"""The reference model of messages, leases, keys and queues. It has no database, plans or clock.

It is written from the reference page and the design, and meant to be read beside them. It is one
list of items; an operation changes the place and the holder of an item at once. ``now`` is the time
in milliseconds, and the owner of the model advances it. An operation returns, or raises ``Lost`` or
``Clash`` after it has done everything that the API does before LeaseLost or DuplicateKey.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bson import ObjectId

Id = Any
Millis = int


class Held(NamedTuple):
    """A reservation: the id of the message and the number of the claim."""

    id: Id
    claim: int


class Lost(Exception):
    """These were no longer held; all other reservations were settled."""

    def __init__(self, held: list[Held]) -> None:
        super().__init__(held)
        self.held = held


class Clash(Exception):
    """These keys are taken, or these ids belong to messages of other queues.

    All other messages were written.
    """

    def __init__(self, keys: list[str], ids: list[Id]) -> None:
        super().__init__(keys, ids)
        self.keys, self.ids = keys, ids


@dataclass(frozen=True)
class Rules:
    """The options of one queue."""

    grave: str
    lease: Millis = 60_000
    max_tries: int | None = None
    history: bool = False
    #: Whether its messages have priorities, and whether claims go by age all the same.
    priorities: bool = False
    by_age: bool = False


@dataclass
class Item:
    """One message."""

    id: Id
    queue: str
    payload: Any
    pushed: Millis
    #: Eligible at this time; while the message is held, the end of the lease.
    when: Millis
    #: Eligible at this time as pushed, rolled back or moved.
    due: Millis
    headers: dict[str, Any] = field(default_factory=dict)
    tries: int = 0
    deliveries: int = 0
    #: The key in this queue while the message is live, and the last key once it is finished or
    #: dead.
    key: str | None = None
    had: str | None = None
    #: The number of the claim that holds the message, or 0. It holds until another claim or change,
    #: not only until ``when``.
    claim: int = 0
    error: Any = None
    #: The failed tries: number, time, type and text.
    attempts: list[tuple[int, Millis, str, str]] = field(default_factory=list)
    progress: Any = None
    checkpoint: Any = None
    dead: Any = None
    trail: list[dict[str, Any]] = field(default_factory=list)
    processed: Millis | None = None
    outcome: str | None = None
    priority: int | None = None
    #: The priority that its last claim saw.
    seen: int | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """Return the position in receive order: by time, then by id, strings before ObjectIds."""
        return self.when, isinstance(self.id, ObjectId), self.id

    @property
    def shown(self) -> str | None:
        """Return the key that ``Message.key`` shows."""
        return (
            self.had if self.key is None and (self.dead or self.processed is not None) else self.key
        )


class Model:
    """All queues of a namespace."""

    def __init__(self, rules: dict[str, Rules]) -> None:
        self.now: Millis = 0
        self.items: dict[Id, Item] = {}
        self.paused: set[str] = set()
        self._rules = rules
        self._claims = itertools.count(1)

    # ---- reads

    def live(self, queue: str) -> list[Item]:
        """Return the live messages, in order."""
        live = (
            each for each in self.items.values() if each.queue == queue and each.processed is None
        )
        return sorted(live, key=lambda each: each.order)

    def ready(self, queue: str) -> list[Item]:
        """Return the messages that can be received, in order; expired leases included.

        Where messages have priorities, the highest come first.
        """
        ready = [each for each in self.live(queue) if each.when <= self.now]
        if self._rules[queue].priorities:
            ready.sort(key=lambda each: -(each.priority or 0))
        return ready

    def _next(self, queue: str) -> list[Item]:
        """Return the messages consumers get, in order; nothing if the queue is paused."""
        if queue in self.paused:
            return []
        ready = self.ready(queue)
        if self._rules[queue].by_age:
            ready.sort(key=lambda each: each.order)
        return ready

    def free(self, queue: str) -> list[Item]:
        """Return the messages without a live lease."""
        return [each for each in self.live(queue) if not each.claim or each.when <= self.now]

    def history(self, queue: str) -> list[Item]:
        """Return the finished messages, newest first."""
        found = [
            each
            for each in self.items.values()
            if each.queue == queue and each.processed is not None
        ]
        return sorted(found, key=lambda each: (each.processed, each.order[1:]), reverse=True)

    def state(self, item: Item) -> str:
        """Return scheduled, ready, reserved or finished."""
        if item.processed is not None:
            return "finished"
        return "ready" if item.when <= self.now else "reserved" if item.claim else "scheduled"

    def counts(self, queue: str) -> tuple[int, ...]:
        """Return the counts of ready, scheduled, reserved and finished messages."""
        states = [self.state(each) for each in self.items.values() if each.queue == queue]
        return tuple(states.count(each) for each in ("ready", "scheduled", "reserved", "finished"))

    def next_when(self, queue: str) -> Millis | None:
        """Return the earliest time of a live message, ends of leases included."""
        return min((each.when for each in self.live(queue)), default=None)

    def with_key(self, queue: str, key: str | None) -> Item | None:
        """Return the one live message of a queue with a key."""
        return next(
            (each for each in self.live(queue) if key is not None and each.key == key), None
        )

    # ---- in

    def push(
        self,
        queue: str,
        given: Iterable[tuple[Any, str | None, Id]],
        *,
        delay: Millis = 0,
        headers: dict[str, Any] | None = None,
        on_duplicate: str = "ignore",
        priority: int | None = None,
    ) -> list[Id | None]:
        """Push (payload, key, id) and return the ids; None for a message that its key kept out."""
        when = self.now + delay
        answers: list[Id | None] = []
        keys, strangers = list[str](), list[Id]()
        for payload, key, id in given:
            twin, known = self.with_key(queue, key), self.items.get(id)
            fresh: dict[str, Any] = {
                "payload": payload,
                "headers": dict(headers or {}),
                "when": when,
                "due": when,
                "priority": self._level(queue, priority),
            }
            if twin and on_duplicate == "replace":
                self.items[twin.id] = self._bare(replace(twin, **fresh, tries=0))
                answers.append(twin.id)
            elif known and (
                known.queue == queue or any(each["q"] == queue for each in known.trail)
            ):
                answers.append(id)  # the same push again
            elif known:
                strangers.append(id)
            elif twin:
                answers.append(None)
                if on_duplicate == "error":
                    keys.append(str(key))
            else:
                self.items[id] = Item(id, queue, pushed=self.now, key=key, **fresh)
                answers.append(id)
        if keys or strangers:
            raise Clash(keys, strangers)
        return answers

    # ---- out

    def reserve(self, queue: str, limit: int, lease: Millis | None = None) -> list[Item]:
        """Claim the first messages; a message that was claimed too often is buried instead."""
        rules, taken = self._rules[queue], list[Item]()
        for item in self._next(queue):
            if len(taken) == limit:
                break
            if rules.max_tries is not None and item.tries >= rules.max_tries and not item.dead:
                self._bury(item, "tries", None)
                continue
            item.claim, item.tries = next(self._claims), item.tries + 1
            item.deliveries += 1
            item.seen = item.priority
            item.when = self.now + (rules.lease if lease is None else lease)
            taken.append(item)
        return taken

    def pop(self, queue: str, limit: int) -> list[Item]:
        """Finish the first messages and return them as they were."""
        taken = self._next(queue)[:limit]
        before = [replace(each) for each in taken]
        for item in taken:
            self._finish(item, "popped")
        return before

    # ---- settled by the holder

    def holds(self, held: Held) -> bool:
        """Return whether a reservation still counts.

        It ends when the message is claimed, replaced, moved or finished.
        """
        item = self.items.get(held.id)
        return item is not None and item.processed is None and item.claim == held.claim

    def _settle(self, given: Iterable[Held], act: Callable[[Item], object]) -> None:
        given = list(dict.fromkeys(given))
        lost = [each for each in given if not self.holds(each)]
        for each in given:
            if each not in lost:
                act(self.items[each.id])
        if lost:
            raise Lost(lost)

    def commit(self, *given: Held, payload: Any = ...) -> None:
        """Finish the messages."""

        def act(item: Item) -> None:
            item.payload = item.payload if payload is ... else payload
            self._finish(item, "committed")

        self._settle(given, act)

    def rollback(self, *given: Held, delay: Millis | None = None, error: Any = None) -> None:
        """Return them for another try; the last try buries.

        The default delay is 1, 2, 4, ... seconds.
        """

        def act(item: Item) -> None:
            most = self._rules[item.queue].max_tries
            if most is not None and item.tries >= most and not item.dead:
                self._bury(item, "tries", error)
                return
            self._note_try(item, error)
            wait = 1000 * 2 ** (item.tries - 1) if delay is None else delay
            item.when = item.due = self.now + wait
            item.claim, item.error = 0, error or item.error

        self._settle(given, act)

    def release(self, *given: Held) -> None:
        """Undo the claim: restore the old place, and count no try."""

        def act(item: Item) -> None:
            item.when, item.claim, item.tries = item.due, 0, item.tries - 1

        self._settle(given, act)

    def extend(self, *given: Held, lease: Millis) -> None:
        """Hold them for this long from now."""

        def act(item: Item) -> None:
            item.when = self.now + lease

        self._settle(given, act)

    def note(self, given: Held, name: str, value: Any) -> None:
        """Set progress or checkpoint."""
        self._settle([given], lambda item: setattr(item, name, value))

    def bury(self, *given: Held, error: Any = None) -> None:
        """Move them to the dead-letter queue."""
        self._settle(given, lambda item: self._bury(item, "buried", error))

    def move(
        self,
        given: Sequence[tuple[Held, Any]],
        *,
        to: str,
        headers: dict[str, Any] | None = None,
        delay: Millis = 0,
        key: str | None = None,
        priority: int | None = None,
    ) -> None:
        """Move them to another queue, with a new payload, or with the old one for ``...``.

        A key that is taken there raises, and nothing has happened.
        """
        payloads = dict(given)
        twin = self.with_key(to, key)
        if twin and any(self.holds(each) and each.id != twin.id for each in payloads):
            raise Clash([str(key)], [])

        def act(item: Item) -> None:
            payload = payloads[Held(item.id, item.claim)]
            self._leave(item, to, self.now + delay)
            if self._rules[to].priorities:
                item.priority = self._level(to, item.seen if priority is None else priority)
            item.payload = item.payload if payload is ... else payload
            item.headers, item.key = item.headers | (headers or {}), key

        self._settle(payloads, act)

    # ---- operations of any client

    def reprioritize(self, queue: str, id: Id, priority: int) -> bool:
        """Give a live message another priority, held or not."""
        for item in self.live(queue):
            if item.id == id:
                item.priority = priority
                return True
        return False

    def redrive(self, queue: str, limit: int | None = None) -> int:
        """Return dead messages to their first queue, with their keys if those are free."""
        found = [each for each in self.free(queue) if each.dead][:limit]
        for item in found:
            home, key = item.dead["from"], item.shown
            self._leave(item, home, self.now, "error", "attempts", "checkpoint")
            item.key = None if self.with_key(home, key) else key
        return len(found)

    def remove(self, queue: str, id: Id) -> bool:
        """Finish a message without a live lease."""
        for item in self.free(queue):
            if item.id == id:
                self._finish(item, "removed")
                return True
        return False

    def purge(self, queue: str) -> int:
        """Delete all messages without a live lease."""
        found = self.free(queue)
        for item in found:
            del self.items[item.id]
        return len(found)

    def replay(self, queue: str, *ids: Id) -> int:
        """Make finished messages ready again, with their keys if those are free."""
        found = [each for each in self.history(queue) if each.id in ids]
        for item in found:
            key, dead = item.shown, item.dead
            self._leave(item, queue, self.now)
            item.dead, item.had = dead, key
            item.key = None if self.with_key(queue, key) else key
        return len(found)

    # ---- helpers

    def _finish(self, item: Item, outcome: str) -> None:
        if not self._rules[item.queue].history:
            del self.items[item.id]
            return
        item.had, item.key = item.shown, None
        item.processed, item.outcome = self.now, outcome

    @staticmethod
    def _note_try(item: Item, error: Any) -> None:
        if error:
            noted = item.tries, error["at"], error["type"], error["message"]
            item.attempts = [*item.attempts, noted][-5:]

    def _bury(self, item: Item, reason: str, error: Any) -> None:
        self._note_try(item, error)
        error = error or item.error
        dead = {
            "from": item.queue,
            "at": self.now,
            "reason": reason,
            "tries": item.tries,
            "error": error,
        }
        key = item.key
        self._leave(item, self._rules[item.queue].grave, self.now, "attempts", "checkpoint")
        item.dead, item.error, item.had = dead, error, key

    def _leave(self, item: Item, queue: str, when: Millis, *kept: str) -> None:
        """Update an item that leaves for a queue, which may be the same.

        The fields of its stay are removed, above all the key.
        """
        item.trail = [*item.trail, {"q": item.queue, "at": self.now}][-20:]
        item.queue, item.when, item.due, item.tries, item.key = queue, when, when, 0, None
        item.priority = self._level(queue, item.priority)
        self._bare(item, *kept)

    def _level(self, queue: str, priority: int | None) -> int | None:
        """Return the priority that a message has in a queue; elsewhere it keeps its own."""
        return 4 if priority is None and self._rules[queue].priorities else priority

    @staticmethod
    def _bare(item: Item, *kept: str) -> Item:
        item.claim = item.deliveries = 0
        if "attempts" not in kept:
            item.attempts = []
        for name in ("error", "progress", "checkpoint", "dead", "processed", "outcome"):
            if name not in kept:
                setattr(item, name, None)
        return item
