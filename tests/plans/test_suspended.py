"""Consumers of queues with a rate that fail or sleep at any command: no more messages start.

A process may be stopped between any two commands, or while a reply travels, and another one uses
the permits that came since. A late start takes new permits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import pytest

from pyqueue import Limit, Unavailable
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.limits import rates
from pyqueue.requests import Plan
from tests.plans import test_pacing as pacing
from tests.plans import test_stream_rates as streams
from tests.plans.faults import some_or_all
from tests.plans.steps import FAULT_AT, Cut, Steps, asleep, resume

#: While a consumer sleeps, the bucket fills again.
RATE: Final[dict[str, Any]] = {"rate": 2, "period": 1, "burst": 5}
SLEEP_S: Final = 2.5


class Works(Protocol):
    """A process that consumes."""

    def work(self) -> Plan[Any]:
        """Receive more messages than the burst."""
        ...


class Popper(pacing.Consumer):
    def receive(self, limit: int, **how: Any) -> Plan[list[Any]]:
        return super().receive(limit, pop=True, **how)


class Claimer(pacing.Consumer):
    """It claims with a name: each process for another group."""

    names = iter(range(1_000_000))

    def work(self) -> Plan[Any]:
        return NamedClaims(self.plans, f"g{next(self.names)}").begin(8, 60)


class Taker(pacing.Consumer):
    """It starts messages that no other process would."""

    def work(self) -> Plan[Any]:
        granted = yield from rates.take("a", Limit(**RATE), {"": 8})
        self.received += range(granted[""].permits)


def in_queue(steps: Steps, consumers: list[Any]) -> int:
    """Return how many messages of a queue were claimed or deleted."""
    ready = {"q": "a", "record": {"$exists": False}, "token": {"$exists": False}}
    return pacing.MESSAGES - int(steps.collection.count_documents(ready))


def in_hand(steps: Steps, consumers: list[Any]) -> int:
    """Return how many messages were handed out: a pack does not store this."""
    return sum(len(each.received) for each in consumers)


def anywhere(steps: Steps, consumers: list[Any]) -> int:
    return in_queue(steps, consumers) + in_hand(steps, consumers)


class User(NamedTuple):
    """A user of permits: its store, its processes, and the counter of its starts.

    ``make test`` disturbs it at each command that is a multiple of ``stride``.
    """

    made: Callable[[], Steps]
    slow: Callable[[], Works]
    other: Callable[[], Works]
    started: Callable[[Steps, list[Any]], int]
    stride: int = 9

    def commands(self, some: bool) -> range:
        """Return the numbers of commands at which it is disturbed."""
        steps = self.made()
        steps.run(self.slow().work())
        return range(0, len(steps.commands), self.stride if some else 1)


def queue(
    kind: str,
    slow: type[pacing.Consumer] = pacing.Consumer,
    other: type[pacing.Consumer] = pacing.Consumer,
    started: Callable[[Steps, list[Any]], int] = in_queue,
    **limit: Any,
) -> User:
    stored = Limit(**RATE, **limit)
    return User(lambda: pacing.made(kind, stored), lambda: slow(kind), lambda: other(kind), started)


USERS: Final = {
    "standard": queue("standard"),
    "priority": queue("priority"),
    "ordered": queue("ordered"),
    "bucket": queue("bucket", started=in_hand),
    "pops": queue("standard", Popper, Popper),
    "key": queue("standard", per="headers.t"),
    "slots": queue("standard", concurrency=9),
    "slots of a key": queue("standard", concurrency=9, per="headers.t"),
    "slots and groups": queue("ordered", concurrency=9),
    "named claims": queue("standard", Claimer, Taker, anywhere),
    "stream": User(
        streams.made,
        streams.Consumer,
        streams.Consumer,
        lambda steps, consumers: streams.started(steps),
        stride=3,
    ),
}
at_a_reply = pytest.mark.parametrize("reply", [False, True], ids=["a command", "a reply"])
each_kind = pytest.mark.parametrize("kind", [*pacing.KINDS, "stream"])


def starts_after_a_sleep(user: str, at: int, reply: bool) -> int:
    """Return how many messages start when a consumer has slept while another one worked."""
    made, make_slow, make_other, started, _ = USERS[user]
    steps, slow, other = made(), make_slow(), make_other()
    before = 0

    def act() -> None:
        nonlocal before
        before = started(steps, [slow, other])
        steps.seconds += SLEEP_S
        steps.run(other.work())

    steps.run(slow.work(), asleep(at, act, after=reply))
    return started(steps, [slow, other]) - before


@some_or_all
@at_a_reply
@pytest.mark.parametrize("user", USERS)
def test_suspended_consumer_starts_no_more(user: str, reply: bool, some: bool) -> None:
    for at in USERS[user].commands(some):
        assert starts_after_a_sleep(user, at, reply) <= RATE["burst"], at


def started(kind: str, steps: Steps, consumers: list[Any]) -> int:
    """Return how many messages have started, also by a dead process, or by a claim undone since."""
    found = USERS[kind].started(steps, consumers)
    return found if kind == "stream" else max(found, in_hand(steps, consumers))


@some_or_all
@pytest.mark.parametrize("fault", FAULT_AT)
@each_kind
def test_fault_at_any_command_starts_no_more(kind: str, fault: str, some: bool) -> None:
    """Another process takes over. After half a second, there is one more permit."""
    user = USERS[kind]
    for at in user.commands(some):
        steps, consumers = user.made(), [user.slow(), user.other(), user.other()]
        with suppress(Cut, Unavailable):
            steps.run(consumers[0].work(), FAULT_AT[fault](at))
        steps.run(consumers[1].work())
        assert started(kind, steps, consumers) <= RATE["burst"]
        steps.seconds = 0.5
        for each in consumers[1:]:
            steps.run(each.work())
        assert started(kind, steps, consumers) <= RATE["burst"] + 1


@some_or_all
@pytest.mark.parametrize("fails_over", [False, True])
@each_kind
def test_sleep_at_any_command_starts_no_more(kind: str, fails_over: bool, some: bool) -> None:
    """Another process works during it, and writes without a majority may be undone before."""
    user = USERS[kind]
    for at in user.commands(some):
        steps, consumers = user.made(), [user.slow(), user.other()]
        steps.safe = steps.all() if fails_over else None
        running = steps.stalled(consumers[0].work(), at)
        assert running is not None
        if fails_over:
            steps.fail_over()
        steps.run(consumers[1].work())
        with suppress(Unavailable):
            resume(running)
        assert started(kind, steps, consumers) <= RATE["burst"]


def popped_around_a_sleep(kind: str, sizes: list[int], at: int, reply: bool) -> list[int]:
    """Return all messages that a sleeping pop and another process get.

    ``sizes``: how many messages each pop of the other process takes during the sleep.
    """
    steps, slow, other = pacing.made(kind, None), Popper(kind), Popper(kind)

    def act() -> None:
        steps.seconds += 60
        for wanted in sizes:
            steps.run(other.receive(wanted))

    steps.run(slow.receive(3), asleep(at, act, after=reply))
    for _ in range(5):
        steps.seconds += 60
        steps.run(other.receive(9))
    return sorted([*slow.received, *other.received])


@at_a_reply
@pytest.mark.parametrize(
    ("kind", "sizes"), [("standard", [9, 1]), ("priority", [1, 1]), ("bucket", [9, 1])]
)
def test_suspended_pop_knows_its_messages(kind: str, sizes: list[int], reply: bool) -> None:
    """Its leases end, and another process pops one of the messages that it had claimed."""
    steps = pacing.made(kind, None)
    steps.run(Popper(kind).receive(3))
    for at in range(len(steps.commands)):
        everything = popped_around_a_sleep(kind, sizes, at, reply)
        assert everything == list(range(pacing.MESSAGES)), at
