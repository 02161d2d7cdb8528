"""Report the batches of a stage to the hooks of its client.

The driver reports them: a batch as one receive, and each settlement once it is known. Executors
report nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pyqueue import telling
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import LeaseLost
from pyqueue.hooks import Tell
from pyqueue.messages import Reservation
from pyqueue.requests import Plan
from pyqueue.runtime.connecting import Connection


class Told:
    """Reports what happens to the messages of a queue to the hooks of a client, if it has hooks.

    Args:
        connection: The connection of the client.
        plans: The plans (command sequences) of the queue.
    """

    def __init__(self, connection: Connection, plans: QueuePlans) -> None:
        self._connection, self._plans = connection, plans

    def received(self, held: Iterable[Reservation[Any]], began: float) -> None:
        """Report the messages of a batch whose claim began at ``began``, by the monotonic clock."""
        if (hooks := self._connection.hooks) is not None and (items := [*held]):
            waited = time.monotonic() - began
            hooks.tell(Tell("received", self._plans.queue, items, waited=waited))

    def settling(self, verb: str, held: Iterable[Reservation[Any]], plan: Plan[None]) -> Plan[None]:
        """Return a plan that settles messages and reports the settlement."""
        if self._connection.hooks is None:
            return plan
        return telling.settling(plan, telling.tells_of(self._plans, verb, held))

    def settled(
        self,
        verb: str,
        held: Iterable[Reservation[Any]],
        *,
        error: LeaseLost | None = None,
        to: str | None = None,
    ) -> None:
        """Report that messages were settled, except the messages that ``error`` lists."""
        if (hooks := self._connection.hooks) is not None:
            for each in telling.tells_of(self._plans, verb, held, to=to):
                each.error = error
                hooks.tell(each)
