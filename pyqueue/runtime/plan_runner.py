"""The protocols of plan runners.

A queue needs its client only to run plans, to renew leases and to know which consumers wait. These
protocols define an object that does so. Therefore queues, claims and pipelines need not depend on
the client, which depends on them.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from pyqueue.hooks import HookCalls
from pyqueue.messages import Reservation
from pyqueue.requests import Plan
from pyqueue.runtime.known_queues import KnownQueues
from pyqueue.runtime.renewal import LeaseRenewer
from pyqueue.runtime.waiters import Waiters

R = TypeVar("R")


class RunnerBase(Protocol):
    """The members that both plan runners have."""

    @property
    def namespace(self) -> str:
        """The name of the collection that holds the queues."""

    @property
    def store(self) -> object:
        """A value that is equal for runners of the same database."""

    @property
    def renewer(self) -> LeaseRenewer:
        """The renewer, which renews the leases of reservations and claims."""

    @property
    def known(self) -> KnownQueues | None:
        """What this client knows about its queues, or None before its first command."""

    @property
    def driver(self) -> Any:
        """The driver that runs the plans, or None before the first command."""

    @property
    def hooks(self) -> HookCalls | None:
        """The hooks of the client, or None if it has none."""

    @property
    def results(self) -> str:
        """The bus topic on which this client hears that a message it waits for has ended."""

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that are waiting in this client."""

    def seconds_left(self, message: Reservation[Any]) -> float:
        """Return the seconds until the lease of a message ends, without running a plan."""

    def aside(self, plan: Plan[None]) -> None:
        """Run a plan in the background; see ``Aside``."""


class PlanRunner(RunnerBase, Protocol):
    """Runs plans for blocking code."""

    def run(self, plan: Plan[R]) -> R:
        """Run a plan and return its result."""


class AsyncPlanRunner(RunnerBase, Protocol):
    """Runs plans for async code."""

    def run(self, plan: Plan[R]) -> Awaitable[R]:
        """Run a plan and return its result."""
