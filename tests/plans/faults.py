"""Faults at each command of a consumer: it dies, loses a message, or sleeps while another works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pytest

from pyqueue import QueueError, Unavailable
from pyqueue.requests import Plan
from tests.plans.steps import Cut, Fault, Steps, cut


class Works(Protocol):
    """A process that consumes."""

    def work(self) -> Plan[None]:
        """Receive messages, and end them in several ways."""
        ...


C = TypeVar("C", bound=Works)


@dataclass(frozen=True)
class Faults(Generic[C]):
    """A set of faults for the consumers of one kind.

    Args:
        stored: Returns the documents with which each run begins.
        consumer: Makes a process.
        audit: Checks where each message is, at the end.
        most_commands: An upper bound on the commands of ``work``.
        check: Checks the invariants after each command.
        store: Makes a store with these documents.
    """

    stored: Callable[[], list[Any]]
    consumer: Callable[[], C]
    audit: Callable[..., None]
    most_commands: int
    check: Callable[[Steps], None] = lambda steps: None
    store: Callable[[list[Any]], Steps] = Steps

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
        """Let a process die, and the one that takes over as well, at these commands."""
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
        meanwhile: Callable[[Steps, C], None],
        undone: bool = False,
        gives_up: bool = False,
        **audited: int,
    ) -> None:
        """Let a process sleep before each command, while something else happens.

        Args:
            every: Stop at every n-th command.
            meanwhile: Acts on the store and with another process while the first one sleeps.
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
            meanwhile(steps, quick)
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

        def meanwhile(steps: Steps, quick: C) -> None:
            steps.seconds += 61
            steps.run(quick.work())
            steps.run(quick.work())

        self.sleeps(every, meanwhile)

    def fails_over(self, every: int) -> None:
        """Undo writes without a majority while one process sleeps, and let another one work."""

        def meanwhile(steps: Steps, quick: C) -> None:
            steps.fail_over()
            steps.run(quick.work())

        self.sleeps(every, meanwhile, undone=True)
