"""Receive one message, or commit one, without a plan.

Such a call usually has nothing to find out: it puts its item into the next batch of its client, and
takes the result. To walk a plan for this would take longer than everything else that the client
does. A call that has to find out more runs its plan, and so does the rest of a call whose batch did
not end as usual. So plans alone know the rules, and these calls know when no rule applies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, cast

from pyqueue import telling
from pyqueue.backends import applying, receiving, settling
from pyqueue.backends.applying import Settlement
from pyqueue.backends.byte_limit import Limits
from pyqueue.backends.claiming import Claimed
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.carried import Carried
from pyqueue.hooks import HookCalls, Tell
from pyqueue.messages import MAX_RECEIVED_BYTES, Reservation
from pyqueue.requests import Coalesce, Plan
from pyqueue.runtime.plan_runner import RunnerBase
from pyqueue.runtime.waiters import Waiters

_ONE: Final = Limits(1, MAX_RECEIVED_BYTES)
#: A longer timeout, in seconds, is left to the plan, which knows the limit.
_DAY_S: Final = 86_400.0


class _AtOnce:
    """A call that takes part in a batch.

    Args:
        runner: The connection of the client.
        request: The request with the item of the call.
    """

    __slots__ = ("_driver", "_hooks", "_request")

    def __init__(self, runner: RunnerBase, request: Coalesce[Any, Any]) -> None:
        self._driver, self._request = runner.driver, request
        self._hooks: HookCalls | None = runner.hooks

    def join(self) -> Any:
        """Return the result of the item, or for an async client an awaitable of it."""
        return self._driver.coalescer.join(self._request)


class Claim(_AtOnce):
    """A call that receives one message."""

    __slots__ = ("_began", "_plans", "_timeout_s", "_waiters")

    def __init__(
        self,
        runner: RunnerBase,
        request: Coalesce[Any, Any],
        plans: QueuePlans,
        waiters: Waiters,
        timeout_s: float | None,
    ) -> None:
        super().__init__(runner, request)
        self._plans, self._waiters, self._timeout_s = plans, waiters, timeout_s
        self._began = time.monotonic()

    def received(self, claimed: Sequence[Claimed]) -> Reservation[Any] | None:
        """Return the message that ``join`` has claimed, or None if it found none."""
        if not claimed:
            return None
        self._waiters.wake_next(True)
        message = cast("Reservation[Any]", claimed[0][1])
        message.carried = Carried(self._plans)
        if self._hooks is not None:
            waited = time.monotonic() - self._began
            self._hooks.tell(Tell("received", self._plans.queue, [message], waited=waited))
        return message

    def left(self) -> None:
        """Wake the next consumer, because this call ends without a message."""
        self._waiters.wake_next(False)

    @property
    def left_s(self) -> float | None:
        """How many seconds of the timeout are left, or None without a timeout."""
        if self._timeout_s is None:
            return None
        return max(0.0, self._timeout_s - (time.monotonic() - self._began))


class Commit(_AtOnce):
    """A call that commits one message."""

    __slots__ = ("_plans", "_settlement")

    def __init__(self, runner: RunnerBase, plans: QueuePlans, settlement: Settlement) -> None:
        super().__init__(runner, applying.shared(plans.queue, settlement))
        self._plans, self._settlement = plans, settlement

    def complete(self, plan: Plan[None]) -> Any:
        """Run the plan that ``ended`` returned; for an async client, return an awaitable."""
        return self._driver.drive(plan)

    def ended(self, outcome: Any) -> Plan[None] | None:
        """Return the plan that completes the call after ``join``, or None if the call is done."""
        if outcome == "done":
            self.tell(None)
            return None
        plan = applying.settled(self._plans.queue, self._settlement, outcome)
        return plan if self._hooks is None else telling.settling(plan, self._tells())

    def _tells(self) -> list[Tell]:
        return telling.tells_of(self._plans, "commit", [self._settlement.held])

    def tell(self, error: BaseException | None) -> None:
        """Report the commit to hooks, or the error that ``join`` has raised."""
        if self._hooks is not None:
            for each in self._tells():
                each.error = error
                self._hooks.tell(each)


def claim(runner: RunnerBase, plans: QueuePlans, timeout: Any) -> Claim | None:
    """Return the call that receives one message, or None if the call needs its plan.

    Args:
        runner: The connection of the client.
        plans: The plans of the queue, from its door.
        timeout: The timeout as the caller gave it.
    """
    if timeout is not None:
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not is_number or not 0 <= timeout <= _DAY_S:
            return None
    now = _ready(runner)
    if now is None:
        return None
    waiters = runner.waiters(plans.queue)
    prepared, state = waiters.prepared, waiters.scan
    if prepared is None or prepared.call != (
        plans.terms,
        receiving.CLAIMS,
        _ONE,
        None,
        False,
        None,
    ):
        return None
    state.observe(now)
    if (
        receiving.wants_record(state, now)
        or receiving.stopped(state)
        or state.limit.limit is not None
        or waiters.needs_upkeep(now)
    ):
        return None
    return Claim(runner, prepared.claiming, plans, waiters, timeout)


def commit(runner: RunnerBase, plans: QueuePlans, given: Sequence[Any]) -> Commit | None:
    """Return the call that commits one message, or None if the call needs its plan.

    Args:
        runner: The connection of the client.
        plans: The plans of the queue, from its door.
        given: The reservations as the caller gave them.
    """
    held: Any = given[0] if len(given) == 1 else None
    if type(held) is not Reservation or held.queue != plans.queue:
        return None
    if held.keep is not None or held.gather is not None or runner.renewer.registered(given):
        return None  # a client or a gather waits for its end, or its lease is renewed
    if _ready(runner) is None:
        return None
    return Commit(runner, plans, settling.finishing_one(plans.terms, held))


def _ready(runner: RunnerBase) -> datetime | None:
    """Return the time of the primary, or None if the driver has to be prepared first.

    Raises:
        QueueClosed, ConfigurationError: The client cannot be used.
    """
    driver = runner.driver
    if driver is None:
        return None
    driver.check_usable()
    now: datetime | None = None if driver.clock.stale else driver.clock.now()
    return now
