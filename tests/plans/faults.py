"""Faults at each command of a consumer: it dies, loses a message, or sleeps while another works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Generic, Protocol, TypeVar

import pytest

from pyqueue import LeaseLost, QueueError, Unavailable
from pyqueue.requests import Plan
from tests.plans.steps import Cut, Fault, Steps, cut, lost_reply, lost_request


class Works(Protocol):
    """A process that consumes."""

    def work(self) -> Plan[None]:
        """Receive messages, and end them in several ways."""
        ...


class Settler:
    """A process that settles messages, and its knowledge of their ends."""

    #: Numbers the settlements of all processes.
    counter = count()

    def __init__(self) -> None:
        #: The messages it began to end, and when. The outcome is unknown if that did not end.
        self.begun: dict[int, int] = {}

    def number(self, held: Any) -> int:
        """Return the number of a message."""
        number: int = held.payload
        return number

    def settle(self, plan: Plan[None], held: list[Any], into: set[int] | None = None) -> Plan[None]:
        """Run a plan that settles messages. ``into`` gets their numbers, if they end by it."""
        numbers = {self.number(each) for each in held}
        if into is not None:
            self.begun |= dict.fromkeys(numbers, next(self.counter))
        lost: set[int] = set()
        try:
            yield from plan
        except LeaseLost as error:
            lost = {self.number(each) for each in (*error.lost, *error.unknown)}
        if into is not None:
            into |= numbers - lost


def check_ends(
    left: list[int], ended: Sequence[int], consumers: Iterable[Settler], messages: int
) -> None:
    """Check that each message is left, or was finished once."""
    assert len(left) == len(set(left)), "in two places"
    assert len(ended) == len(set(ended)), "finished twice"
    assert not set(left) & set(ended), "finished, and there all the same"
    begun = {number for each in consumers for number in each.begun}
    assert set(range(messages)) - set(left) <= begun, "lost"


C = TypeVar("C", bound=Works)


@dataclass(frozen=True)
class Faults(Generic[C]):
    """A world for the faults of consumers.

    Args:
        stored: Returns the documents with which each run begins.
        consumer: Makes a process.
        audit: Checks where each message is, at the end.
        most_commands: An upper bound on the commands of ``work``.
        check: Checks the invariants after each command.
        store: Makes a store with these documents.
        stride: ``make test`` stops at every n-th command, ``make test-slow`` at each.
    """

    stored: Callable[[], list[Any]]
    consumer: Callable[[], C]
    audit: Callable[..., None]
    most_commands: int
    check: Callable[[Steps], None] = lambda steps: None
    store: Callable[[list[Any]], Steps] = Steps
    stride: int = 1

    def made(self) -> tuple[Steps, C]:
        """Return a new store and a process."""
        return self.store(self.stored()), self.consumer()

    def number_of_commands(self) -> int:
        """Return how many commands ``work`` has."""
        steps, consumer = self.made()
        steps.run(consumer.work())
        return len(steps.commands)

    def dies(self, after: bool, every: int) -> None:
        """Let a process die before or after each command."""
        for at in range(0, self.number_of_commands(), every):
            steps, consumer = self.made()
            with pytest.raises(Cut):
                steps.run(consumer.work(), cut(at, after=after))
            self.audit(steps, consumer)

    def loses_a_message(self, lost: Callable[[int], Fault], every: int) -> None:
        """Lose the request or the reply of each command."""
        for at in range(0, self.number_of_commands(), every):
            steps, consumer = self.made()
            try:
                steps.run(consumer.work(), lost(at))
            except QueueError:
                steps.run(consumer.work())
            self.audit(steps, consumer)

    def dies_twice(self, every: int, again: Iterable[int]) -> None:
        """Let a process die, and its successor as well, at these commands."""
        for first in range(0, self.number_of_commands(), every):
            for second in again:
                steps, consumer = self.made()
                heir = self.consumer()
                with pytest.raises(Cut):
                    steps.run(consumer.work(), cut(first, after=True))
                steps.seconds += 61
                with pytest.raises(Cut):
                    steps.run(heir.work(), cut(second, after=True))
                self.audit(steps, consumer, heir)

    def sleeps(
        self,
        every: int,
        act: Callable[[Steps, C], object],
        undone: bool = False,
        gives_up: bool = False,
        **audited: int,
    ) -> None:
        """Let a process sleep before each command, while something else happens.

        Args:
            every: Stop at every n-th command.
            act: Acts on the store and with another process while the first one sleeps.
            undone: Whether it has a fail-over.
            gives_up: Whether it may find that it slept for too long.
            audited: Further arguments of ``audit``.
        """
        for at in range(0, self.most_commands, every):
            steps, slow = self.made()
            quick = self.consumer()
            steps.safe = self.stored() if undone else None
            running = steps.stalled(slow.work(), at)
            if running is None:
                assert at > 10
                return
            act(steps, quick)
            with suppress(*[Unavailable] * gives_up):
                for _ in running:
                    self.check(steps)
            self.audit(steps, slow, quick, **audited)
        raise AssertionError("more commands than expected")

    def sleeps_while_another_works(self, every: int) -> None:
        """Let another process work while one sleeps."""
        self.sleeps(every, lambda steps, quick: steps.run(quick.work()))

    def sleeps_beyond_its_lease(self, every: int) -> None:
        """Let another process work twice after the leases of one that sleeps have ended."""

        def act(steps: Steps, quick: C) -> None:
            steps.seconds += 61
            steps.run(quick.work())
            steps.run(quick.work())

        self.sleeps(every, act)

    def fails_over(self, every: int) -> None:
        """Undo writes without a majority while one process sleeps, and let another one work."""

        def act(steps: Steps, quick: C) -> None:
            steps.fail_over()
            steps.run(quick.work())

        self.sleeps(every, act, undone=True)


#: Each disturbs every n-th command of a process.
DISTURBANCES: Final[Mapping[str, Callable[[Faults[Any], int], None]]] = {
    "dies before a command": lambda faults, every: faults.dies(False, every),
    "dies after a command": lambda faults, every: faults.dies(True, every),
    "loses a request": lambda faults, every: faults.loses_a_message(lost_request, every),
    "loses a reply": lambda faults, every: faults.loses_a_message(lost_reply, every),
    "sleeps while another works": lambda faults, every: faults.sleeps_while_another_works(every),
    "sleeps beyond its lease": lambda faults, every: faults.sleeps_beyond_its_lease(every),
    "meets a fail-over": lambda faults, every: faults.fails_over(every),
}


#: ``make test`` stops at some commands, ``make test-slow`` at each.
some_or_all = pytest.mark.parametrize(
    "some", [pytest.param(True, id="some"), pytest.param(False, id="all", marks=pytest.mark.slow)]
)


def each_command(stride: int) -> pytest.MarkDecorator:
    """Return the parameter ``every``: ``make test`` stops at every n-th command."""
    return pytest.mark.parametrize(
        "every",
        [pytest.param(stride, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)],
    )
