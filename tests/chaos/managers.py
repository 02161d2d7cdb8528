"""What managers do beside the work: change the limit of a queue, and delete one."""

from __future__ import annotations

from pyqueue import Limit
from tests.chaos.limit_checker import LIMITS
from tests.chaos.steps import Plan, Step, WorkloadState, new_payload

__all__ = ["Managers"]

#: The limit for a short time, the one for a long time, and these times.
NARROW, WIDE_S, NARROW_S = 2, 10.0, 25.0


class Managers(WorkloadState):
    """The generators that change queues beside the work."""

    def reshape(self, queue: str) -> Plan:
        """Raise and lower the limit of a queue."""
        [id] = self.new_ids(1)
        yield Step("push", queue, "push", (new_payload(id),), {"id": id}, [id])  # makes its record
        while not self.stopping.is_set():
            for limit, seconds in ((LIMITS[queue], WIDE_S), (Limit(concurrency=NARROW), NARROW_S)):
                step = Step("reshape", queue, "reshape", (queue,), {"limit": limit})
                step.on_client = True
                yield step
                yield seconds

    def delete(self, queue: str) -> Plan:
        """Delete a queue with all of its messages now and then."""
        while not self.stopping.is_set():
            yield self.dice.uniform(3, 8)
            step = Step("delete", queue, "delete_queue", (queue,), {"force": True})
            step.on_client = True
            yield step
