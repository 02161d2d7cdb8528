"""The work of managers: change queues and their messages beside other work."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from pyqueue import Limit
from pyqueue.where import one_of
from tests.chaos.ledger import Call
from tests.chaos.limit_checker import LIMITS
from tests.chaos.names import CHORES, CHORES_DEAD, TICKS
from tests.chaos.steps import (
    Held,
    Plan,
    Step,
    WorkloadState,
    new_payload,
    push_many_step,
    rollback_step,
    settle_step,
)
from tests.chaos.tick_checker import EVERY_S, SCHEDULE

#: The limit for a short time, the one for a long time, and these times.
NARROW, WIDE_S, NARROW_S = 2, 10.0, 25.0
#: How many messages are pushed to this queue, and how often.
NARROW_BATCH, NARROW_PAUSE_S = 10, 2.5
#: How many messages are pushed to the queue that is purged, and their delays. Those with a delay
#: are still there when a purge begins.
PURGED_BATCH, PURGED_DELAYS_S = 8, [None, 2.0, 5.0]
#: The delay of the messages that are changed in bulk.
SORTED_DELAY_S = 4.0


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

    def cancel(self) -> Plan:
        """Push to a queue, and cancel messages: before, while and after a consumer holds them."""
        while not self.stopping.is_set():
            delay = self.dice.choice([None, None, 3.0])
            call = yield from self._push(CHORES, self.dice.randint(1, 4), delay)
            for id in (call.result or [])[:2]:
                yield self.dice.uniform(0, 1)
                step = Step("cancel", CHORES, "cancel", (id,), {}, [id])
                step.options["force"] = self.dice.random() < 0.5
                step.on_client = self.dice.random() < 0.5
                yield step
            yield self.dice.uniform(1, 4)

    def sort_out(self) -> Plan:
        """Change scheduled messages in bulk, and send dead letters back."""
        while not self.stopping.is_set():
            call = yield from self._push(CHORES, self.dice.randint(2, 6), SORTED_DELAY_S)
            yield self.dice.uniform(0.5, 2)
            verb = self.dice.choice(["remove", "move", "requeue", "redrive"])
            selected: dict[str, Any] = {"state": "scheduled"}
            if call.result and self.dice.random() < 0.5:
                selected = {"where": {"payload.n": one_of(call.result)}}
            step = Step(f"bulk {verb}", CHORES, verb, selected=selected)
            if verb == "redrive":
                step.queue, step.selected = CHORES_DEAD, {}
            elif verb == "move":
                step.args = ("billed",)
            yield step
            yield 1.0  # so that the times of two calls do not overlap

    def tend(self) -> Plan:
        """Hold a few messages for a moment, in which they may be cancelled, and settle them."""
        while not self.stopping.is_set():
            call = yield Step("reserve", CHORES, "reserve_many", (4,), {"timeout": 0.5})
            held: Held = list(call.result or [])
            if held and not self.draining:
                yield self.dice.uniform(0, 1.5)
            for each in held:
                chance = 1.0 if self.draining else self.dice.random()
                error = f"by {each.token}"
                if chance < 0.1:
                    yield settle_step("bury", CHORES, [each], error=error)
                elif chance < 0.25:
                    counted = self.dice.random() < 0.5
                    yield rollback_step(CHORES, [each], counted=counted, delay=0, error=error)
                elif chance < 0.3:
                    yield settle_step("release", CHORES, [each])
                elif chance > 0.32:
                    payload = {**each.payload, "trail": [[CHORES, each.token]]}
                    yield settle_step("commit", CHORES, [each], payload=payload)
            if call.outcome != "ok":
                yield 0.1

    def keep_time(self) -> Plan:
        """Store a schedule, pause and resume it, and delete it at the end: then its queue drains.

        Any process may be killed between two of these calls, so each call is repeated.
        """
        options = {"queue": TICKS, "every": EVERY_S, "payload": new_payload(SCHEDULE)}
        options |= {"missed": "all", "overlap": True, "grace": 5}
        while not self.stopping.is_set():
            yield self._of_schedule("schedule", **options)
            if self.dice.random() < 0.2:
                yield self._of_schedule("pause_schedule")
                yield 1.0
            yield self._of_schedule("resume_schedule")
            yield self.dice.uniform(4, 8)
        for _ in range(2):
            if (yield self._of_schedule("unschedule")).outcome == "ok":
                return

    def _of_schedule(self, method: str, **options: Any) -> Step:
        return Step("schedule", TICKS, method, (SCHEDULE,), options, on_client=True)
