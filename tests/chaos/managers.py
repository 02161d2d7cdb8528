"""The work of managers: change the limit of a queue, purge a queue, and delete a queue."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from pyqueue import Limit
from tests.chaos.ledger import Call
from tests.chaos.limit_checker import LIMITS
from tests.chaos.steps import Plan, Step, WorkloadState, push_many_step

#: The limit for a short time, the one for a long time, and these times.
NARROW, WIDE_S, NARROW_S = 2, 10.0, 25.0
#: How many messages are pushed to this queue, and how often.
NARROW_BATCH, NARROW_PAUSE_S = 10, 2.5
#: How many messages are pushed to the queue that is purged, and their delays. Those with a delay
#: are still there when a purge begins.
PURGED_BATCH, PURGED_DELAYS_S = 8, [None, 2.0, 5.0]


class Managers(WorkloadState):
    """The generators that change queues beside the work."""

    def reshape(self, queue: str) -> Plan:
        """Raise and lower the limit of a queue, and push to it."""
        made = False  # by the first push that is acknowledged: there is nothing to reshape before
        while not self.stopping.is_set():
            for seconds, limit in ((WIDE_S, Limit(concurrency=NARROW)), (NARROW_S, LIMITS[queue])):
                until = time.monotonic() + seconds
                while time.monotonic() < until and not self.stopping.is_set():
                    call = yield from self._push(queue, NARROW_BATCH)
                    made = made or call.outcome == "ok"
                    yield NARROW_PAUSE_S
                if not made:
                    continue
                step = Step("reshape", queue, "reshape", (queue,), {"limit": limit})
                step.on_client = True
                yield step

    def _push(
        self, queue: str, count: int, delay: float | None = None
    ) -> Generator[Any, Any, Call]:
        ids = self.new_ids(count)
        call: Call = yield push_many_step(queue, ids, ids=ids, delay=delay)
        return call

    def purge(self, queue: str) -> Plan:
        """Push to a queue, and remove one message or all of them before some are received."""
        while not self.stopping.is_set():
            count, delay = self.dice.randint(1, PURGED_BATCH), self.dice.choice(PURGED_DELAYS_S)
            call = yield from self._push(queue, count, delay)
            yield self.dice.uniform(0.5, 3)
            ids = call.result or []
            if ids and self.dice.random() < 0.5:
                yield Step("remove", queue, "remove", (ids[0],), {}, ids[:1])
            else:
                yield Step("purge", queue, "purge")
            yield 0.5  # so that the times of two removals do not overlap

    def delete(self, queue: str) -> Plan:
        """Delete a queue with all of its messages now and then."""
        while not self.stopping.is_set():
            yield self.dice.uniform(3, 8)
            step = Step("delete", queue, "delete_queue", (queue,), {"force": True})
            step.on_client = True
            yield step
